"""Commands of an operator: drains, transfers of the leadership, and changes of the voters."""

import asyncio
from collections.abc import Callable
from typing import Final

from cluster.api.peer_queries import ask_all, status_of
from cluster.control.control_plane import CommandOutcome, ControlPlane
from cluster.control.membership import LAG_MAX, Change
from cluster.files.replacement import REPLACEABLE, ask_to_replace
from cluster.observe.node_view import NodeState
from cluster.state.host import Host
from replication.shell.replica import Replica
from timer.model.timer_errors import (
    HIDDEN,
    AlreadyExistsError,
    CommitTimeoutError,
    InvalidRequestError,
    NotLeaderError,
    NotReadyError,
)
from timer.model.units import MonoMs
from timerclient.proto import timer_pb2 as pb

CHANGE_TIMEOUT_MS: Final = 8_000
"""Limit for a new learner to catch up, and for a change of the voters to be committed."""
CHANGE_POLL_S: Final = 0.05


class OperatorCommands:
    """Carries the commands out at one node."""

    def __init__(
        self,
        view: NodeState,
        replica: Replica,
        host: Host,
        control: ControlPlane,
        mono_ms: Callable[[], MonoMs],
    ) -> None:
        self._view, self._replica, self._host = view, replica, host
        self._control, self._mono_ms = control, mono_ms
        self._remade: set[str] = set()
        """Nodes that replaced lost voters as learners and do not vote yet."""
        self._drain_holder: str | None = None
        """The holder of the drain of this node; empty: it has none. None: it is not drained."""
        self._drains = asyncio.Lock()

    @property
    def drained(self) -> bool:
        """Whether an operator wants this node not to lead."""
        return self._drain_holder is not None

    async def drain(self, *, undo: bool, holder: str = "") -> bool:
        """Drain this node, or undo it. Return whether the node gave the leadership away.

        Drains run one after another. `holder`: excludes other holders; empty: none. If the call is
        cancelled, this node is as before.

        Raises:
            AlreadyExistsError: another holder has drained this node.
            EngineError: no other node can lead now; this node is as before.
        """
        async with self._drains:
            before = self._drain_holder
            if before is not None and holder not in ("", before):
                name = self._view.name
                why = f"of another command; if that has ended: timerctl drain {name} --undo"
                raise AlreadyExistsError("drain of", name, why)
            if undo:
                self._drain_holder = None
                return False
            self._drain_holder = holder if before is None else before
            try:
                return await self._hand_leadership_over()
            except BaseException:  # also if the call is cancelled
                self._drain_holder = before
                raise

    async def _hand_leadership_over(self) -> bool:
        """Transfer the leadership, if this node leads; return whether it did.

        This node is drained already. So of nodes that are drained at the same time, the last one
        finds all others drained.
        """
        others = await ask_all(self._view.peers(), status_of)
        voters = [node for node in others if self._view.is_voter(node.name)]
        if not any(node.reachable and not node.drained for node in voters):
            name = self._view.name
            limit = f"can't be drained: each other voter is drained, or does not answer {name}"
            raise InvalidRequestError("node", name, limit)
        return self._view.leader_name() == self._view.name and await self.transfer("")

    async def transfer(self, target: str) -> bool:
        """Transfer leadership. False: the target leads already.

        Raises:
            InvalidRequestError: the target cannot lead, or did not catch up in time; or there is no
                other voter.
            NotReadyError: no node can be appointed at the moment, or another one was appointed
                instead: the leadership may have moved.
            CommitTimeoutError: a node was appointed and was not seen serving yet.
        """
        voters = self._replica.voters
        if not target and len(voters) == 1:  # a retry would change nothing
            raise InvalidRequestError("target", HIDDEN, "there is no other voter")
        named = (each for each in voters if self._view.name_of(each) == target)
        replica_id = next(named, None) if target else None
        if target and replica_id is None:
            raise NotReadyError(f"{target} is not a voter yet")
        answer = await self._control.request_transfer(replica_id)
        if answer.outcome is CommandOutcome.UNKNOWN:
            raise CommitTimeoutError(f"transfer: {answer.why}")
        if answer.outcome is CommandOutcome.REFUSED:
            raise InvalidRequestError("target", target, answer.why)
        if answer.outcome is not CommandOutcome.OK:
            raise NotReadyError(f"no transfer: {answer.why}")
        return answer.changed

    async def change_members(self, change: Change, name: str) -> None:
        """Change one voter, and wait until the log has committed the change.

        Raises:
            InvalidRequestError: the change is not possible in the present state.
            NotReadyError: the change is not possible at the moment.
            CommitTimeoutError: the change was proposed; whether it will be committed is unknown.
        """
        lost = change is Change.REPLACE and name in self._view.peers()
        fresh = lost and await self._make_learner(name)
        before = self._control.state.voters
        answer = await self._control.request_change(change, name)
        deadline_ms = self._mono_ms() + CHANGE_TIMEOUT_MS
        refused = (CommandOutcome.REFUSED, CommandOutcome.NOT_NOW)
        while fresh and answer.outcome in refused and self._mono_ms() < deadline_ms:
            await asyncio.sleep(CHANGE_POLL_S)  # until the learner has reported to the controller
            answer = await self._control.request_change(change, name)
        if answer.outcome is CommandOutcome.REFUSED and not fresh:
            raise InvalidRequestError("name", name, answer.why)
        if answer.outcome in (*refused, CommandOutcome.FAILED):
            raise NotReadyError(f"{change} {name}: {answer.why}")
        deadline_ms = self._mono_ms() + CHANGE_TIMEOUT_MS
        while self._mono_ms() < deadline_ms:
            now = self._control.state.voters
            # An id may give way to a name meanwhile, or an earlier change may be published.
            if now.get(name) != before.get(name) and {*now.values()} != {*before.values()}:
                self._remade.discard(name)
                return
            await asyncio.sleep(CHANGE_POLL_S)
        raise CommitTimeoutError(f"{change} {name}: proposed, not committed yet")

    async def _make_learner(self, name: str) -> bool:
        """Make a node that waits for its replacement a learner that has caught up.

        False: the node does not wait for a replacement.

        Raises:
            NotLeaderError: another node leads; request it there.
            NotReadyError: the learner has not caught up yet.
        """
        address, stub = self._view.peers()[name]
        deadline_ms, node = self._mono_ms() + CHANGE_TIMEOUT_MS, pb.NodeStatus()
        while self._mono_ms() < deadline_ms:
            node = await status_of(name, address, stub)
            if node.role == REPLACEABLE:
                if self._host.leader is None:  # needs a majority: the leader has
                    raise NotLeaderError(self._view.leader_address())
                await ask_to_replace(stub, self._view.cluster_id, name)
                self._remade.add(name)
            elif name not in self._remade:
                return False
            behind = self._replica.last_index - node.log_end
            if node.role == "learner" and not node.unsure and behind <= LAG_MAX:
                return True
            await asyncio.sleep(CHANGE_POLL_S)
        why = node.error or f"{node.role}, log end {node.log_end}, {self._replica.last_index} here"
        level = self._replica.level
        if node.version and max(1, node.feature_level_max) < level:
            why = f"its version {node.version} does not support feature level {level}: install a"
            why += " newer release"
        raise NotReadyError(f"{name} was formatted as a learner and still catches up: {why}")
