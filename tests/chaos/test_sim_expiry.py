"""Time to live and retention in the simulator: worlds that have them."""

import pytest

from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import calm
from tests.seeds import seeds


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_messages_expire_and_are_retained_while_policies_change(seed: int) -> None:
    world = TimerWorld(seed, options=calm(seed).aim(expiry=True, proposals_per_s=8))
    world.run(30)
    book = world.town.book.fates
    assert min(len(book.over), book.retained) > 3
    assert len(book.done) > 10
