"""The memtable: rows since the last flush, in the order of their seqs, where they came in.

    rows     | ROW  | ROW  | ROW  | ...      seqs ascend, with gaps: rows due at once aren't here
    alive    |  1   |  0   |  1   | ...      0: cancelled
    bufs     {number: the entry's payload}   what the rows point into
    index    (due, place) of the rows: Tiers; on the leader a Wheel
    graves   (due, seq) of cancelled timers that lie in runs, or in the memtable being flushed

A row that has fired stays where it is: the fire position says so. Everything leaves at once, when
the memtable has been flushed.
"""

from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from timer.columns import I64, ROW, U64, RowArray
from timer.order import RAW, Position, after, raw, tombstones
from timer.tiers import NEVER, Index, Tiers
from timer.wheel import Wheel

CAPACITY: Final = 1 << 20
"""Rows that there is room for at first; the system gives memory only to what is used."""
REINDEX_ROWS: Final = 65_536
GRAVE_SIZE: Final = 64
"""Bytes that a tombstone is counted as."""

_Item = TypeVar("_Item", bound=np.generic)


class Peek(NamedTuple):
    """Rows in firing order, from one source, live ones and tombstones."""

    rows: RowArray
    last: Position | None
    """`rows` is complete up to here. None: up to the time that was asked for."""


class Memtable:
    """See the module. `position` is the fire position: nothing at or before it comes."""

    def __init__(self, position: Position, capacity: int = CAPACITY) -> None:
        self.rows: RowArray = np.empty(capacity, ROW)
        self.alive = np.empty(capacity, np.bool_)
        self.count = 0
        self.bufs: dict[int, bytes | memoryview] = {}
        self.graves = Tiers()
        self.grave_count = 0
        self._raw = self.rows.view(RAW)
        self._seq: U64 = np.empty(capacity, np.uint64)
        self._position = position
        self._index: Index = Tiers()
        self._buf_bytes = 0
        self._next_due: int | None = NEVER
        """Least due of a live row after the fire position. NEVER: no such row. None: not known."""

    @property
    def size(self) -> int:
        """Bytes of memory in use, about."""
        per_row = ROW.itemsize + 8 + 1 + 16
        return self.count * per_row + self._buf_bytes + self.grave_count * GRAVE_SIZE

    def insert(self, rows: RowArray, number: int, buf: bytes | memoryview) -> None:
        """Take n rows with ascending seqs above all others, and the buffer they point into."""
        start, stop = self.count, self.count + len(rows)
        if stop > len(self.rows):
            self._grow(stop)
        self._raw[start:stop] = raw(rows)
        self.rows["buf"][start:stop] = number
        due = rows["due_ms"].astype(np.int64)
        seq = rows["seq"]
        due_min = int(due.min())
        assert due_min > self._position.due_ms, (due_min, self._position)
        assert start == 0 or seq[0] > self._seq[start - 1], (int(seq[0]), int(self._seq[start - 1]))
        self._seq[start:stop] = seq
        self.alive[start:stop] = True
        self.count = stop
        self.bufs[number] = buf
        self._buf_bytes += len(buf)
        self._index.add(due, np.arange(start, stop), due_min)
        if self._next_due is not None:
            self._next_due = min(self._next_due, due_min)

    def find(self, due_ms: I64, seq: U64) -> npt.NDArray[np.intp]:
        """Return the places of the wanted timers (n,), -1 where none that lives is here."""
        if not self.count:
            return np.full(len(seq), -1, np.intp)
        place = self._seq[: self.count].searchsorted(seq)
        place[place == self.count] = 0
        found = (self._seq.take(place) == seq) & self.alive.take(place)
        if found.any():
            found &= self.rows["due_ms"][place] == due_ms
        return np.where(found, place, -1)

    def kill(self, places: npt.NDArray[np.intp]) -> None:
        """Cancel the rows at these places, all of which live."""
        self.alive[places] = False
        if self._next_due is not None and (self.rows["due_ms"][places] == self._next_due).any():
            self._next_due = None

    def bury(self, due_ms: I64, seq: U64) -> None:
        """Keep tombstones for n timers that lie elsewhere."""
        self.graves.add(due_ms.astype(np.int64), seq.astype(np.int64), int(due_ms.min()))
        self.grave_count += len(seq)

    def buried(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which of the timers have a tombstone here (n, bool)."""
        if not self.grave_count:
            return np.zeros(len(seq), np.bool_)
        return self.graves.contains(due_ms, seq.astype(np.int64))

    def peek(self, after: Position, until_ms: int, count: int) -> Peek:
        """Return the live rows after `after` with due <= `until_ms`, up to `count`."""
        due, place, more = self._index.peek(self._place_of(after), until_ms, count)
        last = None
        if more:
            last = Position(int(due[-1]), int(self._seq[place[-1]]))
        alive = self.alive.take(place)
        if not alive.all():
            place = place[alive]
        return Peek(self.rows.take(place), last)

    def peek_graves(self, after: Position, until_ms: int, count: int) -> Peek:
        """Return the tombstones after `after` with due <= `until_ms`, up to `count`."""
        due, seq, more = self.graves.peek(after, until_ms, count)
        last = Position(int(due[-1]), int(seq[-1])) if more else None
        return Peek(tombstones(due, seq.astype(np.uint64)), last)

    def drop(self, through: Position) -> None:
        """Take over the fire position: what lies at or before it is never seen again.

        `peek` has shown all of that before.
        """
        if self._next_due is not None and self._next_due <= through.due_ms:
            self._next_due = None
        self._position = through
        self._index.drop(self._place_of(through))
        self.graves.drop(through)

    def next_due(self) -> int | None:
        """Return the least due of a live row after the fire position, None without one."""
        if self._next_due is None:
            least = self._index.next_due(self.alive)
            self._next_due = NEVER if least is None else least
        return None if self._next_due == NEVER else self._next_due

    def lead(self) -> None:
        """Index the live rows by a wheel."""
        self._reindex(Wheel(self._position.due_ms))

    def follow(self) -> None:
        """Index the live rows by tiers."""
        self._reindex(Tiers())

    def live(self) -> npt.NDArray[np.intp]:
        """Return the places of the live rows after the fire position, ascending."""
        due, seq = self.rows["due_ms"][: self.count], self._seq[: self.count]
        return np.flatnonzero(self.alive[: self.count] & after(due, seq, self._position))

    def graves_left(self) -> tuple[I64, U64]:
        """Return the tombstones after the fire position, sorted."""
        due, key = self.graves.pairs()
        seq = key.astype(np.uint64)
        left = after(due, seq, self._position)
        return due[left], seq[left]

    def row_at(self, due_ms: I64, seq: U64) -> RowArray:
        """Return the live row of one timer, as an array of one or none."""
        place = self.find(due_ms, seq)
        return self.rows.take(place[place >= 0])

    def _reindex(self, index: Index) -> None:
        self._index = index
        self._next_due = None
        places = self.live()
        for start in range(0, len(places), REINDEX_ROWS):  # as much as stays in the cache
            some = places[start : start + REINDEX_ROWS]
            due = self.rows["due_ms"][some]
            index.add(due, some, int(due.min()))

    def _place_of(self, position: Position) -> tuple[int, int]:
        """Return `position` as the index knows it: by (due, place)."""
        place = self._seq[: self.count].searchsorted(np.uint64(position.seq), "right")
        return position.due_ms, int(place) - 1

    def _grow(self, wanted: int) -> None:
        capacity = len(self.rows)
        while capacity < wanted:
            capacity *= 2
        rows = np.empty(capacity, ROW)
        view = rows.view(RAW)
        view[: self.count] = self._raw[: self.count]
        self.rows, self._raw = rows, view
        self._seq = _longer(self._seq, self.count, capacity)
        self.alive = _longer(self.alive, self.count, capacity)


def _longer(array: npt.NDArray[_Item], count: int, capacity: int) -> npt.NDArray[_Item]:
    longer = np.empty(capacity, array.dtype)
    longer[:count] = array[:count]
    return longer
