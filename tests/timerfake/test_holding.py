"""Leases that a consumer renews, messages that it fetched ahead, and leases that it loses."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from timerclient import AckResult, Event, LeaseLost, LeasesLost, TimerClient
from timerclient.client.consumers import AsyncConsumer
from timerclient.client.sync import Consumer
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.holds import Hold, Transit
from timerclient.rows.messages import Batch, Message
from timerclient.streams.acks import QueuedAck
from timerclient.streams.credit import Credit
from timerclient.streams.inbox import Inbox
from timerclient.streams.key_lines import GroupOrder
from timerclient.streams.unseen_returns import UnseenReturns
from timerfake import AsyncFakeCluster, FakeCluster

JOBS = [b"%d" % number for number in range(100)]
LEASE_S = 5


def one_by_one(consumer: Consumer) -> Iterator[Message]:
    yield from consumer


def tens(consumer: Consumer) -> Iterator[Message]:
    while messages := consumer.receive(10):
        yield from messages


def batches(consumer: Consumer) -> Iterator[Message]:
    for batch in consumer.batches():
        yield from batch


@pytest.mark.parametrize("work_s", [0.4, LEASE_S * 0.7, LEASE_S * 4])
@pytest.mark.parametrize("messages", [one_by_one, tens, batches])
def test_slow_application_works_each_message_once(
    cluster: FakeCluster,
    client: TimerClient,
    caplog: pytest.LogCaptureFixture,
    messages: Callable[[Consumer], Iterator[Message]],
    work_s: float,
) -> None:
    client.schedule_batch("orders", JOBS)
    worked: list[bytes] = []
    with client.consumer(
        "orders", group="billing", lease=LEASE_S, hold_max=3600, max_messages=len(JOBS)
    ) as consumer:
        for message in messages(consumer):
            cluster.advance(work_s)
            worked.append(message.payload)
            _ = message.ack()
        assert (consumer.dropped_stale, consumer.leases_lost) == (0, 0)
    assert sorted(worked) == sorted(JOBS)
    assert client.topics()[0].groups[0].unacked == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_slow_coroutine_works_each_message_once() -> None:
    worked: list[bytes] = []
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.schedule_batch("orders", JOBS)
        async with client.consumer("orders", "g", lease=LEASE_S, max_messages=100) as consumer:
            async for message in consumer:
                await cluster.advance(0.4)
                worked.append(message.payload)
                _ = message.ack()
    assert sorted(worked) == sorted(JOBS)


@pytest.mark.parametrize("pause_s", [0.1, 1.5])
def test_hiccup_of_a_quick_application_returns_no_message(
    cluster: FakeCluster, client: TimerClient, pause_s: float
) -> None:
    client.schedule_batch("orders", [b"%d" % number for number in range(400)])
    attempts: list[int] = []
    with client.consumer("orders", "g", lease=30, max_messages=400) as consumer:
        for number, message in enumerate(consumer):
            attempts.append(message.attempt)
            cluster.advance(pause_s if number % 100 == 50 else 0.002)
            _ = message.ack()
    assert attempts == [1] * 400


def test_messages_behind_slow_work_go_to_another_consumer_and_have_not_failed(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_group("orders", "g", max_attempts=1)
    client.schedule_batch("orders", JOBS[:10])
    with client.consumer("orders", "g", lease=LEASE_S, window=10) as slow:
        cluster.settle()
        [hard] = slow.receive(timeout=0)
        with client.consumer("orders", "g", lease=LEASE_S) as other:
            cluster.settle()
            assert other.receive(timeout=0) == [], "the first one came first"
            others: list[bytes] = []
            for least in (6, 9):  # most of them at half of the first lease, not a lease later
                cluster.advance(LEASE_S * 0.6)
                while messages := other.receive(10, timeout=0):
                    others += [message.payload for message in messages]
                    _ = [message.ack() for message in messages]
                assert len(others) >= least
            cluster.advance(LEASE_S)
        hard.ack().result(5)
        assert sorted([hard.payload, *others]) == JOBS[:10]
    assert [topic.name for topic in client.topics()] == ["orders"], "no dead letters"


@pytest.mark.parametrize("hold_max", [None, timedelta(seconds=12), 0])
def test_lease_that_is_held_too_long_is_lost_warned_of_once_and_raised(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, hold_max: timedelta | None
) -> None:
    events: list[Event] = []
    held_s = {None: 600, timedelta(seconds=12): 12, 0: LEASE_S}[hold_max]
    with TimerClient("fake:1", dial=cluster.dial, on_event=events.append) as client:
        client.schedule_batch("orders", [b"a", b"b"])
        with (
            client.consumer("orders", "g", lease=LEASE_S, hold_max=hold_max, window=2) as hung,
            client.consumer("orders", "g") as other,
        ):
            cluster.settle()
            first, second = hung.receive(2, timeout=0)
            cluster.advance(held_s - 0.001)
            assert other.receive(timeout=0) == []
            cluster.advance(0.001)
            again = other.receive(2, timeout=0)
            assert [(each.payload, each.attempt) for each in again] == [(b"a", 2), (b"b", 2)]
            cluster.advance(LEASE_S)  # the consumer asks whether it has them still
            for touch in (first.ack, first.nack, second.extend):
                with pytest.raises(LeaseLost):
                    touch()
            assert hung.leases_lost == 2
    assert [each for each in events if isinstance(each, LeasesLost)] == [
        LeasesLost("orders", "g", (0, 1))
    ]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    [warning] = warnings
    assert warning.startswith(
        "lease lost: topic 'orders', group 'g': 2 messages from queue offset 0"
    )


async def test_message_acked_twice_leaves_the_others_of_its_batch_held() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.schedule_batch("orders", [b"quick", b"slow"])
        async with client.consumer("orders", "g", lease=LEASE_S, window=2) as consumer:
            quick, slow = await consumer.receive(2)
            acks = quick.ack(), quick.ack()  # in one request: nothing was awaited between
            assert await acks[0] is AckResult.ACKED
            assert await acks[1] is AckResult.ALREADY_ACKED
            for _ in range(3):
                await cluster.advance(LEASE_S)
            assert await slow.ack() is AckResult.ACKED
            told = [event.what for event in (await client.tell_story(slow.id)).events]
        assert pb.StoryEvent.WHAT_ACKED in told
        assert pb.StoryEvent.WHAT_LEASE_ENDED not in told


def test_acks_of_single_messages_that_wait_together_each_get_their_answer(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.schedule_batch("orders", JOBS[:4])
    with client.consumer("orders", "g", lease=LEASE_S, hold_max=0, window=4) as consumer:
        cluster.settle()
        first, second, *_ = messages = consumer.receive(4, timeout=0)
        assert first.ack().result(5) is AckResult.ACKED
        with client.consumer("orders", "g") as other:
            cluster.advance(LEASE_S)
            again = other.receive(4, timeout=0)
            assert again[0].queue_offset == second.queue_offset
            acks = [message.ack() for message in messages]
            assert acks[0].result(5) is AckResult.ALREADY_ACKED
            for ack, message in zip(acks[1:], messages[1:], strict=True):
                with pytest.raises(LeaseLost, match=f"queue_offset = {message.queue_offset}"):
                    ack.result(5)


def test_application_that_extends_is_given_its_time_anew(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.schedule("orders", b"long")
    with client.consumer("orders", "g", lease=LEASE_S, hold_max=12) as consumer:
        cluster.settle()
        [message] = consumer.receive(timeout=0)
        for _ in range(5):
            cluster.advance(10)
            message.extend(LEASE_S).result(5)
        message.ack().result(5)


def test_consumer_that_asks_for_nothing_gives_back_and_gets_it_again_once_it_asks(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_group("orders", "g", max_attempts=1)
    client.schedule("orders", b"waits")
    with client.consumer("orders", "g", window=1, lease=LEASE_S) as idle:
        cluster.advance(590)
        assert client.topics()[0].groups[0].leased == 1
        cluster.advance(20)
        assert client.topics()[0].groups[0].leased == 0
        [message] = idle.receive(timeout=5)
        message.ack().result(5)


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_message_that_waited_beyond_its_lease_is_not_handed_over(
    cluster: FakeCluster, client: TimerClient, kind: Any
) -> None:
    client.create_group("orders", "g", type=kind)
    client.schedule_batch("orders", JOBS[:3])
    with client.consumer("orders", "g", lease=LEASE_S, hold_max=0, window=3) as consumer:
        cluster.settle()
        [first] = consumer.receive(timeout=0)
        cluster.advance(LEASE_S)
        rest = [consumer.receive(timeout=5)[0] for _ in range(3)]
        assert (first.attempt, [each.attempt for each in rest]) == (1, [2, 2, 2])
        assert consumer.dropped_stale == 2


@pytest.mark.parametrize("every", [timedelta(minutes=30), timedelta(hours=5)])
def test_test_that_advances_by_long_steps_misses_no_message(
    cluster: FakeCluster, client: TimerClient, every: timedelta
) -> None:
    client.schedule_batch("orders", JOBS[:4], delay=[3600 * n + 1 for n in range(1, 5)])
    seen: list[bytes] = []
    with client.consumer("orders", "g") as consumer:
        for _ in range(-(-timedelta(hours=5) // every)):
            cluster.advance(every)
            while messages := consumer.receive(10, timeout=0):
                seen += [message.payload for message in messages]
                _ = [message.ack() for message in messages]
    assert seen == JOBS[:4]


async def test_coroutine_that_advances_by_a_long_step_misses_no_message() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.schedule("orders", b"waits")
        async with client.consumer("orders", "g") as consumer:
            await cluster.advance(timedelta(hours=1))
            assert [each.payload for each in await consumer.receive(timeout=0)] == [b"waits"]


def test_message_that_expired_while_it_waited_is_not_handed_over(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_topic("orders")
    client.alter_policies({"ttl_ms": 20_000}, topic="orders")
    client.schedule_batch("orders", [b"old", b"younger"], delay=[0, 15])
    cluster.advance(16)
    with client.consumer("orders", "g", lease=30) as consumer:
        cluster.advance(16)  # the extension has told of the expiry
        [message] = consumer.receive(10, timeout=0)
        assert message.payload == b"younger"
        message.ack().result(5)


@pytest.mark.parametrize("hold_max", [0, 600])
async def test_slow_clock_of_the_cluster_ends_no_lease_of_a_message_that_just_arrived(
    hold_max: float,
) -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await cluster.advance(1)
        async with client.consumer("orders", "g", lease=LEASE_S, hold_max=hold_max) as consumer:
            for payload in JOBS[:6]:
                await client.schedule("orders", payload)
                [message] = await consumer.receive(10, timeout=0)
                assert (message.payload, message.attempt) == (payload, 1)
                await message.ack()
                if payload == JOBS[0]:  # the clocks of all nodes are set back
                    cluster._clock._wall_ms -= 600_000
                await cluster.advance(LEASE_S)  # half of it on the cluster's clock
            assert consumer.dropped_stale == 0


def test_time_in_flight_is_measured_and_a_slow_drift_of_the_clocks_is_not() -> None:
    transit, day_s = Transit(), 86_400
    assert transit.late_s(1_000, 500.0) == 0
    assert transit.late_s(2_000, 503.0) == pytest.approx(2, abs=0.001)
    for day in range(1, 100):
        assert transit.late_s(2_000 + day * day_s * 1_000, 501.0 + day * (day_s + 5)) < 0.001
    assert transit.late_s(0, 0.0) == 0


def test_messages_that_were_acked_while_an_extension_was_sent_are_not_lost() -> None:
    hold = Hold(Batch(pb.Deliveries(queue_offsets=[5, 6, 7]), lambda *_: None), 30, 30)
    asked = hold.unsettled_offsets
    hold.settle([5])  # its ack goes first
    results = [pb.ACK_RESULT_LEASE_LOST, pb.ACK_RESULT_LEASE_LOST, pb.ACK_RESULT_EXTENDED]
    assert hold.apply_answer(asked, results, 60) == [6]
    assert (hold.lost_offsets, hold.unsettled_offsets) == ({6}, [7])


async def test_receive_without_a_wait_returns_while_other_tasks_never_rest() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:

        async def produce() -> None:
            while True:
                await client.schedule("orders", b"one more")

        seen = 0
        async with client.consumer("orders", "g") as consumer:
            producing = asyncio.create_task(produce())
            async with asyncio.timeout(60):
                while seen < 20:
                    seen += len(await consumer.receive(timeout=0))
                    await asyncio.sleep(0)
            async with asyncio.timeout(60):  # as threads wait before they look
                assert cluster._clock.settle is not None
                await cluster._clock.settle()
            producing.cancel()


async def test_recalled_message_is_dropped_behind_another_of_its_batch() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.create_group("orders", "g", type="key_shared")
        await client.schedule_batch("orders", [b"a1", b"b1", b"a2"], ordering_keys=["a", "b", "a"])
        async with client.consumer("orders", "g") as consumer:
            await cluster.settle()
            [first] = await consumer.receive()
            assert len(first.batch) == 3
            _ = first.nack()
            await cluster.settle()
            assert consumer._subscription is not None
            got = [each.payload for each in iter(consumer._subscription.next, None)]
            assert got == [b"b1", b"a1", b"a2"]


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize(
    ("kind", "passes"), [("key_shared", ["b1", "-1", "b2"]), ("exclusive", [])]
)
async def test_nack_holds_up_later_messages_of_its_own_key_until_its_answer(
    kind: Any, passes: Any, most: int | None
) -> None:
    names = ["a1", "b1", "a2", "-1", "a3", "b2"]
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.create_group("orders", "g", type=kind)
        await client.schedule_batch(
            "orders",
            [name.encode() for name in names],
            ordering_keys=[None if name[0] == "-" else name[0] for name in names],
        )
        async with client.consumer("orders", "g") as consumer:
            await cluster.settle()
            subscription = consumer._subscription
            assert subscription is not None
            first = subscription.receive(most)[0] if most else subscription.next()
            assert first is not None
            _ = first.nack()
            got = [each.payload.decode() for each in iter(subscription.next, None)]
            assert got == passes
            await cluster.settle()
            late = [each.payload.decode() for each in iter(subscription.next, None)]
            assert late == [name for name in names if name not in got]


def test_messages_that_the_consumer_returns_unseen_hold_up_later_ones_until_the_answer() -> None:
    said = list[QueuedAck]()

    def say(entry: QueuedAck) -> bool:
        said.append(entry)
        return True

    inbox = Inbox(Credit(10), lambda: 0, lambda: 0.0, lambda: None)
    inbox.order = GroupOrder.QUEUE
    returns = UnseenReturns(inbox, say, lambda: None)
    first, later = (Batch(pb.Deliveries(queue_offsets=[at]), lambda *_: None) for at in (5, 6))
    later.hold, first.hold = Hold(later, 30, 30), Hold(first, 30, 30)
    inbox.append(later)
    returns.send([(first, [5])])
    assert inbox.next() is None
    said[0].receiver.on_answer([5], [pb.ACK_RESULT_UNSPECIFIED])
    assert inbox.next() == later[0]


@pytest.mark.parametrize("is_over", [False, True])
def test_messages_of_a_key_wait_for_a_return_and_keep_their_order(is_over: bool) -> None:
    said, arrived = list[QueuedAck](), list[bool]()

    def say(entry: QueuedAck) -> bool:
        said.append(entry)
        return not is_over

    inbox = Inbox(Credit(10), lambda: 0, lambda: 0.0, lambda: None)
    inbox.order = GroupOrder.KEY
    returns = UnseenReturns(inbox, say, lambda: arrived.append(True))
    first, later = (
        Batch(
            pb.Deliveries(
                queue_offsets=offsets,
                payload_sizes=[0] * len(offsets),
                keys=b"aabacc"[: len(offsets)],
                key_sizes=[1] * len(offsets),
            ),
            lambda *_: None,
        )
        for offsets in ([5], range(6, 12))
    )
    later.hold, first.hold = Hold(later, 30, 30), Hold(first, 30, 30)
    inbox.append(later)
    assert not inbox.end_turn(first[0]), "it had none"
    returns.send([(first, [5])])
    assert arrived == [True] * is_over
    if not is_over:
        assert inbox.next() == later[2]
        said[0].receiver.on_answer([5], [pb.ACK_RESULT_UNSPECIFIED])
        assert arrived == [True]
    left = [message for message in later if is_over or message != later[2]]
    assert [*iter(inbox.next, None)] == left


class RandomApplication:
    """An application with one consumer of an ordered group; its steps are random."""

    def __init__(self, rng: random.Random, consumer: AsyncConsumer, *, takes_turns: bool) -> None:
        self.done: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        """Numbers of the acked messages of each key, in the order of the acks."""
        self.held: list[Message] = []
        self._rng = rng
        self._takes_turns = takes_turns
        self._consumer = consumer
        if takes_turns:
            consumer.take_turns()
        assert consumer._subscription is not None
        self._subscription = consumer._subscription

    def check(self) -> None:
        inbox = self._subscription._inbox
        here = sum(map(len, inbox._batches)) + len(inbox._rest) + len(inbox._lines)
        assert inbox._credit.waiting == here
        if self._takes_turns:
            keys = [message.payload[:1] for message in self.held]
            assert len({*keys}) == len(keys)

    def take(self) -> None:
        if self._rng.random() < 0.5:
            self.held += self._subscription.receive(self._rng.randrange(1, 9))
        elif (message := self._subscription.next()) is not None:
            self.held.append(message)

    def end(self, *, may_return: bool) -> None:
        message = self.held.pop(self._rng.randrange(len(self.held)))
        way = self._rng.random() if may_return else 1
        with contextlib.suppress(LeaseLost):
            if way < 0.2:
                _ = message.nack(self._rng.choice([0, 2]))
            elif way < 0.3:
                _ = message.give_back()
            else:
                message.ack().add_done_callback(partial(self._acked, message))
        self._consumer.end_turn(message)

    def _acked(self, message: Message, acking: Any) -> None:
        done, number = self.done[message.payload[:1].decode()], int(message.payload[1:])
        if acking.exception() is None and number not in done:
            done.append(number)


@pytest.mark.parametrize("seed", range(8))
async def test_inbox_of_an_ordered_group_keeps_its_counts_and_the_order(seed: int) -> None:
    rng = random.Random(seed)
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.create_group("orders", "g", type="key_shared", lease=10)
        async with client.consumer("orders", "g", window=20) as consumer:
            await cluster.settle()
            application = RandomApplication(rng, consumer, takes_turns=seed % 2 == 0)
            for number in range(40):
                for key in "abc":
                    names = rng.choice([(key, None), (f"{key}{number}", key), (None, key)])
                    payload = b"%s%d" % (key.encode(), number)
                    await client.schedule("orders", payload, key=names[0], ordering_key=names[1])
                    await cluster.settle()
            for step in range(600):
                if step % 150 == 140:
                    await cluster.fail_over()
                if rng.random() < 0.1:
                    await cluster.advance(rng.choice([0, 0.1, 1, 6]))
                elif application.held and rng.random() < 0.4:
                    application.end(may_return=True)
                else:
                    application.take()
                application.check()
            for _ in range(300):
                await cluster.advance(1)
                application.take()
                while application.held:
                    application.end(may_return=False)
                application.check()
            await cluster.settle()
        for done in application.done.values():
            assert sorted(done) == [*range(40)]
            assert done == sorted(done) or seed % 2
        inbox = application._subscription._inbox
        assert not inbox._turns
        assert not inbox._lines.is_active
