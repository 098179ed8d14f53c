"""A timer that fires late without a fault breaks a promise; with a fault it does not."""

from unittest import mock

import pytest

from chaos.sim.checks import latebook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.options import NEVER
from chaos.sim.world.referee import Broken
from chaos.sim.world.sim_node import SimNode
from tests.chaos.planted.planted import calm

PAUSED_US = 6_000_000


def world_of(seed: int) -> TimerWorld:
    options = calm(seed).aim(nodes=3, proposals_per_s=16, manifest_every=NEVER, sync_us=1_000)
    return TimerWorld(seed, options=options.aim(delay_us=500, crowds=False))


def pause_the_leader(world: TimerWorld) -> None:
    """Pause the leader before a timer is due, for less than its lease, so that it still leads."""
    leader = next(node for node in world.nodes if node.leading)
    app = next(app for app in world.town.apps() if app.node is leader)
    due_ms = app.engine.machine.store.next_due()
    if due_ms is None or not 20 <= due_ms - app.clock_ms() <= 200:
        world.timeline.after(10_000, pause_the_leader, world)
        return
    leader.pause()
    world.timeline.after(350_000, leader.resume)


def the_leader(world: TimerWorld) -> SimNode | None:
    return next((node for node in world.nodes if node.leading), None)


def test_timers_of_a_calm_world_are_judged_and_none_is_late() -> None:
    world = world_of(3)
    world.run(10)
    late = world.town.book.late
    assert late.judged >= 40
    assert late.worst_ms <= 50


def test_pause_of_the_leader_excuses_what_it_makes_late() -> None:
    world = world_of(3)
    world.timeline.after(PAUSED_US, pause_the_leader, world)
    with mock.patch.object(latebook, "LATE_MS", 100):
        world.run(10)


def test_what_a_pause_makes_late_would_be_found_without_that_excuse() -> None:
    world = world_of(3)
    world.timeline.after(PAUSED_US, pause_the_leader, world)
    with (
        mock.patch.object(latebook, "LATE_MS", 100),
        mock.patch.object(latebook, "steady_leader", the_leader),
        pytest.raises(Broken, match="late: "),
    ):
        world.run(10)


def test_clocks_that_are_set_forward_together_take_the_clusters_along_and_make_nothing_late() -> (
    None
):
    world = world_of(3)

    def set_clocks() -> None:
        for node in world.nodes:
            node.set_clock(jump_ms=3_600_000)

    world.timeline.after(PAUSED_US, set_clocks)
    world.run(10)
    ahead_ms = [app.clock_ms() - app.node.wall_ms() for app in world.town.apps()]
    assert min(ahead_ms) > 3_500_000, "the end of the run has set the clocks right"


def test_world_is_not_steady_before_the_application_of_its_leader_leads() -> None:
    world = world_of(3)
    world.run(10)
    leader = the_leader(world)
    assert leader is not None
    late, now_us = world.town.book.late, world.timeline.now_us
    late.observe(world)
    assert late.steady_us <= now_us
    leader.app.on_stepdown(leader.core.epoch)  # the protocol's core still leads
    late.observe(world)
    assert late.steady_us > now_us
