"""The check whether a replica can take the leadership over at once.

Raft brings the target of a transfer up to date before the leader stops (Ongaro's thesis, 3.10).
Here the leader sends all entries to every follower anyway. A target that is not too far behind
therefore only needs time. The leader serves until the target has caught up.
"""

from typing import Protocol

from cluster.control.membership import MembershipRefusal
from timer.model.units import Epoch, LogIndex


class LogReport(Protocol):
    """A report's part on the log."""

    @property
    def name(self) -> str:
        """Name of the node."""

    @property
    def last_epoch(self) -> Epoch:
        """Epoch of the last entry."""

    @property
    def last_index(self) -> LogIndex:
        """Index of the last entry."""

    @property
    def applied_index(self) -> LogIndex:
        """Index of the last applied entry."""

    @property
    def unsure(self) -> bool:
        """The log lost its tail, and no leader has matched it since."""


class SuccessionLimits(Protocol):
    """The limits of the controller's configuration for a transfer, in entries."""

    @property
    def transfer_entries(self) -> int:
        """A target that lacks more entries is refused at once."""

    @property
    def close_entries(self) -> int:
        """A target that lacks at most so many is close enough if the leader does not report."""

    @property
    def lag_entries(self) -> int:
        """A target with more unapplied entries is not ready."""


def why_behind(
    log: LogReport, end: tuple[Epoch, LogIndex], held: LogIndex | None, limits: SuccessionLimits
) -> MembershipRefusal | None:
    """Return why a replica can't take over at once. None: it can.

    Args:
        log: The replica's log.
        end: The greatest (epoch, index) of all reported logs.
        held: The end of the leader's log a moment ago; a log up to there has caught up. None: no
            leader reports.
        limits: How far the replica may be behind.
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
