"""The events of the controller, with the reports of replicas that they carry."""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from cluster.control.control_state import ControlState
from cluster.control.membership import Change
from replication.core.quorum import Voters
from timer.model.feature_level import ProgramRelease
from timer.model.units import Epoch, LogIndex, ReplicaId


class ReportedRole(enum.StrEnum):
    """The role of a replica in the log, as reported."""

    LEARNER = "learner"
    """Without a vote, by the replica's own log."""
    FOLLOWER = "follower"
    PROMOTING = "promoting"
    LEADER = "leader"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A node's report on its replica of the log, sent ten times a second."""

    replica_id: ReplicaId
    name: str
    role: ReportedRole
    epoch: Epoch
    """The epoch that the replica leads, is being promoted to, or follows."""
    serving: bool
    """The replica leads `epoch`, and its EPOCH entry is committed. It answers clients once it has
    applied this entry."""
    lease_ok: bool
    """On a leader: a majority has answered within the lease."""
    last_epoch: Epoch
    last_index: LogIndex
    """The last entry of the replica's log."""
    applied_index: LogIndex
    """The last applied entry. A leader serves when all committed entries are applied."""
    highest_promise: Epoch
    """The highest promise that the replica gave, or that refused it on another node."""
    unsure: bool
    """The log was cut or fetched again, and no leader has matched it yet."""
    refused_epoch: Epoch = Epoch(0)
    """On a leader: the highest epoch for which a voter refused it. If that is its own epoch, the
    voter promised another leader of it, and follows again from the next epoch on."""
    disk_ms: int = 0
    """Duration of the last sync of the disk, or of the present one if that is longer."""
    commit_ms: int = 0
    """On a leader: duration of the last commit, or of the present one if that is longer."""
    accepts: bool = True
    """The node can take connections and open files, is not drained, and its certificate is valid
    for a while."""
    sets: tuple[Voters, ...] = ()
    """The voter sets in force in the replica's log: two while a change of the voters is not
    committed. Empty: the log knows none, or a node of an earlier release sent none. The last
    field, which ControlPlane sends apart: see FrameKind.VOTERS."""

    @property
    def voters(self) -> Voters:
        """All replicas that vote by the replica's log."""
        return frozenset().union(*self.sets)

    def is_urgent_after(self, earlier: "ReplicaReport | None") -> bool:
        """Return whether the report has changes that the controller should learn at once."""
        return earlier is None or self._news() != earlier._news()  # noqa: SLF001

    def _news(self) -> tuple[object, ...]:
        return (
            self.role,
            self.epoch,
            self.serving,
            self.lease_ok,
            self.highest_promise,
            self.unsure,
            self.last_epoch,
            self.sets,
        )


@dataclass(frozen=True, slots=True)
class ControllerTick:
    """Time passed, without another event."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A node's report arrived, or this node's own was made."""

    report: ReplicaReport


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to a peer came up or broke."""

    name: str
    up: bool


@dataclass(frozen=True, slots=True)
class Announced:
    """A node announced its release."""

    name: str
    release: ProgramRelease


@dataclass(frozen=True, slots=True)
class StateApplied:
    """The replicated object changed."""

    state: ControlState


@dataclass(frozen=True, slots=True)
class RaftLeadership:
    """This node became Raft's leader and has applied all earlier commands, or it ceased to be."""

    leads: bool


@dataclass(frozen=True, slots=True)
class ProposalEnded:
    """The last proposal has ended; its outcome may be unknown."""

    refused: bool = False
    """True: the command changed nothing, and certainly never will."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """An operator requests another leader. None: the best voter."""

    target: ReplicaId | None


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """An operator requests other voters."""

    change: Change
    name: str


ControllerRequest: TypeAlias = TransferRequest | ChangeRequest
Event: TypeAlias = (
    ControllerTick
    | Reported
    | LinkChanged
    | Announced
    | StateApplied
    | RaftLeadership
    | ProposalEnded
    | ControllerRequest
)
