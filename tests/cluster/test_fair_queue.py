"""While timers fire late, requests take turns, and few are worked on at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.api.public_services import services_of
from cluster.rpc import fair_queue
from cluster.rpc.caller_turns import CallerTurns
from cluster.rpc.fair_queue import LATE_S, WAITING_MAX, WINDOW_MAX, WINDOW_MIN, FairQueue, weight_of
from cluster.rpc.handlers import Service, ServiceHooks, unary_handler
from cluster.settings.config import NodeConfig
from tests.cluster.hosted import Hosted
from tests.waiting import settled
from timer.model.timer_errors import OverloadedError
from timerclient.proto import timer_pb2 as pb


class Clock:
    """Seconds, as a test sets them."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Play:
    """A queue, and the requests that were let in, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fair_queue, "weight_of", lambda weight: weight)
        self.clock = Clock()
        self.queue = FairQueue(self.clock)
        self.entered: list[tuple[str, int]] = []
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.stack = contextlib.ExitStack()
        for consumer in ("first", "second"):
            self.stack.enter_context(self.queue.present(consumer))

    async def send(self, caller: str, *weights: int) -> None:
        """Send requests; return when each has entered or waits."""
        for weight in weights:

            async def enter(caller: str = caller, weight: Any = weight) -> None:
                await self.queue.enter(caller, weight)
                self.entered.append((caller, weight))

            self.tasks[caller, weight] = asyncio.create_task(enter())
        await settled()

    async def leave(self, *weights: int) -> None:
        """End the work on requests."""
        for weight in weights:
            caller = next(caller for caller, each in self.entered if each == weight)
            self.queue.leave(caller, weight)
            await settled()

    def narrow(self) -> None:
        """Let a FIRE be late."""
        self.queue.on_fired(LATE_S + 0.001)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(monkeypatch)


async def test_without_a_late_fire_no_request_waits(play: Play) -> None:
    play.queue.on_fired(LATE_S)
    await play.send("a", *range(WINDOW_MAX, WINDOW_MAX + 50))
    assert len(play.entered) == 50
    assert play.queue.n_waiting == 0


async def test_a_lone_caller_is_not_slowed_for_its_own_timers(play: Play) -> None:
    play.stack.close()
    await play.send("a", 4_000, 4_001)
    play.narrow()
    assert play.queue.window == WINDOW_MAX
    with play.queue.present("a"):
        play.narrow()
        assert play.queue.window == WINDOW_MAX
    with play.queue.present("b"):
        play.narrow()
    assert play.queue.window == 8_001 / 2
    await play.leave(4_000, 4_001)
    play.clock.now_s += 9
    await play.send("a", 4_000)
    play.narrow()
    assert play.queue.window == WINDOW_MAX, "who has left counts no more"


async def test_each_late_fire_halves_the_window_however_long_it_takes(play: Play) -> None:
    await play.send("a", *range(4_000, 4_016))
    windows = []
    for _ in range(4):
        play.clock.now_s += 2.0
        play.queue.on_fired(2.0)
        windows.append(play.queue.window)
    total = sum(range(4_000, 4_016))
    assert windows == [total / 2, total / 4, total / 8, total / 16]


async def test_a_late_fire_halves_the_work_and_each_second_doubles_it(play: Play) -> None:
    await play.send("a", 4_000, 4_001)
    play.narrow()
    await play.leave(4_000)
    assert play.queue.window == 8_001 / 2
    await play.send("a", 100)
    assert play.entered[2:] == []
    play.clock.now_s += 1.0
    play.queue.on_fired(0.001)
    await settled()
    assert play.entered[2:] == [("a", 100)]
    play.clock.now_s += 5.0
    await play.send("a", WINDOW_MAX)
    assert play.entered[3:] == [("a", WINDOW_MAX)]


async def test_a_window_at_its_minimum_still_takes_small_requests_and_one_large_one(
    play: Play,
) -> None:
    for _ in range(20):
        play.narrow()
    assert play.queue.window == WINDOW_MIN
    await play.send("a", *range(1, 40), 5_000, 5_001)
    assert play.entered == [("a", weight) for weight in range(1, 40)]
    await play.leave(*range(1, 40))
    assert play.entered[39:] == [("a", 5_000)]
    await play.leave(5_000)
    assert play.entered[40:] == [("a", 5_001)]


async def test_callers_take_turns_by_weight_however_much_one_has_sent(play: Play) -> None:
    play.narrow()
    await play.send("busy", 1_000, 1_001, 1_002, 1_003)
    await play.send("rare", 300, 301, 302, 303, 304)
    await play.leave(1_000)
    assert play.entered[1:] == [("busy", 1_001)]  # it came first, when both had had nothing
    await play.leave(1_001)
    assert play.entered[2:] == [("rare", 300), ("rare", 301), ("rare", 302)]
    await play.leave(300, 301, 302)
    assert play.entered[5:] == [("busy", 1_002)] or play.entered[5:] == [("rare", 303)]
    await play.send("new", 7)
    while play.queue.n_waiting:
        await play.leave(play.entered[-1][1])
    assert play.entered.index(("new", 7)) < play.entered.index(("busy", 1_003))


async def test_requests_of_one_caller_keep_their_order(play: Play) -> None:
    play.narrow()
    weights = [900, 30, 800, 20, 1_000, 10]
    await play.send("a", *weights)
    for at in range(len(weights)):
        if len(play.entered) > at:
            await play.leave(weights[at])
    assert [weight for _, weight in play.entered] == weights


async def test_a_request_whose_client_has_gone_takes_no_room(play: Play) -> None:
    play.narrow()
    await play.send("a", 1_000, 1_001, 1_002, 1_003)
    play.tasks["a", 1_001].cancel()
    await settled()
    await play.leave(1_000)
    assert play.entered[1:] == [("a", 1_002)]
    play.queue.leave("a", 1_002)  # lets the next one in,
    play.tasks["a", 1_003].cancel()  # which goes before it can begin
    await settled()
    await play.send("a", WINDOW_MIN)
    assert play.entered[2:] == [("a", WINDOW_MIN)]


async def test_requests_that_are_cancelled_while_they_wait_count_for_nothing() -> None:
    turns, served = CallerTurns(1), list[str]()

    async def request(caller: str) -> None:
        async with turns.turn(caller):
            served.append(caller)
            raise ConnectionError

    def send(caller: str, count: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(request(caller)) for _ in range(count)]

    async with turns.turn("first"):
        hasty, calm = send("hasty", 10), send("calm", 3)
        await settled()
        for each in hasty:
            each.cancel()
        await settled()
        assert turns.n_waiting == 3
        calm += send("hasty", 3)
        await settled()
    async with asyncio.timeout(30):
        await asyncio.gather(*hasty, *calm, return_exceptions=True)
    assert served == ["calm", "hasty"] * 3, "a request that fails ends its turn, too"
    assert turns._waiting_weight == 0


async def test_a_caller_that_comes_later_gets_no_more_turns_than_others() -> None:
    turns, served, step = CallerTurns(1), list[str](), asyncio.Semaphore(0)

    async def request(caller: str) -> None:
        async with turns.turn(caller):
            served.append(caller)
            await step.acquire()

    tasks = [asyncio.create_task(request("old")) for _ in range(8)]
    await settled()
    for _ in range(4):
        step.release()
        await settled()
    tasks += [asyncio.create_task(request("new")) for _ in range(3)]
    await settled()
    for _ in tasks:
        step.release()
        await settled()
    await asyncio.gather(*tasks)
    assert served[:5] == ["old"] * 5
    assert served[5:9].count("new") == 2, served
    assert turns._line == []
    assert turns._queues == {}, "who has left takes no memory"


async def test_the_queue_has_a_bound_and_takes_the_first_request_of_each_caller(
    play: Play,
) -> None:
    play.narrow()
    await play.send("a", 1_000, WAITING_MAX)
    with pytest.raises(OverloadedError, match="the queue of requests is full"):
        await play.queue.enter("a", 1)
    await play.send("b", 2)
    assert play.queue.n_waiting == 2
    play.tasks["b", 2].cancel()
    await settled()
    await play.send("b", 3)  # none of its requests waits
    assert play.queue.n_waiting == 2


def test_a_weight_counts_the_timers_of_a_request_and_the_bytes() -> None:
    row = pb.TimerColumns(payload_sizes=[100] * 1_000, payloads=bytes(100_000), delay_ms=[1])
    assert weight_of(pb.ScheduleRequest(timers=[row])) == pytest.approx(800, abs=50)
    assert weight_of(pb.CancelRequest(timer_ids=bytes(16_000))) == pytest.approx(1_141, abs=10)
    assert weight_of(pb.GetTimerRequest()) == 16


class Calls(Service):
    """A service whose handlers end when a test lets them."""

    def __init__(self, queue: FairQueue) -> None:
        super().__init__(ServiceHooks(queue=queue))
        self.begun: list[str] = []
        self.end = asyncio.Event()

    async def _work(self, name: str) -> str:
        self.begun.append(name)
        await self.end.wait()
        raise OverloadedError("a test", retry_after_ms=1)

    @unary_handler
    async def Cancel(self, request: Any, context: Any) -> str:  # noqa: N802
        return await self._work("Cancel")

    @unary_handler
    async def Ack(self, request: Any, context: Any) -> str:  # noqa: N802
        return await self._work("Ack")

    @unary_handler
    async def GetStatus(self, request: Any, context: Any) -> str:  # noqa: N802
        return await self._work("GetStatus")


class Aborted:
    """The context of a call."""

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1000"

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        raise ConnectionAbortedError(f"{code.name} {details}")


async def test_requests_of_timers_wait_and_those_of_consumers_and_operators_do_not() -> None:
    queue, context = FairQueue(), Aborted()
    with queue.present("b"), queue.present("c"):
        queue.on_fired(LATE_S + 0.001)
    service, request = Calls(queue), pb.CancelRequest(timer_ids=bytes(16 * WINDOW_MIN))
    calls: list[Any] = [service.Cancel, service.Cancel, service.Ack, service.GetStatus]
    tasks = [asyncio.create_task(call(request, context)) for call in calls]
    await settled()
    assert service.begun == ["Cancel", "Ack", "GetStatus"]
    service.end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert service.begun[3:] == ["Cancel"]
    await queue.enter("a", request)
    assert queue.n_waiting == 0, "an error keeps its request's place"


async def test_requests_of_a_stream_wait_until_earlier_ones_are_committed() -> None:
    host: Any = Hosted()
    host.holds = True
    queue, context = FairQueue(), Aborted()
    with queue.present("b"), queue.present("c"):
        queue.on_fired(LATE_S + 0.001)
    config = NodeConfig(name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"})
    services = services_of(host, host, host, config, hooks=ServiceHooks(queue=queue))
    timers = pb.TimerColumns(topic="t", payload_sizes=[0] * 20_000, delay_ms=[1_000])
    taken: list[int] = []

    async def requests() -> AsyncIterator[pb.ScheduleRequest]:
        for number in range(3):
            taken.append(number)
            yield pb.ScheduleRequest(request_no=number, timers=[timers])

    schedule: Any = services.timers.ScheduleStream
    answers: Any = schedule(requests(), context)
    first = asyncio.ensure_future(anext(answers))
    await settled()
    assert (taken, queue.n_waiting) == ([0, 1], 1)
    with queue.present("b"):
        queue.on_fired(LATE_S + 0.001)
    assert queue.window < WINDOW_MAX, "a stream is present"
    host.holds = False
    host.kick()
    assert [(await first).request_no] + [each.request_no async for each in answers] == [0, 1, 2]
    await settled()
    await queue.enter("a", pb.CancelRequest(timer_ids=bytes(16 * WINDOW_MAX)))
    assert queue.n_waiting == 0, "an answered request keeps its place"
