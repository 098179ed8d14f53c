"""Changes of the voters, one voter at a time, and the reasons to refuse one.

    add NAME       the learner that answers under NAME becomes a voter
    replace NAME   the learner that answers under NAME replaces the voter of that name
    remove NAME    the voter becomes a learner

The new set is proposed together with the appointment of the next epoch. The present leader is
appointed again if it stays a voter. The EPOCH entry of that epoch makes the set valid
(replication/core/quorum.py). The refusals here do not protect stored data; they keep the cluster
available. A voter far behind, or a set without an answering majority, could stop it.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from replication.core.quorum import VOTERS_MAX
from timer.model.units import Epoch, LogIndex, ReplicaId

LAG_MAX: Final = 1_000
"""Entries that a learner may lack when it becomes a voter: it fetches them in an instant."""


class Change(enum.StrEnum):
    """The changes that an operator can request."""

    ADD = "add"
    REPLACE = "replace"
    REMOVE = "remove"


class Refusal(NamedTuple):
    """The reason why a transfer, or a change of the voters, is not proposed."""

    why: str
    later: bool = True
    """True: the change may become possible. False: not in the present state."""
    soon: bool = False
    """True: the change normally becomes possible by itself within seconds."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A replica without a vote that reports to the controller."""

    replica_id: ReplicaId
    last_epoch: Epoch
    last_index: LogIndex
    unsure: bool
    silent_ms: int = 0
    """Milliseconds since its last report; 0: it reports. One that installs millions of timers does
    not report meanwhile."""


def id_name(replica_id: ReplicaId) -> str:
    """Return the name of a voter whose own name is unknown, after the loss of Raft's files."""
    return f"{replica_id:016x}"


def voters_after(
    change: Change,
    name: str,
    voters: Mapping[str, ReplicaId],
    learner: Learner | None,
    leader_end: tuple[Epoch, LogIndex],
    reporting: Collection[str],
) -> Mapping[str, ReplicaId] | Refusal:
    """Return the voters after the change, or the reason to refuse it.

    Args:
        change: The requested change.
        name: The node to add, replace or remove.
        voters: The present voters, by name.
        learner: The replica without a vote that reports under `name`. None: there was none lately.
        leader_end: Last epoch and index of the leader's log.
        reporting: Names of all nodes that report.
    """
    if (change is Change.ADD) == (name in voters):
        names = ", ".join(sorted(voters))
        is_ = "is a" if name in voters else "is no"
        return Refusal(f"{is_} voter; the voters are {names}", later=False)
    after = {voter: replica for voter, replica in voters.items() if voter != name}
    if change is not Change.REMOVE:
        if learner is None and name in reporting:
            return Refusal("this voter answers, so it needs no replacement", later=False)
        if learner is None:  # it may be starting
            why = "no learner answers under this name; format one with --learner, and start it"
            return Refusal(why)
        if learner.silent_ms:
            seconds = learner.silent_ms / 1000
            return Refusal(f"the learner last answered {seconds:.0f} s ago")
        behind = leader_end[1] - learner.last_index
        if learner.unsure or learner.last_epoch != leader_end[0] or behind > LAG_MAX:
            return Refusal(
                f"the learner is {behind} entries behind (at most {LAG_MAX}), or its log is unsure"
            )
        after[name] = learner.replica_id
    if not 1 <= len(after) <= VOTERS_MAX:
        return Refusal(f"{len(after)} voters; allowed: 1 to {VOTERS_MAX}", later=False)
    silent = sorted(after.keys() - set(reporting))
    if len(silent) * 2 >= len(after):
        names = ", ".join(silent)
        return Refusal(f"no majority: {names} of the new voters would not answer")
    return after
