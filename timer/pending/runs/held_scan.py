"""The rows of runs that live, in order, read ahead of a FIRE by a thread.

    runs   |x x . x . . x x x x x x x x x|x x x x . . . . . . . . . .|
           F, or the     kept in memory   through ^   not read yet         x: gone, or cancelled
           sweep  ^

What fires, and what a sweep lets go of (timer/state/pauses.py), follows from the rows that live:
they are state. Those that are gone, or were cancelled, may have left a replica's runs long ago and
lie in another's by the million; so how many of them a FIRE passes must not count for what it does,
and has no bound. Therefore a thread passes them before the FIRE is folded, and keeps what lives;
what it did not bring is read then: the same rows, only later. A FIRE needs it for what is due only
where many of the next rows are dead, or were not read ahead (timer/pending/runs/read_window.py).
Memory: twice what a FIRE takes, in rows or in bytes, and a slice of each run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, ROW, U64, Buffers, RowArray, compact, row_bytes
from timer.model.firing_order import Position, concat, rank
from timer.model.timer_id import SEQ_MAX
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.held_rows import ASIDE
from timer.pending.memory.memtable import Peek
from timer.pending.runs.merge import first_of
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import Run

END: Final = Position(1 << 60, SEQ_MAX)
"""After all rows, wherever they lie."""
HELD_END: Final = 2 * ASIDE
"""Held rows are due before it."""
Dead = Callable[[RowArray], npt.NDArray[np.bool_]]
"""Tells which rows tombstones in memtables cancel (n, bool)."""


class Only(NamedTuple):
    """Whose rows a sweep looks at, if not at everybody's."""

    topics: frozenset[int]
    others: DeletedTopics
    """All other topics that there are, or were: as good as gone for it."""


class Portion(NamedTuple):
    """What one FIRE lets a sweep look at."""

    seen: Position
    """After it, of times as ids say them."""
    rows_max: int
    bytes_max: int
    only: Only | None = None
    """None: at all that is held."""


_NO_ROWS: Final[RowArray] = np.empty(0, ROW)


class ReadRows:
    """Rows that live, and exactly what they point into."""

    __slots__ = ("bufs", "rows", "size")

    def __init__(self, rows: RowArray, bufs: Buffers) -> None:
        self.rows, self.bufs = rows, bufs
        self.size = int(row_bytes(rows).sum())

    def after(self, position: Position) -> RowArray:
        """Return those after a position."""
        return self.rows[rank(self.rows["due_ms"], self.rows["seq"], position) :]


class LiveRows:
    """See the module. Of some runs, from a position on; for one thread at a time.

    `gone`: whose rows are passed over: topics that were deleted, and those the sweep is not for.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        gone: DeletedTopics,
        after: Position,
        new_number: Callable[[], int],
    ) -> None:
        self._runs = {run.meta.number for run in runs}
        self.at = after
        """Where the FIREs, or the sweep, are."""
        self._gone = gone
        self._new_number = new_number
        self._windows = [ReadWindow(run, after, new_number) for run in runs]
        self._through = after if runs else END
        """All that lives up to here was read."""
        self._kept: list[ReadRows] = []
        self._cancelled: list[U64] = []
        """Seqs of what was cancelled since `thin`."""

    def go_on(self, after: Position, runs: Sequence[Run], gone: DeletedTopics) -> bool:
        """It has come so far, and these are the runs now; return False to begin anew."""
        numbers = {run.meta.number for run in runs}
        if after < self.at or not numbers <= self._runs or not gone.covers(self._gone):
            return False
        self._windows = [each for each in self._windows if each.run.meta.number in numbers]
        if not self._windows:
            self._through = END
        self.pass_to(after)
        if gone is not self._gone:
            self._gone = gone
            self._keep(lambda each: each.rows[~gone.of(each.rows["topic"])])
        return True

    def pass_to(self, position: Position) -> None:
        """Let go of what lies up to a position."""
        self.at = position
        self._keep(lambda each: each.after(position))

    def windows_at(self, position: Position) -> list[ReadWindow]:
        """Return the windows, if all that was read has fired: they go on from there."""
        return self._windows if self._through == position else []

    def cancel(self, seq: U64) -> None:
        """These timers are cancelled; not while a thread reads."""
        if self._kept:
            self._cancelled.append(seq.copy())

    def thin(self) -> None:
        """Leave out what was cancelled of what was read."""
        if self._cancelled:
            dead = np.concatenate(self._cancelled)
            self._cancelled = []
            self._keep(lambda each: each.rows[~np.isin(each.rows["seq"], dead)])

    def lacks(self, rows_max: int, bytes_max: int, until_ms: int) -> bool:
        """Return whether neither so many rows nor bytes of theirs lie ahead, nor all due."""
        rows = sum(len(kept.rows) for kept in self._kept)
        size = sum(kept.size for kept in self._kept)
        complete = self._through >= Position(until_ms, SEQ_MAX)
        return not complete and rows < rows_max and (size <= bytes_max or rows < 2)

    def read(self, rows_max: int, bytes_max: int, until_ms: int, dead: Dead) -> None:
        """Read on until so many rows that live, or bytes of theirs, lie ahead, or all that is due.

        Raises:
            CorruptFile: a batch doesn't verify.
            FileNotFoundError: a run was merged away, and its file removed.
        """
        while self.lacks(rows_max, bytes_max, until_ms):
            for window in self._windows:
                window.skip(self._gone)
            peeks = [w.peek(self._through, until_ms, rows_max) for w in self._windows]
            found, through, _ = first_of(peeks)
            found = self._living(found, dead)
            if len(found):
                self._kept.append(self._copied(found))
            self._through = through or Position(until_ms, SEQ_MAX)
            for window in self._windows:
                window.drop(self._through)

    def _keep(self, left: Callable[[ReadRows], RowArray]) -> None:
        kept: list[ReadRows] = []
        for each in self._kept:
            rows = left(each)
            if len(rows):
                kept.append(each if len(rows) == len(each.rows) else ReadRows(rows, each.bufs))
        self._kept = kept

    def _living(self, rows: RowArray, dead: Dead) -> RowArray:
        return rows[~(self._gone.of(rows["topic"]) | dead(rows))]

    def _copied(self, rows: RowArray) -> ReadRows:
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
        """Return what was read after `after`, up to `count` rows: see Window.peek."""
        parts = [part for kept in self._kept if len(part := kept.after(after))]
        rows = concat(parts) if parts else _NO_ROWS
        if len(rows) and rows["due_ms"][-1] > until_ms:  # by an earlier read time than before
            rows = rows[: int(rows["due_ms"].searchsorted(until_ms, "right"))]
        if len(rows) > count:
            last = rows[count - 1]
            return Peek(rows[:count], Position(int(last["due_ms"]), int(last["seq"])))
        return Peek(rows, None if self._through.due_ms >= until_ms else self._through)

    def bufs(self) -> Iterator[Buffers]:
        """Yield what the rows that were read point into."""
        return (kept.bufs for kept in self._kept)


class HeldReader:
    """What a thread is to read before a FIRE is folded."""

    def __init__(
        self,
        rows: LiveRows,
        rows_max: int,
        bytes_max: int,
        until_ms: int,
        graves: Sequence[tuple[I64, U64]],
    ) -> None:
        """`graves`: (due, seq) of timers that tombstones in memtables cancel, by now."""
        self._rows, self._rows_max, self._bytes_max = rows, rows_max, bytes_max
        self._until_ms = until_ms
        self._graves = graves

    def read(self) -> None:
        """See the class. For a thread: whoever folds waits for it.

        Raises:
            CorruptFile: a batch doesn't verify.
        """
        first_ms, last_ms = self._rows.at.due_ms, self._until_ms
        ahead = [seq[(due >= first_ms) & (due <= last_ms)] for due, seq in self._graves]
        graves = np.sort(np.concatenate([np.empty(0, np.uint64), *ahead]))

        def dead(rows: RowArray) -> npt.NDArray[np.bool_]:
            if not len(graves):
                return np.zeros(len(rows), np.bool_)
            seq = rows["seq"].copy()
            return np.asarray(graves.take(graves.searchsorted(seq), mode="clip") == seq)

        with suppress(FileNotFoundError):  # other runs have taken its place: they are read then
            self._rows.read(self._rows_max, self._bytes_max, self._until_ms, dead)
