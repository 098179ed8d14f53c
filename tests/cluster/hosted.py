"""A leading engine with the interface of a host. Entries commit at the next step."""

import asyncio
from collections.abc import Callable

from chaos.sim.world.simdisk import SimDisk
from cluster.state.host import Host
from replication.shell.hop_recorder import HopRecorder
from tests.cluster.running import (
    RPC_S,
    Running,
    until,
)
from tests.timer.machines import START_MS, Log, catch_up, engine_on, part_of
from timer.entries.entry_frame import EntryKind
from timer.leader.leader import Leader
from timer.model.columns import gather
from timer.model.timer_errors import EngineError
from timer.model.units import DUE_MS_MAX, Epoch, LogIndex, MonoMs, Now, UnixMs
from timer.pending.read_view import Filter
from timerclient.proto import timer_pb2 as pb

FAR = START_MS + 10**8


class Hosted:
    """The leader of one node, with a topic "t" of id 1."""

    ask, expect = Host.ask, Host.expect

    def __init__(self) -> None:
        self.log, self.engine, self.hops = Log(), engine_on(SimDisk()), HopRecorder()
        self.log.begin_epoch()
        self.log.topic("t")
        catch_up(self.engine, self.log)
        self.leader = self.engine.lead(Epoch(self.log.epoch), self._append, self.now())
        self._loop = asyncio.get_running_loop()
        self.holds = False
        """If set, no entry commits."""
        self.refuse: Callable[[EntryKind], EngineError | None] = lambda kind: None
        """Returns the error with which the log rejects entries of a kind. None: it accepts them."""

    def _append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        if (refused := self.refuse(kind)) is not None:
            raise refused
        self.log.now_ms = max(self.log.now_ms, time_ms)
        return self.log.append(kind, payload).index

    def require_leader(self) -> Leader:
        return self.leader

    require_lease = require_leader

    def now(self) -> Now:
        return Now(MonoMs(0), UnixMs(START_MS))

    def fatal(self, error: BaseException) -> None:
        raise error

    on_read_error = fatal

    def kick(self) -> None:
        self._loop.call_soon(self.step)

    def step(self) -> None:
        self.leader.step(self.now())
        if not self.holds:
            catch_up(self.engine, self.log)

    def fill(self, n: int, first: int = 0) -> None:
        """Schedule n timers with the numbers from `first`, due at FAR + number; key = number."""
        span = range(first, first + n)
        keys = [b"%d" % at for at in span]
        part = part_of([(1, FAR + at, b"p%d" % at) for at in span], keys=keys)
        self.leader.schedule(part, lambda _: None)
        self.step()

    def pending(self) -> dict[int, int]:
        """Return the due times of all pending timers by number."""
        what = Filter(topic=1, due_from_ms=0, due_to_ms=DUE_MS_MAX)
        page = self.engine.machine.store.read_view().page(what, what.start, 1 << 20)
        assert page.next is None
        rows = page.timers.rows
        keys = gather(rows, {0: page.timers.blob}, "key").values()
        found = dict(zip(map(int, keys), rows["due_ms"].tolist(), strict=True))
        assert len(found) == len(rows)
        return found


def flushed(cluster: Running) -> None:
    """Wait until every node has written a manifest with all entries so far."""
    local = pb.GetCheckpointRequest(local=True)
    index = cluster.log_end()

    def written() -> bool:
        nodes = [
            cluster.admin(name).GetCheckpoint(local, timeout=RPC_S).nodes[0]
            for name in cluster.nodes
        ]
        return all(node.manifest_index >= index and node.runs for node in nodes)

    until(written)


PEERS = {"n1": "127.0.0.1:7101", "n2": "127.0.0.1:7102", "n3": "127.0.0.1:7103"}


BASE: dict[str, object] = {
    "name": "n1",
    "cluster_id": "demo",
    "data": "run/n1",
    "peers": ",".join(f"{name}={address}" for name, address in PEERS.items()),
}
