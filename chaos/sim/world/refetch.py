"""Fetch a snapshot for a simulated node, as replication/shell/snapshot_fetch.py does for a real
node.

A node fetches for one of two reasons. Its leader reports that the node is `behind`: the node then
continues to follow. Or its disk is damaged: the node then only fetches. The fetched parts survive
the process. Requests and answers travel over the world's network, which may lose them.

After the arrival of the last part the log may bring more entries, before the install is ordered.
The order may wait long for the process that installs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from chaos.sim.world.paths import INCOMING_PATH
from replication.core.core_events import Role
from timer.model.timer_errors import CorruptFileError, DiskFailedError, NotReadyError
from timer.model.units import LogIndex
from timer.recovery.snapshot import OfferedUnder, Snapshot, SnapshotPart
from timer.recovery.snapshot_receiver import Incoming

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

CHUNK_MIN: Final = 300
CHUNKS_MAX: Final = 8
"""Most chunks of one file; few, so that it arrives in time in a healed world on a slow network."""
ANSWER_MS: Final = 300
TRIES: Final = 4
SETTLE_MS_MAX: Final = 3_000
"""Longest time of following between the last part's arrival and the order to install."""
DRAIN_MS_MAX: Final = 3_000
"""Longest time between the order and the process that installs."""

Offer = tuple[Snapshot, OfferedUnder]


# ---- the source


def offer(
    node: "SimNode", suspect: str, known: LogIndex, answer: Callable[[Offer | None], None]
) -> None:
    """Answer with a snapshot beyond `known`. None: there is none, or the node has no lease."""
    core = node.core
    if core.role is not Role.LEADER or not core.lease_held(node.mono_ms()):
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
    answer((snapshot, OfferedUnder(promise.epoch, promise.leader, promise.nonce)))


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
        self._incoming = Incoming(node.disk, INCOMING_PATH, room_bytes=0)
        self._offer: Offer | None = None
        self._source: SimNode | None = None
        self._suspects: dict[SimNode | None, str] = {}
        self._question = 0
        """Number of the last question. Answers to earlier questions are ignored."""
        self._tries = 0
        node.world.timeline.after(0, self._run, self._look)

    def _look(self) -> None:
        """Find the parts that an earlier process has fetched."""
        for part in self._incoming.planned():
            self._incoming.look(part)
        self._ask()

    def _ask(self) -> None:
        """Send a random other node a request for an offer. Only a leader makes one."""
        world = self._node.world
        others = [node for node in world.nodes if node is not self._node]
        self._source = source = world.rng.choice(others)
        suspect = self._suspects.pop(source, "")
        known = self._node.core.commit_index if self._node.alive else LogIndex(0)
        self._send(source, offer, (suspect, known), self._offered, again=self._ask)

    def _offered(self, found: Offer | None) -> None:
        if found is None:
            self._node.world.timeline.after(50_000, self._run, self._ask)
            return
        self._offer = found
        self._tries = 0
        if self._is_needless():
            return
        try:
            self._incoming.begin(*found)
        except NotReadyError:
            self._node.world.timeline.after(50_000, self._run, self._ask)
            return
        self._fetch()

    def _fetch(self) -> None:
        if self._is_needless():
            return
        wanted = self._incoming.wanted()
        if wanted is None:
            self._finish()
            return
        assert self._source is not None
        self._send(self._source, read, wanted, self._fetched, again=self._again)

    def _again(self) -> None:
        self._tries += 1
        if self._tries > TRIES:
            self._ask()
        else:
            self._fetch()

    def _fetched(self, data: bytes | None) -> None:
        wanted = self._incoming.wanted()
        assert wanted is not None
        if data is None:
            self._ask()
            return
        self._tries = 0
        if not self._incoming.put(*wanted, data):
            self._suspects[self._source] = wanted[0].path
            self._ask()
            return
        self._fetch()

    def _finish(self) -> None:
        node = self._node
        try:
            node.world.app_type.check(node.disk, INCOMING_PATH)
        except CorruptFileError as error:
            node.world.timeline.note(f"node {node.replica}", error)
            self._incoming.forget()
            self._ask()
            return
        settle_us = node.world.rng.randrange(SETTLE_MS_MAX * 1_000)
        node.world.timeline.after(settle_us, self._run, self._order)

    def _order(self) -> None:
        """Order the install, and stop the node until a process installs the snapshot."""
        node, offered = self._node, self._offer
        assert offered is not None
        if self._is_needless():
            return
        self._incoming.finish()
        node.world.timeline.note(f"node {node.replica}", f"has fetched {offered[0].index}")
        node.stop()
        node.world.timeline.after(node.world.rng.randrange(DRAIN_MS_MAX * 1_000), node.start)

    def _is_needless(self) -> bool:
        """Return whether the node has committed the snapshot's index; if so delete all parts."""
        node, offered = self._node, self._offer
        assert offered is not None
        if not node.alive or node.core.commit_index < offered[0].index:
            return False
        self._incoming.forget()
        node.refetch = None
        return True

    # ---- over the network

    def _send(
        self,
        to: "SimNode",
        ask: Callable[..., None],
        args: tuple[object, ...],
        heard: Callable[..., None],
        *,
        again: Callable[[], None],
    ) -> None:
        """Run `ask` on `to`; call `heard` with its answer, or `again` after ANSWER_MS."""
        network, me = self._node.world.network, self._node.replica
        self._question += 1
        question = self._question

        def answer(result: object) -> None:
            network.carry((to.replica, me), self._run, arrive, result)

        def arrive(result: object) -> None:
            if question == self._question:
                self._question += 1
                heard(result)

        def late() -> None:
            if question == self._question:
                again()

        network.carry((me, to.replica), to.call, ask, to, *args, answer)
        self._node.world.timeline.after(ANSWER_MS * 1_000, self._run, late)

    def _run(self, call: Callable[..., None], *args: object) -> None:
        node = self._node
        if node.life != self._life or node.refetch is not self:
            return
        if node.paused:
            node.world.timeline.after(10_000, self._run, call, *args)
            return
        try:
            call(*args)
        except DiskFailedError as error:
            node.fail(error)
