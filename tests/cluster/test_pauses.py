"""Against three real processes: what paused topics hold, over flushes, kills and restarts."""

import json

import pytest

from tests.cluster.conftest import Ctl
from tests.cluster.hosted import flushed
from tests.cluster.running import Running, now_ms, take, until
from timerclient import CancelResult, TimerClient, TimerState

pytestmark = pytest.mark.slow

SETTINGS = ("storage.flush_interval_ms = 1000",)
COUNT = 9_000
"""So many are released in more than one step."""


@pytest.mark.long  # all nodes are killed, and then the leader
def test_what_is_held_outlives_the_death_of_all_nodes_and_is_released(
    cluster: Running, client: TimerClient, topic: str, ctl: Ctl
) -> None:
    client.create_topic(topic)
    ctl("topics", "pause", topic)
    first_ms = now_ms() // 10 * 10 + 1_000
    bodies = [b"%d" % at for at in range(COUNT)]
    dues = [first_ms + at // 100 * 10 for at in range(COUNT)]
    timers = client.schedule_batch(topic, bodies[::-1], due_ms=dues[::-1])
    until(lambda: client.describe_topic(topic).held == COUNT)
    flushed(cluster)
    assert client.cancel(timers[0]) is CancelResult.CANCELLED  # in a run: the last of all
    cluster.kill_together(*cluster.nodes)
    cluster.up()
    shown = client.describe_topic(topic)
    assert (shown.paused, shown.held, shown.pending) == (True, COUNT - 1, COUNT - 1)
    assert f"paused, {COUNT - 1} held" in ctl("topics", "describe", topic)
    assert client.get_timer(timers[1]).held
    said = json.loads(ctl("topics", "resume", topic, "-o", "json"))
    assert said == {"topic": topic, "paused": False, "catch_up": "all"}
    cluster.kill(cluster.wait_for_leader())
    with client.consumer(topic, group="g") as consumer:
        messages = take(consumer, COUNT - 1)
    assert sorted(int(m.payload) for m in messages) == [*range(COUNT - 1)]
    by_offset = sorted(messages, key=lambda message: message.queue_offset)
    due_ms = [message.due_ms for message in by_offset]
    assert due_ms == sorted(due_ms)
    until(lambda: not client.describe_topic(topic).releasing)
    cluster.up()
    cluster.digests_agree()
    cluster.counts_add_up()


def test_what_was_dropped_is_told_by_all_leaders(
    cluster: Running, client: TimerClient, topic: str, ctl: Ctl
) -> None:
    client.schedule(topic, b"far", delay=3600)  # else there is nothing to be flushed
    client.pause_topic(topic)
    timers = client.schedule_batch(topic, [b"1", b"2", b"3"])
    until(lambda: client.describe_topic(topic).held == 3)
    ctl("topics", "resume", topic, "--catch-up", "latest", "--yes")
    until(lambda: client.describe_topic(topic).fired == 1)
    flushed(cluster)
    cluster.kill_together(*cluster.nodes)
    cluster.up()
    states = [client.get_timer(timer).state for timer in timers]
    assert states == [TimerState.DROPPED, TimerState.DROPPED, TimerState.FIRED]
    assert "DROPPED" in ctl("timers", "story", timers[0].id)
    assert cluster.metric(cluster.wait_for_leader(), "timer_held") == 0
    cluster.digests_agree()
