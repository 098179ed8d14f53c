"""A model of the control plane that appoints leaders, with every error that pysyncobj may make.

At intervals it reads every node's report, and appoints another leader when the present one seems
gone. Now and then it changes the voters. A seed's mischief may add:

    transfer    an operator moves the leadership to any voter, however far behind
    slow        it reads reports seldom      dead       it appoints a node that may be dead
    leaderless  it does nothing for seconds  twice      it repeats an old appointment
    double      two controllers appoint two  spurious   it replaces a healthy leader
                nodes in one epoch           late       an appointment arrives seconds later
    forget      its epoch falls back, as after a vote lost in a power cut
"""

import random
from typing import TYPE_CHECKING, Final

from replication.core.core_events import Role
from replication.core.quorum import Voters
from replication.driver.driver import LogStatus
from timer.model.units import Epoch, ReplicaId

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

PATIENCE_MS: Final = 600
"""A leader without a report of serving for this long counts as gone."""
NEAR: Final = 50
"""A learner that lacks at most this many entries may become a voter."""
VOTERS_MIN: Final = 3
VOTERS_MAX: Final = 6
RAISED_IN: Final = 4
"""The epoch from which on the feature level is 2."""
BID_PATIENCE_MS: Final = 2_000
"""Time within which an appointee must begin to serve."""


class Control:
    """The control plane of one world."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.mischief: tuple[str, ...] = world.options.mischief
        self.epoch = Epoch(0)
        self.leader: ReplicaId | None = None
        self.deaf: set[ReplicaId] = set()
        """Nodes that the control plane can't reach."""
        self.voters = world.voters
        """The voters of the leader that served last."""
        self._voters_epoch = Epoch(0)
        self._seen_ok_ms = -(10**9)
        self._appointed_ms = -(10**9)
        self._idle_until_ms = 0
        self._history: list[tuple[Epoch, ReplicaId]] = []
        world.timeline.after(1_000, self._look)

    def welcome(self, node: "SimNode") -> None:
        """Send the present appointment to a node that has just started."""
        if self.leader is not None:
            self._tell(node, self.epoch, self.leader)

    def _reports(self) -> dict[ReplicaId, LogStatus]:
        return {
            node.replica: node.driver.report()
            for node in self._world.nodes
            if node.alive and not node.paused and node.replica in self._hears()
        }

    def _hears(self) -> Voters:
        """Return the voters that the control plane can reach. It reads no reports of learners."""
        for node in self._world.nodes:
            if node.alive and node.core.serving and node.core.epoch > self._voters_epoch:
                self._voters_epoch, self.voters = node.core.epoch, node.core.voters
        return self.voters - self.deaf

    def _look(self) -> None:
        rng, options = self._rng, self._world.options
        poll_ms = options.poll_ms * (rng.choice((1, 5, 15)) if "slow" in self.mischief else 1)
        self._world.timeline.after(int(poll_ms * 1_000 * (0.5 + rng.random())), self._look)
        now_ms = self._world.timeline.now_us // 1_000
        if now_ms < self._idle_until_ms:
            return
        if "leaderless" in self.mischief and rng.random() < 0.01:
            self._idle_until_ms = now_ms + rng.randint(1_000, 8_000)
            return
        reports = self._reports()
        self._misbehave(reports)
        if self._fine(reports, now_ms):
            gone = any(n.refused and n.replica in self.voters for n in self._world.nodes)
            if rng.random() < max(options.member_changes, 0.1 * gone):
                self._change_members(reports)
            return
        if now_ms - self._seen_ok_ms < PATIENCE_MS:
            return
        if now_ms - self._appointed_ms < BID_PATIENCE_MS and self._trying(reports):
            return
        self._appoint(reports)

    def _fine(self, reports: dict[ReplicaId, LogStatus], now_ms: int) -> bool:
        report = reports.get(self.leader) if self.leader is not None else None
        if report is None or report.epoch != self.epoch or report.role is not Role.LEADER:
            return False
        if report.highest_promise > self.epoch or report.refused_epoch or not report.lease_ok:
            return False
        if any(each.highest_promise > self.epoch for each in reports.values()):
            # A node promised a higher epoch than this control plane remembers appointing.
            return False
        self._seen_ok_ms = now_ms
        return report.serving

    def _trying(self, reports: dict[ReplicaId, LogStatus]) -> bool:
        report = reports.get(self.leader) if self.leader is not None else None
        if report is None:
            return False
        return report.bid_epoch == self.epoch or (
            report.epoch == self.epoch and report.role is Role.LEADER
        )

    def _misbehave(self, reports: dict[ReplicaId, LogStatus]) -> None:
        rng = self._rng
        for kind in self.mischief:
            if rng.random() >= 0.01:
                continue
            match kind:
                case "forget":
                    self.epoch, self.leader = Epoch(rng.randint(0, self.epoch)), None
                case "spurious":
                    self._appoint(reports)
                case "transfer":
                    self.transfer(rng.choice(sorted(self.voters)))
                case "twice" if self._history:
                    epoch, leader = rng.choice(self._history[-5:])
                    for node in self._world.nodes:
                        self._tell(node, epoch, leader)
                case _:
                    pass

    def _appoint(self, reports: dict[ReplicaId, LogStatus]) -> None:
        rng = self._rng
        if not reports:
            return
        highest = max(report.highest_promise for report in reports.values())
        if "forget" in self.mischief and rng.random() < 0.3:
            highest = Epoch(0)
        self.epoch = Epoch(max(self.epoch, highest) + 1)
        sure = {r.replica for r in reports.values() if not r.unsure}
        stalled = self._seen_ok_ms < self._appointed_ms and sure == {self.leader}
        # The real controller does not reappoint a node that did not begin, if there is another.
        if stalled and len(reports) > 1:
            reports = {replica: r for replica, r in reports.items() if replica != self.leader}
        # A node that was voted out may be among them, as that is not known here yet. It never bids.
        order = sorted(
            reports.values(),
            key=lambda r: (
                r.role is not Role.LEARNER,
                not r.unsure,
                r.last_epoch,
                r.last_index,
                rng.random(),
            ),
        )
        self.leader = order[-1].replica
        if "dead" in self.mischief and rng.random() < 0.2:
            self.leader = rng.choice(self._world.ids)
        elif self.mischief and rng.random() < 0.3:
            self.leader = rng.choice(order).replica
        self._appointed_ms = self._world.timeline.now_us // 1_000
        self._announce(self.leader)
        if "double" in self.mischief and rng.random() < 0.5:
            self._announce(rng.choice(self._world.ids))

    def transfer(self, replica: ReplicaId) -> None:
        """Appoint `replica`, without regard to its log."""
        highest = max((report.highest_promise for report in self._reports().values()), default=0)
        self.epoch, self.leader = Epoch(max(self.epoch, highest) + 1), replica
        self._appointed_ms = self._world.timeline.now_us // 1_000
        self._announce(replica)

    def _change_members(self, reports: dict[ReplicaId, LogStatus]) -> None:
        """Appoint the same leader in a new epoch with a voter added, removed or replaced."""
        rng, leader = self._rng, self.leader
        assert leader is not None
        end = reports[leader].last_index
        learners = [
            node.replica
            for node in self._world.nodes
            if node.alive
            and node.replica not in self.voters
            and node.core.matched_index + NEAR >= end
        ]
        gone = [node.replica for node in self._world.nodes if node.refused]
        after = set(self.voters)
        lost = sorted(after.intersection(gone)) or sorted(after - {leader})
        kind = rng.choice(("add", "replace", "remove"))
        if kind != "add" and not (kind == "remove" and len(after) <= VOTERS_MIN):
            after.discard(rng.choice(lost))
        if kind != "remove":
            if not learners or (kind == "add" and len(after) >= VOTERS_MAX):
                return
            after.add(rng.choice(learners))
        if after == self.voters:
            return
        highest = max(report.highest_promise for report in reports.values())
        self.epoch = Epoch(max(self.epoch, highest) + 1)
        self._appointed_ms = self._world.timeline.now_us // 1_000
        self._world.faults.on_change(leader, self.voters, frozenset(after))
        self._announce(leader, frozenset(after))

    def _announce(self, leader: ReplicaId, voters: Voters | None = None) -> None:
        self._world.timeline.note("control", f"appoints {leader} in epoch {self.epoch}")
        self._history.append((self.epoch, leader))
        self._world.faults.on_appointed(leader)
        for node in self._world.nodes:
            self._tell(node, self.epoch, leader, voters)

    def _tell(
        self, node: "SimNode", epoch: Epoch, leader: ReplicaId, voters: Voters | None = None
    ) -> None:
        if node.replica in self.deaf:
            return
        delay_us = int(20_000 * self._rng.expovariate(1.0))
        if "late" in self.mischief and self._rng.random() < 0.1:
            delay_us += self._rng.randint(0, 5_000_000)
        level = 1 + (epoch >= RAISED_IN or self._world.options.series)
        self._world.timeline.after(delay_us, node.appointed, epoch, leader, voters, level)
