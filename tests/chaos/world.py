"""Logs written by hand, for tests of the readers of logs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chaos.history.history import OpOutcome, RunFolder, read
from timer.entries import entry_frame as entry
from timer.entries import payloads
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import (
    AnyOp,
    CreateGroup,
    Fire,
    GroupOp,
    GroupSettings,
    GroupStart,
    Move,
    Nack,
    Op,
)
from timer.entries.series_payloads import Planned, SeriesOp, encode_occurrences, encode_series
from timer.files import log as timer_log
from timer.files import segment
from timer.files.disk import RealDisk
from timer.model import timer_id
from timer.model.columns import Binary, OnConflict, Part, encode_schedule
from timer.model.units import Epoch, GroupId, LogIndex, ProducerId, ReplicaId, TopicId, UnixMs

SALT = 42


def id_of(due_ms: int, seq: int) -> str:
    """Return a timer id as text."""
    raw = timer_id.encode(np.array([due_ms], np.int64), np.array([seq], np.uint64), SALT)
    return timer_id.to_text(raw)


def by_id(timers: Sequence[tuple[int, int]]) -> payloads.Ids:
    """Return the targets of timers given as (due_ms, seq)."""
    due_ms, seq = zip(*timers, strict=True)
    return payloads.Ids(np.array(due_ms, np.int64), np.array(seq, np.uint64))


def by_key(names: Sequence[tuple[int, bytes]]) -> payloads.Keys:
    """Return the targets of keys given as (topic, key)."""
    topics = np.array([topic for topic, _ in names], np.uint32)
    return payloads.Keys(topics, Binary.of([key for _, key in names]))


class Log:
    """Frames of one log, appended in order. Time advances only by arguments `at_ms`."""

    def __init__(self, prefix: "Log | None" = None) -> None:
        self.frames: list[bytes] = [*prefix.frames] if prefix else []
        self.current: Epoch = prefix.current if prefix else Epoch(0)
        self.time_ms: UnixMs = prefix.time_ms if prefix else UnixMs(0)
        self.topics = self.groups = self.producers = 0
        self.seqs = 0
        """Number of timers and moved messages; the last seq, if no timer was rescheduled."""
        self.names = set[str]()
        """Names of all topics that were created."""

    def entry(self, kind: EntryKind, *payload: bytes, at_ms: int | None = None) -> None:
        self.time_ms = UnixMs(max(self.time_ms, at_ms or 0))
        index = LogIndex(len(self.frames) + 1)
        self.frames.append(entry.encode(kind, self.current, index, self.time_ms, [*payload]))

    def idle(self, until_ms: int) -> None:
        """Append what a leader without work does: a CHECKPOINT every three seconds."""
        for at_ms in [*range(self.time_ms + 3000, until_ms, 3000), until_ms]:
            self.entry(EntryKind.CHECKPOINT, b"", at_ms=at_ms)

    def epoch(self, number: int, at_ms: int | None = None) -> None:
        self.current = Epoch(number)
        start = payloads.EpochStart(self.current, ReplicaId(1), (ReplicaId(1),))
        self.entry(EntryKind.EPOCH, payloads.encode_epoch(start), at_ms=at_ms)

    def topic(self, name: str) -> TopicId:
        self.entry(EntryKind.TOPIC, payloads.encode_topic(name))
        return self._named(name)

    def _named(self, name: str) -> TopicId:
        self.names.add(name)
        self.topics += 1
        return TopicId(self.topics)

    def delete_topic(self, topic: TopicId, at_ms: int | None = None) -> None:
        self.entry(EntryKind.TOPIC, payloads.encode_delete_topic(topic), at_ms=at_ms)

    def producer(self, token: bytes) -> ProducerId:
        self.producers += 1
        drawn = ProducerId(self.producers)
        self.entry(EntryKind.PRODUCER, payloads.encode_producer(token, drawn))
        return drawn

    def schedule(
        self,
        topic: TopicId,
        rows: Sequence[tuple[int, int]],
        *,
        producer: tuple[int, int] = (0, 0),
        at_ms: int | None = None,
        size: int = 8,
        keys: Sequence[bytes] = (),
        on_conflict: OnConflict = OnConflict.REJECT,
    ) -> None:
        """Append timers given as (due_ms, mark), with a key each if `keys` is not empty."""
        due_ms = np.array([due for due, _ in rows], np.int64)
        self.seqs += len(rows)
        part = Part(
            producer_id=ProducerId(producer[0]),
            sequence=producer[1],
            due_ms=due_ms,
            requested_ms=due_ms,
            topic=np.full(len(rows), topic, np.uint32),
            payload=Binary.of([mark.to_bytes(8, "little").ljust(size) for _, mark in rows]),
            key=Binary.of(keys) if keys else None,
            on_conflict=on_conflict,
        )
        self.entry(EntryKind.SCHEDULE, *encode_schedule([part]), at_ms=at_ms)

    def cancel(self, targets: Sequence[tuple[int, int]], at_ms: int | None = None) -> None:
        """Append a cancel of timers given as (due_ms, seq)."""
        self.entry(EntryKind.CANCEL, *payloads.encode_cancel(by_id(targets)), at_ms=at_ms)

    def cancel_keys(self, targets: Sequence[tuple[int, bytes]], at_ms: int | None = None) -> None:
        """Append a cancel of the timers with keys given as (topic, key)."""
        self.entry(EntryKind.CANCEL, *payloads.encode_cancel(by_key(targets)), at_ms=at_ms)

    def reschedule(
        self, targets: payloads.Targets, due_ms: Sequence[int], at_ms: int | None = None
    ) -> None:
        """Append a reschedule of timers to other due times."""
        due = np.array(due_ms, np.int64)
        order = payloads.Reschedule(targets, due, due)
        self.entry(EntryKind.RESCHEDULE, *payloads.encode_reschedule(order), at_ms=at_ms)

    def fire(
        self,
        read_time_ms: int,
        rows_max: int = 1000,
        bytes_max: int = 1 << 20,
        topics_max: int = 1000,
    ) -> None:
        """Append a FIRE entry; its read time is also its time."""
        fire = Fire(UnixMs(read_time_ms), rows_max, bytes_max, topics_max)
        self.entry(EntryKind.FIRE, payloads.encode_fire(fire), at_ms=read_time_ms)

    def series(self, op: SeriesOp, at_ms: int | None = None) -> None:
        """Append a change of a series. The first that is created is number 1."""
        self.entry(EntryKind.SERIES, encode_series(op), at_ms=at_ms)

    def occurrence(
        self, series: int, number: int, planned_ms: int, due_ms: int, at_ms: int | None = None
    ) -> None:
        """Append the next occurrence of a series."""
        ids, times = np.array([[series], [number]], np.uint64), [[planned_ms], [due_ms]]
        planned = Planned(*ids, *np.array(times, np.int64))
        self.entry(EntryKind.OCCURRENCES, *encode_occurrences(planned), at_ms=at_ms)
        self.seqs += 1

    def group(
        self, topic: TopicId, name: str, start: GroupStart = GroupStart.EARLIEST, **settings: Any
    ) -> GroupId:
        create = CreateGroup(topic, name, start, GroupSettings(**{"lease_ms": 1000} | settings))
        self.entry(EntryKind.GROUP, *payloads.encode_group([create]))
        self.groups += 1
        return GroupId(self.groups)

    def reserve(self, topic: TopicId, group: GroupId, below: int) -> None:
        self.op(GroupOp(Op.RESERVE, topic, group, np.array([below], np.uint64)))

    def ack(
        self, topic: TopicId, group: GroupId, offsets: Sequence[int], at_ms: int | None = None
    ) -> None:
        self.op(GroupOp(Op.ACK, topic, group, np.array(offsets, np.uint64)), at_ms)

    def ended(self, topic: TopicId, group: GroupId, offsets: Sequence[int]) -> None:
        self.op(GroupOp(Op.ENDED, topic, group, np.array(offsets, np.uint64)))

    def recall(self, topic: TopicId, group: GroupId, offsets: Sequence[int]) -> None:
        self.op(GroupOp(Op.RECALL, topic, group, np.array(offsets, np.uint64)))

    def nack(
        self, topic: TopicId, group: GroupId, offsets: Sequence[int], times: Sequence[int]
    ) -> None:
        columns = np.array(offsets, np.uint64), np.array(times, np.int64)
        self.op(Nack(Op.NACK, topic, group, *columns))

    def move(
        self, topic: TopicId, group: GroupId, offsets: Sequence[int], to: str, to_group: str,
        *, marks: Sequence[int] = (), at_ms: int | None = None,
    ) -> None:  # fmt: skip
        """Append a MOVE of messages, with a mark each if `marks` is not empty."""
        ones = np.ones(len(offsets), np.int64)
        part = Part(
            producer_id=ProducerId(0),
            sequence=0,
            due_ms=ones,
            requested_ms=ones,
            topic=np.zeros(len(offsets), np.uint32),
            payload=Binary.of(
                [mark.to_bytes(8, "little") for mark in marks] or [b"moved"] * len(offsets)
            ),
        )
        rows = b"".join(encode_schedule([part]))
        column = np.array(offsets, np.uint64)
        self.op(Move(Op.MOVE, topic, group, column, to, to_group, rows), at_ms)
        self.seqs += len(offsets)
        if to not in self.names:
            self._named(to)
            self.groups += bool(to_group)

    def op(self, op: AnyOp, at_ms: int | None = None) -> None:
        self.entry(EntryKind.GROUP, *payloads.encode_group([op]), at_ms=at_ms)


class Story(ABC):
    """A part of a run. Its log, times, seqs and marks continue those of the story before it."""

    run: RunFolder
    log: Log
    start_ms: int
    before: int
    """The last seq before the story."""
    last: int
    """The last seq of the story."""

    def tell(self, run: RunFolder, log: Log) -> None:
        """Append the story to a log, and write its clients' histories."""
        self.run, self.log = run, log
        self.start_ms, self.before = int(log.time_ms), log.seqs
        self.write()
        self.last = log.seqs

    @abstractmethod
    def write(self) -> None:
        """Write the entries and histories of the story."""

    def ms(self, after_ms: int) -> int:
        """Return the Unix time `after_ms` after the story's start."""
        return self.start_ms + after_ms

    def span_ms(self, after_ms: int, until_ms: int) -> tuple[int, int]:
        """Return the Unix times of a span, given from the story's start."""
        return self.ms(after_ms), self.ms(until_ms)

    def mark(self, number: int) -> int:
        """Return the mark of the story's nth timer; it is the timer's seq."""
        return self.before + number

    def number(self, mark: int) -> int:
        """Return the number of the timer with a mark."""
        return mark - self.before


def write_log(
    folder: Path, frames: Sequence[bytes], *, frames_per_segment: int = 1000, first: int = 1
) -> None:
    """Write frames `first`, `first` + 1, … as segment files; the first frame is number 1."""
    folder.mkdir(parents=True, exist_ok=True)
    epoch, before = Epoch(0), 0
    for start in range(first - 1, len(frames), frames_per_segment):
        part = frames[start : start + frames_per_segment]
        header = segment.Header(LogIndex(start + 1), epoch, LogIndex(before))
        path = segment.path_of(folder, header.first)
        path.write_bytes(header.encode() + b"".join(part))
        epoch, before = segment.peek(memoryview(part[-1]))[0], start + 1


def durable_log(data: Path, entries: int = 4) -> Path:
    """Write a log of `entries` entries as a stopped node leaves it; return its last segment."""
    story = Log()
    story.epoch(1)
    for number in range(1, entries):
        story.topic(f"t{number}")
    log = timer_log.Log.open(RealDisk(), data / "log", segment_size=1 << 20)
    log.append(story.frames)
    log.close()
    return max((data / "log").glob("*.log"))


def told(history: Path) -> list[dict[str, Any]]:
    """Return the lines of a history, except those written before a request is sent."""
    return [line for line in read(history) if line.get("outcome") != OpOutcome.ASKED]
