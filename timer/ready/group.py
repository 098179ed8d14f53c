"""Consumer groups: the replicated record of the messages that each group is done with.

    cursor      acked above it          reserved
      |    A A . A . . A . . . . . . . . .  |
      every offset below the cursor is acked; none at or above `reserved` was ever delivered

Leases are in the leader's memory (timer/leader/groups/group_leases.py). The state that outlives
the leader is here: acks, the number of ended leases and nacks (failures), the earliest redelivery
of nacked messages, and the offset below which this epoch's leader may deliver.

Each epoch begins with nothing reserved. If the old leader died, the new epoch cannot know which
messages were delivered. Everything unacked below `reserved` then counts as delivered once more. A
leader that transfers its leadership appends how far it delivered (HAND_OVER), and its successor
counts nothing. Neither is a failure: a message that was perhaps never delivered must not become a
dead letter. A recall is no failure either.

A seek restarts a group elsewhere in the queue, under a new id. Ops that name the old id have no
effect.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from timer.entries.payloads import GroupSettings
from timer.model.columns import I64, U32, U64
from timer.model.timer_id import mix
from timer.model.units import Epoch, GroupId, QueueOffset, TopicId

_MASK: Final = (1 << 64) - 1
_ENDED_SALT: Final = np.uint64(0xE4DED)
_LATER_SALT: Final = np.uint64(0x1A7E5)
_EXPIRED_SALT: Final = 0xDEAD11FE
_ENDED_MAX: Final = np.iinfo(np.uint16).max
_MOVED_SALT: Final = np.uint64(0x307ED)
MOVED_KEPT: Final = 16_384
"""Moved messages that a group remembers, the last ones: their acks return DEAD_LETTERED."""
CAPACITY_MIN: Final = 32
"""Least length of a column that is not empty; very many groups have few messages."""
LOOK_ROWS: Final = 65_536
"""Offsets looked at in one step of the search for unacked ones."""


_NO_BOOL: Final = np.zeros(0, np.bool_)
_NO_U16: Final = np.zeros(0, np.uint16)
_NO_U64: Final[U64] = np.zeros(0, np.uint64)
_NO_I64: Final[I64] = np.zeros(0, np.int64)
"""Shared by all empty columns: every array costs a hundred bytes, however short."""


def _empty_bool() -> npt.NDArray[np.bool_]:
    return _NO_BOOL


def _empty_u16() -> npt.NDArray[np.uint16]:
    return _NO_U16


def _empty_u64() -> U64:
    return _NO_U64


def _empty_i64() -> I64:
    return _NO_I64


@dataclass(slots=True, kw_only=True)
class Group:
    """State of one group, equal on every replica that applied the same entries."""

    group_id: GroupId
    topic: TopicId
    name: str
    settings: GroupSettings
    cursor: QueueOffset
    reserved: QueueOffset
    """This epoch's leader may deliver offsets below this one; never below `cursor`."""
    delivered_to: QueueOffset = QueueOffset(0)
    """Offsets below this one may have been delivered in an earlier epoch."""
    hashed: int | None = None
    """The group's part of the digest (timer/state/digest.py). None: it has changed since."""
    since: Epoch = Epoch(0)
    """Epoch of the last seek, or of the last deletion of a group in this topic before this group
    was created. Leases of that epoch or an earlier one may be of another group id."""
    expired: int = 0
    """Messages that expired before they were acked."""
    expired_to: QueueOffset = QueueOffset(0)
    """Done messages below this offset were acked or expired."""
    creator: str = ""
    """See timer/state/creators.py."""
    deleted: bool = False
    """The group was deleted and is not in the state."""
    deleted_with: str = ""
    """Name of the topic, if the group was deleted with its topic; otherwise empty."""
    marks: list[int] = field(default_factory=list)
    """One offset per later epoch that found messages delivered: those below count once more."""
    ack_sum: int = 0
    """Order-free sum of hashes of the acked offsets, modulo 2 ** 64, for the digest."""
    ended_sum: int = 0
    """The same sum over leases that ended unacked, and nacks."""
    recalled_sum: int = 0
    """The same sum over recalled leases."""
    acked_count: int = 0
    later_sum: int = 0
    """Sum of hashes of (offset, time) of the times in `later`, modulo 2 ** 64."""
    base: int = 0
    """Offset of element 0 of the arrays below; base <= cursor."""
    acked: npt.NDArray[np.bool_] = field(default_factory=_empty_bool)
    ended: npt.NDArray[np.uint16] = field(default_factory=_empty_u16)
    later: I64 = field(default_factory=_empty_i64)
    """Earliest redelivery of nacked messages, Unix milliseconds.

    0: the message did not fail, or its last failure was an ended lease. As long as `acked`, or
    empty if no message is nacked.
    """
    recalled: npt.NDArray[np.uint16] = field(default_factory=_empty_u16)
    """Recalls of each message. As long as `acked`, or empty if no message was recalled."""
    moved: U64 = field(default_factory=_empty_u64)
    """Offsets of the last MOVED_KEPT messages that moved to another topic, in log order."""
    moved_sum: int = 0
    """Sum of hashes of `moved`, modulo 2 ** 64."""

    def move(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Mark messages as moved to another topic; return which were unacked before, (n, bool)."""
        new = self.ack(offsets)
        gone = self.moved[: max(0, len(self.moved) + int(np.count_nonzero(new)) - MOVED_KEPT)]
        self.moved = np.concatenate([self.moved[len(gone) :], offsets[new]])
        added = moved_hashes(offsets[new]) - moved_hashes(gone)
        self.moved_sum = (self.moved_sum + added) & _MASK
        return new

    def is_moved(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Return which messages are among the last that moved to another topic, (n, bool)."""
        if not len(self.moved):
            return np.zeros(len(offsets), np.bool_)
        return np.isin(offsets, self.moved)

    def ack(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Mark `offsets` as acked; return which were unacked before, (n, bool).

        Offsets that were never delivered return False. The cursor moves to the first unacked one.
        """
        new = (offsets >= self.cursor) & (offsets < self.reach)
        if not new.any():
            return new
        self.hashed = None
        self._grow(int(offsets[new].max()) + 1)
        index = np.where(new, offsets.astype(np.int64) - self.base, 0)
        new &= ~self.acked[index]
        _first_only(new, index)
        fresh = index[new]
        self.acked[fresh] = True
        self._delay(fresh, None)
        self.ack_sum = (self.ack_sum + _sum(mix(offsets[new]))) & _MASK
        self.acked_count += len(fresh)
        self._advance()
        return new

    def is_acked(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Return which of `offsets` are acked, moved or expired, (n, bool)."""
        index = offsets.astype(np.int64) - self.base
        inside = (index >= 0) & (index < len(self.acked))
        done = offsets < self.cursor
        done[inside] |= self.acked[index[inside]]
        return done

    def expire_below(self, offset: QueueOffset, lost: npt.NDArray[np.bool_]) -> None:
        """Expire all unacked messages below `offset`; set `lost`, which ends there, at each."""
        if offset <= self.cursor:
            return
        self.hashed = None
        at = len(lost) - (offset - self.cursor)
        acked = self.acked[self.cursor - self.base : offset - self.base]
        lost[at : at + len(acked)] |= ~acked
        lost[at + len(acked) :] = True
        gone = slice(self.cursor - self.base, offset - self.base)
        if self.later_sum:
            self.later_sum = (self.later_sum - self.later_hashes(gone)) & _MASK
            self.later[gone] = 0
        self.expired += offset - self.cursor - int(np.count_nonzero(acked))
        self._expired_to(offset)
        self.cursor = offset
        if offset - self.base >= len(self.acked):
            self._forget_columns()
        self._advance()

    def expire(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Expire single messages, all different; return which were unacked before, (n, bool)."""
        new = ~self.is_acked(offsets)
        if new.any():
            self.hashed = None
            gone = offsets[new]
            self._grow(int(gone.max()) + 1)
            index = gone.astype(np.int64) - self.base
            self.acked[index] = True
            self._delay(index, None)
            self.ack_sum = (self.ack_sum + _sum(mix(gone ^ np.uint64(_EXPIRED_SALT)))) & _MASK
            self.expired += len(gone)
            self._expired_to(QueueOffset(int(gone.max()) + 1))
            self._advance()
        return new

    def _expired_to(self, offset: QueueOffset) -> None:
        # The digest needs no sum over all expired offsets: their number identifies them enough.
        self.expired_to = max(self.expired_to, offset)
        self.ack_sum = (self.ack_sum + (offset ^ _EXPIRED_SALT) * self.expired) & _MASK

    def end_leases(self, offsets: U64) -> None:
        """Count one more failure of each unacked offset: its lease ended."""
        live = np.unique(offsets[(offsets < self.reach) & ~self.is_acked(offsets)])
        if len(live):
            self._grow(int(live[-1]) + 1)
            self._delay(self._failed(live), None)

    def nack(self, offsets: U64, not_before_ms: I64) -> npt.NDArray[np.bool_]:
        """Count one more failure of nacked messages; return which were unacked, (n, bool).

        `not_before_ms`: their earliest redelivery, (n, int64). Of a repeated offset the first one
        counts.
        """
        live = (offsets < self.reach) & ~self.is_acked(offsets)
        if not live.any():
            return live
        self._grow(int(offsets[live].max()) + 1)
        _first_only(live, np.where(live, offsets.astype(np.int64) - self.base, 0))
        self._delay(self._failed(offsets[live]), not_before_ms[live])
        return live

    def recall(self, offsets: U64) -> None:
        """Count unacked offsets, all different, as delivered once more, without a failure."""
        live = offsets[(offsets < self.reach) & ~self.is_acked(offsets)]
        if not len(live):
            return
        self.hashed = None
        self._grow(int(live.max()) + 1)
        if not len(self.recalled):
            self.recalled = np.zeros(len(self.acked), np.uint16)
        index = live.astype(np.int64) - self.base
        self.recalled[index] += self.recalled[index] < _ENDED_MAX
        self.recalled_sum = (self.recalled_sum + _sum(mix(live))) & _MASK

    def restart(
        self, group_id: GroupId, offset: QueueOffset, queue_end: QueueOffset, epoch: Epoch
    ) -> None:
        """Forget acks, failures and delays; continue at `offset` under a new id.

        Messages that may have been delivered before count as delivered once.
        """
        mark = min(self.reach, queue_end)
        self.hashed = None
        self.group_id, self.since = group_id, epoch
        self.cursor, self.base = offset, int(offset)
        self.reserved, self.delivered_to = offset, mark
        self.marks = [mark] if mark > offset else []
        self.ack_sum = self.ended_sum = self.recalled_sum = self.later_sum = self.acked_count = 0
        self.acked, self.later = _empty_bool(), _empty_i64()
        self.ended, self.recalled = _empty_u16(), _empty_u16()
        self.expired_to = QueueOffset(0)
        self.moved, self.moved_sum = _empty_u64(), 0

    def _failed(self, offsets: U64) -> npt.NDArray[np.int64]:
        """Count one more failure of each offset, all different; return their indexes."""
        self.hashed = None
        index = offsets.astype(np.int64) - self.base
        if not len(self.ended):
            self.ended = np.zeros(len(self.acked), np.uint16)
        self.ended[index] += self.ended[index] < _ENDED_MAX  # no overflow back to "first delivery"
        self.ended_sum = (self.ended_sum + _sum(mix(offsets ^ _ENDED_SALT))) & _MASK
        return index

    def _delay(self, index: npt.NDArray[np.int64], times: I64 | None) -> None:
        """Set the earliest redelivery of offsets; None: none is set."""
        if not len(self.later):
            if times is None:
                return
            self.later = np.zeros(len(self.acked), np.int64)
        gone = self.later_hashes(index)
        self.later[index] = 0 if times is None else times
        self.later_sum = (self.later_sum - gone + self.later_hashes(index)) & _MASK

    def later_hashes(self, index: npt.NDArray[np.int64] | slice) -> int:
        """Return the sum of hashes of (offset, time) at these indexes of `later`."""
        times = self.later[index]
        offsets = np.arange(len(self.later))[index] if isinstance(index, slice) else index
        set_ = times != 0
        hashes = mix((offsets[set_] + self.base).astype(np.uint64) ^ _LATER_SALT)
        return _sum(mix(hashes ^ times[set_].astype(np.uint64)))

    def not_before(self, offsets: U64) -> I64:
        """Return each offset's earliest redelivery, Unix milliseconds, (n, int64); 0: at once."""
        return _look(self.later, offsets.astype(np.int64) - self.base)

    def failures(self, offsets: U64) -> U32:
        """Return the number of nacks and ended leases of each offset, (n, uint32)."""
        return _look(self.ended, offsets.astype(np.int64) - self.base).astype(np.uint32)

    def exhausted(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Return which unacked offsets have failed max_attempts times, (n, bool)."""
        most = self.settings.max_attempts
        return self.failures(offsets) >= most if most else np.zeros(len(offsets), np.bool_)

    def backoff_ms(self, offsets: U64) -> I64:
        """Return the delay of a nack without one, for each offset, milliseconds, (n, int64)."""
        low, high = self.settings.backoff_ms_min, self.settings.backoff_ms_max
        doublings = np.minimum(self.failures(offsets), 62 - low.bit_length())
        waits: I64 = np.minimum(np.int64(low) << doublings, max(low, high))
        return waits

    def reserve(self, offset: QueueOffset) -> None:
        """Allow the leader to deliver offsets below `offset`; never goes back."""
        self.hashed = None
        self.reserved = max(self.reserved, offset)

    def alter(self, settings: GroupSettings) -> None:
        """Replace the settings."""
        self.hashed = None
        self.settings = settings

    @property
    def reach(self) -> QueueOffset:
        """First offset that was never delivered."""
        return max(self.reserved, self.delivered_to)

    def begin_epoch(self, queue_end: QueueOffset) -> bool:
        """Count messages that the old leader may have delivered as delivered once more.

        Returns whether that changes the group.
        """
        mark = min(self.reserved, queue_end)
        if mark > self.cursor:
            self.marks.append(mark)
        elif self.reserved == self.cursor and mark <= self.delivered_to:
            return False
        self.hand_over(mark)
        return True

    def hand_over(self, offset: QueueOffset) -> None:
        """Record that only offsets below `offset` were delivered; stop until the next `reserve`."""
        self.hashed = None
        self.delivered_to = max(self.delivered_to, offset)
        self.reserved = self.cursor

    def attempts(self, offsets: U64) -> U32:
        """Return the number of each offset's next delivery, (n, uint32): 1 is the first.

        Every delivery that may have reached a consumer counts.
        """
        count = np.ones(len(offsets), np.uint32)
        index = offsets.astype(np.int64) - self.base
        inside = (index >= 0) & (index < len(self.ended))
        count[inside] += self.ended[index[inside]]
        count += _look(self.recalled, index).astype(np.uint32)
        for mark in self.marks:
            count += offsets < mark
        return count

    def unacked_from(self, offset: int) -> int:
        """Return the first unacked offset at or after `offset`, which is not below the cursor."""
        rest = self.acked[max(0, offset - self.base) :]
        return offset + (len(rest) if rest.all() else int(np.argmin(rest)))

    def unacked(self, queue_end: QueueOffset) -> int:
        """Return the number of fired messages that are not acked."""
        above = int(np.count_nonzero(self.acked[self.cursor - self.base :]))
        return queue_end - self.cursor - above

    def first_unacked(self, end: int, count: int) -> U64:
        """Return the first `count` unacked offsets below `end`, ascending."""
        known = self.acked[self.cursor - self.base : max(0, end - self.base)]
        found, left = list[npt.NDArray[np.int64]](), count
        for start in range(0, len(known), LOOK_ROWS):  # the rest may be millions
            if left <= 0:
                break
            low = np.flatnonzero(~known[start : start + LOOK_ROWS])[:left] + (self.cursor + start)
            found.append(low)
            left -= len(low)
        start = self.cursor + len(known)
        found.append(np.arange(start, max(start, min(end, start + left))))
        return np.concatenate(found).astype(np.uint64)

    def _grow(self, end: int) -> None:
        """Make the arrays cover offsets below `end`."""
        size = end - self.base
        if size > len(self.acked):
            # Drop the elements below the cursor before allocating more.
            skip = self.cursor - self.base
            capacity = max(CAPACITY_MIN, 2 * (size - skip))
            acked = np.zeros(capacity, np.bool_)
            acked[: len(self.acked) - skip] = self.acked[skip:]
            if len(self.ended):
                ended = np.zeros(capacity, np.uint16)
                ended[: len(self.ended) - skip] = self.ended[skip:]
                self.ended = ended if ended.any() else _empty_u16()
            if len(self.later):
                later = np.zeros(capacity, np.int64)
                later[: len(self.later) - skip] = self.later[skip:]
                self.later = later if self.later_sum else _empty_i64()
            if len(self.recalled):
                recalled = np.zeros(capacity, np.uint16)
                recalled[: len(self.recalled) - skip] = self.recalled[skip:]
                self.recalled = recalled if recalled.any() else _empty_u16()
            self.acked, self.base = acked, self.cursor

    def _forget_columns(self) -> None:
        """Empty the columns: all offsets that they held lie below the cursor."""
        self.base = int(self.cursor)
        self.acked, self.later = _empty_bool(), _empty_i64()
        self.ended, self.recalled = _empty_u16(), _empty_u16()

    def _advance(self) -> None:
        rest = self.acked[self.cursor - self.base :]
        run = len(rest) if rest.all() else int(np.argmin(rest))
        self.cursor = QueueOffset(self.cursor + run)
        if run == len(rest):
            self._forget_columns()
        self.reserved = max(self.reserved, self.cursor)
        if self.marks and min(self.marks) <= self.cursor:
            self.marks = [mark for mark in self.marks if mark > self.cursor]


def _look(column: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> I64:
    """Return a column's values at these indexes, 0 outside."""
    inside = (index >= 0) & (index < len(column))
    out = np.zeros(len(index), np.int64)
    out[inside] = column[index[inside]]
    return out


def _sum(values: U64) -> int:
    return int(np.add.reduce(values, dtype=np.uint64))


def moved_hashes(offsets: U64) -> int:
    """Return the sum of hashes of moved messages, modulo 2 ** 64."""
    if not len(offsets):
        return 0
    return _sum(mix(offsets ^ _MOVED_SALT))


def _first_only(mask: npt.NDArray[np.bool_], index: npt.NDArray[np.int64]) -> None:
    """Clear `mask` where an earlier set element has the same index."""
    chosen = np.flatnonzero(mask)
    if len(chosen) < 2 or (np.diff(index[chosen]) > 0).all():
        return
    _, first = np.unique(index[chosen], return_index=True)
    if len(first) < len(chosen):
        mask[:] = False
        mask[chosen[first]] = True
