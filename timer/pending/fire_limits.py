"""The limits of a FIRE: how many of the due rows it takes out of the store."""

from typing import NamedTuple

import numpy as np

from timer.model.columns import U32, Buffers, RowArray, row_bytes


class FiredRows(NamedTuple):
    """Rows that one FIRE takes out of the store."""

    rows: RowArray
    """In (due, seq) order."""
    bufs: Buffers
    """The buffers that `rows` point into, and no others."""
    limited: bool
    """True if more rows are due by the read time."""


def count_fitting(
    rows: RowArray,
    rows_max: int,
    bytes_max: int,
    topics_max: int | None = None,
    counted_topics: U32 | None = None,
) -> int:
    """Return how many of the first rows fit into the limits.

    Limits: `rows_max` rows; `bytes_max` bytes of payloads, keys and headers, except that one row
    always fits; rows of `topics_max` topics (None: no limit). If `counted_topics` is
    given, only these topics count towards `topics_max`.
    """
    stop = min(rows_max, len(rows))
    if stop:
        ends = np.cumsum(row_bytes(rows[:stop]))
        if ends[-1] > bytes_max:
            stop = max(1, int(ends.searchsorted(bytes_max, "right")))
    if topics_max is None or stop <= topics_max:
        return stop
    topics = rows["topic"][:stop]
    places = (
        np.arange(stop)
        if counted_topics is None
        else np.flatnonzero(np.isin(topics, counted_topics))
    )
    _, first = np.unique(topics[places], return_index=True)
    if len(first) <= topics_max:
        return stop
    return int(places[np.partition(first, topics_max)[topics_max]])
