"""Leases of one group of type `shared`: the leader's memory, a pure core.

What the log holds of a group (timer/groups.py) is which messages are acked, how often a lease
ended, and how far the leader may hand out. Who holds what until when is here, and ends with the
leadership.

    fresh --hand out--> leased --ack--> acking --applied--> gone
                          |                ^
                          |                +-------- ack --------+
                          |                                      |
                          +-- deadline, consumer gone --> ending +--ENDED applied--> back --+
                          ^                                                                 |
                          +------------------------ hand out again -------------------------+

An offset carries one mark: 0 (free), a lease id, ACKING or ENDING. Proposals (ACK, ENDED, RESERVE
ops) go to the log; nothing is answered or handed out again before they were applied.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from timer.columns import U64
from timer.groups import Group
from timer.payloads import GroupOp, Op
from timer.queues import Queue
from timer.units import Epoch, LeaseId, MonoMs, QueueOffset

ACKING: Final = np.uint64((1 << 64) - 1)
ENDING: Final = np.uint64((1 << 64) - 2)
FREE: Final = np.uint64(0)
RESERVE_AHEAD: Final = 4096
"""How far beyond what was handed out the leader reserves: one RESERVE op for so many messages."""
SCAN_MAX: Final = 65_536
"""Offsets looked at in one go when most are acked already, as after a failover."""

DEADLINES_MIN: Final = 1024

DELIVERY_BYTES: Final = 1 << 20
"""Of payloads, keys and headers in one delivery, unless one message alone has more."""

ACCEPT: Final = 1
ALREADY_ACKED: Final = 2
LEASE_LOST: Final = 3
NOT_DELIVERED: Final = 4


@dataclass(slots=True, eq=False)
class Consumer:
    """One open stream of a consumer."""

    name: str
    lease_ms: int
    sink: Callable[[Any], None]
    """Where the shell puts its deliveries."""
    credit: int = 0
    """Messages that it still takes."""
    paused: bool = False
    """Its stream is full: it gets nothing until that has drained."""
    leases: set[LeaseId] = field(default_factory=set)


@dataclass(slots=True)
class Lease:
    """Messages handed out together."""

    lease_id: LeaseId
    consumer: Consumer
    offsets: U64
    deadline_ms: MonoMs
    left: int
    """How many of them are still held."""


@dataclass(slots=True)
class Leases:
    """Who holds which message of a group, in one epoch."""

    group: Group
    epoch: Epoch
    consumers: deque[Consumer] = field(default_factory=deque)
    """In the order in which they are served next."""
    _held: dict[LeaseId, Lease] = field(default_factory=dict)
    _deadlines: list[tuple[MonoMs, LeaseId]] = field(default_factory=list)
    _next_lease: int = 1
    _fresh: int = 0
    """First offset never handed out in this epoch."""
    _back: deque[U64] = field(default_factory=deque)
    """Offsets to be handed out again, each array ascending."""
    _marks: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1024, np.uint64))
    _base: int = 0
    _reserving: bool = False

    def __post_init__(self) -> None:
        """Start at the group's cursor: what the old leader handed out comes again, marked."""
        self._fresh = self._base = int(self.group.cursor)

    # ---- handing out

    def reserve(self) -> GroupOp | None:
        """Return the RESERVE op that should be proposed now, if any.

        It runs ahead of what has fired, so that a message seldom waits for it.
        """
        fresh = max(self._fresh, int(self.group.cursor))
        enough = int(self.group.reserved) >= fresh + RESERVE_AHEAD // 2
        if self._reserving or enough or not self.consumers:
            return None
        self._reserving = True
        offsets = np.array([fresh + RESERVE_AHEAD], np.uint64)
        return GroupOp(Op.RESERVE, self.group.topic, self.group.group_id, offsets)

    def hand_out(self, now_ms: MonoMs, queue: Queue, limit: int) -> Lease | None:
        """Lease up to `limit` messages, of about a megabyte, to the next consumer with credit.

        None: no consumer has credit, no message is free, or those that are were sent for.
        """
        consumer = self._next_consumer()
        if consumer is None:
            return None
        offsets = self._take(queue.end, min(limit, consumer.credit))
        if not len(offsets):
            return None
        there = queue.at_hand(offsets)
        if there < len(offsets):
            self._back.appendleft(offsets[there:])
            offsets = offsets[:there]
        if not there:
            return None
        fitting = queue.fitting(offsets, DELIVERY_BYTES)
        if fitting < len(offsets):
            self._back.appendleft(offsets[fitting:])
            offsets = offsets[:fitting]
        self.consumers.rotate(-1)
        deadline_ms = MonoMs(now_ms + consumer.lease_ms)
        lease = Lease(LeaseId(self._next_lease), consumer, offsets, deadline_ms, len(offsets))
        self._next_lease += 1
        self._held[lease.lease_id] = lease
        self._mark(offsets, np.uint64(lease.lease_id))
        self._watch(lease)
        consumer.leases.add(lease.lease_id)
        consumer.credit -= len(offsets)
        return lease

    def _watch(self, lease: Lease) -> None:
        """Note its deadline; forget those of leases that ended long before theirs."""
        heapq.heappush(self._deadlines, (lease.deadline_ms, lease.lease_id))
        if len(self._deadlines) > 2 * len(self._held) + DEADLINES_MIN:
            self._deadlines = [(each.deadline_ms, each.lease_id) for each in self._held.values()]
            heapq.heapify(self._deadlines)

    def _next_consumer(self) -> Consumer | None:
        for _ in range(len(self.consumers)):
            if self.consumers[0].credit > 0 and not self.consumers[0].paused:
                return self.consumers[0]
            self.consumers.rotate(-1)
        return None

    def _take(self, queue_end: QueueOffset, limit: int) -> U64:
        while self._back:
            offsets: U64 = self._back.popleft()
            free = ~self.group.is_acked(offsets) & (self._marks_of(offsets) == FREE)
            offsets = offsets[free]
            if len(offsets) > limit:
                self._back.appendleft(offsets[limit:])
            if len(offsets):
                return offsets[:limit]
        end = min(int(queue_end), int(self.group.reserved))
        self._fresh = max(self._fresh, int(self.group.cursor))
        scan = limit
        while self._fresh < end:
            offsets = np.arange(self._fresh, min(self._fresh + scan, end), dtype=np.uint64)
            free = ~self.group.is_acked(offsets) & (self._marks_of(offsets) == FREE)
            found: U64 = offsets[free][:limit]
            self._fresh = int(found[-1] if len(found) == limit else offsets[-1]) + 1
            if len(found):
                return found
            scan = min(2 * scan, max(limit, SCAN_MAX))
        return np.zeros(0, np.uint64)

    # ---- taking back

    def ack(self, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> npt.NDArray[np.uint8]:
        """Judge an ack, (n, uint8): ACCEPT, ALREADY_ACKED, LEASE_LOST or NOT_DELIVERED.

        Accepted: unacked and not leased to somebody else meanwhile, whichever epoch it was handed
        out in. What is accepted is not handed out again; the caller proposes an ACK op for it.
        Of a repeated offset the first one counts.
        """
        result = np.full(len(offsets), LEASE_LOST, np.uint8)
        marks = self._marks_of(offsets)
        ours = (marks == FREE) | (marks == ACKING) | (marks == ENDING)
        if epoch == self.epoch:
            ours |= marks == np.uint64(lease_id)
        result[ours] = ACCEPT
        delivered_below = max(self._fresh, *self.group.marks, 0)  # by this leader, by older ones
        result[offsets >= np.uint64(delivered_below)] = NOT_DELIVERED
        result[self.group.is_acked(offsets)] = ALREADY_ACKED
        result[(result == ACCEPT) & _repeated(offsets)] = ALREADY_ACKED
        accepted = result == ACCEPT
        if epoch == self.epoch:
            self._settle(lease_id, int(np.count_nonzero(accepted & (marks == np.uint64(lease_id)))))
        self._mark(offsets[accepted], ACKING)
        return result

    def _settle(self, lease_id: LeaseId, acked: int) -> None:
        """Count what was acked of a lease; it is over when nothing is left."""
        lease = self._held.get(lease_id)
        if lease is None:
            return
        lease.left -= acked
        if lease.left <= 0:
            del self._held[lease_id]
            lease.consumer.leases.discard(lease_id)

    def expire(self, now_ms: MonoMs) -> GroupOp | None:
        """End the leases whose deadline has passed; return the ENDED op to propose, if any."""
        ended: list[U64] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, lease_id = heapq.heappop(self._deadlines)
            ended.append(self._end(lease_id))
        return self._ended(ended)

    def join(self, consumer: Consumer) -> None:
        """Serve one more consumer."""
        self.consumers.append(consumer)

    def leave(self, consumer: Consumer) -> GroupOp | None:
        """A consumer's stream broke: its leases end at once. Return the ENDED op to propose."""
        self.consumers.remove(consumer)
        return self._ended([self._end(lease_id) for lease_id in sorted(consumer.leases)])

    def _end(self, lease_id: LeaseId) -> U64:
        lease = self._held.pop(lease_id, None)
        if lease is None:
            return np.zeros(0, np.uint64)
        lease.consumer.leases.discard(lease_id)
        offsets: U64 = lease.offsets[self._marks_of(lease.offsets) == np.uint64(lease_id)]
        self._mark(offsets, ENDING)  # nobody's until ENDED is applied
        return offsets

    def _ended(self, ended: list[U64]) -> GroupOp | None:
        offsets = np.sort(np.concatenate(ended)) if ended else np.zeros(0, np.uint64)
        if not len(offsets):
            return None
        return GroupOp(Op.ENDED, self.group.topic, self.group.group_id, offsets)

    def applied(self, op: GroupOp) -> None:
        """One of this group's ops was applied to `group`."""
        match op.op:
            case Op.RESERVE:
                self._reserving = False
            case Op.ENDED:
                # What was acked meanwhile stays ACKING.
                offsets = op.offsets[self._marks_of(op.offsets) == ENDING]
                self._mark(offsets, FREE)
                self._back.append(offsets)
            case Op.ACK:
                self._forget_done()
            case Op.CREATE:
                raise AssertionError(op)

    def _forget_done(self) -> None:
        """Drop marks below the cursor once they are the greater half."""
        skip = int(self.group.cursor) - self._base
        if skip > len(self._marks) // 2:
            self._marks = np.concatenate(
                [self._marks[skip:], np.zeros(min(skip, len(self._marks)), np.uint64)]
            )
            self._base += skip

    def wake_at_ms(self) -> MonoMs | None:
        """When `expire` must be called next; None: nothing is leased."""
        while self._deadlines and self._deadlines[0][1] not in self._held:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def leased(self) -> int:
        """Return how many messages are leased now."""
        return sum(lease.left for lease in self._held.values())

    # ---- marks

    def _marks_of(self, offsets: U64) -> npt.NDArray[np.uint64]:
        index = offsets.astype(np.int64) - self._base
        inside = (index >= 0) & (index < len(self._marks))
        if inside.all():
            return self._marks[index]
        return np.where(inside, self._marks[np.where(inside, index, 0)], FREE)

    def _mark(self, offsets: U64, mark: np.uint64) -> None:
        index = offsets.astype(np.int64) - self._base
        index = index[index >= 0]
        if not len(index):
            return
        size = int(index.max()) + 1
        if size > len(self._marks):
            grown = np.zeros(2 * size, np.uint64)
            grown[: len(self._marks)] = self._marks
            self._marks = grown
        self._marks[index] = mark


def _repeated(offsets: U64) -> npt.NDArray[np.bool_]:
    """Return which offsets stood earlier in the same array (n, bool)."""
    repeated = np.zeros(len(offsets), np.bool_)
    if len(offsets) > 1 and not (offsets[1:] > offsets[:-1]).all():
        repeated[:] = True
        repeated[np.unique(offsets, return_index=True)[1]] = False
    return repeated
