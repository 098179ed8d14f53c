"""Fields in errors: the names and units of the contract become those of a form's JSON.

contract             JSON
delay_ms = 2000      delay = 2 s         of one timer; lease_ms and wait_ms likewise
filter.key_prefix    key_prefix
payload[1]           timers[1].payload   of {"timers": [...]}
key[1]               keys[1]             of {"keys": [...]}
due_ms = 1000        due = 1970-01-01T00:00:01.000Z   if the request has `due`
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc.json_fields import moment_text
from timerclient.proto import timer_pb2 as pb

TIMERS: Final = "timers[{at}].{name}"
KEYS: Final = "keys[{at}]"
_INDEXED: Final = re.compile(r"(\w+)(?:\[([0-9]+)\])?")
_OF_A_ROW: Final = frozenset(
    {
        *("payload", "key", "headers", "ordering_key", "priority"),
        *("due_ms", "delay_ms", "delay_level"),
    }
)
_MOMENTS: Final = ("due", "due_from", "due_to", "start", "end")
_OF_ALL_ROWS: Final = frozenset({"payloads", "keys"})
_SPANS: Final = {"delay_ms": "delay", "lease_ms": "lease", "wait_ms": "wait"}
_NUMBER: Final = re.compile(r"(?<![\w.-])-?[0-9]+(?![\w-])")
"""A number by itself, not a part of a name."""


def field_of_one(name: str) -> str:
    """Return the name of a field of a request about one timer, its messages, or a filter."""
    plain = name.removeprefix("filter.")
    return _SPANS.get(plain, plain)


def field_of_row(name: str, rows: int, place: str) -> str:
    """Return the name of a field of a request about a list of `rows` elements.

    `place`: TIMERS or KEYS. An error about all elements names the list.
    """
    found = _INDEXED.fullmatch(name)
    if found is None or found[1] not in _OF_A_ROW | _OF_ALL_ROWS:
        return name
    at = found[2] or ("0" if rows == 1 and name in _OF_A_ROW else None)
    if at is None:
        return place.partition("[")[0]
    return place.format(at=at, name=field_of_one(found[1]))


def moments_of(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the places of a request's times that are not in Unix milliseconds: timers[1].due."""
    found = {name for name in _MOMENTS if fields.get(name) is not None}
    if isinstance(rows := fields.get("timers"), list):
        given = (isinstance(row, dict) and row.get("due") is not None for row in rows)
        found |= {TIMERS.format(at=at, name="due") for at, there in enumerate(given) if there}
    return frozenset(found)


def as_sent(name: str, moments: frozenset[str]) -> str:
    """Return the name of a field as the request has it. `moments`: see `moments_of`."""
    short = name.removesuffix("_ms")
    return short if short in moments else name


def with_field(error: pb.Error, field: str) -> pb.Error:
    """Return a copy of an error that names its field `field`, with value and limit in its unit."""
    made = pb.Error()
    made.CopyFrom(error)
    made.field = field
    rest = error.message.removeprefix(error.field)
    if error.field.partition("[")[0].endswith("_ms") and not field.endswith("_ms"):
        shown = _moment if field.rpartition(".")[2] in _MOMENTS else _span
        rest, made.limit = (
            _NUMBER.sub(shown, text.replace("_ms = ", " = ")) for text in (rest, error.limit)
        )
    if error.message.startswith(error.field):
        made.message = field + rest
    return made


def _span(ms: re.Match[str]) -> str:
    return f"{int(ms[0]) / 1000:.15g} s"


def _moment(ms: re.Match[str]) -> str:
    return moment_text(int(ms[0]))
