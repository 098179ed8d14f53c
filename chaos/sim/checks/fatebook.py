"""The fate of every timer by the oracle, compared with the machine's; a part of the book.

The oracle (chaos/oracle/story.py) applies each entry as it is first committed. The first replica
that applies the entry must have done the same: the same timers fire and are dropped, in the same
order; a change finds the timers that are pending; no message is deleted before its time. So every
seed tests the audit's oracle as well. The book of promises compares answers and deliveries with the
oracle (chaos/sim/checks/book.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from chaos.oracle.group_story import GroupStory
from chaos.oracle.pending_rows import I64, Rows
from chaos.oracle.story import (
    CANCELLED,
    DROPPED,
    FIRED,
    HELD,
    PENDING,
    REPLACED,
    RESCHEDULED,
    LogStory,
    StoryBook,
    timers_of,
)
from chaos.sim.checks.keybook import TimerName
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import (
    DeleteTopic,
    GroupOp,
    Op,
    Targets,
    decode_cancel,
    decode_group,
    decode_reschedule,
    decode_topic,
)
from timer.model.columns import decode_schedule
from timer.state import apply_results
from timer.state.apply_results import (
    Applied,
    CancelApplied,
    Checkpoint,
    DeleteTopicApplied,
    FireApplied,
    GroupApplied,
    MoveApplied,
    OccurrencesApplied,
    Repeated,
    RescheduleApplied,
    ScheduleApplied,
    SeriesApplied,
)
from timer.state.machine import Machine

SWEEP_ROWS: Final = 3
SWEEP_TOPICS: Final = 1
SEARCH_ROWS_MAX: Final = 20
"""The limits of releases in worlds: so low that a release takes several FIREs."""
CHANGED: Final = (apply_results.CANCELLED, apply_results.RESCHEDULED, apply_results.ENTRY_FULL)
_CHECKERS: Final = {FIRED: "twice", CANCELLED: "cancel", REPLACED: "key", RESCHEDULED: "key"}
"""The checker of a timer that fires after this end."""


TopicEnds = dict[int, tuple[list[int], list[int]]]
"""Topic -> the seqs of timers that fire, in that order, and of those that a resume drops."""


@dataclass(slots=True)
class EntryFate:
    """The effect of one entry by the oracle."""

    ended: TopicEnds = field(default_factory=lambda: defaultdict(lambda: ([], [])))
    moved: list[tuple[int, int]] = field(default_factory=list)
    """(group id, number of messages) of each MOVE that moved any."""
    targets: list[tuple[int, int] | None] = field(default_factory=list)
    """(due, seq) of each target of a CANCEL or RESCHEDULE; None: no timer has the key."""
    pended: list[bool] = field(default_factory=list)
    """Whether each of them was pending before the entry."""
    timers: int = 0
    """The timers of all entries so far."""
    lost: int = 0
    """Pending timers of the topic that the entry deletes."""
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Topic -> the first offset that it retains, and the end of its queue."""
    repeats: list[bool] = field(default_factory=list)
    """Whether a part of a SCHEDULE repeats the request that its id is remembered for."""
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)
    """At a CHECKPOINT: topic -> (held, pending) timers."""
    paused: frozenset[int] = frozenset()
    resumed: frozenset[int] = frozenset()
    series: dict[int, tuple[int, tuple[int, int] | None]] = field(default_factory=dict)
    """At an entry about series: series -> (ended occurrences, the pending one)."""


class FateBook(StoryBook):
    """See the module. `on_commit` and `check` raise Broken."""

    def __init__(self) -> None:
        """Begin with an empty log."""
        self.story = LogStory(self, Path(), pending_max=1 << 40)
        held = self.story.held
        held.sweep_rows, held.sweep_topics = SWEEP_ROWS, SWEEP_TOPICS
        held.search_rows_max = SEARCH_ROWS_MAX
        self.ends: dict[int, int] = {}
        """Seq -> its end, as far as it is known."""
        self.dropped: set[TimerName] = set()
        """Timers that a resume dropped."""
        self.gone: set[int] = set()
        """Seqs that were pending when their topic was deleted."""
        self.since_ms: dict[int, int] = {}
        """Seq of a fired timer -> the time of the entry that scheduled it."""
        self.others: dict[int, int] = {}
        """Seq of a row -> that of the pending timer that had its key; 0: none."""
        self.bodies: dict[bytes, set[int]] = defaultdict(set)
        """Request id -> the bodies of the requests that were sent under it."""
        self.queues: dict[int, list[TimerName]] = defaultdict(list)
        """Topic -> the timer of the message at each offset."""
        self.origins: dict[TimerName, TimerName] = {}
        """Dead letter, or redriven one -> the timer whose message it was at first."""
        self.homes: dict[TimerName, str] = {}
        """Dead letter -> the topic that it came from."""
        self.done: set[tuple[int, int]] = set()
        """(group id, offset) of acks and moves that count."""
        self.moved: set[tuple[int, int]] = set()
        """Those of them that are moves."""
        self.over: set[tuple[int, int]] = set()
        """(group id, offset) of messages that expired."""
        self.retained = 0
        """Times that a CHECKPOINT left messages that all groups of a topic had acked."""
        self._fates: dict[int, EntryFate] = {}
        self._now = EntryFate()

    # ---- the story's book

    def fates(self, rows: Rows, **columns: I64 | int) -> None:
        """Note ends of timers."""
        ends = np.broadcast_to(np.asarray(columns["end"]), len(rows)).tolist()
        for row, end in zip(rows, ends, strict=True):
            topic, seq, due_ms = int(row["topic"]), int(row["seq"]), int(row["due_ms"])
            self.ends[seq] = end
            if end == FIRED:
                self._now.ended[topic][0].append(seq)
                self.queues[topic].append(TimerName(due_ms, seq))
                self.since_ms[seq] = int(row["time_ms"])
            elif end == DROPPED and topic not in self.story.deleted:
                self._now.ended[topic][1].append(seq)
                self.dropped.add(TimerName(due_ms, seq))

    def carried(self, group: GroupStory, rows: Rows, offsets: I64, **columns: I64 | int) -> None:
        """Note moved messages. A letter is redriven to the topic that it came from."""
        self._now.moved.append((group.group_id, len(rows)))
        topic = int(rows["topic"][0])
        for offset, now in zip(offsets.tolist(), timers_of(rows), strict=True):
            old, new = self.queues[group.topic][offset], TimerName(*now)
            self.queues[topic].append(new)
            self.moved.add((group.group_id, offset))
            self.origins[new] = self.origins.get(old, old)
            if not columns["redriven"]:
                self.homes[new] = self.story.topics[group.topic]
            elif self.homes[old] != self.story.topics[topic]:
                text = f"{old} of {self.homes[old]} is {new} of {self.story.topics[topic]}"
                raise Broken("redrive", text)

    def messages(self, table: str, group: GroupStory, rows: Any) -> None:
        """Note acks, and messages that expired."""
        if table != "returns":
            into = self.done if table == "acks" else self.over
            into.update((group.group_id, offset) for offset in rows["queue_offset"].tolist())

    # ---- entries

    def on_commit(self, entry: Entry) -> None:
        """Apply an entry as it is committed for the first time."""
        story, fate = self.story, EntryFate()
        self._now = self._fates[entry.index] = fate
        self._note(entry)
        try:
            story.apply(entry)
        except Broken:
            raise
        except (AssertionError, LookupError, ValueError) as error:
            text = f"{entry.index}: the oracle can't apply it: {error!r}"
            raise Broken("conservation", text) from error
        if entry.kind in (EntryKind.SERIES, EntryKind.OCCURRENCES):
            self._occurs(entry)
        seqs, others = (story.decided[name].tolist() for name in ("seq", "other"))
        self.others.update(zip(seqs, others, strict=True))
        fate.timers, fate.repeats = story.timers, story.intake.repeats
        fate.paused, fate.resumed = frozenset(story.held.paused), frozenset(story.held.releases)
        there = [topic for topic in story.topics if topic not in story.deleted]
        fate.spans = {each: (story.queues[each].begin, story.queues[each].end) for each in there}
        if entry.kind is EntryKind.CHECKPOINT:
            for topic in there:
                held, pending = len(story.held.topics.get(topic, ())), len(story.pending_of(topic))
                fate.pending[topic] = held, pending
                cursors = story.cursors(topic)
                self.retained += bool(cursors) and min(cursors) > fate.spans[topic][0]

    def _note(self, entry: Entry) -> None:
        """Note what an entry finds before it is applied."""
        match entry.kind:
            case EntryKind.CANCEL:
                self._targets(decode_cancel(entry.payload))
            case EntryKind.RESCHEDULE:
                self._targets(decode_reschedule(entry.payload).targets)
            case EntryKind.SCHEDULE:
                for request in filter(None, decode_schedule(entry.payload).requests):
                    self.bodies[request.text].add(request.body)
            case EntryKind.GROUP:
                for op in decode_group(entry.payload):
                    if isinstance(op, GroupOp) and op.op in (Op.EXPIRE, Op.EXPIRE_BELOW):
                        self._expires(entry, op)
            case EntryKind.TOPIC:
                said = decode_topic(entry.payload)
                if isinstance(said, DeleteTopic) and said.topic not in self.story.deleted:
                    gone = self.story.pending_of(said.topic)["seq"].tolist()
                    self.gone.update(gone)
                    self._now.lost = len(gone)
            case _:
                pass

    def _occurs(self, entry: Entry) -> None:
        """Each planned time is the next one of its series."""
        series = self.story.series
        self._now.series = {n: (one.ended, one.pending) for n, one in series.series.items()}
        if untrue := [each for each in series.rows if each.untrue]:
            raise Broken("series", f"{entry.index}: {untrue[0]} is not by its definition")
        series.rows.clear()

    def _targets(self, targets: Targets) -> None:
        fate, states = self._now, (PENDING, HELD)
        fate.targets = self.story.holders_of(targets)
        ends = (name and self.story.state_of(*name) for name in fate.targets)
        fate.pended = [end in states for end in ends]

    def _expires(self, entry: Entry, op: GroupOp) -> None:
        """Nothing expires before its due time and its time to live are over."""
        if op.topic in self.story.deleted:
            return  # it has no effect
        offsets = op.offsets.tolist()
        if op.op is Op.EXPIRE_BELOW:
            offsets = range(self.story.queues[op.topic].begin, offsets[0])
        ttl_ms = self.story.rule_of(op.topic, "ttl_ms")
        for offset in offsets:
            due_ms = self.queues[op.topic][offset].due_ms
            if not ttl_ms or due_ms + ttl_ms > entry.time_ms:
                what = f"{offset} of {self.story.topics[op.topic]}, due {due_ms}, lives {ttl_ms}"
                raise Broken("expiry", f"entry {entry.index} of {entry.time_ms} ends {what}")

    # ---- the machine

    def check(self, entry: Entry, applied: Applied, machine: Machine) -> None:
        """Compare an entry, as the first replica has applied it."""
        fate = self._fates.pop(entry.index)
        match applied:
            case SeriesApplied() | OccurrencesApplied():
                self._check_occurrences(entry, fate, machine)
            case ScheduleApplied():
                self._check_schedule(entry, fate, machine, applied)
            case CancelApplied() | RescheduleApplied():
                self._check_changes(entry, fate, applied)
            case FireApplied():
                self._check_fire(entry, fate, applied)
            case GroupApplied(results):
                self._check_moves(entry, fate, results)
            case DeleteTopicApplied(dropped=dropped) if dropped != fate.lost:
                raise Broken("dropped", f"{entry.index}: {dropped} of {fate.lost} went along")
            case Checkpoint():
                there = {t: (each.held, each.counts.pending) for t, each in machine.topics.items()}
                if there != fate.pending:
                    raise Broken("held", f"{entry.index}: {there}, not {fate.pending}")
            case _:
                pass
        _check_queues(entry, fate, machine)

    def _check_schedule(
        self, entry: Entry, fate: EntryFate, machine: Machine, applied: ScheduleApplied
    ) -> None:
        schedule = decode_schedule(entry.payload)
        parts = zip(schedule.requests, fate.repeats, applied.parts, strict=True)
        for request, repeats, result in parts:
            if request is not None and repeats != isinstance(result, Repeated):
                raise Broken("request", f"{entry.index}: {request}, repeated {repeats}: {result}")
        if machine.counts.scheduled == fate.timers:
            return
        checker = "key" if schedule.rows["key_size"].any() else "twice"
        if any(request is not None for request in schedule.requests):
            checker = "request"
        found = f"{machine.counts.scheduled} timers, not {fate.timers}"
        raise Broken(checker, f"{entry.index}: {found}")

    def _check_occurrences(self, entry: Entry, fate: EntryFate, machine: Machine) -> None:
        there = {
            view.series_id: (view.number, (view.due_ms, view.seq) if view.seq else None)
            for view in machine.series.views(machine.series.ids_of(None, 0, 1 << 30))
        }
        if there != fate.series or machine.counts.scheduled != fate.timers:
            raise Broken("series", f"{entry.index}: {there}, not {fate.series}")

    def _check_changes(
        self, entry: Entry, fate: EntryFate, applied: CancelApplied | RescheduleApplied
    ) -> None:
        """A change finds a timer if and only if it is pending."""
        seen: set[tuple[int, int]] = set()
        names = zip(applied.targets.due_ms.tolist(), applied.targets.seq.tolist(), strict=True)
        rows = zip(names, fate.targets, fate.pended, applied.results.tolist(), strict=True)
        for theirs, mine, pended, result in rows:
            name = theirs if theirs[1] else None
            if mine != name:
                raise Broken("key", f"{entry.index}: {name} has the key, not {mine}")
            if name is None or name in seen:
                continue
            seen.add(name)
            if pended != (result in CHANGED):
                checker = "held" if pended else "dropped"
                raise Broken(checker, f"{entry.index}: {name}: {result}, pending: {pended}")

    def _check_fire(self, entry: Entry, fate: EntryFate, applied: FireApplied) -> None:
        ended: TopicEnds = defaultdict(lambda: ([], []))
        for at, moves in enumerate(((*applied.fired, *applied.released), applied.dropped)):
            for number, rows in moves:
                ended[number][at].extend(rows["seq"].tolist())
        for topic in sorted(ended.keys() | fate.ended.keys()):
            theirs, mine = ended[topic], fate.ended[topic]
            if theirs != mine:
                extra = [seq for seq in theirs[0] if seq not in mine[0]]
                text = f"{entry.index}: of topic {topic} {theirs} fire and drop, not {mine}"
                raise Broken(self._checker(fate, topic, extra), text)

    def _checker(self, fate: EntryFate, topic: int, extra: list[int]) -> str:
        """Return the checker of a wrong FIRE, in which these timers fire in addition."""
        if topic in fate.paused and extra:
            return "pause"
        if fate.ended[topic][1] or topic in fate.resumed:
            return "drop"
        checkers = [_CHECKERS.get(self.ends.get(seq, PENDING), "conservation") for seq in extra]
        return checkers[0] if checkers else "conservation"

    def _check_moves(self, entry: Entry, fate: EntryFate, results: Sequence[object]) -> None:
        moves = [each for each in results if isinstance(each, MoveApplied)]
        found = [(int(move.op.group), int(move.new.sum())) for move in moves if move.new.any()]
        if found == fate.moved:
            return
        checker = "dead" if any(move.op.to_group for move in moves) else "redrive"
        if sum(n for _, n in found) < sum(n for _, n in fate.moved):
            checker = "lost"
        raise Broken(checker, f"{entry.index}: {found} move, not {fate.moved}")

    def end_of(self, name: TimerName) -> int | None:
        """Return the end of a timer by the log, or PENDING or HELD; None: there is no such timer.

        A row that became no timer has the end REJECTED or KEPT.
        """
        end = self.ends.get(name.seq)
        return self.story.state_of(name.due_ms, name.seq) if end is None else end

    def fired_before(self, machine: Machine) -> int:
        """Return the number of timers that fired into topics that a replica has deleted."""
        deleted = self.story.deleted.items()
        topics = (topic for topic, (at, _) in deleted if at <= machine.applied_index)
        return sum(self.story.queues[topic].end for topic in topics)

    def at_end(self) -> None:
        """All topics that resumed hold no timer any more."""
        for topic in self.story.held.releases:
            if held := self.story.held.topics.get(topic):
                raise Broken("held", f"topic {topic} never went on: {[*held]}")


def _check_queues(entry: Entry, fate: EntryFate, machine: Machine) -> None:
    """Check the first offset that each topic retains, and the end of its queue."""
    for number, topic in machine.topics.items():
        begin, end = fate.spans.get(number, (0, 0))
        if topic.queue.end != end:
            checker = "lost" if topic.queue.end < end else "twice"
            what = f"{entry.index}: {topic.name} ends at {topic.queue.end}, not {end}"
            raise Broken(checker, what)
        if topic.queue.begin > begin:
            what = f"{topic.name} let go {begin} .. {topic.queue.begin - 1}"
            raise Broken("retention", f"entry {entry.index} of {entry.time_ms}: {what}")
