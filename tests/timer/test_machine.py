"""The machine: random logs against a naive model, on replicas with all allowed differences.

One replica leads, one follows, and one is flushed, merged, crashed and restarted at random points.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timer.machine_world import World, begun, cancel, fired, schedule, step_of
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, part_of, queue_of, u64
from timer.entries.entry_frame import Entry
from timer.entries.payloads import FIRE_ROWS_MAX, EpochStart, GroupStart, Op
from timer.model.units import GroupId, TopicId, UnixMs
from timer.ready.queue import MARK_MS
from timer.ready.topic import RETENTION_MS
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    NOT_FOUND,
    Checkpoint,
)
from timer.state.cancel_outcomes import HORIZON_MS
from timer.state.machine import FIRE_MARK_MS, Machine
from timer.state.producers import IDLE_MS_MAX

steps_of = st.lists(step_of, min_size=20, max_size=50)


def play(steps: list[tuple[Any, ...]]) -> None:
    """Play a program on two replicas and a model, which are compared at its end."""
    world = World()
    for step, *values in steps:
        step(world, *values)
    world.check_end()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(steps_of)
def test_replicas_and_model_agree_whatever_is_flushed_merged_or_restarted(
    steps: list[tuple[Any, ...]],
) -> None:
    play(steps)


@pytest.mark.long  # a program takes a tenth of a second
@settings(derandomize=True, deadline=None, max_examples=250)
@given(steps_of)
def test_replicas_and_model_agree_in_many_programs(steps: list[tuple[Any, ...]]) -> None:
    play(steps)


# ---- single cases

Play = Callable[[], tuple[Machine, Log]]


def test_nothing_fires_before_its_due_and_a_limit_leaves_the_rest_in_order() -> None:
    # E.1
    machine, log = begun()
    schedule(machine, log, 20, 10, 30, 50, 40)
    assert fired(machine, log, 9) == []
    assert fired(machine, log, 15) == [10]
    assert fired(machine, log, 60, rows_max=1) == [20]
    assert fired(machine, log, 60, rows_max=1) == [30]
    assert fired(machine, log, 60) == [40, 50]
    assert fired(machine, log, 60) == []


def test_due_time_exactly_at_the_read_time_fires_and_a_millisecond_later_does_not() -> None:
    # E.2
    machine, log = begun()
    schedule(machine, log, 100, 101)
    assert fired(machine, log, 99) == []
    assert fired(machine, log, 100) == [100]
    assert fired(machine, log, 101) == [101]


@pytest.mark.parametrize("leads", [True, False])
def test_a_thousand_messages_of_one_due_fire_in_the_order_they_were_scheduled(leads: bool) -> None:
    # E.3
    machine, log = begun(leads=leads)
    for _ in range(10):
        schedule(machine, log, *[5000] * 100)
    for limit in (1, 333, 16_384):
        machine.apply(log.fire(5000, limit))
    assert [seq for _, seq, _ in queue_of(machine, 1)] == list(range(1, 1001))


def test_immediate_messages_among_delayed_ones_come_first_in_order() -> None:
    # E.4
    machine, log = begun()
    machine.apply(log.fire(1000))
    schedule(machine, log, 2000, 1000, 3000, 7, 1001, 999)
    assert [message[2] for message in queue_of(machine, 1)] == [b"p1000", b"p7", b"p999"]
    assert fired(machine, log, 5000) == [1001, 2000, 3000]


def test_cancel_tells_the_truth_before_while_and_after_it_fires() -> None:
    # E.5
    machine, log = begun()
    one, two, three = schedule(machine, log, 100, 100, 200)
    unborn = (300, 4)
    assert cancel(machine, log, unborn) == [NOT_FOUND]
    schedule(machine, log, 300)
    assert cancel(machine, log, two, two, unborn) == [CANCELLED, ALREADY_CANCELLED, CANCELLED]
    assert fired(machine, log, 100) == [100]
    assert cancel(machine, log, one, two, three, (0, 0), (10, 99)) == [
        ALREADY_FIRED,
        ALREADY_CANCELLED,
        CANCELLED,
        NOT_FOUND,
        NOT_FOUND,
    ]
    assert fired(machine, log, 1000) == []


def test_cancel_between_two_limited_fires_is_of_what_has_not_fired_yet() -> None:
    # E.5: the read time stands at the due of both.
    machine, log = begun()
    one, two, three = schedule(machine, log, 100, 100, 100)
    assert fired(machine, log, 500, rows_max=1) == [100]
    assert machine.last_read_time_ms == 100
    assert cancel(machine, log, one, two) == [ALREADY_FIRED, CANCELLED]
    assert fired(machine, log, 500) == [100]
    assert cancel(machine, log, three) == [ALREADY_FIRED]


def test_cancel_of_one_of_many_due_in_the_same_tick_leaves_the_others_alone() -> None:
    # E.6
    machine, log = begun()
    timers = schedule(machine, log, *[700] * 50)
    assert cancel(machine, log, timers[20]) == [CANCELLED]
    machine.apply(log.fire(700))
    assert [seq for _, seq, _ in queue_of(machine, 1)] == [
        s for _, s in timers if s != timers[20][1]
    ]


@pytest.mark.parametrize("where", ["memtable", "frozen memtable", "run", "merged run", "window"])
def test_cancel_finds_its_timer_wherever_it_lies(where: str) -> None:
    # E.5
    world = World()
    machine, log = world.engine.machine, world.log
    log.entries.clear()
    machine.apply(log.topic("a"))
    near, far = schedule(machine, log, START_MS + 100, START_MS + 10**7)
    if where == "frozen memtable":
        assert world.engine.begin_flush() is not None
    elif where != "memtable":
        flush(world.engine)
    if where == "merged run":
        for _ in range(7):
            schedule(machine, log, START_MS + 5)
            flush(world.engine)
        merge = machine.store.begin_merge()
        assert merge is not None
        machine.store.install_merge(merge, machine.store.write_merge(merge))
    if where == "window":
        machine.store.lead()
        machine.store.preload(UnixMs(START_MS))
    assert cancel(machine, log, near, far, near) == [CANCELLED, CANCELLED, ALREADY_CANCELLED]
    machine.apply(log.fire(START_MS + 10**8))
    assert {seq for _, seq, _ in queue_of(machine, 1)}.isdisjoint({near[1], far[1]})
    machine.apply(log.checkpoint())
    assert machine.counts.cancelled == 2


def test_more_than_ten_thousand_holes_among_acks_survive_a_crash() -> None:
    # E.8
    world = World()
    log = world.log
    count = 30_000
    log.schedule(part_of([(1, 5, b"")] * count))
    for _ in range(0, count, FIRE_ROWS_MAX):
        log.fire(10)
    log.create_group(1, "g")
    log.op(Op.RESERVE, 1, 1, [count])
    log.op(Op.ACK, 1, 1, range(1, count, 2))
    catch_up(world.engine, log)
    flush = world.engine.begin_flush()
    assert flush is not None
    flush.write()
    world.disk.crash(random.Random(1))
    engine = engine_on(world.disk)
    assert engine.machine.applied_index == len(log.entries)
    log.begin_epoch()
    catch_up(engine, log)
    group = engine.machine.group(TopicId(1), GroupId(1))
    offsets = u64(range(count))
    assert np.flatnonzero(~group.is_acked(offsets)).tolist() == list(range(0, count, 2))
    assert group.attempts(offsets[::2]).tolist() == [2] * (count // 2)


def test_everything_overdue_fires_in_order_once_after_a_long_stop() -> None:
    # E.9: longer than the wheel's window, with rows in runs and in the log.
    world = World()
    log = world.log
    dues = [START_MS + 1000 * (at * 7919 % 500) for at in range(500)]
    log.schedule(part_of([(1, due, b"r") for due in dues[:400]]))
    catch_up(world.engine, log)
    flush = world.engine.begin_flush()
    assert flush is not None
    flush.write()
    log.schedule(part_of([(1, due, b"r") for due in dues[400:]]))
    world.disk.crash(random.Random(2))
    engine = engine_on(world.disk)
    catch_up(engine, log)
    engine.machine.store.lead()
    log.now_ms += 3_600_000
    while engine.machine.apply(log.fire(log.now_ms, 77)).limited:  # type: ignore[union-attr]
        pass
    machine = engine.machine
    seqs = [seq for _, seq, _ in queue_of(machine, 1)]
    assert seqs == [seq for _, seq in sorted((due, at) for at, due in enumerate(dues, start=1))]


def test_outcome_of_a_fired_timer_is_told_for_the_horizon_and_forgotten_later() -> None:
    machine, log = begun()
    (timer,) = schedule(machine, log, START_MS)
    log.now_ms += 1000
    machine.apply(log.fire(log.now_ms))
    end_ms = log.now_ms
    while log.now_ms < end_ms + HORIZON_MS:
        machine.apply(log.fire(log.now_ms))
        machine.apply(log.checkpoint())
        assert cancel(machine, log, timer) == [ALREADY_FIRED], log.now_ms - end_ms
        log.now_ms += 3000
    log.now_ms += FIRE_MARK_MS
    machine.apply(log.fire(log.now_ms))
    assert cancel(machine, log, timer) == [NOT_FOUND]
    assert len(machine.fire_marks) <= HORIZON_MS // FIRE_MARK_MS + 3


def test_cancel_is_remembered_until_its_due_has_passed_by_the_horizon() -> None:
    machine, log = begun()
    (timer,) = schedule(machine, log, START_MS + 2 * HORIZON_MS)
    assert cancel(machine, log, timer) == [CANCELLED]
    answers: list[int] = []
    for _ in range(80):
        log.now_ms += HORIZON_MS // 20
        machine.apply(log.fire(log.now_ms))
        machine.apply(log.checkpoint())
        answers += cancel(machine, log, timer)
    kept = 2 * 20 + 20  # to its due, and for the horizon
    assert set(answers[:kept]) == {ALREADY_CANCELLED}
    assert answers[-1] == NOT_FOUND
    assert set(answers) == {ALREADY_CANCELLED, NOT_FOUND}


def test_retried_schedule_is_one_timer_also_after_a_restart() -> None:
    # P2
    world = World()
    log = world.log
    request = part_of([(1, START_MS + 50, b"once")], producer_id=1, sequence=1)
    log.schedule(request, request)
    catch_up(world.engine, log)
    flush = world.engine.begin_flush()
    assert flush is not None
    flush.write()
    engine = engine_on(world.disk)
    log.schedule(request)
    log.fire(START_MS + 100)
    catch_up(engine, log)
    assert [message[2] for message in queue_of(engine.machine, 1)] == [b"once"]
    assert engine.machine.counts.scheduled == 1


def test_topic_without_groups_keeps_what_fired_for_the_retention_time() -> None:
    machine, log = begun("a", "b")
    schedule(machine, log, 1)
    schedule(machine, log, 1, topic=2)
    machine.apply(log.create_group(2, "g"))
    machine.apply(log.fire(5))
    log.now_ms += RETENTION_MS
    machine.apply(log.checkpoint())
    assert len(queue_of(machine, 1)) == 1
    log.now_ms += MARK_MS
    machine.apply(log.checkpoint())
    assert len(queue_of(machine, 1)) == 0
    assert len(queue_of(machine, 2)) == 1


def test_queue_keeps_what_one_of_its_groups_has_not_acked() -> None:
    machine, log = begun()
    for at in range(4):
        schedule(machine, log, 1 + at)
        machine.apply(log.fire(1 + at))
    for name in ("g", "h"):
        machine.apply(log.create_group(1, name))
    for group in (1, 2):
        machine.apply(log.op(Op.RESERVE, 1, group, [4]))
    machine.apply(log.op(Op.ACK, 1, 1, [0, 1, 2]))
    assert len(queue_of(machine, 1)) == 4
    machine.apply(log.op(Op.ACK, 1, 2, [0, 1, 3]))
    assert [message[0] for message in queue_of(machine, 1)] == [2, 3]


def test_created_again_topics_producers_and_groups_are_the_same_ones() -> None:
    machine, log = begun("a", "b", "a")
    assert sorted(machine.topics) == [1, 2]
    assert [machine.apply(log.producer(token)) for token in (b"x", b"y", b"x")] == [1, 2, 1]
    for topic, name in ((1, "g"), (2, "g"), (1, "g"), (1, "h")):
        machine.apply(log.create_group(topic, name))
    groups = [
        (g.topic, g.name, g.group_id) for t in machine.topics.values() for g in t.groups.values()
    ]
    assert groups == [(1, "g", 1), (1, "h", 3), (2, "g", 2)]


def test_group_at_latest_gets_only_what_fires_after_it() -> None:
    machine, log = begun()
    schedule(machine, log, 1, 2)
    machine.apply(log.fire(5))
    machine.apply(log.create_group(1, "late", GroupStart.LATEST))
    machine.apply(log.create_group(1, "early"))
    cursors = {group.name: group.cursor for group in machine.topics[TopicId(1)].groups.values()}
    assert cursors == {"late": 2, "early": 0}


def test_idle_producers_expire_at_a_checkpoint_by_the_time_of_the_log() -> None:
    machine, log = begun()
    machine.apply(log.producer(b"x"))
    log.now_ms += IDLE_MS_MAX + 1
    machine.apply(log.fire(log.now_ms))
    assert len(machine.producers) == 1
    machine.apply(log.checkpoint())
    assert len(machine.producers) == 0


def test_epoch_says_who_votes_and_never_lowers_the_level() -> None:
    machine, log = begun()
    for level in (2, 1):
        assert isinstance(start := machine.apply(log.begin_epoch(level)), EpochStart)
        assert (machine.voters, machine.level) == (start.voters, 2) == ((1, 2, 3), 2)


def test_checkpoint_says_where_the_state_is() -> None:
    machine, log = begun("a", "b")
    schedule(machine, log, 1, 2)
    machine.apply(log.fire(5))
    checkpoint = machine.apply(log.checkpoint())
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint == machine.checkpoint
    assert checkpoint.queue_offsets == {"a": 2, "b": 0}
    assert (checkpoint.index, checkpoint.last_read_time_ms) == (len(log.entries), 5)
    assert checkpoint.digest == machine.digest()


CHANGES: dict[str, Callable[[Log], Entry]] = {
    "another due": lambda log: log.schedule(part_of([(1, 501, b"x")])),
    "another size": lambda log: log.schedule(part_of([(1, 500, b"xy")])),
    "another topic": lambda log: log.schedule(part_of([(2, 500, b"x")])),
    "immediate": lambda log: log.schedule(part_of([(1, 3, b"x")])),
    "a producer's": lambda log: log.schedule(part_of([(1, 500, b"x")], 1, 1)),
    "a cancel": lambda log: log.cancel([(400, 2)]),
    "another cancel": lambda log: log.cancel([(300, 1)]),
    "a fire": lambda log: log.fire(300),
    "another fire": lambda log: log.fire(400),
    "an empty fire": lambda log: log.fire(299),
    "an ack": lambda log: log.op(Op.ACK, 1, 1, [0]),
    "another ack": lambda log: log.op(Op.ACK, 1, 1, [1]),
    "an ended lease": lambda log: log.op(Op.ENDED, 1, 1, [0]),
    "another ended lease": lambda log: log.op(Op.ENDED, 1, 1, [1]),
    "a nack": lambda log: log.nack(1, 1, [0], 5),
    "a later nack": lambda log: log.nack(1, 1, [0], 6),
    "another nack": lambda log: log.nack(1, 1, [1], 5),
    "an altered group": lambda log: log.alter(1, 1, max_attempts=3),
    "a group altered otherwise": lambda log: log.alter(1, 1, backoff_ms_min=3),
    "a dead-letter topic": lambda log: log.alter(1, 1, dead_letter_topic="c"),
    "a move": lambda log: log.move(1, 1, [0], "c", "h"),
    "a move elsewhere": lambda log: log.move(1, 1, [0], "b", "h"),
    "another move": lambda log: log.move(1, 1, [1], "c", "h"),
    "a reserve": lambda log: log.op(Op.RESERVE, 1, 1, [500]),
    "a topic": lambda log: log.topic("c"),
    "another name": lambda log: log.topic("d"),
    "a group": lambda log: log.create_group(1, "h"),
    "a producer": lambda log: log.producer(b"z"),
    "an epoch": lambda log: log.begin_epoch(),
    "nothing": lambda log: log.checkpoint(),
}


def test_digest_tells_any_two_changes_of_state_apart() -> None:
    # P6
    digests: dict[str, str] = {}
    for what, change in CHANGES.items():
        machine, log = begun("a", "b")
        machine.apply(log.producer(b"x"))
        schedule(machine, log, 300, 400, 1, 2)
        machine.apply(log.fire(5))
        machine.apply(log.create_group(1, "g"))
        machine.apply(log.op(Op.RESERVE, 1, 1, [2]))
        machine.digest()  # whose parts that of the change goes on from
        machine.apply(change(log))
        digests[what] = machine.digest()
        assert digests[what] == machine.digest_anew(), what
    assert len(set(digests.values())) == len(digests), digests


def test_digest_remembers_the_order_of_messages_fired_long_ago() -> None:
    # P6
    digests = set()
    for order in ((1, 2), (2, 1)):
        machine, log = begun()
        for due in order:
            schedule(machine, log, due)
        machine.apply(log.fire(5))
        machine.apply(log.schedule(part_of([(1, 4, b"p4")] * 100)))
        digests.add(machine.topics[TopicId(1)].queue.chain)
    assert len(digests) == 2


@pytest.mark.parametrize(
    "jump", [{"index": 2}, {"index": -1}, {"time_ms": -1}, {"epoch": -1}], ids=str
)
def test_entry_out_of_order_is_our_bug(jump: dict[str, int]) -> None:
    machine, log = begun()
    entry = log.checkpoint()
    values = {"index": entry.index, "time_ms": entry.time_ms, "epoch": entry.epoch}
    values |= {name: values[name] + by for name, by in jump.items()}
    with pytest.raises(AssertionError):
        machine.apply(Entry(entry.kind, payload=entry.payload, **values))  # type: ignore[arg-type]
    machine.apply(entry)
