"""Pages of fired messages as Arrow batches: columns of the wire become columns of Spark."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from timerclient.rows import rows
from timerclient.rows.peeked_messages import MessagePage
from timerclient.values import ids
from timerspark import arrow_columns


def batch_of(page: MessagePage, topic: str, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the wanted columns of a page that has messages."""
    arrays = [_MAKE[name](page, topic) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=[*columns])


def _sizes(page: MessagePage, given: Sequence[int]) -> Sequence[int]:
    """Return the sizes of a column that the page leaves out if all its values are empty."""
    return given or [0] * len(page)


def _payloads(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    return arrow_columns.binary(of.payload_sizes, of.payloads, pa.binary())


def _keys(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    return arrow_columns.binary(_sizes(page, of.key_sizes), of.keys, pa.string(), nulls=True)


def _headers(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    return arrow_columns.headers(_sizes(page, of.headers_sizes), of.headers)


def _ordering_keys(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    sizes = _sizes(page, of.ordering_key_sizes)
    return arrow_columns.binary(sizes, of.ordering_keys, pa.string(), nulls=True)


def _priorities(page: MessagePage, _: str) -> pa.Array:
    if not (given := page.columns.priorities):
        return arrow_columns.repeat(rows.PRIORITY_DEFAULT, pa.int32(), len(page))
    return pa.array([*given], pa.int32())


def _raw_ids(page: MessagePage) -> Any:
    """Return the raw ids, (n, 15) bytes."""
    return np.frombuffer(page.columns.timer_ids, np.uint8).reshape(-1, ids.SIZE)


def _dues(page: MessagePage, _: str) -> pa.Array:
    """Return `ids.due_ms_of` of all ids: their first six bytes, big-endian."""
    wide = np.zeros((len(page), 8), np.uint8)
    wide[:, 2:] = _raw_ids(page)[:, :6]
    return arrow_columns.stamps(wide.view(">i8").ravel())


_MAKE: Final[Mapping[str, Callable[[MessagePage, str], Any]]] = {
    "topic": lambda page, topic: arrow_columns.repeat(topic, pa.string(), len(page)),
    "offset": lambda page, _: pa.array([*page.columns.queue_offsets], pa.int64()),
    "id": lambda page, _: arrow_columns.id_texts(_raw_ids(page)),
    "key": _keys,
    "payload": _payloads,
    "headers": _headers,
    "ordering_key": _ordering_keys,
    "priority": _priorities,
    "due": _dues,
    "requested": lambda page, _: arrow_columns.stamps(page.columns.due_ms),
    "fired_at": lambda page, _: arrow_columns.stamps(page.columns.fired_at_ms),
}
"""Column -> its values of a page."""
