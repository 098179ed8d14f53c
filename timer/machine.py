"""The deterministic machine: applies committed entries, in order.

The same entries give the same state on every replica, so nothing local may decide an outcome: no
clock, no file layout, no wheel. What the leader decided stands in the entry; what acts later goes
by state at the entry's index and by the entry's time.

    SCHEDULE --> store (pending) --FIRE--> queue of the topic --> groups --> gone
                     |  CANCEL
                     v
                  cancelled

Conservation (P7): scheduled = pending + fired + cancelled + dropped, checked at each CHECKPOINT.
"""

import hashlib
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from timer import payloads
from timer.columns import I64, TOMBSTONE, U64, Buffers, RowArray, decode_schedule
from timer.entry import Entry, Kind
from timer.errors import TimerError, UnknownVersion
from timer.groups import Group
from timer.outcomes import HORIZON_MS, Cancels
from timer.payloads import CreateGroup, GroupOp, Op, Start
from timer.producers import Answer, Producers
from timer.queues import Queue
from timer.store import Store
from timer.timer_id import mix
from timer.units import (
    Epoch,
    GroupId,
    LogIndex,
    ProducerId,
    QueueOffset,
    ReplicaId,
    Seq,
    TopicId,
    UnixMs,
)

RETENTION_MS: Final = 7 * 24 * 3_600_000
"""How long a topic without groups keeps what has fired."""
FIRE_MARK_MS: Final = 10_000
APPLY_VERSION: Final = 1
"""How entries are applied; a replica that does not know an epoch's version stops."""

_MASK: Final = (1 << 64) - 1

CANCELLED: Final = 1
ALREADY_CANCELLED: Final = 2
ALREADY_FIRED: Final = 3
NOT_FOUND: Final = 4


@dataclass(slots=True)
class Counts:
    """Where timers went. P7: scheduled = pending + fired + cancelled + dropped."""

    scheduled: int = 0
    fired: int = 0
    cancelled: int = 0
    dropped: int = 0

    @property
    def pending(self) -> int:
        """Timers that neither fired nor were cancelled nor dropped."""
        return self.scheduled - self.fired - self.cancelled - self.dropped


@dataclass(slots=True)
class Topic:
    """One incarnation of a topic."""

    topic_id: TopicId
    name: str
    queue: Queue = field(default_factory=Queue)
    groups: dict[str, Group] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    pending_sum: int = 0
    """Sum of hashes of (due, seq, payload size) of the pending rows, modulo 2 ** 64."""

    def trim(self) -> None:
        """Let go of what every group has acked. Without groups retention decides."""
        if self.groups:
            self.queue.drop_below(min(group.cursor for group in self.groups.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a replica records at a CHECKPOINT entry; the same on all, digest included (P6)."""

    epoch: Epoch
    index: LogIndex
    time_ms: UnixMs
    last_read_time_ms: UnixMs
    queue_offsets: dict[str, int]
    """Topic -> offset after its last fired message."""
    digest: str


@dataclass(frozen=True, slots=True)
class ScheduleApplied:
    """Per part of the entry: its answer and whether it is a repeated one, or why it was refused."""

    parts: tuple[tuple[Answer, bool] | TimerError, ...]
    ready: tuple[TopicId, ...]
    """Topics whose queues grew, by rows that were due already."""


@dataclass(frozen=True, slots=True)
class CancelApplied:
    """Per target: CANCELLED, ALREADY_CANCELLED, ALREADY_FIRED or NOT_FOUND, (n, uint8)."""

    results: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FireApplied:
    """What one FIRE moved, per topic in the order of topic ids."""

    fired: tuple[tuple[TopicId, RowArray], ...]
    limited: bool
    """More rows are due; another FIRE must follow."""


@dataclass(frozen=True, slots=True)
class AcksApplied:
    """An ACK op: which of its offsets were newly acked, (n, bool)."""

    op: GroupOp
    new: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GroupApplied:
    """Per op: the created or existing group, the acks, or the op as it was applied."""

    results: tuple[Group | AcksApplied | GroupOp, ...]


Applied: TypeAlias = (
    ScheduleApplied
    | CancelApplied
    | FireApplied
    | GroupApplied
    | payloads.EpochStart
    | Topic
    | ProducerId
    | Checkpoint
)


class Machine:
    """State of one replica at `applied_index`. Only `apply` changes it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.applied_index = LogIndex(0)
        self.applied_epoch = Epoch(0)
        self.applied_time_ms = UnixMs(0)
        self.voters: tuple[ReplicaId, ...] = ()
        """Of the last EPOCH entry applied. Empty: none was."""
        self.last_read_time_ms = UnixMs(0)
        self.next_seq = Seq(1)
        self.next_topic_id = TopicId(1)
        self.next_group_id = GroupId(1)
        self.counts = Counts()
        self.topics: dict[TopicId, Topic] = {}
        self.topic_by_name: dict[str, Topic] = {}
        self.producers = Producers()
        self.cancels = Cancels()
        self.fire_marks: deque[tuple[UnixMs, UnixMs]] = deque()
        """(log time, last_read_time_ms then), one each FIRE_MARK_MS, back to the horizon."""
        self.checkpoint: Checkpoint | None = None
        """The last one recorded."""

    def apply(self, entry: Entry) -> Applied:
        """Apply the entry after `applied_index`; return what its proposer is answered."""
        assert entry.index == self.applied_index + 1, (entry.index, self.applied_index)
        assert entry.time_ms >= self.applied_time_ms, (entry.time_ms, self.applied_time_ms)
        assert entry.epoch >= self.applied_epoch, (entry.epoch, self.applied_epoch)
        self.applied_index = entry.index
        self.applied_epoch = entry.epoch
        self.applied_time_ms = entry.time_ms
        match entry.kind:
            case Kind.SCHEDULE:
                return self._schedule(entry)
            case Kind.FIRE:
                return self._fire(entry)
            case Kind.GROUP:
                return self._group(entry)
            case Kind.CANCEL:
                return self._cancel(entry)
            case Kind.TOPIC:
                return self._topic(entry)
            case Kind.PRODUCER:
                token = payloads.decode_producer(entry.payload)
                return self.producers.register(token, entry.time_ms)
            case Kind.CHECKPOINT:
                return self._checkpoint()
            case Kind.EPOCH:
                return self._epoch(entry)

    # ---- timers

    def _schedule(self, entry: Entry) -> ScheduleApplied:
        schedule = decode_schedule(entry.payload)
        rows = schedule.rows
        results: list[tuple[Answer, bool] | TimerError] = []
        start, repeats = 0, []
        for producer_id, sequence, size, _ in schedule.parts.tolist():
            stop = start + size
            result = self._part(ProducerId(producer_id), sequence, rows[start:stop])
            if isinstance(result, TimerError) or result[1]:
                repeats.append(slice(start, stop))
            results.append(result)
            start = stop
        if repeats:
            keep = np.ones(len(rows), np.bool_)
            for part in repeats:
                keep[part] = False
            rows = rows[keep]
        ready = self._admit(rows, entry) if len(rows) else ()
        return ScheduleApplied(tuple(results), ready)

    def _part(
        self, producer_id: ProducerId, sequence: int, rows: RowArray
    ) -> tuple[Answer, bool] | TimerError:
        """Number the rows of one request, unless it is a repeated or a refused one."""
        if producer_id:
            try:
                answer = self.producers.repeated(producer_id, sequence)
            except TimerError as refused:
                return refused
            if answer is not None:
                return answer, True
        answer = Answer(sequence, self.next_seq, rows["due_ms"].copy())
        rows["seq"] = np.arange(self.next_seq, self.next_seq + len(rows), dtype=np.uint64)
        self.next_seq = Seq(self.next_seq + len(rows))
        if producer_id:
            self.producers.accept(producer_id, answer, self.applied_time_ms)
        return answer, False

    def _admit(self, rows: RowArray, entry: Entry) -> tuple[TopicId, ...]:
        """Put rows with seqs into the store, or into their queues if they are due already."""
        self.counts.scheduled += len(rows)
        for topic, mine in self._by_topic(rows):
            topic.counts.scheduled += len(mine)
        due = rows["due_ms"] <= self.last_read_time_ms
        if not due.any():
            self._insert(rows, entry)
            return ()
        if not due.all():
            self._insert(rows[~due], entry)
        return tuple(
            topic.topic_id
            for topic, _ in self._enqueue(rows[due], {0: entry.payload}, entry.time_ms)
        )

    def _insert(self, rows: RowArray, entry: Entry) -> None:
        for topic, mine in self._by_topic(rows):
            topic.pending_sum = (topic.pending_sum + _row_sum(mine)) & _MASK
        self.store.insert(rows, entry.payload)

    def _enqueue(
        self, rows: RowArray, bufs: Buffers, fired_at_ms: UnixMs
    ) -> list[tuple[Topic, RowArray]]:
        """Move rows (in firing order) to the ends of their topics' queues; count them as fired."""
        moved = self._by_topic(rows)
        for topic, mine in moved:
            topic.queue.append(mine, bufs, fired_at_ms)
            topic.counts.fired += len(mine)
        self.counts.fired += len(rows)
        return moved

    def _fire(self, entry: Entry) -> FireApplied:
        fire = payloads.decode_fire(entry.payload)
        assert fire.read_time_ms >= self.last_read_time_ms, (fire, self.last_read_time_ms)
        fired = self.store.fire(fire.read_time_ms, fire.rows_max, fire.bytes_max)
        if fired.limited:
            self.last_read_time_ms = UnixMs(int(fired.rows["due_ms"][-1]))
        else:
            self.last_read_time_ms = fire.read_time_ms
        if not self.fire_marks or entry.time_ms - self.fire_marks[-1][0] >= FIRE_MARK_MS:
            self.fire_marks.append((entry.time_ms, self.last_read_time_ms))
        if not len(fired.rows):
            return FireApplied((), fired.limited)
        for topic, mine in self._by_topic(fired.rows):
            topic.pending_sum = (topic.pending_sum - _row_sum(mine)) & _MASK
        moved = self._enqueue(fired.rows, fired.bufs, entry.time_ms)
        return FireApplied(tuple((topic.topic_id, rows) for topic, rows in moved), fired.limited)

    def _cancel(self, entry: Entry) -> CancelApplied:
        due_ms, seq = payloads.decode_cancel(entry.payload)
        hit, removed = self.store.cancel(due_ms, seq)
        for topic, mine in self._by_topic(removed):
            topic.pending_sum = (topic.pending_sum - _row_sum(mine)) & _MASK
            topic.counts.cancelled += len(mine)
        self.counts.cancelled += len(removed)
        self.cancels.add(due_ms[hit], seq[hit])
        results = np.full(len(seq), NOT_FOUND, np.uint8)
        results[self._ended_by_fire(due_ms, seq)] = ALREADY_FIRED
        results[self.cancels.contain(due_ms, seq)] = ALREADY_CANCELLED
        results[hit] = CANCELLED
        return CancelApplied(results)

    def _ended_by_fire(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which genuine ids, if not cancelled, fired within the horizon (n, bool)."""
        recent = (due_ms <= self.last_read_time_ms) & (due_ms > self._forgotten_ms())
        return recent & (seq < self.next_seq) & (seq > 0)

    def _forgotten_ms(self) -> UnixMs:
        """Return the read time of the horizon: what fired up to there may be NOT_FOUND now."""
        forgotten = UnixMs(-1)
        for time_ms, read_time_ms in self.fire_marks:
            if time_ms > self.applied_time_ms - HORIZON_MS:
                break
            forgotten = read_time_ms
        return forgotten

    def _by_topic(self, rows: RowArray) -> list[tuple[Topic, RowArray]]:
        """Split rows by topic, each part in the order of `rows`."""
        if not len(rows):
            return []
        topic = rows["topic"]
        if (topic == topic[0]).all():
            return [(self.topics[TopicId(int(topic[0]))], rows)]
        order = np.argsort(topic, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(topic[order])) + 1)
        return [(self.topics[TopicId(int(topic[part[0]]))], rows[part]) for part in parts]

    # ---- topics and groups

    def _topic(self, entry: Entry) -> Topic:
        name = payloads.decode_topic(entry.payload)
        topic = self.topic_by_name.get(name)
        if topic is None:
            topic = Topic(self.next_topic_id, name)
            assert topic.topic_id < TOMBSTONE
            self.next_topic_id = TopicId(topic.topic_id + 1)
            self.restore_topic(topic)
        return topic

    def restore_topic(self, topic: Topic) -> None:
        """Put back a topic that a manifest holds."""
        self.topics[topic.topic_id] = topic
        self.topic_by_name[topic.name] = topic

    def _group(self, entry: Entry) -> GroupApplied:
        results: list[Group | AcksApplied | GroupOp] = []
        for op in tuple(payloads.decode_group(entry.payload)):  # malformed: nothing is applied
            if isinstance(op, CreateGroup):
                results.append(self._create_group(op))
                continue
            group = self.group(op.topic, op.group)
            match op.op:
                case Op.ACK:
                    results.append(AcksApplied(op, group.ack(op.offsets)))
                    self.topics[op.topic].trim()
                    continue
                case Op.ENDED:
                    group.end_leases(op.offsets)
                case Op.RESERVE:
                    group.reserve(QueueOffset(int(op.offsets[0])))
                case Op.CREATE:
                    raise AssertionError(op)
            results.append(op)
        return GroupApplied(tuple(results))

    def group(self, topic_id: TopicId, group_id: GroupId) -> Group:
        """Return a group by its id."""
        groups = self.topics[topic_id].groups.values()
        return next(group for group in groups if group.group_id == group_id)

    def _create_group(self, create: CreateGroup) -> Group:
        topic = self.topics[create.topic]
        if create.name not in topic.groups:
            queue = topic.queue
            cursor = queue.begin if create.start is Start.EARLIEST else queue.end
            topic.groups[create.name] = Group(
                group_id=self.next_group_id,
                topic=create.topic,
                name=create.name,
                lease_ms=create.lease_ms,
                cursor=cursor,
                reserved=cursor,
                base=cursor,
            )
            self.next_group_id = GroupId(self.next_group_id + 1)
        return topic.groups[create.name]

    # ---- epochs and checkpoints

    def _epoch(self, entry: Entry) -> payloads.EpochStart:
        start = payloads.decode_epoch(entry.payload)
        if start.apply_version != APPLY_VERSION:
            raise UnknownVersion(f"entry {entry.index}", start.apply_version, APPLY_VERSION)
        for topic in self.topics.values():
            for group in topic.groups.values():
                group.begin_epoch(topic.queue.end)
        self.voters = start.voters
        return start

    def _checkpoint(self) -> Checkpoint:
        now_ms = self.applied_time_ms
        self.producers.expire(now_ms)
        # The newest mark that lies before the horizon stays: it says what is forgotten.
        while len(self.fire_marks) > 1 and self.fire_marks[1][0] <= now_ms - HORIZON_MS:
            self.fire_marks.popleft()
        self.cancels.forget(self._forgotten_ms())
        for topic in self.topics.values():
            if not topic.groups:
                topic.queue.expire(UnixMs(now_ms - RETENTION_MS))
        assert self.counts.pending == self.store.pending, (self.counts, self.store.pending)
        self.checkpoint = Checkpoint(
            epoch=self.applied_epoch,
            index=self.applied_index,
            time_ms=now_ms,
            last_read_time_ms=self.last_read_time_ms,
            queue_offsets={topic.name: int(topic.queue.end) for topic in self.topics.values()},
            digest=self.digest(),
        )
        return self.checkpoint

    def digest(self) -> str:
        """Return a hash of the state, 16 hex digits, that does not depend on how it lies in files.

        It visits topics, groups and producers, never rows.
        """
        digest = hashlib.blake2b(digest_size=8)

        def put(*numbers: int) -> None:
            digest.update(struct.pack(f"<{len(numbers)}Q", *(n & _MASK for n in numbers)))

        counts = self.counts
        put(self.applied_index, self.last_read_time_ms, self.next_seq, self.next_topic_id)
        put(self.next_group_id, counts.scheduled, counts.fired, counts.cancelled, counts.dropped)
        for topic_id, topic in sorted(self.topics.items()):
            queue, counts = topic.queue, topic.counts
            put(topic_id, topic.pending_sum, queue.begin, queue.end, queue.chain)
            put(counts.scheduled, counts.fired, counts.cancelled, counts.dropped)
            digest.update(topic.name.encode())
            for group in topic.groups.values():
                put(group.group_id, group.cursor, group.reserved, group.ack_sum, group.ended_sum)
                put(group.acked_count, group.lease_ms, len(group.marks), *group.marks)
        put(self.cancels.sum, len(self.fire_marks), *self.voters)
        put(self.producers.next_id)
        for producer_id, producer in self.producers:
            put(producer_id, producer.last_sequence, len(producer.answers), producer.used_at_ms)
        return digest.hexdigest()


def _row_sum(rows: RowArray) -> int:
    """Return the order-free sum of hashes of (due, seq, payload size), modulo 2 ** 64."""
    hashes = mix(mix(rows["due_ms"].astype(np.uint64)) ^ rows["seq"])
    return int(np.add.reduce(mix(hashes ^ rows["payload_size"]), dtype=np.uint64))
