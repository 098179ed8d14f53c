"""A table of leases that is played with, and the check of its bookkeeping."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tests.timer.machines import leases_of
from timer.entries.payloads import GroupOp, GroupSettings, Nack, Op
from timer.leader.groups import group_leases
from timer.leader.groups.group_leases import (
    ACCEPT,
    Leases,
)
from timer.leader.groups.lease_table import (
    ConsumerStream,
    Lease,
)
from timer.model.columns import ROW
from timer.model.units import Epoch, GroupId, LeaseId, MonoMs, QueueOffset, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue

LEASE_MS = 100


@dataclass
class Play:
    """One group with the leaders of successive epochs."""

    queue: Queue = field(default_factory=Queue)
    group: Group = field(
        default_factory=lambda: Group(
            group_id=GroupId(1),
            topic=TopicId(1),
            name="g",
            settings=GroupSettings(lease_ms=LEASE_MS),
            cursor=QueueOffset(0),
            reserved=QueueOffset(0),
        )
    )
    now_ms: int = 0
    epoch: int = 1
    log: list[GroupOp] = field(default_factory=list)
    """Operations that are proposed and not yet applied."""
    delivered: dict[int, int] = field(default_factory=dict)
    """Offset -> number of deliveries."""
    done: set[int] = field(default_factory=set)
    """Offsets with an applied ack."""
    not_before: dict[int, int] = field(default_factory=dict)
    """Offset -> end of the delay of its last applied nack."""
    consumers: list[ConsumerStream] = field(default_factory=list)
    handed_over: bool = True
    """Whether every leader so far handed over."""
    held: list[tuple[int, Lease]] = field(default_factory=list)
    """(epoch, lease) of all leases so far."""

    def __post_init__(self) -> None:
        self.leases = self.make_leases()

    def make_leases(self) -> Leases:
        return leases_of(self.group, self.epoch)

    def fire(self, count: int, size: int = 1) -> None:
        rows = np.zeros(count, ROW)
        rows["seq"] = np.arange(count) + int(self.queue.end) + 1
        rows["payload_size"] = size
        self.queue.append(rows, {}, UnixMs(1))

    def join(self, credit: int, lease_ms: int = LEASE_MS) -> ConsumerStream:
        consumer = ConsumerStream("c", lease_ms, lambda _: None, credit)
        self.leases.join(consumer)
        self.consumers.append(consumer)
        self.propose(self.leases.reserve())
        return consumer

    def leave(self, consumer: ConsumerStream) -> None:
        self.consumers.remove(consumer)
        self.leases.leave(consumer)
        self.wait(0)

    def propose(self, op: GroupOp | None) -> None:
        if op is not None:
            self.log.append(op)

    def nack(self, back: int, picks: int, delay_ms: int) -> list[int]:
        """Nack some offsets of a lease; the wall clock is `now_ms`."""
        epoch, lease = self.held[-back]
        chosen = [o for at, o in enumerate(lease.offsets.tolist()) if picks >> (at % 12) & 1]
        asked = np.array(chosen + chosen[:1], np.uint64)
        verdict = self.leases.nack(Epoch(epoch), lease.lease_id, asked)
        self.propose(self.leases.recall())
        taken = asked[verdict == ACCEPT]
        if len(taken):
            times = np.full(len(taken), self.now_ms + delay_ms, np.int64)
            ids = self.group.topic, self.group.group_id
            self.log.append(Nack(Op.NACK, *ids, taken, times))
        return [int(each) for each in verdict]

    def apply(self, count: int | None = None) -> None:
        """Apply the first `count` proposed operations. None: all."""
        now, self.log = self.log[:count], self.log[len(self.log[:count]) :]
        for op in now:
            if op.op is Op.ACK:
                self.group.ack(op.offsets)
                self.done.update(op.offsets.tolist())
            elif op.op is Op.ENDED:
                self.group.end_leases(op.offsets)
            elif op.op is Op.RECALL:
                self.group.recall(op.offsets)
            elif isinstance(op, Nack):
                new = self.group.nack(op.offsets, op.not_before_ms)
                told = zip(op.offsets[new].tolist(), op.not_before_ms[new].tolist(), strict=True)
                self.not_before.update(told)
            elif op.op is Op.HAND_OVER:
                self.group.hand_over(QueueOffset(int(op.offsets[0])))
            else:
                self.group.reserve(QueueOffset(int(op.offsets[0])))
            self.leases.on_applied(op)

    def deliver(self, limit: int = 1000) -> list[int]:
        """Deliver once, and check the promises about every delivered message."""
        now = MonoMs(self.now_ms), UnixMs(self.now_ms)
        lease = self.leases.deliver(*now, self.queue, limit)
        self.propose(self.leases.reserve())
        if lease is None:
            return []
        offsets = [int(offset) for offset in lease.offsets]
        assert offsets == sorted(set(offsets))
        assert 1 <= len(offsets) <= limit
        assert lease.consumer.credit >= 0
        assert offsets[-1] < min(int(self.queue.end), int(self.group.reserved))
        assert not self.done & set(offsets), "delivered after its ack"
        early = [o for o in offsets if self.not_before.get(o, 0) > self.now_ms]
        assert not early, "delivered before the time that its nack named"
        attempts = self.group.attempts(lease.offsets).tolist()
        for offset, attempt in zip(offsets, attempts, strict=True):
            before = self.delivered.get(offset, 0)
            assert attempt > before, f"redelivery of {offset} isn't marked"
            assert attempt == before + 1 or not self.handed_over
            self.delivered[offset] = before + 1
        self.held.append((self.epoch, lease))
        return offsets

    def ack(self, epoch: int, lease_id: int, offsets: list[int]) -> list[int]:
        asked = np.array(offsets, np.uint64)
        verdict = self.leases.ack(Epoch(epoch), LeaseId(lease_id), asked)
        accepted = asked[verdict == ACCEPT]
        if len(accepted):
            group = self.group
            self.log.append(GroupOp(Op.ACK, group.topic, group.group_id, accepted))
        return [int(each) for each in verdict]

    def ack_lease(self, offsets: list[int] | None = None, back: int = 1) -> list[int]:
        """Ack offsets of the lease `back` from the end. None: all its offsets."""
        epoch, lease = self.held[-back]
        chosen = [int(offset) for offset in lease.offsets] if offsets is None else offsets
        return self.ack(epoch, lease.lease_id, chosen)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.propose(self.leases.expire(MonoMs(self.now_ms), group_leases.ENDS_MAX)[0])
        self.propose(self.leases.recall())

    def hand_over(self) -> None:
        """Hand over: the leader appends its last operations, and another leader begins."""
        for op in self.leases.hand_over():
            self.propose(op)
        assert self.deliver() == []
        self.apply()
        handed_over = self.handed_over
        self.next_epoch()
        self.handed_over = handed_over

    def next_epoch(self) -> None:
        """Begin another epoch; operations that are not applied are lost."""
        self.log.clear()
        self.handed_over = False
        self.epoch += 1
        self.group.begin_epoch(self.queue.end)
        self.leases = self.make_leases()
        self.consumers.clear()


small = st.integers(0, 5)


steps_of = st.lists(
    st.one_of(
        st.tuples(st.just("fire"), st.integers(1, 5)),
        st.tuples(st.just("join"), small),
        st.tuples(st.just("leave"), small),
        st.tuples(st.just("credit"), small),
        st.tuples(st.just("hand out"), st.integers(1, 4)),
        st.tuples(st.just("hand out"), st.integers(1, 4)),
        st.tuples(st.just("ack"), st.integers(0, 2**12 - 1)),
        st.tuples(st.just("ack"), st.integers(0, 2**12 - 1)),
        st.tuples(st.just("nack"), st.integers(0, 2**12 - 1)),
        st.tuples(st.just("nack"), st.integers(0, 2**12 - 1)),
        st.tuples(st.just("extend"), st.integers(0, 2**12 - 1)),
        st.tuples(st.just("wait"), st.sampled_from([1, LEASE_MS - 1, LEASE_MS])),
        st.tuples(st.just("apply"), st.integers(1, 3)),
        st.tuples(st.just("apply"), st.integers(1, 3)),
        st.tuples(st.just("epoch"), st.just(0)),
        st.tuples(st.just("hand over"), st.just(0)),
    ),
    min_size=25,  # else many have five steps
    max_size=50,
)


def take_step(play: Play, what: str, value: int) -> None:
    consumer = play.consumers[value % len(play.consumers)] if play.consumers else None
    if what == "leave" and consumer:
        play.leave(consumer)
    elif what == "credit" and consumer:
        consumer.credit += value
    elif what == "ack" and play.held:
        epoch, lease = play.held[value % len(play.held)]
        chosen = [o for at, o in enumerate(lease.offsets.tolist()) if value >> (at % 12) & 1]
        play.ack(epoch, lease.lease_id, chosen + chosen[:1])
    elif what == "nack" and play.held:
        play.nack(1 + value % len(play.held), value, delay_ms=(0, 1, 3 * LEASE_MS)[value % 3])
    elif what == "extend" and play.held:
        epoch, lease = play.held[value % len(play.held)]
        now, ids = MonoMs(play.now_ms), (Epoch(epoch), lease.lease_id)
        verdict = play.leases.extend(now, *ids, lease.offsets, 2 * LEASE_MS)
        held = (verdict == ACCEPT).any()
        assert not held or lease.deadline_ms >= play.now_ms + 2 * LEASE_MS
    elif what in SIMPLE:
        SIMPLE[what](play, value)


SIMPLE: dict[str, Callable[[Play, int], object]] = {
    "fire": lambda play, value: play.fire(value),
    "join": lambda play, value: play.join(value),
    "hand out": lambda play, value: play.deliver(value),
    "wait": lambda play, value: play.wait(value),
    "apply": lambda play, value: play.apply(value),
    "epoch": lambda play, _: play.next_epoch(),
    "hand over": lambda play, _: play.hand_over(),
}


def check_bookkeeping(play: Play) -> None:
    wake = play.leases.wake_at_ms()
    assert (wake is None) == (play.leases.in_flight == 0)
    assert wake is None or wake > play.now_ms
    ours = [lease for consumer in play.consumers for lease in consumer.leases]
    assert len(ours) == len(set(ours))
