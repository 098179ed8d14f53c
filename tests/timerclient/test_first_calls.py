"""A client's first single calls name their requests, and need no producer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.timerclient.conftest import QUICK, Threaded, once
from tests.timerclient.fake_cluster import Cluster, wire_error
from tests.waiting import until
from timerclient import AsyncTimerClient, NewTimer, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.streams import first_calls, producer
from timerclient.values import errors

FIRST = 3


@pytest.fixture(autouse=True)
def some_first_calls(producer_from_the_first_call: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del producer_from_the_first_call
    monkeypatch.setattr(first_calls, "FIRST_CALLS", FIRST)


def refused(cluster: Cluster, times: int) -> list[object]:
    """Let the next requests be refused; return the list of all that come."""
    sent: list[object] = []

    def order(request: object) -> pb.Error | None:
        sent.append(request)
        return wire_error(pb.REASON_NOT_READY) if len(sent) <= times else None

    cluster.on_schedule = order
    return sent


async def test_first_single_calls_register_no_producer_and_later_ones_do(cluster: Cluster) -> None:
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=60) as client:
        for number in range(FIRST):
            await client.schedule("orders", b"%d" % number)
        assert cluster.registrations == 0
        assert [len(name) for name in cluster.named] == [32] * FIRST
        await client.schedule("orders", b"more")
        assert cluster.registrations == 1
    assert cluster.payloads == [b"0", b"1", b"2", b"more"]


def test_threads_clients_have_first_calls_too(threaded: Threaded) -> None:
    with TimerClient(threaded.cluster.address, settings=QUICK, timeout=60) as client:
        assert client.schedule("orders", b"1", key="k", delay=60).due_ms
        with pytest.raises(errors.AlreadyExists, match="key = 'k'"):
            client.schedule("orders", b"2", key="k")
        assert threaded.cluster.registrations == 0
        client.submit("orders", b"3").result()
        assert threaded.cluster.registrations == 1


async def test_first_call_whose_answer_is_lost_is_repeated_under_its_id(cluster: Cluster) -> None:
    cluster.on_schedule = once("lose")
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=60) as client:
        await client.schedule("orders", b"p")
    assert len(cluster.named) == 1
    assert cluster.payloads == [b"p"]
    assert cluster.registrations == 0


async def test_first_call_whose_answers_are_lost_is_not_repeated_beyond_its_ids_life(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timerclient.client.aio.REPEAT_S", 0.05)
    cluster.on_schedule = lambda _: "lose"
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=600) as client:
        async with asyncio.timeout(60):
            with pytest.raises(errors.OutcomeUnknown):
                await client.schedule("orders", b"p")
    assert cluster.payloads == [b"p"]


async def test_first_call_with_too_many_ids_about_goes_to_a_producer(cluster: Cluster) -> None:
    cluster.on_schedule = once(wire_error(pb.REASON_OVERLOADED, retry_after_ms=600_000))
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=60) as client:
        await client.schedule("orders", b"p")
        assert cluster.registrations == 1
    assert cluster.payloads == [b"p"]


async def test_calls_at_the_same_time_keep_their_order_behind_the_first(cluster: Cluster) -> None:
    cluster.on_schedule = once(wire_error(pb.REASON_NOT_READY))  # the first one is sent twice
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=60) as client:
        await asyncio.gather(
            *(client.schedule("orders", b"%d" % number) for number in range(5)),
            client.schedule_batch("orders", [b"5"]),
            client.schedule("orders", b"6"),
        )
        assert cluster.registrations == 1
    assert cluster.payloads == [b"%d" % number for number in range(7)]


async def test_call_behind_a_first_one_is_over_in_its_own_time(cluster: Cluster) -> None:
    sent = refused(cluster, times=1 << 30)
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=60) as client:
        first = asyncio.ensure_future(client.schedule("orders", b"1"))
        await until(lambda: sent)
        with pytest.raises(errors.Unreachable) as late:
            await client.schedule("orders", b"2", timeout=0.05)
        assert late.value.outcome_known
        cluster.on_schedule = once()
        await first
        assert cluster.registrations == 0
        await client.schedule("orders", b"3")  # calls come together: a producer is worth it
        assert cluster.registrations == 1
    assert cluster.payloads == [b"1", b"3"]


@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("schedule", ("t", b"1")),
        ("schedule_batch", ("t", [b"1"])),
        ("schedule_all", ([NewTimer("t", b"1")],)),
    ],
)
async def test_wait_for_a_first_call_is_part_of_the_timeout(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: str, given: tuple[Any, ...]
) -> None:
    cluster.on_schedule = lambda _: wire_error(pb.REASON_COMMIT_TIMEOUT)
    now_s = 7.0
    monkeypatch.setattr(producer, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def wait(within_s: float) -> None:
        nonlocal now_s
        now_s += within_s

    async with AsyncTimerClient(cluster.address, settings=QUICK) as client:
        monkeypatch.setattr(client._first_calls, "wait", wait)
        client._first_calls._calls_left = 0
        async with asyncio.timeout(30):
            with pytest.raises(errors.TimerError, match="within 60 s"):
                await getattr(client, way)(*given, timeout=60)
        cluster.on_schedule = lambda _: None


async def test_call_on_another_event_loop_during_a_first_call_is_refused(cluster: Cluster) -> None:
    sent = refused(cluster, times=3)
    async with AsyncTimerClient(cluster.address, settings=QUICK, timeout=60) as client:
        first = asyncio.ensure_future(client.schedule("orders", b"1"))
        second = asyncio.ensure_future(client.schedule("orders", b"2"))
        await until(lambda: sent and client._first_calls._open_count == 2)
        with pytest.raises(RuntimeError, match="this client belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, client.schedule("orders", b"3"))
        await asyncio.gather(first, second)
    assert cluster.payloads == [b"1", b"2"]


async def test_closing_waits_for_the_first_call(cluster: Cluster) -> None:
    sent = refused(cluster, times=3)
    client = AsyncTimerClient(cluster.address, settings=QUICK, timeout=60)
    first = asyncio.ensure_future(client.schedule("orders", b"1"))
    await until(lambda: sent)
    await client.close()
    await first
    assert cluster.payloads == [b"1"]
