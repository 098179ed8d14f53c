"""Fields of requests in JSON, checked. An error names the field, the value and the limit.

Fields of the path and the query are texts. A number may therefore come as text. JSON's null is as
if the field were absent.

    a time        `NAME`: text as in RFC 3339, with its offset; or `NAME_ms`: Unix milliseconds
    a duration    seconds as a number, or text as in ISO 8601 without years and months: PT1H30M
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, Final, TypeVar

from timer.model.timer_errors import HIDDEN, InvalidRequestError
from timer.model.units import DUE_MS_MAX
from timerclient.rows import rows

T = TypeVar("T")
Fields = Mapping[str, Any]
"""Path, query and body of one request."""
SHOWN_MAX: Final = 64
"""Characters of a value in an error."""
_DURATION: Final = re.compile(
    r"P(?:(\d{1,9})W)?(?:(\d{1,9})D)?"
    r"(?:T(?=\d)(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,12}(?:\.\d{1,9})?)S)?)?",
    re.ASCII,
)
_UNITS_S: Final = (604_800, 86_400, 3_600, 60, 1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


def field_error(field: str, value: object, limit: str) -> InvalidRequestError:
    """Return the error of a field. A long value is cut."""
    if value is None:
        value = HIDDEN
    elif isinstance(value, dict | list):
        value = f"{'object' if isinstance(value, dict) else 'list'} of {len(value)}"
    elif isinstance(value, str) and len(value) > SHOWN_MAX:
        value = value[:SHOWN_MAX] + "…"
    elif isinstance(value, int) and abs(value) >= 1 << 64:
        value = "a number of more than 64 bits"
    return InvalidRequestError(field, value, limit)


def check_known(fields: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Check the names of all fields. `where`: of the fields, before their names.

    Raises:
        InvalidRequestError: one is not known.
    """
    for name in fields:
        if name not in known:
            known = [*known]
            near = difflib.get_close_matches(name[:SHOWN_MAX], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            limit = f"is not known{hint} known: {', '.join(known) or 'none'}"
            raise InvalidRequestError(f"{where}{name[:SHOWN_MAX]}", HIDDEN, limit)


def text(fields: Fields, name: str, default: str = "") -> str:
    """Return a text.

    Raises:
        InvalidRequestError: it is another value, or has no form in UTF-8.
    """
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise field_error(name, value, "must be a string")
    utf8(name, value)
    return value


def utf8(name: str, value: str) -> bytes:
    """Return a text in UTF-8.

    Raises:
        InvalidRequestError: it has a lone surrogate.
    """
    try:
        return value.encode()
    except UnicodeEncodeError:
        limit = "must have a form in UTF-8, without lone surrogates"
        raise InvalidRequestError(name, value[:SHOWN_MAX], limit) from None


def whole_number(fields: Fields, name: str, least: float, most: float, default: int = 0) -> int:
    """Return a whole number.

    Raises:
        InvalidRequestError: it is another value, or not in least .. most.
    """
    value = fields.get(name)
    if value is None:
        return default
    if (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value)) or (
        isinstance(value, float) and value.is_integer()
    ):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise field_error(name, value, "must be a whole number")
    if not least <= value <= most:
        raise field_error(name, value, f"must be {least} to {most}")
    return value


def choice(fields: Fields, name: str, choices: Mapping[str, int], default: str) -> int:
    """Return the number of a word in `choices`.

    Raises:
        InvalidRequestError: the word is none of them.
    """
    word = text(fields, name, default)
    if word not in choices:
        raise field_error(name, word, f"must be one of {', '.join(choices)}")
    return choices[word]


def flag(fields: Fields, name: str) -> bool:
    """Return true or false; absent: false.

    Raises:
        InvalidRequestError: it is another value.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise field_error(name, value, "must be true or false")
    return bool(value)


def wholes(fields: Fields, name: str, most: int, count_max: int) -> list[int]:
    """Return a list of 1 to `count_max` whole numbers from 0 to `most`.

    Raises:
        InvalidRequestError: it is another value.
    """
    values = elements(fields, name, "whole numbers", count_max)
    for at, value in enumerate(values):
        if value is None:
            raise field_error(f"{name}[{at}]", value, "must be a whole number")
    return [
        whole_number({(place := f"{name}[{at}]"): value}, place, 0, most)
        for at, value in enumerate(values)
    ]


def elements(fields: Fields, name: str, noun: str, count_max: int | None = None) -> list[Any]:
    """Return a list of 1 to `count_max` values. `noun`: their name in the plural, for the error.

    Raises:
        InvalidRequestError: it is another value, or its length is out of range.
    """
    values = fields.get(name)
    if not isinstance(values, list) or not values or len(values) > (count_max or len(values)):
        limit = f"must be a list of {'one or more' if count_max is None else f'1 to {count_max}'}"
        raise field_error(name, values, f"{limit} {noun}")
    return values


def element(
    name: str, at: int, value: object, known: Iterable[str], read: Callable[[Fields], T]
) -> T:
    """Return the result of `read` for the object at place `at` of the list `name`.

    Raises:
        InvalidRequestError: it is no object, or one of its fields is wrong. The error names the
            place, as in timers[3].delay.
    """
    place = f"{name}[{at}]"
    if not isinstance(value, dict):
        raise field_error(place, value, "must be an object")
    try:
        check_known(value, known)
        return read(value)
    except InvalidRequestError as error:
        wrong = error
    raise InvalidRequestError(f"{place}.{wrong.field}", wrong.value, wrong.limit)


def span_ms(fields: Fields, name: str, most_ms: int = DUE_MS_MAX, least_ms: int = 0) -> int | None:
    """Return a duration in milliseconds, rounded up; absent: None.

    Raises:
        InvalidRequestError: it is none, or not `least_ms` to `most_ms`.
    """
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        seconds = _seconds(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    else:
        seconds = None
    if seconds is None:
        limit = "must be seconds as a number, or a duration of weeks to seconds such as PT1H30M"
        raise field_error(name, value, limit)
    ms = rows.ms_of(seconds)
    if not least_ms <= ms <= most_ms:
        limit = f"must be {least_ms / 1000:g} to {most_ms / 1000:.15g} s"
        raise field_error(name, value, limit)
    return ms


def _seconds(duration: str) -> float | None:
    found = _DURATION.fullmatch(duration)
    if found is None or not any(found.groups()):
        return None
    parts = zip(found.groups(), _UNITS_S, strict=True)
    return sum(float(number) * unit for number, unit in parts if number)


def instant_ms(
    fields: Fields, name: str, least_ms: int = 0, limit: str = f"must be 0 to {DUE_MS_MAX}"
) -> int | None:
    """Return the time `NAME` or `NAME_ms` in Unix milliseconds; absent: None.

    `NAME` is at least 1 ms: 0 is the contract's unset value. `limit`: of `NAME_ms`, for errors.

    Raises:
        InvalidRequestError: both are given, or the time is malformed or out of range.
    """
    in_ms = f"{name}_ms"
    value = fields.get(name)
    if value is None and fields.get(in_ms) is None:
        return None
    if value is None:
        ms = whole_number(fields, in_ms, -inf, inf)
        if not least_ms <= ms <= DUE_MS_MAX:
            raise field_error(in_ms, ms, limit)
        return ms
    if fields.get(in_ms) is not None:
        raise field_error(name, value, f"give {name} or {in_ms}, not both")
    ms, least_ms = _moment_ms(name, value), max(least_ms, 1)
    if ms < least_ms:
        raise field_error(name, value, f"must be {moment_text(least_ms)} or later")
    return ms


def moment_text(unix_ms: int) -> str:
    """Return Unix milliseconds as in RFC 3339."""
    return rows.moment_of(unix_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment_ms(name: str, value: object) -> int:
    limit = f"must be a time as in RFC 3339, such as 2026-11-25T09:00:00Z; Unix time is {name}_ms"
    if not isinstance(value, str):
        raise field_error(name, value, limit)
    try:
        found = datetime.fromisoformat(value.upper())  # RFC 3339 allows t and z
    except ValueError:
        raise field_error(name, value, limit) from None
    if found.utcoffset() is None:
        raise field_error(name, value, "must have an offset from UTC, such as Z or +01:00")
    return -(-(found - _EPOCH) // _MS)
