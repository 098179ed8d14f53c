"""One world: nodes, network, control plane, clients and faults, all from one seed."""

import random
from collections.abc import Callable
from typing import Final

from chaos.sim.world import disk_loss
from chaos.sim.world.app import App
from chaos.sim.world.faults import FaultInjector
from chaos.sim.world.options import WorldOptions, fork
from chaos.sim.world.referee import Broken, Referee
from chaos.sim.world.sim_control import SimControl
from chaos.sim.world.sim_network import SimNetwork
from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.timeline import Timeline
from replication.core.core import Core
from replication.core.quorum import Voters
from timer.model.units import LogIndex, Nonce, ReplicaId

HEAL_MS_MAX: Final = 15_000
"""Every node of a healed cluster must have made progress within this. The controller may wait for
16 s after refusals in a row."""
HEAL_CHECK_MS: Final = 250
MORE_MS: Final = 1_000
"""Time after each fault that is added at the end because too few have struck."""
NOTE_SIZE_MAX: Final = 240
"""Characters of a message or event in a report."""
MORE_MAX: Final = 20
"""Most faults that are added at the end."""


class World:
    """A world made from a seed; `run` plays it to its end."""

    make_core: Callable[..., Core] = Core
    """Class of a node's protocol core; a planted bug sets another class."""
    make_node: Callable[..., SimNode] = SimNode
    app_type: type[App] = App

    def __init__(self, seed: int, options: WorldOptions | None = None) -> None:
        self.rng = random.Random(seed)
        drawn = WorldOptions.draw(self.rng)
        self.options = options or drawn
        self.timeline = Timeline()
        self.sets_seen: set[Voters] = set()
        """Voter sets that were in force at some time, as far as applications recorded them."""
        self.heals = 0
        """Number of times that all faults were ended."""
        self.stranded = False
        """Whether the healed world waits for repair (chaos/sim/world/disk_loss.py)."""
        count = self.options.nodes + self.options.learners
        self.ids = [ReplicaId(number) for number in range(1, count + 1)]
        self.voters = frozenset(self.ids[: self.options.nodes])
        self.network = SimNetwork(self.timeline, fork(self.rng), self.options)
        self.nodes = [self.make_node(self, replica) for replica in self.ids]
        self.referee = Referee(self.nodes)
        for node in self.nodes:
            self.network.add(node)
        self.control = SimControl(self, fork(self.rng))
        self.proposals = 0
        self.workload: Callable[[], None] = self._propose
        """The clients' work, called at the seed's rate."""
        self._clients = fork(self.rng)

    def next_nonce(self) -> Nonce:
        """Return the identity of a new process."""
        return Nonce(self.rng.randint(1, (1 << 63) - 1))

    def run(self, seconds: int) -> None:
        """Play `seconds` with faults, heal the world and check that it recovers.

        If fewer than three faults have struck, the world first plays on with more faults, up to 20.

        Raises:
            Broken: a promise was broken.
            AssertionError: an invariant of the code was broken.
        """
        end_us = seconds * 1_000_000
        self.faults = FaultInjector(self, fork(self.rng), end_us)
        for node in self.nodes:
            within_us = 50_000 if node.replica in self.voters else end_us
            self.timeline.after(self._clients.randrange(within_us), node.start)
        self.timeline.after(0, self._clients_act)
        self.timeline.run_until(end_us)
        for _ in range(MORE_MAX):
            if not self.faults.one_more():
                break
            self.timeline.run_until(self.timeline.now_us + MORE_MS * 1_000)
        self._recover()
        if not self.stranded:
            self.referee.at_end(self.able_nodes())

    def add_learner(self) -> SimNode:
        """Return a new machine with an empty disk; it is not started."""
        replica = ReplicaId(len(self.ids) + 1)
        self.ids.append(replica)
        node = self.make_node(self, replica)
        self.nodes.append(node)
        self.network.add(node)
        return node

    def make_app(self, node: SimNode) -> App:
        """Return the application of a node's new process."""
        return App(node)

    def _clients_act(self) -> None:
        gap_us = int(self._clients.expovariate(self.options.proposals_per_s) * 1_000_000)
        self.timeline.after(gap_us + 1, self._clients_act)
        self.workload()

    def _propose(self) -> None:
        """Propose entries to a node that believes to lead; it may be a deposed leader."""
        rng = self._clients
        leaders = [node for node in self.nodes if node.leading and not node.paused]
        if not leaders:
            return
        node = rng.choice(leaders)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            self.proposals += 1
            size = rng.choice((0, 1, self.options.payload_bytes))
            node.call(node.propose, self.proposals.to_bytes(8, "little") + bytes(size))

    # ---------------------------------------------------------------- the end

    def _recover(self) -> None:
        """End all faults. Wait until every node that can run has committed a new entry and rests.

        Raises:
            Broken: the nodes did not recover within HEAL_MS_MAX.
        """
        self.heals += 1
        self.timeline.note("world", "healed")
        self.network.mend_all()
        self.control.mischief = ()
        self.control.deaf.clear()
        for node in self.nodes:
            node.slow_disk = 1
            node.disk.capacity_bytes = None
            node.disk.mend()
            node.resume()
            node.start()
        target = LogIndex(len(self.referee.committed) + 1)
        self._wait(lambda: self._caught_up(target), f"not every node committed entry {target}")
        self.workload = lambda: None
        self._wait(
            lambda: self._caught_up(LogIndex(len(self.referee.committed))),
            "the nodes did not come to rest",
        )

    def _caught_up(self, target: LogIndex) -> bool:
        """Return whether all nodes have committed `target` and none is unsure any more."""
        return all(
            node.alive and node.core.commit_index >= target and not node.core.unsure
            for node in self.able_nodes()
        )

    def able_nodes(self) -> list[SimNode]:
        """Return the nodes that can run; they must be up to date in the end."""
        return [node for node in self.nodes if not node.refused]

    def _wait(self, done: Callable[[], bool], failure: str) -> None:
        """Run until `done`, or until the world is found to wait for repair.

        Raises:
            Broken: neither was the case after HEAL_MS_MAX.
        """
        give_up_us = self.timeline.now_us + HEAL_MS_MAX * 1_000
        while not done() and not self.stranded:
            if self.timeline.now_us < give_up_us:
                self.timeline.run_until(self.timeline.now_us + HEAL_CHECK_MS * 1_000)
            elif disk_loss.waits_for_repair(self):
                self.stranded = True
            else:
                states = "; ".join(map(str, self.nodes))
                raise Broken("liveness", f"{failure} within {HEAL_MS_MAX} ms: {states}")

    def rows(self) -> int:
        """Return the number of scheduled timers, fired timers and acked messages together."""
        return 0

    def story(self) -> list[str]:
        """Return the last events, one line each."""
        return [
            f"{now_us / 1000:12.3f} ms  {subject:<10} {str(what)[:NOTE_SIZE_MAX]}"
            for now_us, subject, what in self.timeline.trail
        ]
