"""The consumers of one group, in the order of their turns.

A silent consumer let a lease end and has sent no request since: it may be frozen. It gets nothing
while another consumer is not silent. If all are silent and the group bounds failures, each gets one
message at a time.

A round gives each consumer with an allowance one lease. A lease has at most the consumer's share of
the messages that are free, so that none is idle while others hold a whole burst:

    10 free, 3 consumers:  4 of 10 --> 3 of 6 --> 3 of 3

A consumer with much credit works fast. Single messages would cost it more than their work, and many
small leases would reach the most that a group may have. So a lease may have SHARE_MIN of the
credit, even if it is more than the share.
"""

from collections.abc import Sequence
from typing import Final

from timer.leader.groups.lease_table import ConsumerStream, LeaseTable
from timer.ready.group import Group

CONSUMERS_A_UNIT: Final = 128
"""Consumers that a look passes in the time of one work unit (timer/leader/groups/turns.py)."""

SHARE_MIN: Final = 1 / 12
"""The client grants what it works off in half a lease, so this is 1.25 s of work in one of 30 s; or
eight messages, as long as it does not know its pace."""


class Roster:
    """See the module."""

    __slots__ = ("_group", "_join_count", "_table", "_turns_left", "consumers", "silent_count")

    def __init__(self, group: Group, table: LeaseTable) -> None:
        self._group, self._table = group, table
        self.consumers: list[ConsumerStream] = []
        """In the order in which they are served next."""
        self.silent_count = 0
        """Number of silent consumers."""
        self._join_count = 0
        self._turns_left = 0
        """Leases that are left in the round. 0: the next lease begins a round."""

    def join(self, consumer: ConsumerStream) -> None:
        """Add a consumer behind the others."""
        self._join_count += 1
        consumer.number = self._join_count
        self.consumers.append(consumer)
        self.silent_count += consumer.silent

    def remove(self, consumer: ConsumerStream) -> None:
        """Remove a consumer. Its leases stay."""
        self.consumers.remove(consumer)
        self.silent_count -= consumer.silent
        self.end_round()

    def on_request(self, consumer: ConsumerStream) -> bool:
        """Note a request from a consumer; return whether the consumer was silent."""
        was, consumer.silent = consumer.silent, False
        self.silent_count -= was
        return was

    def mark_silent(self, consumer: ConsumerStream) -> None:
        """Note that a lease of the consumer reached its deadline."""
        self.silent_count += not consumer.silent
        consumer.silent = True

    def allowance(self, consumer: ConsumerStream) -> int:
        """Return how many messages a consumer may get now."""
        if consumer.paused or consumer.bytes_left <= 0:
            return 0
        if not consumer.silent:
            return consumer.credit
        if self.silent_count < len(self.consumers):
            return 0
        if self._group.settings.max_attempts:
            return min(1, consumer.credit) if not consumer.leases else 0
        return consumer.credit

    def next(self) -> ConsumerStream | None:
        """Return the next consumer that may get messages; those before it lose their turn."""
        for place, consumer in enumerate(self.consumers):
            if self.allowance(consumer) > 0:
                if place:
                    self.consumers = self.consumers[place:] + self.consumers[:place]
                return consumer
        return None

    def allowed_in_flight(self, limit: int) -> int:
        """Return how many of `limit` messages max_in_flight still allows the group."""
        most = self._group.settings.max_in_flight
        return min(limit, most - self._table.in_flight) if most else limit

    def share(self, consumer: ConsumerStream, free: int) -> int:
        """Return the most messages of the next lease of the round, if this consumer gets it.

        `free`: messages that the group could deliver now. The consumer has an allowance.
        """
        free = self.allowed_in_flight(free)
        if not self._turns_left and free > 1:
            self._turns_left = sum(self.allowance(each) > 0 for each in self.consumers)
        return max(
            1,
            -(-free // max(1, self._turns_left)),
            int(consumer.credit * SHARE_MIN),
        )

    def end_round(self) -> None:
        """Begin a new round with the next lease: no message is free, or no consumer may get one."""
        self._turns_left = 0

    @property
    def work(self) -> int:
        """Work units of a look at all consumers."""
        return len(self.consumers) // CONSUMERS_A_UNIT

    def active_consumers(self) -> Sequence[ConsumerStream]:
        """Return the one consumer that a group with one consumer at a time serves; none: empty.

        The first consumer that is not silent, or the first one if all are silent.
        """
        active = next((each for each in self.consumers if not each.silent), None)
        return [active] if active is not None else self.consumers[:1]

    def end_turn(self, consumer: ConsumerStream) -> None:
        """Put a consumer behind the others: its turn of the round is over."""
        self._turns_left = max(0, self._turns_left - 1)
        self.consumers.remove(consumer)
        self.consumers.append(consumer)
