"""A controller that decides over time, without nodes."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cluster.control.control_state import Appoint, ControlState, Init
from cluster.control.controller import Controller, ControllerEffects
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    ControllerTick,
    Event,
    LinkChanged,
    ProposalEnded,
    RaftLeadership,
    ReplicaReport,
    Reported,
    ReportedRole,
    StateApplied,
)
from cluster.control.membership import Refusal
from replication.core.quorum import Voters
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId

VOTERS = {"a": ReplicaId(1), "b": ReplicaId(2), "c": ReplicaId(3)}
LEARNER = ReplicaId(44)


CONFIG = ControllerConfig()


FOUNDED = ControlState(cluster_id="test", voters=VOTERS)


STEP_MS = 50


def follower(
    name: str, *, epoch: int = 0, index: int = 100, promise: int | None = None
) -> ReplicaReport:
    return ReplicaReport(
        replica_id=VOTERS[name],
        name=name,
        role=ReportedRole.FOLLOWER,
        epoch=Epoch(epoch),
        serving=False,
        lease_ok=False,
        last_epoch=Epoch(epoch),
        last_index=LogIndex(index),
        applied_index=LogIndex(index),
        highest_promise=Epoch(epoch if promise is None else promise),
        unsure=False,
    )


def voter_sets(ids: Iterable[int]) -> tuple[Voters, ...]:
    """Return the sets of a log with one set."""
    return (frozenset(map(ReplicaId, ids)),)


def serving(name: str, *, epoch: int) -> ReplicaReport:
    report = follower(name, epoch=epoch)
    return replace(report, role=ReportedRole.LEADER, serving=True, lease_ok=True)


@dataclass
class Play:
    """The controller of node a, and nodes that report what `reports` says while it runs."""

    reports: dict[str, ReplicaReport] = field(default_factory=dict)
    state: ControlState = FOUNDED
    commits: bool = True
    """Whether Raft applies proposals at once."""
    config: ControllerConfig = CONFIG
    release: ProgramRelease = FIRST_RELEASE

    def __post_init__(self) -> None:
        self.now_ms = MonoMs(1_000_000)
        self.core = Controller(
            name="a",
            cluster_id="test",
            founders=VOTERS,
            config=self.config,
            release=self.release,
        )
        self.appointed: list[tuple[Epoch, str]] = []
        self.proposed: list[Init | Appoint] = []
        self.handed_over: list[str] = []
        self.refusal: Refusal | None = None
        self.reason = ""
        self.said: list[str] = []
        """Lines of the log without a decision."""

    def do(self, event: Event) -> None:
        self.carry_out(self.core.step(self.now_ms, event))

    def carry_out(self, effects: ControllerEffects) -> None:
        if effects.hand_over_to:
            self.handed_over.append(effects.hand_over_to)
        self.refusal = effects.refusal
        command = effects.propose
        if command is None:
            self.said += [effects.reason] if effects.reason else []
            return
        self.reason = effects.reason
        self.proposed.append(command)
        if not self.commits:
            return
        match command:
            case Init(cluster_id=cluster_id, voters=voters):
                self.state = replace(self.state, cluster_id=cluster_id, voters=voters)
            case Appoint(epoch=epoch, leader=leader, unfit=unfit):
                level = max(self.state.level, command.level)
                self.state = replace(self.state, epoch=epoch, leader=leader, unfit=unfit)
                self.state = replace(self.state, level=level)
                ids = {report.replica_id: name for name, report in self.reports.items()}
                name = self.state.name_of(leader) or ids[leader]
                self.appointed.append((epoch, name))
        self.do(StateApplied(self.state))
        self.do(ProposalEnded())

    def run(self, ms: int) -> None:
        """Let time pass; every node in `reports` reports at each step."""
        for _ in range(0, ms, STEP_MS):
            self.now_ms = MonoMs(self.now_ms + STEP_MS)
            for report in list(self.reports.values()):
                self.do(Reported(report))
            self.do(ControllerTick())

    def lead(self) -> None:
        for name in ("b", "c"):
            self.do(LinkChanged(name, up=name in self.reports))
        self.do(StateApplied(self.state))
        self.do(RaftLeadership(leads=True))

    def lose(self, name: str) -> None:
        """The node's process dies."""
        del self.reports[name]
        self.do(LinkChanged(name, up=False))


def in_service(
    leader: str = "b",
    *,
    epoch: int = 5,
    config: ControllerConfig = CONFIG,
    release: ProgramRelease = FIRST_RELEASE,
) -> Play:
    """Let the appointed leader serve, and all other nodes follow."""
    reports = {name: follower(name, epoch=epoch) for name in VOTERS}
    play = Play(reports, config=config, release=release)
    play.reports[leader] = serving(leader, epoch=epoch)
    play.state = replace(play.state, epoch=Epoch(epoch), leader=VOTERS[leader])
    play.lead()
    play.run(1_000)
    assert play.appointed == []
    return play


def with_learner(name: str, *, index: int = 100) -> Play:
    """A learner reports under `name`; if that is a voter's, the voter is dead."""
    play = in_service()
    if name in play.reports:
        play.lose(name)
        play.run(STEP_MS)
    learner = replace(follower("c", epoch=5, index=index), name=name, replica_id=LEARNER)
    play.reports[name] = replace(learner, role=ReportedRole.LEARNER)
    play.do(LinkChanged(name, up=True))
    play.run(1_100)  # what the dead one said is old by then
    return play


def proposal(play: Play) -> Appoint:
    command = play.proposed[-1]
    assert isinstance(command, Appoint)
    return command
