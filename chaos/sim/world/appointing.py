"""The real controller as a world's control plane: every node runs cluster/control/controller.py.

Its inputs are real, too: reports of the nodes' drivers, links that break and return, and the
replicated object (cluster/control/control_state.py). Raft is a model here, a list of states. It
elects a node that reaches a majority within a second, and commits that node's proposals. The kinds
of mischief here:

    transfer    an operator orders another leader         leaderless  Raft has no leader for seconds
    forget      Raft loses its last states                spurious    Raft elects another leader
    late        a node applies a state seconds later      slow        reports every 500 ms, not 100

`_judge` checks each decision by rules of its own, independent of the controller's code.
"""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from chaos.sim.world.referee import Broken
from cluster.control import control_state, replica_report
from cluster.control.control_state import Appoint, ControlState, Init, Members
from cluster.control.controller import Controller, ControllerConfig
from cluster.control.controller_events import (
    ChangeAsked,
    ControllerTick,
    Event,
    LinkChanged,
    ProposalEnded,
    RaftLeadership,
    ReplicaReport,
    Reported,
    StateApplied,
    TransferAsked,
)
from cluster.control.membership import Change
from timer.model.units import MonoMs, ReplicaId

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

CONFIG: Final = ControllerConfig(close_entries=16)
"""A world has few entries. A small `close_entries` makes the length of a log matter."""
TICK_MS: Final = 50
REPORT_MS: Final = 100
LINK_MS: Final = 100
"""Time from the return of the network to the new link."""
SILENCE_MS: Final = 2_000
"""A link that carries nothing breaks after this. The link of a dead process breaks at once."""
RAFT_MS: Final = (400, 900)
"""Shortest and longest time without a leader before Raft elects one."""
DEPOSED_MS: Final = 1_000
"""Time after which a leader of Raft without a majority steps down."""
LATE_MS: Final = 2_000
"""Mean delay of a node's states under the mischief `late`."""
PROPOSE_MS: Final = 2_000
"""Longest time that a proposal waits for a majority."""
ASK_MS: Final = 3_000
"""Time for which an operator repeats a request that may be possible soon."""


@dataclass(slots=True)
class _Link:
    """A link to a peer, as a node sees it."""

    up: bool = False
    as_it_is_ms: int = 0
    """Time of the last change of `carries`."""
    carries: bool = False
    """Whether messages pass in both directions."""


@dataclass(slots=True)
class _Shell:
    """The controller of one process, with its inputs."""

    node: "SimNode"
    life: int
    controller: Controller
    applied: ControlState | None = None
    said: ReplicaReport | None = None
    said_ms: int = -REPORT_MS
    links: dict[str, _Link] = field(default_factory=dict)
    heard: dict[str, tuple[ReplicaReport, int]] = field(default_factory=dict)
    """Name of a node -> its last report and the time of arrival."""


class RealControl:
    """The control plane of one world, in place of the model (chaos/sim/world/control_model.py)."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self._world = world
        self._rng = rng
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
        self._elected_after_ms = 0
        self._quiet_until_ms = 0
        self._nonce = 0
        world.timeline.after(1_000, self._tick)

    def welcome(self, node: "SimNode") -> None:
        """Start the controller of a new process with the last state."""
        name = self._name(node)
        shell = _Shell(node, node.life, Controller(name, "c", self._founders, CONFIG))
        self._shells[node.replica] = shell
        self._apply(shell)

    def transfer(self, replica: ReplicaId) -> None:
        """Order this leader, as an operator does."""
        self._ask(TransferAsked(replica), self._now() + ASK_MS)

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

    def _running(self, node: "SimNode") -> _Shell | None:
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
        """Return Raft's members: the nodes with the name of a founder."""
        return [n for n in self._world.nodes if self._names.get(n.replica) in self._founders]

    def _has_quorum(self, node: "SimNode") -> bool:
        reached = {self._name(each) for each in self._members() if self._reach(node, each)}
        return _goes(node) and len(reached) > len(self._founders) // 2

    # ---- time

    def _tick(self) -> None:
        self._world.timeline.after(TICK_MS * 1_000, self._tick)
        now_ms = self._now()
        shells = [s for n in self._world.nodes if (s := self._running(n)) and not n.paused]
        for shell in shells:
            self._look_at_links(shell, now_ms)
        self._misbehave(now_ms)
        self._look_at_raft(now_ms)
        leader = self._leader
        if leader is None or self._leading() is None:
            return
        for shell in shells:
            if self._reach(shell.node, leader):
                late = "late" in self.mischief and self._rng.random() >= TICK_MS / LATE_MS
                if shell.applied is not self._states[-1] and not late:
                    self._apply(shell)
                self._say(shell, leader, now_ms)
        for shell in shells:
            if shell.controller.leads:
                self._step(shell, ControllerTick())
        self._publish()
        self._operate()

    def _look_at_links(self, shell: _Shell, now_ms: int) -> None:
        for peer in self._world.nodes:
            if peer is shell.node or peer.refused:
                continue
            name, reached = self._name(peer), self._reach(shell.node, peer)
            link = shell.links.setdefault(name, _Link(as_it_is_ms=now_ms))
            if link.carries != reached:
                link.carries, link.as_it_is_ms = reached, now_ms
            dead = not peer.alive and not self._world.network.is_cut(
                shell.node.replica, peer.replica
            )
            wait_ms = LINK_MS if reached else 0 if dead else SILENCE_MS
            if link.up != reached and now_ms - link.as_it_is_ms >= wait_ms:
                link.up, shell.said = reached, None
                self._step(shell, LinkChanged(name, up=reached))

    def _misbehave(self, now_ms: int) -> None:
        """Do each kind of mischief about every five seconds."""
        for kind in self.mischief:
            if self._rng.random() >= TICK_MS / 5_000:
                continue
            match kind:
                case "transfer":
                    self.transfer(self._rng.choice(sorted(self.voters)))
                case "leaderless":
                    self._quiet_until_ms = now_ms + self._rng.randint(1_000, 8_000)
                    self._depose()
                case "forget" if len(self._states) > 2:
                    del self._states[-self._rng.randint(1, min(3, len(self._states) - 2)) :]
                case "spurious":
                    able = [n for n in self._members() if self._running(n) and self._has_quorum(n)]
                    if able:
                        self._elect(self._rng.choice(able))
                case _:
                    pass

    # ---- Raft

    def _look_at_raft(self, now_ms: int) -> None:
        shell = self._leading()
        if shell is not None and not shell.controller.leads:
            shell = None
        if shell is not None and self._has_quorum(shell.node):
            self._leaderless_ms = None
            return
        if self._leaderless_ms is None:
            self._leaderless_ms = now_ms
            self._elected_after_ms = self._rng.randint(*RAFT_MS)
        gone_ms = now_ms - self._leaderless_ms
        if gone_ms >= DEPOSED_MS and shell is not None and not shell.node.paused:
            self._step(shell, RaftLeadership(leads=False))
        if gone_ms < self._elected_after_ms or now_ms < self._quiet_until_ms:
            return
        able = [n for n in self._members() if self._running(n) and self._has_quorum(n)]
        others = [node for node in able if node is not self._leader] or able
        if others:
            self._elect(self._rng.choice(others))

    def _leading(self) -> _Shell | None:
        """Return Raft's leader. None: there is none, or its process has ended."""
        return None if self._leader is None else self._running(self._leader)

    def _depose(self) -> None:
        shell, self._leader = self._leading(), None
        if shell is not None:
            self._cease(shell)

    def _elect(self, node: "SimNode") -> None:
        """Make a node Raft's leader; the old leader may not know it for a while."""
        before, shell = self._leading(), self._running(node)
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
            each.said = None

    def _cease(self, shell: _Shell) -> None:
        running = self._running(shell.node) is shell
        if running and self._leader is not shell.node and shell.controller.leads:
            self._step(shell, RaftLeadership(leads=False))

    def _apply(self, shell: _Shell) -> None:
        """Apply the last state at a node, and pass its appointment to the node."""
        state = shell.applied = self._states[-1]
        self._step(shell, StateApplied(state))
        if state.leader is not None:
            proposed = state.proposed
            voters = None if proposed is None else frozenset(proposed.values())
            shell.node.appointed(state.epoch, state.leader, voters, state.level)

    def _commit(self, command: Init | Appoint | Members) -> bool:
        """Apply a command to the replicated object; return whether the object changed."""
        self._nonce += 1
        encoded = control_state.encode_command(command, nonce=self._nonce)
        state, _ = control_state.apply(self._states[-1], encoded)
        if state is self._states[-1]:
            return False
        self._states.append(state)
        return True

    # ---- reports

    def _say(self, shell: _Shell, to: "SimNode", now_ms: int) -> None:
        every_ms = REPORT_MS * (5 if "slow" in self.mischief else 1)
        report = report_of(shell.node, self._name(shell.node))
        if report.is_urgent_after(shell.said) or now_ms - shell.said_ms >= every_ms:
            shell.said, shell.said_ms = report, now_ms
            delay_us = 0 if shell.node is to else self._world.options.delay_us
            self._world.timeline.after(delay_us, self._hear, shell.node, to, report)

    def _hear(self, node: "SimNode", to: "SimNode", report: ReplicaReport) -> None:
        shell = self._running(to)
        if shell is not None and not to.paused and self._reach(node, to):
            shell.heard[report.name] = report, self._now()
            self._step(shell, Reported(report))

    # ---- decisions

    def _step(self, shell: _Shell, event: Event) -> None:
        state = shell.controller._state  # noqa: SLF001 - the state before the decision
        effects = shell.controller.step(MonoMs(self._now()), event)
        command = effects.propose
        if command is not None:
            self._world.timeline.note("controller", f"{shell.controller.name}: {effects.reason}")
            if isinstance(command, Appoint) and not isinstance(event, TransferAsked | ChangeAsked):
                self._judge(shell, command, state)
            due_us = 3_000 + 2 * self._world.options.delay_us
            give_up_ms = self._now() + PROPOSE_MS
            args = shell, command, effects.reason, give_up_ms
            self._world.timeline.after(due_us, self._end_proposal, *args)
        if effects.hand_over_to is not None:
            for node in self._members():
                named = self._name(node) == effects.hand_over_to
                if named and self._running(node) and self._has_quorum(node):
                    self._elect(node)
        if effects.refusal is not None:
            self._refusal_soon = effects.refusal.soon

    def _end_proposal(
        self, shell: _Shell, command: Init | Appoint, reason: str, give_up_ms: int
    ) -> None:
        node = shell.node
        if self._running(node) is not shell:
            return
        if self._leader is node and self._has_quorum(node):
            changed = self._commit(command)
            if changed and isinstance(command, Appoint):
                self.appointed.append((self._world.timeline.now_us, command, reason))
                self._world.faults.on_appointed(command.leader)
                if command.voters is not None:
                    after = frozenset(command.voters.values())
                    self._world.faults.on_change(command.leader, self.voters, after)
            self._apply(shell)
            self._step(shell, ProposalEnded(refused=not changed))
        elif self._now() >= give_up_ms:
            self._step(shell, ProposalEnded())
        else:
            args = shell, command, reason, give_up_ms
            self._world.timeline.after(TICK_MS * 1_000, self._end_proposal, *args)

    def _judge(self, shell: _Shell, appoint: Appoint, state: ControlState) -> None:
        """Check an appointment against the reports that the controller has.

        Raises:
            Broken: the appointee has not reported within `report_timeout_ms`; or its log lacks
                entries that others have; or an adopted leader does not serve with a lease.
        """
        since_ms = self._now() - CONFIG.report_timeout_ms
        links = {name for name, link in shell.links.items() if link.up} | {shell.controller.name}
        fresh = [
            report
            for name, (report, at_ms) in shell.heard.items()
            if at_ms > since_ms and name in links and report.replica_id in state.voters.values()
        ]
        chosen = next((each for each in fresh if each.replica_id == appoint.leader), None)
        if chosen is None:
            raise Broken("appoint", f"{appoint}: no report since {since_ms} ms")
        if chosen.epoch == appoint.epoch:
            if not (chosen.serving and chosen.lease_ok):
                raise Broken("appoint", f"{appoint}: adopted without serving: {chosen}")
            return
        sure = [each for each in fresh if not each.unsure and each.replica_id != state.leader]
        best = max(((each.last_epoch, each.last_index) for each in sure), default=None)
        if best is not None and not _is_close((chosen.last_epoch, chosen.last_index), best):
            raise Broken("appoint", f"{appoint}: another log ends at {best}; reported: {chosen}")

    # ---- the voters, and the operator

    def _publish(self) -> None:
        """Write the log leader's voters to the replicated object, if they differ from its."""
        state = self._states[-1]
        for node in self._world.nodes:
            if not (self._running(node) and _goes(node) and node.leading and node.core.serving):
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
            self._ask(ChangeAsked(Change.REPLACE, min(lost & learners)), 0)
        elif rng.random() < 0.5 and learners - names:
            self._ask(ChangeAsked(Change.ADD, rng.choice(sorted(learners - names))), 0)
        elif len(names) > len(self._founders):
            self._ask(ChangeAsked(Change.REMOVE, rng.choice(sorted(names))), 0)

    def _ask(self, asked: TransferAsked | ChangeAsked, until_ms: int) -> None:
        """Give an order to the leading controller. Repeat it until `until_ms` if that can help."""
        shell = self._leading()
        self._refusal_soon = False
        if shell is not None and not shell.node.paused:
            self._step(shell, asked)
        if self._refusal_soon and self._now() < until_ms:
            self._world.timeline.after(200_000, self._ask, asked, until_ms)


def report_of(node: "SimNode", name: str) -> ReplicaReport:
    """Return a simulated node's report, as cluster/control/replica_report.py makes it."""
    return replica_report.report_of(
        node.driver.report(), name=name, applied_index=node.app.applied_index
    )


def _goes(node: "SimNode") -> bool:
    return node.alive and not node.paused


def _is_close(end: tuple[int, int], best: tuple[int, int]) -> bool:
    """Return whether a log's end is beyond `best`, or less than `close_entries` before it.

    Both are (last epoch, last index). Ends in different epochs are never close.
    """
    return end >= best or (end[0] == best[0] and end[1] > best[1] - CONFIG.close_entries)
