"""Segment files of the timer log, format version 1.

Little-endian. Positions and sizes in bytes.

    header, once:     0  8  magic           b"TIMERLOG"
                      8  2  version         1
                     10  6  reserved        0
                     16  8  first_index     LogIndex of the first frame; also the file's name
                     24  8  epoch_before    Epoch of entry first_index - 1; 0 before the log
                     32  8  previous_first  first_index of the segment before; 0: there was none
                     40  4  reserved        0
                     44  4  crc32           of bytes [0, 44)

    frames, repeated: timer/entries/entry_frame.py, with consecutive indexes and epochs that never
    fall

The file is `<first_index as 16 hex digits>.log`. The previous segment is synced before this
header, and the header before the first frame. So only the last segment can be torn. If the headers
of a segment and the next one have the same epoch, the epoch of all its entries is known without a
read.

The header keeps its size and checksum in every version, so that another version and damage can be
told apart. A change of anything else needs VERSION += 1 and a reader for the old version.
"""

import bisect
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from isal import isal_zlib

from timer.entries import entry_frame
from timer.entries.entry_frame import Damage
from timer.files.disk import Bytes, Disk
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import Epoch, LogIndex

MAGIC: Final = b"TIMERLOG"
VERSION: Final = 1
HEADER_SIZE: Final = 48
SUFFIX: Final = ".log"

STEP_SIZE: Final = 4 << 10
"""Bytes between two positions in `Positions`. A read may have to skip as many."""
SCAN_SIZE: Final = 4 << 20
"""Bytes per read of a scan."""

_HEADER: Final = struct.Struct("<8sH6xQQQ4x")
_CRC: Final = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_SIZE

# Of a frame's header: crc32, length, magic, version, epoch, index.
_FRAME: Final = struct.Struct("<II2sB5xQQ")
assert _FRAME.size == entry_frame.HEADER_SIZE - 8

Frame: TypeAlias = tuple[int, Epoch, LogIndex, memoryview]
"""Position in the file, epoch, index and the whole frame. A tuple, for speed."""


def path_of(directory: Path, first: LogIndex) -> Path:
    """Return the path of the segment that starts at `first`."""
    return directory / f"{first:016x}{SUFFIX}"


def first_of(name: str) -> LogIndex | None:
    """Return the first index in a file name; None if it is not the name of a segment."""
    digits = name.removesuffix(SUFFIX)
    if len(digits) != 16 or name == digits or not set(digits) <= set("0123456789abcdef"):
        return None
    return LogIndex(int(digits, 16))


def paths(disk: Disk, directory: Path) -> list[Path]:
    """Return the segments in a log's directory, in order."""
    return [directory / name for name in disk.list_dir(directory) if first_of(name)]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment."""

    first: LogIndex
    epoch_before: Epoch
    previous_first: LogIndex

    def encode(self) -> bytes:
        """Return the header's bytes."""
        head = _HEADER.pack(MAGIC, VERSION, self.first, self.epoch_before, self.previous_first)
        return head + _CRC.pack(isal_zlib.crc32(head))


def decode_header(path: Path, data: bytes) -> Header:
    """Return the header at the start of `data`.

    Raises:
        CorruptFileError: it is too short, damaged, or does not belong to this file name.
        UnknownVersionError: it is undamaged and of another version.
    """
    if len(data) < HEADER_SIZE:
        why = f"the file has {len(data)} bytes; a segment header has {HEADER_SIZE}"
        raise CorruptFileError(path, len(data), why)
    magic, version, first, epoch_before, previous_first = _HEADER.unpack_from(data)
    (crc32,) = _CRC.unpack_from(data, _HEADER.size)
    if magic != MAGIC or crc32 != isal_zlib.crc32(data[: _HEADER.size]):
        raise CorruptFileError(path, 0, "magic or checksum mismatch of the segment header")
    if version != VERSION:
        raise UnknownVersionError(path, version, VERSION)
    if first != first_of(path.name):
        why = f"the header is that of the segment {path_of(path.parent, LogIndex(first)).name}"
        raise CorruptFileError(path, 16, why)
    return Header(LogIndex(first), Epoch(epoch_before), LogIndex(previous_first))


def peek(frame: Bytes) -> tuple[Epoch, LogIndex]:
    """Return epoch and index of one whole frame that this process encoded or checked."""
    _, length, magic, version, epoch, index = _FRAME.unpack_from(frame)
    assert magic == entry_frame.MAGIC, bytes(frame[: entry_frame.HEADER_SIZE])
    assert version == entry_frame.VERSION, bytes(frame[: entry_frame.HEADER_SIZE])
    assert len(frame) == entry_frame.HEADER_SIZE + length, (len(frame), length)
    return Epoch(epoch), LogIndex(index)


@dataclass(slots=True)
class Positions:
    """Starts of some frames of one segment, at least STEP_SIZE bytes apart.

    Readers in other threads bisect while the writer adds. A position is added before its index.
    """

    _indexes: "array[int]" = field(default_factory=lambda: array("Q"))
    _positions: "array[int]" = field(default_factory=lambda: array("Q"))

    def add(self, index: LogIndex, position: int) -> None:
        """Add the frame if it starts at least STEP_SIZE bytes after the last one added."""
        if not self._positions or position - self._positions[-1] >= STEP_SIZE:
            self._positions.append(position)
            self._indexes.append(index)

    def at_or_before(self, index: LogIndex) -> tuple[LogIndex, int]:
        """Return the last added frame that is not after `index`: its index and position."""
        number = bisect.bisect_right(self._indexes, index) - 1
        assert number >= 0, f"index {index} is not in this segment"
        return LogIndex(self._indexes[number]), self._positions[number]

    def up_to(self, index: LogIndex) -> "Positions":
        """Return a copy without the frames after `index`."""
        number = bisect.bisect_right(self._indexes, index)
        return Positions(self._indexes[:number], self._positions[:number])


class Scan(NamedTuple):
    """The content of a segment, every frame checked."""

    positions: Positions
    last: tuple[Epoch, LogIndex]
    """The last undamaged frame. The entry before the segment if there is none."""
    starts: list[tuple[LogIndex, Epoch]]
    """First entry of each epoch that begins in this segment."""
    end: int
    """Position after the last whole frame."""
    damage: Damage | None
    """The damage that ends the frames. None: the file ends."""


def scan(disk: Disk, path: Path, header: Header) -> Scan:
    """Read and check a whole segment.

    Raises:
        CorruptFileError: an undamaged frame has the wrong index or an older epoch.
        UnknownVersionError: an undamaged frame is of another version.
        FileNotFoundError: there is no such file.
    """
    positions = Positions()
    starts: list[tuple[LogIndex, Epoch]] = []
    epoch_last, index_last, end = header.epoch_before, LogIndex(header.first - 1), HEADER_SIZE
    for found in walk(disk, path, HEADER_SIZE, SCAN_SIZE):
        if isinstance(found, Damage):
            return Scan(positions, (epoch_last, index_last), starts, end, found)
        position, epoch, index, frame = found
        if index != index_last + 1:
            raise CorruptFileError(path, position, f"entry {index} follows entry {index_last}")
        if epoch < epoch_last:
            why = f"epoch {epoch} follows the higher epoch {epoch_last}"
            raise CorruptFileError(path, position, why)
        if epoch > epoch_last:
            starts.append((index, epoch))
        positions.add(index, position)
        epoch_last, index_last, end = epoch, index, position + len(frame)
    return Scan(positions, (epoch_last, index_last), starts, end, None)


def replace_frame(disk: Disk, directory: Path, index: LogIndex, frame: Bytes) -> None:
    """Replace the frame with the index and epoch of `frame`, durably. No other writer may run.

    Raises:
        CorruptFileError: the segment is damaged before that frame.
        DiskFailedError: the old or the new frame is there.
    """
    path = [each for each in paths(disk, directory) if (first_of(each.name) or 0) <= index][-1]
    for found in walk(disk, path, HEADER_SIZE, SCAN_SIZE, enough=index):
        if isinstance(found, Damage):
            raise CorruptFileError(path, found.position, found.why)
        position, epoch, at, before = found
        if at == index:
            assert peek(frame) == (epoch, index), (peek(frame), epoch, index)
            data = disk.read(path)
            disk.write_atomic(path, data[:position] + frame + data[position + len(before) :])
            return
    raise CorruptFileError(path, 0, f"entry {index} is missing")


def walk(
    disk: Disk, path: Path, position: int, read_size: int, *, enough: LogIndex | None = None
) -> Iterator[Frame | Damage]:
    """Yield the frames from `position` on, then the damage that ends them, if any.

    Reads `read_size` bytes at a time. After the frame `enough` or a later one, only bytes that were
    read already are used. The frames are views into the bytes read.

    Raises:
        UnknownVersionError: an undamaged frame is of another version.
        FileNotFoundError: there is no such file.
    """
    data, start, offset, whole = memoryview(b""), position, 0, False
    while True:
        left, size = len(data) - offset, entry_frame.HEADER_SIZE
        if left >= size:
            crc32, length, magic, version, epoch, index = _FRAME.unpack_from(data, offset)
            # Check the length before its use: the header itself may be damaged.
            if magic != entry_frame.MAGIC or length > entry_frame.PAYLOAD_SIZE_MAX:
                yield Damage(start + offset, f"bad header (magic {magic!r}, length {length})")
                return
            size += length
            if left >= size:
                frame = data[offset : offset + size]
                if isal_zlib.crc32(frame[4:]) != crc32:
                    yield Damage(start + offset, "checksum mismatch")
                    return
                if version != entry_frame.VERSION:
                    raise UnknownVersionError(path, version, entry_frame.VERSION)
                yield start + offset, Epoch(epoch), LogIndex(index), frame
                if enough is not None and index >= enough:
                    enough = LogIndex(0)
                offset += size
                continue
        if enough == 0:
            return
        if whole:
            if left:
                yield Damage(start + offset, f"{left} bytes left of a frame of at least {size}")
            return
        wanted = max(read_size, size)
        start, offset = start + offset, 0
        data = memoryview(disk.read(path, start, wanted))
        whole = len(data) < wanted
