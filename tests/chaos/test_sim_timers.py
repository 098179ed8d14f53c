"""Whole timer clusters in the simulator: the promises hold, and planted bugs are found."""

import random
from dataclasses import replace

import pytest

from chaos.sim.mutations import Mutation, hunt
from chaos.sim.options import Options
from chaos.sim.timer_mutations import TIMER_MUTATIONS
from chaos.sim.timers import TimerWorld


@pytest.mark.parametrize("seed", range(12))
def test_timer_promises_hold(seed: int) -> None:
    world = TimerWorld(seed)
    world.run(60)
    book = world.town.book
    assert book.timers
    assert book.deliveries >= len(book.fired)
    assert book.digests


def test_same_seed_gives_the_same_history() -> None:
    one, other = TimerWorld(7), TimerWorld(7)
    one.run(20)
    other.run(20)
    assert one.town.book == other.town.book
    assert one.timeline.events == other.timeline.events


@pytest.mark.parametrize("mutation", TIMER_MUTATIONS, ids=lambda mutation: mutation.name)
def test_planted_bug_is_found(mutation: Mutation) -> None:
    found = hunt(mutation, 1, make_world=TimerWorld)
    assert found is not None, f"not within {mutation.seeds} seeds: {mutation.breaks}"
    assert found.checker in mutation.checkers, found


def test_nothing_is_found_where_nothing_is_planted() -> None:
    options = Options.draw(random.Random(3))
    quiet = replace(options, faults=("clock",), mischief=(), loss=0.0, duplicate=0.0)
    TimerWorld(3, options=quiet).run(10)
