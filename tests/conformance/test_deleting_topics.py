"""The deletion of a topic deletes its timers, messages and groups, and no others."""

import pytest

from tests.cluster.running import WAIT_S
from tests.conformance.worlds import World
from timerclient import CancelResult, NotFound
from timerclient.proto import timer_pb2 as pb
from timerclient.values import errors

HOUR = 3600.0


def test_deleted_topic_takes_its_pending_timers_messages_groups_and_policy_along(
    world: World, topic: str
) -> None:
    client, other = world.client, f"{topic}-other"
    client.alter_policies({"tick_ms": 1_000}, topic=topic)
    timers = client.schedule_batch(topic, [b"far"] * 3, delay=HOUR)
    kept = client.schedule(other, b"far", delay=HOUR)
    client.create_group(topic, "all")
    with client.consumer(topic, "some") as consumer:
        client.schedule_batch(topic, [b"now"] * 4, delay=0)
        for message in world.receive(consumer, 4)[:3]:
            message.ack().result(WAIT_S)
    gone = client.delete_topic(topic)
    assert gone is not None
    assert (gone.pending, gone.messages) == (3, 4)
    assert {group.name: group.unacked for group in gone.groups} == {"all": 4, "some": 1}
    assert topic not in [each.name for each in client.topics()]
    with pytest.raises(NotFound):
        client.describe_topic(topic)
    with pytest.raises(NotFound):
        client.count_timers(topic)
    with pytest.raises(NotFound):
        client.describe_policies(topic=topic)
    assert client.cancel_batch(timers) == [CancelResult.NOT_FOUND] * 3
    with pytest.raises(NotFound):
        client.get_timer(timers[0])
    assert client.get_timer(kept).topic == other
    with pytest.raises(NotFound, match=topic):
        client.delete_topic(topic)


def test_timer_of_a_deleted_topic_never_fires_not_into_a_topic_of_the_same_name_either(
    world: World, topic: str
) -> None:
    client = world.client
    client.schedule(topic, b"old", delay=2 * world.moment, key="k")
    client.delete_topic(topic)
    timer = client.schedule(topic, b"new", delay=world.moment, key="k")  # which is free
    world.pass_time(3)
    with client.consumer(topic, "g") as consumer:
        [message] = world.take(consumer, 1)
        assert message.payload == b"new"
        world.nothing_waits(consumer, topic)
    assert client.describe_topic(topic).scheduled == 2
    assert timer.id == message.id


def test_consumers_of_a_deleted_topic_end_and_so_do_their_acks(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b""] * 2, delay=0)
    consumer = client.consumer(topic, "g")
    message, _ = world.receive(consumer, 2)
    client.delete_topic(topic)
    with pytest.raises(NotFound, match=f"topic '{topic}' was deleted"):
        consumer.receive(1, timeout=WAIT_S)
    with pytest.raises(errors.TimerError):
        message.ack().result(WAIT_S)
    assert topic not in [each.name for each in client.topics()], "nobody has made it anew"


def test_deletion_outlasts_a_change_of_leader(world: World, topic: str) -> None:
    client = world.client
    [timer] = client.schedule_batch(topic, [b"old"], delay=HOUR)
    client.delete_topic(topic)
    world.change_leader()
    assert client.cancel_batch([timer]) == [CancelResult.NOT_FOUND]
    with pytest.raises(NotFound):
        client.count_timers(topic)
    client.create_topic(topic)
    assert client.count_timers(topic).pending == 0


def test_story_of_a_dropped_timer_tells_that_its_topic_was_deleted(
    world: World, topic: str
) -> None:
    client = world.client
    timer = client.schedule(topic, b"", delay=HOUR)
    client.delete_topic(topic)
    story = client.tell_story(timer)
    told = [event.what for event in story.events]
    assert told == [pb.StoryEvent.WHAT_SCHEDULED, pb.StoryEvent.WHAT_TOPIC_DELETED]
    assert story.end.state == pb.TIMER_STATE_DROPPED
