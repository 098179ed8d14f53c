"""A window: the next rows of one run, copied into memory ahead of their time.

            fired          loaded            only in the file
    run  |..........F=============next..................................|

What it holds are copies, contiguous slices with their payloads, so that no row points into a file
that a merge may delete. On the leader `load` keeps it two seconds ahead; a follower loads when a
FIRE asks. Both see the same rows: `peek` loads what it lacks, one slice at a call.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from timer.columns import I64, U64, RowArray
from timer.memtable import Peek
from timer.order import Position, concat, rank
from timer.run import Cursor, Run

SLICE_ROWS_MIN: Final = 4_096
SLICE_SIZE_MAX: Final = 1 << 20
LOADED_SIZE_MAX: Final = 4 << 20
"""Bytes of payloads that a window loads ahead; more only as it fires."""


class _Slice:
    """Loaded rows, and their keys once more side by side."""

    __slots__ = ("due", "number", "rows", "seq", "size")

    def __init__(self, rows: RowArray, number: int, size: int) -> None:
        rows["buf"] = number
        self.rows = rows
        self.number = number
        self.size = size
        self.due: I64 = np.ascontiguousarray(rows["due_ms"])
        self.seq: U64 = np.ascontiguousarray(rows["seq"])

    @property
    def last(self) -> Position:
        return Position(int(self.due[-1]), int(self.seq[-1]))


class Window:
    """See the module. `new_number` gives numbers for buffers, unique in the store."""

    def __init__(self, run: Run, position: Position, new_number: Callable[[], int]) -> None:
        self.run = run
        self.bufs: dict[int, bytes | memoryview] = {}
        self._position = position
        self._new_number = new_number
        self._slices: deque[_Slice] = deque()
        self._size = 0
        self._cursor: Cursor | None = None  # found when first needed: it reads

    @property
    def next(self) -> Position | None:
        """(due, seq) of the first row that is not loaded, None if all are."""
        if self._cursor is None:
            self._cursor = Cursor(self.run, self._position)
        return self._cursor.next

    def load(self, until_ms: int) -> None:
        """Load the rows with due <= `until_ms`, a bounded number of bytes at most."""
        while self._wants(until_ms) and self._size < LOADED_SIZE_MAX:
            self._load_slice(until_ms)

    def peek(self, after: Position, until_ms: int, count: int) -> Peek:
        """Return the rows after `after` with due <= `until_ms`, up to `count`, or fewer."""
        if self._wants(until_ms) and (not self._slices or self._slices[-1].last <= after):
            self._load_slice(until_ms)
        parts: list[RowArray] = []
        last = after
        for piece in self._slices:
            start = rank(piece.due, piece.seq, after) if piece.due[0] <= after.due_ms else 0
            end = int(piece.due.searchsorted(until_ms, "right"))
            stop = min(end, start + count)
            if start < stop:
                parts.append(piece.rows[start:stop])
                last = Position(int(piece.due[stop - 1]), int(piece.seq[stop - 1]))
                count -= stop - start
            if stop < end:
                return Peek(concat(parts), last)
        return Peek(concat(parts), last if self._wants(until_ms) else None)

    def drop(self, through: Position) -> None:
        """Let go of the slices that lie at or before `through`."""
        self._position = through
        while self._slices and self._slices[0].last <= through:
            gone = self._slices.popleft()
            self._size -= gone.size
            del self.bufs[gone.number]
        assert self._cursor is None or self._cursor.next is None or self._cursor.next > through

    def next_due(self) -> int | None:
        """Return the due of the first row after the fire position, None if there is none.

        That row may have been cancelled.
        """
        for piece in self._slices:
            start = rank(piece.due, piece.seq, self._position)
            if start < len(piece.due):
                return int(piece.due[start])
        following = self.next
        return None if following is None else following.due_ms

    def _wants(self, until_ms: int) -> bool:
        following = self.next
        return following is not None and following.due_ms <= until_ms

    def _load_slice(self, until_ms: int) -> None:
        assert self._cursor is not None
        rows, data = self._cursor.read(until_ms, SLICE_ROWS_MIN, SLICE_SIZE_MAX)
        piece = _Slice(rows, self._new_number(), rows.nbytes + len(data))
        self._slices.append(piece)
        self._size += piece.size
        self.bufs[piece.number] = data
