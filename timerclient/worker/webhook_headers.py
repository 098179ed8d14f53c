"""Headers of a pushed message: those of "Standard Webhooks" with the signature, and the timer's.

    webhook-id, webhook-timestamp, webhook-signature    the timer's id; the signature of the body
    Timer-Topic, Timer-Key, Timer-Due, …                the delivery
    Timer-Header-NAME                                   the message's own headers

Keys and headers of messages are any text. They are percent-encoded: no value ends a line, and a
receiver decodes the same text. The functions are pure.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from timerclient.rows.messages import Message
from timerclient.rows.rows import moment_of
from timerclient.values.codecs import CONTENT_TYPE
from timerclient.values.errors import InvalidRequest

PREFIX: Final = "Timer-Header-"
OMITTED_HEADERS: Final = "Timer-Headers-Omitted"
"""Number of the message's headers that exceed HEADERS_BYTES_MAX, or whose names differ from another
one only in case: names of HTTP have no case."""
HEADERS_BYTES_MAX: Final = 4_096
"""Bytes of the message's headers in a request. Many servers take 8 KB of headers in all."""
CONTENT_TYPE_BYTES_MAX: Final = 256
"""Bytes of a message's `content-type`; a longer one is no media type."""
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 -- of the standard
SECRET_BYTES: Final = range(24, 65)
_TOKEN: Final = "!#$&'*+-.^_`|~"  # noqa: S105 -- a token of HTTP: with letters, digits and "%"
_VISIBLE: Final = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Visible characters of ASCII, without letters, digits and "%"."""
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e]*")
_MEDIA_TYPE: Final = re.compile(rf"{_NAME.pattern}/{_NAME.pattern}(?: *;[\x20-\x7e]*)?")
_RESERVED: Final = frozenset({"connection", "content-length", "host", "transfer-encoding"})
_RESERVED_PREFIXES: Final = ("webhook-", "timer-")


def percent_encode(text: str) -> str:
    """Return a text as a header's value: visible ASCII; all else, and "%", percent-encoded."""
    return quote(text, safe=_VISIBLE, errors="replace")


def delivery_headers(message: Message) -> dict[str, str]:
    """Return the headers that describe a delivery, and the message's own."""
    headers = {
        "Content-Type": _content_type(message.headers),
        "Timer-Topic": percent_encode(message.topic),
        "Timer-Due": _instant(message.due_ms),
        "Timer-Fired": _instant(message.fired_at_ms),
        "Timer-Attempt": str(message.attempt),
        "Timer-Failures": str(message.failures),
    }
    if message.key is not None:
        headers["Timer-Key"] = percent_encode(message.key)
    bytes_left, omitted, names = HEADERS_BYTES_MAX, 0, set[str]()
    for given, text in message.headers.items():
        name, value = PREFIX + quote(given, safe=_TOKEN, errors="replace"), percent_encode(text)
        size = len(f"{name}: {value}\r\n")
        if given == CONTENT_TYPE:
            continue
        if size > bytes_left or name.lower() in names:
            omitted += 1
        else:
            bytes_left -= size
            names.add(name.lower())
            headers[name] = value
    if omitted:
        headers[OMITTED_HEADERS] = str(omitted)
    return headers


def _content_type(headers: Mapping[str, str]) -> str:
    given = headers.get(CONTENT_TYPE, "")
    fits = len(given) <= CONTENT_TYPE_BYTES_MAX and _MEDIA_TYPE.fullmatch(given)
    return given if fits else "application/octet-stream"


def _instant(ms: int) -> str:
    return moment_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def webhook_headers(
    timer_id: str, body: bytes, secrets: Sequence[bytes], now_s: int
) -> dict[str, str]:
    """Return the headers of "Standard Webhooks", with a signature by each of the secrets."""
    headers = {"webhook-id": timer_id, "webhook-timestamp": str(now_s)}
    if secrets:
        signed = f"{timer_id}.{now_s}.".encode() + body
        digests = (hmac.new(each, signed, hashlib.sha256).digest() for each in secrets)
        signatures = (f"v1,{base64.b64encode(each).decode()}" for each in digests)
        headers["webhook-signature"] = " ".join(signatures)
    return headers


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; not the empty ones, nor comments (#)."""
    for number, line in enumerate(text.splitlines(), 1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


def read_secrets(lines: Iterable[tuple[int, str]]) -> list[bytes]:
    """Return the keys of secrets, as `whsec_` and base64. No error has a secret.

    Raises:
        InvalidRequest: One is no base64, or not of 24 to 64 bytes; or there is none.
    """
    found = []
    for number, line in lines:
        try:
            key = base64.b64decode(line.removeprefix(SECRET_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) not in SECRET_BYTES:
            limit = "must be whsec_ and the base64 of 24 to 64 random bytes"
            raise InvalidRequest.of(f"secret {number}", None, limit)
        found.append(key)
    if not found:
        raise InvalidRequest.of("secrets", None, "there is none")
    return found


def read_header_file(text: str, given: Iterable[str] = ()) -> dict[str, str]:
    """Return the headers of a file's lines. No error has a value. `given`: as `read_headers`.

    Raises:
        InvalidRequest: See `read_headers`; or there is no header, as in a file that was emptied.
    """
    if not (found := read_headers(lines_of(text), given)):
        raise InvalidRequest.of("headers", None, "there is none: give lines NAME: VALUE")
    return found


def read_headers(lines: Iterable[tuple[int, str]], given: Iterable[str] = ()) -> dict[str, str]:
    """Return the headers of lines `Name: value`. No error has a value.

    `given`: names of headers that are sent with them.

    Raises:
        InvalidRequest: A line is no header, or its name is reserved, in `given`, or that of an
            earlier line.
    """
    found, names = {}, {each.lower() for each in given}
    for number, line in lines:
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not (colon and _NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            limit = "must be NAME: VALUE, in visible characters of ASCII"
            raise InvalidRequest.of(f"header {number}", None, limit)
        if (lower := name.lower()) in _RESERVED or lower.startswith(_RESERVED_PREFIXES):
            raise InvalidRequest.of("header", name, "is set by the push itself")
        if lower in names:
            raise InvalidRequest.of("header", name, "must be given once")
        names.add(lower)
        found[name] = value
    return found
