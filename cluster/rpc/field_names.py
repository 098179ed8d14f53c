"""Fields in errors: the names of the contract become those of a form's JSON.

contract             JSON
delay_ms             delay               of one timer
filter.key_prefix    key_prefix
payload[1]           timers[1].payload   of {"timers": [...]}
key[1]               keys[1]             of {"keys": [...]}
due_ms               due                 if the request has `due`
"""

import re
from collections.abc import Mapping
from typing import Any, Final

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


def field_of_one(name: str) -> str:
    """Return the name of a field of a request about one timer, or about a filter."""
    plain = name.removeprefix("filter.")
    return "delay" if plain == "delay_ms" else plain


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
    """Return a copy of an error that names its field `field`."""
    made = pb.Error()
    made.CopyFrom(error)
    made.field = field
    if error.field and error.message.startswith(error.field):
        made.message = field + error.message[len(error.field) :]
    return made
