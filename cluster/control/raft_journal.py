"""Raft's durable state on one node: its journal of commands, and its term and vote.

Two files in Raft's own directory. Little-endian, positions and sizes in bytes, format version 1.

    journal, header:   0  8  magic         b"TIMERAFT"
                       8  4  version       1
                      12  4  crc32         of bytes [0, 12)

    journal, record:   0  4  head_crc32    of bytes [4, 28)
                       4  4  length        of the command; 0 .. COMMAND_SIZE_MAX
                       8  8  index         Raft's own; consecutive
                      16  8  term          Raft's own; never falls
                      24  4  crc32         of the command
                      28  n  command

    meta:              0  4  crc32         of the rest
                       4  n  msgpack       [version, term, vote or nil, may_vote]

The two checksums tell three cases apart. *Torn*: the file ends inside a record, or a record has a
sector that was never written (all zero) and no valid record follows. A torn record was never
acknowledged, and is cut. *Corrupt*: any other bytes that do not verify. They were durable once, and
new files are created (raft_files.py). etcd's WAL draws the same line. *Clean*: everything else.

Records are written at once and synced in groups: `flush` must be called before a message is sent or
a command applied. Compaction and replacement write a new file and rename it. Term and vote are
durable before `setCurrentTerm` returns.
"""

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import msgpack
from isal import isal_zlib

from timer.files.disk import RealDisk, disk_failed, open_file
from timer.model.timer_errors import CorruptFileError, DiskFailedError, UnknownVersionError

MAGIC: Final = b"TIMERAFT"
DISK: Final = RealDisk()
"""The disk of both files."""
VERSION: Final = 1
COMMAND_SIZE_MAX: Final = 1 << 16
TRAILING_RECORDS: Final = 1_000
"""Records kept at a compaction, so that a follower slightly behind needs no snapshot."""

_FILE_HEAD: Final = struct.Struct("<8sI")
_RECORD_HEAD: Final = struct.Struct("<IQQI")  # after its own checksum
_U32: Final = struct.Struct("<I")
HEADER_SIZE: Final = _FILE_HEAD.size + _U32.size
RECORD_HEAD_SIZE: Final = _U32.size + _RECORD_HEAD.size
_SECTOR_SIZE: Final = 512

Record: TypeAlias = tuple[bytes, int, int]
"""(command, index, term): the shape that pysyncobj keeps, compares and sends."""


class Journal:
    """The journal and meta files of one directory. Used from one thread at a time.

    The methods in camel case are pysyncobj's. Their positions count records, not indexes.
    """

    def __init__(self, directory: Path) -> None:
        """Open both files; a torn tail is cut.

        Raises:
            CorruptFileError: bytes that were durable do not verify, or a file is missing.
            UnknownVersionError: a file has another format version.
            DiskFailedError: a file can't be read or opened for writing, or the tail can't be cut.
        """
        self._directory = directory
        self._path = directory / "journal"
        self._term, self._vote, self._may_vote = read_meta(directory / "meta")
        try:
            data = DISK.read(self._path)
        except FileNotFoundError:
            raise CorruptFileError(self._path, 0, "the journal is missing") from None
        self._records, self._ends = scan(self._path, data)
        self._fd = self._open()
        self._dirty = False
        self._replaced = False
        """The records are not an extension of the file: `flush` writes a whole new file."""
        self._covered = 0
        """Number of the first records that a snapshot of this process stands for."""
        if self._end < len(data):
            self._truncate()

    @staticmethod
    def create(directory: Path, *, may_vote: bool) -> None:
        """Write an empty journal and a first meta into the existing `directory`, durably."""
        DISK.write_atomic(directory / "journal", _file_header())
        _write_meta(directory / "meta", 0, None, may_vote=may_vote)

    @property
    def may_vote(self) -> bool:
        """False: this node lost, or never had, its records; a leader must send them first."""
        return self._may_vote

    @property
    def records(self) -> list[Record]:
        """All records, oldest first."""
        return list(self._records)

    @property
    def last(self) -> Record:
        """The newest record; there is always one once Raft runs."""
        return self._records[-1]

    @property
    def uncovered_size(self) -> int:
        """Bytes of the records after the last compaction's snapshot; after a start, of all."""
        return self._end - (self._ends[self._covered - 1] if self._covered else HEADER_SIZE)

    def allow_votes(self) -> None:
        """Stop withholding votes, durably."""
        self._may_vote = True
        self._save_meta()

    def flush(self) -> None:
        """Make all additions, deletions and replacements durable.

        Raises:
            DiskFailedError: some may not be durable; the process must stop.
        """
        if not self._dirty:
            return
        if self._replaced:
            with _disk_errors(self._path, "replacement"):
                self._write_file()
        else:
            with _disk_errors(self._path, "fdatasync"):
                os.fdatasync(self._fd)
        self._dirty = False

    def replace(self, records: list[Record]) -> None:
        """Replace all records, durably. After a crash the file has either the old or the new."""
        self._records = list(records)
        self._replaced = self._dirty = True
        self.flush()

    def _write_file(self) -> None:
        # The snapshot before these records was renamed into the same directory earlier.
        DISK.sync_dir(self._directory)
        parts = [_file_header(), *(_encode(*record) for record in self._records)]
        DISK.write_atomic(self._path, b"".join(parts))
        os.close(self._fd)
        self._fd = self._open()
        self._ends = []
        end = HEADER_SIZE
        for part in parts[1:]:
            end += len(part)
            self._ends.append(end)
        self._replaced = False

    def _open(self) -> int:
        with _disk_errors(self._path, "open"):
            return open_file(self._path, os.O_WRONLY | os.O_APPEND)

    def _truncate(self) -> None:
        """End the file after the last record, durably."""
        with _disk_errors(self._path, "ftruncate"):
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else HEADER_SIZE

    def _save_meta(self) -> None:
        path = self._directory / "meta"
        with _disk_errors(path, "replacement"):
            _write_meta(path, self._term, self._vote, may_vote=self._may_vote)

    # The interface that pysyncobj calls

    def add(self, command: bytes, index: int, term: int) -> None:
        """Append one record; durable after the next `flush`."""
        assert len(command) <= COMMAND_SIZE_MAX, len(command)
        if self._records:
            last = self._records[-1]
            assert index == last[1] + 1, f"index {index} after {last[1]}"
            assert term >= last[2], f"term {term} after {last[2]}"
        self._records.append((command, index, term))
        self._dirty = True
        if self._replaced:
            return
        data = _encode(command, index, term)
        with _disk_errors(self._path, "write"):
            written = os.write(self._fd, data)
        if written != len(data):
            why = f"{self._path}: wrote {written} of {len(data)} bytes"
            raise DiskFailedError(why, errno=errno.ENOSPC)  # a short write means a full disk
        self._ends.append(self._end + len(data))

    def clear(self) -> None:
        """Drop all records. The next `flush` replaces the old file in one step."""
        self._records, self._covered = [], 0
        self._replaced = self._dirty = True

    def deleteEntriesFrom(self, position: int) -> None:  # noqa: N802
        """Drop the records [position, end)."""
        if position >= len(self._records):
            return
        del self._records[position:]
        self._covered = min(self._covered, position)
        self._dirty = True
        if self._replaced:
            return
        del self._ends[position:]
        # Before new records are written: after a power cut, pieces of the old records behind a new
        # one would look like damage.
        self._truncate()

    def deleteEntriesTo(self, position: int) -> None:  # noqa: N802
        """Compact: drop the records before `position`, except the last TRAILING_RECORDS."""
        dropped = max(0, position - TRAILING_RECORDS)
        if dropped:
            self.replace(self._records[dropped:])
        self._covered = position - dropped

    def __getitem__(self, key: int | slice) -> Record | list[Record]:
        return self._records[key]

    def __len__(self) -> int:
        return len(self._records)

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802
        """Ignore it: volatile, as in Raft's paper. A leader sends it again."""

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        """Return 1, the index of the first record of every journal."""
        return 1

    def setCurrentTerm(self, term: int, vote: str | None) -> None:  # noqa: N802
        """Store term and vote, durably."""
        if (term, vote) != (self._term, self._vote):
            self._term, self._vote = term, vote
            self._save_meta()

    def getCurrentTerm(self) -> int:  # noqa: N802
        """Return the highest term in which this node has taken part."""
        return self._term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        """Return the node that this node voted for in that term. None: no vote."""
        return self._vote

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Do nothing: no write is delayed."""

    def _destroy(self) -> None:
        self.flush()
        self.close()

    def close(self) -> None:
        """Close the file without a flush."""
        os.close(self._fd)


@contextmanager
def _disk_errors(path: Path, action: str) -> Iterator[None]:
    """Raise OSErrors of the block as DiskFailedError: an open journal's files can't be missing."""
    try:
        yield
    except OSError as error:
        raise disk_failed(path, action, error.errno) from error


def seal(body: bytes) -> bytes:
    """Return `body` after its checksum."""
    return _U32.pack(isal_zlib.crc32(body)) + body


def unseal(path: Path) -> bytes:
    """Return the body of a sealed file.

    Raises:
        CorruptFileError: the checksum is wrong.
        FileNotFoundError: the file does not exist.
    """
    data = DISK.read(path)
    if len(data) < _U32.size or isal_zlib.crc32(data[_U32.size :]) != _U32.unpack_from(data)[0]:
        raise CorruptFileError(path, 0, "checksum mismatch")
    return data[_U32.size :]


def _write_meta(path: Path, term: int, vote: str | None, *, may_vote: bool) -> None:
    DISK.write_atomic(path, seal(msgpack.packb([VERSION, term, vote, may_vote])))


def read_meta(path: Path) -> tuple[int, str | None, bool]:
    """Return term, vote, and whether this node may vote.

    Raises:
        CorruptFileError, UnknownVersionError: the file is missing, damaged or of another version.
    """
    try:
        version, *fields = msgpack.unpackb(unseal(path))
    except FileNotFoundError:
        raise CorruptFileError(path, 0, "term and vote are missing") from None
    if version != VERSION:
        raise UnknownVersionError(path, version, VERSION)
    term, vote, may_vote = fields
    return term, vote, may_vote


def _file_header() -> bytes:
    head = _FILE_HEAD.pack(MAGIC, VERSION)
    return head + _U32.pack(isal_zlib.crc32(head))


def _encode(command: bytes, index: int, term: int) -> bytes:
    head = _RECORD_HEAD.pack(len(command), index, term, isal_zlib.crc32(command))
    return _U32.pack(isal_zlib.crc32(head)) + head + command


def scan(path: Path, data: bytes) -> tuple[list[Record], list[int]]:
    """Return the records and the end of each; bytes after the last end are torn."""
    # The header was written before the file was renamed into place, so it cannot be torn.
    magic, version = _FILE_HEAD.unpack_from(data) if len(data) >= HEADER_SIZE else (b"", 0)
    if magic != MAGIC or data[_FILE_HEAD.size : HEADER_SIZE] != _U32.pack(
        isal_zlib.crc32(data[: _FILE_HEAD.size])
    ):
        raise CorruptFileError(path, 0, "no journal header")
    if version != VERSION:
        raise UnknownVersionError(path, version, VERSION)
    records: list[Record] = []
    ends: list[int] = []
    position = HEADER_SIZE
    while position < len(data):
        record = _record_at(data, position)
        if record is None:
            if not _is_torn(data, position):
                raise CorruptFileError(path, position, "checksum mismatch")
            break
        command, index, term = record
        if records and (index != records[-1][1] + 1 or term < records[-1][2]):
            raise CorruptFileError(
                path, position, f"index {index}, term {term} after {records[-1][1:]}"
            )
        records.append(record)
        position += RECORD_HEAD_SIZE + len(command)
        ends.append(position)
    return records, ends


def _head_at(data: bytes, position: int) -> tuple[int, int, int, int] | None:
    if len(data) - position < RECORD_HEAD_SIZE:
        return None
    (head_crc32,) = _U32.unpack_from(data, position)
    head_start = position + _U32.size
    if isal_zlib.crc32(data[head_start : position + RECORD_HEAD_SIZE]) != head_crc32:
        return None
    length, index, term, crc32 = _RECORD_HEAD.unpack_from(data, head_start)
    return length, index, term, crc32


def _record_at(data: bytes, position: int) -> Record | None:
    head = _head_at(data, position)
    if head is None:
        return None
    length, index, term, crc32 = head
    start = position + RECORD_HEAD_SIZE
    command = data[start : start + length]
    if len(command) < length or isal_zlib.crc32(command) != crc32:
        return None
    return command, index, term


def _is_torn(data: bytes, position: int) -> bool:
    """Return whether the damage at `position` can be a write that a crash interrupted."""
    size = len(data) - position
    head = _head_at(data, position)
    end = len(data) if head is None else position + RECORD_HEAD_SIZE + head[0]
    if size >= RECORD_HEAD_SIZE and end <= len(data):
        # Complete in length. A disk writes whole sectors; a sector that was not written is zero.
        sector_starts = range(position - position % _SECTOR_SIZE, end, _SECTOR_SIZE)
        pieces = (
            data[max(start, position) : min(start + _SECTOR_SIZE, end)] for start in sector_starts
        )
        if all(any(piece) for piece in pieces):
            return False
    return not any(
        _record_at(data, later) is not None
        for later in range(position + 1, len(data) - RECORD_HEAD_SIZE + 1)
    )
