"""Wrong clocks as operators see them: warnings of the status, and log lines.

    ClusterClock --ClockReport--> warnings_of    in the status of the leader
                                  ClockWatch     one log line when a clock becomes wrong or right

Only a leader compares the clocks; the report of another node is empty.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Final

from timer.leader.intake.cluster_clock import ClockReport
from timer.model.units import ReplicaId

logger = logging.getLogger(__name__)

WRONG_MS: Final = 1_000
"""A clock is wrong if it is more than this from the median; as the alert TimerClockWrong."""
RIGHT_MS: Final = WRONG_MS // 2
"""A wrong clock is right again below this, so that a clock at the limit does not fill the log."""
_CLUSTER: Final = "the cluster"


def warnings_of(report: ClockReport, name_of: Callable[[ReplicaId], str]) -> Iterator[str]:
    """Yield a text for each wrong clock: of the cluster, and of the voters, with their names.

    If any of the voters' clocks may be the wrong one, one text has all names.
    """
    if abs(report.error_ms) > WRONG_MS:
        yield _text(_CLUSTER, report.error_ms)
    if report.doubt_ms > WRONG_MS:
        names = " and ".join(f"{name}'s" for name in _names(report, name_of))
        yield f"{names} clocks differ by {report.spread_ms / 1_000:.1f} s"
        return
    for voter, offset_ms in report.offsets_ms.items():
        if abs(offset_ms) > WRONG_MS:
            yield _text(name_of(voter), offset_ms)


class ClockWatch:
    """Logs the changes from one report of a leader to the next."""

    def __init__(self, name_of: Callable[[ReplicaId], str]) -> None:
        self._name_of = name_of
        self._jumped_ms = 0
        self.jumped_total_ms = 0
        """Sum of the jumps since the start, over all leaderships of this node."""
        self._wrong: set[str] = set()
        """Names of voters with a wrong clock, and of the cluster if its clock is."""
        self._in_doubt = False

    def update(self, report: ClockReport) -> None:
        """Log what has changed. The first report of a leadership is of its start: no jump yet."""
        if (jump_ms := report.jumped_ms - self._jumped_ms) > 0:
            logger.warning("the cluster's clock jumped ahead", extra={"jumped_ms": jump_ms})
            self.jumped_total_ms += jump_ms
        self._jumped_ms = report.jumped_ms
        self._log_change(_CLUSTER, report.error_ms)
        self._doubt(report)
        if not self._in_doubt:
            for voter, offset_ms in report.offsets_ms.items():
                self._log_change(self._name_of(voter), offset_ms)

    def _doubt(self, report: ClockReport) -> None:
        clocks = ", ".join(_names(report, self._name_of))
        more = {"clocks": clocks, "differ_ms": report.spread_ms}
        if report.doubt_ms > WRONG_MS and not self._in_doubt:
            self._in_doubt = True
            logger.warning("clocks are in doubt", extra=more)
        elif report.doubt_ms < RIGHT_MS and self._in_doubt:
            self._in_doubt = False
            logger.info("clocks are no longer in doubt", extra=more)

    def _log_change(self, name: str, off_ms: int) -> None:
        if abs(off_ms) > WRONG_MS and name not in self._wrong:
            self._wrong.add(name)
            logger.warning("a clock is wrong", extra={"clock": name, "ahead_ms": off_ms})
        elif abs(off_ms) < RIGHT_MS and name in self._wrong:
            self._wrong.remove(name)
            logger.info("a clock is right again", extra={"clock": name, "ahead_ms": off_ms})


def _names(report: ClockReport, name_of: Callable[[ReplicaId], str]) -> list[str]:
    return sorted(name_of(voter) for voter in report.offsets_ms)


def _text(name: str, off_ms: int) -> str:
    """Return the text for a wrong clock. That of the cluster is ahead: it jumps if it is behind."""
    text = f"{name}'s clock is {abs(off_ms) / 1_000:.1f} s {'behind' if off_ms < 0 else 'ahead'}"
    if name == _CLUSTER:
        text += " of the voters' clocks, and runs at half the rate"
    return text
