"""Times to live and retention of messages after they have fired."""

from typing import Any

import pytest

from tests.cluster.running import WAIT_S
from tests.conformance.worlds import World
from timerclient import AckResult, InvalidRequest, TimerState
from timerclient.proto import timer_pb2 as pb

HOUR_MS = 3_600_000


def live(world: World, topic: str, moments: float, **said: int) -> None:
    """Set the time to live of a topic's messages in moments."""
    ttl_ms = round(moments * world.moment_ms)
    policy: Any = {"ttl_ms": ttl_ms, **said}
    world.client.alter_policies(policy, topic=topic)


def expired(world: World, topic: str) -> int:
    return world.client.describe_topic(topic).expired


def test_message_that_nobody_acks_in_time_is_never_delivered(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g")
    client.schedule_batch(topic, [b"old"] * 3)
    world.until(lambda: world.unacked(topic, "g") == 3)
    live(world, topic, 2)
    world.pass_time(2)
    world.until(lambda: expired(world, topic) == 3)
    group = world.group(topic, "g")
    assert group is not None
    assert (group.unacked, group.expired) == (0, 3)
    live(world, topic, 1000)
    with client.consumer(topic, "g") as consumer:
        world.nothing_waits(consumer, topic)


def test_time_to_live_counts_from_the_due_time(world: World, topic: str) -> None:
    client = world.client
    live(world, topic, 40)
    with client.consumer(topic, "g") as consumer:
        client.schedule(topic, b"late", delay=world.moment)
        client.alter_policies({"ttl_ms": 3600 * 1000}, topic=topic)
        world.pass_time(1)
        assert world.take(consumer, 1)[0].payload == b"late"
    live(world, topic, 1)
    timer = client.schedule(topic, b"later", delay=1000 * world.moment)
    world.pass_time(2)
    assert client.get_timer(timer).state is TimerState.PENDING, "longer than it lives afterwards"
    client.reschedule(timer, delay=world.moment)
    world.pass_time(3)
    world.until(lambda: expired(world, topic) == 1)


def held_too_long(world: World, topic: str) -> None:
    """Let a paused topic hold timers for longer than their time to live."""
    client = world.client
    live(world, topic, 2)
    client.create_group(topic, "g")
    client.pause_topic(topic)
    timers = client.schedule_batch(topic, [b"1", b"2"], delay=world.moment)
    world.pass_time(5)
    world.until(lambda: all(client.get_timer(timer).held for timer in timers))
    assert expired(world, topic) == 0, "what is pending does not expire"


def test_what_a_pause_held_longer_than_it_lives_expires_at_the_resume(
    world: World, topic: str
) -> None:
    held_too_long(world, topic)
    client = world.client
    client.resume_topic(topic)
    world.until(lambda: expired(world, topic) == 2)
    live(world, topic, 1000)
    with client.consumer(topic, "g") as consumer:
        client.schedule(topic, b"fresh")
        assert [message.payload for message in world.take(consumer, 1)] == [b"fresh"]


def test_what_a_pause_held_long_is_delivered_if_it_may_live_on_before_the_resume(
    world: World, topic: str
) -> None:
    held_too_long(world, topic)
    client = world.client
    client.alter_policies({"ttl_ms": 0}, topic=topic)
    client.resume_topic(topic)
    with client.consumer(topic, "g") as consumer:
        assert [message.payload for message in world.take(consumer, 2)] == [b"1", b"2"]


def test_ack_after_a_message_has_expired_is_told_so(world: World, topic: str) -> None:
    client = world.client
    with client.consumer(topic, "g") as consumer:
        client.schedule_batch(topic, [b"1", b"2"])
        first, second = world.receive(consumer, 2)
        assert first.ack().result(WAIT_S) is AckResult.ACKED
        live(world, topic, 2)
        world.pass_time(2)
        world.until(lambda: expired(world, topic) == 1)
        assert world.leased(topic, "g") == 0
        assert second.ack().result(WAIT_S) is AckResult.EXPIRED
        assert second.nack().result(WAIT_S).name == "EXPIRED"


def test_expired_message_is_no_dead_letter(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g", max_attempts=2)
    with client.consumer(topic, "g") as consumer:
        client.schedule(topic, b"once")
        [message] = world.receive(consumer, 1)
        message.nack(delay=10 * world.moment).result(WAIT_S)
        live(world, topic, 3)
        world.pass_time(3)
        world.until(lambda: expired(world, topic) == 1)
    assert f"{topic}.g.dead" not in {each.name for each in client.topics()}


def test_what_has_expired_stays_so_after_a_failover(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g")
    client.schedule(topic, b"old")
    world.until(lambda: world.unacked(topic, "g") == 1)
    live(world, topic, 2)
    world.pass_time(2)
    world.change_leader()
    with client.consumer(topic, "g") as consumer:
        world.until(lambda: expired(world, topic) == 1)
        live(world, topic, 1000)
        world.nothing_waits(consumer, topic)


def test_time_to_live_is_that_of_the_narrowest_scope_and_zero_is_none(
    world: World, topic: str
) -> None:
    client, short, plain = world.client, f"{topic}/short", f"{topic}/plain"
    client.alter_policies({"ttl_ms": world.moment_ms}, namespace=topic)
    client.alter_policies({"ttl_ms": 0}, topic=plain)
    for each in (short, plain):
        client.create_group(each, "g")
        client.schedule(each, b"m")
    world.pass_time(1)
    world.until(lambda: expired(world, short) == 1)
    with client.consumer(plain, "g") as consumer:
        assert world.take(consumer, 1)[0].payload == b"m"


def test_timer_that_would_have_expired_when_it_is_scheduled_is_refused(
    world: World, topic: str
) -> None:
    client = world.client
    client.alter_policies({"ttl_ms": HOUR_MS}, topic=topic)
    now_ms = world.clock_ms()
    client.schedule(topic, b"in time", due_ms=now_ms - HOUR_MS // 2)
    with pytest.raises(InvalidRequest, match=r"due_ms.*must be above .* \(ttl_ms of the topic\)"):
        client.schedule(topic, b"too old", due_ms=now_ms - HOUR_MS)
    assert client.describe_topic(topic).scheduled == 1


def test_topic_without_groups_lets_expired_messages_go(world: World, topic: str) -> None:
    client = world.client
    live(world, topic, 1)
    client.schedule(topic, b"old")
    world.pass_time(1)
    world.until(lambda: expired(world, topic) == 1)
    assert client.describe_topic(topic).queue_begin == 1


def test_message_is_kept_for_the_retention_and_can_be_sought(world: World, topic: str) -> None:
    client = world.client
    client.alter_policies({"retention_ms": HOUR_MS}, topic=topic)
    with client.consumer(topic, "g") as consumer:
        client.schedule_batch(topic, [b"1", b"2", b"3"])
        world.take(consumer, 3)
        kept = client.describe_topic(topic)
        assert (kept.queue_begin, kept.queue_end, kept.ready) == (0, 3, 0)
        assert client.seek_group(topic, "g", offset=1).unacked == 2
        assert [m.payload for m in world.take(consumer, 2)] == [b"2", b"3"]
        client.seek_group(topic, "g", start="earliest")
        assert [m.payload for m in world.take(consumer, 3)] == [b"1", b"2", b"3"]


def test_new_group_at_the_earliest_gets_what_is_retained(world: World, topic: str) -> None:
    client = world.client
    client.alter_policies({"retention_ms": HOUR_MS}, topic=topic)
    with client.consumer(topic, "g") as consumer:
        client.schedule_batch(topic, [b"1", b"2"])
        world.take(consumer, 2)
    with client.consumer(topic, "later") as consumer:
        assert [m.payload for m in world.take(consumer, 2)] == [b"1", b"2"]


def test_message_is_let_go_when_its_retention_is_over(world: World, topic: str) -> None:
    client = world.client
    client.alter_policies({"retention_ms": world.moment_ms}, topic=topic)
    with client.consumer(topic, "g") as consumer:
        client.schedule(topic, b"1")
        world.take(consumer, 1)

    def gone() -> pb.TopicStatus | None:
        world.pass_time(1)
        found = client.describe_topic(topic)
        return found if found.queue_begin == 1 else None

    assert world.until(gone).ready == 0
    with pytest.raises(InvalidRequest, match="must be 1 to 1"):
        client.seek_group(topic, "g", offset=0)
