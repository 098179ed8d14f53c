"""The lease table of one group: the state of each message, and the leases in force.

    FREE --lease--> leased --ack--> ACKING --applied--> forgotten
      ^               |                ^
      |               +-- nack, end -> ENDING --ENDED, NACK or RECALL applied--> FREE
      |               +-- ended before it was sent -----------------------------> FREE
      +-- its time -- WAITING <-- delayed by a nack -- FREE
      +-- revived --- DYING   <-- failed too often --- FREE;  moved, it stays so until forgotten

A state is one uint64 per queue offset. A lease id stands for "leased". Offsets outside the column
are FREE. A message's entry in the log decides what becomes of it: until then it is ACKING or
ENDING, and belongs to no consumer. The states of acked messages are dropped below the cursor. In a
table of several chunks they are dropped above it, too. So test `Group.is_acked` before a state.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.leader.groups.offset_column import OffsetColumn
from timer.model.columns import U64
from timer.model.timer_errors import EngineError
from timer.model.units import GroupId, LeaseId, MonoMs

FREE: Final = np.uint64(0)
ACKING: Final = np.uint64((1 << 64) - 1)
ENDING: Final = np.uint64((1 << 64) - 2)
WAITING: Final = np.uint64((1 << 64) - 3)
DYING: Final = np.uint64((1 << 64) - 4)

DELIVERY_BYTES: Final = 1 << 20
"""Most bytes of payloads, keys and headers in a delivery or a MOVE. A larger message goes alone."""
UNBOUNDED: Final = 1 << 62
RESERVE_AHEAD: Final = 4096
"""Offsets that one RESERVE op reserves ahead of deliveries."""
DEADLINES_MIN: Final = 1024
STALE_MAX: Final = 64
"""Deadlines of ended leases that one look for the next deadline removes."""
LEASE_WEIGHT: Final = 8
"""Weight of a lease that ends, beside its messages: each has weight 1."""

Mask = npt.NDArray[np.bool_]
"""Which of n offsets, (n, bool)."""


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
    withdraw: Callable[[LeaseId], Sequence[LeaseId]] = lambda _: ()
    """Called when a lease ends early or reaches its deadline. If its delivery was not sent yet, the
    shell drops this delivery and all later ones, and returns their leases. Empty: it was sent."""
    recall: Callable[[U64 | None], None] = lambda _: None
    """Called with messages, sent before, that are taken back and come again. None: all of them."""
    single_lease: bool = False
    """The consumer takes one lease and nothing after it."""
    paused: bool = False
    """The stream is full: the consumer gets nothing until it has drained."""
    bytes_left: int = UNBOUNDED
    """Bytes of payloads, keys and headers that it may still get. The sink sets it again."""
    delivery_max: Callable[[], int] = lambda: DELIVERY_BYTES
    """Returns the bytes that its next delivery may have, for the buffer of all consumers."""
    pauses_after_lease: bool = False
    """Each lease pauses the consumer; the sink resumes it when another fits."""
    silent: bool = False
    """A lease of the consumer reached its deadline, and no request has come from it since."""
    leases: dict[LeaseId, None] = field(default_factory=dict)
    """In the order in which they were given."""
    number: int = 0
    """Order of joining, from 1."""

    @property
    def usual_bytes(self) -> int:
        """Most bytes of one of the many deliveries of a step."""
        return min(self.delivery_max(), DELIVERY_BYTES)

    @property
    def bytes_max(self) -> int:
        """Most bytes in its next delivery."""
        return min(self.bytes_left, self.usual_bytes)

    def end_credit(self) -> None:
        """Get nothing until the consumer grants credit again."""
        self.credit = 0


@dataclass(slots=True)
class Lease:
    """Messages delivered together to one consumer."""

    lease_id: LeaseId
    consumer: ConsumerStream
    offsets: U64
    deadline_ms: MonoMs
    leased_count: int
    """Number of its messages that are still leased."""
    group_id: GroupId = GroupId(0)
    """The group's id when the lease was given: a seek assigns a new one."""


class OffsetStates(NamedTuple):
    """The states of n messages."""

    values: U64

    @property
    def free(self) -> Mask:
        """Return which messages may be delivered, as far as the table knows."""
        mask: Mask = self.values == FREE
        return mask

    @property
    def leased(self) -> Mask:
        """Return which messages belong to a lease."""
        mask: Mask = (self.values != FREE) & (self.values < DYING)
        return mask

    @property
    def unleased(self) -> Mask:
        """Return which messages belong to no lease, whatever else becomes of them."""
        return ~self.leased

    @property
    def acking(self) -> Mask:
        """Return which messages are done once an entry is applied."""
        mask: Mask = self.values == ACKING
        return mask

    @property
    def ending(self) -> Mask:
        """Return which messages are free again once an entry is applied."""
        mask: Mask = self.values == ENDING
        return mask

    @property
    def waiting(self) -> Mask:
        """Return which messages wait for the end of their delay."""
        mask: Mask = self.values == WAITING
        return mask

    @property
    def dying(self) -> Mask:
        """Return which messages are to become dead letters."""
        mask: Mask = self.values == DYING
        return mask

    def leased_under(self, lease_id: LeaseId | int) -> Mask:
        """Return which messages belong to that lease."""
        mask: Mask = self.values == np.uint64(lease_id)
        return mask


class LeaseTable:
    """See the module."""

    __slots__ = ("_deadlines", "_leases", "_states", "fresh", "in_flight")

    def __init__(self, base: int) -> None:
        """`base`: the group's cursor."""
        self.fresh = base
        """First offset never delivered in this epoch."""
        self.in_flight = 0
        """Messages leased now."""
        self._states = OffsetColumn(base)
        self._leases: dict[LeaseId, Lease] = {}
        self._deadlines: list[tuple[MonoMs, LeaseId]] = []
        """Heap. An ended or extended lease leaves its old deadline behind."""

    # ---- messages

    def of(self, offsets: U64) -> OffsetStates:
        """Return the states of messages."""
        return OffsetStates(self._states.of(offsets))

    def set(self, offsets: U64, state: np.uint64) -> None:
        """Give messages that belong to no lease another state."""
        self._states.set(offsets, state)

    def take(self, offsets: U64, state: np.uint64, states: OffsetStates | None = None) -> None:
        """Take messages from their leases, those that have one, and give them a state.

        `states`: their present states. None: they are looked up.
        """
        states = self.of(offsets) if states is None else states
        self._settle_all(states.values[states.leased])
        self._states.set(offsets, state)

    def forget(self, offsets: U64) -> None:
        """Drop the states of acked messages at once, if the table has more than one chunk."""
        if self._states.wide:
            self.take(offsets, FREE)

    def forget_below(self, cursor: int) -> None:
        """Drop the states below the cursor, and take these messages from their leases."""
        forgotten = OffsetStates(self._states.forget_below(cursor))
        self._settle_all(forgotten.values[forgotten.leased])

    def finish_below(self, cursor: int) -> None:
        """Take the messages below the cursor from their leases; those not FREE are ACKING then."""
        before = OffsetStates(self._states.replace_below(cursor, ACKING))
        self._settle_all(before.values[before.leased])

    # ---- leases

    def __len__(self) -> int:
        """Return the number of leases in force."""
        return len(self._leases)

    def get(self, lease_id: LeaseId) -> Lease | None:
        """Return a lease in force."""
        return self._leases.get(lease_id)

    def __getitem__(self, lease_id: LeaseId) -> Lease:
        """Return a lease that is in force."""
        return self._leases[lease_id]

    def lease_ids(self) -> list[LeaseId]:
        """Return the leases in force, in the order in which they were given."""
        return [*self._leases]

    def leased(self, weight: int) -> Iterator[U64]:
        """Yield the offsets of all leased messages: of leases of that weight at a time, ascending.

        Between two parts, leases may end: their messages are left out.
        """
        some, left = list[Lease](), weight
        for lease in [*self._leases.values()]:
            some.append(lease)
            left -= LEASE_WEIGHT + len(lease.offsets)
            if left <= 0:
                yield self._offsets_of(some)
                some, left = [], weight
        if some:
            yield self._offsets_of(some)

    def _offsets_of(self, leases: Collection[Lease]) -> U64:
        """Return the messages that leases still hold, ascending. Leases that ended hold none."""
        if not leases:
            return np.zeros(0, np.uint64)
        offsets: U64 = np.concatenate([lease.offsets for lease in leases])
        ids = np.array([lease.lease_id for lease in leases], np.uint64)
        sizes = [len(lease.offsets) for lease in leases]
        return np.sort(offsets[self._states.of(offsets) == np.repeat(ids, sizes)])

    def add(self, lease: Lease) -> None:
        """Lease messages that are free."""
        self._leases[lease.lease_id] = lease
        self._states.set(lease.offsets, np.uint64(lease.lease_id))
        self._add_deadline(lease)
        lease.consumer.leases[lease.lease_id] = None
        self.in_flight += len(lease.offsets)

    def extend(self, lease: Lease, deadline_ms: MonoMs) -> None:
        """Move the deadline of a lease, never to an earlier time."""
        lease.deadline_ms = max(lease.deadline_ms, deadline_ms)
        self._add_deadline(lease)

    def settle(self, lease_id: LeaseId, count: int) -> None:
        """Subtract messages from a lease; remove the lease when it has none left."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        lease.leased_count -= count
        self.in_flight -= count
        assert lease.leased_count >= 0 <= self.in_flight, (lease, count, self.in_flight)
        if not lease.leased_count:
            del self._leases[lease_id]
            lease.consumer.leases.pop(lease_id, None)

    def end(self, leases: Iterable[Lease]) -> U64:
        """End leases, all different and in force; return their messages, ENDING now, ascending."""
        leases = list(leases)
        if not leases:
            return np.zeros(0, np.uint64)
        for lease in leases:
            del self._leases[lease.lease_id]
            lease.consumer.leases.pop(lease.lease_id, None)
        if len(leases) == 1:
            return self._end_one(leases[0])
        offsets, left = self._offsets_of(leases), sum(each.leased_count for each in leases)
        assert len(offsets) == left, (leases[0], len(leases), len(offsets), left)
        self._states.set(offsets, ENDING)
        self.in_flight -= left
        return offsets

    def free(self, lease_ids: Iterable[LeaseId]) -> U64:
        """End leases whose deliveries were not sent; return their messages, FREE now, ascending."""
        leases = [lease for each in lease_ids if (lease := self._leases.get(each)) is not None]
        offsets = self.end(leases)
        self._states.set(offsets, FREE)
        return offsets

    def free_unsent(self, lease_ids: Iterable[LeaseId]) -> U64:
        """End the unsent ones of these leases, and all later leases of their consumers.

        `lease_ids`: ascending. Returns their messages, which are FREE now.
        """
        freed = [np.zeros(0, np.uint64)]
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)  # None: it ended with an earlier one
            if lease is not None and (unsent := lease.consumer.withdraw(lease_id)):
                assert lease_id in unsent, (lease, unsent)
                freed.append(self.free(unsent))
        return np.concatenate(freed)

    def _end_one(self, lease: Lease) -> U64:
        offsets: U64 = lease.offsets[self.of(lease.offsets).leased_under(lease.lease_id)]
        assert len(offsets) == lease.leased_count, (lease, offsets)
        self._states.set(offsets, ENDING)
        self.in_flight -= lease.leased_count
        return offsets

    def overdue(self, now_ms: MonoMs, weight_left: int) -> tuple[list[Lease], int]:
        """Return overdue leases, which the caller ends, and the rest of `weight_left`.

        Stops when their weights, LEASE_WEIGHT and a message each, have used up `weight_left`.
        """
        found: dict[LeaseId, Lease] = {}
        while weight_left > 0 and self._deadlines and self._deadlines[0][0] <= now_ms:
            at_ms, lease_id = heapq.heappop(self._deadlines)
            weight_left -= LEASE_WEIGHT
            if self._is_live(at_ms, lease_id) and lease_id not in found:
                found[lease_id] = self._leases[lease_id]
                weight_left -= found[lease_id].leased_count
        return [*found.values()], weight_left

    def leases_within(
        self, lease_ids: Iterable[LeaseId], weight_left: int
    ) -> tuple[list[Lease], int]:
        """Return the first of these leases, all in force, and the weight left, as `overdue`."""
        found: list[Lease] = []
        for lease_id in lease_ids:
            if weight_left <= 0:
                break
            found.append(self._leases[lease_id])
            weight_left -= LEASE_WEIGHT + found[-1].leased_count
        return found, weight_left

    def next_deadline_ms(self) -> MonoMs | None:
        """Return the first deadline of a lease; None: no lease.

        Behind STALE_MAX deadlines of ended leases, an earlier time is returned.
        """
        for _ in range(STALE_MAX):
            if not self._deadlines or self._is_live(*self._deadlines[0]):
                break
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_live(self, at_ms: MonoMs, lease_id: LeaseId) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.deadline_ms == at_ms

    def _add_deadline(self, lease: Lease) -> None:
        """Note a lease's deadline; drop the deadlines of ended leases once they are many."""
        heapq.heappush(self._deadlines, (lease.deadline_ms, lease.lease_id))
        if len(self._deadlines) > 2 * len(self._leases) + DEADLINES_MIN:
            self._deadlines = [(each.deadline_ms, each.lease_id) for each in self._leases.values()]
            heapq.heapify(self._deadlines)

    def _settle_all(self, lease_ids: U64) -> None:
        if not len(lease_ids):
            return
        if (lease_ids == lease_ids[0]).all():
            self.settle(LeaseId(int(lease_ids[0])), len(lease_ids))
            return
        ids, counts = np.unique(lease_ids, return_counts=True)
        leases, done = self._leases, 0
        for lease_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
            lease = leases.get(lease_id)
            if lease is None:
                continue
            lease.leased_count = left = lease.leased_count - count
            done += count
            if left <= 0:
                assert not left, (lease, count)
                del leases[lease_id]
                lease.consumer.leases.pop(lease_id, None)
        self.in_flight -= done
        assert self.in_flight >= 0, (self.in_flight, done)
