"""Leases, credit and rates, from the leaders' deliveries; a part of the book."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from chaos.sim.world.referee import Broken
from timer.entries.payloads import SHARED
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.groups.lease_table import ConsumerStream
from timer.ready.group import Group

CLOCK_ERROR: Final = 1.05
_Key = tuple[int, int]
"""(Group id, offset)."""
_Counts = tuple[int, int]
"""(Attempt, failures)."""


@dataclass(slots=True)
class LeaseBook:
    """Extensions of leases that leaders accepted, and unsent deliveries. It raises Broken.

    An accepted extension holds a message for its consumer until the new deadline. Before that the
    same leader delivers it to no consumer, except after a nack, a return, or the end of the
    consumer's stream. Only shared groups are judged: an ordered group takes later messages of a key
    back, too.

    A delivery that was dropped before it was sent counts for nothing: the same leader delivers its
    messages again with the same numbers of attempts and failures.
    """

    until: dict[_Key, tuple[object, ConsumerStream, int]] = field(default_factory=dict)
    """Message -> (leader, consumer, the new deadline on the leader's monotonic clock)."""
    unsent: dict[_Key, tuple[object, _Counts]] = field(default_factory=dict)
    """Message -> (leader, its counts) of a delivery that was dropped before it was sent."""

    def check_extension(
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

    def note_return(self, group: Group, offsets: Iterable[int]) -> None:
        """Messages were nacked, or given back."""
        for offset in offsets:
            self.until.pop((group.group_id, offset), None)

    def note_leave(self, consumer: ConsumerStream) -> None:
        """A consumer is gone."""
        mine = [key for key, (_, whose, _) in self.until.items() if whose is consumer]
        for key in mine:
            del self.until[key]

    def not_sent(self, leader: object, delivery: Delivery) -> None:
        """A delivery is dropped before it is sent. Called before the leader ends its lease."""
        lease = delivery.lease
        if lease.lease_id in lease.consumer.leases and lease.leased_count == len(lease.offsets):
            for offset, counts in _counts(delivery):  # none was acked or recalled
                self.unsent[lease.group_id, offset] = leader, counts

    def check_delivery(self, leader: object, delivery: Delivery, mono_ms: int) -> None:
        """A leader hands messages out: none is held for another consumer; counts are as before."""
        group = delivery.group
        for offset, counts in _counts(delivery):
            key = group.group_id, offset
            whose, before = self.unsent.pop(key, (None, counts))
            if whose is leader and before != counts:
                raise Broken("unsent", f"{offset} of {group.name}: {before}, and now {counts}")
            by, _, until_ms = self.until.pop(key, (None, None, 0))
            if by is leader and mono_ms < until_ms:
                raise Broken("extended", f"{offset} of {group.name} at {mono_ms}, not {until_ms}")


def _counts(delivery: Delivery) -> list[tuple[int, _Counts]]:
    """Return (offset, counts) of each message."""
    counts = zip(delivery.attempts.tolist(), delivery.failures.tolist(), strict=True)
    return list(zip(delivery.lease.offsets.tolist(), counts, strict=True))


@dataclass(slots=True)
class CreditBook:
    """Credit of consumers, as they grant it and end it. `delivered` raises Broken.

    A consumer gets no message for which it granted no credit. A consumer that returns messages
    unseen and ends its credit gets none until it grants some again. A stream is any hashable name
    of it.
    """

    credit: dict[object, int] = field(default_factory=dict)
    """Stream -> messages that its node may send."""

    def note_grant(self, stream: object, messages: int) -> None:
        """A node got credit for a stream; the first opens it."""
        self.credit[stream] = self.credit.get(stream, 0) + messages

    def note_end(self, stream: object) -> None:
        """A node got the end of a stream's credit."""
        self.credit[stream] = 0

    def check_delivery(self, stream: object, messages: int) -> None:
        """A leader delivers messages on a stream, no more than it has credit for."""
        left = self.credit.get(stream, 0)
        if messages > left:
            raise Broken("credit", f"{messages} messages on a stream with credit for {left}")
        self.credit[stream] = left - messages


@dataclass(slots=True)
class PaceBook:
    """Rates of delivery, independent of the product's. `handed_out` raises Broken.

    Worlds with `traits` have one rate of all groups, which their operator sets once. Each group has
    a bucket of the world's own time, a little faster than any node's clock.
    """

    levels: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(topic, group) -> (time of the last delivery in microseconds, fill of its bucket)."""
    judged: int = 0
    """Deliveries of groups with a rate."""

    def check_delivery(self, delivery: Delivery, rate: int, now_us: int) -> None:
        """Check a delivery. `rate`: most messages a second to each group; 0: no limit."""
        if not rate:
            return
        self.judged += 1
        place = delivery.topic.name, delivery.group.name
        before_us, fill = self.levels.get(place, (now_us, 0.0))
        drained = rate * CLOCK_ERROR * (now_us - before_us) / 1e6
        fill = max(0.0, fill - drained) + len(delivery.lease.offsets)
        self.levels[place] = now_us, fill
        if fill > max(rate / 10, 1) + 1:
            raise Broken("rate", f"{place} has {fill:.1f} messages above {rate} a second")
