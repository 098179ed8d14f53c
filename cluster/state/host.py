"""The state plane's shell: the engine on the event loop.

    Replica --on_commit--> fold (leader: at once; follower: a few times a second)
    services --> leader --> kick --> step, hand out
    timers  --> step at the leader's wake_at_ms
    flush, merge, read ahead --> in threads, one of each at a time

All methods are for the event loop, and none holds it for long: what is large is folded in chunks.
"""

import asyncio
import functools
import logging
import math
import random
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from cluster.state.loop_watch import Steps
from cluster.state.topic_totals import Totals
from cluster.state.write_pace import Abandoned, IngestRate, Pacer
from timer.entries.entry_frame import Entry, EntryKind
from timer.leader.intake.cluster_clock import ClusterClock, Sample
from timer.leader.intake.disk_reserve import Room
from timer.leader.leader import Delivery, Leader, Now
from timer.model.timer_errors import EngineError, NotLeaderError, NotReadyError, ShuttingDownError
from timer.model.units import Epoch, LogIndex, MonoMs, UnixMs
from timer.pending.prefetch import Prepared
from timer.pending.runs.read_window import ReadAhead
from timer.ready.spill import PageFetch
from timer.recovery.engine import Engine, Flush

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

WAKE_MS_MAX: Final = 1000
LEASE_LOOK_MS: Final = 20
UNSPILLED_FACTOR: Final = 4
"""Of what asks for a flush: so much may fire while one goes on."""
SHARE_MIN: Final = 0.75
"""Of what asks for a flush: replicas apply the same, and should not all write at the same time."""
LOW_FLUSH_MS: Final = 20_000
"""The flush interval while the disk has little room, or while most of the memtable's rows are dead.
The first flush retires files. The next one removes these, and the files that merges have replaced.
So unused room is free within a minute."""
WASTE_SHARE: Final = 8
"""A memtable of dead rows counts from this part of `memtable_bytes_flush`."""
TOPICS_AT_ONCE: Final = 128
"""What a flush needs of each, and tells it at its end, is a hundredth of a millisecond."""
READ_AHEAD_MS: Final = 50
"""How often it is looked whether runs must be read on."""
SAMPLE_MS: Final = 100
"""How often the leader looks at what its voters said of their clocks."""


class HostLog(Protocol):
    """What the host needs of the replica (replication/shell/replica.py)."""

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Append an entry as the leader."""

    def cached(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        """Return entries that are in memory."""

    async def entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry]:
        """Return entries from memory or disk: at least the first, from it on."""

    @property
    def first_index(self) -> LogIndex:
        """The first entry that is kept. Any thread may ask."""

    def kept(self, first: LogIndex, last: LogIndex, size_max: int) -> Sequence[Entry]:
        """Return entries from the disk, about so many bytes; none: `first` is gone.

        For a thread.
        """

    @property
    def last_time_ms(self) -> UnixMs:
        """Header time of the last entry."""

    def lease_held(self) -> bool:
        """Whether this node's leadership is certain at this moment."""

    async def synced(self, index: LogIndex) -> None:
        """Return when the log is on this disk up to the applied `index`."""

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        """This node's restart does not need entries below `index`; keep some for the others."""


def _fatal_errors(work: Callable[Concatenate["Host", _P], None]) -> Callable[..., None]:
    """Make a step of the state plane whose every error ends the process.

    Half a step was done: neither what is in memory nor that we lead can be trusted after it. And
    who called, gRPC for one, might do no more than log it.
    """

    @functools.wraps(work)
    def step(host: "Host", *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            work(host, *args, **kwargs)
        except Exception as error:
            host.fatal(error)
            raise

    return step


class Host:
    """Runs one engine."""

    def __init__(  # noqa: PLR0913
        self,
        engine: Engine,
        log: HostLog,
        *,
        make_clock: Callable[[UnixMs], ClusterClock],
        samples: Callable[[], Iterable[Sample]],
        mono_ms: Callable[[], MonoMs],
        wall_ms: Callable[[], UnixMs],
        fold_interval_ms: int,
        memtable_bytes_flush: int,
        log_bytes_flush: int,
        log_entries_flush: int,
        flush_interval_ms: int,
        draw_share: Callable[[], float] = lambda: random.uniform(SHARE_MIN, 1),  # noqa: S311
        draw_id: Callable[[int], int] = secrets.randbits,
        handed_out: Callable[[Delivery], object],
        leader_address: Callable[[], str | None] = lambda: None,
        on_leading: Callable[[], None] = lambda: None,
        on_committed: Callable[[EntryKind, float], None] = lambda kind, seconds: None,
        steps: Steps | None = None,
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Args:
        leader_address: Returns host:port of another node that leads. None: none is known.
        on_leading: Called when leadership begins or ends.
        on_committed: Called for each entry that this leader appended, with its kind and the
            seconds from append to commit.
        steps: Times the steps of the event loop. None: they are timed, and not reported.
        """
        self.engine = engine
        self.totals = Totals(engine.machine)
        self.steps = steps or Steps()
        """Of the event loop, by function."""
        self.log = log
        self._make_clock = make_clock
        self._samples = samples
        self._clock: ClusterClock | None = None
        self._sampled_at_ms = MonoMs(0)
        self._mono_ms = mono_ms
        self._wall_ms = wall_ms
        self._fold_interval_s = fold_interval_ms / 1000
        self._memtable_bytes_flush = memtable_bytes_flush
        self._log_bytes_flush = log_bytes_flush
        self._log_entries_flush = log_entries_flush
        self._flush_interval_ms = flush_interval_ms
        self.draw_id = draw_id
        """Returns so many random bits, which no client can guess."""
        self._draw_share = draw_share
        self._flush_share = draw_share()
        self._handed_out = handed_out
        self.fatal = fatal
        self._loop = asyncio.get_running_loop()
        self._kicked = False
        self._folding = False
        self._fold_timer: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._promoting: Epoch | None = None
        self._draining = False
        self._stopped = False
        self._in_threads: set[asyncio.Future[Any]] = set()
        """The flush, merge and reading ahead that threads are busy with."""
        self._merging = self._reading = self._fetching = False
        self._read_at_ms = mono_ms()
        self._ingest = IngestRate(self._loop.time())
        self._ingested = 0
        self._flush_pacer = Pacer(self._flush_rate)
        self._merge_pacer = Pacer(self._ingest.writing)
        self._flushed_at_ms = mono_ms()
        self._tasks: set[asyncio.Task[None]] = set()
        self.leader_address = leader_address
        self._on_leading, self._on_committed = on_leading, on_committed
        self._uncommitted: deque[tuple[LogIndex, EntryKind, float]] = deque()
        """Entries that this leader has appended, of which kind, and when."""

    # ---- what services use

    @property
    def leader(self) -> Leader | None:
        """The leader core while this node serves."""
        return self.engine.leader

    def require_leader(self) -> Leader:
        """Return the leader core.

        Raises:
            NotLeaderError: another node leads, or none is known.
            NotReadyError: this node is about to lead.
        """
        if self._draining:
            raise ShuttingDownError("this node drains; another will lead")
        if self.engine.leader is None:
            if self._promoting is not None:
                raise NotReadyError("this node was just promoted and catches up")
            raise NotLeaderError(self.leader_address())
        return self.engine.leader

    def require_lease(self) -> Leader:
        """Return the leader core while nobody else can lead: for answers that nobody commits.

        Raises:
            NotLeaderError: another node leads, or none is known.
            NotReadyError: this node is about to lead, or its leadership is not certain at the
            moment.
        """
        leader = self.require_leader()
        if not self.log.lease_held():
            raise NotReadyError("this leader holds no lease at the moment")
        return leader

    def now(self) -> Now:
        """Return this instant on both clocks; the cluster's never runs behind the log.

        Only a leader knows the cluster's clock; elsewhere it is this node's own.
        """
        mono_ms = self._mono_ms()
        clock_ms = self._clock.now(mono_ms) if self._clock is not None else self._wall_ms()
        return Now(mono_ms, max(clock_ms, self.log.last_time_ms))

    def _sample(self, mono_ms: MonoMs) -> None:
        if self._clock is not None and mono_ms - self._sampled_at_ms >= SAMPLE_MS:
            self._sampled_at_ms = mono_ms
            for sample in self._samples():
                self._clock.observe(sample)

    @property
    def clock_spread_ms(self) -> int:
        """By how much the voters' clocks differ, as the leader knows them; 0 elsewhere."""
        return self._clock.spread_ms(self._mono_ms()) if self._clock is not None else 0

    def kick(self) -> None:
        """Let the leader step once everything of this turn of the loop has come in."""
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._step)

    async def ask(self, start: Callable[[Callable[[object], None]], None]) -> object:
        """Give the leader a request whose `done` this awaits.

        Raises:
            EngineError: what `start` raised, or what came instead of a result.
        """
        future: asyncio.Future[object] = self._loop.create_future()

        def done(result: object) -> None:
            if future.done():
                return
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

        start(done)
        self.kick()
        return await future

    # ---- what the replica tells

    @_fatal_errors
    def on_commit(self, commit_index: LogIndex) -> None:
        """Entries up to here may be applied."""
        while self._uncommitted and self._uncommitted[0][0] <= commit_index:
            _, kind, appended_s = self._uncommitted.popleft()
            self._on_committed(kind, time.perf_counter() - appended_s)
        self.engine.committed(commit_index)
        if self.engine.leader is not None or self._promoting is not None:
            self._fold()
        elif self._fold_timer is None:
            self._fold_timer = self._loop.call_later(self._fold_interval_s, self._fold_later)

    @_fatal_errors
    def on_lead(self, epoch: Epoch) -> None:
        """Apply what is committed, then serve."""
        logger.info("promoted: epoch %d, applied %d", epoch, self.engine.machine.applied_index)
        self._promoting = epoch
        self._fold()

    @_fatal_errors
    def on_drain(self) -> None:
        """Append what a successor should know: another replica is about to lead."""
        if self.engine.leader is not None:
            self.engine.leader.hand_over(self.now())

    @_fatal_errors
    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving at once."""
        logger.info("leadership of epoch %d is over", epoch)
        self._promoting = None
        self.engine.step_down(NotLeaderError(self.leader_address()))
        self._uncommitted.clear()
        self._clock = None
        self._on_leading()

    # ---- folding

    def _fold_later(self) -> None:
        self._fold_timer = None
        self._fold()

    @_fatal_errors
    def _fold(self) -> None:
        if self._folding:
            return
        if self.engine.behind and not self._too_much_is_fired():
            first, last = self.engine.next_chunk()
            entries = self.log.cached(first, last)
            if entries is None:
                self._folding = True
                self.spawn(self._fold_from_disk(first))
                return
            lookup = self.steps.run(self.engine.begin_lookup, entries)
            if lookup is not None:
                self._folding = True
                self.spawn(self._fold_all(entries, lookup))
                return
            self.steps.run(self.engine.fold, entries)
        if self._too_much_is_fired():
            pass  # the flush goes on when it has ended
        elif self.engine.behind:
            self._loop.call_soon(self._fold)
        elif self._promoting is not None:
            self._serve(self._promoting)
        self.kick()

    async def _fold_from_disk(self, first: LogIndex) -> None:
        # As much as is read at once: to read it again for each portion takes longer than to fold.
        entries = await self.log.entries(first, self.engine.commit_index)
        await self._fold_all(entries, self.steps.run(self.engine.begin_lookup, entries))

    async def _fold_all(self, entries: Sequence[Entry], lookup: Prepared | None) -> None:
        """Fold the next entries, in portions between which the loop does other things."""
        while True:
            if lookup is not None:
                await self._in_thread(lookup.read)
                self.steps.run(self.engine.end_lookup, lookup)
            entries = entries[self.steps.run(self.engine.fold, entries) :]
            if not entries or self._stopped or self._too_much_is_fired():
                break
            self.kick()
            await asyncio.sleep(0)
            lookup = self.steps.run(self.engine.begin_lookup, entries)
        self._folding = False
        self._fold()

    def _serve(self, epoch: Epoch) -> None:
        self._promoting = None
        machine = self.engine.machine
        self._clock = self._make_clock(max(self.log.last_time_ms, machine.last_read_time_ms))
        leader = self.engine.lead(epoch, self._append, self.now())
        logger.info(
            "serving: epoch %d, %d pending, next due %s",
            epoch,
            machine.store.pending,
            machine.store.next_due(),
        )
        assert leader.closed is None
        self._on_leading()

    def _append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        index = self.log.propose(kind, payload, time_ms)
        self._uncommitted.append((index, kind, time.perf_counter()))
        return index

    # ---- stepping

    @_fatal_errors
    def _step(self) -> None:
        self._kicked = False
        if self._stopped:
            return
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        leader = self.engine.leader
        self._sample(self._mono_ms())
        now = self.now()
        if leader is not None:
            self.steps.run(leader.step, now)
            held = self.log.lease_held()
            if held:
                for delivery in self.steps.run(leader.hand_out, now):
                    self.steps.run(self._deliver, delivery)
                if leader.groups.waiting:  # what it takes to hand out goes into the log
                    self.steps.run(leader.step, now)
            wait_ms = min(WAKE_MS_MAX, max(0, leader.wake_at_ms(now) - now.mono_ms))
            if not held:  # nobody tells when it is back
                wait_ms = min(wait_ms, LEASE_LOOK_MS)
        else:
            wait_ms = WAKE_MS_MAX
        behind = self.totals.keep_up()
        if self.steps.run(self.engine.keep_up) or behind:
            self.kick()
        self._maybe_flush(now)
        self._maybe_read_ahead(now)
        self._maybe_fetch()
        self._wake = self._loop.call_later(wait_ms / 1000, self.kick)

    def _deliver(self, delivery: Delivery) -> None:
        self._handed_out(delivery)
        delivery.lease.consumer.sink(delivery)

    def start(self) -> None:
        """Begin to step."""
        self.kick()

    # ---- what threads do

    def _maybe_flush(self, now: Now) -> None:
        applied = self.engine.applied_bytes
        self._ingest.add(applied - self._ingested, self._loop.time())
        self._ingested = applied
        if self._draining:
            return  # the drain ends with one
        share = self._flush_share
        interval_ms = self._flush_interval_ms
        wasted = self.engine.wastes(self._memtable_bytes_flush // WASTE_SHARE)
        if self.engine.room.low or wasted:  # only a flush frees disk and memory of what is dead
            interval_ms = min(interval_ms, LOW_FLUSH_MS)
        due = now.mono_ms - self._flushed_at_ms >= share * interval_ms
        if (
            due
            or self.engine.cutting
            or self.engine.wants_flush(
                memtable_bytes=int(share * self._memtable_bytes_flush),
                log_bytes=int(share * self._log_bytes_flush),
                log_entries=int(share * self._log_entries_flush),
            )
        ):
            if not self.steps.run(self.engine.prepare_flush, TOPICS_AT_ONCE):
                self.kick()  # and some more
                return
            self._flushed_at_ms = now.mono_ms
            self._flush_share = self._draw_share()
            if (flush := self.steps.run(self.engine.begin_flush)) is not None:
                self.spawn(self._flush(flush))

    def _too_much_is_fired(self) -> bool:
        """Whether messages that no file holds yet take so much memory that folding must wait."""
        stuck = self.engine.flushing or not self.engine.flush_fits
        unspilled = self.engine.machine.pages.unspilled_size
        return stuck and unspilled >= UNSPILLED_FACTOR * self._memtable_bytes_flush

    def _flush_rate(self) -> float:
        hurry = self.engine.unflushed_bytes >= self._memtable_bytes_flush
        return math.inf if hurry else self._ingest.writing()

    async def flush(self) -> None:
        """Write a manifest at the applied index; nothing if one is being written.

        It is written also if whoever asked gives up.
        """
        await asyncio.shield(self._beside(self._flush_now()))

    async def _flush_now(self) -> None:
        while not self.steps.run(self.engine.prepare_flush, TOPICS_AT_ONCE):  # noqa: ASYNC110
            await asyncio.sleep(0)
        if (flush := self.steps.run(self.engine.begin_flush)) is not None:
            await self._flush(flush)

    async def _flush(self, flush: Flush) -> None:
        # Others may have committed what this disk lacks: no manifest goes beyond the log beside it.
        await self.log.synced(flush.index)
        await self._in_thread(functools.partial(flush.write, self._flush_pacer))
        while not self.steps.run(self.engine.settle_flush, flush, TOPICS_AT_ONCE):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.steps.run(self.engine.end_flush, flush)
        if not self._stopped:
            self._fold()  # it may have waited for this
        self._drop_log()
        logger.info("manifest at %d: %d runs", flush.index, len(self.engine.machine.store.runs))
        if not self._merging and not self._stopped:
            self._merging = True
            self.spawn(self._merge())

    def _drop_log(self) -> None:
        before = LogIndex(self.engine.manifest_index + 1)
        self.log.drop_before(before, keep=not self.engine.room.low)

    def use_room(self, room: Room) -> None:
        """Hear how much room the disk has; when it becomes low, let go what can go."""
        became_low = room.low and not self.engine.room.low
        waited = self._too_much_is_fired()
        self.engine.room = room
        if became_low and not self._stopped:
            self._drop_log()
            self.spawn(self.flush())
        if waited and not self._too_much_is_fired():
            self._fold()

    async def _merge(self) -> None:
        """Merge runs until there is nothing to gain."""
        store = self.engine.machine.store
        try:
            while (merge := self.steps.run(self.engine.begin_merge)) is not None:
                work = functools.partial(store.write_merge, merge, self._merge_pacer)
                self.steps.run(store.install_merge, merge, await self._in_thread(work))
        except Abandoned:
            pass
        finally:
            self._merging = False

    def _maybe_read_ahead(self, now: Now) -> None:
        if self._reading or self._stopped or now.mono_ms < self._read_at_ms:
            return
        self._read_at_ms = MonoMs(now.mono_ms + READ_AHEAD_MS)
        ahead = self.engine.machine.store.begin_ahead(now.clock_ms)
        if ahead is not None:
            self._reading = True
            self.spawn(self._read_ahead(ahead))

    async def _read_ahead(self, ahead: ReadAhead) -> None:
        await self._in_thread(ahead.read)
        self.steps.run(self.engine.machine.store.end_ahead, ahead)
        self._reading = False

    def _maybe_fetch(self) -> None:
        fetch = None if self._fetching or self._stopped else self.engine.begin_fetch()
        if fetch is not None:
            self._fetching = True
            self.spawn(self._fetch(fetch))

    async def _fetch(self, fetch: PageFetch) -> None:
        await self._in_thread(fetch.read)
        self.steps.run(self.engine.end_fetch, fetch)
        self._fetching = False
        self.kick()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run slow disk work; `stop` waits for it."""
        future = self._loop.run_in_executor(None, work)
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return await asyncio.shield(future)

    # ---- ending

    async def drain(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Take nothing new, let what was taken finish, commit a checkpoint.

        `wait` returns after a moment; the caller bounds the whole.
        """
        self._draining = True
        self._flush_pacer.hurry()
        leader = self.engine.leader
        if leader is None:
            return
        leader.refuse(ShuttingDownError("this node drains; another will lead"))
        self.kick()
        while not leader.idle and leader.closed is None:
            await wait()
        if leader.closed is None:
            leader.checkpoint(self.now())
            while not leader.idle and leader.closed is None:
                await wait()

    async def stop(self) -> None:
        """Stop stepping; answer everybody."""
        for timer in (self._wake, self._fold_timer):
            if timer is not None:
                timer.cancel()
        self.engine.step_down(ShuttingDownError("this node stops"))
        self._stopped = True
        self._flush_pacer.hurry()
        self._merge_pacer.abandon()
        for task in list(self._tasks):
            await asyncio.wait([task])
        if self._in_threads:
            await asyncio.wait(self._in_threads)

    def spawn(self, work: Awaitable[None]) -> None:
        """Run `work` beside; an error in it is fatal: the state can't be trusted any more."""
        _ = self._beside(work)

    def _beside(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - it ends the process
                self.fatal(error)

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
