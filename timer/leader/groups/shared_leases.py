"""Leases of one group of type `shared`, a pure core in the leader's memory.

The types that keep an order are in timer/leader/groups/ordered_leases.py.

The log holds a group's state (timer/ready/group.py): its acked messages, the number of failures of
each message, and the offset below which the leader may deliver. The leases themselves are only
here: the consumer and the deadline of each leased message. They end with the leadership.

    fresh --hand out--> leased --ack--> acking --applied--> gone
                          |                ^
                          |                +-------- ack --------+
                          |                                      |
                          +-- deadline, consumer gone --> ending +--ENDED applied--> back --+
                          +-- nack ---------------------> ending +--NACK applied-> waiting -+
                          ^                                                                 |
                          +------------------------ hand out again -------------------------+

A message that has failed as often as the group allows becomes dying instead of returning:
`take_dead` returns it for a MOVE op. An offset has one mark: 0 (free), a lease id, ACKING, ENDING,
WAITING or DYING. Every change is proposed to the log as an op. Answers and redeliveries wait until
the op is applied.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from timer.entries.payloads import GroupOp, Op
from timer.leader.groups.offset_column import Marks
from timer.model.columns import I64, U64
from timer.model.timer_errors import EngineError
from timer.model.units import Epoch, GroupId, LeaseId, MonoMs, QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

ACKING: Final = np.uint64((1 << 64) - 1)
ENDING: Final = np.uint64((1 << 64) - 2)
WAITING: Final = np.uint64((1 << 64) - 3)
DYING: Final = np.uint64((1 << 64) - 4)
FREE: Final = np.uint64(0)
RESERVE_AHEAD: Final = 4096
"""Offsets that the leader reserves ahead of deliveries: one RESERVE op serves so many messages."""
SCAN_MAX: Final = 65_536
"""Offsets looked at in one call when most are already acked, as after a failover."""
DEAD_ROWS_MAX: Final = 256
"""Most dead letters in one MOVE: the headers of each take some microseconds."""

LOOK_ROWS: Final = 4096
"""Offsets looked at in one step of the search for the first free one."""

DEADLINES_MIN: Final = 1024
WAITING_MIN: Final = 256

DELIVERY_BYTES: Final = 1 << 20
"""Most bytes of payloads, keys and headers in one delivery; one larger message goes alone."""

ACCEPT: Final = 1
ALREADY_ACKED: Final = 2
LEASE_LOST: Final = 3
NOT_DELIVERED: Final = 4
EXPIRED: Final = 5
"""The message is done: acked or expired. The group's state does not hold which of the two."""
DEAD_LETTERED: Final = 6
"""Unacked, the message moved to another topic, as a dead letter or by a redrive, as a new one."""


@dataclass(slots=True, eq=False)
class ConsumerStream:
    """One open stream of a consumer."""

    name: str
    lease_ms: int
    sink: Callable[[Any], None]
    """Callback of the shell that sends the stream's deliveries."""
    credit: int = 0
    """Messages that the consumer still accepts."""
    end: Callable[[EngineError], None] = lambda _: None
    """Called when the consumer's group is deleted."""
    once: bool = False
    """The consumer takes one lease and nothing after it."""
    paused: bool = False
    """The stream is full: the consumer gets nothing until it has drained."""
    one_by_one: bool = False
    """Each lease pauses the consumer; the sink resumes it when it has room for another."""
    silent: bool = False
    """A lease of the consumer reached its deadline, and no request has come from it since."""
    leases: set[LeaseId] = field(default_factory=set)
    number: int = 0
    """Order of joining, from 1."""


@dataclass(slots=True)
class Lease:
    """Messages delivered together to one consumer."""

    lease_id: LeaseId
    consumer: ConsumerStream
    offsets: U64
    deadline_ms: MonoMs
    left: int
    """Number of its messages that are still leased."""
    group_id: GroupId = GroupId(0)
    """The group's id when the lease was given: a seek assigns a new one."""


@dataclass(slots=True)
class Leases:
    """The leases of a group, in one epoch."""

    group: Group
    epoch: Epoch
    consumers: list[ConsumerStream] = field(default_factory=list)
    """In the order in which they are served next."""
    lease_ids: Iterator[int] = field(default_factory=itertools.count)
    """Shared by all groups of the epoch."""
    in_flight: int = 0
    """Messages leased now."""
    _held: dict[LeaseId, Lease] = field(default_factory=dict)
    _deadlines: list[tuple[MonoMs, LeaseId]] = field(default_factory=list)
    _fresh: int = 0
    """First offset never delivered in this epoch."""
    _back: list[U64] = field(default_factory=list)
    """Offsets to be delivered again, each array ascending."""
    _marks: Marks = field(init=False)
    _born: int = field(init=False)
    """Leases with greater ids were given to the group under its present id."""
    _reserving: bool = False
    _joined: int = 0
    _silent: int = 0
    """Number of silent consumers."""
    _waiting: list[tuple[UnixMs, int, I64, U64]] = field(default_factory=list)
    """Heap of arrays of delayed messages: (first time, first offset, ascending times, offsets)."""
    _merge_at: int = WAITING_MIN
    _dead: list[U64] = field(default_factory=list)
    """Offsets marked DYING, each array ascending."""
    _expired: list[U64] = field(default_factory=list)
    """Offsets that were to be delivered, had expired, and are marked ACKING."""
    _expiring: int = 0
    """EXPIRE ops of the group in flight."""
    _outlived_ms: UnixMs | None = None
    """Messages due at or before this have expired, Unix milliseconds. None: none expires."""
    work: ClassVar[int] = 1
    """Work units of a look for free messages, relative to other types."""
    handing_over: bool = False
    """The group's HAND_OVER is in flight: nothing is delivered."""
    unfinished: bool = False
    """The last call stopped before it had looked at everything. Call again."""

    def __post_init__(self) -> None:
        """Start at the group's cursor: deliveries of the old leader are repeated, and marked so."""
        self._fresh = int(self.group.cursor)
        self._marks = Marks(self._fresh)
        self._born = next(self.lease_ids)

    # ---- delivery

    def reserve(self) -> GroupOp | None:
        """Return the RESERVE op to propose now, or None.

        Reservations run ahead of the fired messages, so that a message seldom waits for one. The
        first of an epoch covers all offsets delivered in earlier epochs, as most may be acked.
        """
        fresh = max(self._fresh, int(self.group.cursor))
        enough = int(self.group.reserved) >= fresh + RESERVE_AHEAD // 2
        if self._reserving or enough or not self.consumers or self.handing_over:
            return None
        self._reserving = True
        offsets = np.array([max(fresh + RESERVE_AHEAD, self.group.delivered_to)], np.uint64)
        return GroupOp(Op.RESERVE, self.group.topic, self.group.group_id, offsets)

    def hand_over(self) -> list[GroupOp]:
        """Return the ops that record, for a successor, how often each message was delivered.

        Nothing is delivered from then on until the ops are applied and offsets are reserved anew.
        """
        group = self.group
        if group.reserved == group.cursor and not self._reserving:
            return []
        self.handing_over = True
        held = np.array(list(self._held), np.uint64)
        known = [lease.offsets for lease in self._held.values()] or [np.zeros(0, np.uint64)]
        offsets = np.sort(np.concatenate(known))
        offsets = offsets[np.isin(self._marks.of(offsets), held)]
        end = np.array([max(self._fresh, int(group.cursor))], np.uint64)
        where = group.topic, group.group_id
        return [GroupOp(Op.RECALL, *where, offsets), GroupOp(Op.HAND_OVER, *where, end)]

    def hand_out(
        self,
        now_ms: MonoMs,
        clock_ms: UnixMs,
        queue: Queue,
        limit: int,
        outlived_ms: UnixMs | None = None,
    ) -> Lease | None:
        """Lease up to `limit` messages, of about a megabyte, to the next consumer with credit.

        Returns None if no consumer has credit, no message is free, or the free ones are still being
        read from disk or have expired. `take_expired` returns the expired ones.

        `outlived_ms`: messages due at or before it have expired, Unix milliseconds; None: none.
        """
        self._outlived_ms = outlived_ms
        self.unfinished = False
        if self.handing_over:
            return None
        return self._hand_out(now_ms, clock_ms, queue, limit)

    def _hand_out(self, now_ms: MonoMs, clock_ms: UnixMs, queue: Queue, limit: int) -> Lease | None:
        consumer, limit = self._next_consumer(), self._room(limit)
        if consumer is None or limit <= 0:
            return None
        self._release(clock_ms)
        offsets = self._take(clock_ms, queue.end, min(limit, self._allowed(consumer)))
        if not len(offsets):
            return None
        there = queue.at_hand(offsets)
        if there < len(offsets):
            self._back.insert(0, offsets[there:])
            offsets = offsets[:there]
        offsets = self._alive(offsets, queue)
        if not len(offsets):
            return None
        fitting = queue.fitting(offsets, DELIVERY_BYTES)
        if fitting < len(offsets):
            self._back.insert(0, offsets[fitting:])
            offsets = offsets[:fitting]
        self.consumers.append(self.consumers.pop(0))
        return self._lease(consumer, offsets, now_ms)

    def _alive(self, offsets: U64, queue: Queue) -> U64:
        """Return the messages at hand that have not expired; note the others for an EXPIRE op."""
        return self._young(offsets, queue, FREE)

    def _young(self, offsets: U64, queue: Queue, mark: np.uint64) -> U64:
        """Return the messages that have not expired; note expired ones with `mark` for EXPIRE."""
        if self._outlived_ms is None or not len(offsets):
            return offsets
        slices = queue.slices(offsets)
        due_ms = np.concatenate([page.rows["due_ms"][at.astype(np.int64)] for page, at in slices])
        old = due_ms <= self._outlived_ms
        if old.any():
            expired = offsets[old & (self._marks.of(offsets) == mark)]
            self._marks.set(expired, ACKING)
            if len(expired):
                self._expired.append(expired)
        return offsets[~old]

    def take_expired(self) -> U64:
        """Return the expired messages that were not delivered, for an EXPIRE op."""
        expired, self._expired = self._expired, []
        offsets = np.unique(np.concatenate(expired)) if expired else np.zeros(0, np.uint64)
        self._expiring += bool(len(offsets))
        return offsets

    def unexpired(self, offsets: U64) -> None:
        """Free messages whose EXPIRE op was rejected."""
        self._expiring -= 1
        self._marks.set(offsets, FREE)
        self._again(offsets)

    def _room(self, limit: int) -> int:
        """Return how many of `limit` messages max_in_flight still allows the group."""
        most = self.group.settings.max_in_flight
        return min(limit, most - self.in_flight) if most else limit

    def _lease(self, consumer: ConsumerStream, offsets: U64, now_ms: MonoMs) -> Lease:
        deadline_ms = MonoMs(now_ms + consumer.lease_ms)
        number, left = LeaseId(next(self.lease_ids)), len(offsets)
        lease = Lease(number, consumer, offsets, deadline_ms, left, self.group.group_id)
        self._held[lease.lease_id] = lease
        self._marks.set(offsets, np.uint64(lease.lease_id))
        self._watch(lease)
        consumer.leases.add(lease.lease_id)
        consumer.credit = 0 if consumer.once else consumer.credit - len(offsets)
        self.in_flight += len(offsets)
        return lease

    def _watch(self, lease: Lease) -> None:
        """Note a lease's deadline; drop the deadlines of ended leases once they are many."""
        heapq.heappush(self._deadlines, (lease.deadline_ms, lease.lease_id))
        if len(self._deadlines) > 2 * len(self._held) + DEADLINES_MIN:
            self._deadlines = [(each.deadline_ms, each.lease_id) for each in self._held.values()]
            heapq.heapify(self._deadlines)

    def _next_consumer(self) -> ConsumerStream | None:
        for _ in range(len(self.consumers)):
            if self._allowed(self.consumers[0]) > 0:
                return self.consumers[0]
            self.consumers.append(self.consumers.pop(0))
        return None

    def _allowed(self, consumer: ConsumerStream) -> int:
        """Return how many messages a consumer may get now.

        A silent consumer may be frozen and let its leases end. It gets nothing while another
        consumer is not silent. If all are silent and the group bounds failures, it gets one message
        at a time.
        """
        if consumer.paused:
            return 0
        if not consumer.silent:
            return consumer.credit
        if self._silent < len(self.consumers):
            return 0
        if self.group.settings.max_attempts:
            return min(1, consumer.credit) if not consumer.leases else 0
        return consumer.credit

    def heard(self, consumer: ConsumerStream) -> bool:
        """Note a request from a consumer; return whether the consumer was silent."""
        was, consumer.silent = consumer.silent, False
        self._silent -= was
        return was

    def _fall_silent(self, consumer: ConsumerStream) -> None:
        self._silent += not consumer.silent
        consumer.silent = True

    def _take(self, clock_ms: UnixMs, queue_end: QueueOffset, limit: int) -> U64:
        while self._back:
            offsets = self._free(clock_ms, self._back.pop(0))
            if len(offsets) > limit:
                self._back.insert(0, offsets[limit:])
            if len(offsets):
                return offsets[:limit]
        end = min(int(queue_end), int(self.group.reserved))
        self._fresh = max(self._fresh, int(self.group.cursor))
        scan = looked = limit
        while self._fresh < end:
            offsets = np.arange(self._fresh, min(self._fresh + scan, end), dtype=np.uint64)
            found = self._free(clock_ms, offsets)[:limit]
            self._fresh = int(found[-1] if len(found) == limit else offsets[-1]) + 1
            if len(found):
                return found
            looked += len(offsets)
            if looked > SCAN_MAX:  # millions may be acked behind one that is stuck
                self.unfinished = self._fresh < end
                break
            scan = min(2 * scan, max(limit, SCAN_MAX))
        return np.zeros(0, np.uint64)

    def _free(self, clock_ms: UnixMs, offsets: U64) -> U64:
        """Return the offsets that may be delivered; put the delayed and the dying ones aside."""
        group = self.group
        free: U64 = offsets[~group.is_acked(offsets) & (self._marks.of(offsets) == FREE)]
        if group.settings.max_attempts:
            free = self._bury(free)
        if len(group.later):
            times = group.not_before(free)
            early = times > clock_ms
            self._put_off(free[early], times[early])
            free = free[~early]
        return free

    def _bury(self, offsets: U64) -> U64:
        """Mark messages that failed too often as DYING; return the others."""
        dead = self.group.exhausted(offsets)
        if dead.any():
            self._marks.set(offsets[dead], DYING)
            self._dead.append(offsets[dead])
        return offsets[~dead]

    def _put_off(self, offsets: U64, times: I64) -> None:
        if len(offsets):
            self._marks.set(offsets, WAITING)
            order = np.argsort(times, kind="stable")
            self._wait(times[order], offsets[order])

    def _wait(self, times: I64, offsets: U64) -> None:
        heapq.heappush(self._waiting, (UnixMs(int(times[0])), int(offsets[0]), times, offsets))
        if len(self._waiting) > self._merge_at:
            self._merge_waiting()

    def _merge_waiting(self) -> None:
        """Merge many small arrays into one: a nack of one message must not cost an array."""
        runs = sorted(self._waiting, key=lambda run: len(run[2]))
        ends = np.cumsum([len(run[2]) for run in runs])
        small = int(np.searchsorted(ends, SCAN_MAX, side="right"))
        times = np.concatenate([run[2] for run in runs[:small]])
        offsets = np.concatenate([run[3] for run in runs[:small]])
        order = np.argsort(times, kind="stable")
        times, offsets = times[order], offsets[order]
        self._waiting = [(UnixMs(int(times[0])), int(offsets[0]), times, offsets), *runs[small:]]
        heapq.heapify(self._waiting)
        self._merge_at = len(self._waiting) + WAITING_MIN

    def _release(self, clock_ms: UnixMs) -> None:
        """Free the delayed messages whose time has come."""
        while self._waiting and self._waiting[0][0] <= clock_ms:
            _, _, times, offsets = heapq.heappop(self._waiting)
            due = int(np.searchsorted(times, clock_ms, side="right"))
            if due < len(times):
                self._wait(times[due:], offsets[due:])
            ready = np.sort(offsets[:due])
            ready = ready[self._marks.of(ready) == WAITING]
            self._marks.set(ready, FREE)
            self._back.append(ready)

    def returns_at_ms(self) -> UnixMs | None:
        """Return the cluster time at which the next delayed message may return; None: none."""
        return self._waiting[0][0] if self._waiting else None

    @property
    def dying(self) -> bool:
        """Whether some messages may be dead letters that have not moved yet."""
        return bool(self._dead)

    def take_dead(self, queue: Queue) -> U64:
        """Return dead letters for a MOVE: those in memory, about a megabyte; none if none are.

        Expired ones are left out; `take_expired` returns them.
        """
        while self._dead:
            offsets = self._dead.pop(0)
            still = ~self.group.is_acked(offsets) & (self._marks.of(offsets) == DYING)
            offsets = offsets[still]
            if not len(offsets):
                continue
            count = min(queue.at_hand(offsets), DEAD_ROWS_MAX)
            if count:
                count = queue.fitting(offsets[:count], DELIVERY_BYTES)
            if count < len(offsets):
                self._dead.insert(0, offsets[count:])
            taken = self._young(offsets[:count], queue, DYING)
            self.unfinished |= len(taken) < count and bool(self._dead)
            return taken
        return np.zeros(0, np.uint64)

    def waiting_from(self, queue_end: QueueOffset, clock_ms: UnixMs) -> int | None:
        """Return the first offset that waits for nothing except a consumer. None: none.

        Delayed messages, and messages about to become dead letters, are left out.
        """
        del clock_ms
        fresh = self.group.unacked_from(max(self._fresh, int(self.group.cursor)))
        found = [fresh] if fresh < queue_end else []
        for offsets in self._back:
            for start in range(0, len(offsets), LOOK_ROWS):
                some = offsets[start : start + LOOK_ROWS]
                free = some[~self.group.is_acked(some) & (self._marks.of(some) == FREE)]
                if len(free):
                    found.append(int(free[0]))
                    break
        return min(found, default=None)

    # ---- ack, nack, end

    def holder(self, lease_id: LeaseId) -> ConsumerStream | None:
        """Return the consumer of a lease that has not ended; None: no such lease."""
        lease = self._held.get(lease_id)
        return None if lease is None else lease.consumer

    def ack(self, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> npt.NDArray[np.uint8]:
        """Judge an ack, (n, uint8): ACCEPT, LEASE_LOST, NOT_DELIVERED, or a value of `how_done`.

        A message is accepted if it is unacked and not leased to another consumer meanwhile; the
        epoch of its delivery does not matter. Accepted messages are not delivered again. The caller
        proposes an ACK op for them. Of a repeated offset the first one counts.
        """
        marks = self._marks.of(offsets)
        held = (marks == np.uint64(lease_id)) & (epoch == self.epoch)
        ours = held | (marks == FREE) | (marks >= DYING)
        result = self._judge(epoch, lease_id, offsets, ours)
        result[(result == ACCEPT) & _repeated(offsets)] = ALREADY_ACKED
        accepted = result == ACCEPT
        self._settle(lease_id, int(np.count_nonzero(accepted & held)))
        self._marks.set(offsets[accepted], ACKING)
        return result

    def nack(self, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> npt.NDArray[np.uint8]:
        """Judge a nack, (n, uint8), as `ack` does; accepted only under a lease that still holds.

        The caller proposes a NACK op. Until the op is applied, the messages belong to no consumer.
        """
        held = self._held_of(epoch, lease_id, offsets)
        result = self._judge(epoch, lease_id, offsets, held)
        result[(result == ACCEPT) & _repeated(offsets)] = LEASE_LOST  # ended by the first one
        accepted = offsets[result == ACCEPT]
        self._settle(lease_id, len(accepted))
        self._marks.set(accepted, ENDING)
        self._returned(accepted)
        return result

    def extend(
        self, now_ms: MonoMs, epoch: Epoch, lease_id: LeaseId, offsets: U64, lease_ms: int
    ) -> npt.NDArray[np.uint8]:
        """Judge an extension, (n, uint8), as `nack` does.

        If any message is accepted, the rest of the lease ends `lease_ms` from now, and never
        earlier than before.
        """
        held = self._held_of(epoch, lease_id, offsets)
        result = self._judge(epoch, lease_id, offsets, held)
        if (result == ACCEPT).any():
            lease = self._held[lease_id]
            lease.deadline_ms = MonoMs(max(lease.deadline_ms, now_ms + lease_ms))
            self._watch(lease)
        return result

    def _held_of(self, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> npt.NDArray[np.bool_]:
        held = np.zeros(len(offsets), np.bool_)
        if epoch == self.epoch and lease_id in self._held:
            held = self._marks.of(offsets) == np.uint64(lease_id)
        return held

    def _judge(
        self, epoch: Epoch, lease_id: LeaseId, offsets: U64, ours: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.uint8]:
        """Return a verdict per offset (n, uint8): ACCEPT where `ours` and no other rule applies."""
        result = np.full(len(offsets), LEASE_LOST, np.uint8)
        result[ours] = ACCEPT
        delivered_below = max(self._fresh, self.group.delivered_to)  # by this leader, by older ones
        result[offsets >= np.uint64(delivered_below)] = NOT_DELIVERED
        done = self.group.is_acked(offsets)
        result[done] = how_done(self.group, offsets[done])
        if self._of_another_life(epoch, lease_id):
            result[:] = LEASE_LOST
        return result

    def _of_another_life(self, epoch: Epoch, lease_id: LeaseId) -> bool:
        """Return whether a lease may precede a seek, or be of a deleted group of that name."""
        mine = epoch == self.epoch and lease_id > self._born
        return epoch <= self.group.since and not mine

    def _settle(self, lease_id: LeaseId, acked: int) -> None:
        """Subtract acked messages from a lease; remove the lease when it has none left."""
        lease = self._held.get(lease_id)
        if lease is None:
            return
        lease.left -= acked
        self.in_flight -= acked
        if lease.left <= 0:
            del self._held[lease_id]
            lease.consumer.leases.discard(lease_id)

    def expire(self, now_ms: MonoMs) -> GroupOp | None:
        """End the leases whose deadline has passed; return the ENDED op to propose, or None."""
        ended: list[U64] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._held.get(lease_id)
            if lease is not None and lease.deadline_ms <= now_ms:  # else it was extended
                ended.append(self._end(lease_id))
                if not lease.consumer.once:  # such a consumer has retired
                    self._fall_silent(lease.consumer)
        return self._ended(ended)

    def join(self, consumer: ConsumerStream) -> None:
        """Add a consumer."""
        self._joined += 1
        consumer.number = self._joined
        self.consumers.append(consumer)
        self._silent += consumer.silent

    def leave(self, consumer: ConsumerStream) -> GroupOp | None:
        """Remove a consumer at its stream's end; end its leases. Return the ENDED op to propose."""
        self.retire(consumer)
        return self._ended([self._end(lease_id) for lease_id in sorted(consumer.leases)])

    def give_up(self, consumer: ConsumerStream) -> GroupOp | None:
        """Remove a consumer that no delivery reached; return the RECALL op to propose."""
        self.retire(consumer)
        return self._ended([self._end(lease_id) for lease_id in sorted(consumer.leases)], Op.RECALL)

    def retire(self, consumer: ConsumerStream) -> None:
        """Deliver nothing more to a consumer; its messages stay leased."""
        self.consumers.remove(consumer)
        self._silent -= consumer.silent

    def _end(self, lease_id: LeaseId) -> U64:
        lease = self._held.pop(lease_id, None)
        if lease is None:
            return np.zeros(0, np.uint64)
        lease.consumer.leases.discard(lease_id)
        offsets: U64 = lease.offsets[self._marks.of(lease.offsets) == np.uint64(lease_id)]
        self._marks.set(offsets, ENDING)  # they belong to no consumer until ENDED is applied
        self.in_flight -= lease.left
        return offsets

    def _ended(self, ended: list[U64], op: Op = Op.ENDED) -> GroupOp | None:
        offsets = np.sort(np.concatenate(ended)) if ended else np.zeros(0, np.uint64)
        if not len(offsets):
            return None
        self._returned(offsets)
        return GroupOp(op, self.group.topic, self.group.group_id, offsets)

    def _returned(self, offsets: U64) -> None:
        """Handle messages that were leased and are ENDING now; ordered groups recall others."""

    def recall(self) -> GroupOp | None:
        """Return the RECALL op of messages that returned because an earlier one did, or None."""
        return None

    def expired_below(self) -> None:
        """End the leases of messages below the cursor, which have expired."""
        before = self._marks.take_below(int(self.group.cursor), ACKING)
        self._settle_all(before[leased(before)])
        self._forget_done()

    def applied(self, op: GroupOp) -> None:
        """Notice one of this group's ops that was applied to `group`."""
        match op.op:
            case Op.RESERVE:
                self._reserving = False
            case Op.HAND_OVER:
                self.handing_over = False
            case Op.ENDED | Op.NACK | Op.RECALL:
                # Messages acked meanwhile stay ACKING.
                offsets = np.sort(op.offsets[self._marks.of(op.offsets) == ENDING])
                self._marks.set(offsets, FREE)
                self._again(self._bury(offsets))
            case Op.MOVE:
                marks = self._marks.of(op.offsets)
                self._release_all(op.offsets[leased(marks)], ACKING)  # a redrive moves leased ones
                self._forget_done()
            case _:  # ACK, EXPIRE
                self._expiring -= op.op is Op.EXPIRE
                self._forget_done()

    def _release_all(self, offsets: U64, mark: np.uint64) -> None:
        """Remove leased messages from their leases, and mark them."""
        self._settle_all(self._marks.of(offsets))
        self._marks.set(offsets, mark)

    def _settle_all(self, marks: U64) -> None:
        lease_ids, counts = np.unique(marks, return_counts=True)
        for lease_id, count in zip(lease_ids.tolist(), counts.tolist(), strict=True):
            self._settle(LeaseId(lease_id), count)

    def _again(self, offsets: U64) -> None:
        """Queue freed messages for redelivery, each at its time."""
        times = self.group.not_before(offsets)
        self._put_off(offsets[times > 0], times[times > 0])
        self._back.append(offsets[times == 0])

    def _forget_done(self) -> None:
        """Drop the marks below the cursor; end leases of messages that the same entry finished."""
        forgotten = self._marks.forget_below(int(self.group.cursor))
        self._settle_all(forgotten[leased(forgotten)])

    def wake_at_ms(self) -> MonoMs | None:
        """Return when `expire` must be called next; None: no lease."""
        while self._deadlines:
            at_ms, lease_id = self._deadlines[0]
            lease = self._held.get(lease_id)
            if lease is not None and lease.deadline_ms == at_ms:
                break
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


def how_done(group: Group, offsets: U64) -> npt.NDArray[np.uint8]:
    """Return how each done message ended: ALREADY_ACKED, EXPIRED or DEAD_LETTERED, (n, uint8)."""
    how = np.where(offsets < group.expired_to, EXPIRED, ALREADY_ACKED).astype(np.uint8)
    how[group.is_moved(offsets)] = DEAD_LETTERED
    return how


def leased(marks: U64) -> npt.NDArray[np.bool_]:
    """Return which marks are lease ids, (n, bool)."""
    held: npt.NDArray[np.bool_] = (marks != FREE) & (marks < DYING)
    return held


def _repeated(offsets: U64) -> npt.NDArray[np.bool_]:
    """Return which offsets appear earlier in the same array, (n, bool)."""
    repeated = np.zeros(len(offsets), np.bool_)
    if len(offsets) > 1 and not (offsets[1:] > offsets[:-1]).all():
        repeated[:] = True
        repeated[np.unique(offsets, return_index=True)[1]] = False
    return repeated
