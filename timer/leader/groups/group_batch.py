"""The batch for the next GROUP entry: ops, acks and nacks, with the callbacks for their results.

    ack, nack --> Acks       those of one group become one op --+--> GROUP entry --applied--> answer
    all others -> PendingOp  an op each, in order             --+

A pure core, a part of timer/leader/groups/group_entries.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from timer.entries.payloads import AnyOp, GroupOp, Move, Nack, Op
from timer.leader.groups.group_leases import (
    ACCEPT,
    ALREADY_ACKED,
    DEAD_LETTERED,
    EXPIRED,
    LEASE_LOST,
    end_verdicts,
)
from timer.model.columns import I64, U64
from timer.model.timer_errors import EngineError
from timer.model.units import GroupId
from timer.ready.group import Group

GROUP_OFFSETS_MAX: Final = 2 * 65_536
"""Weight that fits into one GROUP entry; an acked offset has weight 1."""
NACK_WEIGHT: Final = 8
"""Weight of a nacked, recalled or ended offset: 16,384 of them take about 10 ms to apply."""
OP_WEIGHT: Final = 2048
"""Weight of an op beside its offsets: 64 small ops on 64 groups take about 5 ms to apply."""
OP_OFFSETS_MAX: Final = 65_536
"""Most offsets in one op."""
ENDED_OFFSETS_MAX: Final = (GROUP_OFFSETS_MAX - OP_WEIGHT) // NACK_WEIGHT
"""Most offsets in one op of ended or recalled leases."""

Verdicts: TypeAlias = npt.NDArray[np.uint8]
OnResult: TypeAlias = Callable[[object], None]
"""Called once with the op's result, or with the EngineError that replaced it."""
OnVerdicts: TypeAlias = Callable[[Verdicts | EngineError], None]


class PendingOp(NamedTuple):
    """An op and the callback for its result; None: no caller waits for it."""

    op: AnyOp
    done: OnResult | None = None


@dataclass(slots=True)
class Acks:
    """Accepted offsets of one ack or nack request, on their way through the log."""

    group: Group
    group_id: GroupId
    """The group's id when the acks were accepted. A seek assigns a new one."""
    verdict: Verdicts
    accepted: U64
    not_before_ms: I64 | None
    """Earliest redelivery of each nacked offset, Unix milliseconds, (n,). None: an ack."""
    done: OnVerdicts


_Same: TypeAlias = tuple[GroupId, bool]
"""The group, and whether these are nacks: acks with the same pair become one op."""


@dataclass(slots=True)
class GroupBatch:
    """Ops and acks that wait for the next GROUP entries, or that go into one."""

    pending_ops: list[PendingOp] = field(default_factory=list)
    acks: list[Acks] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pending_ops or self.acks)

    def append(self, *ops: AnyOp, done: OnResult | None = None) -> None:
        """Add ops; `done` gets the result of each."""
        self.pending_ops += [PendingOp(op, done) for op in ops]

    def add(self, op: GroupOp | None) -> None:
        """Add an op, split at ENDED_OFFSETS_MAX offsets; None or an empty op adds nothing."""
        if op is not None and len(op.offsets):
            where, parts = (op.op, op.topic, op.group), pieces(op.offsets, ENDED_OFFSETS_MAX)
            self.pending_ops += [PendingOp(GroupOp(*where, piece)) for piece in parts]

    def add_some(self, ops: Iterator[GroupOp]) -> bool:
        """Add the next ops, of about one entry; return whether there may be more."""
        weight_left = GROUP_OFFSETS_MAX
        for op in ops:
            self.add(op)
            weight_left -= _weight(op)
            if weight_left <= 0:
                return True
        return False

    def take(self) -> "GroupBatch":
        """Remove and return the first ops and acks that fit into one entry."""
        weight_left = GROUP_OFFSETS_MAX
        ops, weight_left = count_fitting(
            (_weight(pending.op) for pending in self.pending_ops), weight_left
        )
        ops = ops or len(self.pending_ops[:1])  # at least one, even if it is over the limit
        acks, _ = count_fitting(self._ack_weights(), weight_left)
        acks = acks or len(self.acks[:1])
        taken = GroupBatch(self.pending_ops[:ops], self.acks[:acks])
        del self.pending_ops[:ops], self.acks[:acks]
        return taken

    def _ack_weights(self) -> Iterator[int]:
        """Yield the weight of each request; only the first of one op has the op's own weight."""
        seen: set[_Same] = set()
        for ack in self.acks:
            same = ack.group_id, ack.not_before_ms is not None
            weight = len(ack.accepted) * (NACK_WEIGHT if same[1] else 1)
            yield weight if same in seen else weight + OP_WEIGHT
            seen.add(same)

    def put_back(self, batch: "GroupBatch") -> None:
        """Undo a `take`, except for ops with a callback: their callers got the error."""
        self.pending_ops[:0] = [pending for pending in batch.pending_ops if pending.done is None]
        self.acks[:0] = batch.acks

    def acks_by_op(self) -> dict[_Same, list[Acks]]:
        """Return the acks grouped by the op that they become, in order."""
        acks: dict[_Same, list[Acks]] = {}
        for ack in self.acks:
            acks.setdefault((ack.group_id, ack.not_before_ms is not None), []).append(ack)
        return acks

    def ops(self) -> list[AnyOp]:
        """Return the entry's ops: first those in `pending_ops`, then one for each group of acks."""
        ops: list[AnyOp] = [pending.op for pending in self.pending_ops]
        return ops + [_op_of(acks) for acks in self.acks_by_op().values()]

    def reject_ops(
        self, why: EngineError, is_unwanted: Callable[[AnyOp], bool] = lambda _: True
    ) -> None:
        """Drop the unwanted ops that have a callback, and pass them the error."""
        remaining: list[PendingOp] = []
        gathered, self.pending_ops = self.pending_ops, remaining
        for pending in gathered:
            if pending.done is not None and is_unwanted(pending.op):
                pending.done(why)
            else:
                remaining.append(pending)

    @property
    def offsets(self) -> int:
        """Number of offsets in the batch's acks and nacks."""
        return sum(len(ack.accepted) for ack in self.acks)


def pieces(offsets: U64, most: int = OP_OFFSETS_MAX) -> list[U64]:
    """Split offsets into pieces of at most `most`."""
    if len(offsets) <= most:
        return [offsets]
    return np.split(offsets, range(most, len(offsets), most))


def _weight(op: AnyOp) -> int:
    if isinstance(op, Move):
        return OP_WEIGHT + len(op.rows) // 8 + len(op.offsets)
    if not isinstance(op, GroupOp):
        return OP_WEIGHT
    return OP_WEIGHT + len(op.offsets) * (NACK_WEIGHT if op.op in (Op.ENDED, Op.RECALL) else 1)


def count_fitting(weights: Iterable[int], weight_max: int) -> tuple[int, int]:
    """Return how many of the first weights fit into `weight_max`, and the weight that is left."""
    count = 0
    for weight in weights:
        if weight > weight_max:
            break
        count += 1
        weight_max -= weight
    return count, weight_max


def _op_of(acks: list[Acks]) -> GroupOp:
    topic, group_id = acks[0].group.topic, acks[0].group_id
    offsets = np.concatenate([ack.accepted for ack in acks])
    times = [ack.not_before_ms for ack in acks if ack.not_before_ms is not None]
    if times:
        return Nack(Op.NACK, topic, group_id, offsets, np.concatenate(times))
    return GroupOp(Op.ACK, topic, group_id, offsets)


def answer_acks(acks: list[Acks], new: npt.NDArray[np.bool_]) -> None:
    """Answer the acks of one op. `new`: which offsets were unacked when the op was applied."""
    start = 0
    for ack in acks:
        mine = new[start : start + len(ack.accepted)]
        start += len(ack.accepted)
        if not mine.all():
            where = np.flatnonzero(ack.verdict == ACCEPT)
            ack.verdict[where[~mine]] = end_verdicts(ack.group, ack.accepted[~mine])
        ack.done(ack.verdict)


def worst_verdict(results: list[Verdicts | EngineError]) -> Verdicts | EngineError:
    """Return the worst verdict, (1, uint8), of messages that were acked together, or the error."""
    verdicts: list[Verdicts] = []
    for each in results:
        if isinstance(each, EngineError):
            return each
        verdicts.append(each)
    found = {*np.concatenate(verdicts).tolist()}
    worst = (LEASE_LOST, DEAD_LETTERED, EXPIRED, ACCEPT, ALREADY_ACKED)
    return np.array([next(each for each in worst if each in found)], np.uint8)
