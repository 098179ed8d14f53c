"""Handlers that fail, reject or nack their messages, on an in-memory cluster."""

import asyncio
import functools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import pytest

from tests.timerfake.shop import LETTERS, Run, Shop
from timer.leader.groups import dead_letters
from timer.leader.groups.dead_letters import _with_older_deaths
from timerclient import (
    Backoff,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    Reject,
    Retry,
    TimerApp,
    Worker,
)
from timerclient.client.consumers import AsyncConsumer
from timerclient.proto import timer_pb2 as pb
from timerclient.worker import handler_runner, rejected_letters
from timerclient.worker.handler_runner import HandlerRunner
from timerclient.worker.rejected_letters import detail_of, letter_headers
from timerclient.worker.retry_policy import RetryAfter
from timerclient.worker.worker_metrics import Outcome
from timerfake import AsyncFakeApp, AsyncFakeCluster, FakeApp


def test_failure_is_tried_again_after_the_backoff_and_then_a_dead_letter(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = ValueError("no such\norder")
    timer = shop.cancel_unpaid.schedule_sync(order_id=1, key="order\n1")
    for pause_s, attempts in ((0, 1), (29, 1), (1, 2), (60, 3), (99, 3), (1, 4), (1000, 4)):
        timers.advance(pause_s)
        assert len(shop.calls) == attempts
    assert {each.id for each in shop.contexts} == {timer.id}
    assert timers.errors == [shop.fails] * 4
    lines = [each.getMessage() for each in caplog.records if "timer failed" in each.message]
    assert len(lines) == 4
    levels = [each.levelname for each in caplog.records if "timer failed" in each.message]
    assert levels == ["WARNING"] * 3 + ["ERROR"]
    assert lines[3].startswith("timer failed: handler=")
    assert " final=True letters=orders.billing.dead error=" in lines[3]
    assert "\n" not in lines[1]
    key = "key='order\\n1'"
    assert f"topic=orders group=billing id={timer.id} {key} attempt=2 failures=1" in lines[1]
    second = [vars(each) for each in caplog.records if "timer failed" in each.message][1]
    assert {name: value for name, value in second.items() if name.startswith("timer_")} == {
        "timer_event": "timer failed",
        "timer_handler": shop.cancel_unpaid.name,
        "timer_topic": "orders",
        "timer_group": "billing",
        "timer_id": timer.id,
        "timer_key": "order\n1",
        "timer_attempt": 2,
        "timer_failures": 1,
        "timer_error": "ValueError: no such order",
        "timer_at": second["timer_at"],
        "timer_final": False,
    }
    assert "error='ValueError: no such order' at=" in lines[1]
    assert "shop.py:" in lines[1]
    shop.fails = None
    with timers.cluster.client() as client:
        [letter] = client.peek(LETTERS).messages
        assert letter.headers["dead-letter-reason"] == "nacked"
        assert letter.headers["dead-letter-detail"] == "ValueError: no such\norder"
        assert client.redrive("orders.billing.dead") == 1
    timers.advance(0)
    assert len(shop.calls) == 5


def test_failure_in_a_task_group_is_named_by_the_first_exception_in_it(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    app = TimerApp()

    @app.timer("orders", group="billing", retry=Backoff(1, attempts=1))
    async def bill(orders: list[int]) -> None:
        async def fail(order: int) -> None:
            raise ValueError(f"no order {order}")

        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(0))
            for order in orders:
                inner.create_task(fail(order))

    timers = timer_app(app)
    for orders in ([4], [7, 8, 9]):
        bill.schedule_sync(orders=orders)
        timers.advance(0)
    texts = ["ValueError: no order 4", "3 errors, the first: ValueError: no order 7"]
    lines = [each.getMessage() for each in caplog.records if "timer failed" in each.message]
    assert [line.split("error=")[1].split(" at=")[0] for line in lines] == list(map(repr, texts))
    assert all("test_worker_failures.py:" in line for line in lines)
    with timers.cluster.client() as client:
        letters = client.peek(LETTERS).messages
    assert [each.headers["dead-letter-detail"] for each in letters] == texts


def test_an_app_can_keep_the_texts_of_exceptions_out_of_dead_letters(timer_app: Run) -> None:
    app = TimerApp(send_errors=False)

    @app.timer("orders", group="billing", retry=Backoff(1, attempts=1))
    def bill(order: int) -> None:
        raise Reject("no such order") if order else ValueError("password=4711")

    timers = timer_app(app)
    for order in (0, 1):
        bill.schedule_sync(order=order)
        timers.advance(0)
    assert [str(each) for each in timers.errors] == ["password=4711", "no such order"]
    with timers.cluster.client() as client:
        letters = client.peek(LETTERS).messages
    assert [each.headers["dead-letter-detail"] for each in letters] == [
        "ValueError",
        "no such order",
    ]


def test_handler_chooses_the_pause_before_its_next_attempt(timer_app: Run) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Retry("busy", delay=timedelta(minutes=5))
    shop.cancel_unpaid.schedule_sync(order_id=1)
    for pause_s, attempts in ((0, 1), (299, 1), (1, 2), (299, 2)):
        timers.advance(pause_s)
        assert len(shop.calls) == attempts
    shop.fails = None
    timers.advance(1)
    assert (len(shop.calls), shop.contexts[-1].failures) == (3, 2)
    shop.fails = Retry("sooner than the backoff", delay=1)
    shop.cancel_unpaid.schedule_sync(order_id=2)
    timers.settle()
    shop.fails = RetryAfter("not sooner", delay=1)
    for pause_s, attempts in ((1, 5), (59, 5), (1, 6)):
        timers.advance(pause_s)
        assert len(shop.calls) == attempts
    only_first = pb.GroupSettings(backoff_ms_min=5_000)
    assert handler_runner._backoff_of(only_first).delay_s(3) == 5
    for wrong in (-1, timedelta(days=31)):
        with pytest.raises(InvalidRequest):
            Retry(delay=wrong)


def test_rejected_message_is_a_dead_letter_at_once_and_can_be_sent_back(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Reject("no such order")
    shop.cancel_unpaid.schedule_sync(order_id=1, key="k", headers={"a": "b"})
    timers.advance(1000)
    assert len(shop.calls) == 1
    [line] = [each.getMessage() for each in caplog.records if "timer rejected" in each.message]
    assert " final=True letters=orders.billing.dead error=" in line
    with timers.cluster.client() as client:
        [letter] = client.peek("orders.billing.dead").messages
        assert (letter.json(), letter.key) == ({"order_id": 1}, "k")
        assert (letter.headers["dead-letter-reason"], letter.headers["a"]) == ("rejected", "b")
        assert letter.headers["dead-letter-detail"] == "no such order"
        shop.fails = None
        assert client.redrive("orders.billing.dead") == 1
    timers.settle()
    assert len(shop.calls) == 2
    headers = shop.contexts[1].message.headers
    assert headers == {"a": "b", "content-type": "application/json"}


def test_rejection_whose_letter_is_denied_fails_with_its_own_text(
    timer_app: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Reject("no such order")
    denied = AsyncMock(side_effect=PermissionDenied("no rule"))
    monkeypatch.setattr(handler_runner, "write_letter", denied)
    shop.cancel_unpaid.schedule_sync(order_id=1)
    timers.advance(1000)
    assert timers.errors == [shop.fails] * 4
    lines = [each for each in caplog.messages if each.startswith("dead letter not written")]
    assert len(lines) == 4
    assert lines[0].endswith(" letters=orders.billing.dead error='PermissionDenied: no rule'")
    with timers.cluster.client() as client:
        [letter] = client.peek(LETTERS).messages
    assert letter.headers["dead-letter-detail"] == "Reject: no such order"


async def test_worker_gives_the_pauses_if_its_group_was_created_again_without_a_backoff(
    async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_runner, "PAUSE_S", 0.0)
    app, receive, calls = TimerApp(), AsyncConsumer.receive, list[int]()

    @app.timer("jobs", group="g", retry=Backoff(30))
    async def job(number: int) -> None:
        calls.append(number)
        if len(calls) < 5:
            raise ValueError("planted")

    async def create_again_and_deny(*_: object) -> NoReturn:
        monkeypatch.setattr(AsyncConsumer, "receive", receive)
        await client.delete_group("jobs", "g")
        await client.create_group("jobs", "g")
        raise PermissionDenied("no rule")

    async with (
        AsyncFakeCluster() as cluster,
        cluster.client() as client,
        async_timer_app(app, cluster=cluster) as timers,
    ):
        monkeypatch.setattr(AsyncConsumer, "receive", create_again_and_deny)
        await client.create_group("jobs", "g")
        await job.schedule(number=1)  # ends the present call
        await timers.advance(20)
        assert calls == [1, 1], "once in each of the two groups"
        timers.errors.clear()


def test_rejection_that_is_repeated_after_a_lost_ack_writes_one_letter(
    timer_app: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Reject()
    lost = lambda self, message: message.nack(0)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(HandlerRunner, "_ack", lost)
        shop.cancel_unpaid.schedule_sync(order_id=1)
        timers.settle()
        assert len(shop.calls) == 4  # then the cluster itself has made it a dead letter
    with timers.cluster.client() as client:
        reasons = [each.headers["dead-letter-reason"] for each in client.peek(LETTERS).messages]
    assert reasons == ["rejected", "nacked"]


def test_letters_of_workers_keep_the_headers_that_those_of_the_cluster_keep() -> None:
    deaths = [f"{'prior-' * n}dead-letter-{of}" for n in range(9) for of in ("reason", "detail")]
    others = ["a", "prior-a", "dead-letter-owner", "pre-prior-dead-letter-reason"]
    headers = {name: name for name in (*deaths, *others)}
    message: Any = SimpleNamespace(headers=headers, topic="t", id="i", queue_offset=3, failures=0)
    letter = letter_headers(message, "g")
    kept = {name: letter[name] for name in letter if letter[name] in headers}
    assert kept == _with_older_deaths(headers)
    assert {*dead_letters.HEADERS} == rejected_letters.HEADERS


def test_headers_of_earlier_deaths_get_a_prefix_more() -> None:
    names = {
        "dead-letter-reason": "nacked",
        "prior-dead-letter-reason": "expired",
        "prior-art": "x",
    }
    message: Any = SimpleNamespace(headers=names, topic="t", id="i", queue_offset=3, failures=0)
    headers = letter_headers(message, "g")
    assert headers["dead-letter-reason"] == "rejected"
    assert headers["prior-dead-letter-reason"] == "nacked"
    assert headers["prior-prior-dead-letter-reason"] == "expired"
    assert headers["prior-art"] == "x"


def test_text_of_a_rejection_is_cut_and_left_out_where_the_headers_have_no_room(
    timer_app: Run,
) -> None:
    assert detail_of(Reject()) == {}
    assert detail_of(Reject("\ud800a")) == {"dead-letter-detail": "?a"}
    [text] = detail_of(Reject("é" * 1_000)).values()
    assert (len(text.encode()), text) == (1_023, "é" * 510 + "…")
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Reject("x" * 1_000)
    shop.cancel_unpaid.schedule_sync(order_id=1, headers={"a": "b" * 32_000})
    timers.settle()
    with timers.cluster.client() as client:
        [letter] = client.peek(LETTERS).messages
    assert letter.headers["dead-letter-reason"] == "rejected"
    assert "dead-letter-detail" not in letter.headers


@pytest.mark.parametrize("raises", [False, True])
def test_nack_by_the_handler_stands(timer_app: Run, *, raises: bool) -> None:
    app, runs = TimerApp(), list[int]()

    @app.timer("polls", group="g", retry=Backoff(3_600, max=3_600, attempts=5))
    def poll() -> None:
        runs.append(app.context.message.attempt)
        if len(runs) == 1:
            _ = app.context.message.nack(delay=60)
            if raises:
                raise OSError

    timers = timer_app(app)
    poll.schedule_sync()
    timers.settle()
    assert runs == [1]
    timers.advance(61)
    assert runs == [1, 2]


async def test_message_that_its_handler_gives_back_has_not_failed() -> None:
    app, failures = TimerApp(), list[int]()

    @app.timer("polls", group="g")
    async def poll() -> None:
        failures.append(app.context.failures)
        if len(failures) == 1:
            _ = app.context.message.give_back()

    async with AsyncFakeApp(app) as timers:
        await poll.schedule()
        await timers.settle()
        assert timers._worker is not None
        [runner] = timers._worker.runners
    outcomes = {of.value: count for of, count in runner.metrics.outcomes.items() if count}
    assert (failures, outcomes) == ([0, 0], {"returned": 1, "done": 1})


def test_async_function_behind_a_decorator_that_is_not_async_runs(timer_app: Run) -> None:
    app, runs = TimerApp(), list[int]()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**arguments: Any) -> Any:
            return function(**arguments)

        return call

    @app.timer("polls", group="g", retry=Backoff(1, max=1, attempts=5))
    @counted
    async def poll(number: int) -> None:
        await asyncio.sleep(0)
        runs.append(number)
        if len(runs) == 1:
            raise OSError

    timers = timer_app(app)
    poll.schedule_sync(number=7)
    timers.settle()
    timers.advance(2)
    assert runs == [7, 7]


def test_error_of_on_error_is_logged_and_the_message_fails_once(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []

    def leave(*of: object) -> None:
        told.append(of)
        raise SystemExit

    shop = Shop(on_error=leave)
    timers = timer_app(shop.app)
    shop.fails = OSError()
    shop.cancel_unpaid.schedule_sync(order_id=1)
    timers.settle()
    assert len(told) == 1
    assert "on_error failed" in caplog.text


def test_generator_is_refused_as_a_handler(timer_app: Run) -> None:
    def steps() -> Any:
        yield

    app = TimerApp()
    hidden = app.timer("t", group="g", retry=Backoff(60, max=60, attempts=5))(lambda: steps())  # noqa: PLW0108
    timers = timer_app(app)
    hidden.schedule_sync()
    timers.settle()
    assert [type(each) for each in timers.errors] == [TypeError]
    with pytest.raises(InvalidRequest, match=r"handler .*steps: must be no generator"):
        TimerApp().timer("t", group="g")(steps)


@pytest.mark.parametrize("error", [GeneratorExit(), KeyboardInterrupt(), SystemExit(3)])
async def test_error_that_is_no_exception_is_a_failure_of_its_message(
    error: BaseException,
) -> None:
    shop = Shop()
    async with AsyncFakeApp(shop.app) as timers:
        shop.fails = error
        await shop.cancel_unpaid.schedule(order_id=1)
        await timers.settle()
        shop.fails = None
        await timers.advance(100)
    assert len(shop.calls) == 2
    assert timers.errors == [error]


def test_interrupt_while_a_handler_runs_ends_the_test(timer_app: Run) -> None:
    app = TimerApp()

    @app.timer("t", group="g", retry=Backoff(60, max=60, attempts=5))
    def handler() -> None:
        raise KeyboardInterrupt

    timers = timer_app(app)
    handler.schedule_sync()
    with pytest.raises(KeyboardInterrupt):
        timers.settle()


@pytest.mark.parametrize("is_seen", [True, False])
def test_deleted_topic_is_an_error_of_the_fake_app_once_and_none_of_its_exit(
    *, is_seen: bool
) -> None:
    shop = Shop()
    with FakeApp(shop.app) as timers, timers.cluster.client() as client:
        shop.cancel_unpaid.schedule_sync(order_id=1)
        timers.settle()
        client.delete_topic("orders")
        if is_seen:
            with pytest.raises(NotFound):
                _ = [*iter(timers.settle, "end")]


async def test_other_error_of_the_worker_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(_: Worker) -> None:
        await go.wait()
        raise PermissionDenied("no longer")

    go = asyncio.Event()
    monkeypatch.setattr(Worker, "_wait_until_stopped", end)
    async with AsyncFakeApp(Shop().app) as timers:
        go.set()
        assert timers._worker_task is not None
        await asyncio.wait([timers._worker_task])
        with pytest.raises(PermissionDenied):
            await timers.settle()


def test_rejection_without_a_readable_text_is_a_dead_letter(timer_app: Run) -> None:
    class Unreadable(Reject):
        def __str__(self) -> str:
            raise AttributeError

    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Unreadable()
    shop.cancel_unpaid.schedule_sync(order_id=1)
    timers.settle()
    with timers.cluster.client() as client:
        [letter] = client.peek(LETTERS).messages
    assert letter.headers["dead-letter-reason"] == "rejected"


def test_generator_that_ends_in_a_handler_is_an_error_like_others(timer_app: Run) -> None:
    app = TimerApp()

    @app.timer("orders", group="billing")
    def first() -> None:
        next(iter([]))

    timers = timer_app(app)
    first.schedule_sync()
    timers.settle()
    assert [str(each) for each in timers.errors] == ["the handler raised StopIteration"]


@pytest.mark.parametrize("stop", [BaseException("no"), BaseExceptionGroup("no", [SystemExit()])])
def test_exception_beside_exception_is_a_failure_like_others(
    stop: BaseException, timer_app: Run
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = stop
    shop.cancel_unpaid.schedule_sync(order_id=1)
    timers.advance(30 + 60 + 100)
    assert timers.errors == [stop] * 4
    with timers.cluster.client() as client:
        assert len(client.peek(LETTERS).messages) == 1


async def test_cancellation_that_is_not_the_workers_is_a_failure_like_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, runs = TimerApp(), list[int]()

    @app.timer("orders", group="billing", retry=Backoff(30, max=100, attempts=4))
    async def bill() -> None:
        runs.append(app.context.failures)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if len(runs) == 1:
            raise Reject  # the cancellation comes while the worker writes the letter
        await asyncio.sleep(0)

    async with AsyncFakeApp(app) as timers:
        await bill.schedule()
        for pause_s, attempts in ((0, 1), (29, 1), (1, 2), (59, 2), (1, 3)):
            await timers.advance(pause_s)
            assert len(runs) == attempts
        assert runs == [0, 1, 2]
        assert [type(each) for each in timers.errors] == [asyncio.CancelledError] * 3
    assert caplog.text.count("timer failed: handler=") == 3


def test_exception_that_breaks_its_own_description_is_a_failure_like_others(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    class Busy(Retry):
        def __init__(self) -> None:
            """Leave out the base class, as applications do."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise SystemExit

    shop = Shop()
    timers = timer_app(shop.app)
    shop.cancel_unpaid.schedule_sync(order_id=1, delay=1)
    soon = Retry(delay=1)
    soon.delay_s = -1
    for fails, pause_s in ((Busy(), 1), (Silent(), 30), (soon, 60)):
        shop.fails = fails
        timers.advance(pause_s)
    assert [each.failures for each in shop.contexts] == [0, 1, 2]
    shop.fails = None
    timers.advance(100)
    assert len(shop.calls) == 4
    worker = timers._inner._worker
    assert worker is not None
    assert worker.runners[0].metrics.outcomes[Outcome.FAILED] == 3
    assert caplog.text.count("timer failed: handler=") == 3


@pytest.mark.parametrize("payload", [b"\xff", b"[]", b"{}", b'{"order_id":"1"}', b'{"x":1}'])
def test_payload_without_the_arguments_is_a_dead_letter_after_all_attempts(
    payload: bytes, timer_app: Run
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    with timers.cluster.client() as client:
        client.schedule("orders", payload)
        timers.advance(30 + 60 + 99)
        assert len(timers.errors) == 3
        timers.advance(1)
        assert shop.calls == []
        [letter] = client.peek("orders.billing.dead").messages
        assert letter.payload == payload


def test_group_without_a_backoff_is_not_retried_at_full_speed(timer_app: Run) -> None:
    app = TimerApp()

    @app.timer("orders", group="billing", retry=None)
    def fail() -> None:
        raise OSError

    timers = timer_app(app)
    fail.schedule_sync()
    for pause_s, errors in ((0, 1), (1, 2), (1, 2), (1, 3), (3, 3), (1, 4)):
        timers.advance(pause_s)
        assert len(timers.errors) == errors


def test_app_has_its_former_cluster_again_though_its_client_can_not_be_closed() -> None:
    shop = Shop(url="timers://here:1", timeout=0.2)
    timers = FakeApp(shop.app).__enter__()
    shop.app.thread_client.schedule("t", b"p")
    consumer = shop.app.thread_client.consumer("t", "g")
    timers.settle()
    [message] = consumer.receive()
    timers.cluster.disconnect()
    _ = message.ack()
    with pytest.raises(OutcomeUnknown):
        timers.__exit__()
    assert shop.app.url() == "timers://here:1"
    with pytest.raises(RuntimeError, match="closed"):
        timers.cluster.advance(1)
