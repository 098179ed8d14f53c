"""`timerctl rolling-restart`: all nodes restart under load, only while the cluster is healthy."""

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import pytest

from tests.cluster.load import PAUSE_S_MAX, loaded
from tests.cluster.running import Running, until
from timerclient.cli import cli_rolling, timerctl
from timerclient.cli.cli_args import UsageError
from timerclient.cli.cli_rolling import (
    LAG_MAX,
    RestartError,
    RestartSequence,
    command_of,
    order_of,
    troubles_of,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import AlreadyExists, NotReady


def healthy() -> tuple[pb.GetStatusResponse, pb.ListMembersResponse]:
    names = ("n1", "n2", "n3")
    nodes = [
        pb.NodeStatus(name=name, reachable=True, role="follower", commit_index=9_000, epoch=2)
        for name in names
    ]
    for node in nodes:
        node.applied_index = 9_000
    nodes[1].role, nodes[1].serving = "leader", True
    members = [pb.Member(name=name, voter=True, role="follower") for name in names]
    return (
        pb.GetStatusResponse(leader="n2", epoch=2, nodes=nodes),
        pb.ListMembersResponse(leader="n2", members=members),
    )


def restarted(cluster: Running, name: str) -> None:
    cluster.stop(name)
    cluster.start(name)


class Answers:
    """Stands in for a client."""

    def __init__(self, status: pb.GetStatusResponse, members: pb.ListMembersResponse) -> None:
        self.status, self.members = lambda: status, lambda: members
        self._nodes = status.nodes
        self.drains: list[tuple[str, bool]] = []
        self.holders: dict[str, str] = {}
        self.on_drain: Callable[[str], object] = lambda _: None

    def drain_node(self, name: str, *, undo: bool = False, by: str = "") -> pb.DrainNodeResponse:
        self.drains.append((name, undo))
        if self.holders.setdefault(name, by) != by:
            raise AlreadyExists(f"drain of {name!r} exists already: of another command")
        self._set_drained(name, to=not undo)
        self.on_drain(name)
        return pb.DrainNodeResponse(node=name, drained=not undo)

    def restarted(self, name: str) -> None:
        """Let a node be as after a restart."""
        self._set_drained(name, to=False)

    def _set_drained(self, name: str, *, to: bool) -> None:
        for node in self._nodes:
            if node.name == name:
                node.drained = to


def test_each_trouble_stops_a_restart() -> None:
    status, members = healthy()
    assert [*troubles_of(status, members)] == []
    assert order_of(status) == ["n1", "n3", "n2"]

    def trouble(change: Callable[[pb.GetStatusResponse, pb.ListMembersResponse], object]) -> str:
        status, members = healthy()
        change(status, members)
        return "; ".join(troubles_of(status, members))

    def down(status: pb.GetStatusResponse, _: object) -> None:
        status.nodes[0].reachable, status.nodes[0].error = False, "refused"

    def behind(status: pb.GetStatusResponse, _: object) -> None:
        status.nodes[0].applied_index -= LAG_MAX + 1

    def withholding(status: pb.GetStatusResponse, _: object) -> None:
        status.nodes[2].withholds_votes = True

    def lagging(_: object, members: pb.ListMembersResponse) -> None:
        members.members[0].lag_entries = LAG_MAX + 1

    def leaderless(status: pb.GetStatusResponse, _: object) -> None:
        status.leader = ""

    def few(_: object, members: pb.ListMembersResponse) -> None:
        members.members[2].voter = False

    def silent(_: object, members: pb.ListMembersResponse) -> None:
        members.members[0].role = "unreachable"

    def formatted(status: pb.GetStatusResponse, members: pb.ListMembersResponse) -> None:
        status.nodes[0].role, members.members[0].role = "learner", "unreachable"

    def removed(status: pb.GetStatusResponse, _: object) -> None:
        status.nodes.add(name="n4", error="refused")
        assert order_of(status) == ["n1", "n3", "n2"]

    def added(status: pb.GetStatusResponse, members: pb.ListMembersResponse) -> None:
        new = {"reachable": True, "role": "learner", "unsure": True, "withholds_votes": True}
        status.nodes.add(name="n4", **new)
        members.members.add(name="n4", role="learner", lag_entries=LAG_MAX + 1)

    assert trouble(removed) == trouble(added) == ""
    added(*(grown := healthy()))
    assert order_of(grown[0]) == ["n4", "n1", "n3", "n2"]
    removed(status, members)
    sequence = RestartSequence(cast("Any", Answers(status, members)), print, print, 0.0)
    with pytest.raises(RestartError, match="before the restart of n4: n4 does not answer"):
        sequence.run(["n4"])
    assert trouble(silent) == "n1 does not answer: it did before"
    assert trouble(formatted) == "n1 is a learner now: timerctl members replace n1"
    assert trouble(down) == "n1 does not answer: refused"
    assert trouble(behind) == trouble(lagging) == f"n1 is {LAG_MAX + 1} entries behind; limit: 1000"
    assert trouble(withholding) == "n3 does not vote yet"
    assert trouble(leaderless) == "no node leads"
    assert trouble(few) == "2 voters: with fewer than 3 a restart ends the service"


def test_two_commands_at_the_same_time_restart_no_two_nodes() -> None:
    status, members = healthy()
    client = Answers(status, members)
    restarts: list[str] = []
    sequence = RestartSequence(cast("Any", client), restarts.append, print, 0.0)

    def other_command(_: str) -> None:
        status.nodes[2].drained = True

    client.on_drain = other_command
    with pytest.raises(RestartError, match=r"^n3 is drained, perhaps by another rolling restart"):
        sequence.run(["n1"])
    assert restarts == []
    assert client.drains == [("n1", False), ("n1", True)]
    with pytest.raises(RestartError, match="before the restart of n1: n3 is drained"):
        sequence.run(["n1"])
    assert len(client.drains) == 2


def test_node_that_another_command_restarted_after_its_drain_is_not_restarted_again() -> None:
    client = Answers(*healthy())
    client.on_drain = client.restarted
    restarts: list[str] = []
    sequence = RestartSequence(cast("Any", client), restarts.append, print, 0.0)
    with pytest.raises(RestartError, match=r"^n1 is not drained any more: did another command"):
        sequence.run(["n1"])
    assert restarts == []


def test_node_that_another_command_drained_at_the_same_instant_is_not_restarted() -> None:
    client = Answers(*healthy())
    restarts: list[str] = []
    first, second = (
        RestartSequence(cast("Any", client), restarts.append, print, 0.0) for _ in range(2)
    )
    client.on_drain = lambda _: client.restarted("n1")  # the second one's look came before
    with pytest.raises(RestartError, match="not drained any more"):
        first.run(["n1"])
    with pytest.raises(RestartError, match=r"^drain of 'n1' exists already"):
        second.run(["n1"])
    assert restarts == []


def test_drain_is_repeated_while_the_cluster_elects_a_controller() -> None:
    client = Answers(*healthy())
    refusals = iter([NotReady("no transfer: no controller is known")])

    def electing(_: str) -> None:
        for refusal in refusals:
            raise refusal

    client.on_drain = electing
    sequence = RestartSequence(cast("Any", client), client.restarted, print, 60.0)
    sequence.run(["n1"])
    assert client.drains == [("n1", False), ("n1", False)]


def test_interrupted_command_names_the_node_and_the_time_to_resume_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Client(Answers):
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def interrupted(name: str) -> None:
        assert name == "n1"
        raise KeyboardInterrupt

    client = Client(*healthy())
    monkeypatch.setattr(timerctl, "_client", lambda _: client)
    monkeypatch.setattr(cli_rolling, "command_of", lambda *_: interrupted)
    assert timerctl.main(["rolling-restart", "--yes", "--restart-with", "x {node}"]) == 130
    told = capsys.readouterr().err
    assert "n1 may be down\n" in told
    assert "repeat the command with --since 2" in told
    assert client.drains == [("n1", False), ("n1", True)]


def test_learner_that_was_restarted_is_not_said_to_have_caught_up() -> None:
    status, members = healthy()
    status.nodes.add(name="n4", reachable=True, role="learner")
    members.members.add(name="n4", role="learner", lag_entries=LAG_MAX + 1)
    told: list[str] = []
    client = Answers(status, members)
    RestartSequence(cast("Any", client), client.restarted, told.append, 0.0).run(["n1", "n4"])
    assert [line.rpartition(",")[0] for line in told if "restart" not in line] == [
        "n1: serves and has caught up",
        "n4: runs again, without a vote",
    ]


def test_command_runs_without_a_shell(tmp_path: Path) -> None:
    script = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    out = tmp_path / "out"
    words = [sys.executable, "-c", script, str(out), "<{node}>; echo $HOME"]
    command_of(shlex.join(words), 60)("n1")
    assert out.read_text() == "<n1>; echo $HOME"
    for template, match in (("restart n1", "must contain"), ("restart '{node}", "quotation")):
        with pytest.raises(UsageError, match=match):
            command_of(template, 60)
    with pytest.raises(RestartError, match="exit status 3"):
        command_of(shlex.join([sys.executable, "-c", "exit(3)", "{node}"]), 60)("n1")
    with pytest.raises(RestartError, match="No such file"):
        command_of("/no/such/program {node}", 60)("n1")


@pytest.mark.slow
def test_all_nodes_restart_under_load_and_no_timer_is_lost_or_doubled(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    before = {name: node.pid for name, node in cluster.nodes.items()}
    told: list[str] = []
    with loaded(cluster, topic) as load, cluster.client() as client:
        order = order_of(client.status())
        RestartSequence(client, partial(restarted, cluster), told.append, 120).run(order)
        load.wait_for_acks(100)
    assert all(node.pid != before[name] for name, node in cluster.nodes.items())
    assert [line for line in told if line.endswith(": restart")] == [f"{n}: restart" for n in order]
    assert f"{order[-1]}: leadership transferred" in "\n".join(told)
    gap_s = load.longest_gap_s()
    figures(f"longest pause of schedule calls {gap_s * 1_000:.0f} ms in {told}")
    assert gap_s < PAUSE_S_MAX


@pytest.mark.slow
def test_restart_is_refused_while_a_node_is_down_and_resumed_after(
    cluster: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    script = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    command = shlex.join([sys.executable, "-c", script, str(done), "{node}"])
    words = ["--endpoints", ",".join(cluster.endpoints), "rolling-restart", "--yes"]
    words += ["--restart-with", command]
    follower = cluster.followers()[0]
    cluster.kill(follower)
    assert timerctl.main(words) == 1
    assert f"{follower} does not answer" in capsys.readouterr().err
    cluster.up()
    assert not done.exists()
    with cluster.client() as client:
        until(lambda: not [*troubles_of(client.status(), client.members())])
        order = order_of(client.status())
    assert timerctl.main([*words, "--dry-run"]) == 0
    assert f"restart {', '.join(order)}" in capsys.readouterr().out
    # A command that restarts no node: the wait for a new process ends with an error.
    assert timerctl.main([*words, "--node-timeout", "2s"]) == 4
    said = capsys.readouterr().err
    assert f"{order[0]} has no new process" in said
    since = said.partition("--since ")[2].split()[0]
    assert done.read_text() == order[0]
    restarted(cluster, order[0])
    until(lambda: timerctl.main([*words, "--dry-run", "--since", since]) == 0)
    assert f"restart {', '.join(order[1:])}" in capsys.readouterr().out
