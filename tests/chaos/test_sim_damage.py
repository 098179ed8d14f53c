"""Damaged disks: the replica names the damage and heals; the others continue and lose nothing."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chaos.sim.play import Task, play
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world import disk_loss
from chaos.sim.world.options import DAMAGE_FAULTS, FAULTS, WorldOptions
from chaos.sim.world.referee import Broken
from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.simdisk import DAMAGED_PATH, LOG_PATH, PROMISE_PATH, STATE_PATH
from chaos.sim.world.world import World
from replication.core.core_events import Handover
from tests.chaos.planted.planted import calm
from timer.model.timer_errors import CorruptFileError, WrongDirectoryError
from timer.recovery import manifest

MANIFEST_PATH = STATE_PATH / manifest.NAME
STRIKE_US = 5_000_000
SECONDS = 10


def strike(world: World, do: Callable[[SimNode], None], *, leader: bool) -> SimNode:
    """Run `world`; after five seconds call `do` with a leader or a follower. Return the node."""
    chosen: list[SimNode] = []

    def hit() -> None:
        chosen.append(next(node for node in world.nodes if node.leading is leader))
        do(chosen[0])

    world.timeline.after(STRIKE_US, hit)
    world.run(SECONDS)
    return chosen[0]


def flip_and_restart(under: Path, position: int) -> Callable[[SimNode], None]:
    def do(node: SimNode) -> None:
        node.stop()
        names = node.disk.list_dir(under.parent) if not node.disk.exists(under) else []
        path = under if not names else under.parent / names[-1]
        node.disk.flip(path, min(position, node.disk.size(path) // 2))
        node.damage.append(path)
        node.start()

    return do


def healed(world: World, node: SimNode) -> bool:
    return (
        node.alive
        and node.snapshots > 0
        and not node.damage
        and not node.core.unsure
        and node.core.commit_index == len(world.referee.committed)
    )


def others_go_on(world: World, node: SimNode) -> bool:
    rest = [each for each in world.nodes if each is not node]
    return all(each.alive and each.core.commit_index > node.commit_seen for each in rest)


@pytest.mark.parametrize("leader", [True, False], ids=["of the leader", "of a follower"])
def test_flipped_bit_in_the_log_is_named_and_its_replica_fetches_everything_anew(
    leader: bool,
) -> None:
    world = World(3, options=calm(3))
    first = LOG_PATH / "0000000000000001.log"
    node = strike(world, flip_and_restart(first, 100), leader=leader)
    assert isinstance(node.healed[0], CorruptFileError)
    assert re.match(rf"{first}: corrupt at byte \d+: ", str(node.healed[0]))
    assert healed(world, node)


@pytest.mark.parametrize("name", ["manifest", "runs/*"])
def test_flipped_bit_in_the_state_is_healed_and_no_timer_is_lost(name: str) -> None:
    world = TimerWorld(3, options=calm(3).aim(manifest_every=20, nodes=3, proposals_per_s=15))

    def do(node: SimNode) -> None:
        flip_and_restart(STATE_PATH / name, 1 << 20)(node)

    node = strike(world, do, leader=False)
    assert str(STATE_PATH / name.removesuffix("*")) in str(node.healed[0])
    assert healed(world, node)
    assert len(world.town.book.delivered) > 20


def test_replica_heals_though_its_note_of_the_damage_is_damaged() -> None:
    world = World(3, options=calm(3))

    def do(node: SimNode) -> None:
        flip_and_restart(LOG_PATH / "0000000000000001.log", 100)(node)
        node.stop()
        node.disk.write_atomic(DAMAGED_PATH, b"\xf2 is no text")
        node.damage.append(DAMAGED_PATH)
        node.start()  # before anything was fetched

    node = strike(world, do, leader=False)
    assert "\ufffd" in str(node.healed[-1])
    assert healed(world, node)


def test_lost_promise_is_nothing_that_others_have_and_its_replica_stays_down() -> None:
    world = World(3, options=calm(3))
    node = strike(world, flip_and_restart(PROMISE_PATH, 20), leader=False)
    assert str(node.refused) == f"{PROMISE_PATH}: corrupt at byte 0: damaged promise"
    assert others_go_on(world, node)


def test_replica_heals_through_power_cuts_lost_messages_and_other_leaders() -> None:
    world = World(3, options=calm(3).aim(manifest_every=20, loss=0.1, proposals_per_s=8))
    node = world.nodes[0]

    def hit() -> None:
        flip_and_restart(MANIFEST_PATH, 30)(node)
        for number in range(1, 30):
            world.timeline.after(number * 60_000, node.stop_hard)
            world.timeline.after(number * 60_000 + 20_000, node.start)
            other = world.nodes[1 + number % 2]
            world.timeline.after(number * 150_000, other.call, other.handle, Handover())

    world.timeline.after(STRIKE_US, hit)
    world.run(SECONDS)
    assert healed(world, node)


def test_wiped_disk_does_not_come_back_as_the_voter_that_it_was() -> None:
    world = World(3, options=calm(3))

    def do(node: SimNode) -> None:
        node.stop_hard()
        disk_loss.wipe(node)
        node.start()

    node = strike(world, do, leader=True)
    assert isinstance(node.refused, WrongDirectoryError)
    assert "A new node needs `timerd init` first" in str(node.refused)
    assert others_go_on(world, node)


def test_full_disk_stops_the_process_and_it_goes_on_when_there_is_room() -> None:
    world = World(3, options=calm(3))
    fills = list[int]()

    def do(node: SimNode) -> None:
        node.disk.capacity_bytes = node.disk.used_bytes()
        node.world.timeline.after(2_000_000, room, node)

    def room(node: SimNode) -> None:
        fills.append(node.core.commit_index)
        assert not node.alive or node.core.commit_index < len(world.referee.committed)
        node.disk.capacity_bytes = None

    node = strike(world, do, leader=True)
    assert fills
    assert node.core.commit_index == len(world.referee.committed) > fills[0]


def test_damaged_replica_with_a_full_disk_heals_when_there_is_room() -> None:
    world = World(3, options=calm(3))

    def do(node: SimNode) -> None:
        node.disk.capacity_bytes = node.disk.used_bytes()
        node.world.timeline.after(2_000_000, room, node)
        flip_and_restart(LOG_PATH / "0000000000000001.log", 100)(node)
        assert not node.alive

    def room(node: SimNode) -> None:
        assert not node.healed
        node.disk.capacity_bytes = None

    assert healed(world, strike(world, do, leader=False))


def test_damage_never_takes_a_majority() -> None:
    for nodes, most in ((3, 1), (5, 2)):
        world = World(1, options=calm(1).aim(nodes=nodes))
        world.run(1)
        for node in world.nodes:
            if disk_loss.may_damage(world, node):
                disk_loss.wipe(node)
        assert len([node for node in world.nodes if node.damage]) == most
        assert disk_loss.may_damage(
            world, next(node for node in world.nodes if node.damage)
        )  # the same one, once more


def test_undamaged_replica_that_refuses_breaks_a_promise() -> None:
    world = World(3, options=calm(3))

    def do(node: SimNode) -> None:
        node.stop()
        node.disk.write_atomic(MANIFEST_PATH, b"nonsense")
        node.start()

    with pytest.raises(Broken, match=r"storage: node \d: /state/manifest: corrupt"):
        strike(world, do, leader=False)


def test_damaged_replica_that_blames_another_file_breaks_a_promise() -> None:
    world = World(3, options=calm(3))
    node = world.nodes[0]
    node.damage.append(LOG_PATH / "0000000000000001.log")
    with pytest.raises(Broken, match="storage"):
        disk_loss.check_refusal(node, CorruptFileError(MANIFEST_PATH, 0, "checksum mismatch"))


def test_world_with_too_few_sure_replicas_waits_for_repair() -> None:
    world = World(3, options=calm(3).aim(nodes=3))
    world.run(3)
    assert not disk_loss.waits_for_repair(world)
    disk_loss.wipe(world.nodes[0])
    assert not disk_loss.waits_for_repair(world)
    world.nodes[1].core.unsure = True
    assert disk_loss.waits_for_repair(world)


def test_damage_is_part_of_some_worlds_and_not_of_others() -> None:
    worlds = [set(WorldOptions.draw(random.Random(seed)).faults) for seed in range(100)]
    assert set().union(*worlds) == set(FAULTS)
    assert 30 < sum(not world.intersection(DAMAGE_FAULTS) for world in worlds) < 70


@pytest.mark.parametrize("app", ["ledger", "timers"])
@pytest.mark.parametrize("faults", [("flip", "kill"), ("shorten",), ("wipe", "isolate")])
def test_promises_hold_beside_damage(app: str, faults: Sequence[str]) -> None:
    outcome = play(Task(2, app, 12, faults=tuple(faults), mischief=()))
    assert outcome.exit_status == 0, outcome.story
    assert outcome.faults.keys() & set(DAMAGE_FAULTS)
