"""The network between the nodes of a world: it delays, loses, duplicates and reorders messages."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from chaos.sim.world.options import WorldOptions
from chaos.sim.world.timeline import Timeline
from replication.core.peer_messages import Message
from timer.model.units import ReplicaId, UnixMs

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

_Link = tuple[ReplicaId, ReplicaId]


class SimNetwork:
    """The links of a world, one for each ordered pair of nodes."""

    def __init__(self, timeline: Timeline, rng: random.Random, options: WorldOptions) -> None:
        self._timeline, self._rng = timeline, rng
        self._options = options
        self._nodes: dict[ReplicaId, SimNode] = {}
        self._cuts: dict[_Link, int] = {}
        self._arrival_us: dict[_Link, int] = {}
        self.loss = options.loss
        self.duplicate = options.duplicate
        self._slow_us: dict[_Link, int] = {}

    def add(self, node: "SimNode") -> None:
        """Connect `node`."""
        self._nodes[node.replica] = node

    def cut(self, link: _Link) -> None:
        """Lose all messages on this link until each `cut` has had its `mend`."""
        self._cuts[link] = self._cuts.get(link, 0) + 1

    def mend(self, link: _Link) -> None:
        """Undo one `cut`."""
        self._cuts[link] -= 1
        if not self._cuts[link]:
            del self._cuts[link]
            self._nodes[link[0]].on_reconnected(link[1])

    def slow(self, link: _Link, more_us: int) -> None:
        """Delay every message on this link by about `more_us` more; 0 ends this."""
        self._slow_us[link] = more_us

    def reopen(self, link: _Link) -> None:
        """Let later messages overtake the messages of an earlier connection."""
        self._arrival_us.pop(link, None)

    def mend_all(self) -> None:
        """End all cuts, losses, duplicates and delays by `slow`."""
        self._cuts.clear()
        self._slow_us.clear()
        self.loss = self.duplicate = 0.0

    def is_cut(self, one: ReplicaId, other: ReplicaId) -> bool:
        """Return whether one direction between two nodes is cut, or both are."""
        return (one, other) in self._cuts or (other, one) in self._cuts

    def loses(self, link: _Link) -> bool:
        """Return whether the next message on this link is lost."""
        return link in self._cuts or (self.loss > 0 and self._rng.random() < self.loss)

    def is_disturbed(self) -> bool:
        """Return whether a link is cut or slow."""
        return bool(self._cuts) or any(self._slow_us.values())

    def _arrive(self, link: _Link, call: Callable[..., None], *args: object) -> None:
        # Messages under way when the link broke are lost, as are a broken stream's buffers.
        if link not in self._cuts:
            call(*args)

    def send(
        self, sender: ReplicaId, to: ReplicaId, message: Message, wall_ms: UnixMs, data: bytes
    ) -> None:
        """Deliver a message once or twice after a delay, or lose it."""
        rng, options, link = self._rng, self._options, (sender, to)
        if self.loses(link):
            return
        self._timeline.record(data)
        copies = 2 if self.duplicate and rng.random() < self.duplicate else 1
        for _ in range(copies):
            delay_us = int(options.delay_us * (1 + options.jitter * rng.expovariate(1.0)))
            if link in self._slow_us:
                delay_us += int(self._slow_us[link] * (0.5 + rng.random()))
            if not options.reorder:
                arrival_us = max(self._timeline.now_us + delay_us, self._arrival_us.get(link, 0))
                self._arrival_us[link] = arrival_us
                delay_us = arrival_us - self._timeline.now_us
            node = self._nodes[to]
            args = node.receive, sender, message, wall_ms, data
            self._timeline.after(delay_us, self._arrive, link, node.call, *args)
