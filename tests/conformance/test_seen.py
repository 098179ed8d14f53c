"""Lag, lateness, stories, producers, and requests that are sent more than once."""

from contextlib import ExitStack
from functools import partial

import pytest

from tests.conformance.worlds import World
from timerclient import InvalidRequest, NewTimer
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_name

HOUR = 3600.0


def test_request_with_an_id_is_one_timer_however_often_it_is_sent(world: World, topic: str) -> None:
    client, name = world.client, topic[-64:]
    first = client.schedule(topic, b"once", delay=HOUR, request_id=name)
    world.pass_time()
    again = client.schedule(topic, b"once", delay=HOUR, request_id=name)
    assert (again.id, again.duplicate, first.duplicate) == (first.id, True, False)
    with pytest.raises(InvalidRequest, match="request_id"):
        client.schedule(topic, b"something else", delay=HOUR, request_id=name)
    world.change_leader()
    assert client.schedule(topic, b"once", delay=HOUR, request_id=name).id == first.id
    assert client.count_timers(topic).pending == 1


def test_timers_of_several_topics_are_scheduled_at_once_or_not_at_all(
    world: World, topic: str
) -> None:
    client = world.client
    names = [f"{topic}-{n}" for n in range(3)]
    timers = client.schedule_all([NewTimer(name, b"x", delay=HOUR) for name in names])
    assert len({*timers.ids}) == 3
    wrong = NewTimer(names[1], b"x" * (5 << 20), delay=HOUR)
    with pytest.raises(InvalidRequest):
        client.schedule_all([NewTimer(names[0], b"x", delay=HOUR), wrong])
    assert [client.count_timers(name).pending for name in names] == [1, 1, 1]


def test_story_tells_what_became_of_a_timer(world: World, topic: str) -> None:
    client, name = world.client, partial(short_name, pb.StoryEvent.What.DESCRIPTOR)
    timer = client.schedule(topic, b"x", key="k")
    with client.consumer(topic, "g") as consumer:
        [message] = world.receive(consumer, 1)
        message.nack(delay=0).result()
        world.take(consumer, 1)
    moved = client.reschedule(client.schedule(topic, b"y", delay=HOUR), delay=2 * HOUR)
    client.cancel(moved)
    stories = [client.tell_story(each) for each in (timer, moved)]
    assert [[name(event.what) for event in story.events] for story in stories] == [
        ["SCHEDULED", "FIRED", "NACKED", "ACKED"],
        ["RESCHEDULED_FROM", "CANCELLED"],
    ]
    assert [story.end.state for story in stories] == [
        pb.TIMER_STATE_FIRED,
        pb.TIMER_STATE_CANCELLED,
    ]


def test_lag_is_the_age_of_what_waits_though_nothing_moves(world: World, topic: str) -> None:
    client = world.client
    client.create_group(topic, "g")
    client.schedule(topic, b"x")

    def lags() -> tuple[int, int]:
        [group] = client.describe_topic(topic).groups
        return group.undelivered_lag_ms, group.unacked_lag_ms

    world.until(lambda: client.describe_topic(topic).fired)
    world.pass_time(2)
    assert min(lags()) >= 2 * world.moment_ms
    with client.consumer(topic, "g") as consumer:
        world.take(consumer, 1)
    assert lags() == (0, 0)
    assert sum(client.describe_topic(topic).handed_out_late.counts) == 1


def test_producer_is_told_by_its_name_and_among_all(world: World, topic: str) -> None:
    client = world.client
    client.schedule_batch(topic, [b"x"], delay=HOUR)
    newest = client.producers()[-1]
    found = client.describe_producer(newest.producer)
    assert found.last_sequence >= 1
    assert found.expires_at_ms > found.used_at_ms
    with pytest.raises(InvalidRequest, match="producer"):
        client.describe_producer(0)


def test_short_lived_clients_leave_no_producer(world: World, topic: str) -> None:
    """The clients are closed or not, as after a kill of their process."""
    before = {each.producer for each in world.client.producers()}
    with ExitStack() as closed_later:
        for number in range(100):
            client = closed_later.enter_context(world.another_client())
            client.schedule(topic, b"%d" % number, delay=HOUR)
        assert {each.producer for each in world.client.producers()} <= before
    assert world.client.count_timers(topic).pending == 100


def test_client_that_closes_ends_its_producer(world: World, topic: str) -> None:
    with world.another_client() as client:
        before = {each.producer for each in world.client.producers()}
        client.schedule_batch(topic, [b"1", b"2"], delay=HOUR)
        assert len({each.producer for each in world.client.producers()} - before) == 1
    assert {each.producer for each in world.client.producers()} <= before
