"""Changing the voters, one at a time: what may be changed, and why not.

    add NAME       the learner that answers under NAME becomes a voter
    replace NAME   the learner that answers under NAME takes the place of the voter of that name
    remove NAME    that voter becomes a learner

The new set is proposed with the appointment of the next epoch, of the present leader if it stays a
voter; its EPOCH entry makes it true (replication/core/quorum.py). What is refused here would be
harmless to what is stored, and could stop the cluster: a voter that has all to fetch yet, or a set
without a majority that answers.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from replication.core.quorum import VOTERS_MAX
from timer.model.units import Epoch, LogIndex, ReplicaId

LAG_MAX: Final = 1_000
"""Entries that a learner may lack when it becomes a voter: it has them before anybody notices."""


class Change(enum.StrEnum):
    """What an operator may ask for."""

    ADD = "add"
    REPLACE = "replace"
    REMOVE = "remove"


class MembershipRefusal(NamedTuple):
    """What an operator asked for is not proposed."""

    why: str
    later: bool = True
    """It may be possible soon. False: not as things are."""
    soon: bool = False
    """It becomes possible by itself, within seconds as a rule."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A replica without a vote that reports."""

    replica_id: ReplicaId
    last_epoch: Epoch
    last_index: LogIndex
    unsure: bool


def planned(
    change: Change,
    name: str,
    voters: Mapping[str, ReplicaId],
    learner: Learner | None,
    leader_end: tuple[Epoch, LogIndex],
    reporting: Collection[str],
) -> Mapping[str, ReplicaId] | MembershipRefusal:
    """Return the voters after the change, or why it can't be made.

    Args:
        change: What is asked for.
        name: Of which node.
        voters: Those at present.
        learner: The replica without a vote that reports under `name`.
        leader_end: Last epoch and index of the leader's log.
        reporting: Names of all nodes that report.
    """
    if (change is Change.ADD) == (name in voters):
        said = ", ".join(sorted(voters))
        is_ = "is a" if name in voters else "is no"
        return MembershipRefusal(f"{is_} voter; the voters are {said}", later=False)
    after = {voter: replica for voter, replica in voters.items() if voter != name}
    if change is not Change.REMOVE:
        if learner is None:
            why = "no replica without a vote answers under this name; format one (--learner)"
            return MembershipRefusal(why, later=False)
        behind = leader_end[1] - learner.last_index
        if learner.unsure or learner.last_epoch != leader_end[0] or behind > LAG_MAX:
            return MembershipRefusal(
                f"it is {behind} entries behind, {LAG_MAX} at most, and has to be sure"
            )
        after[name] = learner.replica_id
    if not 1 <= len(after) <= VOTERS_MAX:
        return MembershipRefusal(f"{len(after)} voters; 1 .. {VOTERS_MAX}", later=False)
    silent = sorted(after.keys() - set(reporting))
    if len(silent) * 2 >= len(after):
        names = ", ".join(silent)
        return MembershipRefusal(f"of the voters then, {names} would not answer: no majority")
    return after
