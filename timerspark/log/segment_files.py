"""A node's timer log on disk: its segment files, and their entries.

A lost or damaged log begins again at the end of a snapshot. Then the node has several logs, its
*lives*, which may overlap and have gaps between them. A replay combines the lives of all nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from timer.entries import entry_frame
from timer.entries.entry_frame import Damage, Entry
from timer.files import segment
from timer.files.disk import RealDisk
from timer.files.log import MARK_NAME, read_mark
from timer.model.timer_errors import CorruptFileError
from timer.model.units import LogIndex


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file of one log."""

    path: Path
    first: LogIndex
    """Index of its first entry."""
    end: LogIndex | None
    """Index of the next segment's first entry. None: the last segment, which may end torn."""


def segments(log: Path) -> list[Segment]:
    """Return a log's segment files, in order; none if the folder does not exist."""
    paths = log.iterdir() if log.is_dir() else iter(())
    found = {first: path for path in paths if (first := segment.first_of(path.name))}
    firsts = sorted(found)
    return [Segment(found[first], first, end) for first, end in pairwise([*firsts, None]) if first]


def lives(log: Path) -> list[Path]:
    """Return the folders of an archived log's lives, in order; empty: not an archive.

    Their names are numbers. Other folders are ignored.
    """
    folders = log.iterdir() if log.is_dir() else iter(())
    return sorted(path for path in folders if path.name.isdigit() and path.is_dir())


def entries(part: Segment) -> Iterator[tuple[int, Entry]]:
    """Yield (crc32, entry) of one segment file. Only the last segment of a log may end torn.

    An entry at or below the log's durable mark was synced, so a wrong byte in it is no torn end. A
    file that just ends too early counts as torn: it may have been copied before the mark was.

    Raises:
        CorruptFileError: the segment is damaged, or ends before the next one begins.
    """
    path, last = part.path, part.end is None
    data = memoryview(path.read_bytes())
    try:
        segment.decode_header(path, bytes(data[: segment.HEADER_SIZE]))
    except CorruptFileError:
        if last and len(data) <= segment.HEADER_SIZE:
            return  # a crash while the file was created
        raise
    position, index = segment.HEADER_SIZE, part.first
    while (found := entry_frame.frame_at(data, position)) is not None:
        if isinstance(found, Damage):
            if last and (found.is_cut or index > _durable_index(path.parent)):
                return
            raise CorruptFileError(path, found.position, f"entry {index}: {found.why}")
        if found.index != index:
            raise CorruptFileError(path, position, f"entry {found.index} in place of {index}")
        yield int.from_bytes(data[position : position + 4], "little"), found
        position += entry_frame.HEADER_SIZE + len(found.payload)
        index = LogIndex(index + 1)
    if not last and index != part.end:
        raise CorruptFileError(
            path, position, f"ends before entry {index}; the next segment begins at {part.end}"
        )


def _durable_index(log: Path) -> LogIndex:
    """Return the durable mark of a log; 0 if the folder has none, as an archive."""
    return read_mark(RealDisk(), log / MARK_NAME).durable


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries [first, last] of one life of one node's log."""

    log: Sequence[Segment]
    first: LogIndex
    last: LogIndex


def entries_of(piece: Piece) -> Iterator[Entry]:
    """Yield the entries of a piece that the log has.

    Raises:
        CorruptFileError: the log is damaged.
    """
    for part in piece.log:
        if part.end is not None and part.end <= piece.first:
            continue
        for _, item in entries(part):
            if item.index > piece.last:
                return
            if item.index >= piece.first:
                yield item
