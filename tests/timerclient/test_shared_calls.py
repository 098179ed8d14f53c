"""Calls of one timer each share requests, and each caller gets the outcome of its own timer."""

import asyncio
from collections.abc import Sequence

import pytest

from timerclient.streams.shared_calls import SharedCalls
from timerclient.values.errors import InvalidRequest, OutcomeUnknown, TimerError, Unreachable


class Server:
    """Receives requests; the test answers them."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[str], asyncio.Future[None], float]] = []
        self.shared = SharedCalls()

    async def send(self, targets: Sequence[str], within_s: float) -> list[str]:
        answer = asyncio.get_running_loop().create_future()
        self.requests.append(([*targets], answer, within_s))
        await answer
        return [f"{target} done" for target in targets]

    def call(self, target: str, within_s: float = 60, most: int = 100) -> asyncio.Task[str]:
        return asyncio.create_task(self.shared.call("line", target, self.send, most, within_s))

    def answer(self, at: int, error: TimerError | None = None) -> None:
        _, answer, _ = self.requests[at]
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    @property
    def targets(self) -> list[list[str]]:
        return [targets for targets, _, _ in self.requests]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_calls_gather_while_two_requests_are_on_their_way() -> None:
    server = Server()
    calls = [server.call(name, most=3) for name in "abcdefg"]
    await turns()
    assert server.targets == [["a"], ["b"]]
    server.answer(0)
    await turns()
    assert server.targets[2:] == [["c", "d", "e"]]
    server.answer(2)
    server.answer(1)
    await turns()
    assert server.targets[3:] == [["f", "g"]]
    server.answer(3)
    assert await asyncio.gather(*calls) == [f"{name} done" for name in "abcdefg"]
    assert not server.shared._lines


async def test_timer_that_is_named_twice_is_in_two_requests() -> None:
    server = Server()
    calls = [server.call(name) for name in "abccd"]
    await turns()
    server.answer(0)
    await turns()
    assert server.targets[2:] == [["c", "d"]]
    server.answer(1)
    await turns()
    assert server.targets[3:] == [["c"]]
    server.answer(2)
    server.answer(3)
    assert len(await asyncio.gather(*calls)) == 5


async def test_invalid_timer_fails_its_own_call_alone() -> None:
    server = Server()
    calls = [server.call(name) for name in "abcd"]
    await turns()
    server.answer(0)
    await turns()
    server.answer(2, InvalidRequest.of("delay_ms[1]", 9, "must be at most 8"))
    await turns()
    assert server.targets[3:] == [["c"], ["d"]]
    server.answer(3)
    server.answer(4, InvalidRequest.of("delay_ms", 9, "must be at most 8"))
    server.answer(1)
    assert await calls[2] == "c done"
    with pytest.raises(InvalidRequest, match="delay_ms = 9"):
        await calls[3]


async def test_request_of_unknown_outcome_is_not_sent_again() -> None:
    server = Server()
    calls = [server.call(name) for name in "abcd"]
    await turns()
    server.answer(0)
    server.answer(1)
    await turns()
    server.answer(2, OutcomeUnknown("no answer"))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in outcomes] == [str, str, OutcomeUnknown, OutcomeUnknown]
    assert outcomes[2] is not outcomes[3]  # a traceback grows each time that an error is raised
    assert len(server.requests) == 3


async def test_call_with_time_left_is_sent_again_if_its_request_was_not_applied() -> None:
    server = Server()
    calls = [server.call(name) for name in "ab"]
    await turns()
    calls += [server.call("c", within_s=0.001), server.call("d")]
    server.answer(0)
    await turns()
    assert server.targets[2:] == [["c", "d"]]
    assert server.requests[2][2] <= 0.001  # the time of the oldest call
    began_s = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() <= began_s + 0.001:
        await turns()
    server.answer(2, Unreachable("no leader"))
    await turns()
    assert server.targets[3:] == [["d"]]
    server.answer(1)
    server.answer(3)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in outcomes] == [str, str, Unreachable, str]


async def test_call_whose_caller_was_cancelled_is_not_sent() -> None:
    server = Server()
    calls = [server.call(name) for name in "abcd"]
    await turns()
    calls[2].cancel()
    await turns()
    for at in (0, 1):
        server.answer(at)
    await turns()
    assert server.targets == [["a"], ["b"], ["d"]]
    server.answer(2)
    assert await calls[3] == "d done"
    assert not server.shared._lines
