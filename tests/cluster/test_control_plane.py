"""Real control planes, three in one process, over loopback."""

import asyncio
import gc
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import grpc
import pytest

from cluster.control import control_plane, raft, raft_journal
from cluster.control.control_plane import (
    HURRY_S,
    TICK_S,
    CommandAnswer,
    CommandOutcome,
    ControlPlane,
)
from cluster.control.control_state import ControlState, SharedCheckpoint
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    ChangeRequest,
    ControllerTick,
    LinkChanged,
    ReplicaReport,
    ReportedRole,
)
from cluster.control.membership import Change
from cluster.control.raft_link import CHANNEL_OPTIONS
from cluster.observe.leader_history import LeaderHistory
from cluster.settings.exit_codes import ExitCode
from deploy.local import free_ports
from replication.shell.tcp_stream import TcpEnds
from tests.waiting import until
from timer.model.units import Epoch, LogIndex, MonoMs, QueueOffset, ReplicaId, UnixMs

DEADLINE_S = 120.0
VOTERS = {"a": ReplicaId(1), "b": ReplicaId(2), "c": ReplicaId(3)}


def clock() -> MonoMs:
    return MonoMs(time.monotonic_ns() // 1_000_000)


class Node:
    """A control plane, its server, and a replica that carries out each order at once."""

    def __init__(self, cluster: "Cluster", name: str, *, raft_lost: bool) -> None:
        self.failures: list[tuple[ExitCode, str]] = []
        self.name = name
        self.history = LeaderHistory()
        self.led: list[Epoch] = []
        """Epochs that it was appointed for."""
        self.report = ReplicaReport(
            replica_id=VOTERS[name],
            name=name,
            role=ReportedRole.FOLLOWER,
            epoch=Epoch(0),
            serving=False,
            lease_ok=False,
            last_epoch=Epoch(0),
            last_index=cluster.log_ends.get(name, LogIndex(0)),
            applied_index=LogIndex(0),
            highest_promise=cluster.promises.get(name, Epoch(0)),
            unsure=False,
            sets=(frozenset(VOTERS.values()),),
        )
        self.plane = ControlPlane(
            name=name,
            replica_id=VOTERS[name],
            peers=cluster.addresses.keys() - {name},
            directory=cluster.directory / name,
            founding=True,
            cluster_id="test",
            voters=cluster.founders,
            channel_for=cluster.channel_for,
            clock=clock,
            report=lambda: self.report,
            on_state=self.follow,
            raft_lost=raft_lost,
            config=cluster.config,
            tcp=TcpEnds(None, AsyncMock()),
            fail=self.fail,
        )
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.server.add_generic_rpc_handlers(self.plane.handlers())
        self.address = cluster.addresses.get(name, "127.0.0.1:0")

    def fail(self, code: ExitCode, why: str) -> NoReturn:
        self.failures.append((code, why))
        raise SystemExit(code)

    def follow(self, state: ControlState) -> None:
        """Lead when appointed, unless a higher epoch was promised."""
        self.history.note(state, UnixMs(1), earlier=not self.plane.is_current)
        if state.epoch <= self.report.highest_promise:
            return
        leads, end = state.leader == VOTERS[self.name], LogIndex(self.report.last_index + 1)
        if leads:
            self.led.append(state.epoch)
        self.report = replace(
            self.report,
            role=ReportedRole.LEADER if leads else ReportedRole.FOLLOWER,
            epoch=state.epoch,
            serving=leads,
            lease_ok=leads,
            highest_promise=state.epoch,
            last_epoch=state.epoch,
            last_index=end,
            applied_index=end,
        )
        self.plane.report_now()

    async def stop(self) -> None:
        await self.server.stop(None)
        await self.plane.stop()


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.addresses: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}
        self.promises: dict[str, Epoch] = {}
        self.log_ends: dict[str, LogIndex] = {}
        self.founders: Mapping[str, ReplicaId] = VOTERS
        self.config = ControllerConfig.of_lease(3_000)  # no hiccup of the machine moves a leader

    def channel_for(self, name: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.addresses[name], options=CHANNEL_OPTIONS)

    def reserve(self) -> None:
        """Choose free ports, all at once so that they differ."""
        for name, port in zip(VOTERS, free_ports(len(VOTERS)), strict=True):
            self.addresses[name] = f"127.0.0.1:{port}"

    async def start(self, *names: str, raft_lost: bool = False) -> None:
        for name in names:
            node = Node(self, name, raft_lost=raft_lost)
            (self.directory / name).mkdir(exist_ok=True)
            await node.plane.start()
            node.server.add_insecure_port(node.address)
            await node.server.start()
            self.nodes[name] = node

    async def stop(self, *names: str) -> None:
        for name in names or tuple(self.nodes):
            await self.nodes.pop(name).stop()

    @property
    def controllers(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.plane.is_controller]

    async def controller(self) -> str:
        """Wait for one; Raft may hold an election at any time."""
        await until(lambda: len(self.controllers) == 1, "a controller")
        return self.controllers[0]

    def serves(self, *, above: int = 0) -> bool:
        """All nodes know one leader, of an epoch above `above`, and it serves in it."""
        states = [node.plane.state for node in self.nodes.values()]
        first = states[0]
        return (
            all((s.epoch, s.leader) == (first.epoch, first.leader) for s in states)
            and first.epoch > above
            and any(
                node.report.serving
                and node.report.epoch == first.epoch
                and VOTERS[node.name] == first.leader
                for node in self.nodes.values()
            )
        )

    @property
    def epoch(self) -> Epoch:
        return max(node.plane.state.epoch for node in self.nodes.values())

    @property
    def leader(self) -> str:
        state = next(iter(self.nodes.values())).plane.state
        name = state.name_of(state.leader)
        assert name is not None
        return name


async def comes(ask: Callable[[], Awaitable[CommandOutcome]], wanted: CommandOutcome) -> None:
    """Repeat a request until it has this outcome; without a controller it has any except OK."""
    deadline = time.monotonic() + DEADLINE_S
    while (got := await ask()) is not wanted:
        assert got is not CommandOutcome.OK
        assert time.monotonic() < deadline, got
        await asyncio.sleep(0.05)


async def outcome_of(asking: Awaitable[CommandAnswer]) -> CommandOutcome:
    return (await asking).outcome


async def answered(
    ask: Callable[[], Awaitable[CommandAnswer]], wanted: CommandOutcome
) -> CommandAnswer:
    """Repeat a request while no controller is known, which may change at any time."""
    answer: CommandAnswer

    async def outcome() -> CommandOutcome:
        nonlocal answer
        answer = await ask()
        return answer.outcome

    await comes(outcome, wanted)
    return answer


async def publish(
    cluster: "Cluster", node: Node, index: int, **offsets: int
) -> SharedCheckpoint:  # fmt: skip
    """Publish a value; a repeated request without an answer may have taken effect already.

    Each request has the epoch of its time: a machine that stops for longer than the lease may move
    the leader at any time.
    """
    published: SharedCheckpoint

    async def ask() -> CommandOutcome:
        nonlocal published
        published = checkpoint(cluster.epoch, index, **offsets)
        return await node.plane.publish_checkpoint(published)

    await comes(ask, CommandOutcome.OK)
    return published


@asynccontextmanager
async def running(
    directory: Path, *, log_ends: Mapping[str, LogIndex] | None = None
) -> AsyncIterator[Cluster]:
    cluster = Cluster(directory)
    cluster.log_ends = dict(log_ends or {})
    cluster.reserve()
    await cluster.start(*VOTERS)
    try:
        await until(cluster.serves, "first leader")
        yield cluster
        assert [node.failures for node in cluster.nodes.values()] == [[]] * len(cluster.nodes)
    finally:
        await cluster.stop()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(tmp_path) as cluster:
        yield cluster


def checkpoint(epoch: Epoch, index: int, **offsets: int) -> SharedCheckpoint:
    return SharedCheckpoint(
        epoch=epoch,
        index=LogIndex(index),
        last_read_time_ms=UnixMs(1),
        queue_offsets={topic: QueueOffset(offset) for topic, offset in offsets.items()},
        digest="00",
        published_at_ms=UnixMs(2),
    )


async def test_founders_elect_a_controller_that_appoints_another_node(cluster: Cluster) -> None:
    def another_controls() -> bool:
        return len(cluster.controllers) == 1 and cluster.controllers != [cluster.leader]

    await until(another_controls, "another node as controller")  # it hands over, if it must
    assert cluster.nodes["a"].plane.state.voters == VOTERS
    state = cluster.nodes[cluster.controllers[0]].plane.state
    assert state.leader == VOTERS[cluster.leader]


async def test_checkpoint_is_published_from_any_node_to_all(cluster: Cluster) -> None:
    wide = {f"topic-{n:04}": n for n in range(600)}  # several pages
    *others, last = cluster.nodes.values()
    for index, node in enumerate(others, start=1):
        published = await publish(cluster, node, index, **wide, own=index)
        assert node.plane.state.checkpoint == published
    published = await publish(cluster, last, len(VOTERS), **wide, own=len(VOTERS))
    await until(
        lambda: all(n.plane.state.checkpoint == published for n in cluster.nodes.values()),
        "all",
    )
    stale = checkpoint(cluster.epoch, 1, own=9)
    await comes(lambda: cluster.nodes["a"].plane.publish_checkpoint(stale), CommandOutcome.FAILED)
    assert all(n.plane.state.checkpoint == published for n in cluster.nodes.values())


async def move(cluster: Cluster) -> None:
    epoch, plane = cluster.epoch, cluster.nodes[cluster.leader].plane
    await comes(lambda: outcome_of(plane.request_transfer(None)), CommandOutcome.OK)
    await until(lambda: cluster.serves(above=epoch), "transferred")


async def apart(cluster: Cluster) -> str:
    """Let another node lead than the controller, which is returned: Raft may elect the leader."""
    while (controller := await cluster.controller()) == cluster.leader:
        await move(cluster)
    return controller


@pytest.mark.parametrize("role", ["leader", "controller"])
async def test_cluster_survives_loss_of(role: str, cluster: Cluster) -> None:
    controller = await apart(cluster)
    epoch, leader = cluster.epoch, cluster.leader
    lost = leader if role == "leader" else controller
    await cluster.stop(lost)
    await cluster.controller()
    if role == "leader":
        await until(lambda: cluster.serves(above=epoch), "a leader")
        assert cluster.leader != lost
    else:
        await publish(cluster, cluster.nodes[cluster.leader], 1)
        assert cluster.epoch == epoch, "the leader lived, and must not be replaced"
    await cluster.start(lost)
    await until(lambda: cluster.serves(above=epoch - 1), "rejoined")


async def test_transfer_asked_of_a_node_that_is_not_the_controller(cluster: Cluster) -> None:
    epoch, leader = cluster.epoch, cluster.leader
    plane = cluster.nodes[leader].plane

    async def asked(target: ReplicaId | None) -> CommandOutcome:
        return (await plane.request_transfer(target)).outcome

    await comes(lambda: asked(None), CommandOutcome.OK)
    await until(lambda: cluster.serves(above=epoch), "transferred")
    # A machine that stops for longer than the lease may have moved the leader back since.
    others = [each.led for name, each in cluster.nodes.items() if name != leader]
    assert any(led and led[-1] > epoch for led in others)
    await comes(lambda: asked(ReplicaId(99)), CommandOutcome.NOT_NOW)


async def test_transfer_asked_while_there_is_no_controller_waits_for_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "ELECTION_DEADLINE_S", DEADLINE_S)
    lost = await apart(cluster)
    others = [name for name in cluster.nodes if name != cluster.leader]
    plane = cluster.nodes[cluster.leader].plane
    await cluster.stop(*others)
    await until(lambda: not plane._link.is_up(lost), "link down")
    asking = asyncio.ensure_future(plane.request_transfer(None))
    await cluster.start(*others)
    assert (await asking).why != "no controller is known"


async def test_transfer_to_a_node_that_lags_times_out_then_works_when_it_has_caught_up(
    tmp_path: Path,
) -> None:
    # It lags from the start: a controller that was elected meanwhile has no other report of it.
    beyond_close = ControllerConfig().close_entries + 1
    ends = dict.fromkeys(("a", "b"), LogIndex(beyond_close))
    async with running(tmp_path, log_ends=ends) as cluster:
        epoch, leader = cluster.epoch, cluster.nodes[cluster.leader]
        await until(lambda: leader.plane.controller_name not in (None, leader.name), "another")
        lagging = cluster.nodes["c"]
        assert leader is not lagging

        def controller_knows() -> bool:
            controller = cluster.nodes[leader.plane.controller_name or leader.name].plane
            known = controller._controller._nodes.values()
            ends = {each.name: each.report.last_index for each in known if each.report}
            return ends == {name: node.report.last_index for name, node in cluster.nodes.items()}

        await until(controller_knows, "reported")

        async def asked() -> CommandAnswer:
            return await leader.plane.request_transfer(VOTERS[lagging.name])

        answer = await answered(asked, CommandOutcome.REFUSED)
        assert f"{lagging.name} is {beyond_close} entries behind" in answer.why
        assert "the leader stays" in answer.why
        assert cluster.serves(above=epoch - 1)
        assert (cluster.epoch, cluster.leader) == (epoch, leader.name)
        end = leader.report.last_index
        lagging.report = replace(lagging.report, last_index=end, applied_index=end)
        await comes(lambda: outcome_of(asked()), CommandOutcome.OK)
        assert lagging.report.serving
        answer = await answered(asked, CommandOutcome.OK)
        while answer.changed:  # another controller had not heard yet that it serves
            answer = await answered(asked, CommandOutcome.OK)
        assert f"{lagging.name} leads already" in answer.why


@pytest.mark.parametrize(
    ("names_target", "is_drained", "wanted"),
    [
        (True, False, CommandOutcome.NOT_NOW),
        (False, False, CommandOutcome.NOT_NOW),
        (False, True, CommandOutcome.OK),  # another node leads: that is what was requested
    ],
)
async def test_transfer_whose_appointee_ends_before_it_serves_is_not_told_as_done(
    names_target: bool,
    is_drained: bool,
    wanted: CommandOutcome,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_plane, "SERVE_DEADLINE_S", DEADLINE_S)
    controller, leader = await apart(cluster), cluster.leader
    [other] = VOTERS.keys() - {controller, leader}
    plane = cluster.nodes[controller].plane
    old, appointee = cluster.nodes[leader], cluster.nodes[other]
    old.report = replace(old.report, accepts=not is_drained)
    old.plane.report_now()
    known = plane._controller._nodes
    await until(
        lambda: all(known[each.name].report == each.report for each in (old, appointee)),
        "known",
    )
    ending: list[asyncio.Task[None]] = []

    def end_if_appointed(state: ControlState) -> None:
        if state.leader == VOTERS[other] and not ending:
            ending.append(asyncio.create_task(cluster.stop(other)))

    monkeypatch.setattr(appointee.plane, "_on_state", end_if_appointed)
    answer = await plane.request_transfer(VOTERS[other] if names_target else None)
    assert answer.outcome is wanted
    assert ending
    now = plane.state.name_of(plane.state.leader)
    assert now == (controller if is_drained else leader)
    if wanted is CommandOutcome.OK:
        assert cluster.nodes[controller].report.serving
    else:
        assert answer.why == f"{leader} was appointed instead ({other}: its link broke)"
    await ending[0]


async def test_asking_a_controller_that_ends_says_so_when_its_link_breaks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = cluster.nodes[cluster.leader].plane
    await until(lambda: plane.controller_name not in (None, cluster.leader), "a controller")
    controller = plane.controller_name
    assert controller is not None
    monkeypatch.setattr(control_plane, "COMMAND_DEADLINE_S", 600)  # only the link can tell
    silent = cluster.nodes[controller].plane
    monkeypatch.setattr(silent, "_answer", AsyncMock())
    asked = asyncio.ensure_future(plane.request_transfer(None))
    await asyncio.sleep(0)
    assert not asked.done()
    await cluster.stop(controller)
    answer = await asyncio.wait_for(asked, 60)
    assert answer.outcome is CommandOutcome.UNKNOWN
    assert f"the connection to {controller} was lost" in answer.why


async def test_change_says_whether_it_was_refused_is_not_possible_now_or_failed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = cluster.nodes[cluster.leader].plane  # it asks the controller, another node
    await until(lambda: plane.controller_name not in (None, cluster.leader), "a controller")

    async def outcome(change: Change, name: str) -> CommandOutcome:
        return (await plane.request_change(change, name)).outcome

    await comes(lambda: outcome(Change.ADD, cluster.leader), CommandOutcome.REFUSED)
    with monkeypatch.context() as patch:
        patch.setattr(control_plane, "COMMANDS_IN_FLIGHT_MAX", 0)
        await comes(lambda: outcome(Change.REMOVE, cluster.leader), CommandOutcome.FAILED)
    await cluster.stop(*(name for name in VOTERS if name != plane.name))
    links = plane._link
    await until(lambda: not any(map(links.is_up, VOTERS.keys() - {plane.name})), "alone")
    await comes(lambda: outcome(Change.REMOVE, plane.name), CommandOutcome.NOT_NOW)


async def test_restart_of_all_keeps_the_state(cluster: Cluster) -> None:
    epoch = cluster.epoch
    await publish(cluster, cluster.nodes["a"], 7, t=3)
    promise = cluster.nodes["a"].report.highest_promise
    await cluster.stop()
    cluster.promises = dict.fromkeys(VOTERS, promise)
    await cluster.start(*VOTERS)
    await until(lambda: cluster.serves(above=epoch), "restarted")
    kept = cluster.nodes["c"].plane.state.checkpoint
    assert kept is not None
    assert (kept.index, dict(kept.queue_offsets)) == (7, {"t": 3})


async def test_appointments_of_before_a_start_have_no_time(cluster: Cluster) -> None:
    away = next(name for name in VOTERS if name != cluster.leader)
    last, others = cluster.epoch, [name for name in VOTERS if name != away]

    async def transfer() -> Epoch:
        to = next(name for name in others if name != cluster.leader)
        plane = cluster.nodes[to].plane
        asked = partial(plane.request_transfer, VOTERS[to])
        await answered(asked, CommandOutcome.OK)
        await until(lambda: cluster.serves(above=last), "transferred")
        return cluster.epoch

    last = await transfer()
    await cluster.stop(away)
    cluster.promises[away] = last
    last = await transfer()
    await cluster.start(away)
    await until(lambda: cluster.nodes[away].plane.is_current, "caught up")
    last = await transfer()
    found = {each.epoch: each.earlier for each in cluster.nodes[away].history.newest_first()}
    assert not found.pop(last)
    assert found
    assert all(found.values())


async def test_wiped_node_votes_only_when_brought_up_to_date(
    cluster: Cluster, tmp_path: Path
) -> None:
    controller = await cluster.controller()
    wiped, other = (name for name in VOTERS if name != controller)
    await cluster.stop(*VOTERS)
    shutil.rmtree(tmp_path / wiped / "raft")

    # Alone with one other, it may not help to elect: what it forgot may matter.
    await cluster.start(other)
    await cluster.start(wiped)
    of_other = cluster.nodes[other].plane._raft
    assert of_other is not None
    term = of_other.view.term
    await until(lambda: of_other.view.term >= term + 3, "the other stands for election in vain")
    assert cluster.controllers == []
    assert cluster.nodes[wiped].plane.withholds_votes

    await cluster.start(controller)
    await until(lambda: not cluster.nodes[wiped].plane.withholds_votes, "up to date")
    await until(cluster.serves, "in service")
    await cluster.stop(wiped)
    await cluster.start(wiped)
    assert not cluster.nodes[wiped].plane.withholds_votes
    await until(cluster.serves, "in service")


async def test_epoch_survives_loss_of_all_raft_files(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft, "REGRANT_S", 1.0)
    await cluster.stop()
    for name in VOTERS:
        shutil.rmtree(tmp_path / name / "raft")
    cluster.promises = {"a": Epoch(40), "b": Epoch(41), "c": Epoch(7)}
    await cluster.start(*VOTERS)
    await until(cluster.serves, "founded anew")
    assert cluster.epoch >= 42


async def test_node_that_has_forgotten_nothing_leads_those_that_did(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft, "REGRANT_S", 1.0)
    published = await publish(cluster, cluster.nodes["b"], 7, t=3)
    promise = cluster.nodes["a"].report.highest_promise
    await cluster.stop()
    cluster.promises = dict.fromkeys(VOTERS, promise)
    for name in "ac":
        (tmp_path / name / "raft" / "journal").write_bytes(b"damaged")
    await cluster.start(*VOTERS)
    await until(lambda: cluster.serves(above=promise), "in service")
    assert cluster.nodes["a"].plane.state.checkpoint == published
    assert not any(node.plane.withholds_votes for node in cluster.nodes.values())


async def test_majority_without_raft_files_goes_on_without_the_third_node_if_an_operator_says_so(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft, "REGRANT_S", 1.0)
    await cluster.stop()
    cluster.promises = dict.fromkeys(VOTERS, Epoch(40))
    shutil.rmtree(tmp_path / "a" / "raft")
    await cluster.start("a", "b")  # the third may know more
    raft_of_b = cluster.nodes["b"].plane._raft
    assert raft_of_b is not None
    term = raft_of_b.view.term
    await until(lambda: raft_of_b.view.term >= term + 5, "b stands for election in vain")
    assert cluster.controllers == []
    await cluster.stop("a")
    await cluster.start("a", raft_lost=True)
    await until(lambda: cluster.serves(above=40), "in service")


# pysyncobj leaves the closing of a sent snapshot to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*raft/snapshot:pytest.PytestUnraisableExceptionWarning")
async def test_lagging_node_gets_a_snapshot_and_restarts_from_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_journal, "TRAILING_RECORDS", 0)
    controller = await cluster.controller()
    lagging = next(name for name in VOTERS if name not in {controller, cluster.leader})
    await cluster.stop(lagging)
    for index in range(1, 30):
        await publish(cluster, cluster.nodes[controller], index, t=index)
    published = await publish(cluster, cluster.nodes[controller], 30, t=30)
    for name, node in cluster.nodes.items():
        assert node.plane._raft is not None
        node.plane._raft._core.forceLogCompaction()  # type: ignore[union-attr]
        journal = node.plane._raft._files.journal
        await until(lambda journal=journal: len(journal) < 10, f"{name} compacts")  # type: ignore[misc]
    for _ in range(2):
        await cluster.start(lagging)
        plane = cluster.nodes[lagging].plane
        await until(lambda plane=plane: plane.state.checkpoint == published, "caught up")  # type: ignore[misc]
        assert (tmp_path / lagging / "raft" / "snapshot").exists()
        await cluster.stop(lagging)
    epoch = cluster.epoch
    await cluster.stop()
    gc.collect()  # here, not in a test that does not know of it
    cluster.promises = dict.fromkeys(VOTERS, epoch)
    await cluster.start(*VOTERS)
    await until(lambda: cluster.serves(above=epoch), "restarted")
    assert all(n.plane.state.checkpoint == published for n in cluster.nodes.values())


@pytest.mark.parametrize(
    ("leads", "linked", "hurries"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
async def test_controller_looks_at_the_time_more_often_while_a_link_is_down(
    monkeypatch: pytest.MonkeyPatch, *, leads: bool, linked: bool, hurries: bool
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    plane: Any = SimpleNamespace(
        _raft=object(),
        _clock=clock,
        _peers={"b": "", "c": ""},
        _link=SimpleNamespace(is_up=lambda peer: linked or peer == "c"),
        _controller=SimpleNamespace(leads=leads),
    )
    with pytest.raises(asyncio.CancelledError):
        await ControlPlane._run(plane)
    # A tick that is not in a hurry ends at the next multiple of its interval.
    assert (slept == [HURRY_S]) if hurries else (0 < slept[0] <= TICK_S)


async def test_controller_that_fails_at_a_request_ends_the_process(tmp_path: Path) -> None:
    node = Node(Cluster(tmp_path), "a", raft_lost=False)

    def step(*_: object) -> NoReturn:
        raise AssertionError("a half-done step")

    double: Any = node.plane
    double._controller = SimpleNamespace(step=step)
    with pytest.raises(SystemExit):
        await node.plane._carry_out(ChangeRequest(Change.ADD, "d"))
    assert node.failures == [(ExitCode.SHELL_FAILED, "AssertionError('a half-done step')")]


async def test_voters_that_only_the_logs_know_elect_a_leader(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.founders = {"a": VOTERS["a"], "x": ReplicaId(8), "y": ReplicaId(9)}  # x and y are gone
    cluster.promises = dict.fromkeys(VOTERS, Epoch(4))
    cluster.reserve()
    await cluster.start(*VOTERS)
    try:
        await until(lambda: cluster.serves(above=4), "a leader")
        told = cluster.nodes[await cluster.controller()].plane._peer_sets
        await until(lambda: [*told.values()] == [(frozenset(VOTERS.values()),)] * 2, "their voters")
    finally:
        await cluster.stop()


async def test_reports_leave_with_messages_of_raft_and_none_without(tmp_path: Path) -> None:
    """A link that is lost makes the controller decide at the end of the grace, not at a tick."""
    cluster = Cluster(tmp_path)
    plane = Node(cluster, "a", raft_lost=False).plane
    made, steps, now = list[int](), list[object](), SimpleNamespace(ms=0)

    def make_report() -> None:
        made.append(now.ms)
        plane._reported_at_ms = MonoMs(now.ms)

    double: Any = plane
    double._clock, double.report_now = lambda: MonoMs(now.ms), make_report
    for now.ms in (1_000, 1_050, 1_095, 1_100, 1_200):
        plane._link._before_raft()
    assert made == [1_000, 1_095, 1_200]

    decided = asyncio.Event()

    def step(event: object) -> None:
        steps.append(event)
        if isinstance(event, ControllerTick):
            decided.set()

    double._step = step
    double._controller = SimpleNamespace(leads=True)
    plane._on_link("b", False)
    assert steps == [LinkChanged("b", False)]
    async with asyncio.timeout(DEADLINE_S):
        await decided.wait()
