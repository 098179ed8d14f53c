"""How late timers are, topic by topic, in the memory of one leader.

    fired        fired_at - due, of every timer that a FIRE moved
    handed out   handed_out - due, of every first delivery to a group

One row of counters per topic, all in one table: a batch of whatever topics is counted by one call,
and ten thousand topics take three megabytes. Metrics show all topics together (a label per topic
would be a series for each); one topic is told when it is asked for.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.columns import I64

BOUNDS_MS: Final = (
    *(2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500),
    *(1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000),
)
TOPICS_MAX: Final = 16_384
"""Topics that are counted by themselves; later ones only with the others."""

_EDGES: Final = np.array(BOUNDS_MS, np.int64)


class Histogram(NamedTuple):
    """Of one topic."""

    counts: I64
    """(len(BOUNDS_MS) + 1,): by at most so much, and by more than the bound before."""
    sum_ms: int


class Lateness:
    """A histogram for each topic."""

    def __init__(self) -> None:
        self._counts = np.zeros((64, len(BOUNDS_MS) + 1), np.int64)
        self._sums = np.zeros(64, np.int64)

    def observe(self, topics: npt.NDArray[np.integer] | int, late_ms: I64) -> None:
        """Count a batch, (n,): the topics' ids, or the one that they all have."""
        last = int(np.max(topics)) if len(late_ms) else 0
        if isinstance(topics, int):
            topics = np.full(len(late_ms), topics)
        if last >= TOPICS_MAX:
            mine = topics < TOPICS_MAX
            topics, late_ms, last = topics[mine], late_ms[mine], TOPICS_MAX - 1
        if last >= len(self._sums):
            self._grow(last + 1)
        np.add.at(self._counts, (topics, _EDGES.searchsorted(late_ms)), 1)
        np.add.at(self._sums, topics, late_ms)

    def _grow(self, size: int) -> None:
        more = min(max(size, 2 * len(self._sums)), TOPICS_MAX) - len(self._sums)
        self._counts = np.pad(self._counts, ((0, more), (0, 0)))
        self._sums = np.pad(self._sums, (0, more))

    def of(self, topic: int) -> Histogram:
        """Return a topic's histogram."""
        if topic >= len(self._sums):
            return Histogram(np.zeros(len(BOUNDS_MS) + 1, np.int64), 0)
        return Histogram(self._counts[topic], int(self._sums[topic]))
