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

About half of the commits take longer than the mean. After a quiet time a FIRE is therefore appended
a little earlier. In a dense stream it is not, because the next FIRE waits until it is applied.
"""

from typing import Final

from timer.model.units import LogIndex, MonoMs

AHEAD_MS_MAX: Final = 10
"""Slower commits are hidden up to here. Entries behind a FIRE wait at most so long with it."""
GAP_MS_MAX: Final = 10
"""The longest time that a timer waits for the next FIRE, if none is in flight."""
GAP_COMMITS: Final = 2
"""The gap, in mean times of a commit."""
_SPARE_MS: Final = 1.5
"""Added to the mean time of a commit after a quiet time; then most commits come in time. Half a
millisecond of it rounds the mean."""
_WEIGHT: Final = 8
"""A commit counts for so many parts in the mean of all commits before."""


class FireTimes:
    """The mean time from a FIRE's append to its commit, and the times that follow from it."""

    def __init__(self) -> None:
        self._mean_ms = 0.0
        self._measured, self._appended_ms = LogIndex(0), MonoMs(0)

    def ahead_ms(self, mono_ms: MonoMs) -> int:
        """Return the milliseconds between the append of a FIRE at `mono_ms` and its read time."""
        return self._ahead_quiet_ms if mono_ms >= self._quiet_ms else self._ahead_dense_ms

    def wait_ms(self, due_in_ms: int, mono_ms: MonoMs) -> int:
        """Return in how many milliseconds to append the next FIRE; 0 or less: now.

        `due_in_ms`: milliseconds until the next timer is due.
        """
        gap_ms = min(int(GAP_COMMITS * self._mean_ms), GAP_MS_MAX)
        dense = max(due_in_ms - self._ahead_dense_ms, self._appended_ms + gap_ms - mono_ms)
        quiet = max(due_in_ms - self._ahead_quiet_ms, self._quiet_ms - mono_ms)
        return min(dense, quiet)

    @property
    def _quiet_ms(self) -> MonoMs:
        """From then on, the last FIRE is so long ago that the next one follows none."""
        return MonoMs(self._appended_ms + GAP_MS_MAX)

    @property
    def _ahead_dense_ms(self) -> int:
        return min(int(self._mean_ms), AHEAD_MS_MAX)

    @property
    def _ahead_quiet_ms(self) -> int:
        return min(int(self._mean_ms + _SPARE_MS), AHEAD_MS_MAX)

    def appended(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note a FIRE. If an earlier one is not yet committed, only the later one is measured."""
        self._measured, self._appended_ms = index, mono_ms

    def committed(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note that the entries up to `index` are committed."""
        if 0 < self._measured <= index:
            self._measured = LogIndex(0)
            self._mean_ms += (mono_ms - self._appended_ms - self._mean_ms) / _WEIGHT
