"""Smoothing: jitter of due times, and rates of delivery."""

from itertools import pairwise
from typing import Any

import pytest

from tests.conformance.worlds import World
from timerclient import InvalidRequest

HOUR = 3600.0
RATE = 40


def alter(world: World, topic: str, **said: Any) -> None:
    world.client.create_topic(topic)
    policy: Any = said
    world.client.alter_policies(policy, topic=topic)


def test_jitter_spreads_timers_of_one_moment_and_none_is_earlier(world: World, topic: str) -> None:
    client, due_ms = world.client, world.clock_ms() + 3_600_000
    alter(world, topic, jitter_ms=600_000, tick_ms=1)
    timers = client.schedule_batch(topic, [b""] * 500, due_ms=due_ms)
    assert all(due_ms <= timer.due_ms <= due_ms + 600_000 for timer in timers)
    assert len({timer.due_ms // 100_000 for timer in timers}) >= 6
    before = {timer.due_ms for timer in timers}
    moved = client.reschedule(timers[0], due_ms=due_ms)
    assert due_ms <= moved.due_ms <= due_ms + 600_000
    assert moved.due_ms not in before
    assert client.get_timer(moved).requested_ms == due_ms


def test_group_gets_no_more_messages_a_second_than_its_rate(world: World, topic: str) -> None:
    client = world.client
    alter(world, topic, group_rate_max=RATE)
    with client.consumer(topic, "g") as fast, client.consumer(topic, "h") as other:
        world.until(lambda: world.group(topic, "h"))
        client.schedule_batch(topic, [b"x"] * 20)
        world.pass_time(3)
        for consumer in (fast, other):
            times = [message.handed_out_ms for message in world.take(consumer, 20)]
            for at in range(1, len(times)):
                most = RATE * (times[at] - times[0]) / 1000 + RATE / 10 + 1
                assert at + 1 <= most, times
            assert all(before <= after for before, after in pairwise(times))


def test_rates_and_jitter_have_limits(world: World, topic: str) -> None:
    with pytest.raises(InvalidRequest, match=r"jitter_ms = 86400001: must be 0 to 86400000"):
        alter(world, topic, jitter_ms=86_400_001)
    with pytest.raises(InvalidRequest, match=r"topic_rate_max = -1: must be 0 to 1000000000"):
        alter(world, topic, topic_rate_max=-1)
