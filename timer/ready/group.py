"""Consumer groups: the replicated record of the messages that each group is done with.

    cursor      acked above it          reserved
      |    A A . A . . A . . . . . . . . .  |
      every offset below the cursor is acked; none at or above `reserved` was ever delivered

Leases are in the leader's memory (timer/leader/groups/group_leases.py). The state that outlives
the leader is here. Columns by queue offset hold acks, failures (ended leases and nacks) and the
earliest redelivery of nacked messages (timer/ready/group_column.py). `reserved` is the offset below
which this epoch's leader may deliver. Of an acked message only the ack is kept.

Each epoch begins with nothing reserved. If the old leader died, the new epoch cannot know which
messages were delivered. Everything unacked below `reserved` then counts as delivered once more. A
leader that transfers its leadership appends how far it delivered (HAND_OVER), and its successor
counts nothing. Neither is a failure: a message that was perhaps never delivered must not become a
dead letter. A recall is no failure either.

A seek restarts a group elsewhere in the queue, under a new id. Ops that name the old id have no
effect.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.entries.payloads import GroupSettings
from timer.model.columns import I64, U32, U64
from timer.model.timer_id import mix
from timer.model.units import Epoch, GroupId, QueueOffset, TopicId
from timer.ready.group_column import GroupColumn, empty_column

_MASK: Final = (1 << 64) - 1
_ENDED_SALT: Final = np.uint64(0xE4DED)
_LATER_SALT: Final = np.uint64(0x1A7E5)
_EXPIRED_SALT: Final = 0xDEAD11FE
_ENDED_MAX: Final = np.iinfo(np.uint16).max
_MOVED_SALT: Final = np.uint64(0x307ED)
MOVED_OFFSETS_MAX: Final = 16_384
"""Moved messages that a group remembers, the last ones: their acks return DEAD_LETTERED."""
FLAGS: Final = np.dtype(np.bool_)
NUMBERS: Final = np.dtype(np.uint16)
TIMES: Final = np.dtype(np.int64)
"""Types of the values in a group's columns."""
_NO_FLAGS: Final = empty_column(FLAGS)
_NO_NUMBERS: Final = empty_column(NUMBERS)
_NO_TIMES: Final = empty_column(TIMES)
_NO_OFFSETS: Final[U64] = np.zeros(0, np.uint64)


def _no_offsets() -> U64:
    return _NO_OFFSETS


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
    digest_part: int | None = None
    """The group's part of the digest (timer/state/digest.py). None: it has changed since."""
    since_epoch: Epoch = Epoch(0)
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
    delivered_ends: list[int] = field(default_factory=list)
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
    acked: GroupColumn = _NO_FLAGS
    """Which messages at or above the cursor are acked, moved or expired; all below it are."""
    ended: GroupColumn = _NO_NUMBERS
    """Failures of each unacked message: ended leases and nacks."""
    later: GroupColumn = _NO_TIMES
    """Earliest redelivery of nacked, unacked messages, Unix milliseconds.

    0: the message did not fail, or its last failure was an ended lease.
    """
    recalled: GroupColumn = _NO_NUMBERS
    """Recalls of each unacked message."""
    moved: U64 = field(default_factory=_no_offsets)
    """Offsets of the last MOVED_OFFSETS_MAX messages that moved to another topic, in log order."""
    moved_sum: int = 0
    """Sum of hashes of `moved`, modulo 2 ** 64."""

    def move(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Mark messages as moved to another topic; return which were unacked before, (n, bool)."""
        new = self.ack(offsets)
        forgotten = self.moved[
            : max(0, len(self.moved) + int(np.count_nonzero(new)) - MOVED_OFFSETS_MAX)
        ]
        self.moved = np.concatenate([self.moved[len(forgotten) :], offsets[new]])
        added = moved_hashes(offsets[new]) - moved_hashes(forgotten)
        self.moved_sum = (self.moved_sum + added) & _MASK
        return new

    def is_moved(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Return which messages are among the last that moved to another topic, (n, bool)."""
        if not len(self.moved):
            return np.zeros(len(offsets), np.bool_)
        moved = np.sort(self.moved)
        return np.asarray(moved.take(moved.searchsorted(offsets), mode="clip") == offsets)

    def ack(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Mark `offsets` as acked; return which were unacked before, (n, bool).

        Offsets that were never delivered return False. The cursor moves to the first unacked one.
        """
        new = (offsets >= self.cursor) & (offsets < self.undelivered_from)
        if self.acked.value_count:
            new &= ~self.acked.of(offsets)
        fresh = _first_only(new, offsets)
        if not len(fresh):
            return new
        self.digest_part = None
        self._mark_done(fresh)
        self.ack_sum = (self.ack_sum + _sum(mix(fresh))) & _MASK
        self.acked_count += len(fresh)
        return new

    def _mark_done(self, offsets: U64) -> None:
        """Mark unacked offsets, all different, and drop their failures, delays and recalls."""
        self._forget(offsets)
        count = len(offsets)
        if not self.acked.value_count and int(offsets.max()) == self.cursor + count - 1:
            self.cursor = QueueOffset(self.cursor + count)  # these are all up to there
        else:
            self.acked = self.acked.put(offsets, 1, self.cursor)
        self._advance()

    def _forget(self, offsets: U64) -> None:
        """Forget failures, delays and recalls of offsets, all different."""
        if self.ended.value_count:
            failed = offsets[self.ended.of(offsets) > 0]
            if len(failed):
                self.ended = self.ended.put(failed, 0, self.cursor)
                self._delay(failed, None)
        if self.recalled.value_count:
            recalled = offsets[self.recalled.of(offsets) > 0]
            if len(recalled):
                self.recalled = self.recalled.put(recalled, 0, self.cursor)

    def is_acked(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Return which of `offsets` are acked, moved or expired, (n, bool)."""
        done: npt.NDArray[np.bool_] = offsets < self.cursor
        if self.acked.value_count:
            done |= self.acked.of(offsets)
        return done

    def expire_below(self, offset: QueueOffset, expired: npt.NDArray[np.bool_]) -> None:
        """Expire all unacked messages below `offset`; set `expired`, which ends there, at each."""
        if offset <= self.cursor:
            return
        self.digest_part = None
        at = len(expired) - (offset - self.cursor)
        acked = self.acked.span(self.cursor, offset)
        expired[at:] |= ~acked
        for column in (self.ended, self.recalled):
            self._forget(column.offsets(offset))
        self.expired += offset - self.cursor - int(np.count_nonzero(acked))
        self._advance_expired_to(offset)
        self.cursor = offset
        self._advance()

    def expire(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """Expire single messages, all different; return which were unacked before, (n, bool)."""
        new = ~self.is_acked(offsets)
        if new.any():
            self.digest_part = None
            self._mark_done(expired := offsets[new])
            self.ack_sum = (self.ack_sum + _sum(mix(expired ^ np.uint64(_EXPIRED_SALT)))) & _MASK
            self.expired += len(expired)
            self._advance_expired_to(QueueOffset(int(expired.max()) + 1))
        return new

    def _advance_expired_to(self, offset: QueueOffset) -> None:
        # The digest needs no sum over all expired offsets: their number identifies them enough.
        self.expired_to = max(self.expired_to, offset)
        self.ack_sum = (self.ack_sum + (offset ^ _EXPIRED_SALT) * self.expired) & _MASK

    def end_leases(self, offsets: U64) -> None:
        """Count one more failure of each unacked offset: its lease ended."""
        live = np.unique(offsets[(offsets < self.undelivered_from) & ~self.is_acked(offsets)])
        if len(live):
            self._count_failures(live)
            self._delay(live, None)

    def nack(self, offsets: U64, not_before_ms: I64) -> npt.NDArray[np.bool_]:
        """Count one more failure of nacked messages; return which were unacked, (n, bool).

        `not_before_ms`: their earliest redelivery, (n, int64). Of a repeated offset the first one
        counts.
        """
        live = (offsets < self.undelivered_from) & ~self.is_acked(offsets)
        if not live.any():
            return live
        failed = _first_only(live, offsets)
        self._count_failures(failed)
        self._delay(failed, not_before_ms[live])
        return live

    def recall(self, offsets: U64) -> None:
        """Count unacked offsets, all different, as delivered once more, without a failure."""
        live = offsets[(offsets < self.undelivered_from) & ~self.is_acked(offsets)]
        if not len(live):
            return
        self.digest_part = None
        self.recalled = _incremented(self.recalled, live, self.cursor)
        self.recalled_sum = (self.recalled_sum + _sum(mix(live))) & _MASK

    def restart(
        self, group_id: GroupId, offset: QueueOffset, queue_end: QueueOffset, epoch: Epoch
    ) -> None:
        """Forget acks, failures and delays; continue at `offset` under a new id.

        Messages that may have been delivered before count as delivered once.
        """
        mark = min(self.undelivered_from, queue_end)
        self.digest_part = None
        self.group_id, self.since_epoch = group_id, epoch
        self.cursor = offset
        self.reserved, self.delivered_to = offset, mark
        self.delivered_ends = [mark] if mark > offset else []
        self.ack_sum = self.ended_sum = self.recalled_sum = self.later_sum = self.acked_count = 0
        self.acked, self.later = _NO_FLAGS, _NO_TIMES
        self.ended = self.recalled = _NO_NUMBERS
        self.expired_to = QueueOffset(0)
        self.moved, self.moved_sum = _NO_OFFSETS, 0

    def _count_failures(self, offsets: U64) -> None:
        """Count one more failure of each offset, all different."""
        self.digest_part = None
        self.ended = _incremented(self.ended, offsets, self.cursor)
        self.ended_sum = (self.ended_sum + _sum(mix(offsets ^ _ENDED_SALT))) & _MASK

    def _delay(self, offsets: U64, times: I64 | None) -> None:
        """Set the earliest redelivery of offsets, all different; None: none is set."""
        if self.later.value_count:
            before = self.later.of(offsets)
            delayed = offsets[before != 0]
            if len(delayed):
                self.later_sum = (self.later_sum - _times_sum(offsets, before)) & _MASK
                self.later = self.later.put(delayed, 0, self.cursor)
        if times is not None:
            self.later = self.later.put(offsets, times, self.cursor)
            self.later_sum = (self.later_sum + _times_sum(offsets, times)) & _MASK

    def recomputed_later_sum(self) -> int:
        """Return `later_sum`, recomputed."""
        offsets = self.later.offsets()
        return _times_sum(offsets, self.later.of(offsets))

    def not_before_ms(self, offsets: U64) -> I64:
        """Return each offset's earliest redelivery, Unix milliseconds, (n, int64); 0: at once."""
        return self.later.of(offsets)

    def failures(self, offsets: U64) -> U32:
        """Return the nacks and ended leases of each unacked offset, (n, uint32); 0 if acked."""
        return self.ended.of(offsets).astype(np.uint32)

    def are_exhausted(self, offsets: U64) -> npt.NDArray[np.bool_]:
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
        self.digest_part = None
        self.reserved = max(self.reserved, offset)

    def alter(self, settings: GroupSettings) -> None:
        """Replace the settings."""
        self.digest_part = None
        self.settings = settings

    @property
    def undelivered_from(self) -> QueueOffset:
        """First offset that was never delivered."""
        return max(self.reserved, self.delivered_to)

    def begin_epoch(self, queue_end: QueueOffset) -> bool:
        """Count messages that the old leader may have delivered as delivered once more.

        Returns whether that changes the group.
        """
        mark = min(self.reserved, queue_end)
        if mark > self.cursor:
            self.delivered_ends.append(mark)
        elif self.reserved == self.cursor and mark <= self.delivered_to:
            return False
        self.hand_over(mark)
        return True

    def hand_over(self, offset: QueueOffset) -> None:
        """Record that only offsets below `offset` were delivered; stop until the next `reserve`."""
        self.digest_part = None
        self.delivered_to = max(self.delivered_to, offset)
        self.reserved = self.cursor

    def attempts(self, offsets: U64) -> U32:
        """Return the number of each offset's next delivery, (n, uint32): 1 is the first.

        Every delivery that may have reached a consumer counts.
        """
        count = np.ones(len(offsets), np.uint32)
        for column in (self.ended, self.recalled):
            if column.value_count:
                count += column.of(offsets)
        for end in self.delivered_ends:
            count += offsets < end
        return count

    def unacked_from(self, offset: int) -> int:
        """Return the first unacked offset at or after `offset`, which is not below the cursor."""
        return self.acked.first_unset(offset)

    def unacked_count(self, queue_end: QueueOffset) -> int:
        """Return the number of fired messages that are not acked."""
        return queue_end - self.cursor - self.acked.count_from(self.cursor)

    def first_unacked(self, end: int, count: int) -> U64:
        """Return the first `count` unacked offsets below `end`, ascending."""
        return self.acked.unset_offsets(self.cursor, end, count)

    def restore(
        self, acked: GroupColumn, ended: GroupColumn, later: GroupColumn, recalled: GroupColumn
    ) -> None:
        """Set the columns of a manifest. Drops failures of acked messages, kept before 0.2."""
        self.acked, self.ended, self.later, self.recalled = acked, ended, later, recalled
        for column in (ended, recalled):
            offsets = column.offsets()
            self._forget(offsets[acked.of(offsets)])
        self.later_sum = self.recomputed_later_sum()

    def _advance(self) -> None:
        if self.acked.value_count:
            self.cursor = QueueOffset(self.acked.first_unset(self.cursor))
            if self.cursor >= self.acked.top:
                self.acked = _NO_FLAGS
        self.reserved = max(self.reserved, self.cursor)
        if self.delivered_ends and min(self.delivered_ends) <= self.cursor:
            self.delivered_ends = [end for end in self.delivered_ends if end > self.cursor]


def _incremented(column: GroupColumn, offsets: U64, floor: int) -> GroupColumn:
    """Return a column of numbers, one higher at each of these offsets, all different."""
    numbers = column.of(offsets)
    numbers += numbers < _ENDED_MAX  # no overflow back to "first delivery"
    return column.put(offsets, numbers, floor)


def _times_sum(offsets: U64, times: I64) -> int:
    """Return the sum of hashes of (offset, time) of the times that are not 0, modulo 2 ** 64."""
    set_ = times != 0
    return _sum(mix(mix(offsets[set_] ^ _LATER_SALT) ^ times[set_].astype(np.uint64)))


def _sum(values: U64) -> int:
    return int(np.add.reduce(values, dtype=np.uint64))


def moved_hashes(offsets: U64) -> int:
    """Return the sum of hashes of moved messages, modulo 2 ** 64."""
    if not len(offsets):
        return 0
    return _sum(mix(offsets ^ _MOVED_SALT))


def _first_only(mask: npt.NDArray[np.bool_], offsets: U64) -> U64:
    """Clear `mask` where an earlier set element has the same offset; return the set offsets."""
    chosen = offsets[mask]
    if len(chosen) > 1 and not (chosen[1:] > chosen[:-1]).all():
        _, first = np.unique(chosen, return_index=True)
        if len(first) < len(chosen):
            at = np.sort(np.flatnonzero(mask)[first])
            mask[:] = False
            mask[at] = True
            return offsets[at]
    return chosen
