"""Payloads of SERIES and OCCURRENCES entries, format version 1; both need feature level 2.

SERIES       a msgpack map, one of
               {topic, key, spec, last_ms}  creates a series, unless the topic has one of this
                                            key. Occurrences lie after `last_ms`
               {series, changes, last_ms}   changes fields of its definition; `last_ms`: 0, or
                                            the series begins again after this time
               {series}                     deletes it
             spec and changes have the fields of SeriesSpec, all or some of them
OCCURRENCES  n u32, 4 x 0, series n x u64 ascending, number n x u64, planned_ms n x i64,
             due_ms n x i64. planned_ms = -1: the series has no further occurrence. An entry
             takes n seqs. A row has an effect if its series waits for this number
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import numpy as np

from timer.model.columns import I64, TOMBSTONE, U64
from timer.model.recurrence import SPEC_TYPES, Misfire, SeriesSpec
from timer.model.units import DUE_MS_MAX, TopicId, UnixMs

_HEAD: Final = struct.Struct("<II")
_WIDTH: Final = 32
ENDED: Final = -1
"""Value of `planned_ms`: no further occurrence."""
OCCURRENCES_MAX: Final = 1_024
"""Occurrences in one entry: to apply them takes about five milliseconds."""
SERIES_KEY_MAX: Final = 4_096
"""Bytes of a key in the log. Nodes have narrower limits."""


@dataclass(frozen=True, slots=True)
class CreateSeries:
    """A new series. Its id is issued when the entry is applied."""

    topic: TopicId
    key: bytes
    spec: SeriesSpec
    last_ms: UnixMs


@dataclass(frozen=True, slots=True)
class AlterSeries:
    """A change of some fields of a series. The others keep their values."""

    series: int
    changes: Mapping[str, Any]
    last_ms: UnixMs
    """0: times that the series missed stay missed. Else: it begins again after this time."""


@dataclass(frozen=True, slots=True)
class DeleteSeries:
    """The end of a series. Its pending occurrence is cancelled."""

    series: int


SeriesOp: TypeAlias = CreateSeries | AlterSeries | DeleteSeries


class Planned(NamedTuple):
    """The next occurrences of n series, in columns (n,)."""

    series: U64
    number: U64
    planned_ms: I64
    due_ms: I64


def encode_series(op: SeriesOp) -> bytes:
    """Return the payload of a SERIES entry."""
    body: dict[str, Any]
    match op:
        case CreateSeries():
            body = {"topic": op.topic, "key": op.key, "spec": op.spec.pack(), "last_ms": op.last_ms}
        case AlterSeries():
            body = {"series": op.series, "changes": dict(op.changes), "last_ms": op.last_ms}
        case DeleteSeries():
            body = {"series": op.series}
    return bytes(msgpack.packb(body))


def decode_series(payload: memoryview) -> SeriesOp:
    """Return the operation of a SERIES entry.

    Raises:
        ValueError, InvalidRequestError: the payload is malformed, or a value is out of range.
    """
    body = msgpack.unpackb(payload)
    if not isinstance(body, dict):
        raise ValueError(f"SERIES of {body!r}: must be a map")
    keys = body.keys()
    if keys == {"topic", "key", "spec", "last_ms"}:
        topic, key, last_ms = body["topic"], body["key"], _time(body["last_ms"])
        if type(topic) is not int or not 0 < topic < TOMBSTONE:
            raise ValueError(f"SERIES of topic {topic!r}: must be in 1 .. {TOMBSTONE - 1}")
        if type(key) is not bytes or not 1 <= len(key) <= SERIES_KEY_MAX:
            raise ValueError(f"SERIES with key {key!r}: must have 1 .. {SERIES_KEY_MAX} bytes")
        fields = _spec(body["spec"])
        if fields.keys() != SPEC_TYPES.keys():
            raise ValueError(f"SERIES with fields {sorted(fields)}: must be {sorted(SPEC_TYPES)}")
        spec = SeriesSpec(**fields).check()
        spec.check_size(key)
        return CreateSeries(TopicId(topic), key, spec, last_ms)
    if keys == {"series", "changes", "last_ms"}:
        changes = _spec(body["changes"])
        return AlterSeries(_series(body["series"]), changes, _time(body["last_ms"]))
    if keys == {"series"}:
        return DeleteSeries(_series(body["series"]))
    raise ValueError(f"SERIES with fields {sorted(map(str, keys))}: unknown")


def _series(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 63:
        raise ValueError(f"series = {value!r}: must be in 1 .. {(1 << 63) - 1}")
    return value


def _time(value: object) -> UnixMs:
    if type(value) is not int or not 0 <= value <= DUE_MS_MAX:
        raise ValueError(f"last_ms = {value!r}: must be in 0 .. {DUE_MS_MAX}")
    return UnixMs(value)


def _spec(fields: object) -> dict[str, Any]:
    if not isinstance(fields, dict) or not fields.keys() <= SPEC_TYPES.keys():
        raise ValueError(f"{fields!r}: must be a map with fields of {sorted(SPEC_TYPES)}")
    for name, value in fields.items():
        if type(value) is not SPEC_TYPES[name]:
            raise ValueError(f"{name} = {value!r}: must be of type {SPEC_TYPES[name].__name__}")
    if "misfire" in fields:
        return {**fields, "misfire": Misfire(fields["misfire"])}
    return dict(fields)


def encode_occurrences(planned: Planned) -> list[bytes]:
    """Return the payload of an OCCURRENCES entry."""
    head = _HEAD.pack(len(planned.series), 0)
    unsigned = [column.astype("<u8", copy=False).tobytes() for column in planned[:2]]
    return [
        head,
        *unsigned,
        *(column.astype("<i8", copy=False).tobytes() for column in planned[2:]),
    ]


def count_occurrences(payload: memoryview) -> int:
    """Return the number of rows, which is the number of seqs that the entry takes.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) < _HEAD.size:
        raise ValueError(f"OCCURRENCES of {len(payload)} bytes: must be at least {_HEAD.size}")
    n, _ = _HEAD.unpack_from(payload)
    if not n or len(payload) != _HEAD.size + _WIDTH * n:
        size = _HEAD.size + _WIDTH * n
        raise ValueError(f"OCCURRENCES of {len(payload)} bytes: must be {size} for {n} rows")
    return int(n)


def decode_occurrences(payload: memoryview) -> Planned:
    """Return the columns of an OCCURRENCES entry.

    Raises:
        ValueError: the payload is malformed, or a value is out of range.
    """
    n = count_occurrences(payload)
    start = _HEAD.size
    series = np.frombuffer(payload, "<u8", n, start)
    number = np.frombuffer(payload, "<u8", n, start + 8 * n)
    planned = np.frombuffer(payload, "<i8", n, start + 16 * n)
    due = np.frombuffer(payload, "<i8", n, start + 24 * n)
    if (series[1:] <= series[:-1]).any():
        raise ValueError("OCCURRENCES: the ids of the series must ascend")
    low = min(int(planned.min()) + 1, int(due.min()))
    high = max(int(planned.max()), int(due.max()))
    if low < 0 or high > DUE_MS_MAX:
        raise ValueError(f"OCCURRENCES from {low} to {high}: must be in 0 .. {DUE_MS_MAX}")
    return Planned(series, number, planned, due)
