"""Scheduling and cancelling against a cluster that fails over, refuses and loses answers."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.timerclient.conftest import QUICK, once
from tests.timerclient.fake_cluster import NOW_MS, Cluster, wire_error
from tests.waiting import until
from timerclient import AsyncTimerClient, CancelResult, ClientSettings, NewTimer
from timerclient.client import aio
from timerclient.proto import timer_pb2 as pb
from timerclient.streams import producer
from timerclient.streams.node_channel import tcp
from timerclient.streams.nodes import Nodes
from timerclient.values import errors, ids
from timerclient.values.reasons import Reason
from timerclient.values.wire_errors import from_wire


async def test_producer_that_is_denied_says_so_at_once(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.on_call = once(wire_error(pb.REASON_PERMISSION_DENIED, "no rule for produce"))
    with pytest.raises(errors.PermissionDenied, match="no rule for produce"):
        await client.schedule_batch("orders", [b"p"], delay=1)
    await client.schedule_batch("orders", [b"p"], delay=1)
    assert cluster.payloads == [b"p"]


async def test_request_that_a_node_finds_too_large_fails_alone(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    large = b"x" * 10_000
    refused = wire_error(pb.REASON_INVALID_REQUEST, "request = 10 kB: too large", field="request")
    cluster.on_schedule = lambda request: (
        refused if large in bytes(request.timers[0].payloads) else None
    )
    for number in range(4):  # on the stream from here on
        await client.schedule("orders", b"%d" % number)
    sent = [client.schedule_batch("orders", [body]) for body in (b"4", large, b"5")]
    before, failed, behind = await asyncio.gather(*sent, return_exceptions=True)
    assert isinstance(failed, errors.InvalidRequest)
    assert (failed.outcome_known, failed.field) == (True, "request")
    assert [isinstance(each, BaseException) for each in (before, behind)] == [False, False]
    assert cluster.payloads == [b"%d" % number for number in range(6)]


async def test_producer_whose_tasks_are_all_cancelled_fails_its_calls(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    for _ in range(4):
        await client.schedule("orders", b"p")
    cluster.hold = asyncio.Event()
    waiting = asyncio.ensure_future(client.schedule("orders", b"q"))
    await until(lambda: len(cluster.rows) == 5)
    [task] = [each for each in asyncio.all_tasks() if "ProducerStream._run" in repr(each)]
    task.cancel()
    with pytest.raises(errors.OutcomeUnknown):
        await waiting
    with pytest.raises(errors.Closed, match="its task was cancelled"):
        await client.schedule("orders", b"r")
    cluster.hold.set()


async def test_schedule_returns_the_timer_and_carries_all_of_it(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    delay = timedelta(minutes=30)
    timer = await client.schedule("orders", b"p", delay=delay, key="k", headers={"a": "b"})
    [row] = cluster.rows
    assert (row.topic, row.payload, row.key) == ("orders", b"p", b"k")
    assert row.headers == b"\1\0a\1\0b"
    assert timer.id == ids.to_text(row.raw)
    assert timer.due_ms == NOW_MS + 1_800_000
    assert not timer.duplicate


async def test_schedule_without_a_time_is_at_once(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    assert (await client.schedule("orders", b"p")).due_ms == NOW_MS


async def test_batch_returns_lazy_ids_in_order(cluster: Cluster, client: AsyncTimerClient) -> None:
    due_ms = [NOW_MS - 10, NOW_MS - 30, NOW_MS - 20]
    timers = await client.schedule_batch("orders", [b"a", b"b", b"c"], due_ms=due_ms)
    assert len(cluster.requests) == 1
    assert timers.due_ms == due_ms
    assert timers.ids == [ids.to_text(row.raw) for row in cluster.rows]
    assert timers[-1].due_ms == due_ms[-1]
    assert [timer.due_ms for timer in timers[1:]] == due_ms[1:]
    with pytest.raises(IndexError):
        timers[3]


async def test_calls_for_many_topics_share_requests_of_as_many_columns_as_are_taken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "COLUMNS_MAX", 3)
    async with AsyncTimerClient(cluster.address, timeout=60, settings=QUICK) as client:
        calls = [client.schedule(f"t{i // 2 % 10}", b"%d" % i) for i in range(40)]
        assert len({timer.raw for timer in await asyncio.gather(*calls)}) == 40
    columns = [len(request.timers) for request in cluster.requests]
    assert max(columns) == 3
    assert sum(len(each.payload_sizes) for r in cluster.requests for each in r.timers) == 40


async def test_hundred_concurrent_calls_share_few_requests(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    calls = [client.schedule(f"t{i % 3}", b"%d" % i, delay=i) for i in range(100)]
    timers = await asyncio.gather(*calls)
    assert len(cluster.requests) <= 3
    for i, timer in enumerate(timers):
        [row] = [row for row in cluster.rows if row.raw == timer.raw]
        assert (row.payload, row.topic) == (b"%d" % i, f"t{i % 3}")


async def test_columns_of_one_topic_hold_delays_or_due_times(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await asyncio.gather(
        client.schedule("orders", b"a", delay=1),
        client.schedule("orders", b"b", due_ms=NOW_MS + 5),
        client.schedule("orders", b"c", due_ms=NOW_MS + 6),
    )
    for request in cluster.requests:
        topics = [columns.topic for columns in request.timers]
        assert len(topics) == len(set(topics))
    assert cluster.payloads == [b"a", b"b", b"c"]


async def test_bad_row_among_collected_ones_fails_alone(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    bad = wire_error(pb.REASON_INVALID_REQUEST, "payload = BAD", field="payload")
    cluster.on_schedule = lambda request: bad if b"BAD" in request.timers[0].payloads else None
    results = await asyncio.gather(
        *(client.schedule("orders", payload) for payload in (b"a", b"BAD", b"b")),
        client.schedule_batch("orders", [b"c"]),
        return_exceptions=True,
    )
    assert [isinstance(result, errors.InvalidRequest) for result in results] == [0, 1, 0, 0]
    assert cluster.payloads == [b"a", b"b", b"c"]
    assert cluster.registrations == 1


async def test_batches_are_pipelined_in_the_order_of_their_calls(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.hold = asyncio.Event()
    batches = [
        asyncio.ensure_future(client.schedule_batch("orders", [b"%d" % i])) for i in range(20)
    ]
    await until(lambda: cluster.requests)
    cluster.hold.set()
    await asyncio.gather(*batches)
    assert cluster.payloads == [b"%d" % i for i in range(20)]
    assert [request.sequence for request in cluster.requests] == list(range(1, 21))


async def test_leader_is_found_wherever_it_is(cluster: Cluster) -> None:
    await cluster.fail_over(2)
    async with AsyncTimerClient(cluster.address, settings=QUICK) as client:
        await client.schedule("orders", b"p")
    assert cluster.payloads == [b"p"]


async def test_new_leader_is_followed_by_its_hint_even_off_the_list(cluster: Cluster) -> None:
    async with AsyncTimerClient(cluster.nodes[0].address, settings=QUICK) as client:
        await client.schedule("orders", b"a")
        await cluster.fail_over(1)
        await client.schedule("orders", b"b")
    assert cluster.payloads == [b"a", b"b"]


async def test_leader_that_joined_later_is_found_by_what_the_others_say(cluster: Cluster) -> None:
    await cluster.fail_over(2)
    async with AsyncTimerClient(cluster.nodes[0].address, settings=QUICK) as client:
        await client.schedule("orders", b"p")
    assert cluster.payloads == [b"p"]


async def test_leader_that_is_too_busy_to_say_so_at_once_is_found(cluster: Cluster) -> None:
    cluster.nodes[0].status_s = 0.5
    settings = ClientSettings(probe_s=0.1, pause_s_min=0.002, pause_s_max=0.05)
    async with AsyncTimerClient(cluster.address, timeout=60, settings=settings) as client:
        await client.schedule("orders", b"p")
    assert cluster.payloads == [b"p"]


async def test_no_leader_for_a_while_is_waited_for(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.leader = None
    call = asyncio.ensure_future(client.schedule("orders", b"p"))
    await until(lambda: cluster.probes > 3 * len(cluster.nodes))
    assert not call.done()
    await cluster.fail_over(1)
    await call
    assert cluster.payloads == [b"p"]


async def test_no_leader_until_the_time_is_up_is_unreachable_and_known(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.leader = None
    with pytest.raises(errors.Unreachable, match=r"within 4 s.*does not lead") as caught:
        await client.schedule("orders", b"p", timeout=4)
    assert caught.value.outcome_known
    await cluster.fail_over(0)
    await client.schedule("orders", b"q")
    assert cluster.payloads == [b"q"]


async def test_leader_killed_mid_stream_resends_and_nothing_is_doubled(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.schedule("orders", b"first")
    held = cluster.hold = asyncio.Event()
    calls = [asyncio.ensure_future(client.schedule_batch("orders", [b"%d" % i])) for i in range(10)]
    await until(lambda: len(cluster.rows) > 1)
    await asyncio.gather(cluster.nodes[0].stop(), cluster.fail_over(1))
    held.set()  # some may have reached the next leader already
    cluster.hold = None
    await asyncio.gather(*calls)
    assert cluster.payloads == [b"first", *(b"%d" % i for i in range(10))]
    assert cluster.registrations == 1


async def test_lost_answer_is_repeated_and_marked_as_duplicate(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.on_schedule = once("lose")
    timer = await client.schedule("orders", b"p")
    assert timer.duplicate
    assert cluster.payloads == [b"p"]
    assert [request.sequence for request in cluster.requests] == [1, 1]


@pytest.mark.parametrize(
    "reason", [pb.REASON_COMMIT_TIMEOUT, pb.REASON_LEADERSHIP_LOST, pb.REASON_SHUTTING_DOWN]
)
async def test_answers_that_call_for_another_try_are_tried_again(
    cluster: Cluster, client: AsyncTimerClient, reason: int
) -> None:
    cluster.on_schedule = once(wire_error(reason), wire_error(reason))
    await client.schedule("orders", b"p")
    assert [request.sequence for request in cluster.requests] == [1, 1, 1]


async def test_overload_backs_off_as_long_as_asked_and_keeps_the_order(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.on_schedule = once(wire_error(pb.REASON_OVERLOADED, retry_after_ms=80))
    begun = time.monotonic()
    await asyncio.gather(*(client.schedule_batch("orders", [b"%d" % i]) for i in range(5)))
    assert time.monotonic() - begun >= 0.08
    assert cluster.payloads == [b"%d" % i for i in range(5)]


async def test_overload_until_the_time_is_up_is_known_to_have_done_nothing(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.schedule("orders", b"first")  # what follows takes no time for the way there
    cluster.on_schedule = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=4_000)
    with pytest.raises(errors.Overloaded) as caught:
        await client.schedule("orders", b"p", timeout=3)
    assert caught.value.outcome_known
    cluster.on_schedule = once()
    await client.schedule("orders", b"q")
    assert cluster.payloads == [b"first", b"q"]


async def test_refusal_is_not_named_once_the_leader_has_accepted_something(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.on_schedule = once(wire_error(pb.REASON_OVERLOADED, retry_after_ms=1))
    await client.schedule("orders", b"p")
    cluster.hold = asyncio.Event()
    with pytest.raises(errors.OutcomeUnknown) as caught:
        await client.schedule("orders", b"q", timeout=0.5)
    cluster.hold.set()
    assert "OVERLOADED" not in str(caught.value)


async def test_refusal_by_a_leader_that_is_gone_is_not_named(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.schedule("orders", b"p")
    cluster.on_schedule = once(wire_error(pb.REASON_OVERLOADED, retry_after_ms=1))
    cluster.leader = None
    call = asyncio.ensure_future(client.schedule("orders", b"q", timeout=3))
    nodes = client._nodes
    assert nodes is not None
    await until(lambda: nodes.last_error is not None)
    await cluster.stop()
    with pytest.raises(errors.TimerError, match="UNAVAILABLE"):
        await call


async def test_connection_that_a_request_ended_is_named_though_no_leader_is_found_later(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    def lose(_: object) -> str:
        cluster.leader = None
        return "lose"

    cluster.on_schedule = lose
    lost = "the connection was lost: UNAVAILABLE: connection reset; the last error: .* not lead"
    with pytest.raises(errors.OutcomeUnknown, match=lost):
        await client.schedule_batch("orders", [b"p"], timeout=3)


@pytest.mark.parametrize("reason", [pb.REASON_DISK_FULL, pb.REASON_OVERLOADED])
async def test_refusal_is_named_by_all_that_it_holds_up_and_leaves_no_gap(
    cluster: Cluster, client: AsyncTimerClient, reason: int
) -> None:
    await client.schedule_batch("orders", [b"first"])

    def refused(request: pb.ScheduleRequest) -> pb.Error | None:
        return wire_error(reason, retry_after_ms=4_000) if request.sequence == 2 else None

    cluster.on_schedule = refused
    async with client.consumer("quiet", "g"):  # asks the other nodes whether they lead
        names = [b"a", b"b", b"c"]
        calls = [client.schedule_batch("orders", [name], timeout=3) for name in names]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in results} == {from_wire(wire_error(reason)).__class__}
    assert all(Reason(reason).name in str(each) for each in results)

    calls = [client.schedule_batch("orders", [name]) for name in (b"d", b"e", b"f")]
    cluster.on_schedule = once()
    await asyncio.gather(*calls)
    assert cluster.payloads == [b"first", b"d", b"e", b"f"]


async def test_quota_is_told_at_once_of_each_of_the_calls_that_were_put_together(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    def full(request: pb.ScheduleRequest) -> pb.Error | None:
        sizes = request.timers[0].payload_sizes
        refused = wire_error(pb.REASON_QUOTA_REACHED, field="pending_max", limit="at most 1")
        return refused if len(sizes) > 1 or sizes[0] > 1 else None

    cluster.on_schedule = full
    calls = [client.schedule("orders", payload) for payload in (b"a", b"too long", b"c")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each).__name__ for each in results] == ["Timer", "QuotaReached", "Timer"]
    refused = results[1]
    assert isinstance(refused, errors.QuotaReached)
    assert (refused.field, refused.limit) == ("pending_max", "at most 1")
    assert refused.retryable
    assert refused.outcome_known
    assert cluster.payloads == [b"a", b"c"]


async def test_silence_until_the_time_is_up_is_an_unknown_outcome(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.schedule("orders", b"first")
    cluster.hold = asyncio.Event()
    with pytest.raises(errors.OutcomeUnknown) as caught:
        await client.schedule("orders", b"p", timeout=3)
    assert not caught.value.outcome_known
    assert cluster.payloads == [b"first", b"p"]
    cluster.hold.set()
    cluster.hold = None
    await client.schedule("orders", b"q")
    assert cluster.payloads == [b"first", b"p", b"q"]


async def test_paused_leader_is_left_for_the_one_that_leads_by_now(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.schedule("orders", b"a")
    cluster.nodes[0].pause()
    call = asyncio.ensure_future(client.schedule("orders", b"b"))
    probes = cluster.probes
    await until(lambda: cluster.probes > probes)
    await cluster.fail_over(1)
    await call
    assert cluster.nodes[0].paused is not None, "it never answered"
    assert cluster.payloads == [b"a", b"b"]


async def test_slow_leader_that_still_leads_is_not_left(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.hold = asyncio.Event()
    call = asyncio.ensure_future(client.schedule("orders", b"a"))
    await until(lambda: cluster.requests)
    probes = cluster.probes
    await until(lambda: cluster.probes >= probes + 2 * len(cluster.nodes))
    cluster.hold.set()
    await call
    assert len(cluster.requests) == 1


async def test_forgotten_producer_registers_again(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await client.schedule("orders", b"a")
    [request] = cluster.requests
    gone = pb.UnregisterProducerRequest(producer_id=request.producer_id)
    await cluster.stubs["UnregisterProducer"](gone)
    await client.schedule("orders", b"b")
    assert cluster.payloads == [b"a", b"b"]
    assert cluster.registrations == 2


async def test_forgotten_outcome_surfaces(cluster: Cluster, client: AsyncTimerClient) -> None:
    cluster.on_schedule = once(wire_error(pb.REASON_OUTCOME_FORGOTTEN))
    with pytest.raises(errors.OutcomeForgotten):
        await client.schedule("orders", b"a")


async def test_cancelled_call_is_withdrawn_and_later_ones_go_on(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.leader = None
    gone = asyncio.ensure_future(client.schedule_batch("orders", [b"gone"]))
    kept = asyncio.ensure_future(client.schedule_batch("orders", [b"kept"]))
    await until(lambda: cluster.probes >= 2 * len(cluster.nodes))
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await cluster.fail_over(0)
    await kept
    assert cluster.payloads == [b"kept"]


async def test_row_of_a_call_that_is_over_unsent_is_not_sent_for_the_others(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    certain: list[bytes] = []
    for number in range(100):
        busy = wire_error(pb.REASON_OVERLOADED)
        cluster.on_schedule = lambda _, busy=busy: busy  # type: ignore[misc]
        name = str(number).encode()
        gone = asyncio.ensure_future(client.schedule("orders", b"gone" + name, timeout=0.03))
        kept = asyncio.ensure_future(client.schedule("orders", b"kept" + name))
        [error] = await asyncio.gather(gone, return_exceptions=True)
        cluster.on_schedule = lambda _: None
        timer = await kept
        assert [row.payload for row in cluster.rows if row.raw == timer.raw] == [b"kept" + name]
        if isinstance(error, errors.TimerError) and not isinstance(error, errors.OutcomeUnknown):
            certain.append(b"gone" + name)
        if len(certain) == 5:
            break
    assert len(certain) == 5
    assert not {*certain} & {*cluster.payloads}


async def test_row_of_a_call_that_is_over_on_the_wire_stays_and_its_outcome_is_unknown(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.hold = asyncio.Event()
    gone = asyncio.ensure_future(client.schedule("orders", b"gone", timeout=0.5))
    kept = asyncio.ensure_future(client.schedule("orders", b"kept"))
    await until(lambda: cluster.requests)
    with pytest.raises(errors.OutcomeUnknown):
        await gone
    cluster.hold.set()
    timer = await kept
    assert cluster.payloads == [b"gone", b"kept"]
    assert [row.payload for row in cluster.rows if row.raw == timer.raw] == [b"kept"]


async def test_client_that_closes_waits_for_nobody_who_was_cancelled(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.leader = None
    gone = asyncio.ensure_future(client.schedule("orders", b"gone"))
    await until(lambda: cluster.probes >= len(cluster.nodes))
    closing = asyncio.ensure_future(client.close(3600))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(60):
        await closing


async def test_client_whose_close_is_cancelled_before_it_begins_is_closed(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    consumer = client.consumer("orders", "g")
    await cluster.seed("orders", [b"m"])
    await asyncio.gather(*(client.schedule("orders", b"p") for _ in range(8)))
    await consumer.receive(timeout=60)
    closing = asyncio.create_task(client.close())
    asyncio.get_running_loop().call_soon(closing.cancel)
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert consumer.closed
    tasks = [repr(each.get_coro()) for each in asyncio.all_tasks()]
    assert [each for each in tasks if "Subscription" in each or "Producer" in each] == []


@pytest.mark.parametrize("within", [0, -1.0, float("nan"), "soon", True])
async def test_close_refuses_what_is_no_timeout_and_closes_nothing(
    cluster: Cluster, client: AsyncTimerClient, within: Any
) -> None:
    with pytest.raises(errors.InvalidRequest, match="timeout"):
        await client.close(within)
    await client.schedule("orders", b"a")
    assert cluster.payloads == [b"a"]


async def test_error_in_the_clients_block_is_not_replaced_by_its_closing(
    cluster: Cluster,
) -> None:
    async def work() -> None:
        async with AsyncTimerClient(cluster.address, timeout=0.2, settings=QUICK) as client:
            consumer = client.consumer("orders", "g")
            await cluster.seed("orders", [b"m"])
            [message] = await consumer.receive(timeout=60)
            cluster.on_ack = lambda _: "lose"
            _ = message.ack()
            raise KeyError

    with pytest.raises(KeyError):
        await work()


@pytest.mark.parametrize("keys", ["17", b"17"])
async def test_one_text_is_no_list_of_keys(
    cluster: Cluster, client: AsyncTimerClient, keys: Any
) -> None:
    for call in (
        client.cancel_keys("orders", keys),
        client.reschedule_keys("orders", keys, delay=60),
        client.schedule_batch("orders", [b"a", b"b"], delay=60, keys=keys),
    ):
        with pytest.raises(errors.InvalidRequest, match="must be a sequence of strings"):
            await call
    assert not cluster.rows


@pytest.mark.parametrize(
    ("call", "options", "text"),
    [
        ("schedule_all", {"timers": [b"x"]}, "timers[0] = bytes of 1: must be a NewTimer"),
        ("schedule_all", {"timers": 5}, "timers = int: must be a sequence"),
        (
            "schedule_all",
            {"timers": [NewTimer("a", json=1, headers=["b"])]},  # type: ignore[arg-type]
            "timers[0].headers = list",
        ),
        (
            "schedule",
            {"topic": "a", "json": 1, "headers": ["b"]},
            "headers = list: must be a map",
        ),
        ("schedule", {"topic": "a", "json": 1, "headers": "b"}, "headers = str of 1: must be a"),
        ("schedule_batch", {"topic": "a", "payloads": 5}, "payloads = int: must be a sequence"),
        ("schedule_batch", {"topic": "a", "payloads": [b""], "headers": 5}, "headers = int"),
        ("schedule_batch", {"topic": "a", "payloads": [b""], "keys": 5}, "keys = int"),
        (
            "create_series",
            {"topic": "a", "key": "k", "json": 1, "headers": ["b"]},
            "headers = list",
        ),
    ],
)
async def test_arguments_of_another_type_are_named(
    cluster: Cluster, client: AsyncTimerClient, call: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as raised:
        await getattr(client, call)(**options)
    assert text in str(raised.value)
    assert not cluster.rows


async def test_cancels_tell_the_truth(cluster: Cluster, client: AsyncTimerClient) -> None:
    due_ms = [NOW_MS + 60_000, NOW_MS, NOW_MS + 60_000]
    timers = await client.schedule_batch("orders", [b"a", b"fired", b"c"], due_ms=due_ms)
    assert await client.cancel(timers[0].id) == CancelResult.CANCELLED
    assert await client.cancel(timers[0]) == CancelResult.ALREADY_CANCELLED
    results = await client.cancel_batch([timers[1], timers[2].raw, bytes(15)])
    assert results == [
        CancelResult.ALREADY_FIRED,
        CancelResult.CANCELLED,
        CancelResult.NOT_FOUND,
    ]
    assert await client.cancel_batch(timers) == [
        CancelResult.ALREADY_CANCELLED,
        CancelResult.ALREADY_FIRED,
        CancelResult.ALREADY_CANCELLED,
    ]
    assert await client.cancel_batch([]) == []


async def test_cancel_with_a_lost_answer_meets_its_own_work(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    timer = await client.schedule("orders", b"a", delay=60)
    cluster.on_call = once("lose")
    assert await client.cancel(timer) == CancelResult.ALREADY_CANCELLED


async def test_cancel_follows_the_leader_and_leaves_a_silent_one(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    timer = await client.schedule("orders", b"a", delay=60)
    cluster.nodes[0].pause()
    await cluster.fail_over(1)
    assert await client.cancel(timer) == CancelResult.CANCELLED


async def test_a_crowd_that_hears_nothing_asks_once_whether_another_node_leads(
    cluster: Cluster,
) -> None:
    nodes = Nodes(cluster.address.split(","), replace(QUICK, stall_s=40, probe_s=60), tcp(None))
    leader = await nodes.leader()
    assert not any(await asyncio.gather(*(nodes._is_replaced(leader) for _ in range(200))))
    # One round found the leader, and what it had no need of may be heard late; one is the crowd's.
    assert cluster.probes <= 2 * len(cluster.nodes)
    await nodes.close()


async def test_that_no_other_node_led_a_while_ago_is_not_believed_for_long(
    cluster: Cluster,
) -> None:
    nodes = Nodes(cluster.address.split(","), replace(QUICK, probe_s=60), tcp(None))
    leader = await nodes.leader()
    assert not await nodes._is_replaced(leader)
    await cluster.fail_over(1)
    await asyncio.sleep(QUICK.stall_s / 4)
    assert await nodes._is_replaced(leader)
    assert (await nodes.leader()).address == cluster.nodes[1].address
    await nodes.close()


async def test_administration_asks_whoever_answers(cluster: Cluster) -> None:
    await cluster.nodes[0].stop()
    await cluster.fail_over(1)
    settings = replace(QUICK, stall_s=10)  # so long each may take: this machine may be busy
    async with AsyncTimerClient(cluster.address, timeout=60, settings=settings) as client:
        assert (await client.status()).leader == "n2"
        assert [node.node for node in (await client.checkpoint()).nodes] == ["fake"]
        assert await client.create_topic("x")
        assert [topic.name for topic in await client.topics()] == ["x"]
        unknown = wire_error(pb.REASON_NOT_FOUND, "no such node: 'nobody'")
        cluster.on_call = once(pb.TransferLeadershipResponse(), unknown)
        await client.transfer("n3")
        assert [each.target for each in cluster.called(pb.TransferLeadershipRequest)] == ["n3"]
        with pytest.raises(errors.NotFound, match="nobody"):
            await client.transfer("nobody")


async def test_close_waits_for_what_was_submitted(cluster: Cluster) -> None:
    client = AsyncTimerClient(cluster.address, settings=QUICK)
    call = asyncio.ensure_future(client.schedule("orders", b"p"))
    await asyncio.sleep(0)
    await client.close()
    assert (await call).due_ms == NOW_MS
    with pytest.raises(errors.Closed):
        await client.schedule("orders", b"q")
    await client.close()


async def test_close_gives_up_in_time_and_says_what_may_have_happened(cluster: Cluster) -> None:
    cluster.hold = asyncio.Event()
    client = AsyncTimerClient(cluster.address, settings=QUICK)
    call = asyncio.ensure_future(client.schedule("orders", b"p"))
    await until(lambda: cluster.requests)
    await client.close(0.05)
    with pytest.raises(errors.OutcomeUnknown, match="closed"):
        await call
    cluster.hold.set()


async def test_close_leaves_no_task_behind(cluster: Cluster) -> None:
    before = asyncio.all_tasks()
    async with AsyncTimerClient(cluster.address, settings=QUICK) as client:
        await client.schedule("orders", b"p")
        async with client.consumer("orders", "g") as consumer:
            assert await consumer.receive()
    await until(lambda: not [t for t in asyncio.all_tasks() - before if "timerclient" in repr(t)])


@pytest.mark.parametrize("cluster_text", ["", "nohost", "host:", ":1", "a:1,b", [], ["a:x"]])
def test_cluster_that_names_no_address_is_refused(cluster_text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="cluster"):
        AsyncTimerClient(cluster_text)


async def test_request_with_an_id_is_repeated_while_the_cluster_remembers_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "REPEAT_NAMED_S", 0.05)
    cluster.on_schedule = lambda _: "lose"
    async with AsyncTimerClient(cluster.address, timeout=60, settings=QUICK) as client:
        with pytest.raises(errors.OutcomeUnknown, match=r"within 0\.05 s"):
            await client.schedule("orders", b"p", delay=60, request_id="r")
    assert len(cluster.rows) <= 1
