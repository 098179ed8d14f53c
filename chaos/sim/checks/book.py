"""The book of promises to the clients of a simulated timer cluster, and its checkers.

    from the log     each entry as it is first committed, and as each replica has applied it
    from the nodes   deliveries, as they are sent
    from clients     requests, answers and received messages

The oracle applies each entry when it is committed (chaos/sim/checks/fatebook.py). A node answers
and delivers later. So each answer, and each delivery, must be true by the oracle when it arrives.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from chaos.oracle import story
from chaos.sim.checks.fatebook import FateBook
from chaos.sim.checks.keybook import AnsweredRow, Key, TimerName, check_list
from chaos.sim.checks.latebook import LateBook
from chaos.sim.checks.leasebook import CreditBook, LeaseBook, PaceBook
from chaos.sim.checks.orderbook import OrderBook
from chaos.sim.checks.policybook import PolicyBook, QuotaBook
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import GroupOp, Nack, decode_fire, decode_group
from timer.leader.groups import dead_letters
from timer.leader.groups.group_delivery import Delivery
from timer.model.units import Epoch, LogIndex
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    DROPPED,
    Applied,
    Checkpoint,
    GroupApplied,
    MoveApplied,
    SeekApplied,
)
from timer.state.key_conflicts import Verdict
from timer.state.machine import Machine

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.world.sim_node import SimNode

AHEAD_MS_MAX: Final = 5_000
"""The most that the log's clock may be ahead of true time while a majority of clocks is right. A
leader that hears no majority continues by its own clock, which is up to 4 % fast."""
CHANGED: Final = (story.CANCELLED, story.REPLACED, story.RESCHEDULED)
"""Ends by the request of a client."""
_CANCEL_ENDS: Final = {
    CANCELLED: (story.CANCELLED,),
    ALREADY_CANCELLED: CHANGED,
    ALREADY_FIRED: (story.FIRED,),
    DROPPED: (story.DROPPED,),
}
"""Answer to a cancel -> the ends with which it is true."""
_NO_TIMER: Final = {
    Verdict.REJECTED: story.REJECTED,
    Verdict.NOT_PENDING: story.REJECTED,
    Verdict.KEPT: story.KEPT,
}
"""Verdict of a row that became no timer -> its end."""
Place = tuple[int, int]
"""The id of a group, and a queue offset."""


@dataclass(frozen=True, slots=True)
class DeliveredRow:
    """A delivered message."""

    name: TimerName
    fired_at_ms: int
    payload: bytes
    """It names the row and its request; see `NumberedRequest.payloads`."""


@dataclass(slots=True)
class PromiseBook:
    """The promises. Every method raises Broken if one was not kept."""

    timers: dict[TimerName, Key] = field(default_factory=dict)
    """Timers that an answer reported as scheduled -> their topic and key; an empty key: none."""
    requested_ends: set[TimerName | Key] = field(default_factory=set)
    """Timers and keys of requests that may end a timer."""
    cancelled: set[TimerName] = field(default_factory=set)
    """A cancel returned CANCELLED."""
    successors: dict[TimerName, TimerName | None] = field(default_factory=dict)
    """Timers that changed by an answer -> the next timer; None: there is none."""
    digests: dict[LogIndex, str] = field(default_factory=dict)
    fired: set[TimerName] = field(default_factory=set)
    """The timers of the messages that consumers received."""
    payloads: dict[bytes, TimerName | None] = field(default_factory=dict)
    """Row of a request -> the one timer that it became. None: not known yet."""
    series: set[bytes] = field(default_factory=set)
    """Payloads of series: any number of timers have one."""
    repeatable: set[bytes] = field(default_factory=set)
    """Rows that may become a timer again, because their request's id is soon forgotten."""
    whole: list[list[bytes]] = field(default_factory=list)
    """The rows of each request without keys: all of them become timers, or none."""
    acked: set[Place] = field(default_factory=set)
    """Confirmed acks."""
    delivered: set[Place] = field(default_factory=set)
    first_lives: dict[int, int] = field(default_factory=dict)
    """Group after a seek -> the group that it began as."""
    attempts: dict[Place, int] = field(default_factory=dict)
    """The highest attempt of each delivered message."""
    refused: int = 0
    """Requests that were rejected because another one has their id."""
    nacks: dict[Place, int] = field(default_factory=dict)
    """The time of the last committed nack of a message."""
    answered_nacks: set[Place] = field(default_factory=set)
    """Messages of which a nack returned NACKED."""
    requested_up_to: dict[int, int] = field(default_factory=dict)
    """Group id -> the greatest offset of an `ack up to`, delivered or not."""
    policies: PolicyBook = field(init=False)
    fates: FateBook = field(default_factory=FateBook)
    late: LateBook = field(init=False)
    leases: LeaseBook = field(default_factory=LeaseBook)
    credit: CreditBook = field(default_factory=CreditBook)
    order: OrderBook = field(default_factory=OrderBook)
    pace: PaceBook = field(default_factory=PaceBook)
    quotas: QuotaBook = field(init=False)
    committed: LogIndex = LogIndex(0)
    """The last entry that was checked."""
    first_applied: LogIndex = LogIndex(0)
    """The last entry that some replica has applied, and its effects were checked."""
    read_time_ms: int = 0
    """Read time of the last committed FIRE."""

    def __post_init__(self) -> None:
        """Make the books that use other books."""
        self.policies = PolicyBook(self.fates)
        self.late = LateBook(self.fates)
        self.quotas = QuotaBook(self.policies)

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
                        self.nacks[op.group, offset] = int(at_ms)
                if isinstance(op, GroupOp):
                    self.order.note_commit(op)

    def check_counts(self, node: "SimNode", machine: Machine, applied: Applied) -> None:
        """Check P7 on a replica that has just applied an entry."""
        self.order.note_fire(machine)
        if isinstance(applied, GroupApplied):
            for result in applied.results:
                if isinstance(result, SeekApplied):
                    self._check_seek(machine, result)
                elif isinstance(result, MoveApplied):
                    _check_move(machine, result)
        if isinstance(applied, Checkpoint):
            check_list(node, machine)
        counts, held = machine.counts, machine.store.pending
        queued = self.fates.fired_before(machine)
        queued += sum(topic.queue.end for topic in machine.topics.values())
        if held != counts.pending or queued != counts.fired:
            raise Broken("conservation", f"{node}: {counts}, pending {held}, queued {queued}")

    def _check_seek(self, machine: Machine, sought: SeekApplied) -> None:
        group, before = sought.group, sought.op.group
        if group.group_id in self.first_lives:
            return  # another replica has applied the entry before
        self.first_lives[group.group_id] = self.first_lives.get(before, before)
        queue, asked = machine.topics[group.topic].queue, int(sought.op.offsets[0])
        if group.cursor != min(max(asked, queue.begin), queue.end):
            raise Broken("seek", f"{group.name} is at {group.cursor}, asked for {asked}")

    def digest(self, node: "SimNode", checkpoint: Checkpoint, machine: Machine) -> None:
        """Check P6: all replicas record the same digest at an index.

        For one replica in three, in turn, the digest is also recomputed from all its state.
        """
        if (checkpoint.index + node.replica) % 3 == 0:
            whole = machine.recomputed_digest()
            if checkpoint.digest != whole:
                raise Broken("digest", f"{checkpoint} on {node}: of all its state {whole}")
        known = self.digests.setdefault(checkpoint.index, checkpoint.digest)
        if known != checkpoint.digest:
            raise Broken("digest", f"{checkpoint.index}: {known} and, on {node}, {checkpoint}")

    # ---- the leaders' deliveries

    def check_delivery(self, node: object, delivery: Delivery, served: Epoch) -> None:
        """Check P5: only the newest `served` epoch delivers, and no nacked message too early."""
        if delivery.epoch < served:
            raise Broken("handout", f"{node} under epoch {delivery.epoch}; {served} is served")
        self.order.check_delivery(delivery)
        group = delivery.group
        for offset in delivery.lease.offsets.tolist():
            not_before = self.nacks.get((group.group_id, offset), 0)
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

    def check_expiry(self, delivery: Delivery, index: int) -> None:
        """Check that no expired message is delivered, by the policies before the entry `index`."""
        topic, group = delivery.topic, delivery.group.group_id
        ttl_ms = self.policies.rules(index, topic.name).get("ttl_ms")
        for offset in delivery.lease.offsets.tolist():
            due_ms = self.fates.queues[topic.topic_id][offset].due_ms
            over = (group, offset) in self.fates.over
            if over or (ttl_ms and due_ms + ttl_ms <= delivery.at_ms):
                what = f"{offset} of {topic.name}, due {due_ms}, at {delivery.at_ms}"
                raise Broken("expiry", f"{what} is handed out, and lives {ttl_ms}: {over}")

    # ---- producers

    def note_request(self, payloads: list[bytes]) -> None:
        """Note a request that is about to be sent for the first time."""
        for payload in payloads:
            self.payloads[payload] = None

    def check_scheduled(self, name: TimerName, key: Key, requested_ms: int | None = None) -> None:
        """Check a promised timer (P1): it is in the log.

        `requested_ms` is None for a delay, or if policies may make the due time earlier.
        """
        self.timers[name] = key
        if self.fates.end_of(name) in (None, story.REJECTED, story.KEPT):
            raise Broken("lost", f"{name} was scheduled, and is not in the log")
        if requested_ms is not None and name.due_ms < requested_ms:
            raise Broken("early", f"{name} was asked for {requested_ms}")

    def check_key(self, row: AnsweredRow) -> None:
        """Check the answer about a row with a key."""
        other = row.other.seq if row.other else 0
        found = self.fates.ends.get(row.seq), self.fates.others.get(row.seq, 0)
        end = found[0] if row.is_timer else _NO_TIMER[row.verdict]
        if found != (end, other):
            raise Broken("key", f"{row}, not {found}")
        if row.verdict is Verdict.REPLACED:
            assert row.other is not None
            self.check_change(row.other, story.REPLACED, row.name)

    def check_repeat(self, first: list[AnsweredRow], again: list[AnsweredRow]) -> None:
        """Check P2: a retried request returns the first answer."""
        if first != again:
            raise Broken("twice", f"a request was answered {first}, then {again}")

    def refusal(self, text: bytes, body: int) -> None:
        """Check P2: another request has the id of a request that was rejected for that."""
        self.refused += 1
        if not self.fates.bodies.get(text, set()) - {body}:
            raise Broken("request", f"{text!r} of {body} was refused, and no other has it")

    def check_cancel(self, name: TimerName, outcome: int) -> None:
        """Check P4: the answer to a cancel is true, except for timers of a deleted topic."""
        end = self.fates.end_of(name)
        is_true = end in _CANCEL_ENDS.get(outcome, (end,)) or name.seq in self.fates.gone
        if not is_true or (outcome == CANCELLED and name in self.cancelled):
            raise Broken("cancel", f"{name} was answered {outcome}, and its end is {end}")
        if outcome == CANCELLED:
            self.cancelled.add(name)

    def check_change(self, name: TimerName, end: int, successor: TimerName | None) -> None:
        """Check an answer by which a pending timer ended, once, for another one or for none."""
        if self.successors.setdefault(name, successor) != successor:
            raise Broken("key", f"{name} ended for {self.successors[name]} and {successor}")
        if self.fates.end_of(name) != end:
            raise Broken("key", f"{name} ended for {successor}: {self.fates.end_of(name)}")

    def check_reschedule(self, old: TimerName, new: TimerName, by: Key | None = None) -> None:
        """Check a reschedule: `new` fires in place of `old`. `by`: the key that named the timer."""
        self.check_change(old, story.RESCHEDULED, new)
        self.check_scheduled(new, by or self.timers.get(old, ("?", b"")))

    # ---- consumers

    def seen(self, place: Place, row: DeliveredRow, attempt: int) -> None:
        """Check P1 to P5 on a received message."""
        self._check_timer(place, row)
        if place in self.acked:
            raise Broken("acked", f"{place} was delivered after its ack was confirmed")
        group, offset = place
        first = self.first_lives.get(group, group), offset
        if first in self.delivered and attempt < 2:
            raise Broken("unmarked", f"{place} came again as attempt {attempt}")
        before = self.attempts.get(place, 0)
        if attempt == before:
            raise Broken("unmarked", f"{place} came twice as attempt {attempt}")
        self.attempts[place] = max(before, attempt)
        self.delivered |= {place, first}

    def _check_timer(self, place: Place, row: DeliveredRow) -> None:
        name, (group, offset) = row.name, place
        if row.payload not in self.payloads and row.payload not in self.series:
            raise Broken("phantom", f"no client scheduled {row}")
        topic = self.fates.story.groups[group].topic
        if self.fates.queues[topic][offset : offset + 1] != [name]:
            raise Broken("twice", f"{name} did not fire at {offset} of topic {topic}")
        self.fired.add(name)
        if row.payload not in self.series:
            first = self.fates.origins.get(name, name)
            known = self.payloads[row.payload]
            if known not in (None, first) and row.payload not in self.repeatable:
                raise Broken("twice" if first == name else "redrive", f"{row} is {known} as well")
            self.payloads[row.payload] = first
        if row.fired_at_ms < name.due_ms:
            raise Broken("early", f"{name} fired at {row.fired_at_ms}")

    def check_ack(self, place: Place, *, counts: bool) -> None:
        """Check a confirmed ack. `counts`: nothing else had ended the message before."""
        if counts and place in self.fates.over:
            raise Broken("expiry", f"{place}: its ack was told, and it had expired")
        if counts and place in self.fates.moved:
            raise Broken("dead", f"{place} was acked, and is a dead letter")
        if place not in self.fates.done and place not in self.fates.over:
            raise Broken("lost", f"a confirmed ack of {place} is not in the log")
        self.acked.add(place)

    def asks_up_to(self, group: int, offset: int) -> None:
        """Note the request of an `ack up to` an offset."""
        self.requested_up_to[group] = max(self.requested_up_to.get(group, 0), offset)

    def acked_up_to(self, group: int, offset: int) -> None:
        """Note its confirmation."""
        self.acked |= {each for each in self.delivered if each[0] == group and each[1] <= offset}

    # ---- the end

    def at_end(self, app: "EngineApp") -> None:
        """Check P1: scheduled timers fired or were ended, groups received all, acks stayed."""
        self._queues_at_end(app)
        self.fates.at_end()
        for name, key in self.timers.items():
            end = self.fates.end_of(name)
            asked = name in self.requested_ends or key in self.requested_ends
            if end not in (story.FIRED, story.DROPPED) and not (end in CHANGED and asked):
                raise Broken("lost", f"{name} never fired: {end}")
        self._groups_at_end(app.engine.machine)
        # Otherwise some were perhaps never received, or were timers of a deleted topic.
        fired = {name for queue in self.fates.queues.values() for name in queue}
        if fired == self.fired and not (self.fates.dropped or self.fates.story.deleted):
            for rows in self.whole:
                if len({self.payloads[row] is None for row in rows}) > 1:
                    raise Broken("torn", f"of {rows} some became timers, and some did not")
        missing = self.answered_nacks - self.nacks.keys()
        if missing:
            raise Broken("nack", f"told NACKED, but the log has none: {sorted(missing)}")

    def _queues_at_end(self, app: "EngineApp") -> None:
        """Check that the queues of a replica, also their spilled pages, hold what fired."""
        machine = app.engine.machine
        for topic in machine.topics.values():
            for block in topic.queue.blocks:
                machine.pages.request(block)
        while (fetch := app.engine.begin_fetch()) is not None:
            fetch.read()
            app.engine.end_fetch(fetch)
        for topic in machine.topics.values():
            seqs = [name.seq for name in self.fates.queues[topic.topic_id]]
            for block in topic.queue.blocks:
                there = seqs[block.first : block.end]
                if block.page is not None and block.page.rows["seq"].tolist() != there:
                    raise Broken("lost", f"{topic.name} has not {there} from {block.first} on")

    def _groups_at_end(self, machine: Machine) -> None:
        """Check that each group received all messages that were not moved or expired.

        An `ack up to` acks messages that perhaps no consumer received.
        """
        done = self.delivered, self.fates.moved, self.fates.over
        for topic in machine.topics.values():
            for group in topic.groups.values():
                if group.name == dead_letters.GROUP:
                    continue  # no client consumes dead letters
                number, asked = int(group.group_id), self.requested_up_to.get(group.group_id, -1)
                for at in range(self.fates.story.groups[number].start, topic.queue.end):
                    place = number, at
                    passed = at <= asked and place in self.fates.done
                    if not passed and all(place not in each for each in done):
                        raise Broken("lost", f"{group.name} of {topic.name} never got {place}")


def _check_move(machine: Machine, moved: MoveApplied) -> None:
    """Check that a message that was moved from a group is not there any more."""
    group = machine.topics[moved.op.topic].group_by_id.get(moved.op.group)
    if group is not None and not group.is_acked(moved.op.offsets).all():
        raise Broken("dead", f"{group.name}: {moved.op.offsets} moved, and still there")
