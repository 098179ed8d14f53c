"""Handlers of timers on an in-memory cluster: what runs when, and what becomes of failures."""

import asyncio
import math
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import prometheus_client
import pytest

from tests.timerfake.shop import MINUTE, Run, Shop
from timerclient import (
    AsyncTimerClient,
    Backoff,
    ClientSettings,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TimerApp,
    Worker,
)
from timerclient.client.consumers import AsyncConsumer
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Acking, Message
from timerclient.values.results import AckResult
from timerclient.worker import handler_runner
from timerclient.worker.handler_runner import LOG, HandlerRunner
from timerclient.worker.worker_metrics import Outcome
from timerclient.worker.worker_port import CONNECTIONS_MAX, WorkerPort
from timerfake import AsyncFakeApp, AsyncFakeCluster


def test_handler_runs_for_each_occurrence_of_its_series(timer_app: Run) -> None:
    shop, numbers = Shop(), list[tuple[int, int]]()

    @shop.app.timer("renewals", group="billing")
    def renew(customer: int) -> None:
        occurrence = shop.app.context.message.occurrence
        assert occurrence is not None
        numbers.append((customer, occurrence.number))

    timers = timer_app(shop.app)
    series = renew.create_series_sync("customer-7", {"customer": 7}, every=MINUTE)
    assert renew.create_series_sync("customer-7", {"customer": 7}, every=MINUTE).id == series.id
    renew.create_series_sync("customer-8", {"customer": 8}, every=3 * MINUTE)
    renew.create_series_sync("customer-8", {"customer": 9}, every=5 * MINUTE, on_conflict="alter")
    with pytest.raises(InvalidRequest, match="has no such argument"):
        renew.create_series_sync("customer-8", {"client": 8}, every=MINUTE)
    timers.advance(5 * MINUTE)
    assert sorted(numbers) == [(7, 1), (7, 2), (7, 3), (7, 4), (7, 5), (9, 1)]
    assert timers.errors == []


async def test_series_of_a_handler_on_an_event_loop(async_timer_app: type[AsyncFakeApp]) -> None:
    shop = Shop()
    async with async_timer_app(shop.app) as timers:
        await shop.cancel_unpaid.create_series("k", {"order_id": 1}, every=MINUTE, max_count=2)
        await timers.advance(5 * MINUTE)
    assert shop.calls == [(1, "unpaid")] * 2


async def test_worker_and_app_print_their_handlers_and_state() -> None:
    shop = Shop(url="timers://127.0.0.1:1")
    shop.app.handlers[0].name, shop.app.handlers[1].name = "cancel_unpaid", "send_mail"
    assert repr(shop.app) == (
        "TimerApp('timers://127.0.0.1:1', handlers=['cancel_unpaid', 'send_mail'])"
    )
    worker = Worker(shop.app)
    assert repr(worker) == "Worker(cancel_unpaid, send_mail; not connected, 0 running)"
    worker.stop()
    assert repr(worker) == "Worker(cancel_unpaid, send_mail; stopping, 0 running)"


def test_handler_runs_when_its_timer_is_due_with_its_arguments(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger=LOG.name)
    shop = Shop()
    timers = timer_app(shop.app)
    shop.cancel_unpaid.schedule_sync(order_id=4711, delay=30 * MINUTE, key="order-4711")
    timers.advance(29 * MINUTE)
    assert shop.calls == []
    timers.advance(MINUTE)
    assert shop.calls == [(4711, "unpaid")]
    [context] = shop.contexts
    [line] = [each.getMessage() for each in caplog.records if each.name == LOG.name]
    fields = rf"topic=orders group=billing id={context.id} key=order-4711 attempt=1 failures=0"
    assert re.fullmatch(rf"timer done: handler=\S+ {fields} seconds=\d+\.\d+", line)
    timers.advance(MINUTE)  # a lease that an ack has ended is not lost
    assert (context.attempt, context.message.key, context.is_lost) == (1, "order-4711", False)
    with timers.cluster.client() as client:
        [group] = next(each for each in client.topics() if each.name == "orders").groups
        assert (group.unacked, group.settings.max_attempts) == (0, 4)


def test_handler_that_is_not_async_runs_on_the_thread_of_the_test(timer_app: Run) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.send_mail.schedule_sync(to="again")
    timers.advance(MINUTE)
    here = threading.current_thread()
    assert shop.calls == [("again", here), ("end", here)]


async def test_handler_that_takes_time_and_schedules_runs_at_each_due_time(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, seen = TimerApp(), []

    @app.timer("ticks", group="g", concurrency=1)
    async def tick(number: int) -> None:
        await asyncio.sleep(0.001)
        seen.append((number, round(timers.cluster.now_ms - began_ms, -3)))
        if number < 3:
            await tick.schedule(number=number + 1, delay=MINUTE)

    async with async_timer_app(app) as timers:
        began_ms = timers.cluster.now_ms
        await tick.schedule(number=1, delay=MINUTE)
        await timers.advance(10 * MINUTE)
        assert seen == [(1, 60_000), (2, 120_000), (3, 180_000)]
        await asyncio.gather(*(tick.schedule(number=10 + n) for n in range(50)))
        await timers.settle()
        assert len(seen) == 53


async def test_worker_of_another_version_changes_the_settings_of_the_group(
    async_timer_app: type[AsyncFakeApp], caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        for attempts in (3, 5, 5):
            app = TimerApp()
            app.timer("t", group="g", retry=Backoff(1, attempts=attempts))(lambda: None)
            async with async_timer_app(app, cluster=cluster):
                [topic] = await client.topics()
                assert topic.groups[0].settings.max_attempts == attempts
    [warning] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith("settings of the group replaced by the handler's: handler=")
    assert warning.endswith(" topic=t group=g settings='max_attempts: 3->5'")


async def test_worker_without_permission_to_set_the_group_warns_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = pb.GroupSettings(backoff_ms_min=1)
    answer = AsyncMock(return_value=SimpleNamespace(settings=settings))
    for method in ("create_group", "alter_group"):
        monkeypatch.setattr(AsyncTimerClient, method, answer)
    shop = Shop(url="timers://127.0.0.1:1")
    runner = Worker(shop.app).runners[0]
    for reason in ("no rule", "no rule", "no token", None, "no token"):
        answer.side_effect = PermissionDenied(reason) if reason else None
        await runner._prepare_group()
    await shop.app.close()
    lines = [each.getMessage() for each in caplog.records if "no permission" in each.message]
    warned = [each.partition("Denied: ")[2] for each in lines]
    assert warned == ["no rule'", "no token'", "no token'"]
    assert (runner._backoff, runner._is_pacing) == (runner.handler.options.retry, True)


@pytest.mark.parametrize("what", ["group", "topic", "group of a consumer that ended", "no manage"])
async def test_worker_of_a_deleted_group_ends_and_does_not_create_it_again(
    what: str, async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_runner, "PAUSE_S", 0.0)
    shop, deleted = Shop(), asyncio.Event()

    async def delete_and_deny(*_: object) -> NoReturn:
        assert not deleted.is_set(), "the group was created again"
        deleted.set()
        await client.delete_group("orders", "billing")
        raise PermissionDenied("no rule")

    async def run() -> None:
        async with async_timer_app(shop.app, cluster=cluster) as timers:
            await shop.cancel_unpaid.schedule(order_id=1)
            await timers.settle()
            if what == "topic":
                await client.delete_topic("orders")
            elif what == "group":
                await client.delete_group("orders", "billing")
            else:
                if what == "no manage":
                    denied = AsyncMock(side_effect=PermissionDenied("no rule"))
                    for method in ("create_group", "alter_group"):
                        monkeypatch.setattr(AsyncTimerClient, method, denied)
                monkeypatch.setattr(AsyncConsumer, "receive", delete_and_deny)
                await shop.cancel_unpaid.schedule(order_id=2)  # ends the present call
            await timers._worker_task  # type: ignore[misc]

    text = "; the next start of the worker creates 'billing' of 'orders' again"
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        with pytest.raises(NotFound, match=text):
            await run()
        groups = {each.name: len(each.groups) for each in await client.topics()}
        assert groups.get("orders", 0) == 0


async def test_drain_waits_for_handlers_and_returns_the_rest_at_once_without_a_failure(
    async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, begun, ended, go = TimerApp(), [], [], asyncio.Event()

    def on_info(text: str, *_: object) -> None:
        if text.startswith("draining"):
            asyncio.get_running_loop().call_soon(go.set)

    @app.timer("jobs", group="g", concurrency=2, retry=Backoff(1, attempts=1))
    async def job(number: int) -> None:
        begun.append(number)
        if number == 0:
            await go.wait()
        else:
            await asyncio.Event().wait()
        ended.append(number)

    async with async_timer_app(app, handler_s=60) as timers, timers.cluster.client() as client:
        worker = Worker(app, drain=0.2)
        timers.cluster.works.clear()
        timers._worker.stop()  # type: ignore[union-attr]  # another worker takes its place
        await timers._worker_task  # type: ignore[misc]
        running = asyncio.create_task(worker.run())
        for number in range(3):
            await job.schedule(number=number)
        while len(begun) < 2:
            await timers.cluster.settle()
        monkeypatch.setattr(LOG, "info", on_info)
        worker.stop()
        await running
        assert (begun, ended, worker.left_running) == ([0, 1], [0], 1)
        [topic] = await client.topics()
        assert (topic.groups[0].unacked, topic.groups[0].leased) == (2, 0)
        async with client.consumer("jobs", group="g") as consumer:
            await timers.cluster.settle()
            rest = [each async for each in _all(consumer)]
            assert {each.json()["number"]: each.failures for each in rest} == {1: 0, 2: 0}
            for each in rest:
                _ = each.ack()


@pytest.mark.parametrize("stops", [1, 2])
async def test_second_stop_ends_the_wait_for_a_handler_that_ignores_its_cancellation(
    stops: int, async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, begun, go = TimerApp(), asyncio.Event(), asyncio.Event()

    @app.timer("jobs", group="g")
    async def job() -> None:
        begun.set()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()

    def on_info(text: str, *_: object) -> None:
        if text.startswith("draining"):
            asyncio.get_running_loop().call_soon(worker.stop)

    monkeypatch.setattr("timerclient.worker.worker.CANCEL_S", 0.01)
    async with async_timer_app(app) as timers:
        timers.cluster.works.clear()
        timers._worker.stop()  # type: ignore[union-attr]  # another worker takes its place
        await timers._worker_task  # type: ignore[misc]
        worker = Worker(app, drain=3_600)
        running = asyncio.create_task(worker.run())
        await job.schedule()
        await begun.wait()
        if stops == 1:
            monkeypatch.setattr(LOG, "info", on_info)
        for _ in range(stops):  # 2: both before the drain begins
            worker.stop()
        try:
            async with asyncio.timeout(20):
                await running
        finally:
            go.set()
        assert worker.left_running == 1


async def test_messages_that_no_handler_has_begun_return_when_the_drain_begins(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, begun, go = TimerApp(), asyncio.Event(), asyncio.Event()

    @app.timer("jobs", group="g", concurrency=1)
    async def job(number: int) -> None:
        begun.set()
        await go.wait()

    async with async_timer_app(app) as timers, timers.cluster.client() as client:
        worker, running = timers._worker, timers._worker_task
        assert worker is not None
        assert running is not None
        timers.cluster.works.clear()
        for number in range(3):
            await job.schedule(number=number)
        await begun.wait()
        await timers.cluster.settle()
        worker.stop()
        async with client.consumer("jobs", group="g") as consumer:
            for number in (1, 2):
                [message] = await consumer.receive()
                assert (message.json()["number"], message.failures) == (number, 0)
                await message.ack()
        assert not running.done()
        go.set()
        await running
        [topic] = await client.topics()
        assert (worker.left_running, topic.groups[0].unacked) == (0, 0)


async def test_end_of_a_worker_does_not_wait_long_for_acks(
    async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, cut = TimerApp(), set[HandlerRunner]()

    @app.timer("a", group="g")
    async def first() -> None: ...

    @app.timer("b", group="g")
    async def second() -> None: ...

    async def close(runner: HandlerRunner) -> None:
        try:
            await asyncio.Event().wait()  # as if the leader were lost
        finally:
            cut.add(runner)

    async with async_timer_app(app) as timers:
        timers.cluster.works.clear()
        timers._worker.stop()  # type: ignore[union-attr]  # another worker takes its place
        await timers._worker_task  # type: ignore[misc]
        with monkeypatch.context() as patched:
            patched.setattr(HandlerRunner, "close", close)
            for name in ("CANCEL_S", "CLOSE_S", "CLOSE_S_MIN"):
                patched.setattr(f"timerclient.worker.worker.{name}", 0.01)
            worker = Worker(app, drain=0.01)
            worker.stop()
            async with asyncio.timeout(20):
                await worker.run()
        assert cut == {*worker.runners}


async def _all(consumer: Any) -> Any:
    while found := await consumer.receive(10, timeout=0):
        for each in found:
            yield each


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_of_the_worker_stay_if_a_collector_of_the_application_fails(
    timer_app: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = [True, True, False, True]

    class Broken:
        def collect(self) -> Any:
            if failing.pop(0):
                raise RuntimeError("no database")
            return []

    registry = prometheus_client.CollectorRegistry()
    registry.register(Broken())
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    worker = timer_app(Shop().app)._inner._worker
    assert worker is not None
    with WorkerPort(worker, "127.0.0.1", 0) as port:
        while failing:
            status, text = get(port.port, "/metrics")
            assert (status, "\ntimers_worker_connected{" in text) == (200, True)
    line = "metrics of the application left out: RuntimeError: no database"
    assert [each.getMessage() for each in caplog.records].count(line) == 2, "each time it begins"


def test_port_shows_health_readiness_and_metrics(timer_app: Run) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.cancel_unpaid.schedule_sync(order_id=1)
    timers.settle()
    worker = timers._inner._worker
    assert worker is not None
    with WorkerPort(worker, "127.0.0.1", 0) as port:
        assert get(port.port, "/healthz") == (200, "ok\n")
        assert get(port.port, "/readyz?x=1") == (200, "ready\n")
        assert get(port.port, "/")[0] == 404
        status, text = get(port.port, "/metrics")
        assert status == 200
        label = 'topic="orders",group="billing"'
        assert f'timers_worker_handled_total{{{label},outcome="done"}} 1\n' in text
        assert f'timers_worker_handler_seconds_bucket{{{label},le="+Inf"}} 1\n' in text
        assert f"timers_worker_connected{{{label}}} 1\n" in text
        mails = prometheus_client.Counter("shop_mails", "Of the application.")
        mails.inc()
        text = get(port.port, "/metrics")[1]
        prometheus_client.REGISTRY.unregister(mails)
        assert "\ntimers_worker_connected{" in text
        assert "\nshop_mails_total 1.0\n" in text
        worker._beat_s -= 60
        assert get(port.port, "/healthz") == (503, "event loop blocked\n")
        worker._stops = 1
        assert get(port.port, "/readyz") == (503, "not ready\n")


def test_idle_connections_and_broken_ones_do_not_keep_a_probe_from_its_answer(
    timer_app: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    timers = timer_app(Shop().app)
    timers.settle()
    worker = timers._inner._worker
    assert worker is not None
    with WorkerPort(worker, "127.0.0.1", 0) as port, ExitStack() as stack:
        address = ("127.0.0.1", port.port)
        for number in range(3 * CONNECTIONS_MAX):
            idle = stack.enter_context(socket.create_connection(address, 10))
            if number % 2:
                idle.sendall(b"GET /healthz HT")
        assert get(port.port, "/healthz") == (200, "ok\n")
        # Their threads end soon after them, later on a busy machine.
        assert len(port._server._open) <= CONNECTIONS_MAX
        with socket.create_connection(address, 10) as broken:
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            broken.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert get(port.port, "/readyz") == (200, "ready\n")
    assert "Traceback" not in capfd.readouterr().err


def test_connections_that_come_at_once_are_accepted_at_once(timer_app: Run) -> None:
    timers = timer_app(Shop().app)
    timers.settle()
    worker = timers._inner._worker
    assert worker is not None
    port = WorkerPort(worker, "127.0.0.1", 0)  # it does not serve yet
    with ExitStack() as stack:
        stack.callback(port._server.server_close)
        for _ in range(CONNECTIONS_MAX):
            # A connection that does not fit into the queue takes a second or longer.
            stack.enter_context(socket.create_connection(("127.0.0.1", port.port), 0.9))


async def test_ack_of_a_worker_stays_without_the_parts_of_a_future(
    async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, ackings = TimerApp(), list[Acking[AckResult]]()
    ack = Message.ack

    def noted(message: Message) -> Acking[AckResult]:
        ackings.append(ack(message))
        return ackings[-1]

    @app.timer("orders", group="billing")
    async def quick() -> None:
        pass

    monkeypatch.setattr(Message, "ack", noted)
    async with async_timer_app(app) as timers:
        await quick.schedule()
        await timers.settle()
    assert [(acking.done(), acking._has_parts) for acking in ackings] == [(True, False)]


async def test_lease_that_is_lost_under_a_handler_is_a_warning_and_another_has_the_message(
    async_timer_app: type[AsyncFakeApp], caplog: pytest.LogCaptureFixture
) -> None:
    app, seen, go = TimerApp(), [], threading.Event()

    @app.timer("orders", group="billing", hold_max=MINUTE)
    def slow() -> None:
        seen.append(app.context)
        go.wait(60)

    async with async_timer_app(app) as timers, timers.cluster.client() as client:
        timers.cluster.works.clear()  # time passes while the handler runs
        await slow.schedule()
        while not seen:
            await timers.settle()
        async with client.consumer("orders", group="billing") as other:
            await timers.advance(2 * MINUTE)
            [message] = await other.receive(timeout=0)
            assert (message.failures, seen[0].is_lost, len(seen)) == (1, True, 1)
            assert (seen[0].failures, seen[0].attempt) == (0, 1)
            _ = message.ack()
            go.set()
        timers.cluster.works.append(timers._wait_for_handler)
        await timers.settle()
        assert timers._worker is not None
        assert timers._worker.runners[0].metrics.outcomes[Outcome.LOST] == 1
    assert f"ack failed, the timer may run again: handler={slow.name}" in caplog.text
    assert "LeaseLost" in caplog.text


@pytest.mark.parametrize("end", ["dead letter", "expired"])
async def test_message_that_ends_under_a_handler_is_lost_for_it_and_a_warning(
    async_timer_app: type[AsyncFakeApp], caplog: pytest.LogCaptureFixture, end: str
) -> None:
    app, seen, go = TimerApp(), [], threading.Event()

    @app.timer("orders", group="billing", hold_max=MINUTE, retry=Backoff(1, attempts=1))
    def slow() -> None:
        seen.append(app.context)
        go.wait(60)

    async with async_timer_app(app) as timers, timers.cluster.client() as client:
        if end == "expired":
            await client.alter_policies({"ttl_ms": 20_000}, topic="orders")
        timers.cluster.works.clear()  # time passes while the handler runs
        await slow.schedule()
        while not seen:
            await timers.settle()
        was_lost = seen[0].is_lost
        await timers.advance(2 * MINUTE)
        assert (was_lost, seen[0].is_lost) == (False, True)
        go.set()
        timers.cluster.works.append(timers._wait_for_handler)
        await timers.settle()
        assert timers._worker is not None
        outcomes = timers._worker.runners[0].metrics.outcomes
        assert (outcomes[Outcome.DONE], outcomes[Outcome.LOST]) == (1, 1)
    result = {"dead letter": "DEAD_LETTERED", "expired": "EXPIRED"}[end]
    assert f"ack too late: handler={slow.name}" in caplog.text
    assert f"result={result}" in caplog.text


async def test_handler_that_hangs_ends_with_hold_max_and_others_take_its_place(
    async_timer_app: type[AsyncFakeApp], caplog: pytest.LogCaptureFixture
) -> None:
    app, runs = TimerApp(), list[tuple[int, int]]()
    retry = Backoff(30, max=30, attempts=2)

    @app.timer("orders", group="billing", concurrency=1, hold_max=MINUTE, retry=retry)
    async def bill(order: int) -> None:
        runs.append((order, app.context.failures))
        if order == 0:
            await asyncio.Event().wait()

    async with async_timer_app(app) as timers, timers.cluster.client() as client:
        timers.cluster.works.clear()  # time passes while the handler runs
        for order in (0, 1):
            await bill.schedule(order=order)
        await timers.advance(59)
        assert runs == [(0, 0)]
        await timers.advance(1)
        assert runs == [(0, 0), (1, 0)]
        await timers.advance(29)
        assert len(runs) == 2
        await timers.advance(1 + 60)
        assert runs == [(0, 0), (1, 0), (0, 1)]
        [letter] = (await client.peek("orders.billing.dead")).messages
        worker = timers._worker
        assert worker is not None
        metrics = worker.runners[0].metrics
        assert (metrics.outcomes[Outcome.TIMEOUT], metrics.outcomes[Outcome.DONE]) == (2, 1)
        assert (metrics.running, metrics.overdue, worker.problem) == (0, 0, None)
    text = "TimeoutError: the handler ran for longer than hold_max (60 s)"
    assert letter.headers["dead-letter-detail"] == text
    assert f"timer timeout: handler={bill.name}" in caplog.text


@pytest.mark.parametrize(
    ("lease", "hold_max", "cut_s"), [(30, 0, 28), (4, 0, 3), (30, 20, 28), (30, 60, 60)]
)
async def test_call_ends_in_time_for_its_nack(
    lease: int, hold_max: int, cut_s: int, async_timer_app: type[AsyncFakeApp]
) -> None:
    app, begun, ended = TimerApp(), list[int](), list[int]()
    retry = Backoff(100, max=100, attempts=2)

    @app.timer("orders", group="billing", lease=lease, hold_max=hold_max, retry=retry)
    async def bill() -> None:
        begun.append(app.context.failures)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(app.context.failures)

    async with async_timer_app(app) as timers, timers.cluster.client() as client:
        timers.cluster.works.clear()  # time passes while the handler runs
        await bill.schedule()
        await timers.advance(cut_s - 0.1)
        assert (begun, ended) == ([0], [])
        await timers.advance(0.2)
        assert ended == [0]
        await timers.advance(99)
        assert begun == [0]  # the backoff of the nack
        await timers.advance(1 + cut_s)
        [letter] = (await client.peek("orders.billing.dead")).messages
    assert begun == ended == [0, 1]
    assert letter.headers["dead-letter-detail"].startswith("TimeoutError: ")


async def test_extension_gives_more_time_to_its_own_message_alone(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, messages, ended = TimerApp(), dict[int, Message](), list[int]()

    @app.timer("orders", group="billing", hold_max=MINUTE, retry=Backoff(3_600))
    async def bill(order: int) -> None:
        messages[order] = app.context.message
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(order)

    async with async_timer_app(app) as timers:
        timers.cluster.works.clear()  # time passes while the handler runs
        for order in (0, 1):
            await bill.schedule(order=order, delay=10)
        await timers.advance(10)
        assert messages[0].batch is messages[1].batch
        await timers.advance(40)
        _ = messages[1].extend()
        await timers.advance(21)
        assert ended == [0]
        await timers.advance(38)
        assert ended == [0]
        await timers.advance(2)
        assert ended == [0, 1]


@pytest.mark.parametrize("first", [Outcome.TIMEOUT, Outcome.INTERRUPTED])
async def test_drain_ends_a_call_that_outlived_its_time_and_no_time_ends_one_that_was_drained(
    first: Outcome, async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, cuts, go = TimerApp(), list[str](), asyncio.Event()

    @app.timer("orders", group="billing", hold_max=MINUTE)
    async def bill() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                cuts.append(str(runner.running[task].cancel_cause))

    monkeypatch.setattr("timerclient.worker.worker.CANCEL_S", 0.01)
    async with async_timer_app(app, handler_s=0.01) as timers:
        timers.cluster.works.clear()  # time passes while the handler runs
        worker, running = timers._worker, timers._worker_task
        assert worker is not None
        assert running is not None
        [runner] = worker.runners
        await bill.schedule()
        await timers.settle()
        [task] = runner.running
        if first is Outcome.TIMEOUT:
            await timers.advance(MINUTE)
        worker.stop()
        await running
        await timers.advance(MINUTE)
        go.set()
    assert cuts == [*dict.fromkeys([str(first), str(Outcome.INTERRUPTED)])]
    assert worker.left_running == 1


async def test_coroutine_that_a_thread_returns_too_late_does_not_run(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, begun, go, runs = TimerApp(), asyncio.Event(), threading.Event(), list[str]()

    async def late() -> None:
        runs.append(app.context.id)

    @app.timer("orders", group="billing", hold_max=MINUTE)
    def bill() -> Any:
        loop.call_soon_threadsafe(begun.set)
        go.wait(60)
        return late()

    loop = asyncio.get_running_loop()
    async with async_timer_app(app) as timers:
        timers.cluster.works.clear()  # time passes while the handler runs
        assert timers._worker is not None
        [runner] = timers._worker.runners
        await bill.schedule()
        await begun.wait()
        await timers.advance(MINUTE)
        [task] = runner.running
        go.set()
        await task
        assert (runs, runner.metrics.outcomes[Outcome.TIMEOUT]) == ([], 1)


async def test_handler_without_a_longest_time_runs(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, runs = TimerApp(settings=ClientSettings(hold_s_max=math.inf)), list[str]()

    @app.timer("orders", group="billing")
    async def bill() -> None:
        runs.append(app.context.id)

    async with async_timer_app(app) as timers:
        timer = await bill.schedule()
        await timers.settle()
    assert runs == [timer.id]


async def test_worker_with_threads_that_all_exceed_hold_max_is_not_healthy(
    async_timer_app: type[AsyncFakeApp], caplog: pytest.LogCaptureFixture
) -> None:
    app, runs, go = TimerApp(), list[int](), threading.Event()

    @app.timer("orders", group="billing", concurrency=2, hold_max=MINUTE)
    def bill() -> None:
        runs.append(app.context.failures)
        go.wait(60)

    async def begun(count: int) -> None:
        while len(runs) < count:
            await timers.settle()

    async with async_timer_app(app) as timers:
        timers.cluster.works.clear()  # time passes while the handler runs
        worker = timers._worker
        assert worker is not None
        [runner] = worker.runners
        await bill.schedule()
        await begun(1)
        await timers.advance(2 * MINUTE)  # the message is delivered again
        await begun(2)
        assert (runs, runner.metrics.overdue, worker.is_alive) == ([0, 1], 1, True)
        await timers.advance(MINUTE)
        problem = f"all 2 calls of {bill.name} exceed hold_max"
        assert worker.problem == problem
        assert (runner.metrics.running, runner.metrics.overdue) == (2, 2)
        go.set()
        timers.cluster.works.append(timers._wait_for_handler)
        await timers.settle()
        assert (runner.metrics.overdue, worker.is_alive) == (0, True)
    assert "handler in a thread runs for longer than hold_max: handler=" in caplog.text


async def test_lease_is_lost_for_a_handler_that_blocks_the_event_loop_beyond_its_end(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, seen = TimerApp(), list[bool]()

    @app.timer("orders", group="billing", lease=30)
    async def slow() -> None:
        for seconds in (29, 1):
            timers.cluster._clock.advance(1000 * seconds)  # and nothing else happens
            seen.append(app.context.is_lost)

    async with async_timer_app(app) as timers:
        await slow.schedule()
        await timers.settle()
        assert seen[:2] == [False, True]


async def test_lease_is_lost_for_a_handler_when_another_node_becomes_leader(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, seen, go = TimerApp(), [], asyncio.Event()

    @app.timer("orders", group="billing")
    async def slow() -> None:
        seen.append(app.context)
        await go.wait()

    async with async_timer_app(app) as timers:
        timers.cluster.works.clear()
        await slow.schedule()
        while not seen:
            await timers.settle()
        await timers.cluster.fail_over()
        assert seen[0].is_lost
        go.set()
