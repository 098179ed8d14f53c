"""Leases of one group, a pure core in the leader's memory.

The log holds a group's state (timer/ready/group.py): its acked messages, the number of failures of
each message, and the offset below which the leader may deliver. The leases themselves are only
here: the consumer and the deadline of each leased message. They end with the leadership.

    fresh --deliver--> leased --ack--> acking --applied--> forgotten
                         |                ^
                         |                +-------- ack --------+
                         |                                      |
                         +-- deadline, consumer left --> ending +--ENDED applied--> free --+
                         +-- nack ---------------------> ending +--NACK applied-> waiting -+
                         ^                                                                 |
                         +------------------------- deliver again -------------------------+

Every change is proposed to the log as an op. Answers and redeliveries wait until the op is applied.

    Leases --which messages next--> SharedOrder or KeyOrder    by the group's type
           --state of a message---> LeaseTable
           --which consumer-------> Roster
           --expired, dead -------> EndedMessages
"""

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from timer.entries.payloads import SHARED, GroupOp, Op
from timer.leader.groups.ended_messages import EndedMessages
from timer.leader.groups.key_order import ORDER_WINDOW, KeyOrder
from timer.leader.groups.lease_table import (
    ACKING,
    ENDING,
    FREE,
    RESERVE_AHEAD,
    UNBOUNDED,
    ConsumerStream,
    Lease,
    LeaseTable,
    Mask,
    OffsetStates,
)
from timer.leader.groups.roster import Roster
from timer.leader.groups.shared_order import SharedOrder
from timer.model.columns import U64
from timer.model.units import Epoch, LeaseId, MonoMs, QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

ENDS_MAX: Final = 16_384
"""Weight of the leases that end in one step, about 3 ms: 1,820 leases of one message."""

ACCEPT: Final = 1
ALREADY_ACKED: Final = 2
LEASE_LOST: Final = 3
NOT_DELIVERED: Final = 4
EXPIRED: Final = 5
"""The message is done: acked or expired. The group's state does not hold which of the two."""
DEAD_LETTERED: Final = 6
"""The unacked message was moved to another topic, as a dead letter or by a redrive. It is a new one
there."""


class Order(Protocol):
    """Decides which messages are delivered next, and to which consumer."""

    work: int
    """Work units of the last look for free messages."""
    unfinished: bool
    """Whether `next` stopped before it had looked at everything. The caller resets it."""
    ahead: int
    """Offsets to be reserved beyond those that were looked at: RESERVE_AHEAD, or more."""

    def next(self, clock_ms: UnixMs, queue: Queue, limit: int) -> tuple[ConsumerStream, U64] | None:
        """Return up to `limit` free messages, of the consumer's `bytes_max`, and the consumer.

        None: no consumer has credit, no message is free, or the free ones are still being read from
        disk or have expired.
        """

    def on_returned(self, offsets: U64) -> None:
        """Handle messages that were leased and are ENDING now."""

    def take_recalled(self) -> U64:
        """Return, once, the messages that `on_returned` took back with others."""

    def on_freed(self, offsets: U64) -> None:
        """Handle messages that are free again, as an op was applied or rejected."""

    def next_return_ms(self) -> UnixMs | None:
        """Return the cluster time at which the next delayed message may return; None: none."""

    def waiting_from(self, queue_end: QueueOffset, clock_ms: UnixMs) -> int | None:
        """Return the first offset that waits for nothing except a consumer. None: none.

        Delayed messages, and messages about to become dead letters, are left out.
        """

    def on_move(self, lease_number: int, first: int) -> None:
        """Remember a MOVE of messages from `first` on; leases given before have lower numbers."""

    def has_moved_since(self, lease_id: int, offset: int) -> bool:
        """Return whether a MOVE since the lease took a message up to `offset`."""

    def on_silent(self, consumer: ConsumerStream) -> None:
        """Handle a consumer that let a lease end."""

    def forget_below(self, cursor: int) -> None:
        """Drop what is remembered of messages below the cursor."""


class Leases:
    """The leases of a group, in one epoch."""

    __slots__ = (
        "_ended",
        "_first_lease_id",
        "_former_consumers",
        "_large_work",
        "_lease_ids",
        "_leases_max",
        "_order",
        "_reserving",
        "_roster",
        "_table",
        "epoch",
        "group",
        "handing_over",
    )

    def __init__(
        self, group: Group, epoch: Epoch, lease_ids: Iterator[int], leases_max: int
    ) -> None:
        """Start at the group's cursor: deliveries of the old leader are repeated, and marked so.

        `lease_ids`: shared by all groups of the epoch. `leases_max`: deliveries pause
        at this number of leases in force.
        """
        self.group, self.epoch = group, epoch
        self._lease_ids, self._leases_max = lease_ids, leases_max
        self._table = LeaseTable(int(group.cursor))
        self._former_consumers: list[ConsumerStream] = []
        """Consumers that left and whose leases `expire` ends."""
        self._roster = Roster(group, self._table)
        self._ended = EndedMessages(group, self._table)
        kind = SharedOrder if group.settings.type == SHARED else KeyOrder
        self._order: Order = kind(group, self._table, self._roster, self._ended)
        self._first_lease_id = next(self._lease_ids)
        """Leases with greater ids were given to the group under its present id."""
        self._reserving = False
        self.handing_over = False
        """The group's HAND_OVER is in flight: nothing is delivered."""
        self._large_work = 0

    # ---- views

    @property
    def work(self) -> int:
        """Work units of the last look for free messages, and of a large message that it found."""
        return max(self._order.work + self._ended.work, self._large_work)

    @property
    def unfinished(self) -> bool:
        """Whether the last call stopped before it had looked at everything. Call again."""
        return self._order.unfinished or self._ended.unfinished

    @property
    def sorts_ahead(self) -> bool:
        """Whether messages are sorted ahead of their delivery: reserve after each lease, too."""
        return self._order.ahead > RESERVE_AHEAD

    @property
    def in_flight(self) -> int:
        """Messages leased now."""
        return self._table.in_flight

    def states(self, offsets: U64) -> OffsetStates:
        """Return the states of messages, for a look that changes nothing."""
        return self._table.of(offsets)

    @property
    def consumers(self) -> list[ConsumerStream]:
        """The consumers, in the order in which they are served next."""
        return self._roster.consumers

    @property
    def dying(self) -> bool:
        """Whether some messages may be dead letters that have not moved yet."""
        return self._ended.dying

    def next_return_ms(self) -> UnixMs | None:
        """Return the cluster time at which the next delayed message may return; None: none."""
        return self._order.next_return_ms()

    def wake_at_ms(self) -> MonoMs | None:
        """Return when `expire` must be called next; None: no lease."""
        return MonoMs(0) if self._former_consumers else self._table.next_deadline_ms()

    def waiting_from(self, queue_end: QueueOffset, clock_ms: UnixMs) -> int | None:
        """See Order."""
        return self._order.waiting_from(queue_end, clock_ms)

    def holder(self, lease_id: LeaseId) -> ConsumerStream | None:
        """Return the consumer of a lease that has not ended; None: no such lease, or it left."""
        lease = self._table.get(lease_id)
        if lease is None or lease.consumer in self._former_consumers:
            return None
        return lease.consumer

    # ---- delivery

    def reserve(self) -> GroupOp | None:
        """Return the RESERVE op to propose now, or None.

        Reservations run ahead of the fired messages, so that a message seldom waits for one. The
        first of an epoch covers all offsets delivered in earlier epochs, as most may be acked.
        """
        fresh = max(self._table.fresh, int(self.group.cursor))
        ahead = self._order.ahead
        enough = int(self.group.reserved) >= fresh + ahead // 2
        if self._reserving or enough or not self.consumers or self.handing_over:
            return None
        self._reserving = True
        offsets = np.array([max(fresh + ahead, self.group.delivered_to)], np.uint64)
        return GroupOp(Op.RESERVE, self.group.topic, self.group.group_id, offsets)

    def hand_over(self) -> Iterator[GroupOp]:
        """Yield the ops that record, for a successor, how often each message was delivered.

        Deliveries that were not sent are dropped, and count no attempt. Nothing is
        delivered from then on until the ops are applied and offsets are reserved again.
        """
        group = self.group
        if group.reserved == group.cursor and not self._reserving:
            return
        self.handing_over = True
        end = np.array([max(self._table.fresh, int(group.cursor))], np.uint64)
        where = group.topic, group.group_id
        self._order.on_freed(self._table.free_unsent(self._table.lease_ids()))
        for leased in self._table.leased(ENDS_MAX):
            yield GroupOp(Op.RECALL, *where, leased)
        yield GroupOp(Op.HAND_OVER, *where, end)

    def deliver(
        self,
        now_ms: MonoMs,
        clock_ms: UnixMs,
        queue: Queue,
        limit: int,
        outlived_ms: UnixMs | None = None,
    ) -> Lease | None:
        """Lease up to `limit` messages, of its `bytes_max`, to the next consumer with credit.

        Returns None if no consumer has credit, no message is free, or the free ones are still being
        read from disk or have expired. `take_expired` returns the expired ones.

        `outlived_ms`: messages due at or before it have expired, Unix milliseconds; None: none.
        """
        self._ended.outlived_ms = outlived_ms
        self._order.unfinished, self._large_work = False, 0
        self._order.on_freed(self._ended.revive())
        limit = self._roster.allowed_in_flight(limit)
        closed = self.handing_over or limit <= 0 or len(self._table) >= self._leases_max
        found = None if closed else self._order.next(clock_ms, queue, limit)
        if found is None:
            self._roster.end_round()
            return None
        consumer, offsets = found
        if len(offsets) == 1:  # one message is delivered whatever its size
            self._large_work = queue.payload_bytes(int(offsets[0])) // consumer.usual_bytes
        if consumer.bytes_left < UNBOUNDED:
            consumer.bytes_left -= queue.bytes_of(offsets)
        return self._lease(consumer, offsets, now_ms)

    def _lease(self, consumer: ConsumerStream, offsets: U64, now_ms: MonoMs) -> Lease:
        deadline_ms = MonoMs(now_ms + consumer.lease_ms)
        number, count = LeaseId(next(self._lease_ids)), len(offsets)
        lease = Lease(number, consumer, offsets, deadline_ms, count, self.group.group_id)
        self._table.add(lease)
        consumer.credit = 0 if consumer.single_lease else consumer.credit - len(offsets)
        return lease

    def take_expired(self) -> U64:
        """Return the expired messages that were not delivered, for an EXPIRE op."""
        return self._ended.take_expired()

    def on_expire_rejected(self, offsets: U64) -> None:
        """Free messages whose EXPIRE op was rejected."""
        self._ended.expiring -= 1
        self._table.set(offsets, FREE)
        self._order.on_freed(offsets)

    def take_dead(self, queue: Queue) -> U64:
        """Return dead letters for a MOVE: those in memory, about a megabyte; none if none are.

        Expired ones are left out; `take_expired` returns them.
        """
        return self._ended.take_dead(queue)

    def on_settings_changed(self) -> None:
        """Notice the group's new settings: dying messages may be allowed again."""
        self._ended.on_settings_changed()

    # ---- ack, nack, extend

    def ack(self, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> npt.NDArray[np.uint8]:
        """Judge an ack, (n, uint8): ACCEPT, LEASE_LOST, NOT_DELIVERED, or one of `end_verdicts`.

        A message is accepted if it is unacked and not leased to another consumer meanwhile; the
        epoch of its delivery does not matter. Accepted messages are not delivered again. The caller
        proposes an ACK op for them. Of a repeated offset the first one counts.
        """
        states = self._table.of(offsets)
        ours = states.unleased | self._is_leased_under(epoch, lease_id, states)
        result = self._verdicts(epoch, lease_id, offsets, ours)
        result[(result == ACCEPT) & _repeated(offsets)] = ALREADY_ACKED
        self._take(offsets, states, result, ACKING)
        return result

    def nack(self, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> npt.NDArray[np.uint8]:
        """Judge a nack, (n, uint8), as `ack` does; accepted only under a lease that still holds.

        The caller proposes a NACK op. Until the op is applied, the messages belong to no consumer.
        """
        states = self._table.of(offsets)
        is_leased = self._is_leased_under(epoch, lease_id, states)
        result = self._verdicts(epoch, lease_id, offsets, is_leased)
        result[(result == ACCEPT) & _repeated(offsets)] = LEASE_LOST  # ended by the first one
        self._order.on_returned(self._take(offsets, states, result, ENDING))
        return result

    def _take(
        self,
        offsets: U64,
        states: OffsetStates,
        result: npt.NDArray[np.uint8],
        state: np.uint64,
    ) -> U64:
        """Take the accepted messages from their leases, and return them."""
        accepted = result == ACCEPT
        if not accepted.all():
            offsets, states = offsets[accepted], OffsetStates(states.values[accepted])
        self._table.take(offsets, state, states)
        return offsets

    def extend(
        self, now_ms: MonoMs, epoch: Epoch, lease_id: LeaseId, offsets: U64, lease_ms: int
    ) -> npt.NDArray[np.uint8]:
        """Judge an extension, (n, uint8), as `nack` does.

        If any message is accepted, the rest of the lease ends `lease_ms` from now, and never
        earlier than before.
        """
        is_leased = self._is_leased_under(epoch, lease_id, self._table.of(offsets))
        is_leased &= self.holder(lease_id) is not None  # else the lease is about to end
        result = self._verdicts(epoch, lease_id, offsets, is_leased)
        lease = self._table.get(lease_id)
        if (result == ACCEPT).any() and lease is not None:
            self._table.extend(lease, MonoMs(now_ms + lease_ms))
        return result

    def ack_up_to(self, epoch: Epoch, lease_id: LeaseId, offset: int) -> tuple[int, U64]:
        """Judge an ack of everything up to `offset`; return the verdict and the offsets to ack.

        For groups that serve one consumer at a time. The ack is accepted under the rules of single
        acks, if another consumer holds none of the messages. If all of them are already on their
        way to be acked, the last one is acked again, so that the answer waits for those acks.

        DEAD_LETTERED: the ack is accepted. At least one of the messages became a dead letter after
        the lease was given.
        """
        nothing = np.zeros(0, np.uint64)
        if self._may_predate_group(epoch, lease_id):
            return LEASE_LOST, nothing
        if offset >= self._delivered_below():
            return NOT_DELIVERED, nothing
        dead = self._has_moved_since(epoch, lease_id, offset)
        unacked = self.group.first_unacked(offset + 1, offset + 1)
        if not len(unacked):
            last = np.array([offset], np.uint64)
            verdict = DEAD_LETTERED if dead else int(end_verdicts(self.group, last)[0])
            return verdict, nothing
        offsets = unacked[~self._table.of(unacked).acking]
        accept = DEAD_LETTERED if dead else ACCEPT
        if not len(offsets):
            return accept, unacked[-1:]
        states = self._table.of(offsets)
        lease = self._table.get(lease_id) if epoch == self.epoch else None
        holders = {self.holder(LeaseId(each)) for each in states.values[states.leased].tolist()}
        if holders - {None, lease.consumer if lease is not None else None}:
            return LEASE_LOST, nothing
        self._table.take(offsets, ACKING)
        return accept, offsets

    def _is_leased_under(self, epoch: Epoch, lease_id: LeaseId, states: OffsetStates) -> Mask:
        """Return which messages are held under a lease that has not ended, (n, bool)."""
        if epoch != self.epoch or self._table.get(lease_id) is None:
            return np.zeros(len(states.values), np.bool_)
        return states.leased_under(lease_id)

    def _verdicts(
        self, epoch: Epoch, lease_id: LeaseId, offsets: U64, ours: Mask
    ) -> npt.NDArray[np.uint8]:
        """Return a verdict per offset (n, uint8): ACCEPT where `ours` and no other rule applies."""
        result = np.full(len(offsets), LEASE_LOST, np.uint8)
        result[ours] = ACCEPT
        result[offsets >= np.uint64(self._delivered_below())] = NOT_DELIVERED
        done = self.group.is_acked(offsets)
        if done.any():  # a search among all moved messages
            result[done] = end_verdicts(self.group, offsets[done])
        if self._may_predate_group(epoch, lease_id):
            result[:] = LEASE_LOST
        return result

    def _delivered_below(self) -> int:
        """Return the offset below which messages were delivered, by any leader."""
        return max(self._table.fresh, self.group.delivered_to)

    def _may_predate_group(self, epoch: Epoch, lease_id: LeaseId) -> bool:
        """Return whether a lease may precede a seek, or be of a deleted group of that name."""
        mine = epoch == self.epoch and lease_id > self._first_lease_id
        return epoch <= self.group.since_epoch and not mine

    def _has_moved_since(self, epoch: Epoch, lease_id: LeaseId, offset: int) -> bool:
        """Return whether a message up to `offset` became a dead letter since the lease."""
        if epoch < self.epoch:
            moved = self.group.moved
            near = (moved <= offset) & (moved + np.uint64(ORDER_WINDOW) > offset)
            return bool(near.any())
        return self._order.has_moved_since(lease_id, offset)

    # ---- consumers and the ends of leases

    def on_request(self, consumer: ConsumerStream) -> bool:
        """Note a request from a consumer; return whether the consumer was silent."""
        return self._roster.on_request(consumer)

    def join(self, consumer: ConsumerStream) -> None:
        """Add a consumer."""
        self._roster.join(consumer)

    def leave(self, consumer: ConsumerStream) -> None:
        """Remove a consumer at its stream's end. `expire` ends its leases, with those of others."""
        self.retire(consumer)
        self._former_consumers.append(consumer)

    def _end_former_leases(self, weight_left: int) -> tuple[U64, int]:
        """End leases of former consumers; return their messages and the rest of `weight_left`."""
        leases: list[Lease] = []
        while self._former_consumers and weight_left > 0:
            some, weight_left = self._table.leases_within(
                self._former_consumers[-1].leases, weight_left
            )
            leases += some
            if len(some) == len(self._former_consumers[-1].leases):
                self._former_consumers.pop()
        return self._table.end(leases), weight_left

    def give_up(self, consumer: ConsumerStream) -> None:
        """Remove a consumer that no delivery reached."""
        self.retire(consumer)
        self.end_unsent(consumer.leases)

    def end_unsent(self, unsent: Iterable[LeaseId]) -> None:
        """End leases that were not sent, the last ones of a consumer. They count no delivery."""
        self._order.on_freed(self._table.free(unsent))

    def retire(self, consumer: ConsumerStream) -> None:
        """Deliver nothing more to a consumer; its messages stay leased.

        Its leases may outlive it by hours, so it keeps no callback: one may hold an answer.
        """
        self._roster.remove(consumer)
        consumer.sink = consumer.end = consumer.recall = _unused

    def expire(self, now_ms: MonoMs, weight_left: int) -> tuple[GroupOp | None, int]:
        """End leases of former consumers, and those whose deadline has passed.

        Returns the ENDED op to propose, or None, and the rest of `weight_left`. Stops when the
        weights of the leases have used it up (LeaseTable.overdue). `wake_at_ms` then has passed.

        A lease whose delivery was not sent counts no attempt and no failure. The later leases of
        its consumer were not sent either, and end with it: the consumer does not read.
        """
        former, weight_left = self._end_former_leases(weight_left)
        overdue, weight_left = self._table.overdue(now_ms, weight_left)
        assert not (overdue and self._former_consumers), "a consumer that left cannot fall silent"
        sent: list[Lease] = []
        for lease in overdue:
            if self._table.get(lease.lease_id) is None:
                continue  # not sent, and ended with an earlier one
            self._order.on_freed(self._table.free_unsent([lease.lease_id]))
            if self._table.get(lease.lease_id) is not None:
                sent.append(lease)
            if not lease.consumer.single_lease:  # such a consumer has retired
                self._roster.mark_silent(lease.consumer)
                self._order.on_silent(lease.consumer)
        ended = self._table.end(sent)
        return self._ended_op(
            np.concatenate([former, ended]) if len(former) else ended
        ), weight_left

    def _ended_op(self, offsets: U64) -> GroupOp | None:
        offsets = np.sort(offsets)
        if not len(offsets):
            return None
        self._order.on_returned(offsets)
        return GroupOp(Op.ENDED, self.group.topic, self.group.group_id, offsets)

    def recall(self) -> GroupOp | None:
        """Return the RECALL op of messages that returned because an earlier one did, or None."""
        offsets = self._order.take_recalled()
        if not len(offsets):
            return None
        return GroupOp(Op.RECALL, self.group.topic, self.group.group_id, offsets)

    def on_expired_below(self) -> None:
        """End the leases of messages below the cursor, which have expired."""
        self._table.finish_below(int(self.group.cursor))
        self._forget_done()

    # ---- applied ops

    def on_applied(self, op: GroupOp) -> None:
        """Notice one of this group's ops that was applied to `group`."""
        match op.op:
            case Op.RESERVE:
                self._reserving = False
            case Op.HAND_OVER:
                self.handing_over = False
            case Op.ENDED | Op.NACK | Op.RECALL:
                # Messages acked meanwhile stay ACKING.
                offsets = np.sort(op.offsets[self._table.of(op.offsets).ending])
                self._table.set(offsets, FREE)
                self._order.on_freed(self._ended.mark_dying(offsets))
            case Op.MOVE:
                leased = op.offsets[self._table.of(op.offsets).leased]
                self._table.take(leased, ACKING)  # a redrive moves leased ones
                self._order.on_move(next(self._lease_ids), int(op.offsets.min()))
                self._table.forget(op.offsets)
                self._forget_done()
            case _:  # ACK, EXPIRE
                self._ended.expiring -= op.op is Op.EXPIRE
                self._table.forget(op.offsets)
                self._forget_done()

    def _forget_done(self) -> None:
        """Drop what is remembered of messages below the cursor; take them from their leases."""
        self._table.forget_below(int(self.group.cursor))
        self._order.forget_below(int(self.group.cursor))


def end_verdicts(group: Group, offsets: U64) -> npt.NDArray[np.uint8]:
    """Return how each done message ended: ALREADY_ACKED, EXPIRED or DEAD_LETTERED, (n, uint8)."""
    how = np.where(offsets < group.expired_to, EXPIRED, ALREADY_ACKED).astype(np.uint8)
    how[group.is_moved(offsets)] = DEAD_LETTERED
    return how


def _unused(_: object) -> None:
    """Stand in for a callback of a consumer that has retired."""


def _repeated(offsets: U64) -> Mask:
    """Return which offsets appear earlier in the same array, (n, bool)."""
    repeated = np.zeros(len(offsets), np.bool_)
    if len(offsets) > 1 and not (offsets[1:] > offsets[:-1]).all():
        repeated[:] = True
        repeated[np.unique(offsets, return_index=True)[1]] = False
    return repeated
