"""Pages: the rows of queue blocks that are in memory, and which of them may leave it.

    fired --> unspilled --a flush wrote it--> spilled --evicted, the oldest first--> only in a file
                                                 ^                                        |
                                                 +------- fetched (thread) <-- wanted ----+

What no file holds stays. Of the rest so much stays as the shell allows: what a consumer is about to
get is wanted before, and comes back in order. Which pages are in memory decides no outcome.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from timer.model.columns import I64, Buffers, RowArray, row_bytes
from timer.model.units import QueueOffset
from timer.pending.memory.key_index import PLAIN, KeyHasher

PAGE_OVERHEAD: Final = 1_024
"""Bytes of memory that a page takes besides its rows, about."""


@dataclass(slots=True, eq=False)
class BlockRows:
    """The rows of a block and what they point into."""

    rows: RowArray
    bufs: Buffers
    fired_at_ms: I64
    """Of each row (n,)."""
    size: int = 0
    """Bytes of memory, about: of its own rows, where it shares what they point into."""

    def __post_init__(self) -> None:
        """Weigh it, unless that was done."""
        if not self.size:
            self.size = PAGE_OVERHEAD + int(row_bytes(self.rows).sum())
            self.size += self.rows.nbytes + self.fired_at_ms.nbytes

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SpillRef:
    """Where a block lies in a spill file (timer/ready/spill.py)."""

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
    """When its first message fired, known also without its page."""
    payload_bytes: int = 0
    """Of all its messages, likewise."""
    payload_bytes_end: int = 0
    """Of those before it in its queue, too, since some time."""
    due_ms_min: int = 0
    due_ms_max: int = 0
    """Of all its messages: which have expired is seldom asked of the page."""

    @classmethod
    def of(cls, first: QueueOffset, page: BlockRows, spill: SpillRef | None = None) -> "Block":
        """Return the block of a page, with what is known also without it."""
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

    def __init__(self, hasher: KeyHasher = PLAIN) -> None:
        self.hasher = hasher
        """Of the keys of what fired."""
        self.unspilled_size = 0
        """Bytes of pages that no file holds."""
        self.spilled_size = 0
        """Bytes of pages that could leave memory."""
        self._spilled: dict[Block, None] = {}  # the oldest first
        self._wanted: dict[Block, None] = {}

    def add(self, block: Block) -> None:
        """A block came into a queue."""
        if block.page is None:
            return
        if block.spill is None:
            self.unspilled_size += block.page.size
        else:
            self.spilled_size += block.page.size
            self._spilled[block] = None

    def remove(self, block: Block) -> None:
        """A block left its queue."""
        self._wanted.pop(block, None)
        if block.page is None:
            return
        if block.spill is None:
            self.unspilled_size -= block.page.size
        else:
            self.spilled_size -= block.page.size
            del self._spilled[block]

    def want(self, block: Block) -> None:
        """Ask for the page of a block, unless it is there."""
        if block.page is None:
            self._wanted[block] = None

    def wanted(self, size_max: int) -> list[Block]:
        """Return the blocks whose pages are to be fetched next, about so many bytes of them."""
        blocks: list[Block] = []
        for block in self._wanted:
            if size_max <= 0:
                break
            assert block.spill is not None
            size_max -= block.spill.size + PAGE_OVERHEAD
            blocks.append(block)
        return blocks

    def wants(self, block: Block) -> bool:
        """Return whether the block is wanted; one that left its queue is not."""
        return block in self._wanted

    def fetched(self, block: Block, page: BlockRows) -> None:
        """Use a page that was read, if it is still wanted."""
        if block in self._wanted:
            del self._wanted[block]
            assert block.page is None
            block.page = page
            self.add(block)

    def evict(self, size_max: int) -> None:
        """Let the oldest spilled pages go, until they take no more than `size_max` bytes."""
        while self.spilled_size > size_max:
            block = next(iter(self._spilled))
            self.remove(block)
            block.page = None


def constant_ms(value: int, count: int) -> I64:
    """Return a column of equal times (count,), of which only one is kept in memory."""
    return np.broadcast_to(np.int64(value), count)
