"""Messages of the contract as JSON: of timerctl, and of a node's HTTP port."""

import base64
from typing import TYPE_CHECKING, Any

from timerclient.rows.enum_names import short_name

if TYPE_CHECKING:  # a message comes with its module
    from google.protobuf.message import Message


def as_dict(message: "Message") -> dict[str, Any]:
    """Return every field of a message by its name in the contract; absent ones are None.

    Values of enums have their short names (timerclient/rows/enum_names.py).

    Counts and times are numbers, even with 64 bits, so that scripts can compare them. A 64-bit id
    is a string, because many JSON readers round large numbers. An id of 0 means none, and is None.
    The name of a producer has 16 hexadecimal digits, as in `timerctl producers`.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: "Message", field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.name == "producer":
        return f"{value:016x}" if value else None
    if field.name.endswith("_id") and isinstance(value, int):
        return str(value) if value else None
    if field.enum_type is not None and not field.is_repeated:
        return short_name(field.enum_type, value)
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [as_dict(one) for one in value]
    return as_dict(value)


def payload_fields(data: bytes) -> dict[str, str]:
    """Return a payload for JSON: as text if it is UTF-8, else as base64."""
    try:
        return {"payload": data.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}
