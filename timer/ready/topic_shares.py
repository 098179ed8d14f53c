"""Shares: rows split by topic, with the sums that each topic's state adds up.

    rows      b a c a b a ...             in firing order, or in the order of scheduling

    shares    a: a a a   b: b b   c: c    by topic id, each in the order of `rows`

The sums of all shares are computed together. Ten calls of numpy for each of a thousand topics
would block the event loop for 50 ms.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from timer.model.columns import U64, RowArray
from timer.model.firing_order import raw, stable_order
from timer.model.timer_id import mix, mix_one

MASK: Final = (1 << 64) - 1


class TopicRows(NamedTuple):
    """The rows of one topic."""

    topic: int
    rows: RowArray
    sum: int
    """Sum of the rows' hashes: see `row_sum`. 0 without sums."""
    payload_bytes: int
    """0 without sums."""


def shares_of(rows: RowArray, *, sums: bool) -> Iterator[TopicRows]:
    """Yield the rows by topic, at least one row in each share; `sums`: with their sums."""
    topics = rows["topic"]
    if not len(rows):
        return
    if len(rows) == 1 or (topics == topics[0]).all():
        own = (row_sum(rows), payload_bytes(rows)) if sums else (0, 0)
        yield TopicRows(int(topics[0]), rows, *own)
        return
    order = stable_order(topics.astype(np.int64))
    rows = raw(rows).take(order).view(rows.dtype)
    topics = rows["topic"]
    starts = np.concatenate([[0], np.flatnonzero(topics[1:] != topics[:-1]) + 1])
    ids, first = topics[starts].tolist(), starts.tolist()
    totals = sizes = [0] * len(ids)
    if sums:
        totals = np.add.reduceat(row_hashes(rows), starts).tolist()
        sizes = np.add.reduceat(rows["payload_size"].astype(np.int64), starts).tolist()
    for topic, start, stop, total, size in zip(
        ids, first, [*first[1:], len(rows)], totals, sizes, strict=True
    ):
        yield TopicRows(topic, rows[start:stop], total, size)


def row_sum(rows: RowArray) -> int:
    """Return the order-free sum of hashes of (due, seq, payload size), modulo 2 ** 64."""
    if len(rows) == 1:
        row = rows[0]
        pair = mix_one(mix_one(row["due_ms"].item()) ^ row["seq"].item())
        return mix_one(pair ^ row["payload_size"].item())
    return int(np.add.reduce(row_hashes(rows), dtype=np.uint64))


def row_hashes(rows: RowArray) -> U64:
    """Return the hashes that `row_sum` adds up, (n, uint64)."""
    hashes = mix(mix(rows["due_ms"].astype(np.uint64)) ^ rows["seq"])
    return mix(hashes ^ rows["payload_size"])


def payload_bytes(rows: RowArray) -> int:
    """Return the sum of the rows' payload sizes, bytes."""
    sizes = rows["payload_size"]
    return sizes.item() if len(sizes) == 1 else int(sizes.sum(dtype=np.int64))
