"""Queues: the fired messages of each topic, in blocks with consecutive queue offsets.

    begin                              end
      |  block   |   block  |  block    |
      0 ... 411    412 ... 1411  1412     <- the next message fired gets this offset

A block holds rows that fired one after the other, in (due, seq) order. It is in memory as a page,
in a spill file, or in both (timer/ready/page_cache.py). Firing copies payloads only if the rows
need less than a third of their buffers. The division into blocks may differ between replicas.
Blocks below `begin` are dropped: every group has acked them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import (
    I64,
    ROW,
    U64,
    Buffers,
    RowArray,
    compact,
    gather,
    own_copy,
    row_bytes,
)
from timer.model.firing_order import concat
from timer.model.row_traits import kinds_of, ordering_keys, priorities
from timer.model.timer_id import mix
from timer.model.units import QueueOffset, UnixMs
from timer.ready.page_cache import PAGE_OVERHEAD, Block, BlockRows, Pages, SpillRef, constant_ms

BLOCK_ROWS_MAX: Final = 65_536
INTERVAL_MS: Final = 600_000
"""Length of retention's time intervals, milliseconds, if no policy sets a retention."""
SMALL_APPEND_SIZE: Final = 8 << 10
"""Bytes of rows and payloads up to which a queue's new messages share a buffer with others."""
SHARED_SIZE: Final = 64 << 10
"""Bytes of such a shared buffer, roughly. A flush gives each queue its own buffer."""
LOOSE_BLOCKS: Final = 64
"""Blocks of at most SMALL_APPEND_SIZE that are joined, once as many lie at a queue's end. A block
takes a kilobyte beside its rows, and a microsecond when it is dropped."""
AHEAD_BLOCKS: Final = 8
"""Blocks after the delivered ones that are read from disk in advance."""
AHEAD_PART: Final = 2
"""Divisor of the page cache. Once blocks read in advance fill this share of it, none is added: a
reader's pages must stay until they are delivered."""
_PRIME: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_POWERS: Final = np.full(BLOCK_ROWS_MAX + 1, _PRIME, np.uint64)
"""_PRIME ** i, modulo 2 ** 64."""
_POWERS[0] = 1
np.cumprod(_POWERS, out=_POWERS)
_ROW_SIZE: Final = ROW.itemsize + 8
"""Bytes of a row in a page, with the time at which it fired."""
assert int(_POWERS[-1]) == pow(_PRIME, BLOCK_ROWS_MAX, 1 << 64)


@dataclass(slots=True)
class Queue:
    """The fired messages of one topic."""

    begin: QueueOffset = QueueOffset(0)
    """First offset that the queue holds."""
    end: QueueOffset = QueueOffset(0)
    """Offset of the next message to fire."""
    chain: int = 0
    """Chained hash of the seqs at offsets 0 .. end, 64 bits; does not depend on the blocks."""
    intervals: list[tuple[int, QueueOffset]] = field(default_factory=list)
    """(End of a time interval, offset of the first message fired in it), ascending."""
    interval_ms: int = INTERVAL_MS
    """Length of the next intervals, milliseconds."""
    blocks: list[Block] = field(default_factory=list)
    pages: Pages = field(default_factory=Pages)
    """The page cache, shared by all queues of the node."""
    has_ordering_keys: bool = False
    """A message had an ordering key, since the queue was last empty."""
    has_priorities: bool = False
    """A message had another priority than the default, since the queue was last empty."""
    lacks_page: bool = field(default=False, compare=False)
    """A page was missing in `count_in_memory`, since the caller reset this."""
    _payload_bytes: int = 0
    """Payload bytes of all blocks that were added here, dropped ones included."""
    _loose: int = field(default=0, compare=False)
    """Number of small blocks at the end that are neither joined nor taken by a flush."""

    def append(self, rows: RowArray, bufs: Buffers, fired_at_ms: UnixMs) -> None:
        """Add messages at the end; `rows` are in firing order."""
        n = len(rows)
        assert 0 < n <= BLOCK_ROWS_MAX, n
        hashes = mix(np.ascontiguousarray(rows["seq"])) * _POWERS[n - 1 :: -1][:n]
        rows, bufs = compact(rows, bufs)
        page = BlockRows(rows, bufs, constant_ms(fired_at_ms, n))
        if self.has_ordering_keys or self.has_priorities or rows["headers_size"].any():
            self._note_traits(page)
        tail = int(np.add.reduce(hashes, dtype=np.uint64))
        self._append(Block.of(self.end, page), n, tail, fired_at_ms)

    def _note_traits(self, page: BlockRows) -> None:
        """Note the traits of messages that are about to be added."""
        if self.begin == self.end:
            self.has_ordering_keys = self.has_priorities = False
        orders, prioritizes = kinds_of(page.rows, page.bufs)
        self.has_ordering_keys |= orders
        self.has_priorities |= prioritizes

    def _append(self, block: Block, n: int, tail: int, fired_at_ms: UnixMs) -> None:
        """Add a block of n messages that fire now. `tail`: their part of the chain."""
        self.chain = (self.chain * _power(n) + tail) & _MASK
        if self.begin == self.end:
            self.intervals.clear()  # their messages were dropped
        self.shorten_intervals(fired_at_ms)
        if not self.intervals or self.intervals[-1][0] <= fired_at_ms:
            end_ms = self._interval_end(fired_at_ms)
            if self.intervals and self.intervals[-1][0] < end_ms - self.interval_ms:
                self.intervals.append((end_ms - self.interval_ms, self.end))  # without messages
            self.intervals.append((end_ms, self.end))
        self.restore(block)
        assert block.page is not None
        self._loose = self._loose + 1 if block.page.size <= SMALL_APPEND_SIZE else 0
        if self._loose == LOOSE_BLOCKS:
            self._join_loose()

    def _join_loose(self) -> None:
        """Join the small blocks at the end, unless some of them were dropped meanwhile."""
        blocks = self.blocks[-LOOSE_BLOCKS:]
        self._loose = len(blocks) % LOOSE_BLOCKS
        if self._loose:
            return
        pages = [block.page for block in blocks if block.page is not None]
        rows, bufs = list[RowArray](), dict[int, bytes | memoryview]()
        for page in pages:
            rows.append(page.rows.copy())
            for number in np.unique(page.rows["buf"]).tolist():
                rows[-1]["buf"][page.rows["buf"] == number] = len(bufs)
                bufs[len(bufs)] = page.bufs[number]
        fired_at_ms = np.concatenate([page.fired_at_ms for page in pages])
        joined = BlockRows(*own_copy(concat(rows), bufs), fired_at_ms)
        self.replace_blocks(blocks, [Block.of(blocks[0].first, joined)])

    def shorten_intervals(self, now_ms: UnixMs) -> None:
        """End all intervals no later than one that begins now: their messages have fired."""
        end_ms = self._interval_end(now_ms)
        for at in range(len(self.intervals) - 1, -1, -1):
            if self.intervals[at][0] <= end_ms:
                break
            self.intervals[at] = end_ms, self.intervals[at][1]

    def _interval_end(self, now_ms: UnixMs) -> int:
        return (now_ms // self.interval_ms + 1) * self.interval_ms

    def restore(self, block: Block) -> None:
        """Add a block that a manifest holds; chain and intervals include it already."""
        assert block.first == self.end, (block.first, self.end)
        self._payload_bytes += block.payload_bytes
        block.payload_bytes_end = self._payload_bytes
        self.blocks.append(block)
        self.pages.add(block)
        self.end = block.end

    def unspilled_blocks(self) -> list[Block]:
        """Return the blocks that are in no file: the last ones. They stay as they are."""
        self._loose = 0
        start = len(self.blocks)
        while start and self.blocks[start - 1].spill is None:
            start -= 1
        return self.blocks[start:]

    def replace_blocks(self, old: Sequence[Block], new: Sequence[Block]) -> None:
        """Replace blocks by their written copies, except those dropped meanwhile.

        If the page of a joined block was requested, or is in memory because it was, the page of
        the new block with its messages is requested.
        """
        assert old[0].first == new[0].first, (old[0].first, new[0].first)
        assert old[-1].end == new[-1].end, (old[-1].end, new[-1].end)
        start = max(self._count_begun(old[0].first) - 1, 0)
        stop = self._count_begun(old[-1].first)
        left = [block for block in new if block.end > self.begin]
        replaced = self.blocks[start:stop]
        needed = [block for block in replaced if self.pages.is_needed(block)]
        self._weigh(left, replaced)
        if left:  # both have the first message that is left
            left[0].fired_at_ms = max(left[0].fired_at_ms, replaced[0].fired_at_ms)
        for block in replaced:
            self.pages.remove(block)
        for block in left:
            if old[0].spill is None:
                self.pages.add(block)
            else:
                at = bisect_right(needed, block.first, key=attrgetter("end"))
                wanted = at < len(needed) and needed[at].first < block.end
                self.pages.add_joined(block, needed=wanted)
        self.blocks[start:stop] = left

    @staticmethod
    def _weigh(new: Sequence[Block], old: Sequence[Block]) -> None:
        """Set `payload_bytes_end` of the new blocks; the last one's equals that of the old."""
        end = old[-1].payload_bytes_end if old else 0
        for block in reversed(new):
            block.payload_bytes_end = end
            end -= block.payload_bytes

    def payload_bytes_from(self, offset: QueueOffset) -> int:
        """Return the payload bytes of the messages from an offset on.

        The block that holds the offset counts in proportion.
        """
        if offset >= self.end or not self.blocks:
            return 0
        block = self.blocks[self._number_of(offset)]
        here = block.payload_bytes * (block.end - offset) // (block.end - block.first)
        return self._payload_bytes - block.payload_bytes_end + here

    def move_blocks(self, places: Mapping[SpillRef, SpillRef]) -> None:
        """Note that blocks were copied to other files."""
        for block in self.blocks:
            if block.spill is not None:
                block.spill = places.get(block.spill, block.spill)

    def slices(self, offsets: U64) -> Iterator[tuple[BlockRows, U64]]:
        """Yield (page, positions in it) that together cover `offsets`, in order.

        `offsets` ascend, and all of them are in memory.
        """
        for block, here in self._blocks_of(offsets):
            assert block.page is not None, (block.first, block.end)
            yield block.page, here - np.uint64(block.first)

    def _blocks_of(self, offsets: U64) -> Iterator[tuple[Block, U64]]:
        start = 0
        while start < len(offsets):
            block = self.blocks[self._number_of(int(offsets[start]))]
            stop = start + int(np.searchsorted(offsets[start:], np.uint64(block.end)))
            assert stop > start, (int(offsets[start]), self.begin, self.end)
            yield block, offsets[start:stop]
            start = stop

    def _number_of(self, offset: int) -> int:
        number = self._count_begun(offset) - 1
        assert number >= 0, (offset, self.begin, self.end)
        return number

    def _count_begun(self, offset: int) -> int:
        """Return how many blocks have a first offset of at most `offset`."""
        return bisect_right(self.blocks, offset, key=attrgetter("first"))

    def fired_at_ms(self, offset: int) -> int:
        """Return when a message in the queue fired, Unix milliseconds.

        If its page is only in a file, returns an earlier time: the end of the time interval before
        its own, or when its block's first message fired, whichever is later.
        """
        block = self.blocks[self._number_of(offset)]
        if block.page is None:
            number = bisect_right(self.intervals, offset, key=itemgetter(1)) - 1
            return max(block.fired_at_ms, self.intervals[number - 1][0] if number > 0 else 0)
        return int(block.page.fired_at_ms[offset - block.first])

    def count_in_memory(self, offsets: U64) -> int:
        """Return how many of the first `offsets` (ascending, at least one) are in memory.

        The missing pages, and those that come next, are requested from disk.
        """
        count = 0
        for block, here in self._blocks_of(offsets):
            if block.page is None:
                self.lacks_page = True
                break
            count += len(here)
        number = self._number_of(int(offsets[min(count, len(offsets) - 1)]))
        left = self.pages.size_max // AHEAD_PART
        for block in self.blocks[number : number + AHEAD_BLOCKS]:
            if left <= 0:
                break
            self.pages.request(block)
            left -= block.payload_bytes
        return count

    def count_fitting(self, offsets: U64, bytes_max: int) -> int:
        """Return how many of the first `offsets` fit into `bytes_max`; at least one.

        `offsets` ascend, and all of them are in memory.
        """
        return max(
            1, int(np.searchsorted(np.cumsum(self._sizes(offsets)), bytes_max, side="right"))
        )

    def bytes_of(self, offsets: U64) -> int:
        """Return the bytes of the payloads, keys and headers of messages whose pages are read."""
        return int(self._sizes(offsets).sum())

    def payload_bytes(self, offset: int) -> int:
        """Return the bytes of a message's payload, whose page is read; faster than `bytes_of`."""
        block = self.blocks[self._number_of(offset)]
        assert block.page is not None, (block.first, block.end)
        return int(block.page.rows["payload_size"][offset - block.first])

    def _sizes(self, offsets: U64) -> I64:
        return np.concatenate([row_bytes(page.rows[at]) for page, at in self.slices(offsets)])

    def key_hashes(self, offsets: U64) -> U64:
        """Return a hash of each message's ordering key, or else of its key, (n, uint64), never 0.

        A message without both has a hash of its own. `offsets` ascend, and all are in memory.
        """
        hashes = [np.zeros(0, np.uint64)]
        for page, at in self.slices(offsets):
            rows = page.rows[at.astype(np.int64)]
            if rows["key_size"].any():
                keys = gather(rows, page.bufs, "key")
                found = self.pages.hasher(rows["topic"].astype(np.uint32), keys)
            else:
                found = np.zeros(len(rows), np.uint64)
            alone = rows["key_size"] == 0
            found[alone] = mix(rows["seq"][alone])
            if self.has_ordering_keys:
                places, keys = ordering_keys(rows, page.bufs)
                if len(places):
                    topics = rows["topic"][places].astype(np.uint32)
                    found[places] = self.pages.hasher(topics, keys)
            hashes.append(np.maximum(found, np.uint64(1)))
        return np.concatenate(hashes)

    def priorities(self, offsets: U64) -> npt.NDArray[np.uint8]:
        """Return the priority of each message, (n,). `offsets` ascend, and all are in memory."""
        found = [np.zeros(0, np.uint8)]
        for page, at in self.slices(offsets):
            found.append(priorities(page.rows[at.astype(np.int64)], page.bufs))
        return np.concatenate(found)

    def offset_fired_from(self, time_ms: UnixMs) -> QueueOffset | None:
        """Return the offset of the first message that fired at or after a time, or `end`.

        None: a page must be read first; it is requested. Firing times ascend with the offsets,
        because the entries' times do. So only one block can hold the message: the last one that
        begins before the time.
        """
        number = bisect_left(self.blocks, time_ms, key=attrgetter("fired_at_ms")) - 1
        if number < 0:
            return self.begin
        block = self.blocks[number]
        if block.page is None:
            self.pages.request(block)
            return None
        at = int(np.searchsorted(block.page.fired_at_ms, time_ms))
        return max(self.begin, QueueOffset(block.first + at))

    def drop_below(self, offset: QueueOffset) -> None:
        """Drop the messages below `offset`; a block leaves memory with its last message."""
        if offset <= self.begin:
            return
        assert offset <= self.end, (offset, self.end)
        self.begin = offset
        passed = 0
        while passed + 1 < len(self.intervals) and self.intervals[passed + 1][1] <= offset:
            passed += 1
        ended_ms = self.intervals[passed - 1][0] if passed else 0
        del self.intervals[:passed]
        dropped = 0
        while dropped < len(self.blocks) and self.blocks[dropped].end <= offset:
            self.pages.remove(self.blocks[dropped])
            dropped += 1
        if dropped:
            del self.blocks[:dropped]
        if passed and self.blocks:  # its messages in these intervals are dropped
            self.blocks[0].fired_at_ms = max(self.blocks[0].fired_at_ms, ended_ms)

    def expire(self, fired_before_ms: UnixMs, below: QueueOffset | None = None) -> None:
        """Drop the leading messages of intervals that ended by a time, in Unix milliseconds.

        `below`: drop only messages below this offset; None: all of them.
        """
        offset = self.begin
        for end_ms, first in self.intervals:
            offset = max(offset, first)  # the intervals before it have ended
            if end_ms > fired_before_ms or (below is not None and offset >= below):
                break
        else:
            offset = self.end if self.intervals else offset
        self.drop_below(offset if below is None else min(offset, below))

    def close(self) -> None:
        """Drop all messages: the topic was deleted."""
        self.drop_below(self.end)


def append_all(parts: Sequence[tuple[Queue, RowArray]], bufs: Buffers, fired_at_ms: UnixMs) -> None:
    """Add messages at the ends of different queues, as `Queue.append` does for one.

    Queues that get few bytes share a buffer, up to SHARED_SIZE.
    """
    if len(parts) < 2:
        for queue, rows in parts:
            queue.append(rows, bufs, fired_at_ms)
        return
    little: list[tuple[Queue, RowArray]] = []
    size = 0
    for (queue, rows), own in zip(parts, _sizes([rows for _, rows in parts]), strict=True):
        if own > SMALL_APPEND_SIZE:
            queue.append(rows, bufs, fired_at_ms)
            continue
        little.append((queue, rows))
        size += own
        if size >= SHARED_SIZE:
            _append_small(little, bufs, fired_at_ms)
            little, size = [], 0
    if little:
        _append_small(little, bufs, fired_at_ms)


def _append_small(
    parts: Sequence[tuple[Queue, RowArray]], bufs: Buffers, fired_at_ms: UnixMs
) -> None:
    """Append to several queues with one shared buffer; each numpy call serves all of them."""
    counts = np.array([len(rows) for _, rows in parts])
    ends = np.cumsum(counts)
    starts = ends - counts
    rows, bufs = compact(concat([rows for _, rows in parts]), bufs)
    behind = np.repeat(ends, counts) - 1 - np.arange(len(rows))
    hashes = mix(np.ascontiguousarray(rows["seq"])) * _POWERS.take(behind)
    due_ms, payloads = rows["due_ms"].copy(), rows["payload_size"].astype(np.int64)
    columns = (
        starts.tolist(),
        ends.tolist(),
        np.add.reduceat(hashes, starts).tolist(),
        np.minimum.reduceat(due_ms, starts).tolist(),
        np.maximum.reduceat(due_ms, starts).tolist(),
        np.add.reduceat(payloads, starts).tolist(),
        np.add.reduceat(row_bytes(rows), starts).tolist(),
    )
    fired, headed = constant_ms(fired_at_ms, len(rows)), rows["headers_size"].any()
    for (queue, _), start, end, tail, due_min, due_max, payload, size in zip(
        parts, *columns, strict=True
    ):
        n = end - start
        page = BlockRows(rows[start:end], bufs, fired[:n], PAGE_OVERHEAD + n * _ROW_SIZE + size)
        if headed or queue.has_ordering_keys or queue.has_priorities:
            queue._note_traits(page)  # noqa: SLF001 -- this module's
        first, stop = queue.end, QueueOffset(queue.end + n)
        block = Block(first, stop, page, None, fired_at_ms, payload, 0, due_min, due_max)
        queue._append(block, n, tail, fired_at_ms)  # noqa: SLF001 -- this module's


def _sizes(parts: Sequence[RowArray]) -> list[int]:
    """Return the bytes of each part, with the payloads, keys and headers of its rows."""
    counts = np.array([len(rows) for rows in parts])
    weights = np.add.reduceat(row_bytes(concat(parts)), np.cumsum(counts) - counts)
    sizes: list[int] = (weights + counts * _ROW_SIZE).tolist()
    return sizes


def _power(n: int) -> int:
    """Return _PRIME ** n, modulo 2 ** 64."""
    return _POWERS.item(n)
