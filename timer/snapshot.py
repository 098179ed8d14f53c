"""Snapshots: a manifest with its immutable files, pinned on one node and installed on another.

    source                                       receiver
    state/ --take: hard links--> outgoing/       incoming/ --verified, `ready`--> state/, log/
                                     |               ^
                                     +---- parts ----+     (replication/refetch.py carries them)

A manifest is replaced by a rename and its files never change, so a link to each of them is a
consistent cut that outlives whatever the source flushes and merges meanwhile. It holds committed
entries alone, so it is right for every replica of the log, whoever made it.

**Receiving** can stop anywhere and go on: `Incoming` keeps each file that the next offer names with
the same size and checksum, and begins a half one where it ended. A file that is whole is synced and
compared with its checksum.

**Installing** replaces the state. It begins with the file `ready`, written when all parts are
durable and verified, and is done when that is gone. Whoever finds it at start carries the install
out again from its beginning: nothing in it depends on what an earlier attempt got done. A log that
is whole and holds the snapshot's entry stays: it goes on from there. Any other begins anew after
it, and what this replica had acknowledged may be gone, so before its first file goes the caller
marks its promise as unsure (replication/install.py).

    plan, ready     msgpack [version 1, index, epoch, [voters], [[path, size, crc32], ...],
                             [leader's epoch, replica id, nonce]], then its CRC-32
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgpack

from timer import manifest
from timer.disk import Bytes, Disk
from timer.errors import CorruptFile, NotReady, UnknownVersion
from timer.log import begin_anew
from timer.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId

VERSION: Final = 1
READ_SIZE: Final = 1 << 20
TAKE_TRIES: Final = 20
"""Each lost to a newer manifest, and these are seconds apart."""

PINNED_MS: Final = 60_000
"""How long a snapshot stays pinned, and the log after it kept, for somebody who fell silent."""

_PLAN: Final = "plan"
_READY: Final = "ready"


class Part(NamedTuple):
    """One file of a snapshot."""

    path: str
    """Below the state's directory."""
    size: int
    crc32: int
    """Of the whole file."""


class Leadership(NamedTuple):
    """Who led when the snapshot was offered: the receiver promises nobody older."""

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
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes in all of it."""
        return sum(part.size for part in self.parts)


# ---- the source's side


def take(disk: Disk, state: Path, into: Path) -> Snapshot:
    """Pin the newest manifest and all that it names under `into`; return what that is.

    Reads what the manifest has no checksum for. May run beside flushes.

    Raises:
        NotReady: there is no manifest yet, or one replaced the other too fast.
        CorruptFile: a file is not what the manifest says.
    """
    if not disk.exists(state / manifest.NAME):
        raise NotReady("no manifest was written yet")
    for _ in range(TAKE_TRIES):
        drop(disk, into)
        try:
            return _take(disk, state, into)
        except FileNotFoundError:
            continue  # a newer manifest has come, and what the old one named is gone
        except CorruptFile as found:
            path = Path(str(found.path))
            if path.is_relative_to(into):  # a link to the same bytes
                path = state / path.relative_to(into)
            raise CorruptFile(path, found.position, found.why) from None
    raise NotReady("manifests replaced each other too fast")


def _take(disk: Disk, state: Path, into: Path) -> Snapshot:
    for name in ("", *manifest.DIRECTORIES):
        disk.make_dir(into / name)
    # The manifest first: what is read of it then is what was pinned.
    disk.link(state / manifest.NAME, into / manifest.NAME)
    said = manifest.read(disk, into)
    assert said is not None, into
    named = [(manifest.NAME, 0, None), *manifest.files(said)]
    for path, _, _ in named[1:]:
        disk.link(state / path, into / path)
    manifest.check_spills(said, disk, into)
    parts: list[Part] = []
    for path, needed, crc32 in named:
        size = disk.size(into / path)
        if size < needed or (crc32 is not None and size != needed):
            raise CorruptFile(state / path, size, f"{size} bytes, the manifest needs {needed}")
        parts.append(Part(path, size, _crc32(disk, into / path) if crc32 is None else crc32))
    return Snapshot(
        index=LogIndex(said["index"]),
        epoch=Epoch(said["epoch"]),
        voters=tuple(ReplicaId(voter) for voter in said["voters"]),
        parts=tuple(parts),
    )


class Outgoing:
    """The snapshot that a node offers: one at a time, whoever asks, until nobody has for a while.

    Nothing here is safe for two threads at once. `now_ms` is the caller's monotonic clock.
    """

    def __init__(self, disk: Disk, state: Path, directory: Path) -> None:
        """Begin with none; what an earlier process pinned in `directory` is removed."""
        self._disk = disk
        self._state = state
        self._directory = directory
        self._used_ms = MonoMs(0)
        self.pinned: Snapshot | None = None
        """Who installs it needs the log after its index."""
        drop(disk, directory)

    def offer(self, now_ms: MonoMs, known: LogIndex = LogIndex(0)) -> Snapshot:
        """Return the pinned snapshot, or pin the newest: if none is, or none beyond `known`.

        Raises:
            NotReady, CorruptFile: see `take`.
        """
        if self.pinned is None or self.pinned.index <= known:
            self.pinned = None
            self.pinned = take(self._disk, self._state, self._directory)
        self._used_ms = now_ms
        return self.pinned

    def read(self, now_ms: MonoMs, part: Part, offset: int, size: int) -> bytes | None:
        """Return bytes [offset, offset + size) of a part. None: it is not pinned any more."""
        if self.pinned is None or part not in self.pinned.parts:
            return None
        self._used_ms = now_ms
        return self._disk.read(self._directory / part.path, offset, size)

    def check(self, path: str) -> None:
        """Read a part that did not arrive as it should have.

        Raises:
            CorruptFile: it is this node's that is damaged.
        """
        for part in self.pinned.parts if self.pinned is not None else ():
            if part.path == path and _crc32(self._disk, self._directory / path) != part.crc32:
                raise CorruptFile(self._state / path, 0, "checksum mismatch")

    def expire(self, now_ms: MonoMs) -> None:
        """Unpin what nobody has asked for within PINNED_MS."""
        if self.pinned is not None and now_ms - self._used_ms >= PINNED_MS:
            self.pinned = None
            drop(self._disk, self._directory)


def drop(disk: Disk, directory: Path) -> None:
    """Remove a pinned snapshot, or what is left of one."""
    for path in _files(disk, directory):
        disk.remove(path)


# ---- the receiver's side


class Incoming:
    """A snapshot on its way here. Belongs to one task or thread at a time."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._waiting: list[Part] = []

    def begin(self, snapshot: Snapshot, under: Leadership) -> None:
        """Receive this one; keep what is here already of its parts.

        Raises:
            NotReady: there is no room for it.
        """
        disk, directory = self._disk, self._directory
        for name in ("", *manifest.DIRECTORIES):
            disk.make_dir(directory / name)
        before = _read(disk, directory / _PLAN)
        kept = {*before[0].parts} & {*snapshot.parts} if before is not None else set[Part]()
        places = {directory / part.path for part in kept}
        for path in _files(disk, directory):
            if path not in places and path.name != _PLAN:
                disk.remove(path)
        disk.write_atomic(directory / _PLAN, _encode(snapshot, under))
        # What is whole here may have been so only in the memory of an earlier process.
        self._waiting = [part for part in snapshot.parts if not self._is_whole(part)]
        missing = sum(part.size - self._size(part) for part in self._waiting)
        free = disk.free_bytes(directory)
        if missing > free:
            raise NotReady(f"{missing} bytes are to be fetched, the disk has {free} free")

    def wanted(self) -> tuple[Part, int] | None:
        """Return the part to fetch, and from which byte on. None: all is here."""
        if not self._waiting:
            return None
        part = self._waiting[0]
        return part, self._size(part)

    def _size(self, part: Part) -> int:
        """Return how many bytes of a part are here."""
        path = self._directory / part.path
        return self._disk.size(path) if self._disk.exists(path) else 0

    def put(self, part: Part, offset: int, data: Bytes) -> bool:
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
            self._waiting.pop(0)
        return True

    def _is_whole(self, part: Part) -> bool:
        """Return whether the file has its size and checksum; a wrong one is removed."""
        path = self._directory / part.path
        size = self._disk.size(path) if self._disk.exists(path) else -1
        if size == part.size and _crc32(self._disk, path) == part.crc32:
            file = self._disk.open_append(path)
            file.sync()
            file.close()
            return True
        if size >= part.size:
            self._disk.remove(path)
        return False

    def forget(self) -> None:
        """Begin from nothing next time."""
        for path in _files(self._disk, self._directory):
            self._disk.remove(path)

    def finish(self) -> None:
        """Let the next start install it: everything is here and was found good."""
        assert self.wanted() is None, self.wanted()
        disk, directory = self._disk, self._directory
        for name in ("", *manifest.DIRECTORIES):
            disk.sync_dir(directory / name)
        disk.write_atomic(directory / _READY, disk.read(directory / _PLAN))


def ready(disk: Disk, incoming: Path) -> tuple[Snapshot, Leadership] | None:
    """Return the snapshot that has to be installed before anything else is done. None: none.

    Raises:
        CorruptFile: that can't be read.
        UnknownVersion: another program has ordered it.
    """
    if not disk.exists(incoming / _READY):
        return None
    version = _version(disk.read(incoming / _READY))
    if version not in (None, VERSION):
        raise UnknownVersion(incoming / _READY, version, VERSION)
    found = _read(disk, incoming / _READY)
    if found is None:
        raise CorruptFile(incoming / _READY, 0, "damaged")
    return found


def install(
    disk: Disk, incoming: Path, *, state: Path, log: Path, damaged: Path, keep_log: bool
) -> None:
    """Replace the state by the snapshot that is `ready`, durably; the note of damage goes, too.

    Begins from the beginning if a crash, or an error, cut it short. `keep_log`: the log holds the
    snapshot's entry; else it begins anew after that.

    Raises:
        CorruptFile, DiskFailed: it is to be repeated.
    """
    found = ready(disk, incoming)
    assert found is not None, incoming
    snapshot, _ = found
    for name in ("", *manifest.DIRECTORIES):
        disk.make_dir(state / name)
    for path in _files(disk, state):
        disk.remove(path)
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
    drop(disk, incoming)


def drop_leftovers(disk: Disk, incoming: Path) -> None:
    """Remove parts that no plan speaks of: their snapshot was installed."""
    if not disk.exists(incoming / _PLAN):
        drop(disk, incoming)


# ---- files


def is_part_path(path: str) -> bool:
    """Return whether a part may lie there: the manifest, or a file of one of its directories."""
    folder, _, name = path.rpartition("/")
    plain = name not in ("", ".", "..") and "\0" not in name
    return path == manifest.NAME or (folder in manifest.DIRECTORIES and plain)


def _files(disk: Disk, directory: Path) -> Iterator[Path]:
    """Yield the files of a state, or of a snapshot's directory; not the directories in it."""
    if not disk.exists(directory):
        return
    for folder in (directory, *(directory / name for name in manifest.DIRECTORIES)):
        if disk.exists(folder):
            for name in disk.list_dir(folder):
                if folder != directory or name not in manifest.DIRECTORIES:
                    yield folder / name


def _crc32(disk: Disk, path: Path) -> int:
    crc32, position = 0, 0
    while data := disk.read(path, position, READ_SIZE):
        crc32 = zlib.crc32(data, crc32)
        position += len(data)
    return crc32


def _encode(snapshot: Snapshot, under: Leadership) -> bytes:
    fields = [snapshot.index, snapshot.epoch, snapshot.voters, snapshot.parts, under]
    body: bytes = msgpack.packb([VERSION, *fields])
    return body + zlib.crc32(body).to_bytes(4, "little")


def _read(disk: Disk, path: Path) -> tuple[Snapshot, Leadership] | None:
    """Return what a plan says; None: there is none, or it is damaged or another version's."""
    data = disk.read(path) if disk.exists(path) else b""
    if _version(data) != VERSION:
        return None
    _, *fields = msgpack.unpackb(data[:-4])
    index, epoch, voters, parts, under = fields
    snapshot = Snapshot(
        index=LogIndex(index),
        epoch=Epoch(epoch),
        voters=tuple(ReplicaId(voter) for voter in voters),
        parts=tuple(Part(*part) for part in parts),
    )
    return snapshot, Leadership(*under)


def _version(data: bytes) -> int | None:
    """Return the version of a plan; None: it is damaged."""
    body = data[:-4]
    if not body or zlib.crc32(body).to_bytes(4, "little") != data[-4:]:
        return None
    version: int = msgpack.unpackb(body)[0]
    return version
