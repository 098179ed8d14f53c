"""The voters that the controller counts: those of which log, and what follows."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.control.control_state import ControlState
from cluster.control.controller_events import (
    ChangeRequest,
    ControllerTick,
    LinkChanged,
    RaftLeadership,
    ReplicaReport,
    Reported,
    ReportedRole,
    StateApplied,
)
from cluster.control.membership import Change
from cluster.control.newest_log import newest_log, voters_by_name
from replication.core.quorum import Voters
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
    voter_sets,
    with_learner,
)
from timer.model.units import Epoch, ReplicaId

OURS = (1, 2, 3)
STATE = ControlState(cluster_id="test", voters=VOTERS, epoch=Epoch(9), leader=ReplicaId(2))
LOST = ControlState(cluster_id="test", voters=VOTERS)
"""Raft's files were lost: no leader is known, and the voters are the founders."""
LEADS: dict[str, Any] = {"role": ReportedRole.LEADER, "serving": True, "lease_ok": True}
EPOCH_MAX = 1_000


def log(replica: int, epoch: int, *sets: tuple[int, ...], **more: Any) -> ReplicaReport:
    report = follower("a", epoch=epoch)
    told: tuple[Voters, ...] = sum(map(voter_sets, sets), start=())
    return replace(report, replica_id=ReplicaId(replica), sets=told, **more)


@pytest.mark.parametrize(
    ("reports", "state", "newest"),
    [
        pytest.param([log(1, 10, OURS), log(2, 9, OURS, **LEADS)], STATE, 1, id="leader"),
        pytest.param(
            [log(1, 10, OURS), log(2, 9, OURS, **LEADS | {"serving": False})], STATE, 0,
            id="leader that does not serve",
        ),
        pytest.param(
            [log(1, 10, OURS), log(2, 9, OURS, **LEADS | {"lease_ok": False})], STATE, 0,
            id="leader without a lease",
        ),
        pytest.param(
            [log(1, 10, OURS), log(2, 8, OURS, **LEADS)], STATE, 0, id="leader of an earlier epoch"
        ),
        pytest.param(
            [log(1, 10, OURS), log(3, 9, OURS, **LEADS)], STATE, 0, id="leader not appointed"
        ),
        pytest.param(
            [log(2, 9, **LEADS), log(1, 10, OURS)], STATE, 0, id="leader of the release before"
        ),
        pytest.param(
            [log(44, 9, **LEADS), log(1, 9, (1, 2, 44))], replace(STATE, leader=ReplicaId(44)), 1,
            id="leader of the release before that is not published",
        ),
        pytest.param([log(1, 9), log(2, 8, OURS)], STATE, 0, id="newest of the release before"),
        pytest.param([log(1, 9), log(2, 9, OURS)], STATE, 1, id="one of two tells voters"),
        pytest.param([log(77, 10), log(2, 9, OURS)], STATE, 1, id="unknown, tells no voters"),
        pytest.param(
            [log(1, 9, OURS, (1, 2, 44)), log(2, 9, (1, 2, 44))], STATE, 1, id="change committed"
        ),
        pytest.param(
            [log(7, 10, OURS, (1, 2, 44)), log(1, 9, OURS)], STATE, 1,
            id="change that only a learner has",
        ),
        pytest.param(
            [log(44, 10, OURS, (1, 2, 44)), log(1, 9, OURS)], STATE, 0, id="change of a new voter"
        ),
        pytest.param([log(3, 10, (1, 2, 44)), log(1, 9, OURS)], STATE, 0, id="removed voter"),
        pytest.param([log(1, EPOCH_MAX + 1, OURS), log(2, 9, OURS)], STATE, 1, id="incredible"),
        pytest.param([log(77, 30, (77,)), log(1, 9, OURS)], STATE, 1, id="restored elsewhere"),
        pytest.param([log(77, 30, (77,))], STATE, None, id="restored elsewhere alone"),
        pytest.param(
            [log(77, 30, (77,)), log(1, 9, OURS), log(2, 9, OURS)], LOST, 1,
            id="restored elsewhere, Raft lost",
        ),
        pytest.param(
            [log(44, 9, (44, 45, 46)), log(45, 9, (44, 45, 46)), log(1, 4, OURS)], LOST, 0,
            id="all founders replaced, Raft lost",
        ),
        pytest.param(
            [log(45, 9, (44, 45, 46))], replace(STATE, leader=ReplicaId(44)), 0,
            id="of the appointed leader",
        ),
        pytest.param(
            [log(45, 9, (44, 45, 46))], replace(STATE, proposed={"d": ReplicaId(46)}), 0,
            id="of a proposed voter",
        ),
    ],
)  # fmt: skip
def test_voters_of_which_log_count(
    reports: list[ReplicaReport], state: ControlState, newest: int | None
) -> None:
    found = newest_log(reports, state, state.voters, EPOCH_MAX, has_waited=True)
    assert found is (None if newest is None else reports[newest])


def test_restored_data_does_not_win_a_new_control_plane_by_reporting_first() -> None:
    reports = {"a": log(1, 9, OURS), "x": log(77, 30, (77,), name="x"), "b": log(2, 9, OURS)}
    reports = {name: replace(report, name=name) for name, report in reports.items()}
    play = Play({"a": reports["a"], "x": reports["x"]}, state=LOST)
    for name in "bx":
        play.do(LinkChanged(name, up=True))
    play.do(StateApplied(play.state))
    play.do(RaftLeadership(leads=True))
    play.run(CONFIG.gather_first_ms // 2)
    play.reports["b"] = reports["b"]
    play.run(CONFIG.gather_first_ms)
    assert play.appointed[0] == (10, "b")
    assert {name for _, name in play.appointed} == {"b"}


def test_name_of_a_voter_that_is_unknown_is_its_id() -> None:
    voters, reporting = frozenset(map(ReplicaId, (1, 44, 45))), log(44, 9)
    known = {"a": ReplicaId(1), "x": ReplicaId(44)}, {"d": ReplicaId(44)}
    assert voters_by_name(voters, known, []) == {"a": 1, "d": 44, "000000000000002d": 45}
    assert (
        voters_by_name(voters, [{"a": ReplicaId(44)}, {"a": ReplicaId(1)}], [reporting])["a"] == 44
    )


def test_of_two_voters_with_one_name_the_one_that_reports_has_it() -> None:
    voters = frozenset(map(ReplicaId, (44, 45)))
    for first, second in ((44, 45), (45, 44)):
        known = [{"c": ReplicaId(first)}, {"c": ReplicaId(second)}]
        assert voters_by_name(voters, known, [log(44, 9)]) == {"c": 44}


@pytest.mark.parametrize(("epoch", "leader"), [(6, "c"), (5, "a")])
def test_replacement_votes_though_the_leader_died_before_it_could_say_so(
    epoch: int, leader: str
) -> None:
    play = with_learner("c")
    play.do(ChangeRequest(Change.REPLACE, "c"))
    play.reports["b"] = serving("b", epoch=6)
    sets = voter_sets({VOTERS["a"], VOTERS["b"], LEARNER})
    heir = replace(play.reports["c"], role=ReportedRole.FOLLOWER, sets=sets)
    play.reports["c"] = replace(heir, last_epoch=Epoch(epoch))
    if leader == "a":
        play.reports["a"] = replace(play.reports["a"], last_epoch=Epoch(6), sets=sets)
    play.run(STEP_MS)
    play.lose("b")
    play.run(2_000)
    assert play.appointed[1] == (7, leader)


def lost_raft() -> Play:
    """Raft has lost its files. The voters are a, d, and 45, which is down; its name is unknown."""
    sets = voter_sets({VOTERS["a"], LEARNER, ReplicaId(45)})
    newest = replace(follower("b", epoch=9), name="d", replica_id=LEARNER, sets=sets)
    removed = replace(follower("c", epoch=4), sets=voter_sets(VOTERS.values()))
    play = Play({"a": replace(follower("a", epoch=9), sets=sets), "c": removed, "d": newest})
    play.lead()
    play.do(LinkChanged("d", up=True))
    play.run(CONFIG.gather_first_ms + 2 * STEP_MS)
    return play


@pytest.mark.parametrize(
    ("change", "name", "after"),
    [
        (Change.REPLACE, "e", {"a": VOTERS["a"], "d": LEARNER, "e": ReplicaId(46)}),
        (Change.REMOVE, "000000000000002d", {"a": VOTERS["a"], "d": LEARNER}),
    ],
)
def test_voters_of_the_newest_log_count_if_raft_has_lost_its_files(
    change: Change, name: str, after: dict[str, ReplicaId]
) -> None:
    play = lost_raft()
    assert play.appointed == [(10, "d")]
    newest = play.reports["d"]
    leads = replace(newest, role=ReportedRole.LEADER, serving=True, lease_ok=True)
    play.reports["d"] = replace(leads, epoch=Epoch(10), last_epoch=Epoch(10))
    e = replace(newest, name="e", replica_id=ReplicaId(46), role=ReportedRole.LEARNER)
    play.reports["e"] = replace(e, last_epoch=Epoch(10))
    play.run(2 * STEP_MS)
    play.do(ChangeRequest(Change.ADD, "e"))
    assert play.refusal is not None
    assert not play.refusal.later
    assert "voter 000000000000002d is unknown: start it, or replace e" in play.refusal.why
    play.do(ChangeRequest(change, name))
    assert proposal(play).voters == after
    assert proposal(play).planned_from == (VOTERS["a"], LEARNER, 45)

    play.do(Reported(replace(newest, name="f", replica_id=ReplicaId(45))))
    play.run(STEP_MS)
    assert play.core._nodes.keys() == {"a", "d", "f"}


def test_log_counts_though_the_appointed_epoch_never_began() -> None:
    play = lost_raft()
    play.do(RaftLeadership(leads=False))  # d did not begin, and the controller has moved
    play.do(RaftLeadership(leads=True))
    play.run(CONFIG.idle_grace_ms + 3 * STEP_MS)
    assert play.appointed[1:] == [(11, "a")]


def test_serving_leader_whose_name_is_not_known_yet_stays() -> None:
    sets = voter_sets({VOTERS["a"], VOTERS["b"], LEARNER})
    leads = replace(serving("c", epoch=9), replica_id=LEARNER, sets=sets)
    told = {name: replace(follower(name, epoch=9), sets=sets) for name in "ab"}
    state = replace(FOUNDED, epoch=Epoch(9), leader=LEARNER)
    play = Play(told, state=state)
    play.lead()
    play.do(LinkChanged("c", up=True))
    play.run(CONFIG.link_grace_ms + 2 * STEP_MS)
    play.reports["c"] = leads
    play.run(2_000)
    assert play.appointed == []
    play.lose("b")
    play.run(2_000)
    assert play.appointed == []
    play.lose("c")
    play.run(STEP_MS)
    assert play.appointed == []  # no majority reports


def test_appointed_leader_that_is_no_known_voter_has_the_time_to_report() -> None:
    state = ControlState(cluster_id="test", voters={"a": VOTERS["a"]}, epoch=Epoch(9))
    state = replace(state, leader=LEARNER)
    play = Play({"a": follower("a", epoch=9)}, state=state)  # its release tells no voters
    play.lead()
    play.run(CONFIG.report_timeout_ms // 2)
    assert play.appointed == []
    play.run(CONFIG.report_timeout_ms)
    assert play.appointed[0] == (10, "a")
    assert "the appointed leader is no known voter" in play.reason


def test_link_that_comes_up_late_at_a_new_controller_has_not_broken() -> None:
    reports = {name: follower(name, epoch=9) for name in "ab"}
    play = Play(reports, state=replace(FOUNDED, epoch=Epoch(9), leader=VOTERS["c"]))
    play.do(LinkChanged("b", up=True))
    play.do(StateApplied(play.state))
    play.do(RaftLeadership(leads=True))
    play.run(CONFIG.link_grace_ms - STEP_MS)
    assert play.appointed == []
    play.do(LinkChanged("c", up=True))
    play.reports["c"] = serving("c", epoch=9)
    play.run(2_000)
    assert play.appointed == []


def test_link_that_broke_before_the_controller_moved_is_no_reason_to_wait() -> None:
    play = in_service("c", epoch=9)
    play.do(RaftLeadership(leads=False))
    play.lose("c")
    play.run(400)
    play.do(RaftLeadership(leads=True))
    play.do(ControllerTick())
    assert play.appointed == [(10, "b")]


def test_of_two_voters_without_names_one_is_removed_first() -> None:
    play = in_service("a", epoch=9)
    sets = voter_sets({*VOTERS.values(), 44, 45})
    for name, report in play.reports.items():
        play.reports[name] = replace(report, sets=sets)
    learner = replace(follower("b", epoch=9), name="d", replica_id=ReplicaId(46))
    play.reports["d"] = replace(learner, role=ReportedRole.LEARNER)
    play.run(2 * STEP_MS)
    play.do(ChangeRequest(Change.REPLACE, "d"))
    assert play.refusal is not None
    assert "is unknown: start it, or remove 000000000000002" in play.refusal.why
    play.do(ChangeRequest(Change.REMOVE, "000000000000002d"))
    assert proposal(play).voters == {**VOTERS, "000000000000002c": 44}


def test_change_that_only_a_dead_leader_had_does_not_count() -> None:
    play = with_learner("d")
    play.do(ChangeRequest(Change.ADD, "d"))
    of_three = voter_sets(VOTERS.values())
    for name in "ac":
        play.reports[name] = replace(play.reports[name], sets=of_three)
    of_four = (*of_three, *voter_sets({*VOTERS.values(), LEARNER}))
    play.reports["b"] = replace(serving("b", epoch=6), serving=False, sets=of_four)
    play.run(STEP_MS)
    play.lose("d")
    play.lose("b")
    play.run(500)
    assert play.appointed[1:] == [(7, "c")]


def test_learner_by_its_own_log_is_not_appointed_before_a_voter() -> None:
    sets = (*voter_sets(VOTERS.values()), *voter_sets({VOTERS["a"], VOTERS["c"], LEARNER}))
    told = {name: replace(follower(name, epoch=9), sets=sets) for name in VOTERS}
    told["b"] = replace(told["b"], role=ReportedRole.LEARNER)  # it knows that it was replaced
    play = Play(told)
    play.lead()
    play.run(CONFIG.gather_first_ms + 2 * STEP_MS)
    assert play.appointed == [(10, "c")]


def test_each_of_two_sets_needs_a_majority() -> None:
    old, new = {*VOTERS.values(), 4, 5}, {*VOTERS.values(), 4, 6}
    sets = (*voter_sets(old), *voter_sets(new))
    play = Play({name: replace(follower(name, epoch=9), sets=sets) for name in VOTERS})
    play.lead()
    play.run(CONFIG.gather_first_ms + 2 * STEP_MS)
    assert play.appointed == [(10, "b")]  # three of five, twice, though there are six voters
    apart = (*voter_sets(VOTERS.values()), *voter_sets({VOTERS["a"], 4, 5}))
    play = Play({name: replace(follower(name, epoch=9), sets=apart) for name in VOTERS})
    play.lead()
    play.run(5_000)
    assert play.appointed == []


@pytest.mark.parametrize("epoch", [30, 1 << 33])
@pytest.mark.parametrize("ids", [{77, 78, 79}, {77}])
def test_logs_of_restored_data_do_not_count_beside_the_cluster(epoch: int, ids: set[int]) -> None:
    play = in_service(epoch=9)
    for name, report in play.reports.items():
        play.reports[name] = replace(report, sets=voter_sets(VOTERS.values()))
    stray = replace(follower("c", epoch=epoch), name="x", replica_id=ReplicaId(77))
    play.reports["x"] = replace(stray, sets=voter_sets(ids))
    play.do(LinkChanged("x", up=True))
    play.run(2_000)
    assert play.core._nodes.keys() == VOTERS.keys()
    play.lose("b")
    play.run(500)
    assert play.appointed == [(10, "c")]
    play.lose("c")  # no majority is left
    play.run(5_000)
    assert play.appointed == [(10, "c")]


def test_old_log_does_not_count_beside_a_leader_of_the_release_before() -> None:
    old = voter_sets({VOTERS["a"], 8, 9})
    play = in_service(epoch=9)
    play.reports["a"] = replace(follower("a", epoch=4), sets=old)
    play.run(2_000)
    assert play.core._nodes.keys() == VOTERS.keys()
    assert play.appointed == []


def test_epochs_may_be_far_above_those_of_a_new_control_plane() -> None:
    sets = voter_sets({44, 45, 46})
    play = Play({})
    for name, replica in zip("abc", (44, 45, 46), strict=True):
        report = replace(follower(name, epoch=1 << 33), replica_id=ReplicaId(replica), sets=sets)
        play.reports[name] = report
    play.lead()
    for name in "bc":
        play.do(LinkChanged(name, up=True))
    play.run(CONFIG.gather_first_ms + 2 * STEP_MS)
    assert play.appointed[0] == ((1 << 33) + 1, "b")
