"""The promises, each with the name of its checker, and the referee of replication.

Every failure that the simulator reports is a `Broken` with the name of one of `CHECKERS`, or an
assertion of production code. The referee checks the protocol's promises at every step of every
node. chaos/sim/checks/book.py checks those of the state plane, as entries are applied and as
clients see their effects.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from replication.core.core_events import Role
from replication.core.invariants import check_invariants
from replication.core.peer_messages import (
    AppendAnswer,
    Fence,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    Message,
)
from replication.core.promise import NO_PROMISE, Promise
from timer.entries.entry_frame import Entry
from timer.model.units import Epoch, Nonce, ReplicaId

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode


CHECKERS: Final = {
    # The protocol.
    "agreement": "all nodes commit the same entry at an index",
    "lost": "P1: an entry answered OK stays committed; a scheduled timer fires; an ack stays",
    "epoch": "only one leader, in one process, serves in an epoch",
    "commit": "the commit index of a running node never goes back",
    "time": "the time in the log, and the time up to which timers fired, never go back",
    "promise": "a replica never answers a leadership older than, or in conflict with, its last",
    "lease": "at no instant do two replicas hold a lease",
    "appoint": "the controller appoints a log as good as any, or adopts a leader with a lease",
    "liveness": "a healed cluster makes progress, and comes to rest, within a bound",
    "frames": "a message holds the entries that it names, and none that peers reject",
    "series": "an occurrence becomes one timer, if its series waits for its number",
    "storage": "durable data can be read after a restart; damage gives an error with its place",
    "doubt": "a replica is unsure only after its machine went down or its disk was damaged",
    "pace": "a replica repeats a question at the heartbeat's pace, not at the speed of the link",
    "stuck": "a running replica folds, flushes and serves within 5 s after it can",
    "drain": "a node that drains and leads answers all requests that it accepted",
    "space": "the disk reserve lasts: no request of a client fills a disk to its end",
    # The state plane.
    "phantom": "a delivered message was scheduled, byte for byte",
    "twice": "P2: one timer fires once; a retried request is one timer, with one answer",
    "request": "P2: a request id stands for one request as long as the cluster remembers it",
    "torn": "all timers of one request are scheduled or none, of one topic or several",
    "early": "P3: nothing fires before it is due, by the log's clock",
    "late": "P3: without a fault a timer fires within 0.7 s",
    "policy": "P3: a timer's due time follows from its request and the policies before its entry",
    "quota": "no request exceeds a quota, and a request refused by one has no effect",
    "clock": "P3: one wrong clock does not put the log's clock ahead",
    "cancel": "P4: the answer to a cancel is true, and a cancelled timer never fires",
    "key": "a key is unique among a topic's pending timers; the answer to a change is true",
    "pause": "nothing fires from a topic that is paused",
    "held": "timers held by a paused topic are pending: changes reach them, and they end",
    "drop": "a resume fires and drops the overdue timers of its policy, and no others",
    "list": "the list of pending timers and their count agree",
    "acked": "P5: nothing is delivered after its ack was confirmed",
    "extended": "P5: a message goes to no other consumer before the end of its extended lease",
    "unsent": "a delivery that was dropped unsent counts no attempt and no failure",
    "credit": "no consumer gets more messages than it granted credit for, or any after its end",
    "nack": "P5: a nacked message waits for its delay; every nack answered NACKED is in the log",
    "rate": "a group gets no more messages than its rate allows, in any span of time",
    "priority": "the most urgent messages of a shared group come first, except for the oldest ones",
    "expiry": "a message expires after its due time and ttl, and is not delivered later",
    "retention": "no message is deleted that a group has not acked, or that retention keeps",
    "order": "within a key no message is delivered before an earlier one, or apart from it",
    "seek": "after a seek a group continues at the given place, if the topic still keeps it",
    "dropped": "P4, P7: pending timers end with their topic, and in no other way after that",
    "dead": "P5, P7: a message becomes a dead letter once, and never after its ack",
    "redrive": "P2: a dead letter is redriven once, unchanged, to its first topic",
    "unmarked": "P5: a redelivery is marked",
    "handout": "P5: no leader delivers in an epoch while a later epoch is served",
    "work": "P9: one entry's work is bounded, and a thread passes dead rows before a FIRE",
    "digest": "P6: replicas that applied the same log hold the same state",
    "conservation": "P7: scheduled = pending + fired + cancelled + dropped, after every entry",
}


REPEATS_MAX: Final = 50
"""Highest number of equal questions per second: ten heartbeats a second, and some for links that
return."""


class Broken(AssertionError):
    """A promise was broken; `checker` is its name."""

    def __init__(self, checker: str, detail: str) -> None:
        assert checker in CHECKERS, checker
        super().__init__(f"{checker}: {detail}")
        self.checker = checker


class Referee:
    """Checks every step of every node."""

    def __init__(self, nodes: "Sequence[SimNode]") -> None:
        self._nodes = nodes
        self._time_ms = 0
        """Time of the last committed entry."""
        self.served = Epoch(0)
        """The highest epoch that a node began to serve."""
        self.committed: list[tuple[Epoch, bytes]] = []
        """Epoch and payload of entry i + 1, as the first node committed it."""
        self._spoken: dict[ReplicaId, Promise] = {}
        self._questions: dict[tuple[object, ...], tuple[int, int]] = {}
        """Question -> (last second in which it was sent, number of times in that second)."""
        self._leaders: dict[Epoch, tuple[ReplicaId, Nonce]] = {}

    @property
    def epochs(self) -> int:
        """Number of epochs that were served."""
        return len(self._leaders)

    def on_commit(self, node: "SimNode", entries: Sequence[Entry]) -> None:
        """Compare the entries that `node` commits with the committed entries of other nodes."""
        committed = self.committed
        for entry in entries:
            found = (entry.epoch, bytes(entry.payload))
            if entry.index <= len(committed):
                known = committed[entry.index - 1]
                if known != found:
                    differ = f"entry {entry.index} is {known}, and on {node} {found}"
                    raise Broken("agreement", differ)
            elif entry.index == len(committed) + 1:
                committed.append(found)
                node.world.timeline.record(found[1])
                if entry.time_ms < self._time_ms:
                    fell = f"{self._time_ms} ms -> {entry.time_ms} ms"
                    raise Broken("time", f"entry {entry.index}: {fell}")
                self._time_ms = entry.time_ms
            else:
                raise Broken("agreement", f"{node} skipped {len(committed) + 1} .. {entry.index}")

    def on_lead(self, node: "SimNode", epoch: Epoch) -> None:
        """Note that `node` serves `epoch`."""
        who = (node.replica, node.nonce)
        if self._leaders.setdefault(epoch, who) != who:
            raise Broken("epoch", f"{node} and {self._leaders[epoch]} lead epoch {epoch}")
        self.served = max(self.served, epoch)

    def on_send(self, node: "SimNode", to: ReplicaId, message: Message) -> None:
        """Check that an answer keeps the earlier promises, and that questions keep their pace."""
        if isinstance(message, Fence | Fetch):
            self._on_question(node, to, message)
        if not isinstance(message, FenceAnswer | AppendAnswer | FetchAnswer):
            return
        spoken = self._spoken.get(node.replica, NO_PROMISE)
        under = message.under
        if under != spoken:
            if under.epoch <= spoken.epoch:
                raise Broken("promise", f"{node} answered {under} after {spoken}")
            self._spoken[node.replica] = under

    def _on_question(self, node: "SimNode", to: ReplicaId, message: Fence | Fetch) -> None:
        asked = message.prev_index if isinstance(message, Fetch) else None
        question, second = (node.replica, to, message.under, asked), node.mono_ms() // 1_000
        since, count = self._questions.get(question, (second, 0))
        self._questions[question] = (second, count + 1 if since == second else 1)
        if count >= REPEATS_MAX:
            raise Broken("pace", f"{node} sent this to {to} {REPEATS_MAX} times in 1 s: {message}")

    def after_step(self, node: "SimNode") -> None:
        """Check the invariants of `node` after a step."""
        core = node.core
        if core.commit_index < node.commit_seen:
            fell = f"{node.commit_seen} -> {core.commit_index}"
            raise Broken("commit", f"{node}: commit index {fell}")
        node.commit_seen = core.commit_index
        node.leading = core._role is Role.LEADER  # noqa: SLF001 - the property costs too much here
        if node.leading:
            leaders = [each for each in self._nodes if each.leading]
            if len(leaders) > 1:
                held = [each for each in leaders if each.core.holds_lease(each.mono_ms())]
                if len(held) > 1:
                    raise Broken("lease", f"held by {' and '.join(map(str, held))}")

    def at_end(self, nodes: "Sequence[SimNode]") -> None:
        """Check the invariants of `nodes` after all faults ended and the world is at rest."""
        for node in nodes:
            check_invariants(node.core)
            if node.core.commit_index != len(self.committed):
                has = f"{node.core.commit_index} of {len(self.committed)} entries"
                raise Broken("lost", f"{node} has {has}")
