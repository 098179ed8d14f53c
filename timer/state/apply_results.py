"""What the machine answers whoever proposed an entry: one result per kind of entry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from timer.entries import payloads
from timer.entries.payloads import AlterGroup, CreateGroup, DeleteTopic, GroupOp, Ids, Move
from timer.entries.policies import Policies
from timer.model.columns import RowArray
from timer.model.timer_errors import EngineError
from timer.model.units import Epoch, LogIndex, ProducerId, QueueOffset, Seq, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.producers import RequestAnswer

CANCELLED: Final = 1
ALREADY_CANCELLED: Final = 2
ALREADY_FIRED: Final = 3
NOT_FOUND: Final = 4
RESCHEDULED: Final = CANCELLED
LEFT: Final = 5
"""Of a reschedule: still pending as it was; ask again."""
DROPPED: Final = 6
"""It was held, and its topic went on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a replica records at a CHECKPOINT entry; the same on all, digest included (P6)."""

    epoch: Epoch
    index: LogIndex
    time_ms: UnixMs
    last_read_time_ms: UnixMs
    queue_offsets: Mapping[str, QueueOffset]
    """Topic -> offset after its last fired message."""
    digest: str
    since: LogIndex = field(default=LogIndex(0), compare=False)
    """The checkpoint before; 0: there was none, or this one was read from a manifest."""
    moved: Mapping[str, QueueOffset | None] = field(default_factory=dict, compare=False)
    """Of `queue_offsets`, what differs from that one; None: the topic is gone."""


@dataclass(frozen=True, slots=True)
class ScheduleApplied:
    """Per part of the entry: its answer and whether it is a repeated one, or why it was refused."""

    parts: tuple[tuple[RequestAnswer, bool] | EngineError, ...]
    ready: tuple[TopicId, ...]
    """Topics whose queues grew, by rows that were due already."""
    keyed: int = 0
    """Rows that have a key: each was looked for."""
    topics: int = 0
    """Topics that have new timers."""


@dataclass(frozen=True, slots=True)
class CancelApplied:
    """Per target: CANCELLED, ALREADY_CANCELLED, ALREADY_FIRED, NOT_FOUND or DROPPED, (n, uint8)."""

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
    """More rows are due, or held and to be released; another FIRE must follow."""
    released: tuple[tuple[TopicId, RowArray], ...] = ()
    """What was held and has fired, in this order; a topic may be there twice."""
    dropped: tuple[tuple[TopicId, RowArray], ...] = ()
    """What was held and never fires."""


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
    """An op of a group that was deleted or sought before, or whose topic was: nothing was done."""

    op: CreateGroup | GroupOp | AlterGroup


@dataclass(frozen=True, slots=True)
class ExpireApplied:
    """An EXPIRE_BELOW op, or an EXPIRE op."""

    op: GroupOp
    groups: int
    """How many it was to change."""


GroupResult: TypeAlias = (
    Group
    | AcksApplied
    | MoveApplied
    | SeekApplied
    | DeleteApplied
    | ExpireApplied
    | NobodyApplied
    | GroupOp
)


@dataclass(frozen=True, slots=True)
class GroupApplied:
    """Per op: the group created, found or altered, what it changed, or the op as it was applied."""

    results: tuple[GroupResult, ...]


@dataclass(frozen=True, slots=True)
class DeleteTopicApplied:
    """A topic's deletion, and what went with it."""

    op: DeleteTopic
    topic: Topic | None
    """None: it was gone before."""
    dropped: int = 0
    """Timers that were pending."""
    messages: int = 0
    """That it still kept: fired, and not acked by every group."""
    groups: tuple[tuple[str, int], ...] = ()
    """(Name, messages that it had not acked) of each."""


Applied: TypeAlias = (
    ScheduleApplied
    | CancelApplied
    | RescheduleApplied
    | FireApplied
    | GroupApplied
    | payloads.EpochStart
    | Policies
    | Topic
    | DeleteTopicApplied
    | ProducerId
    | Checkpoint
)
