"""Pages: the rows of queue blocks that are in memory, and the eviction of pages.

    fired --> unspilled --flushed to a file--> spilled --evicted, the oldest first--> only in a file
                                                  ^                                        |
                                                  +------- fetched (thread) <-- wanted ----+

Pages that are in no file stay in memory. Of the others, the shell allows a number of bytes. Pages
are requested before a consumer needs them, and are read in order. No outcome depends on which pages
are in memory.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from timer.model.columns import I64, Buffers, RowArray, row_bytes
from timer.model.units import QueueOffset
from timer.pending.memory.key_index import PLAIN_HASHER, KeyHasher

PAGES_SIZE_MAX: Final = 64 << 20
"""Bytes of spilled pages that stay in memory, by default."""
EVICTED_MAX: Final = 64 << 20
"""Bytes of pages that one step evicts: to free them takes some milliseconds."""
PAGE_OVERHEAD: Final = 1_024
"""Approximate bytes of memory that a page takes beside its rows."""


@dataclass(slots=True, eq=False)
class BlockRows:
    """The rows of a block, and the buffers that they point into."""

    rows: RowArray
    bufs: Buffers
    fired_at_ms: I64
    """Time at which each row fired, Unix milliseconds, (n,)."""
    size: int = 0
    """Approximate bytes of memory; of a shared buffer only the part of its own rows."""

    def __post_init__(self) -> None:
        """Compute the size if none was given."""
        if not self.size:
            self.size = PAGE_OVERHEAD + int(row_bytes(self.rows).sum())
            self.size += self.rows.nbytes + self.fired_at_ms.nbytes

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SpillRef:
    """The place of a block in a spill file (timer/ready/spill.py)."""

    file: str
    position: int
    size: int


@dataclass(slots=True, eq=False)
class Block:
    """Messages `first` .. `end` (exclusive) of one queue: in a page, a spill file, or both."""

    first: QueueOffset
    end: QueueOffset
    page: BlockRows | None
    spill: SpillRef | None = None
    fired_at_ms: int = 0
    """Lower bound of the firing times of its messages still in the queue, Unix milliseconds. At
    first, the time of the first message. Known also without the page."""
    payload_bytes: int = 0
    """Payload bytes of all messages; known also without the page."""
    payload_bytes_end: int = 0
    """Payload bytes of the queue's messages up to this block's end, counted from a common start."""
    due_ms_min: int = 0
    due_ms_max: int = 0
    """Least and greatest due of the messages: expiry seldom needs the page."""

    @classmethod
    def of(cls, first: QueueOffset, page: BlockRows, spill: SpillRef | None = None) -> "Block":
        """Return the block of a page, with the fields that are known also without the page."""
        due_ms = page.rows["due_ms"]
        return cls(
            first,
            QueueOffset(first + len(page)),
            page,
            spill,
            fired_at_ms=int(page.fired_at_ms[0]),
            payload_bytes=int(page.rows["payload_size"].sum(dtype=np.int64)),
            due_ms_min=int(due_ms.min()),
            due_ms_max=int(due_ms.max()),
        )


class Pages:
    """The pages of all queues of a node."""

    def __init__(self, hasher: KeyHasher = PLAIN_HASHER) -> None:
        self.hasher = hasher
        """Hashes the keys of fired messages."""
        self.size_max = PAGES_SIZE_MAX
        """Bytes of spilled pages that stay in memory."""
        self.unspilled_size = 0
        """Bytes of pages that are in no file."""
        self.spilled_size = 0
        """Bytes of pages that may be evicted."""
        self._spilled: OrderedDict[Block, bool] = OrderedDict()
        """Blocks whose pages may be evicted, the oldest first, and whether these were fetched."""
        self._requested: dict[Block, None] = {}

    def add(self, block: Block, *, fetched: bool = False) -> None:
        """Count the page of a block that was added to a queue, or was fetched."""
        if block.page is None:
            return
        if block.spill is None:
            self.unspilled_size += block.page.size
        else:
            self.spilled_size += block.page.size
            self._spilled[block] = fetched

    def remove(self, block: Block) -> None:
        """Forget a block that left its queue."""
        self._requested.pop(block, None)
        if block.page is None:
            return
        if block.spill is None:
            self.unspilled_size -= block.page.size
        else:
            self.spilled_size -= block.page.size
            del self._spilled[block]

    def request(self, block: Block) -> None:
        """Request the page of a block if it is not in memory."""
        if block.page is None:
            self._requested[block] = None

    def requested_blocks(self, size_max: int) -> list[Block]:
        """Return the blocks to fetch next, about `size_max` bytes of them."""
        blocks: list[Block] = []
        for block in self._requested:
            if size_max <= 0:
                break
            assert block.spill is not None
            size_max -= block.spill.size + PAGE_OVERHEAD
            blocks.append(block)
        return blocks

    def is_requested(self, block: Block) -> bool:
        """Return whether a block's page is requested; a block that left its queue is not."""
        return block in self._requested

    def is_needed(self, block: Block) -> bool:
        """Return whether a block's page is requested, or in memory because it was requested."""
        return block in self._requested or self._spilled.get(block, False)

    def add_joined(self, block: Block, *, needed: bool) -> None:
        """Add the block that replaces joined ones. `needed`: the page of one of them was needed.

        Then the new page is needed, too. Otherwise it is the first to be evicted.
        """
        self.add(block, fetched=needed)
        if needed:
            self.request(block)
        elif block in self._spilled:
            self._spilled.move_to_end(block, last=False)

    def install_page(self, block: Block, page: BlockRows) -> None:
        """Install a page that was read, if it is still requested."""
        if block in self._requested:
            del self._requested[block]
            assert block.page is None
            block.page = page
            self.add(block, fetched=True)

    def evict(self, size_max: int, most: int | None = None) -> bool:
        """Evict the oldest spilled pages until the rest takes at most `size_max` bytes.

        `most`: bytes after which it stops. Return whether the rest takes at most `size_max`.
        """
        stop_at = 0 if most is None else self.spilled_size - most
        while self.spilled_size > max(size_max, stop_at):
            block = next(iter(self._spilled))
            self.remove(block)
            block.page = None
        return self.spilled_size <= size_max


def constant_ms(value: int, count: int) -> I64:
    """Return a column of equal times, (count,); only one value is in memory."""
    return np.broadcast_to(np.int64(value), count)
