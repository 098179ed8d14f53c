"""Codecs: values in place of bytes as payloads, with their content type in a header.

    client.schedule("orders", json={"order": 4711}, delay=60)          # JSON
    client.schedule("orders", EncodedValue(order, MSGPACK), delay=60)  # any other codec
    message.json(), message.decode(MSGPACK)

A payload of bytes stays as it is, and gets no header.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from timerclient.values.errors import Described, InvalidRequest, UndecodablePayload

CONTENT_TYPE: Final = "content-type"
"""The header that names the codec of a payload."""
NO_VALUE: Final = ...
"""Default of the argument `json`: None is a value, the JSON `null`."""


class Codec(Protocol):
    """Converts values to payloads and back. An object without state serves all threads."""

    @property
    def content_type(self) -> str:
        """The value of the header `content-type`, such as "application/json"."""

    def encode(self, value: Any) -> bytes:
        """Return the payload of a value. Any exception means that there is none."""

    def decode(self, payload: bytes) -> Any:
        """Return the value of a payload. Any exception means that there is none."""


class JsonCodec:
    """JSON in UTF-8, as RFC 8259 has it: no NaN, no infinity."""

    content_type = "application/json"

    def encode(self, value: Any) -> bytes:
        """Return the JSON of a value, without white space.

        Raises:
            TypeError: A part of the value has no form in JSON.
            ValueError: The value contains itself, NaN or an infinity.
        """
        return _ENCODER.encode(value).encode()

    def decode(self, payload: bytes) -> Any:
        """Return the value of a JSON text.

        Raises:
            ValueError: The payload is not JSON.
        """
        return _DECODER.decode(payload.decode())


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(parse_constant=_no_number)
JSON: Final = JsonCodec()


@dataclass(frozen=True, slots=True)
class BytesCodec:
    """Payloads that are encoded already."""

    content_type: str

    def encode(self, value: bytes) -> bytes:
        """Return the payload as it is."""
        return value

    def decode(self, payload: bytes) -> bytes:
        """Return the payload as it is."""
        return payload


@dataclass(frozen=True, slots=True)
class EncodedValue:
    """A value as the payload of a timer, encoded when the timer is scheduled."""

    value: Any
    codec: Codec
    field: str = "payload"
    """Name of the argument, for errors."""

    def payload(self) -> bytes:
        """Return the payload.

        Raises:
            InvalidRequest: The codec has no form of the value, or returns no bytes.
        """
        try:
            payload: object = self.codec.encode(self.value)
        except Exception as error:
            limit = f"must have a form as {self.codec.content_type}: {reason_of(error)}"
            raise InvalidRequest.of(
                self.field, Described(type(self.value).__name__), limit
            ) from error
        if not isinstance(payload, bytes):
            limit = f"the codec must return bytes, not {type(payload).__name__}"
            raise InvalidRequest.of(self.field, Described(type(self.value).__name__), limit)
        return payload

    def of_payload(self, payload: bytes) -> Any:
        """Return the value that a reader of this payload of the value gets.

        Raises:
            InvalidRequest: The codec can't decode it.
        """
        try:
            return self.codec.decode(payload)
        except Exception as error:
            limit = f"can't be read back as {self.codec.content_type}: {reason_of(error)}"
            raise InvalidRequest.of(
                self.field, Described(type(self.value).__name__), limit
            ) from error

    def headers(self, given: Any) -> Mapping[str, str]:
        """Return the headers of the timer: those given, and the content type if they have none.

        A value of another type stays as it is: the call rejects it.
        """
        if given is None or isinstance(given, Mapping):
            return {CONTENT_TYPE: self.codec.content_type, **(given or {})}
        return given  # type: ignore[no-any-return]


Payload = bytes | EncodedValue


def payload_of(payload: Payload | None, json: Any) -> Payload:
    """Return the payload that the arguments `payload` and `json` of a call give.

    Raises:
        InvalidRequest: Both are given, or neither.
    """
    if json is NO_VALUE:
        if payload is None:
            raise InvalidRequest.of("payload", None, "give bytes, or a value as `json`")
        return payload
    if payload is not None:
        limit = "give `payload` or `json`, not both"
        raise InvalidRequest.of("json", Described(type(json).__name__), limit)
    return EncodedValue(json, JSON, "json")


class PayloadReader:
    """The part of a message, a timer or a series that decodes its payload."""

    __slots__ = ()

    @property
    def payload(self) -> bytes | None:
        """The payload of the timer. None: it is not pending any more."""
        raise NotImplementedError

    @property
    def headers(self) -> Mapping[str, str] | None:
        """The headers of the timer. None: it is not pending any more."""
        raise NotImplementedError

    def json(self) -> Any:
        """Return the value of the payload, which is JSON. The header `content-type` may differ.

        Raises:
            UndecodablePayload: The payload is not JSON.
        """
        return _decode(JSON, self.payload)

    def decode(self, codec: Codec) -> Any:
        """Return the value of the payload.

        Raises:
            UndecodablePayload: The header `content-type` names another type than the codec's, apart
                from parameters such as a charset, or the codec can't decode the payload. A message
                without the header is decoded.
        """
        given = (self.headers or {}).get(CONTENT_TYPE, codec.content_type)
        if given != codec.content_type and _media_type(given) != _media_type(codec.content_type):
            text = f"content-type = {given!r}: the codec is of {codec.content_type}"
            raise UndecodablePayload(text)
        return _decode(codec, self.payload)


def _media_type(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def _decode(codec: Codec, payload: bytes | None) -> Any:
    if payload is None:
        raise UndecodablePayload("only a pending timer has its payload")
    try:
        return codec.decode(payload)
    except Exception as error:
        text = f"a payload of {len(payload)} bytes is not {codec.content_type}: {reason_of(error)}"
        raise UndecodablePayload(text) from error


def reason_of(error: Exception) -> str:
    """Return the type and the beginning of the text of an error, in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- an edge: the `__str__` of an application's error
        text = ""
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
