"""The referee can lose its patience: each planted bug is found, by a checker that is named."""

import random
from dataclasses import replace

import pytest

from chaos.sim.mutations import MUTATIONS, Mutation, hunt
from chaos.sim.options import Options
from chaos.sim.world import World

FIRST_SEED = 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_planted_bug_is_found(mutation: Mutation) -> None:
    found = hunt(mutation, FIRST_SEED)
    assert found is not None, f"not within {mutation.seeds} seeds: {mutation.breaks}"
    assert found.checker in mutation.checkers, found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_planted_bug_is_not_found_where_nothing_goes_wrong(mutation: Mutation) -> None:
    with mutation.plant():
        calm_world(3).run(5)


def calm_world(seed: int) -> World:
    options = Options.draw(random.Random(seed))
    return World(
        seed,
        options=replace(
            options, faults=("clock",), mischief=(), loss=0.0, duplicate=0.0, reorder=False
        ),
    )
