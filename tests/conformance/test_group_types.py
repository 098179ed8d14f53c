"""Ordered groups, and the life of groups."""

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster.running import WAIT_S, until
from tests.conformance.worlds import World
from timerclient import AckResult, TimerClient
from timerclient.values import errors


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last)]


def filled(client: TimerClient, topic: str, count: int = 6, **columns: Any) -> None:
    client.create_group(topic, "keeps-all")
    client.schedule_batch(topic, numbers(0, count), **columns)
    until(lambda: [each.queue_end for each in client.topics() if each.name == topic] == [count])


def test_exclusive_group_keeps_its_order_through_a_nack_and_a_failover(
    world: World, topic: str
) -> None:
    client = world.client
    client.create_group(topic, "g", type="exclusive")
    filled(client, topic)
    with client.consumer(topic, "g", name="first") as consumer:
        got = world.receive(consumer, 6)
        assert [message.payload for message in got] == numbers(0, 6)
        with pytest.raises(errors.GroupHeld, match=f"'g' of topic '{topic}'.*'first' has it"):
            client.consumer(topic, "g", name="second")
        assert got[1].ack_up_to().result(WAIT_S) == AckResult.ACKED
        got[2].nack(delay=world.moment).result(WAIT_S)
        world.pass_time()
        again = world.receive(consumer, 4)
        assert [message.payload for message in again] == numbers(2, 6)
        assert [message.attempt for message in again] == [2] * 4
        world.change_leader()
        later = world.receive(consumer, 4)
        assert [message.payload for message in later] == numbers(2, 6)
        assert later[-1].ack_up_to().result(WAIT_S) == AckResult.ACKED
    with client.consumer(topic, "g", name="second"):
        pass


@pytest.mark.parametrize("kind", ["exclusive", "failover", "key_shared"])
def test_messages_that_wait_in_the_client_come_after_an_earlier_one_that_returns(
    world: World, topic: str, kind: Any
) -> None:
    world.client.create_group(topic, "g", type=kind)
    filled(world.client, topic, ordering_keys=["k"] * 6)
    with world.client.consumer(topic, "g") as consumer:
        [first] = world.receive(consumer, 1)
        world.until(lambda: world.leased(topic, "g") == 6)
        _ = first.nack()
        got = world.take(consumer, 6)
    assert [message.payload for message in got] == numbers(0, 6)
    assert {message.attempt for message in got} == {2}


def test_message_of_another_key_that_waits_in_the_client_follows_a_nack(
    world: World, topic: str
) -> None:
    world.client.create_group(topic, "g", type="key_shared")
    filled(world.client, topic, 2, keys=["a", "b"])
    with world.client.consumer(topic, "g", window=1) as consumer:
        batches = consumer.batches()
        first = next(batches)
        world.until(lambda: world.leased(topic, "g") == 2)
        _ = first.nack(delay=3600)
        assert next(batches).payloads == [b"1"]


@pytest.mark.parametrize("kind", ["exclusive", "key_shared"])
def test_batch_that_was_recalled_as_a_whole_comes_once_more_and_not_before(
    world: World, topic: str, kind: Any
) -> None:
    world.client.create_group(topic, "g", type=kind)
    filled(world.client, topic, ordering_keys=["k"] * 6)
    with world.client.consumer(topic, "g", window=1) as consumer:
        offsets = list[int]()
        for batch in consumer.batches():
            if not offsets:
                world.until(lambda: world.leased(topic, "g") >= 2)
                _ = batch.nack()
            else:
                _ = batch.ack()
            offsets += batch.queue_offsets
            if offsets[-1] == 5:
                break
    assert offsets == [0, 0, 1, 2, 3, 4, 5]


def test_next_consumer_of_a_failover_group_goes_on_where_the_first_one_left(
    world: World, topic: str
) -> None:
    client = world.client
    client.create_group(topic, "g", type="failover", max_in_flight=4)
    filled(client, topic)
    first = client.consumer(topic, "g")
    second = client.consumer(topic, "g")
    got = world.receive(first, 4)
    world.pass_time()
    assert not first.receive(1, timeout=0), "the group allows four"
    assert not second.receive(1, timeout=0)
    assert got[0].ack().result(WAIT_S) == AckResult.ACKED
    first.close()
    assert [message.payload for message in world.receive(second, 4)] == numbers(1, 5)
    second.close()


def test_key_of_a_key_shared_group_waits_for_what_is_before_it_and_others_go_on(
    world: World, topic: str
) -> None:
    client = world.client

    def came(moments: int) -> list[bytes]:
        """Return the deliveries after a nack of "0" with a delay in moments, and more timers."""
        name = f"{topic}-{moments}"
        client.create_group(name, "g", type="key_shared")
        filled(client, name, keys=["a", "b", "c", "a2", "b2", "c2"])
        client.schedule_batch(name, [b"A", b"B"], keys=["a", "b"])
        with client.consumer(name, "g") as consumer:
            got = {message.payload: message for message in world.receive(consumer, 8)}
            got[b"0"].nack(delay=moments * world.moment).result(WAIT_S)
            assert got[b"B"].ack().result(WAIT_S) == AckResult.ACKED
            client.schedule_batch(name, [b"A2", b"B2"], keys=["a", "b"])
            first = world.receive(consumer, 1)
            world.pass_time(moments)
            return [message.payload for message in (*first, *world.receive(consumer, 3))]

    for moments in (4, 16, 64):
        payloads = came(moments)
        assert [payload for payload in payloads if payload != b"B2"] == [b"0", b"A", b"A2"]
        # Another message is first, too, if the delay of "0" ended before B2 was scheduled.
        if payloads[0] == b"B2":
            break
    else:
        raise AssertionError("B2 waited for a key that is not its own")


def test_sought_group_gets_what_the_topic_keeps_again_and_old_acks_are_refused(
    world: World, topic: str
) -> None:
    client = world.client
    filled(client, topic)
    client.create_group(topic, "g")
    with client.consumer(topic, "g") as consumer:
        got = world.receive(consumer, 6)
        _ = [message.ack() for message in got[:4]]
        consumer.flush()
        sought = client.seek_group(topic, "g", offset=2)
        assert sought.cursor == 2
        again = world.receive(consumer, 4)
        assert {message.group_id for message in again} == {sought.group_id} != {got[0].group_id}
        assert [message.payload for message in again] == numbers(2, 6)
        assert min(message.attempt for message in again) == 2
        with pytest.raises(errors.LeaseLost):
            got[5].ack().result(WAIT_S)
        assert again[3].ack().result(WAIT_S) == AckResult.ACKED
    fired = datetime.fromtimestamp(again[0].fired_at_ms / 1000, UTC)
    assert client.seek_group(topic, "g", time=fired).cursor <= 2
    assert client.seek_group(topic, "g", start="latest").unacked == 0
    assert client.reset_group(topic, "g").unacked == 6
    with pytest.raises(errors.InvalidRequest, match="must be 0 to 6"):
        client.seek_group(topic, "g", offset=7)
    kept = {each.name: each.unacked for each in _topic(client, topic).groups}
    assert kept == {"keeps-all": 6, "g": 6}


def _topic(client: TimerClient, topic: str) -> Any:
    return next(each for each in client.topics() if each.name == topic)


def test_deleted_group_ends_its_consumers_and_their_acks_and_stays_deleted(
    world: World, topic: str
) -> None:
    client = world.client
    filled(client, topic)
    consumer = client.consumer(topic, "g")
    message, *_ = world.receive(consumer, 6)
    client.delete_group(topic, "g")
    with pytest.raises(errors.NotFound, match=f"group 'g' of topic '{topic}' was deleted"):
        consumer.receive(1, timeout=WAIT_S)
    with pytest.raises(errors.TimerError):
        message.ack().result(WAIT_S)
    with pytest.raises(errors.NotFound):
        client.delete_group(topic, "g")
    assert [each.name for each in _topic(client, topic).groups] == ["keeps-all"]
    with client.consumer(topic, "g", max_messages=6) as anew:
        assert [each.attempt for each in anew] == [1] * 6


def test_type_stands_when_a_group_is_made(world: World, topic: str) -> None:
    client = world.client
    assert client.create_group(topic, "g", type="key_shared").type == "key_shared"
    assert client.create_group(topic, "g").type == "key_shared", "as it is"
    with pytest.raises(
        errors.AlreadyExists, match="its type is key_shared, and a type never changes; "
    ):
        client.create_group(topic, "g", type="shared")
    with pytest.raises(errors.InvalidRequest, match="it is key_shared"):
        client.alter_group(topic, "g", type="exclusive")
    with pytest.raises(errors.InvalidRequest, match="shared, key_shared, exclusive, failover"):
        client.create_group(topic, "h", type="other")  # type: ignore[arg-type]
    altered = client.alter_group(topic, "g", max_in_flight=5).settings
    assert (altered.type, altered.max_in_flight) == ("key_shared", 5)
    with pytest.raises(errors.InvalidRequest, match="max_in_flight"):
        client.alter_group(topic, "g", max_in_flight=1_000_001)
    client.schedule(topic, b"x")
    with client.consumer(topic, "g") as consumer:
        [message] = world.receive(consumer, 1)
        with pytest.raises(errors.InvalidRequest, match="cumulative"):
            message.ack_up_to().result(WAIT_S)
