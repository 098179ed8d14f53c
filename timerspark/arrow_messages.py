"""Pages of fired messages as Arrow batches: columns of the wire become columns of Spark."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from timerclient.rows import rows
from timerclient.rows.peeked_messages import MessagePage
from timerclient.values import ids

_STAMP: Final = pa.timestamp("us", tz="UTC")
_DIGITS: Final = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", np.uint8)
_TEXTS: Final = pa.map_(pa.string(), pa.string())


def batch_of(page: MessagePage, topic: str, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the wanted columns of a page that has messages."""
    arrays = [_MAKE[name](page, topic) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=[*columns])


def _stamps(unix_ms: Any) -> pa.Array:
    return pa.array(np.array(unix_ms, np.int64) * 1000).cast(_STAMP)


def _binary(sizes: Sequence[int], blob: bytes, kind: pa.DataType, *, nulls: bool) -> pa.Array:
    ends = np.zeros(len(sizes) + 1, np.int32)
    lengths = np.array(sizes, np.int32)
    np.cumsum(lengths, out=ends[1:])
    valid = None
    if nulls and not lengths.all():
        valid = pa.py_buffer(np.packbits(lengths > 0, bitorder="little"))
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(blob)]
    return pa.Array.from_buffers(kind, len(sizes), buffers)


def _payloads(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    return _binary(of.payload_sizes, of.payloads, pa.binary(), nulls=False)


def _keys(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    sizes = of.key_sizes if len(of.key_sizes) else [0] * len(page)
    return _binary(sizes, of.keys, pa.string(), nulls=True)


def _headers(page: MessagePage, _: str) -> pa.Array:
    of = page.columns
    if not of.headers:
        return pa.array([[]] * len(page), _TEXTS)
    each = rows.slices(of.headers_sizes, of.headers)
    return pa.array([[*rows.decode_headers(one).items()] for one in each], _TEXTS)


def _raw_ids(page: MessagePage) -> Any:
    """Return the raw ids, (n, 15) bytes."""
    return np.frombuffer(page.columns.timer_ids, np.uint8).reshape(-1, ids.SIZE)


def _id_texts(page: MessagePage, _: str) -> pa.Array:
    """Return `ids.to_text` of all ids: each five bits are a digit."""
    digits = np.packbits(np.unpackbits(_raw_ids(page), axis=1).reshape(-1, 5), axis=1) >> 3
    texts = _DIGITS[digits.ravel()].tobytes()
    return _binary([ids.TEXT_SIZE] * len(page), texts, pa.string(), nulls=False)


def _dues(page: MessagePage, _: str) -> pa.Array:
    """Return `ids.due_ms_of` of all ids: their first six bytes, big-endian."""
    wide = np.zeros((len(page), 8), np.uint8)
    wide[:, 2:] = _raw_ids(page)[:, :6]
    return _stamps(wide.view(">i8").ravel())


_MAKE: Final[Mapping[str, Callable[[MessagePage, str], Any]]] = {
    "topic": lambda page, topic: pa.array([topic] * len(page), pa.string()),
    "offset": lambda page, _: pa.array([*page.columns.queue_offsets], pa.int64()),
    "id": _id_texts,
    "key": _keys,
    "payload": _payloads,
    "headers": _headers,
    "due": _dues,
    "requested": lambda page, _: _stamps(page.columns.due_ms),
    "fired_at": lambda page, _: _stamps(page.columns.fired_at_ms),
}
"""Column -> its values of a page."""
