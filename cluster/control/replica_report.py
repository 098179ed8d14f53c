"""A replica's report to the controller, made of the driver's own."""

from typing import Final

from cluster.control.controller import ReplicaReport, ReportedRole
from replication.core import core_events
from replication.driver import driver
from timer.model.units import LogIndex

ROLES: Final = {
    core_events.Role.LEARNER: ReportedRole.LEARNER,
    core_events.Role.FOLLOWER: ReportedRole.FOLLOWER,
    core_events.Role.CANDIDATE: ReportedRole.PROMOTING,
    core_events.Role.LEADER: ReportedRole.LEADER,
}
"""The protocol's role of a replica -> the controller's word for it."""


def report_of(
    report: driver.LogStatus, *, name: str, applied_index: LogIndex, accepts: bool = True
) -> ReplicaReport:
    """Return the report of the node `name`, whose state is that after `applied_index`.

    `accepts`: the node can take connections, and open files.
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
    )
