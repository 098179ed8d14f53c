"""Deliveries and acks of messages that have expired; a part of the book.

The oracle says which messages have expired (fatebook.py), the policies say how long one lives
(policybook.py).
"""

from dataclasses import dataclass

from chaos.sim.checks.fatebook import FateBook
from chaos.sim.checks.policybook import PolicyBook
from chaos.sim.world.referee import Broken
from timer.leader.groups.group_delivery import Delivery


@dataclass(slots=True)
class ExpiryBook:
    """See the module. Its methods raise Broken."""

    fates: FateBook
    policies: PolicyBook

    def handed_out(self, delivery: Delivery, index: int) -> None:
        """No expired message is delivered, by the policies before the entry `index`."""
        topic, group = delivery.topic, delivery.group.group_id
        ttl_ms = self.policies.at(index, topic.name).get("ttl_ms")
        for offset in delivery.lease.offsets.tolist():
            due_ms = self.fates.due_ms[topic.topic_id][offset]
            over = self.is_over(group, offset)
            if over or (ttl_ms and due_ms + ttl_ms <= delivery.at_ms):
                what = f"{offset} of {topic.name}, due {due_ms}, at {delivery.at_ms}"
                raise Broken("expiry", f"{what} is handed out, and lives {ttl_ms}: {over}")

    def told_acked(self, life: str, offset: int) -> None:
        """A consumer was told that its ack counts."""
        group = int(life.rpartition("#")[2])
        if self.is_over(group, offset):
            raise Broken("expiry", f"{offset} of {life}: its ack was told, and it had expired")

    def is_over(self, group_id: int, offset: int) -> bool:
        """Return whether a message expired in a group before an ack."""
        return (group_id, offset) in self.fates.over
