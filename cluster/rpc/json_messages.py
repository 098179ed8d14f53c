"""Fields of a message of the contract in JSON, checked against the message's descriptor.

For the routes without a form. A 64-bit number may be a number or text.
"""

import math
from collections.abc import Container
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from cluster.rpc.json_fields import Fields, check_known, field_error, flag, text, whole_number
from timer.model.timer_errors import HIDDEN
from timerclient.rows.enum_names import short_names

_RANGE: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
"""Type of a field -> its least and greatest number."""


def check_message(
    fields: Fields, message: Any, where: str = "", leave_out: Container[str] = ()
) -> None:
    """Check the fields of a message, and of the messages in it.

    Args:
        fields: By their names in the contract, or the same in camel case. None: absent.
        message: The descriptor of the message.
        where: The message's own field, with a point behind it, before the names in errors.
        leave_out: Fields that no list of known ones should have.

    Raises:
        InvalidRequestError: one is not known or has a wrong type, or two exclude each other.
    """
    known = [name for name in message.fields_by_name if name not in leave_out]
    declared = {each.json_name: each for each in message.fields} | dict(message.fields_by_name)
    check_known([name for name in fields if name not in declared], known, where)
    for name, field in ((name, declared[name]) for name in fields):
        if name != field.name and field.name in fields:
            raise field_error(
                f"{where}{name}", fields[name], f"is {field.name}, which is given, too"
            )
        if fields[name] is not None:
            _check_field(f"{where}{name}", fields[name], field)
    given = {declared[name].name for name, value in fields.items() if value is not None}
    for group in message.oneofs:
        names = [field.name for field in group.fields]
        if len(given.intersection(names)) > 1:
            raise field_error(
                f"{where}{group.name}", HIDDEN, f"give only one of {', '.join(names)}"
            )


def _check_field(name: str, value: Any, field: Any) -> None:
    if not field.is_repeated:
        _check_value(name, value, field)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            _check_value(f"{name}[{at}]", each, field)
    else:
        raise field_error(name, value, "must be a list")


def _check_value(name: str, value: Any, field: Any) -> None:
    """Check one value: of a field, or of an element of a repeated one."""
    if value is None:
        raise field_error(name, value, "must not be null")
    if field.message_type is not None:
        if not isinstance(value, dict):
            raise field_error(name, value, "must be an object")
        check_message(value, field.message_type, f"{name}.")
    elif field.enum_type is not None:
        names = short_names(field.enum_type)
        known = {*names, *field.enum_type.values_by_name, *field.enum_type.values_by_number}
        if not isinstance(value, str | int) or value not in known:
            meant = [each for each in names if not each.endswith("_UNSPECIFIED")]
            raise field_error(name, value, f"must be one of {', '.join(meant)}")
    elif field.cpp_type in _RANGE:
        _check_number(name, value, *_RANGE[field.cpp_type])
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        flag({name: value}, name)
    else:
        text({name: value}, name)


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    """Check a number by the range of its type, of which an error shows the exceeded end only.

    The method may have a narrower range, which its own error shows.
    """
    number = whole_number({name: value}, name, -math.inf, math.inf)
    if not least <= number <= most:
        limit = f"must be at least {least}" if number < least else f"must be at most {most}"
        raise field_error(name, number, limit)
