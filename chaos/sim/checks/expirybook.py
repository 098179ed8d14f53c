"""What expired and what is kept, told from the log and from what leaders hand out.

A plain model beside timer/leader/groups/expiry.py and timer/ready/topic.py, written apart from
them: sets of offsets, a message at a time. A part of the book; its policies say what held at an
entry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import GroupOp, Op, decode_group
from timer.leader.groups.group_dispatch import Delivery
from timer.state.machine import Machine

WEEK_MS: Final = 7 * 86_400_000
Rules = Callable[[int, str], dict[str, Any]]
"""Entry, topic -> what policies make hold there."""


@dataclass(slots=True)
class ExpiryBook:
    """See the module. Its methods raise Broken."""

    rules: Rules
    messages: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Topic id -> (due, fired at) of each offset."""
    names: dict[int, str] = field(default_factory=dict)
    below: dict[int, int] = field(default_factory=dict)
    """Topic id -> all below this has expired, or was let go before."""
    begins: dict[int, int] = field(default_factory=dict)
    """Topic id -> where its queue began after the last entry that was applied somewhere."""
    reached: dict[int, int] = field(default_factory=dict)
    """Topic id -> the furthest cursor of a group that it had then; 0: it had none."""
    single: set[tuple[int, int]] = field(default_factory=set)
    """(group id, offset) of those that expired one by one."""
    acked: set[tuple[int, int]] = field(default_factory=set)
    """(group id, offset) of those with an ack in the log, before they had expired."""
    applied_index: int = 0
    expired: int = 0
    topic_of: dict[int, int] = field(default_factory=dict)
    """Group id -> its topic's, of groups with an op."""
    retained: int = 0
    """Messages that some entry left where they were though all groups had acked them."""

    def on_commit(self, entry: Entry) -> None:
        """Note the acks of an entry, and what expires in it, in the log's order."""
        if entry.kind is not EntryKind.GROUP:
            return
        for op in decode_group(entry.payload):
            if not isinstance(op, GroupOp):
                continue
            offsets = op.offsets.tolist()
            self.topic_of[op.group] = op.topic
            if op.op is Op.EXPIRE_BELOW:
                self.below[op.topic] = max(self.below.get(op.topic, 0), *offsets)
            elif op.op is Op.EXPIRE:
                self.single |= {(op.group, o) for o in offsets} - self.acked
            elif op.op in (Op.ACK, Op.MOVE):
                alive = {(op.group, o) for o in offsets if o >= self.below.get(op.topic, 0)}
                self.acked |= alive - self.single

    def applied(self, entry: Entry, machine: Machine) -> None:
        """What an entry ended had expired, and what it let go was neither unacked nor retained."""
        if entry.index <= self.applied_index:
            return
        self.applied_index = entry.index
        self._note(machine)
        if entry.kind is EntryKind.GROUP:
            for op in decode_group(entry.payload):
                if isinstance(op, GroupOp):
                    self._ended(entry, op)
        for topic_id, topic in machine.topics.items():
            before, begin = self.begins.get(topic_id, 0), topic.queue.begin
            if begin > before:
                self._let_go(entry, machine, topic_id, before)
            cursors = [group.cursor for group in topic.groups.values()]
            self.retained += min(cursors, default=0) > begin
            self.begins[topic_id], self.reached[topic_id] = begin, max(cursors, default=0)

    def _note(self, machine: Machine) -> None:
        for topic_id, topic in machine.topics.items():
            self.names[topic_id] = topic.name
            known = self.messages.setdefault(topic_id, [])
            for block in topic.queue.blocks:
                if block.end <= len(known):
                    continue
                assert block.page is not None, (topic.name, block.first)
                at = len(known) - block.first
                times = block.page.rows["due_ms"][at:], block.page.fired_at_ms[at:]
                known += zip(*(each.tolist() for each in times), strict=True)

    def _ended(self, entry: Entry, op: GroupOp) -> None:
        """Nothing expires before its due and its time to live are over."""
        if op.op not in (Op.EXPIRE_BELOW, Op.EXPIRE):
            return
        offsets = op.offsets.tolist()
        if op.op is Op.EXPIRE_BELOW:
            offsets = range(self.begins.get(op.topic, 0), offsets[0])
        ttl_ms = self.rules(entry.index, self.names[op.topic]).get("ttl_ms")
        for offset in offsets:
            due_ms = self.messages[op.topic][offset][0]
            if not ttl_ms or due_ms + ttl_ms > entry.time_ms:
                what = f"{offset} of {self.names[op.topic]}, due {due_ms}, lives {ttl_ms}"
                raise Broken("expiry", f"entry {entry.index} of {entry.time_ms} ends {what}")
            self.expired += 1

    def _let_go(self, entry: Entry, machine: Machine, topic_id: int, before: int) -> None:
        topic = machine.topics[topic_id]  # type: ignore[index]
        last, expired = topic.queue.begin - 1, self.below.get(topic_id, 0)
        if last < expired:
            return
        what = f"entry {entry.index} of {entry.time_ms}: {topic.name} let go {before} .. {last}"
        groups = topic.groups.values()
        late = [group.name for group in groups if group.cursor <= last]
        kept_ms = self.rules(entry.index, topic.name).get("retention_ms")
        if kept_ms is None:
            # One entry may delete several groups: what the last one had acked went with the first.
            kept_ms = 0 if groups or last < self.reached.get(topic_id, 0) else WEEK_MS
        fired_at_ms = self.messages[topic_id][last][1]
        if late or fired_at_ms + kept_ms > entry.time_ms:
            raise Broken("retention", f"{what}, fired at {fired_at_ms}, not acked by {late}")

    def handed_out(self, delivery: Delivery, index: int) -> None:
        """Nothing is handed out that has expired, by the policies before the entry `index`."""
        topic = delivery.topic
        ttl_ms = self.rules(index, topic.name).get("ttl_ms")
        for offset in delivery.lease.offsets.tolist():
            due_ms = self.messages[topic.topic_id][offset][0]
            over = offset < self.below.get(topic.topic_id, 0)
            over |= (delivery.group.group_id, offset) in self.single
            if over or (ttl_ms and due_ms + ttl_ms <= delivery.at_ms):
                what = f"{offset} of {topic.name}, due {due_ms}, at {delivery.at_ms}"
                raise Broken("expiry", f"{what} is handed out, and lives {ttl_ms}: {over}")

    def told_acked(self, life: str, offset: int) -> None:
        """A consumer was told that its ack counts."""
        group = int(life.rpartition("#")[2])
        over = self.is_over(self.topic_of.get(group, 0), group, offset)
        if over and (group, offset) not in self.acked:
            raise Broken("expiry", f"{offset} of {life}: its ack was told, and it had expired")

    def is_over(self, topic_id: int, group_id: int, offset: int) -> bool:
        """Return whether nobody needs to have got a message."""
        return offset < self.below.get(topic_id, 0) or (group_id, offset) in self.single
