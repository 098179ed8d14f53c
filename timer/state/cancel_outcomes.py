"""Outcomes of ended timers, so that a later cancel can return the right result.

    seq           = chunk * 65,536 + low        chunk: 65,536 timers that follow each other
    few ended     | low | low | low | ...       sorted, 2 bytes each
    many ended    | 0110 1111 1111 ...          one bit for each timer of the chunk

A fired row needs no record: a genuine id at or before the last read time either fired or was
cancelled. Only cancels are recorded, and all ends of held timers
(timer/pending/memory/held_rows.py). These may end long after their due times, as fired, cancelled
or dropped.

The end of a cancelled timer is needed until firing has passed its due time by the horizon, that of
a held timer until the horizon after the end. A chunk is kept while one of its timers is needed.

All chunks together have a limit of memory. Above it the chunk of the oldest timers is forgotten, of
all outcomes. How these timers ended is then unknown: they are NOT_FOUND, also after they fired. So
a client that cancels at full speed can't fill the memory. Timers as old as these that end later are
recorded like others. Once no forgotten timer would be needed any more, nothing is unknown.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from timer.model.columns import I64, U64
from timer.model.timer_id import mix, mix_one
from timer.model.units import Seq, UnixMs
from timer.state.apply_results import ALREADY_CANCELLED, ALREADY_FIRED, DROPPED

HORIZON_MS: Final = 600_000
SIZE_MAX: Final = 32 << 20
"""Bytes of all chunks. The outcomes of the newest 55 million timers always fit."""
CHUNK_SIZE: Final = 4096
"""Bytes that a chunk counts for besides its data. It takes 300, but each chunk also costs time."""
FREE_DIVISOR: Final = 16
"""1/FREE_DIVISOR of the limit is free after chunks were forgotten."""
LOWS_MAX: Final = 4096
"""Most ended timers that a chunk holds one by one: they take as much as the bits of all."""
FEW: Final = 16
"""So few bits are set one by one in less time than all at once."""

KINDS: Final = (ALREADY_FIRED, ALREADY_CANCELLED, DROPPED)

_SHIFT: Final = 16
_SEQS: Final = 1 << _SHIFT
_BITS_SIZE: Final = _SEQS // 8
_MASK: Final = (1 << 64) - 1


@dataclass(slots=True)
class Chunk:
    """The ended timers among 65,536, with one outcome."""

    data: bytearray = field(default_factory=bytearray)
    until_ms: int = 0
    """The greatest time until which one of them is needed."""
    sum: int = 0
    """Order-free sum of the hashes of their seqs, modulo 2 ** 64."""
    version: int = 0
    """Number of manifests that were captured before `data` was made. Theirs does not change."""

    @property
    def size(self) -> int:
        """Bytes that count for the limit."""
        return CHUNK_SIZE + len(self.data)

    def add(self, low: U64, version: int) -> None:
        """Add ended timers that are not here: the low bits of their seqs, (n,)."""
        if self.version != version:
            self.data, self.version = self.data[:], version
        if len(self.data) == _BITS_SIZE:
            self._set(low)
        elif len(self.data) // 2 + len(low) >= LOWS_MAX:
            lows, self.data = np.frombuffer(self.data, np.uint16), bytearray(_BITS_SIZE)
            self._set(lows)
            self._set(low)
        elif len(low) == 1:
            place = 2 * self._place(low.item())
            self.data[place:place] = low.astype(np.uint16).tobytes()
        else:
            lows = np.concatenate([np.frombuffer(self.data, np.uint16), low.astype(np.uint16)])
            lows.sort()
            self.data = bytearray(lows)

    def _set(self, low: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        if len(low) <= FEW:
            for one in low.tolist():
                self.data[one >> 3] |= 1 << (one & 7)
            return
        ended = np.zeros(_SEQS, np.bool_)
        ended[low] = True
        bits = np.frombuffer(self.data, np.uint8)
        bits |= np.packbits(ended, bitorder="little")

    def _place(self, low: int) -> int:
        with memoryview(self.data).cast("H") as lows:
            return bisect_left(lows, low)

    def contains(self, low: int) -> bool:
        """Return whether the timer ended."""
        if len(self.data) == _BITS_SIZE:
            return bool(self.data[low >> 3] >> (low & 7) & 1)
        place = 2 * self._place(low)
        return self.data[place : place + 2] == low.to_bytes(2, "little")


class Outcomes:
    """The known outcomes of ended timers; see the module."""

    def __init__(self) -> None:
        self._chunks = {kind: SortedDict() for kind in KINDS}
        """Outcome -> number of the chunk -> Chunk."""
        self._sums = dict.fromkeys(KINDS, 0)
        self._size = 0
        self._version = 0
        """Number of manifests that were captured."""
        self._first_chunk = 0
        """Chunks below this number may have been forgotten because of the limit. 0: none was."""
        self._forgotten_until_ms = 0
        """The greatest time until which a chunk that the limit forgot was needed."""

    @property
    def unknown_below(self) -> Seq:
        """Outcomes of timers below this seq may be forgotten already."""
        return Seq(self._first_chunk * _SEQS)

    def add(self, outcome: int, seq: U64, until_ms: I64) -> None:
        """Record ended timers, (n,). `until_ms`: due times, or ends of held timers."""
        chunks, total = self._chunks[outcome], self._sums[outcome]
        for number, low, latest_ms, added in _by_chunk(seq, until_ms):
            chunk = chunks.get(number)
            if chunk is None:
                chunk = chunks[number] = Chunk(version=self._version)
            else:
                self._size -= chunk.size
            chunk.add(low, self._version)
            chunk.until_ms = max(chunk.until_ms, latest_ms)
            chunk.sum = (chunk.sum + added) & _MASK
            total += added
            self._size += chunk.size
        self._sums[outcome] = total & _MASK
        if self._size > SIZE_MAX:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the oldest timers until 1/FREE_DIVISOR of the limit is free, for new ones."""
        while self._size > SIZE_MAX - SIZE_MAX // FREE_DIVISOR:
            oldest = min(each.peekitem(0)[0] for each in self._chunks.values() if each)
            self._first_chunk = max(self._first_chunk, 1 + oldest)
            for kind in KINDS:
                until_ms = self._forget(kind, oldest)
                self._forgotten_until_ms = max(self._forgotten_until_ms, until_ms)

    def fill(self, seq: U64, results: npt.NDArray[np.uint8]) -> None:
        """Set the results, (n,), of the timers whose outcome is recorded."""
        for outcome, chunks in self._chunks.items():
            if not chunks:
                continue
            for at, each in enumerate(seq.tolist()):
                chunk = chunks.get(each >> _SHIFT)
                if chunk is not None and chunk.contains(each & _SEQS - 1):
                    results[at] = outcome

    def forget(self, before_ms: UnixMs) -> None:
        """Drop the chunks whose times all lie before `before_ms`."""
        for kind, chunks in self._chunks.items():
            for number in [at for at, each in chunks.items() if each.until_ms < before_ms]:
                self._forget(kind, number)
        if self._forgotten_until_ms < before_ms:
            self._first_chunk = self._forgotten_until_ms = 0

    def _forget(self, outcome: int, number: int) -> int:
        """Drop a chunk if it is there; return the time until which it was needed, 0 if absent."""
        chunk = self._chunks[outcome].pop(number, None)
        if chunk is None:
            return 0
        self._size -= chunk.size
        self._sums[outcome] = (self._sums[outcome] - chunk.sum) & _MASK
        return int(chunk.until_ms)

    @property
    def words(self) -> tuple[int, ...]:
        """Numbers that differ if two replicas' outcomes differ, for the digest."""
        return (self._first_chunk, self._forgotten_until_ms, *self._sums.values())

    def pack(self) -> list[Any]:
        """Return the fields for a manifest; nothing in them changes later."""
        self._version += 1
        packed: list[Any] = [self._first_chunk, self._forgotten_until_ms]
        for outcome, chunks in self._chunks.items():
            packed += [
                [outcome, at, each.until_ms, each.sum, each.data] for at, each in chunks.items()
            ]
        return packed

    def restore(self, packed: Sequence[Any]) -> None:
        """Put back the fields that a manifest holds."""
        self._first_chunk, self._forgotten_until_ms, *chunks = packed
        for outcome, number, until_ms, total, data in chunks:
            chunk = Chunk(bytearray(data), until_ms, total)
            self._chunks[outcome][number] = chunk
            self._sums[outcome] = (self._sums[outcome] + chunk.sum) & _MASK
            self._size += chunk.size


def _by_chunk(seq: U64, until_ms: I64) -> Iterator[tuple[int, U64, int, int]]:
    """Yield of each chunk: number, low bits of its seqs, greatest time, and sum of hashes."""
    if not len(seq):
        return
    low = seq & np.uint64(_SEQS - 1)
    if len(seq) == 1:
        yield seq.item() >> _SHIFT, low, until_ms.item(), mix_one(seq.item())
        return
    number = seq >> np.uint64(_SHIFT)
    if number[0] == number[-1] and (number == number[0]).all():
        yield int(number[0]), low, int(until_ms.max()), _sum(seq)
        return
    order = np.argsort(number, kind="stable")
    number, low = number[order], low[order]
    starts = np.flatnonzero(np.diff(number, prepend=number[:1] + np.uint64(1)))
    stops = [*starts[1:].tolist(), len(seq)]
    latest_ms = np.maximum.reduceat(until_ms[order], starts).tolist()
    sums = np.add.reduceat(mix(seq[order]), starts).tolist()
    chunks = number[starts].tolist()
    for at, start in enumerate(starts.tolist()):
        yield chunks[at], low[start : stops[at]], latest_ms[at], sums[at]


def _sum(seq: U64) -> int:
    return int(np.add.reduce(mix(seq), dtype=np.uint64))
