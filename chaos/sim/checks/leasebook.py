"""Extensions of leases that leaders accepted; a part of the book.

An accepted extension holds a message for its consumer until the new deadline. Before that the same
leader delivers it to no consumer, except after a nack, a return, or the end of the consumer's
stream. Only shared groups are judged: an ordered group takes later messages of a key back, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos.sim.world.referee import Broken
from timer.entries.payloads import SHARED
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.groups.lease_table import ConsumerStream
from timer.ready.group import Group

_Key = tuple[int, int]
"""(Group id, offset)."""


@dataclass(slots=True)
class LeaseBook:
    """See the module. `handed_out` raises Broken."""

    until: dict[_Key, tuple[object, ConsumerStream, int]] = field(
        default_factory=dict[_Key, tuple[object, ConsumerStream, int]]
    )
    """Message -> (leader, consumer, the new deadline on the leader's monotonic clock)."""
    granted: int = 0

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

    def handed_out(self, leader: object, group: Group, offsets: list[int], mono_ms: int) -> None:
        """A leader hands messages out.

        Raises:
            Broken: one of them is held for a consumer still.
        """
        for offset in offsets:
            by, _, until_ms = self.until.pop((group.group_id, offset), (None, None, 0))
            if by is leader and mono_ms < until_ms:
                raise Broken("extended", f"{offset} of {group.name} at {mono_ms}, not {until_ms}")
