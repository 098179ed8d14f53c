"""Spill files: fired rows that some group has not acked, written with a manifest. Format 1.

Immutable, one per manifest that found blocks which no file held yet. Little-endian:

    header      8s magic b"TIMERSPL", u32 version, u32 reserved
    per block   u32 crc32 of the rest of the block, u32 length of the body,
                u32 topic, u32 rows, u64 first queue offset, i64 fired_at_ms
                body: n x u64 seq, then the columns of timer/columns.py (one part)
"""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from timer.columns import Part, decode_schedule, encode_schedule, gather
from timer.disk import Disk
from timer.errors import CorruptFile, UnknownVersion
from timer.queues import Block, SpillRef
from timer.units import ProducerId, QueueOffset, TopicId, UnixMs

MAGIC: Final = b"TIMERSPL"
VERSION: Final = 1

_HEADER: Final = struct.Struct("<8sII")
_CRC: Final = struct.Struct("<I")
_BLOCK: Final = struct.Struct("<IIIQq")


def write_spill(disk: Disk, path: Path, blocks: Sequence[tuple[TopicId, Block]]) -> list[SpillRef]:
    """Write the blocks to a new file, durably; return where each lies."""
    pieces = [_HEADER.pack(MAGIC, VERSION, 0)]
    position = _HEADER.size
    out: list[SpillRef] = []
    for topic, block in blocks:
        data = _encode(topic, block)
        out.append(SpillRef(path.name, position, len(data)))
        pieces.append(data)
        position += len(data)
    disk.write_atomic(path, b"".join(pieces))
    return out


def _encode(topic: TopicId, block: Block) -> bytes:
    rows, bufs = block.rows, block.bufs
    part = Part(
        producer_id=ProducerId(0),
        sequence=0,
        due_ms=rows["due_ms"],
        requested_ms=rows["requested_ms"],
        topic=rows["topic"],
        payload=gather(rows, bufs, "payload"),
        key=gather(rows, bufs, "key") if rows["key_size"].any() else None,
        headers=gather(rows, bufs, "headers") if rows["headers_size"].any() else None,
    )
    body = b"".join([rows["seq"].tobytes(), *encode_schedule([part])])
    head = _BLOCK.pack(len(body), topic, len(rows), block.first, block.fired_at_ms)
    return _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + head + body


def read_spill(disk: Disk, path: Path, refs: Sequence[SpillRef]) -> list[tuple[TopicId, Block]]:
    """Return the blocks at `refs`, in that order; each refers to its own part of the file.

    Raises:
        CorruptFile: the file is missing, cut or damaged.
        UnknownVersion: it was written by another version.
    """
    try:
        data = memoryview(disk.read(path))
    except FileNotFoundError:
        raise CorruptFile(path, 0, "the manifest names it, but it is missing") from None
    if len(data) < _HEADER.size:
        raise CorruptFile(path, 0, f"{len(data)} bytes")
    magic, version, _ = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFile(path, 0, f"magic {magic!r}")
    if version != VERSION:
        raise UnknownVersion(path, version, VERSION)
    return [_decode(data[ref.position : ref.position + ref.size], path, ref) for ref in refs]


def _decode(data: memoryview, path: Path, ref: SpillRef) -> tuple[TopicId, Block]:
    start = _CRC.size + _BLOCK.size
    if len(data) != ref.size or ref.size < start:
        raise CorruptFile(path, ref.position, "the file is cut")
    if zlib.crc32(data[_CRC.size :]) != _CRC.unpack_from(data)[0]:
        raise CorruptFile(path, ref.position, "checksum mismatch in a block")
    _, topic, n, first, fired_at_ms = _BLOCK.unpack_from(data, _CRC.size)
    columns = data[start + 8 * n :]
    rows = decode_schedule(columns).rows
    rows["seq"] = np.frombuffer(data, "<u8", n, start)
    block = Block(QueueOffset(first), UnixMs(fired_at_ms), rows, {0: columns}, ref)
    return TopicId(topic), block
