"""The client for threads: the same, from blocking code."""

import _thread
import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.timerclient.conftest import QUICK, Threaded
from tests.timerclient.fake_cluster import wire_error
from timerclient import (
    AckResult,
    AlreadyExists,
    AsyncTimerClient,
    CancelResult,
    NewTimer,
    TimerApp,
    TimerClient,
)
from timerclient.client import aio
from timerclient.client.consumers import Consumers
from timerclient.client.sync import Consumer
from timerclient.proto import timer_pb2 as pb
from timerclient.streams import node_channel, producer
from timerclient.streams.nodes import Nodes
from timerclient.streams.subscription import Subscription
from timerclient.threads import background
from timerclient.threads.background import Budget
from timerclient.values import errors
from timerclient.worker.timer_app import AppConnection


def connect(threaded: Threaded) -> TimerClient:
    return TimerClient(threaded.cluster.address, timeout=60, settings=QUICK)


def test_tour(threaded: Threaded) -> None:
    with connect(threaded) as client:
        timer = client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30), key="k")
        timers = client.schedule_batch("orders", [b"a", b"b"], due_ms=[2 * 10**12] * 2)
        assert client.cancel(timer.id) == CancelResult.CANCELLED
        assert client.cancel_batch(timers) == [CancelResult.CANCELLED] * 2
        client.schedule_batch("orders", [b"c"] * 3)
        with client.consumer("orders", group="billing", lease=timedelta(seconds=30)) as consumer:
            ackings = [next(consumer).ack() for _ in range(3)]
        assert [acking.result(0) for acking in ackings] == [AckResult.ACKED] * 3


def test_client_prints_its_nodes_and_that_it_is_closed() -> None:
    client = TimerClient("a:1, b:2")
    client.close()
    assert repr(client) == "TimerClient(a:1,b:2, closed)"
    assert repr(AsyncTimerClient(["a:1"])) == "AsyncTimerClient(a:1)"


@pytest.mark.parametrize("kind", [TimerClient, AsyncTimerClient])
def test_client_needs_threads_that_gevent_has_not_replaced(
    kind: type[TimerClient | AsyncTimerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = SimpleNamespace(__module__="gevent.thread")
    monkeypatch.setattr(_thread, "start_new_thread", replaced)
    with pytest.raises(RuntimeError, match="gevent has replaced threads"):
        kind("127.0.0.1:1")


@contextlib.contextmanager
def at_signal(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle` once, at the first SIGUSR1."""
    calls = iter([handle])
    before = signal.signal(signal.SIGUSR1, lambda *_: [call() for call in calls])
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def after_signal(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return call(*args, **named)

    return called


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AppConnection, "url"),
        (aio, "check_not_forked"),
        (background, "check_threads"),
        (asyncio, "new_event_loop"),
        (threading.Thread, "start"),
    ],
)
def test_signal_handler_gets_the_client_that_its_thread_looks_for(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, found = TimerApp("timers://127.0.0.1:1"), list[TimerClient]()
    monkeypatch.setattr(background, "_loops", loops := dict[int, asyncio.AbstractEventLoop]())
    monkeypatch.setattr(owner, name, after_signal(getattr(owner, name)))
    with at_signal(lambda: found.append(app.thread_client)):
        found.append(app.thread_client)
        app.close_sync()
        found.append(app.thread_client)
    first, second, third = found
    assert first is second
    assert [first._background.loop] == [*loops.values()]
    assert "closed" in repr(first)
    assert "closed" not in repr(third)
    first._background.loop.call_soon_threadsafe(first._background.loop.stop)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("owner", "name"), [(AppConnection, "url"), (Nodes, "abandon"), (aio, "check_not_forked")]
)
def test_signal_handler_gets_the_client_of_the_running_loop(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, found = TimerApp("timers://127.0.0.1:1"), list[AsyncTimerClient]()
    *ended, loop = (asyncio.new_event_loop() for _ in range(3))

    async def look() -> None:
        found.append(app.client)
        app.client.nodes()

    for each in ended:
        each.run_until_complete(look())
    for each in ended:
        each.close()
    monkeypatch.setattr(owner, name, after_signal(getattr(owner, name)))
    with at_signal(lambda: found.append(app.client)), contextlib.closing(loop):
        loop.run_until_complete(look())
    assert found[2] is found[3]
    assert [*app.connection.clients] == [loop]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_client_that_a_thread_makes_during_a_connect_is_of_the_former_cluster(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> object:
        return app.client if kind == "loop" else app.thread_client

    app, former = TimerApp("timers://127.0.0.1:1"), list[AppConnection]()
    monkeypatch.setattr(aio, "check_not_forked", after_signal(vars(aio)["check_not_forked"]))
    with (
        at_signal(lambda: former.append(app.connect(AppConnection("timers://127.0.0.1:2", {})))),
        contextlib.closing(asyncio.new_event_loop()) as loop,
    ):
        found = [loop.run_until_complete(look()) for _ in range(2)]
        app.connect(former[0])
        assert loop.run_until_complete(look()) is found[0]
    assert [repr(each)[-12:-1] for each in found] == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.timeout(20)
def test_call_of_a_signal_handler_ends_though_its_thread_looks_for_the_client_of_an_app(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule() -> None:
        future = client.submit("orders", b"p", delay=60)
        future.add_done_callback(lambda _: seen.append(app.thread_client))  # the clients' thread
        client.schedule("orders", b"p", delay=60)

    app, seen = TimerApp("timers://127.0.0.1:1"), list[TimerClient]()
    monkeypatch.setattr(AppConnection, "url", after_signal(AppConnection.url))
    with connect(threaded) as client, at_signal(schedule):
        assert app.thread_client is app.thread_client
    assert seen == [app.thread_client]


@pytest.mark.timeout(20)
def test_call_of_a_signal_handler_ends_though_its_thread_makes_a_client(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noted(SimpleNamespace):
        is_closed = False

        @property
        def pid(self) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return os.getpid()

    client, found = connect(threaded), list[str]()
    monkeypatch.setattr(node_channel, "_channels", weakref.WeakValueDictionary())
    schedule = lambda: found.append(client.schedule("orders", b"p", delay=60).id)  # noqa: E731
    with client, at_signal(schedule):
        node_channel.note_channel(noted := Noted())  # type: ignore[arg-type]
        TimerClient("127.0.0.1:1").close()
    assert found, noted


async def test_asyncio_client_refuses_calls_on_another_event_loop(threaded: Threaded) -> None:
    threaded.seed("orders", [b"p"])
    client = AsyncTimerClient(threaded.cluster.address, settings=QUICK)
    await client.count_timers("orders")  # makes no producer, which the wrong loop could make
    for call in (
        lambda: client.schedule_batch("orders", [b"p"]),
        lambda: client.schedule("orders", b"p"),
        lambda: client.count_timers("orders"),
        lambda: client.consumer("orders", "g").receive(),
    ):
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, call())
    assert await client.schedule_batch("orders", [b"p"]), "here it still works"
    await client.close()


def test_naive_datetime_is_refused(threaded: Threaded) -> None:
    with connect(threaded) as client, pytest.raises(ValueError, match="naive"):
        client.schedule("orders", b"p", due=datetime(2030, 1, 1))  # noqa: DTZ001


def test_error_of_a_row_names_its_key(threaded: Threaded) -> None:
    with connect(threaded) as client:
        client.schedule("orders", b"p", key="k", delay=60)
        timers = client.schedule_batch("orders", [b"q"], keys=["k"], delay=60)
        with pytest.raises(AlreadyExists, match="key = 'k'"):
            _ = timers[0]


def test_submitted_batches_keep_their_order(threaded: Threaded) -> None:
    with connect(threaded) as client:
        futures = [client.submit_batch("orders", [b"%d" % i]) for i in range(200)]
        futures += [client.submit("orders", b"single")]  # type: ignore[list-item]
        done, _ = wait(futures, timeout=60)
        assert len(done) == 201
    expected = [*(b"%d" % i for i in range(200)), b"single"]
    assert [row.payload for row in threaded.cluster.rows] == expected


def test_threads_share_a_client_and_its_requests(threaded: Threaded) -> None:
    with connect(threaded) as client, ThreadPoolExecutor(16) as pool:
        timers = list(pool.map(lambda i: client.schedule("orders", b"%d" % i), range(400)))
    assert len({timer.id for timer in timers}) == 400
    assert len(threaded.cluster.requests) < 400


def test_failover_goes_unnoticed(threaded: Threaded) -> None:
    cluster = threaded.cluster
    with connect(threaded) as client:
        client.schedule("orders", b"a")
        threaded.run(cluster.fail_over(1))
        threaded.run(cluster.nodes[0].stop())
        client.schedule("orders", b"b")
    assert [row.payload for row in cluster.rows] == [b"a", b"b"]


def test_timeout_is_an_unknown_outcome(threaded: Threaded) -> None:
    with connect(threaded) as client:
        client.schedule("orders", b"first")  # what follows takes no time for the way there
        threaded.cluster.on_schedule = lambda _: wire_error(pb.REASON_COMMIT_TIMEOUT)
        with pytest.raises(errors.OutcomeUnknown):
            client.schedule("orders", b"p", timeout=3)
        threaded.cluster.on_schedule = lambda _: None


def test_consumer_hands_over_messages_batches_and_timeouts(threaded: Threaded) -> None:
    cluster = threaded.cluster
    threaded.seed("orders", [b"%d" % i for i in range(500)])
    with connect(threaded) as client:
        client.create_group("orders", "two")
        with client.consumer("orders", "one", max_messages=500) as consumer:
            payloads = []
            for message in consumer:
                payloads.append(message.payload)
                _ = message.ack()
        assert payloads == [b"%d" % i for i in range(500)]
        assert cluster.acked == set(range(500))
        with client.consumer("orders", "two", max_messages=500) as consumer:
            assert sum(batch.ack().result(60) for batch in consumer.batches()) == 500
        with client.consumer("empty", "one") as consumer:
            assert consumer.receive(timeout=0.02) == []


def test_rest_of_a_batch_goes_with_its_stream(threaded: Threaded) -> None:
    cluster = threaded.cluster
    threaded.seed("orders", [b"%d" % i for i in range(6)])
    with connect(threaded) as client, client.consumer("orders", "g", window=6) as consumer:
        lost: list[str | None] = ["lose"]
        cluster.on_ack = lambda _: lost.pop() if lost else None
        assert next(consumer).ack().result(60) == AckResult.ALREADY_ACKED
        [one] = consumer.receive()
        assert [(m.queue_offset, m.attempt) for m in (one, next(consumer))] == [(1, 2), (2, 2)]


def test_consumer_is_woken_by_a_close_from_another_thread(threaded: Threaded) -> None:
    with connect(threaded) as client:
        consumer = client.consumer("orders", "g")
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.extend(consumer))
        thread.start()
        consumer.close()
        thread.join(60)
        assert not thread.is_alive()
        with pytest.raises(StopIteration):
            next(consumer)


def test_refused_consumer_raises_at_once(threaded: Threaded) -> None:
    with connect(threaded) as client, pytest.raises(errors.InvalidRequest, match="group = '-'"):
        client.consumer("orders", "-")


def test_error_in_the_block_is_not_replaced_by_the_closing(threaded: Threaded) -> None:
    threaded.seed("orders", [b"p"])
    threaded.cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)

    def work() -> None:
        with (
            TimerClient(threaded.cluster.address, timeout=60, settings=QUICK) as client,
            client.consumer("orders", "g") as consumer,
        ):
            _ = next(consumer).ack()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_closed_client_refuses_everything(threaded: Threaded) -> None:
    client = connect(threaded)
    client.schedule("orders", b"p")
    client.close()
    client.close()
    for call in (
        lambda: client.schedule("orders", b"p"),
        lambda: client.cancel("0" * 24),
        lambda: client.consumer("orders", "g"),
        client.status,
    ):
        with pytest.raises(errors.Closed):
            call()


def test_closed_consumer_refuses_to_receive_and_prints_its_group(threaded: Threaded) -> None:
    with connect(threaded) as client:
        with client.consumer("orders", "g", name="c-1") as consumer:
            assert repr(consumer) == "Consumer('orders', group='g', name='c-1')"
        assert repr(consumer) == "Consumer('orders', group='g', name='c-1', closed)"
        for timeout in (None, 0, 5):
            with pytest.raises(errors.Closed, match="the consumer is closed"):
                consumer.receive(timeout=timeout)
        assert list(consumer) == []


def test_closing_leaves_no_thread_and_no_warning(threaded: Threaded) -> None:
    before = set(threading.enumerate())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with connect(threaded) as client:
            client.schedule("orders", b"p")
            next(client.consumer("orders", "g"))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert not {t for t in set(threading.enumerate()) - before if t.name == "timerclient"}


def test_budget_blocks_until_bytes_are_given_back() -> None:
    budget = Budget(10)
    budget.take(100, 1)
    with pytest.raises(errors.Overloaded, match="unanswered"):
        budget.take(1, 0.01)
    budget.release(100)
    budget.take(6, 1)
    taken = threading.Thread(target=lambda: budget.take(6, 60))
    taken.start()
    budget.release(6)
    taken.join(60)
    assert not taken.is_alive()


def test_close_refuses_what_is_no_timeout_and_closes_nothing(threaded: Threaded) -> None:
    with connect(threaded) as client, client.consumer("orders", "g") as consumer:
        for closes in (consumer, client):
            with pytest.raises(errors.InvalidRequest, match="timeout"):
                closes.close(0)
        assert client.schedule("orders", b"y", delay=60).id
        assert not consumer.closed


def test_what_is_given_may_be_read_from_the_client_itself(threaded: Threaded) -> None:
    with connect(threaded) as client:

        def scheduled(n: int) -> Iterator[bytes]:
            for at in range(n):
                yield client.schedule("orders", b"%d" % at, delay=60).raw

        def keyed(*numbers: int) -> Iterator[str]:
            for n in numbers:
                client.schedule("orders", b"x", delay=60, key=f"k{n}")
                yield f"k{n}"

        def later(n: int) -> Iterator[int]:
            yield from (client.schedule("orders", b"x", delay=60).due_ms for _ in range(n))

        assert client.cancel_batch(scheduled(2)) == [CancelResult.CANCELLED] * 2
        assert [each.timer for each in client.reschedule_batch(scheduled(2), due_ms=later(2))]
        assert len(client.cancel_keys("orders", keyed(5, 6))) == 2
        assert len(client.reschedule_keys("orders", keyed(7, 8), delay=9)) == 2
        named = client.schedule_batch(
            "orders", scheduled(3), request_id="r", due_ms=later(3), keys=(None for _ in range(3))
        )
        assert len(named) == 3
        each = (NewTimer("orders", raw, delay=1) for raw in scheduled(2))
        assert len(client.schedule_all(each)) == 2


def test_callback_submits_and_is_refused_what_would_wait(threaded: Threaded) -> None:
    threaded.seed("orders", [b"p"])
    settings = dataclasses.replace(QUICK, submitted_bytes_max=100)
    address = threaded.cluster.address
    with (
        TimerClient(address, timeout=60, settings=settings) as client,
        client.consumer("orders", "g", max_messages=2) as consumer,
    ):
        next(consumer)
        told = list[object]()
        done = threading.Event()

        def callback(_: object) -> None:
            for work in (
                lambda: client.submit("orders", b"then", delay=60),
                lambda: client.submit("orders", bytes(90), delay=60),  # there is no room for it
                lambda: client.schedule("orders", b"now", delay=60),
                lambda: client.schedule_batch("orders", [b"now"], delay=60),
                lambda: client.submit("orders", b"p", delay=60).result(),
                lambda: client.submit("orders", b"p", delay=60).exception(),
                client.status,
                lambda: next(consumer),
                consumer.close,
                client.close,
            ):
                try:
                    told.append(work())
                except (errors.TimerError, RuntimeError) as error:
                    told.append(error)
            done.set()

        attached = threading.Event()
        threaded.cluster.on_schedule = lambda _: _after(attached)
        client.submit("orders", b"first", delay=60).add_done_callback(callback)
        attached.set()
        assert done.wait(60)
        then, full, *refused = told
        assert isinstance(then, Future)
        assert then.result(60).id
        assert isinstance(full, errors.Overloaded)
        assert [type(each) for each in refused] == [RuntimeError] * 8
        assert client.schedule("orders", b"still", delay=60).id
        assert b"now" not in [row.payload for row in threaded.cluster.rows]
        assert not consumer.closed


def test_callback_that_exits_is_logged_and_ends_nothing(
    threaded: Threaded, caplog: pytest.LogCaptureFixture
) -> None:
    threaded.seed("orders", [b"p"])

    def leave(_: object) -> None:
        sys.exit("enough")

    with connect(threaded) as client, client.consumer("orders", "g") as consumer:
        attached = threading.Event()
        threaded.cluster.on_schedule = lambda _: _after(attached)
        submitted = client.submit("orders", b"first", delay=60)
        submitted.add_done_callback(leave)
        attached.set()
        assert submitted.result(60).id
        assert client.status().cluster_id == "fake"
        assert client.schedule("orders", b"then", delay=60).id
        attached.clear()
        threaded.cluster.on_ack = lambda _: _after(attached)
        acking = next(consumer).ack()
        acking.add_done_callback(leave)
        attached.set()
        assert acking.result(60) == AckResult.ACKED
        consumer.flush()
        with pytest.raises(SystemExit):  # it is done: this is the caller's own thread
            acking.add_done_callback(leave)
    assert [r.getMessage() for r in caplog.records].count(
        "a future's callback wanted to end the clients' thread"
    ) == 2


def test_event_handler_that_exits_is_logged_and_ends_nothing(
    threaded: Threaded, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: object) -> None:
        sys.exit("enough")

    with TimerClient(threaded.cluster.address, timeout=60, on_event=leave) as client:
        assert client.schedule("orders", b"p", delay=60).id
    assert "on_event failed" in caplog.text


def test_generator_that_is_left_in_a_block_does_not_hold_up_the_end_of_the_process(
    threaded: Threaded,
) -> None:
    threaded.seed("orders", [b"p", b"q"])
    code = f"""
from timerclient import TimerClient

def messages():
    with TimerClient("{threaded.cluster.address}") as client:
        with client.consumer("orders", "g") as consumer:
            yield from consumer

each = messages()
assert next(each).payload == b"p"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def _after(event: threading.Event) -> None:
    assert event.wait(60)


def test_time_that_a_full_budget_took_is_the_calls_own(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded.cluster.on_schedule = lambda _: wire_error(pb.REASON_COMMIT_TIMEOUT)
    with connect(threaded) as client:
        readings = iter((7.0, 67.0))  # as the call begins, and as the producer receives it
        monkeypatch.setattr(producer, "time", SimpleNamespace(monotonic=lambda: next(readings)))
        held_up = client.submit("orders", b"p", timeout=60)
        with pytest.raises(errors.Unavailable, match="within 60 s"):
            held_up.result(30)
        threaded.cluster.on_schedule = lambda _: None


def test_close_closes_all_consumers_though_one_raises(threaded: Threaded) -> None:
    threaded.seed("orders", [b"p"])
    client = connect(threaded)
    bad, good = client.consumer("orders", "bad"), client.consumer("quiet", "good")
    threaded.cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)
    acking = next(bad).ack()
    with pytest.raises(errors.OutcomeUnknown):
        client.close(0.2)
    threaded.cluster.on_ack = lambda _: None
    assert bad.closed
    assert good.closed
    assert isinstance(acking.exception(60), errors.OutcomeUnknown)
    client.close()  # again: it is done


def test_close_closes_consumers_together(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, begun = Subscription.close, asyncio.Barrier(3)

    async def closing(subscription: Subscription, within_s: float) -> None:
        assert within_s == 60
        async with asyncio.timeout(30):
            await begun.wait()
        await close(subscription, within_s)

    client = connect(threaded)
    consumers = [client.consumer("orders", name) for name in ("a", "b", "c")]
    monkeypatch.setattr(Subscription, "close", closing)
    client.close(60)
    assert all(each.closed for each in consumers)


def test_consumer_that_comes_while_others_are_looked_through_is_closed_too(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(threaded) as client:
        came: list[Consumer] = []
        for _ in range(Consumers.SWEEP_AT - 1):
            client.consumer("orders", "one")

        def over(consumer: Consumer) -> bool:
            if not came:  # as from another thread
                came.append(consumer)
                came.append(client.consumer("orders", "two"))
            return consumer.closed

        monkeypatch.setattr(Consumer, "_is_over", property(over))
        client.consumer("orders", "three")
    assert came[1].closed


def test_consumer_that_slips_past_the_close_dials_nobody_anew(threaded: Threaded) -> None:
    client = connect(threaded)
    late = client.consumer("orders", "late")
    client._consumers.remove(late)  # as if it had been opened amid the close
    client.close()
    with pytest.raises(errors.Closed):
        next(late)
    assert not client._client._nodes._nodes  # type: ignore[union-attr]


def test_iteration_ends_when_another_thread_closes_the_client(threaded: Threaded) -> None:
    client = connect(threaded)
    consumer = client.consumer("orders", "g")
    client.close()
    assert [*consumer] == []


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 10**400, timedelta.max])
def test_timeout_beyond_all_clocks_is_for_ever(threaded: Threaded, timeout: Any) -> None:
    with TimerClient(threaded.cluster.address, timeout=timeout, settings=QUICK) as client:
        assert client.schedule("orders", b"p", timeout=timeout).id
        assert client.cancel("0" * 24, timeout=timeout) == CancelResult.NOT_FOUND
        with client.consumer("orders", "g") as consumer:
            assert consumer.receive(timeout=timeout)
            consumer.flush(timeout)


@pytest.mark.parametrize(
    "delay", [float("inf"), float("nan"), 1e308, 10**400, -(10**400), timedelta.max, timedelta.min]
)
def test_delay_that_no_calendar_has_is_refused(threaded: Threaded, delay: Any) -> None:
    with connect(threaded) as client, pytest.raises(errors.InvalidRequest, match="delay"):
        client.schedule("orders", b"p", delay=delay)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_process_forked_off_one_with_an_open_client_is_told_so(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    # Other tests' clients apart.
    monkeypatch.setattr(node_channel, "_channels", weakref.WeakValueDictionary())
    with connect(threaded) as client:
        client.schedule("orders", b"p", delay=60)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: pid + 1)
            for _ in range(2):
                for new in (TimerClient, AsyncTimerClient):
                    with pytest.raises(RuntimeError, match="forked from one with an open client"):
                        new("127.0.0.1:1")
                with pytest.raises(RuntimeError, match="made before a fork"):
                    client.close()
            TimerClient("127.0.0.1:1", dial=lambda _: pytest.fail("not dialled"))
        assert client.schedule("orders", b"p", delay=60).id
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    TimerClient("127.0.0.1:1")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_message_of_another_process_refuses_to_be_acked(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded.seed("orders", [b"p", b"q"])
    pid = os.getpid()
    with connect(threaded) as client, client.consumer("orders", "g") as consumer:
        message = next(consumer)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: pid + 1)
            for use in (
                message.ack,
                message.ack_up_to,
                message.nack,
                message.give_back,
                message.extend,
                message.batch.ack,
                lambda: next(consumer),
                consumer.receive,
            ):
                with pytest.raises(RuntimeError, match="made before a fork"):
                    use()
        assert message.ack().result(60) == AckResult.ACKED
    assert len(threaded.cluster.acks) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_client_of_another_process_refuses_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    with (
        TimerClient("127.0.0.1:1", timeout=0.1, settings=QUICK) as client,
        monkeypatch.context() as patch,
    ):
        patch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(RuntimeError, match="fork"):
            client.schedule("orders", b"p")


def test_client_that_ends_amid_its_requests_leaves_the_others_alone(
    threaded: Threaded, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(threaded) as stays:
        for _ in range(5):
            ends = connect(threaded)
            assert ends._background.loop is stays._background.loop, "grpc's events are shared"
            futures = [ends.submit("orders", b"x", delay=60) for _ in range(200)]
            with contextlib.suppress(errors.OutcomeUnknown):
                ends.close(0.001)
            assert stays.schedule("orders", b"y", delay=60).id
            assert all(future.done() for future in futures)
            with pytest.raises(errors.Closed):
                ends.schedule("orders", b"z", delay=60)
    # The server, in this process too, may write to a stream just as it ends, and gRPC logs that.
    ours = [each for each in caplog.records if "servicer method" not in each.getMessage()]
    assert [each for each in ours if each.levelno >= logging.WARNING] == []
