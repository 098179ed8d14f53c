"""The voters of the log, as the nodes report them. Part of the controller.

The replicated object has the voters that the last leader published. It may have older ones: the
leader of a change failed before it published them, or Raft's files were lost.

    a leader serves          its voters count
    no leader serves         those of the newest log count: as in an election, a majority of each of
                             its sets is needed, and a log that is not the newest wins none
    no node tells voters     the published ones count: the nodes are of an earlier release

Data that was restored elsewhere may reach these nodes. Its log has other voters, and does not count
beside one that has known ones.
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.control.control_state import ControlState
from cluster.control.controller_events import ReplicaReport, ReportedRole
from cluster.control.membership import id_name
from replication.core.quorum import Voters, is_granted
from timer.model.units import ReplicaId


def newest_log(
    reports: Sequence[ReplicaReport],
    state: ControlState,
    published: Mapping[str, ReplicaId],
    epoch_max: int,
    *,
    has_waited: bool,
) -> ReplicaReport | None:
    """Return the report whose voters count. None: no voter reports a log of this cluster.

    Args:
        reports: The recent reports, of voters and others.
        state: The replicated object.
        published: Its voters, or the founders if it has none.
        epoch_max: The highest credible epoch.
        has_waited: The known voters have had the time to report.
    """
    for report in reports:
        is_appointed = (report.replica_id, report.epoch) == (state.leader, state.epoch)
        serves = report.role is ReportedRole.LEADER and report.serving and report.lease_ok
        tells = report.sets or report.replica_id in published.values()
        if is_appointed and serves and tells:
            return report
    known = {*published.values(), *(state.proposed or {}).values()}
    if state.leader is not None:
        known.add(state.leader)
    logs = [
        report
        for report in reports
        # A change that only others than voters have cannot be committed, and does not count.
        if report.last_epoch <= epoch_max
        and (len(report.sets) == 1 or report.replica_id in (report.voters or known))
    ]
    ours = [report for report in logs if known & {report.replica_id, *report.voters}]
    newest = _newest(ours)
    if state.leader is None and has_waited and not _can_win(newest, reports):
        return _newest(logs)  # all known voters may be those of long ago: Raft's files are lost
    return newest


def _newest(logs: Sequence[ReplicaReport]) -> ReplicaReport | None:
    # Of logs with the same last epoch, the one with fewer sets knows that a change is committed:
    # the voters of before no longer count.
    return max(
        logs,
        key=lambda each: (each.last_epoch, bool(each.sets), -len(each.sets)),
        default=None,
    )


def _can_win(log: ReplicaReport | None, reports: Sequence[ReplicaReport]) -> bool:
    return log is not None and is_granted(log.sets, {report.replica_id for report in reports})


def voters_by_name(
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
