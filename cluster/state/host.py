"""The state plane on the event loop, for services and the node.

    Replica --on_commit--> StatePlane (cluster/state/state_plane.py): its decisions
    services --> leader --> kick      LoopIo (cluster/state/loop_io.py): its timers and threads

All methods are for the event loop, and none holds it for long.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from cluster.rpc.rpc_caller import CALLER
from cluster.state.loop_io import LoopIo
from cluster.state.state_plane import FlushLimits, StatePlane
from cluster.state.topic_totals import Totals
from replication.shell.hop_recorder import Hop, HopRecorder
from timer.files.disk_reserve import DiskSpace
from timer.leader.intake.cluster_clock import ClockReport
from timer.leader.leader import Leader
from timer.model.timer_errors import EngineError, FileDamage, NotReadyError
from timer.model.units import Epoch, LogIndex, Now
from timer.recovery.engine import Engine


class Host:
    """Runs one engine."""

    def __init__(  # noqa: PLR0913
        self,
        engine: Engine,
        io: LoopIo,
        limits: FlushLimits,
        *,
        draw_id: Callable[[int], int] = secrets.randbits,
        hops: HopRecorder | None = None,
        on_damage: Callable[[FileDamage], None] | None = None,
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Args:
        hops: Records the hops of requests while it is on. None: one of this host's own.
        on_damage: Called with damage that a query, a merge or reading ahead meets. They change no
            state, so the node can go on until it is healed. None: such damage ends the process.
        """
        self.engine, self.log, self.steps = engine, io.log, io.steps
        self.leader_address = io.leader_address
        self.hops = hops or HopRecorder()
        self.draw_id = draw_id
        """Takes a number of bits; returns as many random ones, which no client can guess."""
        self._failed = fatal
        self._damaged = on_damage
        self._loop = asyncio.get_running_loop()
        self._flushes: set[asyncio.Future[None]] = set()
        """Callers that wait for the end of a flush."""
        self._io = io
        self._plane = StatePlane(engine, limits, io)
        io.begin(self._plane, limits.memtable_bytes, on_damage=self.on_read_error, fatal=self.fatal)

    def fatal(self, error: BaseException) -> None:
        """End the process: its state can't be trusted any more."""
        self._failed(error)
        self._end_waiting()

    def on_read_error(self, error: BaseException) -> None:
        """Take an error of work that only reads the node's files."""
        if self._damaged is not None and isinstance(error, FileDamage):
            self._damaged(error)
        else:
            self.fatal(error)

    # ---- for the node and services

    @property
    def totals(self) -> Totals:
        """The sums over all topics."""
        return self._plane.totals

    @property
    def leader(self) -> Leader | None:
        """The leader core while this node leads."""
        return self.engine.leader

    @property
    def serves(self) -> bool:
        """Whether this node leads, and no other node can lead at this moment."""
        return self.engine.leader is not None and self.log.holds_lease()

    def require_leader(self) -> Leader:
        """Return the leader core.

        Raises:
            NotLeaderError: another node leads, or none is known.
            NotReadyError: this node is about to lead.
            ShuttingDownError: this node drains.
        """
        return self._plane.require_leader()

    def require_lease(self) -> Leader:
        """Return the leader core while no other node can lead: for answers without an entry.

        Raises:
            NotLeaderError: another node leads, or none is known.
            NotReadyError: this node is about to lead, or its leadership is not certain at the
            moment.
        """
        leader = self.require_leader()
        if not self.serves:
            raise NotReadyError("this leader holds no lease at the moment")
        return leader

    def now(self) -> Now:
        """Return this instant on both clocks; see StatePlane."""
        return self._plane.now()

    def clock_report(self) -> ClockReport:
        """Return how far the clocks are from the median; see StatePlane."""
        return self._plane.clock_report()

    def kick(self) -> None:
        """Let the leader step after all requests of this turn of the loop have come in."""
        self._plane.kick()

    async def ask(self, start: Callable[[Callable[[object], None]], None]) -> object:
        """Give the leader a request whose `done` this awaits. Note its entry for the audit log.

        An entry that `start` appends itself is noted at once: the answer may never come.

        Raises:
            EngineError: raised by `start`, or passed to `done` in place of a result.
        """
        leader, caller = self.engine.leader, CALLER.get()
        before = leader.last_proposed if leader is not None else 0
        future, done = self.expect()
        start(done)
        if caller and leader and not future.done() and leader.last_proposed > before:
            caller.note(leader.epoch, leader.last_proposed)
        self.kick()
        return await future

    def expect(self) -> tuple[asyncio.Future[object], Callable[[object], None]]:
        """Return a future for a result of the leader, and the function that ends it.

        The function notes the result's entry for the audit log. If the future was cancelled, as
        its caller has gone, the audit log gets a line of its own.
        """
        future: asyncio.Future[object] = self._loop.create_future()
        caller = CALLER.get()
        began_ns = time.monotonic_ns() if self.hops.on else 0

        def done(result: object) -> None:
            if future.done() and not future.cancelled():
                return
            if began_ns:
                self.stamp_request(began_ns)
            if caller is not None and self.engine.leader is not None:
                caller.note(self.engine.leader.epoch, self.engine.leader.answering_index)
            if future.cancelled():
                if caller is not None:
                    caller.on_late(caller, result if isinstance(result, EngineError) else None)
            elif isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

        return future, done

    def stamp_request(self, began_ns: int) -> None:
        """Record the hops of a request whose entry was just applied: it came at `began_ns`."""
        leader = self.engine.leader
        if leader is not None and leader.answering_index:
            self.hops.stamp(Hop.REQUEST, leader.answering_index, began_ns)
            self.hops.stamp(Hop.APPLIED, leader.answering_index)

    # ---- from the replica

    def on_commit(self, commit_index: LogIndex) -> None:
        """Entries up to here may be applied."""
        self._io.call_or_end(self._on_commit, commit_index)

    def _on_commit(self, commit_index: LogIndex) -> None:
        if self.hops.on:
            self.hops.stamp(Hop.COMMITTED, commit_index)
        self._io.on_commit(commit_index)
        self._plane.on_commit(commit_index)

    def on_lead(self, epoch: Epoch) -> None:
        """Apply the committed entries, then serve."""
        self._io.call_or_end(self._plane.on_lead, epoch)

    def on_drain(self) -> bool:
        """Append some of the epoch's last entries: another replica is about to lead.

        Returns whether more are left.
        """
        return self._io.call_or_end(self._plane.on_drain)

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving at once."""
        self._io.forget_appended()
        self._io.call_or_end(self._plane.on_stepdown, epoch)

    # ---- files

    def use_disk_space(self, space: DiskSpace) -> None:
        """Take note of the disk's free space. If it has become low, drop the log and flush."""
        self._io.call_or_end(self._plane.use_disk_space, space)

    def use_memory(self, *, high: bool) -> None:
        """Take note whether memory is above its limit. While it is, flushes come sooner."""
        self._plane.memory_high = high

    @property
    def applied_index(self) -> LogIndex:
        """The last applied entry."""
        return self.engine.machine.applied_index

    @property
    def manifest_index(self) -> LogIndex:
        """Index of the newest manifest. 0: there is none."""
        return self.engine.manifest_index

    @property
    def is_low(self) -> bool:
        """Whether the disk has little room."""
        return self.engine.disk_space.low

    async def flush(self) -> None:
        """Write a manifest at the applied index; nothing if one is being written.

        It is written even if the caller gives up.
        """
        ended: asyncio.Future[None] = self._loop.create_future()
        self._flushes.add(ended)
        ended.add_done_callback(self._flushes.discard)
        self._io.call_or_end(
            self._plane.flush, lambda: None if ended.done() else ended.set_result(None)
        )
        await ended

    def _end_waiting(self) -> None:
        for ended in list(self._flushes):
            if not ended.done():
                ended.set_result(None)

    # ---- ending

    async def drain(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Take nothing new, finish the requests that were taken, commit a checkpoint.

        `wait` returns after a moment; the caller bounds the whole.
        """
        self._io.flush_pace.hurry()
        self._plane.drain()
        while not self._plane.is_drained():
            await wait()

    async def stop(self) -> None:
        """Stop stepping; answer all requests."""
        self._plane.stop()
        await self._io.stop()
        self._end_waiting()
