"""What is gathered for the next GROUP entry: ops, acks and nacks, and who waits for them.

    ack, nack ----> Acks    those of one group become one op  --+--> GROUP entry --applied--> answer
    all others ---> Asked   an op each, in order              --+

A pure core, a part of timer/leader/groups/group_dispatch.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from timer.entries.payloads import AnyOp, GroupOp, Move, Nack, Op
from timer.leader.groups.shared_leases import (
    ACCEPT,
    ALREADY_ACKED,
    DEAD_LETTERED,
    EXPIRED,
    LEASE_LOST,
    how_done,
)
from timer.model.columns import I64, U64
from timer.model.timer_errors import EngineError
from timer.model.units import GroupId
from timer.ready.group import Group

GROUP_OFFSETS_MAX: Final = 2 * 65_536
"""Offsets in one GROUP entry."""
NACK_WEIGHT: Final = 8
"""What a nacked offset counts for in there: to apply 16,384 in any order takes about 10 ms."""
OP_WEIGHT: Final = 1024
"""What an op counts for besides: 128 of few offsets, of as many groups, take about 8 ms."""
OP_OFFSETS_MAX: Final = 65_536
"""Offsets in one op."""

Verdicts: TypeAlias = npt.NDArray[np.uint8]
Done: TypeAlias = Callable[[object], None]
"""Called once with the result, or with the EngineError that came instead."""
Told: TypeAlias = Callable[[Verdicts | EngineError], None]


class PendingOp(NamedTuple):
    """An op, and who waits for its result."""

    op: AnyOp
    done: Done | None = None


@dataclass(slots=True)
class Acks:
    """Accepted offsets of one ack or nack request on their way through the log."""

    group: Group
    group_id: GroupId
    """That it had when the acks were taken: a seek gives it another."""
    verdict: Verdicts
    accepted: U64
    not_before_ms: I64 | None
    """Of a nack, (n,)."""
    done: Told


_Same: TypeAlias = tuple[GroupId, bool]
"""Acks that become one op: those of a group, or its nacks."""


@dataclass(slots=True)
class GroupBatch:
    """What waits for the next GROUP entries, or goes into one."""

    asked: list[PendingOp] = field(default_factory=list)
    acks: list[Acks] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.asked or self.acks)

    def add(self, op: GroupOp | None) -> None:
        """Gather an op, in pieces that fit; None, or one without offsets: there is none."""
        if op is not None and len(op.offsets):
            where = op.op, op.topic, op.group
            self.asked += [PendingOp(GroupOp(*where, piece)) for piece in pieces(op.offsets)]

    def take(self) -> "GroupBatch":
        """Split off what comes next and fits into one entry."""
        room = GROUP_OFFSETS_MAX
        ops, room = fitting((_weight(asked.op) for asked in self.asked), room)
        ops = ops or len(self.asked[:1])  # at least one of anything
        acks, _ = fitting(self._ack_weights(), room)
        acks = acks or len(self.acks[:1])
        taken = GroupBatch(self.asked[:ops], self.acks[:acks])
        del self.asked[:ops], self.acks[:acks]
        return taken

    def _ack_weights(self) -> Iterator[int]:
        """Yield what each request counts for: acks of one group become one op."""
        seen: set[_Same] = set()
        for ack in self.acks:
            same = ack.group_id, ack.not_before_ms is not None
            weight = len(ack.accepted) * (NACK_WEIGHT if same[1] else 1)
            yield weight if same in seen else weight + OP_WEIGHT
            seen.add(same)

    def put_back(self, batch: "GroupBatch") -> None:
        """Undo a `take`, but for what somebody waits for: these were answered."""
        self.asked[:0] = [asked for asked in batch.asked if asked.done is None]
        self.acks[:0] = batch.acks

    def together(self) -> dict[_Same, list[Acks]]:
        """Return the acks that become one op, in order."""
        acks: dict[_Same, list[Acks]] = {}
        for ack in self.acks:
            acks.setdefault((ack.group_id, ack.not_before_ms is not None), []).append(ack)
        return acks

    def ops(self) -> list[AnyOp]:
        """Return what the entry says: the ops that were asked for, then one for acks together."""
        ops: list[AnyOp] = [asked.op for asked in self.asked]
        return ops + [_one_op(acks) for acks in self.together().values()]

    def refuse(self, why: EngineError, unwanted: Callable[[AnyOp], bool]) -> None:
        """Drop ops that somebody waits for, and tell so."""
        kept: list[PendingOp] = []
        gathered, self.asked = self.asked, kept
        for asked in gathered:
            if asked.done is not None and unwanted(asked.op):
                asked.done(why)
            else:
                kept.append(asked)

    @property
    def offsets(self) -> int:
        """How many offsets its acks have."""
        return sum(len(ack.accepted) for ack in self.acks)


def pieces(offsets: U64) -> list[U64]:
    """Return offsets in pieces for one op each."""
    return np.split(offsets, range(OP_OFFSETS_MAX, len(offsets), OP_OFFSETS_MAX))


def _weight(op: AnyOp) -> int:
    if isinstance(op, Move):
        return OP_WEIGHT + len(op.rows) // 8 + len(op.offsets)
    return OP_WEIGHT + len(op.offsets) if isinstance(op, GroupOp) else OP_WEIGHT


def fitting(weights: Iterable[int], room: int) -> tuple[int, int]:
    """Return how many of the weights fit one after the other, and the room that they leave."""
    count = 0
    for weight in weights:
        if weight > room:
            break
        count += 1
        room -= weight
    return count, room


def _one_op(acks: list[Acks]) -> GroupOp:
    topic, group_id = acks[0].group.topic, acks[0].group_id
    offsets = np.concatenate([ack.accepted for ack in acks])
    times = [ack.not_before_ms for ack in acks if ack.not_before_ms is not None]
    if times:
        return Nack(Op.NACK, topic, group_id, offsets, np.concatenate(times))
    return GroupOp(Op.ACK, topic, group_id, offsets)


def answer(acks: list[Acks], new: npt.NDArray[np.bool_]) -> None:
    """Tell what became of acks that were one op, of which these offsets were still open."""
    start = 0
    for ack in acks:
        mine = new[start : start + len(ack.accepted)]
        start += len(ack.accepted)
        if not mine.all():
            where = np.flatnonzero(ack.verdict == ACCEPT)
            ack.verdict[where[~mine]] = how_done(ack.group, ack.accepted[~mine])
        ack.done(ack.verdict)


def whole(told: list[Verdicts | EngineError]) -> Verdicts | EngineError:
    """Return one verdict, (1, uint8), on messages that were acked together."""
    verdicts: list[Verdicts] = []
    for each in told:
        if isinstance(each, EngineError):
            return each
        verdicts.append(each)
    found = {*np.concatenate(verdicts).tolist()}
    worst = (LEASE_LOST, DEAD_LETTERED, EXPIRED, ACCEPT, ALREADY_ACKED)
    return np.array([next(each for each in worst if each in found)], np.uint8)
