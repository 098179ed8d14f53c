"""What becomes of a topic's timers when it is deleted, told from the log; a part of the book.

A plain model beside timer/state/machine.py: which seqs are pending, topic by topic. What a deletion
drops is what is pending of its topic by then; none of it fires, is cancelled or is rescheduled
after it.
"""

from dataclasses import dataclass, field

import numpy as np

from chaos.sim.checks.keybook import TimerName
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry
from timer.model.columns import decode_schedule
from timer.model.units import TopicId
from timer.state.apply_results import (
    CANCELLED,
    RESCHEDULED,
    Accepted,
    CancelApplied,
    DeleteTopicApplied,
    FireApplied,
    RescheduleApplied,
    ScheduleApplied,
)
from timer.state.key_conflicts import NEW_MAX, Verdict
from timer.state.machine import Machine
from timer.state.producers import RequestAnswer


@dataclass(slots=True)
class DropBook:
    """See the module. `check` raises Broken when an entry did something else."""

    pending: dict[int, int] = field(default_factory=dict)
    """Seq -> topic id."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Seq -> the topic that it went with."""
    queue_ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Topic that is gone -> (the entry that deleted it, how many had fired)."""
    checked: int = 0

    def check(self, entry: Entry, applied: object, machine: Machine) -> None:
        """Take in an entry as the first replica has applied it."""
        if entry.index <= self.checked:
            return
        self.checked = entry.index
        match applied:
            case ScheduleApplied():
                self._scheduled(entry, applied, machine)
            case RescheduleApplied():
                self._moved(applied, machine)
            case CancelApplied(results, targets):
                for seq in targets.seq[results == CANCELLED].tolist():
                    self._end(entry, seq, "was cancelled")
            case FireApplied():
                self._fired(entry, applied)
            case DeleteTopicApplied():
                self._deleted(entry, applied)
            case _:
                pass

    def _end(self, entry: Entry, seq: int, how: str) -> int:
        topic = self.pending.pop(seq, None)
        if topic is None:
            why = f"went with topic {self.dropped[seq]}" if seq in self.dropped else "was over"
            raise Broken("dropped", f"{entry.index}: {seq} {how}, which {why}")
        return topic

    def _fired(self, entry: Entry, applied: FireApplied) -> None:
        for how, moved in (
            ("fired", (*applied.fired, *applied.released)),
            ("was dropped by a resume", applied.dropped),
        ):
            for topic, rows in moved:
                for seq in rows["seq"].tolist():
                    if self._end(entry, seq, how) != topic:
                        raise Broken("dropped", f"{entry.index}: {seq} {how}, as one of {topic}")

    def _scheduled(self, entry: Entry, applied: ScheduleApplied, machine: Machine) -> None:
        schedule, start = decode_schedule(entry.payload), 0
        ended: list[int] = []
        for size, result in zip(schedule.parts["rows"].tolist(), applied.parts, strict=True):
            rows, start = schedule.rows[start : start + size], start + size
            if not isinstance(result, Accepted):
                continue
            answer = result.answer
            gone = {*rows["topic"].tolist()} & self.queue_ends.keys()
            if gone:
                raise Broken("dropped", f"{entry.index}: timers of {gone}, which are deleted")
            ended += self._begin(answer, rows["topic"].tolist(), machine)
        for seq in ended:  # in the same entry too
            self._end(entry, seq, "was replaced")

    def _begin(self, answer: RequestAnswer, topics: list[int], machine: Machine) -> list[int]:
        """Note new timers; return which ones they replace."""
        verdicts = answer.verdicts
        told = np.full(len(topics), Verdict.SCHEDULED) if verdicts is None else verdicts.verdict
        for at, topic in enumerate(topics):
            if told[at] <= NEW_MAX and _pends(machine, topic, answer.due_ms[at]):
                self.pending[answer.first_seq + at] = topic
        return [] if verdicts is None else verdicts.seq[told == Verdict.REPLACED].tolist()

    def _moved(self, applied: RescheduleApplied, machine: Machine) -> None:
        moved = applied.results == RESCHEDULED
        for old, new, due_ms in zip(
            applied.targets.seq[moved].tolist(),
            applied.timers.seq[moved].tolist(),
            applied.timers.due_ms[moved].tolist(),
            strict=True,
        ):
            topic = self.pending.pop(old, None)
            if topic is None:
                raise Broken("dropped", f"{old} was not pending, and goes on as {new}")
            if _pends(machine, topic, due_ms):
                self.pending[new] = topic

    def _deleted(self, entry: Entry, applied: DeleteTopicApplied) -> None:
        topic = applied.op.topic
        if applied.topic is None:
            return
        mine = {seq for seq, of in self.pending.items() if of == topic}
        if len(mine) != applied.dropped:
            raise Broken("dropped", f"{entry.index}: {applied.dropped} of {len(mine)} went along")
        for seq in mine:
            del self.pending[seq]
            self.dropped[seq] = topic
        self.queue_ends[topic] = entry.index, applied.topic.queue.end

    def fired_before(self, machine: Machine) -> int:
        """Return how many fired into topics that are gone on a replica."""
        past = self.queue_ends.values()
        return sum(end for index, end in past if index <= machine.applied_index)

    def has_dropped(self, name: TimerName) -> bool:
        """Return whether a timer went with its topic."""
        return name.seq in self.dropped


def _pends(machine: Machine, topic: int, due_ms: int) -> bool:
    """Return whether what an entry scheduled did not fire with it."""
    return due_ms > machine.last_read_time_ms or machine.topics[TopicId(topic)].holding
