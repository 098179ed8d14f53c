"""Snapshots: a manifest with its immutable files, pinned on one node and installed on another.

    source (snapshot_source.py)                  receiver (snapshot_receiver.py)
    state/ --pin: hard links--> outgoing/       incoming/ --verified, `ready`--> state/, log/
                                     |               ^
                                     +---- parts ----+     (replication/shell/snapshot_fetch.py)

A manifest is replaced by a rename, and its files never change. So links to the manifest and its
files are a consistent cut, which outlives later flushes and merges of the source. It contains only
committed entries. It is therefore valid for every replica of the log, from any source.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from isal import isal_zlib

from timer.files.disk import Disk
from timer.model.timer_errors import DiskFailedError
from timer.model.units import Epoch, LogIndex, Nonce, ReplicaId
from timer.recovery import manifest

READ_SIZE: Final = 1 << 20


class SnapshotPart(NamedTuple):
    """One file of a snapshot."""

    path: str
    """Relative to the state's directory."""
    size: int
    crc32: int
    """Of the whole file."""


class OfferLeadership(NamedTuple):
    """The leadership when the snapshot was offered. The receiver then promises no older one."""

    epoch: Epoch
    leader: ReplicaId
    nonce: Nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state at `index`, in files."""

    index: LogIndex
    epoch: Epoch
    """Of the entry at `index`."""
    voters: tuple[ReplicaId, ...]
    parts: tuple[SnapshotPart, ...]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


def is_part_path(path: str) -> bool:
    """Return whether a part may have this path: the manifest, or a file in its directories."""
    folder, _, name = path.rpartition("/")
    plain = name not in ("", ".", "..") and "\0" not in name
    return path == manifest.NAME or (folder in manifest.DIRECTORIES and plain)


def files(disk: Disk, directory: Path) -> Iterator[Path]:
    """Yield the files of a state or of a snapshot, without the directories."""
    if not disk.exists(directory):
        return
    for folder in (directory, *(directory / name for name in manifest.DIRECTORIES)):
        if disk.exists(folder):
            for name in disk.list_dir(folder):
                if folder != directory or name not in manifest.DIRECTORIES:
                    yield folder / name


def crc32_of(disk: Disk, path: Path) -> int:
    """Return the CRC-32 of a whole file, which is read step by step."""
    crc32, position = 0, 0
    while data := disk.read(path, position, READ_SIZE):
        crc32 = isal_zlib.crc32(data, crc32)
        position += len(data)
    return crc32


def remove_unnamed(disk: Disk, directory: Path) -> None:
    """Remove the files of a state that its manifest does not name. For a starting process.

    Raises:
        CorruptFileError, UnknownVersionError: the manifest can't be read.
    """
    body = manifest.read(disk, directory)
    named = {directory / path for path, _, _ in manifest.files(body)} if body is not None else set()
    named.add(directory / manifest.NAME)
    for path in files(disk, directory):
        if path not in named:
            _remove(disk, path)


def remove_files(disk: Disk, directory: Path) -> None:
    """Remove the files of a state or a snapshot, complete or not."""
    for path in files(disk, directory):
        _remove(disk, path)


def _remove(disk: Disk, path: Path) -> None:
    """Remove a file. A directory stays: the server makes none here, a file system lost+found."""
    try:
        disk.remove(path)
    except DiskFailedError as error:
        if error.errno != errno.EISDIR:
            raise
