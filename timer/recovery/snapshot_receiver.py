"""The receiver of a snapshot: collects its parts, and installs it at the next start.

**Receiving** can stop at any point and continue. `IncomingSnapshot` keeps each file whose size and
checksum the next offer repeats, and continues an incomplete one at its end. A complete file is
synced and compared with its checksum.

**Installing** replaces the state. The file `ready` begins an install: it is written when all parts
are durable and verified. The removal of `ready` ends the install. A start that finds `ready`
repeats the install from the beginning. No step depends on the progress of an earlier attempt. An
undamaged log with the snapshot's entry stays and continues. Any other log begins again after that
entry, and entries that this replica had acknowledged may be lost. Before the first file is removed,
the caller therefore marks its promise as unsure (replication/shell/snapshot_install.py).

    plan, ready     msgpack [version 1, index, epoch, [voters], [[path, size, crc32], ...],
                             [leader's epoch, replica id, nonce]], then its CRC-32
"""

import contextlib
from pathlib import Path
from typing import Final

import msgpack
from isal import isal_zlib

from timer.files.disk import Bytes, Disk
from timer.files.disk_reserve import START_BYTES
from timer.files.log import replace_by_empty
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import Epoch, LogIndex, ReplicaId
from timer.recovery import manifest
from timer.recovery.snapshot import (
    OfferLeadership,
    Snapshot,
    SnapshotPart,
    crc32_of,
    files,
    remove_files,
)

VERSION: Final = 1

SPARE_BYTES: Final = 2 * START_BYTES
"""Bytes that a snapshot leaves free: the order of the install needs few, a start needs the rest."""

_PLAN: Final = "plan"
_READY: Final = "ready"


class SnapshotSpaceError(Exception):
    """The disk has too little room for a snapshot."""

    def __init__(self, *, free_bytes: int, needed_bytes: int) -> None:
        """`needed_bytes`: the free bytes that the snapshot needs, with those that must stay."""
        super().__init__(f"the snapshot needs {-(-needed_bytes >> 20)} MiB of free disk space")
        self.free_bytes, self.needed_bytes = free_bytes, needed_bytes


class IncomingSnapshot:
    """A snapshot that is being received. For one task or thread at a time."""

    def __init__(self, disk: Disk, directory: Path, spare_bytes: int = SPARE_BYTES) -> None:
        """`spare_bytes`: bytes to leave free on the disk."""
        self._disk = disk
        self._spare_bytes = spare_bytes
        self._directory = directory
        self._plan = b""
        self._waiting: list[SnapshotPart] = []
        self._verified: set[SnapshotPart] = set()
        """Parts that were read here and verified."""

    def planned_parts(self) -> tuple[SnapshotPart, ...]:
        """Return the parts of the snapshot that an earlier process began to receive."""
        plan = _read_plan(self._disk, self._directory / _PLAN)
        return plan[0].parts if plan is not None else ()

    def check_part(self, part: SnapshotPart) -> None:
        """Verify a planned part that may be complete. A crash may have lost bytes of it.

        Reads the part. `begin` would read it, too, but the offering node waits for `begin`.
        """
        if self._is_whole(part):
            self._verified.add(part)

    def begin(self, snapshot: Snapshot, under: OfferLeadership) -> None:
        """Begin to receive a snapshot. Keep the present parts of it.

        Raises:
            SnapshotSpaceError: the disk has too little free space.
        """
        disk, directory = self._disk, self._directory
        for name in ("", *manifest.DIRECTORIES):
            disk.make_dir(directory / name)
        before = _read_plan(disk, directory / _PLAN)
        common = (
            {*before[0].parts} & {*snapshot.parts} if before is not None else set[SnapshotPart]()
        )
        places = {directory / part.path for part in common}
        for path in files(disk, directory):
            if path not in places and path.name != _PLAN:
                disk.remove(path)
        self._plan = _encode(snapshot, under)
        disk.write_atomic(directory / _PLAN, self._plan)
        self._verified = {part for part in common if part in self._verified or self._is_whole(part)}
        self._waiting = [part for part in snapshot.parts if part not in self._verified]
        missing = sum(part.size - self._size(part) for part in self._waiting)
        free, needed = disk.free_bytes(directory), missing + self._spare_bytes
        if missing and needed > free:
            raise SnapshotSpaceError(free_bytes=free, needed_bytes=needed)

    def next_missing(self) -> tuple[SnapshotPart, int] | None:
        """Return the part to fetch and the first missing byte; None: all parts are here."""
        if not self._waiting:
            return None
        part = self._waiting[0]
        return part, self._size(part)

    def _size(self, part: SnapshotPart) -> int:
        """Return how many bytes of a part are here."""
        path = self._directory / part.path
        return self._disk.size(path) if self._disk.exists(path) else 0

    def put(self, part: SnapshotPart, offset: int, data: Bytes) -> bool:
        """Append fetched bytes of the wanted part. With its last bytes the part is durable.

        Returns:
            False: the part is complete and its checksum is wrong. It begins again.
        """
        assert (part, offset) == self.next_missing(), (part, offset, self.next_missing())
        assert 0 < len(data) <= part.size - offset, (part, offset, len(data))
        path = self._directory / part.path
        file = self._disk.open_append(path)
        try:
            file.write([data])
            if file.size == part.size:
                file.sync()
        finally:
            file.close()
        if offset + len(data) == part.size:
            if not self._is_whole(part):
                return False
            self._verified.add(self._waiting.pop(0))
        return True

    def _is_whole(self, part: SnapshotPart) -> bool:
        """Return whether the file has its size and checksum. A wrong file is removed."""
        path = self._directory / part.path
        size = self._disk.size(path) if self._disk.exists(path) else -1
        if size == part.size:
            self._disk.open_append(path).close()  # drops bytes that only the page cache has
            with contextlib.suppress(CorruptFileError):
                if crc32_of(self._disk, path) == part.crc32:
                    return True
        if size >= part.size:
            self._disk.remove(path)
        return False

    def forget(self) -> None:
        """Remove all parts. The next snapshot begins from nothing."""
        self._verified.clear()
        remove_files(self._disk, self._directory)

    def finish(self) -> None:
        """Order the install at the next start. All parts are here and verified."""
        assert self.next_missing() is None, self.next_missing()
        disk, directory = self._disk, self._directory
        for name in ("", *manifest.DIRECTORIES):
            disk.sync_dir(directory / name)
        disk.write_atomic(directory / _READY, self._plan)


def snapshot_to_install(disk: Disk, incoming: Path) -> tuple[Snapshot, OfferLeadership] | None:
    """Return the snapshot that must be installed first; None: no install was ordered.

    Raises:
        CorruptFileError: the order can't be read.
        UnknownVersionError: another version wrote the order.
    """
    if not disk.exists(incoming / _READY):
        return None
    version = _version(disk.read(incoming / _READY))
    if version not in (None, VERSION):
        raise UnknownVersionError(incoming / _READY, version, VERSION)
    found = _read_plan(disk, incoming / _READY)
    if found is None:
        raise CorruptFileError(incoming / _READY, 0, "the install order is damaged")
    return found


def install(
    disk: Disk, incoming: Path, *, state: Path, log: Path, damaged: Path, keep_log: bool
) -> None:
    """Replace the state by `snapshot_to_install`, durably. Remove the note of damage.

    Repeats the install from the beginning after a crash or an error. `keep_log`: the log has the
    snapshot's entry and stays. Otherwise it begins again after that entry.

    Raises:
        CorruptFileError, DiskFailedError: the caller must repeat it.
    """
    disk.sync_dir(incoming)  # a crash may have come before the name `ready` was durable
    found = snapshot_to_install(disk, incoming)
    assert found is not None, incoming
    snapshot, _ = found
    for name in ("", *manifest.DIRECTORIES):
        disk.make_dir(state / name)
    remove_files(disk, state)
    if not keep_log:
        replace_by_empty(disk, log, snapshot.index, snapshot.epoch)
    for part in snapshot.parts:
        disk.link(incoming / part.path, state / part.path)
    if disk.exists(damaged):
        disk.remove(damaged)
        disk.sync_dir(damaged.parent)
    for name in (*manifest.DIRECTORIES, ""):
        disk.sync_dir(state / name)
    if disk.exists(incoming / _PLAN):
        disk.remove(incoming / _PLAN)
        disk.sync_dir(incoming)
    # From here on the state is complete. Parts may be removed only when this is durable.
    disk.remove(incoming / _READY)
    disk.sync_dir(incoming)
    remove_files(disk, incoming)


def drop_leftovers(disk: Disk, incoming: Path) -> None:
    """Remove parts without a plan: their snapshot was installed."""
    if not disk.exists(incoming / _PLAN):
        remove_files(disk, incoming)


def _encode(snapshot: Snapshot, under: OfferLeadership) -> bytes:
    fields = [snapshot.index, snapshot.epoch, snapshot.voters, snapshot.parts, under]
    body: bytes = msgpack.packb([VERSION, *fields])
    return body + isal_zlib.crc32(body).to_bytes(4, "little")


def _read_plan(disk: Disk, path: Path) -> tuple[Snapshot, OfferLeadership] | None:
    """Return the content of a plan; None: it is absent, damaged or of another version."""
    try:
        data = disk.read(path) if disk.exists(path) else b""
    except CorruptFileError:
        return None
    if _version(data) != VERSION:
        return None
    _, *fields = msgpack.unpackb(data[:-4])
    index, epoch, voters, parts, under = fields
    snapshot = Snapshot(
        index=LogIndex(index),
        epoch=Epoch(epoch),
        voters=tuple(ReplicaId(voter) for voter in voters),
        parts=tuple(SnapshotPart(*part) for part in parts),
    )
    return snapshot, OfferLeadership(*under)


def _version(data: bytes) -> int | None:
    """Return the version of a plan; None if it is damaged."""
    body = data[:-4]
    if not body or isal_zlib.crc32(body).to_bytes(4, "little") != data[-4:]:
        return None
    version: int = msgpack.unpackb(body)[0]
    return version
