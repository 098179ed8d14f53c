"""The story of one timer, read from the entries of the log: a pure core fed with entries.

    SCHEDULE, RESCHEDULE, MOVE,   the timer begins    place of its seq: timer/state/firing_trace.py
    OCCURRENCES
    CANCEL, RESCHEDULE, a key,    it ends before its time
    SERIES
    TOPIC                         it ends with its topic, or its message does
    FIRE                          it fires            offset: timer/state/firing_trace.py
                                  it is dropped at its topic's resume, likewise
    GROUP                         nacks, ended leases, acks, moves, expiry of its offset; seeks and
                                  deletions of groups

The machine's knowledge of the timer shows where nothing needs to be read. A pending timer has not
ended, and a fired one was not cancelled before. Most stories are therefore read from two short
stretches of the log.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import DeleteTopic, GroupOp, Ids, Move, Nack, Op, Targets
from timer.entries.series_payloads import (
    CreateSeries,
    count_occurrences,
    decode_occurrences,
    decode_series,
)
from timer.model.columns import REPLACING, Schedule, decode_schedule, parts_of
from timer.model.timer_id import TimerKey
from timer.model.units import GroupId, LogIndex, QueueOffset, Seq, TopicId, UnixMs
from timer.state.firing_trace import FiringPlace, SeqMark


class StoryKind(enum.IntEnum):
    """The kind of an event; the numbers are the contract's."""

    SCHEDULED = 1
    RESCHEDULED_FROM = 2
    MOVED_FROM = 3
    CANCELLED = 4
    REPLACED = 5
    RESCHEDULED = 6
    FIRED = 7
    NACKED = 8
    LEASE_ENDED = 9
    ACKED = 10
    MOVED = 11
    NEW_LEADER = 12
    RECALLED = 13
    SOUGHT = 14
    GROUP_DELETED = 15
    TOPIC_DELETED = 16
    DROPPED = 17
    EXPIRED = 20
    OCCURRENCE = 21
    SERIES_CHANGED = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEvent:
    """One event in a timer's story. Fields that do not apply have their default values."""

    kind: StoryKind
    entry: Entry
    topic: TopicId = TopicId(0)
    group: GroupId = GroupId(0)
    offset: QueueOffset | None = None
    other: TimerKey | None = None
    producer: int = 0
    sequence: int = 0
    request: bytes = b""
    requested_ms: int = 0
    until_ms: int = 0
    to: str = ""
    attempt: int = 0
    series: int = 0
    number: int = 0


class KnownTimer(NamedTuple):
    """The machine's knowledge of a timer."""

    pending: bool
    ended: bool
    """The timer was cancelled, replaced or rescheduled within the horizon."""
    fired: FiringPlace | None
    topic: TopicId | None
    key: bytes
    """Key of a pending timer."""
    dropped: LogIndex | None = None
    """The entry that dropped the timer. None: none did, or it is not known."""
    deleted: bool = False
    """The topic is known, and was deleted."""

    @property
    def goal(self) -> LogIndex | None:
        """The entry that fired or dropped the timer. None: not known."""
        return self.fired.entry if self.fired is not None else self.dropped


@dataclass(slots=True)
class StoryReader:
    """Reads a story: feed it the entry `next`, again and again, until `over`."""

    target: TimerKey
    known: KnownTimer
    marks: Sequence[SeqMark]
    """The machine's marks, ascending."""
    groups: frozenset[GroupId]
    """The topic's groups, if known: the story is over when all are done with the message."""
    next: LogIndex = LogIndex(0)
    """The entry to feed next."""
    over: bool = False
    begun: bool = False
    """The entry that scheduled the timer was fed."""
    dropped: bool = False
    """The topic was deleted before the timer fired."""
    fired_at: LogIndex | None = None
    """The entry that fired the timer; if no firing is noted, the first that could have done so."""
    _next_seq: int | None = None
    """Seq that the next entry issues first. None: not known at this entry."""
    _topic: TopicId | None = None
    _key: bytes = b""
    _series: int = 0
    """Series of the timer, if it is an occurrence and the entry that made it was fed."""
    _marks: dict[int, SeqMark] = field(default_factory=dict)
    _failed: dict[GroupId, int] = field(default_factory=dict)
    _done_groups: set[GroupId] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin at the last mark before the seq; at the first entry if there is no such mark."""
        before = [mark for mark in self.marks if mark.next_seq <= self.target.seq]
        self.next = before[-1].entry if before else LogIndex(1)
        self._marks = {mark.entry: mark for mark in self.marks}
        self._topic, self._key = self.known.topic, self.known.key

    @property
    def topic(self) -> TopicId | None:
        """The timer's topic; None: no entry has shown it yet."""
        return self._topic

    @property
    def located(self) -> bool:
        """Whether a mark shows where in the log the story begins."""
        return bool(self.marks) and self.marks[0].next_seq <= self.target.seq

    @property
    def never_began(self) -> bool:
        """Whether the timer did not begin, although its number was passed."""
        passed = self._next_seq is not None and self._next_seq > self.target.seq
        return passed and not self.begun

    def skip_to(self, index: LogIndex) -> None:
        """Note that the log begins at `index`; earlier events are left out."""
        if index <= self.next:
            return
        self.next, fired = index, self.known.fired
        before = any(m.entry <= index and m.next_seq > self.target.seq for m in self.marks)
        if fired is not None and fired.entry < index:
            self.fired_at = fired.entry
            self.over = not self.groups and not self.known.deleted
        elif before and fired is not None:
            self.next = fired.entry
        elif before and self.known.pending:
            self.over = True

    def feed(self, entry: Entry) -> list[StoryEvent]:
        """Read the next entry; return the timer's events in it."""
        assert entry.index == self.next, (entry.index, self.next)
        self.next = LogIndex(self.next + 1)
        mark = self._marks.get(entry.index)
        if mark is not None:
            self._next_seq = mark.next_seq
        elif entry.kind is EntryKind.CHECKPOINT and self._next_seq is None and not self.begun:
            # Without a mark of its own: no seq was issued since the last mark.
            older = (each.next_seq for each in reversed(self.marks) if each.entry < entry.index)
            self._next_seq = next(older, None)
        events: list[StoryEvent] = []
        if self.fired_at is None:
            events += self._events_before(entry, mark)
            end_entry = self.known.goal
            if self.begun and self.known.pending:
                self.over = True
            elif self.begun and end_entry is not None and entry.index < end_entry:
                self.next, self._next_seq = end_entry, None  # the entries between do not concern it
        if not self.over and entry.index == self.known.dropped:
            events.append(self._end_event(StoryKind.DROPPED, entry))
        if not self.over and self._is_firing(entry):
            self.fired_at = entry.index
            events.append(self._fired_event(entry))
            self.over = self.known.fired is None or not (self.groups or self.known.deleted)
        if self.fired_at is not None and not self.over:
            events += self._events_after(entry)
            self.over |= self.groups <= self._done_groups and not self.known.deleted
        return events

    # ---- before it fires

    def _events_before(self, entry: Entry, mark: SeqMark | None) -> Iterator[StoryEvent]:
        match entry.kind:
            case EntryKind.SCHEDULE:
                yield from self._schedule(entry, mark)
            case EntryKind.CANCEL:
                if self._is_target(payloads.decode_cancel(entry.payload)) is not None:
                    yield self._end_event(StoryKind.CANCELLED, entry)
            case EntryKind.RESCHEDULE:
                yield from self._reschedule(entry)
            case EntryKind.GROUP:
                for op in payloads.decode_group(entry.payload):
                    if isinstance(op, Move):
                        yield from self._move_event(entry, op)
            case EntryKind.OCCURRENCES:
                yield from self._occurrence(entry)
            case EntryKind.SERIES:
                yield from self._series_changed(entry)
            case EntryKind.TOPIC if self._is_deletion(entry) and self.known.fired is None:
                self.dropped = True
                yield self._end_event(StoryKind.TOPIC_DELETED, entry)
            case _:
                pass

    def _is_deletion(self, entry: Entry) -> bool:
        """Return whether the entry deletes the timer's topic."""
        op = payloads.decode_topic(entry.payload)
        return isinstance(op, DeleteTopic) and op.topic == self._topic and not self.over

    def _schedule(self, entry: Entry, mark: SeqMark | None) -> Iterator[StoryEvent]:
        parts, keyed = parts_of(entry.payload)
        schedule: Schedule | None = None
        start = 0
        for number, head in enumerate(parts.tolist()):
            producer, sequence, size, mode, _ = head
            first, start = start, start + size
            if mark is not None and mark.is_refused(number):
                continue
            at = self._place_in_issued(size)
            if at is not None:
                schedule = schedule or decode_schedule(entry.payload)
                row = schedule.rows[first + at]
                self._begin(TopicId(int(row["topic"])), _key_of(row, entry.payload))
                request = schedule.requests[number]
                yield StoryEvent(
                    kind=StoryKind.SCHEDULED,
                    entry=entry,
                    topic=TopicId(int(row["topic"])),
                    producer=producer,
                    sequence=sequence,
                    request=request.text if request is not None else b"",
                    requested_ms=int(row["requested_ms"]),
                )
                first += at + 1
            if mode in REPLACING and keyed and self._key and not self.over:
                schedule = schedule or decode_schedule(entry.payload)
                yield from self._replaced(entry, schedule, slice(first, start))

    def _replaced(self, entry: Entry, schedule: Schedule, rows: slice) -> Iterator[StoryEvent]:
        """Yield the end of the timer if one of these rows, the last of a part, replaces it."""
        if self.known.pending or self.known.goal is not None:
            return
        mine = schedule.rows[rows]
        same = (mine["topic"] == self._topic) & (mine["key_size"] == len(self._key))
        for at in np.flatnonzero(same).tolist():
            if _key_of(mine[at], entry.payload) == self._key:
                other = None
                if self._next_seq is not None:
                    seq = self._next_seq - (rows.stop - rows.start - at)
                    other = TimerKey(UnixMs(int(mine[at]["due_ms"])), Seq(seq))
                yield self._end_event(StoryKind.REPLACED, entry, other)
                return

    def _reschedule(self, entry: Entry) -> Iterator[StoryEvent]:
        order = payloads.decode_reschedule(entry.payload)
        at = self._is_target(order.targets)
        if at is not None:
            due_ms, other = int(order.due_ms[at]), None
            if self._next_seq is not None:
                other = TimerKey(UnixMs(due_ms), Seq(self._next_seq + at))
            yield self._end_event(StoryKind.RESCHEDULED, entry, other)
        issued = self._place_in_issued(len(order.due_ms))
        if issued is not None:
            targets = order.targets
            if isinstance(targets, Ids):
                self._begin(self.known.topic, b"")
                due_ms, seq = int(targets.due_ms[issued]), int(targets.seq[issued])
                old: TimerKey | None = TimerKey(UnixMs(due_ms), Seq(seq))
            else:
                topic, key = targets.names()[issued]
                self._begin(TopicId(topic), key)
                old = None
            yield StoryEvent(
                kind=StoryKind.RESCHEDULED_FROM,
                entry=entry,
                topic=self._topic or TopicId(0),
                other=old,
                requested_ms=int(order.requested_ms[issued]),
            )

    def _move_event(self, entry: Entry, op: Move) -> Iterator[StoryEvent]:
        at = self._place_in_issued(len(op.offsets))
        if at is not None:
            self._begin(self.known.topic, b"")
            offset = QueueOffset(int(op.offsets[at]))
            yield StoryEvent(
                kind=StoryKind.MOVED_FROM,
                entry=entry,
                topic=op.topic,
                group=op.group,
                offset=offset,
            )

    def _occurrence(self, entry: Entry) -> Iterator[StoryEvent]:
        at = self._place_in_issued(count_occurrences(entry.payload))
        if at is not None:
            planned = decode_occurrences(entry.payload)
            self._begin(self.known.topic, b"")
            self._series = int(planned.series[at])
            yield StoryEvent(
                kind=StoryKind.OCCURRENCE,
                entry=entry,
                topic=self._topic or TopicId(0),
                requested_ms=int(planned.planned_ms[at]),
                series=self._series,
                number=int(planned.number[at]),
            )

    def _series_changed(self, entry: Entry) -> Iterator[StoryEvent]:
        """Yield the end of an occurrence that a change or the deletion of its series cancels."""
        op = decode_series(entry.payload)
        if isinstance(op, CreateSeries) or op.series != self._series:
            return
        if self.begun and not (self.over or self.known.pending or self.known.goal is not None):
            yield replace(self._end_event(StoryKind.SERIES_CHANGED, entry), series=op.series)

    def _place_in_issued(self, count: int) -> int | None:
        """Count issued seqs; return the place of the timer's seq among them, or None."""
        if self._next_seq is None:
            return None
        first, self._next_seq = self._next_seq, self._next_seq + count
        at = self.target.seq - first
        return at if 0 <= at < count and not self.begun else None

    def _begin(self, topic: TopicId | None, key: bytes) -> None:
        self.begun = True
        self._topic, self._key = topic or self._topic, key or self._key

    def _is_target(self, targets: Targets) -> int | None:
        """Return the timer's place among the targets of a change; None: it is not changed."""
        if self.known.pending or self.known.goal is not None or self.over:
            return None
        if isinstance(targets, Ids):
            found = np.flatnonzero(
                (targets.seq == np.uint64(self.target.seq)) & (targets.due_ms == self.target.due_ms)
            )
            return int(found[0]) if len(found) else None
        named = enumerate(targets.names() if self._key else ())
        return next((at for at, name in named if name == (self._topic, self._key)), None)

    def _end_event(
        self, kind: StoryKind, entry: Entry, other: TimerKey | None = None
    ) -> StoryEvent:
        self.over = True
        return StoryEvent(kind=kind, entry=entry, topic=self._topic or TopicId(0), other=other)

    # ---- when it fires

    def _is_firing(self, entry: Entry) -> bool:
        if self.fired_at is not None or self.known.pending or self.known.ended:
            return False
        if self.known.dropped is not None:
            return False
        if self.known.fired is not None:
            return entry.index == self.known.fired.entry
        if entry.kind is not EntryKind.FIRE:
            return False
        return payloads.decode_fire(entry.payload).read_time_ms >= self.target.due_ms

    def _fired_event(self, entry: Entry) -> StoryEvent:
        fired = self.known.fired
        if fired is None:
            return StoryEvent(kind=StoryKind.FIRED, entry=entry, topic=self._topic or TopicId(0))
        return StoryEvent(kind=StoryKind.FIRED, entry=entry, topic=fired.topic, offset=fired.offset)

    # ---- after it fired

    def _events_after(self, entry: Entry) -> Iterator[StoryEvent]:
        fired = self.known.fired
        assert fired is not None
        if entry.kind is EntryKind.EPOCH:
            yield StoryEvent(kind=StoryKind.NEW_LEADER, entry=entry)
        if entry.kind is EntryKind.TOPIC and self._is_deletion(entry):
            yield self._end_event(StoryKind.TOPIC_DELETED, entry)
        if entry.kind is not EntryKind.GROUP:
            return
        for op in payloads.decode_group(entry.payload):
            if not isinstance(op, GroupOp):
                continue
            if op.topic != fired.topic or op.op in (Op.RESERVE, Op.HAND_OVER):
                continue
            if op.op in (Op.SEEK, Op.DELETE):
                yield self._group_change(entry, op)
                continue
            if op.op is Op.EXPIRE_BELOW:
                if fired.offset < op.offsets[0]:
                    yield StoryEvent(kind=StoryKind.EXPIRED, entry=entry, topic=op.topic)
                    self._done_groups |= self.groups
                continue
            if op.group in self._done_groups:
                continue
            at = np.flatnonzero(op.offsets == np.uint64(fired.offset))
            if len(at):
                yield self._group_event(entry, op, int(at[0]))

    def _group_change(self, entry: Entry, op: GroupOp) -> StoryEvent:
        """Return the event of a seek, which gives the group a new id, or of its deletion."""
        offset = QueueOffset(int(op.offsets[0])) if op.op is Op.SEEK else None
        kind = StoryKind.SOUGHT if op.op is Op.SEEK else StoryKind.GROUP_DELETED
        return StoryEvent(kind=kind, entry=entry, topic=op.topic, group=op.group, offset=offset)

    def _group_event(self, entry: Entry, op: GroupOp, at: int) -> StoryEvent:
        attempt = 0
        if op.op in (Op.ACK, Op.MOVE, Op.EXPIRE):
            self._done_groups.add(op.group)
        elif op.op is not Op.RECALL:
            self._failed[op.group] = attempt = self._failed.get(op.group, 0) + 1
        return StoryEvent(
            kind=_OF_OP[op.op],
            entry=entry,
            topic=op.topic,
            group=op.group,
            until_ms=int(op.not_before_ms[at]) if isinstance(op, Nack) else 0,
            to=op.to if isinstance(op, Move) else "",
            attempt=attempt,
        )


_OF_OP: Final = {
    Op.ACK: StoryKind.ACKED,
    Op.MOVE: StoryKind.MOVED,
    Op.NACK: StoryKind.NACKED,
    Op.ENDED: StoryKind.LEASE_ENDED,
    Op.RECALL: StoryKind.RECALLED,
    Op.EXPIRE: StoryKind.EXPIRED,
}


def _key_of(row: np.void, payload: memoryview) -> bytes:
    start = int(row["key_start"])
    return bytes(payload[start : start + int(row["key_size"])])
