"""A read window: the next rows of one run, copied into memory before they are due.

            fired          loaded            only in the file
    run  |..........F=============next..................................|

A window holds copies: contiguous slices of rows with their payloads. So no row points into a file
that a merge may remove. A `ReadAhead` reads slices in a thread and installs them before they are
due. Slices that it did not bring are read by `peek`, one per call, with the same result.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from heapq import heapify, heapreplace
from typing import Final

import numpy as np

from timer.model.columns import I64, U64, RowArray
from timer.model.firing_order import Position, concat, rank
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.memory.memtable import Peek
from timer.pending.memory.tiers import NEVER
from timer.pending.runs.run import Cursor, Run

SLICE_ROWS_MIN: Final = 4_096
SLICE_SIZE_MAX: Final = 1 << 20
LOADED_SIZE_MAX: Final = 32 << 20
"""Bytes that all windows of a store load ahead. A FIRE may load more."""


class Slice:
    """Loaded rows, with copies of their due and seq columns."""

    __slots__ = ("data", "due", "number", "rows", "seq", "size")

    def __init__(self, rows: RowArray, data: bytes) -> None:
        self.rows = rows
        self.data = data
        self.number = 0
        self.size = rows.nbytes + len(data)
        self.due: I64 = np.ascontiguousarray(rows["due_ms"])
        self.seq: U64 = np.ascontiguousarray(rows["seq"])

    @property
    def last(self) -> Position:
        """The position of the last row."""
        return Position(int(self.due[-1]), int(self.seq[-1]))


class ReadWindow:
    """See the module. `new_number` returns buffer numbers that are unique in the store."""

    def __init__(self, run: Run, position: Position, new_number: Callable[[], int]) -> None:
        self.run = run
        self.bufs: dict[int, bytes | memoryview] = {}
        self.size = 0
        """Bytes loaded."""
        self.version = 0
        """Number of `take` calls."""
        self._position = position
        self._new_number = new_number
        self._slices: deque[Slice] = deque()
        self._cursor: Cursor | None = None  # made when first used, because it reads a head

    @property
    def next(self) -> Position | None:
        """(due, seq) of the first row that is not loaded, None if all are."""
        if self._cursor is None:
            if self.run.meta.first > self._position:
                return self.run.meta.first
            self._cursor = Cursor(self.run, self._position)
        return self._cursor.next

    @property
    def end_ms(self) -> int | None:
        """All rows due before this are loaded or fired. None: all rows are. Reads nothing."""
        if self._cursor is None:
            if self.run.meta.last <= self._position:
                return None
            return max(self.run.meta.first, self._position).due_ms
        return None if self._cursor.next is None else self._cursor.next.due_ms

    def load(self, until_ms: int, size_max: int) -> None:
        """Load rows with due <= `until_ms`, about `size_max` bytes. For windows not yet in use."""
        ahead = ReadAhead([self], until_ms, size_max)
        ahead.read()
        ahead.install([self])

    def cursor(self) -> Cursor:
        """Return a copy of the cursor, to continue reading. May read a head: for a thread."""
        return copy(self._cursor) if self._cursor else Cursor(self.run, self._position)

    def has_unloaded(self, until_ms: int) -> bool:
        """Return whether rows with due <= `until_ms` are not loaded yet. Reads nothing."""
        if self._cursor is None:
            return self.run.meta.first.due_ms <= until_ms and self.run.meta.last > self._position
        following = self._cursor.next
        return following is not None and following.due_ms <= until_ms

    def must_read(self, after: Position, until_ms: int) -> bool:
        """Return whether `peek` has to read the file."""
        return self.has_unloaded(until_ms) and (not self._slices or self._slices[-1].last <= after)

    @property
    def must_seek(self) -> bool:
        """Whether the window must search its place in the file before it can continue."""
        return self._cursor is None and self.run.meta.last > self._position

    def skip(self, deleted_topics: DeletedTopics) -> None:
        """Pass over batches with rows of deleted topics only. Reads their heads, loads nothing."""
        if deleted_topics and not self._slices and self.next is not None:
            cursor = self.cursor()
            cursor.skip(deleted_topics)
            self._cursor = cursor

    def take(self, slices: Iterable[Slice], cursor: Cursor) -> None:
        """Add slices that were read from `next` on, and the cursor after them."""
        for piece in slices:
            piece.number = self._new_number()
            piece.rows["buf"] = piece.number
            self.bufs[piece.number] = piece.data
            self.size += piece.size
            self._slices.append(piece)
        self._cursor = cursor
        self.version += 1
        self.drop(self._position)

    def peek(self, after: Position, until_ms: int, count: int) -> Peek:
        """Return the rows after `after` with due <= `until_ms`, at most `count`, perhaps fewer."""
        if self.must_read(after, until_ms) and self._has_unread(until_ms):
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
        return Peek(concat(parts), last if self._has_unread(until_ms) else None)

    def drop(self, through: Position) -> None:
        """Free the slices at or before `through`."""
        self._position = through
        while self._slices and self._slices[0].last <= through:
            fired = self._slices.popleft()
            self.size -= fired.size
            del self.bufs[fired.number]
        if self._cursor and self._cursor.next and self._cursor.next <= through:
            self._cursor = None  # unloaded rows fired without this window

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

    def _has_unread(self, until_ms: int) -> bool:
        following = self.next
        return following is not None and following.due_ms <= until_ms

    def _load_slice(self, until_ms: int) -> None:
        cursor = self.cursor()
        rows, data = cursor.read(until_ms, SLICE_ROWS_MIN, SLICE_SIZE_MAX)
        self.take([Slice(rows, data)], cursor)


class ReadAhead:
    """Rows of windows that a thread reads: up to a time, earliest first, to a limit of bytes."""

    def __init__(self, windows: Iterable[ReadWindow], until_ms: int, size_max: int) -> None:
        self._windows = [*windows]
        self._until_ms = until_ms
        self._size_max = size_max
        self._lanes: list[_AheadLane] = []

    def read(self) -> None:
        """Read the slices. For a thread: the windows do not change.

        Raises:
            CorruptFileError: a batch doesn't verify.
        """
        self._lanes = [_AheadLane(window) for window in self._windows]
        heap = [(lane.next_due(), number) for number, lane in enumerate(self._lanes)]
        heapify(heap)
        size = 0
        while heap and heap[0][0] <= self._until_ms and size < self._size_max:
            number = heap[0][1]
            lane = self._lanes[number]
            size += lane.read(self._until_ms)
            heapreplace(heap, (lane.next_due(), number))

    def install(self, in_use: Iterable[ReadWindow]) -> None:
        """Add the slices to their windows, if in use and not continued otherwise meanwhile."""
        used = {id(window) for window in in_use}
        for lane in self._lanes:
            window = lane.window
            if lane.slices and id(window) in used and window.version == lane.version:
                assert lane.cursor is not None
                window.take(lane.slices, lane.cursor)


class _AheadLane:
    """One window and the slices read for it. A missing file was removed by a merge."""

    def __init__(self, window: ReadWindow) -> None:
        self.window = window
        self.version = window.version
        self.slices: list[Slice] = []
        self.cursor: Cursor | None = None
        with suppress(FileNotFoundError):
            self.cursor = window.cursor()

    def next_due(self) -> int:
        following = None if self.cursor is None else self.cursor.next
        return NEVER if following is None else following.due_ms

    def read(self, until_ms: int) -> int:
        """Read one slice; return its size."""
        assert self.cursor is not None
        try:
            piece = Slice(*self.cursor.read(until_ms, SLICE_ROWS_MIN, SLICE_SIZE_MAX))
        except FileNotFoundError:
            self.cursor, self.slices = None, []
            return 0
        self.slices.append(piece)
        return piece.size
