"""Delivery to consumer groups: the leader's consumers, their leases, and the ops for the log.

    consumers --join, credit--> hungry groups --deliver--> Delivery
              --ack, nack-----> GROUP entries (timer/leader/groups/group_entries.py) --> verdicts
              --extend--------> leases (timer/leader/groups/group_leases.py), at once
    deadlines --expire--------> ENDED ops
    failed too often ---------> MOVE ops (timer/leader/groups/dead_letters.py)
    seek, delete -------------> SEEK, DELETE ops --applied--> leases end; consumers stay, or end
    time to live is over -----> EXPIRE_BELOW, EXPIRE ops (timer/leader/groups/expiry.py)

A pure core, owned by the leader (timer/leader/leader.py). A group's state is in the log. This
module collects the ops that change it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from timer.entries.payloads import (
    EXCLUSIVE,
    FAILOVER,
    AlterGroup,
    CreateGroup,
    GroupOp,
    Move,
    Op,
)
from timer.leader.groups import dead_letters, group_batch
from timer.leader.groups.alarms import Alarms
from timer.leader.groups.delivery_rates import DeliveryRates
from timer.leader.groups.expiry import Expiry, Propose
from timer.leader.groups.group_batch import OnResult, OnVerdicts, Verdicts
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.group_entries import GroupEntries, deleted_error
from timer.leader.groups.group_leases import ACCEPT, DEAD_LETTERED, ENDS_MAX, Leases
from timer.leader.groups.lease_table import FREE, ConsumerStream, Lease, OffsetStates
from timer.leader.groups.nack_details import NackDetails
from timer.leader.groups.turns import LEASE_WORK, Next, TurnResult, Turns
from timer.leader.intake.count_limits import (
    CountLimits,
    GroupName,
    check_consumer,
    check_group,
    check_group_id,
    has_free_ids,
    may_have_topic,
)
from timer.model.columns import U64
from timer.model.timer_errors import (
    EngineError,
    GroupHeldError,
    InvalidRequestError,
    NotReadyError,
    TopicDeletedError,
)
from timer.model.units import (
    DUE_MS_MAX,
    Epoch,
    GroupId,
    LeaseId,
    MonoMs,
    Now,
    QueueOffset,
    TopicId,
    UnixMs,
)
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.apply_results import (
    AcksApplied,
    DeleteApplied,
    DeleteTopicApplied,
    ExpireApplied,
    GroupApplied,
    GroupResult,
    MoveApplied,
    NoEffectApplied,
    SeekApplied,
)
from timer.state.machine import Machine

DELIVERY_ROWS_MAX: Final = 2048
STEP_GROUPS: Final = 64
"""Most groups that one step handles for each cause: ended leases, delayed and paced messages."""
LETTER_RETRY_MS: Final = 1000
"""Pause between two tries to move dead letters while the disks are full, milliseconds."""
_DELETING: Final = "the topic is being deleted; retry"


class GroupDispatch:
    """The groups and their consumers, in one epoch."""

    def __init__(  # noqa: PLR0913 -- the parts that the leader lends
        self,
        machine: Machine,
        epoch: Epoch,
        propose: Propose,
        id_salt: int,
        ttl_ms: Callable[[Topic], int],
        expires: Callable[[], bool],
        rates: Callable[[Topic], tuple[int, int]],
        limits: CountLimits,
    ) -> None:
        """`ttl_ms`: a topic's time to live, 0 for none. `expires`: whether any topic has one.

        `rates`: see DeliveryRates.
        """
        self.machine = machine
        self.epoch = epoch
        self.refusal: EngineError | None = None
        """Error for new consumers and groups; acks are still accepted. None: all are accepted."""
        self._closed: EngineError | None = None
        self._id_salt = id_salt
        self._limits = limits
        self.creating: set[GroupName] = set()
        """Groups that are being created: the op is gathered or in flight."""
        self._entries = GroupEntries(machine, propose, self._on_result)
        self._details = NackDetails()
        self._to_hand_over: Iterator[GroupOp] | None = None
        """Ops of the handover that are still to be appended. None: the leader stays."""
        self._leases: dict[GroupId, Leases] = {}
        self._lease_ids = itertools.count()
        self._seeks: list[tuple[Group, UnixMs, OnResult]] = []
        """Seeks to a time that wait for their offset, because pages must be read."""
        self._ends: Alarms[GroupId] = Alarms()
        """Next ends of leases, on the monotonic clock."""
        self._returns: Alarms[GroupId] = Alarms()
        """Times at which delayed messages may return, on the cluster's clock."""
        self._rates = DeliveryRates(rates)
        self.deleting: set[TopicId] = set()
        """Topics with a deletion in flight: requests that name them are rejected."""
        self._turns = Turns()
        """Groups that may have messages for their consumers."""
        self.expiry = Expiry(machine, propose, ttl_ms, expires, self._on_expire_below)

    @property
    def waiting(self) -> bool:
        """Whether ops, acks or seeks wait that are not appended."""
        return bool(self._entries or self._seeks)

    def check_open(self) -> None:
        """Raise the error that ended the epoch, or that began a drain."""
        refused = self._closed or self.refusal
        if refused is not None:
            raise refused.with_traceback(None)  # one object raised often would collect every frame

    # ---- groups

    def create(self, create: CreateGroup, done: OnResult) -> None:
        """Create a group if it does not exist; `done` gets the Group.

        Raises:
            LimitReachedError: the topic or the cluster has the most groups that it may have.
        """
        self.check_open()
        self.check_topic(create.topic)
        topic = self.machine.topics[create.topic]
        if (known := topic.groups.get(create.name)) is not None:
            done(known)
            return
        name = GroupName(create.topic, create.name)
        if name not in self.creating:
            check_group(self._limits, self.machine, topic, self.creating)

        def answer(result: object) -> None:
            self.creating.discard(name)
            done(result)

        self.creating.add(name)
        self._entries.append(create, done=answer)

    def alter(self, alter: AlterGroup, done: OnResult) -> None:
        """Change settings of a group; `done` gets the Group."""
        self.check_open()
        self.check_topic(alter.topic)
        self._entries.append(alter, done=done)

    def delete(self, group: Group, done: OnResult) -> None:
        """Delete a group and end its consumers' streams. `done` gets the DeleteApplied."""
        self._check_group(group)
        op = GroupOp(Op.DELETE, group.topic, group.group_id, np.zeros(0, np.uint64))
        self._entries.append(op, done=done)

    def seek(self, group: Group, offset: QueueOffset, done: OnResult) -> None:
        """Move a group to a queue offset that the topic holds; `done` gets the SeekApplied.

        The group's consumers stay and lose their leases.

        Raises:
            InvalidRequestError: the topic does not hold the offset.
            LimitReachedError: all group ids are used.
        """
        self._check_group(group)
        check_group_id(self.machine)
        queue = self.machine.topics[group.topic].queue
        if not queue.begin <= offset <= queue.end:
            limit = f"must be {queue.begin} to {queue.end} (the queue's end)"
            raise InvalidRequestError("offset", offset, limit)
        op = GroupOp(Op.SEEK, group.topic, group.group_id, np.array([offset], np.uint64))
        self._entries.append(op, done=done)

    def seek_time(self, group: Group, time_ms: UnixMs, done: OnResult) -> None:
        """Move a group to the first message in the queue that fired at or after a time."""
        self._check_group(group)
        self._seeks.append((group, time_ms, done))

    def _resolve_seeks(self) -> None:
        """Turn waiting seeks into ops where the offset is known by now; in a drain, reject them."""
        seeks, self._seeks = self._seeks, []
        for group, time_ms, done in seeks:
            try:
                self._check_group(group)
                offset = self.machine.topics[group.topic].queue.offset_fired_from(time_ms)
                if offset is None:
                    self._seeks.append((group, time_ms, done))
                else:
                    self.seek(group, offset, done)
            except EngineError as refused:
                done(refused)

    def _check_group(self, group: Group) -> None:
        self.check_open()
        if group.deleted:
            raise deleted_error(self.machine, group)
        self.check_topic(group.topic)

    def check_topic(self, topic: TopicId) -> None:
        """Check that a topic exists and is not being deleted.

        Raises:
            NotReadyError: its deletion is in flight.
            TopicDeletedError: it was deleted.
        """
        if topic in self.deleting:
            raise NotReadyError(_DELETING)
        if topic not in self.machine.topics:
            raise TopicDeletedError(topic)

    def begin_deletion(self, topic: TopicId) -> None:
        """Reject requests for a topic from the append of its deletion on.

        Redrives to the topic that still wait are rejected, too: behind the deletion they would
        create the topic again.
        """
        self.deleting.add(topic)
        name = self.machine.topics[topic].name
        self._entries.reject_ops(
            NotReadyError(_DELETING),
            lambda op: isinstance(op, Move) and not op.to_group and op.to == name,
        )

    def lease_counts(self, group: Group) -> tuple[int, int]:
        """Return a group's (messages leased now, consumers)."""
        leases = self._leases.get(group.group_id)
        return (leases.in_flight, len(leases.consumers)) if leases else (0, 0)

    def states(self, group: Group, offsets: U64) -> OffsetStates:
        """Return the states of a group's messages in this epoch; changes nothing."""
        leases = self._leases.get(group.group_id)
        return leases.states(offsets) if leases else OffsetStates(np.full(len(offsets), FREE))

    def all_lease_counts(self) -> Iterator[tuple[Group, int, int]]:
        """Yield (group, messages leased now, consumers) of groups consumed from in this epoch."""
        return ((each.group, each.in_flight, len(each.consumers)) for each in self._leases.values())

    def waiting_from(self, group: Group, clock_ms: UnixMs) -> int | None:
        """Return a group's first offset that waits for a consumer. None: no message waits."""
        end = self.machine.topics[group.topic].queue.end
        if (leases := self._leases.get(group.group_id)) is not None:
            return leases.waiting_from(end, clock_ms)
        return group.cursor if group.cursor < end else None

    # ---- consumers

    def join(self, group: Group, consumer: ConsumerStream) -> None:
        """Add a consumer to a group; it gets messages while it has credit.

        Raises:
            GroupHeldError: the group is exclusive and has another consumer.
            LimitReachedError: the group has the most consumers that it may have.
        """
        self._check_group(group)
        leases = self._leases_of(group)
        if group.settings.type == EXCLUSIVE and leases.consumers:
            topic = self.machine.topics[group.topic].name
            raise GroupHeldError(topic, group.name, leases.consumers[0].name)
        check_consumer(self._limits, group, len(leases.consumers))
        leases.join(consumer)
        self._turns.want(group.group_id)

    def leave(self, group: Group, consumer: ConsumerStream, unsent: Iterable[LeaseId] = ()) -> None:
        """Remove a consumer at the end of its stream; redeliver its messages soon.

        `unsent`: its last leases, which never left this node. They count no attempt and no failure.
        """
        if self._closed is None and not group.deleted:
            leases = self._leases[group.group_id]
            leases.end_unsent(unsent)
            leases.leave(consumer)
            self._ends.set(group.group_id, leases.wake_at_ms())
            self._turns.want(group.group_id)  # the next consumer may have its turn

    def retire(self, group: Group, consumer: ConsumerStream) -> None:
        """Deliver nothing more to a consumer; its messages stay leased."""
        if self._closed is None and not group.deleted:
            self._leases[group.group_id].retire(consumer)
            self._turns.want(group.group_id)

    def give_up(self, group: Group, consumer: ConsumerStream) -> None:
        """Remove a consumer that no delivery reached; its messages count no attempt."""
        if self._closed is None and not group.deleted:
            self._leases[group.group_id].give_up(consumer)
            self._turns.want(group.group_id)

    def credit(self, group: Group, consumer: ConsumerStream, messages: int) -> None:
        """Add to the number of messages that a consumer accepts."""
        consumer.credit += messages
        if messages:
            self.on_request(group, consumer)
        if not group.deleted:
            self._turns.want(group.group_id)

    def on_request(self, group: Group, consumer: ConsumerStream) -> None:
        """Note a request from a consumer: the consumer is not frozen."""
        if (leases := self._leases.get(group.group_id)) and leases.on_request(consumer):
            self._turns.want(group.group_id)

    def holder(self, group: Group, epoch: Epoch, lease_id: LeaseId) -> ConsumerStream | None:
        """Return the consumer of a lease that has not ended; None: no such lease, or it left."""
        leases = self._leases.get(group.group_id)
        return leases.holder(lease_id) if leases is not None and epoch == self.epoch else None

    def ack(
        self, group: Group, epoch: Epoch, lease_id: LeaseId, offsets: U64, done: OnVerdicts
    ) -> None:
        """Ack messages; `done` gets the verdict per offset as in `Leases.ack`, once committed.

        Raises:
            OverloadedError: too many offsets wait already; none of these was accepted.
        """
        leases = self._leases_for(group, len(offsets))
        self._entries.settle(group, leases.ack(epoch, lease_id, offsets), offsets, None, done)

    def ack_up_to(
        self, group: Group, epoch: Epoch, lease_id: LeaseId, offset: QueueOffset, done: OnVerdicts
    ) -> None:
        """Ack all messages up to a queue offset.

        `done` gets one verdict, (1, uint8), once committed. It gets an InvalidRequestError if the
        group serves several consumers at once.

        Raises:
            OverloadedError: too many offsets wait already; none was accepted.
        """
        leases = self._leases_for(group, 0)
        if group.settings.type not in (EXCLUSIVE, FAILOVER):
            limit = f"only in an exclusive or failover group; {group.name!r} is "
            done(InvalidRequestError("cumulative", "true", limit + group.settings.type))
            return
        verdict, offsets = leases.ack_up_to(epoch, lease_id, int(offset))
        if not len(offsets):
            done(np.array([verdict], np.uint8))
            return
        pieces = group_batch.pieces(offsets)
        results: list[Verdicts | EngineError] = []

        def on_piece(result: Verdicts | EngineError) -> None:
            results.append(result)
            if len(results) == len(pieces):
                dead = [np.array([verdict], np.uint8)] if verdict == DEAD_LETTERED else []
                done(group_batch.worst_verdict([*results, *dead]))

        for piece in pieces:
            self._entries.settle(
                group, np.full(len(piece), ACCEPT, np.uint8), piece, None, on_piece
            )

    def nack(  # noqa: PLR0913 -- the arguments of `ack`, and those of the failure
        self, group: Group, epoch: Epoch, lease_id: LeaseId, offsets: U64, delay_ms: int | None,
        now: Now, done: OnVerdicts, detail: str = "",
    ) -> None:  # fmt: skip
        """Return messages for redelivery after `delay_ms`. None: the group's backoff decides.

        `done` gets the verdict per offset as in `Leases.nack`, once committed. `detail`: see
        NackDetails.

        Raises:
            OverloadedError: too many offsets wait already; none of these was accepted.
        """
        leases = self._leases_for(group, len(offsets))
        delays = group.backoff_ms(offsets) if delay_ms is None else np.full(len(offsets), delay_ms)
        not_before = np.minimum(now.clock_ms + delays, DUE_MS_MAX).astype(np.int64)
        verdict = leases.nack(epoch, lease_id, offsets)
        self._details.note(group, offsets[verdict == ACCEPT], detail)
        self._entries.add(leases.recall())
        self._entries.settle(group, verdict, offsets, not_before, done)

    def release(self, group: Group, epoch: Epoch, lease_id: LeaseId, offsets: U64) -> Verdicts:
        """Release messages that the consumer has not processed, for redelivery at once.

        No failure is counted. Returns the verdict per offset, as of a nack.

        Raises:
            OverloadedError: too many offsets wait already; none of these was accepted.
        """
        leases = self._leases_for(group, len(offsets))
        verdict = leases.nack(epoch, lease_id, offsets)
        accepted = np.sort(offsets[verdict == ACCEPT])
        if len(accepted):
            self._entries.add(GroupOp(Op.RECALL, group.topic, group.group_id, accepted))
            self._entries.add(leases.recall())
        return verdict

    def extend(
        self, group: Group, epoch: Epoch, lease_id: LeaseId, offsets: U64, lease_ms: int, now: Now
    ) -> Verdicts:
        """Extend the rest of a lease to `lease_ms` from now; return the verdict per offset."""
        leases = self._leases_for(group, 0)
        verdict = leases.extend(now.mono_ms, epoch, lease_id, offsets, lease_ms)
        self._ends.set(group.group_id, leases.wake_at_ms())
        return verdict

    def _leases_for(self, group: Group, offsets: int) -> Leases:
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if group.deleted:
            raise deleted_error(self.machine, group)
        self.check_topic(group.topic)
        self._entries.check_room(offsets)
        return self._leases_of(group)

    def _leases_of(self, group: Group) -> Leases:
        leases = self._leases.get(group.group_id)
        if leases is None:
            leases = Leases(group, self.epoch, self._lease_ids, self._limits.group_leases_max)
            self._leases[group.group_id] = leases
        return leases

    # ---- time

    def expire(self, now: Now) -> None:
        """End leases at their deadlines; find delayed messages that may return.

        Handles at most STEP_GROUPS groups a call, and leases of the weight ENDS_MAX. If more are
        due, `wake_at_ms` requests another call at once.
        """
        weight_left = ENDS_MAX
        for group_id in self._ends.take_due(now.mono_ms, STEP_GROUPS):
            leases = self._leases[group_id]
            ended, weight_left = leases.expire(now.mono_ms, weight_left)
            self._entries.add(ended)
            self._entries.add(leases.recall())
            self._ends.set(group_id, leases.wake_at_ms())
            self._turns.want(group_id)  # messages that were not sent are free at once
            if weight_left <= 0:
                break
        returns = self._returns.take_due(now.clock_ms, STEP_GROUPS)
        paced = self._rates.alarms.take_due(now.mono_ms, STEP_GROUPS)
        for group_id in itertools.chain(returns, paced):
            self._turns.want(group_id)
        if self.refusal is None:
            self.expiry.step(now)

    def wake_at_ms(self, now: Now) -> MonoMs:
        """Return when the leader must step next."""
        wakes = [now.mono_ms + 1] if self._turns.unfinished else []
        if (ends := self._ends.next_ms()) is not None:
            wakes.append(MonoMs(ends))
        if (paced := self._rates.alarms.next_ms()) is not None:
            wakes.append(MonoMs(paced))
        if (returns := self._returns.next_ms()) is not None:
            wakes.append(MonoMs(now.mono_ms + max(0, returns - now.clock_ms)))
        if self.refusal is None and (expires := self.expiry.wake_at_ms(now)) is not None:
            wakes.append(expires)
        return MonoMs(min(wakes, default=now.mono_ms + DUE_MS_MAX))

    def deliver(self, now: Now, *, may_move_letters: bool) -> list[Delivery]:
        """Lease messages to consumers with credit; return the deliveries.

        The groups take turns, up to the work limit. Dead letters move only if `may_move_letters`.
        """
        if self._to_hand_over is not None:
            return []
        out, expired = list[Delivery](), list[GroupOp]()
        may_move = may_move_letters and has_free_ids(self.machine)

        def turn(group_id: GroupId) -> TurnResult:
            leases = self._leases[group_id]
            group = leases.group
            topic = self.machine.topics[group.topic]
            if self.expiry.is_busy(topic):  # `feed` adds the group again after the entry is applied
                return TurnResult(Next.DONE, 1)
            outlived_ms = self.expiry.outlived_ms(topic, now.clock_ms)
            most = self._rates.allowance(topic, group, DELIVERY_ROWS_MAX, now.mono_ms)
            topic.queue.lacks_page = False
            lease = leases.deliver(now.mono_ms, now.clock_ms, topic.queue, most, outlived_ms)
            if most:
                self._rates.end_turn(topic, group, len(lease.offsets) if lease else 0)
            else:
                self._rates.wait(topic, group, now.mono_ms)
            if lease is not None:
                out.append(self._delivery_of(topic, group, lease, now))
                if leases.sorts_ahead:
                    self._entries.add(leases.reserve())
                result = TurnResult(Next.AGAIN, LEASE_WORK * leases.work)
            else:
                more = self._step_idle_group(leases, topic, now, may_move=may_move)
                after = Next.READING if topic.queue.lacks_page else Next.DONE
                result = TurnResult(Next.LATER if more else after, leases.work)
            if outlived_ms is not None and len(offsets := leases.take_expired()):
                expired.append(GroupOp(Op.EXPIRE, group.topic, group.group_id, offsets))
            return result

        self._turns.run(turn)
        if expired:
            self.expiry.propose(expired, now, lambda applied: self._on_expire(expired, applied))
        return out

    def _delivery_of(self, topic: Topic, group: Group, lease: Lease, now: Now) -> Delivery:
        lease.consumer.paused |= lease.consumer.pauses_after_lease
        self._ends.set(group.group_id, lease.deadline_ms)
        attempts, failures = group.attempts(lease.offsets), group.failures(lease.offsets)
        return Delivery(self.epoch, topic, group, lease, attempts, failures, now.clock_ms)

    def _step_idle_group(self, leases: Leases, topic: Topic, now: Now, *, may_move: bool) -> bool:
        """Do what a group without a free message needs; return whether it wants a turn soon."""
        group_id = leases.group.group_id
        self._entries.add(leases.reserve())
        more = leases.unfinished
        moves = may_move and not self._entries.has_many_ops
        if leases.dying and not (moves and self._may_have_letter_topic(leases.group, topic)):
            self._returns.set(group_id, now.clock_ms + LETTER_RETRY_MS)
        elif may_move:
            more |= self._move_letters(leases, topic)
        if (next_return_ms := leases.next_return_ms() or UnixMs(0)) > now.clock_ms:
            self._returns.set(group_id, next_return_ms)  # else a consumer must come first
        return more

    def _on_expire_below(self, topics: Iterable[TopicId], applied: GroupApplied | None) -> None:
        """Drop the leases of messages below the groups' cursors, after an EXPIRE_BELOW entry.

        `applied` is None if no message expired. The topics' groups are looked at again.
        """
        existing = [each for each in topics if each in self.machine.topics]  # others were deleted
        if applied is not None:
            for topic_id in existing:
                for group_id in self.machine.topics[topic_id].group_by_id:
                    if (leases := self._leases.get(group_id)) is not None:
                        leases.on_expired_below()
        self.feed(existing)

    def _on_expire(self, ops: list[GroupOp], applied: GroupApplied | None) -> None:
        """Notice the result of EXPIRE ops; None: they were rejected, so free the messages."""
        if applied is not None:
            for result in applied.results:
                self._on_result(result)
            return
        for op in ops:
            if (leases := self._leases.get(op.group)) is not None:
                leases.on_expire_rejected(op.offsets)
                self._turns.want(op.group)

    def _may_have_letter_topic(self, group: Group, topic: Topic) -> bool:
        """Return whether a group's dead letter topic exists or may be created."""
        to = dead_letters.topic_of(topic.name, group.name, group.settings.dead_letter_topic)
        return may_have_topic(self._limits, self.machine, to)

    def _move_letters(self, leases: Leases, topic: Topic) -> bool:
        """Gather a MOVE op for dead letters; return whether there may be more."""
        offsets = leases.take_dead(topic.queue)
        if len(offsets):
            group, due_ms = leases.group, self.machine.last_read_time_ms
            details = self._details.take(group, offsets)
            move = dead_letters.move_letters(
                group, topic.name, topic.queue, offsets, due_ms, self._id_salt, details
            )
            self._entries.append(move)
        return bool(len(offsets)) or leases.unfinished

    def redrive(
        self, group: Group, offsets: U64, done: OnResult,
        allows: Callable[[str], bool] = lambda _: True,
    ) -> list[Move]:  # fmt: skip
        """Move dead letters, which are in memory, back to the topics that they came from.

        Returns the MOVE ops; `done` gets each MoveApplied. `offsets` ascend. Letters stay if their
        headers name no existing topic that `allows` accepts, or no group that `sends_to` accepts.

        Raises:
            EngineError: the leadership or the group is gone, or a topic is being deleted.
        """
        self._check_group(group)
        topic = self.machine.topics[group.topic]
        due_ms, known = self.machine.last_read_time_ms, self.machine.topic_by_name

        def is_allowed(name: str, of_group: str) -> bool:
            source = known.get(name)
            if source is None or source is topic or not allows(name):
                return False
            self.check_topic(source.topic_id)
            return dead_letters.sends_to(source, of_group, topic.name)

        moves = dead_letters.redrive(group, topic.queue, offsets, due_ms, is_allowed)
        if moves and offsets[-1] >= group.undelivered_from:  # an op takes no message beyond
            self._entries.add(GroupOp(Op.RESERVE, group.topic, group.group_id, offsets[-1:] + 1))
        self._entries.append(*moves, done=done)
        return moves

    def feed(self, topics: Iterable[TopicId]) -> None:
        """Look again at the groups of topics with new messages."""
        for topic_id in topics:
            self.expiry.feed(topic_id)
            for group in self.machine.topics[topic_id].groups.values():
                if group.group_id in self._leases:
                    self._turns.want(group.group_id)

    def on_pages_read(self) -> None:
        """Look again at the groups and topics that wait for pages: some were read from disk."""
        self.expiry.on_pages_read()
        self._turns.on_pages_read()

    # ---- the log

    def hand_over(self, now: Now) -> bool:
        """Append what waits, and HAND_OVER ops: they give a successor the groups' delivery state.

        Nothing is delivered from the first call on. Returns whether another call is needed.
        """
        if self._to_hand_over is None:
            self._to_hand_over = (op for one in [*self._leases.values()] for op in one.hand_over())
        return self._entries.hand_over(self._to_hand_over, now)

    def flush(self, now: Now) -> None:
        """Append one entry of the ops and acks that wait, unless enough are in flight."""
        self._resolve_seeks()
        self._entries.flush(now)

    def _on_result(self, result: GroupResult) -> None:
        """Pass an applied result on to the group's leases."""
        if isinstance(result, MoveApplied):
            self.feed([result.to])
        if isinstance(result, Group):
            if (leases := self._leases.get(result.group_id)) is not None:
                leases.on_settings_changed()
            self.feed([result.topic])  # its altered settings may make messages dead letters
            self.expiry.check_topic(result.topic)
            return
        if isinstance(result, SeekApplied | DeleteApplied):
            self._drop_group_leases(result)
            self.expiry.check_topic(result.op.topic)
            return
        if isinstance(result, NoEffectApplied):
            return
        changed = AcksApplied | MoveApplied | ExpireApplied
        op = result.op if isinstance(result, changed) else result
        if (leases := self._leases.get(op.group)) is not None:
            leases.on_applied(op)
            self._turns.want(op.group)

    def _drop_group_leases(self, result: SeekApplied | DeleteApplied) -> None:
        """Drop a group's leases; end the streams of its consumers if it was deleted."""
        deleted = result.group.name if isinstance(result, DeleteApplied) else None
        self._rates.forget_group(result.op.topic, result.op.group, deleted)
        for consumer in self._forget(result.op.group):
            if isinstance(result, SeekApplied):
                consumer.recall(None)
                self._leases_of(result.group).join(consumer)
                self._turns.want(result.group.group_id)
            else:
                consumer.end(deleted_error(self.machine, result.group))

    def on_topic_deleted(self, applied: DeleteTopicApplied) -> None:
        """Drop the leases of a deleted topic's groups, and end their consumers' streams."""
        self.deleting.discard(applied.op.topic)
        self._rates.forget_topic(applied.op.topic)
        self.expiry.forget(applied.op.topic)
        for group in applied.topic.groups.values() if applied.topic is not None else ():
            for consumer in self._forget(group.group_id):
                consumer.end(deleted_error(self.machine, group))

    def _forget(self, group: GroupId) -> list[ConsumerStream]:
        """Forget the leases, turns and alarms of an id; return its consumers, without leases."""
        old = self._leases.pop(group, None)
        self._turns.drop(group)
        for alarms in (self._ends, self._returns, self._rates.alarms):
            alarms.forget(group)
        for consumer in (consumers := [*old.consumers] if old is not None else []):
            consumer.leases.clear()
        return consumers

    def close(self, why: EngineError) -> None:
        """End the epoch: pass the error to all that wait. Ops in the batch had no effect."""
        self._closed = why
        for _, _, done in self._seeks:
            done(why)
        self._seeks = []
        self._entries.close(why)
