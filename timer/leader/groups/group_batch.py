"""The batch for the next GROUP entry: ops, acks and nacks, with the callbacks for their results.

    ack, nack --> Acks       those of one group become one op --+--> GROUP entry --applied--> answer
    all others -> PendingOp  an op each, in order             --+

A pure core, a part of timer/leader/groups/group_dispatch.py.
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
    how_done,
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
Done: TypeAlias = Callable[[object], None]
"""Called once with the op's result, or with the EngineError that replaced it."""
Told: TypeAlias = Callable[[Verdicts | EngineError], None]


class PendingOp(NamedTuple):
    """An op and the callback for its result; None: no caller waits for it."""

    op: AnyOp
    done: Done | None = None


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
    done: Told


_Same: TypeAlias = tuple[GroupId, bool]
"""The group, and whether these are nacks: acks with the same pair become one op."""


@dataclass(slots=True)
class GroupBatch:
    """Ops and acks that wait for the next GROUP entries, or that go into one."""

    asked: list[PendingOp] = field(default_factory=list)
    acks: list[Acks] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.asked or self.acks)

    def add(self, op: GroupOp | None) -> None:
        """Add an op, split at ENDED_OFFSETS_MAX offsets; None or an empty op adds nothing."""
        if op is not None and len(op.offsets):
            where, parts = (op.op, op.topic, op.group), pieces(op.offsets, ENDED_OFFSETS_MAX)
            self.asked += [PendingOp(GroupOp(*where, piece)) for piece in parts]

    def take(self) -> "GroupBatch":
        """Remove and return the first ops and acks that fit into one entry."""
        room = GROUP_OFFSETS_MAX
        ops, room = fitting((_weight(asked.op) for asked in self.asked), room)
        ops = ops or len(self.asked[:1])  # at least one, even if it is over the limit
        acks, _ = fitting(self._ack_weights(), room)
        acks = acks or len(self.acks[:1])
        taken = GroupBatch(self.asked[:ops], self.acks[:acks])
        del self.asked[:ops], self.acks[:acks]
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
        self.asked[:0] = [asked for asked in batch.asked if asked.done is None]
        self.acks[:0] = batch.acks

    def together(self) -> dict[_Same, list[Acks]]:
        """Return the acks grouped by the op that they become, in order."""
        acks: dict[_Same, list[Acks]] = {}
        for ack in self.acks:
            acks.setdefault((ack.group_id, ack.not_before_ms is not None), []).append(ack)
        return acks

    def ops(self) -> list[AnyOp]:
        """Return the entry's ops: first those in `asked`, then one for each group of acks."""
        ops: list[AnyOp] = [asked.op for asked in self.asked]
        return ops + [_one_op(acks) for acks in self.together().values()]

    def refuse(self, why: EngineError, unwanted: Callable[[AnyOp], bool]) -> None:
        """Drop the unwanted ops that have a callback, and pass them the error."""
        kept: list[PendingOp] = []
        gathered, self.asked = self.asked, kept
        for asked in gathered:
            if asked.done is not None and unwanted(asked.op):
                asked.done(why)
            else:
                kept.append(asked)

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


def fitting(weights: Iterable[int], room: int) -> tuple[int, int]:
    """Return how many of the first weights fit into `room`, and the room that is left."""
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
    """Answer the acks of one op. `new`: which offsets were unacked when the op was applied."""
    start = 0
    for ack in acks:
        mine = new[start : start + len(ack.accepted)]
        start += len(ack.accepted)
        if not mine.all():
            where = np.flatnonzero(ack.verdict == ACCEPT)
            ack.verdict[where[~mine]] = how_done(ack.group, ack.accepted[~mine])
        ack.done(ack.verdict)


def whole(told: list[Verdicts | EngineError]) -> Verdicts | EngineError:
    """Return the worst verdict, (1, uint8), of messages that were acked together, or the error."""
    verdicts: list[Verdicts] = []
    for each in told:
        if isinstance(each, EngineError):
            return each
        verdicts.append(each)
    found = {*np.concatenate(verdicts).tolist()}
    worst = (LEASE_LOST, DEAD_LETTERED, EXPIRED, ACCEPT, ALREADY_ACKED)
    return np.array([next(each for each in worst if each in found)], np.uint8)
