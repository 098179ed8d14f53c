"""Rows of a table as requests: Arrow columns become columns of the wire.

A request takes consecutive rows. The same rows in the same batches give the same requests.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    DayTimeIntervalType,
    IntegralType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampType,
)

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.values.errors import InvalidRequest
from timerspark.format_options import FormatOptions

CHECKED_ROWS_MAX: Final = 1_000
"""Rows of one request whose rows have keys, headers, topics, ordering keys or priorities. A node
checks these one by one, and a step of its event loop must be short."""
HEADERS_MAX: Final = 16_384
"""Headers of one request: half of the names and values that the cluster takes."""
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "topic": (StringType,),
    "payload": (BinaryType, StringType),
    "key": (StringType,),
    "headers": (MapType,),
    "due": (TimestampType,),
    "delay": (DayTimeIntervalType, NumericType),
    "ordering_key": (StringType,),
    "priority": (IntegralType,),
}
_NULLABLE: Final = frozenset({"key", "headers", "ordering_key", "priority"})
_CHECKED_COLUMNS: Final = frozenset({*_NULLABLE, "topic"})


def check_columns(schema: StructType, options: FormatOptions) -> None:
    """Check the columns of a table that is to be written.

    Raises:
        InvalidRequest: A column is unknown, missing, or of the wrong type.
    """
    names = schema.names
    for each in schema.fields:
        kind = each.dataType.simpleString()
        if each.name not in _TYPES:
            raise InvalidRequest.of("column", each.name, f"must be one of {', '.join(_TYPES)}")
        if not isinstance(each.dataType, _TYPES[each.name]):
            known = " or ".join(one.__name__.removesuffix("Type") for one in _TYPES[each.name])
            raise InvalidRequest.of(each.name, kind, f"the column must be of the type {known}")
        if each.name == "headers" and kind != "map<string,string>":
            raise InvalidRequest.of("headers", kind, "the column must be MAP<STRING, STRING>")
    if "payload" not in names:
        raise InvalidRequest.of("columns", names, "there must be a column payload")
    if ("due" in names) == ("delay" in names):
        raise InvalidRequest.of("columns", names, "there must be a column due or a column delay")
    if ("topic" in names) == bool(options.topic):
        limit = "there must be a column topic or the option topic, and not both"
        raise InvalidRequest.of("topic", options.topic, limit)
    if options.on_conflict != "reject" and "key" not in names:
        raise InvalidRequest.of("on_conflict", options.on_conflict, "there must be a column key")


def requests_of(
    batches: Iterable[pa.RecordBatch], options: FormatOptions
) -> Iterator[pb.ScheduleRequest]:
    """Yield the requests of a partition's rows, without their heads.

    Raises:
        InvalidRequest: A value is null or out of range.
    """
    mode = rows.conflict_mode(options.on_conflict)
    for batch in batches:
        _check_nulls(batch)
        for part in _parts(batch, options):
            request = pb.ScheduleRequest(on_conflict=mode)
            for topic, some in _by_topic(part, options.topic):
                _write_columns(request.timers.add(topic=topic), some)
            yield request


def _check_nulls(batch: pa.RecordBatch) -> None:
    for name in batch.schema.names:
        if name not in _NULLABLE and batch[name].null_count:
            raise InvalidRequest.of(name, None, "no row may have a null here")


def _parts(batch: pa.RecordBatch, options: FormatOptions) -> Iterator[pa.RecordBatch]:
    """Yield slices of a batch that fit into a request each."""
    careful = _CHECKED_COLUMNS & {*batch.schema.names}
    most = options.rows_per_request
    if careful:
        most = min(most, CHECKED_ROWS_MAX)
    if "headers" in careful:
        widest = int(np.diff(batch["headers"].offsets.to_numpy()).max(initial=1))
        most = max(1, min(most, HEADERS_MAX // widest))
    sizes = pc.binary_length(batch["payload"]).to_numpy(zero_copy_only=False)
    if "headers" in careful:
        sizes = sizes + _header_bytes(batch["headers"])
    ends = np.cumsum(sizes, dtype=np.int64)
    start, rows_all = 0, batch.num_rows
    while start < rows_all:
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + options.bytes_per_request, side="right"))
        stop = min(max(fitting, start + 1), start + most, rows_all)
        yield batch.slice(start, stop - start)
        start = stop


def _header_bytes(column: pa.MapArray) -> Any:
    """Return the bytes of each row's headers."""
    names, values = (
        _numbers(pc.binary_length(each).fill_null(0)) for each in (column.keys, column.items)
    )
    before = np.concatenate([[0], np.cumsum(names + values, dtype=np.int64)])
    return np.diff(before[column.offsets.to_numpy()])


def _by_topic(part: pa.RecordBatch, topic: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    if "topic" not in part.schema.names:
        yield topic, part
        return
    names = part["topic"].unique().to_pylist()
    for name in names:
        yield name, part if len(names) == 1 else part.filter(pc.equal(part["topic"], name))


def _write_columns(to: pb.TimerColumns, part: pa.RecordBatch) -> None:
    names = part.schema.names
    if "due" in names:
        stamps = part["due"].cast(pa.timestamp("us", part["due"].type.tz)).cast(pa.int64())
        to.due_ms.extend(_checked_ms("due", -(-_numbers(stamps) // 1000), rows.DUE_MS_MIN))
    else:
        to.delay_ms.extend(_checked_ms("delay", _delays_ms(part["delay"])))
    sizes, to.payloads = _bytes_of(part["payload"])
    to.payload_sizes.extend(sizes)
    if "key" in names:
        sizes, to.keys = _bytes_of(part["key"].fill_null(""))
        to.key_sizes.extend(sizes if to.keys else ())
    if "headers" in names:
        sizes, to.headers = _headers_of(part["headers"])
        to.headers_sizes.extend(sizes if to.headers else ())
    if "ordering_key" in names:
        sizes, to.ordering_keys = _bytes_of(part["ordering_key"].fill_null(""))
        to.ordering_key_sizes.extend(sizes if to.ordering_keys else ())
    if "priority" in names:
        levels = _numbers(part["priority"].fill_null(rows.PRIORITY_DEFAULT)).astype(np.int64)
        if not 0 <= int(levels.min()) <= int(levels.max()) <= rows.PRIORITY_MAX:
            wrong = int(levels.min()) if levels.min() < 0 else int(levels.max())
            raise InvalidRequest.of("priority", wrong, f"must be 0 to {rows.PRIORITY_MAX}")
        if (levels != rows.PRIORITY_DEFAULT).any():
            to.priorities.extend(levels.tolist())


def _headers_of(column: pa.MapArray) -> tuple[list[int], bytes]:
    """Return the sizes of the rows' headers, and all headers, as `rows.encode_headers` does it."""
    column = column.fill_null([])
    ends = column.offsets.to_numpy()
    begin, end = int(ends[0]), int(ends[-1])
    pairs = [each[begin:end].cast(pa.binary()) for each in (column.keys, column.items)]
    if pairs[1].null_count:
        raise InvalidRequest.of("headers", None, "no value may be null")
    names_and_values = np.arange(2 * (end - begin)).reshape(2, -1).T.ravel()
    texts = pa.concat_arrays(pairs).take(pa.array(names_and_values))
    sizes = np.diff(np.frombuffer(texts.buffers()[1], np.int32)[: len(texts) + 1])
    if len(sizes) and int(sizes.max()) > rows.TEXT_SIZE_MAX:
        limit = f"a name or value has at most {rows.TEXT_SIZE_MAX} bytes"
        raise InvalidRequest.of("headers", f"{int(sizes.max())} bytes", limit)
    heads = pa.py_buffer(sizes.astype("<u2").tobytes())
    lengths = pa.Array.from_buffers(pa.binary(2), len(texts), [None, heads]).cast(pa.binary())
    blob = pc.binary_join_element_wise(lengths, texts, b"")
    before = np.concatenate([[0], np.cumsum(sizes + 2, dtype=np.int64)])
    row_sizes: list[int] = np.diff(before[2 * (ends - begin)]).tolist()
    return row_sizes, _bytes_of(blob)[1]


def _numbers(column: pa.Array) -> Any:
    return column.to_numpy(zero_copy_only=False)


def _delays_ms(column: pa.Array) -> Any:
    if pa.types.is_duration(column.type):
        micros = _numbers(column.cast(pa.duration("us")).cast(pa.int64()))
        return -(-micros // 1000)
    with np.errstate(over="ignore"):  # infinity is out of range, too
        return np.ceil(_numbers(column.cast(pa.float64(), safe=False)) * 1000)


def _checked_ms(field: str, ms: Any, least: int = 0) -> list[int]:
    wrong = ms[~((ms >= least) & (ms <= rows.DUE_MS_MAX))]
    if len(wrong):
        limit = rows.DUE_LIMIT if least else f"must be 0 to {rows.DUE_MS_MAX} ms"
        raise InvalidRequest.of(field, f"{wrong[0]:.17g} ms", limit)
    found: list[int] = ms.astype(np.int64).tolist()
    return found


def _bytes_of(column: pa.Array) -> tuple[list[int], bytes]:
    """Return the sizes of a column's values, and the values, one after the other."""
    column = column.cast(pa.large_binary())
    ends = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: len(column) + 1]
    data = column.buffers()[2]
    blob = b"" if data is None else data[int(ends[0]) : int(ends[-1])].to_pybytes()
    sizes: list[int] = np.diff(ends).tolist()
    return sizes, blob
