"""The store: the pending rows of one node.

    insert --> memtable --freeze--> frozen --write_run (thread)--> run, run, run, ...
                  |                    |                             | window
                  +---------- fire ----+-----------------------------+--> Fired

The fire position F = (due_ms, seq) only moves forward. Every pending row at or before F has fired
or is held (timer/pending/memory/held_rows.py). A row is pending if it was inserted, was not
cancelled, lies after F or is held, and its topic exists. A FIRE returns the same rows on all
replicas. Earlier flushes and merges, and the place of a row (wheel, tiers, run), change nothing.

A cancel marks a row of the memtable dead. For a row of a run or of the frozen memtable it adds a
tombstone. Row and tombstone are dropped together by a FIRE or a merge. The rows of a deleted topic
are dead in the memtables, and are skipped in runs (timer/pending/memory/deleted_topics.py).

Memory: the memtable, the frozen memtable during a flush, the next two seconds of the runs, and 72
bytes of index for each 4,096 rows in runs.

Threads: `write_run`, `write_merge`, `ReadAhead.read` and `Prefetch.read` may run beside all other
calls. All other calls belong to one thread. A manifest has the runs, the fire position and the log
index of one freeze. So a merge may leave out rows that fired before the merge began.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.entries.entry_frame import Entry
from timer.entries.payloads import Fire, Ids, Targets
from timer.files.disk import Disk
from timer.model.columns import (
    I64,
    ROW,
    U32,
    U64,
    Binary,
    Buffers,
    RowArray,
    compact,
    row_bytes,
    values_at,
)
from timer.model.firing_order import START, Position, after, concat, raw
from timer.model.timer_errors import FileDamage
from timer.model.timer_id import SEQ_MAX
from timer.model.units import TopicId, UnixMs
from timer.pending.fire_limits import FiredRows, count_fitting
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.held_rows import HELD_OFFSET_MS, held_position, restore_dues
from timer.pending.memory.key_index import PLAIN_HASHER, KeyHasher
from timer.pending.memory.memtable import Memtable, Peek, RowsToFlush
from timer.pending.prefetch import Prefetch, PrefetchTargets, is_surely_small
from timer.pending.read_view import ReadView
from timer.pending.runs import row_reader
from timer.pending.runs.frozen_memtable import FrozenMemtable
from timer.pending.runs.held_scan import HELD_END, HeldReader, LiveRows, Portion
from timer.pending.runs.merge import Merge, first_rows_of, last_of
from timer.pending.runs.merge_plan import part_size
from timer.pending.runs.read_window import ReadAhead, ReadWindow
from timer.pending.runs.row_reader import Packer, WholeRows
from timer.pending.runs.run import RunMeta
from timer.pending.runs.run_set import NO_LIMIT, Runs
from timer.pending.runs.run_writer import Pace, unpaced

FIRE_CHUNK: Final = 4_096
"""Rows per source that one step of a FIRE looks at."""
DEAD_MAX: Final = 32_768
"""Dead rows and tombstones of runs that a FIRE passes without a thread's help."""

NO_ROWS: Final[RowArray] = np.empty(0, ROW)


class Store:
    """The pending rows of one node. See the module."""

    def __init__(self, disk: Disk, directory: Path, hasher: KeyHasher = PLAIN_HASHER) -> None:
        """Begin empty. `directory`: the state's; runs lie in its `runs/`, created if missing."""
        self.hasher = hasher
        """Hashes keys. The manifest stores its secret, because key files hold hashes."""
        self._runs = Runs(disk, directory / "runs", hasher)
        self._position = START
        self._memtable = Memtable(START, hasher=hasher)
        self._frozen: FrozenMemtable | None = None
        self._leads = False
        self._pending = 0
        self._held = 0
        self._prefetch: Prefetch | None = None
        self._found_due: tuple[Fire, RowArray] | None = None
        """The FIRE that `try_find_due` has searched for, and its rows."""
        self.dead_max, self.chunk = DEAD_MAX, FIRE_CHUNK
        """Local limits of a replica: results do not depend on them. Tests set lower ones."""
        self.dead_rows_passed = 0
        """Rows of runs and tombstones that the last FIRE met and did not take."""

    @classmethod
    def recover(  # noqa: PLR0913 -- fields of the manifest
        cls,
        disk: Disk,
        directory: Path,
        runs: Sequence[RunMeta],
        position: Position,
        pending: int,
        held: int = 0,
        hasher: KeyHasher = PLAIN_HASHER,
    ) -> "Store":
        """Return the store that a manifest describes. Files that it doesn't name are removed.

        `pending`, `held`: numbers of rows; held rows are pending, too.

        Raises:
            CorruptFileError: a run is missing, or its length or footer is wrong.
        """
        store = cls(disk, directory, hasher)
        store._adopt(runs, position, pending)
        store._held = held
        return store

    def _adopt(self, runs: Sequence[RunMeta], position: Position, pending: int) -> None:
        self._runs.adopt(runs, position)
        self._position = position
        self._pending = pending
        self._memtable = self._new_memtable()

    # ---- contents

    @property
    def pending(self) -> int:
        """Number of rows that have not fired, been cancelled or been deleted with a topic."""
        return self._pending

    @property
    def held(self) -> int:
        """Number of pending rows that are held."""
        return self._held

    @property
    def position(self) -> Position:
        """The fire position F; the manifest stores it."""
        return self._position

    @property
    def memtable(self) -> Memtable:
        """The rows since the last flush. The frozen memtable is another one."""
        return self._memtable

    @property
    def runs(self) -> list[RunMeta]:
        """The runs in use, for the manifest."""
        return self._runs.metas

    @property
    def retired(self) -> list[RunMeta]:
        """Runs out of use. Their files stay until `remove`, because an old manifest names them."""
        return self._runs.retired

    @property
    def window_end_ms(self) -> int | None:
        """Pending rows due before this are in memory, except held ones. None: of any due time."""
        return self._runs.window_end_ms

    # ---- topics

    @property
    def deleted_topics(self) -> DeletedTopics:
        """The deleted topics."""
        return self._runs.deleted_topics

    def restore_deleted_topics(self, deleted_topics: DeletedTopics) -> None:
        """Set the deleted topics from a manifest."""
        self._runs.deleted_topics = deleted_topics

    def kill_topic(self, topic: TopicId) -> Iterator[None]:
        """End a topic's timers in memory, in portions, before `drop_topic`."""
        for memtable in self._memtables():
            yield from memtable.kill_topic(topic)

    def drop_topic(self, topic: TopicId, pending: int, held: int) -> None:
        """Delete a topic's timers. `pending`, `held`: the number of pending and of held ones."""
        self._runs.deleted_topics = self.deleted_topics.plus(topic)
        self._pending -= pending
        self._held -= held

    # ---- timers

    def insert(self, rows: RowArray, buf: bytes | memoryview) -> None:
        """Add copies of n rows that point into `buf`. `rows["buf"]` is ignored.

        Seqs ascend and are above all earlier ones. All rows lie after the fire position.
        """
        if len(rows):
            self._memtable.insert(rows, self._runs.new_buf(), buf)
            self._pending += len(rows)

    def hold(self, rows: RowArray, bufs: Buffers) -> None:
        """Add copies of n rows at or before the fire position, as held rows."""
        if not len(rows):
            return
        assert not after(rows["due_ms"], rows["seq"], self._position).any(), self._position
        held, bufs = compact(rows, bufs)
        held = held.copy()
        numbers = {number: self._runs.new_buf() for number in bufs}
        known = np.array(sorted(numbers), np.uint32)
        new = np.array([numbers[number] for number in sorted(numbers)], np.uint32)
        held["buf"] = new[known.searchsorted(held["buf"])]
        held["due_ms"] += HELD_OFFSET_MS
        self._memtable.hold(held, {numbers[number]: buf for number, buf in bufs.items()})
        self._pending += len(rows)
        self._held += len(rows)

    def cancel(self, due_ms: I64, seq: U64) -> tuple[npt.NDArray[np.bool_], RowArray]:
        """Cancel those of n timers that are pending. Return which (n, bool), and their rows.

        Of equal targets the first one hits. The rows have no valid payload, key and headers. The
        sizes of key and headers are valid only if the row was in memory.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        due_ms = self._stored_dues(due_ms, seq)
        if len(seq) == 1:
            return self._cancel_one(due_ms.item(), seq.item())
        hit = np.zeros(len(seq), np.bool_)
        removed: list[RowArray] = []
        targets = self._candidates(due_ms, seq)
        for memtable in self._memtables():
            places = memtable.find(due_ms[targets], seq[targets])
            here = places >= 0
            if here.any():
                mine = targets[here]
                hit[mine] = True
                removed.append(memtable.rows.take(places[here]))
                memtable.kill(places[here])
                if memtable is not self._memtable:
                    self._add_tombstones(removed[-1])
                targets = targets[~here]
        if len(targets):
            found, rows = self._runs.find(due_ms[targets], seq[targets])
            if found.any():
                mine = targets[found]
                hit[mine] = True
                removed.append(rows)
                self._add_tombstones(rows)
        self._pending -= int(np.count_nonzero(hit))
        self._held -= int(np.count_nonzero(hit & (due_ms >= HELD_OFFSET_MS)))
        return hit, restore_dues(concat(removed))

    def _cancel_one(self, due_ms: int, seq: int) -> tuple[npt.NDArray[np.bool_], RowArray]:
        """Cancel one timer; see `cancel`. `due_ms` is the stored due."""
        row, memtable, place = self._find_one(due_ms, seq)
        if len(row):
            if memtable is not None:
                memtable.kill(np.array([place]))
            if memtable is not self._memtable:
                self._add_tombstones(row)
            self._pending -= 1
            self._held -= due_ms >= HELD_OFFSET_MS
        return np.array([len(row) > 0]), restore_dues(row)

    def _find_one(self, due_ms: int, seq: int) -> tuple[RowArray, Memtable | None, int]:
        """Return the row of one timer, its memtable and its place there; no row, None, -1 if none.

        `due_ms` is the stored due. One timer needs few numpy calls: a call takes a microsecond or
        two, and several times as long in a step that follows a wait.
        """
        if (due_ms, seq) > self._position:
            memtables = self._memtables()
            for memtable in memtables:
                if memtable.has_tombstone(due_ms, seq):
                    return NO_ROWS, None, -1
            for memtable in memtables:
                place = memtable.find_one(due_ms, seq)
                if place >= 0:
                    return memtable.rows[place : place + 1].copy(), memtable, place
            return self._runs.find_one(due_ms, seq), None, -1
        return NO_ROWS, None, -1

    def begin_prefetch(
        self, entries: Sequence[Entry], sweep: Portion | None = None, fire: Fire | None = None
    ) -> Prefetch | None:
        """Return the reads that a thread does before these entries are applied; None if few.

        `sweep`: held rows that one of the entries reads. `fire`: one that passes many dead rows.
        """
        runs = self._runs.runs
        if not runs:
            return None
        keys = any(run.meta.keys_size for run in runs)
        readers: list[HeldReader] = []
        if sweep is not None:
            held = self._runs.begin_held(held_position(sweep.seen), sweep.sweep_topics)
            readers += self._reader(held, sweep.rows_max, sweep.bytes_max, HELD_END)
        if fire is not None:
            due = self._runs.begin_due(self._position)
            readers += self._reader(due, fire.rows_max, fire.bytes_max, fire.read_time_ms)
        if not readers and is_surely_small(entries, len(runs), keys=keys):
            return None
        targets = PrefetchTargets(entries, self._stored_dues, keys=keys)
        if not readers and targets.is_small(runs):
            return None
        return Prefetch(runs, targets, readers)

    def is_read_ahead(self, sweep: Portion) -> bool:
        """Return whether the held rows of a portion are in memory already."""
        held = self._runs.begin_held(held_position(sweep.seen), sweep.sweep_topics)
        held.drop_cancelled()
        return not held.needs_read(sweep.rows_max + 1, sweep.bytes_max, HELD_END)

    def _reader(
        self, rows: LiveRows, rows_max: int, bytes_max: int, until_ms: int
    ) -> list[HeldReader]:
        """Return a reader if a thread should read rows of runs first, else an empty list."""
        rows.drop_cancelled()
        if not rows.needs_read(2 * rows_max, 2 * bytes_max, until_ms):
            return []
        # Twice the limit: entries before the FIRE may cancel some rows.
        tombstones = [memtable.tombstones()[:2] for memtable in self._memtables()]
        return [HeldReader(rows, 2 * rows_max, 2 * bytes_max, until_ms, tombstones)]

    def prefetch_of(self, targets: Targets) -> Prefetch | None:
        """Return the reads that a thread does before these timers are looked up and read.

        None: all pending ones of them are in memory.
        """
        if isinstance(targets, Ids):
            due_ms = self._stored_dues(targets.due_ms, targets.seq)
            known = ~after(due_ms, targets.seq, self._position)
            for memtable in self._memtables():
                known |= memtable.find(due_ms, targets.seq) >= 0
        else:
            known = np.zeros(len(targets), np.bool_)
            hashes = self.hasher(targets.topic, targets.key)
            for memtable in self._memtables():
                known[memtable.find_keys(hashes, targets.topic, targets.key)[0]] = True
        if known.all() or not self._runs.runs:
            return None
        return Prefetch(self._runs.runs, PrefetchTargets.of(targets, self._stored_dues))

    def use_prefetch(self, prefetch: Prefetch | None) -> None:
        """Use these answers until the next call. None: use none."""
        self._prefetch = prefetch
        self._runs.use_prefetched(None if prefetch is None else prefetch.timers)

    @contextmanager
    def using_prefetch(self, prefetch: Prefetch | None) -> Iterator[None]:
        """Use these answers in the block only. Entries that are half applied have their own."""
        before = self._prefetch
        self.use_prefetch(prefetch)
        try:
            yield
        finally:
            self.use_prefetch(before)

    def find(self, due_ms: UnixMs, seq: int) -> RowArray | None:
        """Return the row of one timer (1,), valid as in `cancel`; None if it is not pending.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        [due] = self._stored_dues(np.array([due_ms], np.int64), np.array([seq], np.uint64)).tolist()
        row, _, _ = self._find_one(due, seq)
        return restore_dues(row) if len(row) else None

    def find_keys(self, topic: U32, keys: Binary, hashes: U64 | None = None) -> RowArray:
        """Return the pending row with each key in its topic (n,); seq = 0 if there is none.

        `hashes`: of topics and keys (n,); None: computed here. Valid are due, seq, topic, and the
        sizes of payload and key.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        rows = np.zeros(len(topic), ROW)
        if hashes is None:
            hashes = self.hasher(topic, keys)
        for memtable in self._memtables():
            which, places = memtable.find_keys(hashes, topic, keys)
            rows[which] = memtable.rows.take(places)
        missing = np.flatnonzero((rows["seq"] == 0) & (keys.sizes > 0))
        if len(missing):
            which, found = self._runs.find_keys(
                hashes[missing],
                topic[missing],
                values_at(keys, missing),
                self._position,
                self._prefetch,
            )
            dead = self._have_tombstones(found["due_ms"].copy(), found["seq"].copy())
            rows[missing[which[~dead]]] = found[~dead]
        return restore_dues(rows)

    def cancel_rows(self, rows: RowArray) -> None:
        """Cancel n different pending timers. `rows`: found since the last change of the store."""
        seq = rows["seq"].copy()
        due_ms = self._stored_dues(rows["due_ms"].copy(), seq)
        here = np.zeros(len(rows), np.bool_)
        for memtable in self._memtables():
            places = memtable.find(due_ms, seq)
            found = places >= 0
            memtable.kill(places[found])
            here |= found & (memtable is self._memtable)
        if not here.all():
            elsewhere = rows[~here]
            elsewhere["due_ms"] = due_ms[~here]
            self._add_tombstones(elsewhere)
        self._pending -= len(rows)
        self._held -= int(np.count_nonzero(due_ms >= HELD_OFFSET_MS))

    def read(
        self, due_ms: I64, seq: U64, bytes_max: int
    ) -> tuple[WholeRows, npt.NDArray[np.bool_]]:
        """Return rows and bytes of the pending ones of n timers; those left out (n, bool).

        Of equal targets the first counts. A timer is left out if payloads up to and including its
        own exceed `bytes_max` bytes. The first pending timer is always returned.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        due_ms = self._stored_dues(due_ms, seq)
        known, places = self._find_pending(due_ms, seq)
        pending = known["seq"] > 0
        fits = np.cumsum(known["payload_size"], dtype=np.int64) <= bytes_max
        fits[: int(pending.argmax()) + 1] = True
        packer = Packer(len(seq))
        for number, memtable in enumerate(self._memtables()):
            for at in np.flatnonzero((places[number] >= 0) & fits).tolist():
                packer.put(at, known[at], memtable.bufs)
        far = np.flatnonzero(pending & fits & (places < 0).all(axis=0))
        runs, finder = self._runs.runs, self._runs.finder
        row_reader.read_rows(runs, finder, due_ms[far], seq[far], packer, far.tolist())
        whole = packer.packed_rows()
        return WholeRows(restore_dues(whole.rows), whole.blob), pending & ~fits

    def topics(self, due_ms: I64, seq: U64) -> U32:
        """Return the topic of each of n timers (n,); 0 if it is not pending.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        return self._find_pending(self._stored_dues(due_ms, seq), seq)[0]["topic"].astype(np.uint32)

    def _find_pending(self, due_ms: I64, seq: U64) -> tuple[RowArray, npt.NDArray[np.intp]]:
        """Return the rows of the pending ones of n timers (n,); places in memtables (2, n), or -1.

        `due_ms` are stored dues. seq = 0: not pending. Of equal targets the first counts.
        """
        targets = self._candidates(due_ms, seq)
        known = np.zeros(len(seq), ROW)
        places = np.full((2, len(seq)), -1, np.intp)
        for number, memtable in enumerate(self._memtables()):
            found = memtable.find(due_ms[targets], seq[targets])
            here = found >= 0
            places[number, targets[here]] = found[here]
            known[targets[here]] = memtable.rows.take(found[here])
            targets = targets[~here]
        if len(targets):
            found_in_runs, rows = self._runs.find(due_ms[targets], seq[targets])
            known[targets[found_in_runs]] = rows
        return known, places

    def read_view(self) -> ReadView:
        """Return the pending rows of this moment, for a thread to read."""
        tables: list[tuple[Memtable, RowsToFlush | None]] = [(self._memtable, None)]
        if self._frozen is not None:
            tables.append((self._frozen.memtable, self._frozen.rows_to_flush))
        return ReadView(self._position, tables, self._runs.runs, self.deleted_topics)

    def try_find_due(self, fire: Fire) -> bool:
        """Find the rows of a FIRE that is applied next. Return False if that is much work.

        Much work: many dead rows are passed, or files are read. A thread should then read them
        first (`begin_prefetch`).

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        rows = self._find_due(fire, self.dead_max)
        self._found_due = None if rows is None else (fire, rows)
        return rows is not None

    def fire(
        self, read_time_ms: UnixMs, rows_max: int, bytes_max: int, topics_max: int = NO_LIMIT
    ) -> FiredRows:
        """Remove and return the pending rows with due <= `read_time_ms`, in (due, seq) order.

        Limits: `rows_max` rows; `bytes_max` bytes of payloads, keys and headers, except that one
        row is always taken; rows of `topics_max` topics. F moves to the last row if more rows are
        due, else past the read time.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        assert read_time_ms >= self._position.due_ms, (read_time_ms, self._position)
        assert rows_max > 0, rows_max
        fire, found = Fire(read_time_ms, rows_max, bytes_max, topics_max), self._found_due
        self._found_due = None
        rows = found[1] if found is not None and found[0] == fire else self._find_due(fire)
        assert rows is not None
        stop = count_fitting(rows, rows_max, bytes_max, topics_max)
        limited = stop < len(rows)
        if limited:
            rows = raw(rows)[:stop].copy().view(rows.dtype)
        fired = FiredRows(rows, self._bufs_of(rows), limited)
        self._pending -= stop
        self._memtable.count_fired(rows["seq"])
        self._advance_position(last_of(rows) if limited else Position(read_time_ms, SEQ_MAX))
        if not limited:
            self._runs.end_due(self._position)
        return fired

    def _find_due(self, fire: Fire, dead_max: int | None = None) -> RowArray | None:
        """Return the first pending rows that are due, until they exceed a FIRE's limit.

        None: more than `dead_max` (None: no limit) of them are dead, or a run must be read.
        """
        until_ms, rows_max, bytes_max, topics_max = fire
        parts: list[RowArray] = []
        count, size, passed, seen, topics = 0, 0, 0, self._position, set[int]()
        ahead = self._runs.continue_due(seen)
        if ahead is not None:
            ahead.drop_cancelled()
            if ahead.needs_read(rows_max + 1, bytes_max, until_ms):
                if dead_max is not None:
                    return None
                ahead.read(rows_max + 1, bytes_max, until_ms, self._are_cancelled)
        while True:
            if dead_max is not None and ahead is None and self._runs.must_read(seen, until_ms):
                return None
            wanted = min(rows_max + 1 - count, self.chunk)
            rows, horizon, met = self._live_due_rows(seen, until_ms, wanted, ahead)
            passed += met - len(rows)
            self.dead_rows_passed = passed
            if len(rows):
                parts.append(rows)
                count += len(rows)
            if horizon is None:
                return concat(parts)
            size += int(row_bytes(rows).sum())
            topics.update(np.unique(rows["topic"]).tolist())
            if count > rows_max or (size > bytes_max and count > 1) or len(topics) > topics_max:
                return concat(parts)
            if dead_max is not None and passed > dead_max:
                return None
            seen = horizon

    def peek_held(self, portion: Portion) -> FiredRows:
        """Return the first held rows of a portion, in (due, seq) order. They stay in the store.

        Limits are those of `fire`. The next portion has a later `seen`, or begins again. Rows of
        runs are read here unless a thread read them before (`begin_prefetch`).

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        seen, rows_max, bytes_max, sweep_topics, topics_max, swept = portion
        at, topics = held_position(seen), None if sweep_topics is None else sweep_topics.topics
        held = self._runs.begin_held(at, sweep_topics)
        held.drop_cancelled()
        held.read(rows_max + 1, bytes_max, HELD_END, self._are_cancelled)
        parts: list[RowArray] = []
        count, size, more = 0, 0, True
        while more and count <= rows_max and (size <= bytes_max or count <= 1):
            peeks = [table.peek_held(at, rows_max + 1, topics) for table in self._memtables()]
            rows, horizon, _ = first_rows_of([*peeks, held.peek(at, HELD_END, rows_max + 1)])
            assert horizon is None or horizon > at, (horizon, at)
            parts.append(rows)
            count += len(rows)
            size += int(row_bytes(rows).sum())
            more = horizon is not None
            at = horizon or at
        rows = concat(parts)
        stop = count_fitting(rows, rows_max, bytes_max, topics_max, swept)
        limited = stop < len(rows) or more
        rows = raw(rows)[:stop].copy().view(rows.dtype)
        bufs = self._bufs_of(rows)
        if not limited:
            self.end_sweep()
        return FiredRows(restore_dues(rows), bufs, limited)

    def end_sweep(self) -> None:
        """Free the held rows that were read for a sweep. The sweep is over."""
        self._runs.end_held()
        for memtable in self._memtables():
            memtable.end_sweep()

    def next_due(self) -> UnixMs | None:
        """Return the due of the earliest pending row that is not held; None if there is none.

        Cancelled and deleted rows of runs count, so the time may be too early, never too late.

        Raises:
            CorruptFileError: a run must be read, and doesn't verify.
        """
        times = [memtable.next_due() for memtable in self._memtables()]
        times.append(self._runs.next_due())
        due = min((time for time in times if time is not None), default=HELD_OFFSET_MS)
        return UnixMs(due) if due < HELD_OFFSET_MS else None  # held rows do not fire

    # ---- leading

    def lead(self) -> None:
        """Become leader: new rows go into a wheel. Present rows are not moved."""
        self._leads = True
        self._memtable.lead()

    def follow(self) -> None:
        """Become follower: new rows go into tiers."""
        self._leads = False
        self._memtable.follow()

    def begin_read_ahead(self, now_ms: UnixMs) -> ReadAhead | None:
        """Return the rows of runs that a thread should read before they are due; None: none."""
        return self._runs.begin_read_ahead(now_ms)

    def end_read_ahead(self, ahead: ReadAhead) -> None:
        """Use the rows that were read ahead."""
        self._runs.end_read_ahead(ahead)

    def keep_up(self) -> bool:
        """Sort some rows in memory that are due soon. Return whether more are left."""
        return any(memtable.keep_up() for memtable in self._memtables())

    # ---- flushing

    def freeze(self) -> FrozenMemtable:
        """Begin a flush. New rows go into a new memtable. Cheap; one flush at a time.

        The manifest of this moment names the present `runs` and those that the flush writes.
        """
        assert self._frozen is None
        memtable = self._memtable
        numbers = self._runs.new_numbers(memtable.size)
        self._frozen = FrozenMemtable(memtable, numbers, memtable.rows_to_flush())
        self._memtable = self._new_memtable()
        return self._frozen

    def write_run(self, frozen: FrozenMemtable, pace: Pace = unpaced) -> list[ReadWindow]:
        """Write the frozen rows to durable runs, usually one, and open them. For a thread.

        Raises:
            CorruptFileError: a run that was just written doesn't verify.
            DiskFailedError: the process must stop.
        """
        chunks, size = frozen.chunks(), frozen.size
        metas = self._runs.write(frozen.numbers, chunks, part_size(size), pace)
        return self._runs.warm(metas, self._position)

    def install(self, frozen: FrozenMemtable, windows: Iterable[ReadWindow]) -> None:
        """End a flush: the runs replace the frozen memtable."""
        assert frozen is self._frozen
        self._frozen = None
        self._runs.use(windows, self._position)
        self._runs.retire_past(self._position)

    # ---- merging

    def begin_merge(self, size_max: int = NO_LIMIT) -> Merge | None:
        """Return the runs to merge now, of at most `size_max` bytes; one merge at a time.

        None: no merge is needed, the needed one is larger, or one is under way.
        """
        return self._runs.begin_merge(self._position, size_max)

    def write_merge(self, merge: Merge, pace: Pace = unpaced) -> list[ReadWindow]:
        """Write the remaining rows of the runs to durable parts, and open them. For a thread.

        Raises:
            CorruptFileError: a batch doesn't verify.
            DiskFailedError: the process must stop.
        """
        return self._runs.warm(self._runs.write_merge(merge, pace), self._position)

    def install_merge(self, merge: Merge, windows: Iterable[ReadWindow]) -> None:
        """Replace the merged runs by the parts, and retire the runs."""
        self._runs.end_merge(merge, windows, self._position)

    def leave_out(self, damage: FileDamage, merge: Merge | None = None) -> None:
        """Merge and read ahead without the damaged run. `merge` met the damage: it is over."""
        self._runs.leave_out(damage, merge)

    def remove(self, retired: Sequence[RunMeta]) -> None:
        """Remove the files of retired runs. For a thread. No durable manifest names the runs."""
        self._runs.remove(retired)

    def forget(self, retired: Sequence[RunMeta]) -> None:
        """Drop these runs from `retired`, once their files are removed."""
        self._runs.forget(retired)

    # ---- inside

    def _memtables(self) -> list[Memtable]:
        return [self._memtable] if self._frozen is None else [self._memtable, self._frozen.memtable]

    def _new_memtable(self) -> Memtable:
        memtable = Memtable(self._position, hasher=self.hasher)
        if self._leads:
            memtable.lead()
        return memtable

    def _stored_dues(self, due_ms: I64, seq: U64) -> I64:
        """Return the stored dues that the timers have if they are pending."""
        if not self._held:
            return due_ms
        return np.where(after(due_ms, seq, self._position), due_ms, due_ms + HELD_OFFSET_MS)

    def _candidates(self, due_ms: I64, seq: U64) -> npt.NDArray[np.intp]:
        """Return the different targets that may be pending: after F and without a tombstone."""
        candidates = np.flatnonzero(after(due_ms, seq, self._position))
        if len(candidates) > 1:
            # A stable sort: of equal targets the first stays.
            order = np.lexsort((seq[candidates], due_ms[candidates]))
            due, number = due_ms[candidates][order], seq[candidates][order]
            repeated = (due[1:] == due[:-1]) & (number[1:] == number[:-1])
            candidates = np.sort(
                np.concatenate([candidates[order[:1]], candidates[order[1:]][~repeated]])
            )
        return candidates[~self._have_tombstones(due_ms[candidates], seq[candidates])]

    def _add_tombstones(self, rows: RowArray) -> None:
        """Add tombstones for timers that are not in the memtable."""
        self._memtable.add_tombstones(rows["due_ms"], rows["seq"], rows["topic"])
        self._runs.note_cancelled(rows["seq"])

    def _are_cancelled(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        """Return which rows (with stored dues) have a tombstone in a memtable (n, bool)."""
        return self._have_tombstones(rows["due_ms"].copy(), rows["seq"].copy())

    def _have_tombstones(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which timers have a tombstone in a memtable (n, bool)."""
        dead = np.zeros(len(seq), np.bool_)
        for memtable in self._memtables():
            dead |= memtable.have_tombstones(due_ms, seq)
        return dead

    def _live_due_rows(
        self, seen: Position, until_ms: int, count: int, ahead: LiveRows | None = None
    ) -> tuple[RowArray, Position | None, int]:
        """Return the live rows after `seen` that are due, complete up to a position.

        Then that position (None: all), and how many rows of runs and tombstones were met, none
        without runs. `ahead`: rows read ahead of a FIRE, used instead of the loaded rows of runs.
        """
        counted = ahead is None and bool(self._runs.runs)
        peeks: list[Peek] = []
        for memtable in self._memtables():
            peeks += memtable.peeks(seen, until_ms, count, with_tombstones=counted)
        if ahead is None:
            peeks += self._runs.peeks(seen, until_ms, count)
        else:
            peeks.append(ahead.peek(seen, until_ms, count))
        rows, horizon, met = first_rows_of(peeks)
        return self._of_existing_topics(rows), horizon, met

    def _of_existing_topics(self, rows: RowArray) -> RowArray:
        """Return the rows whose topics are not deleted."""
        if self.deleted_topics and (deleted := self.deleted_topics.of(rows["topic"])).any():
            return rows[~deleted]
        return rows

    def _bufs_of(self, rows: RowArray) -> dict[int, bytes | memoryview]:
        numbers = np.sort(rows["buf"])
        numbers = np.concatenate([numbers[:1], numbers[1:][numbers[1:] != numbers[:-1]]])
        sources: list[Buffers] = [memtable.bufs for memtable in self._memtables()]
        sources += self._runs.bufs()
        found: dict[int, bytes | memoryview] = {}
        missing = numbers.tolist()
        for bufs in sources:
            found |= {number: bufs[number] for number in missing if number in bufs}
            if len(found) == len(numbers):
                break
            missing = [number for number in missing if number not in found]
        assert len(found) == len(numbers), (len(found), len(numbers))
        return found

    def _advance_position(self, position: Position) -> None:
        """Move the fire position forward."""
        assert position >= self._position, (position, self._position)
        self._position = position
        for memtable in self._memtables():
            memtable.drop(position)
        self._runs.drop(position)
