"""The controller's decisions: which replica should lead the timer log. A pure core.

Every node runs a controller; it acts while its node leads Raft. It watches the nodes through their
reports and links, and takes five decisions:

    appoint      the leader is gone, stalls or was refused; or an operator requests another
    adopt        a node leads a higher epoch than the known one, because Raft's files were lost:
                 note that epoch
    relieve      the leader serves poorly or not yet, and another would serve better: appoint it
    raise level  all nodes support a higher feature level: the next appointment raises it. If none
                 comes, the leader is appointed again
    hand over    the controller leads the log, too: give Raft's leadership to another node, so that
                 the loss of one node costs one role

An appointment is a proposal, compare-and-set on the epoch. The appointee must still collect
promises from a majority. So a wrong decision here costs a pause and never data, and two controllers
at the same time are harmless.

    controller's Raft leadership --leads--> watch --gone--> appoint --applied--> watch
                                              ^                |
                                              +--- refused ----+

Time is passed in as `now_ms`. The core reads no clock, socket or random source.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from cluster.control.announcements import Announcements
from cluster.control.control_state import Appoint, ControlState, Init
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    Announced,
    ChangeRequest,
    ControllerTick,
    Event,
    LinkChanged,
    ProposalEnded,
    RaftLeadership,
    ReplicaReport,
    Reported,
    ReportedRole,
    StateApplied,
    TransferRequest,
)
from cluster.control.leader_fitness import SLOW_PARTS, ServiceRecord, UnfitReplicas
from cluster.control.membership import Change, Learner, Refusal, id_name, voters_after
from cluster.control.newest_log import newest_log, voters_by_name
from cluster.control.succession import Candidate, best, why_behind
from replication.core.quorum import Voters, is_granted
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId

_NEVER: Final = MonoMs(-(1 << 62))
LEARNER_MS: Final = 600_000
"""Time for which a learner that no longer reports is remembered: it may be loading its state."""
EPOCH_LEAP_MAX: Final = 1 << 32
"""A promise that is further above all other epochs is ignored: no controller requested it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerEffects:
    """Orders for the shell, carried out in field order."""

    propose: Init | Appoint | None = None
    """Submit this command to Raft; answer with ProposalEnded."""
    hand_over_to: str | None = None
    """Hand Raft's leadership over to this node."""
    refusal: Refusal | None = None
    """The reason to refuse an operator's request."""
    reason: str = ""
    """The reason for the decision, for the log."""


_NOTHING: Final = ControllerEffects()
_REFUSALS_LOGGED: Final = 1
_NOT_CONTROLLER: Final = "this node is not the controller"
_NO_SUCCESSOR: Final = "no other voter could lead"


def _refusal_effects(why: str) -> ControllerEffects:
    return ControllerEffects(refusal=Refusal(why))


@dataclass(slots=True)
class _Node:
    """The controller's knowledge of one voter or learner."""

    name: str
    replica_id: ReplicaId
    linked: bool
    link_changed_at_ms: MonoMs
    report: ReplicaReport | None = None
    reported_at_ms: MonoMs = _NEVER
    stalled_in: Epoch = Epoch(0)
    """The last epoch in which the node was appointed and did not serve."""

    @property
    def latest(self) -> ReplicaReport:
        """The report of a node that has reported, as each fresh one has."""
        assert self.report is not None, self
        return self.report


@dataclass(slots=True)
class Controller:
    """The controller's knowledge on one node. Only `step` changes it."""

    name: str
    cluster_id: str
    founders: Mapping[str, ReplicaId]
    """The configured voters; they count until the replicated object has voters."""
    config: ControllerConfig = field(default_factory=ControllerConfig)
    release: ProgramRelease = FIRST_RELEASE
    """This node's program, with the highest level that its settings allow."""
    _leads: bool = False
    _state: ControlState = field(default_factory=ControlState)
    _nodes: dict[str, _Node] = field(default_factory=dict)
    """The voters."""
    _sets: tuple[Voters, ...] = ()
    """The voter sets in force: an election needs a majority of each."""
    _links: dict[str, tuple[bool, MonoMs]] = field(default_factory=dict)
    """(up, since when) of the link to each peer, voter or not."""
    _learners: dict[str, tuple[ReplicaReport, MonoMs]] = field(default_factory=dict)
    """(report, its time) of replicas that are not voters."""
    _watched_since_ms: MonoMs = _NEVER
    """Time since which this node has led Raft with the same appointed leader."""
    _served: bool = False
    """The appointee was seen serving in this epoch."""
    _serves_from: LogIndex | None = None
    """The leader answers clients once it has applied this entry. None: it does not lead the log."""
    _service: ServiceRecord = field(default_factory=ServiceRecord)
    """The service of the appointed leader in this epoch."""
    _unfit: UnfitReplicas = field(default_factory=UnfitReplicas)
    _lease_bad_since_ms: MonoMs | None = None
    _promise_above_since_ms: MonoMs | None = None
    _loss_since_ms: MonoMs | None = None
    _wait_logged: bool = False
    """The log has a line about the wait for reports since `_loss_since_ms`."""
    _stalls: int = 0
    """Appointees in a row that never served."""
    _refusals: int = 0
    """Appointments in a row that Raft, or a voter with a higher promise, refused."""
    _wait_until_ms: MonoMs = _NEVER
    _proposed_at_ms: MonoMs | None = None
    _well_since_ms: MonoMs | None = None
    _announced: Announcements = field(init=False)
    _handed_over_at_ms: MonoMs = _NEVER
    _ends: deque[tuple[MonoMs, LogIndex]] = field(default_factory=deque[tuple[MonoMs, LogIndex]])
    """(time, last index) of the leader's latest reports, oldest first."""

    def __post_init__(self) -> None:
        self._announced = Announcements(self.name, self.release)
        self._set_voters(self.founders, ())

    def step(self, now_ms: MonoMs, event: Event) -> ControllerEffects:
        """Advance to `now_ms`, take note of `event`, return the orders for the shell."""
        match event:
            case ControllerTick():
                self._learn_voters(now_ms)
            case Reported(report):
                self._note_report(now_ms, report)
            case LinkChanged(name, up):
                self._note_link(now_ms, name, up=up)
            case Announced(name, release):
                self._announced.note(name, release)
            case StateApplied(state):
                self._note_state(now_ms, state)
            case RaftLeadership(leads):
                self._note_leadership(now_ms, leads=leads)
            case ProposalEnded(refused):
                self._proposed_at_ms = None
                if refused:
                    self._note_refusal(now_ms)
            case TransferRequest(target):
                return self._transfer(now_ms, target)
            case ChangeRequest(change, name):
                return self._change(now_ms, change, name)
            case _:
                assert_never(event)
        return self._decide(now_ms) if self._leads else _NOTHING

    @property
    def leads(self) -> bool:
        """Whether this node is the controller."""
        return self._leads

    @property
    def served_epoch(self) -> Epoch:
        """The epoch in which the appointed leader was seen serving; 0: it was not seen."""
        return self._state.epoch if self._served else Epoch(0)

    # Taking note

    def _set_voters(self, voters: Mapping[str, ReplicaId], sets: tuple[Voters, ...]) -> None:
        """Replace the voters. `sets`: the sets of voters in force; empty: one set of all voters."""
        known, self._nodes = self._nodes, {}
        self._sets = sets or (frozenset(voters.values()),)
        for name, replica_id in voters.items():
            before = known.get(name)
            is_self = name == self.name
            linked, since_ms = self._links.get(name, (is_self, _NEVER))
            node = _Node(name, replica_id, linked=linked, link_changed_at_ms=since_ms)
            if before is not None and before.replica_id == replica_id:
                node = before
            learnt = self._learners.get(name)
            if learnt is not None and learnt[0].replica_id == replica_id:
                node.report, node.reported_at_ms = self._learners.pop(name)
            self._nodes[name] = node
        for name, node in known.items():
            if node.report is not None and node.replica_id not in voters.values():
                learner = node.report, node.reported_at_ms
                if learner[1] > self._learners.get(name, (None, _NEVER))[1]:
                    self._learners[name] = learner

    def _note_link(self, now_ms: MonoMs, name: str, *, up: bool) -> None:
        if name not in self._links or self._links[name][0] != up:
            self._links[name] = (up, now_ms)
        node = self._nodes.get(name)
        if node is not None and node.linked != up:
            node.linked = up
            node.link_changed_at_ms = now_ms

    def _note_report(self, now_ms: MonoMs, report: ReplicaReport) -> None:
        node = self._nodes.get(report.name)
        if node is None or node.replica_id != report.replica_id:
            self._learners[report.name] = (report, now_ms)
        else:
            node.report, node.reported_at_ms = report, now_ms
        self._learn_voters(now_ms)
        node = self._nodes.get(report.name)
        if node is None or not report.replica_id == node.replica_id == self._state.leader:
            return
        self._ends.append((now_ms, report.last_index))
        while len(self._ends) > 1 and self._ends[1][0] <= now_ms - self.config.caught_up_ms:
            self._ends.popleft()
        leads = report.role is ReportedRole.LEADER and report.epoch == self._state.epoch
        if leads and report.serving:
            self._served, self._stalls = True, 0
            self._refusals, self._wait_until_ms = 0, _NEVER
            if self._serves_from is None:
                self._serves_from = report.last_index
            others = [node.latest for node in self._fresh(now_ms)]
            others_ms = [other.disk_ms for other in others if other.name != report.name]
            self._service.note(now_ms, report, others_ms, lease_ms=self.config.lease_ms)
        if leads and not report.lease_ok:
            self._lease_bad_since_ms = self._lease_bad_since_ms or now_ms
        else:
            self._lease_bad_since_ms = None

    def _learn_voters(self, now_ms: MonoMs) -> None:
        """Take the voters of the log that counts; see newest_log.py. Without one, none change."""
        since_ms = now_ms - self.config.report_timeout_ms
        reports = [node.latest for node in self._fresh(now_ms)]
        reports += [report for report, at_ms in self._learners.values() if at_ms > since_ms]
        state, before = self._state, self._voters()
        published = state.voters or self.founders
        has_waited = now_ms - self._watched_since_ms >= self.config.gather_first_ms
        newest = newest_log(reports, state, published, self._epoch_max(), has_waited=has_waited)
        if newest is None:
            return
        voters = published
        if newest.sets:
            known = [published, state.proposed or {}, before]
            known.append({name: report.replica_id for name, (report, _) in self._learners.items()})
            voters = voters_by_name(newest.voters, known, reports)
        sets = newest.sets or (frozenset(voters.values()),)
        if (voters, sets) != (before, self._sets):
            self._set_voters(voters, sets)

    def _note_state(self, now_ms: MonoMs, state: ControlState) -> None:
        if state.voters and state.voters != self._state.voters:
            self._set_voters(state.voters, ())
        if state.epoch != self._state.epoch:
            if self._leads and self._state.leader is not None and not self._served:
                self._stalls = min(self._stalls + 1, self.config.stall_doublings_max)
                if not self._has_stalled():
                    self._note_refusal(now_ms)  # this epoch is above the promise that refused it
            self._watch(now_ms)
            self._unfit.learn(now_ms, state.unfit)
        self._state = state

    def _note_leadership(self, now_ms: MonoMs, *, leads: bool) -> None:
        if leads and not self._leads:
            self._watch(now_ms)
            self._stalls = self._refusals = 0
            self._wait_until_ms, self._proposed_at_ms = _NEVER, None
        self._leads = leads

    def _note_refusal(self, now_ms: MonoMs) -> None:
        """Wait before the next appointment, longer with each refusal in a row."""
        wait_ms = self.config.refused_wait_ms << min(self._refusals, 10)
        self._wait_until_ms = MonoMs(now_ms + min(wait_ms, self.config.refused_wait_ms_max))
        self._refusals += 1

    def _watch(self, now_ms: MonoMs) -> None:
        """Forget all observations of the earlier leader."""
        self._watched_since_ms = now_ms
        self._served, self._serves_from = False, None
        self._service = ServiceRecord()
        self._lease_bad_since_ms = None
        self._promise_above_since_ms = None
        self._loss_since_ms = None
        self._well_since_ms = None
        self._ends.clear()

    # Deciding

    def _decide(self, now_ms: MonoMs) -> ControllerEffects:
        if self._proposed_at_ms is not None:
            if now_ms - self._proposed_at_ms < self.config.propose_timeout_ms:
                return _NOTHING
            self._proposed_at_ms = None
        if now_ms < self._wait_until_ms:
            return _NOTHING
        if self._state.cluster_id is None:
            init = Init(cluster_id=self.cluster_id, voters=dict(self.founders))
            return self._propose(now_ms, init, "the control plane is empty")
        adopted = self._adopt(now_ms)
        if adopted is not None:
            return adopted
        loss = self._loss_of_leader(now_ms)
        if loss is None:
            self._loss_since_ms = None
            decided = self._relieve(now_ms) or self._raise_level(now_ms)
            return decided or self._hand_raft_over(now_ms)
        self._well_since_ms = None
        if self._loss_since_ms is None:
            self._loss_since_ms, self._wait_logged = now_ms, False
        if not self._has_enough_reports(now_ms):
            return self._wait_for_reports(now_ms, loss)
        successor = self._best(now_ms, self._fresh(now_ms), may_lead_again=self._may_lead_again())
        if successor is None:
            return _NOTHING
        return self._appoint(now_ms, successor, f"{self._leader_name()}: {loss}")

    def _relieve(self, now_ms: MonoMs) -> ControllerEffects | None:
        """Appoint a better leader in the place of one that serves poorly, once it is caught up.

        Also in the place of one that still applies entries, and so does not serve at all.
        """
        poor, leader = self._service.why_poor(), self._leader()
        reason = poor or self._why_late(now_ms)
        if reason is None or leader is None or not self._served:
            return None
        fresh, unfit = self._fresh(now_ms), self._unfit.at(now_ms)
        better = [
            node
            for node in fresh
            if node is not leader
            and node.replica_id not in unfit
            and not self._is_slow(node.latest)
            and node.latest.accepts
            and self._takeover_obstacle(node, fresh) is None
        ]
        successor = self._best(now_ms, better, may_lead_again=False)
        if successor is None:
            return None
        unfit |= {leader.replica_id} if poor else set()
        return self._appoint(now_ms, successor, f"{leader.name}: {reason}", unfit=unfit)

    def _why_late(self, now_ms: MonoMs) -> str | None:
        """Return why the leader of the log answers no client yet. None: it does, or may soon."""
        leader, from_index = self._leader(), self._serves_from
        if leader is None or leader.report is None or from_index is None:
            return None
        left = from_index - leader.report.applied_index
        # A leader that reports between commit and apply has its EPOCH entry left, at any time.
        if left < self.config.lag_entries or now_ms - self._watched_since_ms < self.config.late_ms:
            return None
        return f"it does not serve yet: it has {left} entries to apply"

    def _raise_level(self, now_ms: MonoMs) -> ControllerEffects | None:
        """Appoint the leader again, if no other appointment has raised the feature level."""
        leader, level = self._leader(), self._higher_level()
        possible = leader is not None and self._served and self._state.proposed is None and level
        after_ms = self.config.raise_level_after_ms
        if not self._announced.is_due(now_ms, after_ms, possible=bool(possible)):
            return None
        assert leader is not None, "nothing is due without a leader"
        return self._appoint(now_ms, leader, f"all nodes support feature level {level}")

    def _higher_level(self) -> int:
        """Return the level that an appointment raises the cluster to; 0: it stays."""
        linked = [name for name, (up, _) in self._links.items() if up]
        reports = [node.report for node in self._nodes.values() if node.report is not None]
        # No log has an entry: a new cluster has no earlier program.
        new = not self._state.epoch and not any(report.last_epoch for report in reports)
        return self._announced.higher(self._state.level, () if new else self._nodes, linked)

    def _is_slow(self, report: ReplicaReport) -> bool:
        return report.disk_ms >= self.config.lease_ms // SLOW_PARTS

    def _adopt(self, now_ms: MonoMs) -> ControllerEffects | None:
        """Note the leader of a higher epoch: the log elected it, and Raft's files are lost."""
        for node in self._fresh(now_ms):
            report = node.latest
            if (
                report.role is ReportedRole.LEADER
                and report.serving
                and report.lease_ok
                and report.epoch > self._state.epoch
            ):
                appoint = Appoint(
                    epoch=report.epoch,
                    leader=node.replica_id,
                    expected_epoch=self._state.epoch,
                )
                return self._propose(now_ms, appoint, f"{node.name} leads already")
        return None

    def _loss_of_leader(self, now_ms: MonoMs) -> str | None:
        """Return the reason to replace the appointed leader. None: there is none."""
        config, watched_ms = self.config, now_ms - self._watched_since_ms
        leader = self._leader()
        if leader is None:
            return self._why_unknown(watched_ms)
        broken_at_ms = leader.link_changed_at_ms
        if broken_at_ms == _NEVER:  # the link comes up
            broken_at_ms = self._watched_since_ms
        is_named = leader.name != id_name(leader.replica_id)  # otherwise its link is unknown
        if not leader.linked and is_named and now_ms - broken_at_ms >= config.link_grace_ms:
            return "its link broke"
        heard_at_ms = max(leader.reported_at_ms, self._watched_since_ms)
        if now_ms - heard_at_ms >= config.report_timeout_ms:
            return f"no report for {config.report_timeout_ms} ms"
        reported_since = leader.reported_at_ms >= self._watched_since_ms
        report = leader.report if reported_since else None
        if report is not None:
            if report.highest_promise > self._state.epoch and not self._served:
                return f"it met a promise of epoch {report.highest_promise}"
            promised = report.highest_promise == self._state.epoch  # and bids no more
            follows = report.role in (ReportedRole.FOLLOWER, ReportedRole.LEARNER)
            if follows and (self._served or promised):
                return "it stepped down or restarted"
            bids = report.epoch >= self._state.epoch  # it may wait for the end of the last lease
            if follows and not bids and watched_ms >= config.idle_grace_ms:
                return "it does not begin its promotion"
        lease_bad_since_ms = self._lease_bad_since_ms
        if lease_bad_since_ms is not None and (
            now_ms - lease_bad_since_ms >= config.lease_grace_ms
        ):
            return "it has no lease"
        if not self._served and watched_ms >= config.stall_timeout_ms << self._stalls:
            return "it does not serve"
        return self._why_above(now_ms)

    def _why_unknown(self, watched_ms: int) -> str | None:
        """Return why no voter is the leader. None: the voters of its log may be reported yet."""
        if self._state.leader is None:
            return "no leader is appointed"
        is_over = watched_ms >= self.config.report_timeout_ms
        return "the appointed leader is no known voter" if is_over else None

    def _why_above(self, now_ms: MonoMs) -> str | None:
        """Return the reason if voters have promised another leadership. None: there is none."""
        epoch, most = self._state.epoch, self._epoch_max()
        above = [
            node.name
            for node in self._fresh(now_ms)
            if epoch < node.latest.highest_promise <= most
            or (node.replica_id == self._state.leader and node.latest.refused_epoch >= epoch)
        ]
        if not above:
            self._promise_above_since_ms = None
            return None
        if self._promise_above_since_ms is None:
            self._promise_above_since_ms = now_ms
        if now_ms - self._promise_above_since_ms < self.config.promise_grace_ms:
            return None
        return f"{', '.join(above)} promised, or met, another leadership"

    def _has_enough_reports(self, now_ms: MonoMs) -> bool:
        """Return whether there are enough fresh reports to choose a leader."""
        if not self._has_majority(now_ms):
            return False
        fresh = self._fresh(now_ms)
        first = self._state.leader is None
        if len(fresh) == sum(first or node.linked for node in self._nodes.values()):
            return True
        assert self._loss_since_ms is not None
        gather_ms = self.config.gather_first_ms if first else self.config.gather_ms
        return now_ms - max(self._loss_since_ms, self._watched_since_ms) >= gather_ms

    def _wait_for_reports(self, now_ms: MonoMs, loss: str) -> ControllerEffects:
        """Propose nothing. Name the missing reports once, if the wait is long."""
        assert self._loss_since_ms is not None
        if self._wait_logged or now_ms - self._loss_since_ms < self.config.wait_logged_ms:
            return _NOTHING
        self._wait_logged = True
        fresh = ", ".join(node.name for node in self._fresh(now_ms)) or "no node"
        linked = ", ".join(node.name for node in self._nodes.values() if node.linked) or "none"
        why = f"{loss}; fewer than a majority report: {fresh}; linked: {linked}"
        return ControllerEffects(reason=f"{self._leader_name()}: {why}")

    def _has_majority(self, now_ms: MonoMs) -> bool:
        """Return whether a majority of the voters reports; of each set in force."""
        return is_granted(self._sets, {node.replica_id for node in self._fresh(now_ms)})

    def _fresh(self, now_ms: MonoMs) -> list[_Node]:
        return [
            node
            for node in self._nodes.values()
            if node.linked and now_ms - node.reported_at_ms < self.config.report_timeout_ms
        ]

    def _may_lead_again(self) -> bool:
        """Return whether the leader that must be replaced may be appointed again.

        True if it restarted, or if a promise above its epoch refused it. False if it stalls or has
        no lease: it may be cut off from the others.
        """
        return self._lease_bad_since_ms is None and (self._served or not self._has_stalled())

    def _has_stalled(self) -> bool:
        leader = self._leader()
        report = leader.report if leader else None
        return report is None or report.highest_promise <= self._state.epoch

    def _best(
        self, now_ms: MonoMs, candidates: Sequence[_Node], *, may_lead_again: bool
    ) -> _Node | None:
        """Return the fresh node to appoint; see `succession.best`. None: there is no candidate.

        `may_lead_again`: the present leader counts as the others do. Otherwise it is appointed only
        if there is no other candidate.
        """
        # A learner by its own log never begins: it is a voter of a set that no longer counts, or
        # does not know of its vote yet.
        able = [node for node in candidates if node.latest.role is not ReportedRole.LEARNER]
        able = able or [*candidates]
        others = [node for node in able if node.replica_id != self._state.leader]
        pool = able if may_lead_again or not others else others
        unfit, most = self._unfit.at(now_ms), self._epoch_max()
        chosen = best(
            [
                Candidate(
                    report=node.latest,
                    stalled_in=node.stalled_in,
                    led_poorly=node.replica_id in unfit,
                    is_slow=self._is_slow(node.latest),
                    is_controller=node.name == self.name,
                    is_bound_above=node.latest.highest_promise > most,
                )
                for node in pool
            ],
            self.config,
            self._entries_per_s(),
        )
        return self._nodes[chosen.report.name] if chosen is not None else None

    def _entries_per_s(self) -> int:
        """Return how many entries the leader appended in a second, by its latest reports."""
        if len(self._ends) <= 1:
            return 0
        (began_ms, first), (ended_ms, last) = self._ends[0], self._ends[-1]
        return 1_000 * max(0, last - first) // max(1, ended_ms - began_ms)

    def _appoint(
        self,
        now_ms: MonoMs,
        successor: _Node,
        reason: str,
        voters: Mapping[str, ReplicaId] | None = None,
        planned_from: Voters = frozenset(),
        unfit: frozenset[ReplicaId] | None = None,
    ) -> ControllerEffects:
        """`unfit`: replicas that led poorly of late. None: the known ones, maybe the successor."""
        leader = self._leader()
        if leader is not None and not self._served:
            leader.stalled_in = self._state.epoch
        appoint = Appoint(
            epoch=self._next_epoch(),
            leader=successor.replica_id,
            expected_epoch=self._state.epoch,
            voters=voters,
            planned_from=tuple(sorted(planned_from)),
            unfit=tuple(sorted(self._unfit.at(now_ms) if unfit is None else unfit)),
            level=self._higher_level(),
            why=reason,
        )
        return self._propose(now_ms, appoint, f"{reason}; appointing {successor.name}")

    def _next_epoch(self) -> Epoch:
        """Return an epoch above all known ones: the log's promises outlive Raft's files."""
        known: list[int] = [self._state.epoch]
        for node in self._nodes.values():
            if node.report is not None:
                known += [node.report.epoch, node.report.last_epoch, node.report.highest_promise]
        most = self._epoch_max()
        return Epoch(max(epoch for epoch in known if epoch <= most) + 1)

    def _epoch_max(self) -> int:
        """Return the highest credible epoch: at most EPOCH_LEAP_MAX above the median log's last."""
        reports = [node.report for node in self._nodes.values() if node.report]
        reports += [report for report, _ in self._learners.values()]
        logs = sorted(report.last_epoch for report in reports)
        middle = logs[(len(logs) - 1) // 2] if logs else 0
        return max(self._state.epoch, middle) + EPOCH_LEAP_MAX

    def _propose(self, now_ms: MonoMs, command: Init | Appoint, reason: str) -> ControllerEffects:
        self._proposed_at_ms = now_ms
        if self._refusals == _REFUSALS_LOGGED:
            reason += "; refused again: further refusals are not logged"
        return ControllerEffects(
            propose=command, reason=reason if self._refusals <= _REFUSALS_LOGGED else ""
        )

    def _transfer(self, now_ms: MonoMs, target: ReplicaId | None) -> ControllerEffects:
        if not self._leads:
            return _refusal_effects(_NOT_CONTROLLER)
        if self._proposed_at_ms is not None:
            return _refusal_effects("an appointment is under way")
        leader = self._leader()
        fresh = self._fresh(now_ms)
        if not self._has_majority(now_ms):
            return _refusal_effects("fewer than a majority of the voters report")
        if target is None:
            others = [node for node in fresh if node is not leader]
            successor = self._best(now_ms, others, may_lead_again=True)
        else:
            successor = next((node for node in fresh if node.replica_id == target), None)
        if successor is None:
            return _refusal_effects(_NO_SUCCESSOR if target is None else "no such voter reports")
        if successor is leader and self._served:
            return ControllerEffects(reason=f"{successor.name} leads already")
        refusal = self._takeover_obstacle(successor, fresh)
        if refusal is not None:
            return ControllerEffects(refusal=refusal)
        unfit = self._unfit.at(now_ms) - {successor.replica_id}
        return self._appoint(now_ms, successor, "a transfer was requested", unfit=unfit)

    def _takeover_obstacle(self, successor: _Node, fresh: Collection[_Node]) -> Refusal | None:
        """Return why `successor` can't take over at once. The present leader serves until then."""
        held = self._ends[0][1] if self._ends and self._leader() in fresh else None
        end = max((node.latest.last_epoch, node.latest.last_index) for node in fresh)
        return why_behind(successor.latest, end, held, self.config)

    def _change(self, now_ms: MonoMs, change: Change, name: str) -> ControllerEffects:
        """Appoint again with other voters: the present leader if it stays a voter."""
        leader, fresh = self._leader(), self._fresh(now_ms)
        if not self._leads:
            return _refusal_effects(_NOT_CONTROLLER)
        if self._proposed_at_ms is not None or self._state.proposed is not None:
            return _refusal_effects("another change, or an appointment, is under way")
        if leader is None or leader not in fresh or not self._served:
            return _refusal_effects("no leader serves")
        learner = self._learner(now_ms, name)
        voters = self._voters()
        nameless = [each for each, replica_id in voters.items() if each == id_name(replica_id)]
        if nameless and change is not Change.REMOVE and name not in voters:
            if change is Change.ADD or len(nameless) > 1:  # which of them has this name?
                first = f"replace {name}" if len(nameless) == 1 else f"remove {nameless[0]}"
                why = f"the name of voter {nameless[0]} is unknown: start it, or {first}"
                return ControllerEffects(refusal=Refusal(why, later=False))
            voters[name] = voters.pop(nameless[0])  # that voter has lost its name
        reporting = {node.name for node in fresh} | ({name} if learner is not None else set())
        leader_end = leader.latest.last_epoch, leader.latest.last_index
        after = voters_after(change, name, voters, learner, leader_end, reporting)
        if isinstance(after, Refusal):
            return ControllerEffects(refusal=after)
        stays = after.get(leader.name) == leader.replica_id
        remaining = [node for node in fresh if after.get(node.name) == node.replica_id]
        successor = leader if stays else self._best(now_ms, remaining, may_lead_again=True)
        if successor is None:
            return _refusal_effects(_NO_SUCCESSOR)
        why = f"an operator asked to {change} {name}: voters {', '.join(sorted(after))}"
        return self._appoint(now_ms, successor, why, after, leader.latest.voters)

    def _learner(self, now_ms: MonoMs, name: str) -> Learner | None:
        """Return the learner that reports under a name, or did so in the last LEARNER_MS."""
        report, at_ms = self._learners.get(name, (None, _NEVER))
        age_ms = now_ms - at_ms
        if report is None or age_ms >= LEARNER_MS:
            return None
        silent_ms = age_ms if age_ms >= self.config.report_timeout_ms else 0
        end = report.last_epoch, report.last_index
        return Learner(report.replica_id, *end, report.unsure, silent_ms)

    def _hand_raft_over(self, now_ms: MonoMs) -> ControllerEffects:
        """Hand Raft's leadership over if this node also leads the log, and leads it well."""
        config, leader = self.config, self._leader()
        peers = [node for node in self._fresh(now_ms) if node.name != self.name]
        if leader is None or leader.name != self.name or not self._served or not peers:
            self._well_since_ms = None
            return _NOTHING
        if self._well_since_ms is None:
            self._well_since_ms = now_ms
        if now_ms - self._well_since_ms < config.hand_over_after_ms:
            return _NOTHING
        if now_ms - self._handed_over_at_ms < config.hand_over_every_ms:
            return _NOTHING
        self._handed_over_at_ms = now_ms
        peer = min(peers, key=lambda node: node.replica_id)
        return ControllerEffects(hand_over_to=peer.name, reason="the controller leads the log too")

    def _voters(self) -> dict[str, ReplicaId]:
        return {node.name: node.replica_id for node in self._nodes.values()}

    def _leader(self) -> _Node | None:
        leader = self._state.leader
        return next((node for node in self._nodes.values() if node.replica_id == leader), None)

    def _leader_name(self) -> str:
        leader = self._leader()
        return leader.name if leader else "the cluster"
