"""Fetch a snapshot for a simulated node, as replication/shell/snapshot_fetch.py does for a real
node.

A node fetches for one of two reasons. Its leader reports that the node is `behind`: the node then
continues to follow. Or its disk is damaged: the node then only fetches. The fetched parts survive
the process. Requests and answers travel over the world's network, which may lose them.

After the arrival of the last part the log may bring more entries, before the install is ordered.
The order may wait long for the process that installs.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

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

RETRY_US: Final = 50_000
"""Time between two requests for an offer."""
LATE: Final = object()
"""The result of a question without an answer in time."""

Offer = tuple[Snapshot, OfferedUnder]
Script = Generator[Any, Any, None]
"""Yields waits in microseconds; and questions, as (node, question, its arguments): it gets the
answer."""


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


class _Needless(Exception):
    """The node has committed the snapshot's index meanwhile."""


class SimSnapshotFetch:
    """The fetch of a snapshot by one process of a node."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self._life = node.life
        self._incoming = Incoming(node.disk, INCOMING_PATH, room_bytes=0)
        self._suspects: dict[SimNode, str] = {}
        """Node -> the part that arrived damaged from it."""
        self._question = 0
        """Number of the last question. Answers to earlier questions are ignored."""
        self._script = self._fetch()
        node.world.timeline.after(0, self._run, self._go_on)

    def _fetch(self) -> Script:
        """Fetch a snapshot, then stop the node until a process installs it."""
        node, world = self._node, self._node.world
        for part in self._incoming.planned():
            self._incoming.look(part)  # of an earlier process
        snapshot: Snapshot | None = None
        while snapshot is None:
            # Only a leader makes an offer.
            source = world.rng.choice([each for each in world.nodes if each is not node])
            snapshot = yield from self._from(source)
        yield world.rng.randrange(SETTLE_MS_MAX * 1_000)
        self._check_need(snapshot)
        self._incoming.finish()
        world.timeline.note(f"node {node.replica}", f"has fetched {snapshot.index}")
        node.stop()
        world.timeline.after(world.rng.randrange(DRAIN_MS_MAX * 1_000), node.start)

    def _from(self, source: "SimNode") -> Generator[Any, Any, Snapshot | None]:
        """Fetch a whole snapshot from one node. None: another node has to be asked."""
        node, incoming = self._node, self._incoming
        known = node.core.commit_index if node.alive else LogIndex(0)
        found = yield source, offer, self._suspects.pop(source, ""), known
        if found is LATE:
            return None
        begun = False
        if found is not None:
            self._check_need(found[0])
            with suppress(NotReadyError):
                incoming.begin(*found)
                begun = True
        if not begun:
            yield RETRY_US
            return None
        tries = 0
        while (wanted := incoming.wanted()) is not None:
            data = yield source, read, *wanted
            tries = tries + 1 if data is LATE else 0
            if data is None or tries > TRIES:
                return None
            if data is not LATE and not incoming.put(*wanted, data):
                self._suspects[source] = wanted[0].path
                return None
            self._check_need(found[0])
        try:
            node.world.app_type.check(node.disk, INCOMING_PATH)
        except CorruptFileError as error:
            node.world.timeline.note(f"node {node.replica}", error)
            incoming.forget()
            return None
        whole: Snapshot = found[0]
        return whole

    def _check_need(self, snapshot: Snapshot) -> None:
        """Raise _Needless if the node has committed the snapshot's index."""
        if self._node.alive and self._node.core.commit_index >= snapshot.index:
            raise _Needless

    def _go_on(self, result: object = None) -> None:
        """Continue with the answer to a question, up to the next question or wait."""
        try:
            step = self._script.send(result)
        except StopIteration:
            return
        except _Needless:
            self._incoming.forget()
            self._node.refetch = None
            return
        if isinstance(step, int):
            self._node.world.timeline.after(step, self._run, self._go_on)
        else:
            self._ask(*step)

    # ---- over the network

    def _ask(self, to: "SimNode", question: Callable[..., None], *args: object) -> None:
        """Ask a node. Continue with its answer, or with LATE after ANSWER_MS."""
        network, me = self._node.world.network, self._node.replica
        self._question += 1

        def answer(result: object) -> None:
            network.carry((to.replica, me), self._run, self._heard, number, result)

        number = self._question
        network.carry((me, to.replica), to.call, question, to, *args, answer)
        self._node.world.timeline.after(ANSWER_MS * 1_000, self._run, self._heard, number, LATE)

    def _heard(self, number: int, result: object) -> None:
        if number == self._question:
            self._question += 1
            self._go_on(result)

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
