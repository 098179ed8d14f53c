"""Calls of one timer each share requests, and each caller gets the outcome of its own timer."""

import asyncio
from collections.abc import Sequence

import pytest

from timerclient.streams.shared_calls import SharedCalls
from timerclient.values.errors import InvalidRequest, OutcomeUnknown, TimerError, Unreachable

Row = tuple[str, int]


class Server:
    """Receives requests; the test answers them."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, asyncio.Future[None], float]] = []
        self.left: set[str] = set()
        """Timers that the next answer leaves unchanged."""
        self.shared = SharedCalls()

    async def send(self, rows: Sequence[Row], within_s: float) -> list[str | None]:
        answer = asyncio.get_running_loop().create_future()
        self.requests.append(("".join(timer for timer, _ in rows), answer, within_s))
        await answer
        left, self.left = self.left, set()
        return [None if timer in left else f"{timer}{ms}" for timer, ms in rows]

    def call(self, timer: str, ms: int = 1, within_s: float = 60) -> asyncio.Task[str]:
        row = timer, ms
        call = self.shared.call("line", timer, row, self.send, rows_max=3, within_s=within_s)
        return asyncio.create_task(call)

    def answer(self, at: int, error: TimerError | None = None) -> None:
        _, answer, _ = self.requests[at]
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    @property
    def sent(self) -> list[str]:
        return [timers for timers, _, _ in self.requests]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def busy(*names: str) -> tuple[Server, list[asyncio.Task[str]]]:
    """Return a server with the requests a and b on their way, and calls that wait."""
    server = Server()
    calls = [server.call(name) for name in ("a", "b", *names)]
    await turns()
    assert server.sent == ["a", "b"]
    return server, calls


async def test_calls_gather_while_two_requests_are_on_their_way() -> None:
    server, calls = await busy(*"cdefg")
    server.answer(0)
    await turns()
    assert server.sent[2:] == ["cde"]
    server.answer(2)
    server.answer(1)
    await turns()
    assert server.sent[3:] == ["fg"]
    server.answer(3)
    assert await asyncio.gather(*calls) == [f"{name}1" for name in "abcdefg"]
    await turns()
    assert not server.shared._lines


async def test_timer_that_is_named_twice_is_in_two_requests() -> None:
    server, calls = await busy("c")
    calls += [server.call("c", 2), server.call("d")]
    await turns()
    server.answer(0)
    await turns()
    assert server.sent[2:] == ["cd"]
    server.answer(1)
    await turns()
    assert server.sent[3:] == ["c"]
    server.answer(2)
    server.answer(3)
    assert await asyncio.gather(*calls) == ["a1", "b1", "c1", "c2", "d1"]


@pytest.mark.parametrize(
    ("field", "parts"), [("delay_ms[1]", ["d", "ce"]), ("delay_ms[3]", ["c", "de"])]
)
async def test_invalid_row_fails_its_own_call_alone(field: str, parts: list[str]) -> None:
    server, calls = await busy(*"cde")
    server.answer(0)
    await turns()
    server.answer(2, InvalidRequest.of(field, 9, "must be at most 8"))
    await turns()
    assert server.sent[3:] == parts[:1]  # two requests of a line are on their way, at most
    wrong = InvalidRequest.of("delay_ms", 9, "must be at most 8")
    server.answer(3, wrong)
    await turns()
    assert server.sent[4:] == parts[1:]
    server.answer(4)
    server.answer(1)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = [str(each) for each in outcomes if isinstance(each, InvalidRequest)]
    assert failed == [str(wrong)]
    assert len([each for each in outcomes if isinstance(each, str)]) == 4


async def test_request_of_unknown_outcome_is_not_sent_again() -> None:
    server, calls = await busy("c", "d")
    server.answer(0)
    server.answer(1)
    await turns()
    server.answer(2, OutcomeUnknown("no answer"))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in outcomes] == [str, str, OutcomeUnknown, OutcomeUnknown]
    assert outcomes[2] is not outcomes[3]  # a traceback grows each time that an error is raised
    assert len(server.requests) == 3


async def test_timer_that_was_left_unchanged_is_sent_again_and_the_others_have_outcomes() -> None:
    server, calls = await busy(*"cdef")
    server.answer(0)
    await turns()
    server.left = {"d"}
    server.answer(2)
    await turns()
    assert [call.done() for call in calls[2:5]] == [True, False, True]
    assert server.sent[3:] == ["df"]
    server.answer(1)
    server.answer(3)
    assert await asyncio.gather(*calls) == [f"{name}1" for name in "abcdef"]


async def test_each_call_fails_at_its_own_end() -> None:
    server, calls = await busy()
    calls += [server.call("c", within_s=0.5), server.call("d")]
    third = server.call("e", within_s=0.5)
    await turns()
    server.answer(0)
    await turns()
    assert server.sent[2:] == ["cde"]
    assert server.requests[2][2] > 50  # the time of the call that may take longest
    for late in (calls[2], third):
        with pytest.raises(OutcomeUnknown, match=r"within 0\.5 s"):
            await late
    waiting = server.call("f", within_s=0.5)
    with pytest.raises(Unreachable, match=r"within 0\.5 s"):
        await waiting
    server.answer(2)
    assert await calls[3] == "d1"
    server.answer(1)
    await turns()
    assert server.sent == ["a", "b", "cde"]


async def test_call_of_an_invalid_request_that_ends_before_it_is_sent_again_had_no_effect() -> None:
    server, calls = await busy()
    calls += [server.call("c", within_s=0.5), server.call("d", within_s=0.5)]
    await turns()
    server.answer(0)
    await turns()
    assert server.sent[2:] == ["cd"]
    server.answer(2, InvalidRequest.of("delay_ms[0]", 9, "must be at most 8"))
    await turns()
    assert server.sent[3:] == ["c"]
    with pytest.raises(OutcomeUnknown):
        await calls[2]
    with pytest.raises(Unreachable):
        await calls[3]
    server.answer(1)
    server.answer(3)
    await turns()
    assert server.sent == ["a", "b", "cd", "c"]


async def test_call_whose_caller_was_cancelled_is_not_sent() -> None:
    server, calls = await busy("c", "d")
    calls[2].cancel()
    await turns()
    for at in (0, 1):
        server.answer(at)
    await turns()
    assert server.sent == ["a", "b", "d"]
    server.answer(2)
    assert await calls[3] == "d1"
    await turns()
    assert not server.shared._lines
