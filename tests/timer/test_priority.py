"""Priority among the ready messages of a shared group, and its bound on starvation."""

from unittest import mock

import numpy as np
import pytest

from tests.timer.leading import LEASE_MS, Play, schedule
from timer.entries.policies import Scope, ScopePolicy
from timer.leader.groups import shared_order
from timer.leader.groups.priority_shelf import OLDEST, RUN, SHELF_MAX, PriorityShelf
from timer.leader.groups.shared_order import SharedOrder
from timer.ready.group import Group


def delivered(play: Play, since: int = 0) -> list[int]:
    """Return the offsets of all deliveries, in their order."""
    leases = (each.lease.offsets.tolist() for each in play.deliveries[since:])
    return [offset for offsets in leases for offset in offsets]


def settle(play: Play) -> None:
    """Settle, and go on while the shelf fills in steps."""
    play.settle()
    while play.leader.groups._turns.unfinished:
        play.settle()


def take_all(play: Play, group: Group, credit: int) -> list[int]:
    """Return the offsets of all messages as a consumer gets them, `credit` at a time."""
    consumer = play.join(group, credit=0)
    start = len(play.deliveries)
    while True:
        before = len(play.deliveries)
        play.leader.groups.credit(group, consumer, credit)
        settle(play)
        for delivery in play.deliveries[before:]:
            play.ack("ack", delivery)
            play.settle()
            del play.answers["ack"]
        if len(play.deliveries) == before:
            return delivered(play, start)


def test_messages_of_a_higher_priority_come_first_and_equal_ones_in_their_order() -> None:
    play = Play()
    group = play.make_group()
    schedule(play, [4, 0, 9, 4, 9, 0])
    assert take_all(play, group, 10) == [2, 4, 0, 3, 1, 5]


@pytest.mark.parametrize("kind", ["key_shared", "exclusive"])
def test_priority_changes_nothing_where_an_order_holds(kind: str) -> None:
    play = Play()
    group = play.make_group(type=kind)
    schedule(play, [4, 0, 9, 4, 9, 0], [b"k"] * 6)
    assert take_all(play, group, 10) == [*range(6)]


def test_messages_taken_from_a_full_shelf_copy_none_of_the_others() -> None:
    shelf, offsets = PriorityShelf(), np.arange(SHELF_MAX, dtype=np.uint64)
    shelf.put(offsets, (offsets % 10).astype(np.uint8))
    before, runs = shelf.levels, 3
    for _ in range(runs * (RUN + OLDEST)):
        shelf.take(leased := shelf.choose(1))
        assert not any(np.shares_memory(leased, held) for held in before), "a lease would keep it"
    assert shelf.count == sum(map(len, shelf.levels)) == SHELF_MAX - runs * (RUN + OLDEST)
    assert all(map(np.shares_memory, before, shelf.levels))
    while shelf.count:
        shelf.take(shelf.choose(1_000))
        kept = sum(len(held if held.base is None else held.base) for held in shelf._levels)
        assert kept <= 2 * shelf.count


def test_messages_taken_while_no_others_waited_make_no_run() -> None:
    shelf, offsets = PriorityShelf(), np.arange(RUN + 10, dtype=np.uint64)
    shelf.put(offsets, np.full(len(offsets), 4, np.uint8))
    for _ in range(RUN):
        shelf.take(shelf.choose(1))
    shelf.put(offsets[-1:] + 1, np.array([9], np.uint8))
    assert shelf.choose(1) == offsets[-1:] + 1


def test_message_that_becomes_ready_passes_a_backlog_of_lower_ones() -> None:
    play = Play()
    group = play.make_group(lease_ms=600_000)
    schedule(play, [0, *[4] * 9_999])
    consumer = play.join(group, credit=100)
    play.settle()
    schedule(play, [4, 8])
    play.leader.groups.credit(group, consumer, 10)
    play.settle()
    assert delivered(play)[100] == 10_001


@pytest.mark.parametrize("credit", [1, 5, 50, 2_000])
def test_low_message_waits_no_longer_than_the_bound_while_higher_ones_come(credit: int) -> None:
    play = Play()
    group = play.make_group(lease_ms=600_000)
    low, ahead = 20, 3
    schedule(play, [*[0] * low, *[9] * 400])
    consumer, got = play.join(group, credit=0), list[int]()
    for _ in range(40_000 // credit):
        play.leader.groups.credit(group, consumer, credit)
        play.settle()
        got = delivered(play)
        if set(range(low)) <= set(got):
            break
        schedule(play, [9] * credit)
    for offset in range(low):
        wait_max = (offset // OLDEST + 1) * (RUN + OLDEST)
        assert got.index(offset) < wait_max, (offset, got.index(offset))
    assert got.index(ahead) >= RUN, "the lowest priority came before the highest"


def test_returned_message_keeps_its_priority_and_a_new_leader_sorts_anew() -> None:
    play = Play()
    group = play.make_group(lease_ms=600_000)
    schedule(play, [4, 4, 9])
    consumer = play.join(group, credit=1)
    play.settle()
    assert play.last()[0] == [2]
    play.nack("nack", play.deliveries[-1], delay_ms=0)
    play.settle()
    play.leader.groups.credit(group, consumer, 1)
    play.settle()
    assert play.last()[0] == [2]
    play.restart()
    assert take_all(play, group, 10) == [2, 0, 1]


def test_delayed_message_behind_the_end_of_a_fill_is_delivered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_order, "SHELF_MAX", 64)
    play = Play()
    group = play.make_group(lease_ms=600_000)
    schedule(play, [5] * 200)
    play.join(group, credit=200)
    settle(play)
    delivery = play.deliveries[1]
    assert delivery.lease.offsets.tolist() == [*range(64, 128)]
    play.ack("ack", delivery, [*range(64, 74)])
    play.nack("nack", delivery, [89], delay_ms=500)
    play.settle()
    play.restart()
    consumer, start = play.join(group, credit=0), len(play.deliveries)
    for credit in (10, 10, 10, 200):
        play.leader.groups.credit(group, consumer, credit)
        settle(play)
        play.wait(300)
    got = delivered(play, start)
    assert sorted(got) == sorted({*range(200)} - {*range(64, 74)})


def test_backlog_beyond_the_shelf_is_delivered_whole_and_once() -> None:
    play = Play()
    group = play.make_group(lease_ms=600_000)
    for _ in range(2):
        schedule(play, ([4] * (OLDEST - 1) + [7]) * (SHELF_MAX // OLDEST // 2 + 1_000))
    got = take_all(play, group, 20_000)
    assert sorted(got) == [*range(len(got))]
    assert len(got) == 2 * OLDEST * (SHELF_MAX // OLDEST // 2 + 1_000)
    assert not play.leader.groups._leases[group.group_id]._order._shelf.count  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", [0, 2], ids=["all", "those behind younger ones"])
def test_messages_that_expire_on_the_shelf_leave_it_in_one_pass(first: int) -> None:
    play, ttl_ms, count = Play(), 60_000, 1_000
    group = play.make_group(lease_ms=600_000)
    policy = ScopePolicy(ttl_ms=ttl_ms)
    play.leader.set_policy(Scope("", play.topic_id), policy, (), play.now, play.done("policy"))
    if first:
        schedule(play, [4] * first)
    schedule(play, [3, 9] * (count // 2), ago_ms=ttl_ms - 1)
    consumer = play.join(group, credit=1)
    play.settle()
    assert delivered(play) == [first + 1]
    play.wait(LEASE_MS)
    play.settle()
    if not first:
        schedule(play, [4])
    look = mock.patch.object(
        SharedOrder, "_deliverable", autospec=True, side_effect=SharedOrder._deliverable
    )
    with look as looks:
        play.leader.groups.credit(group, consumer, 2)
        settle(play)
    assert delivered(play)[1:] == ([*range(first)] or [count])
    assert group.expired == count
    assert looks.call_count < 30


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
@pytest.mark.parametrize("last", [4, 9])
def test_messages_fill_the_room_of_a_consumer_and_one_may_exceed_it(kind: str, last: int) -> None:
    play = Play()
    group = play.make_group(type=kind)
    schedule(play, [4, 4, 4, last])
    by_priority = (kind, last) == ("shared", 9)
    order = [3, 0, 1, 2] if by_priority else [*range(4)]
    queue = play.machine.topics[play.topic_id].queue
    sizes = [queue.bytes_of(np.array([offset], np.uint64)) for offset in order]
    consumer = play.join(group, credit=0)
    consumer.bytes_left = sum(sizes[:2]) + 1
    play.leader.groups.credit(group, consumer, 10)
    settle(play)
    counts = [len(each.lease.offsets) for each in play.deliveries]
    assert counts == ([1, 1, 1] if by_priority else [2, 1]), "of one level each"
    assert consumer.bytes_left == 1 - sizes[2]
    consumer.bytes_left = 1
    play.leader.groups.credit(group, consumer, 0)
    settle(play)
    assert delivered(play) == order
