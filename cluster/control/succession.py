"""Whether a replica can take the leadership over at once.

Raft brings the target of a transfer up to date before the leader stops (Ongaro's thesis, 3.10).
Here the leader sends every follower all entries anyway. So a target needs time alone, if it is not
too far behind; until then the leader serves.
"""

from typing import Protocol

from cluster.control.membership import MembershipRefusal
from timer.model.units import Epoch, LogIndex


class LogReport(Protocol):
    """What a report tells of a log."""

    @property
    def name(self) -> str:
        """Of the node."""

    @property
    def last_epoch(self) -> Epoch:
        """Of the last entry."""

    @property
    def last_index(self) -> LogIndex:
        """Of the last entry."""

    @property
    def applied_index(self) -> LogIndex:
        """The state is that after this entry."""

    @property
    def unsure(self) -> bool:
        """It lost its tail, and no leader has matched it since."""


class SuccessionLimits(Protocol):
    """Of the controller's configuration."""

    @property
    def transfer_entries(self) -> int:
        """A target that lacks more is refused at once."""

    @property
    def close_entries(self) -> int:
        """A target that lacks less is close."""

    @property
    def lag_entries(self) -> int:
        """A target that has more to apply is not ready."""


def why_behind(
    log: LogReport, end: tuple[Epoch, LogIndex], held: LogIndex | None, limits: SuccessionLimits
) -> MembershipRefusal | None:
    """Return why a replica can't take over at once. None: it can.

    Args:
        log: The replica's.
        end: The greatest end of a log that is reported.
        held: The end of the leader's log a moment ago: to hold that is enough. None: no leader
            reports.
        limits: How far behind it may be.
    """
    behind = max(0, end[1] - log.last_index)
    lacks = f"{log.name} is {behind} entries behind"
    if behind > limits.transfer_entries:
        return MembershipRefusal(f"{lacks}; at most {limits.transfer_entries}", later=False)
    if log.unsure:
        return MembershipRefusal(f"{lacks}, and not matched with the leader's log yet", soon=True)
    if log.last_epoch != end[0]:
        return MembershipRefusal(f"{lacks}, and has no entry of epoch {end[0]} yet", soon=True)
    if behind > limits.close_entries if held is None else log.last_index < held:
        return MembershipRefusal(lacks, soon=True)
    unapplied = log.last_index - log.applied_index
    if unapplied > limits.lag_entries:
        return MembershipRefusal(f"{log.name} has {unapplied} entries to apply", soon=True)
    return None
