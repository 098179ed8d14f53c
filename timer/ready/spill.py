"""Spill files: fired rows that some group has not acked, written with a manifest. Format 2.

    messages that fired since the last flush --> blocks ---+
    small blocks side by side in a queue --> joined -------+--> the flush's file
    blocks of files of which little is needed --> copied --+

The files are immutable. A manifest writes at most one. It holds the blocks that are in no file yet,
joined blocks, and blocks copied from files of which little is still needed. Little-endian:

    header      8s magic b"TIMERSPL", u32 version, u32 reserved
    per block   u32 crc32 of the rest of the block, u32 length of the body,
                u32 topic, u32 rows, u64 first queue offset
                body: n x u64 seq, n x i64 fired_at_ms, then the columns of timer/model/columns.py

A block has at most 4,096 rows and at most a megabyte, except that one larger row is a block of its
own. A read fetches one block. The manifest holds the places of the blocks. A block is verified when
it is read; the files' names and sizes are verified at start.

A topic that fires seldom gets a small block with each flush. A later flush joins them. So the
number of a queue's blocks follows the size of its messages, not the number of flushes.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

import numpy as np
from isal import isal_zlib

from timer.files.disk import AppendFile, Disk
from timer.model.columns import Part, decode_schedule, encode_schedule, gather, row_bytes
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import ProducerId, QueueOffset, TopicId
from timer.pending.runs.run_writer import Pace, unpaced
from timer.ready.page_cache import Block, BlockRows, Pages, SpillRef
from timer.ready.queue import Queue

MAGIC: Final = b"TIMERSPL"
VERSION: Final = 2
BLOCK_ROWS_MAX: Final = 4_096
BLOCK_SIZE_MAX: Final = 1 << 20
WRITE_SIZE: Final = 1 << 20
SPARSE_DIVISOR: Final = 4
"""A file of which less than 1/SPARSE_DIVISOR is needed is dropped; that part is copied."""
SMALL_SIZE: Final = 256 << 10
SMALL_FILES_MAX: Final = 8
"""Above this number of files below SMALL_SIZE, the small files are merged into one."""
MOVED_SIZE_MAX: Final = 256 << 20
"""Limit of the bytes that one manifest joins, and of those that it joins and copies together. The
last copied file may exceed it."""
ROW_WEIGHT: Final = BLOCK_SIZE_MAX // BLOCK_ROWS_MAX
"""Least bytes that a row counts: a block of BLOCK_ROWS_MAX short rows is full, too."""
SMALL_BLOCK: Final = BLOCK_SIZE_MAX // 2
"""Blocks of this weight or more are never joined: half a megabyte, or 2,048 rows."""
JOINED_MIN: Final = 8
"""Least number of small neighbouring blocks that are joined."""
JOINED_MAX: Final = 4_096
"""Small blocks that one flush joins, besides two for each queue with new messages. Also the limit
for the blocks of one queue that a flush examines, and for those that it joins."""
JOINED_TTL_SHARE: Final = 10
"""The firings of blocks that are joined span at most 1/10 of the topic's time to live."""
BLOCK_WORK: Final = 4 << 10
"""Work to join a block besides that of its bytes, as a number of bytes. See `Pace`."""

_HEADER: Final = struct.Struct("<8sII")
_CRC: Final = struct.Struct("<I")
_BLOCK: Final = struct.Struct("<IIIQ")


@dataclass(slots=True)
class Spill:
    """Neighbouring blocks of one queue, and the written blocks that replace them."""

    topic: TopicId
    queue: Queue
    old: list[Block]
    """Blocks that are all in no file yet, or all in files and small: those are joined."""
    new: list[Block]
    """The written blocks: as few and as large as possible."""

    @property
    def is_join(self) -> bool:
        """Whether the blocks are in files already."""
        return self.old[0].spill is not None

    @property
    def places(self) -> list[SpillRef]:
        """The places of the old blocks in files."""
        return [block.spill for block in self.old if block.spill is not None]

    @property
    def old_size(self) -> int:
        """Bytes of the old blocks in files."""
        return sum(ref.size for ref in self.places)

    def install(self) -> None:
        """Replace the old blocks by the new ones."""
        self.queue.replace_blocks(self.old, self.new)


def spills_of(topic: TopicId, queue: Queue, ttl_ms: int = 0) -> list[Spill]:
    """Return the blocks of a queue that are in no file, and those to join, if any.

    `ttl_ms`: the topic's time to live, milliseconds; 0: its messages never expire.
    """
    fresh = queue.unspilled_blocks()
    span_ms = ttl_ms // JOINED_TTL_SHARE if ttl_ms else None
    found = (_blocks_to_join(queue.blocks, len(queue.blocks) - len(fresh), span_ms), fresh)
    return [Spill(topic, queue, blocks, []) for blocks in found if blocks]


def _blocks_to_join(blocks: Sequence[Block], stop: int, span_ms: int | None) -> list[Block]:
    """Return the last of `blocks[:stop]`, all in files, if they are many small ones.

    A block is included if it is at most twice as large as all later ones together. The sizes thus
    grow by a factor: few blocks remain, and a message is written again a few times.

    At most JOINED_MAX blocks are examined. If all of them are included, returns older small blocks
    instead: those after a large one, or at the beginning. Otherwise they would stay in front of a
    full block. With `span_ms` they stay there, and expire.

    `span_ms`: milliseconds between the first firings in the first and the last of the returned
    blocks, at most; None: any number.
    """
    start, later, lowest = stop, SMALL_BLOCK, max(0, stop - JOINED_MAX)
    while start > lowest:
        block = blocks[start - 1]
        weight = _weight(block)
        if weight >= SMALL_BLOCK or weight > 2 * later:
            break
        if span_ms is not None and blocks[stop - 1].fired_at_ms - block.fired_at_ms > span_ms:
            break
        later = weight if start == stop else later + weight
        start -= 1
    if start == lowest > 0 and span_ms is None:
        first = bisect_left(blocks, True, hi=lowest, key=_is_small)  # noqa: FBT003 -- a value
        end = first + sum(1 for _ in takewhile(_is_small, blocks[first : first + JOINED_MAX]))
        if end - first >= JOINED_MIN:
            return [*blocks[first:end]]
    return [*blocks[start:stop]] if stop - start >= JOINED_MIN else []


def _weight(block: Block) -> int:
    """Return the size of a block in a file, or the least that its rows count."""
    assert block.spill is not None
    return max(block.spill.size, (block.end - block.first) * ROW_WEIGHT)


def _is_small(block: Block) -> bool:
    return _weight(block) < SMALL_BLOCK


def limit_joins(spills: Sequence[Spill], size_max: int) -> list[Spill]:
    """Return the spills, without the joins that are too many or too large for one flush.

    The longest go first, and may be cut. JOINED_MAX limits the joined blocks. Two more for each
    queue with new messages keep the number of blocks bounded.
    """
    fresh = [spill for spill in spills if not spill.is_join]
    joins = [spill for spill in spills if spill.is_join]
    joins.sort(key=lambda spill: len(spill.old), reverse=True)
    chosen, blocks_left, size = [], JOINED_MAX + 2 * len(fresh), min(size_max, MOVED_SIZE_MAX)
    for spill in joins:
        if blocks_left < JOINED_MIN:
            break
        if part := _fitting_neighbours(spill.old, blocks_left, size):
            chosen.append(Spill(spill.topic, spill.queue, part, []))
            blocks_left -= len(part)
            size -= chosen[-1].old_size
    return fresh + chosen


def _fitting_neighbours(blocks: Sequence[Block], count: int, size: int) -> list[Block]:
    """Return the first JOINED_MIN or more neighbours within `count` blocks and `size` bytes.

    Returns none if too few fit. A later flush joins the rest. Small blocks left in front of a
    large one might never be joined, so the first ones are chosen.
    """
    start = total = 0
    for at, block in enumerate(blocks):
        assert block.spill is not None
        total += block.spill.size
        if (total > size or at - start == count) and at - start >= JOINED_MIN:
            return [*blocks[start:at]]
        while total > size:
            first = blocks[start].spill
            assert first is not None
            total -= first.size
            start += 1
    return [*blocks[start:]] if len(blocks) - start >= JOINED_MIN else []


class _Writer:
    """Appends blocks to a new spill file, and syncs it after each WRITE_SIZE bytes."""

    def __init__(self, file: AppendFile, name: str) -> None:
        self._file, self._name = file, name
        self._pieces, self._waiting = [_HEADER.pack(MAGIC, VERSION, 0)], _HEADER.size

    def add(self, data: bytes, pace: Pace = unpaced) -> SpillRef:
        """Append a block and return its place. `pace` is called with the bytes of each sync."""
        ref = SpillRef(self._name, self._file.size + self._waiting, len(data))
        self._pieces.append(data)
        self._waiting += len(data)
        if self._waiting >= WRITE_SIZE:
            pace(self.sync())
        return ref

    def sync(self) -> int:
        """Write and sync the waiting blocks. Return their bytes."""
        self._file.write(self._pieces)
        self._file.sync()
        size, self._pieces, self._waiting = self._waiting, [], 0
        return size


def write_spill(
    disk: Disk,
    path: Path,
    spills: Sequence[Spill],
    moved: Sequence[SpillRef] = (),
    pace: Pace = unpaced,
) -> dict[SpillRef, SpillRef]:
    """Write the blocks to a new file, durably, and fill in `Spill.new`. For a thread.

    Also copies the blocks at `moved` from other files, and returns their new places. `pace` is
    called with the bytes written, about, and with the work of reading the blocks to join.

    Raises:
        CorruptFileError: a block to copy or to join is damaged.
    """
    file = disk.open_append(path)
    places: dict[SpillRef, SpillRef] = {}
    try:
        writer = _Writer(file, path.name)
        for spill in spills:
            _write_blocks(disk, path, spill, writer, pace if spill.is_join else unpaced)
        for ref in moved:
            data = disk.read(path.parent / ref.file, ref.position, ref.size)
            _decode(memoryview(data), path.parent / ref.file, ref)
            places[ref] = writer.add(data, pace)
        writer.sync()
    finally:
        file.close()
    disk.sync_dir(path.parent)
    return places


def _write_blocks(disk: Disk, path: Path, spill: Spill, writer: _Writer, pace: Pace) -> None:
    """Write the blocks of one queue. Joined blocks keep their pages if no old page was missing."""
    pages = [block.page for block in spill.old]  # the loop may evict them meanwhile
    stays, first = None not in pages, spill.old[0].first
    for group in _page_groups(_read_pages(disk, path.parent, spill, pages, pace)):
        data = _encode(spill.topic, first, group)
        ref = writer.add(data, pace)
        page = _decode(memoryview(data), path, ref)
        spill.new.append(Block.of(first, page, ref))
        first = spill.new[-1].end
        if not stays:
            spill.new[-1].page = None
    assert first == spill.old[-1].end, (first, spill.old[-1].end)


def _read_pages(
    disk: Disk, directory: Path, spill: Spill, pages: Sequence[BlockRows | None], pace: Pace
) -> Iterator[BlockRows]:
    """Yield the pages of the old blocks, those in memory as they are.

    The others are read about a megabyte at a time, each file once. `pace` is called with the work.
    """
    start = 0
    while start < len(spill.old):
        work, stop = 0, start
        missing: dict[str, list[tuple[int, SpillRef]]] = {}
        while stop < len(spill.old) and work < WRITE_SIZE:
            ref, page = spill.old[stop].spill, pages[stop]
            work += BLOCK_WORK
            if page is None:
                assert ref is not None
                missing.setdefault(ref.file, []).append((stop, ref))
                work += ref.size
            stop += 1
        found = dict(enumerate(pages[start:stop], start))
        for name, each in missing.items():
            parts = disk.read_parts(directory / name, [(r.position, r.size) for _, r in each])
            for (at, ref), data in zip(each, parts, strict=True):
                found[at] = _decode(memoryview(data), directory / name, ref)
        pace(work)
        yield from (page for page in found.values() if page is not None)
        start = stop


def blocks_to_move(
    disk: Disk, directory: Path, refs: Sequence[SpillRef], size_max: int, joined: int = 0
) -> list[SpillRef]:
    """Return the blocks among all `refs` that should move to another file, and fit. For a thread.

    These are the blocks of files of which little is needed, or of many small files. If they do not
    all fit in `size_max` bytes, the files that free most go first. `joined`: bytes that joins use
    of `size_max` and MOVED_SIZE_MAX.
    """
    needed: dict[str, int] = {}
    for ref in refs:
        needed[ref.file] = needed.get(ref.file, 0) + ref.size
    sizes = {name: disk.size(directory / name) for name in needed}
    dropped = {name for name, size in sizes.items() if SPARSE_DIVISOR * needed[name] < size}
    small = {name for name, size in sizes.items() if size < SMALL_SIZE}
    if len(small - dropped) > SMALL_FILES_MAX:
        dropped |= small
    chosen: set[str] = set()
    size = joined
    for name in sorted(dropped, key=lambda name: (needed[name] - sizes[name], name)):
        if size < MOVED_SIZE_MAX and size + needed[name] <= size_max:
            size += needed[name]
            chosen.add(name)
    return [ref for ref in refs if ref.file in chosen]


def _page_groups(pages: Iterable[BlockRows]) -> Iterator[list[BlockRows]]:
    """Yield the rows of all pages, in order, in groups of a bounded size."""
    group: list[BlockRows] = []
    rows_left, size_left = BLOCK_ROWS_MAX, BLOCK_SIZE_MAX
    for page in pages:
        ends = np.cumsum(row_bytes(page.rows))
        start, before = 0, 0
        while start < len(page):
            fits = int(ends.searchsorted(before + size_left, "right"))
            stop = min(fits, start + rows_left)
            if stop <= start and group:
                yield group
                group, rows_left, size_left = [], BLOCK_ROWS_MAX, BLOCK_SIZE_MAX
                continue
            stop = max(stop, start + 1)
            part = page.rows[start:stop]
            whole = len(part) == len(page)
            group.append(
                page if whole else BlockRows(part, page.bufs, page.fired_at_ms[start:stop])
            )
            rows_left -= stop - start
            size_left -= int(ends[stop - 1]) - before
            start, before = stop, int(ends[stop - 1])
    if group:
        yield group


def _encode(topic: TopicId, first: QueueOffset, pages: Sequence[BlockRows]) -> bytes:
    parts = [
        Part(
            producer_id=ProducerId(0),
            sequence=0,
            due_ms=page.rows["due_ms"],
            requested_ms=page.rows["requested_ms"],
            topic=page.rows["topic"],
            payload=gather(page.rows, page.bufs, "payload"),
            key=gather(page.rows, page.bufs, "key") if page.rows["key_size"].any() else None,
            headers=gather(page.rows, page.bufs, "headers")
            if page.rows["headers_size"].any()
            else None,
        )
        for page in pages
    ]
    seqs = [page.rows["seq"].tobytes() for page in pages]
    times = [page.fired_at_ms.tobytes() for page in pages]
    body = b"".join([*seqs, *times, *encode_schedule(parts)])
    head = _BLOCK.pack(len(body), topic, sum(map(len, pages)), first)
    return _CRC.pack(isal_zlib.crc32(body, isal_zlib.crc32(head))) + head + body


def check_spill(disk: Disk, path: Path, refs: Sequence[SpillRef]) -> None:
    """Check that the file exists and is long enough for the blocks at `refs`.

    Raises:
        CorruptFileError: the file is missing or cut.
        UnknownVersionError: another version wrote the file.
    """
    try:
        data, size = disk.read(path, 0, _HEADER.size), disk.size(path)
    except FileNotFoundError:
        why = "the file is missing, and the manifest names it"
        raise CorruptFileError(path, 0, why) from None
    if len(data) < _HEADER.size:
        raise CorruptFileError(path, 0, f"{len(data)} bytes; a header has {_HEADER.size}")
    magic, version, _ = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptFileError(path, 0, f"not a spill file: magic {magic!r}, must be {MAGIC!r}")
    if version != VERSION:
        raise UnknownVersionError(path, version, VERSION)
    end = max((ref.position + ref.size for ref in refs), default=0)
    if size < end:
        raise CorruptFileError(path, size, f"the file has {size} bytes; a block ends at {end}")


def read_page(disk: Disk, directory: Path, ref: SpillRef) -> BlockRows:
    """Return the page of the block at `ref`. For a thread.

    Raises:
        FileNotFoundError: the file was deleted, because no queue needs it any more.
        CorruptFileError: the block is cut or damaged.
    """
    path = directory / ref.file
    return _decode(memoryview(disk.read(path, ref.position, ref.size)), path, ref)


def _decode(data: memoryview, path: Path, ref: SpillRef) -> BlockRows:
    start = _CRC.size + _BLOCK.size
    if len(data) != ref.size or ref.size < start:
        raise CorruptFileError(path, ref.position, "the file ends within a block")
    if isal_zlib.crc32(data[_CRC.size :]) != _CRC.unpack_from(data)[0]:
        raise CorruptFileError(path, ref.position, "checksum mismatch in a block")
    _, _, n, _ = _BLOCK.unpack_from(data, _CRC.size)
    columns = data[start + 16 * n :]
    rows = decode_schedule(columns).rows
    rows["seq"] = np.frombuffer(data, "<u8", n, start)
    return BlockRows(rows, {0: columns}, np.frombuffer(data, "<i8", n, start + 8 * n))


class PageFetch:
    """Requested pages, to be read by a thread. A block may move to another file meanwhile."""

    def __init__(self, disk: Disk, directory: Path, blocks: Sequence[Block]) -> None:
        self._disk = disk
        self._directory = directory
        self._blocks = [(block, block.spill) for block in blocks]
        self._pages: list[tuple[Block, SpillRef, BlockRows | None]] = []

    def read(self) -> None:
        """Read the pages.

        Raises:
            CorruptFileError: a block is cut or damaged.
        """
        for block, ref in self._blocks:
            assert ref is not None
            try:
                page = read_page(self._disk, self._directory, ref)
            except FileNotFoundError:
                page = None
            self._pages.append((block, ref, page))

    def install(self, pages: Pages) -> None:
        """Install the pages that are still requested.

        Raises:
            CorruptFileError: the file of such a block is missing.
        """
        for block, ref, page in self._pages:
            if page is not None:
                pages.install_page(block, page)
            elif pages.is_requested(block) and block.spill == ref:  # else it moved or was acked
                raise CorruptFileError(self._directory / ref.file, 0, "the file is missing")
