"""Paused topics: held timers, changes of held timers, and the resume."""

import pytest

from tests.conformance.worlds import World
from timerclient import AlreadyExists, CancelResult, InvalidRequest, NotFound, Timer, TimerState
from timerclient.proto import timer_pb2 as pb

HOUR = 3600.0


def status(world: World, topic: str) -> pb.TopicStatus:
    return world.client.describe_topic(topic)


def until_held(world: World, *timers: Timer) -> None:
    """Return when these timers are due and held."""
    world.until(lambda: all(world.client.get_timer(timer).held for timer in timers))


def paused(world: World, topic: str) -> None:
    world.client.create_topic(topic)
    world.client.pause_topic(topic)


def overdue(world: World, topic: str, *bodies: bytes) -> list[Timer]:
    """Return held timers, each due later than the one before."""
    first_ms = world.clock_ms() + world.moment_ms
    timers = [
        world.client.schedule(topic, body, due_ms=first_ms + 100 * at)
        for at, body in enumerate(bodies)
    ]
    world.pass_time(2)
    until_held(world, *timers)
    return timers


def test_paused_topic_holds_what_comes_due_and_delivers_it_in_order_later(
    world: World, topic: str
) -> None:
    paused(world, topic)
    with world.client.consumer(topic, "g") as consumer:
        timers = overdue(world, topic, b"1", b"2", b"3")
        shown = status(world, topic)
        assert (shown.paused, shown.held, shown.pending, shown.fired) == (True, 3, 3, 0)
        assert shown.lag_ms == 0
        answer = world.client.resume_topic(topic)
        assert (answer.effective.paused, answer.effective.catch_up) == (False, "all")
        assert [message.payload for message in world.take(consumer, 3)] == [b"1", b"2", b"3"]
    world.until(lambda: not status(world, topic).releasing)
    shown = status(world, topic)
    assert (shown.paused, shown.held, shown.pending, shown.fired) == (False, 0, 0, 3)
    assert world.client.cancel(timers[0]) is CancelResult.ALREADY_FIRED


def test_what_is_due_at_once_is_held_in_a_paused_topic(world: World, topic: str) -> None:
    paused(world, topic)
    timer = world.client.schedule(topic, b"now")
    until_held(world, timer)
    assert status(world, topic).fired == 0
    world.client.resume_topic(topic)
    with world.client.consumer(topic, "g") as consumer:
        assert world.take(consumer, 1)[0].payload == b"now"


def test_messages_that_fired_before_a_pause_are_delivered_during_it(
    world: World, topic: str
) -> None:
    world.client.schedule(topic, b"before")
    world.until(lambda: status(world, topic).fired == 1)
    world.client.pause_topic(topic)
    with world.client.consumer(topic, "g") as consumer:
        assert world.take(consumer, 1)[0].payload == b"before"


def test_held_timers_are_listed_counted_cancelled_and_rescheduled(world: World, topic: str) -> None:
    paused(world, topic)
    client = world.client
    one, two, three = overdue(world, topic, b"1", b"2", b"3")
    keyed = client.schedule(topic, b"4", key="k")
    far = client.schedule(topic, b"5", delay=HOUR)
    until_held(world, keyed)
    for page_size in (1, 3, 100):
        listed = client.list_timers(topic, page_size=page_size)
        assert [(each.payload, each.held) for each in listed] == [
            *((b"%d" % number, True) for number in range(1, 5)),
            (b"5", False),
        ]
    counts = client.count_timers(topic)
    assert (counts.pending, min(counts.within.values())) == (5, 4)
    assert client.get_timer(key="k", topic=topic).held
    assert not client.get_timer(far).held
    assert client.cancel(one) is CancelResult.CANCELLED
    assert client.cancel(one) is CancelResult.ALREADY_CANCELLED
    moved = client.reschedule(two, delay=HOUR)
    client.reschedule(key="k", topic=topic, delay=HOUR)
    assert not client.get_timer(moved).held
    assert client.cancel_where(topic, due_to=three.due_ms + 1) == 1
    assert status(world, topic).held == 0
    assert [each.payload for each in client.list_timers(topic)] == [b"5", b"2", b"4"]
    assert client.cancel_where(topic) == 3


def test_catch_up_with_the_latest_drops_the_others(world: World, topic: str) -> None:
    paused(world, topic)
    timers = overdue(world, topic, b"1", b"2", b"3")
    world.client.resume_topic(topic, catch_up="latest")
    with world.client.consumer(topic, "g") as consumer:
        assert world.take(consumer, 1)[0].payload == b"3"
        world.nothing_waits(consumer, topic)
    assert status(world, topic).dropped == 2
    told = world.client.cancel_batch(timers)
    assert told == [CancelResult.DROPPED, CancelResult.DROPPED, CancelResult.ALREADY_FIRED]


def test_catch_up_by_dropping_lets_only_later_ones_fire(world: World, topic: str) -> None:
    def resumed(due_ms: int) -> tuple[str, Timer, int]:
        name = f"{topic}-{due_ms}"
        paused(world, name)
        [timer] = overdue(world, name, b"1")
        world.client.schedule(name, b"2", due_ms=due_ms)
        world.client.resume_topic(name, catch_up="drop")
        return name, timer, due_ms

    name, timer, due_ms = world.in_time(resumed, 4)
    with world.client.consumer(name, "g") as consumer:
        world.pass_time((due_ms - world.clock_ms()) / world.moment_ms + 1)
        assert world.take(consumer, 1)[0].payload == b"2"
    assert world.client.get_timer(timer).state is TimerState.DROPPED
    story = world.client.tell_story(timer)
    assert [event.what for event in story.events] == [
        pb.StoryEvent.WHAT_SCHEDULED,
        pb.StoryEvent.WHAT_DROPPED,
    ]
    assert story.end.state == pb.TIMER_STATE_DROPPED
    assert not story.end.gaps


def test_key_of_a_held_timer_is_taken(world: World, topic: str) -> None:
    paused(world, topic)
    timer = world.client.schedule(topic, b"1", key="k")
    until_held(world, timer)
    with pytest.raises(AlreadyExists):
        world.client.schedule(topic, b"2", key="k", delay=HOUR)
    world.client.resume_topic(topic)
    world.until(lambda: status(world, topic).fired == 1)
    assert world.client.cancel(world.client.schedule(topic, b"3", key="k", delay=HOUR)) is (
        CancelResult.CANCELLED
    )


def test_namespace_is_paused_and_one_of_its_topics_goes_on(world: World, topic: str) -> None:
    ns, client = topic, world.client
    client.alter_policies({"paused": True}, namespace=ns)
    held = client.schedule(f"{ns}/a", b"1")
    client.create_topic(f"{ns}/b")
    client.resume_topic(f"{ns}/b")
    client.schedule(f"{ns}/b", b"2")
    world.until(lambda: status(world, f"{ns}/b").fired == 1)
    until_held(world, held)
    client.alter_policies(unset=["paused"], namespace=ns)
    world.until(lambda: status(world, f"{ns}/a").fired == 1)


def test_unknown_topic_is_neither_paused_nor_made(world: World, topic: str) -> None:
    for call in (world.client.pause_topic, world.client.resume_topic):
        with pytest.raises(NotFound):
            call(topic)
    assert topic not in {each.name for each in world.client.topics()}


def test_catch_up_of_another_kind_is_refused_and_names_the_limit(world: World, topic: str) -> None:
    world.client.create_topic(topic)
    with pytest.raises(InvalidRequest) as refused:
        world.client.resume_topic(topic, catch_up="some")  # type: ignore[arg-type]
    limit = "must be one of all, latest, drop"
    assert (refused.value.field, refused.value.limit) == ("catch_up", limit)


def test_what_is_held_outlives_a_change_of_leader(world: World, topic: str) -> None:
    paused(world, topic)
    timers = overdue(world, topic, b"1", b"2")
    world.change_leader()
    until_held(world, *timers)
    world.client.resume_topic(topic)
    with world.client.consumer(topic, "g") as consumer:
        assert [message.payload for message in world.take(consumer, 2)] == [b"1", b"2"]
