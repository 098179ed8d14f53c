"""Conversion of an application's arguments to columns of the contract.

The due time is given in one of four ways, for one row or for many:

    delay        timedelta, or seconds as int or float; from the time the leader accepts the request
    delay_level  n: the topic's nth delay; beyond the last = the last; 0 = at once
    due          an aware datetime
    due_ms       Unix milliseconds, from 1e10 on: less is the 0 of an unset field, or Unix seconds

Without any of them, the timer fires at once. In a batch of n rows each may be one value for all, or
n values: a list, a tuple, or an object with `tolist()` (array.array, a numpy array). A delay may be
a timedelta64 of numpy, of weeks to nanoseconds. A datetime64 has no zone and is rejected. The
headers of a row are encoded as (u16 size, UTF-8) of name, value, name, value, …; little-endian.
"""

import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, floor
from typing import Any, Final, Literal, NamedTuple, TypedDict, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from timerclient.proto import timer_pb2 as pb
from timerclient.values.codecs import NO_VALUE, Payload
from timerclient.values.errors import Described, InvalidRequest

DUE_MS_MAX: Final = (1 << 48) - 1
DUE_MS_MIN: Final = 10**10
"""Smaller due times are mistakes: a field without a value is 0, and others are Unix seconds."""
BOUND_LIMIT: Final = f"must be {DUE_MS_MIN} to {DUE_MS_MAX}, in Unix milliseconds, not seconds"
DUE_LIMIT: Final = f"{BOUND_LIMIT}; a delay of 0 means at once"
UNIX_SECONDS: Final = range(10**9, 10**10)
"""Unix seconds from 2001 to 2286. As milliseconds they are times of early 1970: a mistake."""
LEASE_MS_MAX: Final = 43_200_000
"""Longest lease that the settings of a node can allow."""
PAUSE_MS_MAX: Final = 30 * 86_400_000
"""Longest delay of a nack, and backoff of a group."""
ATTEMPTS_MAX: Final = 1_000
"""Highest `max_attempts` of a group."""
IN_FLIGHT_MAX: Final = 1_000_000
"""Highest `max_in_flight` of a group."""
UINT63_MAX: Final = (1 << 63) - 1
UINT64_MAX: Final = (1 << 64) - 1
LEVEL_MAX: Final = (1 << 31) - 1
"""Limit of the contract's field. A level beyond the topic's last is the last."""
TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,253}[A-Za-z0-9._-])?")
GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
NAME_SIZE_MAX: Final = 255
REQUEST_ID_SIZE_MAX: Final = 64
PRIORITY_MAX: Final = 9
PRIORITY_DEFAULT: Final = 4
TEXT_SIZE_MAX: Final = (1 << 16) - 1
SHOWN_MAX: Final = 32
"""Characters of a long name or value in an error."""
REQUEST_SIZE_MAX: Final = (64 << 20) - 1024
"""Bytes of one request's rows. A message has at most 64 MiB; its head is small."""

Headers = Mapping[str, str]
OnConflict = Literal["reject", "replace", "keep", "update"]
"""Treatment of a new timer with the key of a pending timer; see `TimerClient.schedule`."""
T = TypeVar("T")
_MS: Final = timedelta(milliseconds=1)
_FLOAT_ERROR: Final = 4 * sys.float_info.epsilon
"""Relative error of a float that is the result of some additions or products."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MS
"""The end of the year 9999, the latest datetime."""


class DueTime(TypedDict, total=False):
    """Due time of one timer: at most one of these. None: at once."""

    delay: timedelta | float | None
    delay_level: int | None
    due: datetime | None
    due_ms: int | None


class WhenMany(TypedDict, total=False):
    """Due times of a batch: at most one of these; one value for all timers, or one for each."""

    delay: timedelta | float | Iterable[timedelta | float] | None
    delay_level: int | Iterable[int] | None
    due: datetime | Iterable[datetime] | None
    due_ms: int | Iterable[int] | None


@dataclass(frozen=True, slots=True)
class NewTimer:
    """One of several timers that are scheduled together; its due time as in `DueTime`."""

    topic: str
    payload: Payload | None = None
    """Bytes, or a value with its codec. None: `json` has the value."""
    key: str | None = None
    headers: Headers | None = None
    delay: timedelta | float | None = None
    delay_level: int | None = None
    due: datetime | None = None
    due_ms: int | None = None
    json: Any = NO_VALUE
    """A value for JSON in place of `payload`."""
    ordering_key: str | None = None
    priority: int | None = None
    """0 to 9. None: 4."""

    @property
    def when(self) -> DueTime:
        """The due time."""
        return DueTime(
            delay=self.delay, delay_level=self.delay_level, due=self.due, due_ms=self.due_ms
        )


Way = Literal["due_ms", "delay_ms", "delay_level"]
"""A field of the contract that holds due times."""


_NO_LISTS: Final = (str, bytes, bytearray, Mapping, AbstractSet)
"""Iterables that are no list of due times."""


class Moment(NamedTuple):
    """The due times of a request's rows."""

    way: Way
    values: Sequence[int]
    """Milliseconds or levels: one for all rows, or one for each."""


def moment(when: Mapping[str, Any], n: int | None = None) -> Moment:
    """Return the due times of `delay`, `delay_level`, `due` or `due_ms`.

    Args:
        when: The arguments of a call.
        n: The rows of a batch, which has one value, or one for each. None: one value.

    Raises:
        InvalidRequest: More than one is given, a datetime is naive, a value is no time or out of
            range, or there are neither one value nor n.
        TypeError: An argument has another name.
    """
    given = {name: value for name, value in when.items() if value is not None}
    unknown = when.keys() - _CONVERT.keys()
    if unknown:
        msg = f"unexpected keyword argument {min(unknown)!r}: give one of {', '.join(_CONVERT)}"
        raise TypeError(msg)
    if not given:
        return Moment("delay_ms", (0,))
    if len(given) > 1:
        limit = f"give only one of {', '.join(_CONVERT)}"
        raise InvalidRequest.of("when", sorted(given), limit)
    [(name, value)] = given.items()
    way, convert = _CONVERT[name]
    if hasattr(value, "tolist"):
        value = _plain(name, value)
    if n is None or isinstance(value, _NO_LISTS) or not isinstance(value, Iterable):
        return Moment(way, (convert(value),))
    checked = name == "due_ms" and _all_in_range(value)
    values = cast("list[int]", value) if checked else convert_all(value, convert)
    if len(values) != n:
        limit = f"must have {n}, one for each; a value without a list is for all"
        raise InvalidRequest.of(name, f"a list of {len(values)}", limit)
    return Moment(way, values)


def _plain(name: str, values: Any) -> Any:
    """Return an array as a list of Python's values, and a scalar of numpy as one of them."""
    plain = values.tolist()
    dtype: Any = getattr(values, "dtype", None)  # array.array has none, and torch's has no kind
    if getattr(dtype, "kind", "") not in {"m", "M"}:
        return plain
    convert = partial(_plain_time, name, dtype.name)
    return list(map(convert, plain)) if isinstance(plain, list) else convert(plain)


def _plain_time(name: str, dtype: str, value: Any) -> Any:
    """Return an element of a timedelta64 or datetime64 that numpy converted to Python.

    That is a timedelta or a datetime, except for NaT, and for a whole number of nanoseconds, of
    months, years or no unit, or beyond Python's range. These become a description, which every
    conversion rejects. Nanoseconds of a delay become a timedelta.
    """
    if value is None:
        return Described("NaT")
    if not isinstance(value, int):
        return value
    if name == "delay" and dtype == "timedelta64[ns]":
        return timedelta(microseconds=-(-value // 1000))
    return Described(f"{value} of {dtype}")


def convert_all(values: Iterable[Any], convert: Callable[[Any], T]) -> list[T]:
    """Return `convert` of each value.

    Raises:
        InvalidRequest: A value is rejected; the field has its index, such as `delay[7]`.
    """
    found: list[T] = []
    try:
        found.extend(map(convert, values))  # those before the rejected one are kept
    except InvalidRequest as refused:
        field, dot, header = refused.field.partition(".")
        raise refused.with_field(f"{field}[{len(found)}]{dot}{header}") from None
    return found


def _all_in_range(values: Any) -> bool:
    """Return whether `values` is a list of due_ms that need no check one by one."""
    return (
        isinstance(values, list)
        and set(map(type, values)) == {int}
        and min(values) >= DUE_MS_MIN
        and max(values) <= DUE_MS_MAX
    )


def span_ms(field: str, value: Any, most_ms: int = DUE_MS_MAX, least_ms: int = 0) -> int:
    """Return a timedelta, or a number of seconds, in milliseconds. A fraction of one is rounded up.

    Raises:
        InvalidRequest: It is neither, or negative, or not `least_ms` to `most_ms`; names `field`.
    """
    if isinstance(value, timedelta):
        within = max(-_MS, min(value, timedelta(milliseconds=most_ms + 1)))
        ms = -(-within // _MS) or within // _MS
    elif isinstance(value, int | float) and not isinstance(value, bool):
        ms = ms_of(value)
    else:
        raise InvalidRequest.of(field, value, "must be a timedelta or a number of seconds")
    if not least_ms <= ms <= most_ms:
        limit = f"must be {least_ms / 1000:g} to {most_ms / 1000:.15g} s"
        raise InvalidRequest.of(field, value, limit)
    return ms


def ms_of(seconds: float) -> int:
    """Return seconds in milliseconds, rounded up. A negative fraction and NaN are negative.

    A float such as 0.1 + 0.2 is 300 ms: its last digits are not rounded up.
    """
    ms = max(-1.0, min(seconds, DUE_MS_MAX)) * 1000
    return ceil(ms * (1 - _FLOAT_ERROR)) or floor(ms)


def lease_ms(lease: Any) -> int:
    """Return a lease in milliseconds, 1 to LEASE_MS_MAX. The settings of a node may allow less.

    Raises:
        InvalidRequest: It is not a duration, or out of range.
    """
    return span_ms("lease", lease, LEASE_MS_MAX, 1)  # 0 means the group's setting in the contract


def _of_delay(value: Any) -> int:
    return span_ms("delay", value)


def _of_due(value: Any) -> int:
    unix_ms = _of_datetime("due", value)
    if unix_ms < DUE_MS_MIN:  # the last year of a datetime is below DUE_MS_MAX
        raise InvalidRequest.of("due", value, DUE_LIMIT)
    return unix_ms


def _of_due_ms(value: Any) -> int:
    return whole_number("due_ms", value, DUE_MS_MIN, DUE_MS_MAX, DUE_LIMIT)


def _of_datetime(field: str, value: Any) -> int:
    if not isinstance(value, datetime):
        raise InvalidRequest.of(field, value, "must be an aware datetime")
    try:
        offset = value.utcoffset()
    except ValueError:  # pandas.NaT is a datetime
        raise InvalidRequest.of(field, value, "must be an aware datetime") from None
    if offset is None:
        limit = "must not be naive; give the datetime a tzinfo, such as datetime.UTC"
        raise InvalidRequest.of(field, value, limit)
    return -(-(value - _EPOCH) // _MS)


def _of_level(value: Any) -> int:
    return whole_number("delay_level", value, 0, LEVEL_MAX)


def whole_number(field: str, value: Any, least: int, most: int, limit: str = "") -> int:
    """Return a whole number. `limit`: of the error, in place of "must be `least` to `most`".

    Raises:
        InvalidRequest: It is not a whole number, or not in least .. most; names `field`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidRequest.of(field, value, "must be a whole number")
    if not least <= number <= most:
        between = f"must be {least} to {most}"
        if most >= UINT63_MAX:  # the bound of the contract's type; no caller comes near it
            between = f"must be {least} or more" if number < least else f"must be at most {most}"
        raise InvalidRequest.of(field, value, limit or between)
    return number


def choice(field: str, value: Any, choices: Mapping[str, T]) -> T:
    """Return the value of a name in `choices`.

    Raises:
        InvalidRequest: The name is not in `choices`; names `field`.
    """
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequest.of(field, value, f"must be one of {', '.join(choices)}")
    return choices[value]


def set_field(message: Message, field: str, value: Any) -> None:
    """Set a field of a message of the contract.

    Raises:
        InvalidRequest: The field can't hold the value; names the field and its type.
    """
    try:
        setattr(message, field, value)
    except (TypeError, ValueError):
        kind = message.DESCRIPTOR.fields_by_name[field].cpp_type
        holds = _FIELD_TYPE_NAMES.get(kind)
        if holds is None:  # an integer, whose range the cluster checks
            whole_number(field, value, 0, UINT63_MAX)
            holds = "a whole number"
        raise InvalidRequest.of(field, value, f"must be {holds}") from None


_FIELD_TYPE_NAMES: Final = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a string",
}
"""Values of a field that an application may set, by the field's type."""


_CONVERT: Final[dict[str, tuple[Way, Callable[[Any], int]]]] = {
    "delay": ("delay_ms", _of_delay),
    "delay_level": ("delay_level", _of_level),
    "due": ("due_ms", _of_due),
    "due_ms": ("due_ms", _of_due_ms),
}


def utf8(field: str, text: Any) -> bytes:
    """Return a string in UTF-8.

    Raises:
        InvalidRequest: It is not a str, or has a lone surrogate.
    """
    if not isinstance(text, str):
        raise InvalidRequest.of(field, text, "must be str")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest.of(field, text, "must have a form in UTF-8") from None


def text(field: str, value: Any) -> str:
    """Return a string, checked to have a form in UTF-8.

    Raises:
        InvalidRequest: See `utf8`.
    """
    return utf8(field, value).decode()


def name(field: str, text: Any, pattern: re.Pattern[str] | None = None) -> str:
    """Return a name, checked. `pattern`: TOPIC_NAME or GROUP_NAME; None: the cluster checks it.

    Raises:
        InvalidRequest: It is empty, not a string, or not of the pattern; names `field`.
    """
    if not utf8(field, text):
        raise InvalidRequest.of(field, text, "must not be empty")
    if pattern is not None and (limit := name_limit(text, pattern)):
        raise InvalidRequest.of(field, text, limit)
    return str(text)


def name_limit(text: str, pattern: re.Pattern[str], bytes_max: int = NAME_SIZE_MAX) -> str:
    """Return the limit that a name exceeds; empty: a topic or a group may have the name."""
    if pattern.fullmatch(text) and len(text) <= bytes_max:
        return ""
    signs = "A-Z a-z 0-9 . _ -" + (" /" if pattern is TOPIC_NAME else "")
    limit = f"must be 1 to {bytes_max} of {signs}, beginning with a letter or digit"
    return limit + (", not ending in /" if pattern is TOPIC_NAME else "")


def request_name(request_id: str) -> str:
    """Return a request id, checked.

    Raises:
        InvalidRequest: It is empty, longer than 64 bytes, has a zero byte, or is not a string.
    """
    size = len(utf8("request_id", request_id))
    if not 1 <= size <= REQUEST_ID_SIZE_MAX or "\0" in request_id:
        limit = f"must have 1 to {REQUEST_ID_SIZE_MAX} bytes, none of them zero"
        raise InvalidRequest.of("request_id", request_id, limit)
    return request_id


MODES: Final = {
    "reject": pb.ON_CONFLICT_UNSPECIFIED,
    "replace": pb.ON_CONFLICT_REPLACE,
    "keep": pb.ON_CONFLICT_KEEP,
    "update": pb.ON_CONFLICT_UPDATE,
}


def conflict_mode(name: str) -> pb.OnConflict.ValueType:
    """Return the contract's value of an `on_conflict`.

    Raises:
        InvalidRequest: It is none of reject, replace, keep and update.
    """
    return choice("on_conflict", name, MODES)


def check_keyed(name: str, on_conflict: str, keys: Sequence[object]) -> None:
    """Check that every row has a key, except with "reject". `name`: with the place of a key as {}.

    Raises:
        InvalidRequest: A row has none.
    """
    if MODES[on_conflict] and not all(keys):
        place = next(at for at, key in enumerate(keys) if not key)
        limit = f"must be given with on_conflict = {on_conflict}"
        raise InvalidRequest.of(name.format(place), None, limit)


def moment_of(unix_ms: int) -> datetime:
    """Return Unix milliseconds as an aware datetime in UTC, at most the end of the year 9999."""
    return _EPOCH + timedelta(milliseconds=min(unix_ms, _LAST_MS))


def instant_ms(field: str, value: datetime | int) -> int:
    """Return an aware datetime, or Unix milliseconds, as Unix milliseconds.

    Raises:
        InvalidRequest: It is naive, of another type, or out of range; names `field`.
    """
    if not isinstance(value, datetime) and not hasattr(value, "__index__"):
        raise InvalidRequest.of(field, value, "must be an aware datetime, or Unix milliseconds")
    if not isinstance(value, datetime):
        unix_ms = whole_number(field, value, 0, DUE_MS_MAX)
    elif (unix_ms := _of_datetime(field, value)) < 0:
        raise InvalidRequest.of(field, value, "must be in 1970 or later")
    if unix_ms in UNIX_SECONDS:
        limit = f"must be Unix milliseconds; {moment_of(1000 * unix_ms):%Y-%m-%d} is {unix_ms}000"
        raise InvalidRequest.of(field, value, limit)
    return unix_ms


def bound_ms(field: str, value: datetime | int | None) -> int:
    """Return a bound of a range of time as `instant_ms`. None: 0, the contract's "no bound".

    Raises:
        InvalidRequest: See `instant_ms`; or it is 0, which would mean no bound.
    """
    if value is None:
        return 0
    unix_ms = instant_ms(field, value)
    if not unix_ms:
        raise InvalidRequest.of(field, value, "must be after 1970 began; None: no bound")
    return unix_ms


def encode_headers(headers: Headers | None) -> bytes:
    """Return one row's headers, encoded. Without headers: empty.

    Raises:
        InvalidRequest: They are no mapping, a name is empty, a name or value is not a str, or its
            UTF-8 is longer than 65,535 bytes.
    """
    if headers is None:
        return b""
    if not isinstance(headers, Mapping):
        raise InvalidRequest.of("headers", kind_of(headers), "must be a mapping of str to str")
    if "" in headers:
        raise InvalidRequest.of("headers", "", "the name of a header must not be empty")
    out = bytearray()
    for header, value in headers.items():
        out += _header_text(header)
        try:
            out += _header_text(value)
        except InvalidRequest as error:
            raise error.with_field(f"headers.{header[:SHOWN_MAX]}") from None
    return bytes(out)


def _header_text(text: str) -> bytes:
    encoded = utf8("headers", text)
    if len(encoded) > TEXT_SIZE_MAX:
        limit = f"a name or value has at most {TEXT_SIZE_MAX} bytes"
        raise InvalidRequest.of("headers", text[:SHOWN_MAX] + "…", limit)
    return len(encoded).to_bytes(2, "little") + encoded


def slices(sizes: Iterable[int], blob: bytes, n: int = 0) -> list[bytes]:
    """Return the values of a column of bytes. Without sizes, the column has `n` empty ones."""
    values = [blob[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
    return values or [b""] * n


def decode_headers(encoded: bytes) -> dict[str, str]:
    """Return one row's headers; the inverse of `encode_headers`."""
    texts: list[str] = []
    position = 0
    while position < len(encoded):
        end = position + 2 + int.from_bytes(encoded[position : position + 2], "little")
        texts.append(encoded[position + 2 : end].decode())
        position = end
    return dict(zip(texts[::2], texts[1::2], strict=True))


class Columns:
    """Rows of one topic that are being collected, one call of `schedule` each."""

    __slots__ = (
        *("headers", "keys", "ordering_keys", "payloads", "priorities", "topic", "values", "way"),
    )

    def __init__(self, topic: str, way: Way) -> None:
        self.topic = topic
        self.way: Way = way
        self.values: list[int] = []
        self.payloads: list[bytes] = []
        self.keys: list[bytes] = []
        self.headers: list[bytes] = []
        self.ordering_keys: list[bytes] = []
        self.priorities: list[int] = []

    def write(self, to: pb.TimerColumns) -> None:
        """Write the rows to a message of the contract."""
        to.topic = self.topic
        getattr(to, self.way).extend(self.values)
        to.payload_sizes.extend(map(len, self.payloads))
        to.payloads = b"".join(self.payloads)
        _write_optional(to, self.keys, self.headers)
        _write_traits(to, self.ordering_keys, self.priorities)


def encode_batch(  # noqa: PLR0913 -- the columns of a batch
    topic: str,
    payloads: Iterable[bytes],
    when: Mapping[str, Any],
    keys: Iterable[str | None] | None,
    headers: Headers | Iterable[Headers | None] | None,
    on_conflict: OnConflict = "reject",
    ordering_keys: Iterable[str | None] | None = None,
    priorities: Iterable[int | None] | int | None = None,
) -> tuple[bytes, int]:
    """Return (a ScheduleRequest without its head, its rows n >= 1).

    Raises:
        InvalidRequest: A column has neither one value nor n, or an invalid value.
    """
    request = pb.ScheduleRequest(on_conflict=conflict_mode(on_conflict))
    to = request.timers.add()
    utf8("topic", topic)
    to.topic = topic
    n = _write_payloads(to, payloads)
    way, values = moment(when, n)
    getattr(to, way).extend(values)
    key_list = [] if keys is None else _keys("keys", keys)
    if isinstance(headers, Mapping):
        header_list = [encode_headers(headers)] * n
    else:
        rows = [] if headers is None else sequence_of("headers", headers)
        header_list = convert_all(rows, encode_headers)
    orders = [] if ordering_keys is None else _keys("ordering_keys", ordering_keys)
    levels = _priorities(priorities, n)
    columns: dict[str, Sequence[object]] = {"keys": key_list, "headers": header_list}
    columns |= {"ordering_keys": orders, "priorities": levels}
    for name, column in columns.items():
        if len(column) not in (0, n):
            raise InvalidRequest.of(name, Described(f"{len(column)} values"), f"give none, or {n}")
    check_keyed("keys[{}]" if key_list else "keys", on_conflict, key_list or [b""])
    _write_optional(to, key_list, header_list)
    _write_traits(to, orders, levels)
    return check_size(request.SerializeToString()), n


def _keys(name: str, keys: Iterable[str | None]) -> list[bytes]:
    return convert_all(texts(name, keys), lambda key: utf8(name, "" if key is None else key))


def priority(value: int | None) -> int:
    """Return a priority.

    Raises:
        InvalidRequest: It is not in 0 .. 9.
    """
    return PRIORITY_DEFAULT if value is None else whole_number("priority", value, 0, PRIORITY_MAX)


def _priorities(values: Iterable[int | None] | int | None, n: int) -> list[int]:
    if isinstance(values, Iterable):
        return convert_all(sequence_of("priorities", values), priority)
    return [] if values is None else [priority(values)] * n


def check_size(body: bytes) -> bytes:
    """Return `body`, checked to fit into one message.

    Raises:
        InvalidRequest: It is too large.
    """
    if len(body) > REQUEST_SIZE_MAX:
        raise InvalidRequest.of(
            "request", Described(f"{len(body)} bytes"), f"at most {REQUEST_SIZE_MAX}"
        )
    return body


def payload_bytes(payload: Any, hint: str = ", or give a value as `json`") -> bytes:
    """Return one payload as bytes. `hint`: the end of the error text.

    Raises:
        InvalidRequest: It is not bytes-like.
    """
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    raise InvalidRequest.of("payload", kind_of(payload), f"must be bytes; encode text first{hint}")


def kind_of(value: object) -> str:
    """Return the type and size of a value, for an error that must not show the value."""
    size = f" of {len(value)}" if isinstance(value, str | bytes | bytearray) else ""
    return Described(f"{type(value).__name__}{size}")


def _write_payloads(to: pb.TimerColumns, payloads: Any) -> int:
    """Write the payloads to `to`; return their number."""
    if isinstance(payloads, bytes | bytearray | str):
        raise InvalidRequest.of("payloads", kind_of(payloads), "must be a sequence of bytes")
    table = _table(payloads)
    if table is not None:
        n, width = table.shape or (0, 0)
        to.payload_sizes.extend([width] * n)
        to.payloads = table.tobytes()
    else:
        rows = sequence_of("payloads", payloads)
        n = len(rows)
        try:
            blob = to.payloads = b"".join(rows)
            sizes = list(map(len, rows))
        except TypeError:
            convert_all(rows, lambda row: payload_bytes(row, ""))
            raise
        if sum(sizes) != len(blob):  # views of wider items
            sizes = [memoryview(row).nbytes for row in rows]
        to.payload_sizes.extend(sizes)
    if not n:
        raise InvalidRequest.of("payloads", [], "a batch has at least one row")
    return n


def _table(payloads: Any) -> memoryview | None:
    """Return `payloads` as a buffer of bytes (n, width). None: it is not one."""
    if isinstance(payloads, list | tuple):
        return None
    try:
        view = memoryview(payloads)
    except (TypeError, ValueError):
        return None
    return view if view.ndim == 2 and view.itemsize == 1 else None


def texts(name: str, values: Iterable[T]) -> Sequence[T]:
    """Return `values` as a sequence.

    Raises:
        InvalidRequest: It is a single string. Its letters would be read as strings.
    """
    if isinstance(values, str | bytes):
        raise InvalidRequest.of(name, values[:32], "must be a sequence of strings")
    return sequence_of(name, values)


def at_hand(values: T) -> T:
    """Return an iterator or another lazy iterable as a list, and any other value unchanged.

    Arrays, sequences, mappings, strings, bytes and numbers are unchanged.
    """
    lazy = isinstance(values, Iterable) and not isinstance(values, str | bytes | Sequence | Mapping)
    return list(values) if lazy and not hasattr(values, "tolist") else values  # type: ignore[call-overload]


def times_at_hand(when: "WhenMany") -> "WhenMany":
    """Return due times with `at_hand` values."""
    return cast("WhenMany", {name: at_hand(values) for name, values in when.items()})


def sequence_of(name: str, values: Any) -> Sequence[Any]:
    """Return `values` as a sequence.

    Raises:
        InvalidRequest: They can't be iterated; names `name`.
    """
    if isinstance(values, list | tuple):
        return values
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise InvalidRequest.of(name, kind_of(values), "must be a sequence, one for each timer")
    return list(values)


def _write_optional(to: pb.TimerColumns, keys: list[bytes], headers: list[bytes]) -> None:
    if any(keys):
        to.key_sizes.extend(map(len, keys))
        to.keys = b"".join(keys)
    if any(headers):
        to.headers_sizes.extend(map(len, headers))
        to.headers = b"".join(headers)


def _write_traits(to: pb.TimerColumns, ordering_keys: list[bytes], priorities: list[int]) -> None:
    if any(ordering_keys):
        to.ordering_key_sizes.extend(map(len, ordering_keys))
        to.ordering_keys = b"".join(ordering_keys)
    if any(each != PRIORITY_DEFAULT for each in priorities):
        to.priorities.extend(priorities)
