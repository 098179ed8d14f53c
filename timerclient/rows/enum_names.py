"""Short names of enum values, without the prefix that the contract gives them.

    REASON_NOT_FOUND        NOT_FOUND
    GROUP_START_UNSPECIFIED EARLIEST
    REASON_UNSPECIFIED      REASON_UNSPECIFIED: it stands for no value

JSON, timerctl, errors and the client's own enums have the short names.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_MEANT: Final = {"timer.v1.GroupStart": "EARLIEST", "timer.v1.OnConflict": "REJECT"}
"""Enum -> the short name of its value 0, if that stands for a value of its own."""


def prefix_of(enum: str) -> str:
    """Return the prefix of an enum's values: `GROUP_START_` of `GroupStart`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", enum).upper() + "_"


def short_name(enum: Any, number: int) -> str:
    """Return the short name of a value; of a later version's value, its number.

    `enum`: the enum's descriptor.
    """
    value = enum.values_by_number.get(number)
    if value is None:
        return str(number)
    if number == 0:
        return _MEANT.get(enum.full_name, str(value.name))
    return str(value.name).removeprefix(prefix_of(enum.name))


def short_names(enum: Any) -> dict[str, int]:
    """Return the numbers of all values of an enum by their short names, in order."""
    return {short_name(enum, value.number): value.number for value in enum.values}


def with_numbers(fields: Mapping[str, Any], message: Any) -> dict[str, Any]:
    """Return a message's fields, as JSON has them, with numbers for the short names of enums.

    Other names are left unchanged. `message`: the message's descriptor.
    """

    def number(enum: Any, value: Any) -> Any:
        return short_names(enum).get(value, value) if isinstance(value, str) else value

    return _with_enums(number, fields, message)


def with_short_names(fields: Mapping[str, Any], message: Any) -> dict[str, Any]:
    """Return a message's fields, as JSON has them, with short names for the numbers of enums.

    `message`: the message's descriptor.
    """
    return _with_enums(short_name, fields, message)


def _with_enums(
    changed: Callable[[Any, Any], Any], fields: Mapping[str, Any], message: Any
) -> dict[str, Any]:
    """Return fields with other values of enums, also in the messages within them."""

    def value_of(value: Any, field: Any) -> Any:
        if isinstance(value, list):
            return [value_of(one, field) for one in value]
        if field.enum_type is not None:
            return changed(field.enum_type, value)
        is_message = isinstance(value, dict) and not field.message_type.GetOptions().map_entry
        return _with_enums(changed, value, field.message_type) if is_message else value

    known = message.fields_by_name
    return {
        name: value_of(value, known[name])
        if name in known and (known[name].enum_type or known[name].message_type)
        else value
        for name, value in fields.items()
    }
