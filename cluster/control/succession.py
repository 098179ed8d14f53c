"""The successor of a leader: the choice among candidates, and the moment of a transfer.

**Choice.** `best` keeps the logs that end near the longest log of the last epoch. Among these it
takes the candidate with the lowest rank. A successor serves when it has applied that log. An entry
takes 0.1 ms to apply, or 50 ms if it schedules a thousand timers with keys. So unapplied entries
are compared with the load of the last leader, which had about the same entries.

**Transfer.** Raft brings the target of a transfer up to date before the leader stops (Ongaro's
thesis, 3.10). Here the leader sends all entries to every follower anyway. A target that is not too
far behind therefore catches up by itself. The leader serves until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import ReplicaReport
from cluster.control.membership import Refusal
from timer.model.units import Epoch, LogIndex, ReplicaId


def why_behind(
    log: ReplicaReport, end: tuple[Epoch, LogIndex], held: LogIndex | None, limits: ControllerConfig
) -> Refusal | None:
    """Return why a replica can't take over at once. None: it can.

    Args:
        log: The report of that replica.
        end: Last epoch and index of the greatest reported log.
        held: End of the leader's log a moment ago. A target that has applied this entry has caught
            up. None: no leader reports.
        limits: The greatest distances from the end.
    """
    behind = max(0, end[1] - log.last_index)
    lacks = f"{log.name} is {behind} entries behind"
    if behind > limits.transfer_entries:
        return Refusal(f"{lacks}; at most {limits.transfer_entries}", later=False)
    if log.unsure:
        return Refusal(f"{lacks}, and not matched with the leader's log yet", soon=True)
    if log.last_epoch != end[0]:
        return Refusal(f"{lacks}, and has no entry of epoch {end[0]} yet", soon=True)
    if behind > limits.close_entries if held is None else log.last_index < held:
        return Refusal(lacks, soon=True)
    unapplied = log.last_index - log.applied_index
    if unapplied > limits.lag_entries and (held is None or log.applied_index < held):
        return Refusal(f"{log.name} has {unapplied} entries to apply", soon=True)
    return None


class Rank(NamedTuple):
    """The rank of a candidate. The lowest is appointed. A field outweighs all fields after it."""

    is_bound_above: bool
    """Its promise is above every epoch that the controller believes: it refuses the next one."""
    stalled_in: Epoch
    """The last epoch in which it was appointed and did not serve."""
    seconds_behind: int
    """Entries that it has yet to apply, in seconds of the last leader's load. A node that serves
    poorly is better than one that does not serve; it is relieved when another has caught up."""
    is_closed: bool
    """It takes no connections, is drained, or its certificate expires."""
    led_poorly: bool
    """It served poorly in the last minutes."""
    is_slow: bool
    """Its disk is slow."""
    unapplied: int
    """Entries that it has yet to apply, in portions of `lag_entries`."""
    is_controller: bool
    """It is the controller. Two roles on one node are lost together."""
    missing: int
    """Entries of the longest log that it lacks."""
    replica_id: ReplicaId
    """Orders equal candidates, the same on every controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A voter that reports, with the controller's findings about it. See `Rank` for the fields."""

    report: ReplicaReport
    stalled_in: Epoch
    led_poorly: bool
    is_slow: bool
    """Whether its disk is slow."""
    is_controller: bool
    is_bound_above: bool

    def rank(self, end: LogIndex, second_entries: int, lag_entries: int) -> Rank:
        """Return the rank of this candidate.

        Args:
            end: Last index of the longest log. Each candidate has to apply the log up to there.
            second_entries: Entries that the last leader appended in a second.
            lag_entries: Unapplied entries count in portions of this size.
        """
        report = self.report
        unapplied = end - report.applied_index
        return Rank(
            is_bound_above=self.is_bound_above,
            stalled_in=self.stalled_in,
            seconds_behind=unapplied // max(second_entries, lag_entries),
            is_closed=not report.accepts,
            led_poorly=self.led_poorly,
            is_slow=self.is_slow,
            unapplied=unapplied // lag_entries,
            is_controller=self.is_controller,
            missing=end - report.last_index,
            replica_id=report.replica_id,
        )


def best(
    candidates: Sequence[Candidate], limits: ControllerConfig, second_entries: int = 0
) -> Candidate | None:
    """Return the candidate to appoint. None: `candidates` is empty.

    An unsure log may lack entries that it once acknowledged. It is chosen only if all are unsure.
    A log of an earlier epoch is not chosen, nor one that lacks `close_entries` of the longest.
    `second_entries`: entries that the last leader appended in a second, as far as known.
    """
    if not candidates:
        return None
    pool = [each for each in candidates if not each.report.unsure] or candidates
    last_epoch = max(each.report.last_epoch for each in pool)
    newest = [each for each in pool if each.report.last_epoch == last_epoch]
    end = max(each.report.last_index for each in newest)
    close = [each for each in newest if each.report.last_index > end - limits.close_entries]
    return min(close, key=lambda each: each.rank(end, second_entries, limits.lag_entries))
