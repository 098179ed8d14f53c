"""What tests of the machine share: a log in memory, and a naive model of the machine."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chaos.simdisk import SimDisk
from timer import payloads
from timer.columns import Binary, Part, encode_schedule, gather
from timer.engine import Engine
from timer.entry import Entry, Kind, encode, frame_at
from timer.errors import TimerError
from timer.leader import LeaderConfig
from timer.machine import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    NOT_FOUND,
    AcksApplied,
    Applied,
    CancelApplied,
    FireApplied,
    GroupApplied,
    Machine,
    ScheduleApplied,
    Topic,
)
from timer.outcomes import HORIZON_MS
from timer.payloads import CreateGroup, EpochStart, Fire, GroupOp, Op, Start
from timer.store import Store
from timer.units import Epoch, GroupId, LogIndex, ProducerId, ReplicaId, TopicId, UnixMs

START_MS = 1_700_000_000_000
STATE = Path("/state")
Timer = tuple[int, int, bytes]
"""Topic id, due, payload."""


def u64(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([*values], np.uint64)


def part_of(
    timers: Sequence[Timer], producer_id: int = 0, sequence: int = 0, *, keys: bool = False
) -> Part:
    due = np.array([due for _, due, _ in timers], np.int64)
    return Part(
        producer_id=ProducerId(producer_id),
        sequence=sequence,
        due_ms=due,
        requested_ms=due - 1,
        topic=np.array([topic for topic, _, _ in timers], np.uint32),
        payload=Binary.of([payload for _, _, payload in timers]),
        key=Binary.of([b"k" + payload for _, _, payload in timers]) if keys else None,
    )


@dataclass
class Log:
    """Entries as a log holds them: framed, parsed, numbered, times never going back."""

    now_ms: int = START_MS
    epoch: int = 1
    entries: list[Entry] = field(default_factory=list)

    def append(self, kind: Kind, payload: list[bytes]) -> Entry:
        index = LogIndex(len(self.entries) + 1)
        frame = encode(kind, Epoch(self.epoch), index, UnixMs(self.now_ms), payload)
        entry = frame_at(memoryview(frame), 0)
        assert isinstance(entry, Entry)
        self.entries.append(entry)
        return entry

    def schedule(self, *parts: Part) -> Entry:
        return self.append(Kind.SCHEDULE, encode_schedule(parts))

    def cancel(self, timers: Sequence[tuple[int, int]]) -> Entry:
        due = np.array([due for due, _ in timers], np.int64)
        return self.append(Kind.CANCEL, payloads.encode_cancel(due, u64(s for _, s in timers)))

    def fire(self, read_time_ms: int, rows_max: int = 65_536, bytes_max: int = 1 << 24) -> Entry:
        fire = Fire(UnixMs(read_time_ms), rows_max, bytes_max)
        return self.append(Kind.FIRE, [payloads.encode_fire(fire)])

    def group(self, *ops: CreateGroup | GroupOp) -> Entry:
        return self.append(Kind.GROUP, payloads.encode_group(ops))

    def create_group(self, topic: int, name: str, start: Start = Start.EARLIEST) -> Entry:
        return self.group(CreateGroup(TopicId(topic), name, start, 1000))

    def op(self, op: Op, topic: int, group: int, offsets: Iterable[int]) -> Entry:
        return self.group(GroupOp(op, TopicId(topic), GroupId(group), u64(offsets)))

    def topic(self, name: str) -> Entry:
        return self.append(Kind.TOPIC, [payloads.encode_topic(name)])

    def producer(self, token: bytes) -> Entry:
        return self.append(Kind.PRODUCER, [payloads.encode_producer(token)])

    def checkpoint(self) -> Entry:
        return self.append(Kind.CHECKPOINT, [])

    def begin_epoch(self) -> Entry:
        self.epoch += 1
        voters = (ReplicaId(1), ReplicaId(2), ReplicaId(3))
        start = EpochStart(Epoch(self.epoch), ReplicaId(1), voters)
        return self.append(Kind.EPOCH, [payloads.encode_epoch(start)])


def machine_on(disk: SimDisk, *, leads: bool) -> Machine:
    store = Store(disk, STATE)
    if leads:
        store.lead()
    return Machine(store)


def engine_on(disk: SimDisk) -> Engine:
    return Engine(disk, STATE, LeaderConfig())


def catch_up(engine: Engine, log: Log) -> None:
    """Apply what the log holds beyond what the engine has applied."""
    engine.committed(LogIndex(len(log.entries)))
    while engine.behind:
        first, last = engine.next_chunk()
        engine.fold(log.entries[first - 1 : last])


# ---- what is compared


def answer_of(applied: Applied) -> Any:
    """Return what was applied as plain values, such as `==` compares."""
    match applied:
        case ScheduleApplied(parts, ready):
            return [
                type(part)
                if isinstance(part, TimerError)
                else (part[0].sequence, part[0].first_seq, part[0].due_ms.tolist(), part[1])
                for part in parts
            ], sorted(ready)
        case CancelApplied(results):
            return results.tolist()
        case FireApplied(fired, limited):
            return [(topic, rows["seq"].tolist()) for topic, rows in fired], limited
        case GroupApplied(results):
            return [
                each.new.tolist() if isinstance(each, AcksApplied) else type(each).__name__
                for each in results
            ]
        case Topic():
            return applied.topic_id
        case _:
            return applied


Message = tuple[int, int, bytes]
"""Queue offset, seq, payload."""


def queue_of(machine: Machine, topic_id: int) -> list[Message]:
    """Return what the topic's queue holds."""
    queue = machine.topics[TopicId(topic_id)].queue
    found: list[Message] = []
    for block, places in queue.slices(np.arange(queue.begin, queue.end, dtype=np.uint64)):
        rows = block.rows[places]
        column = gather(rows, block.bufs, "payload")
        ends = np.cumsum(column.sizes).tolist()
        starts = [0, *ends[:-1]]
        blob = bytes(column.blob)
        for place, row, start, end in zip(places.tolist(), rows, starts, ends, strict=True):
            found.append((int(block.first) + place, int(row["seq"]), blob[start:end]))
    return found


def state_of(machine: Machine) -> dict[str, Any]:
    """Return all of the state that any answer can depend on, as plain values."""
    return {
        "digest": machine.digest(),
        "applied": (machine.applied_index, machine.applied_epoch, machine.applied_time_ms),
        "counts": astuple(machine.counts),
        "pending": machine.store.pending,
        "position": tuple(machine.store.position),
        "voters": machine.voters,
        "queues": {topic: queue_of(machine, topic) for topic in machine.topics},
        "groups": [
            (
                group.group_id,
                group.name,
                group.cursor,
                group.reserved,
                group.marks,
                group.is_acked(u64(range(200))).tolist(),
                [a for o, a in enumerate(group.attempts(u64(range(200)))) if o >= group.cursor],
            )
            for topic in machine.topics.values()
            for group in topic.groups.values()
        ],
        "producers": [
            (
                producer_id,
                producer.token,
                producer.used_at_ms,
                producer.last_sequence,
                producer.answer_rows,
                [(a.sequence, a.first_seq, a.due_ms.tolist()) for a in producer.answers],
            )
            for producer_id, producer in machine.producers
        ],
        "cancels": {
            minute: sorted(np.concatenate(arrays).tolist())
            for minute, arrays in machine.cancels.buckets.items()
        },
        "fire marks": list(machine.fire_marks),
        "checkpoint": machine.checkpoint,
    }


# ---- the model


@dataclass
class Model:
    """The promises, one timer at a time: no columns, files or cleverness."""

    last_read_ms: int = 0
    next_seq: int = 1
    timers: dict[int, Timer] = field(default_factory=dict)
    """Of every seq ever issued."""
    weights: dict[int, int] = field(default_factory=dict)
    """Seq -> bytes of payload and key."""
    pending: set[int] = field(default_factory=set)
    queues: dict[int, list[int]] = field(default_factory=dict)
    """Topic -> seqs in the order of their offsets."""
    cancelled_at: dict[int, int] = field(default_factory=dict)
    fired_at: dict[int, int] = field(default_factory=dict)
    answers: dict[int, list[tuple[int, int, list[int]]]] = field(default_factory=dict)
    """Producer -> (sequence, first seq, dues) of all its requests."""

    def schedule(
        self, parts: Sequence[Part], now_ms: int
    ) -> list[tuple[int, int, list[int], bool] | None]:
        """Return per part its answer, None where it is refused."""
        results: list[tuple[int, int, list[int], bool] | None] = []
        for part in parts:
            known = self.answers.get(part.producer_id)
            if part.producer_id and known is None:
                results.append(None)
                continue
            if known is not None and 1 <= part.sequence <= len(known):
                results.append((*known[part.sequence - 1], True))
                continue
            if known is not None and part.sequence != len(known) + 1:
                results.append(None)
                continue
            answer = (part.sequence, self.next_seq, part.due_ms.tolist())
            if known is not None:
                known.append(answer)
            results.append((*answer, False))
            self._take(part, now_ms)
        return results

    def _take(self, part: Part, now_ms: int) -> None:
        ends = np.cumsum(part.payload.sizes).tolist()
        starts = [0, *ends[:-1]]
        sizes = part.payload.sizes + (0 if part.key is None else part.key.sizes)
        self.weights.update(enumerate(sizes.tolist(), start=self.next_seq))
        for topic, due, start, end in zip(part.topic, part.due_ms, starts, ends, strict=True):
            seq = self.next_seq
            self.next_seq += 1
            self.timers[seq] = (int(topic), int(due), bytes(part.payload.blob[start:end]))
            if due <= self.last_read_ms:
                self._fire(seq, now_ms)
            else:
                self.pending.add(seq)

    def _fire(self, seq: int, now_ms: int) -> None:
        self.pending.discard(seq)
        assert seq not in self.fired_at
        self.fired_at[seq] = now_ms
        self.queues.setdefault(self.timers[seq][0], []).append(seq)

    def fire(self, fire: Fire, now_ms: int) -> tuple[list[int], bool]:
        """Return the seqs that fire, in order, and whether the limit was reached."""
        due = sorted(
            (self.timers[s][1], s) for s in self.pending if self.timers[s][1] <= fire.read_time_ms
        )
        fired: list[int] = []
        size = 0
        for _, seq in due:
            weight = self.weights[seq]
            if len(fired) == fire.rows_max or (fired and size + weight > fire.bytes_max):
                break
            fired.append(seq)
            size += weight
        limited = len(fired) < len(due)
        self.last_read_ms = self.timers[fired[-1]][1] if limited else fire.read_time_ms
        for seq in fired:
            self._fire(seq, now_ms)
        return fired, limited

    def cancel(self, targets: Sequence[tuple[int, int]], now_ms: int) -> list[set[int]]:
        """Return per target the answers that are true."""
        results: list[set[int]] = []
        for due, seq in targets:
            if seq in self.pending and self.timers[seq][1] == due:
                self.pending.discard(seq)
                self.cancelled_at[seq] = now_ms
                results.append({CANCELLED})
            elif seq in self.cancelled_at:
                results.append(_within_horizon(ALREADY_CANCELLED, now_ms - self.cancelled_at[seq]))
            elif seq in self.fired_at:
                results.append(_within_horizon(ALREADY_FIRED, now_ms - self.fired_at[seq]))
            else:
                results.append({NOT_FOUND})
        return results


def _within_horizon(result: int, age_ms: int) -> set[int]:
    return {result} if age_ms <= HORIZON_MS else {result, NOT_FOUND}
