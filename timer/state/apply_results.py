"""Results that the machine returns to the proposer of an entry, one type per kind of entry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from timer.entries import payloads
from timer.entries.payloads import AlterGroup, CreateGroup, DeleteTopic, GroupOp, Ids, Move
from timer.entries.policies import Policies
from timer.entries.series_payloads import SeriesOp
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
ENTRY_FULL: Final = 5
"""Reschedule only: the timer is still pending, unchanged, because the entry was full; retry."""
DROPPED: Final = 6
"""The timer was held, and its topic's resume dropped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A replica's record at a CHECKPOINT entry; equal on all replicas, digest included."""

    epoch: Epoch
    index: LogIndex
    time_ms: UnixMs
    last_read_time_ms: UnixMs
    queue_offsets: Mapping[str, QueueOffset]
    """Topic name -> offset after its last fired message."""
    digest: str
    since: LogIndex = field(default=LogIndex(0), compare=False)
    """Index of the previous checkpoint. 0: none, or this checkpoint was read from a manifest."""
    moved: Mapping[str, QueueOffset | None] = field(default_factory=dict, compare=False)
    """Entries of `queue_offsets` that changed since then. None: the topic was deleted."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A schedule request whose rows got seqs."""

    answer: RequestAnswer


@dataclass(frozen=True, slots=True)
class Repeated:
    """A schedule request that was accepted before. It changes nothing."""

    answer: RequestAnswer


PartResult: TypeAlias = Accepted | Repeated | EngineError
"""The result of one schedule request; the error if it was refused."""


@dataclass(frozen=True, slots=True)
class ScheduleApplied:
    """The result of each part of the entry, in their order."""

    parts: tuple[PartResult, ...]
    ready: tuple[TopicId, ...]
    """Topics with new messages: rows that were due already."""
    keyed: int = 0
    """Rows that have a key; the machine looked up each key."""
    topics: int = 0
    """Number of topics with new timers."""


@dataclass(frozen=True, slots=True)
class CancelApplied:
    """Per target: CANCELLED, ALREADY_CANCELLED, ALREADY_FIRED, NOT_FOUND or DROPPED, (n, uint8)."""

    results: npt.NDArray[np.uint8]
    targets: Ids
    """The timers that the targets stood for. seq = 0: no pending timer has the key."""


@dataclass(frozen=True, slots=True)
class RescheduleApplied:
    """Per target: RESCHEDULED, ENTRY_FULL or, if not pending, a cancel's result, (n, uint8)."""

    results: npt.NDArray[np.uint8]
    targets: Ids
    """The timers that the targets stood for. seq = 0: no pending timer has the key."""
    timers: Ids
    """The new timers; valid where the result is RESCHEDULED."""
    ready: tuple[TopicId, ...]
    """Topics with new messages: rows that were due already."""
    moved_bytes: int
    """Payloads, keys and headers of all timers that the entry moved."""


@dataclass(frozen=True, slots=True)
class FireApplied:
    """The rows that one FIRE moved, per topic in the order of topic ids."""

    fired: tuple[tuple[TopicId, RowArray], ...]
    limited: bool
    """More rows are due, or held and to be released. Another FIRE must follow."""
    released: tuple[tuple[TopicId, RowArray], ...]
    """Held rows that fired, in this order; a topic may appear twice."""
    dropped: tuple[tuple[TopicId, RowArray], ...]
    """Held rows that were dropped and never fire."""


@dataclass(frozen=True, slots=True)
class AcksApplied:
    """An ACK or NACK op, and which of its offsets were unacked before it, (n, bool)."""

    op: GroupOp
    new: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MoveApplied:
    """A MOVE op, which of its offsets were unacked before it (n, bool), and the target topic."""

    op: Move
    new: npt.NDArray[np.bool_]
    to: TopicId
    first_seq: Seq
    """First of as many seqs as offsets. A message that did not move leaves its seq unused."""
    created_group: Group | None
    """The group that the op created in the target topic. None: it created none."""


@dataclass(frozen=True, slots=True)
class SeekApplied:
    """A SEEK op, which carries the group's previous id, and the group at its new offset."""

    op: GroupOp
    group: Group


@dataclass(frozen=True, slots=True)
class DeleteApplied:
    """A DELETE op and the deleted group."""

    op: GroupOp
    group: Group


@dataclass(frozen=True, slots=True)
class NoEffectApplied:
    """An op without effect: its topic or group was deleted, or a seek changed the group's id."""

    op: CreateGroup | GroupOp | AlterGroup


@dataclass(frozen=True, slots=True)
class ExpireApplied:
    """An EXPIRE_BELOW or EXPIRE op."""

    op: GroupOp
    groups: int
    """Groups that the op applied to."""


GroupResult: TypeAlias = (
    Group
    | AcksApplied
    | MoveApplied
    | SeekApplied
    | DeleteApplied
    | ExpireApplied
    | NoEffectApplied
    | GroupOp
)


@dataclass(frozen=True, slots=True)
class GroupApplied:
    """Per op: the group created, found or altered, or the op's own result, or the op itself."""

    results: tuple[GroupResult, ...]


@dataclass(frozen=True, slots=True)
class DeleteTopicApplied:
    """A topic's deletion and its losses."""

    op: DeleteTopic
    topic: Topic | None
    """The deleted topic. None: it was deleted before."""
    dropped: int = 0
    """Timers that were pending."""
    messages: int = 0
    """Messages that the queue still held."""
    groups: tuple[tuple[str, int], ...] = ()
    """(Name, unacked messages) of each group."""


@dataclass(frozen=True, slots=True)
class SeriesApplied:
    """A change of the series: its id, or the reason for which nothing changed."""

    op: SeriesOp
    series: int
    """Id of the series; of the one that has the key if a creation was refused. 0: none."""
    refusal: EngineError | None = None


@dataclass(frozen=True, slots=True)
class OccurrencesApplied:
    """Which rows of an OCCURRENCES entry had an effect, each (n, bool)."""

    new: npt.NDArray[np.bool_]
    """Rows that became timers."""
    finished: npt.NDArray[np.bool_]
    """Rows that ended their series."""
    first_seq: Seq
    """Seq of the first row; each row has one, used or not."""
    ready: tuple[TopicId, ...]
    """Topics with new messages: occurrences that were due already."""


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
    | SeriesApplied
    | OccurrencesApplied
)
