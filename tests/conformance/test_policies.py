"""Policies of the cluster, a namespace and a topic."""

from collections.abc import Iterator

import pytest

from tests.conformance.worlds import World
from timerclient import InvalidRequest, NotFound, TimerState
from timerclient.rows import policy_fields

HOUR = 3600.0
HOUR_MS = 3_600_000
SLACK_MS = 30_000
"""Tolerance of a due time; it tells hours apart, also on a slow machine."""


def hours_away(world: World, due_ms: int, hours: float) -> bool:
    return abs(due_ms - world.clock_ms() - hours * HOUR_MS) < SLACK_MS


@pytest.fixture
def ns(world: World, topic: str) -> Iterator[str]:
    """A namespace for this test only; its timers are cancelled afterwards."""
    yield topic
    for each in world.client.topics():
        if each.name.startswith(f"{topic}/"):
            world.client.cancel_where(each.name)


def test_delay_levels_are_the_eighteen_until_a_scope_has_its_own(world: World, ns: str) -> None:
    client, topic = world.client, f"{ns}/t"
    seconds = [1, 5, 10, 30, *(60 * n for n in range(1, 11)), 1200, 1800, 3600, 7200]
    # Levels below 5 are left out, because their timers would fire during the test.
    timers = client.schedule_batch(topic, [b""] * 14, delay_level=[*range(5, 19)])
    begin_ms = timers.due_ms[0] - 60_000
    for due_ms, delay_s in zip(timers.due_ms, seconds[4:], strict=True):
        assert abs(due_ms - begin_ms - 1000 * delay_s) <= 10
    assert hours_away(world, client.schedule(topic, b"", delay_level=19).due_ms, 2)
    client.alter_policies({"delay_levels_ms": [4 * HOUR_MS, HOUR_MS]}, topic=topic)
    own = client.schedule_batch(topic, [b""] * 4, delay_level=[1, 2, 3, 2_000_000_000])
    for due_ms, hours in zip(own.due_ms, (4, 1, 1, 1), strict=True):
        assert hours_away(world, due_ms, hours)
    other = client.schedule(f"{ns}/other", b"", delay_level=1)
    assert -SLACK_MS < other.due_ms - world.clock_ms() - 1_000 <= 1_000
    with pytest.raises(InvalidRequest, match="delay_level"):
        client.schedule(topic, b"", delay_level=-1)


def test_level_zero_is_at_once(world: World, ns: str) -> None:
    with world.client.consumer(f"{ns}/t", "g") as consumer:
        world.client.schedule(f"{ns}/t", b"now", delay_level=0)
        assert world.take(consumer, 1)[0].payload == b"now"


def test_narrower_scope_wins_field_by_field(world: World, ns: str) -> None:
    client, topic = world.client, f"{ns}/t"
    client.create_topic(topic)
    client.alter_policies({"fixed_delay_ms": 2 * HOUR_MS, "tick_ms": 1_000}, namespace=ns)
    assert hours_away(world, client.schedule(topic, b"").due_ms, 2)
    answer = client.alter_policies({"fixed_delay_ms": HOUR_MS}, topic=topic)
    timer = client.schedule(topic, b"", delay=9 * HOUR)
    assert hours_away(world, timer.due_ms, 1)
    assert timer.due_ms % 1_000 == 0
    assert policy_fields.fields_of(answer.own) == {"fixed_delay_ms": HOUR_MS}
    effective = {"fixed_delay_ms": HOUR_MS, "tick_ms": 1_000, "delayed_delivery": True}
    assert policy_fields.fields_of(answer.effective).items() >= effective.items()
    whose = {name: answer.sources[name] for name in ("fixed_delay_ms", "tick_ms", "delay_ms_max")}
    assert whose == {"fixed_delay_ms": "topic", "tick_ms": "namespace", "delay_ms_max": "node"}
    assert [each.topic for each in client.describe_policies(namespace=ns).narrower] == [topic]
    client.alter_policies(unset=["fixed_delay_ms"], topic=topic)
    assert hours_away(world, client.schedule(topic, b"").due_ms, 2)
    requested_ms = client.get_timer(timer).requested_ms
    assert requested_ms is not None
    assert hours_away(world, requested_ms, 9)


def test_delays_are_bounded_below_and_above(world: World, ns: str) -> None:
    client, topic = world.client, f"{ns}/t"
    client.alter_policies({"delay_ms_min": HOUR_MS, "delay_ms_max": 3 * HOUR_MS}, namespace=ns)
    assert hours_away(world, client.schedule(topic, b"").due_ms, 1)
    assert hours_away(world, client.schedule(topic, b"", due_ms=10**10).due_ms, 1)
    assert hours_away(world, client.schedule(topic, b"", delay=2 * HOUR).due_ms, 2)
    assert hours_away(world, client.schedule(topic, b"", delay=3 * HOUR).due_ms, 3)
    limit = rf"must be at most {3 * HOUR_MS} \(delay_ms_max of the namespace\)"
    with pytest.raises(InvalidRequest, match=limit):
        client.schedule(topic, b"", delay=3 * HOUR + 0.001)
    client.alter_policies({"delay_ms_max": HOUR_MS}, namespace=ns)
    with pytest.raises(InvalidRequest, match=r"delay_level = 18.*stands for 7200000 ms"):
        client.schedule(topic, b"", delay_level=18)
    with pytest.raises(InvalidRequest, match=r"due_ms.*delay_ms_max of the namespace"):
        client.schedule(topic, b"", due_ms=world.clock_ms() + HOUR_MS + SLACK_MS)


def test_delayed_delivery_off_delivers_new_ones_at_once_and_pending_ones_keep_their_time(
    world: World, ns: str
) -> None:
    client, topic = world.client, f"{ns}/t"
    old = client.schedule(topic, b"old", delay=HOUR)
    client.schedule(topic, b"soon", delay=3 * world.moment)
    client.alter_policies({"delayed_delivery": False}, namespace=ns)
    with client.consumer(topic, "g") as consumer:
        client.schedule(topic, b"new", delay=HOUR)
        world.pass_time(4)
        assert {m.payload for m in world.take(consumer, 2)} == {b"new", b"soon"}
    world.change_leader()
    assert client.get_timer(old).state is TimerState.PENDING
    client.alter_policies({"delayed_delivery": True}, namespace=ns)
    assert hours_away(world, client.schedule(topic, b"", delay=HOUR).due_ms, 1)


def test_payload_limit_of_a_namespace_is_its_own(world: World, ns: str) -> None:
    client = world.client
    client.alter_policies({"payload_bytes_max": 10}, namespace=ns)
    client.schedule(f"{ns}/t", b"x" * 10, delay=HOUR)
    limit = r"must have at most 10 bytes \(payload_bytes_max of the namespace\)"
    with pytest.raises(InvalidRequest, match=limit):
        client.schedule(f"{ns}/t", b"x" * 11, delay=HOUR)
    other = client.schedule(f"{ns}-other/t", b"x" * 11, delay=HOUR)
    assert [timer.payload for timer in client.list_timers(f"{ns}/t")] == [b"x" * 10]
    client.cancel(other)


def test_rescheduled_timer_follows_the_policies_of_its_topic(world: World, ns: str) -> None:
    client = world.client
    topics = f"{ns}/fixed", f"{ns}/plain"
    timers = [client.schedule(topic, b"p", delay=HOUR) for topic in topics]
    client.alter_policies({"fixed_delay_ms": 3 * HOUR_MS}, topic=topics[0])
    moved = client.reschedule_batch(timers, delay=5 * HOUR)
    for one, hours in zip(moved, (3, 5), strict=True):
        assert one.timer is not None
        assert hours_away(world, one.timer.due_ms, hours)


def test_default_namespace_needs_no_name(world: World, topic: str) -> None:
    client = world.client
    client.schedule(f"default/{topic}", b"1", delay=HOUR)
    client.schedule(topic, b"2", delay=HOUR)
    assert [t.payload for t in client.list_timers(f"default/{topic}")] == [b"1", b"2"]
    assert [each.name for each in client.topics() if each.name.endswith(topic)] == [topic]
    client.alter_policies({"tick_ms": 60_000}, topic=f"default/{topic}")
    assert client.describe_policies(topic=topic).effective.tick_ms == 60_000
    assert client.schedule(topic, b"3", delay=HOUR).due_ms % 60_000 == 0
    with client.consumer(f"default/{topic}", "g") as consumer:
        client.schedule(topic, b"4")
        assert world.take(consumer, 1)[0].payload == b"4"
    client.cancel_where(topic)


def test_policy_of_an_unknown_topic_is_not_found(world: World, ns: str) -> None:
    with pytest.raises(NotFound):
        world.client.describe_policies(topic=f"{ns}/t")
    with pytest.raises(InvalidRequest, match="must be one of"):
        world.client.alter_policies({"nonsense": 1}, namespace=ns)  # type: ignore[typeddict-unknown-key]
