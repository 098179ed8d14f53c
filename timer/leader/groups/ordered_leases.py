"""Leases of a group that keeps an order: types `key_shared`, `exclusive` and `failover`.

    cursor                                queue end
      | L  A  L  W  f  f  .  .  .  .  .  .  |     one key: messages behind the wall W wait

Messages of one key are delivered in the order of their queue offsets. Groups of types `exclusive`
and `failover` serve one consumer at a time and treat all messages as one key.

A message is delivered only if every earlier message of its key is acked (A), or leased to the same
consumer (L). A message that returns by a nack or an ended lease is a wall until it is delivered
again. A return also recalls the later messages of its key from their consumer: RECALL. The
deliveries of a key therefore go on without a gap, or go back to the key's first unacked message.

The marks alone decide which messages may be delivered. Each look computes them anew, in a window
that begins at the first unacked offset. Keys are hashes: two keys of one hash wait for each other.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np

from timer.entries.payloads import KEY_SHARED, SHARED, GroupOp, Op
from timer.leader.groups.offset_column import Marks
from timer.leader.groups.shared_leases import (
    ACCEPT,
    ACKING,
    DEAD_LETTERED,
    DELIVERY_BYTES,
    ENDING,
    FREE,
    LEASE_LOST,
    NOT_DELIVERED,
    ConsumerStream,
    Lease,
    Leases,
    how_done,
    leased,
)
from timer.model.columns import I64, U64
from timer.model.units import Epoch, LeaseId, MonoMs, QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

ORDER_WINDOW: Final = 16_384
"""Length of the window, in unacked offsets: nothing beyond it is delivered."""
LOOK_MIN: Final = 1024
MOVES_KEPT: Final = 1024
ANYBODY: Final = 0
_NO_WALL: Final = (1 << 63) - 1


class _Open(NamedTuple):
    """Messages that may be delivered: offsets ascending, and their owners, each (n,)."""

    offsets: U64
    owner: I64
    """Number of the consumer that holds messages of the same key. 0: none does."""
    whole: bool
    """No messages lie behind the ones that were looked at."""


@dataclass
class Ordered(Leases):
    """The leases of an ordered group, in one epoch; see the module."""

    work: ClassVar[int] = 4
    _keys: Marks = field(init=False)
    _recalled: list[U64] = field(default_factory=list)
    _returns_at: UnixMs | None = None
    _moves: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MOVES_KEPT))
    """(Lease number, first message) of the last MOVEs. Leases given before have lower numbers."""

    def __post_init__(self) -> None:
        """Start at the group's cursor."""
        super().__post_init__()
        self._keys = Marks(self._fresh)

    # ---- delivery

    def _hand_out(self, now_ms: MonoMs, clock_ms: UnixMs, queue: Queue, limit: int) -> Lease | None:
        """See Leases. The lease goes to the next consumer that may get an open message."""
        limit = 0 if self._expiring else self._room(limit)
        ready = [each for each in self._served() if self._allowed(each) > 0]
        if not ready or limit <= 0:
            return None
        size = min(max(LOOK_MIN, 2 * self.in_flight + limit), ORDER_WINDOW)
        while True:
            open_ = self._look(clock_ms, queue, size)
            for consumer in ready:
                offsets = self._of(consumer, open_, queue, min(limit, self._allowed(consumer)))
                if len(offsets):
                    self._turn(consumer)
                    self._fresh = max(self._fresh, int(offsets[-1]) + 1)
                    return self._lease(consumer, offsets, now_ms)
            if open_.whole or size >= ORDER_WINDOW:
                return None
            size = min(4 * size, ORDER_WINDOW)

    def _served(self) -> Sequence[ConsumerStream]:
        """Return the consumers that may get messages now, in the order of their turns."""
        if self.group.settings.type == KEY_SHARED:
            return [*self.consumers]
        heard = next((each for each in self.consumers if not each.silent), None)
        return [heard] if heard is not None else [*self.consumers][:1]

    def _fall_silent(self, consumer: ConsumerStream) -> None:
        """See Leases. In a failover group the next consumer takes over for good."""
        super()._fall_silent(consumer)
        if self.group.settings.type != KEY_SHARED and [*self.consumers][:1] == [consumer]:
            self.consumers.append(self.consumers.pop(0))

    def _turn(self, consumer: ConsumerStream) -> None:
        if self.group.settings.type == KEY_SHARED:
            self.consumers.remove(consumer)
            self.consumers.append(consumer)

    def _of(self, consumer: ConsumerStream, open_: _Open, queue: Queue, limit: int) -> U64:
        mine = (open_.owner == ANYBODY) | (open_.owner == consumer.number)
        offsets: U64 = open_.offsets[mine][:limit]
        if len(offsets):
            offsets = self._alive(offsets[: queue.at_hand(offsets)], queue)
        if len(offsets):
            offsets = offsets[: queue.fitting(offsets, DELIVERY_BYTES)]
        return offsets

    def _alive(self, offsets: U64, queue: Queue) -> U64:
        """See Leases. Messages behind the first expired one wait until that one is gone."""
        alive = super()._alive(offsets, queue)
        if self._expired:
            alive = alive[alive < min(int(expired[0]) for expired in self._expired)]
        return alive

    def _look(self, clock_ms: UnixMs, queue: Queue, size: int) -> _Open:
        """Find the messages that may be delivered among the first `size` unacked offsets."""
        group = self.group
        offsets = group.first_unacked(min(int(queue.end), int(group.reserved)), size)
        keys = self._keys_of(offsets, queue)
        whole = len(keys) < size
        offsets = offsets[: len(keys)]
        free = self._marks.of(offsets) == FREE
        if group.settings.max_attempts:
            self._bury(offsets[free])
        marks = self._marks.of(offsets)
        free = marks == FREE
        times = group.not_before(offsets)
        early = free & (times > clock_ms)
        self._returns_at = UnixMs(int(times[early].min())) if early.any() else None
        free &= ~early
        held = leased(marks)
        walls = ~(free | held | (marks == ACKING))
        mine = keys[free]
        wall_at = _first_of(keys[walls], offsets[walls].astype(np.int64), mine, _NO_WALL)
        owner = _first_of(keys[held], self._owners(marks[held]), mine, ANYBODY)
        offsets = offsets[free]
        before = offsets.astype(np.int64) < wall_at
        return _Open(offsets[before], owner[before], whole)

    def _keys_of(self, offsets: U64, queue: Queue) -> U64:
        """Return the keys, (n, uint64); fewer if the next messages must first be read from disk."""
        if self.group.settings.type != KEY_SHARED:
            return np.zeros(len(offsets), np.uint64)
        keys = self._keys.of(offsets)
        unknown = offsets[keys == 0]
        if not len(unknown):
            return keys
        there = queue.at_hand(unknown)
        if there:
            self._keys.set(unknown[:there], queue.key_hashes(unknown[:there]))
            keys = self._keys.of(offsets)
        if there < len(unknown):
            keys = keys[: int(np.searchsorted(offsets, unknown[there]))]
        return keys

    def _owners(self, lease_ids: U64) -> I64:
        """Return the number of the consumer that holds each lease, (n, int64)."""
        held = np.fromiter(self._held, np.uint64, len(self._held))  # ascending, as ids are issued
        numbers = [lease.consumer.number for lease in self._held.values()]
        return np.array(numbers, np.int64)[np.searchsorted(held, lease_ids)]

    def returns_at_ms(self) -> UnixMs | None:
        """See Leases."""
        return self._returns_at

    def waiting_from(self, queue_end: QueueOffset, clock_ms: UnixMs) -> int | None:
        """See Leases. Covers the first unacked messages, also those that wait for their order."""
        offsets = self.group.first_unacked(queue_end, ORDER_WINDOW)
        free = offsets[self._marks.of(offsets) == FREE]
        free = free[self.group.not_before(free) <= clock_ms]
        return int(free[0]) if len(free) else None

    # ---- return and recall

    def _again(self, offsets: U64) -> None:
        """Do nothing: freed messages are no longer walls, and `_look` finds them."""

    def _returned(self, offsets: U64) -> None:
        """Recall the leased messages behind these, in each of their keys."""
        if not len(offsets):
            return
        offsets = np.sort(offsets)
        behind = self.group.first_unacked(self._fresh, ORDER_WINDOW)
        behind = behind[behind > offsets[0]]
        behind = behind[leased(self._marks.of(behind))]
        first = _first_of(self._key(offsets), offsets.astype(np.int64), self._key(behind), _NO_WALL)
        behind = behind[behind.astype(np.int64) > first]
        if len(behind):
            self._release_all(behind, ENDING)
            self._recalled.append(behind)

    def _key(self, offsets: U64) -> U64:
        """Return the keys of delivered messages."""
        if self.group.settings.type == KEY_SHARED:
            return self._keys.of(offsets)
        return np.zeros(len(offsets), np.uint64)

    def recall(self) -> GroupOp | None:
        """See Leases."""
        recalled, self._recalled = self._recalled, []
        if not recalled:
            return None
        offsets = np.concatenate(recalled)
        return GroupOp(Op.RECALL, self.group.topic, self.group.group_id, offsets)

    def ack_up_to(self, epoch: Epoch, lease_id: LeaseId, offset: int) -> tuple[int, U64]:
        """Judge an ack of everything up to `offset`; return the verdict and the offsets to ack.

        For groups that serve one consumer at a time. The ack is accepted under the rules of single
        acks, if another consumer holds none of the messages. If all of them are already on their
        way to be acked, the last one is acked again, so that the answer waits for those acks.

        DEAD_LETTERED: the ack is accepted. At least one of the messages became a dead letter after
        the lease was given.
        """
        nothing = np.zeros(0, np.uint64)
        if self._of_another_life(epoch, lease_id):
            return LEASE_LOST, nothing
        if offset >= max(self._fresh, self.group.delivered_to):
            return NOT_DELIVERED, nothing
        dead = self._moved_since(epoch, lease_id, offset)
        unacked = self.group.first_unacked(offset + 1, offset + 1)
        if not len(unacked):
            last = np.array([offset], np.uint64)
            verdict = DEAD_LETTERED if dead else int(how_done(self.group, last)[0])
            return verdict, nothing
        offsets = unacked[self._marks.of(unacked) != ACKING]
        accept = DEAD_LETTERED if dead else ACCEPT
        if not len(offsets):
            return accept, unacked[-1:]
        theirs = offsets[leased(self._marks.of(offsets))]
        lease = self._held.get(lease_id) if epoch == self.epoch else None
        holders = {self._held[LeaseId(each)].consumer for each in self._marks.of(theirs).tolist()}
        if holders - ({lease.consumer} if lease is not None else set()):
            return LEASE_LOST, nothing
        self._release_all(theirs, ACKING)
        self._marks.set(offsets, ACKING)
        return accept, offsets

    def _moved_since(self, epoch: Epoch, lease_id: LeaseId, offset: int) -> bool:
        """Return whether a message up to `offset` became a dead letter since the lease."""
        if epoch < self.epoch:
            moved = self.group.moved
            near = (moved <= offset) & (moved + np.uint64(ORDER_WINDOW) > offset)
            return bool(near.any())
        return any(lease_id < number and first <= offset for number, first in self._moves)

    def applied(self, op: GroupOp) -> None:
        """See Leases."""
        super().applied(op)
        if op.op is Op.MOVE:
            self._moves.append((next(self.lease_ids), int(op.offsets.min())))

    def _forget_done(self) -> None:
        super()._forget_done()
        self._keys.forget_below(int(self.group.cursor))


def _first_of(keys: U64, values: I64, of: U64, default: int) -> I64:
    """Return, for each key in `of`, the value at its first place in `keys`, or the default."""
    wanted, places = np.unique(of, return_inverse=True)
    found = np.full(len(wanted) + 1, default, np.int64)  # the last element takes other keys
    place = np.searchsorted(wanted, keys)
    other = wanted[np.minimum(place, len(wanted) - 1)] != keys if len(wanted) else place >= 0
    place[other] = len(wanted)
    found[place[::-1]] = values[::-1]  # the last assignment to a key is its first place
    return found[places.ravel()]


def leases_of(group: Group, epoch: Epoch, lease_ids: Iterator[int]) -> Leases:
    """Return the leases of a group: an object of the class for the group's type."""
    kind = Leases if group.settings.type == SHARED else Ordered
    return kind(group, epoch, lease_ids=lease_ids)
