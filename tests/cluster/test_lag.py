"""Lag at the moment of the request, and lateness of timers, by topic."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.observe import lag
from cluster.observe.lateness import BOUNDS_MS, TOPICS_MAX, Lateness
from cluster.state.topic_totals import Totals
from tests.timer.leading import LEASE_MS, Play
from tests.timer.machines import START_MS, Log, engine_on, part_of
from timer.files.disk import RealDisk
from timer.model.units import TopicId
from timer.ready.group import Group


def unacked(play: Play) -> list[TopicId]:
    totals = Totals(play.machine)
    return totals.unacked_topics()


def lags(play: Play, group: Group) -> tuple[int, int]:
    found = lag.of_group(play.leader, play.machine.topics[group.topic], group, play.now.clock_ms)
    every = asyncio.run(lag.of_groups(play.leader, play.now.clock_ms, unacked(play)))
    assert every in ([], [found])
    return found.undelivered_ms, found.unacked_ms


def test_lag_of_a_group_grows_by_itself_and_ends_with_delivery_and_ack() -> None:
    play = Play()
    group = play.make_group()
    assert lags(play, group) == (0, 0)
    play.schedule("first", 0)
    play.settle()
    play.wait(100)
    play.schedule("second", 0)
    play.settle()
    assert lags(play, group) == (100, 100)
    play.wait(50)
    assert lags(play, group) == (150, 150), "nobody consumes"
    consumer = play.join(group, 1)
    play.settle()
    assert lags(play, group) == (50, 150), "the first is delivered, the second waits"
    play.leader.groups.credit(group, consumer, 5)
    play.settle()
    assert lags(play, group) == (0, 150)
    play.ack("ack 2", play.deliveries[1])
    play.settle()
    assert lags(play, group) == (0, 150)
    play.ack("ack 1", play.deliveries[0])
    play.settle()
    assert lags(play, group) == (0, 0)


def test_dead_letters_take_no_place_of_groups_that_consumers_read() -> None:
    play = Play()
    group = play.make_group()
    topic = play.machine.topics[group.topic]
    letters = replace(group, name="dead-letters")
    every = [
        lag.GroupLag(topic, letters, 9_000, 9_000),
        lag.GroupLag(topic, group, 7, 8),
        lag.GroupLag(topic, letters, 9_500, 9_500),
        lag.GroupLag(topic, group, 7, 9),
    ]
    assert lag.worst(every, 1) == [every[3], every[2]], "the worst of each kind"
    assert lag.of_consumers(every) == [every[1], every[3]]


def test_message_whose_lease_ended_waits_again_and_one_that_is_put_off_does_not() -> None:
    play = Play()
    group = play.make_group()
    play.join(group, 2)
    play.schedule("s", 0, 0)
    play.settle()
    play.nack("nack", play.deliveries[0], [0], delay_ms=60_000)
    play.settle()
    assert lags(play, group) == (0, 0)
    play.wait(LEASE_MS + 1)
    play.settle()
    assert lags(play, group) == (LEASE_MS + 1, LEASE_MS + 1), "the other one has come back"
    play.wait(60_000)
    play.join(group, 1)
    play.settle()
    waits, unacked = lags(play, group)
    assert waits == unacked == 61_000 + 1, "the one that was put off waits: the other is held"


def test_messages_that_were_put_off_by_the_last_consumer_wait_once_their_time_has_come() -> None:
    play = Play()
    group = play.make_group()
    consumer = play.join(group, 2)
    play.schedule("s", 0, 0)
    play.settle()
    play.nack("nack", play.deliveries[0], [0, 1], delay_ms=1_000)
    play.settle()
    play.leader.groups.leave(group, consumer)
    play.wait(999)
    assert lags(play, group) == (0, 999)
    play.wait(1)
    assert lags(play, group) == (1_000, 1_000)
    play.join(group, 2)
    play.settle()
    assert play.deliveries[-1].lease.offsets.tolist() == [0, 1]
    assert lags(play, group) == (0, 1_000)


def test_new_leader_knows_the_lag_of_a_group_that_nobody_consumes() -> None:
    play = Play()
    group = play.make_group()
    play.join(group)
    play.schedule("s", 0, 0)
    play.settle()
    play.ack("ack", play.deliveries[0], [0])
    play.settle()
    play.restart()
    play.wait(70)
    assert lags(play, group) == (70, 70)


def test_of_many_groups_some_are_looked_at_before_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag, "GROUPS_AT_ONCE", 1)
    play = Play()
    for name in ("g", "h", "i"):
        play.make_group(name)
    play.schedule("s", 0)
    play.settle()
    turns = 0

    async def look() -> list[lag.GroupLag]:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        found = await lag.of_groups(play.leader, play.now.clock_ms, unacked(play))
        beside.cancel()
        return found

    assert len(asyncio.run(look())) == 3
    assert turns == 3


def test_when_a_message_fired_is_known_without_its_page(tmp_path: Path) -> None:
    log, engine = Log(), engine_on(RealDisk(), tmp_path)
    entries = [log.begin_epoch(), log.topic("a"), log.create_group(1, "g")]
    for number in range(3):
        entries.append(log.schedule(part_of([(1, START_MS + 1, b"x")])))
        log.now_ms += 1_000
        entries.append(log.fire(START_MS + 1 + number))
    engine.raise_commit_index(entries[-1].index)
    engine.fold(entries)
    flush = engine.begin_flush()
    assert flush is not None
    flush.write()
    queue = engine_on(RealDisk(), tmp_path).machine.topic_by_name["a"].queue
    assert [block.page for block in queue.blocks] == [None]
    here = engine.machine.topic_by_name["a"].queue
    fired = [here.fired_at_ms(offset) for offset in range(3)]
    assert fired == [START_MS + 1_000, START_MS + 1_000, START_MS + 2_000]
    assert [queue.fired_at_ms(offset) for offset in range(3)] == [START_MS + 1_000] * 3


# ---- lateness


@pytest.mark.parametrize("late_ms", [0, 2, 3, 10, 299_999, 300_000, 300_001])
def test_lateness_is_counted_at_the_least_bound_that_holds_it(late_ms: int) -> None:
    table = Lateness()
    table.observe([7], [2], np.array([late_ms, late_ms], np.int64))
    at = next((n for n, bound in enumerate(BOUNDS_MS) if late_ms <= bound), len(BOUNDS_MS))
    counts, sum_ms = table.of(7)
    assert counts.tolist() == [2 if n == at else 0 for n in range(len(BOUNDS_MS) + 1)]
    assert sum_ms == 2 * late_ms
    assert not table.of(8).counts.any()


def test_topics_of_one_batch_are_told_apart() -> None:
    table = Lateness()
    table.observe([1, 500], [2, 1], np.array([1, 3, 20], np.int64))
    assert [table.of(topic).sum_ms for topic in (1, 2, 500)] == [4, 0, 20]
    table.observe([], [], np.zeros(0, np.int64))
    table.observe([1], [0], np.zeros(0, np.int64))
    assert table.of(1).counts.sum() == 2


def test_topics_are_counted_up_to_a_limit_however_many_were_deleted_before() -> None:
    table, one = Lateness(), np.ones(1, np.int64)
    for topic in range(1, 3 * TOPICS_MAX):
        table.observe([topic], [1], topic * one)
        table.forget(topic - 2)
    assert [table.of(topic).sum_ms for topic in range(topic - 3, topic + 1)] == [
        0,
        0,
        topic - 1,
        topic,
    ]
    assert len(table._sums) <= 64
    many = range(topic + 1, topic + 2 + TOPICS_MAX)
    table.observe(many, [1] * len(many), np.full(len(many), 9))
    counted = [table.of(each).sum_ms == 9 for each in many]
    assert counted == [True] * (TOPICS_MAX - 2) + [False] * 3
    table.forget(topic)
    table.observe(many[-1:], [1], one)
    assert table.of(many[-1]).sum_ms == 1
