"""The book of promises to the clients of a simulated timer cluster, and its checkers.

from the log     each entry as it is first committed, and as each replica has applied it
from the nodes   deliveries, as they are sent
from clients     requests, answers and received messages
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from chaos.sim.checks.creditbook import CreditBook
from chaos.sim.checks.expirybook import ExpiryBook
from chaos.sim.checks.fatebook import FateBook
from chaos.sim.checks.keybook import Key, KeyBook, TimerName, ToldRow
from chaos.sim.checks.latebook import LateBook
from chaos.sim.checks.leasebook import LeaseBook
from chaos.sim.checks.letterbook import LetterBook
from chaos.sim.checks.orderbook import OrderBook
from chaos.sim.checks.pacebook import PaceBook
from chaos.sim.checks.policybook import PolicyBook
from chaos.sim.checks.quotabook import QuotaBook
from chaos.sim.checks.requestbook import RequestBook
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import GroupOp, Move, Nack, Op, decode_fire, decode_group
from timer.leader.groups import dead_letters
from timer.leader.groups.group_delivery import Delivery
from timer.model import timer_id
from timer.model.columns import decode_headers, decode_schedule
from timer.model.units import Epoch, GroupId, LogIndex
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    DROPPED,
    Applied,
    Checkpoint,
    DeleteTopicApplied,
    GroupApplied,
    MoveApplied,
    SeekApplied,
)
from timer.state.machine import Machine

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.world.sim_node import SimNode

AHEAD_MS_MAX: Final = 5_000
"""The most that the log's clock may be ahead of true time while a majority of clocks is right. A
leader that hears no majority continues by its own clock, which is up to 4 % fast."""


@dataclass(frozen=True, slots=True)
class DeliveredRow:
    """A delivered message."""

    name: TimerName
    fired_at_ms: int
    payload: bytes
    """It names the row and its request; see `Request.payloads`."""


@dataclass(slots=True)
class PromisedTimer:
    """One timer that an answer to a producer reported as scheduled."""

    topic: str
    requested_ms: int | None
    """None: the leader computed the time from a delay, or from policies."""
    cancelled: bool = False
    """A cancel returned CANCELLED."""
    cancel_open: int = 0
    """Cancels without an answer: their outcome is unknown."""


@dataclass(slots=True)
class PromiseBook:
    """The promises. Every method raises Broken if one was not kept."""

    timers: dict[TimerName, PromisedTimer] = field(default_factory=dict)
    digests: dict[LogIndex, str] = field(default_factory=dict)
    fired: dict[TimerName, tuple[str, int]] = field(default_factory=dict)
    """Timer -> (topic, queue offset), from consumers' messages."""
    payloads: dict[bytes, TimerName | None] = field(default_factory=dict)
    """Row of a request -> the one timer that it became. None: not known yet."""
    series: set[bytes] = field(default_factory=set)
    """Payloads of series: any number of timers have one."""
    repeatable: set[bytes] = field(default_factory=set)
    """Rows that may become a timer again, because their request's id is soon forgotten."""
    whole: list[list[bytes]] = field(default_factory=list)
    """The rows of each request without keys: all of them become timers, or none."""
    requests: RequestBook = field(default_factory=RequestBook)
    acked: set[tuple[str, str, int]] = field(default_factory=set)
    """(topic, life of a group, offset) of confirmed acks. A seek begins another life."""
    acked_first: set[tuple[str, str, int]] = field(default_factory=set)
    """Those of them that returned ACKED: nothing else had ended the message before."""
    delivered: set[tuple[str, str, int]] = field(default_factory=set)
    lives: dict[GroupId, tuple[str, str]] = field(default_factory=dict)
    """Group id -> (topic, life)."""
    first_lives: dict[str, str] = field(default_factory=dict)
    """Life after a seek -> the life that the group began with."""
    seeks: int = 0
    ups: int = 0
    """Acks of all up to a message."""
    deliveries: int = 0
    attempts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """The highest attempt of each delivered message."""
    redeliveries: int = 0
    answers: int = 0
    starts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(topic, life) -> its first offset."""
    nacks: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(topic id, group id, offset) -> the time of its last committed nack."""
    nacks_told: set[tuple[int, int, int]] = field(default_factory=set)
    """(topic id, group id, offset) of nacks that returned NACKED."""
    dead: dict[tuple[int, int, int], LogIndex] = field(default_factory=dict)
    """(topic id, group id, offset) -> the entry that made the message a dead letter."""
    buried: set[TimerName] = field(default_factory=set)
    """Timers that became dead letters. Perhaps no consumer ever received them."""
    keys: KeyBook = field(default_factory=KeyBook)
    policies: PolicyBook = field(init=False)
    fates: FateBook = field(default_factory=FateBook)
    late: LateBook = field(init=False)
    leases: LeaseBook = field(default_factory=LeaseBook)
    credit: CreditBook = field(default_factory=CreditBook)
    order: OrderBook = field(default_factory=OrderBook)
    pace: PaceBook = field(default_factory=PaceBook)
    quotas: QuotaBook = field(init=False)
    expiry: ExpiryBook = field(init=False)
    letters: LetterBook = field(default_factory=LetterBook)
    asked_up_to: dict[tuple[str, str], int] = field(default_factory=dict)
    """(topic, life) -> the greatest offset of an `ack up to`, delivered or not."""
    passed: set[tuple[int, int, int]] = field(default_factory=set)
    """(topic id, group id, offset) that an `ack up to` acked. Perhaps no consumer received it."""
    committed: LogIndex = LogIndex(0)
    """The last entry that was checked."""
    read_time_ms: int = 0
    """Read time of the last committed FIRE."""

    def __post_init__(self) -> None:
        """Make the books that use other books."""
        self.policies = PolicyBook(self.fates)
        self.late = LateBook(self.fates)
        self.quotas = QuotaBook(self.policies)
        self.expiry = ExpiryBook(self.fates, self.policies)

    # ---- the log

    def on_commit(self, entry: Entry, true_ms: int | None) -> None:
        """Check an entry that is committed on some node.

        `true_ms`: the true time, or None if two clocks were wrong.
        """
        if entry.index <= self.committed:
            return
        self.committed = entry.index
        if true_ms is not None and entry.time_ms > true_ms + AHEAD_MS_MAX:
            raise Broken("clock", f"entry {entry.index} of {entry.time_ms}, at {true_ms}")
        if entry.kind is EntryKind.FIRE:
            read_time_ms = decode_fire(entry.payload).read_time_ms
            if read_time_ms < self.read_time_ms:
                raise Broken("time", f"FIRE {entry.index}: {self.read_time_ms} -> {read_time_ms}")
            self.read_time_ms = read_time_ms
        self.fates.on_commit(entry)
        if entry.kind is EntryKind.GROUP:
            for op in decode_group(entry.payload):
                if isinstance(op, Nack):
                    for offset, at_ms in zip(op.offsets.tolist(), op.not_before_ms, strict=True):
                        self.nacks[op.topic, op.group, offset] = int(at_ms)
                if isinstance(op, GroupOp):
                    self.order.committed(op)
                    self._passes(op)

    def _passes(self, op: GroupOp) -> None:
        """Note the acks of an `ack up to` that are in the log."""
        key = self.lives.get(op.group)
        if op.op is not Op.ACK or key not in self.asked_up_to:
            return
        offsets = op.offsets[op.offsets <= self.asked_up_to[key]].tolist()
        self.passed.update((op.topic, op.group, offset) for offset in offsets)

    def applied(self, node: "SimNode", machine: Machine, applied: Applied) -> None:
        """Check P7 on a replica that has just applied an entry; note where a new group begins."""
        self.order.fired(machine)
        if isinstance(applied, DeleteTopicApplied):
            self.order.passing.add(applied.op.topic)
        if isinstance(applied, GroupApplied):
            for result in applied.results:
                if isinstance(result, Group):
                    self._begins(machine, result)
                elif isinstance(result, SeekApplied):
                    self._sought(machine, result)
                elif isinstance(result, MoveApplied):
                    self._moved(machine, result)
            self.letters.checked = max(self.letters.checked, machine.applied_index)
        if isinstance(applied, Checkpoint):
            self.keys.unique(node, machine)
        counts, held = machine.counts, machine.store.pending
        queued = self.fates.fired_before(machine)
        queued += sum(topic.queue.end for topic in machine.topics.values())
        if held != counts.pending or queued != counts.fired:
            raise Broken("conservation", f"{node}: {counts}, pending {held}, queued {queued}")

    def _begins(self, machine: Machine, group: Group) -> None:
        topic = machine.topics[group.topic].name
        self.lives[group.group_id] = (topic, life_of(group))
        self.starts.setdefault((topic, life_of(group)), group.cursor)

    def _sought(self, machine: Machine, sought: SeekApplied) -> None:
        before = f"{sought.group.name}#{sought.op.group}"
        life = life_of(sought.group)
        self.seeks += life not in self.first_lives
        queue, cursor = machine.topics[sought.group.topic].queue, sought.group.cursor
        asked = int(sought.op.offsets[0])
        if life not in self.first_lives and cursor != min(max(asked, queue.begin), queue.end):
            raise Broken("seek", f"{life} is at {cursor}, asked for {asked}")
        self.first_lives[life] = self.first_lives.get(before, before)
        self._begins(machine, sought.group)

    def _moved(self, machine: Machine, moved: MoveApplied) -> None:
        """Check that a message becomes a dead letter once, and not after its confirmed ack."""
        op, first = moved.op, machine.applied_index > self.letters.checked
        group = machine.topics[op.topic].group_by_id.get(op.group)
        if group is not None and not group.is_acked(op.offsets).all():
            raise Broken("dead", f"{group.name}: {op.offsets} moved, and still there")
        if not op.to_group:
            if first:
                self.letters.redriven(machine, moved, self.order.fired_names)
            return
        topic, life = self.lives[op.group]
        if first:
            self.letters.buried(moved, topic)
        self.buried |= _names_in(op) if moved.new.any() else set()
        for offset in op.offsets[moved.new].tolist():
            index = self.dead.setdefault((op.topic, op.group, offset), machine.applied_index)
            if index != machine.applied_index:
                raise Broken("dead", f"{offset} moved at {index} and {machine.applied_index}")
            if (topic, life, offset) in self.acked_first:
                raise Broken("dead", f"{offset} of {topic} was acked, and is a dead letter")

    def digest(self, node: "SimNode", checkpoint: Checkpoint, machine: Machine) -> None:
        """Check P6: all replicas record the same digest at an index.

        For one replica in three, in turn, the digest is also computed anew from all its state.
        """
        if (checkpoint.index + node.replica) % 3 == 0:
            anew = machine.digest_anew()
            if checkpoint.digest != anew:
                raise Broken("digest", f"{checkpoint} on {node}: of all its state {anew}")
        known = self.digests.setdefault(checkpoint.index, checkpoint.digest)
        if known != checkpoint.digest:
            raise Broken("digest", f"{checkpoint.index}: {known} and, on {node}, {checkpoint}")

    def handed_out(self, node: object, delivery: Delivery, served: Epoch) -> None:
        """Check P5: only the newest `served` epoch delivers, and no nacked message too early."""
        if delivery.epoch < served:
            raise Broken("handout", f"{node} under epoch {delivery.epoch}; {served} is served")
        self.order.handed_out(delivery)
        group = delivery.group
        for offset in delivery.lease.offsets.tolist():
            not_before = self.nacks.get((group.topic, group.group_id, offset), 0)
            if not_before > delivery.at_ms:
                early = f"{offset} of {group.name} at {delivery.at_ms}, not before {not_before}"
                raise Broken("nack", f"{node} hands out {early}")

    def check_due(self, node: object, delivery: Delivery) -> None:
        """Check P3: no message is handed out before it is due by the leader's clock."""
        for page, at in delivery.topic.queue.slices(delivery.lease.offsets):
            due_ms = int(page.rows["due_ms"][at.astype(np.int64)].max())
            if due_ms > delivery.at_ms:
                name = delivery.group.name
                raise Broken("early", f"{node} hands out {due_ms} to {name} at {delivery.at_ms}")

    # ---- producers

    def asked(self, payloads: list[bytes]) -> None:
        """Note a request that is about to be sent for the first time."""
        for payload in payloads:
            self.payloads[payload] = None

    def scheduled(self, name: TimerName, topic: str, requested_ms: int | None) -> None:
        """Note a promised timer (P1).

        `requested_ms` is None for a delay, or if policies may make the due time earlier.
        """
        self.timers[name] = PromisedTimer(topic, requested_ms)
        if requested_ms is not None and name.due_ms < requested_ms:
            raise Broken("early", f"{name} was asked for {requested_ms}")

    def answered_again(self, first: list[ToldRow], again: list[ToldRow]) -> None:
        """Check P2: a retried request returns the first answer."""
        if first != again:
            raise Broken("twice", f"a request was answered {first}, then {again}")

    def cancel_asked(self, name: TimerName) -> None:
        """Note a cancel: from now on the timer may be cancelled."""
        self.timers[name].cancel_open += 1

    def cancel_answered(self, name: TimerName, outcome: int) -> None:
        """Check P4: the answer to a cancel is true."""
        asked = self.timers[name]
        asked.cancel_open -= 1
        if outcome == CANCELLED and (asked.cancelled or name in self.keys.ended):
            raise Broken("cancel", f"{name} was cancelled twice")
        if outcome in (CANCELLED, ALREADY_CANCELLED) and name in self.fired:
            raise Broken("cancel", f"{name} was delivered, then cancelled ({outcome})")
        if outcome == ALREADY_FIRED and asked.cancelled:
            raise Broken("cancel", f"{name} was cancelled, then had fired")
        dropped = name in self.fates.dropped
        if dropped != (outcome == DROPPED) and outcome in (CANCELLED, ALREADY_FIRED, DROPPED):
            raise Broken("cancel", f"{name} was answered {outcome}; dropped: {dropped}")
        asked.cancelled |= outcome == CANCELLED

    def ended(self, name: TimerName, successor: int) -> None:
        """Note that a change by key, or a reschedule, ended a timer.

        `successor` is the seq of the next timer; 0: there is none.
        """
        if name in self.timers and self.timers[name].cancelled:
            raise Broken("key", f"{name} was cancelled, then ended for {successor}")
        self.keys.end(name, successor, fired=name in self.fired)

    def rescheduled(self, old: TimerName, new: TimerName, by: Key | None = None) -> None:
        """Note a reschedule: `new` fires in place of `old`. `by`: the key that named the timer."""
        self.ended(old, new.seq)
        topic = self.timers[old].topic if old in self.timers else "?"
        self.scheduled(new, topic, None)
        key = by or self.keys.keys.get(old)
        if key is not None:
            self.keys.keys[new] = key

    # ---- consumers

    def seen(self, key: tuple[str, str, int], row: DeliveredRow, attempt: int) -> None:
        """Check P1 to P5 on a received message. `key`: topic, life of the group, offset."""
        self._check_timer(key, row)
        if key in self.acked:
            raise Broken("acked", f"{key} was delivered after its ack was confirmed")
        topic, life, offset = key
        first = (topic, self.first_lives.get(life, life), offset)
        if first in self.delivered:
            self.redeliveries += 1
            if attempt < 2:
                raise Broken("unmarked", f"{key} came again as attempt {attempt}")
        before = self.attempts.get(key, 0)
        if attempt == before:
            raise Broken("unmarked", f"{key} came twice as attempt {attempt}")
        self.attempts[key] = max(before, attempt)
        self.delivered |= {key, first}
        self.deliveries += 1

    def _check_timer(self, key: tuple[str, str, int], row: DeliveredRow) -> None:
        topic, _, offset = key
        name, fired_at = row.name, row.fired_at_ms
        if row.payload not in self.payloads and row.payload not in self.series:
            raise Broken("phantom", f"nobody has scheduled {row}")
        home = self.letters.home.get(name)
        if home is not None:
            if home != row.payload:
                raise Broken("redrive", f"{row} is {home!r}, redriven")
        elif row.payload not in self.series:
            self._check_name(row)
        if self.fired.setdefault(name, (topic, offset)) != (topic, offset):
            raise Broken("twice", f"{name} fired at {self.fired[name]} and {(topic, offset)}")
        if fired_at < name.due_ms:
            raise Broken("early", f"{name} fired at {fired_at}")
        if name in self.timers and self.timers[name].cancelled:
            raise Broken("cancel", f"{name} was cancelled, then delivered")
        if name in self.keys.ended:
            raise Broken("key", f"{name} ended for {self.keys.ended[name]}, then was delivered")

    def _check_name(self, row: DeliveredRow) -> None:
        """Check P2: a scheduled row is one timer."""
        name, known = row.name, self.payloads[row.payload]
        if known is not None and known != name and row.payload not in self.repeatable:
            raise Broken("twice", f"{row} is {known} as well")
        self.payloads[row.payload] = name

    def asks_up_to(self, key: tuple[str, str], offset: int) -> None:
        """Note the request of an `ack up to` an offset of (topic, life)."""
        self.asked_up_to[key] = max(self.asked_up_to.get(key, 0), offset)

    def acked_up_to(self, key: tuple[str, str], offset: int) -> None:
        """Note its confirmation."""
        mine = {each for each in self.delivered if each[:2] == key and each[2] <= offset}
        self.acked |= mine
        self.ups += bool(mine)

    # ---- the end

    def at_end(self, app: "EngineApp") -> None:
        """Check P1: scheduled timers fired or were ended, groups received all, acks stayed."""
        machine = app.engine.machine
        for topic in machine.topics.values():
            for block in topic.queue.blocks:
                machine.pages.want(block)
        while (fetch := app.engine.begin_fetch()) is not None:
            fetch.read()
            app.engine.end_fetch(fetch)
        fired = self.fired.keys() | {
            TimerName(int(row["due_ms"]), int(row["seq"]))
            for topic in machine.topics.values()
            for block in topic.queue.blocks
            if block.page is not None
            for row in block.page.rows
        }
        unseen = self.order.unseen(self.passed)
        if self.fates.over:
            unseen = self.order.fired_names
        fired |= self.buried | unseen
        self.fates.at_end()
        self.keys.at_end({*self.timers})
        for name, asked in self.timers.items():
            ended = asked.cancelled or asked.cancel_open or name in self.keys.ended
            ended = ended or self.keys.changes_open.get(name, 0)
            named = self.keys.keys.get(name)
            ended = ended or (named is not None and self.keys.open.get(named, 0))
            ended = ended or name.seq in self.fates.gone
            if name not in fired | self.fates.dropped and not ended:
                raise Broken("lost", f"{name} of {asked.topic} never fired")
        self._groups_at_end(machine)
        # Otherwise some were perhaps never received, or were timers of a deleted topic.
        dropped = self.fates.dropped or self.fates.story.deleted
        if not (self.buried or unseen - self.fired.keys() or dropped):
            for rows in self.whole:
                if len({self.payloads[row] is None for row in rows}) > 1:
                    raise Broken("torn", f"of {rows} some became timers, and some did not")
        missing = self.nacks_told - self.nacks.keys()
        if missing:
            raise Broken("nack", f"told NACKED, but the log has none: {sorted(missing)}")

    def _groups_at_end(self, machine: Machine) -> None:
        for topic in machine.topics.values():
            for group in topic.groups.values():
                key = (topic.name, life_of(group))
                if key not in self.starts:
                    self._all_there(topic)
                    continue
                for offset in range(self.starts[key], topic.queue.end):
                    where = topic.topic_id, group.group_id, offset
                    dead = where in self.dead or self.expiry.is_over(group.group_id, offset)
                    over = dead or where in self.passed
                    if not over and (*key, offset) not in self.delivered:
                        raise Broken("lost", f"{key} never got {offset} of {topic.queue.end}")
                mine = np.array(
                    [offset for (t, g, offset) in self.acked if (t, g) == key], np.uint64
                )
                if not group.is_acked(mine).all():
                    raise Broken("lost", f"a confirmed ack of {key} is gone")

    def _all_there(self, topic: Topic) -> None:
        """Check that a topic of dead letters has the messages that its group moved there."""
        moved = [
            offset
            for (_, group_id, offset) in self.dead
            if f"{self.lives[GroupId(group_id)][0]}."
            f"{self.lives[GroupId(group_id)][1].split('#')[0]}.dead" == topic.name
        ]
        if len(moved) != topic.queue.end:
            raise Broken("dead", f"{topic.name} has {topic.queue.end} of {sorted(moved)}")


def life_of(group: Group) -> str:
    """Return the name of a group's life. It changes with each seek and each deletion."""
    return f"{group.name}#{group.group_id}"


def _names_in(op: Move) -> set[TimerName]:
    """Return the timers of a MOVE's dead letters, from their headers."""
    names = set()
    for row in decode_schedule(memoryview(op.rows)).rows:
        start, size = int(row["headers_start"]), int(row["headers_size"])
        text = decode_headers(bytes(op.rows[start : start + size])).get(dead_letters.TIMER_ID)
        if text is not None:
            due_ms, seq, _ = timer_id.decode(timer_id.from_text(text), 0)
            names.add(TimerName(int(due_ms[0]), int(seq[0])))
    return names
