"""Events after long times: outcomes, producers and messages that are forgotten."""

from datetime import timedelta

import pytest

from timerclient import CancelResult, NotFound, TimerClient, TimerState
from timerfake import FakeCluster

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def fired_and_cancelled(cluster: FakeCluster, client: TimerClient, wait: timedelta) -> list[str]:
    """Return the answers about timers that fired so long ago, without other timers near them."""
    first, second = client.schedule_batch("t", [b""] * 2, delay=[HOUR, HOUR + timedelta(seconds=5)])
    gone = client.schedule("t", b"", delay=HOUR)
    assert client.cancel(gone) is CancelResult.CANCELLED
    cluster.advance(HOUR + timedelta(seconds=5) + wait)
    return [client.cancel(timer).name for timer in (first, second, gone)]


def test_outcomes_are_told_for_ten_minutes(cluster: FakeCluster, client: TimerClient) -> None:
    said = fired_and_cancelled(cluster, client, 9 * MINUTE)
    assert said == ["ALREADY_FIRED", "ALREADY_FIRED", "ALREADY_CANCELLED"]


def test_outcomes_are_forgotten_soon_after_however_little_happens(
    cluster: FakeCluster, client: TimerClient
) -> None:
    assert fired_and_cancelled(cluster, client, 11 * MINUTE) == ["NOT_FOUND"] * 3


def test_cancel_is_remembered_until_the_timer_would_have_fired(
    cluster: FakeCluster, client: TimerClient
) -> None:
    timer = client.schedule("t", b"", delay=365 * DAY)
    client.cancel(timer)
    cluster.advance(365 * DAY)
    assert client.cancel(timer) is CancelResult.ALREADY_CANCELLED
    assert client.get_timer(timer).state is TimerState.CANCELLED
    cluster.advance(HOUR)
    with pytest.raises(NotFound):
        client.get_timer(timer)


def test_client_that_was_idle_for_longer_than_producers_are_known_goes_on(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.schedule("t", b"1", delay=HOUR)
    cluster.advance(30 * DAY)
    assert not client.schedule("t", b"2", delay=HOUR).duplicate
    cluster.advance(HOUR)
    assert client.topics()[0].fired == 2


def test_topic_without_groups_keeps_messages_for_seven_days(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.schedule("t", b"old")
    cluster.advance(2 * DAY)
    client.schedule("t", b"young")
    cluster.advance(6 * DAY)
    with client.consumer("t", "g") as consumer:
        cluster.settle()
        assert [m.payload for m in consumer.receive(10, timeout=0)] == [b"young"]


def test_group_keeps_messages_for_as_long_as_it_takes(
    cluster: FakeCluster, client: TimerClient
) -> None:
    client.create_group("t", "g")
    client.schedule("t", b"old")
    cluster.advance(3650 * DAY)
    with client.consumer("t", "g") as consumer:
        cluster.settle()
        assert [m.payload for m in consumer.receive(10, timeout=0)] == [b"old"]


def test_nack_of_thirty_days_is_kept(cluster: FakeCluster, client: TimerClient) -> None:
    client.schedule("t", b"p")
    with client.consumer("t", "g") as consumer:
        cluster.settle()
        [message] = consumer.receive(timeout=0)
        _ = message.nack(delay=30 * DAY)
        cluster.advance(30 * DAY - MINUTE)
        cluster.fail_over()
        assert consumer.receive(timeout=0) == []
        cluster.advance(MINUTE)
        [again] = consumer.receive(timeout=5)
        assert again.attempt > 1


def test_time_that_passes_in_one_go_or_in_many_ends_in_the_same_state() -> None:
    """Compare pending rows, queues and groups, because the passing time itself appends entries."""
    ends = []
    for steps in (1, 60):
        with FakeCluster() as cluster, cluster.client() as client:
            start_ms = cluster.now_ms
            client.create_group("t", "g", lease=20, max_attempts=3)
            client.schedule_batch("t", [b"%d" % n for n in range(50)], delay=[*range(0, 500, 10)])
            with client.consumer("t", "g", window=5) as consumer:
                for _ in range(steps):
                    cluster.advance(300 / steps)
                [topic] = [each for each in client.topics() if each.name == "t"]
                taken = consumer.receive(100, timeout=0)
                seen = [(m.payload, m.attempt, m.handed_out_ms - start_ms) for m in taken]
            ends.append((topic, seen, [t.due_ms - start_ms for t in client.list_timers("t")]))
    assert ends[0] == ends[1]
