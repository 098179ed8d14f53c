"""Cancelled timers: what lets a cancel say ALREADY_CANCELLED, and a late one not ALREADY_FIRED.

A fired row needs no record: a genuine id at or before the last read time either fired or was
cancelled. So only cancels are kept: as seqs, in buckets of one minute of their due time, until
firing has passed that minute by the horizon. An id says its due time, so one bucket is asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.columns import I64, U64
from timer.timer_id import mix
from timer.units import UnixMs

HORIZON_MS: Final = 600_000
BUCKET_MS: Final = 60_000
ARRAYS_MAX: Final = 8
"""Sorted arrays in a bucket, beyond which a look-up merges them first."""

_MASK: Final = (1 << 64) - 1


@dataclass(slots=True)
class Cancels:
    """The seqs of cancelled timers that are not forgotten yet."""

    buckets: dict[int, list[U64]] = field(default_factory=dict)
    """Minute of the due time -> arrays of seqs, each sorted."""
    sum: int = 0
    """Of the hashes of all seqs in here, modulo 2 ** 64: order-free, for the digest."""

    def add(self, due_ms: I64, seq: U64) -> None:
        """Remember that these timers were cancelled."""
        for minute, at in _by_minute(due_ms):
            self.restore(minute, np.sort(seq[at]))

    def restore(self, minute: int, seq: U64) -> None:
        """Put sorted seqs into one bucket."""
        self.buckets.setdefault(minute, []).append(seq)
        self.sum = (self.sum + _sum(seq)) & _MASK

    def contain(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which of these timers are remembered as cancelled (n, bool)."""
        found = np.zeros(len(seq), np.bool_)
        for minute, at in _by_minute(due_ms):
            arrays = self.buckets.get(minute)
            if arrays is None:
                continue
            if len(arrays) > ARRAYS_MAX:
                arrays[:] = [np.sort(np.concatenate(arrays))]
            wanted = seq[at]
            for array in arrays:
                place = np.searchsorted(array, wanted)
                place[place == len(array)] = 0
                found[at] |= array[place] == wanted
        return found

    def forget(self, through_ms: UnixMs) -> None:
        """Drop the buckets whose due times all lie at or before `through_ms`."""
        for minute in [m for m in self.buckets if (m + 1) * BUCKET_MS <= through_ms]:
            gone = sum(_sum(array) for array in self.buckets.pop(minute))
            self.sum = (self.sum - gone) & _MASK


def _by_minute(due_ms: I64) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield (minute, places of the rows due in it)."""
    if not len(due_ms):
        return
    minute = due_ms // BUCKET_MS
    order = np.argsort(minute, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(minute[order])) + 1):
        yield int(minute[at[0]]), at


def _sum(seq: U64) -> int:
    return int(np.add.reduce(mix(seq), dtype=np.uint64))
