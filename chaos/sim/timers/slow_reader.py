"""Unsent deliveries in the stream of a consumer.

    deliver --> waiting --send--> the stream, in order
                   +-- withdrawn at a lease's deadline, or taken back at the stream's end

In worlds with `stalls` the consumer stops reading now and then, for less or more than a lease. In
all other worlds each delivery is sent at once. A client drops messages after the end of their
lease, so a waiting delivery is sent only if its lease still holds.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.leader import Delivery
from timer.model.units import LeaseId

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode


class UnsentDelivery(NamedTuple):
    """A delivery that waits for its consumer to read."""

    delivery: Delivery
    messages: int
    """Messages. Without a send their credit counts again."""
    send: Callable[[], None]

    @property
    def lease(self) -> LeaseId:
        """Its lease."""
        return self.delivery.lease.lease_id


class SlowReader:
    """See the module."""

    def __init__(
        self,
        node: "SimNode",
        stall_us: Callable[[], int],
        holds: Callable[[Delivery], bool],
        drained: Callable[[int], None],
    ) -> None:
        """Args:
        stall_us: Draws the duration of a stall, in microseconds. 0: the consumer reads.
        holds: Returns whether all messages of a delivery are still leased.
        drained: Called when the consumer reads again, with the number of dropped messages. It
            grants credit for them anew.
        """
        self._node, self._stall_us, self._holds, self._drained = node, stall_us, holds, drained
        self._waiting: list[UnsentDelivery] = []
        self._stalled = False

    def deliver(self, delivery: Delivery, send: Callable[[], None]) -> None:
        """Send a delivery by calling `send`, behind all earlier ones."""
        self._waiting.append(UnsentDelivery(delivery, len(delivery.lease.offsets), send))
        if self._stalled:
            return
        if us := self._stall_us():
            self._stalled = True
            self._node.later(us, self._read_again)
        else:
            self._waiting.clear()
            send()

    def _read_again(self) -> None:
        self._stalled = False
        messages = 0
        for each in self.close():
            if self._holds(each.delivery):
                each.send()
            else:
                messages += each.messages
        self._drained(messages)

    def end_credit(self) -> None:
        """Note that the consumer has ended its credit: that of unsent messages, too."""
        self._waiting = [each._replace(messages=0) for each in self._waiting]

    def withdraw(self, lease_id: LeaseId, consumer: ConsumerStream) -> list[UnsentDelivery]:
        """Drop the delivery of a lease, if it was not sent, and all later ones; return them.

        The consumer gets nothing more until it reads.
        """
        if all(each.lease != lease_id for each in self._waiting):
            return []
        dropped = [each for each in self._waiting if each.lease >= lease_id]
        self._waiting = [each for each in self._waiting if each.lease < lease_id]
        consumer.credit += sum(each.messages for each in dropped)
        consumer.paused = True
        return dropped

    def close(self) -> list[UnsentDelivery]:
        """Drop all deliveries that were not sent, at the stream's end; return them."""
        waiting, self._waiting = self._waiting, []
        return waiting
