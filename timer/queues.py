"""Queues: what has fired, per topic, in blocks with consecutive queue offsets.

    begin                              end
      |  block   |   block  |  block    |
      0 ... 411    412 ... 1411  1412     <- the next message fired gets this offset

A block holds rows that fired together, in (due, seq) order, and the buffers that their payloads
lie in. Nothing is copied at firing. Blocks below `begin` are gone: every group has acked them.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from timer.columns import U64, Buffers, RowArray, compact, row_bytes
from timer.timer_id import mix
from timer.units import QueueOffset, UnixMs

BLOCK_ROWS_MAX: Final = 65_536
_PRIME: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_POWERS: Final = np.full(BLOCK_ROWS_MAX + 1, _PRIME, np.uint64)
"""_PRIME ** i, modulo 2 ** 64."""
_POWERS[0] = 1
np.cumprod(_POWERS, out=_POWERS)
assert int(_POWERS[-1]) == pow(_PRIME, BLOCK_ROWS_MAX, 1 << 64)


@dataclass(frozen=True, slots=True)
class SpillRef:
    """Where a block lies in a spill file (timer/spill.py)."""

    file: str
    position: int
    size: int


@dataclass(slots=True)
class Block:
    """Messages `first` .. `first + len(rows)` (exclusive) of one queue."""

    first: QueueOffset
    fired_at_ms: UnixMs
    rows: RowArray
    bufs: Buffers
    spill: SpillRef | None = None
    """The spilled copy. None: only memory and the log hold it."""

    @property
    def end(self) -> QueueOffset:
        """The offset after the last message."""
        return QueueOffset(self.first + len(self.rows))


@dataclass(slots=True)
class Queue:
    """The fired messages of one topic."""

    begin: QueueOffset = QueueOffset(0)
    """First offset still kept."""
    end: QueueOffset = QueueOffset(0)
    """Offset of the next message to fire."""
    chain: int = 0
    """Chained hash of the seqs at offsets 0 .. end, whatever blocks they came in; 64 bits."""
    blocks: list[Block] = field(default_factory=list)
    _firsts: list[int] = field(default_factory=list)

    def append(self, rows: RowArray, bufs: Buffers, fired_at_ms: UnixMs) -> None:
        """Add messages at the end; `rows` keep the order in which they fire."""
        n = len(rows)
        assert 0 < n <= BLOCK_ROWS_MAX, n
        hashes = mix(np.ascontiguousarray(rows["seq"])) * _POWERS[n - 1 :: -1][:n]
        tail = int(np.add.reduce(hashes, dtype=np.uint64))
        self.chain = (self.chain * int(_POWERS[n]) + tail) & _MASK
        rows, bufs = compact(rows, bufs)
        self.restore(Block(self.end, fired_at_ms, rows, bufs))

    def restore(self, block: Block) -> None:
        """Add a block that a manifest holds; the chain knows it already."""
        assert block.first == self.end, (block.first, self.end)
        self.blocks.append(block)
        self._firsts.append(block.first)
        self.end = block.end

    def slices(self, offsets: U64) -> Iterator[tuple[Block, U64]]:
        """Yield (block, positions in it) that together cover `offsets` (ascending), in order."""
        start = 0
        while start < len(offsets):
            number = bisect_right(self._firsts, int(offsets[start])) - 1
            assert number >= 0, (int(offsets[start]), self.begin, self.end)
            block = self.blocks[number]
            stop = start + int(np.searchsorted(offsets[start:], np.uint64(block.end)))
            assert stop > start, (int(offsets[start]), self.begin, self.end)
            yield block, offsets[start:stop] - np.uint64(block.first)
            start = stop

    def fitting(self, offsets: U64, bytes_max: int) -> int:
        """Return how many of the first `offsets` (ascending) fit into `bytes_max`; at least one."""
        sizes = np.concatenate([row_bytes(b.rows[at]) for b, at in self.slices(offsets)])
        return max(1, int(np.searchsorted(np.cumsum(sizes), bytes_max, side="right")))

    def drop_below(self, offset: QueueOffset) -> None:
        """Forget what lies before `offset`; whole blocks leave memory."""
        if offset <= self.begin:
            return
        assert offset <= self.end, (offset, self.end)
        self.begin = offset
        gone = 0
        while gone < len(self.blocks) and self.blocks[gone].end <= offset:
            gone += 1
        if gone:
            del self.blocks[:gone]
            del self._firsts[:gone]

    def expire(self, fired_before_ms: UnixMs) -> None:
        """Forget the leading blocks that fired before that time."""
        offset = self.begin
        for block in self.blocks:
            if block.fired_at_ms >= fired_before_ms:
                break
            offset = block.end
        self.drop_below(offset)
