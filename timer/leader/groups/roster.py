"""The consumers of one group, in the order of their turns.

A silent consumer let a lease end and has sent no request since: it may be frozen. It gets nothing
while another consumer is not silent. If all are silent and the group bounds failures, each gets one
message at a time.
"""

from collections.abc import Sequence
from typing import Final

from timer.leader.groups.lease_table import ConsumerStream
from timer.ready.group import Group

CONSUMERS_A_UNIT: Final = 128
"""Consumers that a look passes in the time of one work unit (timer/leader/groups/turns.py)."""


class Roster:
    """See the module."""

    __slots__ = ("_group", "_joined", "consumers", "silent")

    def __init__(self, group: Group) -> None:
        self._group = group
        self.consumers: list[ConsumerStream] = []
        """In the order in which they are served next."""
        self.silent = 0
        """Number of silent consumers."""
        self._joined = 0

    def join(self, consumer: ConsumerStream) -> None:
        """Add a consumer behind the others."""
        self._joined += 1
        consumer.number = self._joined
        self.consumers.append(consumer)
        self.silent += consumer.silent

    def remove(self, consumer: ConsumerStream) -> None:
        """Remove a consumer. Its leases stay."""
        self.consumers.remove(consumer)
        self.silent -= consumer.silent

    def heard(self, consumer: ConsumerStream) -> bool:
        """Note a request from a consumer; return whether the consumer was silent."""
        was, consumer.silent = consumer.silent, False
        self.silent -= was
        return was

    def fall_silent(self, consumer: ConsumerStream) -> None:
        """Note that a lease of the consumer reached its deadline."""
        self.silent += not consumer.silent
        consumer.silent = True

    def allowed(self, consumer: ConsumerStream) -> int:
        """Return how many messages a consumer may get now."""
        if consumer.paused or consumer.room <= 0:
            return 0
        if not consumer.silent:
            return consumer.credit
        if self.silent < len(self.consumers):
            return 0
        if self._group.settings.max_attempts:
            return min(1, consumer.credit) if not consumer.leases else 0
        return consumer.credit

    def next(self) -> ConsumerStream | None:
        """Return the next consumer that may get messages; those before it lose their turn."""
        for place, consumer in enumerate(self.consumers):
            if self.allowed(consumer) > 0:
                self.consumers = self.consumers[place:] + self.consumers[:place]
                return consumer
        return None

    @property
    def work(self) -> int:
        """Work units of a look at all consumers."""
        return len(self.consumers) // CONSUMERS_A_UNIT

    def first(self) -> Sequence[ConsumerStream]:
        """Return the one consumer that a group with one consumer at a time serves; none: empty.

        The first consumer that is not silent, or the first one if all are silent.
        """
        heard = next((each for each in self.consumers if not each.silent), None)
        return [heard] if heard is not None else self.consumers[:1]

    def served(self, consumer: ConsumerStream) -> None:
        """Put a consumer behind the others."""
        self.consumers.remove(consumer)
        self.consumers.append(consumer)
