"""Recent cancels: what lets a second cancel say ALREADY_CANCELLED.

A fired row needs no record: a genuine id at or before the fire position either fired or was
cancelled. So only cancels are kept, as seqs, in buckets of one minute of the log's clock, and
dropped a whole bucket at a time once the horizon has passed.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.columns import U64
from timer.units import UnixMs

HORIZON_MS: Final = 600_000
BUCKET_MS: Final = 60_000
ARRAYS_MAX: Final = 8
"""Sorted arrays in a bucket, beyond which a look-up merges them first."""


@dataclass(slots=True)
class Cancels:
    """The seqs of timers cancelled within the horizon."""

    buckets: dict[int, list[U64]] = field(default_factory=dict)
    """Minute of the log's clock -> arrays of seqs, each sorted."""

    def add(self, seq: U64, now_ms: UnixMs) -> None:
        """Remember cancels that were applied at `now_ms`."""
        if len(seq):
            self.buckets.setdefault(now_ms // BUCKET_MS, []).append(np.sort(seq))

    def contains(self, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which of `seq` were cancelled within the horizon (n, bool)."""
        found = np.zeros(len(seq), np.bool_)
        for arrays in self.buckets.values():
            if len(arrays) > ARRAYS_MAX:
                arrays[:] = [np.sort(np.concatenate(arrays))]
            for array in arrays:
                at = np.searchsorted(array, seq)
                at[at == len(array)] = 0
                found |= array[at] == seq
        return found

    def expire(self, now_ms: UnixMs) -> None:
        """Drop the buckets that ended before the horizon."""
        oldest = (now_ms - HORIZON_MS) // BUCKET_MS
        for minute in [minute for minute in self.buckets if minute < oldest]:
            del self.buckets[minute]
