"""The digest: two states that differ in any one field have different digests."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import Log, machine_on, part_of, u64
from timer.entries.payloads import GroupSettings, Op
from timer.entries.policies import Scope, ScopePolicy
from timer.model.columns import RequestId
from timer.model.firing_order import Position
from timer.model.units import ProducerId, ReplicaId, Seq, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic, TopicRelease
from timer.state.apply_results import ALREADY_CANCELLED, DROPPED
from timer.state.machine import Machine
from timer.state.producers import RequestAnswer

DUE_MS = 10_000_000_000_000


def busy() -> Machine:
    """Return a machine with state of each kind."""
    machine, log = machine_on(SimDisk(), leads=False), Log()
    entries = [log.begin_epoch(), log.topic("a"), log.producer(b"p")]
    entries += [log.create_group(1, "g"), log.schedule(part_of([(1, DUE_MS, b"far")]))]
    entries += [log.schedule(part_of([(1, log.now_ms, b"x")] * 4)), log.fire(log.now_ms)]
    entries += [log.op(Op.RESERVE, 1, 1, [4]), log.op(Op.ACK, 1, 1, [2])]
    for entry in entries:
        machine.apply(entry)
    return machine


def topic_of(machine: Machine) -> Topic:
    return machine.topics[TopicId(1)]


def group_of(machine: Machine) -> Group:
    return topic_of(machine).groups["g"]


def plus_one(of: Callable[[Machine], object], name: str) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        owner = of(machine)
        setattr(owner, name, getattr(owner, name) + 1)

    return change


MACHINE = (
    *("applied_index", "last_read_time_ms", "next_seq", "next_topic_id", "next_group_id"),
    "topic_deleted_in",
)
COUNTS = ("scheduled", "fired", "cancelled", "dropped")
TOPIC = ("deleted_in", "expired", "pending_sum", "pending_bytes", "held", "held_bytes")
QUEUE = ("begin", "end", "chain")
GROUP = (
    *("group_id", "cursor", "reserved", "since_epoch", "delivered_to", "ack_sum", "acked_count"),
    *("ended_sum", "recalled_sum", "later_sum", "expired", "expired_to", "moved_sum"),
)
PLAIN: dict[str, Callable[[Machine], None]] = {
    **{f"machine {name}": plus_one(lambda m: m, name) for name in MACHINE},
    **{f"counts {name}": plus_one(lambda m: m.counts, name) for name in COUNTS},
    **{f"topic {name}": plus_one(topic_of, name) for name in TOPIC},
    **{f"topic counts {name}": plus_one(lambda m: topic_of(m).counts, name) for name in COUNTS},
    **{f"queue {name}": plus_one(lambda m: topic_of(m).queue, name) for name in QUEUE},
    **{f"group {name}": plus_one(group_of, name) for name in GROUP},
}


def named(machine: Machine) -> None:
    request = RequestId(b"r", 1, UnixMs(9))
    machine.requests.accept(request, RequestAnswer(0, Seq(1), np.zeros(1, np.int64)), UnixMs(0))


def ended(machine: Machine) -> None:
    machine.producers.end(ProducerId(1))


def used(machine: Machine) -> None:
    machine.producers.accept(
        ProducerId(1), RequestAnswer(1, Seq(1), np.zeros(1, np.int64)), machine.applied_time_ms
    )


def released(machine: Machine) -> None:
    topic_of(machine).release = TopicRelease("all", UnixMs(1), Seq(1), None, is_waiting=False)


def released_further(machine: Machine) -> None:
    topic_of(machine).release = TopicRelease(
        "all", UnixMs(1), Seq(1), Position(1, Seq(1)), is_waiting=False
    )


OTHERS: dict[str, Callable[[Machine], None]] = {
    "voters": lambda m: setattr(m, "voters", (*m.voters, ReplicaId(9))),
    "a mark of what fired": lambda m: setattr(m, "fire_marks", deque([*m.fire_marks, (1, 1)])),
    "a policy": lambda m: setattr(
        m, "policies", m.policies.with_policy(Scope("", TopicId(1)), ScopePolicy(ttl_ms=7))
    ),
    "a cancel": lambda m: m.outcomes.add(ALREADY_CANCELLED, u64([1]), np.array([1])),
    "a dropped timer": lambda m: m.outcomes.add(DROPPED, u64([1]), np.array([1])),
    "a sweep": lambda m: setattr(m, "sweep_position", Position(1, Seq(2))),
    "a sweep that is further": lambda m: setattr(m, "sweep_position", Position(1, Seq(3))),
    "a request's id": named,
    "a producer": ended,
    "a producer's request": used,
    "a release": released,
    "a release that is further": released_further,
    "a topic": lambda m: m.restore_topics([Topic(TopicId(2), "b", topic_of(m).queue)]),
    "a topic's name": lambda m: setattr(topic_of(m), "name", "c"),
    "a group's name": lambda m: setattr(group_of(m), "name", "h"),
    "a group's settings": lambda m: setattr(group_of(m), "settings", GroupSettings(lease_ms=7)),
    "a mark of a failover": lambda m: group_of(m).delivered_ends.append(3),
}
CHANGES = PLAIN | OTHERS


def test_states_that_differ_in_one_thing_have_different_digests() -> None:
    found = {"nothing": busy().recomputed_digest()}
    assert busy().recomputed_digest() == found["nothing"]
    for name, change in CHANGES.items():
        machine = busy()
        change(machine)
        found[name] = machine.recomputed_digest()
    places: dict[str, list[str]] = {}
    for name, digest in found.items():
        places.setdefault(digest, []).append(name)
    assert [names for names in places.values() if len(names) > 1] == []


@pytest.mark.parametrize("by_ms", [1, 1 << 20])
def test_row_that_is_due_at_another_time_is_another_state(by_ms: int) -> None:
    digests = []
    for due_ms in (DUE_MS, DUE_MS + by_ms):
        machine, log = machine_on(SimDisk(), leads=False), Log()
        for entry in (log.begin_epoch(), log.topic("a"), log.schedule(part_of([(1, due_ms, b"")]))):
            machine.apply(entry)
        digests.append(machine.recomputed_digest())
    assert digests[0] != digests[1]
