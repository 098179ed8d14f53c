"""The source of a snapshot: pins its newest manifest, and what that names, for those who fetch.

One snapshot at a time, by hard links in a directory of its own; timer/recovery/snapshot.py has the
picture.
"""

from pathlib import Path
from typing import Final

from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, NotReadyError
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId
from timer.recovery import manifest
from timer.recovery.snapshot import Snapshot, SnapshotPart, crc32_of, remove_files

TAKE_TRIES: Final = 20
"""Each lost to a newer manifest, and these are seconds apart."""

PINNED_MS: Final = 60_000
"""How long a snapshot stays pinned, and the log after it kept, for somebody who fell silent."""


def take(disk: Disk, state: Path, into: Path) -> Snapshot:
    """Pin the newest manifest and all that it names under `into`; return what that is.

    Reads what the manifest has no checksum for. May run beside flushes.

    Raises:
        NotReadyError: there is no manifest yet, or one replaced the other too fast.
        CorruptFileError: a file is not what the manifest says.
    """
    if not disk.exists(state / manifest.NAME):
        raise NotReadyError("no manifest was written yet")
    for _ in range(TAKE_TRIES):
        remove_files(disk, into)
        try:
            return _take(disk, state, into)
        except FileNotFoundError:
            continue  # a newer manifest has come, and what the old one named is gone
        except CorruptFileError as found:
            path = Path(str(found.path))
            if path.is_relative_to(into):  # a link to the same bytes
                path = state / path.relative_to(into)
            raise CorruptFileError(path, found.position, found.why) from None
    raise NotReadyError("manifests replaced each other too fast")


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
    parts: list[SnapshotPart] = []
    for path, needed, crc32 in named:
        size = disk.size(into / path)
        if size < needed or (crc32 is not None and size != needed):
            raise CorruptFileError(state / path, size, f"{size} bytes, the manifest needs {needed}")
        parts.append(
            SnapshotPart(path, size, crc32_of(disk, into / path) if crc32 is None else crc32)
        )
    return Snapshot(
        index=LogIndex(said["index"]),
        epoch=Epoch(said["epoch"]),
        voters=tuple(ReplicaId(voter) for voter in said["voters"]),
        parts=tuple(parts),
    )


class OfferedSnapshot:
    """The snapshot that a node offers: one at a time, whoever asks, until nobody has for a while.

    Nothing here is safe for two threads at once.
    """

    def __init__(self, disk: Disk, state: Path, directory: Path) -> None:
        """Begin with none; what an earlier process pinned in `directory` is removed."""
        self._disk = disk
        self._state = state
        self._directory = directory
        self._used = False
        """Since `expire` last looked."""
        self._used_ms = MonoMs(0)
        self.pinned: Snapshot | None = None
        """Who installs it needs the log after its index."""
        remove_files(disk, directory)

    def offer(self, known: LogIndex = LogIndex(0)) -> Snapshot:
        """Return the pinned snapshot, or pin the newest: if none is, or none beyond `known`.

        To be read keeps it pinned, to be offered does not: who has no room for it asks for ever.

        Raises:
            NotReadyError, CorruptFileError: see `take`.
        """
        if self.pinned is None or self.pinned.index <= known:
            self.pinned = None
            self.pinned = take(self._disk, self._state, self._directory)
            self._used = True
        return self.pinned

    def read(self, part: SnapshotPart, offset: int, size: int) -> bytes | None:
        """Return bytes [offset, offset + size) of a part. None: it is not pinned any more."""
        if not self.holds(part):
            return None
        self._used = True
        return self._disk.read(self._directory / part.path, offset, size)

    def holds(self, part: SnapshotPart) -> bool:
        """Return whether a part is pinned. Any thread may ask."""
        pinned = self.pinned
        return pinned is not None and part in pinned.parts

    def check(self, path: str) -> None:
        """Read a part that did not arrive as it should have.

        Raises:
            CorruptFileError: it is this node's that is damaged.
        """
        for part in self.pinned.parts if self.pinned is not None else ():
            if part.path == path and crc32_of(self._disk, self._directory / path) != part.crc32:
                raise CorruptFileError(self._state / path, 0, "checksum mismatch")

    def expire(self, now_ms: MonoMs) -> None:
        """Unpin what nobody has asked for within PINNED_MS. For every now and then.

        `now_ms` is the caller's monotonic clock.
        """
        if self._used:
            self._used, self._used_ms = False, now_ms
        if self.pinned is not None and now_ms - self._used_ms >= PINNED_MS:
            self.pinned = None
            remove_files(self._disk, self._directory)
