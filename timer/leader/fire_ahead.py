"""How long before its time a FIRE is appended, so that its commit is over when its timers are due.

    appended ---- commit: about `ms` ---- header's time: the leader applies it, messages go out

A FIRE's read time and its header's time lie so far ahead of the clock. The leader applies no entry
before its header's time (cluster/state/state_plane.py). No timer fires early, and entries behind
the FIRE wait with it: a cancel that comes in this window loses, and its answer comes when the timer
is due.
"""

from typing import Final

from timer.model.units import LogIndex, MonoMs

AHEAD_MS_MAX: Final = 10
"""Slower commits are hidden up to here. Entries behind a FIRE wait at most so long with it."""
_WEIGHT: Final = 8
"""A commit counts for so many parts in the mean of all commits before."""


class FireAhead:
    """The mean time from a FIRE's append to its commit."""

    def __init__(self) -> None:
        self._mean_ms = 0.0
        self._index, self._appended_ms = LogIndex(0), MonoMs(0)

    @property
    def ms(self) -> int:
        """Milliseconds between the append of the next FIRE and its read time."""
        return min(int(self._mean_ms), AHEAD_MS_MAX)

    def appended(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note a FIRE. If an earlier one is not yet committed, only the later one is measured."""
        self._index, self._appended_ms = index, mono_ms

    def committed(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note that the entries up to `index` are committed."""
        if 0 < self._index <= index:
            self._index = LogIndex(0)
            self._mean_ms += (mono_ms - self._appended_ms - self._mean_ms) / _WEIGHT
