"""The order in which groups receive messages, from the log and the leaders' deliveries.

A part of the book, independent of timer/leader/groups/key_order.py and priority_shelf.py. Per group
and epoch it notes the consumer of each message. In an ordered group, each earlier message of the
key must be in flight at the same consumer, or acked, moved or expired, or perhaps about to be
acked. In a shared group, no message passes a free one of a higher priority, except for 8 after each
64 deliveries.

Ordering keys and priorities of timers follow from their payloads, so that requests that are sent
again have the same ones, and the book knows them without the product.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from chaos.sim.world.referee import Broken
from timer.entries.payloads import KEY_SHARED, SHARED, GroupOp, Op
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import OffsetStates
from timer.model.columns import U64, Binary
from timer.model.row_traits import Traits, join
from timer.ready.group import Group
from timer.ready.page_cache import BlockRows
from timer.state.machine import Machine

RUN: Final = 64
"""Deliveries by priority in a row, and then those by age."""
OLDEST: Final = 8
ORDERING: Final = (b"", b"k", b"o")
"""Ordering keys; b"k" is a key as well (chaos/sim/timers/town.py)."""
PRIORITIES: Final = (9, 9, 9, 9, 4, 0)


def ordering_of(payload: bytes) -> bytes:
    """Return the ordering key of a timer; empty: none."""
    return ORDERING[zlib.crc32(payload) % len(ORDERING)]


def priority_of(payload: bytes) -> int:
    """Return the priority of a timer."""
    return PRIORITIES[zlib.crc32(payload, 1) % len(PRIORITIES)]


def headers_of(payloads: list[bytes]) -> Binary:
    """Return the headers of timers: only their traits."""
    ordering = Binary.of([*map(ordering_of, payloads)])
    priority = np.array([*map(priority_of, payloads)], np.uint8)
    return join(Binary.of([b""] * len(payloads)), Traits(ordering, priority))


@dataclass(slots=True)
class OrderBook:
    """See the module; `handed_out` raises Broken."""

    keys: dict[int, list[bytes]] = field(default_factory=dict)
    """Topic id -> the key of each offset. Messages without a key have different ones."""
    done: dict[int, set[int]] = field(default_factory=dict)
    """Group id -> offsets that are acked, moved or expired, or have a requested ack."""
    flights: dict[int, tuple[int, dict[int, object]]] = field(default_factory=dict)
    """Group id -> (an epoch, offset -> the consumer to which its leader delivered it)."""
    has_traits: bool = False
    """Timers have ordering keys and priorities as `headers_of` gives them."""
    priorities: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Topic id -> the priority of each offset, in worlds with traits."""
    turns: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(Group id, epoch) -> (messages delivered, those that passed a more urgent one)."""

    def note_fire(self, machine: Machine) -> None:
        """Note the keys of new messages. Their pages are in memory: the entry was just applied."""
        for topic_id, topic in machine.topics.items():
            keys = self.keys.setdefault(topic_id, [])
            if topic.queue.end <= len(keys):
                continue
            for block in topic.queue.blocks:
                if block.end <= len(keys):
                    continue
                assert block.page is not None, (topic.name, block.first, len(keys))
                for row in block.page.rows[len(keys) - block.first :]:
                    key, payload = (_bytes_of(block.page, row, name) for name in ("key", "payload"))
                    if self.has_traits:
                        key = ordering_of(payload) or key
                        self.priorities[topic_id].append(priority_of(payload))
                    keys.append(key or b"/%d" % len(keys))

    def note_ack_request(self, group_id: int, offsets: Iterable[int]) -> None:
        """Note requested acks. A leader may count them before they are committed."""
        self.done.setdefault(group_id, set()).update(offsets)

    def note_commit(self, op: GroupOp) -> None:
        """Note an op of the log. A message that came back is in flight at no consumer."""
        offsets = op.offsets.tolist()
        if op.op in (Op.ACK, Op.MOVE, Op.EXPIRE):
            self.note_ack_request(op.group, offsets)
        elif op.op in (Op.NACK, Op.ENDED, Op.RECALL):
            _, held = self.flights.get(op.group, (0, {}))
            for offset in offsets:
                held.pop(offset, None)

    def not_sent(self, delivery: Delivery) -> None:
        """Note a delivery that was dropped, with all later ones of its consumer."""
        _, held = self.flights.get(delivery.group.group_id, (0, {}))
        for offset in delivery.lease.offsets.tolist():
            if held.get(offset) is delivery.lease.consumer:
                del held[offset]

    def check_delivery(self, delivery: Delivery) -> None:
        """Check that no message comes before an earlier one of its key, or apart from it."""
        group, consumer = delivery.group, delivery.lease.consumer
        kind, group_id = group.settings.type, group.group_id
        if kind == SHARED:
            return
        epoch, held = self.flights.get(group_id, (0, {}))
        if epoch < delivery.epoch:
            held = {}
            self.flights[group_id] = (delivery.epoch, held)
        who = f"{group.name} ({kind}) of {delivery.topic.name}"
        done, keys = self.done.setdefault(group_id, set()), self.keys[group.topic]

        def same(other: int, offset: int) -> bool:
            return other not in done and (kind != KEY_SHARED or keys[other] == keys[offset])

        for offset in delivery.lease.offsets.tolist():
            before = [o for o in range(group.cursor, offset) if same(o, offset)]
            for other in before:
                if held.get(other) is not consumer:
                    raise Broken("order", f"{who} gets {offset} before {other}")
            for other in held:
                if other > offset and same(other, offset):
                    raise Broken("order", f"{who} gets {offset} again behind {other}")
            held[offset] = consumer

    def by_priority(self, delivery: Delivery, states: Callable[[Group, U64], OffsetStates]) -> None:
        """Check that a shared group's most urgent messages come first.

        `states`: returns the states of messages at the leader. They are those after all deliveries
        of its step, so a message that is free now was free then.
        """
        group, queue = delivery.group, delivery.topic.queue
        if group.settings.type != SHARED:
            return
        free = np.arange(group.cursor, min(queue.end, group.reserved), dtype=np.uint64)
        if any(block.page is None for block in queue.blocks):
            free = free[:0]  # a message waits for those before it that are on disk only
        free = free[states(group, free).free & ~group.is_acked(free)]
        place = self.priorities[group.topic]
        levels = [place[offset] for offset in free.tolist()]
        mine = [place[offset] for offset in delivery.lease.offsets.tolist()]
        count, passed = self.turns.get((group.group_id, delivery.epoch), (0, 0))
        passed += sum(level < max(levels, default=0) for level in mine)
        count += len(mine)
        self.turns[group.group_id, delivery.epoch] = count, passed
        if passed > count // RUN * OLDEST:
            text = f"{passed} of {count} messages passed more urgent ones: {mine}, not {levels}"
            raise Broken("priority", f"{group.name} of {delivery.topic.name}: {text}")


def _bytes_of(page: BlockRows, row: Any, name: str) -> bytes:
    """Return a column of variable size of one row."""
    start, size = int(row[f"{name}_start"]), int(row[f"{name}_size"])
    return bytes(page.bufs[int(row["buf"])][start : start + size])
