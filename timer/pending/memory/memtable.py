"""The memtable: rows since the last flush, in the order of their seqs, at fixed places.

    rows     | ROW  | ROW  | ROW  | ...      seqs ascend, with gaps: rows due at once are not here
    alive    |  1   |  0   |  1   | ...      0: cancelled
    bufs     {number: payload of an entry}   the bytes of the rows
    indices  (due, place) of the rows: Tiers for rows added as follower, a Wheel for rows added as
             leader. A change of role moves nothing: both find the rows that are due
    tombstones  (due, seq) of cancelled timers in runs or in the frozen memtable
    keys     (hash, place) of the rows with a key: KeyTiers
    held     (due, seq, place) of held rows (held_rows.py): HeldTiers, and HeldByTopic. They are
             in no index. Their seqs come in any order, so the column that is searched by seq has
             the seq of the row before them instead

A fired row stays in its place: it lies at or before the fire position. After the flush the memtable
is dropped as a whole.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, ROW, U32, U64, Binary, Buffers, RowArray, gather
from timer.model.firing_order import RAW, Position, after, fire_order, raw, tombstones
from timer.model.timer_id import SEQ_MAX
from timer.pending.memory.held_rows import HELD_OFFSET_MS, HeldByTopic, HeldTiers
from timer.pending.memory.key_index import PLAIN_HASHER, KeyHasher, KeyTiers
from timer.pending.memory.tiers import NEVER, Index, Tiers
from timer.pending.memory.wheel import Wheel

CAPACITY: Final = 1 << 20
"""Rows and tombstones of the first allocation. The system gives memory only for pages in use."""
SPARE_ROWS: Final = 16_384
"""Rows beyond those of a SCHEDULE that have memory: as many as a FIRE may hold."""
PORTION_SIZE: Final = 1 << 20
"""Bytes that a portion of `prepare_memory` touches or copies."""
TOMBSTONE_MEMORY: Final = 64
"""Bytes that one tombstone counts for."""

_Item = TypeVar("_Item", bound=np.generic)

Tombstones = tuple[I64, U64, U32]
"""(due, seq, topic) of tombstones: columns of equal length."""


class Peek(NamedTuple):
    """Live rows and tombstones of one source, in firing order."""

    rows: RowArray
    last: Position | None
    """`rows` is complete up to here. None: complete up to the requested time."""


class TopicOrder(NamedTuple):
    """Rows of one topic in (due, seq) order. Some may be dead."""

    end: int
    """All rows of the topic before this place are here."""
    due_ms: I64
    seq: U64
    places: npt.NDArray[np.intp]


class Memtable:
    """See the module. `position`: the fire position; all rows that are added lie after it."""

    def __init__(
        self, position: Position, capacity: int = CAPACITY, hasher: KeyHasher = PLAIN_HASHER
    ) -> None:
        self.rows: RowArray = np.empty(capacity, ROW)
        self.alive = np.empty(capacity, np.bool_)
        self.count = 0
        self.dead = 0
        """Number of cancelled and fired rows. Released held rows are not counted."""
        self.bufs: dict[int, bytes | memoryview] = {}
        self.tombstone_tiers = Tiers()
        self.tombstone_count = 0
        self._tombstones: Tombstones = (
            np.empty(CAPACITY, np.int64),
            np.empty(CAPACITY, np.uint64),
            np.empty(CAPACITY, np.uint32),
        )
        """The tombstones in the order of arrival."""
        self._hasher = hasher
        self._keys = KeyTiers()
        self._keyed_count = 0
        self._held_tiers = HeldTiers()
        self._held_by_topic = HeldByTopic()
        self._held_count = 0
        self.orders: dict[int, TopicOrder] = {}
        """A few topics' rows in order, for threads that read cuts (timer/pending/read_view.py)."""
        self._raw = self.rows.view(RAW)
        self._seq: U64 = np.empty(capacity, np.uint64)
        self._topic: U32 = np.empty(capacity, np.uint32)
        self._position = position
        self._tiers: Tiers | None = None
        self._wheel: Wheel | None = None
        self._leads = False
        self._buf_bytes = 0
        self._touched_end = 0
        """Places before this one have memory."""
        self._first_seq = SEQ_MAX
        """Seq of the first row that is not held."""
        self._next_due: int | None = NEVER
        """Least due of a live row after the fire position. NEVER: no such row. None: unknown."""

    @property
    def has_held(self) -> bool:
        """Whether held rows were added."""
        return self._held_count > 0

    @property
    def size(self) -> int:
        """Bytes of memory in use, approximately."""
        per_row = ROW.itemsize + 8 + 4 + 1 + 16
        size = self.count * per_row + self._buf_bytes + self.tombstone_count * TOMBSTONE_MEMORY
        return size + 16 * self._keyed_count + 32 * self._held_count

    @property
    def is_mostly_dead(self) -> bool:
        """Whether a flush frees most of the rows' memory without writing them."""
        return self.dead > self.count // 2

    def needs_memory(self, count: int) -> bool:
        """Return whether `prepare_memory` has much to do before `count` more rows are added.

        Memory for a few rows is touched when they are added.
        """
        if self.count + count + SPARE_ROWS > len(self.rows):
            return True
        return count > SPARE_ROWS and self.count + count > self._touched_end

    def prepare_memory(self, count: int) -> Iterator[None]:
        """Touch memory for `count` more rows and SPARE_ROWS beyond, in portions.

        The first touch of memory costs time: 14 ms of CPU for 50,000 rows. A copy of a million rows
        into larger arrays takes 100 ms.
        """
        stop = self.count + count + SPARE_ROWS
        if stop > len(self.rows):
            yield from self._grow(stop)
        for column in self._columns:
            for part in _portions(column, max(self._touched_end, self.count), stop):
                column[part].view(np.uint8).fill(0)
                yield
        self._touched_end = stop

    def insert(self, rows: RowArray, number: int, buf: bytes | memoryview) -> None:
        """Add n rows with ascending seqs above all others, and the buffer that they point into."""
        due = rows["due_ms"].astype(np.int64)
        seq, before = rows["seq"], self._seq[: self.count][-1:]
        due_min = int(due.min())
        assert due_min > self._position.due_ms or after(due, seq, self._position).all(), (
            due_min,
            self._position,
        )
        assert (seq[0] > before).all(), (int(seq[0]), before)
        start, stop = self._append(rows)
        self._first_seq = min(self._first_seq, int(seq[0]))
        self.rows["buf"][start:stop] = number
        self._seq[start:stop] = seq
        self._add_bufs_and_keys(start, stop, {number: buf})
        self._index().add(due, np.arange(start, stop), due_min)
        if self._next_due is not None:
            self._next_due = min(self._next_due, due_min)

    def hold(self, rows: RowArray, bufs: Buffers) -> None:
        """Add n held rows, with stored dues, and their buffers, which are new here."""
        due = rows["due_ms"].astype(np.int64)
        assert int(due.min()) >= HELD_OFFSET_MS, int(due.min())
        start, stop = self._append(rows)
        self._seq[start:stop] = self._seq[start - 1] if start else 0
        self._add_bufs_and_keys(start, stop, bufs)
        self._held_tiers.add(due, rows["seq"].astype(np.uint64), np.arange(start, stop), self.alive)
        self._held_by_topic.add(rows, start, self.alive)
        self._held_count += len(rows)

    def _append(self, rows: RowArray) -> tuple[int, int]:
        """Append rows. Return their places: [start, stop)."""
        start, stop = self.count, self.count + len(rows)
        if stop > len(self.rows):
            for _ in self._grow(stop):
                pass
        self._raw[start:stop] = raw(rows)
        self._topic[start:stop] = rows["topic"]
        self.alive[start:stop] = True
        self.count = stop
        return start, stop

    def _add_bufs_and_keys(self, start: int, stop: int, bufs: Buffers) -> None:
        """Add the buffers of rows at these places. Index the rows' keys."""
        rows = self.rows[start:stop]
        keyed = np.flatnonzero(rows["key_size"])
        if len(keyed):
            mine = rows[keyed]
            hashes = self._hasher(mine["topic"], gather(mine, bufs, "key"))
            self._keys.add(hashes, keyed + start)
            self._keyed_count += len(keyed)
        self.bufs.update(bufs)
        self._buf_bytes += sum(map(len, bufs.values()))

    def find(self, due_ms: I64, seq: U64) -> npt.NDArray[np.intp]:
        """Return the places of n timers (n,); -1 if the timer has no live row here."""
        if not self.count:
            return np.full(len(seq), -1, np.intp)
        if len(seq) == 1:
            return np.array([self.find_one(due_ms.item(), seq.item())])
        place = self._seq[: self.count].searchsorted(seq)
        place[place == self.count] = 0
        found = (self._seq.take(place) == seq) & self.alive.take(place)
        if found.any():
            found &= self.rows["due_ms"][place] == due_ms
        places = np.where(found, place, -1)
        if self._held_count and (held := due_ms >= HELD_OFFSET_MS).any():
            places[held] = self._held_tiers.find(due_ms[held], seq[held], self.alive)
        return places

    def find_one(self, due_ms: int, seq: int) -> int:
        """Return the place of one timer; -1 if it has no live row here."""
        if due_ms >= HELD_OFFSET_MS:
            if not self._held_count:
                return -1
            column = np.array([due_ms]), np.array([seq], np.uint64)
            return self._held_tiers.find(*column, self.alive).item()
        place = int(self._seq[: self.count].searchsorted(np.uint64(seq)))
        if place == self.count or self._seq.item(place) != seq or not self.alive.item(place):
            return -1
        return place if self.rows["due_ms"].item(place) == due_ms else -1

    def kill(self, places: npt.NDArray[np.intp]) -> None:
        """Cancel the rows at these places. All of them are alive."""
        self.alive[places] = False
        self.dead += len(places)
        if self._next_due is not None and (self.rows["due_ms"][places] == self._next_due).any():
            self._next_due = None

    def kill_topic(self, topic: int) -> Iterator[None]:
        """Cancel all rows of a topic, in portions. Meanwhile no row is added."""
        for part in _portions(self.rows, 0, self.count):
            places = part.start + np.flatnonzero((self._topic[part] == topic) & self.alive[part])
            if len(places):
                self._next_due = None  # first, as `kill` would compare the due times with it
                self.kill(places[self._are_unfired(places)])
                yield

    def count_fired(self, seq: U64) -> None:
        """Count the fired rows of this memtable as dead: their seqs are above all others."""
        self.dead += int(np.count_nonzero(seq >= self._first_seq))

    def find_keys(self, hashes: U64, topic: U32, keys: Binary) -> tuple[npt.NDArray[np.intp], I64]:
        """Return (number of the key, place) of the live rows after the fire position with the keys.

        Key i belongs to topic[i]. `hashes` are those of topics and keys.
        """
        if not self._keyed_count:
            return np.empty(0, np.intp), np.empty(0, np.int64)
        which, place = self._keys.find(hashes, self._live)
        rows = self.rows.take(place)
        same = (rows["topic"] == topic[which]) & (rows["key_size"] == keys.sizes[which])
        ends = np.cumsum(keys.sizes, dtype=np.int64)[which].tolist()
        columns = (rows[name].tolist() for name in ("buf", "key_start", "key_size"))
        for at, (buf, start, size) in enumerate(zip(*columns, strict=True)):
            if same.item(at):
                mine = self.bufs[buf][start : start + size]
                same[at] = mine == keys.blob[ends[at] - size : ends[at]]
        return which[same], place[same]

    def _live(self, places: I64) -> npt.NDArray[np.bool_]:
        """Return which rows are alive and after the fire position (n, bool)."""
        return self.alive.take(places) & self._are_unfired(places)

    def _are_unfired(self, places: I64) -> npt.NDArray[np.bool_]:
        """Return which rows lie after the fire position (n, bool)."""
        return after(self.rows["due_ms"][places], self.rows["seq"][places], self._position)

    def add_tombstones(self, due_ms: I64, seq: U64, topic: U32) -> None:
        """Add tombstones for n timers that are not here."""
        start, stop = self.tombstone_count, self.tombstone_count + len(seq)
        due, number, of = self._tombstones
        if stop > len(due):
            capacity = 1 << stop.bit_length()
            due, number, of = (
                _longer(due, start, capacity),
                _longer(number, start, capacity),
                _longer(of, start, capacity),
            )
            self._tombstones = due, number, of
        due[start:stop], number[start:stop], of[start:stop] = due_ms, seq, topic
        due, number = due[start:stop], number[start:stop]
        self.tombstone_tiers.add(due, number.view(np.int64), int(due.min()))
        self.tombstone_count = stop

    def have_tombstones(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which of the timers have a tombstone here (n, bool)."""
        if not self.tombstone_count:
            return np.zeros(len(seq), np.bool_)
        return self.tombstone_tiers.contains(due_ms, seq.astype(np.int64))

    def has_tombstone(self, due_ms: int, seq: int) -> bool:
        """Return whether one timer has a tombstone here."""
        return self.tombstone_count > 0 and self.tombstone_tiers.has(due_ms, seq)

    def peeks(
        self, after: Position, until_ms: int, count: int, *, with_tombstones: bool = True
    ) -> Iterator[Peek]:
        """Yield the first live rows and tombstones after `after` that are due, per source.

        Sources: each index, and the tombstones if `with_tombstones`. At most `count` of each.
        """
        key = self._place_of(after)
        for index in self._indices():
            due, place, more = index.peek(key, until_ms, count, self.alive)
            last = Position(int(due[-1]), int(self._seq[place[-1]])) if more else None
            alive = self.alive.take(place)
            yield Peek(self.rows.take(place if alive.all() else place[alive]), last)
        if self.tombstone_count and with_tombstones:
            due, seq, more = self.tombstone_tiers.peek(after, until_ms, count)
            last = Position(int(due[-1]), int(seq[-1])) if more else None
            yield Peek(tombstones(due, seq.astype(np.uint64)), last)

    def peek_held(self, after: Position, count: int, topics: frozenset[int] | None = None) -> Peek:
        """Return about `count` live held rows after `after`: of some topics, or of all (None)."""
        if topics is None:
            places, last = self._held_tiers.peek(after, count, self.alive)
        else:
            places, last = self._held_by_topic.peek(after, count, self.alive, topics)
        return Peek(self.rows.take(places), last)

    def end_sweep(self) -> None:
        """End the sweep: free the order of its topics' rows."""
        self._held_by_topic.end_sweep()

    def drop(self, through: Position) -> None:
        """Move the fire position. Rows at or before it are not returned any more."""
        if self._next_due is not None and self._next_due <= through.due_ms:
            self._next_due = None
        self._position = through
        key = self._place_of(through)
        for index in self._indices():
            index.drop(key)
        self.tombstone_tiers.drop(through)

    def keep_up(self) -> bool:
        """Sort some rows that are due soon. Return whether more are left."""
        return self._wheel is not None and self._wheel.keep_up(self.alive)

    def next_due(self) -> int | None:
        """Return the least due of a live row after the fire position; None if there is none."""
        if self._next_due is None:
            dues = [index.next_due(self.alive) for index in self._indices()]
            self._next_due = min((due for due in dues if due is not None), default=NEVER)
        return None if self._next_due == NEVER else self._next_due

    def lead(self) -> None:
        """Index new rows by a wheel."""
        self._leads = True

    def follow(self) -> None:
        """Index new rows by tiers."""
        self._leads = False

    def tombstones(self) -> Tombstones:
        """Return the tombstones in the order of arrival. Later ones do not change the result."""
        due, seq, topic = self._tombstones
        count = self.tombstone_count
        return due[:count], seq[:count], topic[:count]

    def rows_to_flush(self) -> "RowsToFlush":
        """Return the live rows of this moment. Cheap: the selection is done when first used."""
        due, seq = self.rows["due_ms"][: self.count], self._seq[: self.count]
        alive = self.alive[: self.count].copy()
        return RowsToFlush(due, seq, alive, self.tombstones(), self._position)

    def _index(self) -> Index:
        """Return the index for new rows."""
        if self._leads:
            if self._wheel is None:
                self._wheel = Wheel(self._position.due_ms)
            return self._wheel
        if self._tiers is None:
            self._tiers = Tiers()
        return self._tiers

    def _indices(self) -> list[Index]:
        return [index for index in (self._tiers, self._wheel) if index is not None]

    def _place_of(self, position: Position) -> tuple[int, int]:
        """Return `position` as (due, place), as the indices order rows."""
        place = self._seq[: self.count].searchsorted(np.uint64(position.seq), "right")
        return position.due_ms, int(place) - 1

    def _grow(self, wanted: int) -> Iterator[None]:
        """Copy the rows, in portions, to arrays with room for `wanted` rows. They don't change."""
        capacity = len(self.rows)
        while capacity < wanted:
            capacity *= 2
        larger = []
        for column in self._columns:
            larger.append(np.empty(capacity, column.dtype))
            for part in _portions(column, 0, self.count):
                larger[-1][part] = column[part]
                yield
        self._raw, self._seq, self._topic, self.alive = larger
        self.rows = self._raw.view(ROW)
        self._touched_end = self.count

    @property
    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self._raw, self._seq, self._topic, self.alive


class RowsToFlush:
    """The live rows and tombstones of a memtable after the fire position, at one moment."""

    def __init__(
        self,
        due_ms: I64,
        seq: U64,
        alive: npt.NDArray[np.bool_],
        tombstones: Tombstones,
        position: Position,
    ) -> None:
        self._due_ms, self._seq, self._alive = due_ms, seq, alive
        self._tombstones = tombstones
        self._position = position

    @cached_property
    def live(self) -> npt.NDArray[np.intp]:
        """Places of the live rows, ascending."""
        return np.flatnonzero(self._alive & after(self._due_ms, self._seq, self._position))

    @cached_property
    def tombstones(self) -> Tombstones:
        """The tombstones, sorted."""
        due, seq, topic = self._tombstones
        unfired = after(due, seq, self._position)
        due, seq, topic = due[unfired], seq[unfired], topic[unfired]
        order = fire_order(due, seq)
        return due[order], seq[order], topic[order]


def _portions(column: npt.NDArray[Any], start: int, stop: int) -> Iterator[slice]:
    """Yield the places [start, stop) in slices of PORTION_SIZE bytes."""
    step = PORTION_SIZE // column.itemsize
    for low in range(start, stop, step):
        yield slice(low, min(low + step, stop))


def _longer(array: npt.NDArray[_Item], count: int, capacity: int) -> npt.NDArray[_Item]:
    longer = np.empty(capacity, array.dtype)
    longer[:count] = array[:count]
    return longer
