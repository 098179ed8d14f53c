"""The file interface: every operation of the log, promise, data directory and runs on a disk.

It has two implementations: `RealDisk` here, and the simulator's, which loses, tears and damages
bytes as a real disk may. The same code runs with both. It may rely on these rules only:

    written     survives a crash of the process, not of the machine
    synced      survives both. `sync` syncs the bytes of an AppendFile or MarkFile; `sync_dir` syncs
                names (created, renamed, removed); `write_atomic` and `make_dir` sync both
    torn        after a crash of the machine, any part of the unsynced bytes may be on the disk, in
                any order, in pages of 512 bytes; the rest reads as zeros or is missing
    failed      after a failed write or sync, the bytes on the disk are unknown. The file refuses
                all operations except `close`, and the process stops. The next process opens the
                file for writing, which drops bytes that only the page cache has. Reads then return
                the bytes on the disk

Any thread may call a Disk. A file belongs to one thread at a time.
"""

import contextlib
import errno
import functools
import logging
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from timer.model.timer_errors import DiskFailedError, UnreadableFileError, WrongDirectoryError

logger = logging.getLogger(__name__)

Bytes: TypeAlias = bytes | bytearray | memoryview

UNKNOWN_BOOT: Final = bytes(16)
"""The boot id of a machine that has none."""
MARK_SIZE_MAX: Final = 512
"""Bytes in a MarkFile: one sector. A disk writes a sector completely or not at all."""
OWNER_FILE: Final = "identity.json"
"""The file of a data directory that is never absent. Its owner is the node's user."""
TEMPORARY: Final = ".tmp"
"""End of the name under which `write_atomic` writes a file. A crash may leave it."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PART_SIZE: Final = 64 << 20
"""Bytes per read. A requested size may be a damaged number, so it is not allocated at once."""
_IOV_MAX: Final = 1024
_UNREADABLE: Final = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""Errors of a read at a bad sector, or of a block whose checksum the file system finds wrong."""


class AppendFile(Protocol):
    """A file open for writing at its end."""

    @property
    def size(self) -> int:
        """Bytes in the file, synced or not."""

    def write(self, buffers: Sequence[Bytes]) -> None:
        """Append all of the buffers.

        Raises:
            DiskFailedError: some bytes may be written. The file refuses all but `close`.
        """

    def sync(self) -> None:
        """Make all earlier writes and truncations survive a crash of the machine.

        Raises:
            DiskFailedError: the durable bytes are unknown. The file refuses all but `close`.
        """

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, at most its present size. Durable after `sync`.

        Raises:
            DiskFailedError: the file refuses all but `close`.
        """

    def close(self) -> None:
        """Close the file without a sync. A second close does nothing."""


class MarkFile(Protocol):
    """At most 512 bytes, overwritten in place. Cheap; after a crash the old or the new content."""

    def put(self, data: bytes) -> None:
        """Replace the content. `data` always has the same length.

        Raises:
            DiskFailedError: the file refuses all but `close`.
        """

    def sync(self) -> None:
        """Make the last `put` survive a crash of the machine.

        Raises:
            DiskFailedError: the file refuses all but `close`.
        """

    def close(self) -> None:
        """Close the file without a sync. A second close does nothing."""


class FileLock(Protocol):
    """A lock that ends with `release` or with its process."""

    def release(self) -> None:
        """Release the lock. A second release does nothing."""


class Disk(Protocol):
    """Every operation raises DiskFailedError if it fails, FileNotFoundError if stated."""

    def open_append(self, path: Path) -> AppendFile:
        """Open for appending. Create an absent file; its name is durable after `sync_dir`."""

    def open_mark(self, path: Path) -> MarkFile:
        """Open for overwriting. Create an absent file; its name is durable after `sync_dir`."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes [start, start + size) of a file, up to its end. `size` None: to the end.

        Raises:
            FileNotFoundError: there is no such file.
            UnreadableFileError: the disk can't return bytes that were written.
        """

    def read_parts(self, path: Path, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return several parts (start, size) of a file, as `read` does. It is opened once.

        Raises:
            FileNotFoundError, UnreadableFileError: as `read`.
        """
        return [self.read(path, start, size) for start, size in parts]

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
        """Create the directory and its parents durably, if missing."""

    def write_atomic(self, path: Path, data: Bytes) -> None:
        """Replace the file by `data`, durably. A crash leaves the old or the new content."""

    def remove(self, path: Path) -> None:
        """Remove a file. Durable after `sync_dir`.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def link(self, path: Path, name: Path) -> None:
        """Add a second name, which must be free, to the file at `path`. Durable after `sync_dir`.

        Both names are the same file. It exists until both are removed.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def sync_dir(self, path: Path) -> None:
        """Make the names in this directory survive a crash of the machine."""

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes may still be written to the disk of `path`."""

    def boot_id(self) -> bytes:
        """Return 16 bytes that identify the machine's present run, from boot to boot.

        Zeros: unknown. Bytes written under the same boot id are still in memory or on the disk.
        """

    def lock(self, path: Path) -> FileLock:
        """Lock the file `path`, created if absent, without waiting.

        On a read-only file system the file has the pid of an earlier holder.

        Raises:
            WrongDirectoryError: another process has the lock. The message has its pid.
        """


@contextlib.contextmanager
def converting_os_errors(path: Path, action: str) -> Iterator[None]:
    """Raise OSErrors of the block as DiskFailedError, with the errno and its name."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_failed(path, action, error.errno) from error


def disk_failed(path: Path, action: str, number: int | None) -> DiskFailedError:
    """Return the error for an action that failed on a path, with the reason."""
    name, meaning = "?", "unknown reason"
    if number is not None:
        name, meaning = errno.errorcode.get(number, str(number)), os.strerror(number)
    if number == errno.EACCES:
        meaning += "; if root made it or its directory, chown that to the node's user"
    return DiskFailedError(f"{path}: {action} failed: {name} ({meaning})", errno=number)


def is_full(error: BaseException | None) -> bool:
    """Return whether a write failed because a disk, or a quota, is full."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


class DiskRefusal:
    """Remembers that a file, or one of several, failed, and refuses all later actions.

    The later errors carry the errno of the first one, so that another thread that only sees a later
    one knows the reason.
    """

    __slots__ = ("_failed", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: DiskFailedError | None = None

    @contextlib.contextmanager
    def guard(self, action: str) -> Iterator[None]:
        """Run `action`. Refuse it if an earlier one failed.

        Raises:
            DiskFailedError: this action failed, or an earlier one.
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
        with converting_os_errors(path, "read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                left = max(0, os.fstat(fd).st_size - start) if size is None else size
                return _read_part(path, fd, start, left)
            finally:
                os.close(fd)

    def read_parts(self, path: Path, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        """See Disk. The open takes more time than the read of a small part."""
        with converting_os_errors(path, "read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return [_read_part(path, fd, start, size) for start, size in parts]
            finally:
                os.close(fd)

    def size(self, path: Path) -> int:
        """See Disk."""
        with converting_os_errors(path, "stat"):
            return path.stat().st_size

    def exists(self, path: Path) -> bool:
        """See Disk."""
        with converting_os_errors(path, "stat"):
            return path.exists()

    def list_dir(self, path: Path) -> list[str]:
        """See Disk."""
        with converting_os_errors(path, "list"):
            return sorted(os.listdir(path))

    def make_dir(self, path: Path) -> None:
        """See Disk."""
        is_there = path.is_dir()
        if not is_there:
            self.make_dir(path.parent)
            with converting_os_errors(path, "mkdir"):
                create_dir(path)
        try:  # even if it is there: an earlier process may have died before this sync
            self.sync_dir(path.parent)
        except DiskFailedError as error:
            if not is_there or error.errno != errno.EACCES:  # a mode as 0711: made by another user
                raise

    def write_atomic(self, path: Path, data: Bytes) -> None:
        """See Disk."""
        temporary = path.with_name(path.name + TEMPORARY)
        with converting_os_errors(path, "write"):
            temporary.unlink(missing_ok=True)  # of a process that was killed
            fd = create_file(temporary, os.O_WRONLY)
            try:
                _write_all(fd, [data])
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        self.sync_dir(path.parent)

    def remove(self, path: Path) -> None:
        """See Disk."""
        with converting_os_errors(path, "remove"):
            path.unlink()

    def link(self, path: Path, name: Path) -> None:
        """See Disk."""
        with converting_os_errors(name, "link"):
            os.link(path, name)

    def sync_dir(self, path: Path) -> None:
        """See Disk."""
        with (
            converting_os_errors(path, "fsync of the directory"),
            _opened_dir(path, os.O_RDONLY) as fd,
        ):
            os.fsync(fd)

    def free_bytes(self, path: Path) -> int:
        """See Disk."""
        with converting_os_errors(path, "statvfs"):
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
        import fcntl  # Windows has none; a fake cluster, which imports this module, locks no file

        with converting_os_errors(path, "lock"):
            fd, is_writable = _open_lock(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                holder = b"%d\n" % os.getpid()
                if is_writable:
                    os.pwrite(fd, holder, 0)  # before truncating: a full disk may refuse a block
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
    """Reads the disk, never the page cache. For immutable files."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """See Disk."""
        with converting_os_errors(path, "read"):
            _forget_cached(path, start, size)
            data = super().read(path, start, size)
            _forget_cached(path, start, size)
        return data

    def read_parts(self, path: Path, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        """See Disk."""
        return [self.read(path, start, size) for start, size in parts]


def _read_part(path: Path, fd: int, start: int, size: int) -> bytes:
    """Return bytes [start, start + size) of an open file, up to its end."""
    parts: list[bytes] = []
    try:
        while size and (part := os.pread(fd, min(size, _PART_SIZE), start)):
            parts.append(part)
            start += len(part)
            size -= len(part)
    except OSError as error:
        if error.errno in _UNREADABLE:
            why = disk_failed(path, "read", error.errno)
            raise UnreadableFileError(path, start, str(why)) from error
        raise
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _forget_cached(path: Path, start: int, size: int | None) -> None:
    """Drop clean pages from the page cache. `size` None: to the end of the file.

    The range is extended to whole pages, because the system keeps pages that are named in part.
    """
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    length = 0 if size is None else -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE - first
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, first, length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class _Descriptor:
    """An open file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _WrittenFile(_Descriptor):
    """A file that is written and synced."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(fd)
        self._refusal = DiskRefusal(path)

    def sync(self) -> None:
        with self._refusal.guard("fdatasync"):
            os.fdatasync(self._fd)


class _RealAppendFile(_WrittenFile):
    """See AppendFile."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        super().__init__(path, fd)
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def write(self, buffers: Sequence[Bytes]) -> None:
        with self._refusal.guard("write"):
            self._size += _write_all(self._fd, buffers)

    def truncate(self, size: int) -> None:
        assert 0 <= size <= self._size, (size, self._size)
        with self._refusal.guard("truncate"):
            os.ftruncate(self._fd, size)
            self._size = size


class _RealMarkFile(_WrittenFile):
    """See MarkFile."""

    def put(self, data: bytes) -> None:
        assert len(data) <= MARK_SIZE_MAX, len(data)
        with self._refusal.guard("write"):
            written = os.pwrite(self._fd, data, 0)
            if written != len(data):
                raise OSError(errno.EIO, f"wrote {written} of {len(data)} bytes")


class _RealLock(_Descriptor):
    """A flock. The system releases it when the process ends in any way."""

    release = _Descriptor.close


def create_file(path: Path, flags: int) -> int:
    """Create a file for the owner of its directory. Return a descriptor, opened with the flags.

    Raises:
        FileExistsError: there is such a name; a link to a file is not followed.
        OSError: the file can't be created.
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _opened_parent(path) as (directory, owner):
        fd = os.open(path.name, flags, 0o640, dir_fd=directory)
        _give_ownership(path, fd, owner)
    return fd


def open_file(path: Path, flags: int) -> int:
    """Open a file. Return its descriptor. A link is not followed, and a FIFO has no wait.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it can't be opened; ELOOP: it is a link; ENXIO: a FIFO that no process reads.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def create_dir(path: Path) -> None:
    """Create a directory for the owner of the one around it. An existing one stays as it is.

    Raises:
        OSError: the directory can't be created.
    """
    with _opened_parent(path) as (directory, owner):
        try:
            os.mkdir(path.name, 0o750, dir_fd=directory)
        except FileExistsError:
            if not path.is_dir():
                raise
            return
        with _opened_dir(path.name, os.O_RDONLY | os.O_NOFOLLOW, directory) as fd:
            if not os.listdir(fd):  # another one, with files, may have taken its name
                _give_ownership(path, fd, owner)


@contextlib.contextmanager
def _opened_dir(path: Path | str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    """Open a directory during the block; relative to the directory `dir_fd` if that is given."""
    fd = os.open(path, flags | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened_parent(path: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """Open the directory of a path during the block: (descriptor, owner). OSErrors get the path."""
    with _opened_dir(path.parent, os.O_PATH) as directory:
        try:
            yield directory, owner_of(directory)
        except OSError as error:
            error.filename = str(path)
            raise


def owner_of(directory: int) -> tuple[int, int]:
    """Return the user and the group of the files of an open directory.

    A volume may be root's, with a group that may write. If it is the data directory itself, files
    there belong to the owner of its identity, which any user can make if all may write.
    """
    found = os.fstat(directory)
    if found.st_uid == 0 and not found.st_mode & stat.S_IWOTH:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(OWNER_FILE, dir_fd=directory, follow_symlinks=False)
    return found.st_uid, found.st_gid


def _give_ownership(path: Path, fd: int, owner: tuple[int, int]) -> None:
    """Give a file or directory that root has just created to a user, so the node can open it."""
    if os.geteuid() == 0 and owner[0] != 0:
        try:
            os.chown(fd, *owner)
        except OSError as error:
            _warn(path.parent, *owner, os.strerror(error.errno or 0))


@functools.cache
def _warn(directory: Path, user: int, group: int, reason: str) -> None:
    """Log once that new files in a directory stay root's."""
    why = f"{reason}: CAP_CHOWN is missing, or the file system does not allow it"
    text = "%s: all that root creates there stays root's (%s). Run on it: chown %d:%d"
    logger.warning(text, directory, why, user, group)


def _open_or_create(path: Path, flags: int) -> int:
    """Return a descriptor of the file; an absent one is created. See `open_file`."""
    try:
        return open_file(path, flags)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process has just created it
            return create_file(path, flags)
    return open_file(path, flags)


def _open_lock(path: Path) -> tuple[int, bool]:
    """Open or create a lock file. Return (fd, whether it can be written).

    With a second name it may be any file of the system, so it is locked and not written.
    """
    try:
        fd = _open_or_create(path, os.O_RDWR)
        return fd, os.fstat(fd).st_nlink == 1
    except OSError as error:
        if error.errno != errno.EROFS or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _open_true(path: Path, flags: int) -> tuple[int, int]:
    """Open or create for writing, so that reads return the bytes on the disk. Return (fd, size).

    After a failed fsync of an earlier process, pages may be in memory, not on the disk, and no
    longer dirty. Reads would return bytes that are not durable. So dirty pages are written, and
    clean ones are dropped.
    """
    with converting_os_errors(path, "open"):
        fd = _open_or_create(path, os.O_WRONLY | flags)
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
    """Write all bytes at the file's position. Return their number."""
    total = 0
    for start in range(0, len(buffers), _IOV_MAX):
        group = list(buffers[start : start + _IOV_MAX])
        wanted = sum(map(len, group))
        written = os.writev(fd, group)
        while written < wanted:
            # Short write: a signal, or a nearly full disk. The next write shows which.
            group = _without_prefix(group, written)
            total += written
            wanted -= written
            written = os.writev(fd, group)
        total += written
    return total


def _without_prefix(group: list[Bytes], size: int) -> list[Bytes]:
    """Return the buffers without their first `size` bytes."""
    for number, buffer in enumerate(group):
        if size < len(buffer):
            return [memoryview(buffer)[size:], *group[number + 1 :]]
        size -= len(buffer)
    return []
