"""Request ids in the simulator: the model agrees with production code, and finds differences."""

from dataclasses import replace

import pytest

from chaos.sim.checks.requestbook import RequestBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.options import WorldOptions
from chaos.sim.world.referee import Broken
from tests.chaos.planted.planted import calm
from tests.timer.machines import START_MS, Log, part_of
from timer.model.columns import RequestId
from timer.model.timer_errors import EngineError, InvalidRequestError
from timer.model.units import Seq, UnixMs
from timer.state.apply_results import Accepted, Repeated, ScheduleApplied
from timer.state.producers import RequestAnswer


def of_requests(seed: int) -> WorldOptions:
    return calm(seed).aim(requests=True, proposals_per_s=8)


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.long)])
def test_ids_are_repeated_forgotten_and_refused(seed: int) -> None:
    world = TimerWorld(seed, options=of_requests(seed))
    world.run(12)
    book = world.town.book
    assert book.requests.repeated > 10
    assert book.requests.refused > 0
    assert book.repeatable
    assert any(len(rows) > 1 for rows in book.whole)


FRESH, REPEATED = False, True


@pytest.mark.parametrize(
    ("at_ms", "body", "result", "fits"),
    [
        (100, 1, (7, REPEATED), True),
        (100, 1, (8, REPEATED), False),
        (100, 1, (9, FRESH), False),
        (100, 2, InvalidRequestError("request_id", "r", "another's"), True),
        (100, 2, (7, REPEATED), False),
        (100, 2, (9, FRESH), False),
        (101, 1, (9, FRESH), True),
        (101, 2, (9, FRESH), True),
        (101, 1, (7, REPEATED), False),
    ],
)
def test_book_knows_what_an_id_stands_for(
    at_ms: int, body: int, result: tuple[int, bool] | EngineError, fits: bool
) -> None:
    log, book = Log(), RequestBook()

    def check(body: int, result: tuple[int, bool] | EngineError) -> None:
        request = RequestId(b"r", body, UnixMs(START_MS + 100))
        made = part_of([(1, START_MS, b"x")])
        entry = log.schedule(replace(made, request=request))
        if not isinstance(result, EngineError):
            answer = RequestAnswer(0, Seq(result[0]), made.due_ms)
            applied = Repeated(answer) if result[1] else Accepted(answer)
            book.check(entry, ScheduleApplied((applied,), ()))
        else:
            book.check(entry, ScheduleApplied((result,), ()))

    check(1, (7, FRESH))
    log.now_ms += at_ms
    if fits:
        check(body, result)
    else:
        with pytest.raises(Broken, match="request"):
            check(body, result)
    with pytest.raises(Broken, match="request"):
        book.refusal(b"s", 1)
