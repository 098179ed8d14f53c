"""In which order groups get messages, told from the log and from what leaders hand out.

A plain model beside timer/ordered.py, written apart from it: per group and epoch, who has which
message. What is handed out must have nothing before it in its key but what is in flight at the same
consumer, or is acked, moved or expired, or perhaps is about to be acked. A part of the book.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos.sim.keybook import TimerName
from chaos.sim.referee import Broken
from timer.machine import Machine
from timer.payloads import KEY_SHARED, SHARED, GroupOp, Op
from timer.serving import Delivery


@dataclass(slots=True)
class OrderBook:
    """See the module; `handed_out` raises Broken."""

    keys: dict[int, list[bytes]] = field(default_factory=dict)
    """Topic id -> the key of each offset; one of its own without a key."""
    done: dict[int, set[int]] = field(default_factory=dict)
    """Group id -> offsets that are acked, moved or expired, or that somebody has asked to ack."""
    flights: dict[int, tuple[int, dict[int, object]]] = field(default_factory=dict)
    """Group id -> an epoch, and of each offset that its leader handed out, who has it."""
    fired_names: set[TimerName] = field(default_factory=set)
    passing: bool = False
    """Some group was sought or deleted: what has fired may never have been delivered."""
    checked: int = 0
    """Messages handed out behind another one of their key."""

    def fired(self, machine: Machine) -> None:
        """Note the keys of what has fired since: its pages are there, as it was just applied."""
        for topic_id, topic in machine.topics.items():
            keys = self.keys.setdefault(topic_id, [])
            if topic.queue.end <= len(keys):
                continue
            for block in topic.queue.blocks:
                if block.end <= len(keys):
                    continue
                assert block.page is not None, (topic.name, block.first, len(keys))
                for row in block.page.rows[len(keys) - block.first :]:
                    start, size = int(row["key_start"]), int(row["key_size"])
                    key = bytes(block.page.bufs[int(row["buf"])][start : start + size])
                    keys.append(key or b"/%d" % len(keys))
                    self.fired_names.add(TimerName(int(row["due_ms"]), int(row["seq"])))

    def ack_asked(self, group_id: int, offsets: Iterable[int]) -> None:
        """Somebody says that these are done; the leader may believe it before it is committed."""
        self.done.setdefault(group_id, set()).update(offsets)

    def committed(self, op: GroupOp) -> None:
        """Note what an op of the log did: what came back is with nobody."""
        offsets = op.offsets.tolist()
        self.passing |= op.op in (Op.SEEK, Op.DELETE)
        if op.op in (Op.ACK, Op.MOVE, Op.EXPIRE):
            self.ack_asked(op.group, offsets)
        elif op.op in (Op.NACK, Op.ENDED, Op.RECALL):
            _, held = self.flights.get(op.group, (0, {}))
            for offset in offsets:
                held.pop(offset, None)

    def handed_out(self, delivery: Delivery) -> None:
        """Nothing comes before what is earlier in its key, and that is with the same consumer."""
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
            self.checked += len(before)
            for other in before:
                if held.get(other) is not consumer:
                    raise Broken("order", f"{who} gets {offset} before {other}")
            for other in held:
                if other > offset and same(other, offset):
                    raise Broken("order", f"{who} gets {offset} again behind {other}")
            held[offset] = consumer
