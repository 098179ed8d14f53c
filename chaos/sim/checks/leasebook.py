"""Extensions of leases that leaders accepted, and deliveries not sent; a part of the book.

An accepted extension holds a message for its consumer until the new deadline. Before that the same
leader delivers it to no consumer, except after a nack, a return, or the end of the consumer's
stream. Only shared groups are judged: an ordered group takes later messages of a key back, too.

A delivery that was dropped before it was sent counts for nothing: the same leader delivers its
messages again with the same numbers of attempts and failures.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos.sim.world.referee import Broken
from timer.entries.payloads import SHARED
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.groups.lease_table import ConsumerStream
from timer.ready.group import Group

_Key = tuple[int, int]
"""(Group id, offset)."""
_Counts = tuple[int, int]
"""(Attempt, failures)."""


@dataclass(slots=True)
class LeaseBook:
    """See the module. `handed_out` raises Broken."""

    until: dict[_Key, tuple[object, ConsumerStream, int]] = field(default_factory=dict)
    """Message -> (leader, consumer, the new deadline on the leader's monotonic clock)."""
    granted: int = 0
    unsent: dict[_Key, tuple[object, _Counts]] = field(default_factory=dict)
    """Message -> (leader, its counts) of a delivery that was dropped before it was sent."""
    dropped: int = 0
    """Such deliveries."""
    again: int = 0
    """Messages that were delivered again after such a delivery, by the same leader."""

    def extended(
        self,
        leader: object,
        to: tuple[Group, ConsumerStream],
        verdicts: Iterable[tuple[int, int]],
        until_ms: int,
    ) -> None:
        """A leader has judged an extension: a verdict per offset."""
        group, consumer = to
        if group.settings.type != SHARED:
            return
        for offset, verdict in verdicts:
            if verdict == ACCEPT:
                self.until[group.group_id, offset] = leader, consumer, until_ms
                self.granted += 1

    def returned(self, group: Group, offsets: Iterable[int]) -> None:
        """Messages were nacked, or given back."""
        for offset in offsets:
            self.until.pop((group.group_id, offset), None)

    def left(self, consumer: ConsumerStream) -> None:
        """A consumer is gone."""
        mine = [key for key, (_, whose, _) in self.until.items() if whose is consumer]
        for key in mine:
            del self.until[key]

    def not_sent(self, leader: object, delivery: Delivery) -> None:
        """A delivery is dropped before it is sent. Called before the leader ends its lease."""
        lease = delivery.lease
        self.dropped += 1
        if lease.lease_id in lease.consumer.leases and lease.left == len(lease.offsets):
            for offset, counts in _counts(delivery):  # none was acked or recalled
                self.unsent[lease.group_id, offset] = leader, counts

    def handed_out(self, leader: object, delivery: Delivery, mono_ms: int) -> None:
        """A leader hands messages out: none is held for another consumer; counts are as before."""
        group = delivery.group
        for offset, counts in _counts(delivery):
            key = group.group_id, offset
            whose, before = self.unsent.pop(key, (None, counts))
            if whose is leader:
                self.again += 1
                if before != counts:
                    raise Broken("unsent", f"{offset} of {group.name}: {before}, and now {counts}")
            by, _, until_ms = self.until.pop(key, (None, None, 0))
            if by is leader and mono_ms < until_ms:
                raise Broken("extended", f"{offset} of {group.name} at {mono_ms}, not {until_ms}")


def _counts(delivery: Delivery) -> list[tuple[int, _Counts]]:
    """Return (offset, counts) of each message."""
    counts = zip(delivery.attempts.tolist(), delivery.failures.tolist(), strict=True)
    return list(zip(delivery.lease.offsets.tolist(), counts, strict=True))
