"""The state plane's decisions: when to fold, flush, merge, read and serve. Pure, as its engine is.

    on_commit, on_lead, on_drain,      StatePlane                        StateIo (a shell)
    on_stepdown, kick, flush     ----> fold -> serve -> step ----------> soon, wake_in, fold_in
                                       flush -> settle -> merge -------> run (a thread), read
                                                      <-- done(result) --

Two shells implement `StateIo`: the event loop with its threads (cluster/state/loop_io.py), and the
simulator (chaos/sim/timers/timeline_io.py). Both therefore run the same code except for the clock,
the threads and the log.

All methods are for one thread, and none of them takes long: large work is done in portions. An
error in any of them leaves half a step behind. The shell ends the process then.
"""

import bisect
import enum
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, Protocol, TypeVar

from cluster.state.topic_totals import Totals
from timer.entries.entry_frame import Entry, EntryKind
from timer.files.disk_reserve import DiskSpace
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.cluster_clock import ClockReport, ClusterClock, Sample
from timer.leader.leader import Leader
from timer.model.timer_errors import (
    CorruptFileError,
    FileDamage,
    NotLeaderError,
    NotReadyError,
    ShuttingDownError,
    UnknownVersionError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, Now, UnixMs
from timer.pending.prefetch import Prefetch
from timer.pending.runs.merge import Merge
from timer.pending.runs.read_window import ReadAhead, ReadWindow
from timer.pending.runs.run_writer import Pace
from timer.ready.spill import PageFetch
from timer.recovery.engine import Engine, Flush

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

WAKE_MS_MAX: Final = 1000
"""Longest time between two steps."""
LEASE_CHECK_MS: Final = 20
"""Interval in which a leader without a lease checks whether it has one again."""
LOW_FLUSH_MS: Final = 20_000
"""The flush interval while the disk has little space, memory is above its limit, or most rows of
the memtable are dead. The first flush retires files. The next one removes these, and the files that
merges have replaced. So unused space is free within a minute."""
EARLY_SHARE: Final = 8
"""An earlier flush frees memory only if it frees at least this part of `memtable_bytes`."""
TOPICS_AT_ONCE: Final = 128
"""Topics in one portion of a flush. Each takes a hundredth of a millisecond."""
READ_AHEAD_MS: Final = 50
"""Least time between two checks whether more of the runs must be read."""
SAMPLE_MS: Final = 100
"""The least time between two samples of the voters' clocks."""
HIGH_DELIVERY_MS: Final = 100
"""The least time between two steps with deliveries while memory is high: consumers that do not read
are disconnected meanwhile."""


class ThreadWork(enum.Enum):
    """The kinds of work that a thread does for the state plane.

    If a merge or reading ahead meets damage, the state stays as it was. Both leave the damaged run
    out until the node is healed. Damage that other work meets ends the process.
    """

    PREFETCH = enum.auto()
    FLUSH = enum.auto()
    MERGE = enum.auto()
    READ_AHEAD = enum.auto()
    FETCH = enum.auto()


@dataclass(frozen=True, slots=True)
class FlushLimits:
    """A flush is due when one of the first four, times the share that `StateIo` draws, is reached.

    They decide when a node folds and flushes. The state does not depend on them.
    """

    memtable_bytes: int
    log_bytes: int
    log_entries: int
    interval_ms: int
    unspilled_bytes: int
    """Folding waits for the flush at this many bytes of fired messages in no file, or more."""
    topics_at_once: int = TOPICS_AT_ONCE


class StateIo(Protocol):
    """The shell's operations for the state plane. None of them blocks or calls back at once."""

    @property
    def flush_pace(self) -> Pace:
        """Called by the thread that writes a flush."""

    @property
    def merge_pace(self) -> Pace:
        """Called by the thread that merges."""

    def mono_ms(self) -> MonoMs:
        """Return CLOCK_BOOTTIME in milliseconds."""

    def wall_ms(self) -> UnixMs:
        """Return this node's Unix time in milliseconds."""

    def samples(self) -> Iterable[Sample]:
        """Return the newest samples of the voters' clocks."""

    def make_clock(self, floor_ms: UnixMs, /) -> ClusterClock:
        """Return the cluster's clock for a new leader. It shows at least `floor_ms`."""

    def draw_share(self) -> float:
        """Return the share of the limits at which the next flush is due, in (0, 1].

        Replicas apply the same entries. Their shares differ, so they do not all write at once.
        """

    def soon(self, call: Callable[[], None]) -> None:
        """Call in a later turn."""

    def wake_in(self, wait_ms: int) -> None:
        """Call `StatePlane.kick` after `wait_ms`. Replaces the previous order."""

    def fold_in(self) -> None:
        """Call `StatePlane.fold_later` after a follower's interval."""

    def run(self, kind: ThreadWork, work: Callable[[], _T], done: Callable[[_T], None]) -> None:
        """Do `work` in a thread, then call `done` with its result. A process that ends may not."""

    def run_timed(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call now, and measure how long the call takes."""

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Append an entry as the leader."""

    def last_time_ms(self) -> UnixMs:
        """Return the header time of the log's last entry."""

    def lease_held(self) -> bool:
        """Return whether this node's leadership is certain at this moment."""

    def cached(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        """Return the entries [first, last]. None: some of them are not in memory."""

    def read(
        self, first: LogIndex, last: LogIndex, done: Callable[[Sequence[Entry]], None]
    ) -> None:
        """Read entries from `first` on, at least one and none after `last`, then call `done`."""

    def when_synced(self, index: LogIndex, done: Callable[[], None]) -> None:
        """Call `done` once this disk has the log up to `index`, which is applied."""

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        """This node's restart does not need entries below `index`. `keep`: some are for others."""

    def leader_address(self) -> str | None:
        """Return the address of the node that leads, if known."""

    def on_delivery(self, delivery: Delivery, /) -> object:
        """A delivery is about to be sent to its consumer."""

    def on_leading_changed(self) -> None:
        """Leadership began or ended."""

    def clocks_read(self, report: ClockReport, /) -> object:
        """The leader has read the voters' clocks again."""

    def on_damage(self, damage: FileDamage, /) -> None:
        """A merge or reading ahead met a damaged file. The node must be healed."""


class StatePlane:
    """Runs one engine. The shell calls the public methods."""

    def __init__(self, engine: Engine, limits: FlushLimits, io: StateIo) -> None:
        self.engine = engine
        self.totals = Totals(engine.machine)
        self._limits, self._io = limits, io
        self._clock: ClusterClock | None = None
        self._sampled_at_ms = MonoMs(0)
        self._kicked = False
        self._folding = False
        """A thread or the disk is busy for the fold, or its next portion is ordered."""
        self._fold_ordered = False
        """A follower's next fold is ordered."""
        self._promoting: Epoch | None = None
        self._draining = False
        self._retiring: Leader | None = None
        """The leader at the start of the drain."""
        self._checkpointed = False
        """The drain has appended its CHECKPOINT."""
        self._fold_at_ms: UnixMs | None = None
        """Header time of a committed entry that a leader applies only then."""
        self.stopped = False
        self._settling: Callable[[], None] | None = None
        """Ends the flush whose manifest is durable, at once."""
        self._merging = self._reading = self._fetching = False
        self._read_at_ms = self._flushed_at_ms = io.mono_ms()
        self._share = io.draw_share()
        self._delivered_at_ms = MonoMs(0)
        self.memory_high = False
        """Whether the process's memory is above its limit, last measured by the shell."""

    # ---- for services

    def require_leader(self) -> Leader:
        """Return the leader core.

        Raises:
            NotLeaderError: another node leads, or none is known.
            NotReadyError: this node is about to lead.
            ShuttingDownError: this node drains.
        """
        if self._draining:
            raise ShuttingDownError("this node drains; another will lead")
        if self.engine.leader is None:
            if self._promoting is not None:
                raise NotReadyError("this node was just promoted and catches up")
            raise NotLeaderError(self._io.leader_address())
        return self.engine.leader

    def now(self) -> Now:
        """Return this instant on both clocks. The clock never runs behind the applied entries.

        Only a leader has the cluster's clock. Other nodes return their own.
        """
        mono_ms = self._io.mono_ms()
        if self._clock is not None:
            return Now(mono_ms, self._clock.now(mono_ms))
        return Now(mono_ms, max(self._io.wall_ms(), self._io.last_time_ms()))

    def clock_report(self) -> ClockReport:
        """Return how far the clocks are from the median. Only a leader knows: empty elsewhere."""
        return self._clock.report(self._io.mono_ms()) if self._clock is not None else ClockReport()

    def kick(self) -> None:
        """Step in a later turn, after all requests of this one have come in."""
        if not self._kicked:
            self._kicked = True
            self._io.soon(self._step)

    # ---- from the replica

    def on_commit(self, commit_index: LogIndex) -> None:
        """Entries up to `commit_index` may be applied."""
        self.engine.raise_commit_index(commit_index)
        if self.engine.leader is not None:
            self.engine.leader.on_committed(commit_index, self._io.mono_ms())
        if self.engine.leader is not None or self._promoting is not None:
            self._fold()
        elif not self._fold_ordered:
            self._fold_ordered = True
            self._io.fold_in()

    def on_lead(self, epoch: Epoch) -> None:
        """Apply the committed entries, then serve."""
        more = {"epoch": epoch, "applied_index": self.engine.machine.applied_index}
        logger.info("promoted", extra=more)
        self._promoting = epoch
        self._fold()

    def on_drain(self) -> bool:
        """Append some of the epoch's last entries: another replica is about to lead.

        Returns whether more are left.
        """
        leader = self.engine.leader
        return leader is not None and leader.hand_over(self.now())

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving at once."""
        logger.info("the leadership is over", extra={"epoch": epoch})
        self._promoting = None
        self.engine.step_down(NotLeaderError(self._io.leader_address()))
        self._clock = None
        self._io.on_leading_changed()

    # ---- folding

    def fold_later(self) -> None:
        """Fold as a follower."""
        self._fold_ordered = False
        self._fold()

    def _fold(self) -> None:
        if self._folding or self.stopped:
            return
        if self.engine.is_behind and not self.waits_for_flush:
            first, last = self.engine.next_chunk()
            entries = self._io.cached(first, last)
            if entries is None:
                # All that one read returns: a second read takes longer than folding.
                self._folding = True
                self._io.read(first, self.engine.commit_index, self._fold_portion)
                return
            entries = self._foldable(entries)
            if not entries:
                self.kick()
                return
            prefetch = self._io.run_timed(self.engine.begin_prefetch, entries)
            if prefetch is not None:
                self._folding = True
                self._prefetch(entries, prefetch)
                return
            self._io.run_timed(self.engine.fold, entries)
        self.kick()  # first: the step may begin the flush for which the next fold has to wait
        if self.waits_for_flush:
            pass  # the end of the flush folds
        elif self._fold_at_ms is not None:
            pass  # the step at that time folds
        elif self.engine.is_behind:
            self._io.soon(self._fold)
        elif self._promoting is not None:
            self._serve(self._promoting)

    def _foldable(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return those of the entries whose header's time has come, on a leader; elsewhere all.

        The leader appends a FIRE ahead of its time (timer/leader/fire_times.py).
        """
        self._fold_at_ms = None
        if self.engine.leader is None or not entries:
            return entries
        clock_ms = self.now().clock_ms
        if entries[-1].time_ms <= clock_ms:
            return entries
        ripe = bisect.bisect_right(entries, clock_ms, key=lambda entry: entry.time_ms)
        self._fold_at_ms = entries[ripe].time_ms
        return entries[:ripe]

    def _fold_portion(self, entries: Sequence[Entry]) -> None:
        entries = self._foldable(entries)
        if not entries:
            self._folding = False
            self.kick()
            return
        prefetch = self._io.run_timed(self.engine.begin_prefetch, entries)
        if prefetch is not None:
            self._prefetch(entries, prefetch)
        else:
            self._apply(entries)

    def _prefetch(self, entries: Sequence[Entry], prefetch: Prefetch) -> None:
        def done(_: None) -> None:
            self._io.run_timed(self.engine.use_prefetch, prefetch)
            self._apply(entries)

        self._io.run(ThreadWork.PREFETCH, prefetch.read, done)

    def _apply(self, entries: Sequence[Entry]) -> None:
        rest = entries
        if not self.waits_for_flush:  # a step may have begun the flush since the last portion
            rest = entries[self._io.run_timed(self.engine.fold, entries) :]
        if not rest or self.stopped or self.waits_for_flush:
            self._folding = False
            self._fold()
        else:
            self.kick()
            self._io.soon(functools.partial(self._fold_portion, rest))

    @property
    def waits_for_flush(self) -> bool:
        """Whether messages that no file holds yet take so much memory that folding must wait.

        It waits only if the end of a flush or more room on the disk follows. So a FIRE passes that
        exceeds the limit alone.
        """
        engine = self.engine
        stuck = engine.flushing or engine.capture_begun or not engine.flush_fits
        return stuck and engine.machine.pages.unspilled_size >= self._limits.unspilled_bytes

    def _serve(self, epoch: Epoch) -> None:
        self._promoting = None
        machine = self.engine.machine
        self._clock = self._io.make_clock(max(self._io.last_time_ms(), machine.last_read_time_ms))
        self._io.clocks_read(self.clock_report())
        leader = self.engine.lead(epoch, self._io.append, self.now())
        figures = {"pending": machine.store.pending, "next_due_ms": machine.store.next_due()}
        logger.info("serving", extra={"epoch": epoch, **figures})
        assert leader.closed is None
        self._io.on_leading_changed()

    # ---- stepping

    def _step(self) -> None:
        self._kicked = False
        if self.stopped:
            return
        self._sample(self._io.mono_ms())
        now = self.now()
        if self._fold_at_ms is not None and now.clock_ms >= self._fold_at_ms:
            # No new request: a fold that waits for a thread or a flush resumes when that ends.
            self._fold_at_ms = None
            self._fold()
            now = self.now()
        leader = self.engine.leader
        wait_ms = WAKE_MS_MAX if leader is None else self._lead(leader, now)
        behind = self.totals.keep_up()
        if self._io.run_timed(self.engine.keep_up) or behind:
            self.kick()
        self._maybe_flush(now)
        self._maybe_read_ahead(now)
        self._maybe_fetch()
        if self._fold_at_ms is not None:
            wait_ms = min(wait_ms, self._fold_at_ms - now.clock_ms)
        self._io.wake_in(max(0, wait_ms - (self._io.mono_ms() - now.mono_ms)))

    def _lead(self, leader: Leader, now: Now) -> int:
        """Step the leader; return after how many milliseconds to step again."""
        self._io.run_timed(leader.step, now)
        held = self._io.lease_held()
        pause_ms = self._delivered_at_ms + HIGH_DELIVERY_MS - now.mono_ms if self.memory_high else 0
        if held and pause_ms <= 0:
            self._delivered_at_ms = now.mono_ms
            for delivery in self._io.run_timed(leader.deliver, now):
                self._io.run_timed(self._deliver, delivery)
            if leader.groups.waiting:  # deliveries need entries
                self._io.run_timed(leader.step, now)
        wait_ms = min(WAKE_MS_MAX, max(0, leader.wake_at_ms(now) - now.mono_ms))
        wait_ms = min(wait_ms, pause_ms) if pause_ms > 0 else wait_ms
        return wait_ms if held else min(wait_ms, LEASE_CHECK_MS)

    def _sample(self, mono_ms: MonoMs) -> None:
        if self._clock is not None and mono_ms - self._sampled_at_ms >= SAMPLE_MS:
            self._sampled_at_ms = mono_ms
            for sample in self._io.samples():
                self._clock.observe(sample)
            self._io.clocks_read(self._clock.report(mono_ms))

    def _deliver(self, delivery: Delivery) -> None:
        self._io.on_delivery(delivery)
        delivery.lease.consumer.sink(delivery)

    # ---- flushing and merging

    def _maybe_flush(self, now: Now) -> None:
        if self._draining and not self.engine.capture_begun:
            return  # the drain ends with a flush
        if self._is_flush_due(now) or self.engine.capture_begun:
            if not self._io.run_timed(self.engine.prepare_flush, self._limits.topics_at_once):
                self.kick()  # for the next portion
                return
            self._flushed_at_ms = now.mono_ms
            self._share = self._io.draw_share()
            self._begin_flush(lambda: None)

    def _is_flush_due(self, now: Now) -> bool:
        share, limits = self._share, self._limits
        interval_ms = limits.interval_ms
        early = limits.memtable_bytes // EARLY_SHARE
        frees = self.memory_high and self.engine.unflushed_bytes >= early
        dead = self.engine.is_mostly_dead(early)  # only a flush frees such rows
        if self.engine.disk_space.low or frees or dead:
            interval_ms = min(interval_ms, LOW_FLUSH_MS)
        return now.mono_ms - self._flushed_at_ms >= share * interval_ms or self.engine.wants_flush(
            memtable_bytes=int(share * limits.memtable_bytes),
            log_bytes=int(share * limits.log_bytes),
            log_entries=int(share * limits.log_entries),
        )

    def flush(self, done: Callable[[], None] = lambda: None) -> None:
        """Write a manifest at the applied index, then call `done`.

        Nothing is written if nothing is new, or while another flush is under way.
        """
        if not self._io.run_timed(self.engine.prepare_flush, self._limits.topics_at_once):
            self._io.soon(functools.partial(self.flush, done))
            return
        self._begin_flush(done)

    def _begin_flush(self, done: Callable[[], None]) -> None:
        waited = self.waits_for_flush
        flush = self._io.run_timed(self.engine.begin_flush)
        if flush is None:
            if waited and not self.waits_for_flush:
                self._fold()
            done()
            return
        # Other nodes may have committed entries that this disk lacks. No manifest may pass the log.
        self._io.when_synced(flush.index, functools.partial(self._write, flush, done))

    def _write(self, flush: Flush, done: Callable[[], None]) -> None:
        write = functools.partial(flush.write, self._io.flush_pace)

        def written(_: None) -> None:
            self._settling = functools.partial(self._end_flush, flush, done)
            self._settle(flush, done)

        self._io.run(ThreadWork.FLUSH, write, written)

    def _settle(self, flush: Flush, done: Callable[[], None]) -> None:
        if self._settling is None:
            return  # the stop has ended the flush
        at_once = self._limits.topics_at_once
        if self.stopped or self._io.run_timed(self.engine.settle_flush, flush, at_once):
            self._end_flush(flush, done)
        else:
            self._io.soon(functools.partial(self._settle, flush, done))

    def _end_flush(self, flush: Flush, done: Callable[[], None]) -> None:
        self._settling = None
        self._io.run_timed(self.engine.end_flush, flush)
        self._fold()  # it may have waited for this
        self._drop_log()
        logger.info("manifest at %d: %d runs", flush.index, len(self.engine.machine.store.runs))
        if not self._merging:
            self._merging = True
            self._io.soon(self._merge)
        done()

    def _drop_log(self) -> None:
        before = LogIndex(self.engine.manifest_index + 1)
        self._io.drop_before(before, keep=not self.engine.disk_space.low)

    def use_disk_space(self, space: DiskSpace) -> None:
        """Take note of the disk's free space. If it has become low, drop the log and flush."""
        became_low = space.low and not self.engine.disk_space.low
        waited = self.waits_for_flush
        self.engine.disk_space = space
        if became_low and not self.stopped:
            self._drop_log()
            self.flush()
        if waited and not self.waits_for_flush:
            self._fold()

    def _merge(self) -> None:
        """Merge runs until there is nothing to gain."""
        store = self.engine.machine.store
        merge: Merge | None = None if self.stopped else self._io.run_timed(self.engine.begin_merge)
        if merge is None:
            self._merging = False
            return

        def done(windows: list[ReadWindow] | FileDamage) -> None:
            if isinstance(windows, FileDamage):
                self._io.run_timed(store.leave_out, windows, merge)
                self._io.on_damage(windows)
            else:
                self._io.run_timed(store.install_merge, merge, windows)
            self._merge()

        work = functools.partial(_or_damage, store.write_merge, merge, self._io.merge_pace)
        self._io.run(ThreadWork.MERGE, work, done)

    # ---- reading

    def _maybe_read_ahead(self, now: Now) -> None:
        if self._reading or now.mono_ms < self._read_at_ms:
            return
        self._read_at_ms = MonoMs(now.mono_ms + READ_AHEAD_MS)
        ahead = self.engine.machine.store.begin_read_ahead(now.clock_ms)
        if ahead is not None:
            self._reading = True
            work = functools.partial(_or_damage, ahead.read)
            self._io.run(ThreadWork.READ_AHEAD, work, functools.partial(self._read, ahead))

    def _read(self, ahead: ReadAhead, damage: FileDamage | None) -> None:
        store = self.engine.machine.store
        self._reading = False
        if damage is None:
            self._io.run_timed(store.end_read_ahead, ahead)
        else:
            self._io.run_timed(store.leave_out, damage)
            self._io.on_damage(damage)

    def _maybe_fetch(self) -> None:
        fetch = None if self._fetching else self.engine.begin_fetch()
        if fetch is not None:
            self._fetching = True
            self._io.run(ThreadWork.FETCH, fetch.read, functools.partial(self._on_fetched, fetch))

    def _on_fetched(self, fetch: PageFetch, _: None) -> None:
        self._io.run_timed(self.engine.end_fetch, fetch)
        self._fetching = False
        self.kick()

    # ---- ending

    def drain(self) -> None:
        """Take nothing new, and finish the requests that were taken."""
        self._draining = True
        self._retiring = self.engine.leader
        if self._retiring is not None:
            self._retiring.begin_drain(ShuttingDownError("this node drains; another will lead"))
            self.kick()

    def is_drained(self) -> bool:
        """Return whether a drain is over: every request is answered, and a CHECKPOINT committed.

        Call it again and again: it appends the CHECKPOINT after the last answer.
        """
        leader = self._retiring
        if leader is None or leader.closed is not None:
            return True
        if leader.idle and not self._checkpointed:
            self._checkpointed = True
            leader.checkpoint(self.now())
        return leader.idle

    def stop(self) -> None:
        """Stop stepping, and answer all requests. Threads may still be busy."""
        self.engine.step_down(ShuttingDownError("this node stops"))
        self.stopped = True
        if self._settling is not None:
            self._settling()


def _or_damage(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | FileDamage:
    """Call, and return the damage that the call meets in place of a result."""
    try:
        return work(*args, **kwargs)
    except (CorruptFileError, UnknownVersionError) as damage:
        return damage
