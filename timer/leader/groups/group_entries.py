"""The leader's GROUP entries: ops and acks of groups on their way through the log.

    op, ack, nack --append, add, settle--> batch --flush--> GROUP entry
    GROUP entry --applied--> `on_result` for each result, and the answer to each caller

A pure core, a part of timer/leader/groups/group_dispatch.py.
"""

from collections.abc import Callable, Iterator
from typing import Final

from timer.entries import payloads
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import AnyOp, CreateGroup, GroupOp
from timer.leader.groups import group_batch
from timer.leader.groups.expiry import Propose
from timer.leader.groups.group_batch import Acks, GroupBatch, OnResult, OnVerdicts, Verdicts
from timer.leader.groups.group_leases import ACCEPT, LEASE_LOST
from timer.model.columns import I64, U64
from timer.model.timer_errors import (
    OVERLOAD_RETRY_MS,
    EngineError,
    GroupDeletedError,
    NotFoundError,
    OverloadedError,
    TopicDeletedError,
)
from timer.model.units import Now
from timer.ready.group import Group
from timer.state.apply_results import (
    AcksApplied,
    Applied,
    GroupApplied,
    GroupResult,
    NoEffectApplied,
)
from timer.state.machine import Machine

WAITING_OFFSETS_MAX: Final = 1 << 20
"""Acked and nacked offsets that may wait; above that they are rejected with OverloadedError."""
IN_FLIGHT_MAX: Final = 2
"""Most GROUP entries in flight; above that ops and acks wait in the batch."""
OPS_MAX: Final = 256
"""Most ops that wait; above that dead letters stay in their group. An op may have a megabyte."""


class GroupEntries:
    """Ops and acks that wait for an entry or for its commit, in one epoch."""

    def __init__(
        self, machine: Machine, propose: Propose, on_result: Callable[[GroupResult], None]
    ) -> None:
        """`on_result`: gets each result that was applied, before its caller."""
        self._machine = machine
        self._propose = propose
        self._on_result = on_result
        self._batch = GroupBatch()
        self._acks_waiting = 0
        """Offsets in the acks of `_batch`."""
        self._in_flight = 0
        self._closed: EngineError | None = None

    def __bool__(self) -> bool:
        """Return whether ops or acks wait that are not appended."""
        return bool(self._batch)

    @property
    def has_many_ops(self) -> bool:
        """Whether OPS_MAX ops wait."""
        return len(self._batch.pending_ops) >= OPS_MAX

    def append(self, *ops: AnyOp, done: OnResult | None = None) -> None:
        """Let ops wait for the next entry; `done` gets the result of each."""
        self._batch.append(*ops, done=done)

    def add(self, op: GroupOp | None) -> None:
        """Let an op wait for the next entry; None or an op without offsets changes nothing."""
        self._batch.add(op)

    def check_room(self, offsets: int) -> None:
        """Check that so many offsets of acks may wait.

        Raises:
            OverloadedError: too many wait already.
        """
        if self._acks_waiting + offsets > WAITING_OFFSETS_MAX:
            raise OverloadedError("the leader's queue of acks", retry_after_ms=OVERLOAD_RETRY_MS)

    def settle(
        self, group: Group, verdict: Verdicts, offsets: U64, return_ms: I64 | None, done: OnVerdicts
    ) -> None:
        """Let the accepted ones of acked or nacked offsets wait for the next entry.

        `return_ms`: the earliest redelivery of each nacked offset. None: they are acked. `done`
        gets the verdicts once the entry is applied; at once, if none was accepted.
        """
        is_accepted = verdict == ACCEPT
        accepted = offsets[is_accepted]
        if not len(accepted):
            done(verdict)
            return
        times = None if return_ms is None else return_ms[is_accepted]
        self._batch.acks.append(Acks(group, group.group_id, verdict, accepted, times, done))
        self._acks_waiting += len(accepted)

    def reject_ops(self, why: EngineError, is_unwanted: Callable[[AnyOp], bool]) -> None:
        """Drop the unwanted ops that wait with a callback, and pass them the error."""
        self._batch.reject_ops(why, is_unwanted)

    def flush(self, now: Now) -> None:
        """Append one entry, unless IN_FLIGHT_MAX entries are in flight."""
        if self._batch and self._in_flight < IN_FLIGHT_MAX:
            self._flush(now)

    def hand_over(self, ops: Iterator[GroupOp], now: Now) -> bool:
        """Append all that waits, and then the next ops; return whether there may be more of these.

        Acks and nacks go before their group's ops. If the log rejects some, the ops wait.
        """
        while self._batch and self._flush(now):
            pass
        more = not self._batch and self._batch.add_some(ops)
        while self._batch and self._flush(now):
            pass
        return more

    def _flush(self, now: Now) -> bool:
        """Append one entry of the batch; return whether the log accepted it."""
        batch = self._batch.take()
        self._acks_waiting -= batch.offsets
        self._in_flight += 1

        def answer(applied: Applied | EngineError) -> None:
            self._in_flight -= 1
            if isinstance(applied, GroupApplied):
                self._on_applied(batch, applied)
                return
            assert isinstance(applied, EngineError)
            batch.reject_ops(applied)
            if self._closed is None:
                # Rejected before the append: acks and ops without a callback are tried again.
                self._batch.put_back(batch)
                self._acks_waiting += batch.offsets
                return
            for ack in batch.acks:
                ack.done(applied)

        return self._propose(EntryKind.GROUP, payloads.encode_group(batch.ops()), now, answer)

    def _on_applied(self, batch: GroupBatch, applied: GroupApplied) -> None:
        waiters = [pending.done for pending in batch.pending_ops]
        for result, done in zip(applied.results, waiters, strict=False):
            self._on_result(result)
            if done is not None and isinstance(result, NoEffectApplied):
                done(self._no_effect_error(result.op))
            elif done is not None:
                done(result)
        acks_by_op = batch.acks_by_op().values()
        for result, acks in zip(applied.results[len(waiters) :], acks_by_op, strict=True):
            if isinstance(result, NoEffectApplied):
                self._answer_without_effect(acks)
                continue
            assert isinstance(result, AcksApplied), result
            self._on_result(result)
            group_batch.answer_acks(acks, result.new)

    def _no_effect_error(self, op: AnyOp) -> EngineError:
        """Return the error for an op without effect."""
        if isinstance(op, CreateGroup) or op.topic not in self._machine.topics:
            return TopicDeletedError(op.topic)
        return NotFoundError("group", op.group)

    def _answer_without_effect(self, acks: list[Acks]) -> None:
        """Answer acks of a group that was deleted or moved by a seek meanwhile."""
        for ack in acks:
            if ack.group.deleted:
                ack.done(deleted_error(self._machine, ack.group))
            else:
                ack.verdict[:] = LEASE_LOST
                ack.done(ack.verdict)

    def close(self, why: EngineError) -> None:
        """End the epoch: pass the error to all that wait. Ops in the batch had no effect."""
        self._closed = why
        batch, self._batch = self._batch, GroupBatch()
        batch.reject_ops(why)
        for ack in batch.acks:
            ack.done(why)


def deleted_error(machine: Machine, group: Group) -> EngineError:
    """Return the error for a request to a deleted group."""
    if group.deleted_with:
        return TopicDeletedError(group.deleted_with)
    topic = machine.topics.get(group.topic)  # None: the topic was deleted after the group
    if topic is None:
        return TopicDeletedError(group.topic)
    return GroupDeletedError(topic.name, group.name)
