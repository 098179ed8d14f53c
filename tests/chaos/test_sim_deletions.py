"""Deleted topics in the simulator: worlds in which they come and go."""

import pytest

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import calm


@pytest.mark.parametrize("seed", [1, 4])
def test_topics_come_and_go_while_timers_are_pending_and_consumers_consume(seed: int) -> None:
    world = TimerWorld(seed, options=calm(seed).aim(deletions=True, proposals_per_s=16))
    world.run(30)
    book = world.town.book
    assert len(book.fates.story.deleted) > 3
    assert book.fates.gone
    assert book.delivered
