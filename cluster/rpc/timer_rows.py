"""New timers as JSON: one object is one row of a ScheduleRequest.

    {"json": {"order": 4711}, "delay": 1800, "key": "order-4711", "headers": {"a": "b"}}

The payload is a JSON value (`json`), a text (`payload`) or bytes in base64 (`payload_base64`);
without any, it is empty. A JSON value gets the header `content-type: application/json`, as from the
Python client. The due time is `due`, `due_ms`, `delay` or `delay_level`; without any, the timer is
due at once. A timer has at least one of payload and due time.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from cluster.rpc import json_fields
from cluster.rpc.json_bodies import TOO_DEEP
from cluster.rpc.json_fields import SHOWN_MAX, Fields, field_error, utf8
from cluster.rpc.schemas import HEADERS, MOMENT, MS, SPAN, TEXT, WHOLE, Schema, nullable, words
from timer.model.timer_errors import HIDDEN, InvalidRequestError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import (
    DUE_LIMIT,
    DUE_MS_MIN,
    LEVEL_MAX,
    MODES,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    TEXT_SIZE_MAX,
    Columns,
    Way,
)
from timerclient.values.codecs import CONTENT_TYPE, JSON

PAYLOADS: Final = ("json", "payload", "payload_base64")
TIMES: Final = ("due", "due_ms", "delay", "delay_level")
ROW: Final = (*PAYLOADS, *TIMES, "key", "ordering_key", "priority", "headers")
"""The fields of a new timer."""

TIME_SCHEMA: Final[dict[str, Schema]] = {
    "due": MOMENT,
    "due_ms": MS,
    "delay": SPAN,
    "delay_level": WHOLE | {"description": "n: the topic's nth delay; 0: at once"},
}
CONTENT_SCHEMA: Final[dict[str, Schema]] = {
    "json": {"description": "the payload, as any JSON value"},
    "payload": TEXT | {"description": "the payload, as a string"},
    "payload_base64": TEXT | {"description": "the payload, in base64"},
    "headers": nullable(HEADERS),
}
ROW_SCHEMA: Final[dict[str, Schema]] = {
    **CONTENT_SCHEMA,
    **TIME_SCHEMA,
    "key": nullable(TEXT),
    "ordering_key": nullable(TEXT) | {"description": "of key_shared groups"},
    "priority": WHOLE | {"minimum": 0, "maximum": PRIORITY_MAX, "description": "default: 4"},
}
MODE_SCHEMA: Final = words(*MODES) | {
    "description": "if a pending timer has the key; default: reject"
}


class TimerRow(NamedTuple):
    """One new timer."""

    payload: bytes
    way: Way
    value: int
    """Of the due time, in the unit of `way`."""
    key: bytes
    headers: bytes
    """Encoded; empty: none."""
    ordering_key: bytes
    priority: int


def row_of(fields: Fields) -> TimerRow:
    """Return a new timer. The names of the fields are known.

    Raises:
        InvalidRequestError: a field is wrong, there is neither payload nor due time, or the only
            due time is null.
    """
    payload, headers = content_of(fields)
    when = way_of(fields)
    key = json_fields.text(fields, "key").encode()
    ordering_key = json_fields.text(fields, "ordering_key").encode()
    priority = json_fields.whole_number(fields, "priority", 0, PRIORITY_MAX, PRIORITY_DEFAULT)
    if payload is None and when is None:  # such as an empty body
        limit = f"give it, json or payload_base64, or one of {', '.join(TIMES)}"
        raise field_error("payload", HIDDEN, limit)
    if when is None and (null := next((name for name in TIMES if name in fields), None)):
        limit = "must not be null without another time; a delay of 0 means at once"
        raise field_error(null, HIDDEN, limit)  # such as an unset variable of a program
    way, value = when or ("delay_ms", 0)
    return TimerRow(payload or b"", way, value, key, headers or b"", ordering_key, priority)


def content_of(fields: Fields) -> tuple[bytes | None, bytes | None]:
    """Return the payload and the encoded headers; None: they are not given.

    Raises:
        InvalidRequestError: one is malformed, or several payloads are given.
    """
    headers = fields.get("headers")
    if headers is not None and not isinstance(headers, dict):
        raise field_error("headers", headers, "must be an object of strings")
    payload = None
    given = [name for name in PAYLOADS if fields.get(name) is not None]
    if not given and "json" in fields:
        given = ["json"]  # the value null
    if len(given) > 1:
        raise field_error(given[0], HIDDEN, f"give it or {given[1]}, not both")
    if given:
        payload = _PAYLOAD_OF[given[0]](fields[given[0]])
        if given[0] == "json":
            headers = {CONTENT_TYPE: JSON.content_type, **(headers or {})}
    return payload, None if headers is None else _headers(headers)


def _of_json(value: Any) -> bytes:
    try:
        return JSON.encode(value)
    except (ValueError, RecursionError) as error:
        why = TOO_DEEP if isinstance(error, RecursionError) else f"{error}"
        limit = f"must be JSON in UTF-8: {why[:200]}".encode(errors="backslashreplace").decode()
        raise InvalidRequestError("json", type(value).__name__, limit) from None


def _of_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise field_error("payload", value, "must be a string; any other value is `json`")
    return utf8("payload", value)


def _of_base64(value: Any) -> bytes:
    if not isinstance(value, str):
        raise field_error("payload_base64", value, "must be a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise field_error("payload_base64", value, f"must be base64: {error}") from None


_PAYLOAD_OF: Final[dict[str, Callable[[Any], bytes]]] = {
    "json": _of_json,
    "payload": _of_text,
    "payload_base64": _of_base64,
}


def way_of(fields: Fields) -> tuple[Way, int] | None:
    """Return the due time, and the way in which it is given; None: there is none.

    Raises:
        InvalidRequestError: it is wrong, or given in several ways.
    """
    given = [name for name in TIMES if fields.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise field_error(given[0], HIDDEN, f"give only one of {', '.join(given)}")
    if given[0] == "delay":
        return "delay_ms", json_fields.span_ms(fields, "delay") or 0
    if given[0] == "delay_level":
        return "delay_level", json_fields.whole_number(fields, "delay_level", 0, LEVEL_MAX)
    return "due_ms", json_fields.instant_ms(fields, "due", DUE_MS_MIN, DUE_LIMIT) or 0


def _headers(headers: dict[str, Any]) -> bytes:
    out = bytearray()
    for name, value in headers.items():
        if not name:
            raise field_error("headers", name, "the name of a header must not be empty")
        for field, each in (("headers", name), (f"headers.{name[:SHOWN_MAX]}", value)):
            if not isinstance(each, str):
                raise field_error(field, each, "must be a string")
            encoded = utf8(field, each)
            if len(encoded) > TEXT_SIZE_MAX:
                limit = f"a name or value has at most {TEXT_SIZE_MAX} bytes"
                raise InvalidRequestError(field, f"{len(encoded)} bytes", limit)
            out += len(encoded).to_bytes(2, "little") + encoded
    return bytes(out)


def request_of(
    topic: str, rows: Sequence[TimerRow], fields: Fields, place: str = "{name}"
) -> pb.ScheduleRequest:
    """Return the request for new timers of one topic.

    `fields`: of the request. `place`: of a row's field in the request, for errors.

    Raises:
        InvalidRequestError: `on_conflict` is wrong, or it needs a key that a row lacks.
    """
    mode = json_fields.choice(fields, "on_conflict", MODES, "reject")
    for at, row in enumerate(rows if mode else ()):
        if not row.key:
            limit = f"must be given with on_conflict = {fields['on_conflict']}"
            raise InvalidRequestError(place.format(at=at, name="key"), HIDDEN, limit)
    request = pb.ScheduleRequest(
        on_conflict=mode,  # type: ignore[arg-type]
        request_id=fields.get("request_id", ""),
    )
    columns: Columns | None = None
    for row in rows:
        if columns is None or columns.way != row.way:
            if columns is not None:
                columns.write(request.timers.add())
            columns = Columns(topic, row.way)
        columns.values.append(row.value)
        columns.payloads.append(row.payload)
        columns.keys.append(row.key)
        columns.headers.append(row.headers)
        columns.ordering_keys.append(row.ordering_key)
        columns.priorities.append(row.priority)
    if columns is not None:
        columns.write(request.timers.add())
    return request
