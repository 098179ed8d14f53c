"""`timerctl verify --data DIR`: reads every file of a stopped node and checks every checksum.

It writes only its pid, into LOCK, so that no node starts meanwhile; on a read-only disk, nothing.
Without `--data` the nodes of a running cluster read their files themselves
(cluster/files/scrubber.py).
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.control import raft_files
from replication.core.promise import PromiseFile
from timer.files.data_directory import IDENTITY_NAME, LOCK_NAME, check_formatted, read_identity
from timer.files.disk import Disk, RealDisk
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    EngineError,
    PromiseLostError,
    UnknownVersionError,
    UnopenedFileError,
)
from timer.model.units import Epoch
from timer.recovery import manifest, scrub
from timer.recovery.scrub import FileCheck
from timer.recovery.snapshot import SnapshotPart, crc32_of
from timer.recovery.snapshot_receiver import snapshot_to_install

DAMAGED = 1
"""Exit code: a file is damaged."""
UNCHECKED = 3
"""Exit code: the directory can't be checked."""


def verify(disk: Disk, data: Path) -> Iterator[FileCheck]:
    """Yield every file of a stopped node's data directory, checked.

    A file or directory that can't be opened is damage (UnopenedFileError). It ends a start, too.

    Raises:
        WrongDirectoryError: it is not a data directory, or a process has locked it.
        DiskFailedError: the lock can't be opened, or is absent on a read-only disk.
    """
    check_formatted(disk, data)
    lock = disk.lock(data / LOCK_NAME)
    try:
        yield _check_file(disk, data / IDENTITY_NAME, lambda: read_identity(disk, data))
        state, log, incoming = data / "state", data / "log", data / "incoming"
        # The next start replaces the state, and a damaged log.
        is_ordered = disk.exists(incoming / "ready")
        for path in (state, data / "raft", *([log] if is_ordered else [])):
            yield from _unopened_directory(disk, path)
        promise, epoch = data / "promise", Epoch(0) if is_ordered else scrub.last_epoch(disk, log)
        found = _check_file(
            disk, promise, lambda: PromiseFile.load(disk, promise, last_epoch=epoch)
        )
        yield found
        for path, check in raft_files.checks(data).items():
            yield _check_file(disk, path, check)
        if is_ordered:
            yield from _install_order_files(disk, incoming)
        else:
            is_used = found.damage is None and PromiseFile.load(disk, promise).is_given
            yield from scrub.verify(disk, state=state, log=log, is_used=is_used)
        noted = data / "damaged"
        if disk.exists(noted):
            yield _check_file(disk, noted, lambda: raise_noted_damage(disk, noted))
    finally:
        lock.release()


def _unopened_directory(disk: Disk, path: Path) -> Iterator[FileCheck]:
    """Yield a directory that exists and can't be opened."""
    try:
        if disk.exists(path):
            disk.list_dir(path)
    except DiskFailedError as error:
        yield FileCheck(path, 0, UnopenedFileError(path, error))


def raise_noted_damage(disk: Disk, path: Path) -> None:
    """Raise the damage that the node has noted in the file `path`, as a CorruptFileError."""
    why = f"noted by the node: {disk.read(path).decode(errors='replace')}"
    raise CorruptFileError(path, 0, why)


def _install_order_files(disk: Disk, incoming: Path) -> Iterator[FileCheck]:
    """Yield the order to install a snapshot, and the snapshot's files."""
    order = incoming / "ready"
    found = _check_file(disk, order, lambda: snapshot_to_install(disk, incoming))
    yield found
    if found.damage is not None or (snapshot := snapshot_to_install(disk, incoming)) is None:
        return
    for part in snapshot[0].parts:
        path = incoming / part.path
        yield _check_file(disk, path, functools.partial(_check_part, disk, path, part))


def _check_part(disk: Disk, path: Path, part: SnapshotPart) -> None:
    if not disk.exists(path):
        raise CorruptFileError(path, 0, "the file is missing")
    if (disk.size(path), crc32_of(disk, path)) != (part.size, part.crc32):
        raise CorruptFileError(path, 0, "size or checksum differs from the install order")


def _check_file(disk: Disk, path: Path, check: Callable[[], object]) -> FileCheck:
    try:
        check()
        return FileCheck(path, disk.size(path), None)
    except (CorruptFileError, UnknownVersionError) as error:
        return FileCheck(path, 0, error)
    except PromiseLostError as error:
        return FileCheck(path, 0, CorruptFileError(path, 0, str(error)))
    except (DiskFailedError, OSError) as error:
        return FileCheck(path, 0, UnopenedFileError(path, error))


def run(args: argparse.Namespace) -> int:
    """Run `timerctl verify --data`; return its exit code."""
    try:
        found = list(verify(RealDisk(), args.data))
    except EngineError as error:
        print(f"timerctl: {error}", file=sys.stderr)  # noqa: T201
        return UNCHECKED
    damaged = [each for each in found if each.damage is not None]
    size = sum(each.size for each in found)
    if args.output == "json":
        lines: list[dict[str, Any]] = [_line(each) for each in damaged]
        print(json.dumps({"files": len(found), "bytes": size, "damaged": lines}, indent=2))  # noqa: T201
    else:
        for each in damaged:
            print(each.damage)  # noqa: T201
        print(f"{len(found)} files, {size} bytes: {len(damaged) or 'none'} damaged")  # noqa: T201
        if manifest.NAME not in {each.path.name for each in found}:
            print("There is no manifest: the next start applies the log from entry 1.")  # noqa: T201
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    return DAMAGED if damaged else 0


def _line(each: FileCheck) -> dict[str, Any]:
    position = each.damage.position if isinstance(each.damage, CorruptFileError) else 0
    return {"file": str(each.path), "byte": position, "what": str(each.damage)}
