"""Groups, leases, acks, nacks, dead letters, and calls without a stream."""

import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.cluster.running import WAIT_S
from tests.conformance.worlds import World, refusal
from timerclient import AckResult, ExtendResult, InvalidRequest, LeaseLost, NackResult, NotFound
from timerclient.proto import timer_pb2 as pb


def test_each_group_gets_every_message(world: World, topic: str) -> None:
    payloads = [b"%d" % n for n in range(50)]
    for group in ("one", "two"):
        world.client.create_group(topic, group)
    world.client.schedule_batch(topic, payloads)
    for group in ("one", "two"):
        with world.client.consumer(topic, group) as consumer:
            assert [message.payload for message in world.take(consumer, 50)] == payloads
        assert world.unacked(topic, group) == 0


def test_group_begins_at_the_earliest_or_at_the_latest_message(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "slow")
    client.schedule(topic, b"before")
    with client.consumer(topic, "quick") as consumer:
        world.take(consumer, 1)
    with (
        client.consumer(topic, "early", start="earliest") as early,
        client.consumer(topic, "new", start="latest") as new,
        client.consumer(topic, "slow") as slow,  # a message stays while one group has not acked it
    ):
        client.schedule(topic, b"after")
        assert world.take(new, 1)[0].payload == b"after"
        for consumer in (early, slow):
            assert [m.payload for m in world.take(consumer, 2)] == [b"before", b"after"]


def test_message_that_all_groups_have_acked_is_gone(world: World, topic: str) -> None:
    with world.client.consumer(topic, "g") as consumer:
        world.client.schedule(topic, b"gone")
        world.take(consumer, 1)
    with world.client.consumer(topic, "late") as consumer:
        world.nothing_waits(consumer, topic)


def test_consumers_of_a_group_share_its_messages(world: World, topic: str) -> None:
    client = world.client
    with (
        client.consumer(topic, "g", max_messages=30) as one,
        client.consumer(topic, "g", max_messages=70) as two,
    ):
        client.schedule_batch(topic, [b"%d" % n for n in range(100)])
        came = [m.payload for m in (*world.take(one, 30), *world.take(two, 70))]
    assert {*came} == {b"%d" % n for n in range(100)}
    assert world.unacked(topic, "g") == 0


def test_burst_leaves_no_consumer_of_a_group_idle(world: World, topic: str) -> None:
    client = world.client
    with (
        client.consumer(topic, "g") as one,
        client.consumer(topic, "g") as two,
        client.consumer(topic, "g") as three,
    ):
        world.until(lambda: (found := world.group(topic, "g")) and found.consumers == 3)
        client.schedule_batch(topic, [b""] * 30)
        came = [world.take(consumer, 10) for consumer in (one, two, three)]
    assert len({m.id for messages in came for m in messages}) == 30


def test_consumer_gets_no_more_than_its_window(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b""] * 100)
    with client.consumer(topic, "g", window=10) as consumer:
        world.until(lambda: world.leased(topic, "g") == 10)
        first = world.receive(consumer, 10)
        world.until(lambda: world.leased(topic, "g") > 10)
        for message in first:
            _ = message.ack()
        world.take(consumer, 90)
    assert world.unacked(topic, "g") == 0


def test_ack_is_final_for_its_group(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b"acked", b"held"])
    with client.consumer(topic, "g") as consumer:
        acked, _ = world.receive(consumer, 2)
        assert acked.ack().result(WAIT_S) is AckResult.ACKED
        assert acked.ack().result(WAIT_S) is AckResult.ALREADY_ACKED
    with client.consumer(topic, "g") as consumer:
        [again] = world.take(consumer, 1)
        assert (again.payload, again.attempt) == (b"held", 2)
        world.nothing_waits(consumer, topic)


def test_consumer_that_leaves_gives_back_what_it_holds_and_nothing_twice(
    world: World, topic: str
) -> None:
    client = world.client
    leaving = client.consumer(topic, "g", max_messages=10)
    client.schedule_batch(topic, [b"%d" % n for n in range(20)])
    for message in world.receive(leaving, 10)[::2]:
        assert message.ack().result(WAIT_S) is AckResult.ACKED
    with client.consumer(topic, "g") as staying:
        rest = world.take(staying, 10)
        leaving.close()
        again = world.take(staying, 5)
        world.nothing_waits(staying, topic)
    assert [(m.payload, m.attempt) for m in rest] == [(b"%d" % n, 1) for n in range(10, 20)]
    assert [(m.payload, m.attempt) for m in again] == [(b"%d" % n, 2) for n in range(1, 10, 2)]


def test_lease_that_ends_gives_the_message_to_another(world: World, topic: str) -> None:
    client = world.client
    client.schedule(topic, b"p")
    with client.consumer(topic, "g", lease=world.moment, hold_max=0, max_messages=1) as slow:
        [late] = world.receive(slow, 1)
        with client.consumer(topic, "g", lease=60) as other:
            world.pass_time(1.5)
            [again] = world.receive(other, 1)
            assert (again.payload, again.attempt) == (b"p", 2)
            assert again.handed_out_ms >= late.handed_out_ms + world.moment_ms
            with pytest.raises(LeaseLost) as lost:  # by its ack, or at once by the client
                late.ack().result(WAIT_S)
            assert lost.value.offsets == (late.queue_offset,)
            assert f"queue_offset = {late.queue_offset}:" in str(lost.value)
            assert again.ack().result(WAIT_S) is AckResult.ACKED


def test_extended_lease_holds_longer(world: World, topic: str) -> None:
    client = world.client
    client.schedule(topic, b"p")
    with client.consumer(topic, "g", lease=16 * world.moment, hold_max=0, max_messages=1) as slow:
        [message] = world.receive(slow, 1)
        extended = message.extend(lease=100 * world.moment).result(WAIT_S)
        assert extended is ExtendResult.EXTENDED
        with client.consumer(topic, "g", lease=60) as other:
            world.pass_time(17)
            world.nothing_waits(other, topic)
        assert message.ack().result(WAIT_S) is AckResult.ACKED
    assert world.unacked(topic, "g") == 0


def test_batch_is_acked_and_given_back_whole(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b"%d" % n for n in range(10)])
    with client.consumer(topic, "g") as consumer:
        batches = consumer.batches()
        seen = 0
        while seen < 10:
            batch = next(batches)
            seen += len(batch)
            assert batch.nack(delay=0).result(WAIT_S) == len(batch)
        again = 0
        while again < 10:
            batch = next(batches)
            assert {*batch.attempts} == {2}
            again += len(batch)
            assert batch.ack().result(WAIT_S) == len(batch)
    assert world.unacked(topic, "g") == 0


# ---- messages returned unseen, consumers that die


def test_nacked_message_comes_again_after_its_delay(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b"later", b"at once"])
    with client.consumer(topic, "g") as consumer:
        later, soon = world.receive(consumer, 2)
        assert soon.nack(delay=0).result(WAIT_S) is NackResult.NACKED
        assert later.nack(delay=2 * world.moment).result(WAIT_S) is NackResult.NACKED
        with pytest.raises(LeaseLost):
            later.nack().result(WAIT_S)
        [first] = world.take(consumer, 1)
        world.pass_time(2.5)
        [second] = world.take(consumer, 1)
        assert second.nack().result(WAIT_S) is NackResult.ALREADY_ACKED
        assert later.extend().result(WAIT_S) is ExtendResult.ALREADY_ACKED
    assert [(m.payload, m.attempt) for m in (first, second)] == [(b"at once", 2), (b"later", 2)]
    assert second.handed_out_ms >= later.handed_out_ms + 2 * world.moment_ms


def test_backoff_doubles_up_to_its_maximum(world: World, topic: str) -> None:
    client, unit = world.client, world.moment
    client.create_group(topic, "g", backoff_min=unit, backoff_max=1.5 * unit)
    client.schedule(topic, b"p")
    handed_out: list[int] = []
    with client.consumer(topic, "g") as consumer:
        for pause in (1.1, 1.6, 1.6, 0):
            [message] = world.receive(consumer, 1)
            handed_out.append(message.handed_out_ms)
            assert message.nack().result(WAIT_S) is NackResult.NACKED
            world.pass_time(pause)
    pauses = [b - a for a, b in pairwise(handed_out)]
    least = [world.moment_ms, 3 * world.moment_ms // 2, 3 * world.moment_ms // 2]
    assert [pause >= ms for pause, ms in zip(pauses, least, strict=True)] == [True] * 3


def test_message_that_fails_too_often_becomes_a_dead_letter_that_says_why(
    world: World, topic: str
) -> None:
    client, dead = world.client, f"{topic}.g.dead"
    client.create_group(topic, "g", max_attempts=2)
    timer = client.schedule(topic, b"bad", key="k", headers={"mine": "1"})
    with client.consumer(topic, "g") as consumer:
        for attempt in (1, 2):
            [message] = world.receive(consumer, 1)
            assert message.attempt == attempt
            nacking = message.nack(delay=0, detail=f"ValueError: failure {attempt}")
            assert nacking.result(WAIT_S) is NackResult.NACKED
        world.nothing_waits(consumer, topic)
    with client.consumer(dead, "look") as consumer:
        [letter] = world.take(consumer, 1)
    assert (letter.payload, letter.key, letter.headers["mine"]) == (b"bad", "k", "1")
    said = {k: v for k, v in letter.headers.items() if k.startswith("dead-letter-")}
    assert said == {
        "dead-letter-reason": "nacked",
        "dead-letter-detail": "ValueError: failure 2",
        "dead-letter-topic": topic,
        "dead-letter-group": "g",
        "dead-letter-timer-id": timer.id,
        "dead-letter-offset": "0",
        "dead-letter-attempts": "2",
    }


def test_what_a_consumer_had_fetched_ahead_has_not_failed_when_it_closes(
    world: World, topic: str
) -> None:
    client = world.client
    client.create_group(topic, "g", max_attempts=1)
    client.schedule_batch(topic, [b"%d" % n for n in range(6)])
    consumer = client.consumer(topic, "g", window=10)
    [seen] = world.receive(consumer, 1)
    seen.ack().result(WAIT_S)
    [given_back] = world.receive(consumer, 1)
    assert given_back.give_back().result(WAIT_S) is NackResult.NACKED
    consumer.close()
    with client.consumer(topic, "g") as consumer:
        rest = world.take(consumer, 5)
    assert sorted(message.payload for message in rest) == [b"1", b"2", b"3", b"4", b"5"]
    assert f"{topic}.g.dead" not in {each.name for each in client.topics()}


def test_leases_that_end_kill_a_message_too(world: World, topic: str) -> None:
    client, dead = world.client, f"{topic}-dead"
    client.create_group(topic, "g", max_attempts=1, lease=world.moment, dead_letter_topic=dead)
    client.schedule(topic, b"slow")
    with client.consumer(topic, "g", hold_max=0, max_messages=1) as consumer:
        world.receive(consumer, 1)
        world.pass_time(1.5)
        with client.consumer(dead, "dead-letters") as letters:
            [letter] = world.take(letters, 1)
    assert letter.headers["dead-letter-reason"] == "lease ended"


def test_redriven_dead_letters_come_once_where_they_came_from(world: World, topic: str) -> None:
    client, dead = world.client, f"{topic}.g.dead"
    client.create_group(topic, "g", max_attempts=1)
    payloads = [b"%d" % n for n in range(30)]
    client.schedule_batch(topic, payloads, headers={"mine": "1"})
    with client.consumer(topic, "g") as consumer:
        for message in world.receive(consumer, 30):
            _ = message.nack()
        consumer.flush()
        world.until(lambda: world.unacked(dead, "dead-letters") == 30)
        assert world.until(lambda: client.redrive(dead, 10)) == 10
        world.redriven(dead, 20)
        assert client.redrive(dead) == 0
        back = world.take(consumer, 30)
        world.nothing_waits(consumer, topic)
    assert {m.payload for m in back} == {*payloads}
    assert [(m.attempt, m.headers) for m in back] == [(1, {"mine": "1"})] * 30
    with pytest.raises(NotFound, match=f"no such topic of dead letters: '{topic}'"):
        client.redrive(topic)


def test_group_of_dead_letters_is_deleted_only_without_letters(world: World, topic: str) -> None:
    client, dead = world.client, f"{topic}.g.dead"
    client.create_group(topic, "g", max_attempts=1)
    client.schedule_batch(topic, [b"1", b"2"])
    with client.consumer(topic, "g", max_messages=2) as consumer:
        for message in world.receive(consumer, 2):
            message.nack().result(WAIT_S)
    world.until(lambda: world.unacked(dead, "dead-letters") == 2)
    with pytest.raises(InvalidRequest, match=f"has 2 dead letters of topic '{dead}': redrive or p"):
        client.delete_group(dead, "dead-letters")
    world.redriven(dead, 2)
    client.delete_group(dead, "dead-letters")
    assert client.describe_topic(dead).groups == []


def test_dead_letters_of_ones_choice_are_redriven_alone(world: World, topic: str) -> None:
    client, dead, other = world.client, f"{topic}.dead", f"{topic}.other"
    for name in (topic, other):
        client.create_group(name, "g", max_attempts=1, dead_letter_topic=dead)
        client.schedule_batch(name, [b"%d" % number for number in range(600)])
        with client.consumer(name, "g") as consumer:
            for message in world.receive(consumer, 600):
                _ = message.nack()
            consumer.flush()
        world.until(lambda: world.unacked(name, "g") == 0)  # noqa: B023
    world.until(lambda: world.unacked(dead, "dead-letters") == 1_200)
    assert client.redrive(dead, offsets=[3, 1_100, 500, 3]) == 3
    client.delete_topic(other)
    done = client.redrive(dead, offsets=range(300, 700))  # two requests
    assert (done, done.homeless, done.leased, done.exact) == (299, 100, 0, True)
    assert client.redrive(dead, offsets=[3]) == 0
    with client.consumer(dead, "dead-letters", max_messages=1) as consumer:
        [letter] = world.receive(consumer, 1)
        assert letter.queue_offset == 0
        held = client.redrive(dead, offsets=[0, 1])
        assert (held, held.leased) == (1, 1)
    with client.consumer(topic, "g") as consumer:
        back = {message.payload for message in world.take(consumer, 302)}
    assert back == {b"%d" % number for number in (1, 3, *range(300, 600))}
    assert world.unacked(dead, "dead-letters") == 1_200 - 303
    for options in ({"offsets": [1_200]}, {"offsets": [-1]}, {"offsets": [1], "max_messages": 1}):
        with pytest.raises(InvalidRequest):
            client.redrive(dead, **options)


def test_dead_letters_whose_topic_is_gone_stay_and_hold_up_no_others(
    world: World, topic: str
) -> None:
    client, dead, gone = world.client, f"{topic}.dead", f"{topic}.gone"
    for name, letters in ((gone, 300), (topic, 2)):  # in front, more than one request reads
        client.create_group(name, "g", max_attempts=1, dead_letter_topic=dead)
        client.schedule_batch(name, [b"x"] * letters)
        before = world.unacked(dead, "dead-letters")
        with client.consumer(name, "g") as consumer:
            for message in world.receive(consumer, letters):
                _ = message.nack()
            consumer.flush()
            world.until(lambda: world.unacked(dead, "dead-letters") - max(0, before) == letters)  # noqa: B023
    client.delete_topic(gone)
    assert world.redriven(dead, 2) == 300
    assert (world.unacked(topic, "g"), world.unacked(dead, "dead-letters")) == (2, 300)


def test_dead_letter_that_dies_again_keeps_what_was_said_of_its_first_death(
    world: World, topic: str
) -> None:
    client, dead = world.client, f"{topic}.g.dead"
    client.create_group(topic, "g", max_attempts=1)
    client.schedule(topic, b"bad", headers={"mine": "1"})

    def die(where: str, group: str) -> dict[str, str]:
        with client.consumer(where, group) as consumer:
            [message] = world.receive(consumer, 1)
            assert message.nack().result(WAIT_S) is NackResult.NACKED
        with client.consumer(f"{where}.{group}.dead", "look") as consumer:
            return world.receive(consumer, 1)[0].headers

    first = die(topic, "g")
    client.create_group(dead, "h", max_attempts=1)
    second = die(dead, "h")
    assert (second["dead-letter-topic"], second["dead-letter-group"]) == (dead, "h")
    assert {name: second[f"prior-{name}"] for name in first if name != "mine"} == {
        name: value for name, value in first.items() if name != "mine"
    }
    world.redriven(f"{dead}.h.dead", 1)
    with client.consumer(dead, "back") as consumer:
        assert [m.headers for m in world.receive(consumer, 2)] == [first, first]
    world.redriven(dead, 2)  # the letter that died once, and the letter that returned
    with client.consumer(topic, "g") as consumer:
        assert [m.headers for m in world.take(consumer, 2)] == [{"mine": "1"}] * 2


def test_group_is_altered_in_part_and_creating_it_again_changes_nothing(
    world: World, topic: str
) -> None:
    client = world.client
    made = client.create_group(topic, "g", lease=5, max_attempts=3)
    assert made.settings == client.create_group(topic, "g", lease=9).settings
    altered = client.alter_group(topic, "g", max_attempts=0, backoff_min=2).settings
    assert (altered.lease_ms, altered.max_attempts, altered.backoff_ms_min) == (5_000, 0, 2_000)
    with pytest.raises(NotFound):
        client.alter_group(topic, "nobody", max_attempts=1)


# ---- without a stream


def test_message_is_received_and_settled_by_plain_calls(world: World, topic: str) -> None:
    asked: dict[str, Any] = {"topic": topic, "group": "g"}
    assert not world.unary("Receive", pb.ReceiveRequest(**asked, wait_ms=100)).queue_offsets
    with ThreadPoolExecutor(1) as pool:
        request = pb.ReceiveRequest(**asked, wait_ms=20_000, max_messages=3)
        waiting = pool.submit(world.unary, "Receive", request)
        world.until(lambda: (group := world.group(topic, "g")) and group.consumers)
        world.client.schedule_batch(topic, [b"a", b"b", b"c"])
        got = waiting.result(WAIT_S)
    assert (got.payloads, list(got.attempts)) == (b"abc", [1, 1, 1])
    for wait_ms in (0, 100):
        request = pb.ReceiveRequest(**asked, wait_ms=wait_ms)
        assert not world.unary("Receive", request).queue_offsets
    held = asked | {"lease_id": got.lease_id, "epoch": got.epoch}
    longer = pb.ExtendRequest(**held, offsets=[0, 9], lease_ms=60_000)
    assert world.unary("Extend", longer).results == [
        pb.ACK_RESULT_EXTENDED,
        pb.ACK_RESULT_NOT_DELIVERED,
    ]
    guesses = [struct.pack("<QQQ", got.epoch, guess, 1) for guess in range(1, 200)]  # 4 portions
    lost = world.unary("Ack", pb.AckRequest(**asked, leases=guesses)).results
    assert lost == [pb.ACK_RESULT_LEASE_LOST] * len(guesses)
    assert world.unary("Ack", pb.AckRequest(**held, offsets=[0])).results == [pb.ACK_RESULT_ACKED]
    back = world.unary("Nack", pb.NackRequest(**held, offsets=[0, 1, 1], delay_ms=0))
    assert back.results == [
        pb.ACK_RESULT_ALREADY_ACKED,
        pb.ACK_RESULT_NACKED,
        pb.ACK_RESULT_LEASE_LOST,
    ]
    again = world.unary("Receive", pb.ReceiveRequest(**asked, wait_ms=20_000, max_messages=3))
    assert (again.payloads, list(again.attempts)) == (b"b", [2])
    assert again.handed_out_ms >= got.handed_out_ms > 0


def test_plain_call_beyond_a_limit_names_it(world: World, topic: str) -> None:
    world.client.create_group(topic, "g")
    asked: dict[str, Any] = {"topic": topic, "group": "g"}
    for method, request, field in (
        ("Receive", pb.ReceiveRequest(**asked, max_messages=1001), "max_messages"),
        ("Receive", pb.ReceiveRequest(**asked, wait_ms=20_001), "wait_ms"),
        ("Receive", pb.ReceiveRequest(**asked, lease_ms=1), "lease_ms"),
        ("Nack", pb.NackRequest(**asked), "offsets"),
        ("Nack", pb.NackRequest(**asked, offsets=range(16_385)), "offsets"),
        ("Nack", pb.NackRequest(**asked, offsets=[1], delay_ms=1 << 40), "delay_ms"),
        ("Nack", pb.NackRequest(**asked, offsets=[1], detail="é" * 513), "detail"),
        ("Extend", pb.ExtendRequest(**asked, offsets=[1], lease_ms=1 << 31), "lease_ms"),
    ):
        error = refusal(world, method, request)
        assert (error.reason, error.field) == (pb.REASON_INVALID_REQUEST, field)
    nobody = pb.AckRequest(topic=topic, group="nobody", offsets=[1])
    assert refusal(world, "Ack", nobody).reason == pb.REASON_NOT_FOUND
