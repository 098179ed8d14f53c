"""`timerctl check`: levels, exit codes and forms of the verdict."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.timerclient.conftest import Answering, Ctl
from timerclient.cli import cli_nodes, timerctl
from timerclient.cli.cli_check import (
    Finding,
    Level,
    _nagios,
    findings_of_nodes,
    findings_of_topic,
    findings_of_votes,
    worst_level,
)
from timerclient.cli.cli_nodes import rejects_new_timers, too_old_notes
from timerclient.proto import timer_pb2 as pb
from timerclient.values import errors

DAY_MS = 86_400_000
Change = Callable[[list[pb.NodeStatus], list[pb.NodeCheckpoint]], Any]


def cluster() -> tuple[list[pb.NodeStatus], list[pb.NodeCheckpoint]]:
    """Three healthy nodes; n1 leads epoch 4."""
    nodes = [
        pb.NodeStatus(
            name=name,
            reachable=True,
            role="leader" if name == "n1" else "follower",
            serving=name == "n1",
            epoch=4,
            disk_free_bytes=10 << 30,
            disk_reserve_bytes=1 << 30,
            replica_id=number,
        )
        for number, name in enumerate(("n1", "n2", "n3"), 1)
    ]
    checkpoints = [
        pb.NodeCheckpoint(
            node=each.name, role=each.role, reachable=True, digest="aa", checkpoint_index=7
        )
        for each in nodes
    ]
    return nodes, checkpoints


def voters(*numbers: int) -> pb.ListMembersResponse:
    """Answer with the voters n1, n2, ... of these replica ids."""
    rows = [pb.Member(name=f"n{number}", replica_id=number, voter=True) for number in numbers]
    return pb.ListMembersResponse(members=rows)


def low(nodes: list[pb.NodeStatus], reserves: float = 0.5) -> int:
    for node in nodes:
        node.disk_low, node.disk_free_bytes = True, int(reserves * (1 << 30))
    return len(nodes)


def no_memory(node: pb.NodeStatus) -> None:
    node.memory_high = True
    node.warnings.append("more memory than limits.memory_bytes_max = 1")


def unlike(nodes: list[pb.NodeStatus]) -> None:
    """Give n2 another lease; n3 has a release that reports no settings."""
    for node, lease in zip(nodes, ("500", "2000"), strict=False):
        node.settings.update({"leadership.lease_ms": lease, "limits.key_bytes_max": "64"})


def full_and_away(full: pb.NodeStatus, away: pb.NodeStatus) -> None:
    low([full])
    away.reachable = False


def judged(change: Change) -> list[Finding]:
    nodes, checkpoints = cluster()
    change(nodes, checkpoints)
    status = pb.GetStatusResponse(
        cluster_id="c", epoch=4, leader="n1", controller="n2", nodes=nodes
    )
    checkpoint = pb.GetCheckpointResponse(nodes=checkpoints)
    return [*findings_of_nodes(status, voters(1, 2, 3), checkpoint, 100)]


def test_a_healthy_cluster_is_ok() -> None:
    findings = judged(lambda *_: None)
    assert worst_level(findings) is Level.OK
    checks = {"leader", "controller", "nodes", "level", "disk", "behind", "state"}
    assert {each.check for each in findings} == checks


@pytest.mark.parametrize(
    ("change", "level", "check", "text"),
    [
        (lambda n, _: setattr(n[0], "serving", False), 2, "leader", "does not serve yet"),
        (
            lambda n, _: setattr(n[2], "reachable", False),
            1,
            "nodes",
            "no answer: n3",
        ),
        (
            lambda n, _: [each.ClearField("reachable") for each in n[1:]],
            2,
            "nodes",
            "1 of 3 answer; no answer: n2, n3",
        ),
        (
            lambda n, _: n[2].CopyFrom(pb.NodeStatus(name="n3", error="refused")),
            1,
            "nodes",
            "no answer: n3 (refused)",
        ),
        (
            lambda n, _: n[2].CopyFrom(
                pb.NodeStatus(name="n3", role="waiting for room", error="7 bytes")
            ),
            1,
            "nodes",
            "no answer: n3 (waiting for room: 7 bytes)",
        ),
        (lambda n, _: n[1].warnings.append("not ready: x"), 1, "node", "not ready: x"),
        (lambda n, _: no_memory(n[1]), 1, "node", "memory_bytes_max"),
        (lambda n, _: no_memory(n[0]), 2, "memory", "memory_bytes_max: new timers are rejected"),
        (lambda n, _: low(n[1:2]), 1, "disk", "reserve 1024 MiB"),
        (lambda n, _: low(n[:1]), 2, "disk", "reserve 1024 MiB"),
        (lambda n, _: low(n[1:]), 2, "disk", "reserve 1024 MiB"),
        (lambda n, _: full_and_away(*n[1:]), 2, "disk", "512 MiB free"),
        (lambda n, _: low(n[1:2], 1), 1, "disk", "low: not yet an eighth above the reserve"),
        (lambda n, _: setattr(n[1], "disk_free_bytes", 2 << 30), 0, "disk", "2048 MiB free"),
        (lambda n, _: setattr(n[1], "disk_free_bytes", (2 << 30) - 1), 1, "disk", "2047 MiB"),
        (lambda n, _: setattr(n[1], "damage", "a.arrow"), 2, "files", "damaged: a.arrow"),
        (
            lambda n, _: setattr(n[1], "tls_not_after_ms", DAY_MS),
            1,
            "certificate",
            "1.0 days until",
        ),
        (lambda n, _: setattr(n[1], "tls_not_after_ms", 14 * DAY_MS), 0, "certificate", "14.0"),
        (lambda n, _: setattr(n[1], "tls_not_after_ms", -1), 2, "certificate", "first at 1969"),
        (
            lambda n, _: n[1].CopyFrom(
                pb.NodeStatus(name="n2", error="its certificate: certificate has expired")
            ),
            2,
            "certificate",
            "has expired",
        ),
        (
            lambda n, _: n[1].CopyFrom(
                pb.NodeStatus(name="n2", error="your certificate expired at 2030 (this node's …)")
            ),
            2,
            "certificate",
            "this node's",
        ),
        (lambda n, _: setattr(n[1], "unsure", True), 1, "files", "does not vote"),
        (lambda n, _: unlike(n), 1, "settings", "lease_ms must be the same on all nodes"),
        (lambda _, c: setattr(c[1], "lag_entries", 101), 1, "behind", "101 entries behind"),
        (lambda _, c: setattr(c[0], "role", "follower"), 0, "behind", "unknown: no leader answers"),
        (lambda _, c: setattr(c[1], "epoch", 5), 0, "behind", "unknown: no leader answers"),
        (lambda _, c: setattr(c[1], "digest", "bb"), 2, "state", "at the checkpoint 7"),
        (lambda _, c: [each.ClearField("digest") for each in c[1:]], 0, "state", "not compared"),
    ],
)
def test_each_trouble_has_its_level(change: Change, level: int, check: str, text: str) -> None:
    findings = judged(change)
    assert any(each.check == check and text in each.text for each in findings), findings
    assert worst_level(findings) == level


def test_a_cluster_without_a_controller_is_critical_after_an_election(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, checkpoints = cluster()
    without = pb.GetStatusResponse(cluster_id="c", epoch=4, leader="n1", nodes=nodes)
    elected = pb.GetStatusResponse(controller="n2")
    elected.MergeFrom(without)
    heard = pb.GetStatusResponse(epoch=4, leader="n1", controller="n2", hears_leader=True)
    heard.nodes.add(name="n1")
    checkpoint = pb.GetCheckpointResponse(nodes=checkpoints)
    client = Answering(members=voters(1, 2, 3), checkpoint=checkpoint)
    monkeypatch.setattr(timerctl, "_client", lambda _: client)
    clock = count()  # seconds
    monkeypatch.setattr(
        cli_nodes, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda _: None)
    )
    for answers, level, text in (
        ([without, elected], 0, "n2 appoints leaders"),
        ([heard, elected], 0, "n1 leads epoch 4"),
        ([without] * 5, 2, "none; no new leader can be appointed"),
    ):
        monkeypatch.setattr(client, "status", partial(answers.pop, 0), raising=False)
        code, out, _ = ctl("check")
        assert (code, answers, text in out) == (level, [], True), out


def test_status_waits_until_the_cluster_serves(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[pb.GetStatusResponse | None] = []

    def status() -> pb.GetStatusResponse:
        if (answer := answers.pop(0)) is None:
            raise errors.Unreachable("no node answers")
        return answer

    client = Answering()
    monkeypatch.setattr(client, "status", status)
    monkeypatch.setattr(timerctl, "_client", lambda _: client)
    monkeypatch.setattr(cli_nodes, "CHECK_INTERVAL_S", 0)
    leads = pb.NodeStatus(name="n1", reachable=True, role="leader", serving=True, epoch=1)
    serves = pb.GetStatusResponse(cluster_id="c", epoch=1, leader="n1", nodes=[leads])
    answers[:] = [None, pb.GetStatusResponse(), serves]
    assert ctl("status", "--wait", "1h")[0] == 0
    assert not answers
    for answer in (None, pb.GetStatusResponse()):
        answers[:] = [answer]
        assert ctl("status")[0] == 3
        answers[:] = [answer] * 3
        clock = count(0, 0.5)  # seconds, at the start and after each answer
        with monkeypatch.context() as patch:
            patch.setattr(cli_nodes, "time", SimpleNamespace(monotonic=clock.__next__, sleep=id))
            assert ctl("status", "--wait", "1s")[0] == 3
        assert len(answers) == 1, "there is no further request"
    heard = pb.GetStatusResponse(epoch=1, leader="n1", nodes=[pb.NodeStatus(name="n1")])
    heard.hears_leader = True
    answers[:] = [heard, serves]  # the leader answers the asked node a moment later
    assert ctl("status")[0] == 0
    answers[:] = [serves, pb.GetStatusResponse()]
    with pytest.raises(IndexError):  # there is no answer for a third frame
        ctl("status", "--wait", "1h", "--watch", "0.1")
    assert "the cluster does not serve" in capsys.readouterr().out


def test_lag_is_unknown_without_a_leader_or_an_answer(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, Any] = {"status": pb.GetStatusResponse(), "members": voters(1)}
    monkeypatch.setattr(timerctl, "_client", lambda _: Answering(**answers))
    rows = [
        pb.NodeCheckpoint(node=f"n{n}", role=role, reachable=bool(role))
        for n, role in enumerate(("leader", "follower", ""), 1)
    ]
    answers["checkpoint"] = pb.GetCheckpointResponse(nodes=rows)
    shown, caught_up = [], []
    for leader in ("n1", ""):
        answers["members"].leader = leader
        caught_up.append(cli_nodes._has_caught_up(answers["members"], "n1"))
        row = ctl("members")[1].splitlines()[-1].split()
        [member] = json.loads(ctl("members", "-o", "json")[1])["members"]
        shown.append((row[-3], member["lag_entries"]))
    assert shown == [("0", 0), ("-", None)]
    assert caught_up == [True, False]
    nodes = json.loads(ctl("checkpoint", "-o", "json")[1])["nodes"]
    assert [node["lag_entries"] for node in nodes] == [0, 0, None]


def test_status_says_that_new_timers_are_rejected(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, _ = cluster()
    answer = pb.GetStatusResponse(cluster_id="c", epoch=4, leader="n1", nodes=nodes)
    answers = {"status": answer, "members": voters(1, 2, 3)}
    monkeypatch.setattr(timerctl, "_client", lambda _: Answering(**answers))
    assert "rejected" not in ctl("status")[1]
    low(nodes[:1], 1)
    answer.nodes[0].CopyFrom(nodes[0])
    code, out, _ = ctl("status")
    assert (code, "new timers are rejected" in out) == (0, True)
    assert "disk low: not yet an eighth above the reserve of 1024 MiB" in out
    assert json.loads(ctl("status", "-o", "json")[1])["rejects_new_timers"]


def test_nodes_without_votes_do_not_let_new_timers_be_rejected() -> None:
    nodes, _ = cluster()
    low(nodes[1:2])
    nodes += [pb.NodeStatus(name=name) for name in ("n4", "n5")]
    status = pb.GetStatusResponse(leader="n1", nodes=nodes)
    assert not rejects_new_timers(status, voters(1, 2, 3))
    assert rejects_new_timers(status, voters(1, 2, 3, 4, 5))


def test_a_silent_node_in_peers_without_a_vote_is_named() -> None:
    nodes, _ = cluster()
    nodes.append(pb.NodeStatus(name="n4", error="refused"))
    status = pb.GetStatusResponse(nodes=nodes)
    [found] = findings_of_votes(status, voters(1, 2, 3))
    assert (found.check, found.of, found.level) == ("votes", "n4", Level.CRITICAL)
    status.nodes.add(name="n5", reachable=True, replica_id=5)
    [found] = findings_of_votes(status, voters(1, 2, 3, 5))
    assert (found.of, found.level) == ("n4", Level.WARNING)
    status.nodes[4].withholds_votes = True  # so three of five can elect a controller
    assert [each.level for each in findings_of_votes(status, voters(1, 2, 3, 5))] == [
        Level.CRITICAL
    ]
    assert not [*findings_of_votes(status, voters(1, 2, 3, 4, 5))]


def test_a_node_without_a_vote_is_a_warning() -> None:
    nodes = [pb.NodeStatus(name=f"n{i}", replica_id=i, reachable=True) for i in (1, 2, 3)]
    other = [pb.Member(name="n3", replica_id=9, voter=True), pb.Member(name="n3", replica_id=3)]
    members = pb.ListMembersResponse(members=[*voters(1, 2).members, *other])
    [found] = findings_of_votes(pb.GetStatusResponse(nodes=nodes), members)
    assert (found.check, found.of, found.level) == ("votes", "n3", Level.WARNING)
    nodes[2].reachable = False
    assert not [*findings_of_votes(pb.GetStatusResponse(nodes=nodes), members)]


def test_a_node_too_old_for_the_feature_level_is_named_and_gets_no_vote(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, checkpoints = cluster()
    for number, node in enumerate(nodes, 1):
        node.replica_id, node.feature_level_max, node.version = number, 2, "0.2.0"
    status = pb.GetStatusResponse(cluster_id="c", epoch=4, leader="n1", nodes=nodes)
    members = [pb.Member(name=n.name, replica_id=n.replica_id, voter=True) for n in nodes[:2]]
    members.append(pb.Member(name="n3", replica_id=3, role="learner", unsure=True))
    answers = {
        "status": status,
        "members": pb.ListMembersResponse(members=members),
        "checkpoint": pb.GetCheckpointResponse(nodes=checkpoints),
    }
    monkeypatch.setattr(timerctl, "_client", lambda _: Answering(**answers))
    old = status.nodes[2]  # 0.1 reports no level
    old.version, old.feature_level_max = "0.1.0", 0
    for level, is_named in ((0, False), (1, False), (2, True)):
        status.feature_level = level
        note = f"version 0.1.0 of n3 does not support feature level {level}"
        lines = [line for line in ctl("check")[1].splitlines() if line.split()[1] == "level"]
        assert [(line.split()[0], note in line) for line in lines] == [
            ("WARNING" if is_named else "OK", is_named)
        ]
        out = ctl("members")[1]
        assert (note in out, "to give it a vote" in out) == (is_named, not is_named)
    old.reachable = False  # so its level is not known
    assert not too_old_notes(status)


def test_a_removed_node_is_shown_as_the_learner_that_it_becomes(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(role: str) -> pb.ListMembersResponse:
        return pb.ListMembersResponse(members=[pb.Member(name="n3", replica_id=3, role=role)])

    class Client(Answering):
        def change_members(self, change: str, name: str) -> pb.ListMembersResponse:
            assert (change, name) == ("remove", "n3")
            return removed("follower")  # before it has applied its removal

    answers = {"members": removed("learner"), "status": pb.GetStatusResponse()}
    monkeypatch.setattr(timerctl, "_client", lambda _: Client(**answers))
    monkeypatch.setattr(cli_nodes, "CHECK_INTERVAL_S", 0)
    code, out, err = ctl("members", "remove", "n3", "--yes")
    assert (code, err, "members add n3" in out) == (0, "", True)


def test_nodes_at_different_checkpoints_are_not_compared() -> None:
    def behind(_: list[pb.NodeStatus], checkpoints: list[pb.NodeCheckpoint]) -> None:
        checkpoints[1].digest, checkpoints[1].checkpoint_index = "bb", 6

    assert worst_level(judged(behind)) is Level.OK


def test_lag_of_a_topic_and_of_its_groups() -> None:
    group = pb.GroupStatus(name="g", unacked_lag_ms=10_000)
    topic = pb.TopicStatus(name="t", lag_ms=60_000, groups=[group])
    limits = timedelta(seconds=10), timedelta(minutes=1)
    overdue, unacked = findings_of_topic(topic, *limits)
    assert (overdue.level, overdue.value) == (Level.CRITICAL, 60.0)
    assert (unacked.level, unacked.of) == (Level.WARNING, "t/g")
    [swapped, _] = findings_of_topic(topic, timedelta(minutes=2), timedelta(minutes=1))
    assert swapped.level is Level.CRITICAL, "whatever the other limit is"
    topic.paused, topic.groups[0].unacked_lag_ms = True, 0
    assert [each.level for each in findings_of_topic(topic, *limits)] == [
        Level.OK,
        Level.OK,
    ]
    topic.held = 3
    [paused, _] = findings_of_topic(topic, *limits)
    assert (paused.level, paused.text) == (Level.WARNING, "paused: 3 overdue timers wait")


def test_an_unknown_outweighs_a_warning_and_not_an_outage() -> None:
    def at(*levels: Level) -> Level:
        return worst_level(Finding("c", "", level, "") for level in levels)

    assert at(Level.WARNING, Level.UNKNOWN) is Level.UNKNOWN
    assert at(Level.CRITICAL, Level.UNKNOWN) is Level.CRITICAL
    assert at() is Level.UNKNOWN


def test_figures_for_nagios_have_units_and_no_exponents() -> None:
    free = Finding("disk", "n1", Level.OK, "", 72_763_300_000)
    late = Finding("overdue", "orders", Level.OK, "", 0.25)
    line = _nagios([free, late, Finding("behind", "n1", Level.OK, "", 0)])
    assert (
        line == "TIMER OK: 3 checks | 'disk n1'=72763300000B 'overdue orders'=0.25s 'behind n1'=0"
    )


def test_forms_of_a_verdict(ctl: Ctl) -> None:
    ctl("schedule", "orders", "x", "--delay", "1h")
    code, out, err = ctl("check", "--topic", "orders", "--topic", "absent", "--format", "nagios")
    assert (code, err) == (3, "")
    assert out.startswith("TIMER UNKNOWN: overdue absent: there is no such topic | ")
    assert out.count("\n") == 1
    code, out, _ = ctl("check", "--topic", "orders", "--format", "prometheus")
    assert code == 0
    assert 'timer_check_level{check="leader",of=""} 0\n' in out
    assert 'timer_check_value{check="overdue",of="orders"} 0\n' in out
    for form in ("-o", "json"), ("--format", "json"):
        assert json.loads(ctl("check", *form)[1])["level"] == "OK"
    assert ctl("check", "--behind", "-1")[0] == 2
    assert ctl("check")[1].splitlines()[0].split() == ["LEVEL", "CHECK", "OF", "RESULT"]


def test_a_cluster_without_an_answer_is_critical(ctl: Ctl) -> None:
    code, out, _ = ctl("check", "--endpoints", "127.0.0.1:1", "--timeout", "200ms")
    assert code == 2
    assert "CRITICAL" in out


def test_check_asks_for_the_members_and_warns_of_a_node_without_a_vote(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    node: dict[str, Any] = {"name": "n1", "reachable": True, "role": "leader", "serving": True}
    nodes = [pb.NodeStatus(**(node | {"epoch": 1, "replica_id": 7}))]
    status = pb.GetStatusResponse(cluster_id="c", epoch=1, leader="n1", nodes=nodes)
    none = Answering(
        status=status, checkpoint=pb.GetCheckpointResponse(), members=pb.ListMembersResponse()
    )
    monkeypatch.setattr(timerctl, "_client", lambda _: none)
    assert "a leader without a vote" in ctl("check")[1]
