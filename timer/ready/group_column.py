"""A column of a group: one value per queue offset, 0 where none is set.

    base        65,536 offsets       the last chunk may be shorter
      |   chunk 0   |   chunk 1   | ... |  chunk n  |

All columns of a type share one constant array for their full chunks of zeros, and one for their
full chunks of set flags. Only chunks with mixed values need memory. A step copies or allocates only
the chunks of the values to set.

A column of few offsets is one short array. If the array must grow, it first moves to the group's
cursor.
The leader keeps states and keys of messages in such columns, too.

`freeze` takes references to the arrays and makes them read-only. The next change of a chunk copies
it.
"""

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, U64

SIZE_MIN: Final = 32
"""Least length of an array; very many groups have few messages."""

Values = npt.NDArray[Any]
DType = np.dtype[Any]


class GroupColumn:
    """See the module. An empty column never changes: `put` returns another one."""

    __slots__ = ("_chunks", "_counts", "_dtype", "base", "top", "value_count")

    bits: ClassVar = 16
    """A chunk has 2 ** bits offsets."""

    def __init__(self, dtype: DType, base: int) -> None:
        self._dtype = dtype
        self.base = base
        """First offset that may have a value."""
        self._chunks: list[Values] = []
        self._counts: list[int] = []
        """Values other than 0 in each chunk."""
        self.value_count = 0
        """Values other than 0."""
        self.top = base
        """Offset behind the last one that was put. Offsets from `base` to here have storage."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays of this column alone, without shared ones."""
        values = (0, 1) if self._dtype == np.bool_ else (0,)
        shared = {id(_constant(self._dtype, value, 1 << self.bits)) for value in values}
        return sum(chunk.nbytes for chunk in self._chunks if id(chunk) not in shared)

    @property
    def is_chunked(self) -> bool:
        """Whether the column has more than one chunk."""
        return len(self._chunks) > 1

    # ---- values

    def of(self, offsets: U64) -> Values:
        """Return the values of offsets, (n, dtype)."""
        index = np.subtract(offsets, self.base, dtype=np.uint64)  # huge below the base
        if len(self._chunks) == 1:
            return _values_at(self._chunks[0], index)
        values, mask = np.zeros(len(index), self._dtype), np.uint64((1 << self.bits) - 1)
        for number, where in self._pieces(index):
            values[where] = _values_at(self._chunks[number], index[where] & mask)
        return values

    def put(self, offsets: U64, values: Values | np.uint64 | int, floor: int) -> "GroupColumn":
        """Set the values of different offsets. Return the changed column: this or another one.

        `values`: (n, dtype), or one for all. `floor`: the group's cursor; no offset lies below it,
        and values below it may be forgotten.
        """
        column = self if self._chunks else GroupColumn(self._dtype, floor)
        column._put(offsets, values, floor)  # noqa: SLF001
        return column if column.value_count else empty_column(self._dtype)

    def _put(self, offsets: U64, values: Values | np.uint64 | int, floor: int) -> None:
        if (top := int(offsets.max()) + 1) > self.top:
            self._extend_to(top, floor)
            self.top = top
        index = np.subtract(offsets, self.base, dtype=np.uint64)
        if len(self._chunks) == 1:
            self._write(0, index, values)
            return
        mask = np.uint64((1 << self.bits) - 1)
        for number, where in self._pieces(index):
            some = values[where] if isinstance(values, np.ndarray) else values
            self._write(number, index[where] & mask, some)

    def _write(self, number: int, index: U64, values: Values | np.uint64 | int) -> None:
        index = index.view(np.int64)
        chunk, count = self._chunks[number], self._counts[number]
        if not count and not np.any(values):
            return
        if not chunk.flags.writeable:
            chunk = chunk.copy() if count else np.zeros(len(chunk), self._dtype)
        change = -int(np.count_nonzero(chunk[index]))
        chunk[index] = values
        if isinstance(values, np.ndarray):
            change += int(np.count_nonzero(values))
        elif values:
            change += len(index)
        now = count + change
        looks_constant = now <= 0 or (now >= len(chunk) and self._dtype == np.bool_)
        if looks_constant and len(index) > 1:
            now = int(np.count_nonzero(chunk))  # right even if an offset was repeated
        self._chunks[number], self._counts[number] = self._shared_chunk(chunk, now), now
        self.value_count += now - count

    def _shared_chunk(self, chunk: Values, count: int) -> Values:
        """Return the constant with the same values as a chunk if there is one, or the chunk."""
        size = 1 << self.bits
        if len(chunk) == size and (not count or (count == size and self._dtype == np.bool_)):
            return _constant(self._dtype, int(count > 0), size)
        return chunk

    def _pieces(self, index: U64) -> Iterator[tuple[int, slice | I64]]:
        """Yield (number of a chunk, the elements of `index` in it)."""
        if not len(index) or not self._chunks:
            return
        numbers, order = index >> self.bits, None
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            numbers = numbers[order]
        ends = [len(numbers)]
        if numbers[0] != numbers[-1]:
            ends[:0] = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
        start = 0
        for end in ends:
            if 0 <= (number := int(numbers[start])) < len(self._chunks):
                yield number, slice(start, end) if order is None else order[start:end]
            start = end

    # ---- storage

    def _extend_to(self, end: int, floor: int) -> None:
        """Make storage for offsets below `end`. Before that, drop the chunks below `floor`."""
        size, last = 1 << self.bits, len(self._chunks) - 1
        if last >= 0 and end <= self.base + (last << self.bits) + len(self._chunks[-1]):
            return
        self._forget_below(floor)
        capacity = max(SIZE_MIN, 2 * (end - floor))
        if len(self._chunks) <= 1 and capacity <= size:
            self._move_to(floor, capacity)
            return
        if self._chunks and len(self._chunks[-1]) < size:
            chunk = np.zeros(size, self._dtype)
            chunk[: len(self._chunks[-1])] = self._chunks[-1]
            self._chunks[-1] = chunk
        more = (end - self.base - 1 >> self.bits) + 1 - len(self._chunks)
        self._chunks += [_constant(self._dtype, 0, size)] * more
        self._counts += [0] * more

    def _forget_below(self, floor: int) -> None:
        """Drop the chunks below `floor`."""
        passed = min(max(0, floor - self.base) >> self.bits, len(self._chunks))
        self.value_count -= sum(self._counts[:passed])
        del self._chunks[:passed], self._counts[:passed]
        self.base = self.base + (passed << self.bits) if self._chunks else floor

    def _move_to(self, floor: int, size: int) -> None:
        """Make the column, of one chunk at most, an array of `size` offsets from `floor` on."""
        chunk = np.zeros(size, self._dtype)
        if self._chunks:
            values = self._chunks[0][floor - self.base :]
            chunk[: len(values)] = values
        self.value_count = int(np.count_nonzero(chunk))
        self.base, self._chunks, self._counts = floor, [chunk], [self.value_count]

    def drop_below(self, floor: int) -> Values:
        """Forget values below `floor`; return them, without chunks of zeros.

        A single array: only if they are more than half of it. Otherwise: whole chunks.
        """
        skip = max(0, floor - self.base)
        if len(self._chunks) == 1:
            size = len(self._chunks[0])
            if 2 * skip <= size:
                return np.zeros(0, self._dtype)
            dropped = [self._chunks[0][:skip]]
            self._move_to(floor, size)
        else:
            below = slice(skip >> self.bits)
            chunks = zip(self._chunks[below], self._counts[below], strict=True)
            dropped = [chunk for chunk, count in chunks if count]
            self._forget_below(floor)
        return np.concatenate([np.zeros(0, self._dtype), *dropped])

    # ---- searches

    def _chunks_from(self, offset: int) -> Iterator[tuple[int, int, Values]]:
        """Yield (number of a chunk, an offset, the chunk from there), from `offset` on."""
        index = max(0, offset - self.base)
        for number in range(index >> self.bits, len(self._chunks)):
            at = number << self.bits
            chunk = self._chunks[number]
            if (skip := max(0, index - at)) < len(chunk):
                yield number, self.base + at + skip, chunk[skip:]

    def count_from(self, offset: int) -> int:
        """Return the number of values, other than 0, at or after `offset`."""
        whole, rest = divmod(max(0, offset - self.base), 1 << self.bits)
        below = sum(self._counts[:whole])
        if whole < len(self._chunks):
            below += int(np.count_nonzero(self._chunks[whole][:rest]))
        return self.value_count - below

    def first_unset(self, offset: int) -> int:
        """Return the first offset without a set flag, at or after `offset`."""
        size = 1 << self.bits
        for number, at, chunk in self._chunks_from(offset):
            offset = at + len(chunk)
            if self._counts[number] < size and not chunk[first := int(chunk.argmin())]:
                return at + first
        return offset

    def unset_offsets(self, start: int, end: int, count: int) -> U64:
        """Return the first `count` offsets in [start, end) without a set flag."""
        found, size = list[I64](), 1 << self.bits
        for number, at, chunk in self._chunks_from(start):
            if not count or at >= end:
                break
            start = min(end, at + len(chunk))
            if self._counts[number] < size:
                found.append(np.flatnonzero(~chunk[: end - at])[:count] + at)
                count -= len(found[-1])
        found.append(np.arange(start, max(start, min(end, start + count))))
        return np.concatenate(found).astype(np.uint64)

    def span(self, start: int, end: int) -> Values:
        """Return the values of all offsets in [start, end)."""
        values = np.zeros(end - start, self._dtype)
        for _, at, chunk in self._chunks_from(start):
            if at >= end:
                break
            values[at - start : at - start + len(chunk)] = chunk[: end - at]
        return values

    def offsets(self, end: int | None = None) -> U64:
        """Return the offsets below `end` with a value other than 0, ascending."""
        found = [np.zeros(0, np.int64)]
        for number, at, chunk in self._chunks_from(self.base):
            if end is not None and at >= end:
                break
            if self._counts[number]:
                found.append(np.flatnonzero(chunk[: None if end is None else end - at]) + at)
        return np.concatenate(found).astype(np.uint64)

    # ---- manifests

    def freeze(self, start: int) -> "FrozenColumn":
        """Return the values from `start` on. They do not change when the column does."""
        for chunk in self._chunks:
            chunk.flags.writeable = False
        return FrozenColumn([*self._chunks], start - self.base)

    @classmethod
    def unpack(cls, data: bytes, dtype: DType, base: int) -> "GroupColumn":
        """Return the column of an encoding by `FrozenColumn.pack`. `base`: its first offset.

        Raises:
            zlib.error, ValueError: `data` is damaged or ends early.
        """
        if not data:
            return empty_column(dtype)
        column, unpacker = cls(dtype, base), zlib.decompressobj()
        while values := unpacker.decompress(data, dtype.itemsize << cls.bits):
            data = unpacker.unconsumed_tail
            chunk = np.frombuffer(values, dtype)
            count = int(np.count_nonzero(chunk))
            column._chunks.append(column._shared_chunk(chunk, count))
            column._counts.append(count)
            column.value_count += count
            column.top += len(chunk)
        if not unpacker.eof:
            raise zlib.error("the values of a column end early")
        return column


class FrozenColumn:
    """The values of a column at some moment; see `GroupColumn.freeze`."""

    __slots__ = ("_chunks", "_skip")

    def __init__(self, chunks: list[Values], skip: int) -> None:
        self._chunks, self._skip = chunks, skip

    def pack(self) -> bytes:
        """Return the values, without the zeros at the end, compressed; b"" if all are 0. Slow."""
        chunks, skip = list[Values](), self._skip
        for chunk in self._chunks:
            chunks.append(chunk[skip:])
            skip = max(0, skip - len(chunk))
        while chunks and not chunks[-1].any():
            chunks.pop()
        if not chunks:
            return b""
        chunks[-1] = chunks[-1][: int(np.flatnonzero(chunks[-1])[-1]) + 1]
        packer = zlib.compressobj(1)
        return b"".join([*(packer.compress(chunk.data) for chunk in chunks), packer.flush()])


@cache
def empty_column(dtype: DType) -> GroupColumn:
    """Return a column without values. All groups share it: each object costs a hundred bytes."""
    return GroupColumn(dtype, 0)


@cache
def _constant(dtype: DType, value: int, size: int) -> Values:
    """Return a chunk of equal values."""
    chunk = np.full(size, value, dtype) if value else np.zeros(size, dtype)
    chunk.flags.writeable = False
    return chunk


def _values_at(chunk: Values, index: U64) -> Values:
    """Return a chunk's values at these indexes, 0 behind its end."""
    inside = index < len(chunk)
    at = index.view(np.int64)
    if inside.all():
        return chunk[at]
    values = np.zeros(len(index), chunk.dtype)
    values[inside] = chunk[at[inside]]
    return values
