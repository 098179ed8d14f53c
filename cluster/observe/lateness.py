"""Lateness of timers by topic, in the memory of one leader.

    fired        fired_at - due, of every timer that a FIRE moved and did not release from a pause
    handed out   handed_out - due, of every first delivery to a group

All topics share one table with a row of counters each. So one call counts a batch of many topics,
and ten thousand topics take three megabytes. Metrics show all topics together, because a label per
topic would be a series for each. A status request can return one topic's histogram.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from timer.model.columns import I64

BOUNDS_MS: Final = (
    *(2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500),
    *(1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000),
)
TOPICS_MAX: Final = 16_384
"""Topics with counters of their own, at most; timers of further topics are not counted by topic."""

_EDGES: Final = np.array(BOUNDS_MS, np.int64)


class Histogram(NamedTuple):
    """The histogram of one topic."""

    counts: I64
    """(len(BOUNDS_MS) + 1,): timers late by at most this bound and more than the one before."""
    sum_ms: int


class Lateness:
    """A histogram for each topic."""

    def __init__(self) -> None:
        self._counts = np.zeros((64, len(BOUNDS_MS) + 1), np.int64)
        self._sums = np.zeros(64, np.int64)
        self._rows: dict[int, int] = {}
        """Topic -> its row; row 0 is shared by topics without a row."""
        self._free: list[int] = []

    def observe(self, topics: Sequence[int], sizes: Sequence[int], late_ms: I64) -> None:
        """Count a batch (n,): `sizes[i]` values of `topics[i]`, one topic after another."""
        mine = np.array([self._row_of(topic) for topic in topics], np.intp)
        rows = mine.repeat(np.array(sizes, np.intp))
        np.add.at(self._counts, (rows, _EDGES.searchsorted(late_ms)), 1)
        np.add.at(self._sums, rows, late_ms)

    def forget(self, topic: int) -> None:
        """Delete a topic's counters; another topic may get its row."""
        row = self._rows.pop(topic, None)
        if row is not None:
            self._counts[row] = self._sums[row] = 0
            self._free.append(row)

    def of(self, topic: int) -> Histogram:
        """Return the histogram of a topic; empty if it has no row."""
        row = self._rows.get(topic)
        if row is None:
            return Histogram(np.zeros(len(BOUNDS_MS) + 1, np.int64), 0)
        return Histogram(self._counts[row], int(self._sums[row]))

    def _row_of(self, topic: int) -> int:
        row = self._rows.get(topic)
        if row is not None:
            return row
        if len(self._rows) == TOPICS_MAX:
            return 0
        row = self._rows[topic] = self._free.pop() if self._free else len(self._rows) + 1
        if row >= len(self._sums):
            self._counts = np.pad(self._counts, ((0, row), (0, 0)))
            self._sums = np.pad(self._sums, (0, row))
        return row
