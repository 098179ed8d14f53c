"""The source of a snapshot: pins its newest manifest and the files that it names, for receivers.

One snapshot at a time, by hard links in a directory of its own. timer/recovery/snapshot.py has a
drawing.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, NotReadyError
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId
from timer.recovery import manifest
from timer.recovery.snapshot import Snapshot, SnapshotPart, crc32_of, remove_files

PIN_TRIES: Final = 20
"""Attempts to pin. One fails if a newer manifest is written meanwhile, once in some seconds."""

PINNED_MS: Final = 60_000
"""Time since the last read after which a snapshot is unpinned, and the log after it is freed."""


def pin(disk: Disk, state: Path, into: Path) -> Snapshot:
    """Pin the newest manifest and the files that it names under `into`. Return the snapshot.

    Reads the files for which the manifest has no checksum. May run beside flushes.

    Raises:
        NotReadyError: there is no manifest yet, or each attempt missed a file.
        CorruptFileError: a file differs from the manifest's description.
    """
    if not disk.exists(state / manifest.NAME):
        raise NotReadyError("the node has not written its first manifest yet; retry later")
    missing = ""
    for _ in range(PIN_TRIES):
        remove_files(disk, into)
        try:
            return _try_pin(disk, state, into)
        except FileNotFoundError as gone:
            missing = gone.filename  # as a rule after a newer manifest, which does not name it
        except CorruptFileError as found:
            path = Path(str(found.path))
            if path.is_relative_to(into):  # a link: report the original's path
                path = state / path.relative_to(into)
            raise CorruptFileError(path, found.position, found.why) from None
    why = "a newer manifest was written at each attempt, or the file is lost; retry later"
    raise NotReadyError(f"{missing} is missing: {why}")


def _try_pin(disk: Disk, state: Path, into: Path) -> Snapshot:
    for name in ("", *manifest.DIRECTORIES):
        disk.make_dir(into / name)
    # The manifest first: the pinned one is then read.
    disk.link(state / manifest.NAME, into / manifest.NAME)
    body = manifest.read(disk, into)
    assert body is not None, into
    named = [(manifest.NAME, 0, None), *manifest.files(body)]
    for path, _, _ in named[1:]:
        disk.link(state / path, into / path)
    manifest.check_spills(body, disk, into)
    parts: list[SnapshotPart] = []
    for path, needed, crc32 in named:
        size = disk.size(into / path)
        if size < needed or (crc32 is not None and size != needed):
            why = f"the file has {size} bytes; the manifest needs {needed}"
            raise CorruptFileError(state / path, size, why)
        parts.append(
            SnapshotPart(path, size, crc32_of(disk, into / path) if crc32 is None else crc32)
        )
    return Snapshot(
        index=LogIndex(body["index"]),
        epoch=Epoch(body["epoch"]),
        voters=tuple(ReplicaId(voter) for voter in body["voters"]),
        parts=tuple(parts),
    )


class OfferedSnapshot:
    """The snapshot that a node offers, to any number of receivers, until none has read for a while.

    Not safe for two threads at once.
    """

    def __init__(self, disk: Disk, state: Path, directory: Path) -> None:
        """Begin without one. Remove the files that an earlier process pinned in `directory`."""
        self._disk = disk
        self._state = state
        self._directory = directory
        self._used = False
        """Read or pinned since the last `expire`."""
        self._used_ms = MonoMs(0)
        self._damaged: set[SnapshotPart] = set()
        """Parts that `check` found damaged. They are not sent."""
        self.pinned: Snapshot | None = None
        """The pinned snapshot. A receiver that installs it needs the log after its index."""
        remove_files(disk, directory)

    def offer(self, known: LogIndex = LogIndex(0)) -> Snapshot:
        """Return the pinned snapshot. If none is, or none beyond `known`, pin the newest first.

        A read keeps it pinned, an offer does not: a receiver without room would retry for ever.

        Raises:
            NotReadyError: see `pin`.
            CorruptFileError: see `pin`; or `check` has found a part damaged.
        """
        if self.pinned is None or self.pinned.index <= known:
            self.pinned = None
            try:
                self.pinned = pin(self._disk, self._state, self._directory)
            except Exception:
                remove_files(self._disk, self._directory)  # the links would keep files on the disk
                raise
            self._used = True
        for part in self.pinned.parts:
            if part in self._damaged:
                raise self._mismatch(part)
        return self.pinned

    def read(self, part: SnapshotPart, offset: int, size: int) -> bytes | None:
        """Return bytes [offset, offset + size) of a part; None if it is not pinned any more."""
        if not self.has_part(part):
            return None
        self._used = True
        try:
            return self._disk.read(self._directory / part.path, offset, size)
        except FileNotFoundError:  # another program removed the link; the next offer pins again
            self.pinned = None
            return None

    def has_part(self, part: SnapshotPart) -> bool:
        """Return whether a part is pinned and can be sent. For any thread."""
        pinned = self.pinned
        return pinned is not None and part in pinned.parts and part not in self._damaged

    def check(self, path: str) -> None:
        """Read a part that a receiver found damaged.

        Raises:
            CorruptFileError: this node's file is damaged.
        """
        if self.pinned is None:
            return
        for part in self.pinned.parts:
            with suppress(FileNotFoundError):  # as in `read`
                if part.path == path and not self._is_whole(part):
                    self._damaged.add(part)
                    raise self._mismatch(part)

    def _is_whole(self, part: SnapshotPart) -> bool:
        if part in self._damaged:
            return False
        return crc32_of(self._disk, self._directory / part.path) == part.crc32

    def _mismatch(self, part: SnapshotPart) -> CorruptFileError:
        return CorruptFileError(self._state / part.path, 0, "checksum mismatch")

    def expire(self, now_ms: MonoMs) -> None:
        """Unpin a snapshot that was not read within PINNED_MS. Call it now and then.

        `now_ms`: the caller's monotonic clock.
        """
        if self._used:
            self._used, self._used_ms = False, now_ms
        if self.pinned is not None and now_ms - self._used_ms >= PINNED_MS:
            self.pinned = None
            remove_files(self._disk, self._directory)
