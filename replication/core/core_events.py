"""Input and output of a step of the core: events, effects, roles."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from replication.core.peer_messages import LogStart, Message
from replication.core.promise import Promise
from replication.core.quorum import Voters
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs


class Role(enum.Enum):
    """The activity of a replica."""

    LEARNER = "learner"
    """Follows without a vote."""
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    """Appointed; collects promises, then entries."""
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived. `sizes`: bytes of each frame beside it."""

    sender: ReplicaId
    message: Message
    wall_ms: UnixMs
    """The sender's wall clock at sending."""
    sizes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Durable:
    """The log is on disk up to `index`. `version`: truncations when the write was ordered."""

    version: int
    index: LogIndex


@dataclass(frozen=True, slots=True)
class Proposed:
    """The leader's application appends entries of these sizes in bytes. Only while `serving`."""

    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shell has read the entries [first, last] for `peer`, as a `Read` ordered."""

    version: int
    peer: ReplicaId
    first: LogIndex
    last: LogIndex
    size: int


@dataclass(frozen=True, slots=True)
class Appointed:
    """The control plane appoints a leader."""

    epoch: Epoch
    leader: ReplicaId
    voters: Voters | None = None
    """The voters from this epoch on. None: no change is proposed."""
    level: int = 0
    """The feature level that all nodes support. 0: unknown. It is for the driver."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The node requests an orderly end of its own leadership."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """`peer` is connected (again); earlier messages to it may have been lost."""

    peer: ReplicaId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, or a burst of proposals has ended."""


Event: TypeAlias = (
    Received | Durable | Proposed | Loaded | Appointed | Handover | Reconnected | Tick
)


class Persist(NamedTuple):
    """The state that must survive this process and its machine."""

    promise: Promise
    unsure: bool


class Read(NamedTuple):
    """Read entries from `first` on for `peer`: about `limit_bytes`, at least one."""

    version: int
    peer: ReplicaId
    first: LogIndex
    last: LogIndex
    limit_bytes: int


class OutgoingMessage(NamedTuple):
    """A message to one peer."""

    to: ReplicaId
    message: Message


@dataclass(slots=True, kw_only=True)
class Effects:
    """Orders for the shell, to be executed in field order."""

    persist: Persist | None = None
    """Durable before any order below is executed."""
    truncate_after: LogIndex | None = None
    """Truncate the log after this index, behind the writes that are already queued."""
    append: tuple[LogIndex, LogIndex] | None = None
    """Append the frames of the entries (first, last) that came with the event."""
    start: LogStart | None = None
    """Append this leader's EPOCH entry."""
    read: list[Read] = field(default_factory=list[Read])
    send: list[OutgoingMessage] = field(default_factory=list[OutgoingMessage])
    overtake: list[OutgoingMessage] = field(default_factory=list[OutgoingMessage])
    """Messages without entries that need not arrive in order. They may overtake others."""
    behind: bool = False
    """The leader has dropped the entries that this replica needs next: fetch a snapshot."""
    forgotten: bool = False
    """This founder lost its disk, and its promise with it. It must take no part."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A peer's wall clock showed `wall_ms` at this replica's `at_ms`, within `error_ms`."""

    wall_ms: UnixMs
    at_ms: MonoMs
    error_ms: int
