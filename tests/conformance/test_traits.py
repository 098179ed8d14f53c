"""Ordering keys and priorities."""

import pytest

from tests.cluster.running import WAIT_S
from tests.conformance.worlds import World
from timerclient import InvalidRequest, NewTimer

HOUR = 3600.0


def test_ordering_key_orders_timers_of_different_keys(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g", type="key_shared")
    keys = ["a", "b", "c", "d"]
    client.schedule_batch(
        topic, [b"0", b"1", b"2", b"3"], keys=keys, ordering_keys=["o", "o", "p", None]
    )
    with client.consumer(topic, "g") as one:
        got = {message.payload: message for message in world.receive(one, 4)}
        assert [got[b"%d" % at].ordering_key for at in range(4)] == ["o", "o", "p", None]
        assert {message.headers.get("") for message in got.values()} == {None}
        for payload in (b"1", b"2", b"3"):
            got[payload].ack().result(WAIT_S)
        got[b"0"].nack(delay=4 * world.moment).result(WAIT_S)
        client.schedule(topic, b"4", ordering_key="o")
        client.schedule(topic, b"5", ordering_key="p")
        assert world.take(one, 1)[0].payload == b"5"
        world.pass_time(4)
        assert [message.payload for message in world.take(one, 2)] == [b"0", b"4"]


def test_traits_stay_with_a_timer_through_its_lives(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g", max_attempts=1)
    timer = client.schedule(
        topic, b"x", delay=HOUR, key="k", ordering_key="\u00f6", priority=7, headers={"a": "b"}
    )
    pending = client.get_timer(timer)
    assert (pending.ordering_key, pending.priority, pending.headers) == ("\u00f6", 7, {"a": "b"})
    [listed] = client.list_timers(topic)
    assert (listed.ordering_key, listed.priority) == ("\u00f6", 7)
    client.reschedule(timer, delay=0)
    with client.consumer(topic, "g") as consumer:
        [message] = world.receive(consumer, 1)
        assert (message.ordering_key, message.priority) == ("\u00f6", 7)
        message.nack(delay=0).result(WAIT_S)
    world.until(lambda: world.unacked(f"{topic}.g.dead", "dead-letters") == 1)
    [letter] = client.peek(f"{topic}.g.dead").messages
    assert (letter.ordering_key, letter.priority, letter.headers["a"]) == ("\u00f6", 7, "b")
    world.redriven(f"{topic}.g.dead", 1)
    with client.consumer(topic, "g") as consumer:
        [message] = world.take(consumer, 1)
        assert (message.key, message.ordering_key, message.priority) == ("k", "\u00f6", 7)
        assert message.headers == {"a": "b"}


def test_higher_priority_is_delivered_first_by_a_shared_group(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g")
    client.schedule_batch(topic, [b"0", b"1", b"2"], priorities=[0, 4, None])
    client.schedule_all([NewTimer(topic, b"3", priority=9), NewTimer(topic, b"4")])
    world.until(lambda: world.unacked(topic, "g") == 5)
    with client.consumer(topic, "g") as consumer:
        got = world.take(consumer, 5)
        assert [message.payload for message in got] == [b"3", b"1", b"2", b"4", b"0"]
        assert [message.priority for message in got] == [9, 4, 4, 4, 0]
    world.change_leader()
    with client.consumer(topic, "g") as consumer:
        world.nothing_waits(consumer, topic)


def test_traits_have_limits(world: World, topic: str) -> None:
    client = world.client
    with pytest.raises(InvalidRequest, match=r"priority = 10: must be 0 to 9"):
        client.schedule(topic, b"x", priority=10)
    with pytest.raises(
        InvalidRequest, match=r"ordering_key = '1025 bytes': must have at most 1024"
    ):
        client.schedule(topic, b"x", ordering_key="k" * 1025)
    with pytest.raises(InvalidRequest, match="the name of a header must not be empty"):
        client.schedule(topic, b"x", headers={"": "9k"})
    with pytest.raises(InvalidRequest, match="priorities = 2 values: give none, or 3"):
        client.schedule_batch(topic, [b"x"] * 3, priorities=[1, 2])
