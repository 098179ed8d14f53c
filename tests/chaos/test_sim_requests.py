"""Request ids in the simulator: the model agrees with production code, and finds differences."""

from dataclasses import replace

import pytest

from chaos.sim.checks.book import PromiseBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.options import WorldOptions
from chaos.sim.world.referee import Broken
from tests.chaos.planted.planted import calm
from tests.timer.machines import START_MS, Log, part_of
from timer.model.columns import RequestId
from timer.model.units import UnixMs


def of_requests(seed: int) -> WorldOptions:
    return calm(seed).aim(requests=True, proposals_per_s=8)


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.long)])
def test_ids_are_repeated_forgotten_and_refused(seed: int) -> None:
    world = TimerWorld(seed, options=of_requests(seed))
    world.run(12)
    book = world.town.book
    assert book.refused > 0
    assert book.repeatable
    assert any(len(rows) > 1 for rows in book.whole)


def test_refusal_needs_another_request_under_the_id() -> None:
    log, book = Log(), PromiseBook()
    made = part_of([(1, START_MS, b"x")])
    book.fates.on_commit(log.topic("t"))
    request = RequestId(b"r", 1, UnixMs(START_MS + 100))
    book.fates.on_commit(log.schedule(replace(made, request=request)))
    book.refusal(b"r", 2)
    for text, body in ((b"r", 1), (b"s", 1)):
        with pytest.raises(Broken, match="request"):
            book.refusal(text, body)
