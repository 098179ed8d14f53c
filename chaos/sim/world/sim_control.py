"""The control plane of a world: every node runs the controller (cluster/control/controller.py).

Its inputs are real, too: reports of the nodes' drivers, links that break and return, and the
replicated object (cluster/control/control_state.py). Raft is a model here, a list of states. It
elects a node that reaches a majority within a second, and commits that node's proposals. Each node
hears of an appointment some milliseconds after its commit. A seed's mischief may add:

    transfer    an operator orders another leader         leaderless  Raft has no leader for seconds
    forget      Raft loses its last states                spurious    Raft elects another leader
    late        an appointment arrives seconds later      slow        reports every 500 ms, not 100
    blind       any node is appointed, or is said to lead a recent epoch

No appointment may harm the log. `blind`, and the exchange of healthy voters, are therefore worse
than the controller's decisions. `_check_appointment` checks these by rules of its own,
independent of the controller's code.
"""

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from chaos.sim.world.referee import Broken
from cluster.control import control_state, replica_report
from cluster.control.control_state import Appoint, ControlState, Init, Members
from cluster.control.controller import Controller
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    ChangeRequest,
    ControllerRequest,
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
from cluster.control.membership import Change
from replication.core.core_events import Appointed
from replication.core.quorum import Voters
from timer.model.units import Epoch, MonoMs, ReplicaId

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

CONFIG: Final = ControllerConfig(
    close_entries=16,
    report_timeout_ms=600,
    lease_grace_ms=600,
    idle_grace_ms=600,
    stall_timeout_ms=2_000,
    promise_grace_ms=1_000,
    gather_first_ms=300,
    refused_wait_ms_max=4_000,
)
"""A world has few entries. A small `close_entries` makes the length of a log matter. The times are
shorter than the product's, so that a world has many leaders."""
TICK_MS: Final = 50
REPORT_MS: Final = 100
SILENCE_MS: Final = 1_000
"""A link that carries nothing breaks after this. The link of a dead process breaks at once."""
RAFT_MS: Final = (100, 400)
"""Shortest and longest time without a leader before Raft elects one."""
DEPOSED_MS: Final = 600
"""Time after which a leader of Raft without a majority steps down."""
TELL_US: Final = 20_000
"""Mean time from the commit of an appointment to its arrival at a node."""
LATE_US: Final = 5_000_000
"""Longest further delay under the mischief `late`."""
MISCHIEF_MS: Final = 4_000
"""Mean time between two acts of mischief."""
RAISED_IN: Final = 4
"""The epoch from which on the feature level is 2."""
NEAR: Final = 50
"""A learner that lacks at most this many entries may become a voter."""
PROPOSE_MS: Final = 2_000
"""Longest time that a proposal waits for a majority."""


@dataclass(slots=True)
class _Shell:
    """The controller of one process, with its inputs."""

    node: "SimNode"
    life: int
    controller: Controller
    applied: ControlState | None = None
    last_report: ReplicaReport | None = None
    reported_ms: int = -REPORT_MS
    links: set[str] = field(default_factory=set)
    """Names of the nodes to which a link is up."""
    reached_ms: dict[str, int] = field(default_factory=dict)
    """Name of a node -> the last time at which messages passed in both directions."""
    heard: dict[str, tuple[ReplicaReport, int]] = field(default_factory=dict)
    """Name of a node -> its last report and the time of arrival."""


class SimControl:
    """The control plane of one world."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.mischief: tuple[str, ...] = world.options.mischief
        self.deaf: set[ReplicaId] = set()
        """Nodes that can't reach the Raft of the others."""
        self.voters = world.voters
        self.appointed: list[tuple[int, Appoint, str]] = []
        """Time in microseconds, committed appointment, and reason."""
        self._states = [ControlState()]
        self._names: dict[ReplicaId, str] = {}
        self._founders = {str(voter): voter for voter in sorted(world.voters)}
        self._shells: dict[ReplicaId, _Shell] = {}
        self._leader: SimNode | None = None
        """Raft's leader. None: there is none."""
        self._leaderless_ms: int | None = None
        self._elected_after_ms = self._quiet_until_ms = self._nonce = 0
        world.timeline.after(1_000, self._tick)

    def welcome(self, node: "SimNode") -> None:
        """Start the controller of a new process with the last state."""
        name = self._name(node)
        shell = _Shell(node, node.life, Controller(name, "c", self._founders, CONFIG))
        self._shells[node.replica] = shell
        self._apply(shell)
        self.hear(node)

    def hear(self, node: "SimNode", state: ControlState | None = None) -> None:
        """Send an appointment to a node. `state`: the state that has it; None: the last one."""
        state = state or self._states[-1]
        if state.leader is None or node.replica in self.deaf:
            return
        delay_us = int(TELL_US * self._rng.expovariate(1.0))
        if "late" in self.mischief and self._rng.random() < 0.1:
            delay_us += self._rng.randrange(LATE_US)
        self._world.timeline.after(delay_us, node.call, self._tell, node, state, state.leader)

    def _tell(self, node: "SimNode", state: ControlState, leader: ReplicaId) -> None:
        level = 1 + (state.epoch >= RAISED_IN or self._world.options.series)
        node.handle(Appointed(state.epoch, leader, state.change_of(node.core.voters), level))

    def transfer(self, replica: ReplicaId) -> None:
        """Order this leader, as an operator does."""
        self._ask(TransferRequest(replica))

    def appoint(self, replica: ReplicaId, voters: Voters | None = None) -> None:
        """Appoint this leader at once, though no controller decided it. None: the voters stay."""
        state, nodes = self._states[-1], self._world.nodes
        promises = [n.driver.report().highest_promise for n in nodes if n.alive]
        epoch = Epoch(max([state.epoch, *promises]) + 1)
        names = None if voters is None else {self._names[each]: each for each in sorted(voters)}
        command = Appoint(epoch=epoch, leader=replica, expected_epoch=state.epoch, voters=names)
        self._commit(command, "by no controller")

    # ---- names and reach

    def _now(self) -> int:
        return self._world.timeline.now_us // 1_000

    def _name(self, node: "SimNode") -> str:
        """Return the name of a node. A new machine takes the name of a lost voter."""
        if node.replica not in self._names:
            lost = [n for n in self._world.nodes if n.refused and n.replica in self._names]
            free = {self._names[n.replica] for n in lost} - {
                self._names[n.replica] for n in self._world.nodes
                if n.replica in self._names and not n.refused
            }  # fmt: skip
            own = str(node.replica)
            self._names[node.replica] = min(free) if free and own not in self._founders else own
        return self._names[node.replica]

    def _shell_of(self, node: "SimNode") -> _Shell | None:
        shell = self._shells.get(node.replica)
        return shell if node.alive and shell is not None and shell.life == node.life else None

    def _reach(self, one: "SimNode", other: "SimNode") -> bool:
        """Return whether messages pass between two nodes in both directions."""
        if one is other:
            return True
        if {one.replica, other.replica} & self.deaf or not (_goes(one) and _goes(other)):
            return False
        return not self._world.network.is_cut(one.replica, other.replica)

    def _members(self) -> "list[SimNode]":
        """Return Raft's members: the voters."""
        return [node for node in self._world.nodes if node.replica in self.voters]

    def _has_quorum(self, node: "SimNode") -> bool:
        reached = sum(self._reach(node, each) for each in self._members())
        return _goes(node) and reached > len(self.voters) // 2

    def _able(self) -> "list[SimNode]":
        """Return the nodes that can lead Raft."""
        return [n for n in self._members() if self._shell_of(n) and self._has_quorum(n)]

    # ---- time

    def _tick(self) -> None:
        self._world.timeline.after(TICK_MS * 1_000, self._tick)
        now_ms = self._now()
        shells = [s for n in self._world.nodes if (s := self._shell_of(n)) and not n.paused]
        for shell in shells:
            self._check_links(shell, now_ms)
        self._misbehave(now_ms)
        self._check_raft(now_ms)
        leader = self._leader
        if leader is None or self._leading_shell() is None:
            return
        for shell in shells:
            if self._reach(shell.node, leader):
                if shell.applied is not self._states[-1]:
                    self._apply(shell)
                self._report(shell, leader, now_ms)
        for shell in shells:
            if shell.controller.leads:
                self._step(shell, ControllerTick())
        self._publish()
        self._operate()

    def _check_links(self, shell: _Shell, now_ms: int) -> None:
        for peer in self._world.nodes:
            if peer is shell.node or peer.refused:
                continue
            name = self._name(peer)
            if self._reach(shell.node, peer):
                shell.reached_ms[name] = now_ms
            cut = self._world.network.is_cut(shell.node.replica, peer.replica)
            silent_ms = now_ms - shell.reached_ms.get(name, -SILENCE_MS)
            up = silent_ms < (SILENCE_MS if peer.alive or cut else 1)
            if up != (name in shell.links):
                shell.links ^= {name}
                shell.last_report = None
                self._step(shell, LinkChanged(name, up=up))

    def _misbehave(self, now_ms: int) -> None:
        """Do some mischief every few seconds."""
        if not self.mischief or self._rng.random() >= TICK_MS / MISCHIEF_MS:
            return
        match self._rng.choice(self.mischief):
            case "transfer":
                self.transfer(self._rng.choice(sorted(self.voters)))
            case "leaderless":
                self._quiet_until_ms = now_ms + self._rng.randint(1_000, 8_000)
                shell, self._leader = self._leading_shell(), None
                if shell is not None:
                    self._cease(shell)
            case "forget" if len(self._states) > 2:
                del self._states[-self._rng.randint(1, min(3, len(self._states) - 2)) :]
            case "spurious":
                if able := self._able():
                    self._elect(self._rng.choice(able))
            case "blind":
                self._appoint_blindly()
            case _:
                pass

    def _appoint_blindly(self) -> None:
        rng, leader = self._rng, self._rng.choice(self._world.ids)
        if rng.random() < 0.5:
            self.appoint(leader)
        else:
            state = replace(rng.choice(self._states[-5:]), leader=leader, proposed=None)
            for node in self._world.nodes:
                self.hear(node, state)

    # ---- Raft

    def _check_raft(self, now_ms: int) -> None:
        shell = self._leading_shell()
        leads = shell is not None and shell.controller.leads
        if shell is not None and leads and self._has_quorum(shell.node):
            self._leaderless_ms = None
            return
        if self._leaderless_ms is None:
            self._leaderless_ms = now_ms
            self._elected_after_ms = self._rng.randint(*RAFT_MS)
        gone_ms = now_ms - self._leaderless_ms
        if gone_ms >= DEPOSED_MS and shell is not None and leads and not shell.node.paused:
            self._step(shell, RaftLeadership(leads=False))
        if gone_ms < self._elected_after_ms or now_ms < self._quiet_until_ms:
            return
        able = self._able()
        others = [node for node in able if node is not self._leader] or able
        if others:
            self._elect(self._rng.choice(others))

    def _leading_shell(self) -> _Shell | None:
        """Return Raft's leader. None: there is none, or its process has ended."""
        return None if self._leader is None else self._shell_of(self._leader)

    def _elect(self, node: "SimNode") -> None:
        """Make a node Raft's leader; the old leader may not know it for a while."""
        before, shell = self._leading_shell(), self._shell_of(node)
        assert shell is not None
        self._leader, self._leaderless_ms = node, None
        if before is not None and before is not shell:
            heard = _goes(before.node) and self._reach(before.node, node)
            delay_ms = 5 if heard else DEPOSED_MS
            self._world.timeline.after(delay_ms * 1_000, self._cease, before)
        self._apply(shell)
        if shell.controller.leads:
            self._step(shell, RaftLeadership(leads=False))
        self._step(shell, RaftLeadership(leads=True))
        for each in self._shells.values():
            each.last_report = None

    def _cease(self, shell: _Shell) -> None:
        running = self._shell_of(shell.node) is shell
        if running and self._leader is not shell.node and shell.controller.leads:
            self._step(shell, RaftLeadership(leads=False))

    def _apply(self, shell: _Shell) -> None:
        state = shell.applied = self._states[-1]
        self._step(shell, StateApplied(state))

    def _commit(self, command: Init | Appoint | Members, reason: str = "") -> bool:
        """Apply a command to the replicated object; return whether the object changed."""
        self._nonce += 1
        encoded = control_state.encode_command(command, nonce=self._nonce)
        state, _ = control_state.apply(self._states[-1], encoded)
        if state is self._states[-1]:
            return False
        self._states.append(state)
        if isinstance(command, Appoint):
            world, voters = self._world, command.voters
            world.timeline.note("control", command)
            self.appointed.append((world.timeline.now_us, command, reason))
            world.faults.on_appointed()
            if voters is not None:
                world.faults.on_change(command.leader, self.voters, frozenset(voters.values()))
            for node in world.nodes:
                self.hear(node)
        return True

    # ---- reports

    def _report(self, shell: _Shell, to: "SimNode", now_ms: int) -> None:
        every_ms = REPORT_MS * (5 if "slow" in self.mischief else 1)
        report = report_of(shell.node, self._name(shell.node))
        if report.is_urgent_after(shell.last_report) or now_ms - shell.reported_ms >= every_ms:
            shell.last_report, shell.reported_ms = report, now_ms
            delay_us = 0 if shell.node is to else self._world.options.delay_us
            self._world.timeline.after(delay_us, self._hear, shell.node, to, report)

    def _hear(self, node: "SimNode", to: "SimNode", report: ReplicaReport) -> None:
        shell = self._shell_of(to)
        if shell is not None and not to.paused and self._reach(node, to):
            shell.heard[report.name] = report, self._now()
            self._step(shell, Reported(report))

    # ---- decisions

    def _step(self, shell: _Shell, event: Event) -> None:
        effects = shell.controller.step(MonoMs(self._now()), event)
        command = effects.propose
        if command is not None:
            self._world.timeline.note("controller", f"{shell.controller.name}: {effects.reason}")
            if isinstance(command, Appoint) and not isinstance(event, ControllerRequest):
                self._check_appointment(shell, command, shell.controller._state)  # noqa: SLF001
            due_us = 3_000 + 2 * self._world.options.delay_us
            give_up_ms = self._now() + PROPOSE_MS
            args = shell, command, effects.reason, give_up_ms
            self._world.timeline.after(due_us, self._end_proposal, *args)
        if effects.hand_over_to is not None:
            for node in self._able():
                if self._name(node) == effects.hand_over_to:
                    self._elect(node)

    def _end_proposal(
        self, shell: _Shell, command: Init | Appoint, reason: str, give_up_ms: int
    ) -> None:
        node = shell.node
        if self._shell_of(node) is not shell:
            return
        if self._leader is node and self._has_quorum(node):
            changed = self._commit(command, reason)
            self._apply(shell)
            self._step(shell, ProposalEnded(refused=not changed))
        elif self._now() >= give_up_ms:
            self._step(shell, ProposalEnded())
        else:
            args = shell, command, reason, give_up_ms
            self._world.timeline.after(TICK_MS * 1_000, self._end_proposal, *args)

    def _check_appointment(self, shell: _Shell, appoint: Appoint, state: ControlState) -> None:
        """Check an appointment against the reports that the controller has.

        Raises:
            Broken: the appointee has not reported within `report_timeout_ms`; or its log lacks
                entries that others have; or an adopted leader does not serve with a lease.
        """
        since_ms = self._now() - CONFIG.report_timeout_ms
        links = shell.links | {shell.controller.name}
        fresh = [
            report
            for name, (report, at_ms) in shell.heard.items()
            if at_ms > since_ms and name in links
        ]
        voters = state.voters.values()
        chosen = next((each for each in fresh if each.replica_id == appoint.leader), None)
        if chosen is None or not (_may_lead(chosen) or chosen.replica_id in voters):
            raise Broken("appoint", f"{appoint}: no report since {since_ms} ms")
        if chosen.epoch == appoint.epoch:
            if not (chosen.serving and chosen.lease_ok):
                raise Broken("appoint", f"{appoint}: adopted without serving: {chosen}")
            return
        others = [each for each in fresh if each.replica_id in voters and _may_lead(each)]
        sure = [each for each in others if not each.unsure and each.replica_id != state.leader]
        best = max(((each.last_epoch, each.last_index) for each in sure), default=None)
        if best is not None and not _is_close((chosen.last_epoch, chosen.last_index), best):
            raise Broken("appoint", f"{appoint}: another log ends at {best}; reported: {chosen}")

    # ---- the voters, and the operator

    def _publish(self) -> None:
        """Write the log leader's voters to the replicated object, if they differ from its."""
        state = self._states[-1]
        for node in self._world.nodes:
            if not (self._shell_of(node) and _goes(node) and node.leading and node.core.serving):
                continue
            core = node.core
            known = frozenset(state.voters.values())
            if core.epoch != state.epoch or (core.voters == known and state.proposed is None):
                continue
            assert self._leader is not None
            if self._reach(node, self._leader) and self._has_quorum(self._leader):
                self.voters = core.voters
                voters = {self._names[each]: each for each in sorted(core.voters)}
                self._commit(Members(epoch=core.epoch, voters=voters))

    def _operate(self) -> None:
        """Now and then order a change of the voters; a lost voter is replaced sooner."""
        world, rng = self._world, self._rng
        lost = {self._name(n) for n in world.nodes if n.refused and n.replica in self.voters}
        if rng.random() >= max(world.options.member_changes, 0.1 * bool(lost)) / 3:
            return
        names = {self._names[each] for each in self.voters if each in self._names}
        learners = {self._name(n) for n in world.nodes if n.alive and n.replica not in self.voters}
        if lost & learners:
            self._ask(ChangeRequest(Change.REPLACE, min(lost & learners)))
        elif rng.random() < 0.5:
            self._exchange()
        elif rng.random() < 0.5 and learners - names:
            self._ask(ChangeRequest(Change.ADD, rng.choice(sorted(learners - names))))
        elif len(names) > len(self._founders):
            self._ask(ChangeRequest(Change.REMOVE, rng.choice(sorted(names))))

    def _exchange(self) -> None:
        """Appoint the leader again, with a learner in the place of a voter. All voters run.

        The product replaces only lost voters.
        """
        nodes = [node for node in self._world.nodes if _goes(node)]
        leaders = [node for node in nodes if node.leading and node.core.serving]
        if len(leaders) != 1 or leaders[0].core.voters != self.voters:
            return
        end = leaders[0].core.matched_index - NEAR
        voters = [node for node in nodes if node.replica in self.voters]
        learners = [n for n in nodes if n not in voters and n.core.matched_index >= end]
        if len(voters) == len(self.voters) and learners:
            gone = self._rng.choice([node for node in voters if node is not leaders[0]]).replica
            new = self._rng.choice(learners).replica
            self.appoint(leaders[0].replica, self.voters - {gone} | {new})

    def _ask(self, asked: ControllerRequest) -> None:
        """Give an order to the leading controller. It may refuse."""
        shell = self._leading_shell()
        if shell is not None and not shell.node.paused:
            self._step(shell, asked)


def report_of(node: "SimNode", name: str) -> ReplicaReport:
    """Return a simulated node's report, as cluster/control/replica_report.py makes it."""
    applied = node.app.applied_index
    return replica_report.report_of(node.driver.report(), name=name, applied_index=applied)


def _goes(node: "SimNode") -> bool:
    return node.alive and not node.paused


def _may_lead(report: ReplicaReport) -> bool:
    """Return whether a replica votes by its own log. The replicated object may not know it yet."""
    return report.role is not ReportedRole.LEARNER


def _is_close(end: tuple[int, int], best: tuple[int, int]) -> bool:
    """Return whether a log's end is beyond `best`, or less than `close_entries` before it.

    Both are (last epoch, last index). Ends in different epochs are never close.
    """
    return end >= best or (end[0] == best[0] and end[1] > best[1] - CONFIG.close_entries)
