"""The runs of a store: their files, their read windows, and how merges reduce them.

    flush --open--> in use --merged, or all fired--> retired --no manifest names them--> removed
                      | read window
                      +--> peek, find

Files of retired runs stay while a manifest names them, because a restart from it reads them. The
order of the runs has no meaning: a timer and its tombstone have the same (due, seq), in any two
runs.

Threads: `write` and the functions that it calls, `ReadAhead.read` and `PrefetchedTimers.read` may
run beside all other calls.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from timer.files.disk import Disk
from timer.model.columns import I64, ROW, U32, U64, Binary, Buffers, RowArray
from timer.model.firing_order import Position, after, find
from timer.model.timer_errors import CorruptFileError, FileDamage, UnknownVersionError
from timer.model.units import UnixMs
from timer.pending.memory.deleted_topics import NONE_DELETED, DeletedTopics
from timer.pending.memory.held_rows import HELD_OFFSET_MS
from timer.pending.memory.key_index import PLAIN_HASHER, KeyHasher
from timer.pending.memory.memtable import Peek
from timer.pending.memory.tiers import NEVER
from timer.pending.runs import key_file
from timer.pending.runs.held_scan import LiveRows, SweepTopics
from timer.pending.runs.merge import Merge, merged_rows
from timer.pending.runs.merge_plan import PART_SIZE, Sketch, part_size, plan
from timer.pending.runs.read_window import LOADED_SIZE_MAX, ReadAhead, ReadWindow
from timer.pending.runs.row_reader import find_in_run
from timer.pending.runs.run import SUFFIX, TOPIC_ROWS, Finder, Range, Run, RunMeta, is_tombstone
from timer.pending.runs.run_writer import Pace, write_parts

AHEAD_MS: Final = 2_000
"""Rows that are due within this time are copied out of runs."""
REFILL_MS: Final = 1_000
"""Reading continues when the loaded rows reach less far than this."""
WARM_MS: Final = 5_000
"""Span after the fire position that a new run loads before use. Firing may lag by so much."""
WARM_SIZE_MAX: Final = 4 << 20
NO_LIMIT: Final = 1 << 62
"""Bytes of a merge, for callers without a limit."""


class Candidates(Protocol):
    """The timers with some keys, read before: timer/pending/prefetch.py."""

    def names(self, topic: U32, keys: Binary) -> list[tuple[int, bytes]] | None:
        """Return (topic, key) for each key; None if some were not looked up."""

    def candidates(
        self, run: Run, names: list[tuple[int, bytes]]
    ) -> tuple[npt.NDArray[np.intp], RowArray] | None:
        """Return the result of `row_reader.find_in_run`; None if the run was not read."""


class PrefetchedTimers:
    """Timers that a thread reads from runs before they are needed. Runs never change."""

    def __init__(
        self, runs: Sequence[Run], due_ms: I64, seq: U64, rows: npt.NDArray[np.bool_]
    ) -> None:
        """`rows`: which timers' rows are needed (n, bool); of the others only tombstones are."""
        # The first one counts of a timer that is there twice: that whose row is needed.
        order = np.lexsort((~rows, seq, due_ms))
        self.due_ms, self.seq = due_ms[order], seq[order]
        self._runs = runs
        self._rows = rows[order]
        self._found: dict[int, tuple[npt.NDArray[np.bool_], RowArray]] = {}

    def read(self) -> None:
        """Find the timers in each run. For a thread.

        Raises:
            CorruptFileError: a head doesn't verify.
        """
        finder = Finder()
        for run in self._runs:
            targets = np.flatnonzero(self._rows | bool(run.meta.tombstones))
            if not len(targets):
                continue
            with suppress(FileNotFoundError):  # a merge has removed the run
                here, rows = finder.find(run, self.due_ms[targets], self.seq[targets])
                found, every = np.zeros(len(self.seq), np.bool_), np.zeros(len(self.seq), ROW)
                found[targets[here]], every[targets[here]] = True, rows
                self._found[run.meta.number] = found, every

    def answer(
        self, run: Run, due_ms: I64, seq: U64
    ) -> tuple[npt.NDArray[np.bool_], RowArray] | None:
        """Return the result of Finder.find; None if a timer or the run was not read."""
        known = self._found.get(run.meta.number)
        place = find(self.due_ms, self.seq, due_ms, seq)
        if known is None or (place < 0).any():
            return None
        if not (run.meta.tombstones or self._rows[place].all()):
            return None
        found, rows = known[0][place], known[1][place]
        return found, rows[found]


class Runs:
    """See the module. `directory` is for runs alone; it is created if missing."""

    def __init__(self, disk: Disk, directory: Path, hasher: KeyHasher = PLAIN_HASHER) -> None:
        self._disk = disk
        self._hasher = hasher
        self._directory = directory
        disk.make_dir(directory)
        self._windows: list[ReadWindow] = []
        self._retired: list[RunMeta] = []
        self.finder = Finder()
        """For look-ups on the event loop."""
        self._prefetched: PrefetchedTimers | None = None
        self._merge: Merge | None = None
        self._damaged: set[int] = set()
        """Numbers of runs that are neither merged nor read ahead any more."""
        self.deleted_topics: DeletedTopics = NONE_DELETED
        """The deleted topics. `peeks` still returns their rows."""
        self._next_due: int | None = None
        """Least due of a row after the fire position. NEVER: no such row. None: unknown."""
        self._deleted_rows_by_run: dict[int, tuple[DeletedTopics, int]] = {}
        """Number of a run -> (deleted topics, how many of its rows belong to them)."""
        self._held_rows: LiveRows | None = None
        """The rows of runs that a sweep reads."""
        self._due_rows: LiveRows | None = None
        """The rows of runs for FIREs, if many due rows are dead or were not loaded in time."""
        self._next_buf = count(1)
        self._next_number = 1

    def adopt(self, metas: Sequence[RunMeta], position: Position) -> None:
        """Use the runs that a manifest names. Remove all other files.

        Raises:
            CorruptFileError: a run is missing, or its length or footer is wrong.
        """
        suffixes = (SUFFIX, key_file.SUFFIX)
        found = [name for name in self._disk.list_dir(self._directory) if name.endswith(suffixes)]
        orphans = [*{*found} - {name for meta in metas for name in meta.names}]
        for name in orphans:
            self._disk.remove(self._directory / name)
        if orphans:
            self._disk.sync_dir(self._directory)
        self._windows = [self._open(meta, position) for meta in metas]
        self._next_due = None
        numbers = [int(name.partition(".")[0]) for name in found]
        self._next_number = max([*numbers, *(meta.number for meta in metas)], default=0) + 1

    @property
    def runs(self) -> list[Run]:
        """The runs in use."""
        return [window.run for window in self._windows]

    @property
    def metas(self) -> list[RunMeta]:
        """The runs in use, for the manifest."""
        return [run.meta for run in self.runs]

    @property
    def retired(self) -> list[RunMeta]:
        """The runs that are out of use and still have files."""
        return [*self._retired]

    @property
    def loaded_size(self) -> int:
        """Bytes of memory that the read windows use."""
        return sum(window.size for window in self._windows)

    def new_buf(self) -> int:
        """Return a number for a buffer that rows point into. For any thread."""
        return next(self._next_buf) & 0xFFFF_FFFF

    def new_numbers(self, size: int) -> range:
        """Return numbers for the parts of a run of `size` bytes."""
        first = self._next_number
        self._next_number += size // PART_SIZE + 3  # held rows begin a part of their own
        return range(first, self._next_number)

    @property
    def window_end_ms(self) -> int | None:
        """All rows due before this are loaded, except held ones. None: rows of any due time."""
        ends = (
            each.end_ms for each in self._windows if each.run.meta.first.due_ms < HELD_OFFSET_MS
        )
        return min((end for end in ends if end is not None), default=None)

    # ---- reading

    def peeks(self, after: Position, until_ms: int, rows_max: int) -> Iterator[Peek]:
        """Yield the first due rows after `after` of each run: see ReadWindow.peek."""
        for window in self._windows:
            if window.run.meta.first.due_ms <= until_ms:
                yield window.peek(after, until_ms, rows_max)

    def bufs(self) -> Iterator[Buffers]:
        """Yield the buffers that the rows of `peeks`, `begin_held` and `begin_due` point into."""
        read = [each.bufs() for each in (self._held_rows, self._due_rows) if each is not None]
        return chain((window.bufs for window in self._windows if window.bufs), *read)

    def must_read(self, after: Position, until_ms: int) -> bool:
        """Return whether `peeks` has to read a file."""
        return any(window.must_read(after, until_ms) for window in self._windows)

    def begin_due(self, after: Position) -> LiveRows:
        """Return the live rows after the fire position, for a thread to read."""
        rows = self.continue_due(after)
        if rows is None:
            rows = LiveRows(self._due_runs(after), self.deleted_topics, after, self.new_buf)
            self._due_rows = rows
        return rows

    def continue_due(self, after: Position) -> LiveRows | None:
        """Go on with the live rows that a thread has read. None: the caller uses `peeks`."""
        if self._due_rows is not None and not self._due_rows.continue_from(
            after, self._due_runs(after), self.deleted_topics
        ):
            self._due_rows = None
        return self._due_rows

    def _due_runs(self, after: Position) -> list[Run]:
        runs = [each for each in self.runs if each.meta.first.due_ms < HELD_OFFSET_MS]
        return [run for run in runs if run.meta.last > after]

    def end_due(self, position: Position) -> None:
        """Note that all due rows up to here have fired."""
        if self._due_rows is None:
            return
        found = {id(window.run): window for window in self._due_rows.windows_at(position)}
        for at, window in enumerate(self._windows):
            if window.must_seek and id(window.run) in found:
                self._windows[at] = found[id(window.run)]
        self._due_rows = None

    def note_cancelled(self, seq: U64) -> None:
        """Note that these timers have tombstones."""
        for each in (self._held_rows, self._due_rows):
            if each is not None:
                each.note_cancelled(seq)

    def begin_held(self, after: Position, sweep_topics: SweepTopics | None) -> LiveRows:
        """Return the held rows from a position on: of the sweep's topics, or of all (None)."""
        skipped_topics = self.deleted_topics if sweep_topics is None else sweep_topics.others
        runs = [
            run
            for run in self.runs
            if run.meta.last.due_ms >= HELD_OFFSET_MS and run.meta.last > after
        ]
        runs = [run for run in runs if _count_rows_of(run.meta, skipped_topics) < run.meta.rows]
        if self._held_rows is None or not self._held_rows.continue_from(
            after, runs, skipped_topics
        ):
            self._held_rows = LiveRows(runs, skipped_topics, after, self.new_buf)
        return self._held_rows

    def end_held(self) -> None:
        """Free the held rows that were read."""
        self._held_rows = None

    def next_due(self) -> int | None:
        """Return the due of the first row of all runs; None if there is none."""
        if self._next_due is None:  # each step asks for it; only runs and F change it
            dues = (w.next_due() for w in self._windows)
            self._next_due = min((due for due in dues if due is not None), default=NEVER)
        return None if self._next_due == NEVER else self._next_due

    def drop(self, through: Position) -> None:
        """Move the fire position."""
        if self._next_due is not None and self._next_due <= through.due_ms:
            self._next_due = None
        for window in self._windows:
            window.drop(through)

    def find(self, due_ms: I64, seq: U64) -> tuple[npt.NDArray[np.bool_], RowArray]:
        """Return which timers have a row and no tombstone in runs (n, bool), and their rows.

        Raises:
            CorruptFileError: a head doesn't verify.
        """
        if len(seq) == 1:
            row = self.find_one(due_ms.item(), seq.item())
            return np.array([len(row) > 0]), row
        rows = np.zeros(len(seq), ROW)
        timer = np.zeros(len(seq), np.bool_)
        cancelled = np.zeros(len(seq), np.bool_)
        ranges = Range.of(due_ms, seq)
        for run in self.runs:
            if not ranges.overlaps(run.meta):
                continue
            targets = np.flatnonzero(~timer | (run.meta.tombstones > 0))
            found, here = self._find(run, due_ms[targets], seq[targets])
            mine, dead = targets[found], is_tombstone(here)
            cancelled[mine[dead]] = True
            timer[mine[~dead]] = True
            rows[mine[~dead]] = here[~dead]
        found = timer & ~cancelled & ~self.deleted_topics.of(rows["topic"])
        return found, rows[found]

    def find_one(self, due_ms: int, seq: int) -> RowArray:
        """Return the row of one timer that has a row and no tombstone in runs, or no row.

        Raises:
            CorruptFileError: a head doesn't verify.
        """
        none = timer = np.empty(0, ROW)
        for window in self._windows:
            run, meta = window.run, window.run.meta
            if not meta.may_contain(due_ms, seq) or (len(timer) and not meta.tombstones):
                continue
            if self._prefetched is None:
                row = self.finder.find_one(run, due_ms, seq)
            else:
                _, row = self._find(run, np.array([due_ms]), np.array([seq], np.uint64))
            if not len(row):
                continue
            if is_tombstone(row)[0]:
                return none
            timer = row
        return (
            none
            if len(timer) and self.deleted_topics and self.deleted_topics.of(timer["topic"])[0]
            else timer
        )

    def _find(self, run: Run, due_ms: I64, seq: U64) -> tuple[npt.NDArray[np.bool_], RowArray]:
        known = None if self._prefetched is None else self._prefetched.answer(run, due_ms, seq)
        return known or self.finder.find(run, due_ms, seq)

    def find_keys(
        self,
        hashes: U64,
        topic: U32,
        keys: Binary,
        position: Position,
        prefetch: "Candidates | None",
    ) -> tuple[npt.NDArray[np.intp], RowArray]:
        """Return (number of the key, row) of the timers after `position` with the keys.

        Timers with a tombstone in a run are left out. Valid are due, seq, topic, and the sizes of
        payload and key.

        Raises:
            CorruptFileError: a key file, key or head doesn't verify.
        """
        which: list[npt.NDArray[np.intp]] = [np.empty(0, np.intp)]
        parts: list[RowArray] = [np.empty(0, ROW)]
        names = None if prefetch is None or not self.runs else prefetch.names(topic, keys)
        for run in self.runs:
            if not run.meta.keys_size or run.meta.last <= position:
                continue
            known = None if prefetch is None or names is None else prefetch.candidates(run, names)
            number, rows = known or find_in_run(run, hashes, topic, keys)
            if not len(number):
                continue
            live = after(rows["due_ms"], rows["seq"], position)
            which.append(number[live])
            parts.append(rows[live])
        found, rows = np.concatenate(which), np.concatenate(parts)
        live = ~self._have_tombstones(rows["due_ms"].copy(), rows["seq"].copy())
        live &= ~self.deleted_topics.of(rows["topic"])
        return found[live], rows[live]

    def _have_tombstones(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which timers have a tombstone in a run (n, bool)."""
        dead = np.zeros(len(seq), np.bool_)
        for run in self.runs:
            if run.meta.tombstones and len(seq):
                targets = np.flatnonzero(~dead)
                found, here = self._find(run, due_ms[targets], seq[targets])
                dead[targets[found]] |= is_tombstone(here)
        return dead

    def use_prefetched(self, timers: PrefetchedTimers | None) -> None:
        """Use these answers until the next call."""
        self._prefetched = timers

    # ---- reading ahead

    def begin_read_ahead(self, now_ms: UnixMs) -> ReadAhead | None:
        """Return the rows that a thread should load for the next two seconds; None: none now."""
        size_max = LOADED_SIZE_MAX - self.loaded_size
        undamaged = [w for w in self._windows if w.run.meta.number not in self._damaged]
        if size_max <= 0 or not any(
            window.has_unloaded(now_ms + REFILL_MS) for window in undamaged
        ):
            return None
        until_ms = now_ms + AHEAD_MS
        return ReadAhead([w for w in undamaged if w.has_unloaded(until_ms)], until_ms, size_max)

    def end_read_ahead(self, ahead: ReadAhead) -> None:
        """Use the rows that were loaded."""
        ahead.install(self._windows)

    # ---- writing

    def write(
        self, numbers: range, chunks: Iterable[tuple[RowArray, Buffers]], size: int, pace: Pace
    ) -> list[RunMeta]:
        """Write sorted rows to durable runs of about `size` bytes each. For a thread.

        Raises:
            CorruptFileError: a chunk comes from a run that doesn't verify.
            DiskFailedError: the process must stop.
        """
        place = self._disk, self._directory, iter(numbers)
        return write_parts(*place, chunks, size, pace, self._hasher)

    def warm(self, metas: Iterable[RunMeta], position: Position) -> list[ReadWindow]:
        """Open new runs and load the rows that are due soon, before use. For a thread.

        Raises:
            CorruptFileError: a run that was just written doesn't verify.
        """
        windows = [self._open(meta, position) for meta in metas]
        for window in windows:
            window.load(position.due_ms + WARM_MS, WARM_SIZE_MAX)
        return windows

    def _open(self, meta: RunMeta, position: Position) -> ReadWindow:
        run = Run(self._disk, self._directory, meta, self._hasher)
        return ReadWindow(run, position, self.new_buf)

    def use(self, windows: Iterable[ReadWindow], position: Position) -> None:
        """Begin to use new runs, at the fire position."""
        self._next_due = None
        for window in windows:
            window.drop(position)
            self._windows.append(window)

    def retire_past(self, position: Position) -> None:
        """Retire, without reading, the runs whose rows are all fired or of deleted topics."""
        merging = set() if self._merge is None else {id(run) for run in self._merge.runs}
        past = [
            window
            for window in self._windows
            if (meta := window.run.meta).last <= position or self._deleted_rows(meta) == meta.rows
        ]
        self._retire([window for window in past if id(window.run) not in merging])

    def _retire(self, windows: Sequence[ReadWindow]) -> None:
        self._next_due = None
        retired = {id(window) for window in windows}
        self._retired += [window.run.meta for window in windows]
        self._windows = [window for window in self._windows if id(window) not in retired]
        for window in windows:
            self._deleted_rows_by_run.pop(window.run.meta.number, None)

    def _deleted_rows(self, meta: RunMeta) -> int:
        """Return how many rows of a run, tombstones included, belong to deleted topics."""
        if not self.deleted_topics:
            return 0
        known = self._deleted_rows_by_run.get(meta.number)
        if known is None or known[0] is not self.deleted_topics:
            known = self._deleted_rows_by_run[meta.number] = (
                self.deleted_topics,
                _count_rows_of(meta, self.deleted_topics),
            )
        return known[1]

    def forget(self, retired: Sequence[RunMeta]) -> None:
        """Drop these runs from `retired`, once their files are removed."""
        numbers = {meta.number for meta in retired}
        self._retired = [meta for meta in self._retired if meta.number not in numbers]

    def remove(self, retired: Sequence[RunMeta]) -> None:
        """Remove the files of retired runs. For a thread. No durable manifest names the runs."""
        for meta in retired:
            for name in meta.names:
                with suppress(FileNotFoundError):  # gone already, as it should be
                    self._disk.remove(self._directory / name)
        if retired:
            self._disk.sync_dir(self._directory)

    # ---- merging

    def begin_merge(self, position: Position, size_max: int = NO_LIMIT) -> Merge | None:
        """Return the runs to merge now; None: none within `size_max`, or one is under way.

        Rows at or before `position`, the fire position, and rows of deleted topics are left out.
        """
        if self._merge is not None:
            return None
        live = [run for run in self.runs if run.meta.last > position]
        live = [run for run in live if run.meta.number not in self._damaged]
        sketches = [_sketch(run, position, self._deleted_rows(run.meta)) for run in live]

        def fits(places: Sequence[int]) -> bool:
            size = sum(live[number].size_after(position) for number in places)
            return _merged_size(size, [sketches[number] for number in places]) <= size_max

        chosen = tuple(live[number] for number in plan(sketches, fits))
        if not chosen:
            return None
        size = sum(run.size_after(position) for run in chosen)
        self._merge = Merge(
            chosen, self.new_numbers(size), part_size(size), position, self.deleted_topics
        )
        return self._merge

    def write_merge(self, merge: Merge, pace: Pace) -> list[RunMeta]:
        """Write the remaining rows of the runs, in parts. For a thread.

        Raises:
            CorruptFileError: a batch doesn't verify. The parts are removed.
            DiskFailedError: the process must stop.
        """
        try:
            return self.write(merge.numbers, merged_rows(merge), merge.part_size, pace)
        except (CorruptFileError, UnknownVersionError):
            for name in self._disk.list_dir(self._directory):
                number = name.partition(".")[0]
                if number.isdecimal() and int(number) in merge.numbers:
                    self._disk.remove(self._directory / name)
            raise

    def end_merge(self, merge: Merge, windows: Iterable[ReadWindow], position: Position) -> None:
        """Replace the merged runs by the parts, and retire the runs."""
        assert merge is self._merge
        self._merge = None
        runs = {id(run) for run in merge.runs}
        self._retire([window for window in self._windows if id(window.run) in runs])
        self.use(windows, position)

    def leave_out(self, damage: FileDamage, merge: Merge | None) -> None:
        """Merge and read ahead without the damaged run. `merge` met the damage: it is over."""
        name = Path(str(damage.path)).name
        damaged = {run.meta.number for run in self.runs if name in run.meta.names}
        if merge is not None:
            assert merge is self._merge
            self._merge = None
            damaged = damaged or {run.meta.number for run in merge.runs}  # one of the parts
        self._damaged |= damaged


def _sketch(run: Run, position: Position, deleted_rows: int) -> Sketch:
    meta = run.meta
    rows = run.rows_after(position)
    tombstones, deleted_rows = (
        count * rows // meta.rows for count in (meta.tombstones, deleted_rows)
    )
    return Sketch(max(meta.first, position), meta.last, meta.size, rows, tombstones, deleted_rows)


def _merged_size(size: int, runs: Sequence[Sketch]) -> int:
    """Return about how many bytes a merge of `runs` writes. They have `size` bytes.

    A tombstone removes one timer. Tombstones of timers in other runs stay.
    """
    tombstones = sum(run.tombstones for run in runs)
    timers = sum(max(0, run.rows - run.tombstones - run.deleted_rows) for run in runs)
    if not tombstones and not any(run.deleted_rows for run in runs):
        return size
    share = max(0, timers - tombstones) / max(1, sum(run.rows - run.tombstones for run in runs))
    return int(size * share) + tombstones * ROW.itemsize


def _count_rows_of(meta: RunMeta, topics: DeletedTopics) -> int:
    """Return how many rows of a run, tombstones included, belong to these topics."""
    if not topics:
        return 0
    table = np.frombuffer(meta.topics, TOPIC_ROWS)
    mine = table[topics.of(table["topic"])]
    return int(mine["timers"].sum(dtype=np.int64) + mine["tombstones"].sum(dtype=np.int64))
