"""Entries of the timer log: their frame, format version 1.

Little-endian. Positions and sizes in bytes. A segment file, a message to a follower and a message
to a learner have the same bytes: frames, one after the other.

    0   4  crc32         zlib's CRC-32 of bytes [4, 40 + length)
    4   4  length        of the payload; 0 .. PAYLOAD_SIZE_MAX
    8   2  magic         b"TE"
    10  1  version       1
    11  1  kind          EntryKind
    12  4  reserved      0
    16  8  epoch         Epoch of the leader that appended it
    24  8  index         LogIndex, consecutive
    32  8  time_ms       UnixMs on the cluster's clock at append; never goes back
    40  n  payload       by kind: timer/model/columns.py (SCHEDULE),
                         timer/entries/policies.py (POLICY), timer/entries/series_payloads.py
                         (SERIES, OCCURRENCES), timer/entries/payloads.py (all others)

A change of this format needs VERSION += 1 and a reader for the old version.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from isal import isal_zlib

from timer.model.units import Epoch, LogIndex, UnixMs

MAGIC: Final = b"TE"
VERSION: Final = 1
PAYLOAD_SIZE_MAX: Final = 32 << 20
HEADER_SIZE: Final = 40

_CRC: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<I2sBBIQQq")  # the header after the crc
assert _CRC.size + _HEAD.size == HEADER_SIZE


class EntryKind(enum.IntEnum):
    """The effect of an entry. docs/adr/0002-log-entries.md has a table."""

    EPOCH = 1
    SCHEDULE = 2
    CANCEL = 3
    FIRE = 4
    GROUP = 5
    TOPIC = 6
    PRODUCER = 7
    CHECKPOINT = 8
    RESCHEDULE = 9
    POLICY = 10
    SERIES = 11
    """Since feature level 2, as the next one."""
    OCCURRENCES = 12


_KINDS: Final = frozenset(int(kind) for kind in EntryKind)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, parsed. `payload` is a view into the bytes that were parsed."""

    kind: EntryKind
    epoch: Epoch
    index: LogIndex
    time_ms: UnixMs
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Damage:
    """The place from which frames can't be read, and the reason."""

    position: int
    why: str
    is_cut: bool = False
    """Whether the data just ends within a frame, and has no wrong byte."""


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The head of a frame whose checksum is not checked."""

    kind: EntryKind
    index: LogIndex
    time_ms: UnixMs
    length: int
    """Of its payload."""


def encode(
    kind: EntryKind, epoch: Epoch, index: LogIndex, time_ms: UnixMs, payload: list[bytes]
) -> bytes:
    """Return the whole frame around the concatenation of `payload`."""
    length = sum(map(len, payload))
    assert length <= PAYLOAD_SIZE_MAX, length
    head = _HEAD.pack(length, MAGIC, VERSION, kind, 0, epoch, index, time_ms)
    crc32 = isal_zlib.crc32(head)
    for part in payload:
        crc32 = isal_zlib.crc32(part, crc32)
    return b"".join([_CRC.pack(crc32), head, *payload])


def frame_at(data: memoryview, position: int) -> Entry | Damage | None:
    """Return the entry that starts at `position`; None at the exact end; else the damage."""
    size = len(data) - position
    if size == 0:
        return None
    if size < HEADER_SIZE:
        return Damage(position, f"{size} bytes left, a header has {HEADER_SIZE}", is_cut=True)
    length, magic, version, kind, _, epoch, index, time_ms = _HEAD.unpack_from(data, position + 4)
    # Check the length before its use: the header itself may be damaged.
    if magic != MAGIC or length > PAYLOAD_SIZE_MAX or HEADER_SIZE + length > size:
        why = f"bad header (magic {magic!r}, length {length}, {size} bytes left)"
        is_cut = magic == MAGIC and length <= PAYLOAD_SIZE_MAX
        return Damage(position, why, is_cut=is_cut)
    end = position + HEADER_SIZE + length
    (crc32,) = _CRC.unpack_from(data, position)
    if isal_zlib.crc32(data[position + 4 : end]) != crc32:
        return Damage(position, "checksum mismatch")
    if version != VERSION:
        return Damage(position, f"entry version {version}; this program knows {VERSION}")
    if kind not in _KINDS:
        return Damage(position, f"entry kind {kind}; this program knows {sorted(_KINDS)}")
    return Entry(
        EntryKind(kind),
        Epoch(epoch),
        LogIndex(index),
        UnixMs(time_ms),
        data[position + HEADER_SIZE : end],
    )


def head_at(data: memoryview, position: int, size: int | None = None) -> FrameHead | None:
    """Return the head of the frame at `position`; None at the end, and at a damaged or cut head.

    `size`: bytes from there to the end of the file, if `data` has a part of it. None: it has all.
    """
    size = len(data) - position if size is None else size
    if len(data) - position < HEADER_SIZE:
        return None
    length, magic, version, kind, _, _, index, time_ms = _HEAD.unpack_from(data, position + 4)
    if magic != MAGIC or version != VERSION or kind not in _KINDS:
        return None
    if HEADER_SIZE + length > size:
        return None
    return FrameHead(EntryKind(kind), LogIndex(index), UnixMs(time_ms), length)


def frames(data: memoryview) -> Iterator[Entry]:
    """Yield every entry of `data`, which has whole frames.

    Raises:
        ValueError: `data` is damaged. If it came over a stream, the peer sent it so.
    """
    position = 0
    while (found := frame_at(data, position)) is not None:
        if isinstance(found, Damage):
            raise ValueError(f"damaged frame at byte {found.position}: {found.why}")
        yield found
        position += HEADER_SIZE + len(found.payload)
