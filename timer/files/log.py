"""The timer log on one disk: a directory of segment files. Entries are appended at its end.

    first_index                               durable_index    last_index
    |                                                     |    |
    [ 00..01.log ][ 00..2f.log ][ 00..9a.log            ......]    durable
      sealed        sealed        active: frames are appended here

timer/files/segment.py has the format. Appended entries are *written*; after `sync` they are
*durable*. A segment is sealed, complete and durable, before the next one is created.

**Damage at start.** The file `durable` has the durable index. It is overwritten after every sync,
and is itself synced when a segment is sealed, at truncation and at close. After a power cut its
index may be too low, never too high.

    the first damaged or missing byte is                              so the log is
    in a sealed segment                                               corrupt: CorruptFileError
    at or below the durable index, or the caller's committed floor    corrupt: CorruptFileError
    above both                                                        torn: cut, `tail_was_cut`
    in an unreadable sector; before the log's first entry, if the     corrupt: CorruptFileError
    caller's committed floor does not reach so far

After a power cut the mark may be too low, and a disk may have lost synced bytes. Entries that were
cut may then have been durable and acknowledged: the replica is unsure until a leader has matched
its log. Within one run of the machine (`Disk.boot_id`, which the mark has) no synced byte is lost,
and the mark is exact. A torn tail is then an interrupted write of a process. Its entries were never
acknowledged, so they are cut without doubt (docs/adr/0039).

The mark notes a doubtful cut before the cut is made, and until `clear_tail_was_cut`. So a second
crash does not hide it. A start checks every frame above the committed floor. Segments below it,
which a restart does not need, are checked when they are first read.

**Threads.** One thread writes: `append`, `sync`, `truncate_after`, `drop_before`,
`raise_committed_floor`, `close`. They wait for the disk. Any thread may call the other methods at
any time. These use one `_View`, an immutable value that the writer replaces by one assignment.
`read` reads the disk without a lock. `_removals` counts the shortenings of the log, and rises
before the first file is touched. A reader whose bytes were removed therefore notices it, and starts
again with the present view.

Durable mark, format version 2, little-endian:

    0   8   magic     b"TIMERDUR"
    8   2   version   2
    10  1   was_cut   0 or 1: a tail was cut in doubt, and the caller has not noted it yet
    11  5   reserved  0
    16  8   durable   LogIndex
    24  16  boot      boot id of the machine when it was written; zeros: unknown
    40  4   crc32     of bytes [0, 40)
"""

import bisect
import itertools
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from isal import isal_zlib

from timer.entries.entry_frame import Damage
from timer.files import segment
from timer.files.disk import (
    TEMPORARY,
    UNKNOWN_BOOT,
    AppendFile,
    Bytes,
    Disk,
    DiskRefusal,
    MarkFile,
)
from timer.files.segment import Header, Positions, Scan
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import Epoch, LogIndex

SEGMENT_SIZE: Final = 64 << 20
"""Largest size of a segment, except if one frame alone is larger."""
MARK_NAME: Final = "durable"
MARK_VERSION: Final = 2

_MARK: Final = struct.Struct("<8sHB5xQ16s")
_MARK_VERSION: Final = struct.Struct("<H")
_CRC: Final = struct.Struct("<I")
_MARK_MAGIC: Final = b"TIMERDUR"


@dataclass(slots=True, eq=False)
class _Segment:
    """One file. `positions` is None until the file was read. Any thread may set it."""

    path: Path
    header: Header
    positions: Positions | None
    size: int
    """Bytes. For the active segment, as of the last append."""


@dataclass(frozen=True, slots=True)
class _View:
    """The log at one moment."""

    segments: tuple[_Segment, ...]
    """Never empty. The last one is active."""
    last: LogIndex
    durable: LogIndex
    starts: tuple[LogIndex, ...]
    """First index of each epoch. starts[0] is the entry before the first one kept."""
    epochs: tuple[Epoch, ...]
    """One per start, ascending."""

    @property
    def first(self) -> LogIndex:
        return self.segments[0].header.first


class Log:
    """One replica's log, created by `Log.open`. The module states the rules for threads."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        view: _View,
        files: tuple[AppendFile, MarkFile],
        *,
        segment_size: int,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._view = view
        self._file, self._mark = files
        self._segment_size = segment_size
        self._boot = disk.boot_id()
        self._refusal = DiskRefusal(directory)
        self._removals = 0
        self._committed_floor = LogIndex(0)
        self._tail_was_cut = False
        self.torn_bytes = 0
        """Bytes of a torn tail that this start cut, in doubt or not."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: Path,
        *,
        committed_floor: LogIndex | None = None,
        segment_size: int = SEGMENT_SIZE,
        is_used: bool = False,
    ) -> "Log":
        """Recover the log. Create it if absent. All entries that are left are durable then.

        Args:
            disk: the disk of the log.
            directory: for the log alone.
            committed_floor: entries up to here are committed, hence undamaged, and in a manifest.
                The log must have the entries after it. None: no restart uses this log.
            segment_size: bytes.
            is_used: the replica has given a promise, so the log exists.

        Raises:
            CorruptFileError: durable bytes or files are damaged or missing.
            UnknownVersionError: a file or frame of another version.
            DiskFailedError: the disk failed an operation.
        """
        disk.make_dir(directory)
        mark_path = directory / MARK_NAME
        marked = read_mark(disk, mark_path)
        committed = LogIndex(0) if committed_floor is None else committed_floor
        floor = LogIndex(max(committed, marked.durable))
        paths = segment.paths(disk, directory)
        if paths:
            disk.open_append(paths[-1]).close()  # drops bytes that only the page cache has
        segments = _read_headers(disk, paths, floor)
        if not segments:
            if floor or is_used:
                raise missing_segments_error(directory, floor)
            born, file = _create(disk, directory, Header(LogIndex(1), Epoch(0), LogIndex(0)))
            file.close()
            segments = [born]
        first = segments[0].header.first
        if committed_floor is not None and first > committed + 1:
            why = f"the log begins with entry {first}; entry {committed + 1} is missing"
            why += "" if committed else ", and there is no manifest"
            raise CorruptFileError(segments[0].path, 0, why)
        view, end = _recover(disk, segments, committed_floor=committed, floor=floor)
        if marked.damaged:  # replaced: a bad sector may refuse writes
            unknown = DurableMark(was_cut=view.last > 0)
            disk.write_atomic(mark_path, _encode_mark(unknown))
        file, mark = disk.open_append(segments[-1].path), disk.open_mark(mark_path)
        disk.sync_dir(directory)
        log = cls(disk, directory, view, (file, mark), segment_size=segment_size)
        log._committed_floor = committed
        log.torn_bytes = file.size - end
        torn = log.torn_bytes > 0 and (log._boot != marked.boot or log._boot == UNKNOWN_BOOT)
        log._tail_was_cut = marked.was_cut or torn or (marked.damaged and view.last > 0)
        if log._tail_was_cut:
            log._put_mark(marked.durable)
            mark.sync()
        file.truncate(end)
        log._sync_file()
        mark.sync()
        return log

    # Any thread.

    @property
    def first_index(self) -> LogIndex:
        """First entry that is kept; last_index + 1 if there is none."""
        return self._view.first

    @property
    def last_index(self) -> LogIndex:
        """Last entry written; first_index - 1 if there is none."""
        return self._view.last

    @property
    def last_epoch(self) -> Epoch:
        """Epoch of entry last_index; 0 before the log."""
        return self._view.epochs[-1]

    @property
    def end(self) -> tuple[Epoch, LogIndex]:
        """(last_epoch, last_index) at one moment: a voter's answer to a fence."""
        view = self._view
        return view.epochs[-1], view.last

    @property
    def durable_index(self) -> LogIndex:
        """Entries up to here survive a crash of the machine."""
        return self._view.durable

    @property
    def tail_was_cut(self) -> bool:
        """Whether a torn tail, maybe with durable entries, was cut at this or an earlier start."""
        return self._tail_was_cut

    def first_within(self, size_bytes: int) -> LogIndex:
        """Return the first entry of the last segments that together have at most `size_bytes`.

        The active segment always counts, whatever its size.
        """
        segments = self._view.segments
        first = segments[-1].header.first
        for each in reversed(segments):
            size_bytes -= each.size
            if size_bytes < 0:
                break
            first = each.header.first
        return first

    def epoch_at(self, index: LogIndex) -> Epoch | None:
        """Return the epoch of an entry in [first_index - 1, last_index]; None for others."""
        view = self._view
        if not view.first - 1 <= index <= view.last:
            return None
        return view.epochs[bisect.bisect_right(view.starts, index) - 1]

    def read(
        self, first: LogIndex, max_bytes: int, last: LogIndex | None = None
    ) -> list[memoryview]:
        """Return whole, checked frames from entry `first` on, none after `last`.

        At least one frame, and as many as fit into `max_bytes`. Fewer if a segment ends: read again
        from the next one. Frames may not be durable yet. Empty: `first` is not in the log (any
        more). The frames are views into one buffer, which lives as long as any of them.

        Raises:
            CorruptFileError: the frames on the disk are damaged or missing.
            UnknownVersionError: a frame of another version.
            DiskFailedError: the disk failed the read.
        """
        while True:
            removals = self._removals
            try:
                found = self._read(self._view, first, max_bytes, last)
            except (CorruptFileError, FileNotFoundError) as error:
                if removals == self._removals:
                    if isinstance(error, FileNotFoundError):
                        why = "the segment is missing"
                        raise CorruptFileError(error.filename, 0, why) from error
                    raise
            else:
                if removals == self._removals:
                    return found

    def _read(
        self, view: _View, first: LogIndex, max_bytes: int, wanted: LogIndex | None
    ) -> list[memoryview]:
        if not view.first <= first <= view.last:
            return []
        each, last = self._segment_with(view, first)
        last = last if wanted is None else min(last, wanted)
        assert each.positions is not None
        expected, position = each.positions.at_or_before(first)
        found: list[memoryview] = []
        read_size = segment.STEP_SIZE + max_bytes
        for frame in segment.walk(self._disk, each.path, position, read_size, enough=first):
            if isinstance(frame, Damage):
                if found:  # the read of the next frame reports it
                    break
                raise CorruptFileError(each.path, frame.position, frame.why)
            position, _, index, data = frame
            if index != expected:
                why = f"entry {index} follows entry {expected - 1}"
                raise CorruptFileError(each.path, position, why)
            expected = LogIndex(expected + 1)
            if index >= first:
                max_bytes -= len(data)
                if found and max_bytes < 0:
                    break
                found.append(data)
            if (found and max_bytes <= 0) or index == last:  # later frames may be half written
                break
        if not found:
            raise CorruptFileError(each.path, position, f"entry {first} is missing")
        return found

    def check_active(self) -> None:
        """Check that the active segment is there, with all bytes that were written to it.

        Another program may have removed, cut or replaced it. Appends to a removed file succeed.

        Raises:
            CorruptFileError: it is missing or too short.
            DiskFailedError: the disk failed an operation.
        """
        removals, active = self._removals, self._view.segments[-1]
        written, found = active.size, 0  # read in this order: the file grows meanwhile
        with suppress(FileNotFoundError):
            found = self._disk.size(active.path)
        if found < written and removals == self._removals:
            why = f"the file is missing or cut: it has {found} bytes, and {written} were written"
            raise CorruptFileError(active.path, found, why)

    def _segment_with(self, view: _View, index: LogIndex) -> tuple[_Segment, LogIndex]:
        """Return the segment with `index`, its positions loaded, and its last index."""
        number = bisect.bisect_right(view.segments, index, key=lambda each: each.header.first) - 1
        each = view.segments[number]
        following = view.segments[number + 1] if number + 1 < len(view.segments) else None
        if each.positions is None:
            assert following is not None, "the active segment is read at start"
            each.positions = _scan_sealed(self._disk, each, following).positions
        return each, view.last if following is None else LogIndex(following.header.first - 1)

    # The writer's thread.

    def append(self, frames: Sequence[Bytes]) -> None:
        """Write whole frames after the last one. `sync` makes them durable.

        Consecutive indexes and epochs that don't fall are asserted. Checksums are not checked. A
        full segment is sealed, which syncs it.

        Raises:
            DiskFailedError: some frames may be written. The log refuses all later writes.
        """
        epoch, index = self.end
        for frame in frames:
            frame_epoch, frame_index = segment.peek(frame)
            assert frame_index == index + 1, f"index {frame_index} follows {index}"
            assert frame_epoch >= epoch, f"epoch {frame_epoch} follows {epoch}"
            epoch, index = frame_epoch, frame_index

        with self._refusal.guard("append"):
            begin, size = 0, self._file.size
            for end, frame in enumerate(frames):
                if size + len(frame) > self._segment_size and size > segment.HEADER_SIZE:
                    self._write(frames[begin:end])
                    self._seal()
                    begin, size = end, segment.HEADER_SIZE
                size += len(frame)
            self._write(frames[begin:])

    def _write(self, frames: Sequence[Bytes]) -> None:
        """Write frames to the active segment and publish them to readers."""
        if not frames:
            return
        view, position = self._view, self._file.size
        active = view.segments[-1]
        assert active.positions is not None
        self._file.write(frames)
        starts, epochs, last = view.starts, view.epochs, view.last
        for frame in frames:
            epoch, last = segment.peek(frame)
            if epoch != epochs[-1]:
                starts, epochs = (*starts, last), (*epochs, epoch)
            active.positions.add(last, position)
            position += len(frame)
        active.size = position
        self._view = _View(view.segments, last, view.durable, starts, epochs)

    def _seal(self) -> None:
        """Make the active segment durable and create the next one."""
        assert self._file.size > segment.HEADER_SIZE, "an empty segment is never sealed"
        self._sync_file()
        self._mark.sync()
        view = self._view
        header = Header(LogIndex(view.last + 1), view.epochs[-1], view.segments[-1].header.first)
        active, file = _create(self._disk, self._directory, header)
        self._file.close()
        self._file = file
        self._view = replace(view, segments=(*view.segments, active))

    def sync(self) -> None:
        """Make all appended frames durable.

        Raises:
            DiskFailedError: the durable index is unknown. The log refuses all later writes.
        """
        with self._refusal.guard("sync"):
            if self._view.durable != self._view.last:
                self._sync_file()

    def _sync_file(self) -> None:
        self._file.sync()
        last = self._view.last
        # The mark first: acknowledged entries then lie below it if the process dies.
        self._put_mark(last)
        self._view = replace(self._view, durable=last)

    def _put_mark(self, durable: LogIndex) -> None:
        self._mark.put(_encode_mark(DurableMark(durable, self._tail_was_cut, self._boot)))

    def clear_tail_was_cut(self) -> None:
        """Clear `tail_was_cut`, durably. The caller has stored it elsewhere.

        Raises:
            DiskFailedError: the next start may report the cut once more.
        """
        with self._refusal.guard("mark"):
            self._tail_was_cut = False
            self._put_mark(self._view.durable)
            self._mark.sync()

    def truncate_after(self, index: LogIndex) -> None:
        """Remove all entries after `index`, durably. If there are any, the others become durable.

        Raises:
            CorruptFileError: the frames before the cut can't be read.
            DiskFailedError: the log ends anywhere from `index` on, and refuses all later writes.
        """
        view = self._view
        assert index >= self._committed_floor, f"{index} is below {self._committed_floor}"
        assert index >= view.first - 1, f"{index} is before the log, which starts at {view.first}"
        if index >= view.last:
            return
        each, _ = self._segment_with(view, LogIndex(index + 1))
        kept = view.segments[: view.segments.index(each)]
        position = self._position_of(each, LogIndex(index + 1))
        assert each.positions is not None
        short = _Segment(each.path, each.header, each.positions.up_to(index), position)
        number = bisect.bisect_right(view.starts, index)
        durable = LogIndex(min(view.durable, index))
        with self._refusal.guard("truncate"):
            self._view = _View(
                (*kept, short), index, durable, view.starts[:number], view.epochs[:number]
            )
            self._removals += 1
            # The mark is lowered durably before any cut. Else the cut would look like a loss.
            self._put_mark(durable)
            self._mark.sync()
            self._file.close()
            for later in reversed(view.segments[len(kept) + 1 :]):
                self._remove(later)
            self._file = self._disk.open_append(short.path)
            self._file.truncate(position)
            self._sync_file()

    def _position_of(self, each: _Segment, index: LogIndex) -> int:
        assert each.positions is not None
        _, start = each.positions.at_or_before(index)
        for frame in segment.walk(self._disk, each.path, start, segment.STEP_SIZE):
            if isinstance(frame, Damage):
                raise CorruptFileError(each.path, frame.position, frame.why)
            position, _, found, _ = frame
            if found == index:
                return position
        raise CorruptFileError(each.path, start, f"entry {index} is missing")

    def drop_before(self, index: LogIndex) -> None:
        """Remove the segments whose entries are all below `index`, except the active one.

        Raises:
            DiskFailedError: some of them may be left. The next start reads them.
        """
        view = self._view
        count = bisect.bisect_right(view.segments, index, key=lambda each: each.header.first) - 1
        if count <= 0:
            return
        kept = view.segments[count:]
        before = LogIndex(kept[0].header.first - 1)
        number = bisect.bisect_right(view.starts, before)
        with self._refusal.guard("drop"):
            self._view = replace(
                view,
                segments=kept,
                starts=(before, *view.starts[number:]),
                epochs=view.epochs[number - 1 :],
            )
            self._removals += 1
            for each in view.segments[:count]:
                self._remove(each)

    def _remove(self, each: _Segment) -> None:
        with suppress(FileNotFoundError):  # gone already, as it should be
            self._disk.remove(each.path)
        # One by one: if only the second removal survived a crash, the log would have a hole.
        self._disk.sync_dir(self._directory)

    def raise_committed_floor(self, index: LogIndex) -> None:
        """Note that entries up to `index` are committed: `truncate_after` keeps them."""
        assert index <= self._view.last, f"{index} is above the last entry, {self._view.last}"
        self._committed_floor = LogIndex(max(self._committed_floor, index))

    def close(self) -> None:
        """Make all entries durable and close the files.

        Raises:
            DiskFailedError: some entries are not durable. The files are closed, too.
        """
        try:
            self.sync()
            self._mark.sync()
        finally:
            self._file.close()
            self._mark.close()


def has_entry(disk: Disk, directory: Path, index: LogIndex, epoch: Epoch) -> bool:
    """Return whether the log in the directory is undamaged, with entry `index` of `epoch`.

    The whole log is read. A torn tail is cut, and the mark notes this.

    Raises:
        UnknownVersionError, DiskFailedError: as `Log.open`.
    """
    try:
        log = Log.open(disk, directory)
    except CorruptFileError:
        return False
    held = log.epoch_at(index) == epoch
    log.close()
    return held


def replace_by_empty(disk: Disk, directory: Path, after: LogIndex, epoch: Epoch) -> None:
    """Replace the log in the directory by an empty one after entry `after`, of `epoch`.

    Other files and directories stay. After a crash the log is undefined: the caller repeats the
    call.

    Raises:
        DiskFailedError: the disk failed an operation.
    """
    disk.make_dir(directory)
    for name in disk.list_dir(directory):
        whole = name.removesuffix(TEMPORARY)
        if whole == MARK_NAME or segment.first_of(whole) is not None:
            disk.remove(directory / name)
    disk.write_atomic(directory / MARK_NAME, _encode_mark(DurableMark(after)))
    _, file = _create(disk, directory, Header(LogIndex(after + 1), epoch, LogIndex(0)))
    file.close()


def missing_segments_error(directory: Path, floor: LogIndex) -> CorruptFileError:
    """Return the error for a used log without files. `floor`: a durable entry; 0: unknown."""
    lost = f"entry {floor} was durable" if floor else "the replica has followed a leader"
    return CorruptFileError(directory, 0, f"the log has no segments; {lost}")


class DurableMark(NamedTuple):
    """Content of the mark. Zeros, with `damaged`, if the file is absent or can't be read."""

    durable: LogIndex = LogIndex(0)
    was_cut: bool = False
    boot: bytes = UNKNOWN_BOOT
    damaged: bool = False


def _encode_mark(mark: DurableMark) -> bytes:
    head = _MARK.pack(_MARK_MAGIC, MARK_VERSION, mark.was_cut, mark.durable, mark.boot)
    return head + _CRC.pack(isal_zlib.crc32(head))


def read_mark(disk: Disk, path: Path) -> DurableMark:
    """Return the content of the mark.

    A damaged or missing mark is no error: without it the replica is unsure, which is safe.

    Raises:
        UnknownVersionError: the mark is undamaged and of another version.
    """
    try:
        data = disk.read(path) if disk.exists(path) else b""
    except CorruptFileError:
        return DurableMark(damaged=True)
    # Every version ends in its checksum, so another version and damage can be told apart.
    if data[:8] != _MARK_MAGIC or data[-4:] != _CRC.pack(isal_zlib.crc32(data[:-4])):
        return DurableMark(damaged=True)
    (version,) = _MARK_VERSION.unpack_from(data, 8)
    if version != MARK_VERSION:
        raise UnknownVersionError(path, version, MARK_VERSION)
    *_, was_cut, durable, boot = _MARK.unpack_from(data)
    return DurableMark(LogIndex(durable), bool(was_cut), boot)


def _create(disk: Disk, directory: Path, header: Header) -> tuple[_Segment, AppendFile]:
    """Create an empty segment, durable before a frame is written to it."""
    path = segment.path_of(directory, header.first)
    file = disk.open_append(path)
    file.truncate(0)
    file.write([header.encode()])
    file.sync()
    disk.sync_dir(directory)
    return _Segment(path, header, Positions(), segment.HEADER_SIZE), file


def _read_headers(disk: Disk, paths: list[Path], floor: LogIndex) -> list[_Segment]:
    """Return the segments in order, their chain checked. Remove one without a complete header.

    Raises:
        CorruptFileError: a header is damaged, or a segment between two others is missing.
    """
    segments: list[_Segment] = []
    for path in paths:
        size = disk.size(path)
        try:
            header = segment.decode_header(path, disk.read(path, 0, segment.HEADER_SIZE))
        except CorruptFileError:
            first = segment.first_of(path.name)
            assert first is not None
            # Frames follow only a durable header, so this segment has none.
            if path != paths[-1] or size > segment.HEADER_SIZE or first <= floor:
                raise
            disk.remove(path)
            disk.sync_dir(path.parent)
            break
        if segments:
            _check_follows(path, header, segments[-1].header)
        segments.append(_Segment(path, header, None, size))
    return segments


def _check_follows(path: Path, header: Header, before: Header) -> None:
    if header.previous_first != before.first:
        raise CorruptFileError(
            path, 32, f"segment {header.previous_first:016x} before it is missing"
        )
    if header.epoch_before < before.epoch_before:
        why = f"epoch {header.epoch_before} follows the higher epoch {before.epoch_before}"
        raise CorruptFileError(path, 24, why)


def _recover(
    disk: Disk, segments: list[_Segment], *, committed_floor: LogIndex, floor: LogIndex
) -> tuple[_View, int]:
    """Check the frames of a start. Return the view, and where the active segment's frames end.

    Sealed segments at or below the committed floor are not read, except if an epoch begins there.

    Raises:
        CorruptFileError: damage in a sealed segment, or at or below `floor`.
    """
    before = segments[0].header
    starts = [(LogIndex(before.first - 1), before.epoch_before)]
    for each, following in itertools.pairwise(segments):
        same_epoch = each.header.epoch_before == following.header.epoch_before
        if same_epoch and following.header.first - 1 <= committed_floor:
            continue
        found = _scan_sealed(disk, each, following)
        each.positions = found.positions
        starts += found.starts

    active = segments[-1]
    found = segment.scan(disk, active.path, active.header)
    last = found.last[1]
    if last < floor:
        why = found.damage.why if found.damage else "the log ends here"
        raise CorruptFileError(active.path, found.end, f"{why}; entry {floor} was durable")
    active.positions, active.size = found.positions, found.end
    indexes, epochs = zip(*starts, *found.starts, strict=True)
    return _View(tuple(segments), last, last, indexes, epochs), found.end


def _scan_sealed(disk: Disk, each: _Segment, following: _Segment) -> Scan:
    """Check a whole sealed segment against the header of the next one.

    Raises:
        CorruptFileError: it is damaged, or does not end where the next one begins.
    """
    found = segment.scan(disk, each.path, each.header)
    if found.damage:
        raise CorruptFileError(each.path, found.damage.position, found.damage.why)
    end = (following.header.epoch_before, LogIndex(following.header.first - 1))
    if found.last != end:
        why = "ends at entry {1} of epoch {0}".format(*found.last)
        after = "the next segment follows entry {1} of epoch {0}".format(*end)
        raise CorruptFileError(each.path, found.end, f"{why}; {after}")
    return found
