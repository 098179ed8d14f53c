"""Handlers of timers on an in-memory cluster: what runs when, and what becomes of failures."""

import asyncio
import functools
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from timer.leader.groups import dead_letters
from timer.leader.groups.dead_letters import _put_off
from timerclient import (
    Backoff,
    InvalidRequest,
    Reject,
    Retry,
    TimerApp,
    TimerContext,
    Worker,
)
from timerclient.rows.messages import Acking, Message
from timerclient.values.codecs import Codec
from timerclient.values.results import AckResult
from timerclient.worker import handler_arguments, rejected_letters
from timerclient.worker.handler_runner import LOG, HandlerRunner
from timerclient.worker.rejected_letters import detail_of, letter_headers
from timerclient.worker.worker_metrics import Outcome
from timerclient.worker.worker_port import CONNECTIONS_MAX, WorkerPort
from timerfake import AsyncFakeApp, AsyncFakeCluster, FakeApp

Run = Callable[..., FakeApp]
MINUTE = timedelta(minutes=1)
LETTERS = "orders.billing.dead"


class Shop:
    """An app with a handler of each kind; `calls` has their arguments."""

    def __init__(self, **options: Any) -> None:
        self.app = TimerApp(**options)
        self.calls: list[Any] = []
        self.contexts: list[TimerContext] = []
        self.fails: BaseException | None = None

        @self.app.timer("orders", group="billing", retry=Backoff(30, max=100, attempts=4))
        async def cancel_unpaid(order_id: int, reason: str = "unpaid") -> None:
            self.calls.append((order_id, reason))
            self.contexts.append(self.app.context)
            if self.fails is not None:
                raise self.fails

        @self.app.timer("mails", group="senders")
        def send_mail(to: str) -> None:
            self.calls.append((to, threading.current_thread()))
            if to == "again":
                send_mail.schedule_sync(to="end", delay=MINUTE)

        self.cancel_unpaid, self.send_mail = cancel_unpaid, send_mail


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


def test_handler_runs_when_its_timer_is_due_with_its_arguments(timer_app: Run) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.cancel_unpaid.schedule_sync(order_id=4711, delay=30 * MINUTE, key="order-4711")
    timers.advance(29 * MINUTE)
    assert shop.calls == []
    timers.advance(MINUTE)
    assert shop.calls == [(4711, "unpaid")]
    [context] = shop.contexts
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


def test_failure_is_tried_again_after_the_backoff_and_then_a_dead_letter(
    timer_app: Run, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = ValueError("no such\norder")
    timer = shop.cancel_unpaid.schedule_sync(order_id=1)
    for pause_s, attempts in ((0, 1), (29, 1), (1, 2), (60, 3), (99, 3), (1, 4), (1000, 4)):
        timers.advance(pause_s)
        assert len(shop.calls) == attempts
    assert {each.id for each in shop.contexts} == {timer.id}
    assert timers.errors == [shop.fails] * 4
    lines = [each.getMessage() for each in caplog.records if "timer failed" in each.message]
    assert len(lines) == 4
    levels = [each.levelname for each in caplog.records if "timer failed" in each.message]
    assert levels == ["WARNING"] * 3 + ["ERROR"]
    assert lines[3].startswith("timer failed for good, see orders.billing.dead: handler=")
    assert "\n" not in lines[1]
    assert f"topic=orders group=billing id={timer.id} attempt=2 failures=1" in lines[1]
    assert "error='ValueError: no such order' at=" in lines[1]
    assert "test_worker.py:" in lines[1]
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
    assert all("test_worker.py:" in line for line in lines)
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
    for wrong in (-1, timedelta(days=31)):
        with pytest.raises(InvalidRequest):
            Retry(delay=wrong)


def test_rejected_message_is_a_dead_letter_at_once_and_can_be_sent_back(timer_app: Run) -> None:
    shop = Shop()
    timers = timer_app(shop.app)
    shop.fails = Reject("no such order")
    shop.cancel_unpaid.schedule_sync(order_id=1, key="k", headers={"a": "b"})
    timers.advance(1000)
    assert len(shop.calls) == 1
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
    assert {name: letter[name] for name in letter if letter[name] in headers} == _put_off(headers)
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


def test_generator_is_refused_as_a_handler() -> None:
    def steps() -> Any:
        yield

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


async def test_worker_of_another_version_changes_the_settings_of_the_group(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        for attempts in (3, 5):
            app = TimerApp()
            app.timer("t", group="g", retry=Backoff(1, attempts=attempts))(lambda: None)
            async with async_timer_app(app, cluster=cluster):
                [topic] = await client.topics()
                assert topic.groups[0].settings.max_attempts == attempts


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "order_id: Shop.__init__.<locals>.cancel_unpaid needs this argument"),
        ({"order_id": "1"}, "order_id = str: Shop.__init__.<locals>.cancel_unpaid takes int"),
        ({"order_id": True}, "order_id = bool: "),
        ({"order_id": 1, "dealy": 3}, "dealy: .* it has: order_id, reason"),
        ({"order_id": 1, "delay": -1}, "delay = -1: must be 0 to"),
    ],
)
def test_wrong_arguments_are_rejected_when_they_are_scheduled(
    given: dict[str, Any], text: str, timer_app: Run
) -> None:
    shop = Shop()
    timer_app(shop.app)
    with pytest.raises(InvalidRequest, match=text):
        shop.cancel_unpaid.schedule_sync(**given)


@pytest.mark.parametrize(
    ("value", "wanted", "fits"),
    [
        (1, float, True),
        (1.0, int, False),
        (None, int | None, True),
        ([1, None], list[int | None], True),
        ([1, "a"], list[int], False),
        ({"a": [1]}, dict[str, list[int]], True),
        ({"a": 1}, dict[str, str], False),
        ("a", Literal["a", "b"], True),
        (1, Literal[True], False),
        (object(), Any, True),
        (True, bool, True),
        (True, int, False),
        (True, Codec, True),
        (1, Codec, True),
        ([1], list[Codec], True),
    ],
)
def test_value_fits_its_annotation(value: object, wanted: Any, fits: bool) -> None:
    assert (handler_arguments.fitted(value, wanted) is not handler_arguments.UNFIT) is fits


class Colour(StrEnum):
    """An argument that JSON has as text."""

    RED = "red"


def test_schedule_accepts_the_arguments_that_the_worker_accepts(timer_app: Run) -> None:
    app, calls = TimerApp(), list[Any]()

    @app.timer("orders", group="billing")
    async def bill(
        pair: tuple[int, str],
        pairs: list[tuple[int, ...]] | None = None,
        colours: dict[Colour, tuple] = {},  # type: ignore[type-arg]  # noqa: B006
        names: dict[int, str] | None = None,
    ) -> None:
        calls.append((pair, pairs, colours))

    timers = timer_app(app)
    good = {"pair": (1, "a"), "pairs": [(1,), (2, 3)], "colours": {Colour.RED: (4,)}}
    bill.schedule_sync(**good)
    timers.settle()
    assert calls == [(*good.values(),)]
    assert type(next(iter(calls[0][2]))) is Colour
    for pair in ((1,), (1, 2), (1, "a", "b")):
        with pytest.raises(InvalidRequest, match=r"pair = tuple: .* takes tuple\[int, str\]$"):
            bill.schedule_sync(pair=pair)
    with pytest.raises(InvalidRequest, match=r"names = dict: .*, which application/json does not"):
        bill.schedule_sync(pair=(1, "a"), names={1: "a"})
    assert timers.errors == []


def test_handler_that_can_not_be_called_by_names_is_refused() -> None:
    app = TimerApp()

    def options(key: str) -> None: ...
    def many(*args: int) -> None: ...
    def fine() -> None: ...

    for function, text in ((options, "key"), (many, "args")):
        with pytest.raises(InvalidRequest, match=text):
            app.timer("t", group="g")(function)
    app.timer("t", group="g")(fine)
    with pytest.raises(InvalidRequest, match=r"group = 'g': .*fine has it in 't'"):
        app.timer("t", group="g")(fine)
    for wrong in ({"concurrency": 0}, {"retry": Backoff(1)} | {"group": ""}):
        with pytest.raises(InvalidRequest):
            app.timer("t", **{"group": "h", **wrong})(fine)  # type: ignore[arg-type]
    for topic, group in (("bad topic", "g"), ("t/", "g"), ("t", "a/b")):
        with pytest.raises(InvalidRequest, match="must be 1 to 255 of A-Z a-z 0-9"):
            app.timer(topic, group=group)
    for first, more in ((0, {}), (2, {"max": 1}), (1, {"attempts": 1001}), ("1", {})):
        with pytest.raises(InvalidRequest):
            Backoff(first, **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no handler"):
        Worker(TimerApp())
    with pytest.raises(RuntimeError, match=r"in other threads use app\.thread_client"):
        _ = Shop().app.client
    with pytest.raises(RuntimeError, match=r"app\.context is for a handler"):
        app.context  # noqa: B018


async def test_drain_waits_for_handlers_and_returns_the_rest_at_once(
    async_timer_app: type[AsyncFakeApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, begun, ended, go = TimerApp(), [], [], asyncio.Event()
    details, nack = list[str](), Message.nack

    def noted(message: Message, delay: float | None = None, *, detail: str = "") -> Any:
        details.append(detail)
        return nack(message, delay, detail=detail)

    def on_info(text: str, *_: object) -> None:
        if text.startswith("draining"):
            asyncio.get_running_loop().call_soon(go.set)

    @app.timer("jobs", group="g", concurrency=2)
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
        await timers._running  # type: ignore[misc]
        running = asyncio.create_task(worker.run())
        for number in range(3):
            await job.schedule(number=number)
        while len(begun) < 2:
            await timers.cluster.settle()
        monkeypatch.setattr(LOG, "info", on_info)
        monkeypatch.setattr(Message, "nack", noted)
        worker.stop()
        await running
        assert details == ["the worker stopped before the handler ended"]
        assert (begun, ended, worker.left_running) == ([0, 1], [0], 1)
        [topic] = await client.topics()
        assert (topic.groups[0].unacked, topic.groups[0].leased) == (2, 0)
        async with client.consumer("jobs", group="g") as consumer:
            await timers.cluster.settle()
            rest = [each async for each in _all(consumer)]
            assert {each.json()["number"]: each.failures for each in rest} == {1: 1, 2: 0}
            for each in rest:
                _ = each.ack()
        timers.cluster.works.append(timers._until_idle)


async def test_messages_that_no_handler_has_begun_return_when_the_drain_begins(
    async_timer_app: type[AsyncFakeApp],
) -> None:
    app, begun, go = TimerApp(), asyncio.Event(), asyncio.Event()

    @app.timer("jobs", group="g", concurrency=1)
    async def job(number: int) -> None:
        begun.set()
        await go.wait()

    async with async_timer_app(app) as timers, timers.cluster.client() as client:
        worker, running = timers._worker, timers._running
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
        timers.cluster.works.append(timers._until_idle)


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
        await timers._running  # type: ignore[misc]
        with monkeypatch.context() as patched:
            patched.setattr(HandlerRunner, "close", close)
            for name in ("CANCEL_S", "CLOSE_S", "CLOSE_S_MIN"):
                patched.setattr(f"timerclient.worker.worker.{name}", 0.01)
            worker = Worker(app, drain=0.01)
            worker.stop()
            async with asyncio.timeout(20):
                await worker.run()
        assert cut == {*worker.runners}
        timers.cluster.works.append(timers._until_idle)


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
    app, seen, go = TimerApp(), [], asyncio.Event()

    @app.timer("orders", group="billing", hold_max=MINUTE)
    async def slow() -> None:
        seen.append(app.context)
        await go.wait()

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
            await timers.settle()
        timers.cluster.works.append(timers._until_idle)
        await timers.settle()
        assert timers._worker is not None
        assert timers._worker.runners[0].metrics.outcomes[Outcome.LOST] == 1
    assert f"ack failed, the timer may run again: handler={slow.name}" in caplog.text
    assert "LeaseLost" in caplog.text


@pytest.mark.parametrize("end", ["dead letter", "expired"])
async def test_message_that_ends_under_a_handler_is_lost_for_it_and_a_warning(
    async_timer_app: type[AsyncFakeApp], caplog: pytest.LogCaptureFixture, end: str
) -> None:
    app, seen, go = TimerApp(), [], asyncio.Event()

    @app.timer("orders", group="billing", hold_max=MINUTE, retry=Backoff(1, attempts=1))
    async def slow() -> None:
        seen.append(app.context)
        await go.wait()

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
        await timers.settle()
        timers.cluster.works.append(timers._until_idle)
        await timers.settle()
        assert timers._worker is not None
        outcomes = timers._worker.runners[0].metrics.outcomes
        assert (outcomes[Outcome.DONE], outcomes[Outcome.LOST]) == (1, 1)
    result = {"dead letter": "DEAD_LETTERED", "expired": "EXPIRED"}[end]
    assert f"ack too late: handler={slow.name}" in caplog.text
    assert f"result={result}" in caplog.text


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
        timers.cluster.works.append(timers._until_idle)
