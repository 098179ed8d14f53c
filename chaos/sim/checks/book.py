"""The book of what clients of a simulated timer cluster were promised, and its checkers.

from the log     each entry as it is first committed, and as each replica has applied it
from the nodes   deliveries as they are handed out
from clients     what they asked, what they were answered, what they saw
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
from chaos.sim.checks.policybook import PolicyBook
from chaos.sim.checks.quotabook import QuotaBook
from chaos.sim.checks.requestbook import RequestBook
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import GroupOp, Move, Nack, Op, decode_fire, decode_group
from timer.leader.groups import dead_letters
from timer.leader.groups.group_dispatch import Delivery
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
    from chaos.sim.timers.timers import TimerApp
    from chaos.sim.world.sim_node import SimNode

AHEAD_MS_MAX: Final = 5_000
"""By so much the log's clock may be ahead of true time while a majority of clocks is right: a
leader that can't hear a majority of them runs on by its own, which is up to 4 % fast."""


@dataclass(frozen=True, slots=True)
class DeliveredRow:
    """A delivered message."""

    name: TimerName
    fired_at_ms: int
    payload: bytes
    """Says which row of which request it is; see `Request.payloads`."""


@dataclass(slots=True)
class PromisedTimer:
    """One timer that a producer was told is scheduled."""

    topic: str
    requested_ms: int | None
    """None: a delay, or policies, which the leader resolved."""
    cancelled: bool = False
    """A cancel was answered CANCELLED."""
    cancel_open: int = 0
    """Cancels asked and not answered: their outcome is unknown."""


@dataclass(slots=True)
class PromiseBook:
    """What was promised. Every method raises Broken when it was not kept."""

    timers: dict[TimerName, PromisedTimer] = field(default_factory=dict)
    digests: dict[LogIndex, str] = field(default_factory=dict)
    fired: dict[TimerName, tuple[str, int]] = field(default_factory=dict)
    """Timer -> (topic, queue offset), as consumers saw it."""
    payloads: dict[bytes, TimerName | None] = field(default_factory=dict)
    """Row of a request -> the one timer that it became. None: nobody has seen that yet."""
    repeatable: set[bytes] = field(default_factory=set)
    """Rows that may become a timer again, as their request's id is soon forgotten."""
    whole: list[list[bytes]] = field(default_factory=list)
    """Rows of one request each, without keys: they become timers all or none."""
    requests: RequestBook = field(default_factory=RequestBook)
    acked: set[tuple[str, str, int]] = field(default_factory=set)
    """(topic, life of a group, offset) whose ack was confirmed. A seek begins another life."""
    acked_first: set[tuple[str, str, int]] = field(default_factory=set)
    """Of those, which were told ACKED: nothing else had ended them."""
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
    """The highest under which each was delivered."""
    redeliveries: int = 0
    answers: int = 0
    starts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(topic, life) -> the first offset that it gets."""
    nacks: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(topic id, group id, offset) -> the time of its last nack that was committed."""
    nacks_told: set[tuple[int, int, int]] = field(default_factory=set)
    """Of those, which a consumer was told NACKED."""
    dead: dict[tuple[int, int, int], LogIndex] = field(default_factory=dict)
    """(topic id, group id, offset) -> the entry that made it a dead letter."""
    buried: set[TimerName] = field(default_factory=set)
    """Timers that became dead letters: perhaps they were leased, and nobody ever got them."""
    keys: KeyBook = field(default_factory=KeyBook)
    policies: PolicyBook = field(default_factory=PolicyBook)
    fates: FateBook = field(default_factory=FateBook)
    late: LateBook = field(init=False)
    leases: LeaseBook = field(default_factory=LeaseBook)
    credit: CreditBook = field(default_factory=CreditBook)
    order: OrderBook = field(default_factory=OrderBook)
    quotas: QuotaBook = field(init=False)
    expiry: ExpiryBook = field(init=False)
    letters: LetterBook = field(default_factory=LetterBook)
    asked_up_to: dict[tuple[str, str], int] = field(default_factory=dict)
    """(topic, life) -> somebody asked to ack all up to this, whoever was given it."""
    passed: set[tuple[int, int, int]] = field(default_factory=set)
    """(topic id, group id, offset) that the log acks as somebody asked: perhaps nobody got it."""
    committed: LogIndex = LogIndex(0)
    """What comes after it was not looked at."""
    read_time_ms: int = 0
    """Of the last FIRE committed."""

    def __post_init__(self) -> None:
        """Let what reads the same pages have them."""
        self.late = LateBook(self.fates)
        self.quotas = QuotaBook(self.policies)
        self.expiry = ExpiryBook(self.fates, self.policies)

    # ---- the log

    def on_commit(self, entry: Entry, true_ms: int | None) -> None:
        """Look at an entry that is committed somewhere. `true_ms`: the time, if no two clocks
        were wrong.
        """
        if entry.index <= self.committed:
            return
        self.committed = entry.index
        self.policies.on_commit(entry)
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
        """What a group has acked unseen is what was asked for and is in the log: no less."""
        key = self.lives.get(op.group)
        if op.op is not Op.ACK or key not in self.asked_up_to:
            return
        offsets = op.offsets[op.offsets <= self.asked_up_to[key]].tolist()
        self.passed.update((op.topic, op.group, offset) for offset in offsets)

    def applied(self, node: "SimNode", machine: Machine, applied: Applied) -> None:
        """P7, on a replica that has just applied an entry; and where a new group begins."""
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
        """A message becomes a dead letter once, and not after its ack was confirmed."""
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
        """P6: every replica records the same digest at an index, that of all its state.

        All the state of one replica in three, in turn.
        """
        if (checkpoint.index + node.replica) % 3 == 0:
            anew = machine.digest_anew()
            if checkpoint.digest != anew:
                raise Broken("digest", f"{checkpoint} on {node}: of all its state {anew}")
        known = self.digests.setdefault(checkpoint.index, checkpoint.digest)
        if known != checkpoint.digest:
            raise Broken("digest", f"{checkpoint.index}: {known} and, on {node}, {checkpoint}")

    def handed_out(self, node: object, delivery: Delivery, served: Epoch) -> None:
        """P5: only the newest epoch that is `served` hands anything out, and no nack too early."""
        if delivery.epoch < served:
            raise Broken("handout", f"{node} under epoch {delivery.epoch}; {served} is served")
        self.order.handed_out(delivery)
        group = delivery.group
        for offset in delivery.lease.offsets.tolist():
            not_before = self.nacks.get((group.topic, group.group_id, offset), 0)
            if not_before > delivery.at_ms:
                early = f"{offset} of {group.name} at {delivery.at_ms}, not before {not_before}"
                raise Broken("nack", f"{node} hands out {early}")

    # ---- producers

    def asked(self, payloads: list[bytes]) -> None:
        """A request is about to be sent for the first time."""
        for payload in payloads:
            self.payloads[payload] = None

    def scheduled(self, name: TimerName, topic: str, requested_ms: int | None) -> None:
        """P1 begins here. None: a delay was asked for, or policies may make it earlier."""
        self.timers[name] = PromisedTimer(topic, requested_ms)
        if requested_ms is not None and name.due_ms < requested_ms:
            raise Broken("early", f"{name} was asked for {requested_ms}")

    def answered_again(self, first: list[ToldRow], again: list[ToldRow]) -> None:
        """P2: a retried request is answered as it was before."""
        if first != again:
            raise Broken("twice", f"a request was answered {first}, then {again}")

    def cancel_asked(self, name: TimerName) -> None:
        """From here on the timer may be cancelled."""
        self.timers[name].cancel_open += 1

    def cancel_answered(self, name: TimerName, outcome: int) -> None:
        """P4: what a cancel was answered is so."""
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
        """A change by key, or a reschedule, was told that it ended a timer; 0: for nothing."""
        if name in self.timers and self.timers[name].cancelled:
            raise Broken("key", f"{name} was cancelled, then ended for {successor}")
        self.keys.end(name, successor, fired=name in self.fired)

    def rescheduled(self, old: TimerName, new: TimerName, by: Key | None = None) -> None:
        """A reschedule was told that `new` fires instead of `old`. `by`: the key that named it."""
        self.ended(old, new.seq)
        topic = self.timers[old].topic if old in self.timers else "?"
        self.scheduled(new, topic, None)
        key = by or self.keys.keys.get(old)
        if key is not None:
            self.keys.keys[new] = key

    # ---- consumers

    def seen(self, key: tuple[str, str, int], row: DeliveredRow, attempt: int) -> None:
        """P1 - P5: a consumer got a message. `key`: topic, life of the group, offset."""
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
        if row.payload not in self.payloads:
            raise Broken("phantom", f"nobody has scheduled {row}")
        home = self.letters.home.get(name)
        if home is not None:
            if home != row.payload:
                raise Broken("redrive", f"{row} is {home!r}, redriven")
        else:
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
        """P2: what somebody has scheduled is one timer."""
        name, known = row.name, self.payloads[row.payload]
        if known is not None and known != name and row.payload not in self.repeatable:
            raise Broken("twice", f"{row} is {known} as well")
        self.payloads[row.payload] = name

    def asks_up_to(self, key: tuple[str, str], offset: int) -> None:
        """Somebody asks to ack all up to an offset of (topic, life), given to anybody or not."""
        self.asked_up_to[key] = max(self.asked_up_to.get(key, 0), offset)

    def acked_up_to(self, key: tuple[str, str], offset: int) -> None:
        """It was told that they are."""
        mine = {each for each in self.delivered if each[:2] == key and each[2] <= offset}
        self.acked |= mine
        self.ups += bool(mine)

    # ---- the end

    def at_end(self, app: "TimerApp") -> None:
        """P1: what was scheduled fired, unless it was cancelled; groups saw all; acks stayed."""
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
        # Else some were perhaps never seen, or were of a topic that is gone.
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
        """A dead-letter topic holds what its group moved there, and nothing else."""
        moved = [
            offset
            for (_, group_id, offset) in self.dead
            if f"{self.lives[GroupId(group_id)][0]}."
            f"{self.lives[GroupId(group_id)][1].split('#')[0]}.dead" == topic.name
        ]
        if len(moved) != topic.queue.end:
            raise Broken("dead", f"{topic.name} has {topic.queue.end} of {sorted(moved)}")


def life_of(group: Group) -> str:
    """Return what a group is called in the book until it is sought or deleted."""
    return f"{group.name}#{group.group_id}"


def _names_in(op: Move) -> set[TimerName]:
    """Return the timers that a MOVE's dead letters were, as their headers say."""
    names = set()
    for row in decode_schedule(memoryview(op.rows)).rows:
        start, size = int(row["headers_start"]), int(row["headers_size"])
        text = decode_headers(bytes(op.rows[start : start + size])).get(dead_letters.TIMER_ID)
        if text is not None:
            due_ms, seq, _ = timer_id.decode(timer_id.from_text(text), 0)
            names.add(TimerName(int(due_ms[0]), int(seq[0])))
    return names
