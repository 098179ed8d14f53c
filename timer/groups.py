"""Consumer groups: which messages of a queue are done. The replicated part.

    cursor      acked above it          reserved
      |    A A . A . . A . . . . . . . . .  |
      every offset below the cursor is acked; none at or above `reserved` was ever handed out

Leases are the leader's memory (timer/leases.py); what outlives it is here: acks, how often a
lease ended unacked (attempts), and how far the leader may hand out. A new epoch can't know what
the old leader really handed out, so everything unacked below `reserved` counts as delivered once.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.columns import U32, U64
from timer.timer_id import mix
from timer.units import GroupId, QueueOffset, TopicId

_MASK: Final = (1 << 64) - 1
_ENDED_SALT: Final = np.uint64(0xE4DED)
_ENDED_MAX: Final = np.iinfo(np.uint16).max


def _empty_bool() -> npt.NDArray[np.bool_]:
    return np.zeros(0, np.bool_)


def _empty_u16() -> npt.NDArray[np.uint16]:
    return np.zeros(0, np.uint16)


@dataclass(slots=True, kw_only=True)
class Group:
    """State of one group; the same on every replica that applied the same entries."""

    group_id: GroupId
    topic: TopicId
    name: str
    lease_ms: int
    cursor: QueueOffset
    reserved: QueueOffset
    """The leader may hand out offsets below this one."""
    marks: list[int] = field(default_factory=list)
    """One per later epoch that found messages handed out: those below were perhaps delivered."""
    ack_sum: int = 0
    """Sum of hashes of the acked offsets, modulo 2 ** 64: order-free, for the digest."""
    ended_sum: int = 0
    """The same for the leases that ended unacked."""
    acked_count: int = 0
    base: int = 0
    """The offset that element 0 of the arrays below belongs to; base <= cursor."""
    acked: npt.NDArray[np.bool_] = field(default_factory=_empty_bool)
    ended: npt.NDArray[np.uint16] = field(default_factory=_empty_u16)

    def ack(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Mark `offsets` as done; return which were not yet (n, bool). Unknown ones: False.

        The cursor moves over what is acked without a hole.
        """
        new = (offsets >= self.cursor) & (offsets < self.reserved)
        if not new.any():
            return new
        self._grow(int(offsets[new].max()) + 1)
        index = np.where(new, offsets.astype(np.int64) - self.base, 0)
        new &= ~self.acked[index]
        _first_only(new, index)
        fresh = index[new]
        self.acked[fresh] = True
        self.ack_sum = (self.ack_sum + _sum(mix(offsets[new]))) & _MASK
        self.acked_count += len(fresh)
        self._advance()
        return new

    def is_acked(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Return which of `offsets` are done (n, bool)."""
        index = offsets.astype(np.int64) - self.base
        inside = (index >= 0) & (index < len(self.acked))
        done = offsets < self.cursor
        done[inside] |= self.acked[index[inside]]
        return done

    def end_leases(self, offsets: U64) -> None:
        """Count one more attempt for each unacked offset whose lease ended."""
        live = np.unique(offsets[(offsets < self.reserved) & ~self.is_acked(offsets)])
        if not len(live):
            return
        self._grow(int(live[-1]) + 1)
        index = live.astype(np.int64) - self.base
        self.ended[index] += self.ended[index] < _ENDED_MAX  # it stays there: never back to "first"
        self.ended_sum = (self.ended_sum + _sum(mix(live ^ _ENDED_SALT))) & _MASK

    def reserve(self, offset: QueueOffset) -> None:
        """Let the leader hand out offsets below `offset`; never goes back."""
        self.reserved = max(self.reserved, offset)

    def begin_epoch(self, queue_end: QueueOffset) -> None:
        """Count what the old leader may have handed out as delivered once more."""
        mark = min(self.reserved, queue_end)
        if mark > self.cursor:
            self.marks.append(mark)

    def attempts(self, offsets: U64) -> U32:
        """Return the number of this delivery of each offset (n, uint32): 1 is the first."""
        count = np.ones(len(offsets), np.uint32)
        index = offsets.astype(np.int64) - self.base
        inside = (index >= 0) & (index < len(self.ended))
        count[inside] += self.ended[index[inside]]
        for mark in self.marks:
            count += offsets < mark
        return count

    def unacked(self, queue_end: QueueOffset) -> int:
        """Return how many fired messages are not acked."""
        above = int(np.count_nonzero(self.acked[self.cursor - self.base :]))
        return queue_end - self.cursor - above

    def _grow(self, end: int) -> None:
        """Make the arrays cover offsets below `end`."""
        size = end - self.base
        if size > len(self.acked):
            # Drop what the cursor has passed before asking for more.
            skip = self.cursor - self.base
            capacity = max(1024, 2 * (size - skip))
            acked, ended = np.zeros(capacity, np.bool_), np.zeros(capacity, np.uint16)
            acked[: len(self.acked) - skip] = self.acked[skip:]
            ended[: len(self.ended) - skip] = self.ended[skip:]
            self.acked, self.ended, self.base = acked, ended, self.cursor

    def _advance(self) -> None:
        rest = self.acked[self.cursor - self.base :]
        run = len(rest) if rest.all() else int(np.argmin(rest))
        self.cursor = QueueOffset(self.cursor + run)
        if self.marks and min(self.marks) <= self.cursor:
            self.marks = [mark for mark in self.marks if mark > self.cursor]


def _sum(values: U64) -> int:
    return int(np.add.reduce(values, dtype=np.uint64))


def _first_only(mask: npt.NDArray[np.bool_], index: npt.NDArray[np.int64]) -> None:
    """Clear `mask` where an earlier set element has the same index."""
    chosen = np.flatnonzero(mask)
    _, first = np.unique(index[chosen], return_index=True)
    if len(first) < len(chosen):
        mask[:] = False
        mask[chosen[first]] = True
