"""What a FIRE takes out of the store, and where its limits end it."""

from typing import NamedTuple

import numpy as np

from timer.model.columns import Buffers, RowArray, row_bytes


class FiredRows(NamedTuple):
    """What one FIRE moves out of the store."""

    rows: RowArray
    """In (due, seq) order."""
    bufs: Buffers
    """Exactly the buffers that `rows` point into."""
    limited: bool
    """More rows are due by the read time."""


def within(rows: RowArray, rows_max: int, bytes_max: int, topics_max: int | None = None) -> int:
    """Return how many of the first rows fit into the limits.

    `rows_max` rows; `bytes_max` bytes of payloads, keys and headers, but at least one row; rows of
    `topics_max` topics, None: of any number.
    """
    stop = min(rows_max, len(rows))
    if stop:
        ends = np.cumsum(row_bytes(rows[:stop]))
        if ends[-1] > bytes_max:
            stop = max(1, int(ends.searchsorted(bytes_max, "right")))
    if topics_max is None or stop <= topics_max:
        return stop
    _, first = np.unique(rows["topic"][:stop], return_index=True)
    return stop if len(first) <= topics_max else int(np.partition(first, topics_max)[topics_max])
