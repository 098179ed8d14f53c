"""Parses a client's message after checks of its size and its number of fields.

    bytes --too many bytes?--> --too many fields?--> parsed --> the request
                                                     else   --> Refused, which the handler raises

Protobuf creates an object for each field that is a message or a text, and holds the interpreter
meanwhile. 17 MB of empty `TimerColumns` took 2.8 s and 900 MB; 17 MB of packed numbers take 10 ms.
So the fields of a large message are counted first, including those of the messages in it.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from timer.model.timer_errors import EngineError, InvalidRequestError

COLUMNS_BYTES_MAX: Final = 2 << 20
"""Bytes of a request beside payloads, keys and headers: 65,536 rows, 1,024 topics."""
COUNTED_FROM: Final = 64 << 10
"""Bytes. The fields of shorter messages are not counted: parsing one takes at most 5 ms."""
FIELDS_MAX: Final = 20_000
"""Fields of a longer message, at most: 1,024 `TimerColumns` with all their columns, and some more.
Counting them takes about 10 ms, parsing 5 ms."""

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """Stands for a request that could not be parsed; carries the error to raise."""

    error: EngineError


_RECEIVED: ContextVar[int] = ContextVar("received", default=0)
"""Bytes of the request that this task received last. gRPC parses in the task of the handler."""


def size_of(request: Any) -> int:
    """Return the bytes of the request on which this task works, as received.

    `ByteSize` encodes a message, so it is called only for a request of the HTTP port.
    """
    return _RECEIVED.get() or (request.ByteSize() if hasattr(request, "ByteSize") else 0)


class _TooMany(Exception):
    pass


class MessageShape:
    """The fields of a message type that are messages themselves, by number."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._inner: Mapping[int, MessageShape] = {
            field.number: MessageShape(field.message_type)
            for field in descriptor.fields
            if field.message_type is not None
        }

    def holds_at_most(self, data: bytes, fields: int) -> bool:
        """Return whether a message has at most `fields` fields, those of inner messages included.

        Counting stops at malformed bytes and returns True, because parsing then fails, too.
        """
        try:
            self.count(data, 0, len(data), fields)
        except IndexError:
            return True
        except _TooMany:
            return False
        return True

    def count(self, data: bytes, at: int, end: int, left: int) -> int:
        """Return the number of fields that are left of `left` after those in `data[at:end]`."""
        while at < end:
            left -= 1
            if left < 0:
                raise _TooMany
            key, at = _varint(data, at)
            wire = key & 7
            if wire == _BYTES:
                size, at = _varint(data, at)
                inner = self._inner.get(key >> 3)
                if inner is not None:
                    left = inner.count(data, at, min(at + size, end), left)
                at += size
            elif wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _FIXED32:
                at += 4
            elif wire == _FIXED64:
                at += 8
        return left


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (the number at `at`, the place after it)."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = shift = 0
    for end in range(at, at + 10):
        byte = data[end]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, end + 1
        shift += 7
    raise IndexError("a varint has at most 10 bytes")


Parse: TypeAlias = Callable[[bytes], Message]
Read: TypeAlias = Callable[[bytes], Message | UnreadableRequest]


def reader_of(parse: Parse, bytes_max: int) -> Read:
    """Return a function that parses a method's requests. `parse`: `FromString` of their class."""
    cls: Any = parse.__self__  # type: ignore[attr-defined]  # it is a class method
    shape = MessageShape(cls.DESCRIPTOR)

    def read(data: bytes) -> Message | UnreadableRequest:
        size = len(data)
        _RECEIVED.set(size)
        if size > bytes_max:
            limit = f"must have at most {bytes_max} bytes"
            return UnreadableRequest(InvalidRequestError("request", f"{size} bytes", limit))
        if size > COUNTED_FROM and not shape.holds_at_most(data, FIELDS_MAX):
            limit = f"must have at most {FIELDS_MAX}, as it has more than {COUNTED_FROM} bytes"
            value = f"more than {FIELDS_MAX} fields"
            return UnreadableRequest(
                InvalidRequestError("request", value, limit + "; pack repeated numbers")
            )
        try:
            return parse(data)
        except DecodeError:
            name = cls.DESCRIPTOR.full_name
            return UnreadableRequest(
                InvalidRequestError("request", f"{size} bytes", f"must be a {name}")
            )

    return read
