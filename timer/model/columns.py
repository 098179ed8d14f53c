"""Columns of timers: the payload of a SCHEDULE entry, format version 3, and their row form.

A SCHEDULE entry has all requests that waited when the leader appended it: the requests of many
producers ("parts"), their rows one after the other. Little-endian:

    0   4  parts           p >= 1
    4   4  rows            n >= 1, the sum over the parts
    8   4  flags           1: keys are present; 2: headers are present; 4: request ids are
    12  4  reserved        0
    16     parts           p x (producer_id u64, sequence u64, rows u32, on_conflict u32, body u64:
                           a checksum of the producer's request; 0 without a producer)
           requests        p x (id, padded with zeros to 64 bytes; body u64, a hash of the request;
                           until_ms i64, time to which the id is remembered); only if present; a
                           part without an id: zeros
           due_ms          n x i64   effective due time, decided at append
           requested_ms    n x i64   requested due time (a delay is resolved at append)
           topic           n x u32   TopicId
           payload_size    n x u32
           key_size        n x u32   only if present
           headers_size    n x u32   only if present
           payloads        bytes, one after the other
           keys            bytes     only if present
           headers         bytes     only if present; each in the form of `encode_headers`, perhaps
                                     with a row's traits in front (timer/model/row_traits.py)
In memory a row is one element of a numpy structured array (`ROW`). It points at its bytes by (buf,
start, size). So one vectorised call sorts, filters or takes many rows. A payload is sliced out only
when it is delivered or written to a run.
"""

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.ma  # np.unique imports it at its first call, which takes 40 ms
import numpy.typing as npt

from timer.model.units import DUE_MS_MAX, ProducerId, UnixMs

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
RowArray = npt.NDArray[np.void]
"""A numpy array of dtype `ROW`."""

ROW: Final = np.dtype(
    [
        ("due_ms", "<i8"),
        ("seq", "<u8"),
        ("requested_ms", "<i8"),
        ("topic", "<u4"),
        ("buf", "<u4"),  # number of the buffer in its owner's table
        ("payload_start", "<u4"),
        ("payload_size", "<u4"),
        ("key_start", "<u4"),
        ("key_size", "<u4"),
        ("headers_start", "<u4"),
        ("headers_size", "<u4"),
    ]
)
TOMBSTONE: Final = 0xFFFF_FFFF
"""Value of `topic` in a row that is no timer. It cancels the timer with the same (due_ms, seq),
whose topic is in `requested_ms`."""

_PREFIX: Final = struct.Struct("<IIII")
PART: Final = np.dtype(
    [
        ("producer_id", "<u8"),
        ("sequence", "<u8"),
        ("rows", "<u4"),
        ("on_conflict", "<u4"),
        ("body", "<u8"),
    ]
)
REQUEST_ID_BYTES_MAX: Final = 64
REQUEST: Final = np.dtype(
    [("id", f"S{REQUEST_ID_BYTES_MAX}"), ("body", "<u8"), ("until_ms", "<i8")]
)
HAS_KEYS: Final = 1
HAS_HEADERS: Final = 2
HAS_REQUESTS: Final = 4


class OnConflict(enum.IntEnum):
    """The treatment of a new timer if a pending timer of its topic has the same key."""

    REJECT = 0
    """The new timer is not scheduled."""
    REPLACE = 1
    """The pending timer is cancelled."""
    KEEP = 2
    """The new timer is not scheduled. The result has the id of the pending timer."""
    UPDATE = 3
    """The pending timer is cancelled. Without one, the new timer is not scheduled."""


REPLACING: Final = (OnConflict.REPLACE, OnConflict.UPDATE)
"""A new timer of these modes cancels the pending timer with its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A column of byte strings: `sizes` (n, uint32), and their bytes one after the other."""

    sizes: U32
    blob: bytes | memoryview

    def __post_init__(self) -> None:
        """Check that sizes and bytes agree."""
        assert int(self.sizes.sum(dtype=np.int64)) == len(self.blob), (
            int(self.sizes.sum(dtype=np.int64)),
            len(self.blob),
        )

    @classmethod
    def of(cls, values: Sequence[bytes]) -> "Binary":
        """Return a column of `values`."""
        sizes = np.fromiter(map(len, values), dtype=np.uint32, count=len(values))
        return cls(sizes=sizes, blob=b"".join(values))

    def values(self) -> list[bytes]:
        """Return the byte strings, one by one."""
        ends, blob = np.cumsum(self.sizes, dtype=np.int64).tolist(), bytes(self.blob)
        return [blob[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def values_at(column: Binary, places: npt.NDArray[np.intp]) -> Binary:
    """Return the byte strings at these ascending places, as a new column."""
    if len(places) == len(column.sizes):
        return column
    ends = np.cumsum(column.sizes, dtype=np.int64)[places]
    sizes = column.sizes[places]
    pieces = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    return Binary(sizes=sizes, blob=b"".join([column.blob[start:end] for start, end in pieces]))


class RequestId(NamedTuple):
    """A client's id of a request that it may repeat (timer/state/request_ids.py)."""

    text: bytes
    """1 to REQUEST_ID_BYTES_MAX bytes of UTF-8 without a zero byte."""
    body: int
    """Hash of the request, 64 bits. The same id with another body is another request."""
    until_ms: UnixMs
    """The result is remembered up to this time of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One producer's request inside a SCHEDULE entry: its rows as columns of equal length n."""

    producer_id: ProducerId
    sequence: int
    """1, 2, 3, … per producer. 0 if producer_id is 0."""
    due_ms: I64
    requested_ms: I64
    topic: U32
    payload: Binary
    key: Binary | None = None
    headers: Binary | None = None
    on_conflict: OnConflict = OnConflict.REJECT
    request: RequestId | None = None
    """None if a producer sent the part, or the request has no id."""
    body: int = 0
    """Checksum of a producer's request, 64 bits. The same sequence with another body is no
    repetition."""

    @property
    def topics(self) -> set[int]:
        """The topics of the rows."""
        topic = self.topic
        if len(topic) == 1 or (topic == topic[0]).all():
            return {int(topic[0])}
        return {*np.unique(topic).tolist()}

    @property
    def keyed_rows(self) -> int:
        """Number of rows with a key."""
        return 0 if self.key is None else int(np.count_nonzero(self.key.sizes))

    @property
    def size(self) -> int:
        """Bytes that this part adds to an entry."""
        extra = sum(len(c.blob) + 4 * len(c.sizes) for c in (self.key, self.headers) if c)
        extra += REQUEST.itemsize if self.request is not None else 0
        return PART.itemsize + 24 * len(self.due_ms) + len(self.payload.blob) + extra


def encode_schedule(parts: Sequence[Part]) -> list[bytes]:
    """Return the payload of one SCHEDULE entry, in pieces to be concatenated."""
    rows = sum(len(part.due_ms) for part in parts)
    keys = any(part.key for part in parts)
    headers = any(part.headers for part in parts)
    table = np.zeros(len(parts), PART)
    table["producer_id"] = [part.producer_id for part in parts]
    table["sequence"] = [part.sequence for part in parts]
    table["rows"] = [len(part.due_ms) for part in parts]
    table["on_conflict"] = [part.on_conflict for part in parts]
    table["body"] = [part.body for part in parts]
    requests = any(part.request for part in parts)
    flags = (HAS_KEYS if keys else 0) | (HAS_HEADERS if headers else 0)
    flags |= HAS_REQUESTS if requests else 0
    pieces: list[bytes] = [_PREFIX.pack(len(parts), rows, flags, 0), table.tobytes()]
    if requests:
        pieces.append(np.array([part.request or (b"", 0, 0) for part in parts], REQUEST).tobytes())
    pieces += [part.due_ms.astype("<i8", copy=False).tobytes() for part in parts]
    pieces += [part.requested_ms.astype("<i8", copy=False).tobytes() for part in parts]
    pieces += [part.topic.astype("<u4", copy=False).tobytes() for part in parts]
    binaries = [[part.payload for part in parts]]
    for present, name in ((keys, "key"), (headers, "headers")):
        if present:
            binaries.append([getattr(part, name) or _empty(len(part.due_ms)) for part in parts])
    for column in binaries:
        pieces += [piece.sizes.astype("<u4", copy=False).tobytes() for piece in column]
    for column in binaries:
        pieces += [bytes(piece.blob) for piece in column]
    return pieces


def _empty(rows: int) -> Binary:
    return Binary(sizes=np.zeros(rows, np.uint32), blob=b"")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A SCHEDULE entry's payload, parsed: `parts` (p, dtype PART) and `rows` (n, dtype ROW).

    `rows["seq"]` is 0 until the entry is applied, `rows["buf"]` until a memtable has the rows.
    Starts are positions in the entry's payload.
    """

    parts: npt.NDArray[np.void]
    rows: RowArray
    requests: tuple[RequestId | None, ...]
    """One per part. None: the part has no request id."""


def rows_of(payload: memoryview) -> int:
    """Return the number of rows of a SCHEDULE entry."""
    return int(_PREFIX.unpack_from(payload)[1])


def keyed_max(payload: memoryview) -> int:
    """Return how many rows of a SCHEDULE entry may have a key: all or none."""
    _, n, flags, _ = _PREFIX.unpack_from(payload)
    return int(n) if flags & HAS_KEYS else 0


def parts_of(payload: memoryview) -> tuple[npt.NDArray[np.void], bool]:
    """Return the parts of a SCHEDULE entry (p, dtype PART), and whether rows may have keys.

    The rows are not checked: the payload was decoded before, when it was applied.
    """
    p, _, flags, _ = _PREFIX.unpack_from(payload)
    return np.frombuffer(payload, PART, p, _PREFIX.size), bool(flags & HAS_KEYS)


class _Columns(NamedTuple):
    """Columns of a SCHEDULE entry's payload: views into it, checked against its length."""

    parts: npt.NDArray[np.void]
    requests: npt.NDArray[np.void] | None
    due_ms: I64
    requested_ms: I64
    topic: U32
    sizes: Mapping[str, U32]
    """Sizes of payloads, and of keys and headers if present."""
    start: int
    """Position of the bytes of the first column in `sizes`."""


def _columns(payload: memoryview) -> _Columns:
    if len(payload) < _PREFIX.size:
        raise ValueError(f"SCHEDULE of {len(payload)} bytes: must be at least {_PREFIX.size}")
    p, n, flags, _ = _PREFIX.unpack_from(payload)
    if p == 0 or n == 0:
        raise ValueError(f"SCHEDULE with {p} parts, {n} rows: must be at least 1 of each")
    names = ["payload"]
    names += ["key"] if flags & HAS_KEYS else []
    names += ["headers"] if flags & HAS_HEADERS else []
    table = _PREFIX.size + p * PART.itemsize
    position = table + (p * REQUEST.itemsize if flags & HAS_REQUESTS else 0)
    if position + n * (20 + 4 * len(names)) > len(payload) or flags & ~7:
        raise ValueError(
            f"SCHEDULE of {len(payload)} bytes: too short for {p} parts and {n} rows, or unknown"
            f" flags {flags}"
        )
    parts = np.frombuffer(payload, PART, p, _PREFIX.size)
    if int(parts["on_conflict"].max()) > max(OnConflict):
        mode = int(parts["on_conflict"].max())
        raise ValueError(f"SCHEDULE with on_conflict {mode}: must be at most {max(OnConflict):d}")
    requests = np.frombuffer(payload, REQUEST, p, table) if flags & HAS_REQUESTS else None
    due_ms = np.frombuffer(payload, "<i8", n, position)
    requested_ms = np.frombuffer(payload, "<i8", n, position + 8 * n)
    topic = np.frombuffer(payload, "<u4", n, position + 16 * n)
    position += 20 * n
    sizes = {
        name: np.frombuffer(payload, "<u4", n, position + 4 * n * at)
        for at, name in enumerate(names)
    }
    start = position + 4 * n * len(names)
    end = start + sum(int(column.sum(dtype=np.int64)) for column in sizes.values())
    rows = int(parts["rows"].sum(dtype=np.int64))
    if end != len(payload) or rows != n:
        raise ValueError(
            f"SCHEDULE of {len(payload)} bytes, {n} rows: columns end at byte {end}, parts have"
            f" {rows} rows"
        )
    return _Columns(parts, requests, due_ms, requested_ms, topic, sizes, start)


def check_schedule(payload: memoryview) -> None:
    """Check that a SCHEDULE entry can be applied. Some numpy calls for any number of rows.

    Raises:
        ValueError: the payload is malformed, or a value is out of range.
    """
    columns = _columns(payload)
    low, high = int(columns.due_ms.min()), int(columns.due_ms.max())
    if low < 0 or high > DUE_MS_MAX:
        raise ValueError(f"SCHEDULE due from {low} to {high}: must be in 0 .. {DUE_MS_MAX}")
    if (topic := int(columns.topic.max())) >= TOMBSTONE:
        raise ValueError(f"SCHEDULE of topic {topic}: must be below {TOMBSTONE}")


def decode_schedule(payload: memoryview) -> Schedule:
    """Return the columns of a SCHEDULE entry as an array of dtype ROW.

    Raises:
        ValueError: the payload is not a SCHEDULE of version 3, or its sizes disagree.
    """
    columns = _columns(payload)
    requests: tuple[RequestId | None, ...] = (None,) * len(columns.parts)
    if columns.requests is not None:
        fields = columns.requests.tolist()
        requests = tuple(RequestId(*each) if each[0] else None for each in fields)
    rows = np.zeros(len(columns.due_ms), ROW)
    rows["due_ms"], rows["requested_ms"] = columns.due_ms, columns.requested_ms
    rows["topic"] = columns.topic
    start = columns.start
    for name, sizes in columns.sizes.items():
        ends = start + np.cumsum(sizes, dtype=np.int64)
        rows[f"{name}_size"] = sizes
        rows[f"{name}_start"] = ends - sizes
        start = int(ends[-1])
    return Schedule(columns.parts, rows, requests)


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return headers as (u16 size, UTF-8 bytes) pairs: name, value, name, value, …"""
    out = bytearray()
    for text in (text for pair in headers.items() for text in pair):
        data = text.encode()
        out += len(data).to_bytes(2, "little") + data
    return bytes(out)


def decode_headers(data: bytes) -> dict[str, str]:
    """Return the headers that `encode_headers` was called on.

    Raises:
        ValueError: the bytes do not have that form.
    """
    texts: list[str] = []
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 2], "little")
        end = position + 2 + size
        if end > len(data):
            raise ValueError(f"headers end at byte {len(data)}, a text in them at byte {end}")
        texts.append(data[position + 2 : end].decode())
        position = end
    if len(texts) % 2:
        raise ValueError("a header without a value")
    return dict(zip(texts[::2], texts[1::2], strict=True))


Buffers = Mapping[int, bytes | memoryview]
"""Number -> buffer: `buf` of a row is such a number."""


def gather(rows: RowArray, bufs: Buffers, name: str) -> Binary:
    """Return column `name` (payload, key or headers) of `rows` as one Binary, copied once.

    One slice if the rows lie side by side, as those of one batch do; otherwise one slice per row.
    """
    sizes = rows[f"{name}_size"].astype(np.uint32)
    starts, buf = rows[f"{name}_start"], rows["buf"]
    n = len(rows)
    if n == 0 or not sizes.any():
        return Binary(sizes=sizes, blob=b"")
    if (buf == buf[0]).all() and (starts[1:] == starts[:-1] + sizes[:-1]).all():
        first, end = int(starts[0]), int(starts[-1]) + int(sizes[-1])
        return Binary(sizes=sizes, blob=memoryview(bufs[int(buf[0])])[first:end])
    ends = (starts + sizes).tolist()
    pieces = zip(buf.tolist(), starts.tolist(), ends, strict=True)
    return Binary(sizes=sizes, blob=b"".join([bufs[b][s:e] for b, s, e in pieces]))


BUFFER_RATIO_MAX: Final = 3
"""Bytes of buffers that a row's own byte may keep in memory."""


def compact(rows: RowArray, bufs: Buffers) -> tuple[RowArray, Buffers]:
    """Return the rows with buffers of at most BUFFER_RATIO_MAX times the rows' own bytes.

    Rows of one entry end at different times. The last one must not keep the whole entry in memory.
    """
    if len(bufs) > 1:
        bufs = {number: bufs[number] for number in np.unique(rows["buf"]).tolist()}
    own = int(row_bytes(rows).sum())
    if BUFFER_RATIO_MAX * own >= sum(map(len, bufs.values())):
        return rows, bufs
    return own_copy(rows, bufs)


def own_copy(rows: RowArray, bufs: Buffers) -> tuple[RowArray, Buffers]:
    """Return copies of the rows, with one buffer that holds their bytes alone."""
    out = rows.copy()
    out["buf"] = 0
    blob, start = [], 0
    for name in ("payload", "key", "headers"):
        column = gather(rows, bufs, name)
        ends = start + np.cumsum(column.sizes, dtype=np.int64)
        out[f"{name}_start"] = ends - column.sizes
        start = int(ends[-1]) if len(ends) else start
        blob.append(column.blob)
    return out, {0: b"".join(blob)}


def row_bytes(rows: RowArray) -> I64:
    """Return the bytes of each row's payload, key and headers together (n, int64)."""
    total = rows["payload_size"].astype(np.int64)
    total += rows["key_size"]
    total += rows["headers_size"]
    return total
