"""When the leader appends a FIRE: ahead of its time, and not too soon after the last one.

    appended -- commit: about `ahead_ms` -- header's time: the leader applies it, messages go out
    appended -- the least time between two --> the next FIRE is appended

A FIRE's read time and its header's time lie `ahead_ms` ahead of the clock. The leader applies no
entry before its header's time (cluster/state/state_plane.py). No timer fires early, and entries
behind the FIRE wait with it: a cancel that comes in this window loses, and its answer comes when
the timer is due.

A timer that is due alone fires at its due time. In a dense stream the gap makes groups: each FIRE
leads to deliveries, acks and their entries, so FIREs that follow each other at once would take the
processors' time. A commit takes longer on a busy machine, and the gap grows with it.
"""

from typing import Final

from timer.model.units import LogIndex, MonoMs

AHEAD_MS_MAX: Final = 10
"""Slower commits are hidden up to here. Entries behind a FIRE wait at most so long with it."""
GAP_MS_MAX: Final = 10
"""The longest time that a timer waits for the next FIRE, if none is in flight."""
GAP_COMMITS: Final = 2
"""The gap, in mean times of a commit."""
_WEIGHT: Final = 8
"""A commit counts for so many parts in the mean of all commits before."""


class FireTimes:
    """The mean time from a FIRE's append to its commit, and the times that follow from it."""

    def __init__(self) -> None:
        self._mean_ms = 0.0
        self._measured, self._appended_ms = LogIndex(0), MonoMs(0)

    @property
    def ahead_ms(self) -> int:
        """Milliseconds between the append of the next FIRE and its read time."""
        return min(int(self._mean_ms), AHEAD_MS_MAX)

    @property
    def next_ms(self) -> MonoMs:
        """The earliest time of the next FIRE."""
        return MonoMs(self._appended_ms + min(int(GAP_COMMITS * self._mean_ms), GAP_MS_MAX))

    def appended(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note a FIRE. If an earlier one is not yet committed, only the later one is measured."""
        self._measured, self._appended_ms = index, mono_ms

    def committed(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note that the entries up to `index` are committed."""
        if 0 < self._measured <= index:
            self._measured = LogIndex(0)
            self._mean_ms += (mono_ms - self._appended_ms - self._mean_ms) / _WEIGHT
