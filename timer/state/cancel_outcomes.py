"""Outcomes of ended timers, so that a later cancel can return the right result.

A fired row needs no record: a genuine id at or before the last read time either fired or was
cancelled. Only cancels are recorded: their seqs, in buckets of one minute of the due time. A bucket
is dropped when firing has passed its minute by the horizon. An id contains its due time, so a
lookup reads one bucket.

Held timers (timer/pending/memory/held_rows.py) may end long after their due times, as fired,
cancelled or dropped. All of these ends are recorded, in buckets of one minute of the end, for the
horizon.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from timer.model.columns import I64, U64
from timer.model.timer_id import mix, mix_one
from timer.model.units import UnixMs

HORIZON_MS: Final = 600_000
BUCKET_MS: Final = 60_000
ARRAY_ROWS_MAX: Final = 1 << 20
"""Most rows of a merged array, so that a merge takes some milliseconds at most."""

_MASK: Final = (1 << 64) - 1


@dataclass(slots=True)
class Cancels:
    """The seqs of cancelled timers that are still remembered."""

    buckets: dict[int, list[U64]] = field(default_factory=dict)
    """Minute of the due time -> arrays of seqs, each sorted, the largest first.
    Minutes are in order of insertion; manifests keep that order."""
    sum: int = 0
    """Order-free sum of the hashes of all seqs, modulo 2 ** 64, for the digest."""
    _sums: SortedDict = field(default_factory=SortedDict)
    """The same sum for each bucket, by minute: cancelled timers may be due in very many."""

    def add(self, due_ms: I64, seq: U64) -> None:
        """Record cancelled timers."""
        for minute, at in _by_minute(due_ms):
            mine = seq[at]
            mine.sort()
            self.restore(minute, mine)

    def restore(self, minute: int, seq: U64) -> None:
        """Put sorted seqs into one bucket."""
        arrays = self.buckets.setdefault(minute, [])
        arrays.append(seq)
        while len(arrays) > 1 and _alike(*arrays[-2:]):
            merged = np.concatenate([arrays.pop(), arrays.pop()])
            merged.sort(kind="stable")  # a stable sort merges sorted halves
            arrays.append(merged)
        added = _sum(seq)
        self._sums[minute] = self._sums.get(minute, 0) + added
        self.sum = (self.sum + added) & _MASK

    def contain(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which of these timers are recorded as cancelled, (n, bool)."""
        found = np.zeros(len(seq), np.bool_)
        for minute, at in _by_minute(due_ms):
            arrays = self.buckets.get(minute)
            if arrays is None:
                continue
            wanted = seq[at]
            for array in arrays:
                place = np.searchsorted(array, wanted)
                place[place == len(array)] = 0
                found[at] |= array[place] == wanted
        return found

    def forget(self, through_ms: UnixMs) -> None:
        """Drop the buckets whose due times all lie at or before `through_ms`."""
        while self._sums and (self._sums.peekitem(0)[0] + 1) * BUCKET_MS <= through_ms:
            minute, forgotten = self._sums.popitem(0)
            del self.buckets[minute]
            self.sum = (self.sum - forgotten) & _MASK


class Late(Cancels):
    """The seqs of timers that ended after their due times, by the minute of their end."""

    def ended(self, time_ms: UnixMs, seq: U64) -> None:
        """Record timers that ended at `time_ms`."""
        self.restore(time_ms // BUCKET_MS, np.sort(seq))

    def among(self, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which of these timers are recorded, (n, bool)."""
        found = np.zeros(len(seq), np.bool_)
        for arrays in self.buckets.values():
            for array in arrays:
                found |= array.take(np.searchsorted(array, seq), mode="clip") == seq
        return found


def _alike(left: U64, right: U64) -> bool:
    """Return whether two neighbouring arrays should be merged, to have few arrays."""
    return len(left) < 2 * len(right) and len(left) + len(right) <= ARRAY_ROWS_MAX


def _by_minute(due_ms: I64) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield (minute, places of the rows due in it)."""
    if not len(due_ms):
        return
    if len(due_ms) == 1:
        yield due_ms.item() // BUCKET_MS, np.zeros(1, np.intp)
        return
    minute = due_ms // BUCKET_MS
    order = np.argsort(minute, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(minute[order])) + 1):
        yield int(minute[at[0]]), at


def _sum(seq: U64) -> int:
    if len(seq) == 1:
        return mix_one(seq.item())
    return int(np.add.reduce(mix(seq), dtype=np.uint64))
