"""Timer ids: one opaque string with the place of a row, so that no index is needed to find it.

    0   6  due_ms   effective due, big-endian: ids sort in firing order
    6   6  seq      big-endian
    12  3  check    of due_ms, seq and the cluster's salt: a mistyped id, or one of another
                    cluster, differs from the id of a timer that has ended

On the wire an id is its 15 raw bytes, as text their 24 base32hex characters in lower case.
"""

import base64
import binascii
import hashlib
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, U64
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, Seq, UnixMs

SIZE: Final = 15
TEXT_SIZE: Final = 24
SEQ_MAX: Final = (1 << 48) - 1

_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_M1_INT, _M2_INT, _GOLDEN_INT = int(_M1), int(_M2), int(_GOLDEN)
_MASK: Final = (1 << 64) - 1


class TimerKey(NamedTuple):
    """The place in an id."""

    due_ms: UnixMs
    seq: Seq


def salt_of(cluster_id: str) -> int:
    """Return the cluster's salt for the check of timer ids, 64 bits."""
    return int.from_bytes(hashlib.sha256(b"timer-id/" + cluster_id.encode()).digest()[:8], "big")


def mix(values: U64) -> U64:
    """Return splitmix64's finaliser of each value (n, uint64): a cheap, well-spread hash."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def mix_one(value: int) -> int:
    """Return `mix` of one value below 2 ** 64. One numpy call would take as long as all of this."""
    z = value + _GOLDEN_INT & _MASK
    z = (z ^ (z >> 30)) * _M1_INT & _MASK
    z = (z ^ (z >> 27)) * _M2_INT & _MASK
    return z ^ (z >> 31)


def encode(due_ms: I64, seq: U64, salt: int) -> bytes:
    """Return the raw ids of n rows, 15 bytes each, one after the other."""
    if len(due_ms) == 1:
        return _encode_one(int(due_ms[0]), int(seq[0]), salt)
    due = due_ms.astype(np.uint64)
    check = _check(due, seq, salt)
    out = np.empty((len(due), SIZE), np.uint8)
    out[:, 0:6] = due.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:]
    out[:, 6:12] = seq.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:]
    out[:, 12:15] = check.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 5:]
    return out.tobytes()


def decode(raw: bytes, salt: int) -> tuple[I64, U64, npt.NDArray[np.bool_]]:
    """Return (due_ms, seq, genuine) of n raw ids; `genuine` is False where the check is wrong.

    Raises:
        InvalidRequestError: the length is not a multiple of an id's.
    """
    if len(raw) % SIZE:
        raise InvalidRequestError("timer_ids", f"{len(raw)} bytes", f"must be a multiple of {SIZE}")
    if len(raw) == SIZE:
        one, number = int.from_bytes(raw[:6], "big"), int.from_bytes(raw[6:12], "big")
        genuine = _encode_one(one, number, salt) == raw
        return np.array([one]), np.array([number], np.uint64), np.array([genuine])
    table = np.frombuffer(raw, np.uint8).reshape(-1, SIZE)
    wide = np.zeros((3, len(table), 8), np.uint8)
    wide[0, :, 2:] = table[:, 0:6]
    wide[1, :, 2:] = table[:, 6:12]
    wide[2, :, 5:] = table[:, 12:15]
    due, seq, check = (column.view(">u8").ravel().astype(np.uint64) for column in wide)
    return due.astype(np.int64), seq, check == _check(due, seq, salt)


def _check(due: U64, seq: U64, salt: int) -> U64:
    return mix(mix(due ^ np.uint64(salt)) ^ seq) >> np.uint64(40)


def _encode_one(due_ms: int, seq: int, salt: int) -> bytes:
    """Return one id, as `encode`."""
    check = mix_one(mix_one(due_ms ^ salt) ^ seq) >> 40
    return b"".join(
        [
            (due_ms & DUE_MS_MAX).to_bytes(6, "big"),
            (seq & SEQ_MAX).to_bytes(6, "big"),
            check.to_bytes(3, "big"),
        ]
    )


def to_text(raw: bytes) -> str:
    """Return one raw id as text."""
    return base64.b32hexencode(raw).decode().lower()


def from_text(text: str) -> bytes:
    """Return the raw bytes of an id's text form.

    Raises:
        InvalidRequestError: it is not 24 characters of base32hex.
    """
    try:
        raw = base64.b32hexdecode(text.upper().encode())
    except (binascii.Error, UnicodeEncodeError, ValueError):
        raw = b""
    if len(raw) != SIZE:
        raise InvalidRequestError("timer_id", text, f"must be {TEXT_SIZE} characters of 0-9, a-v")
    return raw


assert DUE_MS_MAX < 1 << 48
