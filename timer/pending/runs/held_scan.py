"""Live rows of runs, read in order by a thread ahead of a FIRE.

    runs   |x x . x . . x x x x x x x x x|x x x x . . . . . . . . . .|
           F, or the     kept in memory   through ^   not read yet         x: deleted or cancelled
           sweep  ^

A FIRE takes due rows, and may move a sweep on, which releases held rows (timer/state/pauses.py).
The result follows from the live rows alone, because they are replicated state. Deleted and
cancelled rows are not: one replica's runs may still have millions that another's have dropped. The
work to pass them has no bound, and must not limit a FIRE. So a thread passes them before the FIRE
is applied, and keeps the live rows. Rows that the thread did not bring are read when the FIRE is
applied, with the same result.

For due rows a FIRE needs the thread only if many of the next rows are dead, or were not read ahead
(timer/pending/runs/read_window.py). Memory: twice a FIRE's limit, in rows or in bytes, and a slice
of each run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, ROW, U32, U64, Buffers, RowArray, compact, row_bytes
from timer.model.firing_order import Position, concat, rank
from timer.model.timer_id import SEQ_MAX
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.held_rows import HELD_OFFSET_MS
from timer.pending.memory.memtable import Peek
from timer.pending.runs.merge import first_rows_of
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import Run

END: Final = Position(1 << 60, SEQ_MAX)
"""After all rows, wherever they lie."""
HELD_END: Final = 2 * HELD_OFFSET_MS
"""Above the stored due of every held row."""
IsCancelled = Callable[[RowArray], npt.NDArray[np.bool_]]
"""Returns which rows are cancelled by tombstones in memtables (n, bool)."""


class SweepTopics(NamedTuple):
    """The topics of a sweep that does not serve all topics."""

    topics: frozenset[int]
    others: DeletedTopics
    """All other topics, existing or deleted. The sweep passes over their rows."""


class Portion(NamedTuple):
    """The held rows that one FIRE reads for a sweep."""

    seen: Position
    """The rows after this (due, seq), with the due of the timer's id."""
    rows_max: int
    bytes_max: int
    sweep_topics: SweepTopics | None
    """None: rows of all topics."""
    topics_max: int | None
    """Greatest number of the topics in `swept` whose rows are read. None: no limit."""
    swept: U32
    """Topics that take part in the sweep."""


_NO_ROWS: Final[RowArray] = np.empty(0, ROW)


class ReadRows:
    """Live rows, and the buffers that they point into."""

    __slots__ = ("bufs", "rows", "size")

    def __init__(self, rows: RowArray, bufs: Buffers) -> None:
        self.rows, self.bufs = rows, bufs
        self.size = int(row_bytes(rows).sum())

    def after(self, position: Position) -> RowArray:
        """Return the rows after a position."""
        return self.rows[rank(self.rows["due_ms"], self.rows["seq"], position) :]


class LiveRows:
    """Live rows of some runs, from a position on. See the module. For one thread at a time.

    `skipped_topics`: deleted topics, and those that the sweep is not for.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        skipped_topics: DeletedTopics,
        after: Position,
        new_number: Callable[[], int],
    ) -> None:
        self._runs = {run.meta.number for run in runs}
        self.position = after
        """The position of the FIREs, or of the sweep."""
        self._skipped_topics = skipped_topics
        self._new_number = new_number
        self._windows = [ReadWindow(run, after, new_number) for run in runs]
        self._through = after if runs else END
        """All live rows up to here were read."""
        self._read: list[ReadRows] = []
        self._cancelled: list[U64] = []
        """Seqs of timers that were cancelled since `drop_cancelled`."""

    def continue_from(
        self, after: Position, runs: Sequence[Run], skipped_topics: DeletedTopics
    ) -> bool:
        """Continue from a position with the present runs. Return False if a new start is needed."""
        numbers = {run.meta.number for run in runs}
        if (
            after < self.position
            or not numbers <= self._runs
            or not skipped_topics.covers(self._skipped_topics)
        ):
            return False
        self._windows = [each for each in self._windows if each.run.meta.number in numbers]
        if not self._windows:
            self._through = END
        self.drop_to(after)
        if skipped_topics is not self._skipped_topics:
            self._skipped_topics = skipped_topics
            self._filter(lambda each: each.rows[~skipped_topics.of(each.rows["topic"])])
        return True

    def drop_to(self, position: Position) -> None:
        """Drop the rows up to a position."""
        self.position = position
        self._filter(lambda each: each.after(position))

    def windows_at(self, position: Position) -> list[ReadWindow]:
        """Return the windows to go on with if all read rows have fired, else none."""
        return self._windows if self._through == position else []

    def note_cancelled(self, seq: U64) -> None:
        """Note cancelled timers. Not while a thread reads."""
        if self._read:
            self._cancelled.append(seq.copy())

    def drop_cancelled(self) -> None:
        """Remove the timers noted by `note_cancelled` from the rows that were read."""
        if self._cancelled:
            dead = np.concatenate(self._cancelled)
            self._cancelled = []
            self._filter(lambda each: each.rows[~np.isin(each.rows["seq"], dead)])

    def needs_read(self, rows_max: int, bytes_max: int, until_ms: int) -> bool:
        """Return whether the rows ahead are below both limits, and not yet all that are due."""
        rows = sum(len(each.rows) for each in self._read)
        size = sum(each.size for each in self._read)
        complete = self._through >= Position(until_ms, SEQ_MAX)
        return not complete and rows < rows_max and (size <= bytes_max or rows < 2)

    def read(self, rows_max: int, bytes_max: int, until_ms: int, is_cancelled: IsCancelled) -> None:
        """Read until the live rows ahead reach a limit, or are all with due <= `until_ms`.

        Raises:
            CorruptFileError: a batch doesn't verify.
            FileNotFoundError: a merge has removed the file of a run.
        """
        while self.needs_read(rows_max, bytes_max, until_ms):
            for window in self._windows:
                window.skip(self._skipped_topics)
            peeks = [w.peek(self._through, until_ms, rows_max) for w in self._windows]
            found, through, _ = first_rows_of(peeks)
            found = self._live_rows(found, is_cancelled)
            if len(found):
                self._read.append(self._copy(found))
            self._through = through or Position(until_ms, SEQ_MAX)
            for window in self._windows:
                window.drop(self._through)

    def _filter(self, rows_of: Callable[[ReadRows], RowArray]) -> None:
        remaining: list[ReadRows] = []
        for each in self._read:
            rows = rows_of(each)
            if len(rows):
                remaining.append(each if len(rows) == len(each.rows) else ReadRows(rows, each.bufs))
        self._read = remaining

    def _live_rows(self, rows: RowArray, is_cancelled: IsCancelled) -> RowArray:
        return rows[~(self._skipped_topics.of(rows["topic"]) | is_cancelled(rows))]

    def _copy(self, rows: RowArray) -> ReadRows:
        bufs: dict[int, bytes | memoryview] = {}
        for window in self._windows:
            bufs |= window.bufs
        rows, own = compact(rows, bufs)
        if [*own] == [0]:
            number = self._new_number()
            rows["buf"] = number
            own = {number: own[0]}
        return ReadRows(rows, own)

    def peek(self, after: Position, until_ms: int, count: int) -> Peek:
        """Return the read rows after `after`, at most `count`: see ReadWindow.peek."""
        parts = [part for each in self._read if len(part := each.after(after))]
        rows = concat(parts) if parts else _NO_ROWS
        if len(rows) and rows["due_ms"][-1] > until_ms:  # an earlier read time than before
            rows = rows[: int(rows["due_ms"].searchsorted(until_ms, "right"))]
        if len(rows) > count:
            last = rows[count - 1]
            return Peek(rows[:count], Position(int(last["due_ms"]), int(last["seq"])))
        return Peek(rows, None if self._through.due_ms >= until_ms else self._through)

    def bufs(self) -> Iterator[Buffers]:
        """Yield the buffers that the read rows point into."""
        return (each.bufs for each in self._read)


class HeldReader:
    """The rows of runs that a thread reads before a FIRE is applied."""

    def __init__(
        self,
        rows: LiveRows,
        rows_max: int,
        bytes_max: int,
        until_ms: int,
        tombstones: Sequence[tuple[I64, U64]],
    ) -> None:
        """`tombstones`: (due, seq) of the tombstones in memtables at this moment."""
        self._rows, self._rows_max, self._bytes_max = rows, rows_max, bytes_max
        self._until_ms = until_ms
        self._tombstones = tombstones

    def read(self) -> None:
        """Read the rows. For a thread. The apply step waits for it.

        Raises:
            CorruptFileError: a batch doesn't verify.
        """
        first_ms, last_ms = self._rows.position.due_ms, self._until_ms
        ahead = [seq[(due >= first_ms) & (due <= last_ms)] for due, seq in self._tombstones]
        cancelled = np.sort(np.concatenate([np.empty(0, np.uint64), *ahead]))

        def is_cancelled(rows: RowArray) -> npt.NDArray[np.bool_]:
            if not len(cancelled):
                return np.zeros(len(rows), np.bool_)
            seq = rows["seq"].copy()
            return np.asarray(cancelled.take(cancelled.searchsorted(seq), mode="clip") == seq)

        with suppress(FileNotFoundError):  # merged into other runs, which are read later
            self._rows.read(self._rows_max, self._bytes_max, self._until_ms, is_cancelled)
