"""The store: the pending rows of one node.

    insert --> memtable --freeze--> frozen --write_run (thread)--> run, run, run, ...
                  |                    |                             | window
                  +---------- fire ----+-----------------------------+--> Fired

The fire position F = (due_ms, seq) only moves forward: everything pending at or before F has fired.
A row is pending iff it was inserted, was not cancelled and lies after F. What fires follows from
the rows alone: leader (wheels, windows loaded ahead) and followers (tiers, windows loaded when a
FIRE asks) give the same answer, whatever was flushed and merged when.

Cancelled rows: in a memtable the row is marked dead; for a row in a run, or in the frozen memtable,
a tombstone goes into the memtable, and into a run with it. Row and tombstone annihilate where they
meet, in a FIRE or in a merge. The seqs of timers in one run lie apart from those of every other
run, since flushes follow each other and only neighbours in age are merged.

Memory: the memtable, the frozen one while it is written, two seconds of each run, and 2 MB of keys
per run. Nothing grows with the rows in runs but their batch index (72 bytes each 65,536 rows).

Threads: `write_run` and `write_merge` may run beside everything else; all other calls belong to
one thread. Merges leave out what lies at or before the position of the last *installed* flush, so
that a manifest, taken when a flush is installed, never names a run that lacks rows it needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.columns import I64, U64, Buffers, RowArray, row_bytes
from timer.disk import Disk
from timer.memtable import Memtable, Peek
from timer.merge import Merge, last_of, merged
from timer.order import (
    START,
    Position,
    after,
    annihilate,
    concat,
    fire_order,
    rank,
    raw,
    stable_order,
    tombstones,
)
from timer.run import BATCH_ROWS_MAX, SUFFIX, Finder, Run, RunMeta, is_tombstone
from timer.run_writer import Pace, RunWriter, unpaced
from timer.timer_id import SEQ_MAX
from timer.units import UnixMs
from timer.window import Window

AHEAD_MS: Final = 2_000
"""How far ahead of now the leader copies rows out of runs."""
RUNS_MERGED_AT: Final = 7
"""Merge when there are so many runs: with one more flush before it is done, there are 8."""
MERGE_WIDTH: Final = 4


class Fired(NamedTuple):
    """What one FIRE moves out of the store."""

    rows: RowArray
    """In (due, seq) order."""
    bufs: Buffers
    """Exactly the buffers that `rows` point into."""
    limited: bool
    """More rows are due by the read time."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A memtable that is being flushed, as it was at the freeze."""

    memtable: Memtable
    number: int
    """Of the run that it becomes."""
    position: Position
    """The fire position then."""
    live: npt.NDArray[np.intp]
    """Places of the rows that were pending."""
    graves: tuple[I64, U64]
    """(due, seq) of its tombstones, sorted."""


class Store:
    """See the module."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        """Begin empty. `directory` is the state's; runs lie in its `runs/`, made if missing."""
        self._disk = disk
        self._directory = directory / "runs"
        disk.make_dir(self._directory)
        self._position = START
        self._flushed_position = START
        self._memtable = Memtable(START)
        self._frozen: Frozen | None = None
        self._windows: list[Window] = []  # of the runs, oldest first
        self._retired: list[RunMeta] = []
        self._finder = Finder()
        self._leads = False
        self._pending = 0
        self._next_buf = 0
        self._next_run = 1
        self._merging = False

    @classmethod
    def recover(
        cls,
        disk: Disk,
        directory: Path,
        runs: Sequence[RunMeta],
        position: Position,
        pending: int,
    ) -> "Store":
        """Return the store that a manifest describes; files that it doesn't name are removed.

        Raises:
            CorruptFile: a run is missing, or its length or footer is wrong.
        """
        store = cls(disk, directory)
        store._adopt(runs, position, pending)
        return store

    def _adopt(self, runs: Sequence[RunMeta], position: Position, pending: int) -> None:
        found = [name for name in self._disk.list_dir(self._directory) if name.endswith(SUFFIX)]
        named = {meta.name for meta in runs}
        orphans = [name for name in found if name not in named]
        for name in orphans:
            self._disk.remove(self._directory / name)
        if orphans:
            self._disk.sync_dir(self._directory)
        self._position = self._flushed_position = position
        self._pending = pending
        self._memtable = self._new_memtable()
        self._windows = [self._window(meta) for meta in runs]
        numbers = [int(name.removesuffix(SUFFIX)) for name in found]
        self._next_run = max([*numbers, *(meta.number for meta in runs)], default=0) + 1

    # ---- what it holds

    @property
    def pending(self) -> int:
        """Rows that were inserted, have not fired and were not cancelled."""
        return self._pending

    @property
    def position(self) -> Position:
        """The fire position F; it belongs into the manifest."""
        return self._position

    @property
    def memtable_bytes(self) -> int:
        """Bytes of memory that a flush would free, about; those being flushed not counted."""
        return self._memtable.size

    @property
    def runs(self) -> list[RunMeta]:
        """The runs, oldest first, for the manifest."""
        return [window.run.meta for window in self._windows]

    @property
    def retired(self) -> list[RunMeta]:
        """Runs no longer in use, whose files stay until `remove`: an old manifest names them."""
        return [*self._retired]

    # ---- timers

    def insert(self, rows: RowArray, buf: bytes | memoryview) -> None:
        """Keep n rows that point into `buf`, a copy of each; `rows["buf"]` is ignored.

        Seqs ascend and lie above all earlier ones; all dues lie after the last read time.
        """
        if len(rows):
            self._memtable.insert(rows, self._new_buf(), buf)
            self._pending += len(rows)

    def cancel(self, due_ms: I64, seq: U64) -> tuple[npt.NDArray[np.bool_], RowArray]:
        """Cancel the pending ones of n timers; return which these were (n, bool), and their rows.

        Of a repeated target the first one hits. Of the rows all but payload, key and headers
        themselves is valid; key and headers sizes only where the row was in memory.

        Raises:
            CorruptFile: a run must be read, and doesn't verify.
        """
        hit = np.zeros(len(seq), np.bool_)
        removed: list[RowArray] = []
        asked = self._candidates(due_ms, seq)
        for memtable in self._memtables():
            places = memtable.find(due_ms[asked], seq[asked])
            here = places >= 0
            if here.any():
                mine = asked[here]
                hit[mine] = True
                removed.append(memtable.rows.take(places[here]))
                memtable.kill(places[here])
                if memtable is not self._memtable:
                    self._memtable.bury(due_ms[mine], seq[mine])
                asked = asked[~here]
        if len(asked) and self._windows:
            found, rows = self._find_in_runs(due_ms[asked], seq[asked])
            if found.any():
                mine = asked[found]
                hit[mine] = True
                removed.append(rows)
                self._memtable.bury(due_ms[mine], seq[mine])
        self._pending -= int(np.count_nonzero(hit))
        return hit, concat(removed)

    def find(self, due_ms: UnixMs, seq: int) -> RowArray | None:
        """Return the row of one timer, an array of one as from `cancel`; None if not pending.

        Raises:
            CorruptFile: a run must be read, and doesn't verify.
        """
        due, number = np.array([due_ms], np.int64), np.array([seq], np.uint64)
        if not len(self._candidates(due, number)):
            return None
        for memtable in self._memtables():
            row = memtable.row_at(due, number)
            if len(row):
                return row
        found, rows = self._find_in_runs(due, number)
        return rows if found.any() else None

    def fire(self, read_time_ms: UnixMs, rows_max: int, bytes_max: int) -> Fired:
        """Take out the pending rows with due <= `read_time_ms`, in (due, seq) order, to a limit.

        The limit: `rows_max` rows; `bytes_max` bytes of payloads, keys and headers, but at least
        one row. F moves to the last row if rows are left that are due, else past the read time.

        Raises:
            CorruptFile: a run must be read, and doesn't verify.
        """
        assert read_time_ms >= self._position.due_ms, (read_time_ms, self._position)
        assert rows_max > 0, rows_max
        parts: list[RowArray] = []
        count, size, seen = 0, 0, self._position
        while True:
            rows, horizon = self._due(seen, read_time_ms, rows_max + 1)
            if len(rows):
                parts.append(rows)
                count += len(rows)
            if horizon is None:
                break
            size += int(row_bytes(rows).sum())
            if count > rows_max or (size > bytes_max and count > 1):
                break
            seen = horizon
        rows = concat(parts)
        stop = min(rows_max, len(rows))
        if stop:
            ends = np.cumsum(row_bytes(rows[:stop]))
            if ends[-1] > bytes_max:
                stop = max(1, int(ends.searchsorted(bytes_max, "right")))
        limited = stop < len(rows)
        if limited:
            rows = raw(rows)[:stop].copy().view(rows.dtype)
        fired = Fired(rows, self._bufs_of(rows), limited)
        self._pending -= stop
        self._move(last_of(rows) if limited else Position(read_time_ms, SEQ_MAX))
        return fired

    def next_due(self) -> UnixMs | None:
        """Return the due of the earliest pending row, None without one.

        Of a run's rows the cancelled ones count too: then the time may be earlier, never later.

        Raises:
            CorruptFile: a run must be read, and doesn't verify.
        """
        times = [memtable.next_due() for memtable in self._memtables()]
        times += [window.next_due() for window in self._windows]
        return min((UnixMs(time) for time in times if time is not None), default=None)

    # ---- leading

    def lead(self) -> None:
        """Become the leader's: build the wheels, from what is in memory alone."""
        self._leads = True
        for memtable in self._memtables():
            memtable.lead()

    def follow(self) -> None:
        """Become a follower's: drop the wheels."""
        self._leads = False
        for memtable in self._memtables():
            memtable.follow()

    def preload(self, now_ms: UnixMs) -> None:
        """Copy what the runs hold for the next two seconds into memory.

        Raises:
            CorruptFile: a batch doesn't verify.
        """
        for window in self._windows:
            window.load(now_ms + AHEAD_MS)

    # ---- flushing

    def freeze(self) -> Frozen:
        """Begin a flush: what follows goes into a new memtable. Cheap; one flush at a time."""
        assert self._frozen is None
        memtable = self._memtable
        self._frozen = Frozen(
            memtable, self._new_run(), self._position, memtable.live(), memtable.graves_left()
        )
        self._memtable = self._new_memtable()
        return self._frozen

    def write_run(self, frozen: Frozen, pace: Pace = unpaced) -> RunMeta | None:
        """Write the frozen rows to a durable run; None if there are none. For a thread.

        Raises:
            DiskFailed: the process must stop.
        """
        return self._write(frozen.number, _sorted_rows(frozen), pace)

    def install(self, frozen: Frozen, meta: RunMeta | None) -> None:
        """End a flush: let the run take the place of the frozen memtable.

        `runs` is now what a manifest may name whose other content is of the freeze's index.
        """
        assert frozen is self._frozen
        self._frozen = None
        self._flushed_position = frozen.position
        if meta is not None:
            self._windows.append(self._window(meta))

    # ---- merging. Tiers of size, cut by due time, come instead of this policy in a later release.

    def begin_merge(self) -> Merge | None:
        """Return which runs to merge now, None if there is nothing to gain. One at a time."""
        if self._merging:
            return None
        chosen = [
            window.run for window in self._windows if window.run.meta.last <= self._flushed_position
        ]
        if not chosen and len(self._windows) >= RUNS_MERGED_AT:
            sizes = np.array([meta.size for meta in self.runs])
            sums = np.convolve(sizes, np.ones(MERGE_WIDTH, np.int64), "valid")
            first = int(sums.argmin())
            chosen = [window.run for window in self._windows[first : first + MERGE_WIDTH]]
        if not chosen:
            return None
        self._merging = True
        return Merge(tuple(chosen), self._new_run(), self._flushed_position)

    def write_merge(self, merge: Merge, pace: Pace = unpaced) -> RunMeta | None:
        """Write what is left of the runs to a durable one; None if nothing is. For a thread.

        Raises:
            CorruptFile: a batch doesn't verify.
            DiskFailed: the process must stop.
        """
        return self._write(merge.number, merged(merge), pace)

    def install_merge(self, merge: Merge, meta: RunMeta | None) -> None:
        """Let the new run take the place of the old ones, which are retired."""
        assert self._merging
        self._merging = False
        first = next(i for i, window in enumerate(self._windows) if window.run in merge.runs)
        self._retired += [run.meta for run in merge.runs]
        self._windows = [window for window in self._windows if window.run not in merge.runs]
        if meta is not None:
            self._windows.insert(first, self._window(meta))

    def remove(self, retired: Sequence[RunMeta]) -> None:
        """Remove the files of retired runs. First a manifest must be durable that names none."""
        for meta in retired:
            self._retired.remove(meta)
            self._disk.remove(self._directory / meta.name)
        if retired:
            self._disk.sync_dir(self._directory)

    def close(self) -> None:
        """Let go of all memory; nothing may be called after it."""
        self._windows.clear()
        self._memtable = Memtable(self._position, capacity=1)
        self._frozen = None

    # ---- inside

    def _memtables(self) -> list[Memtable]:
        return [self._memtable] if self._frozen is None else [self._memtable, self._frozen.memtable]

    def _new_memtable(self) -> Memtable:
        memtable = Memtable(self._position)
        if self._leads:
            memtable.lead()
        return memtable

    def _window(self, meta: RunMeta) -> Window:
        run = Run(self._disk, self._directory, meta)
        return Window(run, self._position, self._new_buf)

    def _new_buf(self) -> int:
        self._next_buf = (self._next_buf + 1) & 0xFFFF_FFFF
        return self._next_buf

    def _new_run(self) -> int:
        self._next_run += 1
        return self._next_run - 1

    def _write(
        self, number: int, chunks: Iterator[tuple[RowArray, Buffers]], pace: Pace
    ) -> RunMeta | None:
        writer = RunWriter(self._disk, self._directory, number, pace)
        try:
            for rows, bufs in chunks:
                writer.add(rows, bufs)
            return writer.finish()
        finally:
            writer.close()

    def _candidates(self, due_ms: I64, seq: U64) -> npt.NDArray[np.intp]:
        """Return which targets may be pending, each one once: after F and without a tombstone."""
        asked = np.flatnonzero(after(due_ms, seq, self._position))
        if len(asked) > 1:
            # A stable sort: of equal targets the first stays.
            order = np.lexsort((seq[asked], due_ms[asked]))
            due, number = due_ms[asked][order], seq[asked][order]
            repeated = (due[1:] == due[:-1]) & (number[1:] == number[:-1])
            asked = np.sort(np.concatenate([asked[order[:1]], asked[order[1:]][~repeated]]))
        for memtable in self._memtables():
            asked = asked[~memtable.buried(due_ms[asked], seq[asked])]
        return asked

    def _find_in_runs(self, due_ms: I64, seq: U64) -> tuple[npt.NDArray[np.bool_], RowArray]:
        """Return which timers are in a run and in none cancelled (n, bool), and their rows."""
        rows = np.zeros(len(seq), dtype=self._memtable.rows.dtype)
        timer = np.zeros(len(seq), np.bool_)
        cancelled = np.zeros(len(seq), np.bool_)
        for window in self._windows:
            asked = np.flatnonzero(~timer | (window.run.meta.tombstones > 0))
            found, here = self._finder.find(window.run, due_ms[asked], seq[asked])
            mine, dead = asked[found], is_tombstone(here)
            cancelled[mine[dead]] = True
            timer[mine[~dead]] = True
            rows[mine[~dead]] = here[~dead]
        found = timer & ~cancelled
        return found, rows[found]

    def _due(self, seen: Position, until_ms: int, count: int) -> tuple[RowArray, Position | None]:
        """Return the live rows after `seen` that are due, complete up to the position.

        None: complete.
        """
        peeks: list[Peek] = []
        for memtable in self._memtables():
            peeks.append(memtable.peek(seen, until_ms, count))
            if memtable.grave_count:
                peeks.append(memtable.peek_graves(seen, until_ms, count))
        peeks += [window.peek(seen, until_ms, count) for window in self._windows]
        horizon = min((peek.last for peek in peeks if peek.last is not None), default=None)
        parts = [peek.rows for peek in peeks if len(peek.rows)]
        if horizon is not None:
            parts = [rows[: rank(rows["due_ms"], rows["seq"], horizon)] for rows in parts]
        rows = concat([part for part in parts if len(part)])
        if len(parts) > 1:
            rows = rows.take(fire_order(rows["due_ms"].copy(), rows["seq"].copy()))
        dead = is_tombstone(rows)
        if dead.any():
            rows = rows[annihilate(rows) & ~dead]
        return rows, horizon

    def _bufs_of(self, rows: RowArray) -> dict[int, bytes | memoryview]:
        numbers = np.sort(rows["buf"])
        numbers = np.concatenate([numbers[:1], numbers[1:][numbers[1:] != numbers[:-1]]])
        sources = [memtable.bufs for memtable in self._memtables()]
        sources += [window.bufs for window in self._windows]
        found: dict[int, bytes | memoryview] = {}
        missing = numbers.tolist()
        for bufs in sources:
            found |= {number: bufs[number] for number in missing if number in bufs}
            if len(found) == len(numbers):
                break
            missing = [number for number in missing if number not in found]
        assert len(found) == len(numbers), (len(found), len(numbers))
        return found

    def _move(self, position: Position) -> None:
        """Move the fire position forward."""
        assert position >= self._position, (position, self._position)
        self._position = position
        for memtable in self._memtables():
            memtable.drop(position)
        for window in self._windows:
            window.drop(position)


def _sorted_rows(frozen: Frozen) -> Iterator[tuple[RowArray, Buffers]]:
    """Yield the rows and tombstones of a frozen memtable in (due, seq) order, in chunks."""
    rows, live = frozen.memtable.rows, frozen.live
    due_ms = rows["due_ms"][live]
    grave_due, grave_seq = frozen.graves
    if len(grave_due):
        seq = np.concatenate([rows["seq"][live], grave_seq])
        order = fire_order(np.concatenate([due_ms, grave_due]), seq)
    else:
        order = stable_order(due_ms)
    for start in range(0, len(order), BATCH_ROWS_MAX):
        places = order[start : start + BATCH_ROWS_MAX]
        grave = places[places >= len(live)] - len(live)
        chunk = np.empty(len(places), rows.dtype)
        alive = places < len(live)
        raw(chunk)[alive] = raw(rows).take(live.take(places[alive]))
        raw(chunk)[~alive] = raw(tombstones(grave_due[grave], grave_seq[grave]))
        yield chunk, frozen.memtable.bufs
