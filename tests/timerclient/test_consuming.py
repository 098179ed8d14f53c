"""Consuming: credit, acks, epochs, and failovers in the middle."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest

from tests.timerclient.conftest import QUICK, once
from tests.timerclient.dead_letters import DeadLetters
from tests.timerclient.fake_cluster import NOW_MS, Cluster, wire_error
from tests.waiting import until
from timerclient import AckResult, AsyncTimerClient, ClientSettings, ExtendResult, NackResult
from timerclient.client.consumers import Consumers
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Batch, Message
from timerclient.streams import subscription
from timerclient.streams.ack_pipeline import AckPipeline
from timerclient.streams.credit import (
    FIRST_FETCH,
    LINK_BYTES_MAX,
    LINK_BYTES_MIN,
    Credit,
    LinkWindow,
)
from timerclient.streams.subscription import Subscription
from timerclient.values import errors


def numbers(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


async def test_callback_that_raises_a_cancel_does_not_end_the_consumer(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    def cancel(_: object) -> None:
        raise asyncio.CancelledError

    await cluster.seed("orders", numbers(4))
    async with client.consumer("orders", "billing") as consumer:
        for _ in range(4):
            [message] = await consumer.receive(timeout=60)
            acking = message.ack()
            acking.add_done_callback(cancel)
            assert await acking == AckResult.ACKED


async def test_close_with_a_wrong_timeout_leaves_the_consumer_open(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(1))
    async with client.consumer("orders", "billing") as consumer:
        with pytest.raises(errors.InvalidRequest):
            await consumer.close(timeout=0)
        assert len(await consumer.receive(timeout=60)) == 1


async def test_message_carries_what_was_scheduled(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    timer = await client.schedule("orders", b"p", due_ms=NOW_MS, key="k", headers={"a": "ä"})
    await client.schedule("orders", b"q")
    async with client.consumer("orders", "billing") as consumer:
        message, bare = await consumer.receive(10)
        assert (message.payload, message.key, message.headers) == (b"p", "k", {"a": "ä"})
        assert message.id == timer.id
        assert (message.due_ms, message.fired_at_ms) == (NOW_MS, NOW_MS)
        assert (message.attempt, message.queue_offset, message.epoch) == (1, 0, 1)
        assert (bare.key, bare.headers) == (None, {})
        assert await message.ack() == AckResult.ACKED
        assert await message.ack() == AckResult.ALREADY_ACKED


async def test_message_is_found_in_its_batch_and_refuses_to_be_pickled(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(2))
    async with client.consumer("orders", "billing") as consumer:
        first, second = await consumer.receive(2)
        assert second in first.batch
        assert first.batch.index(second) == 1
        assert {first, *first.batch} == {first, second}
        assert first == mock.ANY, "the other operand compares"
        with pytest.raises(TypeError, match="pass its payload, id, key and headers"):
            pickle.dumps(first)


async def test_messages_are_iterated_acked_and_confirmed_by_closing(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(250))
    seen = []
    async with client.consumer("orders", "g", lease=5, name="me", max_messages=250) as consumer:
        async for message in consumer:
            seen.append(message.payload)
            _ = message.ack()
    assert seen == numbers(250)
    assert cluster.acked == set(range(250))
    assert (cluster.opened[0].lease_ms, cluster.opened[0].consumer) == (5_000, "me")
    assert len(cluster.acks) < 100


async def test_batches_are_acked_as_columns(cluster: Cluster, client: AsyncTimerClient) -> None:
    await cluster.seed("orders", numbers(300))
    payloads: list[bytes] = []
    async with client.consumer("orders", "g", max_messages=300) as consumer:
        ackings = []
        async for batch in consumer.batches():
            payloads += batch.payloads
            ackings.append(batch.ack())
        assert sum([await acking for acking in ackings]) == 300
    assert payloads == numbers(300)
    assert len(cluster.acks) == len(ackings)


async def test_more_than_asked_for_is_never_leased(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(50))
    async with client.consumer("orders", "g", window=4, max_messages=10) as consumer:
        assert len([message async for message in consumer]) == 10
        assert len({*cluster.delivered}) == 10


async def test_window_bounds_what_waits_untaken(cluster: Cluster, client: AsyncTimerClient) -> None:
    await cluster.seed("orders", numbers(100))
    async with client.consumer("orders", "g", window=10) as consumer:
        await until(lambda: len(cluster.delivered) == 10)
        assert len(await consumer.receive(5)) == 5
        await until(lambda: len(cluster.delivered) == 15)
    assert cluster.credits == [5]


async def test_consumer_that_falls_behind_ends_its_credit_and_grants_some_again(
    cluster: Cluster, client: AsyncTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.seed("orders", numbers(3))
    async with client.consumer("orders", "g", window=14) as consumer:
        subscription = consumer._subscription
        assert subscription is not None
        inbox, credit = subscription._inbox, subscription._inbox._credit
        await until(lambda: credit.waiting == 3)
        await cluster.seed("orders", numbers(3))
        await until(lambda: credit.waiting == 6)
        with monkeypatch.context() as slow:
            slow.setattr(inbox._pace, "messages_within", lambda *_: 2)
            subscription._returns.shed(at_once=True)
        await until(lambda: cluster.credit_ends)
        assert cluster.given_back == [3, 4, 5]
        async with asyncio.timeout(60):
            got = [(await anext(consumer)).queue_offset for _ in range(6)]
    assert got == [*range(6)]
    assert cluster.credit_ends == 1
    assert cluster.credits, "the rest of the first credit was over"


async def test_credit_is_over_when_the_last_returned_part_is_answered(
    cluster: Cluster, client: AsyncTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.seed("orders", numbers(1))
    async with client.consumer("orders", "g") as consumer:
        assert (await anext(consumer)).queue_offset == 0
        subscription, ended = consumer._subscription, list[bool]()
        assert subscription is not None
        monkeypatch.setattr(subscription._inbox, "on_credit_ended", lambda: ended.append(True))
        subscription._returns.unanswered = 2
        subscription._returns._on_answer(set())
        assert ended == []
        subscription._returns._on_answer(set())
        assert ended == [True]


@pytest.mark.parametrize("timeout", [None, 1e-6], ids=["in time", "its time is up"])
async def test_closing_gives_back_what_nobody_saw(
    cluster: Cluster,
    client: AsyncTimerClient,
    monkeypatch: pytest.MonkeyPatch,
    timeout: float | None,  # noqa: ASYNC109
) -> None:
    for name in ("LEAVE_S", "LEAVE_S_MIN"):
        monkeypatch.setattr(subscription, name, 60.0)
    await cluster.seed("orders", numbers(100))
    consumer = client.consumer("orders", "g", window=10)
    assert (await anext(consumer)).queue_offset == 0
    await until(lambda: len({*cluster.delivered}) >= 10)
    await consumer.close(timeout)
    assert sorted(cluster.given_back) == [*range(1, len({*cluster.delivered}))]
    assert cluster.acks == []


async def test_closing_waits_for_a_silent_leader_only_so_long(
    cluster: Cluster, client: AsyncTimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "LEAVE_S", 0.05)
    await cluster.seed("orders", numbers(10))
    cluster.answers_leaving = False
    async with client.consumer("orders", "g") as consumer:
        await (await anext(consumer)).ack()
    assert consumer._subscription is not None
    assert consumer._subscription.is_over


async def test_receive_without_a_message_gives_none_in_time(client: AsyncTimerClient) -> None:
    async with client.consumer("orders", "g") as consumer:
        assert await consumer.receive(timeout=0.02) == []


async def test_receive_of_none_or_less_is_refused_and_takes_nothing(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(3))
    async with client.consumer("orders", "g") as consumer:
        [first] = await consumer.receive()
        for wrong in (0, -1):
            with pytest.raises(errors.InvalidRequest, match="max_messages"):
                await consumer.receive(wrong)
        rest = await consumer.receive(5)
        assert [first.queue_offset, *(message.queue_offset for message in rest)] == [0, 1, 2]


async def test_redelivery_says_so(cluster: Cluster, client: AsyncTimerClient) -> None:
    await cluster.seed("orders", numbers(1))
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        assert message.attempt == 1
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        assert message.attempt == 2
        assert repr(message) == f"Message({message.id!r}, queue_offset=0, attempt=2)"


@pytest.mark.parametrize("how", ["deposed", "killed", "paused"])
async def test_consumer_goes_on_through_a_failover_and_resends_its_acks(
    cluster: Cluster, client: AsyncTimerClient, how: str
) -> None:
    await cluster.seed("orders", numbers(5))
    async with client.consumer("orders", "g") as consumer:
        first = await consumer.receive(5)
        if how == "paused":
            cluster.nodes[0].pause()
        ackings = [message.ack() for message in first]
        await cluster.fail_over(1)
        if how == "killed":
            await cluster.nodes[0].stop()
        await cluster.seed("orders", [b"new"])
        await until(lambda: len(cluster.opened) >= 2)
        seen: list[bytes] = []
        while b"new" not in seen:
            seen += [message.payload for message in await consumer.receive(10)]
        assert {await acking for acking in ackings} <= {AckResult.ACKED, AckResult.ALREADY_ACKED}
    assert cluster.acked >= set(range(5))


async def test_unanswered_acks_are_resent_with_their_epoch_and_lease(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(1))
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        cluster.on_ack = once("lose")
        assert await message.ack() == AckResult.ALREADY_ACKED
    first, second = cluster.acks
    assert (first.epoch, first.lease_id) == (second.epoch, second.lease_id)
    assert first.lease_id > 0


@pytest.mark.parametrize("max_messages", [None, 6])
async def test_what_a_broken_stream_brought_is_dropped_unseen_and_comes_again_in_order(
    cluster: Cluster, client: AsyncTimerClient, max_messages: int | None
) -> None:
    await cluster.seed("orders", numbers(3))
    consumer = client.consumer("orders", "g", window=6, max_messages=max_messages)
    async with consumer:
        first = await anext(consumer)
        await cluster.seed("orders", numbers(3))
        await until(lambda: len({*cluster.delivered}) == 6)
        await until(lambda: consumer._open()._inbox._batches)
        cluster.on_ack = once("lose")
        assert await first.ack() == AckResult.ALREADY_ACKED  # by the next stream, of the same epoch
        again = [await anext(consumer) for _ in range(5)]
        assert [(each.queue_offset, each.attempt) for each in again] == [
            (at, 2) for at in range(1, 6)
        ]
        assert (consumer.dropped_stale, cluster.epoch) == (5, 1)
        if max_messages is not None:
            with pytest.raises(StopAsyncIteration):
                await anext(consumer)


async def test_nacked_message_comes_again_and_a_delay_is_sent_along(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(2))
    async with client.consumer("orders", "g") as consumer:
        one, two = await consumer.receive(2)
        assert await one.nack(delay=timedelta(seconds=1.5)) == NackResult.NACKED
        assert await two.ack() == AckResult.ACKED
        assert await two.nack() == NackResult.ALREADY_ACKED
        with pytest.raises(errors.LeaseLost):
            await one.nack(delay=0)
        await cluster.core.advance(2)
        [again] = await consumer.receive(2)
        assert (again.payload, again.attempt) == (b"0", 2)
    sent = [request for request in cluster.acks if isinstance(request, pb.NackRequest)]
    delays = [request.delay_ms if request.HasField("delay_ms") else None for request in sent]
    assert delays == [1_500, None, 0]


async def test_batch_is_nacked_and_extended_as_a_whole(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(3))
    async with client.consumer("orders", "g") as consumer:
        await until(lambda: len({*cluster.delivered}) == 3)
        batch = await anext(aiter(consumer.batches()))
        assert await batch[0].ack() == AckResult.ACKED
        assert await batch.extend(lease=60) == 2
        assert await batch[1].extend() == ExtendResult.EXTENDED
        assert await batch.nack() == 2
        with pytest.raises(errors.LeaseLost) as caught:
            await batch.extend()
        assert caught.value.offsets == (1, 2)
    leases = [r.lease_ms for r in cluster.acks if isinstance(r, pb.ExtendRequest)]
    assert leases == [60_000, 0, 0]


@pytest.mark.parametrize(
    ("send", "result"),
    [(Message.ack, AckResult.ACKED), (partial(Message.nack, delay=5), NackResult.NACKED)],
)
async def test_acks_and_nacks_of_one_delay_that_wait_share_a_request(
    cluster: Cluster, send: Callable[[Message], Awaitable[object]], result: object
) -> None:
    await cluster.seed("orders", numbers(100))
    settings = ClientSettings(ack_requests_max=1)
    async with (
        AsyncTimerClient(cluster.address, settings=settings) as client,
        client.consumer("orders", "g", window=100) as consumer,
    ):
        for sending in [send(message) for message in await consumer.receive(100)]:
            assert await sending == result
    assert len(cluster.acks) <= 2


async def test_cumulative_ack_is_a_request_of_its_own_and_repeated_if_its_answer_is_lost(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(9))
    await client.create_group("orders", "g", type="exclusive")
    async with client.consumer("orders", "g") as consumer:
        got = await consumer.receive(9)
        cluster.on_ack = once("lose")
        answers = [got[3].ack_up_to(), got[6].ack_up_to(), got[8].ack()]
        first, *others = [await each for each in answers]
        assert first is AckResult.ALREADY_ACKED
        assert {*others} <= {AckResult.ACKED, AckResult.ALREADY_ACKED}
    asked = {(tuple(r.offsets), r.cumulative) for r in cluster.acks if isinstance(r, pb.AckRequest)}
    assert asked == {((3,), True), ((6,), True), ((8,), False)}


async def test_group_that_is_held_refuses_who_comes_and_lets_who_was_there_wait(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(2))
    held = wire_error(pb.REASON_GROUP_HELD, "consumer 'other' has it")
    cluster.on_open = once(held)
    with pytest.raises(errors.GroupHeld, match="'other' has it"):
        async with client.consumer("orders", "g"):
            pass
    async with client.consumer("orders", "g", window=1) as consumer:
        _ = await consumer.receive()
        cluster.on_open = once(held, held)
        await cluster.fail_over(to=1)
        assert await consumer.receive()
    assert [each.existing for each in cluster.opened] == [False, False, *[True] * 3]


async def test_deletion_whose_answer_was_lost_is_done(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    with pytest.raises(errors.NotFound):
        await client.delete_group("orders", "nobody")
    await client.create_group("orders", "g")
    cluster.on_call = once("lose")
    await client.delete_group("orders", "g")
    assert len(cluster.called(pb.DeleteGroupRequest)) == 3


async def test_redrive_of_so_many_is_not_sent_again_once_an_answer_was_lost(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    letters = DeadLetters(250)
    letters.lost = 1
    cluster.on_call = letters.redrive
    with pytest.raises(errors.OutcomeUnknown):
        await client.redrive("orders.g.dead", 30)
    assert letters.count == 220
    letters.errors = [wire_error(pb.REASON_COMMIT_TIMEOUT)]
    with pytest.raises(errors.OutcomeUnknown) as caught:
        await client.redrive("orders.g.dead", 150)
    assert (caught.value.done, letters.count) == (100, 120)
    letters.lost = 1
    redriven = await client.redrive("orders.g.dead")  # all: what is sent again harms nobody
    assert (redriven, redriven.exact, letters.count) == (20, False, 0)
    cluster.on_call = once("break", pb.RedriveLettersResponse(redriven=1))
    redriven = await client.redrive("orders.g.dead", offsets=[7, 9])
    assert (redriven, redriven.exact) == (1, False)


async def test_seek_needs_exactly_one_place(cluster: Cluster, client: AsyncTimerClient) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"offset": 1, "start": "latest"},
        {"offset": -1},
        {"offset": 1 << 64},
        {"start": "middle"},
        {"time": datetime(2030, 1, 1)},  # noqa: DTZ001 -- naive
    ]
    for place in wrong:
        with pytest.raises(errors.InvalidRequest):
            await client.seek_group("orders", "g", **place)
    assert not cluster.called(pb.SeekGroupRequest)
    await cluster.seed("orders", numbers(9))
    await client.create_group("orders", "g")
    assert (await client.seek_group("orders", "g", offset=5)).cursor == 5


async def test_nack_whose_answer_is_lost_is_unknown_and_not_repeated(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(1))
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        cluster.on_ack = once("lose")
        with pytest.raises(errors.OutcomeUnknown):
            await message.nack(delay=0)
        [again] = await consumer.receive()
        assert await again.ack() == AckResult.ACKED
    assert [type(request).__name__ for request in cluster.acks] == ["NackRequest", "AckRequest"]


@pytest.mark.parametrize("delay", [-1, timedelta(days=-1), float("nan"), 1e18])
async def test_delay_that_cannot_be_is_refused_at_once(
    cluster: Cluster, client: AsyncTimerClient, delay: float | timedelta
) -> None:
    await cluster.seed("orders", numbers(1))
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        with pytest.raises(errors.InvalidRequest):
            _ = message.nack(delay=delay)
    assert cluster.acks == []


async def test_lost_lease_is_raised_and_counted(cluster: Cluster, client: AsyncTimerClient) -> None:
    await cluster.seed("orders", numbers(3))
    async with client.consumer("orders", "g", window=3) as consumer:
        await until(lambda: len({*cluster.delivered}) == 3)
        batch = await anext(aiter(consumer.batches()))
        lost = pb.ACK_RESULT_LEASE_LOST
        results = [pb.ACK_RESULT_ACKED, lost, pb.ACK_RESULT_ACKED]
        cluster.on_ack = once(*(pb.AckResponse(results=each) for each in (results, [lost])))
        with pytest.raises(errors.LeaseLost) as caught:
            await batch.ack()
        assert caught.value.offsets == (1,)
        with pytest.raises(errors.LeaseLost):
            await batch[1].ack()
        assert consumer.leases_lost == 1


async def test_ack_that_is_overloaded_is_sent_again(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(1))
    cluster.on_ack = once(
        wire_error(pb.REASON_OVERLOADED, retry_after_ms=1),
        wire_error(pb.REASON_LEADERSHIP_LOST),
        None,
    )
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        assert await message.ack() == AckResult.ACKED
    assert len(cluster.acks) == 3


async def test_ack_that_is_refused_raises(cluster: Cluster, client: AsyncTimerClient) -> None:
    await cluster.seed("orders", numbers(1))
    cluster.on_ack = once(wire_error(pb.REASON_NOT_FOUND, "no such group"))
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        with pytest.raises(errors.NotFound):
            await message.ack()


async def test_acks_of_a_group_that_is_deleted_say_so_and_its_close_has_nothing_to_add(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(3))
    gone = wire_error(pb.REASON_NOT_FOUND, "group 'g' of topic 'orders' was deleted")
    cluster.gone, cluster.on_open = gone, lambda opening: gone if opening.existing else None
    consumer = client.consumer("orders", "g")
    one, two, three = await consumer.receive(3)
    cluster.on_ack = once("lose")
    sent, later = one.ack(), two.ack()
    for acking in (sent, later):
        with pytest.raises(errors.NotFound, match="was deleted"):
            await acking
    with pytest.raises(errors.NotFound, match="was deleted"):
        await consumer.receive()
    with pytest.raises(errors.NotFound, match="was deleted"):
        await three.ack()
    await consumer.close()  # what became of the acks is known


async def test_block_of_a_deleted_group_ends_in_peace_without_acks(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(1))
    gone = wire_error(pb.REASON_NOT_FOUND, "group 'g' of topic 'orders' was deleted")
    cluster.gone, cluster.on_open = gone, lambda opening: gone if opening.existing else None
    async with client.consumer("orders", "g") as consumer:
        [message] = await consumer.receive()
        cluster.on_ack = once("lose")
        # A write that meets the end of the stream first hides the node's reason in grpc.aio. The
        # nack's outcome is then unknown, and the reopened stream tells the reason.
        with pytest.raises((errors.NotFound, errors.OutcomeUnknown)):
            await message.nack()
        with pytest.raises(errors.NotFound):
            await consumer.receive()


async def test_flush_waits_for_answers_and_says_when_they_don_t_come(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(2))
    async with client.consumer("orders", "g") as consumer:
        first, second = await consumer.receive(2)
        acking = first.ack()
        await consumer.flush()
        assert acking.done()
        cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)
        acking = second.ack()
        with pytest.raises(errors.OutcomeUnknown):
            await consumer.flush(0.05)
        cluster.on_ack = once()
    assert acking.result() == AckResult.ACKED


async def test_closing_without_answers_fails_the_acks(cluster: Cluster) -> None:
    await cluster.seed("orders", numbers(1))
    client = AsyncTimerClient(cluster.address, settings=QUICK)
    async with client:
        consumer = client.consumer("orders", "g")
        [message] = await consumer.receive()
        cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)
        acking = message.ack()
        with pytest.raises(errors.OutcomeUnknown):
            await consumer.close(0.05)
        with pytest.raises(errors.OutcomeUnknown):
            await acking
        with pytest.raises(errors.Closed):
            await message.ack()
        with pytest.raises(errors.Closed):
            await consumer.receive()


async def test_client_closes_all_consumers_though_one_raises(cluster: Cluster) -> None:
    await cluster.seed("orders", [b"p"])
    client = AsyncTimerClient(cluster.address, timeout=60, settings=QUICK)
    bad, good = client.consumer("orders", "bad"), client.consumer("quiet", "good")
    async with good, bad:
        cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)
        [message] = await bad.receive()
        acking = message.ack()
        with pytest.raises(errors.OutcomeUnknown):
            await client.close(0.2)
        assert bad.closed
        assert good.closed
        assert isinstance(acking.exception(0), errors.OutcomeUnknown)
        with pytest.raises(errors.Closed):
            await client.schedule("orders", b"p")


async def test_client_closes_its_consumers_together(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, begun = Subscription.close, asyncio.Barrier(3)

    async def closing(subscription: Subscription, within_s: float) -> None:
        assert within_s == 60
        async with asyncio.timeout(30):
            await begun.wait()
        await close(subscription, within_s)

    monkeypatch.setattr(Subscription, "close", closing)
    client = AsyncTimerClient(cluster.address, settings=QUICK)
    for name in ("a", "b", "c"):
        await client.consumer("orders", name).receive(timeout=0)
    await client.close(60)


async def test_client_forgets_consumers_that_are_over(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    refused, closed, alive = (client.consumer("orders", g) for g in ("-", "a", "b"))
    with pytest.raises(errors.InvalidRequest):
        await refused.receive()
    await closed.close()
    new = [client.consumer("orders", "c") for _ in range(Consumers.SWEEP_AT - 3)]
    assert client._consumers == {alive, *new}


async def test_stale_deliveries_are_dropped_and_counted(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    await cluster.seed("orders", numbers(3))
    old = client.consumer("orders", "g", window=3)
    async with old:
        await until(lambda: len({*cluster.delivered}) == 3)
        # Another consumer of the same client meets the new epoch first.
        cluster.epoch_shift = 1
        async with client.consumer("other", "g"), asyncio.timeout(60):
            while old.dropped_stale < 3:  # they may be on their way yet
                assert await old.receive(timeout=0.05) == []
        assert old.dropped_stale == 3


async def test_leader_of_an_older_epoch_is_not_consumed_from(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    async with client.consumer("orders", "g"):
        cluster.epoch_shift = -1
        consumer = client.consumer("other", "g")
        with pytest.raises(errors.Unreachable):
            await consumer._open().wait_until_open(0.1)
        cluster.epoch_shift = 1
        await consumer._open().wait_until_open(60)
        await consumer.close()


async def test_refused_consumer_raises(client: AsyncTimerClient) -> None:
    with pytest.raises(errors.InvalidRequest, match="group = '-'"):
        async with client.consumer("orders", "-"):
            pass
    lazy = client.consumer("orders", "-")
    with pytest.raises(errors.InvalidRequest, match="group = '-'"):
        await lazy.receive()


async def test_consumer_without_a_cluster_is_unreachable_in_time() -> None:
    async with AsyncTimerClient("127.0.0.1:1", timeout=0.1, settings=QUICK) as client:
        with pytest.raises(errors.Unreachable):
            async with client.consumer("orders", "g"):
                pass


@pytest.mark.parametrize(
    "wrong",
    [{"window": 0}, {"window": 1.5}, {"max_messages": 0}, {"start": "middle"}, {"lease": 0}],
)
async def test_wrong_options_are_refused(client: AsyncTimerClient, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        client.consumer("orders", "g", **wrong)


async def test_iteration_ends_when_the_consumer_is_closed(client: AsyncTimerClient) -> None:
    async with client.consumer("orders", "g") as consumer:

        async def count() -> int:
            return len([message async for message in consumer])

        counting = asyncio.ensure_future(count())
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(consumer.receive())
        await asyncio.sleep(0)
        await consumer.close()
        assert await counting == 0
        assert await waiting == []
        assert repr(consumer) == "AsyncConsumer('orders', group='g', closed)"


def test_batch_slices_its_columns_only_when_asked() -> None:
    columns = pb.Deliveries(queue_offsets=[5, 6], payload_sizes=[1, 2], payloads=b"abb")
    batch = Batch(columns, lambda *_: None)
    assert len(batch) == 2
    assert batch.payloads == [b"a", b"bb"]
    assert [message.payload for message in batch[::-1]] == [b"bb", b"a"]
    assert batch[1].payload is batch[1].payload  # the columns are not copied for each message
    assert batch[-1].queue_offset == 6
    with pytest.raises(IndexError):
        batch[2]


def test_credit_refills_by_half_windows_and_ends_with_its_total() -> None:
    credit = Credit(10, 14)
    assert credit.grant() == 10
    credit.count_arrived(8)
    assert not credit.is_due()
    credit.count_taken(8)
    assert credit.is_due()
    assert credit.grant() == 4
    assert not credit.is_due()
    credit.revoke()
    assert credit.grant() == 6
    credit.count_arrived(6)
    credit.count_taken(4)
    credit.count_dropped(2)
    assert not credit.is_exhausted
    assert credit.is_due()
    assert credit.grant() == 2
    credit.count_arrived(2)
    credit.count_taken(2)
    assert credit.is_exhausted


def test_credit_of_large_messages_is_that_of_the_bytes_that_may_wait() -> None:
    credit = Credit(1_000)
    credit.bytes_max = 1_000
    assert credit.grant() == FIRST_FETCH
    credit.count_arrived(96, 96 * 5)  # 200 fit
    assert credit.grant() == 200 - FIRST_FETCH
    credit.count_arrived(4, 4 * 5_000)  # one is larger than all that may wait
    credit.count_arrived(100, 0)
    credit.count_taken(199)
    assert not credit.is_due()
    credit.count_taken(1)
    assert credit.is_due()
    assert credit.grant() == 1
    for _ in range(40):
        credit.count_arrived(1, 10)
        credit.count_taken(1)
    assert 90 <= credit.grant() <= 100


@pytest.mark.parametrize("rate", [10_000, 200_000, 1_000_000, 1_000_000_000])
def test_window_of_a_link_holds_what_it_carries_in_a_quarter_of_a_lease(rate: int) -> None:
    """A leader that always has messages of 10 kB, a link of `rate` bytes a second, a lease of 20 s.

    The link is also idle for a minute: what little came then says nothing about it.
    """
    now_s, size, lease_s = 0.0, 10_000, 20.0
    window = LinkWindow(now_s)
    knows = (window.size, 0)  # the leader: the window, and what the client has received
    sent = 0
    for round_no in range(6_000):
        idle_s = 60.0 if round_no == 2_000 else 0.0
        while sent - knows[1] < knows[0]:
            sent += size
        now_s += size / rate + idle_s
        window.count_arrived(size, lease_s, now_s)
        if window.is_report_due():
            knows = (window.size, window.take_report())
        assert knows[1] + knows[0] > window.received, "the link is idle"
    fits = min(max(int(rate * lease_s / 4), LINK_BYTES_MIN), LINK_BYTES_MAX)
    assert fits / 2 < window.size <= fits


async def test_streams_are_free_to_move_if_no_lease_or_ack_would_be_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[tuple[bool, bool]] = []

    async def check(_: object, *, silent: bool, free: bool) -> None:
        checks.append((silent, free))

    async def seen(*, free: bool) -> None:
        checks.clear()
        await until(lambda: len(checks) >= 16)
        assert {each[1] for each in checks} == {free}

    settings = replace(QUICK, stall_s=0.02)
    async with AsyncTimerClient(cluster.address, timeout=60, settings=settings) as client:
        monkeypatch.setattr(client.nodes(), "check", check)
        await client.schedule("quiet", b"a")
        await seen(free=True)
        assert {silent for silent, _ in checks} == {False}, "the producer waits for no answer"
    async with AsyncTimerClient(cluster.address, timeout=60, settings=settings) as client:
        monkeypatch.setattr(client.nodes(), "check", check)
        await cluster.seed("orders", numbers(1))
        async with client.consumer("orders", "billing") as consumer:
            [message] = await consumer.receive(timeout=60)
            await seen(free=False)
            await until(lambda: (True, False) in checks)
            cluster.nodes[0].pause()
            acking = message.ack()
            await until(
                lambda: consumer._subscription and not consumer._subscription._leases.has_leases
            )
            await seen(free=False)
            cluster.nodes[0].resume()
            await acking
            await seen(free=True)
            monkeypatch.setattr(AckPipeline, "has_resends", property(lambda _: True))
            await seen(free=False)
