"""The promises of replication, checked while a world runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replication.messages import AppendAnswer, FenceAnswer, FetchAnswer, Message
from replication.promise import NO_PROMISE, Promise
from replication.steps import Role
from timer.entry import Entry
from timer.units import Epoch, LogIndex, Nonce, ReplicaId

if TYPE_CHECKING:
    from chaos.sim.node import SimNode


class Broken(AssertionError):
    """A promise was broken: `checker` names which."""

    def __init__(self, checker: str, detail: str) -> None:
        super().__init__(f"{checker}: {detail}")
        self.checker = checker


class Referee:
    """Sees every step of every node.

    checker      what must hold
    agreement    what one node ever committed at an index, every node commits there
    lost         what was answered OK is committed, under its index, to the end
    epoch        one leader, in one process, serves in an epoch
    commit       the commit index of a running node never goes back
    promise      a replica answers no older or other leadership than it did before, ever
    lease        at no instant do two replicas hold a lease
    liveness     a healed cluster makes progress within a bound
    frames       a message holds the entries that it says
    storage      what was durable can be read after a restart
    """

    def __init__(self, nodes: "Sequence[SimNode]") -> None:
        self._nodes = nodes
        self.committed: list[tuple[Epoch, bytes]] = []
        """Of entry i + 1, by whoever committed it first."""
        self.acked: dict[LogIndex, bytes] = {}
        self._spoken: dict[ReplicaId, Promise] = {}
        self._leaders: dict[Epoch, tuple[ReplicaId, Nonce]] = {}

    @property
    def epochs(self) -> int:
        """How many epochs were served."""
        return len(self._leaders)

    def on_commit(self, node: "SimNode", entries: Sequence[Entry]) -> None:
        """Compare what `node` has just committed with what was committed before."""
        committed = self.committed
        for entry in entries:
            found = (entry.epoch, bytes(entry.payload))
            if entry.index <= len(committed):
                known = committed[entry.index - 1]
                if known != found:
                    raise Broken(
                        "agreement",
                        f"entry {entry.index} is {known} and, on {node}, {found}",
                    )
            elif entry.index == len(committed) + 1:
                committed.append(found)
            else:
                raise Broken("agreement", f"{node} skipped {len(committed) + 1} .. {entry.index}")

    def on_ack(self, node: "SimNode", index: LogIndex, payload: bytes) -> None:
        """Remember what a client was told."""
        if self.committed[index - 1][1] != payload:
            raise Broken("lost", f"{node} acknowledged entry {index}, which is another one")
        self.acked[index] = payload

    def on_lead(self, node: "SimNode", epoch: Epoch) -> None:
        """Take note that `node` serves `epoch`."""
        who = (node.replica, node.nonce)
        if self._leaders.setdefault(epoch, who) != who:
            raise Broken("epoch", f"{node} and {self._leaders[epoch]} lead epoch {epoch}")

    def on_send(self, node: "SimNode", message: Message) -> None:
        """Check that an answer breaks no earlier one."""
        if not isinstance(message, FenceAnswer | AppendAnswer | FetchAnswer):
            return
        spoken = self._spoken.get(node.replica, NO_PROMISE)
        under = message.under
        if under != spoken:
            if under.epoch <= spoken.epoch:
                raise Broken("promise", f"{node} answered {under} after {spoken}")
            self._spoken[node.replica] = under

    def after_step(self, node: "SimNode") -> None:
        """Check what a step of `node` may have broken."""
        core = node.core
        if core.commit_index < node.commit_seen:
            raise Broken("commit", f"{node}: {node.commit_seen} -> {core.commit_index}")
        node.commit_seen = core.commit_index
        node.leading = core._role is Role.LEADER  # noqa: SLF001 - the property costs too much here
        if node.leading:
            leaders = [each for each in self._nodes if each.leading]
            if len(leaders) > 1:
                held = [each for each in leaders if each.core.lease_held(each.mono_ms())]
                if len(held) > 1:
                    raise Broken("lease", f"held by {' and '.join(map(str, held))}")

    def at_end(self) -> None:
        """Check what must hold once everything is healed and quiet."""
        for index, payload in self.acked.items():
            if self.committed[index - 1][1] != payload:
                raise Broken("lost", f"entry {index} was acknowledged and is another one")
        for node in self._nodes:
            node.core.check_invariants()
            if node.core.commit_index != len(self.committed):
                raise Broken(
                    "lost", f"{node} has {node.core.commit_index} of {len(self.committed)}"
                )
