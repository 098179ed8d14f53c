"""Three real replicas over loopback streams and real files."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from replication.core.core_events import Role
from replication.core.replication_config import ReplicationConfig
from replication.shell import transport
from replication.shell.replica import Replica
from replication.shell.tcp_stream import Connect, TcpEnds, TcpPort
from tests.replication.promises import matched
from tests.waiting import until
from timer.entries.entry_frame import Entry, EntryKind
from timer.files.disk import RealDisk
from timer.files.log import Log
from timer.model.timer_errors import NotLeaderError
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

DEADLINE_S = 60.0
CONF = ReplicationConfig(lease_ms=60_000, heartbeat_ms=50, cache_bytes=1 << 16)
"""So long that no pause of the machine ends a lease; a test that needs its end moves the clock."""


class Node:
    """One replica with its server; starts again from its directory."""

    def __init__(self, cluster: "Cluster", replica: ReplicaId, directory: Path) -> None:
        self.cluster = cluster
        self.replica_id = replica
        self.name = f"n{replica}"
        self.directory = directory
        self.port = 0
        self.leads: list[Epoch] = []
        self.stepdowns: list[Epoch] = []
        self.roles: list[Role] = []
        self.committed = LogIndex(0)
        self.fatal: list[BaseException] = []
        self.alive = False
        self.drains = 0
        self.shipped_from: LogIndex | None = None
        self._starts = 0

    async def start(self, dials: dict[str, Callable[[], grpc.aio.Channel]]) -> None:
        self._starts += 1
        disk = RealDisk()
        disk.make_dir(self.directory)
        log = Log.open(disk, self.directory / "log", segment_size=1 << 16)
        promise = matched(disk, self.directory / "promise")
        self.committed = LogIndex(0)
        tcp = TcpPort("127.0.0.1", 0) if self.cluster.with_tcp else None
        if tcp is not None:
            await tcp.open()
        self.replica = Replica(
            replica_id=self.replica_id,
            name=self.name,
            nonce=Nonce(self.replica_id * 100 + self._starts),
            cluster_id="test",
            founding=frozenset(self.cluster.nodes),
            voters=None,
            state_time_ms=UnixMs(0),
            dials=dials,
            log=log,
            promise=promise,
            commit_index=LogIndex(0),
            config=CONF,
            listener=self,
            mono_ms=self.cluster.mono_ms,
            wall_ms=lambda: UnixMs(time.time_ns() // 1_000_000),
            shipped_from=lambda: self.shipped_from,
            tcp=TcpEnds(tcp, self.cluster.connect),
            fatal=self.fatal.append,
        )
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers(tuple(self.replica.handlers()))
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def join(self) -> None:
        await self.replica.start()
        self.alive = True

    async def stop(self) -> None:
        if self.alive:
            self.alive = False
            await self.server.stop(None)
            await self.replica.stop()
            del self.server

    def check(self, entry: Entry) -> None:
        """Nothing applies what these tests append."""

    def on_commit(self, commit_index: LogIndex) -> None:
        assert commit_index > self.committed
        self.committed = commit_index

    def on_role(self, role: Role, epoch: Epoch) -> None:
        self.roles.append(role)

    def on_lead(self, epoch: Epoch) -> None:
        self.leads.append(epoch)

    def on_drain(self) -> bool:
        self.drains += 1
        propose(self, b"drained %d" % self.drains)
        return self.drains < 3

    def on_stepdown(self, epoch: Epoch) -> None:
        self.stepdowns.append(epoch)

    def on_behind(self) -> None:
        raise AssertionError("nothing was dropped")

    def on_forgotten(self) -> None:
        raise AssertionError("no disk was lost")


async def connect(_: str, port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
    await asyncio.get_running_loop().create_connection(protocol, "127.0.0.1", port)


class Cluster:
    def __init__(self, directory: Path, *, with_tcp: bool) -> None:
        self.with_tcp = with_tcp
        self.connect: Connect = connect
        self.ahead_ms = 0
        """Of the machine's clock."""
        ids = [ReplicaId(number) for number in (1, 2, 3)]
        self.nodes: dict[ReplicaId, Node] = {}
        for replica in ids:
            self.nodes[replica] = Node(self, replica, directory / str(replica))

    def mono_ms(self) -> MonoMs:
        now_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        return MonoMs(now_ms + self.ahead_ms)

    def dials_of(self, node: Node) -> dict[str, Callable[[], grpc.aio.Channel]]:
        def dialer(other: Node) -> Callable[[], grpc.aio.Channel]:
            options = [("grpc.use_local_subchannel_pool", 1)]
            return lambda: grpc.aio.insecure_channel(f"127.0.0.1:{other.port}", options=options)

        return {other.name: dialer(other) for other in self.nodes.values() if other is not node}

    async def start(self) -> None:
        for node in self.nodes.values():
            await node.start(self.dials_of(node))
        for node in self.nodes.values():
            await node.join()

    def appoint(self, epoch: int, leader: Node) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.replica.on_appointment(Epoch(epoch), leader.replica_id)

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()
            assert not node.fatal, node.fatal
        gc.collect()  # grpc shuts the servers down once more, and needs the loop for it


@pytest.fixture(params=[True, False], ids=["tcp", "grpc"])
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, with_tcp=request.param)
    await cluster.start()
    cluster.ahead_ms = CONF.guard_ms  # what a lease from before the start would take
    yield cluster
    await cluster.stop()


def propose(node: Node, payload: bytes) -> LogIndex:
    return node.replica.propose(EntryKind.SCHEDULE, [payload], node.replica.last_time_ms)


async def payloads(node: Node, first: int, last: int) -> list[bytes]:
    found: list[Entry] = []
    while not found or found[-1].index < last:
        begin = LogIndex(found[-1].index + 1 if found else first)
        found += await node.replica.entries(begin, LogIndex(last))
    return [bytes(entry.payload) for entry in found]


async def test_leader_dies_and_nothing_committed_is_lost(cluster: Cluster) -> None:
    one, two, three = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    said = [f"entry {number}".encode() * 200 for number in range(300)]
    first = propose(one, said[0])
    for each in said[1:]:
        propose(one, each)
    last = first + len(said) - 1
    await until(lambda: all(node.committed >= last for node in (one, two, three)))
    await until(one.replica.holds_lease)
    with pytest.raises(NotLeaderError):
        propose(two, b"not here")

    await one.stop()
    cluster.ahead_ms += CONF.guard_ms
    cluster.appoint(2, two)
    await until(lambda: two.leads == [2])
    assert await payloads(two, first, last) == said
    more = propose(two, b"after the failover")
    await until(lambda: three.committed >= more)

    await one.start(cluster.dials_of(one))
    await one.join()
    await until(lambda: one.committed >= more)
    assert (await payloads(one, first, more))[-1] == b"after the failover"
    assert one.replica.leader_id == two.replica_id
    assert two.replica.clock_samples.keys() == {one.replica_id, three.replica_id}


async def test_follower_that_was_away_catches_up_from_disk(cluster: Cluster) -> None:
    one, _, three = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    await three.stop()
    last = LogIndex(0)
    for number in range(100):
        last = propose(one, bytes([number]) * 1_000_000)
        await until(lambda: one.replica.last_index - one.committed < 20)
    await until(lambda: one.committed >= last)
    assert one.replica.cached_entries(LogIndex(2), LogIndex(3)) is None, (
        "else it says nothing of the disk"
    )

    await three.start(cluster.dials_of(three))
    await three.join()
    await until(lambda: three.committed >= last)
    assert await payloads(three, 2, 4) == [bytes([number]) * 1_000_000 for number in range(3)]


async def test_log_that_a_backup_lacks_is_kept_within_the_limit(cluster: Cluster) -> None:
    one, *others = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    first, *_ = [propose(one, bytes(2_000)) for _ in range(300)]
    await until(lambda: all(node.committed >= first + 299 for node in (one, *others)))
    await until(lambda: one.replica._core.kept_from > first + 299)  # every voter has all
    one.shipped_from = LogIndex(first + 100)
    one.replica.drop_before(one.committed)
    await until(lambda: one.replica.first_index > first)
    kept = one.replica.first_index
    assert kept <= first + 100, "the first entry that the backup lacks is in the first segment"
    assert kept > first + 50
    one.replica.drop_before(one.committed, keep=False)
    await until(lambda: one.replica.first_index > first + 200)


async def test_released_leadership_moves_without_waiting_for_the_lease(cluster: Cluster) -> None:
    one, two, _ = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    await until(one.replica.holds_lease)
    last = propose(one, b"the last word")
    await one.replica.release()
    assert one.stepdowns == [1]
    assert one.committed >= last
    assert not one.replica.holds_lease()
    cluster.appoint(2, two)
    await until(lambda: two.leads == [2])


async def test_appointment_above_makes_a_healthy_leader_hand_over(cluster: Cluster) -> None:
    one, two, _ = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    await until(one.replica.holds_lease)
    cluster.appoint(2, two)
    await until(lambda: two.leads == [2])
    assert one.stepdowns == [1]
    assert one.drains == 3
    drained = [b"drained 1", b"drained 2", b"drained 3"]
    assert await payloads(two, 2, 4) == drained, "before the next epoch begins"


async def test_replica_that_fell_silent_acknowledges_nothing(cluster: Cluster) -> None:
    one, two, three = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    await until(one.replica.holds_lease)
    await until(lambda: three.replica.last_index == one.replica.last_index)
    await two.stop()
    ended = three.replica.last_index
    flushing = asyncio.create_task(three.replica.wait_until_synced(LogIndex(ended + 1)))
    await asyncio.sleep(0)
    await three.replica.fall_silent()
    async with asyncio.timeout(DEADLINE_S):
        assert not await flushing
    index = propose(one, b"alone")
    cluster.ahead_ms += CONF.lease_ms
    await until(lambda: not one.replica.holds_lease())
    assert one.committed < index
    assert three.replica.last_index == ended


async def test_streams_leave_grpc_once_the_tcp_ports_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "TCP_RETRY_S", 0.01)
    errors = [ConnectionRefusedError(), UnicodeError("label empty")] * 6
    made: list[Any] = []

    async def connect_later(name: str, port: int, protocol: Callable[[], Any]) -> None:
        if errors:
            raise errors.pop()
        dialled = protocol()
        made.append(dialled)
        await connect(name, port, lambda: dialled)

    cluster = Cluster(tmp_path, with_tcp=True)
    cluster.connect = connect_later
    await cluster.start()
    await until(lambda: not errors)
    await until(lambda: sum(is_open(each) for each in made) == 6)
    cluster.ahead_ms = CONF.guard_ms
    one, _, three = cluster.nodes.values()
    cluster.appoint(1, one)
    await until(lambda: one.leads == [1])
    last = propose(one, b"over TCP")
    await until(lambda: three.committed >= last)
    await cluster.stop()


def is_open(dialled: Any) -> bool:
    return hasattr(dialled, "transport") and not dialled.transport.is_closing()


async def test_other_cluster_is_refused(cluster: Cluster) -> None:
    one, _, _ = cluster.nodes.values()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(
            "/replication.v1.Peer/Link"
        )()
        await call.write(b"\x12\x05other")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
