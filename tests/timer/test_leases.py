"""Leases: random histories against the promises, then single cases that once failed.

`Play` stands in for the rest of the leader: a queue, a group, and a log whose operations the test
applies.
"""

import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.timer.lease_play import (
    LEASE_MS,
    Play,
    check_bookkeeping,
    steps_of,
    take_step,
)
from timer.entries.payloads import GroupOp, GroupSettings, Nack, Op
from timer.leader.groups import group_leases
from timer.leader.groups.group_batch import GROUP_OFFSETS_MAX, NACK_WEIGHT, GroupBatch
from timer.leader.groups.group_leases import (
    ACCEPT,
    ALREADY_ACKED,
    LEASE_LOST,
    NOT_DELIVERED,
)
from timer.leader.groups.lease_table import (
    DEADLINES_MIN,
    DELIVERY_BYTES,
    LEASE_WEIGHT,
    RESERVE_AHEAD,
    ConsumerStream,
    LeaseTable,
)
from timer.leader.groups.shared_order import SCAN_MAX, WAITING_MIN, SharedOrder
from timer.leader.groups.turns import OFFSETS_A_UNIT
from timer.model.columns import ROW
from timer.model.units import Epoch, GroupId, MonoMs, QueueOffset, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.group_column import GroupColumn


def ready(messages: int, credit: int = 1000) -> Play:
    play = Play()
    play.fire(messages)
    play.join(credit)
    play.apply()
    return play


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
        while play.deliver():
            assert set(play.ack_lease()) == {ACCEPT}
        play.wait(3 * LEASE_MS)
    assert play.done == set(range(int(play.queue.end)))
    assert play.leases.in_flight == 0
    assert play.leases.wake_at_ms() is None


def test_messages_go_out_in_order_one_consumer_after_the_other_within_credit() -> None:
    play = ready(10, credit=3)
    other = play.join(credit=4)
    assert [play.deliver(2) for _ in range(5)] == [[0, 1], [2, 3], [4], [5, 6], []]
    other.credit = 1
    assert play.deliver(2) == [7]


def test_burst_is_shared_by_all_consumers_with_room() -> None:
    play = ready(10, credit=24)
    consumers = [*play.consumers, *(play.join(credit=24) for _ in range(2))]
    idle = play.join(credit=0)
    assert play.deliver() == [0, 1, 2, 3]
    play.fire(5)
    assert [len(play.deliver()) for _ in range(4)] == [6, 5, 0, 0]
    play.fire(1000)
    assert [len(play.deliver()) for _ in range(4)] == [20, 18, 19, 0], "their whole credit"
    idle.credit = 1000
    assert len(play.deliver()) == 943, "all that are left to a single consumer"
    assert not any(each.credit for each in consumers)
    play = ready(2, credit=8)
    play.join(credit=8)
    assert [len(play.deliver()) for _ in range(3)] == [1, 1, 0], "a burst of two is one, too"


def test_consumer_with_much_credit_gets_more_than_its_share() -> None:
    play = ready(12, credit=120)
    play.join(credit=60)
    assert [len(play.deliver()) for _ in range(3)] == [10, 2, 0]


def test_share_of_a_burst_is_of_what_the_group_may_hold() -> None:
    play = Play()
    play.group.settings = GroupSettings(lease_ms=LEASE_MS, type="shared", max_in_flight=6)
    play.leases = play.make_leases()
    for _ in range(3):
        play.join(credit=24)
    play.fire(100)
    play.apply()
    assert [len(play.deliver()) for _ in range(4)] == [2, 2, 2, 0]


def test_reserve_runs_ahead_so_that_one_op_serves_many_messages() -> None:
    play = ready(20_000, credit=20_000)
    proposed = 1
    for _ in range(200):
        assert len(play.deliver(100)) == 100
        proposed += len(play.log)
        play.apply()
    assert proposed <= 2 * 20_000 / RESERVE_AHEAD + 2


def test_extended_lease_outlives_its_old_deadline_beside_another_that_ends() -> None:
    play = ready(4, credit=100)
    assert [play.deliver(2), play.deliver(2)] == [[0, 1], [2, 3]]
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
    assert play.deliver(2) == [0, 1]
    other = play.join(credit=1)
    play.wait(LEASE_MS)
    play.apply()
    assert play.deliver() == [0], "what has expired goes to another first"
    assert play.held[-1][1].consumer is other
    assert play.deliver() == [], "the other takes no more, and the first is frozen"
    assert play.leases.on_request(frozen)
    assert play.deliver() == [1]
    assert play.deliver() == [2, 3]
    assert not play.leases.on_request(frozen)


def test_silent_consumer_without_another_gets_one_message_at_a_time() -> None:
    play = ready(3)
    play.group.settings = replace(play.group.settings, max_attempts=9)
    (frozen,) = play.consumers
    play.deliver()
    for _ in range(2):
        play.wait(LEASE_MS)
        play.apply()
        assert len(play.deliver()) == 1
        assert play.deliver() == []
    other = play.join(credit=0)
    play.wait(LEASE_MS)
    play.apply()
    assert play.deliver() == []
    play.leave(other)
    assert len(play.deliver()) == 1
    play.leave(frozen)
    assert play.leases._roster.silent_count == 0


def test_paused_consumer_gets_nothing() -> None:
    play = ready(2)
    (consumer,) = play.consumers
    consumer.paused = True
    assert play.deliver() == []
    consumer.paused = False
    assert play.deliver() == [0, 1]


def test_delivery_is_of_about_a_megabyte_but_of_one_message_at_least() -> None:
    play = Play()
    for size in (DELIVERY_BYTES // 2, DELIVERY_BYTES // 2, 1, 3 * DELIVERY_BYTES, 7):
        play.fire(1, size)
    play.join(credit=10)
    play.apply()
    assert [play.deliver() for _ in range(5)] == [[0, 1], [2], [3], [4], []]


def test_consumer_that_retired_keeps_no_callback_while_its_lease_lasts() -> None:
    play = ready(1)
    consumer = play.consumers[0]
    consumer.sink = consumer.end = lambda _: None
    callback = weakref.ref(consumer.sink)
    assert play.deliver() == [0]
    play.leases.retire(consumer)
    assert callback() is None
    assert play.leases.in_flight == 1


def test_deadlines_of_leases_that_were_acked_do_not_gather() -> None:
    play = ready(3 * DEADLINES_MIN)
    consumer = play.consumers[0]
    for offset in range(3 * DEADLINES_MIN):
        consumer.credit = 1
        assert play.deliver() == [offset]
        assert play.ack_lease([offset]) == [ACCEPT]
        play.apply()
    assert len(play.leases._table._deadlines) <= DEADLINES_MIN + 2


def test_leases_of_consumers_that_leave_together_end_in_one_operation() -> None:
    play = ready(3, credit=1)
    for _ in range(2):
        play.join(credit=1)
    assert [play.deliver() for _ in range(3)] == [[0], [1], [2]]
    for consumer in play.consumers:
        play.leases.leave(consumer)
    _, lease = play.held[-1]
    assert play.leases.holder(lease.lease_id) is None, "another stream may ack for its consumer"
    held = Epoch(play.epoch), lease.lease_id, lease.offsets
    assert play.leases.extend(MonoMs(0), *held, LEASE_MS).tolist() == [LEASE_LOST]
    play.wait(0)
    assert [op.offsets.tolist() for op in play.log if op.op is Op.ENDED] == [[0, 1, 2]]


def singles(play: Play, count: int) -> ConsumerStream:
    """Lease `count` messages to the first consumer, one by one."""
    consumer = play.consumers[0]
    for offset in range(count):
        consumer.credit = 1
        assert play.deliver() == [offset]
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
    assert play.deliver() == []
    assert play.ack_lease() == [ACCEPT]
    assert play.deliver() == [3]


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


def test_single_nacks_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    play = ready(3 * WAITING_MIN)
    play.deliver()
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
    looks = calls_of(monkeypatch, LeaseTable, "of")
    assert play.leases.waiting_from(play.queue.end, UnixMs(0)) is None
    assert not looks, "the time of none has come"
    play.consumers[0].credit = 10_000
    assert play.deliver() == []
    play.now_ms = 1_005
    early = 0
    while got := play.deliver():
        early += len(got)
    assert early == sum(7 * o % 11 <= 5 for o in range(3 * WAITING_MIN))
    play.now_ms = 1_010
    while play.deliver():
        pass
    assert len(play.delivered) == 3 * WAITING_MIN
    assert set(play.delivered.values()) == {2}


def test_single_messages_that_are_given_back_share_their_memory() -> None:
    play, count = ready(3 * WAITING_MIN), 3 * WAITING_MIN
    play.deliver()
    epoch, lease = play.held[-1]
    for offset in reversed(range(count)):
        asked = np.array([offset], np.uint64)
        play.leases.nack(Epoch(epoch), lease.lease_id, asked)
        play.log.append(GroupOp(Op.RECALL, play.group.topic, play.group.group_id, asked))
        play.apply()
    order = play.leases._order
    assert isinstance(order, SharedOrder)
    assert len(order._returned) <= count.bit_length()
    play.consumers[0].credit = count
    while play.deliver():
        pass
    assert play.delivered == dict.fromkeys(range(count), 2)


def test_new_leader_with_much_put_off_looks_at_it_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    for _ in range(4):
        play.fire(50_000)
    play.group.reserve(QueueOffset(200_000))
    every = np.arange(200_000, dtype=np.uint64)
    play.group.nack(every, np.repeat([53, 52, 51, 50], 50_000))
    play.next_epoch()
    play.join(credit=1000)
    play.apply()
    calls = 0
    while play.deliver() or play.leases.unfinished:
        calls += 1
    assert 1 <= calls < 10
    assert play.leases.next_return_ms() == 50
    play.now_ms = 53
    freed = calls_of(monkeypatch, SharedOrder, "_add_returned")
    assert min(play.deliver()) > 100_000
    assert play.leases._order.unfinished
    assert play.leases.work > SCAN_MAX // OFFSETS_A_UNIT
    assert sum(len(offsets) for _, offsets in freed) < 2 * SCAN_MAX
    assert play.leases.waiting_from(play.queue.end, UnixMs(53)) == 0
    play.consumers[0].credit = 200_000
    while play.deliver():
        pass
    assert len(play.delivered) == 200_000


def test_leases_are_handed_over_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_leases, "ENDS_MAX", 2 * LEASE_WEIGHT + 20)
    play = ready(100)
    while play.deliver(10):
        pass
    ops = play.leases.hand_over()
    first = next(ops)
    assert first.offsets.tolist() == [*range(20)]
    play.ack_lease()  # 90 to 99
    rest = [*ops]
    assert np.concatenate([op.offsets for op in rest[:-1]]).tolist() == [*range(20, 90)]
    assert all(len(op.offsets) <= 20 for op in rest)
    assert [op.op for op in rest] == [Op.RECALL] * 4 + [Op.HAND_OVER]


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
    assert play.deliver() == [0]
    looked = [play.leases._table.fresh]
    while not (got := play.deliver()):
        assert play.leases.unfinished
        looked.append(play.leases._table.fresh)
    assert got == [count - 1]
    assert np.diff(looked).max() <= 2 * SCAN_MAX
    assert play.deliver() == []
    assert not play.leases.unfinished


def test_ack_is_judged_by_who_holds_the_message() -> None:
    play = ready(3)
    play.deliver()
    assert play.ack_lease([0]) == [ACCEPT]
    play.apply()
    assert play.ack_lease([0]) == [ALREADY_ACKED]
    assert play.ack(1, 77, [1]) == [LEASE_LOST]
    play.wait(LEASE_MS)
    assert play.ack_lease([1]) == [ACCEPT], "expired, but leased to nobody else"
    play.apply()
    assert play.deliver() == [2]
    assert play.ack_lease([2], back=2) == [LEASE_LOST], "leased again"
    assert play.ack_lease([2]) == [ACCEPT]


def test_ack_of_what_was_never_handed_out_is_refused() -> None:
    play = ready(3, credit=1)
    play.deliver()
    lease = play.held[-1][1].lease_id
    asked = [1, 2, 3, 4095, 4096, 2**63, 2**64 - 1]
    assert play.ack(1, lease, asked) == [NOT_DELIVERED] * len(asked)
    play.consumers[0].credit = 5
    assert play.deliver() == [1, 2]


def test_ack_that_names_an_offset_twice_settles_it_once() -> None:
    play = ready(3)
    play.deliver()
    assert play.ack_lease([0, 0, 0]) == [ACCEPT, ALREADY_ACKED, ALREADY_ACKED]
    assert play.leases.in_flight == 2
    play.wait(LEASE_MS)
    play.apply()
    assert play.deliver() == [1, 2]
    assert play.ack(1, 99, [1, 1]) == [LEASE_LOST, LEASE_LOST]


def test_ack_while_its_lease_is_ending_is_not_undone_by_the_end() -> None:
    play = ready(1)
    play.deliver()
    play.wait(LEASE_MS)
    assert play.ack_lease() == [ACCEPT]
    play.apply(1)  # the end of the lease
    assert play.deliver() == []
    play.apply()
    assert play.group.cursor == 1


def test_repeated_ack_in_flight_is_answered_when_it_is_applied() -> None:
    play = ready(1)
    play.deliver()
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
    found = play.deliver(limit)
    while len(found) < 3:
        got = play.deliver(limit)
        assert got or play.leases.unfinished
        found += got
    assert found == holes
    assert len(looks) < 1_000
    assert max(len(offsets) for _, offsets in looks) <= SCAN_MAX


def test_messages_that_an_entry_finishes_in_two_moves_are_released_in_both() -> None:
    play = ready(1000)
    play.deliver()
    offsets = play.held[0][1].offsets
    play.group.ack(offsets)  # by the whole entry, before leases hear of its parts
    for part in np.split(offsets, [10]):
        play.leases.on_applied(GroupOp(Op.MOVE, play.group.topic, play.group.group_id, part))
    assert (play.leases.in_flight, play.leases.wake_at_ms()) == (0, None)
    assert not play.consumers[0].leases


@pytest.mark.parametrize("settle", ["ack", "nack"])
def test_marks_of_acked_messages_behind_a_stuck_one_take_no_memory(settle: str) -> None:
    with mock.patch.object(GroupColumn, "bits", 8):
        play = ready(1, credit=1_000_000)
        assert play.deliver(1) == [0]
        if settle == "nack":
            play.nack(1, 1, delay_ms=10**9)
        for _ in range(50):
            play.fire(1000)
            while play.deliver():
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
        while play.deliver():
            play.ack_lease()
        play.apply()
    assert play.group.cursor == 200_001
    assert play.leases._table._states.nbytes <= 131_072
