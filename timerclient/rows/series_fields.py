"""Series of recurring timers: from an application's arguments to the contract, and back."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypedDict

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.values import ids
from timerclient.values.codecs import NO_VALUE, EncodedValue, Payload, PayloadReader, payload_of
from timerclient.values.errors import InvalidRequest

Misfire = Literal["fire_once", "fire_all", "skip"]
MISFIRES: Final[Mapping[str, pb.Misfire.ValueType]] = {
    "fire_once": pb.MISFIRE_FIRE_ONCE,
    "fire_all": pb.MISFIRE_FIRE_ALL,
    "skip": pb.MISFIRE_SKIP,
}
SeriesConflict = Literal["reject", "alter"]
CONFLICTS: Final[Mapping[str, bool]] = {"reject": False, "alter": True}
"""Whether a creation alters a series of another definition that has the key."""
SERIES_HEADER: Final = "timer-series"
SERIES_KEY_HEADER: Final = "timer-series-key"
NUMBER_HEADER: Final = "timer-occurrence"
EVERY_S_MIN: Final = 1
EVERY_S_MAX: Final = 366 * 24 * 3_600 * 10
_TIME: Final = re.compile(r"\b((?:start_ms|end_ms|first time) = )([1-9]\d*)")
"""A time in a node's error, in Unix milliseconds."""


class SeriesOptions(TypedDict, total=False):
    """Fields of a series' definition. In a change, those that are absent keep their values."""

    every: timedelta | float
    """Interval, a timedelta or seconds; at least one second. This or `cron`."""
    cron: str
    """Five fields (minute hour day month weekday), six with seconds first, or a name: @daily."""
    zone: str
    """IANA time zone of `cron`, such as "Europe/Berlin"; default: UTC."""
    start: datetime | int
    """No occurrence is earlier, and an interval counts from here. An aware datetime, or Unix
    milliseconds. Default: one interval after the creation."""
    end: datetime | int | None
    """No occurrence is later. None: no end."""
    max_count: int | None
    """Occurrences at most. None: no limit."""
    misfire: Misfire
    """Times missed in a pause or an outage: the latest occurs ("fire_once", the default), all of
    them ("fire_all"), or none ("skip")."""
    headers: Mapping[str, str] | None
    """Headers of each occurrence."""


@dataclass(frozen=True, slots=True)
class Series(PayloadReader):
    """A series of recurring timers, as it was at the call."""

    id: int
    topic: str
    key: str
    every: timedelta | None
    cron: str | None
    zone: str
    """IANA time zone of `cron`; empty: UTC."""
    start: datetime | None
    end: datetime | None
    max_count: int | None
    misfire: str
    paused: bool
    payload: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    ended: int
    """Occurrences that fired, were cancelled or were dropped."""
    timer_id: str | None
    """Id of the pending occurrence, number `ended` + 1. None: there is none, or it is scheduled
    in a moment, as after a creation."""
    next: datetime | None
    """Planned time of the next occurrence. None: the series is paused or finished."""
    finished: bool
    """The end or the count is reached."""


def fields_of(
    options: SeriesOptions, payload: Payload | None = None, json: object = NO_VALUE
) -> pb.SeriesFields:
    """Return the fields that an application gives. Without `payload` and `json`: no payload.

    Raises:
        InvalidRequest: A value is of the wrong type or out of range, or a name is unknown.
    """
    out = pb.SeriesFields()
    given: dict[str, Any] = dict(options)
    if payload is not None or json is not NO_VALUE:
        value = payload_of(payload, json)
        if isinstance(value, EncodedValue):
            given["headers"] = value.headers(given.get("headers"))
            value = value.payload()
        out.payload = rows.payload_bytes(value)
    for name, value in given.items():
        if name not in SeriesOptions.__annotations__:
            limit = f"must be one of {', '.join(SeriesOptions.__annotations__)}"
            raise InvalidRequest.of("option", name, limit)
        _put(out, name, value)
    return out


def _put(out: pb.SeriesFields, name: str, value: Any) -> None:
    match name:
        case "every":
            out.every_ms = rows.span_ms("every", value, EVERY_S_MAX * 1000, EVERY_S_MIN * 1000)
        case "start":
            out.start_ms = rows.bound_ms(name, value)
        case "end":
            out.end_ms = rows.bound_ms(name, value)
        case "max_count":
            out.max_count = (
                0 if value is None else rows.whole_number(name, value, 1, rows.UINT63_MAX)
            )
        case "misfire":
            out.misfire = rows.choice(name, value, MISFIRES)
        case "headers":
            out.headers = rows.encode_headers(value)
        case _:
            rows.set_field(out, name, value)


def as_given(error: InvalidRequest) -> InvalidRequest:
    """Return a node's error with the names of arguments, and times in ISO 8601."""
    named = copy.copy(error)
    text, named.field, named.limit = (
        re.sub(r"\b(every|start|end)_ms\b", r"\1", _TIME.sub(_as_iso, each))
        for each in (str(error), error.field, error.limit)
    )
    named.args = (text,)
    return named


def _as_iso(time: re.Match[str]) -> str:
    moment = rows.moment_of(int(time[2])).isoformat(timespec="milliseconds")
    return time[1] + moment.replace("+00:00", "Z")


def series_of(message: pb.Series) -> Series:
    """Return the series of an answer."""
    fields = message.fields
    every, zero = fields.every_ms, pb.MISFIRE_FIRE_ONCE
    names = {number: name for name, number in MISFIRES.items()}
    return Series(
        id=message.series_id,
        topic=message.topic,
        key=message.key,
        every=timedelta(milliseconds=every) if every else None,
        cron=fields.cron or None,
        zone=fields.zone,
        start=rows.moment_of(fields.start_ms) if fields.start_ms else None,
        end=rows.moment_of(fields.end_ms) if fields.end_ms else None,
        max_count=fields.max_count or None,
        misfire=names.get(fields.misfire, names[zero]),
        paused=fields.paused,
        payload=fields.payload,
        headers=rows.decode_headers(fields.headers),
        ended=message.ended,
        timer_id=ids.to_text(message.timer_id) if message.timer_id else None,
        next=rows.moment_of(message.planned_ms) if message.planned_ms else None,
        finished=message.finished,
    )


@dataclass(frozen=True, slots=True)
class Occurrence:
    """The occurrence that a message is."""

    series: int
    """Id of the series."""
    key: str
    """Key of the series."""
    number: int
    """1, 2, 3, …"""


def occurrence_of(headers: Mapping[str, str]) -> Occurrence | None:
    """Return the occurrence that a message with these headers is; None: it is no occurrence."""
    series, number = headers.get(SERIES_HEADER, ""), headers.get(NUMBER_HEADER, "")
    if not (series.isascii() and series.isdigit() and number.isascii() and number.isdigit()):
        return None
    return Occurrence(int(series), headers.get(SERIES_KEY_HEADER, ""), int(number))
