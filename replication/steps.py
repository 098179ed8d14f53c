"""What goes into a step of the core and what comes out: events, effects, roles."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from replication.messages import Message, Start
from replication.promise import Promise
from replication.quorum import Voters
from timer.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs


class Role(enum.Enum):
    """What a replica is doing."""

    LEARNER = "learner"
    """Follows without a vote."""
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    """Was appointed; collects promises, then entries."""
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Received:
    """A message came, with the sizes of the frames beside it."""

    sender: ReplicaId
    message: Message
    wall_ms: UnixMs
    """The sender's wall clock at sending."""
    sizes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Durable:
    """The log is on disk up to `index`, as it was after `version` truncations."""

    version: int
    index: LogIndex


@dataclass(frozen=True, slots=True)
class Proposed:
    """The leader's application appends entries of these sizes. Only while `serving`."""

    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shell holds [first, last] for `peer`, as a `Read` asked."""

    version: int
    peer: ReplicaId
    first: LogIndex
    last: LogIndex
    size: int


@dataclass(frozen=True, slots=True)
class Appointed:
    """The control plane says who should lead."""

    epoch: Epoch
    leader: ReplicaId
    voters: Voters | None = None
    """Who should vote from then on; None: no change is proposed."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Somebody wants this leader to end its leadership in good order."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """`peer` can be reached (again); what was sent to it before may have been lost."""

    peer: ReplicaId


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time, or the end of a burst of proposals."""


Event: TypeAlias = (
    Received | Durable | Proposed | Loaded | Appointed | Handover | Reconnected | Tick
)


class Persist(NamedTuple):
    """What must survive this process and its machine."""

    promise: Promise
    unsure: bool


class Read(NamedTuple):
    """Get entries from `first` on, about `limit_bytes` of them, at least one, for `peer`."""

    version: int
    peer: ReplicaId
    first: LogIndex
    last: LogIndex
    limit_bytes: int


class Outgoing(NamedTuple):
    """A message to one peer."""

    to: ReplicaId
    message: Message


@dataclass(slots=True, kw_only=True)
class Effects:
    """Orders for the shell, carried out in field order."""

    persist: Persist | None = None
    """Durable before anything below happens."""
    truncate_after: LogIndex | None = None
    """Cut the log; what was on its way to the disk goes first."""
    append: tuple[LogIndex, LogIndex] | None = None
    """Append these (first, last) of the frames that came with the event."""
    start: Start | None = None
    """Append the EPOCH entry of this leader."""
    read: list[Read] = field(default_factory=list[Read])
    send: list[Outgoing] = field(default_factory=list[Outgoing])
    behind: bool = False
    """The leader has dropped what this replica needs next: fetch a snapshot."""
    forgotten: bool = False
    """This founder lost its disk, and with it what it promised: it must take no part."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A peer's wall clock: it showed `wall_ms` at our `at_ms`, give or take `error_ms`."""

    wall_ms: UnixMs
    at_ms: MonoMs
    error_ms: int
