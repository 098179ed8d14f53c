"""A leader whose disk becomes slow: nothing waits for it, and the controller relieves it."""

from chaos.sim.node import SimNode
from chaos.sim.options import NEVER
from chaos.sim.planted import calm
from chaos.sim.world import World
from cluster.control import Appoint, ControlState
from cluster.controller import (
    Controller,
    LinkChanged,
    ProposalEnded,
    RaftLeadership,
    Report,
    Reported,
    Role,
    StateApplied,
    Tick,
)
from replication import steps
from timer.units import MonoMs

SLOW_US = 5_000_000
SECONDS = 25
ROLES = {
    steps.Role.LEARNER: Role.LEARNER,
    steps.Role.FOLLOWER: Role.FOLLOWER,
    steps.Role.CANDIDATE: Role.PROMOTING,
    steps.Role.LEADER: Role.LEADER,
}


def report_of(node: SimNode) -> Report:
    report = node.driver.report()
    return Report(
        replica_id=report.replica,
        name=str(node.replica),
        role=ROLES[report.role],
        epoch=report.bid_epoch or report.epoch,
        serving=report.serving,
        lease_ok=report.lease_ok,
        last_epoch=report.last_epoch,
        last_index=report.last_index,
        applied_index=node.app.applied_index,
        highest_promise=report.highest_promise,
        unsure=report.unsure,
        disk_ms=report.disk_ms,
        commit_ms=report.commit_ms,
    )


class Watched:
    """A world that the real controller takes over when the leader's disk becomes slow."""

    def __init__(self, seed: int, slowed: int) -> None:
        options = calm(seed).aim(
            nodes=3, sync_us=1_000, delay_us=500, proposals_per_s=20, manifest_every=NEVER
        )
        self.world, self.slowed = World(seed, options=options), slowed
        self.appointed: list[tuple[int, Appoint, str]] = []
        self.longest_us, self._committed = 0, (0, SLOW_US)
        self.worst = 0, 0
        """How long the slow leader's disk, and its commits, took at the worst."""
        self.world.timeline.after(SLOW_US, self._begin)
        self.world.run(SECONDS)

    def _begin(self) -> None:
        assert self.world.control is not None
        self.world.control._idle_until_ms = 1 << 60
        self.leader = next(node for node in self.world.nodes if node.leading)
        self.leader.slow_disk = self.slowed
        names = {str(voter): voter for voter in sorted(self.world.voters)}
        other = next(name for name, voter in names.items() if voter != self.leader.replica)
        self.controller = Controller(name=other, cluster_id="c", founders=names)
        self.state = ControlState(
            cluster_id="c", voters=names, epoch=self.leader.core.epoch, leader=self.leader.replica
        )
        for name in names.keys() - {other}:
            self._step(LinkChanged(name, up=True))
        self._step(StateApplied(self.state))
        self._step(RaftLeadership(leads=True))
        self._look()

    def _look(self) -> None:
        now_us, committed = self.world.timeline.now_us, len(self.world.referee.committed)
        if committed != self._committed[0]:
            self._committed = committed, now_us
        self.longest_us = max(self.longest_us, now_us - self._committed[1])
        if now_us >= (SECONDS - 2) * 1_000_000:
            return  # the world is being healed
        self.world.timeline.after(10_000, self._look)
        if now_us // 10_000 % 10 == 0:
            for node in self.world.nodes:
                report = report_of(node)
                if report.serving and node is self.leader:
                    self.worst = max(self.worst, (report.disk_ms, report.commit_ms))
                self._step(Reported(report))
            self._step(Tick())

    def _step(self, event: object) -> None:
        now_us = self.world.timeline.now_us
        effects = self.controller.step(MonoMs(now_us // 1_000), event)  # type: ignore[arg-type]
        if isinstance(effects.propose, Appoint):
            appoint = effects.propose
            self.appointed.append((now_us - SLOW_US, appoint, effects.reason))
            self.state = ControlState(
                cluster_id="c",
                voters=self.state.voters,
                epoch=appoint.epoch,
                leader=appoint.leader,
                unfit=appoint.unfit,
            )
            for node in self.world.nodes:
                node.appointed(appoint.epoch, appoint.leader, None)
            self._step(StateApplied(self.state))
            self._step(ProposalEnded())


def test_leader_whose_syncs_take_seconds_is_relieved_and_no_commit_waits_for_it() -> None:
    seen = Watched(5, slowed=2_000)
    ((after_us, appoint, reason),) = seen.appointed
    assert after_us <= 10_000_000
    assert appoint.unfit == (seen.leader.replica,)
    assert "to become durable" in reason
    disk_ms, commit_ms = seen.worst
    assert disk_ms >= 1_000
    assert commit_ms <= 100
    assert seen.longest_us <= 500_000, "proposals are 50 ms apart"
    assert next(node.replica for node in seen.world.nodes if node.leading) == appoint.leader


def test_leader_with_a_disk_as_fast_as_the_others_stays() -> None:
    seen = Watched(5, slowed=1)
    assert seen.appointed == []
    assert seen.worst[0] < 50
