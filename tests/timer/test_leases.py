"""Leases: random histories against the promises, then single cases that once failed.

`Play` stands in for the rest of the leader: a queue, a group, and a log whose operations the test
applies.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.timer.machines import leases_of
from timer.entries.payloads import GroupOp, GroupSettings, Nack, Op
from timer.leader.groups import group_leases
from timer.leader.groups.group_batch import GROUP_OFFSETS_MAX, NACK_WEIGHT, GroupBatch
from timer.leader.groups.group_leases import (
    ACCEPT,
    ALREADY_ACKED,
    LEASE_LOST,
    NOT_DELIVERED,
    Leases,
)
from timer.leader.groups.lease_table import (
    DEADLINES_MIN,
    DELIVERY_BYTES,
    LEASE_WEIGHT,
    RESERVE_AHEAD,
    ConsumerStream,
    Lease,
)
from timer.leader.groups.shared_order import SCAN_MAX, WAITING_MIN, SharedOrder
from timer.model.columns import ROW
from timer.model.units import Epoch, GroupId, LeaseId, MonoMs, QueueOffset, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.group_column import GroupColumn
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
        self.propose(self.leases.leave(consumer))
        self.propose(self.leases.recall())

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
            self.leases.applied(op)

    def hand_out(self, limit: int = 1000) -> list[int]:
        """Deliver once, and check the promises about every delivered message."""
        now = MonoMs(self.now_ms), UnixMs(self.now_ms)
        lease = self.leases.hand_out(*now, self.queue, limit)
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
        assert self.hand_out() == []
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


def ready(messages: int, credit: int = 1000) -> Play:
    play = Play()
    play.fire(messages)
    play.join(credit)
    play.apply()
    return play


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
    max_size=50,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(steps_of, st.sampled_from([16, 2]))
def test_whatever_happens_every_message_is_acked_and_none_is_delivered_after_it(
    steps: list[tuple[str, int]], bits: int
) -> None:
    with mock.patch.object(GroupColumn, "bits", bits):
        whatever_happens(steps)


def whatever_happens(steps: list[tuple[str, int]]) -> None:
    play = Play()
    for what, value in steps:
        take_step(play, what, value)
        check_bookkeeping(play)
    # A patient consumer gets all other messages: none is stuck.
    for consumer in [*play.consumers]:
        play.leave(consumer)
    play.join(credit=10_000)
    for _ in range(4):
        play.apply()
        while play.hand_out():
            assert set(play.ack_lease()) == {ACCEPT}
        play.wait(3 * LEASE_MS)
    assert play.done == set(range(int(play.queue.end)))
    assert play.leases.in_flight == 0
    assert play.leases.wake_at_ms() is None


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
    "hand out": lambda play, value: play.hand_out(value),
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


def test_messages_go_out_in_order_one_consumer_after_the_other_within_credit() -> None:
    play = ready(10, credit=3)
    other = play.join(credit=4)
    assert [play.hand_out(2) for _ in range(5)] == [[0, 1], [2, 3], [4], [5, 6], []]
    other.credit = 1
    assert play.hand_out(2) == [7]


def test_burst_is_shared_by_all_consumers_with_room() -> None:
    play = ready(10, credit=24)
    consumers = [*play.consumers, *(play.join(credit=24) for _ in range(2))]
    idle = play.join(credit=0)
    assert play.hand_out() == [0, 1, 2, 3]
    play.fire(5)
    assert [len(play.hand_out()) for _ in range(4)] == [6, 5, 0, 0]
    play.fire(1000)
    assert [len(play.hand_out()) for _ in range(4)] == [20, 18, 19, 0], "their whole credit"
    idle.credit = 1000
    assert len(play.hand_out()) == 943, "all that are left to a single consumer"
    assert not any(each.credit for each in consumers)


def test_consumer_with_much_credit_gets_more_than_its_share() -> None:
    play = ready(12, credit=120)
    play.join(credit=60)
    assert [len(play.hand_out()) for _ in range(3)] == [10, 2, 0]


def test_share_of_a_burst_is_of_what_the_group_may_hold() -> None:
    play = Play()
    play.group.settings = GroupSettings(lease_ms=LEASE_MS, type="shared", max_in_flight=6)
    play.leases = play.make_leases()
    for _ in range(3):
        play.join(credit=24)
    play.fire(100)
    play.apply()
    assert [len(play.hand_out()) for _ in range(4)] == [2, 2, 2, 0]


def test_nothing_is_handed_out_beyond_what_was_reserved() -> None:
    play = Play()
    play.fire(5)
    play.join(credit=10)
    assert play.hand_out() == []
    assert [op.op for op in play.log] == [Op.RESERVE]
    play.apply()
    assert play.hand_out() == [0, 1, 2, 3, 4]


def test_reserve_runs_ahead_so_that_one_op_serves_many_messages() -> None:
    play = ready(20_000, credit=20_000)
    proposed = 1
    for _ in range(200):
        assert len(play.hand_out(100)) == 100
        proposed += len(play.log)
        play.apply()
    assert proposed <= 2 * 20_000 / RESERVE_AHEAD + 2


def test_extended_lease_outlives_its_old_deadline_beside_another_that_ends() -> None:
    play = ready(4, credit=100)
    assert [play.hand_out(2), play.hand_out(2)] == [[0, 1], [2, 3]]
    first, other = (lease for _, lease in play.held)
    play.wait(LEASE_MS // 2)
    held = MonoMs(play.now_ms), Epoch(play.epoch), first.lease_id
    assert play.leases.extend(*held, first.offsets, LEASE_MS).tolist() == [ACCEPT] * 2
    play.wait(LEASE_MS // 2)  # the old deadline of both
    assert [op.offsets.tolist() for op in play.log] == [other.offsets.tolist()]
    assert play.leases.wake_at_ms() == LEASE_MS // 2 + LEASE_MS
    play.wait(LEASE_MS // 2)
    assert [op.offsets.tolist() for op in play.log] == [[2, 3], [0, 1]]


def test_silent_consumer_gets_nothing_while_another_is_heard() -> None:
    play = ready(4, credit=100)
    (frozen,) = play.consumers
    assert play.hand_out(2) == [0, 1]
    other = play.join(credit=1)
    play.wait(LEASE_MS)
    play.apply()
    assert play.hand_out() == [0], "what has expired goes to another first"
    assert play.held[-1][1].consumer is other
    assert play.hand_out() == [], "the other takes no more, and the first is frozen"
    assert play.leases.heard(frozen)
    assert play.hand_out() == [1]
    assert play.hand_out() == [2, 3]
    assert not play.leases.heard(frozen)


def test_silent_consumer_without_another_gets_one_message_at_a_time() -> None:
    play = ready(3)
    play.group.settings = replace(play.group.settings, max_attempts=9)
    (frozen,) = play.consumers
    play.hand_out()
    for _ in range(2):
        play.wait(LEASE_MS)
        play.apply()
        assert len(play.hand_out()) == 1
        assert play.hand_out() == []
    other = play.join(credit=0)
    play.wait(LEASE_MS)
    play.apply()
    assert play.hand_out() == []
    play.leave(other)
    assert len(play.hand_out()) == 1
    play.leave(frozen)
    assert play.leases._roster.silent == 0


def test_paused_consumer_gets_nothing() -> None:
    play = ready(2)
    (consumer,) = play.consumers
    consumer.paused = True
    assert play.hand_out() == []
    consumer.paused = False
    assert play.hand_out() == [0, 1]


def test_delivery_is_of_about_a_megabyte_but_of_one_message_at_least() -> None:
    play = Play()
    for size in (DELIVERY_BYTES // 2, DELIVERY_BYTES // 2, 1, 3 * DELIVERY_BYTES, 7):
        play.fire(1, size)
    play.join(credit=10)
    play.apply()
    assert [play.hand_out() for _ in range(5)] == [[0, 1], [2], [3], [4], []]


def test_lease_ends_at_its_deadline_and_comes_again_marked_once_that_is_applied() -> None:
    play = ready(2)
    play.hand_out()
    play.wait(LEASE_MS - 1)
    assert play.log == []
    play.wait(1)
    assert play.hand_out() == []
    play.apply()
    assert play.hand_out() == [0, 1]
    assert play.group.attempts(play.held[-1][1].offsets).tolist() == [2, 2]


def test_consumer_that_retired_keeps_no_callback_while_its_lease_lasts() -> None:
    play = ready(1)
    consumer = play.consumers[0]
    consumer.sink = consumer.end = lambda _: None
    callback = weakref.ref(consumer.sink)
    assert play.hand_out() == [0]
    play.leases.retire(consumer)
    assert callback() is None
    assert play.leases.in_flight == 1


def test_deadlines_of_leases_that_were_acked_do_not_gather() -> None:
    play = ready(3 * DEADLINES_MIN)
    consumer = play.consumers[0]
    for offset in range(3 * DEADLINES_MIN):
        consumer.credit = 1
        assert play.hand_out() == [offset]
        assert play.ack_lease([offset]) == [ACCEPT]
        play.apply()
    assert len(play.leases._table._deadlines) <= DEADLINES_MIN + 2


def singles(play: Play, count: int) -> ConsumerStream:
    """Lease `count` messages to the first consumer, one by one."""
    consumer = play.consumers[0]
    for offset in range(count):
        consumer.credit = 1
        assert play.hand_out() == [offset]
    return consumer


@pytest.mark.parametrize("leaves", [True, False])
def test_many_leases_end_in_portions(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_leases, "ENDS_MAX", 5 * (LEASE_WEIGHT + 1))
    play = ready(12)
    consumer = singles(play, 12)
    if leaves:
        play.leave(consumer)
    else:
        play.now_ms += LEASE_MS
    for _ in range(4):
        wake = play.leases.wake_at_ms()
        if wake is not None and wake <= play.now_ms:
            play.wait(0)
    assert [len(op.offsets) for op in play.log if op.op is Op.ENDED] == [5, 5, 2]
    assert play.leases.in_flight == 0
    assert play.leases.wake_at_ms() is None
    play.apply()
    assert not play.leases.consumers or not leaves
    assert play.group.failures(np.arange(12, dtype=np.uint64)).tolist() == [1] * 12


def test_deliveries_pause_at_the_most_leases_until_one_ends() -> None:
    play = ready(5)
    play.leases._leases_max = 3
    singles(play, 3)
    play.consumers[0].credit = 1
    assert play.hand_out() == []
    assert play.ack_lease() == [ACCEPT]
    assert play.hand_out() == [3]


def test_ended_leases_share_an_entry_only_as_far_as_they_apply_quickly() -> None:
    batch = GroupBatch()
    for op in (Op.ENDED, Op.RECALL):
        batch.add(GroupOp(op, TopicId(1), GroupId(1), np.arange(40_000, dtype=np.uint64)))
    sizes = []
    while batch:
        ops = batch.take().ops()
        sizes.append(sum(len(op.offsets) for op in ops if isinstance(op, GroupOp)))
    assert sum(sizes) == 80_000
    assert max(sizes) <= GROUP_OFFSETS_MAX // NACK_WEIGHT


def test_single_nacks_share_their_memory() -> None:
    play = ready(3 * WAITING_MIN)
    play.hand_out()
    for offset in range(3 * WAITING_MIN):
        epoch, lease = play.held[-1]
        asked = np.array([offset], np.uint64)
        assert play.leases.nack(Epoch(epoch), lease.lease_id, asked).tolist() == [ACCEPT]
        times = np.array([1_000 + 7 * offset % 11])
        op = Nack(Op.NACK, play.group.topic, play.group.group_id, asked, times)
        play.log.append(op)
        play.apply()
    order = play.leases._order
    assert isinstance(order, SharedOrder)
    assert len(order._waiting) <= WAITING_MIN + 2
    play.consumers[0].credit = 10_000
    assert play.hand_out() == []
    play.now_ms = 1_005
    early = 0
    while got := play.hand_out():
        early += len(got)
    assert early == sum(7 * o % 11 <= 5 for o in range(3 * WAITING_MIN))
    play.now_ms = 1_010
    while play.hand_out():
        pass
    assert len(play.delivered) == 3 * WAITING_MIN
    assert set(play.delivered.values()) == {2}


def test_single_messages_that_are_given_back_share_their_memory() -> None:
    play, count = ready(3 * WAITING_MIN), 3 * WAITING_MIN
    play.hand_out()
    epoch, lease = play.held[-1]
    for offset in reversed(range(count)):
        asked = np.array([offset], np.uint64)
        play.leases.nack(Epoch(epoch), lease.lease_id, asked)
        play.log.append(GroupOp(Op.RECALL, play.group.topic, play.group.group_id, asked))
        play.apply()
    order = play.leases._order
    assert isinstance(order, SharedOrder)
    assert len(order._back) <= count.bit_length()
    play.consumers[0].credit = count
    while play.hand_out():
        pass
    assert play.delivered == dict.fromkeys(range(count), 2)


def test_new_leader_with_much_put_off_looks_at_it_in_steps() -> None:
    play = Play()
    for _ in range(4):
        play.fire(50_000)
    play.group.reserve(QueueOffset(200_000))
    every = np.arange(200_000, dtype=np.uint64)
    play.group.nack(every, np.full(200_000, 50))
    play.next_epoch()
    play.join(credit=1000)
    play.apply()
    calls = 0
    while play.hand_out() or play.leases.unfinished:
        calls += 1
    assert 1 <= calls < 10
    assert play.leases.returns_at_ms() == 50
    play.now_ms = 50
    assert len(play.hand_out()) == 1000


def test_new_leader_behind_a_stuck_message_looks_at_what_is_acked_in_steps() -> None:
    play = Play()
    count = 10 * SCAN_MAX
    for _ in range(10):
        play.fire(SCAN_MAX)
    play.group.reserve(QueueOffset(count))
    play.group.ack(np.arange(1, count - 1, dtype=np.uint64))
    play.next_epoch()
    play.join(credit=1000)
    play.apply()
    assert play.hand_out() == [0]
    looked = [play.leases._table.fresh]
    while not (got := play.hand_out()):
        assert play.leases.unfinished
        looked.append(play.leases._table.fresh)
    assert got == [count - 1]
    assert np.diff(looked).max() <= 2 * SCAN_MAX
    assert play.hand_out() == []
    assert not play.leases.unfinished


def test_consumer_that_leaves_gives_back_what_it_did_not_ack() -> None:
    play = ready(4)
    play.hand_out()
    play.ack_lease([1, 2])
    play.leave(play.consumers[0])
    play.join(credit=10)
    play.apply()
    assert play.hand_out() == [0, 3]


def test_ack_is_judged_by_who_holds_the_message() -> None:
    play = ready(3)
    play.hand_out()
    assert play.ack_lease([0]) == [ACCEPT]
    play.apply()
    assert play.ack_lease([0]) == [ALREADY_ACKED]
    assert play.ack(1, 77, [1]) == [LEASE_LOST]
    play.wait(LEASE_MS)
    assert play.ack_lease([1]) == [ACCEPT], "expired, but leased to nobody else"
    play.apply()
    assert play.hand_out() == [2]
    assert play.ack_lease([2], back=2) == [LEASE_LOST], "leased again"
    assert play.ack_lease([2]) == [ACCEPT]


def test_ack_of_an_older_epoch_is_accepted_until_the_message_is_leased_again() -> None:
    play = ready(3)
    play.hand_out()
    play.next_epoch()
    play.join(credit=1)
    play.apply()
    assert play.hand_out() == [0]
    assert play.ack_lease([0, 1], back=2) == [LEASE_LOST, ACCEPT]
    play.apply()
    play.consumers[0].credit = 5
    assert play.hand_out() == [2]
    assert play.group.attempts(play.held[-1][1].offsets).tolist() == [2]


def test_ack_of_what_was_never_handed_out_is_refused() -> None:
    play = ready(3, credit=1)
    play.hand_out()
    lease = play.held[-1][1].lease_id
    asked = [1, 2, 3, 4095, 4096, 2**63, 2**64 - 1]
    assert play.ack(1, lease, asked) == [NOT_DELIVERED] * len(asked)
    play.consumers[0].credit = 5
    assert play.hand_out() == [1, 2]


def test_ack_that_names_an_offset_twice_settles_it_once() -> None:
    play = ready(3)
    play.hand_out()
    assert play.ack_lease([0, 0, 0]) == [ACCEPT, ALREADY_ACKED, ALREADY_ACKED]
    assert play.leases.in_flight == 2
    play.wait(LEASE_MS)
    play.apply()
    assert play.hand_out() == [1, 2]
    assert play.ack(1, 99, [1, 1]) == [LEASE_LOST, LEASE_LOST]


def test_ack_while_its_lease_is_ending_is_not_undone_by_the_end() -> None:
    play = ready(1)
    play.hand_out()
    play.wait(LEASE_MS)
    assert play.ack_lease() == [ACCEPT]
    play.apply(1)  # the end of the lease
    assert play.hand_out() == []
    play.apply()
    assert play.group.cursor == 1


def test_repeated_ack_in_flight_is_answered_when_it_is_applied() -> None:
    play = ready(1)
    play.hand_out()
    assert play.ack_lease() == [ACCEPT]
    assert play.ack_lease() == [ACCEPT]
    play.apply()
    assert play.ack_lease() == [ALREADY_ACKED]


@pytest.mark.parametrize("limit", [1, 2048])
def test_new_leader_finds_the_holes_among_many_acks_quickly(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play()
    last = 3_000_000
    rows = np.zeros(60_000, ROW)
    for _ in range(0, last, len(rows)):
        play.queue.append(rows, {}, UnixMs(1))
    play.group.reserve(play.queue.end)
    holes = [0, 1_500_000, last - 1]
    play.group.ack(np.delete(np.arange(last, dtype=np.uint64), holes))
    play.next_epoch()
    play.join(credit=10)
    play.apply()
    looks = calls_of(monkeypatch, Group, "is_acked")
    found = play.hand_out(limit)
    while len(found) < 3:
        got = play.hand_out(limit)
        assert got or play.leases.unfinished
        found += got
    assert found == holes
    assert len(looks) < 1_000
    assert max(len(offsets) for _, offsets in looks) <= SCAN_MAX


def test_messages_that_an_entry_finishes_in_two_moves_are_released_in_both() -> None:
    play = ready(1000)
    play.hand_out()
    offsets = play.held[0][1].offsets
    play.group.ack(offsets)  # by the whole entry, before leases hear of its parts
    for part in np.split(offsets, [10]):
        play.leases.applied(GroupOp(Op.MOVE, play.group.topic, play.group.group_id, part))
    assert (play.leases.in_flight, play.leases.wake_at_ms()) == (0, None)
    assert not play.consumers[0].leases


@pytest.mark.parametrize("settle", ["ack", "nack"])
def test_marks_of_acked_messages_behind_a_stuck_one_take_no_memory(settle: str) -> None:
    with mock.patch.object(GroupColumn, "bits", 8):
        play = ready(1, credit=1_000_000)
        assert play.hand_out(1) == [0]
        if settle == "nack":
            play.nack(1, 1, delay_ms=10**9)
        for _ in range(50):
            play.fire(1000)
            while play.hand_out():
                play.ack_lease()
            play.apply()
            assert play.leases._table._states.nbytes <= 8 * 5000
        assert (play.group.cursor, play.leases.in_flight) == (0, settle == "ack")
        epoch, lease = play.held[0]
        play.ack(epoch, lease.lease_id, [0])
        play.apply()
        assert (play.group.cursor, play.leases.in_flight) == (50_001, 0)
        assert not play.leases._table._states.nbytes


def test_marks_follow_the_cursor() -> None:
    play = ready(1, credit=1_000_000)
    for _ in range(200):
        play.fire(1000)
        while play.hand_out():
            play.ack_lease()
        play.apply()
    assert play.group.cursor == 200_001
    assert play.leases._table._states.nbytes <= 131_072
