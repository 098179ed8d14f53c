"""Timer ids: 15 opaque bytes on the wire, 24 characters of lower-case base32hex as text.

The first six bytes are the effective due time, big-endian. Ids therefore sort in the order in
which their timers fire.
"""

import base64
import binascii
from typing import Final

from timerclient.values.errors import InvalidRequest

# As in timer/model/timer_id.py, which a client does not have.
SIZE: Final = 15
TEXT_SIZE: Final = 24


def to_text(raw: bytes) -> str:
    """Return one raw id as text."""
    return base64.b32hexencode(raw).decode().lower()


def from_text(text: str) -> bytes:
    """Return the raw bytes of an id's text form.

    Raises:
        InvalidRequest: The text is not 24 characters of base32hex.
    """
    try:
        raw = base64.b32hexdecode(text.upper().encode())
    except (binascii.Error, UnicodeEncodeError, ValueError):
        raw = b""
    if len(raw) != SIZE:
        raise InvalidRequest.of("timer_id", text, f"must be {TEXT_SIZE} characters of 0-9, a-v")
    return raw


def split(raw: bytes) -> list[bytes]:
    """Return raw ids that stand one after the other, one by one."""
    return [raw[at : at + SIZE] for at in range(0, len(raw), SIZE)]


def due_ms_of(raw: bytes) -> int:
    """Return the effective due time, Unix milliseconds, that a raw id carries."""
    return int.from_bytes(raw[:6], "big")
