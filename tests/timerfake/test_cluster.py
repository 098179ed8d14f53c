"""The fake cluster as applications use it: both fronts, its clock, its mishaps, its end."""

import ast
import asyncio
import inspect
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster.observe.topic_view as listing
from cluster.api import cron_calendar
from cluster.api.consume_service import _Stream
from cluster.state.alarm import KernelAlarm
from tests.cluster.running import WAIT_S, until
from tests.parsing import parsed
from tests.timerfake.shop import MINUTE, Shop
from timer.model.timer_errors import ConfigError, InvalidRequestError
from timer.model.units import DUE_MS_MAX
from timerclient import (
    AsyncTimerClient,
    ClientSettings,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    TimerClient,
    TimerError,
    Unreachable,
)
from timerclient.client.sync import Consumer
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.series_fields import SeriesConflict, SeriesOptions
from timerclient.streams import shared_calls
from timerclient.streams.credit import LINK_BYTES_MIN
from timerclient.threads.background import Background
from timerclient.values.errors import RpcFailed
from timerfake import (
    AsyncFakeCluster,
    AsyncTimerAppFixture,
    FakeCluster,
    TimerAppFixture,
    loopback,
)

START = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def test_fake_cluster_needs_no_timer_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise AssertionError("other systems have none")

    monkeypatch.setattr(KernelAlarm, "__init__", absent)
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        client.schedule("t", b"x", delay=60)


def test_fake_cluster_needs_no_module_that_windows_lacks() -> None:
    script = """
import sys
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios", "uvloop")))
from timerfake import FakeCluster
with FakeCluster() as cluster, cluster.client() as client:
    client.schedule("t", b"x", delay=60)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)


@pytest.mark.parametrize(
    "use",
    [
        "from timerfake import FakeCluster",
        "from timerfake import pytest_plugin; next(pytest_plugin.timer_app.__wrapped__())",
    ],
)
def test_module_that_the_fake_lacks_is_named_with_the_extra(use: str) -> None:
    command = [sys.executable, "-c", f"import sys; sys.modules['isal'] = None; {use}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert re.search(r": Fake(App|Cluster) needs isal: pip install '\.\[testing\]'", last), last


def test_series_whose_zone_the_leader_does_not_know_is_declared_again_and_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_cron: str, zone: str, _after_ms: int) -> None:
        raise InvalidRequestError("zone", zone, "unknown here")

    daily: SeriesOptions = {"cron": "0 7 * * *", "zone": "Europe/Berlin"}
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        first = client.create_series("t", "k", b"a", **daily)
        monkeypatch.setattr(cron_calendar, "_next", unknown)
        for _ in range(2):  # with a pending occurrence, and without
            assert client.create_series("t", "k", b"a", **daily).id == first.id
            cluster.advance(timedelta(days=1))
        changed = client.create_series("t", "k", b"b", on_conflict="alter", **daily)
        assert (changed.payload, changed.next, changed.finished) == (b"b", None, False)
        at_eight: SeriesOptions = {**daily, "cron": "0 8 * * *"}
        for key, options in (("k", at_eight), ("new", daily)):
            with pytest.raises(InvalidRequest, match="unknown here"):
                client.create_series("t", key, on_conflict="alter", **options)


@pytest.mark.parametrize("on_conflict", ["reject", "alter"])
def test_interval_is_declared_again_until_its_end_and_afterwards(
    on_conflict: SeriesConflict,
) -> None:
    hourly: SeriesOptions = {"every": HOUR, "end": START + 2.5 * HOUR}
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        for hours, ended in ((0, 0), (1.75, 1), (1, 2)):
            cluster.advance(hours * HOUR)
            found = client.create_series("t", "k", b"", on_conflict=on_conflict, **hourly)
            assert (found.start, found.ended) == (START + HOUR, ended)
        with pytest.raises(InvalidRequest, match="must be at least start"):
            client.create_series("t", "new", b"", **hourly)


# ---- time


def test_time_stands_still_until_it_is_advanced_and_then_passes_to_the_millisecond() -> None:
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        assert cluster.now == START
        timer = client.schedule("t", b"p", delay=HOUR)
        assert timer.due_ms == cluster.now_ms + 3_600_000
        with client.consumer("t", "g") as consumer:
            cluster.advance(HOUR - timedelta(milliseconds=1))
            assert consumer.receive(timeout=0) == []
            assert cluster.now == START + HOUR - timedelta(milliseconds=1)
            cluster.advance(0.001)
            [message] = consumer.receive(timeout=0)
            assert message.fired_at_ms == message.due_ms == timer.due_ms == cluster.now_ms
            _ = message.ack()


def test_each_thing_happens_at_its_own_time_however_far_time_is_advanced() -> None:
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        client.create_group("t", "g", lease=timedelta(seconds=7))
        client.schedule_batch("t", [b"a", b"b"], delay=[HOUR, 10 * HOUR])
        with client.consumer("t", "g", window=1) as consumer:
            cluster.advance(timedelta(days=1))
            [first] = consumer.receive(timeout=5)  # what came long before has gone back
    hour_ms, begin_ms = 3_600_000, int(START.timestamp() * 1000)
    assert first.fired_at_ms == begin_ms + hour_ms
    assert first.handed_out_ms == begin_ms + 24 * hour_ms


def test_ends_of_leases_do_not_hold_up_a_century() -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        client.schedule("t", b"p", delay=timedelta(days=36_500))
        with client.consumer("t", "g") as consumer:
            client.schedule("t", b"unread")
            cluster.advance(timedelta(days=36_500, seconds=1))
            seen: list[bytes] = []
            while b"p" not in seen or b"unread" not in seen:
                seen += [message.payload for message in consumer.receive(100, timeout=5)]
            assert len(seen) == 2


def test_settling_lets_what_was_acked_take_effect_without_time() -> None:
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        client.schedule_batch("t", [b"1", b"2"])
        with client.consumer("t", "g", window=1) as consumer:
            cluster.settle()
            [first] = consumer.receive(timeout=0)
            acking = first.ack()
            cluster.settle()
            assert acking.done()
            assert consumer.receive(timeout=0)[0].payload == b"2"
        assert cluster.now == START


@pytest.mark.parametrize("by", [-1, -HOUR, float("nan"), DUE_MS_MAX])
def test_time_goes_neither_back_nor_beyond_what_a_timer_can_tell(by: Any) -> None:
    with FakeCluster() as cluster:
        before = cluster.now_ms
        with pytest.raises(InvalidRequest):
            cluster.advance(by)
        assert cluster.now_ms == before


def test_clock_begins_at_the_present_or_where_it_is_told_to() -> None:
    with FakeCluster() as cluster:
        assert abs(cluster.now - datetime.now(UTC)) < timedelta(minutes=5)
    with pytest.raises(InvalidRequest, match="time zone"):
        FakeCluster(start=datetime(2030, 1, 1))  # noqa: DTZ001 -- that it is none is the point


def play(cluster: FakeCluster) -> list[Any]:
    """Return all that is seen of some timers, acks, a failover."""
    seen: list[Any] = []
    with cluster.client() as client, client.consumer("t", "g", lease=600) as consumer:
        seen += client.schedule_batch("t", [b"%d" % n for n in range(50)], delay=[*range(50)]).ids
        for n in range(30):
            cluster.advance(2)
            for message in consumer.receive(100, timeout=0):
                seen.append((message.payload, message.attempt, message.handed_out_ms))
                _ = message.ack() if n % 3 else message.nack(delay=1)
        cluster.settle()
        seen.append(client.checkpoint().nodes[0].digest)
    return seen


def test_same_steps_give_the_same_ids_times_and_state() -> None:
    runs = []
    for _ in range(3):
        with FakeCluster(start=START) as cluster:
            runs.append(play(cluster))
    assert runs[0] == runs[1] == runs[2]
    assert any(attempt > 1 for _, attempt, _ in (each for each in runs[0] if len(each) == 3))


# ---- clients


def test_consumer_on_another_thread_gets_what_falls_due() -> None:
    came: list[bytes] = []

    def work(consumer: Consumer) -> None:
        for message in consumer:
            _ = message.ack()
            came.append(message.payload)

    with FakeCluster() as cluster, cluster.client() as client:
        consumer = client.consumer("t", "g", max_messages=10)
        thread = threading.Thread(target=work, args=[consumer])
        thread.start()
        for n in range(10):
            client.schedule("t", b"%d" % n, delay=HOUR)
            cluster.advance(HOUR)
            until(lambda n=n: len(came) > n)  # type: ignore[misc]
        thread.join(WAIT_S)
        assert not thread.is_alive()
        consumer.close()
    assert came == [b"%d" % n for n in range(10)]


def test_several_clients_and_clusters_live_side_by_side() -> None:
    with (
        FakeCluster() as one,
        FakeCluster() as two,
        one.client() as a,
        one.client() as b,
        two.client() as c,
    ):
        timer = a.schedule("t", b"p", delay=HOUR)
        assert b.get_timer(timer).payload == b"p"
        assert c.topics() == []
        one.advance(HOUR)
        assert two.now < one.now


def test_application_that_makes_its_own_client_is_given_the_way_to_dial() -> None:
    cluster = FakeCluster()
    with TimerClient("timers.example:7401", dial=cluster.dial) as client:
        assert client.schedule("t", b"p").due_ms <= cluster.now_ms
    cluster.close()


async def test_client_that_hears_nothing_for_long_is_told_who_leads() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.create_topic("t")
        node = await client.nodes().leader()
        assert not await client.nodes()._is_replaced(node)


def test_nothing_touches_a_socket_and_coroutines_need_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with AsyncFakeCluster() as cluster, cluster.client() as client:
            await client.schedule("t", b"p", delay=HOUR)
            assert [timer.payload async for timer in client.list_timers("t")] == [b"p"]
            async with client.consumer("t", "g") as consumer:
                await cluster.advance(HOUR)
                [message] = await consumer.receive(timeout=0)
                await message.ack()

    def refuse(*_: Any) -> None:
        raise AssertionError("a socket was used")

    before = {*threading.enumerate()}
    with asyncio.Runner() as runner:
        runner.get_loop()
        for name in ("bind", "connect", "listen"):
            monkeypatch.setattr(socket.socket, name, refuse)
        runner.run(work())
        assert {*threading.enumerate()} <= before


async def test_asyncio_clients_run_side_by_side_with_time() -> None:
    async with AsyncFakeCluster(start=START) as cluster, cluster.client() as client:
        came: list[tuple[bytes, int]] = []

        async def work() -> None:
            async with client.consumer("t", "g") as consumer:
                async for message in consumer:
                    came.append((message.payload, message.attempt))
                    if len(came) == 1:
                        await message.nack(delay=60)
                    else:
                        await message.ack()

        worker = asyncio.create_task(work())
        await cluster.settle()
        await asyncio.gather(*(client.schedule("t", b"%d" % n, delay=HOUR) for n in range(3)))
        await cluster.advance(HOUR)
        assert came == [(b"0", 1), (b"1", 1), (b"2", 1)]
        await cluster.advance(60)
        assert came[3:] == [(b"0", 2)]
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def test_cluster_serves_calls_of_other_event_loops_and_no_consumers_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Background().loop, "_debug", True)  # it rejects calls of other threads
    cluster = FakeCluster()
    async with AsyncTimerClient(cluster.address, dial=cluster.dial) as client:
        timers = [(await client.schedule_batch("t", [b"p"], delay=HOUR))[0] for _ in range(3)]
        assert len({timer.id for timer in timers}) == 3
        assert len((await client.tell_story(timers[2])).events) == 1
        with pytest.raises(RpcFailed, match="runs on the cluster's event loop: use FakeCluster"):
            await client.consumer("t", "g").receive(timeout=WAIT_S)
        with pytest.raises(NotFound):
            await client.get_timer(key="none", topic="t")
    cluster.close()


async def test_call_of_a_thread_for_which_the_event_loop_of_the_cluster_waits_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loopback, "BLOCKED_S", 0.5)
    settings = ClientSettings(probe_s=0.1)  # the client cancels and repeats each call before
    async with AsyncFakeCluster() as cluster:
        with TimerClient(
            cluster.address, dial=cluster.dial, settings=settings, timeout=1
        ) as client:
            with pytest.raises(RuntimeError, match=r"is blocked: .* \(asyncio.to_thread\)"):
                client.topics()
            monkeypatch.undo()
            assert await asyncio.to_thread(client.topics) == []
            with pytest.raises(TimerError):
                client.get_timer(key="k", topic="t", timeout=0.1)
            await asyncio.sleep(0)
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * loopback.BLOCKED_S)
            monkeypatch.setattr(loopback, "time", later)
            assert await asyncio.to_thread(client.topics) == []


def test_cluster_of_another_event_loop_or_of_one_that_has_ended_is_refused() -> None:
    cluster = AsyncFakeCluster()
    with asyncio.Runner() as runner:
        runner.run(cluster.start())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            asyncio.run(cluster.client().topics())
    for work in (cluster.advance(1), cluster.settle(), cluster.fail_over(), cluster.close()):
        with pytest.raises(RuntimeError, match=r"another event loop: asyncio\.run makes"):
            asyncio.run(work)
    with TimerClient(cluster.address, dial=cluster.dial) as client:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            client.topics()
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            client.schedule_batch("t", [b"p"])


async def test_handler_in_a_thread_schedules_with_the_client_of_threads(
    async_timer_app: AsyncTimerAppFixture,
) -> None:
    shop = Shop()
    async with async_timer_app(shop.app) as timers:
        await shop.send_mail.schedule(to="again")
        await timers.advance(MINUTE)
        assert [to for to, _ in shop.calls] == ["again", "end"]


def test_test_without_an_event_loop_runs_coroutines_of_its_application(
    timer_app: TimerAppFixture,
) -> None:
    async def schedule() -> None:
        for number in range(3):
            await shop.cancel_unpaid.schedule(order_id=number)

    shop = Shop()
    timers = timer_app(shop.app)
    for calls in (3, 6):
        asyncio.run(schedule())
        timers.settle()
        assert len(shop.calls) == calls


async def test_asyncio_cluster_must_be_entered_first() -> None:
    with pytest.raises(RuntimeError, match="enter"):
        await AsyncFakeCluster().advance(1)


def test_topics_are_listed_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE_SIZE_MAX", 2)
    monkeypatch.setattr(listing, "PAGE_GROUPS_MAX", 3)
    with FakeCluster() as cluster, TimerClient(cluster.address, dial=cluster.dial) as client:
        assert client.topics() == []
        names = [*"abcde"]
        for name in reversed(names):
            client.create_topic(name)
        for group in "ghi":
            client.create_group("b", group)
        assert [topic.name for topic in client.topics()] == names
        client.delete_topic("e")
        client.create_topic("ns/f")
        assert [topic.name for topic in client.topics()] == [*names[:4], "ns/f"]
        assert [topic.name for topic in client.describe_namespace("ns").topics] == ["ns/f"]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_namespace_is_described_without_a_look_at_other_topics_except_by_old_servers(
    monkeypatch: pytest.MonkeyPatch, *, ignored: bool
) -> None:
    shown, topics = list[str](), listing.TopicView.topics

    async def noted(
        view: listing.TopicView, after: str, page_size: int, prefix: str, *more: Any
    ) -> pb.ListTopicsResponse:
        found = await topics(view, after, page_size, "" if ignored else prefix, *more)
        shown.extend(topic.name for topic in found.topics)
        return found

    monkeypatch.setattr(listing.TopicView, "topics", noted)
    names = ["a", "default-a", "ns/f", "ns/g", "ns2/f"]
    with FakeCluster() as cluster, TimerClient(cluster.address, dial=cluster.dial) as client:
        for name in names:
            client.create_topic(name)
        for namespace, mine, listed in (
            ("ns", ["ns/f", "ns/g"], ["ns/f", "ns/g"]),
            ("default", ["a", "default-a"], names),
        ):
            shown.clear()
            found = client.describe_namespace(namespace)
            assert [topic.name for topic in found.topics] == mine
            assert shown == (names if ignored else listed)


def test_two_fronts_offer_the_same() -> None:
    def public(of: type) -> dict[str, list[str]]:
        return {
            name: [*inspect.signature(member).parameters] if callable(member) else []
            for name, member in inspect.getmembers(of)
            if not name.startswith("_") and name != "start"
        }

    assert public(FakeCluster) == public(AsyncFakeCluster)


def test_every_method_of_the_client_is_shown_on_the_fake() -> None:
    folders = Path(__file__).parent, Path(__file__).parents[1] / "conformance"
    used = {
        node.attr
        for folder in folders
        for path in folder.glob("*.py")
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    public = {name for of in (TimerClient, Consumer) for name in dir(of) if name[0] != "_"}
    assert public <= used, public - used


# ---- settings, mishaps, the end


def test_request_over_its_limit_is_refused_as_a_node_does(client: TimerClient) -> None:
    limit = "request = '.* bytes': must have at most 18874368 bytes"
    for request_id in ("a", None):  # without a producer, and on its stream
        with pytest.raises(InvalidRequest, match=limit):
            client.schedule_batch("t", [bytes(4 << 20)] * 5, request_id=request_id)
    assert client.schedule("t", b"1", delay=HOUR).id


def test_settings_are_those_of_a_node() -> None:
    cluster = FakeCluster(settings={"limits.payload_bytes_max": 5})
    with cluster.client() as client, pytest.raises(InvalidRequest, match="at most 5 bytes"):
        client.schedule("t", b"123456")
    cluster.close()
    with pytest.raises(ConfigError, match="payload_bytes_max"):
        FakeCluster(settings={"limits.payload_max": 5})


def test_operators_calls_are_answered() -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        assert client.status().nodes[0].serving
        assert client.checkpoint().nodes[0].reachable
        [member] = client.members().members
        assert member.voter
        with pytest.raises(InvalidRequest, match="one node"):
            client.change_members("remove", member.name)
        with pytest.raises(InvalidRequest, match="one node"):
            client.drain_node(member.name)
        assert client.dump_stacks(member.name).node == member.name
        assert client.trace_hops(member.name).node == member.name
        assert client.reload_files(member.name).node == member.name
        logger = "asyncio"
        client.set_log_level("error", logger=logger)
        assert client.set_log_level("default", logger=logger) == "error"
        name = member.name
        for call in (
            client.begin_verification,
            lambda: client.verification(name),
            lambda: client.open_backup(name, 1),
            lambda: client.fetch_backup(name, 1, "manifest", 0),
            lambda: client.close_backup(name, 1),
            lambda: client.fetch_log(name, 1),
        ):
            with pytest.raises(InvalidRequest, match="no files"):
                call()
        before = client.status().epoch
        client.transfer()
        assert client.status().epoch == before + 1


def test_producer_ends_with_its_client() -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        with cluster.client() as other:
            other.schedule_batch("t", [b"x"], delay=HOUR)
            [producer] = client.producers()
            assert producer.last_sequence == 1
        assert client.producers() == []
        assert client.count_timers("t").pending == 1


def test_failover_ends_leases_and_consumers_come_back_by_themselves() -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        client.schedule("t", b"p")
        with client.consumer("t", "g") as consumer:
            [held] = consumer.receive(timeout=WAIT_S)
            cluster.fail_over()
            [again] = consumer.receive(timeout=WAIT_S)
            assert (again.payload, again.epoch) == (b"p", held.epoch + 1)
            assert again.attempt > 1
            assert again.ack().result(WAIT_S)
            assert consumer.dropped_stale == consumer.leases_lost == 0
            consumer.flush()


def test_consumer_reports_what_has_come_so_that_more_than_its_window_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[tuple[int, int]] = []
    note_window = _Stream.note_window

    def noted(stream: _Stream, request: pb.ConsumeRequest) -> None:
        if request.window_bytes:
            reports.append((request.window_bytes, request.received))
        note_window(stream, request)

    monkeypatch.setattr(_Stream, "note_window", noted)
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        client.schedule_batch("t", [bytes(1_000)] * 400)
        with client.consumer("t", "g", window=1_000) as consumer:
            for _ in range(400):
                assert consumer.receive(timeout=WAIT_S)
            assert reports[0] == (LINK_BYTES_MIN, 0)
            assert 4 < reports[-1][1] < 400
            reports.clear()
            cluster.fail_over()
            client.schedule("t", b"")
            assert consumer.receive(timeout=WAIT_S)
            assert reports[0] == (LINK_BYTES_MIN, 0), "a new stream begins anew"


def test_disconnected_cluster_is_unreachable_and_goes_on_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_calls, "GRACE_S", WAIT_S)  # the request says why, however late
    with FakeCluster() as cluster, cluster.client() as client:
        client.schedule_batch("t", [b"p"], delay=HOUR)
        consumer = client.consumer("t", "g")
        cluster.disconnect()
        with pytest.raises(Unreachable):  # it is sent once, and was not sent
            client.cancel(key="k", topic="t", timeout=0.5)
        with pytest.raises(Unreachable) as refused:
            client.schedule("t", b"q", timeout=0.5)
        assert refused.value.outcome_known
        with pytest.raises(Unreachable):
            client.count_timers("t", timeout=0.5)
        cluster.advance(HOUR)
        assert consumer.receive(timeout=0) == []
        cluster.reconnect()
        [message] = consumer.receive(timeout=WAIT_S)
        assert message.payload == b"p"
        assert client.topics()[0].scheduled == 1


async def test_answer_that_is_lost_is_an_unknown_outcome_or_a_duplicate() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.schedule_batch("t", [b"the stream stands"], delay=HOUR)
        impatient = asyncio.create_task(client.schedule("t", b"q", delay=HOUR, timeout=0.2))
        patient = asyncio.create_task(client.schedule("t", b"q", delay=HOUR))
        assert cluster._node is not None
        while cluster._node.host.engine.machine.counts.pending < 3:  # noqa: ASYNC110 -- one loop
            await asyncio.sleep(0)
        await cluster.disconnect()  # they are scheduled, and nobody has heard of it
        with pytest.raises(OutcomeUnknown) as unknown:
            await impatient
        assert not unknown.value.outcome_known
        await cluster.reconnect()
        assert (await patient).duplicate
        assert (await client.count_timers("t")).pending == 3


def test_submitted_schedules_are_answered_in_the_background() -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        one = client.submit("t", b"p", delay=HOUR)
        many = client.submit_batch("t", [b"q"] * 3, delay=HOUR)
        assert (one.result(WAIT_S).due_ms, len(many.result(WAIT_S))) == (one.result().due_ms, 3)
        assert not one.result().duplicate


def test_closed_cluster_refuses_all_calls_at_once_and_its_clients_can_be_closed() -> None:
    cluster = FakeCluster(start=START)
    assert repr(cluster) == "FakeCluster(now=2030-01-01T00:00:00+00:00)"
    client, other = cluster.client(), cluster.client()
    consumer = client.consumer("t", "g")
    client.submit("t", b"p").result(WAIT_S)
    cluster.close()
    cluster.close()
    assert repr(cluster) == "FakeCluster(now=2030-01-01T00:00:00+00:00, closed)"
    calls: list[Callable[[], Any]] = [
        *(client.topics, other.topics, lambda: other.consumer("t", "g"), consumer.receive),
        *(lambda: client.schedule("t", b"p"), lambda: client.submit("t", b"p").result(WAIT_S)),
        *(cluster.settle, lambda: cluster.advance(1)),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, TimerError), match="the fake cluster is closed"):
            call()
    client.close()
    other.close()


async def test_closed_cluster_refuses_calls_of_coroutines() -> None:
    async with AsyncFakeCluster() as cluster:
        client = cluster.client()
        consumer = client.consumer("t", "g")
        assert await consumer.receive(timeout=0) == []
    for call in (client.topics(), consumer.receive(), client.schedule("t", b""), cluster.settle()):
        with pytest.raises((RuntimeError, TimerError), match="the fake cluster is closed"):
            await call
    await client.close()


def test_bug_behind_the_services_ends_all_calls_and_is_told() -> None:
    cluster = FakeCluster()
    node = cluster._cluster._node
    assert node is not None
    client = cluster.client()
    consumer = client.consumer("t", "g")
    client.schedule("t", b"p", delay=HOUR)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    node.host.engine.machine.store.fire = broken  # type: ignore[method-assign, assignment]
    logged: list[Any] = []
    loop = client._background.loop
    usual = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: logged.append(context["exception"]))
    with pytest.raises(RuntimeError, match="failed") as told:
        cluster.advance(HOUR)
    loop.set_exception_handler(usual)
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert {type(error) for error in logged} == {ZeroDivisionError}
    with pytest.raises((RuntimeError, RpcFailed), match="failed"):
        client.topics()
    with pytest.raises((RuntimeError, RpcFailed), match="failed"):
        client.schedule("t", b"q")
    with pytest.raises((RuntimeError, RpcFailed), match="failed"):
        consumer.receive(timeout=WAIT_S)
    client.close()
    with pytest.raises(RuntimeError, match="failed"):
        cluster.close()
