"""Columns of bytes and numbers as Arrow arrays, without an object per row."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from timerclient.values import ids
from timerclient.values.errors import InvalidRequest

STAMP: Final = pa.timestamp("us", tz="UTC")
TEXTS: Final = pa.map_(pa.string(), pa.string())
_DIGITS: Final = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", np.uint8)


def stamps(unix_ms: Any) -> pa.Array:
    """Return Unix milliseconds as timestamps."""
    return pa.array(np.array(unix_ms, np.int64) * 1000).cast(STAMP)


def binary(sizes: Any, blob: Any, kind: pa.DataType, *, nulls: bool = False) -> pa.Array:
    """Return the values of a column of bytes. `nulls`: an empty value is null."""
    lengths = np.array(sizes, np.int32)
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    valid = None
    if nulls and not lengths.all():
        valid = pa.py_buffer(np.packbits(lengths > 0, bitorder="little"))
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(blob)]
    return pa.Array.from_buffers(kind, len(lengths), buffers)


def headers(sizes: Any, blob: Any) -> pa.Array:
    """Return the headers of rows, encoded as `rows.encode_headers` does it, as maps.

    Raises:
        InvalidRequest: The bytes do not have that form.
    """
    lengths = np.array(sizes, np.int64)
    ends = np.cumsum(lengths)
    data = np.frombuffer(blob, np.uint8)
    at, rows = ends - lengths, np.flatnonzero(lengths)
    counts = np.zeros(len(lengths) + 1, np.int32)
    starts: list[Any] = []
    while len(rows):  # each round takes one text of each row that has a further one
        head = at[rows]
        if (head + 2 > ends[rows]).any():
            raise InvalidRequest.of("headers", f"{len(data)} bytes", "a text is cut off")
        starts.append(head)
        counts[rows + 1] += 1
        at[rows] = head + 2 + data[head] + (data[head + 1].astype(np.int64) << 8)
        rows = rows[at[rows] < ends[rows]]
    if (at != ends).any() or (counts % 2).any():
        raise InvalidRequest.of("headers", f"{len(data)} bytes", "a text is cut off")
    first = np.sort(np.concatenate([np.zeros(0, np.int64), *starts]))
    edges = np.append(np.stack([first, first + 2], axis=1).ravel(), len(data)).astype(np.int32)
    pieces = [None, pa.py_buffer(edges), pa.py_buffer(blob)]
    both = pa.Array.from_buffers(pa.binary(), 2 * len(first), pieces)  # size, text, size, text, …
    names, values = (
        both.take(pa.array(np.arange(start, 2 * len(first), 4))).cast(pa.string())
        for start in (1, 3)
    )
    return pa.MapArray.from_arrays(pa.array(np.cumsum(counts, dtype=np.int32) // 2), names, values)


def id_texts(raw: Any) -> pa.Array:
    """Return `ids.to_text` of raw ids, (n, 15) bytes: each five bits are a digit."""
    digits = np.packbits(np.unpackbits(raw, axis=1).reshape(-1, 5), axis=1) >> 3
    texts = _DIGITS[digits.ravel()].tobytes()
    return binary(np.full(len(raw), ids.TEXT_SIZE), texts, pa.string())


def repeat(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """Return a column of one value. None: a column of nulls."""
    if value is None:
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(value, kind), count)


def join(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches of one schema as one."""
    return pa.concat_batches(batches) if len(batches) > 1 else batches[0]
