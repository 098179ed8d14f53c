"""Messages with the same fields under another name: the answers of different RPCs.

Each RPC has an answer of its own type, which may get fields of its own. Several answers have all
fields of a message that other RPCs return too: `CreateGroupResponse` those of `GroupStatus`.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # a message comes with its module
    from google.protobuf.message import Message

_Message = TypeVar("_Message", bound="Message")


def as_type(kind: type[_Message], message: "Message") -> _Message:
    """Return a copy of a message, as the type `kind`, which has the same fields."""
    return kind.FromString(message.SerializeToString())
