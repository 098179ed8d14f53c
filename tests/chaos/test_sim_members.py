"""Changes of voters: the newest voter set decides, and replaced voters do not."""

from collections.abc import Iterable

from chaos.sim.world import disk_loss
from chaos.sim.world.world import World
from tests.chaos.planted.planted import calm
from timer.model.units import ReplicaId

SECONDS = 12


class Members:
    """A calm world of three voters and some learners, with actions at given seconds."""

    def __init__(self, learners: int) -> None:
        self.world = World(3, options=calm(3).aim(nodes=3, learners=learners))
        self.nodes = {node.replica: node for node in self.world.nodes}
        for node in self.world.nodes:
            self.world.timeline.after(0, node.start)
        self.sets: list[frozenset[ReplicaId]] = []

    def leader(self) -> ReplicaId:
        """Return the leader."""
        (leader,) = (node.replica for node in self.world.nodes if node.leading)
        return leader

    def others(self) -> list[ReplicaId]:
        """Return the founders except the leader."""
        return sorted(set(self.world.voters) - {self.leader()})

    def change(self, after: Iterable[ReplicaId]) -> None:
        """Appoint the same leader in a new epoch with other voters."""
        self.sets.append(frozenset(after))
        self.world.control.appoint(self.leader(), self.sets[-1])

    def voters(self) -> frozenset[ReplicaId]:
        """Return the leader's voters."""
        return self.nodes[self.leader()].core.voters

    def lose(self, replica: ReplicaId) -> None:
        """Remove a disk for good."""
        self.nodes[replica].stop_hard()
        disk_loss.wipe(self.nodes[replica])


def test_voter_that_never_heard_that_it_is_one_helps_to_elect() -> None:
    members = Members(learners=1)
    world, timeline = members.world, members.world.timeline
    fourth = ReplicaId(4)

    def leave() -> None:
        members.change({members.leader(), members.others()[1], fourth})

    def come_back_unheard() -> None:
        absent = members.others()[0]
        assert absent not in members.voters()
        for peer in set(members.nodes) - {absent}:
            world.network.cut((peer, absent))
        members.change({*world.voters, fourth})

    def fail() -> None:
        assert members.voters() == {*world.voters, fourth}
        leader = members.leader()
        members.lose(members.others()[1])
        members.nodes[leader].stop_hard()
        members.nodes[leader].start()

    timeline.after(3_000_000, leave)
    timeline.after(5_000_000, come_back_unheard)
    timeline.after(7_000_000, fail)
    world.run(SECONDS)
    assert len(members.sets) == 2
    assert not world.stranded


def test_voters_that_were_replaced_are_not_asked_after_a_power_cut() -> None:
    members = Members(learners=2)
    world, timeline = members.world, members.world.timeline
    replaced = list[ReplicaId]()

    def replace(by: int) -> None:
        replaced.append(members.others()[len(replaced)])
        members.change((members.voters() - {replaced[-1]}) | {ReplicaId(by)})

    def fail() -> None:
        assert members.voters() == {members.leader(), 4, 5}
        for replica in replaced:
            members.lose(replica)
        for node in world.nodes:
            node.stop_hard()
        for node in world.nodes:
            node.start()

    timeline.after(3_000_000, replace, 4)
    timeline.after(5_000_000, replace, 5)
    timeline.after(7_000_000, fail)
    world.run(SECONDS)
    assert len(replaced) == 2
    assert not world.stranded
