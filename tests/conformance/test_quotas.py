"""Quotas of pending timers and of ready messages."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.worlds import World
from timerclient import InvalidRequest, NewTimer, QuotaReached, TimerClient

HOUR = 3600.0


def quota(client: TimerClient, topic: str, **said: Any) -> None:
    client.create_topic(topic)
    limits: Any = said
    client.alter_policies(limits, topic=topic)


def names(client: TimerClient) -> list[str]:
    return sorted(each.name for each in client.topics())


def used(client: TimerClient, topic: str) -> dict[str, tuple[int, int, str]]:
    """Return field -> (used, limit, scope of the limit)."""
    quotas = client.describe_topic(topic).quotas
    return {each.field: (each.used, each.limit, each.source) for each in quotas}


def test_topic_takes_no_more_timers_than_may_be_pending(world: World, topic: str) -> None:
    client = world.client
    quota(client, topic, pending_max=3)
    timers = client.schedule_batch(topic, [b""] * 2, delay=HOUR)
    with pytest.raises(
        QuotaReached, match=f"topic '{topic}' has 2 pending timers; 2 more"
    ) as refused:
        client.schedule_batch(topic, [b""] * 2, delay=HOUR)
    assert refused.value.field == "pending_max"
    assert refused.value.limit == "must be at most 3 (pending_max of the topic)"
    assert refused.value.outcome_known
    client.schedule(topic, b"", delay=HOUR)
    with pytest.raises(QuotaReached, match="has 3 pending timers; its limit is 3"):
        client.schedule(topic, b"", delay=0)
    assert client.cancel(timers[0]).name == "CANCELLED"
    client.schedule(topic, b"", delay=HOUR)
    assert client.count_timers(topic).pending == 3


def test_payloads_of_pending_timers_have_no_more_bytes_than_they_may(
    world: World, topic: str
) -> None:
    client = world.client
    quota(client, topic, pending_bytes_max=100)
    client.schedule(topic, b"x" * 60, delay=HOUR, key="k")
    with pytest.raises(QuotaReached, match="has 60 bytes of pending payloads; 41 more"):
        client.schedule(topic, b"x" * 41, delay=HOUR)
    with pytest.raises(QuotaReached):  # counts as one more, although it would replace the other
        client.schedule(topic, b"x" * 41, delay=HOUR, key="k", on_conflict="replace")
    client.schedule(topic, b"x" * 40, delay=HOUR, key="k", on_conflict="replace")
    client.schedule(topic, b"x" * 60, delay=HOUR)
    with pytest.raises(QuotaReached):
        client.schedule(topic, b"", delay=HOUR)


@pytest.mark.parametrize("field", ["ready_max", "ready_bytes_max"])
def test_topic_takes_nothing_while_too_much_is_not_acked(
    world: World, topic: str, field: str
) -> None:
    client = world.client
    quota(client, topic, **{field: 3})
    with client.consumer(topic, "g") as consumer:
        world.until(lambda: world.group(topic, "g"))
        client.schedule_batch(topic, [b"a", b"b", b"c"])
        messages = world.receive(consumer, 3)
        for delay in (0.0, HOUR):
            with pytest.raises(
                QuotaReached, match=f"has 3 .*; its limit is 3 .{field} of the topic"
            ):
                client.schedule(topic, b"d", delay=delay)
        messages[0].ack().result(5)
        client.schedule(topic, b"d", delay=HOUR)
        with pytest.raises(
            QuotaReached, match=f"has 2 .*; 2 more would exceed its limit of 3 .{field}"
        ):
            client.schedule_batch(topic, [b"d", b"e"])
        client.schedule(topic, b"d")
        for message in messages[1:]:
            message.ack().result(5)
        assert world.take(consumer, 1)[0].payload == b"d"


def test_what_was_pending_fires_beyond_the_quota_of_what_is_ready(world: World, topic: str) -> None:
    client = world.client
    with client.consumer(topic, "g") as consumer:
        client.schedule_batch(topic, [b"x"] * 4, delay=world.moment)
        client.alter_policies({"ready_max": 1, "pending_max": 0}, topic=topic)
        world.pass_time(2)
        assert len(world.receive(consumer, 4)) == 4
        assert used(client, topic) == {"pending_max": (0, 0, "topic"), "ready_max": (4, 1, "topic")}


def test_many_schedules_at_once_are_taken_until_the_quota_is_reached(
    world: World, topic: str
) -> None:
    client = world.client
    quota(client, topic, pending_max=10)
    futures = [client.submit(topic, b"", delay=HOUR) for _ in range(25)]
    errors = [future.exception(30) for future in futures]
    assert sum(error is None for error in errors) == 10
    assert {type(error) for error in errors} == {type(None), QuotaReached}
    assert client.count_timers(topic).pending == 10
    client.cancel_where(topic)
    client.schedule(topic, b"", delay=HOUR)  # the producer continues


def test_batch_due_later_is_taken_behind_one_for_which_too_much_is_ready(
    world: World, topic: str
) -> None:
    client = world.client
    quota(client, topic, ready_max=1)
    client.schedule(topic, b"", delay=HOUR)
    now, later = (client.submit_batch(topic, [b""] * 2, delay=delay) for delay in (0, HOUR))
    assert isinstance(now.exception(30), QuotaReached)
    assert later.exception(30) is None
    assert client.count_timers(topic).pending == 3


def test_request_of_several_topics_is_refused_whole_by_the_quota_of_one(
    world: World, topic: str
) -> None:
    client, other = world.client, f"{topic}-other"
    quota(client, topic, pending_max=1)
    both = [NewTimer(other, b"", delay=HOUR), NewTimer(topic, b"", delay=HOUR)]
    client.schedule_all(both, request_id=f"{topic}-1"[-64:])
    new = [NewTimer(f"{topic}-{at}", b"", delay=HOUR) for at in range(2)]
    with pytest.raises(QuotaReached, match=f"topic '{topic}'"):
        client.schedule_all([new[0], *both, new[1]], request_id=f"{topic}-2"[-64:])
    assert [name for name in names(client) if name.startswith(topic)] == [topic, other]
    again = client.schedule_all(both, request_id=f"{topic}-1"[-64:])
    assert again.duplicate
    assert [client.count_timers(each).pending for each in (topic, other)] == [1, 1]


def test_quota_holds_for_each_topic_of_a_namespace_and_over_a_change_of_leader(
    world: World, topic: str
) -> None:
    client, topics = world.client, [f"{topic}/a", f"{topic}/b"]
    client.alter_policies({"pending_max": 2}, namespace=topic)
    for each in topics:
        client.schedule_batch(each, [b""] * 2, delay=HOUR)
    world.change_leader()
    for each in topics:
        with pytest.raises(QuotaReached, match="of the namespace"):
            client.schedule(each, b"", delay=HOUR)
        assert used(client, each) == {"pending_max": (2, 2, "namespace")}
    client.alter_policies(unset=["pending_max"], namespace=topic)
    client.schedule(topics[0], b"", delay=HOUR)
    client.cancel_where(topics[0])
    client.cancel_where(topics[1])


def test_refused_request_creates_no_topic(world: World, topic: str) -> None:
    client, new = world.client, f"{topic}/new"
    limits: Any = {"pending_max": 2, "ready_max": 1, "payload_bytes_max": 5, "delay_ms_max": 1000}
    client.alter_policies(limits, namespace=topic)
    beyond: Any = {"delay_ms_min": 100, "delay_ms_max": 10}
    refused: list[tuple[str, Callable[[], object]]] = [
        ("has 0 pending timers; 3 more", lambda: client.schedule_batch(new, [b""] * 3, delay=1)),
        ("has 0 unacked messages; 2 more", lambda: client.schedule_batch(new, [b""] * 2, delay=0)),
        ("payload_bytes_max of the namespace", lambda: client.schedule(new, b"123456", delay=1)),
        ("delay_ms_max of the namespace", lambda: client.schedule(new, b"", delay=HOUR)),
        ("1024 bytes", lambda: client.schedule(new, b"", delay=1, key="x" * 1025)),
        ("key", lambda: client.schedule(new, b"", delay=1, on_conflict="keep")),
        ("of the namespace", lambda: client.create_series(new, "s", b"1" * 6, every=9)),
        ("at most delay_ms_max", lambda: client.alter_policies(beyond, topic=new)),
        ("both set", lambda: client.alter_policies({"ttl_ms": 9}, unset=["ttl_ms"], topic=new)),
    ]
    for why, call in refused:
        with pytest.raises((InvalidRequest, QuotaReached), match=why):
            call()
        assert new not in names(client), why
    client.schedule(f"{topic}-b/new", b"123456", delay=HOUR)
    client.schedule_batch(new, [b"12345"] * 2, delay=1)
    with pytest.raises(QuotaReached, match="has 2 pending timers"):
        client.schedule(new, b"", delay=1)


def test_reschedules_and_dead_letters_go_on_where_nothing_new_is_taken(
    world: World, topic: str
) -> None:
    client = world.client
    client.create_group(topic, "g", max_attempts=1)
    client.schedule(topic, b"broken")
    timer = client.schedule(topic, b"", delay=HOUR)
    client.alter_policies({"pending_max": 0, "ready_max": 0}, topic=topic)
    client.alter_policies({"ready_max": 0}, topic=f"{topic}.g.dead")
    moved = client.reschedule(timer, delay=2 * HOUR)
    with client.consumer(topic, "g") as consumer:
        world.receive(consumer, 1)[0].nack().result(5)
    with client.consumer(f"{topic}.g.dead", "readers") as consumer:
        assert world.take(consumer, 1)[0].payload == b"broken"
    assert client.cancel(moved.id).name == "CANCELLED"
