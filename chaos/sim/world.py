"""One world: nodes, network, control plane, clients and faults, all from one seed."""

import random
from collections.abc import Callable
from typing import Any, Final

from chaos.sim.app import Ledger, MakeApp
from chaos.sim.control import Control
from chaos.sim.faults import Faults
from chaos.sim.network import Network
from chaos.sim.node import SimNode
from chaos.sim.options import Options
from chaos.sim.referee import Broken, Referee
from chaos.sim.timeline import Timeline
from replication.core import Core
from timer.units import LogIndex, Nonce, ReplicaId

HEAL_MS_MAX: Final = 15_000
"""A healed cluster must have made progress everywhere within this."""
HEAL_LOOK_MS: Final = 250


class World:
    """Made by a seed; `run` plays it to its end."""

    make_core: Callable[..., Core] = Core
    """What a node runs; a planted bug puts another class here."""
    make_node: Callable[..., SimNode] = SimNode

    def __init__(
        self, seed: int, make_app: MakeApp = Ledger, options: Options | None = None
    ) -> None:
        self.rng = random.Random(seed)
        drawn = Options.draw(self.rng)
        self.options = options or drawn
        self.timeline = Timeline()
        self.heals = 0
        """How often all faults were ended."""
        self.ids = [ReplicaId(number) for number in range(1, self.options.nodes + 1)]
        self.network = Network(self.timeline, self._fork(), self.options)
        self.control: Control | None = None
        self.nodes = [self.make_node(self, replica, make_app) for replica in self.ids]
        self.referee = Referee(self.nodes)
        for node in self.nodes:
            self.network.add(node)
        self.control = Control(self, self._fork())
        self.proposals = 0
        self.workload: Callable[[], None] = self._propose
        """Called at the seed's rate: what clients do."""
        self._clients = self._fork()

    def _fork(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def next_nonce(self) -> Nonce:
        """Return the identity of a new process."""
        return Nonce(self.rng.randint(1, (1 << 63) - 1))

    def run(self, seconds: int) -> None:
        """Play `seconds` with faults, then heal the world and see it recover.

        Raises:
            Broken: a promise was.
            AssertionError: an invariant of the code was.
        """
        end_us = seconds * 1_000_000
        self.faults = Faults(self, self._fork(), end_us)
        for node in self.nodes:
            self.timeline.after(self._clients.randrange(50_000), node.start)
        self.timeline.after(0, self._clients_act)
        self.timeline.run_until(end_us)
        self._recover()
        self.referee.at_end()

    def _clients_act(self) -> None:
        gap_us = int(self._clients.expovariate(self.options.proposals_per_s) * 1_000_000)
        self.timeline.after(gap_us + 1, self._clients_act)
        self.workload()

    def _propose(self) -> None:
        """Offer something to whoever believes to lead, deposed leaders included."""
        rng = self._clients
        leaders = [node for node in self.nodes if node.leading and not node.paused]
        if not leaders:
            return
        node = rng.choice(leaders)
        assert isinstance(node.app, Ledger)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            self.proposals += 1
            size = rng.choice((0, 1, self.options.payload_bytes))
            node.call(node.app.propose, self.proposals.to_bytes(8, "little") + bytes(size))

    # ---------------------------------------------------------------- the end

    def _recover(self) -> None:
        """End all faults; wait until every node has committed something new."""
        self.heals += 1
        self.faults.disarm()
        self.timeline.note("world", "healed")
        self.network.mend_all()
        assert self.control is not None
        self.control.mischief = ()
        self.control.deaf.clear()
        for node in self.nodes:
            node.slow_disk = 1
            node.resume()
            node.start()
        target = LogIndex(len(self.referee.committed) + 1)
        give_up_us = self.timeline.now_us + HEAL_MS_MAX * 1_000
        while not self._caught_up(target):
            if self.timeline.now_us >= give_up_us:
                states = "; ".join(map(str, self.nodes))
                raise Broken(
                    "liveness",
                    f"not every node committed {target} within {HEAL_MS_MAX} ms: {states}",
                )
            self.timeline.run_until(self.timeline.now_us + HEAL_LOOK_MS * 1_000)
        self.workload = _nothing
        self._quieten(give_up_us + HEAL_MS_MAX * 1_000)

    def _caught_up(self, target: LogIndex) -> bool:
        return all(node.alive and node.core.commit_index >= target for node in self.nodes)

    def _quieten(self, give_up_us: int) -> None:
        """Wait until all nodes have committed the same."""
        while not self._caught_up(LogIndex(len(self.referee.committed))):
            if self.timeline.now_us >= give_up_us:
                states = "; ".join(map(str, self.nodes))
                raise Broken("liveness", f"the nodes don't come to rest: {states}")
            self.timeline.run_until(self.timeline.now_us + HEAL_LOOK_MS * 1_000)

    def story(self) -> list[str]:
        """Return the last things that happened, one line each."""
        return [
            f"{now_us / 1000:12.3f} ms  {subject:<10} {brief(what)}"
            for now_us, subject, what in self.timeline.trail
        ]


def brief(what: Any) -> str:
    """Return a message or event as one short line."""
    text = str(what)
    for noise in ("Promise(", "epoch=", "leader=", "nonce="):
        text = text.replace(f"under={noise}", "under=(")
    return text if len(text) <= 240 else text[:237] + "..."


def _nothing() -> None:
    """Do nothing: clients are quiet."""
