"""The receiver of a snapshot: gathers its parts, and installs it at the next start.

**Receiving** can stop anywhere and go on: `Incoming` keeps each file that the next offer names with
the same size and checksum, and begins a half one where it ended. A file that is whole is synced and
compared with its checksum.

**Installing** replaces the state. It begins with the file `ready`, written when all parts are
durable and verified, and is done when that is gone. Whoever finds it at start carries the install
out again from its beginning: nothing in it depends on what an earlier attempt got done. A log that
is whole and holds the snapshot's entry stays: it goes on from there. Any other begins anew after
it, and what this replica had acknowledged may be gone, so before its first file goes the caller
marks its promise as unsure (replication/shell/snapshot_install.py).

    plan, ready     msgpack [version 1, index, epoch, [voters], [[path, size, crc32], ...],
                             [leader's epoch, replica id, nonce]], then its CRC-32
"""

import contextlib
import zlib
from pathlib import Path
from typing import Final

import msgpack

from timer.files.disk import Bytes, Disk
from timer.files.log import begin_anew
from timer.leader.intake.disk_reserve import START_BYTES
from timer.model.timer_errors import CorruptFileError, NotReadyError, UnknownVersionError
from timer.model.units import Epoch, LogIndex, ReplicaId
from timer.recovery import manifest
from timer.recovery.snapshot import (
    OfferedUnder,
    Snapshot,
    SnapshotPart,
    crc32_of,
    files,
    remove_files,
)

VERSION: Final = 1

ROOM_BYTES: Final = 2 * START_BYTES
"""What a snapshot leaves free: to order the install takes a little, to start the rest."""

_PLAN: Final = "plan"
_READY: Final = "ready"


class Incoming:
    """A snapshot on its way here. Belongs to one task or thread at a time."""

    def __init__(self, disk: Disk, directory: Path, room_bytes: int = ROOM_BYTES) -> None:
        """`room_bytes` stay free on the disk."""
        self._disk = disk
        self._room_bytes = room_bytes
        self._directory = directory
        self._plan = b""
        self._waiting: list[SnapshotPart] = []
        self._whole: set[SnapshotPart] = set()
        """Those that were read here, and are good."""

    def planned(self) -> tuple[SnapshotPart, ...]:
        """Return the parts of the snapshot that an earlier process began to receive."""
        said = _read(self._disk, self._directory / _PLAN)
        return said[0].parts if said is not None else ()

    def look(self, part: SnapshotPart) -> None:
        """See whether a planned part is here and whole: it was so, maybe, in memory alone.

        Reads it. `begin` would do so, too, but while whoever offers the snapshot waits.
        """
        if self._is_whole(part):
            self._whole.add(part)

    def begin(self, snapshot: Snapshot, under: OfferedUnder) -> None:
        """Receive this one; keep what is here already of its parts.

        Raises:
            NotReadyError: there is no room for it.
        """
        disk, directory = self._disk, self._directory
        for name in ("", *manifest.DIRECTORIES):
            disk.make_dir(directory / name)
        before = _read(disk, directory / _PLAN)
        kept = {*before[0].parts} & {*snapshot.parts} if before is not None else set[SnapshotPart]()
        places = {directory / part.path for part in kept}
        for path in files(disk, directory):
            if path not in places and path.name != _PLAN:
                disk.remove(path)
        self._plan = _encode(snapshot, under)
        disk.write_atomic(directory / _PLAN, self._plan)
        self._whole = {part for part in kept if part in self._whole or self._is_whole(part)}
        self._waiting = [part for part in snapshot.parts if part not in self._whole]
        missing = sum(part.size - self._size(part) for part in self._waiting)
        free = disk.free_bytes(directory)
        if missing and missing + self._room_bytes > free:
            why = f"{missing} bytes are to be fetched and {self._room_bytes} to stay free"
            raise NotReadyError(f"{why}, the disk has {free} free")

    def wanted(self) -> tuple[SnapshotPart, int] | None:
        """Return the part to fetch, and from which byte on. None: all is here."""
        if not self._waiting:
            return None
        part = self._waiting[0]
        return part, self._size(part)

    def _size(self, part: SnapshotPart) -> int:
        """Return how many bytes of a part are here."""
        path = self._directory / part.path
        return self._disk.size(path) if self._disk.exists(path) else 0

    def put(self, part: SnapshotPart, offset: int, data: Bytes) -> bool:
        """Keep what was fetched of the wanted part; with its last bytes it is durable.

        Returns:
            False: it is all here and its checksum is wrong. It begins anew.
        """
        assert (part, offset) == self.wanted(), (part, offset, self.wanted())
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
            self._whole.add(self._waiting.pop(0))
        return True

    def _is_whole(self, part: SnapshotPart) -> bool:
        """Return whether the file has its size and checksum; a wrong one is removed."""
        path = self._directory / part.path
        size = self._disk.size(path) if self._disk.exists(path) else -1
        if size == part.size:
            self._disk.open_append(path).close()  # forgets what only the page cache holds
            with contextlib.suppress(CorruptFileError):
                if crc32_of(self._disk, path) == part.crc32:
                    return True
        if size >= part.size:
            self._disk.remove(path)
        return False

    def forget(self) -> None:
        """Begin from nothing next time."""
        self._whole.clear()
        remove_files(self._disk, self._directory)

    def finish(self) -> None:
        """Let the next start install it: everything is here and was found good."""
        assert self.wanted() is None, self.wanted()
        disk, directory = self._disk, self._directory
        for name in ("", *manifest.DIRECTORIES):
            disk.sync_dir(directory / name)
        disk.write_atomic(directory / _READY, self._plan)


def ready(disk: Disk, incoming: Path) -> tuple[Snapshot, OfferedUnder] | None:
    """Return the snapshot that has to be installed before anything else is done. None: none.

    Raises:
        CorruptFileError: that can't be read.
        UnknownVersionError: another program has ordered it.
    """
    if not disk.exists(incoming / _READY):
        return None
    version = _version(disk.read(incoming / _READY))
    if version not in (None, VERSION):
        raise UnknownVersionError(incoming / _READY, version, VERSION)
    found = _read(disk, incoming / _READY)
    if found is None:
        raise CorruptFileError(incoming / _READY, 0, "damaged")
    return found


def install(
    disk: Disk, incoming: Path, *, state: Path, log: Path, damaged: Path, keep_log: bool
) -> None:
    """Replace the state by the snapshot that is `ready`, durably; the note of damage goes, too.

    Begins from the beginning if a crash, or an error, cut it short. `keep_log`: the log holds the
    snapshot's entry; else it begins anew after that.

    Raises:
        CorruptFileError, DiskFailed: it is to be repeated.
    """
    disk.sync_dir(incoming)  # whoever wrote `ready` may have died before its name was durable
    found = ready(disk, incoming)
    assert found is not None, incoming
    snapshot, _ = found
    for name in ("", *manifest.DIRECTORIES):
        disk.make_dir(state / name)
    remove_files(disk, state)
    if not keep_log:
        begin_anew(disk, log, snapshot.index, snapshot.epoch)
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
    # From here on there is no way back: the parts may go only when this is certain.
    disk.remove(incoming / _READY)
    disk.sync_dir(incoming)
    remove_files(disk, incoming)


def drop_leftovers(disk: Disk, incoming: Path) -> None:
    """Remove parts that no plan speaks of: their snapshot was installed."""
    if not disk.exists(incoming / _PLAN):
        remove_files(disk, incoming)


def _encode(snapshot: Snapshot, under: OfferedUnder) -> bytes:
    fields = [snapshot.index, snapshot.epoch, snapshot.voters, snapshot.parts, under]
    body: bytes = msgpack.packb([VERSION, *fields])
    return body + zlib.crc32(body).to_bytes(4, "little")


def _read(disk: Disk, path: Path) -> tuple[Snapshot, OfferedUnder] | None:
    """Return what a plan says; None: there is none, or it is damaged or another version's."""
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
    return snapshot, OfferedUnder(*under)


def _version(data: bytes) -> int | None:
    """Return the version of a plan; None: it is damaged."""
    body = data[:-4]
    if not body or zlib.crc32(body).to_bytes(4, "little") != data[-4:]:
        return None
    version: int = msgpack.unpackb(body)[0]
    return version
