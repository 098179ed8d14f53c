"""A replica's report to the controller, made of the driver's own."""

from typing import Final

from cluster.controller import Report, Role
from replication import driver, steps
from timer.units import LogIndex

ROLES: Final = {
    steps.Role.LEARNER: Role.LEARNER,
    steps.Role.FOLLOWER: Role.FOLLOWER,
    steps.Role.CANDIDATE: Role.PROMOTING,
    steps.Role.LEADER: Role.LEADER,
}
"""The protocol's role of a replica -> the controller's word for it."""


def report_of(
    report: driver.Report, *, name: str, applied_index: LogIndex, accepts: bool = True
) -> Report:
    """Return the report of the node `name`, whose state is that after `applied_index`.

    `accepts`: the node can take connections, and open files.
    """
    return Report(
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
