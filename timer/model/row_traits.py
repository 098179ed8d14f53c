"""Ordering key and priority of a timer: its traits, at the start of the row's headers.

    0   2  0         the size of a first header's name: an ordinary header has a name
    2   2  s >= 1    the size of its value
    4   1  "0"-"9"   priority
    5      bytes     ordering key, UTF-8; s - 1 bytes, 0: none
    4+s    bytes     the other headers

A row without traits has no such header. Rows without headers therefore cost nothing, and every
format that has headers has traits: entries, runs, pages, spill files and snapshots. All columns of
heads are read at once; only the wire's edge and dead letters look at one row after the other.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, U32, Binary, Buffers, RowArray

PRIORITY_MAX: Final = 9
PRIORITY_DEFAULT: Final = 4
"""Priority of a row without traits: half of the others are above it."""
HEAD_SIZE: Final = 5
_DIGIT: Final = ord("0")

U8 = npt.NDArray[np.uint8]
_Heads = tuple[npt.NDArray[np.bool_], U8, U32]


class Traits(NamedTuple):
    """The traits of n rows."""

    ordering: Binary
    """Ordering keys; empty: none."""
    priority: U8
    """Priorities, (n,)."""


def _heads(heads: U8, sizes: U32) -> _Heads:
    """Return which rows have traits, their priorities, and the sizes of their ordering keys, (n,).

    `heads`: the first HEAD_SIZE bytes of each row's headers, (n, HEAD_SIZE). `sizes`: of all its
    headers.
    """
    value = heads[:, 2].astype(np.uint32) | heads[:, 3].astype(np.uint32) << np.uint32(8)
    digit = heads[:, 4] - np.uint8(_DIGIT)  # wraps around below "0"
    has = (heads[:, 0] | heads[:, 1]) == 0
    has &= (value >= 1) & (value + np.uint32(4) <= sizes) & (digit <= PRIORITY_MAX)
    return has, digit, value - np.uint32(1)


class _Found(NamedTuple):
    """Rows that have traits: their places, ascending (m,), and columns of m values."""

    places: npt.NDArray[np.intp]
    numbers: U32
    """Numbers of the buffers with their headers."""
    starts: I64
    """Positions of their headers."""
    priority: U8
    sizes: U32
    """Of the ordering keys; 0: none."""


def _of_rows(rows: RowArray, bufs: Buffers) -> _Found | None:
    """Return the rows that have traits. None: no row has any.

    Of rows with other headers it reads one byte.
    """
    places = np.flatnonzero(rows["headers_size"] >= HEAD_SIZE)
    if not len(places):
        return None
    starts = rows["headers_start"][places].astype(np.int64)
    numbers = rows["buf"][places].astype(np.uint32)
    maybe = np.flatnonzero(_first_bytes(numbers, starts, bufs) == 0)
    if not len(maybe):
        return None
    places, starts, numbers = places[maybe], starts[maybe], numbers[maybe]
    data = b"".join([bufs[b][at : at + HEAD_SIZE] for b, at in _pairs(numbers, starts)])
    heads = np.frombuffer(data, np.uint8).reshape(-1, HEAD_SIZE)
    has, priority, sizes = _heads(heads, rows["headers_size"][places].astype(np.uint32))
    if not has.any():
        return None
    return _Found(places[has], numbers[has], starts[has], priority[has], sizes[has])


def _first_bytes(numbers: U32, starts: I64, bufs: Buffers) -> U8:
    """Return the byte at each position, (n,); one call for the rows of each buffer."""
    if (numbers == numbers[0]).all():
        return np.frombuffer(bufs[int(numbers[0])], np.uint8)[starts]
    out = np.empty(len(starts), np.uint8)
    order = np.argsort(numbers, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        out[part] = np.frombuffer(bufs[int(numbers[part[0]])], np.uint8)[starts[part]]
    return out


def _pairs(numbers: U32, starts: I64) -> Iterator[tuple[int, int]]:
    return zip(numbers.tolist(), starts.tolist(), strict=True)


def kinds_of(rows: RowArray, bufs: Buffers) -> tuple[bool, bool]:
    """Return whether a row has an ordering key, and whether one has another priority."""
    found = _of_rows(rows, bufs)
    if found is None:
        return False, False
    return bool(found.sizes.any()), bool((found.priority != PRIORITY_DEFAULT).any())


def priorities(rows: RowArray, bufs: Buffers) -> U8:
    """Return the priority of each row, (n,)."""
    out = np.full(len(rows), PRIORITY_DEFAULT, np.uint8)
    found = _of_rows(rows, bufs)
    if found is not None:
        out[found.places] = found.priority
    return out


def ordering_keys(rows: RowArray, bufs: Buffers) -> tuple[npt.NDArray[np.intp], Binary]:
    """Return the places of the rows with an ordering key, ascending (m,), and the keys."""
    found = _of_rows(rows, bufs)
    if found is None or not found.sizes.any():
        return np.zeros(0, np.intp), Binary.of([])
    has = found.sizes > 0
    sizes, starts = found.sizes[has], found.starts[has] + HEAD_SIZE
    ends = (starts + sizes).tolist()
    pieces = zip(_pairs(found.numbers[has], starts), ends, strict=True)
    keys = b"".join([bytes(bufs[b][start:end]) for (b, start), end in pieces])
    return found.places[has], Binary(sizes=sizes, blob=keys)


def none_of(rows: int) -> Traits:
    """Return the traits of rows that have none."""
    empty = Binary(sizes=np.zeros(rows, np.uint32), blob=b"")
    return Traits(empty, np.full(rows, PRIORITY_DEFAULT, np.uint8))


def join(headers: Binary, traits: Traits) -> Binary:
    """Return headers of n rows with the traits that differ from the defaults in front."""
    out, at, key_at = [], 0, 0
    columns = zip(
        headers.sizes.tolist(),
        traits.ordering.sizes.tolist(),
        traits.priority.tolist(),
        strict=True,
    )
    for size, key_size, priority in columns:
        rest = bytes(headers.blob[at : at + size])
        if key_size or priority != PRIORITY_DEFAULT:
            key = bytes(traits.ordering.blob[key_at : key_at + key_size])
            value = bytes([_DIGIT + priority]) + key
            rest = b"\0\0" + len(value).to_bytes(2, "little") + value + rest
        out.append(rest)
        at, key_at = at + size, key_at + key_size
    return Binary.of(out)


def split(headers: Binary) -> tuple[Binary, Traits | None]:
    """Return the headers without traits, and the traits. None: no row has any."""
    if not headers.blob:
        return headers, None
    blob, sizes = np.frombuffer(headers.blob, np.uint8), headers.sizes
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    places = np.flatnonzero(sizes >= HEAD_SIZE)
    places = places[blob[starts[places]] == 0]
    heads = blob[starts[places][:, None] + np.arange(HEAD_SIZE)]
    has, digits, key_sizes = _heads(heads, sizes[places].astype(np.uint32))
    if not has.any():
        return headers, None
    places, digits, key_sizes = places[has], digits[has], key_sizes[has]
    priority = np.full(len(sizes), PRIORITY_DEFAULT, np.uint8)
    priority[places] = digits
    ordering = np.zeros(len(sizes), np.uint32)
    ordering[places] = key_sizes
    rest_starts = starts.copy()
    rest_starts[places] += HEAD_SIZE + key_sizes.astype(np.int64)
    data = bytes(headers.blob)
    keys = [
        data[start + HEAD_SIZE : start + HEAD_SIZE + size]
        for start, size in zip(starts[places].tolist(), key_sizes.tolist(), strict=True)
    ]
    rest = [data[start:end] for start, end in zip(rest_starts.tolist(), ends.tolist(), strict=True)]
    return Binary.of(rest), Traits(Binary(sizes=ordering, blob=b"".join(keys)), priority)
