"""Who should lead the timer log: the controller's decisions, as a pure core.

Every node runs one; it acts while Raft's leadership is local. It watches the nodes through
their reports and the links to them, and decides four things:

    appoint      the leader is gone, stalls or was refused; or an operator asks for another
    adopt        a node leads an epoch above ours: Raft forgot it, not the log; take note
    relieve      the leader serves, but poorly, and another would serve better: appoint that
    hand over    the controller leads the log too: give Raft's leadership to somebody else,
                 so that one dead node costs one role

An appointment is a proposal, compare-and-set on the epoch; the appointee still has to collect
promises from a majority. So a wrong guess here costs a pause, never data, and two controllers
at once are harmless.

    controller's Raft leadership --leads--> watch --gone--> appoint --applied--> watch
                                              ^                |
                                              +--- refused ----+

Time arrives as `now_ms`; no clock, socket or random source is read here.
"""

import enum
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Self, TypeAlias, assert_never

from cluster.control.control_state import Appoint, ControlState, Init
from cluster.control.leader_fitness import SLOW_PARTS, ServiceRecord, UnfitReplicas
from cluster.control.membership import Change, Learner, MembershipRefusal, planned
from cluster.control.succession import why_behind
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId

_NEVER: Final = MonoMs(-(1 << 62))
EPOCH_LEAP_MAX: Final = 1 << 32
"""A promise further above all else was never asked for by a controller: it is passed over."""


class ReportedRole(enum.StrEnum):
    """What a replica does in the log."""

    LEARNER = "learner"
    """It has no vote, as far as its own log tells."""
    FOLLOWER = "follower"
    PROMOTING = "promoting"
    LEADER = "leader"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Times and limits of the controller; milliseconds."""

    link_grace_ms: int = 150
    """A broken link that is not rebuilt within this tells a dead leader from a hiccup."""
    report_timeout_ms: int = 1_000
    """A report older than this says nothing; ten are due in it."""
    lease_grace_ms: int = 1_000
    """A leader without a lease for this long serves nobody."""
    idle_grace_ms: int = 1_000
    """An appointee that hasn't begun its promotion by then won't: it restarted or never heard."""
    stall_timeout_ms: int = 3_000
    """An appointee that doesn't serve by then is replaced. Doubles with each that stalled in a
    row, so that a slow catch-up isn't cut short for ever."""
    stall_doublings_max: int = 4
    gather_ms: int = 200
    """Wait this long for reports of nodes that are linked, once a majority has reported."""
    gather_first_ms: int = 1_000
    """The same for the very first appointment, when nodes start one after the other."""
    promise_grace_ms: int = 3_000
    """A voter whose promise is above the epoch refuses the leader; after this, lead it above."""
    close_entries: int = 256
    """Logs of the same last epoch that differ by less are as good: reports are 0.1 s old."""
    lag_entries: int = 1_024
    """Candidates are told apart by what they have yet to apply in portions of this: 0.2 s each. A
    follower applies four times a second, so it lacks less, unless it has just started."""
    propose_timeout_ms: int = 2_500
    """Propose again when nothing came of a proposal; above the shell's own deadline."""
    refused_wait_ms: int = 1_000
    """After refusals in a row, wait before the next try; doubles with each."""
    refused_wait_ms_max: int = 16_000
    hand_over_after_ms: int = 5_000
    """Everything must have been well for this long before Raft's leadership is handed over."""
    hand_over_every_ms: int = 30_000
    transfer_ms: int = 3_000
    """A transfer's target may take this long to catch up; the leader serves meanwhile."""
    transfer_entries: int = 100_000
    """A target that lacks more entries is refused at once."""
    lease_ms: int = 500
    """The lease: what takes as long is slow."""
    caught_up_ms: int = 300
    """A target has caught up if it holds all that the leader held this long ago: reports, ten a
    second, are no sharper, and the rest is fetched while nobody serves."""

    def __post_init__(self) -> None:
        assert self.link_grace_ms < self.report_timeout_ms <= self.stall_timeout_ms
        assert self.idle_grace_ms <= self.stall_timeout_ms

    @classmethod
    def of_lease(cls, lease_ms: int) -> Self:
        """Return times that bear whatever hiccup the lease bears.

        They are the defaults up to a lease of half a second. A leader that nobody hears keeps its
        lease so long, and a successor waits for the end of it before it can serve.
        """
        least = cls()
        return cls(
            lease_ms=max(least.lease_ms, lease_ms),
            report_timeout_ms=max(least.report_timeout_ms, 2 * lease_ms),
            lease_grace_ms=max(least.lease_grace_ms, 2 * lease_ms),
            idle_grace_ms=max(least.idle_grace_ms, 2 * lease_ms),
            stall_timeout_ms=max(least.stall_timeout_ms, 6 * lease_ms),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a node says about its replica of the log, several times a second."""

    replica_id: ReplicaId
    name: str
    role: ReportedRole
    epoch: Epoch
    """That it leads, is being promoted to or follows."""
    serving: bool
    """Promoted: it answers clients in `epoch`."""
    lease_ok: bool
    """As leader: a majority answered it within the lease."""
    last_epoch: Epoch
    last_index: LogIndex
    """Its log's last entry."""
    applied_index: LogIndex
    """Its state is that after this entry; it serves when it has applied all that is committed."""
    highest_promise: Epoch
    """The highest that it gave, or met at others when it was refused."""
    unsure: bool
    """Its log was cut or refetched and isn't matched with a leader's yet."""
    refused_epoch: Epoch = Epoch(0)
    """As leader: the highest epoch for which a voter refused it. At its own epoch, that voter
    promised another appointee of it, and follows again only from the next epoch on."""
    disk_ms: int = 0
    """How long its disk took to make an entry durable, or takes with the present one."""
    commit_ms: int = 0
    """As leader: how long a commit took, or takes."""
    accepts: bool = True
    """It can take connections, and open files."""

    def is_urgent_after(self, earlier: "ReplicaReport | None") -> bool:
        """Return whether this says something that the controller should know at once."""
        return earlier is None or self._news() != earlier._news()  # noqa: SLF001

    def _news(self) -> tuple[object, ...]:
        return (
            self.role,
            self.epoch,
            self.serving,
            self.lease_ok,
            self.highest_promise,
            self.unsure,
            self.last_epoch,
        )


@dataclass(frozen=True, slots=True)
class ControllerTick:
    """Nothing happened but time."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A node's report arrived, or this node's own was made."""

    report: ReplicaReport


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to a peer was built or broke."""

    name: str
    up: bool


@dataclass(frozen=True, slots=True)
class StateApplied:
    """The replicated object changed."""

    state: ControlState


@dataclass(frozen=True, slots=True)
class RaftLeadership:
    """This node became, or ceased to be, Raft's leader with everything before it applied."""

    leads: bool


@dataclass(frozen=True, slots=True)
class ProposalEnded:
    """The last proposal has an outcome, or none is known."""

    refused: bool = False
    """It was applied and changed nothing, or certainly never will be."""


@dataclass(frozen=True, slots=True)
class TransferAsked:
    """An operator wants another leader. None: whichever is best."""

    target: ReplicaId | None


@dataclass(frozen=True, slots=True)
class ChangeAsked:
    """An operator wants other voters."""

    change: Change
    name: str


Asked: TypeAlias = TransferAsked | ChangeAsked
Event: TypeAlias = (
    ControllerTick | Reported | LinkChanged | StateApplied | RaftLeadership | ProposalEnded | Asked
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerEffects:
    """Orders for the shell, carried out in field order."""

    propose: Init | Appoint | None = None
    """Submit to Raft; answer with ProposalEnded."""
    hand_over_to: str | None = None
    """Ask Raft to make this node its leader."""
    refusal: MembershipRefusal | None = None
    """Why what was asked for is not proposed."""
    reason: str = ""
    """Why, for the log."""


_NOTHING: Final = ControllerEffects()
_REFUSALS_SAID: Final = 1


def _refused(why: str) -> ControllerEffects:
    return ControllerEffects(refusal=MembershipRefusal(why))


@dataclass(slots=True)
class _Node:
    """What is known of one voter, or of a learner."""

    name: str
    replica_id: ReplicaId
    linked: bool
    link_changed_at_ms: MonoMs
    report: ReplicaReport | None = None
    reported_at_ms: MonoMs = _NEVER
    stalled_in: Epoch = Epoch(0)
    """The last epoch in which it was appointed and did not serve."""


@dataclass(slots=True)
class Controller:
    """The controller's knowledge on one node. Only `step` changes it."""

    name: str
    cluster_id: str
    founders: Mapping[str, ReplicaId]
    """Voters as configured; they count until the replicated object names some."""
    config: ControllerConfig = field(default_factory=ControllerConfig)
    _leads: bool = False
    _state: ControlState = field(default_factory=ControlState)
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _links: dict[str, tuple[bool, MonoMs]] = field(default_factory=dict)
    """Of every peer, voter or not: whether it is linked, and since when."""
    _learners: dict[str, tuple[ReplicaReport, MonoMs]] = field(default_factory=dict)
    """What came from replicas that are no voters, and when."""
    _watched_since_ms: MonoMs = _NEVER
    """Since when this node has led Raft and the appointed leader was the same."""
    _served: bool = False
    """The appointee was seen serving in this epoch."""
    _service: ServiceRecord = field(default_factory=ServiceRecord)
    """Of the appointed leader in this epoch."""
    _unfit: UnfitReplicas = field(default_factory=UnfitReplicas)
    _lease_bad_since_ms: MonoMs | None = None
    _promise_above_since_ms: MonoMs | None = None
    _gone_since_ms: MonoMs | None = None
    _stalls: int = 0
    """Appointees in a row that never served."""
    _refusals: int = 0
    """Appointments in a row that Raft, or a voter with a higher promise, refused."""
    _wait_until_ms: MonoMs = _NEVER
    _proposed_at_ms: MonoMs | None = None
    _well_since_ms: MonoMs | None = None
    _handed_over_at_ms: MonoMs = _NEVER
    _ends: deque[tuple[MonoMs, LogIndex]] = field(default_factory=deque[tuple[MonoMs, LogIndex]])
    """The end of the leader's log as it was reported lately, oldest first."""

    def __post_init__(self) -> None:
        self._meet(self.founders)

    def step(self, now_ms: MonoMs, event: Event) -> ControllerEffects:
        """Advance to `now_ms`, take note of `event`, return what the shell must do."""
        match event:
            case ControllerTick():
                pass
            case Reported(report):
                self._note_report(now_ms, report)
            case LinkChanged(name, up):
                if name not in self._links or self._links[name][0] != up:
                    self._links[name] = (up, now_ms)
                node = self._nodes.get(name)
                if node is not None and node.linked != up:
                    node.linked = up
                    node.link_changed_at_ms = now_ms
            case StateApplied(state):
                self._note_state(now_ms, state)
            case RaftLeadership(leads):
                self._note_leadership(now_ms, leads=leads)
            case ProposalEnded(refused):
                self._proposed_at_ms = None
                if refused:
                    self._note_refusal(now_ms)
            case TransferAsked(target):
                return self._transfer(now_ms, target)
            case ChangeAsked(change, name):
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
        """The epoch in which the appointed leader was seen serving; 0: it was not."""
        return self._state.epoch if self._served else Epoch(0)

    def describe(self, now_ms: MonoMs) -> list[dict[str, object]]:
        """Return one row of plain values per voter; reports are known on the controller only."""
        return [
            {
                "name": node.name,
                "replica_id": node.replica_id,
                "linked": node.linked,
                "report": asdict(node.report) if node.report else None,
                "report_age_ms": now_ms - node.reported_at_ms if node.report else None,
            }
            for node in self._nodes.values()
        ]

    # Taking note

    def _meet(self, voters: Mapping[str, ReplicaId]) -> None:
        known, self._nodes = self._nodes, {}
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

    def _note_report(self, now_ms: MonoMs, report: ReplicaReport) -> None:
        node = self._nodes.get(report.name)
        if node is None or node.replica_id != report.replica_id:
            self._learners[report.name] = (report, now_ms)
            if node is None or not self._is_heir(now_ms, report, node):
                return  # a learner, or another directory under a voter's name
            node = self._nodes[report.name] = replace(node, replica_id=report.replica_id)
            del self._learners[report.name]
        node.report, node.reported_at_ms = report, now_ms
        if node.replica_id != self._state.leader:
            return
        self._ends.append((now_ms, report.last_index))
        while len(self._ends) > 1 and self._ends[1][0] <= now_ms - self.config.caught_up_ms:
            self._ends.popleft()
        leads = report.role is ReportedRole.LEADER and report.epoch == self._state.epoch
        if leads and report.serving:
            self._served, self._stalls = True, 0
            self._refusals, self._wait_until_ms = 0, _NEVER
            self._note_service(now_ms, report)
        if leads and not report.lease_ok:
            self._lease_bad_since_ms = self._lease_bad_since_ms or now_ms
        else:
            self._lease_bad_since_ms = None

    def _note_service(self, now_ms: MonoMs, report: ReplicaReport) -> None:
        others = [node.report for node in self._fresh(now_ms) if node.report is not None]
        self._service.note(
            now_ms,
            lease_ok=report.lease_ok,
            accepts=report.accepts,
            disk_ms=report.disk_ms,
            commit_ms=report.commit_ms,
            others_ms=[other.disk_ms for other in others if other.name != report.name],
            lease_ms=self.config.lease_ms,
        )

    def _is_heir(self, now_ms: MonoMs, report: ReplicaReport, voter: _Node) -> bool:
        """Return whether a replica votes in place of a silent one, though nobody has said so.

        By its log it does, and the leader of that change died before it could publish it.
        """
        silent_ms = now_ms - voter.reported_at_ms
        return (
            report.role is not ReportedRole.LEARNER and silent_ms >= self.config.report_timeout_ms
        )

    def _note_state(self, now_ms: MonoMs, state: ControlState) -> None:
        if state.voters and state.voters != self._state.voters:
            self._meet(state.voters)
        if state.epoch != self._state.epoch:
            if self._leads and self._state.leader is not None and not self._served:
                self._stalls = min(self._stalls + 1, self.config.stall_doublings_max)
                if not self._has_stalled():
                    self._note_refusal(now_ms)  # this epoch is above what was met
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
        """Start afresh: nothing that was seen of an earlier leader counts."""
        self._watched_since_ms = now_ms
        self._served = False
        self._service = ServiceRecord()
        self._lease_bad_since_ms = None
        self._promise_above_since_ms = None
        self._gone_since_ms = None
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
        reason = self._why_gone(now_ms)
        if reason is None:
            self._gone_since_ms = None
            return self._relieve(now_ms) or self._hand_over(now_ms)
        self._well_since_ms = None
        if self._gone_since_ms is None:
            self._gone_since_ms = now_ms
        if not self._is_gathered(now_ms):
            return _NOTHING
        successor = self._best(now_ms, self._fresh(now_ms), may_lead_again=self._may_lead_again())
        if successor is None:
            return _NOTHING
        return self._appoint(now_ms, successor, f"{self._leader_name()}: {reason}")

    def _relieve(self, now_ms: MonoMs) -> ControllerEffects | None:
        """Appoint a better leader in place of one that serves poorly; it takes over in order."""
        reason, leader = self._service.why_poor(), self._leader()
        if reason is None or leader is None or not self._served:
            return None
        fresh, unfit = self._fresh(now_ms), self._unfit.at(now_ms)
        better = [
            node
            for node in fresh
            if node is not leader
            and node.replica_id not in unfit
            and node.report is not None
            and not self._is_slow(node.report)
            and node.report.accepts
            and self._why_not_yet(node, fresh) is None
        ]
        successor = self._best(now_ms, better, may_lead_again=False)
        if successor is None:
            return None
        unfit |= {leader.replica_id}
        return self._appoint(now_ms, successor, f"{leader.name}: {reason}", unfit=unfit)

    def _is_slow(self, report: ReplicaReport) -> bool:
        return report.disk_ms >= self.config.lease_ms // SLOW_PARTS

    def _adopt(self, now_ms: MonoMs) -> ControllerEffects | None:
        """A node serves an epoch above ours: the log made it leader, and Raft forgot."""
        for node in self._fresh(now_ms):
            report = node.report
            assert report is not None
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

    def _why_gone(self, now_ms: MonoMs) -> str | None:
        """Return why the appointed leader has to be replaced. None: it needn't."""
        config, watched_ms = self.config, now_ms - self._watched_since_ms
        leader = self._leader()
        if leader is None:
            return "nobody is appointed"
        if not leader.linked and now_ms - leader.link_changed_at_ms >= config.link_grace_ms:
            return "its link broke"
        heard_at_ms = max(leader.reported_at_ms, self._watched_since_ms)
        if now_ms - heard_at_ms >= config.report_timeout_ms:
            return "it reports nothing"
        reported_since = leader.reported_at_ms >= self._watched_since_ms
        report = leader.report if reported_since else None
        if report is not None:
            if report.highest_promise > self._state.epoch and not self._served:
                return f"it met a promise of epoch {report.highest_promise}"
            promised = report.highest_promise == self._state.epoch  # and bids no more
            follows = report.role in (ReportedRole.FOLLOWER, ReportedRole.LEARNER)
            if follows and (self._served or promised):
                return "it stepped down or restarted"
            bids = report.epoch >= self._state.epoch  # it may wait for the lease of the last one
            if follows and not bids and watched_ms >= config.idle_grace_ms:
                return "it does not begin"
        lease_bad_since_ms = self._lease_bad_since_ms
        if lease_bad_since_ms is not None and (
            now_ms - lease_bad_since_ms >= config.lease_grace_ms
        ):
            return "it has no lease"
        if not self._served and watched_ms >= config.stall_timeout_ms << self._stalls:
            return "it does not serve"
        return self._why_above(now_ms)

    def _why_above(self, now_ms: MonoMs) -> str | None:
        """A voter promised another leadership, and refuses what the leader sends."""
        epoch, most = self._state.epoch, self._epoch_max()
        above = [
            node.name
            for node in self._fresh(now_ms)
            if node.report is not None
            and (
                epoch < node.report.highest_promise <= most
                or (node.replica_id == self._state.leader and node.report.refused_epoch >= epoch)
            )
        ]
        if not above:
            self._promise_above_since_ms = None
            return None
        if self._promise_above_since_ms is None:
            self._promise_above_since_ms = now_ms
        if now_ms - self._promise_above_since_ms < self.config.promise_grace_ms:
            return None
        return f"{', '.join(above)} promised, or met, another leadership"

    def _is_gathered(self, now_ms: MonoMs) -> bool:
        """Return whether enough fresh reports are here to choose from."""
        fresh = self._fresh(now_ms)
        if len(fresh) <= len(self._nodes) // 2:
            return False
        first = self._state.leader is None
        if len(fresh) == sum(first or node.linked for node in self._nodes.values()):
            return True
        assert self._gone_since_ms is not None
        gather_ms = self.config.gather_first_ms if first else self.config.gather_ms
        return now_ms - max(self._gone_since_ms, self._watched_since_ms) >= gather_ms

    def _fresh(self, now_ms: MonoMs) -> list[_Node]:
        return [
            node
            for node in self._nodes.values()
            if node.linked and now_ms - node.reported_at_ms < self.config.report_timeout_ms
        ]

    def _may_lead_again(self) -> bool:
        """Return whether the leader that has to be replaced is as good a candidate as others.

        It is when it restarted, or was refused by a promise above its epoch; it isn't when it
        stalls, or has no lease: it may be cut off from the others.
        """
        return self._lease_bad_since_ms is None and (self._served or not self._has_stalled())

    def _has_stalled(self) -> bool:
        leader = self._leader()
        report = leader.report if leader else None
        return report is None or report.highest_promise <= self._state.epoch

    def _best(
        self, now_ms: MonoMs, candidates: Iterable[_Node], *, may_lead_again: bool
    ) -> _Node | None:
        """Return the node to appoint: longest log, least of it to apply, then not the controller.

        Nodes that led poorly, or have a slow disk, come last.
        """
        reported = [(node, node.report) for node in candidates if node.report is not None]
        if not reported:
            return None
        others = [pair for pair in reported if pair[0].replica_id != self._state.leader]
        pool = reported if may_lead_again or not others else others
        # An unsure log may lack what it once acknowledged: only if there is no other.
        pool = [pair for pair in pool if not pair[1].unsure] or pool
        last_epoch = max(report.last_epoch for _, report in pool)
        last_index = max(report.last_index for _, report in pool if report.last_epoch == last_epoch)
        close = [
            (node, report)
            for node, report in pool
            if report.last_epoch == last_epoch
            and report.last_index > last_index - self.config.close_entries
        ]
        unfit, most = self._unfit.at(now_ms), self._epoch_max()
        node, _ = min(
            close,
            key=lambda pair: (
                pair[1].highest_promise > most,
                pair[0].stalled_in,
                pair[0].replica_id in unfit,
                self._is_slow(pair[1]) or not pair[1].accepts,
                (pair[1].last_index - pair[1].applied_index) // self.config.lag_entries,
                pair[0].name == self.name,
                -pair[1].last_index,
                pair[0].replica_id,
            ),
        )
        return node

    def _appoint(
        self,
        now_ms: MonoMs,
        successor: _Node,
        reason: str,
        voters: Mapping[str, ReplicaId] | None = None,
        unfit: frozenset[ReplicaId] | None = None,
    ) -> ControllerEffects:
        """`unfit`: those that led poorly lately. None: as known, the successor among them."""
        leader = self._leader()
        if leader is not None and not self._served:
            leader.stalled_in = self._state.epoch
        appoint = Appoint(
            epoch=self._next_epoch(),
            leader=successor.replica_id,
            expected_epoch=self._state.epoch,
            voters=voters,
            unfit=tuple(sorted(self._unfit.at(now_ms) if unfit is None else unfit)),
        )
        return self._propose(now_ms, appoint, f"{reason}; appointing {successor.name}")

    def _next_epoch(self) -> Epoch:
        """Return an epoch above all that is known: the log's promises outlive Raft's files."""
        known: list[int] = [self._state.epoch]
        for node in self._nodes.values():
            if node.report is not None:
                known += [node.report.epoch, node.report.last_epoch, node.report.highest_promise]
        most = self._epoch_max()
        return Epoch(max(epoch for epoch in known if epoch <= most) + 1)

    def _epoch_max(self) -> int:
        """Return the highest epoch that is believed: of logs, half of them count."""
        logs = sorted(node.report.last_epoch for node in self._nodes.values() if node.report)
        middle = logs[(len(logs) - 1) // 2] if logs else 0
        return max(self._state.epoch, middle) + EPOCH_LEAP_MAX

    def _propose(self, now_ms: MonoMs, command: Init | Appoint, reason: str) -> ControllerEffects:
        self._proposed_at_ms = now_ms
        if self._refusals == _REFUSALS_SAID:
            reason += "; refused again: this is said no more until it works"
        return ControllerEffects(
            propose=command, reason=reason if self._refusals <= _REFUSALS_SAID else ""
        )

    def _transfer(self, now_ms: MonoMs, target: ReplicaId | None) -> ControllerEffects:
        if not self._leads:
            return _refused("this node is not the controller")
        if self._proposed_at_ms is not None:
            return _refused("an appointment is under way")
        leader = self._leader()
        fresh = self._fresh(now_ms)
        if len(fresh) <= len(self._nodes) // 2:
            return _refused("no majority of the voters reports")
        if target is None:
            others = [node for node in fresh if node is not leader]
            successor = self._best(now_ms, others, may_lead_again=True)
        else:
            successor = next((node for node in fresh if node.replica_id == target), None)
        if successor is None:
            return _refused("no such voter reports")
        if successor is leader and self._served:
            return ControllerEffects(reason=f"{successor.name} leads already")
        refusal = self._why_not_yet(successor, fresh)
        if refusal is not None:
            return ControllerEffects(refusal=refusal)
        unfit = self._unfit.at(now_ms) - {successor.replica_id}
        return self._appoint(now_ms, successor, "an operator asked for a transfer", unfit=unfit)

    def _why_not_yet(self, successor: _Node, fresh: Collection[_Node]) -> MembershipRefusal | None:
        """Return why `successor` can't take over at once: the leader serves until it can."""
        held = self._ends[0][1] if self._ends and self._leader() in fresh else None
        reports = [node.report for node in fresh if node.report is not None]
        ends = [(report.last_epoch, report.last_index) for report in reports]
        assert successor.report is not None, successor
        return why_behind(successor.report, max(ends), held, self.config)

    def _change(self, now_ms: MonoMs, change: Change, name: str) -> ControllerEffects:
        """Appoint once more, with other voters: the present leader, if it is still one then."""
        leader, fresh = self._leader(), self._fresh(now_ms)
        if not self._leads:
            return _refused("this node is not the controller")
        if self._proposed_at_ms is not None or self._state.proposed is not None:
            return _refused("another change, or an appointment, is under way")
        if leader is None or leader not in fresh or leader.report is None or not self._served:
            return _refused("nobody leads")
        learner, at_ms = self._learners.get(name, (None, _NEVER))
        if learner is not None and now_ms - at_ms >= self.config.report_timeout_ms:
            learner = None
        voters = {node.name: node.replica_id for node in self._nodes.values()}
        reporting = {node.name for node in fresh} | ({name} if learner is not None else set())
        after = planned(
            change,
            name,
            voters,
            None
            if learner is None
            else Learner(
                learner.replica_id, learner.last_epoch, learner.last_index, learner.unsure
            ),
            (leader.report.last_epoch, leader.report.last_index),
            reporting,
        )
        if isinstance(after, MembershipRefusal):
            return ControllerEffects(refusal=after)
        stays = after.get(leader.name) == leader.replica_id
        remaining = [node for node in fresh if after.get(node.name) == node.replica_id]
        successor = leader if stays else self._best(now_ms, remaining, may_lead_again=True)
        if successor is None:
            return _refused("nobody else could lead")
        why = f"an operator asked to {change} {name}: voters {', '.join(sorted(after))}"
        return self._appoint(now_ms, successor, why, after)

    def _hand_over(self, now_ms: MonoMs) -> ControllerEffects:
        """Give Raft's leadership away when this node leads the log too, and all is well."""
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

    def _leader(self) -> _Node | None:
        leader = self._state.leader
        return next((node for node in self._nodes.values() if node.replica_id == leader), None)

    def _leader_name(self) -> str:
        leader = self._leader()
        return leader.name if leader else "the cluster"
