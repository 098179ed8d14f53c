"""The deterministic state machine: applies committed entries in order.

The same entries give the same state on every replica. Nothing local may therefore decide an
outcome: no clock, no file layout, no timing wheel. The leader's decisions are in the entry. Later
effects depend only on the state at the entry's index and on the entry's time.

    SCHEDULE --> store (pending) --FIRE--> queue of the topic --> groups --> gone
                  ^  |  CANCEL, a replaced key; for paused topics see timer/state/pauses.py
       RESCHEDULE |  v                    recurring timers: see timer/state/recurring.py
                  cancelled                        deletion of a topic: its messages and groups are
                                                   deleted, its pending timers are dropped

The ledger counts the timers, and checks after each entry that none is lost.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import (
    MOVED_GROUP,
    AlterGroup,
    CreateGroup,
    DeleteTopic,
    GroupOp,
    GroupStart,
    Ids,
    Move,
    Nack,
    Op,
    Targets,
)
from timer.entries.policies import Policies, Scope, ScopePolicy, namespace_of
from timer.model.columns import (
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
from timer.model.timer_errors import EngineError, TopicDeletedError
from timer.model.units import (
    GroupId,
    LogIndex,
    ProducerId,
    QueueOffset,
    Seq,
    TopicId,
    UnixMs,
)
from timer.pending.store import Store
from timer.ready.group import Group
from timer.ready.queue import Queue
from timer.ready.topic import Topic
from timer.state.apply_results import (
    ALREADY_FIRED,
    CANCELLED,
    ENTRY_FULL,
    NOT_FOUND,
    RESCHEDULED,
    Accepted,
    AcksApplied,
    Applied,
    CancelApplied,
    Checkpoint,
    DeleteApplied,
    DeleteTopicApplied,
    ExpireApplied,
    FireApplied,
    GroupApplied,
    GroupResult,
    MoveApplied,
    NoEffectApplied,
    PartResult,
    Repeated,
    RescheduleApplied,
    ScheduleApplied,
    SeekApplied,
)
from timer.state.cancel_outcomes import HORIZON_MS
from timer.state.digest import digest_of, topic_sum
from timer.state.dirty_topics import MANY, take_all, take_some
from timer.state.entry_portions import Portions
from timer.state.key_conflicts import NEW_MAX, decide
from timer.state.ledger import Ledger
from timer.state.pauses import Pauses
from timer.state.producers import RequestAnswer
from timer.state.recurring import Recurring
from timer.state.retention import Retention
from timer.state.state import State

FIRE_MARK_MS: Final = 10_000
RESCHEDULE_BYTES_MAX: Final = 4 << 20
"""Payload bytes that one RESCHEDULE moves; timers beyond it are ENTRY_FULL."""

RESERVED_AHEAD_MAX: Final = 65_536
"""Most offsets reserved beyond a queue's end; leaders stay far below it."""


class Machine(State):
    """A state that applies entries. Only `apply` and its portions change it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.ledger = Ledger(self)
        self.pauses = Pauses(self, self.ledger)
        self.recurring = Recurring(self, self.ledger, self._admit)
        self.portions = Portions(self, self.pauses)
        """Work on the entry after `applied_index`, if it may concern many topics or the like."""
        self._hashes = topic_sum(self.changes.reader())
        self._retention = Retention(self.changes.reader())
        self._changed_topics = self.changes.reader()
        self._queue_ends: dict[str, QueueOffset] = {}
        """Queue end by topic name at the last checkpoint; `_changed_topics` may differ now."""
        self._changed_ends: dict[str, QueueOffset | None] = {}
        """Queue ends that changed since the last checkpoint. None: the topic was deleted."""

    def apply(self, entry: Entry) -> Applied:
        """Apply the entry after `applied_index`; return the result for its proposer.

        Work on the entry that `portions` has not done before is done here.
        """
        assert entry.index == self.applied_index + 1, (entry.index, self.applied_index)
        assert entry.time_ms >= self.applied_time_ms, (entry.time_ms, self.applied_time_ms)
        assert entry.epoch >= self.applied_epoch, (entry.epoch, self.applied_epoch)
        self.portions.finish(entry)
        self.applied_index = entry.index
        self.applied_epoch = entry.epoch
        self.applied_time_ms = entry.time_ms
        applied = self._apply(entry)
        self.ledger.check()
        return applied

    def _apply(self, entry: Entry) -> Applied:
        match entry.kind:
            case EntryKind.SCHEDULE:
                return self._schedule(entry)
            case EntryKind.FIRE:
                return self._fire(entry)
            case EntryKind.GROUP:
                return self._group(entry)
            case EntryKind.CANCEL:
                return self._cancel(entry)
            case EntryKind.RESCHEDULE:
                return self._reschedule(entry)
            case EntryKind.TOPIC | EntryKind.PRODUCER | EntryKind.POLICY:
                return self._settings(entry)
            case EntryKind.CHECKPOINT:
                return self._checkpoint(entry)
            case EntryKind.EPOCH:
                return self._epoch(entry)
            case EntryKind.SERIES | EntryKind.OCCURRENCES:
                return self.recurring.apply(entry)

    # ---- timers

    def _schedule(self, entry: Entry) -> ScheduleApplied:
        schedule = decode_schedule(entry.payload)
        rows, self.topics_split = schedule.rows, 0
        modes = np.repeat(schedule.parts["on_conflict"], schedule.parts["rows"])
        results: list[PartResult] = []
        fresh: list[RequestAnswer] = []
        is_accepted = np.zeros(len(rows), np.bool_)
        # A topic id that was never issued counts as deleted.
        is_deleted = (rows["topic"] == 0) | (rows["topic"] >= self.next_topic_id)
        is_deleted |= self.store.deleted_topics.of(rows["topic"])
        any_deleted = bool(is_deleted.any())
        start, first_seq = 0, self.next_seq
        for head, request in zip(schedule.parts.tolist(), schedule.requests, strict=True):
            producer_id, sequence, size, _, body = head
            stop = start + size
            mine = rows[start:stop]
            deleted_topics = mine["topic"][is_deleted[start:stop]].tolist() if any_deleted else []
            name = ProducerId(producer_id), sequence, body
            result = self._apply_part(*name, request, mine, deleted_topics)
            if isinstance(result, Accepted):
                fresh.append(result.answer)
                is_accepted[start:stop] = True
            results.append(result)
            start = stop
        if not is_accepted.all():
            rows, modes = rows[is_accepted], modes[is_accepted]
            refused = [not isinstance(each, Accepted) for each in results]
            self.trace.add_mark(entry.index, first_seq, np.packbits(refused).tobytes())
        ready: tuple[TopicId, ...] = ()
        keyed = int(np.count_nonzero(rows["key_size"]))
        if keyed:
            rows = self._resolve_keys(rows, modes, entry.payload, fresh)
        self.requests.seal()
        if len(rows):
            ready = self._admit(rows, entry.payload)
        return ScheduleApplied(tuple(results), ready, keyed, self.topics_split)

    def _apply_part(
        self,
        producer_id: ProducerId,
        sequence: int,
        body: int,
        request: RequestId | None,
        rows: RowArray,
        deleted_topics: list[int],
    ) -> PartResult:
        """Assign seqs to the rows of one request, if it is neither a repeat nor rejected.

        `deleted_topics`: ids of its topics that were deleted.
        """
        answer = None
        try:
            if producer_id:
                answer = self.producers.stored_answer(producer_id, sequence, body)
            elif request is not None:
                answer = self.requests.stored_answer(request, self.applied_time_ms)
        except EngineError as refused:
            return refused
        if answer is not None:
            return Repeated(answer)
        if deleted_topics:
            return TopicDeletedError(deleted_topics[0])
        answer = RequestAnswer(sequence, self.next_seq, rows["due_ms"].copy(), body)
        rows["seq"] = np.arange(self.next_seq, self.next_seq + len(rows), dtype=np.uint64)
        self.next_seq = Seq(self.next_seq + len(rows))
        if producer_id:
            self.producers.accept(producer_id, answer, self.applied_time_ms)
        elif request is not None:
            self.requests.accept(request, answer, self.applied_time_ms)
        return Accepted(answer)

    def _resolve_keys(
        self, rows: RowArray, modes: U32, payload: memoryview, answers: list[RequestAnswer]
    ) -> RowArray:
        """Keep keys unique and complete the answers; return the rows that become timers."""
        keyed = rows[rows["key_size"] > 0]
        keys, topic = gather(keyed, {0: payload}, "key"), keyed["topic"].astype(np.uint32)
        hashes = self.store.hasher(topic, keys)
        holders = self.store.find_keys(topic, keys, hashes)
        pends = (rows["due_ms"] > self.last_read_time_ms) | self.pauses.holds(rows)
        decision = decide(rows, modes, keys, hashes, holders, pends)
        start = 0
        for answer in answers:
            stop = start + len(answer.due_ms)
            answer.verdicts = decision.verdicts.part(start, stop)
            start = stop
        if len(decision.ended):
            self.store.cancel_rows(decision.ended)
            self.ledger.cancel(decision.ended)
        if decision.undone.any():
            self.ledger.schedule(rows[decision.undone], pending=False)
            self.ledger.cancel(rows[decision.undone], were_pending=False)
        stay = (decision.verdicts.verdict <= NEW_MAX) & ~decision.undone
        return rows if stay.all() else rows[stay]

    def _admit(self, rows: RowArray, payload: bytes | memoryview) -> tuple[TopicId, ...]:
        """Put rows with seqs into the store; hold or fire those that are due already.

        Returns the topics with new messages.
        """
        due = rows["due_ms"] <= self.last_read_time_ms
        if not due.any():
            self.ledger.schedule(rows, pending=True)
            self.store.insert(rows, payload)
            return ()
        self.ledger.schedule(rows, pending=False)
        if (held := due & self.pauses.holds(rows)).any():
            due &= ~held
            held &= self.ledger.is_past(rows)  # later rows are held by a later FIRE
            self.ledger.add_pending(rows[held])
            self._hold(rows[held], {0: payload})
            rows, due = rows[~held], due[~held]
        if not due.all():
            self.ledger.add_pending(rows[~due])
            self.store.insert(rows[~due], payload)
        return self._enqueue(rows[due], payload)

    def _hold(self, rows: RowArray, bufs: Buffers) -> None:
        """Hold pending rows that lie at or before the fire position."""
        self.store.hold(rows, bufs)
        self.ledger.hold(rows)

    def _enqueue(self, rows: RowArray, payload: bytes | memoryview) -> tuple[TopicId, ...]:
        """Fire rows that were never pending; return their topics."""
        if not len(rows):
            return ()
        at_ms = self.applied_time_ms
        moved = self.ledger.fire(rows, {0: payload}, at_ms, were_pending=False)
        return tuple(topic for topic, _ in moved)

    def _fire(self, entry: Entry) -> FireApplied:
        fire = payloads.decode_fire(entry.payload)
        read_time_ms = max(fire.read_time_ms, self.last_read_time_ms)
        fired = self.store.fire(*fire._replace(read_time_ms=read_time_ms))
        if fired.limited:
            self.last_read_time_ms = UnixMs(int(fired.rows["due_ms"][-1]))
        else:
            self.last_read_time_ms = read_time_ms
        if not self.fire_marks or entry.time_ms - self.fire_marks[-1][0] >= FIRE_MARK_MS:
            self.fire_marks.append((entry.time_ms, self.last_read_time_ms))
        rows = fired.rows
        if (held := self.pauses.holds(rows)).any():
            self._hold(rows[held], fired.bufs)
            rows = rows[~held]
        moved = self.ledger.fire(rows, fired.bufs, entry.time_ms, were_pending=True)
        released, dropped, more = self.pauses.sweep(fire)
        limited = fired.limited or more
        return FireApplied(tuple(moved), limited, tuple(released), tuple(dropped))

    def _cancel(self, entry: Entry) -> CancelApplied:
        targets = self._target_ids(payloads.decode_cancel(entry.payload))
        hit, removed = self.store.cancel(targets.due_ms, targets.seq)
        self.ledger.cancel(removed)
        results = np.full(len(targets), CANCELLED, np.uint8)
        if not hit.all():
            missed = Ids(targets.due_ms[~hit], targets.seq[~hit])
            results[~hit] = self.outcomes_of(missed)
        return CancelApplied(results, targets)

    def _reschedule(self, entry: Entry) -> RescheduleApplied:
        order = payloads.decode_reschedule(entry.payload)
        targets = self._target_ids(order.targets)
        n = len(targets)
        timers = Ids(order.due_ms, np.arange(self.next_seq, self.next_seq + n, dtype=np.uint64))
        whole, is_left = self.store.read(targets.due_ms, targets.seq, RESCHEDULE_BYTES_MAX)
        is_moved = whole.rows["seq"] > 0
        rows = whole.rows[is_moved]
        self.series.on_rescheduled(
            targets.seq[is_moved], timers.due_ms[is_moved], timers.seq[is_moved]
        )
        self.store.cancel_rows(rows)
        self.ledger.cancel(rows)
        results = self.outcomes_of(targets)
        results[is_left] = ENTRY_FULL
        results[is_moved] = RESCHEDULED
        self.next_seq = Seq(self.next_seq + n)
        rows["due_ms"], rows["seq"] = timers.due_ms[is_moved], timers.seq[is_moved]
        rows["requested_ms"] = order.requested_ms[is_moved]
        self.successors.add(targets.seq[is_moved], timers.due_ms[is_moved], timers.seq[is_moved])
        ready = self._admit(rows, whole.blob) if len(rows) else ()
        return RescheduleApplied(results, targets, timers, ready, len(whole.blob))

    def _target_ids(self, targets: Targets) -> Ids:
        """Return the pending timers of keys. seq = 0: no timer, or a key that appeared before."""
        if isinstance(targets, Ids):
            return targets
        rows = self.store.find_keys(targets.topic, targets.key)
        seq = rows["seq"].astype(np.uint64)
        first = np.zeros(len(seq), np.bool_)
        first[np.unique(seq, return_index=True)[1]] = True
        seq[~first] = 0
        return Ids(np.where(seq > 0, rows["due_ms"], 0), seq)

    def outcomes_of(self, targets: Ids) -> npt.NDArray[np.uint8]:
        """Return the outcome of timers that are not pending, (n, uint8), as a cancel's results."""
        results = np.full(len(targets), NOT_FOUND, np.uint8)
        results[self._ended_by_fire(targets.due_ms, targets.seq)] = ALREADY_FIRED
        self.outcomes.fill(targets.seq, results)
        return results

    def _ended_by_fire(self, due_ms: I64, seq: U64) -> npt.NDArray[np.bool_]:
        """Return which ids, if issued and not cancelled, fired within the horizon, (n, bool)."""
        recent = (due_ms <= self.last_read_time_ms) & (due_ms > self._horizon()[1])
        return recent & (seq < self.next_seq) & (seq > 0) & (seq >= self.outcomes.unknown_below)

    def _horizon(self) -> tuple[UnixMs, UnixMs]:
        """Return the newest mark before the horizon; (-1, -1) if none lies before it.

        Timers due by its read time, the second one, may be NOT_FOUND.
        """
        found = UnixMs(-1), UnixMs(-1)
        for mark in self.fire_marks:
            if mark[0] > self.applied_time_ms - HORIZON_MS:
                break
            found = mark
        return found

    # ---- topics, producers, policies, groups

    def _settings(self, entry: Entry) -> Topic | DeleteTopicApplied | ProducerId | Policies:
        if entry.kind is EntryKind.TOPIC:
            return self._topic(entry)
        if entry.kind is EntryKind.PRODUCER:
            return self._producer(entry)
        return self.policies  # `portions` has changed them already

    def _producer(self, entry: Entry) -> ProducerId:
        op = payloads.decode_producer(entry.payload)
        if isinstance(op, payloads.EndProducer):
            return self.producers.end(op.producer_id)
        return self.producers.register(*op, entry.time_ms) or ProducerId(0)

    def _topic(self, entry: Entry) -> Topic | DeleteTopicApplied:
        op = payloads.decode_topic(entry.payload)
        if isinstance(op, DeleteTopic):
            return self._delete_topic(op)
        return self._ensure_topic(op.name, op.creator)

    def _delete_topic(self, op: DeleteTopic) -> DeleteTopicApplied:
        """Delete a topic with everything in it. Later entries with its id find no topic.

        `portions` has removed its series, and its timers from memory.
        """
        if op.topic not in self.topics:
            return DeleteTopicApplied(op, None)
        topic = self.topic_to_change(op.topic)
        del self.topics[op.topic], self.topic_by_name[topic.name]
        self.groups -= len(topic.groups)
        self.creators.remove(topic)
        self.namespaces[namespace := namespace_of(topic.name)] -= 1
        if not self.namespaces[namespace]:
            del self.namespaces[namespace]
        if self._queue_ends.pop(topic.name, None) is not None:
            self._changed_ends[topic.name] = None
        queue, dropped = topic.queue, self.ledger.drop_topic(topic)
        groups = [(group.name, group.unacked_count(queue.end)) for group in topic.groups.values()]
        applied = DeleteTopicApplied(op, topic, dropped, queue.end - queue.begin, tuple(groups))
        self.store.drop_topic(op.topic, dropped, topic.held)
        self.pauses.forget_topic(topic)
        self.topic_deleted_in = self.applied_epoch
        self.policies = self.policies.with_policy(Scope("", op.topic), ScopePolicy())
        topic.close()
        return applied

    def _ensure_topic(self, name: str, creator: str = "") -> Topic:
        """Return the topic of this name; create it if it does not exist."""
        topic = self.topic_by_name.get(name)
        if topic is None:
            topic = Topic(self.next_topic_id, name, Queue(pages=self.pages), creator=creator)
            topic.deleted_in = self.topic_deleted_in  # a deleted topic may have had this name
            assert topic.topic_id < TOMBSTONE
            self.next_topic_id = TopicId(topic.topic_id + 1)
            self.restore_topics([topic])
            self.retain([topic.topic_id], self.applied_time_ms)
        return topic

    def restore_topics(self, topics: Sequence[Topic]) -> None:
        """Put back topics that a manifest holds."""
        self.changes.note_all([topic.topic_id for topic in topics])
        for topic in topics:
            self.topics[topic.topic_id] = self.topic_by_name[topic.name] = topic
            self.groups += len(topic.groups)
            self.creators.add(topic)
        self.namespaces.update(namespace_of(topic.name) for topic in topics)
        self.ledger.restore(topics)
        self.pauses.add_topics(topics)

    def _group(self, entry: Entry) -> GroupApplied:
        ops = tuple(payloads.decode_group(entry.payload))  # if malformed, no op is applied
        return GroupApplied(tuple(map(self._group_op, ops)))

    def _group_op(self, op: payloads.AnyOp) -> GroupResult:
        topic = self.topics.get(op.topic)
        if topic is None or (isinstance(op, GroupOp) and _lies_beyond(op, topic.queue.end)):
            return self._without_effect(op)
        if isinstance(op, CreateGroup):
            return self._create_group(op)
        group = self.topic_to_change(op.topic).group_by_id.get(op.group)
        if isinstance(op, Move):
            return self._move(op, group)
        if group is None:
            if isinstance(op, GroupOp) and op.op is Op.EXPIRE_BELOW:  # of all groups
                return self._expire_below(op)
            return NoEffectApplied(op)
        if isinstance(op, AlterGroup):
            group.alter(op.of(group.settings))
            return group
        if isinstance(op, Nack):
            return AcksApplied(op, group.nack(op.offsets, op.not_before_ms))
        return self._plain_op(op, group)

    def _without_effect(self, op: payloads.AnyOp) -> NoEffectApplied:
        """Return the result of an op whose topic was deleted or has no such messages."""
        if isinstance(op, Move):  # a seq must not depend on the outcome, only on the log
            self.next_seq = Seq(self.next_seq + len(op.offsets))
        return NoEffectApplied(op)

    def _plain_op(self, op: GroupOp, group: Group) -> GroupResult:
        match op.op:
            case Op.ACK | Op.EXPIRE:
                return self._ack_or_expire(op, group)
            case Op.ENDED:
                group.end_leases(op.offsets)
            case Op.RECALL:
                group.recall(op.offsets)
            case Op.RESERVE:
                group.reserve(QueueOffset(int(op.offsets[0])))
            case Op.HAND_OVER:
                group.hand_over(QueueOffset(int(op.offsets[0])))
            case Op.SEEK:
                return self._seek(op, group)
            case Op.DELETE:
                return self._delete(op, group)
            case _:
                raise AssertionError(op)
        return op

    def _expire_below(self, op: GroupOp) -> ExpireApplied:
        topic = self.topics[op.topic]
        topic.expire_below(QueueOffset(int(op.offsets[0])))
        return ExpireApplied(op, len(topic.groups))

    def _ack_or_expire(self, op: GroupOp, group: Group) -> AcksApplied | ExpireApplied:
        """Ack or expire messages of a group."""
        topic = self.topics[op.topic]
        if op.op is Op.EXPIRE:
            topic.expire(group, op.offsets)
            return ExpireApplied(op, 1)
        new = group.ack(op.offsets)
        topic.trim()
        return AcksApplied(op, new)

    def _seek(self, op: GroupOp, group: Group) -> SeekApplied:
        """Move a group to an offset, or to the nearest one that the queue holds."""
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
        self.groups -= 1
        self.creators.remove_group(group)
        topic.deleted_in = self.applied_epoch
        topic.trim()
        return DeleteApplied(op, group)

    def _move(self, op: Move, group: Group | None) -> MoveApplied:
        """Move unacked messages from a group to another topic, where they fire at once."""
        rows = decode_schedule(memoryview(op.rows)).rows
        rows["due_ms"] = np.minimum(rows["due_ms"], self.last_read_time_ms)  # they have fired
        new = np.zeros(len(rows), np.bool_) if group is None else group.move(op.offsets)
        to, created = self._ensure_topic(op.to), None
        if op.to_group and op.to_group not in to.groups:
            create = CreateGroup(to.topic_id, op.to_group, GroupStart.EARLIEST, MOVED_GROUP)
            created = self._create_group(create)
        first_seq = self.next_seq
        self.next_seq = Seq(self.next_seq + len(rows))  # the same for every outcome
        rows["topic"] = to.topic_id
        rows["seq"] = np.arange(first_seq, self.next_seq, dtype=np.uint64)
        if new.any():
            self.ledger.schedule(rows[new], pending=False)  # fired before, so never held
            self._enqueue(rows[new], op.rows)
        self.topics[op.topic].trim()
        return MoveApplied(op, new, to.topic_id, first_seq, created)

    def _create_group(self, create: CreateGroup) -> Group:
        topic = self.topic_to_change(create.topic)
        if create.name not in topic.groups:
            queue = topic.queue
            cursor = queue.begin if create.start is GroupStart.EARLIEST else queue.end
            group = Group(
                group_id=self.next_group_id,
                topic=create.topic,
                name=create.name,
                settings=create.settings,
                cursor=cursor,
                reserved=cursor,
                since_epoch=topic.deleted_in,
                creator=create.creator,
            )
            topic.add(group)
            self.groups += 1
            self.creators.add_group(group)
            self.next_group_id = GroupId(self.next_group_id + 1)
        return topic.groups[create.name]

    # ---- epochs and checkpoints

    def _epoch(self, entry: Entry) -> payloads.EpochStart:
        start = payloads.decode_epoch(entry.payload)
        self.voters = start.voters
        self.level = max(self.level, start.level)
        return start

    def _checkpoint(self, entry: Entry) -> Checkpoint:
        now_ms = self.applied_time_ms
        self.requests.expire(now_ms)
        self.trace.add_mark(entry.index, self.next_seq)
        # The newest mark before the horizon stays: `_horizon` returns it.
        while len(self.fire_marks) > 1 and self.fire_marks[1][0] <= now_ms - HORIZON_MS:
            self.fire_marks.popleft()
        # Both follow one mark: timers that ended before it were due before those fired by it.
        ended_ms, fired_ms = self._horizon()
        self.outcomes.forget(min(ended_ms, fired_ms))
        for topic_id in self._retention.forget_due(self.topics, now_ms):
            self.changes.note(topic_id)
        since = self.checkpoint.index if self.checkpoint is not None else LogIndex(0)
        for topic_id in take_all(self._changed_topics):
            self._note_queue_end(topic_id)
        changed_ends, self._changed_ends = self._changed_ends, {}
        self.checkpoint = Checkpoint(
            epoch=self.applied_epoch,
            index=self.applied_index,
            time_ms=now_ms,
            last_read_time_ms=self.last_read_time_ms,
            queue_offsets=self._queue_ends.copy(),
            since=since,
            moved=changed_ends,
            digest=self.digest(),
        )
        return self.checkpoint

    def _note_queue_end(self, topic_id: TopicId) -> None:
        topic = self.topics.get(topic_id)
        if topic is not None and self._queue_ends.get(topic.name) != topic.queue.end:
            self._queue_ends[topic.name] = self._changed_ends[topic.name] = topic.queue.end

    def restore_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Put back the checkpoint that a manifest holds, after the topics."""
        self.checkpoint = checkpoint
        self._queue_ends = dict(checkpoint.queue_offsets)
        for name in self._queue_ends.keys() - self.topic_by_name.keys():
            del self._queue_ends[name]
            self._changed_ends[name] = None

    def catch_up(self) -> None:
        """Do at once all work that `keep_up` does in portions; no client waits yet."""
        self._retention.catch_up(self.topics)
        for topic_id in take_all(self._changed_topics):
            self._note_queue_end(topic_id)

    def keep_up(self) -> bool:
        """Do some of the next checkpoint's work in advance; return whether much of it remains.

        Calls are optional: the checkpoint does all work that remains.
        """
        for topic_id in take_some(self._changed_topics):
            self._note_queue_end(topic_id)
        more = [self._hashes.keep_up(self.topics), self._retention.keep_up(self.topics)]
        return self.producers.keep_up() or len(self._changed_topics) > MANY or any(more)

    def digest(self) -> str:
        """Return a hash of the state, 16 hex digits: see timer/state/digest.py."""
        return digest_of(self, self._hashes)

    def recomputed_digest(self) -> str:
        """Return the digest recomputed from all parts, for checkers."""
        return digest_of(self, topic_sum(set(self.topics), recomputed=True), recomputed=True)


def _lies_beyond(op: GroupOp, queue_end: QueueOffset) -> bool:
    """Return whether an op names messages that have not fired; no leader appends such an op."""
    if not len(op.offsets) or op.op is Op.SEEK:
        return False
    last = int(op.offsets.max())
    match op.op:
        case Op.RESERVE:
            return last > queue_end + RESERVED_AHEAD_MAX
        case Op.EXPIRE_BELOW | Op.HAND_OVER:
            return last > queue_end
        case _:
            return last >= queue_end
