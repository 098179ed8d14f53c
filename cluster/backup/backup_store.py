"""The store of backups: a local directory or an object store, through pyarrow.fs.

A local file is written under another name, synced and renamed. An object of an object store appears
when its stream is closed. pyarrow can't abort a stream: after an error, the object has the bytes so
far until it is deleted. Readers therefore compare sizes and checksums.
"""

import copy
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from cluster.backup.store_calls import Interruptible, interruptible
from timer.files.disk import create_dir, create_file
from timerclient.values.errors import TimerError, Unavailable

READ_SIZE: Final = 4 << 20
"""Bytes of one read from the store."""
DELETIONS: Final = 8
"""Files that are deleted at the same time."""
RETRY_S: Final = 60
"""Time in which Google Cloud Storage is called again; its library's default is 15 minutes."""
INCOMPLETE_AGE_S: Final = 3600.0
"""Age in seconds from which an incomplete file has no writer: a writer takes minutes at most."""
_REQUEST_ID: Final = re.compile(r" *\([^()]*Request ID:[^()]*\)")
"""In messages of S3, another one each time."""
_TEMPORARY: Final = ".tmp"


class BackupError(TimerError):
    """A backup or a restore failed. The message has the cause."""


class WrongStore(BackupError):
    """The store is that of another cluster."""


class StoreUnavailable(Unavailable):
    """The store does not answer, or rejects the access."""

    def __init__(self, message: str, cause: str = "") -> None:
        """`cause`: the reason without the names of a file and a request. Empty: the message."""
        super().__init__(message)
        self.cause = cause or message


class BackupStore:
    """Files under one root, by their path there, such as "parts/x". Threads may share it."""

    def __init__(self, root: str) -> None:
        """Open a store. None of its files is read or written.

        `root`: a directory, or a URI such as s3://bucket/prefix?region=eu-west-1 or file:///backup.

        Raises:
            BackupError: the URI is wrong, it names a file or a link to nothing, or pyarrow has no
                such file system.
        """
        from pyarrow import ArrowInvalid, fs

        self.root: Final = root
        self._stopped: Callable[[], bool] = lambda: False
        self._fs_module: Any = fs
        found: Any
        try:
            if "://" in root:
                found, self._base = interruptible(fs.FileSystem.from_uri, with_retry_time(root))
            else:
                found, self._base = fs.LocalFileSystem(), str(Path(root).absolute())
        except (ArrowInvalid, NotImplementedError) as error:
            raise BackupError(f"{root!r} is no directory and no URI of a store: {error}") from None
        except OSError as error:
            raise StoreUnavailable(f"{root}: {error}") from None
        self._is_local = isinstance(found, fs.LocalFileSystem)
        self._fs = self._interruptible(found)
        if not self._base.strip("/") and not self._is_local:
            raise BackupError(f"{root!r} names no bucket: s3://BUCKET/PREFIX")
        if self._is_local and Path(self._base).is_file():
            raise BackupError(f"{root} is a file: give a directory")
        if self._is_local:
            check_link(Path(self._base))

    def interruptible_by(self, stopped: Callable[[], bool]) -> "BackupStore":
        """Return the same store, whose calls raise BackupError once `stopped` returns True."""
        found = copy.copy(self)
        found._stopped = stopped  # noqa: SLF001 -- a copy of this store
        return found

    def _interruptible(self, opened: Any) -> Any:
        """Return a file system or a stream. Calls of a local one are short."""
        return opened if self._is_local else Interruptible(opened)

    def _call(self, work: Callable[[], None]) -> None:
        """Do some work, as one call of the store."""
        if self._is_local:
            work()
        else:
            interruptible(work)

    def _path(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}"

    @contextmanager
    def _converting_errors(self, name: str) -> Iterator[None]:
        """Convert errors of the file system.

        Raises:
            BackupError: the file is missing; or see `interruptible_by`.
            StoreUnavailable: any other error.
        """
        if self._stopped():
            raise BackupError(f"{self.root}: {name}: stopped; the next run continues")
        try:
            yield
        except FileNotFoundError:
            raise BackupError(f"{self.root}: {name} is missing") from None
        except OSError as error:
            text = _REQUEST_ID.sub("", str(error).replace(name, ""))
            cause = os.strerror(error.errno) if error.errno else text
            raise StoreUnavailable(f"{self.root}: {name}: {error}", cause) from None

    def check_exists(self) -> None:
        """Check that the root exists, as a directory or as the prefix of an object.

        Raises:
            BackupError: it does not.
            StoreUnavailable: it can't be looked up.
        """
        with self._converting_errors("its root"):
            found = self._fs.get_file_info(self._base.rstrip("/") or "/")
        if found.type != self._fs_module.FileType.Directory:
            self.check_bucket()
            raise BackupError(f"{self.root}: there is no such folder; no backup was taken into it")

    def directory_id(self) -> tuple[int, int]:
        """Return a directory's device and inode; another disk has others. Zeros: there is none.

        Raises:
            StoreUnavailable: it can't be looked up.
        """
        with self._converting_errors("its root"), suppress(FileNotFoundError):
            if self._is_local:
                found = os.stat(self._base)
                return found.st_dev, found.st_ino
        return 0, 0

    def check_bucket(self) -> None:
        """Check that the bucket of an object store exists, if the access allows to look it up.

        Raises:
            BackupError: it does not.
        """
        bucket = self._base.partition("/")[0]
        with suppress(OSError):
            found = None if self._is_local else self._fs.get_file_info(bucket)
            if found is not None and found.type == self._fs_module.FileType.NotFound:
                raise BackupError(f"{self.root}: there is no bucket {bucket!r}")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return path -> bytes of the complete files in a folder and below. Absent: none.

        Raises:
            StoreUnavailable: the folder can't be listed.
        """
        path = self._path(folder)
        selector = self._fs_module.FileSelector(path, allow_not_found=True, recursive=True)
        with self._converting_errors(folder):
            found = self._fs.get_file_info(selector)
        is_file = self._fs_module.FileType.File
        return {
            f"{folder}/{info.path[len(path) :].strip('/')}": info.size
            for info in found
            if info.type == is_file and not info.path.endswith(_TEMPORARY)
        }

    @contextmanager
    def open_writer(self, name: str) -> Iterator[Any]:
        """Give a binary stream to write a file. It is complete and durable at the end, or absent.

        In a directory, the file of an earlier writer of the name stays after an error; if the last
        sync of the folder fails, it has the new bytes. In an object store, a writer that fails
        deletes it. So writers that may run at the same time need different names.

        Raises:
            StoreUnavailable: it can't be written.
        """
        path = self._path(name)
        # A name of its own: two backups may write the same part at the same time.
        own = f".{secrets.token_hex(8)}{_TEMPORARY}"
        there = path + own if self._is_local else path
        opened = list[Any]()

        def begin() -> None:
            if self._is_local:
                opened.append(os.fdopen(create_file(Path(there), os.O_WRONLY), "wb"))
            else:
                opened.append(self._fs.open_output_stream(there, compression=None))

        def abandon() -> None:
            for each in opened:
                with suppress(OSError):
                    each.close()
            with suppress(OSError):  # the end of the stream has made an object of its part
                self._fs.delete_file(there)

        with self._converting_errors(name):
            if self._is_local:
                _make_folder(Path(path).parent)
            try:
                self._call(begin)  # a signal may end the wait: the thread still has the stream
                out = self._interruptible(opened[0])
                yield out
                if self._is_local:  # the name may be another file's by now
                    out.flush()
                    os.fsync(out.fileno())
                out.close()
                if self._is_local:
                    is_new = not Path(path).exists()
                    self._fs.move(there, path)
                    there = path if is_new else there
                    _sync(path.rpartition("/")[0])
            except BaseException:
                with suppress(OSError):
                    self._call(abandon)
                raise

    def put(self, name: str, data: Iterable[bytes], size: int) -> None:
        """Write a file of `size` bytes. It is complete and durable on return, or absent.

        Raises:
            StoreUnavailable: it can't be written, or has another size afterwards.
        """
        with self.open_writer(name) as out:
            for each in data:
                out.write(each)
        with self._converting_errors(name):
            written = self._fs.get_file_info(self._path(name)).size
        if written != size:
            raise StoreUnavailable(f"{self.root}: {name}: {written} of {size} bytes were written")

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file, in pieces.

        Raises:
            BackupError: the file is missing.
            StoreUnavailable: it can't be read.
        """
        with self._converting_errors(name):
            opened = self._fs.open_input_stream(self._path(name), compression=None)
            source = self._interruptible(opened)
            try:
                while piece := source.read(READ_SIZE):
                    yield piece
            finally:
                with suppress(OSError):
                    source.close()

    def delete_incomplete(self, folder: str) -> None:
        """Delete incomplete files in a folder and below, whose writers were killed an hour ago.

        Raises:
            StoreUnavailable: a file can't be deleted.
        """
        with self._converting_errors(folder):
            rests = [*Path(self._path(folder)).rglob(f"*{_TEMPORARY}")] if self._is_local else []
            for each in rests:
                with suppress(FileNotFoundError):  # its writer has just ended
                    if time.time() - each.stat().st_mtime >= INCOMPLETE_AGE_S:
                        each.unlink()

    def delete(self, name: str) -> None:
        """Delete a file. Absent: do nothing.

        Raises:
            StoreUnavailable: it can't be deleted.
        """
        with self._converting_errors(name), suppress(FileNotFoundError):
            self._fs.delete_file(self._path(name))

    def delete_all(self, names: Collection[str]) -> None:
        """Delete files, several at a time; see `delete`.

        Raises:
            StoreUnavailable: one can't be deleted. Some of the others are.
        """

        interruptible(_each, self.delete, names)

    def discard(self, groups: Sequence[Collection[str]], left: set[str]) -> None:
        """Delete files, a group after the other, and remove their names from `left`.

        The last group is the one with a file that can't be deleted. If a handler of a signal
        raises, the deletions go on.
        """

        def discard(name: str) -> None:
            with suppress(StoreUnavailable):
                self.delete(name)
                left.remove(name)

        def discard_all() -> None:
            for names in groups:
                _each(discard, names)
                if not left.isdisjoint(names):
                    return

        with suppress(InterruptedError):
            interruptible(discard_all)


def _each(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Do the work for each name, several at a time. An error cancels the rest."""
    with ThreadPoolExecutor(DELETIONS) as pool:
        for _ in pool.map(work, names):
            pass


def with_retry_time(uri: str) -> str:
    """Return a URI whose file system repeats its calls for RETRY_S, if it names no other time.

    S3 has a bound of its own, of about 100 seconds.
    """
    if not uri.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds={RETRY_S}"


def check_link(path: Path) -> None:
    """Check that a directory, which may be absent, is not a link to nothing.

    Raises:
        BackupError: it is.
    """
    if path.is_symlink() and not path.exists():
        raise BackupError(f"{path} is a link to {path.readlink()}, which is missing")


def _make_folder(path: Path) -> None:
    """Make a directory and its missing parents, durably; existing ones keep their modes."""
    if not path.is_dir():
        _make_folder(path.parent)
        create_dir(path)
        _sync(str(path.parent))


def _sync(path: str) -> None:
    """Make the names in a local directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
