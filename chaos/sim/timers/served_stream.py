"""The stream of a consumer, at the node that serves it.

    deliver --> waiting --send--> the consumer, in order
                   +-- withdrawn at a lease's deadline, or taken back at the stream's end

In worlds with `stalls` the consumer stops reading now and then, for less or more than a lease. In
all other worlds each delivery is sent at once. A client drops messages after the end of their
lease, so a waiting delivery is sent only if its lease still holds.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from chaos.sim.timers.node_results import Reply, list_of, rows_of
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.leader import Leader
from timer.model.timer_errors import EngineError
from timer.model.units import LeaseId, QueueOffset
from timer.ready.group import Group

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.timers.town import LeasedMessages, SimStream

LEASE_MS: Final = 2_000


class UnsentDelivery(NamedTuple):
    """A delivery that waits for its consumer to read."""

    delivery: Delivery
    messages: int
    """Messages. Without a send their credit counts again."""
    take: Callable[[], None]
    """The consumer's call that receives it."""

    @property
    def lease(self) -> LeaseId:
        """Its lease."""
        return self.delivery.lease.lease_id


class ServedStream:
    """See the module. Requests of the consumer come through EngineApp.on_stream."""

    def __init__(self, app: "EngineApp", stream: "SimStream", group: Group) -> None:
        self._app, self._stream, self._group = app, stream, group
        self._book, self._line = app.town.book, app.town.line
        self._leader = app.engine.leader
        self._consumer = ConsumerStream(
            "sim", LEASE_MS, self._deliver, end=self._end, withdraw=self._withdraw
        )
        self._waiting: list[UnsentDelivery] = []
        self._stalled = False

    def join(self, credit: int) -> None:
        """Become a consumer of the group, or end the stream."""
        assert self._leader is not None
        try:
            self._leader.groups.join(self._group, self._consumer)
        except EngineError as refused:
            self._end(refused)
        else:
            self._app.streams[self._stream] = self
            self._app.on_stream(self._stream, "credit", credit)

    def _end(self, why: EngineError) -> None:
        del why
        self._app.streams.pop(self._stream, None)
        self._line.stream(self._stream.consumer.on_end, self._stream)

    # ---- deliveries

    def _deliver(self, delivery: Delivery) -> None:
        messages, consumer = len(delivery.lease.offsets), self._stream.consumer
        self._book.credit.check_delivery(self._stream, messages)
        group_id, rows = delivery.group.group_id, rows_of(delivery)
        take = partial(consumer.take, self._stream, delivery, self._app, group_id, rows)
        self._waiting.append(UnsentDelivery(delivery, messages, take))
        if self._stalled:
            return
        if us := consumer.stall_us():
            self._stalled = True
            self._app.node.later(us, self._retry_waiting)
        else:
            self._waiting.clear()
            self._line.stream(take)

    def _retry_waiting(self) -> None:
        """Send the waiting deliveries whose messages are all leased; grant the others' credit."""
        self._stalled = self._consumer.paused = False
        waiting, self._waiting = self._waiting, []
        dropped = 0
        for each in waiting:
            lease = each.delivery.lease
            whole = each.lease in self._consumer.leases and lease.leased_count == len(lease.offsets)
            if whole and self._app.engine.leader is self._leader:
                self._line.stream(each.take)
            else:
                dropped += each.messages
        self._app.on_stream(self._stream, "credit", dropped)

    def _withdraw(self, lease_id: LeaseId) -> list[LeaseId]:
        """Drop the delivery of a lease, if it was not sent, and all later ones; return them.

        The consumer gets nothing more until it reads.
        """
        if all(each.lease != lease_id for each in self._waiting):
            return []
        dropped = [each for each in self._waiting if each.lease >= lease_id]
        self._waiting = [each for each in self._waiting if each.lease < lease_id]
        messages = sum(each.messages for each in dropped)
        self._consumer.credit += messages
        self._consumer.paused = True
        self._book.credit.note_grant(self._stream, messages)
        return self._not_sent(dropped)

    def _not_sent(self, dropped: list[UnsentDelivery]) -> list[LeaseId]:
        for each in dropped:
            self._book.leases.not_sent(self._app.engine.leader, each.delivery)
            self._book.order.not_sent(each.delivery)
        return [each.lease for each in dropped]

    # ---- requests of the consumer

    def leave(self, leader: Leader) -> None:
        """Detach the consumer after its stream broke."""
        del self._app.streams[self._stream]
        self._book.leases.note_leave(self._consumer)
        waiting, self._waiting = self._waiting, []
        leader.groups.leave(self._group, self._consumer, self._not_sent(waiting))

    def credit(self, leader: Leader, messages: int) -> None:
        """Give the consumer credit for more messages."""
        self._book.credit.note_grant(self._stream, messages)
        leader.groups.credit(self._group, self._consumer, messages)

    def ack(self, leader: Leader, leased: "LeasedMessages", reply: Reply) -> None:
        """Acknowledge messages; the answer is a list of verdicts.

        The verdicts are those of timer/leader/groups/group_leases.py.
        """
        self._book.order.note_ack_request(self._group.group_id, leased.offsets)
        leader.groups.ack(self._group, *leased.columns, lambda result: reply(list_of(result)))

    def ack_up_to(self, leader: Leader, leased: "LeasedMessages", reply: Reply) -> None:
        """Acknowledge all messages up to the last held one; the answer is a list of one verdict."""
        group, last = self._group, QueueOffset(leased.offsets[-1])
        self._book.order.note_ack_request(group.group_id, range(group.cursor, last + 1))
        lease = leased.columns[:2]
        leader.groups.ack_up_to(group, *lease, last, lambda result: reply(list_of(result)))

    def nack(
        self, leader: Leader, leased: "LeasedMessages", delay_ms: int | None, reply: Reply
    ) -> None:
        """Nack messages; the answer is (group id, verdicts). None after an error."""
        group_id = self._group.group_id

        def answer(result: object) -> None:
            if not isinstance(result, EngineError):
                reply((group_id, list_of(result)))

        self._book.leases.note_return(self._group, leased.offsets)
        leader.groups.nack(self._group, *leased.columns, delay_ms, self._app.now(), answer)

    def give_back(self, leader: Leader, leased: "LeasedMessages") -> None:
        """Return messages that were not seen."""
        self._book.leases.note_return(self._group, leased.offsets)
        leader.groups.release(self._group, *leased.columns)

    def shed(self, leader: Leader, leased: "LeasedMessages", reply: Callable[[], None]) -> None:
        """Return messages unseen, and end the stream's credit: also for unsent messages."""
        self.give_back(leader, leased)
        self._book.credit.note_end(self._stream)
        self._consumer.end_credit()
        self._waiting = [each._replace(messages=0) for each in self._waiting]
        reply()

    def extend(self, leader: Leader, leased: "LeasedMessages") -> None:
        """Extend the leases of messages; no answer."""
        now = self._app.now()
        verdicts = leader.groups.extend(self._group, *leased.columns, LEASE_MS, now)
        judged = zip(leased.offsets, verdicts.tolist(), strict=True)
        to, until_ms = (self._group, self._consumer), now.mono_ms + LEASE_MS
        self._book.leases.check_extension(leader, to, judged, until_ms)
