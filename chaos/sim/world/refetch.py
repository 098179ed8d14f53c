"""Fetch a snapshot for a simulated node, as replication/shell/snapshot_fetch.py does for a real
node.

A node fetches for one of two reasons. Its leader reports that the node is `behind`: the node then
continues to follow. Or its disk is damaged: the node then only fetches. The fetched parts survive
the process. A question and its answer take a step together; the world's network may lose them.

After the arrival of the last part the log may bring more entries, before the install is ordered.
The order may wait long for the process that installs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from chaos.sim.world.simdisk import INCOMING_PATH
from replication.core.core_events import Role
from timer.model.timer_errors import CorruptFileError, DiskFailedError, NotReadyError
from timer.model.units import LogIndex
from timer.recovery.snapshot import OfferLeadership, Snapshot, SnapshotPart
from timer.recovery.snapshot_receiver import IncomingSnapshot, SnapshotSpaceError

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

CHUNK_MIN: Final = 300
CHUNKS_MAX: Final = 8
"""Most chunks of one file; few, so that it arrives in time in a healed world on a slow network."""
TRIES: Final = 4
"""Questions in a row without an answer; then another node is asked."""
SETTLE_MS_MAX: Final = 3_000
"""Longest time of following between the last part's arrival and the order to install."""
DRAIN_MS_MAX: Final = 3_000
"""Longest time between the order and the process that installs."""

RETRY_US: Final = 50_000
"""Time between two requests for an offer, and the longest between two others."""
Offer = tuple[Snapshot, OfferLeadership]


# ---- the source


def offer(
    node: "SimNode", suspect: str, known: LogIndex, answer: Callable[[Offer | None], None]
) -> None:
    """Answer with a snapshot beyond `known`. None: there is none, or the node has no lease."""
    core = node.core
    if core.role is not Role.LEADER or not core.holds_lease(node.mono_ms()):
        answer(None)
        return
    if suspect:
        node.outgoing.check(suspect)
    try:
        snapshot = node.outgoing.offer(known)
    except NotReadyError:
        node.app.flush()
        answer(None)
        return
    promise = core.promise
    answer((snapshot, OfferLeadership(promise.epoch, promise.leader, promise.nonce)))


def read(
    node: "SimNode", part: SnapshotPart, position: int, answer: Callable[[bytes | None], None]
) -> None:
    """Answer with the next bytes of a part. None: the part is not pinned here any more."""
    chunk = max(CHUNK_MIN, -(-part.size // CHUNKS_MAX))
    answer(node.outgoing.read(part, position, chunk))


# ---- the receiver


class SimSnapshotFetch:
    """The fetch of a snapshot by one process of a node."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self._life = node.life
        self._incoming = IncomingSnapshot(node.disk, INCOMING_PATH, spare_bytes=0)
        self._suspects: dict[SimNode, str] = {}
        """Node -> the part that arrived damaged from it."""
        self._source: SimNode | None = None
        """The node that sends the snapshot. None: one that offers one must be found."""
        self._snapshot: Snapshot | None = None
        self._whole, self._tries = False, 0
        node.world.timeline.after(0, self._run, self._look)

    def _run(self, step: Callable[[], int | None]) -> None:
        """Take a step. It returns the time until the next one; None: the fetch is over."""
        node, wait_us = self._node, 10_000
        if node.life != self._life or node.refetch is not self:
            return
        if not node.paused:
            try:
                result = step()
            except DiskFailedError as error:
                node.fail(error)
                return
            if result is None:
                return
            wait_us, step = result, self._step
        node.world.timeline.after(wait_us, self._run, step)

    def _look(self) -> int:
        """Check the parts of an earlier process."""
        for part in self._incoming.planned_parts():
            self._incoming.check_part(part)
        return 0

    def _step(self) -> int | None:
        """Fetch some more; at the end, stop the node until a process installs the snapshot."""
        node, world, incoming = self._node, self._node.world, self._incoming
        snapshot = self._snapshot
        if snapshot is not None and node.alive and node.core.commit_index >= snapshot.index:
            incoming.forget()  # the log has caught up
            node.refetch = None
            return None
        if self._whole:
            incoming.finish()
            world.timeline.note(f"node {node.replica}", f"has fetched {snapshot}")
            node.stop()
            world.timeline.after(world.rng.randrange(DRAIN_MS_MAX * 1_000), node.start)
            return None
        if self._source is None:
            return self._open(world.rng.choice([each for each in world.nodes if each is not node]))
        if incoming.next_missing() is not None:
            self._fetch(self._source)
            return world.rng.randrange(RETRY_US)
        try:
            world.app_type.check(node.disk, INCOMING_PATH)
        except CorruptFileError as error:
            world.timeline.note(f"node {node.replica}", error)
            incoming.forget()
            self._source = None
            return RETRY_US
        self._whole = True
        return world.rng.randrange(SETTLE_MS_MAX * 1_000)

    def _open(self, source: "SimNode") -> int:
        """Ask a node for an offer; only a leader makes one."""
        known = self._node.core.commit_index if self._node.alive else LogIndex(0)
        found = self._ask(source, offer, self._suspects.pop(source, ""), known)
        if found is None:
            return RETRY_US
        self._snapshot = found[0]
        try:
            self._incoming.begin(*found)
        except SnapshotSpaceError:
            return RETRY_US
        self._source, self._tries = source, 0
        return 0

    def _fetch(self, source: "SimNode") -> None:
        """Ask for the next bytes of a part."""
        wanted = self._incoming.next_missing()
        assert wanted is not None
        data = self._ask(source, read, *wanted)
        self._tries = self._tries + 1 if data is None else 0
        if data is not None and not self._incoming.put(*wanted, data):
            self._suspects[source] = wanted[0].path
            self._source = None
        elif self._tries > TRIES:
            self._source = None

    def _ask(self, to: "SimNode", question: Callable[..., None], *args: object) -> Any:
        """Return a node's answer. None: there is none, or the network lost it or the question."""
        network, link = self._node.world.network, (self._node.replica, to.replica)
        if network.loses(link) or network.loses(link[::-1]):
            return None
        answers: list[Any] = []
        to.call(question, to, *args, answers.append)
        return answers[0] if answers else None
