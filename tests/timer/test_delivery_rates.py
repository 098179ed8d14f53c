"""Smoothing: rates of delivery in a leader over a log in memory, and the jitter of due times."""

import random
from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from tests.timer.leading import Play
from timer.entries.policies import CLUSTER, DEFAULTS, Policies, Scope, ScopePolicy
from timer.leader.groups.delivery_rates import BURST_MS
from timer.leader.intake.admission import Draws, Rules, WantedTimes
from timer.model.units import MonoMs, Now, QueueOffset, TopicId, UnixMs

NOW = 1_000_000


def alter(play: Play, topic: TopicId, **said: Any) -> None:
    policy = ScopePolicy(**said)
    play.leader.set_policy(Scope("", topic), policy, (), play.now, play.done("policy"))
    play.settle()
    del play.answers["policy"]


def run(play: Play, for_ms: int) -> list[tuple[int, str, int]]:
    """Step whenever the leader asks for it; return (time, group, messages) of each delivery."""
    end_ms, found = play.mono_ms + for_ms, []
    for _ in range(100 * for_ms):
        before = len(play.deliveries)
        play.settle()
        new = play.deliveries[before:]
        found += [(play.mono_ms, each.group.name, len(each.lease.offsets)) for each in new]
        play.mono_ms = max(play.mono_ms + 1, int(play.leader.wake_at_ms(play.now)))
        if play.mono_ms >= end_ms:
            return found
    raise AssertionError("the leader steps all the time")


def most_beyond(found: list[tuple[int, str, int]], rate: int) -> float:
    """Return the most messages of any span of time above `rate` a second."""
    ends = [0, *accumulate(count for *_, count in found)]
    times = [at for at, *_ in found]
    return max(
        ends[last + 1] - ends[first] - rate * (times[last] - times[first]) / 1000
        for first in range(len(found))
        for last in range(first, len(found))
    )


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
@pytest.mark.parametrize("rate", [3, 40, 5_000])
def test_no_span_of_time_has_more_deliveries_than_the_rate_and_a_tenth_of_a_second(
    rate: int, kind: str
) -> None:
    play = Play()
    group = play.make_group(type=kind, lease_ms=60_000)
    alter(play, play.topic_id, group_rate_max=rate)
    play.join(group, credit=1_000_000)
    play.schedule("many", *[0] * (2 * rate))
    found = run(play, 1_500)
    sent = sum(count for *_, count in found)
    assert most_beyond(found, rate) <= max(1, rate * BURST_MS / 1000)
    assert sent >= 1.4 * rate - 1
    assert len(found) <= 200, "so many deliveries of few messages cost more than they need"
    play.restart()  # a failover
    play.join(group, credit=1_000_000)
    assert most_beyond(found + run(play, 300), rate) <= max(1, rate * BURST_MS / 1000)


def test_groups_share_the_rate_of_their_topic_and_an_idle_one_takes_nothing_from_it() -> None:
    play = Play()
    groups = [play.make_group(name, lease_ms=60_000) for name in "ghi"]
    alter(play, play.topic_id, topic_rate_max=100)
    for group in groups[:2]:
        play.join(group, credit=10_000)
    play.join(groups[2], credit=0)
    play.schedule("many", *[0] * 400)
    found = run(play, 4_000)
    by_group: Counter[str] = Counter()
    for _, name, count in found:
        by_group[name] += count
    assert most_beyond(found, 100) <= 10
    assert 380 <= by_group["g"] + by_group["h"] <= 400
    assert abs(by_group["g"] - by_group["h"]) <= 20
    play.leader.groups.delete(groups[0], play.done("deleted"))
    found = run(play, 2_000)
    assert sum(count for *_, count in found) >= 190, "a deleted group keeps its part of the rate"


def test_low_rate_of_a_topic_reaches_each_of_many_groups() -> None:
    play = Play()
    groups = [play.make_group(f"g{n}", lease_ms=60_000) for n in range(7)]
    alter(play, play.topic_id, topic_rate_max=5)
    for group in groups:
        play.join(group, credit=10_000)
    play.schedule("many", *[0] * 100)
    by_group = Counter(name for _, name, _ in run(play, 6_000))
    assert len(by_group) == len(groups)
    assert max(by_group.values()) - min(by_group.values()) <= 1


def test_seek_of_a_group_that_waits_for_its_turn_stops_no_group_of_its_topic() -> None:
    play = Play()
    sought, other = (play.make_group(name, lease_ms=60_000) for name in "gh")
    alter(play, play.topic_id, topic_rate_max=5)
    play.join(sought, credit=10_000)
    play.schedule("many", *[0] * 100)
    assert run(play, 500)
    play.leader.groups.seek(sought, QueueOffset(0), play.done("sought"))
    play.join(other, credit=10_000)
    by_group = Counter(name for _, name, _ in run(play, 4_000))
    assert sum(by_group.values()) >= 19
    assert abs(by_group["g"] - by_group["h"]) <= 1


def test_rate_counts_redeliveries_and_dead_letters_still_leave_the_group() -> None:
    play = Play()
    group = play.make_group(lease_ms=60_000, max_attempts=1)
    alter(play, play.topic_id, group_rate_max=20)
    consumer = play.join(group, credit=10_000)
    play.schedule("many", *[0] * 60)
    sent, begin_ms = 0, play.mono_ms
    for _ in range(40):
        while sent < len(play.deliveries):
            play.nack("nack", play.deliveries[sent])
            play.settle()
            del play.answers["nack"]
            sent += 1
        run(play, 25)
    assert consumer.credit > 0
    delivered = sum(len(each.lease.offsets) for each in play.deliveries)
    allowed = 20 * (play.mono_ms - begin_ms) / 1000
    assert allowed - 3 <= delivered <= allowed + 2
    assert len(play.messages("a.g.dead")) >= 10


def test_rate_of_the_narrower_scope_counts_and_zero_is_no_limit() -> None:
    play = Play()
    group = play.make_group(lease_ms=60_000)
    play.leader.set_policy(CLUSTER, ScopePolicy(group_rate_max=1), (), play.now, play.done("whole"))
    play.join(group, credit=10_000)
    play.schedule("many", *[0] * 500)
    assert sum(count for *_, count in run(play, 300)) <= 1
    alter(play, play.topic_id, group_rate_max=0)
    run(play, 10)
    assert sum(len(each.lease.offsets) for each in play.deliveries) == 500


# ---- jitter


def due_of(seed: int, when: WantedTimes, rows: int, **said: Any) -> list[int]:
    effective = Policies().with_policy(CLUSTER, ScopePolicy(**said)).effective(DEFAULTS)
    rules = Rules(effective, Draws(seed))
    times = rules.times(when, rows, Now(MonoMs(0), UnixMs(NOW)), UnixMs(NOW - 100))
    assert len(times.requested_ms) == len(times.due_ms) == rows
    due: list[int] = times.due_ms.tolist()
    return due


@pytest.mark.parametrize("delay_ms", [0, 7_000])
def test_jitter_spreads_equal_times_over_its_window_and_never_makes_one_earlier(
    delay_ms: int,
) -> None:
    when = WantedTimes("delay_ms", np.array([delay_ms], np.int64))
    due = due_of(1, when, 10_000, jitter_ms=1_000, tick_ms=1)
    after = np.array(due) - NOW - delay_ms
    assert after.min() >= 0
    assert after.max() <= 1_000
    counts = np.histogram(after, bins=10, range=(0, 1_000))[0]
    assert counts.min() > 800
    assert due != due_of(2, when, 10_000, jitter_ms=1_000, tick_ms=1)


def test_jitter_of_past_times_begins_now_and_the_tick_is_kept() -> None:
    chance = random.Random(3)
    past = np.array([chance.randrange(NOW) for _ in range(1_000)], np.int64)
    due = due_of(3, WantedTimes("due_ms", past), 1_000, jitter_ms=500, tick_ms=100)
    assert all(each % 100 == 0 for each in due if each > NOW)
    assert NOW <= min(due) < max(due) <= NOW + 500


def test_without_delayed_delivery_there_is_no_jitter() -> None:
    when = WantedTimes("delay_ms", np.array([5_000], np.int64))
    assert due_of(1, when, 3, jitter_ms=1_000, delayed_delivery=False) == [NOW] * 3
