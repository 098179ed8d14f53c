"""Scenarios of the controller: three nodes, a clock, and one controller on node a."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from cluster.control.control_state import ControlState, Init
from cluster.control.controller import EPOCH_LEAP_MAX, LEARNER_MS
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    ChangeRequest,
    LinkChanged,
    ProposalEnded,
    RaftLeadership,
    ReplicaReport,
    Reported,
    ReportedRole,
    StateApplied,
    TransferRequest,
)
from cluster.control.membership import LAG_MAX, Change, Refusal
from tests.cluster.controlling import (
    CONFIG,
    FOUNDED,
    LEARNER,
    STEP_MS,
    VOTERS,
    Play,
    follower,
    in_service,
    proposal,
    serving,
    with_learner,
)
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId


def lagging(name: str, lag: int) -> ReplicaReport:
    """Return the report of a node with this number of unapplied entries."""
    return replace(follower(name, epoch=5, index=9_000), applied_index=LogIndex(9_000 - lag))


def test_empty_control_plane_is_founded_then_another_node_appointed() -> None:
    play = Play(state=ControlState(), reports={name: follower(name) for name in VOTERS})
    play.lead()
    play.run(STEP_MS)
    assert play.proposed[0] == Init(cluster_id="test", voters=VOTERS)
    assert play.appointed == [(1, "b")]


def test_first_appointment_waits_for_the_last_node_but_not_for_ever() -> None:
    play = Play(reports={name: follower(name) for name in "ab"})
    play.lead()
    play.run(CONFIG.gather_first_ms - STEP_MS)
    assert play.appointed == []
    play.run(2 * STEP_MS)
    assert play.appointed == [(1, "b")]


def test_healthy_leader_is_left_alone() -> None:
    play = in_service()
    play.run(60_000)
    assert (play.appointed, play.handed_over) == ([], [])


def test_node_that_does_not_lead_raft_decides_nothing() -> None:
    play = in_service()
    play.do(RaftLeadership(leads=False))
    play.lose("b")
    play.run(10_000)
    assert play.proposed == []


def test_dead_leader_is_replaced_by_the_node_that_is_not_the_controller() -> None:
    play = in_service()
    play.lose("b")
    play.run(CONFIG.link_grace_ms - STEP_MS)
    assert play.appointed == []
    play.run(2 * STEP_MS)
    assert play.appointed == [(6, "c")]
    assert "link broke" in play.reason


def test_wait_for_reports_is_said_once() -> None:
    play = in_service()
    del play.reports["c"]  # linked, and silent
    play.run(CONFIG.report_timeout_ms)
    play.lose("b")
    play.run(CONFIG.wait_logged_ms)
    assert play.said == []
    play.run(20_000)
    assert play.said == ["b: its link broke; fewer than a majority report: a; linked: a, c"]
    assert play.appointed == []


def test_link_rebuilt_at_once_is_no_death() -> None:
    play = in_service()
    play.do(LinkChanged("b", up=False))
    play.run(CONFIG.link_grace_ms - STEP_MS)
    play.do(LinkChanged("b", up=True))
    play.run(1_000)
    assert play.appointed == []


def test_leader_that_reports_nothing_is_replaced() -> None:
    play = in_service()
    del play.reports["b"]
    play.run(CONFIG.report_timeout_ms - STEP_MS)
    assert play.appointed == []
    play.run(CONFIG.gather_ms + 2 * STEP_MS)
    assert play.appointed == [(6, "c")]


def test_leader_that_is_silent_for_its_lease_is_left_alone_however_long_that_is() -> None:
    assert ControllerConfig.of_lease(500) == CONFIG
    lease_ms = 3 * CONFIG.report_timeout_ms
    play = in_service(config=ControllerConfig.of_lease(lease_ms))
    report = play.reports.pop("b")
    play.run(lease_ms)
    play.reports["b"] = report
    play.run(1_000)
    assert play.appointed == []


def test_leader_without_a_lease_for_a_second_is_replaced_by_another() -> None:
    play = in_service()
    play.reports["b"] = replace(play.reports["b"], lease_ok=False, last_index=LogIndex(900))
    play.run(CONFIG.lease_grace_ms - STEP_MS)
    play.reports["b"] = serving("b", epoch=5)
    play.run(STEP_MS)
    play.reports["b"] = replace(play.reports["b"], lease_ok=False, last_index=LogIndex(900))
    play.run(CONFIG.lease_grace_ms)
    assert play.appointed == []
    play.run(2 * STEP_MS)
    assert play.appointed == [(6, "c")]


def test_leader_that_restarted_is_replaced_at_once() -> None:
    play = in_service()
    play.reports["b"] = follower("b", epoch=5)
    play.run(STEP_MS)
    assert play.appointed[0][0] == 6


def test_new_controller_replaces_a_leader_that_died_with_the_old_one() -> None:
    play = Play(reports={name: follower(name, epoch=5) for name in "ac"})
    play.state = replace(play.state, epoch=Epoch(5), leader=VOTERS["b"])
    play.now_ms = MonoMs(play.now_ms + 10_000)
    play.lead()
    play.run(CONFIG.gather_ms)
    assert play.appointed == [(6, "c")]


def test_new_controller_gives_the_leader_time_to_report_to_it() -> None:
    play = Play(reports={name: follower(name, epoch=5) for name in VOTERS})
    play.state = replace(play.state, epoch=Epoch(5), leader=VOTERS["b"])
    del play.reports["b"]
    play.lead()
    play.do(LinkChanged("b", up=True))
    play.run(CONFIG.report_timeout_ms - STEP_MS)
    play.reports["b"] = serving("b", epoch=5)
    play.run(5_000)
    assert play.appointed == []


def test_appointee_that_dies_before_serving_is_followed_by_the_next_quickly() -> None:
    play = in_service()
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    assert play.appointed == [(6, "c")]
    play.lose("c")
    play.reports["b"] = follower("b", epoch=5)
    play.do(LinkChanged("b", up=True))
    play.run(CONFIG.link_grace_ms + CONFIG.gather_ms)
    assert play.appointed[1:] == [(7, "b")]


def test_appointee_that_stalls_is_followed_by_another_and_given_longer_each_time() -> None:
    play = in_service()
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    play.reports["c"] = replace(follower("c", epoch=6), role=ReportedRole.PROMOTING)
    play.run(CONFIG.stall_timeout_ms - 2 * STEP_MS)
    assert play.appointed == [(6, "c")]
    play.run(2 * STEP_MS)
    assert play.appointed[1:] == [(7, "a")]
    play.reports["a"] = replace(follower("a", epoch=7), role=ReportedRole.PROMOTING)
    play.run(2 * CONFIG.stall_timeout_ms - 2 * STEP_MS)
    assert len(play.appointed) == 2
    play.run(3 * STEP_MS)
    assert len(play.appointed) == 3


def test_only_sure_replica_that_stalls_is_followed_by_an_unsure_one() -> None:
    # It may lack entries that the others have dropped, which it gets only by following one of them.
    play = in_service()
    play.reports["a"] = replace(play.reports["a"], unsure=True)
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    play.reports["c"] = replace(follower("c", epoch=6), role=ReportedRole.PROMOTING)
    play.run(CONFIG.stall_timeout_ms + STEP_MS)
    assert play.appointed == [(6, "c"), (7, "a")]


def test_appointee_that_never_begins_is_replaced() -> None:
    play = in_service()
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    play.run(CONFIG.idle_grace_ms + STEP_MS)
    assert play.appointed == [(6, "c"), (7, "a")]


def test_appointee_that_waits_for_the_lease_of_the_last_leader_is_given_its_time() -> None:
    play = in_service()
    play.do(TransferRequest(VOTERS["c"]))
    play.reports["c"] = replace(follower("c", epoch=6, promise=5), last_epoch=Epoch(5))
    play.run(CONFIG.stall_timeout_ms - 2 * STEP_MS)
    assert play.appointed == [(6, "c")]


def test_leader_that_promised_its_epoch_in_an_earlier_life_is_replaced_at_once() -> None:
    play = Play(reports={name: follower(name, epoch=5) for name in VOTERS})
    play.state = replace(play.state, epoch=Epoch(5), leader=VOTERS["b"])
    play.lead()
    for name in ("b", "c"):
        play.do(LinkChanged(name, up=True))
    play.run(CONFIG.gather_ms + 2 * STEP_MS)
    assert [epoch for epoch, _ in play.appointed] == [6]


def test_refused_appointee_is_followed_by_an_epoch_above_the_promise_it_met() -> None:
    play = in_service()
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    play.reports["c"] = replace(follower("c", epoch=6, promise=40), role=ReportedRole.PROMOTING)
    play.run(STEP_MS)
    assert [epoch for epoch, _ in play.appointed] == [6, 41]


def test_refusals_in_a_row_are_answered_ever_more_slowly_and_said_twice() -> None:
    play = in_service()
    play.lose("b")
    said: list[str] = []
    made_ms: list[int] = []
    for _ in range(0, 60_000, STEP_MS):
        count = len(play.appointed)
        epoch = play.state.epoch
        for name in "ac":  # each has met a promise above every appointment
            play.reports[name] = replace(
                follower(name, epoch=epoch), highest_promise=Epoch(epoch + 7)
            )
            if VOTERS[name] == play.state.leader:
                play.reports[name] = replace(play.reports[name], role=ReportedRole.PROMOTING)
        play.run(STEP_MS)
        if len(play.appointed) > count:
            made_ms.append(play.now_ms)
            said += [play.reason] if play.reason else []
    waits_ms = [after - before for before, after in itertools.pairwise(made_ms)]
    assert waits_ms[0] <= 2 * STEP_MS  # the first goes above the promise at once
    assert waits_ms[1:6] == [1_000, 2_000, 4_000, 8_000, 16_000]
    assert len(said) == 3
    assert "further refusals are not logged" in said[-1]
    name = next(name for name in "ac" if VOTERS[name] == play.state.leader)
    play.reports[name] = serving(name, epoch=play.state.epoch)
    play.run(STEP_MS)
    play.lose(name)
    play.reports["b"] = follower("b", epoch=play.state.epoch)
    play.do(LinkChanged("b", up=True))
    play.run(CONFIG.link_grace_ms + CONFIG.gather_ms + STEP_MS)
    assert play.appointed[-1][0] > play.state.epoch - 1, "a leader served: nothing waits"
    assert len(play.appointed) == len(made_ms) + 1


def test_proposal_that_raft_refuses_is_not_made_again_at_once() -> None:
    play = in_service()
    play.commits = False
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    assert len(play.proposed) == 1
    for wait_ms in (1_000, 2_000):
        count = len(play.proposed)
        play.do(ProposalEnded(refused=True))
        play.run(wait_ms - STEP_MS)
        assert len(play.proposed) == count
        play.run(2 * STEP_MS)
        assert len(play.proposed) == count + 1


@pytest.mark.parametrize("epoch", [(1 << 63) - 1, EPOCH_LEAP_MAX + 6])
def test_epoch_that_no_controller_can_have_given_is_passed_over(epoch: int) -> None:
    play = in_service()
    play.reports["c"] = replace(follower("c", epoch=5), highest_promise=Epoch(epoch))
    play.run(3 * CONFIG.promise_grace_ms)
    assert play.appointed == []  # whatever it promised, the leader serves
    play.lose("b")
    play.run(CONFIG.link_grace_ms + CONFIG.gather_ms + STEP_MS)
    assert [epoch for epoch, _ in play.appointed] == [6]


def test_voter_that_promised_above_the_leader_gets_an_epoch_above_its_promise() -> None:
    play = in_service()
    play.reports["c"] = replace(follower("c", epoch=5, promise=9))
    play.run(CONFIG.promise_grace_ms)
    assert play.appointed == []
    play.run(2 * STEP_MS)
    assert [epoch for epoch, _ in play.appointed] == [10]


def test_leader_that_a_voter_refuses_in_its_own_epoch_gets_the_next_epoch() -> None:
    play = in_service()
    name, report = next((n, r) for n, r in play.reports.items() if r.role is ReportedRole.LEADER)
    play.reports[name] = replace(report, refused_epoch=report.epoch)
    play.run(CONFIG.promise_grace_ms)
    assert play.appointed == []
    play.run(2 * STEP_MS)
    assert [epoch for epoch, _ in play.appointed] == [report.epoch + 1]


def test_lost_control_plane_starts_above_the_highest_promise_reported() -> None:
    play = Play(state=ControlState())
    play.reports = {
        "a": follower("a", epoch=3),
        "b": follower("b", epoch=4, promise=17),
        "c": follower("c", epoch=5),
    }
    play.lead()
    play.run(STEP_MS)
    assert play.appointed == [(18, "c")]


def test_lost_control_plane_adopts_a_leader_that_serves() -> None:
    play = Play(state=ControlState())
    play.reports = {name: follower(name, epoch=8) for name in VOTERS}
    play.reports["c"] = serving("c", epoch=8)
    play.lead()
    play.run(10_000)
    assert play.appointed == [(8, "c")]


def test_lost_control_plane_adopts_no_leader_without_a_lease() -> None:
    play = Play(state=ControlState())
    play.reports = {name: follower(name, epoch=8) for name in VOTERS}
    play.reports["c"] = replace(serving("c", epoch=8), lease_ok=False)
    play.lead()
    play.run(CONFIG.gather_first_ms)
    assert [epoch for epoch, _ in play.appointed][:1] == [9]


def test_without_a_majority_nobody_is_appointed() -> None:
    play = in_service()
    play.lose("b")
    play.lose("c")
    play.run(10_000)
    assert play.appointed == []
    play.reports["c"] = follower("c", epoch=5)
    play.do(LinkChanged("c", up=True))
    play.run(CONFIG.gather_ms)
    assert play.appointed == [(6, "c")]


@pytest.mark.parametrize(
    ("a", "c", "chosen"),
    [
        (follower("a", epoch=5, index=100), follower("c", epoch=4, index=900), "a"),
        (follower("a", epoch=5, index=100), follower("c", epoch=5, index=90), "c"),
        (
            follower("a", epoch=5, index=100 + CONFIG.close_entries),
            follower("c", epoch=5, index=100),
            "a",
        ),
        (
            follower("a", epoch=5, index=99 + CONFIG.lag_entries),
            follower("c", epoch=5, index=100),
            "c",
        ),
        (follower("a", epoch=5), replace(follower("c", epoch=5), unsure=True), "a"),
        (follower("a", epoch=5, index=9_000), lagging("c", CONFIG.lag_entries), "a"),
        (follower("a", epoch=5, index=9_000), lagging("c", CONFIG.lag_entries - 1), "c"),
        (lagging("a", CONFIG.lag_entries), lagging("c", 2 * CONFIG.lag_entries), "a"),
        (follower("a", epoch=5, index=8_000), lagging("c", 9_000), "c"),
    ],
    ids=[
        "higher last epoch",
        "close",
        "much longer",
        "just close",
        "unsure",
        "still applies",
        "applies what just came",
        "both still apply",
        "still applies, but has the log",
    ],
)
def test_successor_has_the_longest_log_then_applied_it_then_is_not_the_controller(
    a: ReplicaReport, c: ReplicaReport, chosen: str
) -> None:
    play = in_service()
    play.reports |= {"a": a, "c": c}
    play.run(STEP_MS)
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    assert play.appointed == [(6, chosen)]


def test_report_under_a_voters_name_from_another_directory_counts_for_nothing() -> None:
    play = in_service()
    other = replace(play.reports["c"], replica_id=ReplicaId(9), role=ReportedRole.LEARNER)
    play.reports["c"] = other
    play.run(CONFIG.report_timeout_ms)
    play.lose("b")
    play.run(5_000)
    assert play.appointed == []


def test_lost_proposal_is_made_again() -> None:
    play = in_service()
    play.commits = False
    play.lose("b")
    play.run(CONFIG.link_grace_ms + STEP_MS)
    assert len(play.proposed) == 1
    play.run(CONFIG.propose_timeout_ms)
    assert len(play.proposed) == 2
    assert play.proposed[0] == play.proposed[1]
    play.do(ProposalEnded())
    assert len(play.proposed) == 3


def test_transfer_goes_to_the_target_or_to_the_best() -> None:
    play = in_service()
    play.do(TransferRequest(VOTERS["a"]))
    assert play.appointed == [(6, "a")]
    play = in_service()
    play.do(TransferRequest(None))
    assert play.appointed == [(6, "c")]


@pytest.mark.parametrize(
    ("target", "why"),
    [(ReplicaId(99), "no such voter"), (VOTERS["c"], "matched")],
)
def test_transfer_that_makes_no_sense_is_refused(target: ReplicaId, why: str) -> None:
    play = in_service()
    play.reports["c"] = replace(play.reports["c"], unsure=True)
    play.run(STEP_MS)
    play.do(TransferRequest(target))
    assert play.appointed == []
    assert play.refusal is not None
    assert why in play.refusal.why


def test_transfer_from_a_lone_voter_is_refused_for_want_of_another() -> None:
    alone = replace(FOUNDED, voters={"a": VOTERS["a"]}, epoch=Epoch(5), leader=VOTERS["a"])
    play = Play({"a": serving("a", epoch=5)}, alone)
    play.lead()
    play.run(1_000)
    play.do(TransferRequest(None))
    assert play.appointed == []
    assert play.refusal is not None
    assert play.refusal.why == "no other voter could lead"


def test_transfer_waits_until_its_target_has_caught_up_while_the_leader_stays() -> None:
    play = in_service()

    def end(leader: int, target: int, ms: int = STEP_MS) -> None:
        play.reports["b"] = replace(play.reports["b"], last_index=LogIndex(leader))
        play.reports["c"] = replace(follower("c", epoch=5, index=target))
        play.run(ms)
        play.do(TransferRequest(VOTERS["c"]))

    end(90_000, 10_000, ms=1_000)
    for step in range(20):  # it comes nearer, but holds what the leader held long ago
        end(90_000 + 100 * step, 10_000 + 1_000 * step)
        assert play.refusal is not None
        assert play.refusal.soon
        assert f"c is {80_000 - 900 * step} entries behind" in play.refusal.why
    for step in range(10):  # under load its reports are never those of the leader
        end(92_000 + 100 * step, 91_700 + 100 * step)
        if play.appointed:
            break
    assert play.appointed == [(6, "c")]


def test_transfer_to_a_target_that_lags_too_far_is_refused_and_says_by_how_much() -> None:
    play = in_service()
    play.reports["b"] = replace(play.reports["b"], last_index=LogIndex(5_000_000))
    play.run(STEP_MS)
    play.do(TransferRequest(VOTERS["c"]))
    why = f"c is 4999900 entries behind; at most {CONFIG.transfer_entries}"
    assert (play.appointed, play.refusal) == ([], Refusal(why, later=False))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"last_epoch": Epoch(4), "last_index": LogIndex(900)}, "has no entry of epoch 5"),
        ({"last_index": LogIndex(130)}, "has 30 entries to apply"),
    ],
    ids=["log of an earlier epoch", "not applied"],
)
def test_transfer_waits_for_a_target_that_could_not_serve_at_once(
    changes: dict[str, Any], why: str
) -> None:
    play = in_service()
    play.reports["b"] = replace(play.reports["b"], last_index=LogIndex(130))
    play.reports["c"] = replace(play.reports["c"], **changes)
    play.run(1_000)
    play.do(TransferRequest(VOTERS["c"]))
    assert play.appointed == []
    assert play.refusal is not None
    assert (why in play.refusal.why, play.refusal.soon) == (True, True)


def test_transfer_to_who_leads_is_done() -> None:
    # Perhaps by an earlier sending of the same request.
    play = in_service()
    play.do(TransferRequest(VOTERS["b"]))
    assert (play.appointed, play.refusal) == ([], None)


def test_transfer_is_refused_by_a_node_that_is_not_the_controller() -> None:
    play = in_service()
    play.do(RaftLeadership(leads=False))
    play.do(TransferRequest(None))
    assert play.refusal == Refusal("this node is not the controller")


def test_controller_that_leads_the_log_too_hands_over_seldom() -> None:
    play = in_service(leader="a")
    play.run(CONFIG.hand_over_after_ms - 1_000 - STEP_MS)
    assert play.handed_over == []
    play.run(2 * STEP_MS)
    assert play.handed_over == ["b"]
    play.run(CONFIG.hand_over_every_ms - STEP_MS)
    assert play.handed_over == ["b"]
    play.run(2 * STEP_MS)
    assert play.handed_over == ["b", "b"]
    assert play.appointed == []


def test_learner_replaces_the_voter_of_its_name_under_the_same_leader() -> None:
    play = with_learner("c")
    play.do(ChangeRequest(Change.REPLACE, "c"))
    assert play.refusal is None
    assert play.appointed == [(6, "b")]
    assert proposal(play).voters == {"a": VOTERS["a"], "b": VOTERS["b"], "c": LEARNER}


def test_appointee_without_a_vote_by_its_own_log_is_replaced_as_one_that_does_not_begin() -> None:
    play = in_service()
    play.state = replace(play.state, epoch=Epoch(6), leader=VOTERS["c"])
    play.do(StateApplied(play.state))
    play.reports["b"] = follower("b", epoch=5)
    play.reports["c"] = replace(follower("c", epoch=5), role=ReportedRole.LEARNER)
    play.run(CONFIG.idle_grace_ms + 2 * STEP_MS)
    assert play.appointed == [(7, "b")]


def test_other_replica_of_a_name_is_none_as_long_as_the_voter_speaks() -> None:
    play = in_service()
    other = replace(play.reports["c"], replica_id=LEARNER)
    for _ in range(20):
        play.do(Reported(other))
        play.run(STEP_MS)
    assert {node.replica_id for node in play.core._nodes.values()} == {*VOTERS.values()}


def test_learner_is_added_and_reports_as_a_voter_at_once() -> None:
    play = with_learner("d")
    play.do(ChangeRequest(Change.ADD, "d"))
    assert proposal(play).voters == {**VOTERS, "d": LEARNER}
    play.state = replace(play.state, voters={**VOTERS, "d": LEARNER}, proposed=None)
    play.reports["b"] = serving("b", epoch=6)
    play.reports["d"] = replace(play.reports["d"], last_epoch=Epoch(6), role=ReportedRole.FOLLOWER)
    play.do(StateApplied(play.state))
    play.run(1_000)
    assert play.appointed == [(6, "b")]  # nothing is missed of the new one
    play.do(TransferRequest(LEARNER))
    assert play.appointed[1:] == [(7, "d")]


def test_leader_that_is_removed_is_succeeded_by_another() -> None:
    play = in_service()
    play.do(ChangeRequest(Change.REMOVE, "b"))
    assert play.appointed == [(6, "c")]
    assert proposal(play).voters == {"a": VOTERS["a"], "c": VOTERS["c"]}


@pytest.mark.parametrize(
    ("change", "name", "why", "later"),
    [
        (Change.ADD, "c", "is a voter", False),
        (Change.REMOVE, "d", "is no voter", False),
        (Change.REPLACE, "a", "this voter answers, so it needs no replacement", False),
        (Change.ADD, "d", "no learner answers", True),
        (Change.REPLACE, "c", f"the learner is {LAG_MAX + 1} entries behind", True),
        (Change.REMOVE, "a", "no majority: c of the new voters would not answer", True),
    ],
)
def test_change_that_makes_no_sense_now_is_refused(
    change: Change, name: str, why: str, later: bool
) -> None:
    play = with_learner("c", index=100 - LAG_MAX - 1)
    play.do(ChangeRequest(change, name))
    assert play.appointed == []
    assert play.refusal is not None
    assert (why in play.refusal.why, play.refusal.later) == (True, later)


def test_learner_that_fell_silent_or_is_gone_is_waited_for() -> None:
    play = with_learner("c")
    play.lose("c")
    play.run(30_000)
    play.do(ChangeRequest(Change.REPLACE, "c"))
    assert play.refusal is not None
    assert ("last answered 30 s ago" in play.refusal.why, play.refusal.later) == (True, True)
    play.run(LEARNER_MS)
    play.do(ChangeRequest(Change.REPLACE, "c"))
    assert ("no learner answers" in play.refusal.why, play.refusal.later) == (True, True)


def test_one_change_at_a_time() -> None:
    play = in_service()
    play.state = replace(play.state, proposed=VOTERS)
    play.do(StateApplied(play.state))
    play.do(ChangeRequest(Change.REMOVE, "a"))
    assert play.refusal is not None
    assert ("another change" in play.refusal.why, play.refusal.later) == (True, True)
