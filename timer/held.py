"""The held rows of runs, in order, read ahead of a sweep (timer/pauses.py).

    runs   |x x . x . . x x x x x x x x x|x x x x . . . . . . . . . .|
           swept ^      kept in memory   through ^   not read yet         x: gone, or cancelled

What is let go of follows from the rows that live: they are state. Those that are gone, or were
cancelled, may have left a replica's runs long ago and lie in another's by the million; so how many
of them a FIRE passes must not count for what it does, and has no bound. Therefore a thread passes
them before the FIRE is folded, and keeps what lives; what it did not bring is read then: the same
rows, only later. Memory: twice what a FIRE lets go of, in rows or in bytes, and a
slice of each run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.aside import ASIDE
from timer.columns import I64, ROW, U64, Buffers, RowArray, compact, row_bytes
from timer.gone import Gone
from timer.memtable import Peek
from timer.merge import first_of
from timer.order import Position, concat, rank
from timer.run import Run
from timer.window import Window

Dead = Callable[[RowArray], npt.NDArray[np.bool_]]
"""Tells which rows tombstones in memtables cancel (n, bool)."""


class Only(NamedTuple):
    """Whose rows a sweep looks at, if not at everybody's."""

    topics: frozenset[int]
    others: Gone
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


class Kept:
    """Rows that live, and exactly what they point into."""

    __slots__ = ("bufs", "rows", "size")

    def __init__(self, rows: RowArray, bufs: Buffers) -> None:
        self.rows, self.bufs = rows, bufs
        self.size = int(row_bytes(rows).sum())

    def after(self, position: Position) -> RowArray:
        """Return those after a position."""
        return self.rows[rank(self.rows["due_ms"], self.rows["seq"], position) :]


class HeldRows:
    """See the module. Of some runs, from a position on; for one thread at a time.

    `gone`: whose rows are passed over: topics that were deleted, and those the sweep is not for.
    """

    def __init__(
        self, runs: Sequence[Run], gone: Gone, after: Position, new_number: Callable[[], int]
    ) -> None:
        self._runs = {run.meta.number for run in runs}
        self.at = after
        """Where the sweep is."""
        self._gone = gone
        self._new_number = new_number
        self._windows = [Window(run, after, new_number) for run in runs]
        self._through: Position | None = after if runs else None
        """All that lives up to here was read. None: all that lives."""
        self._kept: list[Kept] = []

    def go_on(self, after: Position, runs: Sequence[Run], gone: Gone) -> bool:
        """The sweep has come so far, and these are the runs now; return False to begin anew."""
        numbers = {run.meta.number for run in runs}
        if after < self.at or not numbers <= self._runs or not gone.covers(self._gone):
            return False
        self._windows = [each for each in self._windows if each.run.meta.number in numbers]
        if not self._windows:
            self._through = None
        self.at, self._gone = after, gone
        self._keep(lambda each: each.after(after))
        return True

    def thin(self, dead: Dead) -> None:
        """Leave out what is not there any more of what was read."""
        self._keep(lambda each: self._living(each.rows, dead))

    def lacks(self, rows_max: int, bytes_max: int) -> bool:
        """Return whether neither so many rows nor bytes of theirs lie ahead, nor all of them."""
        rows = sum(len(kept.rows) for kept in self._kept)
        size = sum(kept.size for kept in self._kept)
        return self._through is not None and rows < rows_max and (size <= bytes_max or rows < 2)

    def read(self, rows_max: int, bytes_max: int, dead: Dead) -> None:
        """Read on until so many rows that live, or bytes of theirs, lie ahead of the sweep.

        Raises:
            CorruptFile: a batch doesn't verify.
            FileNotFoundError: a run was merged away, and its file removed.
        """
        self.thin(dead)
        while self.lacks(rows_max, bytes_max):
            assert self._through is not None
            for window in self._windows:
                window.skip(self._gone)
            peeks = [w.peek(self._through, 2 * ASIDE, rows_max) for w in self._windows]
            found, self._through = first_of(peeks)
            found = self._living(found, dead)
            if len(found):
                self._kept.append(self._copied(found))
            if self._through is None:
                self._windows = []
                break
            for window in self._windows:
                window.drop(self._through)

    def _keep(self, left: Callable[[Kept], RowArray]) -> None:
        kept = (Kept(left(each), each.bufs) for each in self._kept)
        self._kept = [each for each in kept if len(each.rows)]

    def _living(self, rows: RowArray, dead: Dead) -> RowArray:
        return rows[~(self._gone.of(rows["topic"]) | dead(rows))]

    def _copied(self, rows: RowArray) -> Kept:
        bufs: dict[int, bytes | memoryview] = {}
        for window in self._windows:
            bufs |= window.bufs
        rows, own = compact(rows, bufs)
        if [*own] == [0]:
            number = self._new_number()
            rows["buf"] = number
            own = {number: own[0]}
        return Kept(rows, own)

    def peek(self, after: Position, count: int) -> Peek:
        """Return what was read after `after`, up to `count` rows: see Window.peek."""
        parts = [part for kept in self._kept if len(part := kept.after(after))]
        rows = concat(parts) if parts else _NO_ROWS
        if len(rows) <= count:
            return Peek(rows, self._through)
        last = rows[count - 1]
        return Peek(rows[:count], Position(int(last["due_ms"]), int(last["seq"])))

    def bufs(self) -> Iterator[Buffers]:
        """Yield what the rows that were read point into."""
        return (kept.bufs for kept in self._kept)


class HeldAhead:
    """What a thread is to read before a FIRE is folded that moves a sweep on."""

    def __init__(
        self, held: HeldRows, rows_max: int, bytes_max: int, graves: Sequence[tuple[I64, U64]]
    ) -> None:
        """`graves`: (due, seq) of timers that tombstones in memtables cancel, by now."""
        self._held, self._rows_max, self._bytes_max = held, rows_max, bytes_max
        self._graves = graves

    def read(self) -> None:
        """See the class. For a thread: whoever folds waits for it.

        Raises:
            CorruptFile: a batch doesn't verify.
        """
        from_ms = self._held.at.due_ms
        ahead = [seq[due_ms >= from_ms] for due_ms, seq in self._graves]
        graves = np.sort(np.concatenate([np.empty(0, np.uint64), *ahead]))

        def dead(rows: RowArray) -> npt.NDArray[np.bool_]:
            if not len(graves):
                return np.zeros(len(rows), np.bool_)
            seq = rows["seq"].copy()
            return np.asarray(graves.take(graves.searchsorted(seq), mode="clip") == seq)

        with suppress(FileNotFoundError):  # other runs have taken its place: they are read then
            self._held.read(self._rows_max, self._bytes_max, dead)
