"""Retention of messages that all groups of a topic have acked, against a naive model."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import (
    START_MS,
    Log,
    catch_up,
    engine_on,
    flush,
    machine_on,
    part_of,
    state_of,
)
from timer.entries.payloads import GroupStart, Op
from timer.entries.policies import CLUSTER, Scope
from timer.model.units import LogIndex, TopicId, UnixMs
from timer.ready.queue import INTERVAL_MS
from timer.ready.topic import INTERVALS, RETENTION_MS
from timer.state.machine import Machine
from timer.state.retention import TOPICS_MAX

HOUR_MS = 3_600_000
TOPIC = Scope("", TopicId(1))


@dataclass
class World:
    """A machine with one topic, and the times of firing of its messages."""

    log: Log = field(default_factory=Log)
    machine: Machine = field(default_factory=lambda: machine_on(SimDisk(), leads=False))
    fired_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log.topic("ns/t")
        self.catch_up()

    def catch_up(self) -> None:
        for entry in self.log.entries[self.machine.applied_index :]:
            self.machine.apply(entry)

    def fire(self, count: int = 1) -> None:
        self.log.schedule(part_of([(1, START_MS, b"m")] * count))
        self.log.fire(self.log.now_ms)
        self.fired_at += [self.log.now_ms] * count
        self.catch_up()

    def group(self, name: str, start: GroupStart = GroupStart.EARLIEST) -> int:
        self.log.create_group(1, name, start)
        self.catch_up()
        group = self.topic.groups[name]
        self.log.op(Op.RESERVE, 1, group.group_id, [1 << 10])
        self.catch_up()
        return int(group.group_id)

    def ack(self, group_id: int, below: int) -> None:
        self.log.op(Op.ACK, 1, group_id, range(below))
        self.catch_up()

    def checkpoint(self, after_ms: int = 0) -> None:
        self.log.now_ms += after_ms
        self.log.checkpoint()
        self.catch_up()

    def say(self, scope: Scope = TOPIC, **said: int) -> None:
        self.log.policy(scope, **said)
        self.catch_up()

    @property
    def topic(self):  # type: ignore[no-untyped-def]
        return self.machine.topics[TopicId(1)]


def test_acked_message_is_kept_for_the_retention_and_goes_with_a_checkpoint() -> None:
    world = World()
    world.say(retention_ms=HOUR_MS)
    group = world.group("g")
    world.fire(2)
    world.ack(group, 2)
    assert (world.topic.queue.begin, world.topic.ready) == (0, 0)
    world.checkpoint(HOUR_MS)
    assert world.topic.queue.begin == 0, "at least so long"
    world.log.now_ms += HOUR_MS // INTERVALS + 1
    world.catch_up()
    assert world.topic.queue.begin == 0
    world.checkpoint()
    assert world.topic.queue.begin == 2


def test_shorter_retention_is_of_what_fired_last_before_it_too() -> None:
    world = World()
    world.say(retention_ms=100 * 365 * 24 * HOUR_MS)
    group = world.group("g")
    world.fire(2)
    world.ack(group, 2)
    world.say(retention_ms=60_000)
    world.checkpoint(59_000)
    assert world.topic.queue.begin == 0, "at least so long"
    world.checkpoint(3_000)
    assert world.topic.queue.begin == 2


def test_topic_that_waits_for_an_ack_is_not_looked_at_until_it_changes() -> None:
    world = World()
    world.say(retention_ms=60_000)
    group = world.group("g")
    world.fire(2)
    world.checkpoint(HOUR_MS)
    let_go = world.machine._retention.forget_due
    assert [*let_go(world.machine.topics, UnixMs(world.log.now_ms + HOUR_MS))] == []
    world.ack(group, 1)
    assert [*let_go(world.machine.topics, UnixMs(world.log.now_ms))] == [1]


def test_topic_whose_messages_all_went_once_lets_go_of_later_ones_in_their_time() -> None:
    world = World()
    world.say(retention_ms=HOUR_MS)
    world.fire(2)
    world.checkpoint(HOUR_MS + HOUR_MS // INTERVALS)
    assert world.topic.queue.begin == 2
    world.log.now_ms += HOUR_MS
    world.fire()
    for _ in range(3):
        world.checkpoint(1_000)
        let_go = world.machine._retention.forget_due
        assert [*let_go(world.machine.topics, UnixMs(world.log.now_ms))] == []
    world.checkpoint(HOUR_MS)
    assert world.topic.queue.begin == 3


def test_checkpoint_lets_so_many_topics_go_and_the_next_one_others() -> None:
    log, machine = Log(), machine_on(SimDisk(), leads=False)
    count = TOPICS_MAX + 10
    for number in range(count):
        log.topic(f"t{number}")
    log.schedule(part_of([(topic, START_MS, b"m") for topic in range(1, count + 1)]))
    log.fire(log.now_ms)
    kept = []
    for after_ms in (0, 2 * RETENTION_MS, 1, 1):
        log.now_ms += after_ms
        log.checkpoint()
        for entry in log.entries[machine.applied_index :]:
            machine.apply(entry)
        kept.append(sum(t.queue.end - t.queue.begin for t in machine.topics.values()))
    assert kept == [count, 10, 0, 0]


def test_new_group_begins_with_what_is_retained_and_a_sought_one_goes_back_to_it() -> None:
    world = World()
    world.say(retention_ms=HOUR_MS)
    group = world.group("g")
    world.fire(3)
    world.ack(group, 3)
    world.checkpoint(1000)
    world.group("later")
    assert world.topic.groups["later"].cursor == 0
    world.log.op(Op.SEEK, 1, group, [1])
    world.catch_up()
    assert world.topic.groups["g"].cursor == 1
    assert world.topic.ready == 3


def test_retention_counts_without_groups_too_and_is_seven_days_if_nobody_says() -> None:
    world = World()
    world.fire()
    world.checkpoint(RETENTION_MS - 1)
    assert world.topic.queue.begin == 0
    world.say(retention_ms=HOUR_MS)
    world.fire()
    world.checkpoint(HOUR_MS)
    assert world.topic.queue.begin == 1
    world.checkpoint(HOUR_MS // INTERVALS)
    assert world.topic.queue.begin == 2


@pytest.mark.parametrize("scope", [CLUSTER, Scope("ns"), TOPIC])
def test_retention_is_that_of_the_narrowest_scope_that_says_something(scope: Scope) -> None:
    world = World()
    world.say(CLUSTER, retention_ms=1)
    world.say(scope, retention_ms=HOUR_MS)
    world.say(Scope("other"), retention_ms=2)
    assert world.topic.retention_ms == HOUR_MS
    world.log.topic("ns/new")
    world.catch_up()
    expected = 1 if scope == TOPIC else HOUR_MS
    assert world.machine.topic_by_name["ns/new"].retention_ms == expected


def test_unset_retention_lets_go_at_the_next_checkpoint() -> None:
    world = World()
    world.say(retention_ms=HOUR_MS)
    group = world.group("g")
    world.fire(2)
    world.ack(group, 1)
    world.say()
    assert world.topic.queue.begin == 0
    world.checkpoint()
    assert world.topic.queue.begin == 1
    world.ack(group, 2)
    assert world.topic.queue.begin == 2, "and as ever from then on"


def test_marks_of_a_retention_do_not_grow_with_it() -> None:
    world = World()
    world.say(retention_ms=10**12)
    for _ in range(20):
        world.fire()
        world.log.now_ms += 10**8
    assert len(world.topic.queue.intervals) <= 4


def test_retention_survives_a_restart() -> None:
    disk = SimDisk()
    engine, log = engine_on(disk), Log()
    log.topic("t")
    log.policy(TOPIC, retention_ms=HOUR_MS)
    log.create_group(1, "g")
    log.op(Op.RESERVE, 1, 1, [100])
    log.schedule(part_of([(1, START_MS, b"m")]))
    log.fire(START_MS)
    log.op(Op.ACK, 1, 1, [0])
    catch_up(engine, log)
    flush(engine)
    again = engine_on(disk)
    assert state_of(again.machine) == state_of(engine.machine)
    log.now_ms += HOUR_MS // 2
    log.checkpoint()
    log.now_ms += HOUR_MS
    log.checkpoint()
    begins = []
    for each in (engine, again):
        each.raise_commit_index(LogIndex(len(log.entries) - 1))
        each.fold(log.entries[each.machine.applied_index : -1])
        begins.append(each.machine.topics[TopicId(1)].queue.begin)
        catch_up(each, log)
        begins.append(each.machine.topics[TopicId(1)].queue.begin)
    assert begins == [0, 1, 0, 1]
    assert engine.machine.digest() == again.machine.digest()


steps_of = st.lists(
    st.one_of(
        st.tuples(st.just("fire"), st.integers(1, 3)),
        st.tuples(st.just("ack"), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 999, 5_000, INTERVAL_MS, RETENTION_MS])),
        st.tuples(st.just("policy"), st.sampled_from([None, 0, 1, 4_000, HOUR_MS, 10**12])),
        st.tuples(st.just("group"), st.integers(0, 1)),
        st.tuples(st.just("delete"), st.integers(0, 1)),
        st.tuples(st.just("checkpoint"), st.just(0)),
    ),
    max_size=30,
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(steps_of)
def test_nothing_is_let_go_that_is_unacked_or_retained_and_nothing_else_is_kept(
    steps: list[tuple[str, int | None]],
) -> None:
    world, retention_ms, begin = World(), None, 0
    for what, value in steps:
        groups = [*world.topic.groups.values()]
        if what == "fire":
            world.fire(value or 0)
        elif what == "ack" and groups:
            group_id = groups[(value or 0) % len(groups)].group_id
            world.ack(group_id, min(value or 0, world.topic.queue.end))
        elif what == "wait":
            world.log.now_ms += value or 0
        elif what == "policy":
            retention_ms = value
            world.say(TOPIC, **({} if value is None else {"retention_ms": value}))
        elif what == "group":
            world.group(f"g{value}")
        elif what == "delete" and f"g{value}" in world.topic.groups:
            world.log.op(Op.DELETE, 1, world.topic.groups[f"g{value}"].group_id, [])
            world.catch_up()
        elif what == "checkpoint":
            world.checkpoint()
        queue, groups = world.topic.queue, [*world.topic.groups.values()]
        least = min((group.cursor for group in groups), default=queue.end)
        kept_ms = retention_ms
        if kept_ms is None:
            kept_ms = 0 if groups else RETENTION_MS
        since = np.searchsorted(world.fired_at, world.log.now_ms - kept_ms)
        stretch = max(INTERVAL_MS, kept_ms // INTERVALS)
        latest = np.searchsorted(world.fired_at, world.log.now_ms - kept_ms - 2 * stretch)
        if queue.begin > begin:  # deleted messages stay deleted under a later policy
            assert queue.begin <= least
            if what != "ack":
                assert queue.begin <= since or (groups and not retention_ms)
        if what == "checkpoint":
            assert queue.begin >= min(least, int(latest))
            assert retention_ms or not groups or queue.begin == max(least, begin)
        begin = queue.begin
