"""When the leader appends a FIRE: ahead of its time, and not too soon after the last one.

    appended -- commit: in time, mostly -- header's time: the leader applies it, messages go out
    appended -- the least time between two --> the next FIRE is appended

A FIRE's read time and its header's time lie ahead of the clock. The leader applies no entry before
its header's time (cluster/state/state_plane.py). No timer fires early, and entries behind the FIRE
wait with it: a cancel that comes in this window loses, and its answer comes when the timer is due.

A timer that is due alone fires at its due time. In a dense stream the gap makes groups: each FIRE
leads to deliveries, acks and their entries, so FIREs that follow each other at once would take the
processors' time. A commit takes longer on a busy machine, and the gap grows with it.

A FIRE is ahead by the mean time of a commit. About half of the commits take longer. So a FIRE
without another one shortly before is ahead by a little more. In a dense stream this would delay the
next FIRE, as each one waits until the last one is applied.
"""

from typing import Final

from timer.model.units import LogIndex, MonoMs

AHEAD_MS_MAX: Final = 10
"""Most time by which a FIRE precedes its timers' due time. Slower commits delay them. The entries
behind the FIRE wait at most this long."""
GAP_MS_MAX: Final = 10
"""The longest time that a timer waits for the next FIRE, if none is in flight."""
GAP_COMMITS: Final = 2
"""The gap, in mean times of a commit."""
_SPARE_MS: Final = 1
"""A FIRE without another one shortly before is ahead by the rounded mean time of a commit and this.
If the mean is below 1.5 ms, the FIRE is ahead by twice the mean, rounded down."""
_WEIGHT: Final = 8
"""A commit moves the mean of the commit times by 1/_WEIGHT of its distance from it."""


class FireTimes:
    """The mean time from a FIRE's append to its commit, and the times that follow from it."""

    def __init__(self) -> None:
        self._mean_ms = 0.0
        self._measured_index, self._appended_ms = LogIndex(0), MonoMs(0)

    def next(self, due_in_ms: int, mono_ms: MonoMs) -> tuple[int, int]:
        """Return (milliseconds until the append of the next FIRE, milliseconds it is ahead).

        The first one is 0 or less for an append now; the second one is of an append now.

        Args:
            due_in_ms: Milliseconds until the next timer is due; negative: it is overdue.
            mono_ms: The time now.
        """
        gap_ms = min(int(GAP_COMMITS * self._mean_ms), GAP_MS_MAX)
        usual_ms = min(int(self._mean_ms), AHEAD_MS_MAX)
        spare_ms = min(_SPARE_MS + 0.5, self._mean_ms)  # 0.5 rounds; commits may take no time
        alone_ms = min(int(self._mean_ms + spare_ms), AHEAD_MS_MAX)
        gap_left_ms = self._appended_ms + gap_ms - mono_ms
        # From then on, neither the gap nor the time ahead overlaps with the last FIRE.
        alone_in_ms = self._appended_ms + max(gap_ms + alone_ms, GAP_MS_MAX) - mono_ms
        wait_ms = min(
            max(due_in_ms - usual_ms, gap_left_ms), max(due_in_ms - alone_ms, alone_in_ms)
        )
        if alone_in_ms > 0:
            return wait_ms, usual_ms
        return wait_ms, min(alone_ms, max(due_in_ms, usual_ms))  # not behind the due time

    def on_appended(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note a FIRE. If an earlier one is not yet committed, only the later one is measured."""
        self._measured_index, self._appended_ms = index, mono_ms

    def on_committed(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note that the entries up to `index` are committed."""
        if 0 < self._measured_index <= index:
            self._measured_index = LogIndex(0)
            self._mean_ms += (mono_ms - self._appended_ms - self._mean_ms) / _WEIGHT
