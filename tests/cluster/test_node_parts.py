"""The parts of a node that stand between its planes."""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from grpc_health.v1 import health_pb2

from cluster.control.control_plane import CommandAnswer, CommandOutcome
from cluster.control.control_state import ControlState
from cluster.control.leader_fitness import DiskRecord
from cluster.control.membership import id_name
from cluster.control.replica_report import ReportSource
from cluster.node import build, checkpoint_publisher, digest_comparison
from cluster.node.allocator import release_free_pages
from cluster.node.checkpoint_publisher import CheckpointPublisher
from cluster.node.digest_comparison import DigestComparison
from cluster.node.node import Node
from cluster.node.ports import GrpcServers, Ports
from cluster.observe.apply_metrics import PromotionMetrics
from cluster.observe.metrics import Levels, Telemetry
from cluster.rpc import memory
from cluster.rpc.health_service import HealthService
from cluster.settings.config import NodeConfig, build_config
from cluster.settings.exit_codes import Diverged
from cluster.state.alarm import KernelAlarm
from replication.core.core_events import Role
from replication.core.promise import NEVER_GIVEN
from replication.shell.tasks import TaskSet
from timer.files.data_directory import format_directory, founding_replica_id
from timer.files.disk import RealDisk
from timer.model.timer_errors import ConfigError
from timer.model.units import Epoch, LogIndex, ReplicaId
from timer.state.apply_results import Checkpoint

A, B, C = ReplicaId(1), ReplicaId(2), ReplicaId(3)


# ---- digests


class Comparison:
    """A comparison with given digests as the answers of the other voters, round by round."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *rounds: tuple[dict[str, str], bool]
    ) -> None:
        self.rounds = list(rounds)
        self.errors: list[BaseException] = []
        self.spawned: list[Coroutine[Any, Any, None]] = []
        engine: Any = SimpleNamespace(digests={LogIndex(7): "mine"})
        replica: Any = SimpleNamespace(replica_id=A, voters=frozenset({A, B, C}))
        monkeypatch.setattr(digest_comparison, "ROUND_S", 0)
        monkeypatch.setattr(digest_comparison, "digests_at", self.digests_at)
        self.comparison = DigestComparison(
            engine, replica, peers=dict, spawn=self.spawned.append, fatal=self.errors.append
        )

    async def digests_at(self, *_: object) -> tuple[dict[str, str], bool]:
        return self.rounds.pop(0)


async def test_lagging_voter_is_asked_again_before_a_replica_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Comparison(monkeypatch, ({"b": "other"}, True), ({"b": "other", "c": "mine"}, False))
    await play.comparison.compare_at(LogIndex(7), "mine")
    assert (play.rounds, play.errors) == ([], [])


@pytest.mark.parametrize(("others", "repairable"), [(("x", "x"), True), (("x", "y"), False)])
async def test_replica_stops_if_a_majority_or_no_state_contradicts_it(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, str], repairable: bool
) -> None:
    play = Comparison(monkeypatch, (dict(zip("bc", others, strict=True)), False))
    await play.comparison.compare_at(LogIndex(7), "mine")
    [error] = play.errors
    assert isinstance(error, Diverged)
    assert error.repairable is repairable


@pytest.mark.parametrize(
    ("index", "digest", "asks"), [(7, "theirs", True), (7, "mine", False), (8, "theirs", False)]
)
def test_voters_are_asked_only_about_a_digest_that_differs_at_the_same_index(
    monkeypatch: pytest.MonkeyPatch, index: int, digest: str, asks: bool
) -> None:
    play = Comparison(monkeypatch)
    shared: Any = SimpleNamespace(index=LogIndex(index), digest=digest)
    play.comparison.compare(shared)
    play.comparison.compare(None)
    assert len(play.spawned) == asks
    for work in play.spawned:
        work.close()


@pytest.mark.parametrize(("replica", "stops"), [(A, False), (ReplicaId(9), True)])
async def test_learner_has_no_vote_on_its_own_state(
    monkeypatch: pytest.MonkeyPatch, replica: ReplicaId, stops: bool
) -> None:
    play = Comparison(monkeypatch, ({"b": "mine", "c": "other"}, False))
    monkeypatch.setattr(play.comparison._replica, "replica_id", replica)
    await play.comparison.compare_at(LogIndex(7), "mine")
    assert bool(play.errors) is stops


# ---- ports


class Door:
    """A port, or the channels; `events` has what is done to it. `taken`: it can't be opened."""

    tls = None

    def __init__(self, name: str, events: list[str], *, taken: bool = False) -> None:
        self._name, self._events, self._taken = name, events, taken

    async def start(self, *_: object) -> None:
        if self._taken:
            raise ConfigError(self._name, "127.0.0.1:1", "is in use")
        self._events.append(f"{self._name} opens")

    listen = start

    async def open_replication(self) -> None:
        """There is no TCP port."""

    async def stop(self, *_: object) -> None:
        self._events.append(f"{self._name} closes")

    close = stop


def ports_of(events: list[str], *, taken: bool = False) -> Ports:
    grpc_port: Any = Door("grpc", events)
    http: Any = Door("http", events, taken=taken)
    channels: Any = Door("channels", events)
    relay: Any = Door("relay", events)
    return Ports(
        grpc_port,
        channels,
        http,
        relay=relay,
        servers=GrpcServers(grpc_port, None, None),
        health_service=HealthService(bool),
    )


async def test_grpc_port_closes_if_the_http_port_can_not_be_opened() -> None:
    events = list[str]()
    with pytest.raises(ConfigError, match="http"):
        await ports_of(events, taken=True).open()
    assert events == ["grpc opens", "grpc closes"]


async def test_http_port_and_channels_close_after_the_grpc_port() -> None:
    events = list[str]()
    ports = ports_of(events)
    await ports.open()
    await ports.close_grpc(0.0)
    await ports.close()
    assert events == [
        *("grpc opens", "http opens", "grpc closes", "http closes"),
        *("relay closes", "channels closes"),
    ]


# ---- checkpoints and members


class Plane:
    """A control plane that records publications."""

    def __init__(self, outcome: CommandOutcome = CommandOutcome.OK, **state: Any) -> None:
        self.state = ControlState(**state)
        self.outcome = outcome
        self.members: list[tuple[Epoch, dict[str, ReplicaId]]] = []
        self.checkpoints: list[LogIndex] = []

    async def publish_members(self, epoch: Epoch, voters: dict[str, ReplicaId]) -> None:
        self.members.append((epoch, voters))

    async def publish_checkpoint(self, shared: Any, *_: object) -> CommandOutcome:
        self.checkpoints.append(shared.index)
        return self.outcome


def publisher_of(plane: Plane, names: dict[ReplicaId, str], judged: list[LogIndex]) -> Any:
    checkpoint = Checkpoint.__new__(Checkpoint)
    fields = {"epoch": 4, "index": 9, "last_read_time_ms": 1, "queue_offsets": {}, "digest": "d"}
    for name, value in {**fields, "moved": {}, "since": 0}.items():
        object.__setattr__(checkpoint, name, value)
    machine = SimpleNamespace(checkpoint=checkpoint, voters=(A, B))
    host: Any = SimpleNamespace(
        leader=SimpleNamespace(epoch=Epoch(4)),
        engine=SimpleNamespace(machine=machine),
        now=lambda: SimpleNamespace(clock_ms=5),
    )
    replica: Any = SimpleNamespace(name_of=names.get)

    async def compare_at(index: LogIndex, _: str) -> None:
        judged.append(index)

    control: Any = plane
    snapshots: Any = None
    return CheckpointPublisher(host, replica, control, snapshots, compare=compare_at, interval_ms=1)


async def test_checkpoint_is_published_once_and_again_after_a_failure() -> None:
    judged: list[LogIndex] = []
    plane = Plane(CommandOutcome.UNKNOWN)
    publisher = publisher_of(plane, {}, judged)
    await publisher._publish_checkpoint()
    plane.outcome = CommandOutcome.OK
    for _ in range(2):
        await publisher._publish_checkpoint()
    assert (plane.checkpoints, judged) == ([9, 9], [9])


async def test_follower_publishes_no_checkpoint() -> None:
    plane = Plane()
    publisher = publisher_of(plane, {}, [])
    publisher._host.leader = None
    await publisher._publish_checkpoint()
    assert plane.checkpoints == []


async def test_idle_snapshots_are_unpinned_on_every_node_and_voters_published_by_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane, expired = Plane(), list[int]()
    publisher = publisher_of(plane, {A: "a", B: "b"}, [])

    async def expire() -> None:
        expired.append(len(plane.members))

    async def pause(_: float) -> None:
        if not rounds:
            raise asyncio.CancelledError
        rounds.pop()

    publisher._snapshots = SimpleNamespace(expire=expire)
    monkeypatch.setattr(checkpoint_publisher, "next_round", pause)
    for leads in (True, False):
        publisher._host.leader = SimpleNamespace(epoch=Epoch(4)) if leads else None
        expired.clear()
        rounds = [1, 2]
        with pytest.raises(asyncio.CancelledError):
            await publisher.run()
        assert len(expired) == 2
    assert len(plane.members) == 2


@pytest.mark.parametrize(
    ("names", "state", "published"),
    [
        ({A: "a", B: "b"}, {"voters": {"a": A}}, {"a": A, "b": B}),
        ({A: "a", B: "b"}, {"voters": {"a": A, "b": B}}, None),
        ({A: "a"}, {"voters": {"a": A, "c": C}}, {"a": A, id_name(B): B}),  # B's name is unknown
        ({A: "a", B: "b"}, {"voters": {"a": A, id_name(B): B}}, {"a": A, "b": B}),
        # A proposal that this epoch's leader has decided, and one that awaits its next epoch:
        ({}, {"epoch": 4, "voters": {"a": A, "b": B}, "proposed": {"a": A}}, {"a": A, "b": B}),
        ({}, {"epoch": 5, "voters": {"a": A, "b": B}, "proposed": {"a": A}}, None),
    ],
)
async def test_voters_are_published_if_the_control_plane_has_others(
    names: dict[ReplicaId, str], state: dict[str, Any], published: dict[str, ReplicaId] | None
) -> None:
    plane = Plane(**state)
    await publisher_of(plane, names, [])._publish_members()
    assert plane.members == ([] if published is None else [(4, published)])


@pytest.mark.parametrize(
    ("planned_from", "published", "is_passed"),
    [
        ((A, B), {"a": A}, True),
        ((A,), {"a": A}, False),  # the leader that added b ended before it published that
        ((A,), {"a": A, "b": B}, False),  # published since the plan
        ((), {"a": A, "b": B}, True),  # planned by the release before
        ((), {"a": A}, False),
    ],
)
def test_proposal_that_was_planned_from_other_voters_is_not_passed_on(
    planned_from: tuple[ReplicaId, ...], published: dict[str, ReplicaId], is_passed: bool
) -> None:
    proposed, log = {"a": A, "c": C}, {A, B}
    passed: list[frozenset[ReplicaId] | None] = []

    def on_appointment(
        _: Epoch, __: ReplicaId, voters: frozenset[ReplicaId] | None, ___: int
    ) -> None:
        passed.append(voters)

    replica = SimpleNamespace(replica_id=B, voters=frozenset(log), on_appointment=on_appointment)
    ignored = SimpleNamespace(compare=lambda _: None, note_leader=lambda _: None)
    parts = SimpleNamespace(replica=replica, digests=ignored, view=ignored)
    node: Any = SimpleNamespace(_parts=parts, _stopping=False)
    plan: dict[str, Any] = {"proposed": proposed, "planned_from": planned_from}
    state = ControlState(epoch=Epoch(4), leader=A, voters=published, **plan)
    Node.on_control_state(node, state)
    assert passed == [frozenset(proposed.values()) if is_passed else None]


# ---- the end


async def test_leader_that_stops_waits_for_no_successor_when_it_is_the_last_node() -> None:
    control = SimpleNamespace(is_alone=False, state=ControlState())
    is_asked = asyncio.Event()
    released = []

    async def request_transfer(target: None) -> None:
        is_asked.set()
        await asyncio.Event().wait()  # the appointed node has ended

    async def release() -> None:
        released.append(control.is_alone)

    control.request_transfer = request_transfer
    node: Any = SimpleNamespace(
        _parts=SimpleNamespace(control=control, replica=SimpleNamespace(release=release))
    )
    resigning = asyncio.create_task(Node._resign(node))
    await is_asked.wait()
    assert not released
    control.is_alone = True
    async with asyncio.timeout(30):
        await resigning
    assert released == [True]


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        (["not now", "ok"], ["retrying the transfer: n1 was appointed instead"]),
        (["not now, as before"], ["leadership not transferred: n1 was appointed instead"]),
        (["failed"], ["leadership not transferred: n1 was appointed instead"]),
    ],
)
async def test_leader_that_stops_repeats_the_transfer_after_another_appointment(
    answers: list[str], lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    released = []
    control = SimpleNamespace(is_alone=False, state=ControlState(epoch=Epoch(4)))

    async def request_transfer(target: None) -> CommandAnswer:
        outcome, _, is_early = answers.pop(0).partition(", ")
        if not is_early:
            control.state = ControlState(epoch=Epoch(control.state.epoch + 2))
        return CommandAnswer(CommandOutcome(outcome), "n1 was appointed instead")

    async def release() -> None:
        released.append(len(answers))

    control.request_transfer = request_transfer
    replica = SimpleNamespace(serving=False, release=release)
    node: Any = SimpleNamespace(_parts=SimpleNamespace(control=control, replica=replica))
    async with asyncio.timeout(30):
        await Node._resign(node)
    assert released == [0]
    assert [record.getMessage() for record in caplog.records] == lines


@pytest.mark.parametrize("silent", [True, False])
async def test_stop_flushes_if_the_replica_has_not_fallen_silent(silent: bool) -> None:
    host = SimpleNamespace(leader=None, drain=AsyncMock(), flush=AsyncMock())
    parts = SimpleNamespace(host=host, replica=SimpleNamespace(silent=silent))
    node: Any = SimpleNamespace(_parts=parts)
    await Node._drain(node)
    assert host.flush.await_count == (not silent)


async def test_cancel_that_nothing_asked_for_is_an_error_of_a_task() -> None:
    errors: list[BaseException] = []
    tasks = TaskSet(errors.append)

    async def wait_for_a_call(*, is_cancelled: bool) -> None:
        if is_cancelled:
            raise asyncio.CancelledError("the call")
        await asyncio.Event().wait()

    for is_cancelled in (True, False):
        tasks.spawn(wait_for_a_call(is_cancelled=is_cancelled))
        [task] = tasks._tasks
        if not is_cancelled:
            tasks.cancel()
        assert (await asyncio.wait({task}, timeout=10))[0], "a cancel of the set ends its tasks"
    assert [str(each) for each in errors] == ["the call"]


# ---- metrics, health and reports


def test_promotion_is_measured_from_the_first_word_of_its_appointment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telemetry = Telemetry(node="n1", version="1", read_levels=Levels)
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(
        "cluster.observe.apply_metrics.time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    promotions = PromotionMetrics(telemetry)
    promotions.on_appointed(Epoch(3))
    promotions.on_appointed(Epoch(3))
    promotions.on_serves(Epoch(3))
    promotions.on_serves(Epoch(4))  # of an appointment that did not come through the control plane
    value = telemetry.registry.get_sample_value
    assert value("timer_promotions_total") == 2
    assert value("timer_promotion_seconds_count") == 1
    assert value("timer_promotion_seconds_sum") == 0.5


@pytest.mark.parametrize("leads", [True, False])
async def test_services_of_the_leader_are_healthy_on_the_leader_alone(leads: bool) -> None:
    health = HealthService(lambda: leads)
    await health.update()
    found = {}
    for name in ("", "AdminService", "TimerService", "ConsumeService"):
        request = health_pb2.HealthCheckRequest(service=name and f"timer.v1.{name}")
        found[name] = (await health._servicer.Check(request, None)).status
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, 2
    on_leader = serving if leads else not_serving
    assert found == {
        "": serving,
        "AdminService": serving,
        "TimerService": on_leader,
        "ConsumeService": on_leader,
    }


def test_stranded_replica_is_logged_once_while_it_is_stranded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranded: list[tuple[ReplicaId, ...]] = [(B,), (B,), (), (B,)]
    told = []

    def status() -> Any:
        names = ("replica", "epoch", "bid_epoch", "last_epoch", "last_index", "highest_promise")
        numbers = dict.fromkeys((*names, "refused_epoch", "disk_ms", "commit_ms"), 0)
        flags = dict.fromkeys(("serving", "lease_ok", "unsure"), False)
        sets = {"stranded": stranded.pop(0), "sets": (frozenset({B}),)}
        return SimpleNamespace(role=Role.LEADER, **sets, **numbers, **flags)

    source = ReportSource("a", status, lambda: LogIndex(5), lambda: False)
    with caplog.at_level(logging.WARNING):
        while stranded:
            assert source.report().applied_index == 5
            told.append(len(caplog.records))
    assert told == [1, 1, 1, 2]


# ---- the node's own wiring


class _HostMade(Exception):
    """Carries the settings of the host of a node; nothing else of the node is made after it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def founder(data: Path, *names: str) -> NodeConfig:
    """Format the directory of n1; return its configuration. `names`: those of all nodes."""
    peers = {f"peers.{name}": f"127.0.0.1:{7_000 + at}" for at, name in enumerate(names)}
    config = build_config({"name": "n1", "cluster_id": "c", "data": str(data), **peers})
    voters = {name: founding_replica_id("c", name) for name in names}
    format_directory(
        RealDisk(),
        data,
        cluster_id="c",
        name="n1",
        replica_id=voters["n1"],
        founding_voters=voters,
        promise=NEVER_GIVEN,
    )
    return config


@pytest.mark.parametrize("names", [("n1",), ("n1", "n2", "n3")])
async def test_node_hears_its_host_has_the_kernels_alarm_and_reports_damage_to_peers_only(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object, **settings: Any) -> None:
        raise _HostMade(**settings)

    io = Mock()
    monkeypatch.setattr(build, "LoopIo", io)
    monkeypatch.setattr(build, "Host", made)
    config = founder(tmp_path, *names)
    calls: Any = SimpleNamespace(fatal=print, on_leading=Mock(), on_clocks=Mock())
    with pytest.raises(_HostMade) as host:
        build.build(config, calls, raft_lost=False)
    settings = {**io.call_args.kwargs, **host.value.settings}
    assert settings["make_alarm"] is KernelAlarm
    for name in ("fatal", "on_leading", "on_clocks"):
        assert settings[name] is getattr(calls, name)
    # Without peers there is nothing to fetch: the damage ends the process.
    assert (settings["on_damage"] is None) == (names == ("n1",))


async def test_node_notes_the_speed_of_its_disk_with_each_report_and_complains_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[object] = []
    monkeypatch.setattr(DiskRecord, "note", lambda _, *__, **what: noted.append(what))
    monkeypatch.setattr(DiskRecord, "complaints", lambda _: ["slow disk"])
    parts = build.build(founder(tmp_path, "n1", "n2", "n3"), Mock(), raft_lost=False)
    parts.control._report()
    assert noted == [{"disk_ms": 0, "durable": 0, "lease_ms": 500}]
    assert [text for concern in parts.view.concerns for text in concern()] == ["slow disk"]


async def test_node_with_little_memory_caches_fewer_pages_and_flushes_while_it_is_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 256 << 20)
    parts = build.build(founder(tmp_path, "n1", "n2", "n3"), Mock(), raft_lost=False)
    guard, plane = parts.guards[0], parts.host._plane
    assert plane.engine.machine.pages.size_max == 24 << 20
    guard.high = True
    guard._on_check()
    assert plane.memory_high
    assert guard._release_pages is release_free_pages
