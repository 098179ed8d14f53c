"""Several replicas, played from a text: the production driver over a clock, links and disks.

    cluster n1 n2 n3       new replicas with empty logs, all linked; nobody is appointed
    appoint n2 5           the control plane appoints n2 for epoch 5; all linked to n2 hear it
    n1 proposes 3          the leader appends three entries
    n1 hands over          the leader ends its leadership in good order
    n2 checkpoints         n2 keeps its state up to its commit index, and drops its log up to there
    kill n1, start n1      the process ends at any point; the next one finds all that was written
    cut n1, heal n1        the links of n1 to all others; with a second name, the link between two
    stop n1, go on n1      the disk of n1: nothing becomes durable meanwhile
    time +500              milliseconds pass

`; ` separates commands of one line. A link takes one millisecond, and so does a
write or a read. Each line that begins with a number tells of a change at that millisecond; the
state of the nodes follows.

After every millisecond this holds: at most one node has a lease; entries that are committed are
equal everywhere, and in the log of every leader that begins to serve; each core is consistent.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replication.core.core import Core
from replication.core.core_events import (
    Appointed,
    Durable,
    Event,
    Handover,
    Persist,
    Read,
    Reconnected,
    Role,
)
from replication.core.invariants import check_invariants
from replication.core.log_shape import LogShape
from replication.core.peer_messages import Fetch, LogStart, Message, Refused
from replication.core.promise import NO_PROMISE
from replication.core.replication_config import ReplicationConfig
from replication.driver.driver import Driver
from replication.driver.write_order import Order, TruncateLog, Write
from timer.entries.entry_frame import Entry, EntryKind, frame_at
from timer.entries.payloads import decode_epoch
from timer.files.disk import Bytes
from timer.model.timer_errors import NotLeaderError
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

STEP_MS = 1
"""A link, a write and a read take this."""


@dataclass
class Files:
    """What the next process of a node finds."""

    kept: Persist = field(default_factory=lambda: Persist(NO_PROMISE, unsure=False))
    checkpoint: int = 0
    base: tuple[int, Epoch, UnixMs] = (0, Epoch(0), UnixMs(0))
    """Index, epoch and time of the last entry that was dropped."""
    frames: list[Bytes] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.base[0] + len(self.frames)

    @property
    def time_ms(self) -> UnixMs:
        return self.entry(self.last).time_ms if self.frames else self.base[2]

    def entry(self, index: int) -> Entry:
        found = frame_at(memoryview(self.frames[index - self.base[0] - 1]), 0)
        assert isinstance(found, Entry), found
        return found

    def drop_before(self, index: int) -> None:
        if index > self.base[0] + 1:
            last = self.entry(index - 1)
            del self.frames[: index - self.base[0] - 1]
            self.base = index - 1, last.epoch, last.time_ms

    def truncate_after(self, index: int) -> None:
        del self.frames[index - self.base[0] :]

    def shape(self, founders: frozenset[ReplicaId]) -> LogShape:
        first, epoch, _ = self.base
        shape = LogShape(LogIndex(first), epoch, founders, LogIndex(first))
        entries = [self.entry(index) for index in range(first + 1, self.last + 1)]
        starts = [
            LogStart(each.index, each.epoch, frozenset(decode_epoch(each.payload).voters))
            for each in entries
            if each.kind is EntryKind.EPOCH
        ]
        if entries:
            shape.extend(LogIndex(self.last), starts)
        return shape


class Node:
    """One replica: the shell of its driver, and the listener."""

    def __init__(self, cluster: "Cluster", replica: int) -> None:
        self.cluster = cluster
        self.replica = ReplicaId(replica)
        self.files = Files()
        self.life = 0
        self.alive = self.stopped = self.leased = False
        self.start()

    def __str__(self) -> str:
        return f"n{self.replica}"

    def start(self) -> None:
        self.life += 1
        self.alive, self.leased = True, False
        self.wake: MonoMs | None = None
        self.committed = self.files.checkpoint
        self.core = Core(
            me=self.replica,
            nonce=Nonce(100 * self.replica + self.life),
            conf=ReplicationConfig(cache_bytes=1),  # durable entries are read from the disk
            promise=self.files.kept.promise,
            unsure=self.files.kept.unsure,
            shape=self.files.shape(self.cluster.founders),
            commit_index=LogIndex(self.files.checkpoint),
            now_ms=self.mono_ms(),
        )
        self.driver = Driver(self.core, self, self, self.files.time_ms)

    def kill(self) -> None:
        self.alive = self.leased = False
        self.life += 1

    def say(self, text: str) -> None:
        self.cluster.say(f"{self} {text}")

    def later(self, call: Callable[..., object], *args: object) -> None:
        """Call it in this process after a step, unless the process ends first."""
        life = self.life
        self.cluster.later(lambda: call(*args) if life == self.life else None)

    def handle(self, event: Event) -> None:
        if self.alive:
            self.driver.handle(event)

    def look(self) -> None:
        """Wake the driver if it is time, and tell of a change of the lease."""
        if self.alive:
            while self.wake is not None and self.wake <= self.cluster.now_ms:
                self.wake = None
                self.driver.tick()
            check_invariants(self.core)
        leased = self.alive and self.core.holds_lease(self.mono_ms())
        if leased != self.leased:
            self.leased = leased
            self.say("has a lease" if leased else "has no lease any more")

    # ---- what the driver asks of its shell

    def mono_ms(self) -> MonoMs:
        return MonoMs(self.cluster.now_ms)

    def persist(self, order: Persist) -> None:
        def done() -> None:
            if self.stopped:
                self.later(done)
                return
            if order.promise != self.files.kept.promise:
                self.say(f"promises epoch {order.promise.epoch} to n{order.promise.leader}")
            self.files.kept = order
            self.driver.on_persisted()

        self.later(done)

    def write(self, order: Order) -> None:
        files = self.files
        if isinstance(order, Write):
            files.frames += order.frames
        elif isinstance(order, TruncateLog):
            if files.last > order.after:
                epoch = files.entry(order.after + 1).epoch
                self.say(f"discards {order.after + 1}..{files.last} of epoch {epoch}")
            files.truncate_after(order.after)
        else:
            files.drop_before(order.before)
        self.later(self._synced, Durable(order.version, LogIndex(files.last)))

    def _synced(self, event: Durable) -> None:
        if self.stopped:
            self.later(self._synced, event)
        else:
            self.driver.handle(event)

    def read(self, order: Read) -> None:
        first = self.files.base[0] + 1
        frames = self.files.frames[order.first - first : order.last - first + 1]
        self.later(self.driver.on_read, order, frames)

    def send(self, to: ReplicaId, message: Message, frames: Sequence[Bytes] = ()) -> None:
        if isinstance(message, Fetch):
            self.say(f"fetches what follows {message.prev_index} from n{to}")
        elif isinstance(message, Refused):
            self.say(f"refuses n{to}: it has promised epoch {message.promise.epoch}")
        self.cluster.carry(self, self.cluster.nodes[to], message, b"".join(frames))

    overtake = send

    def refuse(self, sender: ReplicaId, why: str) -> None:
        raise AssertionError(f"{self} ends the stream of n{sender}: {why}")

    def wake_at(self, at_ms: MonoMs | None) -> None:
        self.wake = at_ms

    def soon(self) -> None:
        self.wake = self.mono_ms()

    # ---- what the driver tells

    def check(self, entry: Entry) -> None:
        """Every entry can be applied."""

    def on_commit(self, commit_index: LogIndex) -> None:
        self.say(f"commits {self.committed + 1}..{commit_index}")
        for index in range(self.committed + 1, commit_index + 1):
            self.cluster.compare(self, index)
        self.committed = commit_index

    def on_role(self, role: Role, epoch: Epoch) -> None:
        self.say(f"is {role.value} of epoch {epoch}")

    def on_lead(self, epoch: Epoch) -> None:
        for index in range(self.files.base[0] + 1, len(self.cluster.committed) + 1):
            self.cluster.compare(self, index)
        self.say(f"serves epoch {epoch}, its log applied up to {self.committed}")

    def on_drain(self) -> bool:
        self.say("takes nothing new")
        return False

    def on_stepdown(self, epoch: Epoch) -> None:
        self.say(f"stops serving epoch {epoch}")

    def on_behind(self) -> None:
        self.say("needs a snapshot")

    def on_forgotten(self) -> None:
        raise AssertionError(f"{self} is taken for a founder without a disk")


class Cluster:
    """The nodes, their links, and one clock for all."""

    def __init__(self, count: int) -> None:
        self.now_ms = 0
        self.founders = frozenset(ReplicaId(each + 1) for each in range(count))
        self.committed: list[tuple[Epoch, bytes]] = []
        self._lines: list[str] = []
        self._cut: set[frozenset[ReplicaId]] = set()
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.nodes = {replica: Node(self, replica) for replica in sorted(self.founders)}
        self.connect(*self.nodes.values())

    def say(self, text: str) -> None:
        self._lines.append(f"{self.now_ms:5} {text}")

    def told(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def later(self, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now_ms + STEP_MS, next(self._order), call))

    def carry(self, sender: Node, to: Node, message: Message, data: bytes) -> None:
        def arrive() -> None:
            if to.alive and frozenset((sender.replica, to.replica)) not in self._cut:
                to.driver.receive(sender.replica, message, wall_ms, memoryview(data))

        wall_ms = UnixMs(self.now_ms)
        self.later(arrive)

    def cut(self, *ends: Node) -> None:
        self._cut |= self._links(*ends)

    def heal(self, *ends: Node) -> None:
        self._cut -= self._links(*ends)
        self.connect(*(self.nodes.values() if len(ends) == 1 else ends))

    def _links(self, node: Node, *other: Node) -> set[frozenset[ReplicaId]]:
        others = {each.replica for each in other} or {*self.nodes} - {node.replica}
        return {frozenset((node.replica, each)) for each in others}

    def connect(self, *ends: Node) -> None:
        """Tell both ends of each whole link that it is there, perhaps again."""
        for one, other in itertools.permutations(ends, 2):
            if frozenset((one.replica, other.replica)) not in self._cut and other.alive:
                one.handle(Reconnected(other.replica))

    def linked(self, node: Node) -> list[Node]:
        """Return a node and those that it can reach."""
        cut = [{*link} for link in self._cut]
        return [
            each
            for each in self.nodes.values()
            if each is node or {each.replica, node.replica} not in cut
        ]

    def compare(self, node: Node, index: int) -> None:
        """Check a committed entry of a node's log against those committed before it."""
        if index <= node.files.base[0]:
            return
        assert index <= node.files.last, f"{node} lacks the committed entry {index}"
        entry = node.files.entry(index)
        found = entry.epoch, bytes(entry.payload)
        if index > len(self.committed):
            assert index == len(self.committed) + 1, f"{node} skips entries before {index}"
            self.committed.append(found)
        assert self.committed[index - 1] == found, f"{node} has another entry {index}"

    def run(self, duration_ms: int) -> None:
        for _ in range(duration_ms):
            self.now_ms += 1
            while self._due and self._due[0][0] <= self.now_ms:
                heapq.heappop(self._due)[-1]()
            self.look()

    def look(self) -> None:
        for node in self.nodes.values():
            node.look()
        leased = [str(node) for node in self.nodes.values() if node.leased]
        assert len(leased) < 2, f"at {self.now_ms} ms {' and '.join(leased)} have leases"

    def state(self) -> list[str]:
        lines = []
        for node in self.nodes.values():
            core, files = node.core, node.files
            log = f"log {files.entry(files.last).epoch}:{files.last}" if files.frames else "no log"
            if not node.alive:
                lines.append(f"{node}: down, {log}, checkpoint {files.checkpoint}")
                continue
            notes = [", serving"] * core.serving + [", lease"] * node.leased
            role = f"{core.role.value} of epoch {core.epoch}"
            lines.append(f"{node}: {role}, {log}, commit {core.commit_index}{''.join(notes)}")
        return lines


class ElectionsPlayer:
    """Plays the commands of one text; see the module."""

    cluster: Cluster

    def play(self, line: str) -> str:
        for command in line.split("; "):
            words = command.split()
            if words[0] == "cluster":
                self.cluster = Cluster(len(words) - 1)
            else:
                self._play(words)
                self.cluster.look()
        return "\n".join([*self.cluster.told(), *self.cluster.state()])

    def _play(self, words: list[str]) -> None:
        cluster = self.cluster
        ends = [self._node(word) for word in words if word[0] == "n" and word[1:].isdigit()]
        match words:
            case ["time", after]:
                cluster.run(int(after))
            case ["appoint", _, epoch]:
                for node in cluster.linked(ends[0]):
                    node.handle(Appointed(Epoch(int(epoch)), ends[0].replica))
            case [_, "proposes", count]:
                self._propose(ends[0], int(count))
            case [_, "hands", "over"]:
                ends[0].handle(Handover())
            case [_, "checkpoints"]:
                index = ends[0].files.checkpoint = int(ends[0].core.commit_index)
                ends[0].driver.drop_before(LogIndex(index + 1), LogIndex(index + 1))
            case ["kill", _]:
                ends[0].kill()
            case ["start", _]:
                ends[0].start()
                cluster.connect(*cluster.nodes.values())
            case ["cut", *_]:
                cluster.cut(*ends)
            case ["heal", *_]:
                cluster.heal(*ends)
            case ["stop", _] | ["go", "on", _]:
                ends[0].stopped = words[0] == "stop"
            case _:
                raise ValueError(" ".join(words))

    def _node(self, name: str) -> Node:
        return self.cluster.nodes[ReplicaId(int(name[1:]))]

    def _propose(self, node: Node, count: int) -> None:
        for _ in range(count):
            payload = f"{node} {node.files.last + 1}".encode()
            try:
                node.driver.propose(EntryKind.FIRE, [payload], UnixMs(self.cluster.now_ms))
            except NotLeaderError:
                node.say("accepts nothing: it does not lead")
                return
