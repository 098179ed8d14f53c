"""The event loop, threads and log as the state plane uses them.

Every piece of work runs under a guard: an error in it ends the process. Half a step was done, so
neither the state in memory nor the leadership can be trusted after it.
"""

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from cluster.state.alarm import Alarm, LoopAlarm
from cluster.state.loop_watch import Steps
from cluster.state.state_plane import StatePlane, ThreadWork
from cluster.state.write_pace import IngestRate, Pacer, WriteAbandoned
from timer.entries.entry_frame import Entry, EntryKind
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.cluster_clock import ClockReport, ClusterClock, Sample
from timer.model.timer_errors import FileDamage
from timer.model.units import LogIndex, MonoMs, UnixMs

_P = ParamSpec("_P")
_T = TypeVar("_T")

SHARE_MIN: Final = 0.75
"""Of the flush limits. Replicas apply the same entries, and should not all write at once."""


class HostLog(Protocol):
    """The replica's methods that the host needs (replication/shell/replica.py)."""

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Append an entry as the leader."""

    def cached_entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        """Return entries that are in memory."""

    async def entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry]:
        """Return entries from memory or disk: at least the first, from it on."""

    @property
    def first_index(self) -> LogIndex:
        """The first entry that is kept. Any thread may ask."""

    def stored_entries(self, first: LogIndex, last: LogIndex, size_max: int) -> Sequence[Entry]:
        """Return entries from the disk, about `size_max` bytes; none: `first` is gone.

        For a thread.
        """

    @property
    def last_time_ms(self) -> UnixMs:
        """Header time of the last entry."""

    def holds_lease(self) -> bool:
        """Whether this node's leadership is certain at this moment."""

    async def wait_until_synced(self, index: LogIndex) -> bool:
        """Wait until the log is on this disk up to the applied `index`. False: it never will be."""

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        """This node's restart does not need entries below `index`; keep some for the others."""


def draw_share() -> float:
    """Return the share of the limits at which the next flush is due."""
    return random.uniform(SHARE_MIN, 1)  # noqa: S311


class LoopIo:
    """Implements StateIo for one plane."""

    plane: StatePlane
    on_damage: Callable[[FileDamage], None]
    _fatal: Callable[[BaseException], None]
    _memtable_bytes: int
    _wake: Alarm

    def __init__(  # noqa: PLR0913
        self,
        log: HostLog,
        *,
        make_clock: Callable[[UnixMs], ClusterClock],
        samples: Callable[[], Iterable[Sample]],
        mono_ms: Callable[[], MonoMs],
        wall_ms: Callable[[], UnixMs],
        fold_interval_ms: int,
        draw_share: Callable[[], float] = draw_share,
        on_delivery: Callable[[Delivery], object],
        leader_address: Callable[[], str | None] = lambda: None,
        on_leading: Callable[[], None] = lambda: None,
        on_clocks: Callable[[ClockReport], object] = lambda report: None,
        on_committed: Callable[[EntryKind, float], None] = lambda kind, seconds: None,
        steps: Steps | None = None,
        make_alarm: Callable[[Callable[[], object]], Alarm] = LoopAlarm,
    ) -> None:
        """Args:
        leader_address: Returns host:port of another node that leads. None: none is known.
        on_leading: Called when leadership begins or ends.
        on_clocks: Called each time that the leader has read the voters' clocks.
        on_committed: Called for each entry that this leader appended, with its kind and the
            seconds from append to commit.
        steps: Times the steps of the event loop. None: they are timed, and not reported.
        make_alarm: Returns the timer that wakes the plane. A node's is exact.
        """
        self.make_clock, self.samples = make_clock, samples
        self.mono_ms, self.wall_ms = mono_ms, wall_ms
        self.draw_share = draw_share
        self.on_delivery = on_delivery
        self.leader_address, self.on_leading_changed = leader_address, on_leading
        self.clocks_read = on_clocks
        self._on_committed, self.steps = on_committed, steps or Steps()
        self._make_alarm = make_alarm
        self.flush_pace = Pacer(self._flush_rate)
        self._ingest = IngestRate(asyncio.get_running_loop().time())
        self.merge_pace = Pacer(self._ingest.write_rate)
        self._ingested = 0
        self.log = log
        self._fold_interval_s = fold_interval_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._fold_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_threads: set[asyncio.Future[Any]] = set()
        """The work that threads are busy with."""
        self._uncommitted: deque[tuple[LogIndex, EntryKind, float]] = deque()
        """Entries that this leader has appended, of which kind, and when."""

    def begin(
        self,
        plane: StatePlane,
        memtable_bytes: int,
        *,
        on_damage: Callable[[FileDamage], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Take the plane to call. `memtable_bytes`: from so much on a flush is not paced."""
        self.plane, self._memtable_bytes = plane, memtable_bytes
        self.on_damage, self._fatal = on_damage, fatal
        self._wake = self._make_alarm(plane.kick)

    # ---- calls

    def call_or_end(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call now. An error ends the process, and is raised."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._fatal(error)
            raise

    def soon(self, call: Callable[[], None]) -> None:
        """See StateIo."""
        self._loop.call_soon(self.call_or_end, call)

    def wake_in(self, wait_ms: int) -> None:
        """See StateIo. Each step ends with this call, so the rate of intake is measured here."""
        self._observe_ingest()
        self._wake.set_in(wait_ms)

    def fold_in(self) -> None:
        """See StateIo."""
        self._fold_timer = self._loop.call_later(
            self._fold_interval_s, self.call_or_end, self.plane.fold_later
        )

    def run_timed(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """See StateIo."""
        return self.steps.run(work, *args, **kwargs)

    def run(self, kind: ThreadWork, work: Callable[[], _T], done: Callable[[_T], None]) -> None:
        """See StateIo. `done` is not called if a merge is abandoned."""
        self._spawn(self._run(work, done))

    async def _run(self, work: Callable[[], _T], done: Callable[[_T], None]) -> None:
        future = self._loop.run_in_executor(None, work)
        self.in_threads.add(future)
        future.add_done_callback(self.in_threads.discard)
        try:
            result = await asyncio.shield(future)
        except WriteAbandoned:
            return
        done(result)

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - it ends the process
                self._fatal(error)

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the log

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """See StateIo."""
        index = self.log.propose(kind, payload, time_ms)
        self._uncommitted.append((index, kind, time.perf_counter()))
        return index

    def on_commit(self, commit_index: LogIndex) -> None:
        """Measure how long the entries up to here took."""
        while self._uncommitted and self._uncommitted[0][0] <= commit_index:
            _, kind, appended_s = self._uncommitted.popleft()
            self._on_committed(kind, time.perf_counter() - appended_s)

    def forget_appended(self) -> None:
        """Leadership has ended: another leader may have replaced the uncommitted entries."""
        self._uncommitted.clear()

    def last_time_ms(self) -> UnixMs:
        """See StateIo."""
        return self.log.last_time_ms

    def lease_held(self) -> bool:
        """See StateIo."""
        return self.log.holds_lease()

    def cached(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        """See StateIo."""
        return self.log.cached_entries(first, last)

    def read(
        self, first: LogIndex, last: LogIndex, done: Callable[[Sequence[Entry]], None]
    ) -> None:
        """See StateIo."""

        async def read() -> None:
            done(await self.log.entries(first, last))

        self._spawn(read())

    def when_synced(self, index: LogIndex, done: Callable[[], None]) -> None:
        """See StateIo."""

        async def wait() -> None:
            if await self.log.wait_until_synced(index):
                done()

        self._spawn(wait())

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        """See StateIo."""
        self.log.drop_before(index, keep=keep)

    # ---- the pace of writing

    def _observe_ingest(self) -> None:
        applied = self.plane.engine.applied_bytes
        self._ingest.add(applied - self._ingested, self._loop.time())
        self._ingested = applied

    def _flush_rate(self) -> float:
        hurry = self.plane.engine.unflushed_bytes >= self._memtable_bytes
        return math.inf if hurry else self._ingest.write_rate()

    # ---- ending

    async def stop(self) -> None:
        """Cancel the timers; return after the last thread."""
        self._wake.close()
        if self._fold_timer is not None:
            self._fold_timer.cancel()
        self.flush_pace.hurry()
        self.merge_pace.abandon()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.in_threads:
            await asyncio.wait(self.in_threads)
