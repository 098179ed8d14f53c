"""A window: the next rows of one run, copied into memory ahead of their time.

            fired          loaded            only in the file
    run  |..........F=============next..................................|

What it holds are copies, contiguous slices with their payloads, so that no row points into a file
that a merge may delete. An `ReadAhead` carries slices from a thread into windows before their time;
what it did not bring `peek` reads itself, one slice at a call: the same rows, only later.
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
"""Bytes that all windows of a store load ahead; more only as it fires."""


class Slice:
    """Loaded rows, and their keys once more side by side."""

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
    """See the module. `new_number` gives numbers for buffers, unique in the store."""

    def __init__(self, run: Run, position: Position, new_number: Callable[[], int]) -> None:
        self.run = run
        self.bufs: dict[int, bytes | memoryview] = {}
        self.size = 0
        """Bytes that are loaded."""
        self.cold_reads = 0
        """Slices that somebody had to wait for."""
        self.version = 0
        """How often it went on."""
        self._position = position
        self._new_number = new_number
        self._slices: deque[Slice] = deque()
        self._cursor: Cursor | None = None  # found when first needed: it reads

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
        """What is due before this is loaded, or has fired; None: all is. It reads nothing."""
        if self._cursor is None:
            if self.run.meta.last <= self._position:
                return None
            return max(self.run.meta.first, self._position).due_ms
        return None if self._cursor.next is None else self._cursor.next.due_ms

    def load(self, until_ms: int, size_max: int) -> None:
        """Load rows with due <= `until_ms`, a bounded number of bytes: before it is in use."""
        ahead = ReadAhead([self], until_ms, size_max)
        ahead.read()
        ahead.install([self])

    def cursor(self) -> Cursor:
        """Return a copy of the cursor to read on with. It may read a head: for a thread."""
        return copy(self._cursor) if self._cursor else Cursor(self.run, self._position)

    def wants(self, until_ms: int) -> bool:
        """Return whether rows with due <= `until_ms` are not loaded yet; without reading any."""
        if self._cursor is None:
            return self.run.meta.first.due_ms <= until_ms and self.run.meta.last > self._position
        following = self._cursor.next
        return following is not None and following.due_ms <= until_ms

    def lacks(self, after: Position, until_ms: int) -> bool:
        """Return whether `peek` has to read."""
        return self.wants(until_ms) and (not self._slices or self._slices[-1].last <= after)

    @property
    def lost(self) -> bool:
        """Whether to go on it has to find its place in the file first."""
        return self._cursor is None and self.run.meta.last > self._position

    def skip(self, gone: DeletedTopics) -> None:
        """Pass over what is gone, where all of a batch is; read but its head. Nothing is loaded."""
        if gone and not self._slices and self.next is not None:
            cursor = self.cursor()
            cursor.skip(gone)
            self._cursor = cursor

    def take(self, slices: Iterable[Slice], cursor: Cursor) -> None:
        """Go on with slices that were read from `next` on, and the cursor after them."""
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
        """Return the rows after `after` with due <= `until_ms`, up to `count`, or fewer."""
        if self.lacks(after, until_ms) and self._wants(until_ms):
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
            self.size -= gone.size
            del self.bufs[gone.number]
        if self._cursor and self._cursor.next and self._cursor.next <= through:
            self._cursor = None  # what was not loaded was passed without this window

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
        cursor = self.cursor()
        self.cold_reads += 1
        rows, data = cursor.read(until_ms, SLICE_ROWS_MIN, SLICE_SIZE_MAX)
        self.take([Slice(rows, data)], cursor)


class ReadAhead:
    """What a thread is to load into windows: rows up to a time, the earliest first, to a limit."""

    def __init__(self, windows: Iterable[ReadWindow], until_ms: int, size_max: int) -> None:
        self._windows = [*windows]
        self._until_ms = until_ms
        self._size_max = size_max
        self._lanes: list[_AheadLane] = []

    def read(self) -> None:
        """Read the slices. For a thread: the windows stay as they are.

        Raises:
            CorruptFile: a batch doesn't verify.
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
        """Give the windows that are still in use, and still lack them, their slices."""
        used = {id(window) for window in in_use}
        for lane in self._lanes:
            window = lane.window
            if lane.slices and id(window) in used and window.version == lane.version:
                assert lane.cursor is not None
                window.take(lane.slices, lane.cursor)


class _AheadLane:
    """One window and what is read for it. A file that is gone was merged away meanwhile."""

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
