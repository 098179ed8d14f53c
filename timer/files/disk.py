"""The door to files: what the log, the promise, the directory and later the runs may do to a disk.

Two disks stand behind it: `RealDisk` here, and the simulator's, which loses, tears and damages
what a real one may. So code that goes through this door runs under both, and what it may rely
on is written down here and nowhere else:

    written     survives the death of the process, not of the machine
    synced      survives both. An AppendFile's and MarkFile's bytes by `sync`; a name (created,
                renamed, removed) by `sync_dir`; `write_atomic` and `make_dir` do both themselves
    torn        bytes written and not synced when the machine died: any part of them may be
                there, in any order, in pages of 512 bytes; the rest reads as zeros or is missing
    failed      after a failed write or sync the bytes may be anywhere. The file refuses all
                else, the process stops, and opening the file for writing in the next one forgets
                what only the page cache holds, so that what is read then is what is there

Any thread may call a Disk; a file belongs to one thread at a time.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from timer.model.timer_errors import DiskFailedError, UnreadableFileError, WrongDirectoryError

Bytes: TypeAlias = bytes | bytearray | memoryview

UNKNOWN_BOOT: Final = bytes(16)
"""The name of a run of a machine that does not tell."""
MARK_SIZE_MAX: Final = 512
"""Bytes in a MarkFile: one sector, which a disk writes whole or not at all."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TEMPORARY: Final = ".tmp"
_PART_SIZE: Final = 64 << 20
"""Read at a time: memory is taken for what is asked, which may be a damaged number."""
_IOV_MAX: Final = 1024
_UNREADABLE: Final = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""What a read says of a bad sector, or of a block whose checksum the file system finds wrong."""


class AppendFile(Protocol):
    """A file open for writing at its end."""

    @property
    def size(self) -> int:
        """Bytes in the file, synced or not."""

    def write(self, buffers: Sequence[Bytes]) -> None:
        """Append the buffers, all of them.

        Raises:
            DiskFailedError: some part of them may be there. The file refuses all but `close`.
        """

    def sync(self) -> None:
        """Make everything written or truncated so far survive the machine.

        Raises:
            DiskFailedError: nobody knows what is durable. The file refuses all but `close`.
        """

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, not above its present size; durable after `sync`.

        Raises:
            DiskFailedError: the file refuses all but `close`.
        """

    def close(self) -> None:
        """Let go of the file, without syncing. Closing twice does nothing."""


class MarkFile(Protocol):
    """At most 512 bytes that are overwritten in place: cheap, and old or new after a crash."""

    def put(self, data: bytes) -> None:
        """Replace the content. `data` has the same length every time.

        Raises:
            DiskFailedError: the file refuses all but `close`.
        """

    def sync(self) -> None:
        """Make the last `put` survive the machine.

        Raises:
            DiskFailedError: the file refuses all but `close`.
        """

    def close(self) -> None:
        """Let go of the file, without syncing. Closing twice does nothing."""


class FileLock(Protocol):
    """A lock that ends with `release`, or with its process."""

    def release(self) -> None:
        """Let others take it. Releasing twice does nothing."""


class Disk(Protocol):
    """An operation raises DiskFailedError if the system refuses it, FileNotFoundError if stated."""

    def open_append(self, path: Path) -> AppendFile:
        """Open for appending; an absent file is created (its name durable after `sync_dir`)."""

    def open_mark(self, path: Path) -> MarkFile:
        """Open for overwriting; an absent file is created (its name durable after `sync_dir`)."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes [start, start + size), fewer where the file ends; to its end if None.

        Raises:
            FileNotFoundError: there is no such file.
            UnreadableFileError: the disk can't give back what it took.
        """

    def size(self, path: Path) -> int:
        """Return the file's size in bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def exists(self, path: Path) -> bool:
        """Return whether a file or directory has this name."""

    def list_dir(self, path: Path) -> list[str]:
        """Return the sorted names in a directory.

        Raises:
            FileNotFoundError: there is no such directory.
        """

    def make_dir(self, path: Path) -> None:
        """Make sure, durably, that the directory and its parents exist."""

    def write_atomic(self, path: Path, data: Bytes) -> None:
        """Replace the file by `data`, durably: a crash leaves the old content or the new."""

    def remove(self, path: Path) -> None:
        """Remove a file; durable after `sync_dir`.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def link(self, path: Path, name: Path) -> None:
        """Give the file at `path` a second name, which must be free; durable after `sync_dir`.

        Both names are the same file; it lasts until the last of them is removed.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def sync_dir(self, path: Path) -> None:
        """Make the names in this directory survive the machine."""

    def free_bytes(self, path: Path) -> int:
        """Return how much may still be written beside `path`."""

    def boot_id(self) -> bytes:
        """Return 16 bytes that name the machine's present run, from power to power.

        Zeros: unknown. What a process wrote under the same name is still in memory or on the disk.
        """

    def lock(self, path: Path) -> FileLock:
        """Hold the lock file `path`, created if absent, without waiting.

        Raises:
            WrongDirectoryError: another process holds it; the message names which.
        """


@contextlib.contextmanager
def failing(path: Path, action: str) -> Iterator[None]:
    """Turn the system's refusals into DiskFailedError, with the errno and its name."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_failed(path, action, error.errno) from error


def disk_failed(path: Path, action: str, number: int | None) -> DiskFailedError:
    """Return the error that says which action failed on which path, and why."""
    name, meaning = "?", "unknown reason"
    if number is not None:
        name, meaning = errno.errorcode.get(number, str(number)), os.strerror(number)
    return DiskFailedError(f"{path}: {action} failed: {name} ({meaning})", errno=number)


def is_full(error: BaseException | None) -> bool:
    """Return whether a disk, or a quota, has no room for what was to be written."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


class DiskRefusal:
    """Remembers that a file, or the log of many, failed: from then on it refuses.

    The second error carries the first one's errno, so that whoever meets it first in another
    thread still sees why.
    """

    __slots__ = ("_failed", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: DiskFailedError | None = None

    @contextlib.contextmanager
    def around(self, action: str) -> Iterator[None]:
        """Run `action`; refuse if an earlier one failed.

        Raises:
            DiskFailedError: now, or before.
        """
        if self._failed is not None:
            message = f"{action} refused, after: {self._failed}"
            raise DiskFailedError(message, errno=self._failed.errno)
        try:
            yield
        except DiskFailedError as error:
            self._failed = error
            raise
        except OSError as error:
            self._failed = disk_failed(self._path, action, error.errno)
            raise self._failed from error


class RealDisk:
    """The operating system's files (Linux)."""

    def open_append(self, path: Path) -> AppendFile:
        """See Disk."""
        return _RealAppendFile(path, *_open_true(path, os.O_APPEND))

    def open_mark(self, path: Path) -> MarkFile:
        """See Disk."""
        fd, _ = _open_true(path, 0)
        return _RealMarkFile(path, fd)

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """See Disk."""
        with failing(path, "read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                left = max(0, os.fstat(fd).st_size - start) if size is None else size
                parts: list[bytes] = []
                while left and (part := os.pread(fd, min(left, _PART_SIZE), start)):
                    parts.append(part)
                    start += len(part)
                    left -= len(part)
            except OSError as error:
                if error.errno in _UNREADABLE:
                    why = disk_failed(path, "read", error.errno)
                    raise UnreadableFileError(path, start, str(why)) from error
                raise
            finally:
                os.close(fd)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, path: Path) -> int:
        """See Disk."""
        with failing(path, "stat"):
            return path.stat().st_size

    def exists(self, path: Path) -> bool:
        """See Disk."""
        return path.exists()

    def list_dir(self, path: Path) -> list[str]:
        """See Disk."""
        with failing(path, "list"):
            return sorted(os.listdir(path))

    def make_dir(self, path: Path) -> None:
        """See Disk."""
        if not path.is_dir():
            self.make_dir(path.parent)
            with failing(path, "mkdir"):
                path.mkdir(mode=0o750, exist_ok=True)
        # Also if it was there: an earlier process may have died between the two.
        self.sync_dir(path.parent)

    def write_atomic(self, path: Path, data: Bytes) -> None:
        """See Disk."""
        temporary = path.with_name(path.name + _TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with failing(path, "write"):
            fd = os.open(temporary, flags, 0o640)
            try:
                _write_all(fd, [data])
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        self.sync_dir(path.parent)

    def remove(self, path: Path) -> None:
        """See Disk."""
        with failing(path, "remove"):
            path.unlink()

    def link(self, path: Path, name: Path) -> None:
        """See Disk."""
        with failing(name, "link"):
            os.link(path, name)

    def sync_dir(self, path: Path) -> None:
        """See Disk."""
        with failing(path, "fsync of the directory"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """See Disk."""
        with failing(path, "statvfs"):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def boot_id(self) -> bytes:
        """See Disk."""
        try:
            return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
        except (OSError, ValueError):
            return UNKNOWN_BOOT

    def lock(self, path: Path) -> FileLock:
        """See Disk."""
        with failing(path, "lock"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                holder = b"%d\n" % os.getpid()
                os.pwrite(fd, holder, 0)  # first: on a full disk a shorter file gets no block back
                os.ftruncate(fd, len(holder))
            except BlockingIOError as error:
                who = os.pread(fd, 32, 0).decode(errors="replace").split("\n")[0] or "unknown"
                os.close(fd)
                raise WrongDirectoryError(f"{path.parent} is in use by process {who}") from error
            except OSError:
                os.close(fd)
                raise
        return _RealLock(fd)


class FreshDisk(RealDisk):
    """Reads what is on the disk, not what the page cache remembers of it. For immutable files."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """See Disk."""
        with failing(path, "read"):
            _forget_cached(path, start, size)
            data = super().read(path, start, size)
            _forget_cached(path, start, size)
        return data


def _forget_cached(path: Path, start: int, size: int | None) -> None:
    """Drop clean pages: a length of 0 reaches to the end of the file.

    Whole ones: the system keeps those that are named in part.
    """
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    length = 0 if size is None else -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE - first
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, first, length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class _RealAppendFile:
    """See AppendFile."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._refusal = DiskRefusal(path)

    @property
    def size(self) -> int:
        return self._size

    def write(self, buffers: Sequence[Bytes]) -> None:
        with self._refusal.around("write"):
            self._size += _write_all(self._fd, buffers)

    def sync(self) -> None:
        with self._refusal.around("fdatasync"):
            os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        assert 0 <= size <= self._size, (size, self._size)
        with self._refusal.around("truncate"):
            os.ftruncate(self._fd, size)
            self._size = size

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _RealMarkFile:
    """See MarkFile."""

    def __init__(self, path: Path, fd: int) -> None:
        self._fd = fd
        self._refusal = DiskRefusal(path)

    def put(self, data: bytes) -> None:
        assert len(data) <= MARK_SIZE_MAX, len(data)
        with self._refusal.around("write"):
            written = os.pwrite(self._fd, data, 0)
            if written != len(data):
                raise OSError(errno.EIO, f"wrote {written} of {len(data)} bytes")

    def sync(self) -> None:
        with self._refusal.around("fdatasync"):
            os.fdatasync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _RealLock:
    """A flock: the system ends it with the process, however that dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_true(path: Path, flags: int) -> tuple[int, int]:
    """Open or create for writing, reads showing what is on the disk; return (fd, size).

    A failed fsync of an earlier process leaves pages that are in memory, not on the disk, and no
    longer dirty: reading them back would be reading a wish. So what is dirty is written, and
    what is clean is dropped.
    """
    with failing(path, "open"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o640)
        try:
            size = os.fstat(fd).st_size
            if size:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            os.close(fd)
            raise
    return fd, size


def _write_all(fd: int, buffers: Sequence[Bytes]) -> int:
    """Write every byte at the file's position; return how many."""
    total = 0
    for start in range(0, len(buffers), _IOV_MAX):
        group = list(buffers[start : start + _IOV_MAX])
        wanted = sum(map(len, group))
        written = os.writev(fd, group)
        while written < wanted:
            # Short write: a signal, or the disk is nearly full. The next one says which.
            group = _without_prefix(group, written)
            total += written
            wanted -= written
            written = os.writev(fd, group)
        total += written
    return total


def _without_prefix(group: list[Bytes], size: int) -> list[Bytes]:
    """Return the buffers less their first `size` bytes."""
    for number, buffer in enumerate(group):
        if size < len(buffer):
            return [memoryview(buffer)[size:], *group[number + 1 :]]
        size -= len(buffer)
    return []
