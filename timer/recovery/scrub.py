"""Reads all files of a node's state and log, and checks all checksums: unread files rot, too.

    file                              check
    manifest                          its own checksum; it exists if the log does not begin at 1
    run, key file                     batch by batch, page by page; the whole against the manifest
    spill file                        block by block, the blocks that the manifest needs
    segment                           frame by frame; each ends where the next begins; the first
                                      begins at the manifest's end or before; if the node is
                                      stopped, the last reaches the durable index and the manifest
    `durable`                         its own checksum; it exists if the log has entries

Nothing is written, so a scrub may run in a thread beside a node's work. After each step it calls
`pace` with the number of bytes read. `pace` may sleep, or raise to end the scrub. The node replaces
and removes files meanwhile. So damage counts only if the file is still in use and is damaged at a
second read.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from timer.entries.entry_frame import Damage
from timer.files import segment
from timer.files.disk import Disk
from timer.files.log import MARK_NAME, missing_segments_error, read_mark
from timer.files.segment import Header
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    FileDamage,
    UnknownVersionError,
    UnopenedFileError,
)
from timer.model.units import Epoch, LogIndex
from timer.pending.runs.key_file import KeyFile
from timer.pending.runs.run import Run, RunMeta
from timer.pending.runs.run_writer import Pace, unpaced
from timer.ready.page_cache import SpillRef
from timer.ready.spill import check_spill, read_page
from timer.recovery import manifest

READ_SIZE: Final = 1 << 20
FRAME_COST: Final = 512
"""Least cost of a frame in bytes: small frames cost time."""

Check = Callable[[Pace], int]
"""Reads one file and returns its size. Raises CorruptFileError or UnknownVersionError."""


class FileCheck(NamedTuple):
    """The result for one file."""

    path: Path
    size: int
    """Bytes. 0: unknown."""
    damage: FileDamage | None


def scrub(disk: Disk, *, state: Path, log: Path, pace: Pace = unpaced) -> Iterator[FileCheck]:
    """Yield every file of a running node's state, and the sealed segments of its log.

    Damage is confirmed by a second read. Files that were removed meanwhile are left out.
    """
    for path, check in _checks(disk, state, log, sealed_only=True).items():
        found = _check_file(path, check, pace)
        if found.damage is not None:
            present = _checks(disk, state, log, sealed_only=True)
            if path not in present:
                continue
            found = _check_file(path, present[path], pace)
        yield found


def extent(disk: Disk, *, state: Path, log: Path) -> tuple[int, int]:
    """Return the number of files that a scrub would read now, and their bytes."""
    paths = _checks(disk, state, log, sealed_only=True)
    size = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or damage
            size += disk.size(path)
    return len(paths), size


def verify(disk: Disk, *, state: Path, log: Path, is_used: bool = False) -> Iterator[FileCheck]:
    """Yield every file of a stopped node's state and log. `is_used`: see `Log.open`.

    A file or directory that can't be opened is damage (UnopenedFileError).
    """
    for path, check in _checks(disk, state, log, sealed_only=False, is_used=is_used).items():
        try:
            yield _check_file(path, check, unpaced)
        except (DiskFailedError, OSError) as error:
            yield FileCheck(path, 0, UnopenedFileError(path, error))


def _checks(
    disk: Disk, state: Path, log: Path, *, sealed_only: bool, is_used: bool = False
) -> dict[Path, Check]:
    """Return the checks of the files that are in use now."""
    # Listed before the manifest is read: segments after it are never dropped.
    checks: dict[Path, Check] = {}
    applied, paths, is_listed = LogIndex(0), list[Path](), True
    try:
        paths = segment.paths(disk, log) if disk.exists(log) else []
    except DiskFailedError:
        checks[log] = lambda _: len(segment.paths(disk, log))
        is_listed = False
    try:
        body = manifest.read(disk, state)
        mine = _state_checks(disk, state, body) if body is not None else {}
    except (CorruptFileError, UnknownVersionError, DiskFailedError):
        checks[state / manifest.NAME] = lambda _: _check_manifest(disk, state)
    else:
        applied = LogIndex(body["index"] if body is not None else 0)
        first = segment.first_of(paths[0].name) if paths else None
        if first is not None and first > applied + 1:
            missing = paths[0] if body is not None else state / manifest.NAME
            why = f"the log begins with entry {first}; entry {applied + 1} is missing"
            checks[missing] = lambda _: _raise(CorruptFileError(missing, 0, why))
        checks |= mine
    end: dict[Path, Check] = {}
    if is_listed and not sealed_only:
        end = _end_checks(disk, log, paths, applied, is_used=is_used)
    sealed = {
        path: _sealed_check(disk, path, after, runs=sealed_only)
        for path, after in itertools.pairwise(paths)
    }
    for path, check in (sealed | end).items():
        checks.setdefault(path, check)
    return checks


def _raise(damage: CorruptFileError) -> int:
    raise damage


def _check_file(path: Path, check: Check, pace: Pace) -> FileCheck:
    try:
        return FileCheck(path, check(pace), None)
    except FileNotFoundError:
        return FileCheck(path, 0, CorruptFileError(path, 0, "it is missing"))
    except (CorruptFileError, UnknownVersionError) as error:
        return FileCheck(path, 0, error)


# ---- state


def _state_checks(disk: Disk, state: Path, body: manifest.ManifestBody) -> dict[Path, Check]:
    """Return the checks of the manifest and of the files that it needs."""
    checks: dict[Path, Check] = {state / manifest.NAME: lambda _: _check_manifest(disk, state)}
    for fields in body["runs"]:
        checks |= _run_checks(disk, state / manifest.RUN_DIRECTORY, RunMeta.unpack(fields))
    blocks = [block for topic in body["topics"] for block in topic["blocks"]]
    refs: dict[str, list[SpillRef]] = {}
    for block in blocks:
        refs.setdefault(block[0], []).append(SpillRef(*block[:3]))
    for name, mine in refs.items():
        checks |= _spill_check(disk, state / manifest.SPILL_DIRECTORY / name, mine)
    return checks


def _check_manifest(disk: Disk, state: Path) -> int:
    body = manifest.read(disk, state)
    if body is not None:
        for fields in body["runs"]:
            RunMeta.unpack(fields)
    return disk.size(state / manifest.NAME)


def _run_checks(disk: Disk, directory: Path, meta: RunMeta) -> dict[Path, Check]:
    def check_run(pace: Pace) -> int:
        Run(disk, directory, meta).check(pace)
        return meta.size

    def check_keys(pace: Pace) -> int:
        KeyFile(disk, directory / meta.keys_name).check(pace)
        return meta.keys_size

    checks: dict[Path, Check] = {directory / meta.name: check_run}
    if meta.keys_size:
        checks[directory / meta.keys_name] = check_keys
    return checks


def _spill_check(disk: Disk, path: Path, refs: list[SpillRef]) -> dict[Path, Check]:
    def check(pace: Pace) -> int:
        check_spill(disk, path, refs)
        for ref in refs:
            read_page(disk, path.parent, ref)
            pace(ref.size)
        return disk.size(path)

    return {path: check}


# ---- log


def _end_checks(
    disk: Disk, log: Path, paths: list[Path], applied: LogIndex, *, is_used: bool
) -> dict[Path, Check]:
    """Return the checks of a stopped node's mark, and of its last segment or the lack of segments.

    A segment whose header a crash left incomplete is no damage. It is removed from `paths`.
    """
    checks: dict[Path, Check] = {}
    floor, mark = applied, log / MARK_NAME
    if disk.exists(mark) or any(disk.size(path) > segment.HEADER_SIZE for path in paths):
        checks[mark] = lambda _: _check_mark(disk, mark)
        with contextlib.suppress(UnknownVersionError, DiskFailedError):
            floor = max(floor, read_mark(disk, mark).durable)
    if paths and _is_unborn(disk, paths[-1], floor):
        paths.pop()
    if paths:
        last = paths[-1]
        checks[last] = lambda pace: _check_end(disk, last, floor, pace)
    elif floor or is_used:
        checks[log] = lambda _: _raise(missing_segments_error(log, floor))
    return checks


def _is_unborn(disk: Disk, path: Path, floor: LogIndex) -> bool:
    """Return whether a start would remove a segment: frames only follow a durable header."""
    first = segment.first_of(path.name)
    if first is None or first <= floor or disk.size(path) > segment.HEADER_SIZE:
        return False
    try:
        _header(disk, path)
    except CorruptFileError:
        return True
    except (UnknownVersionError, DiskFailedError):
        pass  # its check reports this
    return False


def _sealed_check(disk: Disk, path: Path, following: Path, *, runs: bool) -> Check:
    """Return the check of a segment. `runs`: the node runs, so a failed read ends it."""

    def check(pace: Pace) -> int:
        after: Header | None = None
        try:
            after = _header(disk, following)
        except DiskFailedError:
            if runs:
                raise
            # else the check of the following segment reports this
        end, damage, last = _walk(disk, path, pace)
        if damage is not None:
            raise CorruptFileError(path, damage.position, damage.why)
        if after is None:
            return end
        wanted = (after.epoch_before, LogIndex(after.first - 1))
        if last != wanted:
            why = "ends at entry {1} of epoch {0}".format(*last)
            follows = "the next segment follows entry {1} of epoch {0}".format(*wanted)
            raise CorruptFileError(path, end, f"{why}; {follows}")
        return end

    return check


def _check_end(disk: Disk, path: Path, floor: LogIndex, pace: Pace) -> int:
    """Accept damage above the durable index and the manifest: a start cuts such a torn tail."""
    end, damage, (_, last) = _walk(disk, path, pace)
    if last < floor:
        why = damage.why if damage is not None else "the log ends here"
        raise CorruptFileError(path, end, f"{why}; entry {floor} was durable")
    return end


def last_epoch(disk: Disk, log: Path) -> Epoch:
    """Return the epoch of a stopped node's last entry. 0: none, or it can't be read."""
    try:
        paths = segment.paths(disk, log) if disk.exists(log) else []
        return _walk(disk, paths[-1], unpaced)[2][0] if paths else Epoch(0)
    except (CorruptFileError, UnknownVersionError, DiskFailedError):
        return Epoch(0)


def _check_mark(disk: Disk, path: Path) -> int:
    size = disk.size(path)
    if read_mark(disk, path).damaged:
        raise CorruptFileError(path, 0, "checksum mismatch")
    return size


def _header(disk: Disk, path: Path) -> Header:
    return segment.decode_header(path, disk.read(path, 0, segment.HEADER_SIZE))


def _walk(disk: Disk, path: Path, pace: Pace) -> tuple[int, Damage | None, tuple[Epoch, LogIndex]]:
    """Return the end of a segment's frames, the damage there, and (epoch, index) of the last frame.

    Raises:
        CorruptFileError: an undamaged frame has a wrong index or epoch.
    """
    header = _header(disk, path)
    epoch, index, end = header.epoch_before, LogIndex(header.first - 1), segment.HEADER_SIZE
    cost = 0
    for found in segment.walk(disk, path, segment.HEADER_SIZE, READ_SIZE):
        if isinstance(found, Damage):
            return end, found, (epoch, index)
        position, frame_epoch, frame_index, frame = found
        if frame_index != index + 1 or frame_epoch < epoch:
            why = f"entry {frame_index} of epoch {frame_epoch} follows {index} of epoch {epoch}"
            raise CorruptFileError(path, position, why)
        epoch, index, end = frame_epoch, frame_index, position + len(frame)
        cost += max(len(frame), FRAME_COST)
        if cost >= READ_SIZE:
            pace(cost)
            cost = 0
    pace(cost)
    return end, None, (epoch, index)
