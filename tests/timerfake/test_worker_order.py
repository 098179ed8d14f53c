"""Handlers of ordered groups: one call at a time for each key, and messages that wait for it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from timerclient import Backoff, TimerApp
from timerclient.streams import subscription
from timerclient.streams.key_lines import GroupOrder
from timerclient.worker import handler_runner
from timerclient.worker.target_brake import TargetBrake
from timerfake import AsyncFakeApp, AsyncFakeCluster


class Calls:
    """The calls of one handler, which run until the test ends them."""

    def __init__(self, app: TimerApp) -> None:
        self.app = app
        self.running: list[str] = []
        self.failures: list[int] = []
        self._ends: dict[str, asyncio.Future[None]] = {}

    async def handle(self, name: str) -> None:
        self.running.append(name)
        self.failures.append(self.app.context.failures)
        self._ends[name] = asyncio.get_running_loop().create_future()
        try:
            await self._ends[name]
        finally:
            self.running.remove(name)

    def end(self, name: str, error: Exception | None = None) -> None:
        if error is None:
            self._ends[name].set_result(None)
        else:
            self._ends[name].set_exception(error)


@asynccontextmanager
async def made(kind: Any, app: TimerApp, *names: str) -> AsyncIterator[AsyncFakeApp]:
    """Run an app; its group has a message for each name, whose first character is its key."""
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.create_group("orders", "g", type=kind)
        async with AsyncFakeApp(app, cluster=cluster) as timers:
            cluster.works.clear()  # the test ends the calls
            await client.schedule_batch(
                "orders",
                [b'{"name": "%s"}' % name.encode() for name in names],
                ordering_keys=[None if name[0] == "-" else name[0] for name in names],
            )
            await cluster.settle()
            yield timers


def handled(**options: Any) -> Calls:
    """Return the calls of a handler with these options."""
    calls = Calls(TimerApp())
    retry = Backoff(30, attempts=9)
    calls.app.timer("orders", group="g", retry=retry, **options)(calls.handle)
    return calls


async def test_calls_of_a_key_run_one_after_the_other_and_those_of_other_keys_beside_them() -> None:
    calls = handled(concurrency=4)
    names = ("a1", "a2", "a3", "b1", "-1", "-2", "c1")
    async with made("key_shared", calls.app, *names) as timers:
        assert calls.running == ["a1", "b1", "-1", "-2"]
        for name, running in (
            ("b1", ["a1", "-1", "-2", "c1"]),
            ("c1", ["a1", "-1", "-2"]),
            ("a1", ["-1", "-2", "a2"]),
        ):
            calls.end(name)
            await timers.settle()
            assert calls.running == running
        calls.end("a2", ValueError("no"))
        await timers.advance(29)
        assert calls.running == ["-1", "-2"]
        await timers.advance(1)
        for name in ("a2", "a3"):
            assert calls.running == ["-1", "-2", name]
            calls.end(name)
            await timers.settle()
        calls.end("-1")
        calls.end("-2")
    assert calls.failures == [0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
async def test_calls_of_a_group_that_is_ordered_as_a_whole_run_one_after_the_other(
    kind: str,
) -> None:
    calls = handled()
    async with made(kind, calls.app, "a1", "b1", "-1") as timers:
        for name in ("a1", "b1", "-1"):
            assert calls.running == [name]
            calls.end(name)
            await timers.settle()


@pytest.mark.parametrize("kind", ["key_shared", "exclusive", "failover"])
@pytest.mark.parametrize(("hold_max", "call_s"), [(None, 400), (0, 40)])
async def test_message_that_waits_for_its_turn_has_not_failed(
    kind: str, hold_max: int | None, call_s: int
) -> None:
    calls = handled(lease=100, hold_max=hold_max)
    async with made(kind, calls.app, "a1", "a2", "a3", "a4") as timers:
        for name in ("a1", "a2", "a3", "a4"):
            await timers.advance(call_s)
            assert calls.running == [name]
            calls.end(name)
            await timers.settle()
    assert calls.failures == [0] * 4


async def test_message_that_waits_for_its_key_returns_when_the_drain_begins() -> None:
    calls = handled()
    async with made("key_shared", calls.app, "a1", "a2") as timers:
        worker, running = timers._worker, timers._worker_task
        assert worker is not None
        assert running is not None
        worker.stop()
        await timers.settle()
        async with timers.cluster.client() as client:
            [topic] = [each for each in await client.topics() if each.name == "orders"]
            assert (calls.running, topic.groups[0].leased) == (["a1"], 1)
            calls.end("a1")
            await running
            async with client.consumer("orders", "g") as consumer:
                [message] = await consumer.receive()
                assert (message.json(), message.failures) == ({"name": "a2"}, 0)


async def test_functions_in_threads_keep_the_order_of_each_key() -> None:
    app, lock, begun = TimerApp(), threading.Lock(), list[str]()
    at_work = dict.fromkeys("ab", 0)

    @app.timer("orders", group="g", retry=Backoff(1, attempts=3))
    def handle(name: str) -> None:
        with lock:
            begun.append(name)
            at_work[name[0]] += 1
            assert at_work[name[0]] == 1
        with lock:
            at_work[name[0]] -= 1
        if name == "a3" and app.context.failures == 0:
            raise ValueError(name)

    names = [f"{'ba'[number % 2]}{number}" for number in range(40)]
    async with made("key_shared", app, *names) as timers:
        timers.cluster.works.append(timers._wait_for_handler)
        await timers.advance(10)
        timers.cluster.works.clear()
    assert [name for name in begun if name[0] == "b"] == names[::2]
    assert [name for name in begun if name[0] == "a"] == ["a1", "a3", *names[3::2]]
    assert [str(error) for error in timers.errors] == ["a3"]


@pytest.mark.parametrize("names", [("a1",), ("a1", "a2"), ("a1", "b1", "a2")])
async def test_key_of_a_call_that_hangs_in_a_thread_goes_to_another_consumer(
    names: tuple[str, ...],
) -> None:
    app, hang = TimerApp(), threading.Event()

    @app.timer("orders", group="g", retry=Backoff(1, attempts=9), lease=30, hold_max=60)
    def handle(name: str) -> None:
        if name == "a1":
            hang.wait()

    taken = list[str]()
    async with made("key_shared", app, *names) as timers:
        try:
            async with timers.cluster.client() as client, client.consumer("orders", "g") as other:
                for _ in range(12):
                    await timers.advance(15)
                    for message in await other.receive(timeout=0):
                        taken.append(message.json()["name"])
                        _ = message.ack()
        finally:
            hang.set()
    assert taken == [name for name in names if name[0] == "a"]


async def test_recalled_messages_of_a_key_that_is_held_up_leave_room_for_others() -> None:
    calls = handled()
    async with made("key_shared", calls.app, *(f"a{number}" for number in range(1500))) as timers:
        [worker] = timers._worker.runners if timers._worker else []
        [run] = worker.running.values()
        _ = run.message.nack(3600)  # and the call goes on
        await timers.advance(5)
        async with timers.cluster.client() as client:
            await client.schedule("orders", b'{"name": "b"}', ordering_key="b")
        await timers.advance(30)
        assert calls.running == ["a0", "b"]
        for name in ("a0", "b"):
            calls.end(name)
        await timers.settle()


async def test_other_keys_pass_many_messages_of_a_key_whose_calls_are_slow() -> None:
    calls = handled(lease=10, concurrency=2)
    names = [f"{key}{number}" for key, count in (("b", 5), ("a", 90)) for number in range(count)]
    async with made("key_shared", calls.app, *names) as timers:
        for number in range(5):
            await timers.advance(6)
            calls.end(f"a{number}")
            calls.end(f"b{number}")
            await timers.settle()
        async with timers.cluster.client() as client:
            await client.schedule("orders", b'{"name": "c"}', ordering_key="c")
        await timers.settle()
        assert calls.running == ["a5", "c"]
        assert timers._worker is not None
        timers._worker.stop()
        for name in ("a5", "c"):
            calls.end(name)


async def test_messages_beside_a_long_line_of_a_key_go_to_a_worker_that_is_free() -> None:
    begun, waiting = [list[str](), list[str]()], list[asyncio.Future[None]]()

    def app(no: int) -> TimerApp:
        app = TimerApp()

        @app.timer("orders", group="g", retry=Backoff(5, attempts=0), lease=30, concurrency=2)
        async def handle(name: str) -> None:
            begun[no].append(name)
            waiting.append(asyncio.get_running_loop().create_future())
            await waiting[-1]

        return app

    names = ["a"] * 150 + [chr(0x100 + number) for number in range(30)]
    async with (
        made("key_shared", app(0), *names) as timers,
        AsyncFakeApp(app(1), cluster=timers.cluster) as others,
    ):
        timers.cluster.works.clear()
        for _ in range(8):
            await timers.advance(30)
            ended, waiting[:] = [*waiting], []
            for each in ended:
                each.set_result(None)
            await timers.settle()
        assert [len(each) for each in begun] == [18, 18]
        for workers in (timers, others):
            assert workers._worker is not None
            workers._worker.stop()
        for each in waiting:
            each.set_result(None)


async def test_message_that_the_worker_hands_back_at_once_leaves_its_turn() -> None:
    calls = handled()
    async with made("key_shared", calls.app, "-") as timers:
        [runner] = timers._worker.runners if timers._worker else []
        runner.handler.brake = brake = TargetBrake()
        brake.on_unavailable(time.monotonic(), time.monotonic())
        async with timers.cluster.client() as client:
            await client.schedule("orders", b'{"name": "a"}', ordering_key="a")
        await timers.settle()
        assert calls.running == ["-"]
        brake.on_answer()
        runner._call_ended.set()
        await timers.settle()
        assert calls.running == ["-", "a"]
        calls.end("-")
        calls.end("a")


async def reopen(timers: AsyncFakeApp) -> None:
    """Let the worker's consumer end with an error; wait until it is opened again."""
    [runner] = timers._worker.runners if timers._worker else []
    former = runner._consumer
    assert former is not None
    assert former._subscription is not None
    assert former._subscription._task is not None
    former._subscription._task.cancel()
    while runner._consumer in (None, former):
        await timers.settle()
    await timers.settle()


async def test_calls_that_run_keep_their_turns_when_the_consumer_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handler_runner, "PAUSE_S", 0)
    calls = handled()
    async with made("key_shared", calls.app, "a1", "a2") as timers:
        await reopen(timers)
        for name in ("a1", "a1", "a2"):
            assert calls.running == [name]
            calls.end(name)
            await timers.settle()


async def test_calls_keep_their_turns_while_leaders_of_two_releases_report_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handler_runner, "PAUSE_S", 0)
    orders = iter((GroupOrder.KEY, GroupOrder.QUEUE, GroupOrder.KEY))
    monkeypatch.setattr(subscription, "order_of", lambda _: next(orders))
    calls = handled()
    async with made("key_shared", calls.app, "a1", "a2", "b1") as timers:
        assert calls.running == ["a1", "b1"]
        await reopen(timers)
        await timers.cluster.fail_over()
        await timers.settle()
        calls.end("b1")
        await timers.settle()
        for name, running in (
            ("a1", ["a1", "b1"]),
            ("a1", ["b1", "a1"]),
            ("a2", ["b1", "a2"]),
            ("b1", ["b1"]),
        ):
            assert calls.running == running
            calls.end(name)
            await timers.settle()
