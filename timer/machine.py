"""The deterministic machine: applies committed entries, in order.

The same entries give the same state on every replica, so nothing local may decide an outcome: no
clock, no file layout, no wheel. What the leader decided stands in the entry; what acts later goes
by state at the entry's index and by the entry's time.

    SCHEDULE --> store (pending) --FIRE--> queue of the topic --> groups --> gone
                  ^  |  CANCEL, a key that is replaced
       RESCHEDULE |  v
                  cancelled

Conservation (P7): scheduled = pending + fired + cancelled + dropped, checked at each CHECKPOINT.
"""

import hashlib
import struct
from collections import deque
from dataclasses import astuple, dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from timer import payloads
from timer.columns import (
    I64,
    TOMBSTONE,
    U32,
    U64,
    Buffers,
    RequestId,
    RowArray,
    decode_schedule,
    gather,
)
from timer.conflicts import NEW_MAX, decide
from timer.entry import Entry, Kind
from timer.errors import TimerError, UnknownVersion
from timer.groups import Group
from timer.keys import hash_keys
from timer.outcomes import HORIZON_MS, Cancels
from timer.pages import Pages
from timer.payloads import (
    MOVED_GROUP,
    AlterGroup,
    CreateGroup,
    GroupOp,
    Ids,
    Move,
    Nack,
    Op,
    Start,
    Targets,
)
from timer.policies import Policies, decode_policy
from timer.producers import IDLE_MS_MAX, Answer, Producers
from timer.queues import Queue
from timer.requests import Requests
from timer.store import Store
from timer.timer_id import mix
from timer.trace import Trace
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
RESCHEDULE_BYTES_MAX: Final = 4 << 20
"""Payloads that one RESCHEDULE moves; what is beyond is LEFT."""

_MASK: Final = (1 << 64) - 1

CANCELLED: Final = 1
ALREADY_CANCELLED: Final = 2
ALREADY_FIRED: Final = 3
NOT_FOUND: Final = 4
RESCHEDULED: Final = CANCELLED
LEFT: Final = 5
"""Of a reschedule: still pending as it was; ask again."""


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
    group_by_id: dict[GroupId, Group] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    pending_sum: int = 0
    """Sum of hashes of (due, seq, payload size) of the pending rows, modulo 2 ** 64."""
    deleted_in: Epoch = Epoch(0)
    """When a group was deleted last."""

    def add(self, group: Group) -> None:
        """Let it have one more group."""
        self.groups[group.name] = self.group_by_id[group.group_id] = group

    def remove(self, group: Group) -> None:
        """Let it have one group less."""
        del self.groups[group.name], self.group_by_id[group.group_id]
        group.deleted = True

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
    keyed: int = 0
    """Rows that have a key: each was looked for."""


@dataclass(frozen=True, slots=True)
class CancelApplied:
    """Per target: CANCELLED, ALREADY_CANCELLED, ALREADY_FIRED or NOT_FOUND, (n, uint8)."""

    results: npt.NDArray[np.uint8]
    targets: Ids
    """Which timers that were; of a key that nobody has, seq = 0."""


@dataclass(frozen=True, slots=True)
class RescheduleApplied:
    """Per target: RESCHEDULED, LEFT, or why not, as of a cancel, (n, uint8)."""

    results: npt.NDArray[np.uint8]
    targets: Ids
    """Which timers that were; of a key that nobody has, seq = 0."""
    timers: Ids
    """The new timers; valid where RESCHEDULED."""
    ready: tuple[TopicId, ...]
    """Topics whose queues grew, by rows that were due already."""


@dataclass(frozen=True, slots=True)
class FireApplied:
    """What one FIRE moved, per topic in the order of topic ids."""

    fired: tuple[tuple[TopicId, RowArray], ...]
    limited: bool
    """More rows are due; another FIRE must follow."""


@dataclass(frozen=True, slots=True)
class AcksApplied:
    """An ACK or NACK op: which of its offsets were unacked until then, (n, bool)."""

    op: GroupOp
    new: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MoveApplied:
    """A MOVE op: which of its offsets were unacked until then (n, bool), and where they went."""

    op: Move
    new: npt.NDArray[np.bool_]
    to: TopicId
    first_seq: Seq
    """As many as offsets: a message that did not move leaves its seq unused."""
    made: Group | None
    """The group that the topic was given."""


@dataclass(frozen=True, slots=True)
class SeekApplied:
    """A SEEK op, with the id that the group had before; the group is where it was asked to."""

    op: GroupOp
    group: Group


@dataclass(frozen=True, slots=True)
class DeleteApplied:
    """A DELETE op, and the group that is no more."""

    op: GroupOp
    group: Group


@dataclass(frozen=True, slots=True)
class NobodyApplied:
    """An op of a group that was deleted or sought before: nothing was done."""

    op: GroupOp | AlterGroup


GroupResult: TypeAlias = (
    Group | AcksApplied | MoveApplied | SeekApplied | DeleteApplied | NobodyApplied | GroupOp
)


@dataclass(frozen=True, slots=True)
class GroupApplied:
    """Per op: the group created, found or altered, what it changed, or the op as it was applied."""

    results: tuple[GroupResult, ...]


Applied: TypeAlias = (
    ScheduleApplied
    | CancelApplied
    | RescheduleApplied
    | FireApplied
    | GroupApplied
    | payloads.EpochStart
    | Policies
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
        self.pages = Pages()
        self.topics: dict[TopicId, Topic] = {}
        self.topic_by_name: dict[str, Topic] = {}
        self.policies = Policies()
        self.producers = Producers()
        self.requests = Requests()
        self.trace = Trace()
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
            case Kind.RESCHEDULE:
                return self._reschedule(entry)
            case Kind.TOPIC | Kind.PRODUCER | Kind.POLICY:
                return self._settings(entry)
            case Kind.CHECKPOINT:
                return self._checkpoint(entry)
            case Kind.EPOCH:
                return self._epoch(entry)

    # ---- timers

    def _schedule(self, entry: Entry) -> ScheduleApplied:
        schedule = decode_schedule(entry.payload)
        rows = schedule.rows
        modes = np.repeat(schedule.parts["on_conflict"], schedule.parts["rows"])
        results: list[tuple[Answer, bool] | TimerError] = []
        fresh: list[Answer] = []
        keep = np.zeros(len(rows), np.bool_)
        start, first_seq = 0, self.next_seq
        for head, request in zip(schedule.parts.tolist(), schedule.requests, strict=True):
            producer_id, sequence, size, _ = head
            stop = start + size
            result = self._part(ProducerId(producer_id), sequence, request, rows[start:stop])
            if not isinstance(result, TimerError) and not result[1]:
                fresh.append(result[0])
                keep[start:stop] = True
            results.append(result)
            start = stop
        if not keep.all():
            rows, modes = rows[keep], modes[keep]
            refused = [isinstance(each, TimerError) or each[1] for each in results]
            self.trace.mark(entry.index, first_seq, np.packbits(refused).tobytes())
        ready: tuple[TopicId, ...] = ()
        keyed = int(np.count_nonzero(rows["key_size"]))
        if keyed:
            rows = self._decide(rows, modes, entry.payload, fresh)
        if len(rows):
            ready = self._admit(rows, entry.payload)
        return ScheduleApplied(tuple(results), ready, keyed)

    def _part(
        self, producer_id: ProducerId, sequence: int, request: RequestId | None, rows: RowArray
    ) -> tuple[Answer, bool] | TimerError:
        """Number the rows of one request, unless it is a repeated or a refused one."""
        answer = None
        try:
            if producer_id:
                answer = self.producers.repeated(producer_id, sequence)
            elif request is not None:
                answer = self.requests.repeated(request, self.applied_time_ms)
        except TimerError as refused:
            return refused
        if answer is not None:
            return answer, True
        answer = Answer(sequence, self.next_seq, rows["due_ms"].copy())
        rows["seq"] = np.arange(self.next_seq, self.next_seq + len(rows), dtype=np.uint64)
        self.next_seq = Seq(self.next_seq + len(rows))
        if producer_id:
            self.producers.accept(producer_id, answer, self.applied_time_ms)
        elif request is not None:
            self.requests.accept(request, answer, self.applied_time_ms)
        return answer, False

    def _decide(
        self, rows: RowArray, modes: U32, payload: memoryview, answers: list[Answer]
    ) -> RowArray:
        """Keep keys unique; complete the answers; return the rows that become timers, and stay."""
        keyed = rows[rows["key_size"] > 0]
        keys, topic = gather(keyed, {0: payload}, "key"), keyed["topic"].astype(np.uint32)
        hashes = hash_keys(topic, keys)
        held = self.store.find_keys(topic, keys, hashes)
        decision = decide(rows, modes, keys, hashes, held, self.last_read_time_ms)
        start = 0
        for answer in answers:
            stop = start + len(answer.due_ms)
            answer.verdicts = decision.verdicts.part(start, stop)
            start = stop
        if len(decision.ended):
            self.store.end(decision.ended)
            self._ended(decision.ended)
        if decision.undone.any():
            self._count_scheduled(rows[decision.undone])
            self._ended(rows[decision.undone], were_pending=False)
        stay = (decision.verdicts.verdict <= NEW_MAX) & ~decision.undone
        return rows if stay.all() else rows[stay]

    def _ended(self, rows: RowArray, *, were_pending: bool = True) -> None:
        """Count timers as cancelled, and remember them."""
        for topic, mine in self._by_topic(rows):
            topic.counts.cancelled += len(mine)
            if were_pending:
                topic.pending_sum = (topic.pending_sum - _row_sum(mine)) & _MASK
        self.counts.cancelled += len(rows)
        self.cancels.add(rows["due_ms"].astype(np.int64), rows["seq"].astype(np.uint64))

    def _count_scheduled(self, rows: RowArray) -> None:
        self.counts.scheduled += len(rows)
        for topic, mine in self._by_topic(rows):
            topic.counts.scheduled += len(mine)

    def _admit(self, rows: RowArray, payload: bytes | memoryview) -> tuple[TopicId, ...]:
        """Put rows with seqs into the store, or into their queues if they are due already."""
        self._count_scheduled(rows)
        due = rows["due_ms"] <= self.last_read_time_ms
        if not due.any():
            self._insert(rows, payload)
            return ()
        if not due.all():
            self._insert(rows[~due], payload)
        moved = self._enqueue(rows[due], {0: payload}, self.applied_time_ms)
        return tuple(topic.topic_id for topic, _ in moved)

    def _insert(self, rows: RowArray, payload: bytes | memoryview) -> None:
        for topic, mine in self._by_topic(rows):
            topic.pending_sum = (topic.pending_sum + _row_sum(mine)) & _MASK
        self.store.insert(rows, payload)

    def _enqueue(
        self, rows: RowArray, bufs: Buffers, fired_at_ms: UnixMs
    ) -> list[tuple[Topic, RowArray]]:
        """Move rows (in firing order) to the ends of their topics' queues; count them as fired."""
        moved = self._by_topic(rows)
        for topic, mine in moved:
            self.trace.fired(self.applied_index, topic.topic_id, topic.queue.end, mine)
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
        targets = self._ids(payloads.decode_cancel(entry.payload))
        hit, removed = self.store.cancel(targets.due_ms, targets.seq)
        self._ended(removed)
        results = np.full(len(targets), CANCELLED, np.uint8)
        if not hit.all():
            missed = Ids(targets.due_ms[~hit], targets.seq[~hit])
            results[~hit] = self.judge(missed)
        return CancelApplied(results, targets)

    def _reschedule(self, entry: Entry) -> RescheduleApplied:
        order = payloads.decode_reschedule(entry.payload)
        targets = self._ids(order.targets)
        n = len(targets)
        timers = Ids(order.due_ms, np.arange(self.next_seq, self.next_seq + n, dtype=np.uint64))
        whole, left = self.store.read(targets.due_ms, targets.seq, RESCHEDULE_BYTES_MAX)
        moved = whole.rows["seq"] > 0
        rows = whole.rows[moved]
        self.store.end(rows)
        self._ended(rows)
        results = self.judge(targets)
        results[left] = LEFT
        results[moved] = RESCHEDULED
        self.next_seq = Seq(self.next_seq + n)
        rows["due_ms"], rows["seq"] = timers.due_ms[moved], timers.seq[moved]
        rows["requested_ms"] = order.requested_ms[moved]
        ready = self._admit(rows, whole.blob) if len(rows) else ()
        return RescheduleApplied(results, targets, timers, ready)

    def _ids(self, targets: Targets) -> Ids:
        """Return which pending timers have the keys; seq = 0 for none, and for a repeated key."""
        if isinstance(targets, Ids):
            return targets
        rows = self.store.find_keys(targets.topic, targets.key)
        seq = rows["seq"].astype(np.uint64)
        first = np.zeros(len(seq), np.bool_)
        first[np.unique(seq, return_index=True)[1]] = True
        seq[~first] = 0
        return Ids(np.where(seq > 0, rows["due_ms"], 0), seq)

    def judge(self, targets: Ids) -> npt.NDArray[np.uint8]:
        """Return what became of timers that are not pending: (n, uint8), as of a cancel."""
        results = np.full(len(targets), NOT_FOUND, np.uint8)
        results[self._ended_by_fire(targets.due_ms, targets.seq)] = ALREADY_FIRED
        results[self.cancels.contain(targets.due_ms, targets.seq)] = ALREADY_CANCELLED
        return results

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

    # ---- topics, producers, policies, groups

    def _settings(self, entry: Entry) -> Topic | ProducerId | Policies:
        if entry.kind is Kind.TOPIC:
            return self._topic(entry)
        if entry.kind is Kind.PRODUCER:
            token = payloads.decode_producer(entry.payload)
            return self.producers.register(token, entry.time_ms)
        self.policies = self.policies.changed(*decode_policy(entry.payload))
        return self.policies

    def _topic(self, entry: Entry) -> Topic:
        return self._topic_of(payloads.decode_topic(entry.payload))

    def _topic_of(self, name: str) -> Topic:
        """Return the topic of this name, which is made if it isn't there."""
        topic = self.topic_by_name.get(name)
        if topic is None:
            topic = Topic(self.next_topic_id, name, Queue(pages=self.pages))
            assert topic.topic_id < TOMBSTONE
            self.next_topic_id = TopicId(topic.topic_id + 1)
            self.restore_topic(topic)
        return topic

    def restore_topic(self, topic: Topic) -> None:
        """Put back a topic that a manifest holds."""
        self.topics[topic.topic_id] = topic
        self.topic_by_name[topic.name] = topic

    def _group(self, entry: Entry) -> GroupApplied:
        ops = tuple(payloads.decode_group(entry.payload))  # malformed: nothing is applied
        return GroupApplied(tuple(map(self._group_op, ops)))

    def _group_op(self, op: payloads.AnyOp) -> GroupResult:
        if isinstance(op, CreateGroup):
            return self._create_group(op)
        group = self.topics[op.topic].group_by_id.get(op.group)
        if isinstance(op, Move):
            return self._move(op, group)
        if group is None:
            return NobodyApplied(op)
        if isinstance(op, AlterGroup):
            group.settings = op.of(group.settings)
            return group
        if isinstance(op, Nack):
            return AcksApplied(op, group.nack(op.offsets, op.not_before_ms))
        match op.op:
            case Op.ACK:
                new = group.ack(op.offsets)
                self.topics[op.topic].trim()
                return AcksApplied(op, new)
            case Op.ENDED:
                group.end_leases(op.offsets)
            case Op.RECALL:
                group.recall(op.offsets)
            case Op.RESERVE:
                group.reserve(QueueOffset(int(op.offsets[0])))
            case Op.SEEK:
                return self._seek(op, group)
            case Op.DELETE:
                return self._delete(op, group)
            case _:
                raise AssertionError(op)
        return op

    def _seek(self, op: GroupOp, group: Group) -> SeekApplied:
        """Let a group go on from an offset, or from the nearest one that is kept."""
        topic = self.topics[op.topic]
        queue = topic.queue
        offset = QueueOffset(min(max(int(op.offsets[0]), queue.begin), queue.end))
        del topic.group_by_id[group.group_id]
        group.restart(self.next_group_id, offset, queue.end, self.applied_epoch)
        topic.group_by_id[group.group_id] = group
        self.next_group_id = GroupId(self.next_group_id + 1)
        topic.trim()
        return SeekApplied(op, group)

    def _delete(self, op: GroupOp, group: Group) -> DeleteApplied:
        topic = self.topics[op.topic]
        topic.remove(group)
        topic.deleted_in = self.applied_epoch
        topic.trim()
        return DeleteApplied(op, group)

    def _move(self, op: Move, group: Group | None) -> MoveApplied:
        """Let unacked messages leave a group for another topic, where they fire at once."""
        rows = decode_schedule(memoryview(op.rows)).rows
        assert int(rows["due_ms"].max()) <= self.last_read_time_ms, (op, self.last_read_time_ms)
        new = np.zeros(len(rows), np.bool_) if group is None else group.ack(op.offsets)
        to, made = self._topic_of(op.to), None
        if op.to_group and op.to_group not in to.groups:
            create = CreateGroup(to.topic_id, op.to_group, Start.EARLIEST, MOVED_GROUP)
            made = self._create_group(create)
        first_seq = self.next_seq
        self.next_seq = Seq(self.next_seq + len(rows))  # what a seq is, the log alone tells
        rows["topic"] = to.topic_id
        rows["seq"] = np.arange(first_seq, self.next_seq, dtype=np.uint64)
        if new.any():
            self._admit(rows[new], op.rows)
        self.topics[op.topic].trim()
        return MoveApplied(op, new, to.topic_id, first_seq, made)

    def group(self, topic_id: TopicId, group_id: GroupId) -> Group:
        """Return a group by its id."""
        return self.topics[topic_id].group_by_id[group_id]

    def _create_group(self, create: CreateGroup) -> Group:
        topic = self.topics[create.topic]
        if create.name not in topic.groups:
            queue = topic.queue
            cursor = queue.begin if create.start is Start.EARLIEST else queue.end
            group = Group(
                group_id=self.next_group_id,
                topic=create.topic,
                name=create.name,
                settings=create.settings,
                cursor=cursor,
                reserved=cursor,
                base=cursor,
                since=topic.deleted_in,
            )
            topic.add(group)
            self.next_group_id = GroupId(self.next_group_id + 1)
        return topic.groups[create.name]

    # ---- epochs and checkpoints

    def _epoch(self, entry: Entry) -> payloads.EpochStart:
        start = payloads.decode_epoch(entry.payload)
        if start.apply_version != payloads.APPLY_VERSION:
            raise UnknownVersion(
                f"entry {entry.index}", start.apply_version, payloads.APPLY_VERSION
            )
        for topic in self.topics.values():
            for group in topic.groups.values():
                group.begin_epoch(topic.queue.end)
        self.voters = start.voters
        return start

    def _checkpoint(self, entry: Entry) -> Checkpoint:
        now_ms = self.applied_time_ms
        self.producers.expire(now_ms, payloads.decode_checkpoint(entry.payload) or IDLE_MS_MAX)
        self.requests.expire(now_ms)
        self.trace.mark(entry.index, self.next_seq)
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
            put(topic.deleted_in)
            put(counts.scheduled, counts.fired, counts.cancelled, counts.dropped)
            digest.update(topic.name.encode())
            for group in topic.groups.values():
                put(group.group_id, group.cursor, group.reserved, group.ack_sum, group.ended_sum)
                put(group.acked_count, group.later_sum, len(group.marks), *group.marks)
                put(group.since, group.recalled_sum)
                digest.update(repr(astuple(group.settings)).encode())
        digest.update(self.policies.packed)
        put(self.cancels.sum, len(self.fire_marks), *self.voters)
        put(self.producers.next_id, len(self.requests), self.requests.sum)
        for producer_id, producer in self.producers:
            put(producer_id, producer.last_sequence, len(producer.answers), producer.used_at_ms)
        return digest.hexdigest()


def _row_sum(rows: RowArray) -> int:
    """Return the order-free sum of hashes of (due, seq, payload size), modulo 2 ** 64."""
    hashes = mix(mix(rows["due_ms"].astype(np.uint64)) ^ rows["seq"])
    return int(np.add.reduce(mix(hashes ^ rows["payload_size"]), dtype=np.uint64))
