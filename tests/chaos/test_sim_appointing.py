"""The controller appoints the leaders of worlds."""

from chaos.sim.world.options import WorldOptions
from chaos.sim.world.sim_control import SimControl
from chaos.sim.world.world import World
from tests.chaos.planted.planted import calm
from timer.model.units import ReplicaId


def world_of(seed: int) -> tuple[World, SimControl]:
    options: WorldOptions = calm(seed).aim(nodes=3, proposals_per_s=16)
    world = World(seed, options=options.aim(delay_us=500, sync_us=1_000))
    return world, world.control


def leader_of(world: World) -> ReplicaId:
    (leader,) = [node for node in world.nodes if node.leading]
    return leader.replica


def test_controller_appoints_one_leader_where_nothing_goes_wrong() -> None:
    world, control = world_of(3)
    world.run(10)
    ((_, appoint, _),) = control.appointed
    assert leader_of(world) == appoint.leader
    assert len(world.referee.committed) >= 100


def test_killed_leader_is_replaced_within_two_seconds() -> None:
    world, control = world_of(3)

    def kill() -> None:
        (leader,) = [node for node in world.nodes if node.leading]
        leader.stop_hard()
        world.timeline.after(4_000_000, leader.start)

    world.timeline.after(5_000_000, kill)
    world.run(10)
    (_, first, _), (at_us, second, _) = control.appointed
    assert second.leader != first.leader
    assert at_us <= 7_000_000


def test_operator_moves_the_leadership_through_the_controller() -> None:
    world, control = world_of(3)
    asked: list[ReplicaId] = []

    def ask() -> None:
        asked.append(next(node.replica for node in world.nodes if not node.leading))
        control.transfer(asked[0])

    world.timeline.after(5_000_000, ask)
    world.run(10)
    _, (_, moved, reason) = control.appointed
    assert [moved.leader] == asked == [leader_of(world)]
    assert "a transfer was requested" in reason
