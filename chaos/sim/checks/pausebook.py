"""What pauses make of simulated clients' timers, told from the log; a part of the book.

A plain model beside timer/state/pauses.py, written apart from it: which timers are pending, one by
one, which topics are paused at an entry, and what a resume finds overdue. How far a sweep has come
it does not know: it judges what each entry lets go of, and at the end that all of it went.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from chaos.sim.checks.keybook import TimerName
from chaos.sim.checks.policybook import PolicyBook
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry, EntryKind
from timer.model.columns import RowArray, decode_schedule
from timer.model.firing_order import after
from timer.model.units import LogIndex, TopicId
from timer.state.apply_results import (
    CANCELLED,
    LEFT,
    RESCHEDULED,
    Accepted,
    Applied,
    CancelApplied,
    Checkpoint,
    DeleteTopicApplied,
    FireApplied,
    RescheduleApplied,
    ScheduleApplied,
)
from timer.state.key_conflicts import Verdict
from timer.state.machine import Machine

BORN: Final = (Verdict.SCHEDULED, Verdict.REPLACED)


class Place(NamedTuple):
    """A timer, in the order in which timers fire."""

    due_ms: int
    seq: int


@dataclass(slots=True)
class Resume:
    """What a topic's last resume found."""

    index: LogIndex
    catch_up: str
    overdue: set[Place]
    fired: list[Place] = field(default_factory=list)
    dropped: set[Place] = field(default_factory=set)
    ended: bool = False
    """One of them was cancelled, or moved, since."""
    over: bool = False
    """None of them is pending."""


@dataclass(slots=True)
class PauseBook:
    """See the module. `check` raises Broken when a pause, or a resume, was not kept."""

    policies: PolicyBook
    pending: dict[int, dict[int, Place]] = field(default_factory=dict)
    """Topic id -> seq -> timer."""
    paused: set[int] = field(default_factory=set)
    resumes: dict[int, Resume] = field(default_factory=dict)
    """Topic id -> the last one, unless it was paused again."""
    dropped: set[TimerName] = field(default_factory=set)
    past: int = 0
    """Resumes that were looked at to their end."""
    held_most: int = 0
    """Timers held at a CHECKPOINT."""
    checked: LogIndex = LogIndex(0)
    read_ms: int = 0
    """How far firing has come."""

    def check(self, entry: Entry, applied: Applied, machine: Machine) -> None:
        """Judge an entry as the first replica has applied it."""
        if entry.index <= self.checked:
            return
        self.checked = entry.index
        match applied:
            case ScheduleApplied():
                self._scheduled(entry, applied, machine)
            case RescheduleApplied():
                self._rescheduled(applied, machine)
            case CancelApplied():
                self._cancelled(applied)
            case FireApplied():
                self._fired(entry, applied)
            case Checkpoint():
                self._count(machine)
            case DeleteTopicApplied():
                self._deleted(applied.op.topic)
            case _:
                pass
        self.read_ms = machine.last_read_time_ms
        if entry.kind in (EntryKind.POLICY, EntryKind.TOPIC, EntryKind.GROUP):
            self._look_at_policies(entry)
        for topic, resume in self.resumes.items():
            left = self.pending.get(topic, {}).keys() & {place.seq for place in resume.overdue}
            if not left and not resume.over:
                self._over(topic, resume)

    def _deleted(self, topic: int) -> None:
        """What was pending of a topic went with it: chaos/sim/checks/dropbook.py."""
        self.pending.pop(topic, None)
        self.resumes.pop(topic, None)
        self.paused.discard(topic)

    # ---- what is pending

    def _born(self, machine: Machine, topic: int, due_ms: int, seq: int) -> None:
        holding = topic in self.paused or machine.topics[TopicId(topic)].release is not None
        if due_ms > self.read_ms or holding:  # else it fired at once
            self.pending.setdefault(topic, {})[seq] = Place(due_ms, seq)

    def _gone(self, due_ms: int, seq: int) -> bool:
        """Let a timer end before its time; return whether it was pending."""
        for topic, timers in self.pending.items():
            if timers.get(seq) == (due_ms, seq):
                place = timers.pop(seq)
                if (resume := self.resumes.get(topic)) and place in resume.overdue:
                    resume.ended = True
                return True
        return False

    def _scheduled(self, entry: Entry, applied: ScheduleApplied, machine: Machine) -> None:
        schedule, start = decode_schedule(entry.payload), 0
        for part, result in zip(schedule.parts.tolist(), applied.parts, strict=True):
            rows = schedule.rows[start : start + part[2]]
            start += part[2]
            if not isinstance(result, Accepted):
                continue
            answer = result.answer
            for at, row in enumerate(rows):
                verdicts = answer.verdicts
                if verdicts is not None:
                    if Verdict(int(verdicts.verdict[at])) not in BORN:
                        continue
                    if verdicts.verdict[at] == Verdict.REPLACED:
                        self._gone(int(verdicts.due_ms[at]), int(verdicts.seq[at]))
                name = int(row["due_ms"]), answer.first_seq + at
                self._born(machine, int(row["topic"]), *name)

    def _rescheduled(self, applied: RescheduleApplied, machine: Machine) -> None:
        topics: list[int] = []
        old, new = applied.targets, applied.timers
        for due_ms, seq in zip(old.due_ms.tolist(), old.seq.tolist(), strict=True):
            having = (topic for topic, timers in self.pending.items() if seq in timers)
            topics.append(next(having, 0))
            self._tell(topics[-1], Place(due_ms, seq), int(applied.results[len(topics) - 1]))
        for at, (due_ms, seq) in enumerate(zip(new.due_ms.tolist(), new.seq.tolist(), strict=True)):
            if applied.results[at] == RESCHEDULED:
                self._born(machine, topics[at], due_ms, seq)

    def _cancelled(self, applied: CancelApplied) -> None:
        targets = applied.targets
        places = map(Place, targets.due_ms.tolist(), targets.seq.tolist())
        for place, result in zip(places, applied.results.tolist(), strict=True):
            if place.seq:
                having = (t for t, timers in self.pending.items() if place.seq in timers)
                self._tell(next(having, 0), place, result)

    def _tell(self, topic: int, place: Place, result: int) -> None:
        """A change of a timer was answered so."""
        was_pending = self.pending.get(topic, {}).get(place.seq) == place
        if was_pending != (result in (CANCELLED, RESCHEDULED, LEFT)):
            raise Broken("held", f"{place} of topic {topic}: {result}, pending: {was_pending}")
        if was_pending and result != LEFT:
            self._gone(*place)

    # ---- firing

    def _fired(self, entry: Entry, applied: FireApplied) -> None:
        for topic, rows in (*applied.fired, *applied.released):
            if topic in self.paused:
                raise Broken("pause", f"{entry.index}: topic {topic} is paused, {rows['seq']} fire")
            for place in _places(rows):
                self._left(entry, topic, place)
                resume = self.resumes.get(topic)
                if resume is not None and place in resume.overdue:
                    self._fires_overdue(entry, resume, place)
        for topic, rows in applied.dropped:
            resume = self.resumes.get(topic)
            for place in _places(rows):
                self._left(entry, topic, place)
                if resume is None or resume.catch_up == "all" or place not in resume.overdue:
                    raise Broken("drop", f"{entry.index}: {place} of topic {topic}, {resume}")
                resume.dropped.add(place)
                self.dropped.add(TimerName(*place))

    def _left(self, entry: Entry, topic: int, place: Place) -> None:
        if self.pending.get(topic, {}).pop(place.seq, None) != place:
            raise Broken("twice", f"{entry.index}: {place} of topic {topic} was not pending")

    def _fires_overdue(self, entry: Entry, resume: Resume, place: Place) -> None:
        late = resume.fired and resume.fired[-1] > place
        if resume.catch_up == "drop" or late or (resume.catch_up == "latest" and resume.fired):
            raise Broken("drop", f"{entry.index}: {place} fires, {resume}")
        if resume.catch_up == "latest" and max(resume.dropped, default=place) > place:
            raise Broken("drop", f"{entry.index}: {place} is not the latest, {resume}")
        resume.fired.append(place)

    # ---- pauses

    def _look_at_policies(self, entry: Entry) -> None:
        """See which topics are paused behind this entry; one that goes on has overdue timers."""
        for topic, name in enumerate(self.policies.topics, 1):
            rules = self.policies.at(entry.index + 1, name)
            if rules.get("paused", False):
                self.paused.add(topic)
                self.resumes.pop(topic, None)
            elif topic in self.paused:
                self.paused.remove(topic)
                until_ms = max(entry.time_ms, self.read_ms)
                timers = self.pending.get(topic, {}).values()
                overdue = {place for place in timers if place.due_ms <= until_ms}
                self.resumes[topic] = Resume(entry.index, rules.get("catch_up", "all"), overdue)

    def _over(self, topic: int, resume: Resume) -> None:
        """All that was overdue has gone."""
        latest = resume.catch_up == "latest" and resume.overdue
        if latest and not (resume.fired or resume.ended):
            raise Broken("drop", f"the latest of topic {topic} never fired: {resume}")
        resume.over = True
        self.past += bool(resume.overdue)

    def _count(self, machine: Machine) -> None:
        """Held is what is pending at or before the fire position, topic by topic."""
        for topic_id, topic in machine.topics.items():
            places = [*self.pending.get(topic_id, {}).values()]
            due = np.array([place.due_ms for place in places], np.int64)
            seq = np.array([place.seq for place in places], np.uint64)
            held = len(places) - int(np.count_nonzero(after(due, seq, machine.store.position)))
            if (topic.held, topic.counts.pending) != (held, len(places)):
                raise Broken("held", f"{topic.name}: {topic.held} of {topic.counts}, {places}")
            self.held_most = max(self.held_most, held)

    def at_end(self) -> None:
        """All topics go on, and have settled."""
        for topic, resume in self.resumes.items():
            if not resume.over:
                raise Broken("held", f"topic {topic} never went on: {resume}")


def _places(rows: RowArray) -> list[Place]:
    return [*map(Place, rows["due_ms"].tolist(), rows["seq"].tolist())]
