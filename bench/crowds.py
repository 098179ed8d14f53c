"""More crowds for P9 (bench/step_times.py).

leases      10,000 groups hold a message each, and all leases end at one instant
transfer    10,000 groups hold a message each, and the leadership is transferred
policies    the cluster's policy pauses and resumes 10,000 topics, sets retention and time to
            live
one_ms      1,000,000 timers, in memory, are due at one millisecond
grown       2,000,000 timers are scheduled between two flushes
producers   100,000 producers send a request each, and all expire at one checkpoint
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bench.loop import PORTION, START_MS, TOPICS, Loop
from bench.measure import check
from timer.entries.payloads import CreateGroup, GroupSettings, GroupStart
from timer.entries.policies import Scope, ScopePolicy
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.model.units import ProducerId, TopicId
from timer.pending.memory.memtable import CAPACITY
from timer.state.producers import IDLE_MS_MAX

CLUSTER: Final = Scope("")
LEASE_MS: Final = 30_000
PRODUCERS: Final = 100_000


def add_groups(loop: Loop, topics: Sequence[TopicId]) -> list[Delivery]:
    """Add a group with a consumer to each topic. Return the list that will hold deliveries."""
    made, got = list[Any](), list[Delivery]()
    for number, topic in enumerate(topics):
        settings = GroupSettings(lease_ms=LEASE_MS)
        loop.leader.groups.create(
            CreateGroup(topic, "g", GroupStart.EARLIEST, settings), made.append
        )
        if number % PORTION == PORTION - 1:
            loop.settle()
    loop.settle()
    for group in made:
        consumer = ConsumerStream("c", LEASE_MS, got.append)
        loop.leader.groups.join(group, consumer)
        loop.leader.groups.credit(group, consumer, 10)
    loop.settle()
    return got


def _lease_one_each(loop: Loop) -> list[Delivery]:
    """Let 10,000 groups hold a message each. Return the list that has their deliveries."""
    topics = loop.topics(TOPICS)
    got = add_groups(loop, topics)
    loop.schedule(topics, np.full(TOPICS, 60_000))
    loop.wait(60_001)
    loop.settle()
    check(len(got) == TOPICS, f"{len(got)} of {TOPICS} were delivered")
    loop.forget()
    return got


def leases(loop: Loop, scale: int) -> None:
    """10,000 groups hold a message each; all leases end at one instant."""
    del scale
    got = _lease_one_each(loop)
    loop.wait(60_001 + LEASE_MS)
    loop.settle()
    check(len(got) == 2 * TOPICS, f"{len(got) - TOPICS} of {TOPICS} were delivered again")
    loop.checkpoint()


def transfer(loop: Loop, scale: int) -> None:
    """10,000 groups hold a message each; the leadership is transferred."""
    del scale
    got = _lease_one_each(loop)
    while loop.step("hand_over", lambda: loop.leader.hand_over(loop.now)):
        loop.fold()
    loop.fold()
    known = {int(each.group.attempts(each.lease.offsets)[0]) for each in got}
    check(known == {2}, f"after the transfer, messages have the attempts {known}")


def policies(loop: Loop, scale: int) -> None:
    """The cluster's policy pauses 10,000 topics that hold a timer each, and resumes them."""
    del scale
    topics = loop.topics(TOPICS)
    add_groups(loop, topics)
    loop.schedule(topics, np.full(TOPICS, 60_000))
    loop.forget()
    for said, at_ms in (
        (ScopePolicy(retention_ms=60_000), 10_000),
        (ScopePolicy(paused=True), 50_000),
        (ScopePolicy(ttl_ms=600_000), 60_001),
        (ScopePolicy(paused=False), 70_000),
    ):
        loop.wait(at_ms)
        loop.settle()
        loop.step("alter", lambda said=said: loop.alter(CLUSTER, said))  # type: ignore[misc]
        loop.settle()
        loop.checkpoint()
    fired = loop.engine.machine.counts.fired
    check(fired == TOPICS, f"{fired} of {TOPICS} fired")


def one_ms(loop: Loop, scale: int) -> None:
    """A million timers, in memory, are due at one millisecond."""
    [topic] = loop.topics(1)
    count = 1_000_000 // scale
    loop.forget()
    loop.schedule([topic], np.full(count, 600_000))
    for now_ms in range(0, 600_000, 3_000):  # at the interval of the leader's checkpoints
        loop.wait(now_ms + 1_000)
        loop.settle()
        loop.checkpoint()
    loop.wait(600_001)
    loop.settle()
    loop.checkpoint()
    fired = loop.engine.machine.counts.fired
    check(fired == count, f"{fired} of {count} fired")


def grown(loop: Loop, scale: int) -> None:
    """Twice as many timers as the memtable has room for at first are scheduled."""
    [topic] = loop.topics(1)
    count = 2 * CAPACITY // scale
    loop.forget()
    loop.schedule([topic], np.full(count, 600_000))
    check(loop.engine.machine.store.memtable.count == count, "the memtable lacks rows")


def producers(loop: Loop, scale: int) -> None:
    """100,000 producers send a request each, are written by a flush, and expire."""
    count = PRODUCERS // scale
    [topic] = loop.topics(1)
    ids: list[Any] = []
    loop.forget()
    for number in range(count):
        token = number.to_bytes(16, "little")
        loop.leader.register(token, ProducerId(1 + number), loop.now, ids.append)
        if number % PORTION == PORTION - 1:
            loop.settle()
    loop.settle()
    due_ms = np.array([START_MS + 600_000], np.int64)
    for number, producer in enumerate(ids):
        loop.request(due_ms, np.array([topic], np.uint32), producer, 1)
        if number % PORTION == PORTION - 1:
            loop.settle()
    loop.settle()
    loop.checkpoint()
    loop.flush()
    check(len(loop.engine.machine.producers) == count, "producers are missing")
    loop.wait(2 * IDLE_MS_MAX)
    for _ in itertools.takewhile(lambda _: len(loop.engine.machine.producers), range(count)):
        loop.settle()
        loop.checkpoint()
    check(not len(loop.engine.machine.producers), "producers have not expired")
    loop.settle()
