"""A disk in memory that loses, tears and damages data as a real disk may (timer/files/disk.py).

Every file has two images: the bytes that the process sees, and the bytes that a crash leaves.

    write ──► seen ──sync──► durable          names likewise: seen ──sync_dir──► durable
               ▲                │
               └──── crash ─────┘  seen becomes durable plus a random part of the unsynced bytes

One `SimDisk` is the disk of one machine, used by one thread. It outlives crashes; its handles do
not. Using a handle from before a crash is a bug of the simulated program, and asserted. The caller
passes all randomness.
"""

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from timer.files.disk import MARK_SIZE_MAX, AppendFile, Bytes, Disk, DiskRefusal, FileLock, MarkFile
from timer.model.timer_errors import UnreadableFileError, WrongDirectoryError

LOG_PATH: Final = Path("/log")
PROMISE_PATH: Final = Path("/promise")
STATE_PATH: Final = Path("/state")
INCOMING_PATH: Final = Path("/incoming")
OUTGOING_PATH: Final = Path("/outgoing")
DAMAGED_PATH: Final = Path("/damaged")


class Death(Exception):
    """The process is killed inside a system call; none of its code runs after it."""


PAGE_SIZE: Final = 512
"""A crash writes a page whole or not at all. Appended bytes may also end within a page."""


@dataclass(slots=True, eq=False)
class _File:
    """The bytes of one file, which may have several names."""

    seen: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    clean: int = 0
    """Bytes [0, clean) are equal in `seen` and `durable`."""
    cut: int = 0
    """Smallest size of the file since the last sync."""
    lied: bool = False
    """Whether a sync failed; the seen bytes may then never become durable."""
    unreadable: set[int] = field(default_factory=set)
    """Numbers of the pages that can't be read until they are written again."""

    def put(self, position: int, data: Bytes) -> None:
        self._overwrite(position, position + len(data))
        self.seen[position : position + len(data)] = data
        self.clean = min(self.clean, position)

    def _overwrite(self, start: int, end: int) -> None:
        """Make the pages in [start, end) readable again.

        Raises:
            OSError: EIO, as the range covers only a part of an unreadable page. The disk must read
                the other part.
        """
        for page in self.unreadable.intersection(_pages(start, end - start)):
            first, last = page * PAGE_SIZE, min((page + 1) * PAGE_SIZE, len(self.seen))
            if start > first or end < last:
                raise OSError(errno.EIO, "a bad sector (simulated)")
        self.unreadable.difference_update(_pages(start, end - start))

    def truncate(self, size: int) -> None:
        self._overwrite(size, len(self.seen))
        del self.seen[size:]
        self.clean = min(self.clean, size)
        self.cut = min(self.cut, size)

    def sync(self) -> None:
        self.durable[self.clean :] = self.seen[self.clean :]
        self.clean = self.cut = len(self.seen)

    def forget(self) -> None:
        """Set the seen bytes to the durable bytes."""
        self.seen = bytearray(self.durable)
        self.clean = self.cut = len(self.seen)
        self.lied = False

    def tear(self, rng: random.Random) -> None:
        """Make a random part of the unsynced bytes durable."""
        base, seen = self.durable, self.seen
        if self.cut < len(base):
            if rng.random() < 0.5:  # the truncation and all later writes are lost
                return
            base = base[: self.cut]
        how = rng.choice(("lost", "kept", "prefix", "pages"))
        if how == "kept":
            base = bytearray(seen)
        elif how == "prefix":
            size = rng.randint(len(base), len(seen))
            base = base + seen[len(base) : size]
        elif how == "pages":
            size = rng.choice((len(seen), rng.randint(len(base), len(seen))))
            base = base + bytes(size - len(base))
            first = self.clean // PAGE_SIZE * PAGE_SIZE
            for page in range(first, size, PAGE_SIZE):
                if rng.random() < 0.5:
                    end = min(page + PAGE_SIZE, size)
                    base[page:end] = seen[page:end]
        self.durable = base
        self.clean = min(self.clean, len(base))
        self.cut = min(self.cut, len(base))


def _pages(position: int, size: int) -> range:
    """Return the numbers of the pages that bytes [position, position + size) touch."""
    return range(position // PAGE_SIZE, -(-(position + size) // PAGE_SIZE) if size > 0 else 0)


_Names: TypeAlias = dict[Path, _File | None]
"""Path -> file; None for a directory."""


class SimDisk(Disk):
    """A simulated disk. It implements timer.files.disk.Disk and has a method per fault."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        """A write beyond it writes the bytes that fit and fails with ENOSPC. None: no limit."""
        self._root = Path("/")
        self._seen: _Names = {}
        self._durable: _Names = {}
        self._pending: list[dict[Path, _File | str | None]] = []
        """Directory operations that are not synced yet; "" stands for a removed name."""
        self._failing: tuple[int, random.Random] | None = None
        self._dying: tuple[Path, random.Random] | None = None
        self._locks: dict[Path, int] = {}
        self._life = 0
        self._boots = 1

    # Faults.

    def crash(self, rng: random.Random) -> None:
        """Cut the power: unsynced data are lost, wholly or partly, and every lock is free."""
        for operation in self._pending:
            if rng.random() < 0.5:
                self._apply(self._durable, operation)
        self._seen = {
            path: file
            for path, file in self._durable.items()
            if all(parent in self._durable for parent in path.parents if parent != self._root)
        }
        for _, file in sorted(self._files()):
            if not file.lied:
                file.tear(rng)
            file.forget()
        self._durable = dict(self._seen)
        self._pending.clear()
        self._boots += 1
        self.die()

    def die(self) -> None:
        """Kill the process: its writes are still seen; handles and locks are gone."""
        self.mend()
        self._locks.clear()
        self._life += 1

    def fail_sync(self, rng: random.Random, *, after: int = 0) -> None:
        """Let the file sync after the next `after` syncs fail with EIO.

        A random part of the data becomes durable. As on Linux the written bytes may still be read,
        until the file is opened for writing again.
        """
        self._failing = (after, rng)

    def die_in_write(self, rng: random.Random, under: Path) -> None:
        """Kill the process inside its next append to a file in the directory `under`."""
        self._dying = (under, rng)

    def lose(self, gone: Sequence[Path]) -> None:
        """Remove these files, and all files in these directories, durably."""
        for names in (self._seen, self._durable):
            for path in [*names]:
                if any(path.is_relative_to(each) for each in gone):
                    del names[path]
        self._pending.clear()

    def mend(self) -> None:
        """Cancel a coming failure of a sync and a coming death in a write."""
        self._failing = self._dying = None

    def flip(self, path: Path, position: int, *, mask: int = 1) -> None:
        """Flip bits of one byte, in the seen and in the durable image."""
        assert 0 < mask < 256, mask
        file = self._file(path)
        file.seen[position] ^= mask
        if position < len(file.durable):
            file.durable[position] ^= mask

    def spoil(self, path: Path, position: int) -> None:
        """Make this byte's page unreadable until it is written again."""
        self._file(path).unreadable.add(position // PAGE_SIZE)

    def shorten(self, path: Path, size: int) -> None:
        """Cut a file within its synced data. Only for a disk that no process uses."""
        file = self._file(path)
        del file.durable[size:]
        file.forget()

    def names_of(self, path: Path) -> list[Path]:
        """Return all names of the file at `path`, links included."""
        wanted = self._file(path)
        return sorted(name for name, file in self._files() if file is wanted)

    def synced_byte(self, rng: random.Random, under: Path) -> tuple[Path, int] | None:
        """Return the place of a random synced byte below `under`. None: there is none."""
        sizes = [
            (path, size)
            for path, file in sorted(self._files())
            if under in path.parents and (size := min(file.clean, len(file.durable)))
        ]
        if not sizes:
            return None
        path, size = rng.choice(sizes)
        return path, rng.randrange(size)

    def wipe(self) -> None:
        """Replace the disk by an empty one."""
        self._seen, self._durable = {}, {}
        self._pending.clear()
        self._boots += 1
        self.die()

    def used_bytes(self) -> int:
        """Return the sum of the seen sizes of all files in bytes."""
        files = {id(file): file for _, file in self._files()}
        return sum(len(file.seen) for file in files.values())

    # Disk.

    def open_append(self, path: Path) -> AppendFile:
        return _SimHandle(self, path, self._open_true(path))

    def open_mark(self, path: Path) -> MarkFile:
        return _SimHandle(self, path, self._open_true(path))

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        file = self._file(path)
        end = len(file.seen) if size is None else min(start + size, len(file.seen))
        if bad := file.unreadable.intersection(_pages(start, end - start)):
            at = max(start, min(bad) * PAGE_SIZE)
            raise UnreadableFileError(path, at, "a bad sector (simulated)")
        return bytes(file.seen[start:end])

    def size(self, path: Path) -> int:
        return len(self._file(path).seen)

    def exists(self, path: Path) -> bool:
        return path == self._root or path in self._seen

    def list_dir(self, path: Path) -> list[str]:
        if path != self._root and self._seen.get(path, ...) is not None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        return sorted(each.name for each in self._seen if each.parent == path)

    def make_dir(self, path: Path) -> None:
        if path == self._root:
            return
        if not self.exists(path):
            self.make_dir(path.parent)
            self._change({path: None})
        self.sync_dir(path.parent)

    def write_atomic(self, path: Path, data: Bytes) -> None:
        temporary = path.with_name(path.name + ".tmp")
        file = _File()
        self._change({temporary: file})
        with DiskRefusal(path).guard("write"):
            self._write(file, 0, data)
            self._sync(file)
        self._change({temporary: "", path: file})
        self.sync_dir(path.parent)

    def remove(self, path: Path) -> None:
        self._file(path)
        self._change({path: ""})

    def link(self, path: Path, name: Path) -> None:
        assert name not in self._seen, name
        self._change({name: self._file(path)})

    def sync_dir(self, path: Path) -> None:
        assert path == self._root or self._seen[path] is None, path
        pending: list[dict[Path, _File | str | None]] = []
        for operation in self._pending:
            if all(each.parent == path for each in operation):
                self._apply(self._durable, operation)
            else:
                pending.append(operation)
        self._pending = pending

    def free_bytes(self, path: Path) -> int:
        assert self.exists(path), path
        if self.capacity_bytes is None:
            return 1 << 50
        return max(0, self.capacity_bytes - self.used_bytes())

    def boot_id(self) -> bytes:
        return self._boots.to_bytes(16, "little")

    def lock(self, path: Path) -> FileLock:
        file = self._open(path)
        if path in self._locks:
            raise WrongDirectoryError(f"{path.parent} is in use by process {self._locks[path]}")
        self._locks[path] = self._life
        return _SimHandle(self, path, file)

    # Methods that the handles share.

    def _files(self) -> list[tuple[Path, _File]]:
        return [(path, file) for path, file in self._seen.items() if file is not None]

    def _file(self, path: Path) -> _File:
        file = self._seen.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return file

    def _open(self, path: Path) -> _File:
        if path not in self._seen:
            if self._seen.get(path.parent, ...) is not None and path.parent != self._root:
                raise FileNotFoundError(errno.ENOENT, "no such directory", str(path.parent))
            self._change({path: _File()})
        return self._file(path)

    def _open_true(self, path: Path) -> _File:
        """Open or create the file; after a failed sync only its durable bytes are seen."""
        file = self._open(path)
        if file.lied:
            file.forget()
        if file.seen:
            with DiskRefusal(path).guard("fdatasync"):
                self._sync(file)
        return file

    def _change(self, operation: dict[Path, _File | str | None]) -> None:
        self._apply(self._seen, operation)
        self._pending.append(operation)

    @staticmethod
    def _apply(names: _Names, operation: dict[Path, _File | str | None]) -> None:
        for path, what in operation.items():
            if isinstance(what, str):
                names.pop(path, None)
            else:
                names[path] = what

    def _append(self, path: Path, file: _File, data: Bytes) -> None:
        if self._dying is not None and path.parent == self._dying[0] and len(data) > 1:
            part = memoryview(data)[: self._dying[1].randrange(1, len(data))]
            self._dying = None
            self._write(file, len(file.seen), part)
            raise Death
        self._write(file, len(file.seen), data)

    def _write(self, file: _File, position: int, data: Bytes) -> None:
        if self.capacity_bytes is not None:
            growth = max(0, position + len(data) - len(file.seen))
            room = self.capacity_bytes - self.used_bytes()
            if growth > room:
                file.put(position, memoryview(data)[: max(0, len(data) - growth + room)])
                raise OSError(errno.ENOSPC, "the simulated disk is full")
        file.put(position, data)

    def _sync(self, file: _File) -> None:
        if self._failing is not None:
            left, rng = self._failing
            self._failing = (left - 1, rng) if left else None
            if not left:
                file.tear(rng)
                file.lied = True
                raise OSError(errno.EIO, "simulated")
        assert not file.lied, "synced again after a failed sync"
        file.sync()

    def _release(self, path: Path, life: int) -> None:
        if life == self._life:
            self._locks.pop(path, None)


class _SimHandle:
    """See AppendFile, MarkFile and FileLock. Usable until the process dies."""

    def __init__(self, disk: SimDisk, path: Path, file: _File) -> None:
        self._disk, self._path, self._file = disk, path, file
        self._life = disk._life  # noqa: SLF001
        self._refusal = DiskRefusal(path)
        self._closed = False

    def _use(self) -> None:
        assert self._life == self._disk._life, f"{self._path}: from before the crash"  # noqa: SLF001
        assert not self._closed, f"{self._path}: used after close"

    @property
    def size(self) -> int:
        return len(self._file.seen)

    def write(self, buffers: Sequence[Bytes]) -> None:
        self._use()
        with self._refusal.guard("write"):
            for buffer in buffers:
                self._disk._append(self._path, self._file, buffer)  # noqa: SLF001

    def truncate(self, size: int) -> None:
        self._use()
        assert 0 <= size <= self.size, (size, self.size)
        with self._refusal.guard("truncate"):
            self._file.truncate(size)

    def put(self, data: bytes) -> None:
        self._use()
        assert len(data) <= MARK_SIZE_MAX, len(data)
        with self._refusal.guard("write"):
            self._disk._write(self._file, 0, data)  # noqa: SLF001

    def sync(self) -> None:
        self._use()
        with self._refusal.guard("fdatasync"):
            self._disk._sync(self._file)  # noqa: SLF001

    def close(self) -> None:
        self._closed = True

    def release(self) -> None:
        self._disk._release(self._path, self._life)  # noqa: SLF001
