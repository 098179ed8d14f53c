"""The voters of the log, as the nodes report them. Part of the controller.

The replicated object has the voters that the last leader published. It may have older ones: the
leader of a change failed before it published them, or Raft's files were lost.

    a leader serves          its voters count
    no leader serves         those of the newest log count: as in an election, a majority of each of
                             its sets is needed, and a log that is not the newest wins none
    no node tells voters     the published ones count: the nodes are of an earlier release
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.control.control_state import ControlState
from cluster.control.controller_events import ReplicaReport, ReportedRole
from cluster.control.membership import id_name
from replication.core.quorum import Voters
from timer.model.units import ReplicaId


def newest_log(
    reports: Sequence[ReplicaReport],
    state: ControlState,
    published: Mapping[str, ReplicaId],
    epoch_max: int,
) -> ReplicaReport | None:
    """Return the report whose voters count. None: no voter reports a log of this cluster.

    Args:
        reports: The recent reports, of voters and others.
        state: The replicated object.
        published: Its voters, or the founders if it has none.
        epoch_max: The highest credible epoch.
    """
    for report in reports:
        leads = report.role is ReportedRole.LEADER and report.epoch == state.epoch
        if leads and report.replica_id == state.leader and report.serving and report.lease_ok:
            return report
    known = {*published.values(), *(state.proposed or {}).values()}
    if state.leader is not None:
        known.add(state.leader)

    def counts(report: ReplicaReport) -> bool:
        if report.last_epoch > epoch_max:
            return False
        if not report.sets:
            return report.replica_id in known
        # Data that was restored elsewhere may reach these nodes: it has other voters. All known
        # voters may be outdated after the loss of Raft's files, until a leader is appointed.
        is_ours = state.leader is None or bool(known & report.voters)
        # A change that only others than voters have cannot be committed, and does not count.
        return is_ours and (len(report.sets) == 1 or report.replica_id in report.voters)

    # Of logs with the same last epoch, the one with fewer sets knows that a change is committed:
    # the voters of before no longer count.
    return max(
        filter(counts, reports),
        key=lambda each: (each.last_epoch, bool(each.sets), -len(each.sets)),
        default=None,
    )


def named(
    voters: Voters, known: Iterable[Mapping[str, ReplicaId]], reports: Iterable[ReplicaReport]
) -> dict[str, ReplicaId]:
    """Return the voters by name. The name of a voter that is unknown is its id.

    Of two voters with one name, during a replacement, it is the one that reports.

    `known`: names and their replicas; later ones win.
    """
    names = {replica_id: name for each in known for name, replica_id in each.items()}
    reporting = {report.replica_id for report in reports}
    ordered = sorted(voters, key=lambda voter: (voter in reporting, voter))
    return {names.get(voter, id_name(voter)): voter for voter in ordered}
