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

from tests.timer.machine_world import World, begun, cancel, schedule, step_of
from tests.timer.machines import START_MS, Log, catch_up, engine_on, part_of, queue_of, u64
from timer.entries.entry_frame import Entry
from timer.entries.payloads import FIRE_ROWS_MAX, EpochStart, GroupStart, Op
from timer.model.units import GroupId, TopicId
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    NOT_FOUND,
    Checkpoint,
)
from timer.state.cancel_outcomes import HORIZON_MS
from timer.state.machine import FIRE_MARK_MS

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
        assert digests[what] == machine.recomputed_digest(), what
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
