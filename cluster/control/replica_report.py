"""Converts the log driver's report on a replica to a report for the controller."""

import logging
from collections.abc import Callable
from typing import Final

from cluster.control.controller_events import ReplicaReport, ReportedRole
from cluster.rpc.open_files import has_spare
from replication.core import core_events
from replication.driver import driver
from timer.model.units import LogIndex, ReplicaId

logger = logging.getLogger(__name__)

ROLES: Final = {
    core_events.Role.LEARNER: ReportedRole.LEARNER,
    core_events.Role.FOLLOWER: ReportedRole.FOLLOWER,
    core_events.Role.CANDIDATE: ReportedRole.PROMOTING,
    core_events.Role.LEADER: ReportedRole.LEADER,
}
"""The log protocol's role -> the controller's."""


def report_of(
    report: driver.LogStatus, *, name: str, applied_index: LogIndex, accepts: bool = True
) -> ReplicaReport:
    """Return the report of the node `name`.

    `applied_index`: the last applied entry. `accepts`: the node can take connections and open
    files, and neither a drain nor the end of its certificate forbids it to lead.
    """
    return ReplicaReport(
        replica_id=report.replica,
        name=name,
        role=ROLES[report.role],
        epoch=report.bid_epoch or report.epoch,
        serving=report.serving,
        lease_ok=report.lease_ok,
        last_epoch=report.last_epoch,
        last_index=report.last_index,
        applied_index=applied_index,
        highest_promise=report.highest_promise,
        unsure=report.unsure,
        refused_epoch=report.refused_epoch,
        disk_ms=report.disk_ms,
        commit_ms=report.commit_ms,
        accepts=accepts,
        sets=report.sets,
    )


class ReportSource:
    """Makes the reports of one node, and logs the replicas that its leader can't catch up."""

    def __init__(
        self,
        name: str,
        status: Callable[[], driver.LogStatus],
        applied_index: Callable[[], LogIndex],
        closed: Callable[[], bool],
    ) -> None:
        """`status`: returns the driver's report. `applied_index`: of this node's state.

        `closed`: whether the node is drained, or its certificate expires.
        """
        self._name, self._status, self._applied_index = name, status, applied_index
        self._closed = closed
        self._stranded: set[ReplicaId] = set()

    def report(self) -> ReplicaReport:
        """Return the present report. A replica that is stranded since the last one is logged."""
        status = self._status()
        for replica in set(status.stranded) - self._stranded:
            logger.warning(
                "replica %016x lacks entries that the log has dropped: it needs a snapshot, unless"
                " they are on their way",
                replica,
            )
        self._stranded = set(status.stranded)
        return report_of(
            status,
            name=self._name,
            applied_index=self._applied_index(),
            accepts=has_spare() and not self._closed(),
        )
