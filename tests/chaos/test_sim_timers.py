"""Whole timer clusters in the simulator: the promises hold, and the book finds broken ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from chaos.sim.checks.book import AHEAD_MS_MAX, DeliveredRow, PromiseBook
from chaos.sim.checks.keybook import TimerName, ToldRow
from chaos.sim.checks.orderbook import OrderBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.paths import STATE_PATH
from chaos.sim.world.referee import Broken
from tests.chaos.planted.planted import calm
from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Fire, GroupOp, GroupSettings, Op
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream, Lease
from timer.model.columns import OnConflict
from timer.model.units import (
    Epoch,
    GroupId,
    LeaseId,
    LogIndex,
    MonoMs,
    QueueOffset,
    TopicId,
    UnixMs,
)
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.apply_results import ALREADY_CANCELLED, ALREADY_FIRED, CANCELLED, SeekApplied
from timer.state.key_conflicts import Verdict

NAME = TimerName(1_000, 7)
KEY = ("a", "g", 0)


def test_timer_promises_hold() -> None:
    world = TimerWorld(0)  # a quick one: `make test` plays many beside
    world.run(60)
    book = world.town.book
    assert book.timers
    assert book.deliveries >= len(book.fired)
    assert book.digests
    assert world.rows() > 3 * len(book.timers) // 2


def test_clients_reach_a_leader_whose_disk_is_damaged() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    leader = world.town.leader()
    assert leader is not None
    leader.node.damage.append(STATE_PATH)
    assert world.town.leader() is leader


def book_of() -> PromiseBook:
    book = PromiseBook()
    book.asked([b"x"])
    book.scheduled(NAME, "a", NAME.due_ms)
    return book


def told(name: TimerName = NAME, verdict: Verdict = Verdict.SCHEDULED, other: int = 0) -> ToldRow:
    return ToldRow(name.seq, verdict, name, TimerName(1_000, other) if other else None)


def row(name: TimerName = NAME, fired_at_ms: int = 1_000, payload: bytes = b"x") -> DeliveredRow:
    return DeliveredRow(name, fired_at_ms, payload)


def entry(index: int, time_ms: int, read_time_ms: int) -> Entry:
    payload = memoryview(payloads.encode_fire(Fire(UnixMs(read_time_ms))))
    return Entry(EntryKind.FIRE, Epoch(1), LogIndex(index), UnixMs(time_ms), payload)


def test_delivery_of_what_nobody_scheduled_is_a_phantom() -> None:
    with pytest.raises(Broken, match="phantom"):
        book_of().seen(KEY, row(payload=b"y"), 1)


def test_timer_at_two_offsets_and_request_with_two_timers_are_told_twice() -> None:
    book = book_of()
    book.seen(KEY, row(), 1)
    with pytest.raises(Broken, match="twice"):
        book.seen(("a", "g", 1), row(), 1)
    with pytest.raises(Broken, match="twice"):
        book.seen(("a", "g", 1), row(TimerName(1_000, 8)), 1)
    with pytest.raises(Broken, match="twice"):
        book.answered_again([told(NAME)], [told(TimerName(1_000, 8))])


def test_firing_before_the_due_time_is_early() -> None:
    with pytest.raises(Broken, match="early"):
        book_of().seen(KEY, row(fired_at_ms=999), 1)
    with pytest.raises(Broken, match="early"):
        book_of().scheduled(TimerName(999, 8), "a", 1_000)


def test_clock_of_the_log_is_compared_with_the_true_time_and_never_goes_back() -> None:
    book = PromiseBook()
    book.on_commit(entry(1, 50_000, 40_000), 50_000 - AHEAD_MS_MAX)
    book.on_commit(entry(1, 99_000_000, 0), 0)  # of another replica; the book has read the entry
    with pytest.raises(Broken, match="clock"):
        book.on_commit(entry(2, 50_001, 40_000), 50_000 - AHEAD_MS_MAX)
    with pytest.raises(Broken, match="time"):
        book.on_commit(entry(3, 50_001, 39_999), None)


@pytest.mark.parametrize("outcome", [CANCELLED, ALREADY_CANCELLED])
def test_cancel_that_says_so_of_a_delivered_timer_lies(outcome: int) -> None:
    book = book_of()
    book.seen(KEY, row(), 1)
    book.cancel_asked(NAME)
    with pytest.raises(Broken, match="cancel"):
        book.cancel_answered(NAME, outcome)


@pytest.mark.parametrize("outcome", [CANCELLED, ALREADY_FIRED])
def test_cancelled_timer_is_neither_cancelled_again_nor_fired(outcome: int) -> None:
    book = book_of()
    book.cancel_asked(NAME)
    book.cancel_answered(NAME, CANCELLED)
    with pytest.raises(Broken, match="cancel"):
        book.cancel_answered(NAME, outcome)
    with pytest.raises(Broken, match="cancel"):
        book.seen(KEY, row(), 1)


def test_delivery_after_its_ack_and_one_that_does_not_say_again_are_told() -> None:
    book = book_of()
    book.seen(KEY, row(), 1)
    with pytest.raises(Broken, match="unmarked"):
        book.seen(KEY, row(), 1)
    book.seen(KEY, row(), 2)
    book.acked.add(KEY)
    with pytest.raises(Broken, match="acked"):
        book.seen(KEY, row(), 3)


def handed_out(epoch: int, at_ms: int) -> Delivery:
    """Return the delivery of one message."""
    group = Group(
        group_id=GroupId(1),
        topic=TopicId(1),
        name="g",
        settings=GroupSettings(lease_ms=1),
        cursor=QueueOffset(0),
        reserved=QueueOffset(9),
    )
    consumer, offsets = ConsumerStream("c", 1, lambda _: None), np.array([7], np.uint64)
    lease = Lease(LeaseId(1), consumer, offsets, MonoMs(1), 1)
    topic, counts = Topic(TopicId(1), "t"), (np.ones(1, np.uint32), np.zeros(1, np.uint32))
    return Delivery(Epoch(epoch), topic, group, lease, *counts, UnixMs(at_ms))


def test_deposed_leader_that_hands_out_is_told() -> None:
    PromiseBook().handed_out("node 1", handed_out(3, 5), Epoch(3))
    with pytest.raises(Broken, match="handout"):
        PromiseBook().handed_out("node 1", handed_out(2, 5), Epoch(3))


def test_nacked_message_that_comes_before_its_time_is_told() -> None:
    book = PromiseBook(nacks={(1, 1, 7): 5, (1, 1, 8): 99, (1, 2, 7): 99})
    book.handed_out("node 1", handed_out(3, 5), Epoch(3))
    with pytest.raises(Broken, match="nack"):
        book.handed_out("node 1", handed_out(3, 4), Epoch(3))


def test_counts_that_do_not_add_up_are_told() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    machine = world.town.apps()[0].engine.machine
    book = world.town.book
    book.applied("node 1", machine, machine.voters)  # type: ignore[arg-type]
    machine.counts.fired += 1
    with pytest.raises(Broken, match="conservation"):
        book.applied("node 1", machine, machine.voters)  # type: ignore[arg-type]


def test_offset_that_a_group_never_got_is_lost() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    book = world.town.book
    app = world.town.apps()[0]
    book.at_end(app)
    dead = {(*book.lives[GroupId(g)], offset) for _, g, offset in book.dead}
    book.delivered.remove(min(book.delivered - dead))
    with pytest.raises(Broken, match="lost"):
        book.at_end(app)


# ---- keys

K = ("a", b"k")


def test_delivery_of_what_was_replaced_breaks_its_key() -> None:
    book = book_of()
    book.keys.row(
        K, OnConflict.REPLACE, told(TimerName(1_000, 9), Verdict.REPLACED, 7), fired=False
    )
    with pytest.raises(Broken, match="key"):
        book.seen(KEY, row(), 1)
    with pytest.raises(Broken, match="key"):
        book.keys.end(NAME, 10, fired=False)
    book.cancel_asked(NAME)
    with pytest.raises(Broken, match="cancel"):
        book.cancel_answered(NAME, CANCELLED)


def test_replacement_of_what_was_delivered_breaks_its_key() -> None:
    with pytest.raises(Broken, match="key"):
        book_of().keys.end(NAME, 9, fired=True)


@pytest.mark.parametrize(
    ("mode", "verdict", "other"),
    [
        (OnConflict.KEEP, Verdict.REJECTED, 7),
        (OnConflict.REPLACE, Verdict.KEPT, 7),
        (OnConflict.KEEP, Verdict.KEPT, 12),
        (OnConflict.KEEP, Verdict.KEPT, 8),
        (OnConflict.REJECT, Verdict.SCHEDULED, 0),
        (OnConflict.UPDATE, Verdict.SCHEDULED, 0),
        (OnConflict.UPDATE, Verdict.NOT_PENDING, 0),
        (OnConflict.REPLACE, Verdict.NOT_PENDING, 0),
    ],
)
def test_answers_that_do_not_fit_in_the_order_of_the_log_break_their_key(
    mode: OnConflict, verdict: Verdict, other: int
) -> None:
    book = book_of()
    keys = book.keys
    keys.row(K, OnConflict.REJECT, told(), fired=False)
    keys.row(("a", b"l"), OnConflict.REJECT, told(TimerName(1_000, 8)), fired=False)
    keys.end(NAME, 20, fired=False)
    keys.row(K, mode, told(TimerName(1_000, 10), verdict, other), fired=False)
    with pytest.raises(Broken, match="key"):
        keys.at_end({NAME, TimerName(1_000, 8)})


def test_answers_that_fit_break_nothing() -> None:
    book = book_of()
    book.keys.row(K, OnConflict.REJECT, told(), fired=False)
    book.keys.row(K, OnConflict.KEEP, told(TimerName(1_000, 8), Verdict.KEPT, 7), fired=False)
    book.keys.row(K, OnConflict.REPLACE, told(TimerName(5, 9), Verdict.REPLACED, 7), fired=False)
    book.rescheduled(TimerName(5, 9), TimerName(6, 10))
    last = told(TimerName(1_000, 11), Verdict.REPLACED, 10)
    book.keys.row(K, OnConflict.UPDATE, last, fired=False)
    nothing = told(TimerName(1_000, 12), Verdict.NOT_PENDING)
    book.keys.row(("a", b"l"), OnConflict.UPDATE, nothing, fired=False)
    book.keys.at_end({NAME})
    assert book.keys.keys[TimerName(6, 10)] == K


def test_key_of_a_timer_that_nobody_heard_of_is_known_by_its_reschedule() -> None:
    book = book_of()
    book.rescheduled(TimerName(5, 9), TimerName(6, 10), K)
    assert book.keys.keys[TimerName(6, 10)] == K


# ---- order


def ordered(kind: str, *offsets: int, consumer: ConsumerStream, epoch: int = 3) -> Delivery:
    """Return a delivery of messages of a group that keeps an order."""
    one = handed_out(epoch, 5)
    one.group.settings = GroupSettings(lease_ms=1, type=kind)
    lease = Lease(LeaseId(1), consumer, np.array(offsets, np.uint64), MonoMs(1), len(offsets))
    return Delivery(one.epoch, one.topic, one.group, lease, one.attempts, one.failures, one.at_ms)


def order_book() -> tuple[OrderBook, ConsumerStream, ConsumerStream]:
    """Return a book of a topic with keys a b a b a b, and two consumers."""
    x, y = (ConsumerStream(name, 1, lambda _: None) for name in "xy")
    return OrderBook(keys={1: [b"a", b"b"] * 3}), x, y


def op(kind: Op, *offsets: int) -> GroupOp:
    return GroupOp(kind, TopicId(1), GroupId(1), np.array(offsets, np.uint64))


def test_what_is_handed_out_in_order_breaks_nothing() -> None:
    book, x, y = order_book()
    book.handed_out(ordered("key_shared", 0, 2, consumer=x))
    book.handed_out(ordered("key_shared", 1, consumer=y))
    book.committed(op(Op.ACK, 0))
    book.committed(op(Op.NACK, 2))
    book.handed_out(ordered("key_shared", 2, 4, consumer=y))
    book.ack_asked(1, [1])
    book.handed_out(ordered("key_shared", 3, consumer=x))
    book.handed_out(ordered("failover", 1, 2, 3, consumer=x, epoch=4))


def test_message_before_an_earlier_one_of_its_key_is_told() -> None:
    book, x, y = order_book()
    with pytest.raises(Broken, match=r"order: g .key_shared. of t gets 2 before 0"):
        book.handed_out(ordered("key_shared", 2, consumer=x))
    book.handed_out(ordered("key_shared", 0, consumer=x))
    with pytest.raises(Broken, match="gets 2 before 0"):
        book.handed_out(ordered("key_shared", 2, consumer=y))
    with pytest.raises(Broken, match="gets 2 before 0"):
        book.handed_out(ordered("exclusive", 2, consumer=x, epoch=4))


def test_message_that_expired_alone_is_waited_for_until_then_and_no_longer() -> None:
    book, x, _ = order_book()
    book.handed_out(ordered("exclusive", 0, consumer=x))
    with pytest.raises(Broken, match="gets 2 before 1"):
        book.handed_out(ordered("exclusive", 2, consumer=x))
    book.committed(op(Op.EXPIRE, 1))
    book.handed_out(ordered("exclusive", 2, consumer=x))


def test_message_that_comes_again_behind_what_was_not_taken_back_is_told() -> None:
    book, x, _ = order_book()
    book.handed_out(ordered("failover", 0, 1, consumer=x))
    book.committed(op(Op.NACK, 0))
    with pytest.raises(Broken, match="gets 0 again behind 1"):
        book.handed_out(ordered("failover", 0, consumer=x))
    book.committed(op(Op.RECALL, 1))
    book.handed_out(ordered("failover", 0, 1, consumer=x))


def test_group_that_is_not_where_it_was_sought_to_is_told() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    machine = world.town.apps()[0].engine.machine
    topic = next(each for each in machine.topics.values() if each.groups)
    group = next(iter(topic.groups.values()))
    sought = GroupOp(Op.SEEK, topic.topic_id, group.group_id, np.array([group.cursor], np.uint64))
    world.town.book._sought(machine, SeekApplied(sought, group))
    world.town.book.first_lives.clear()
    group.cursor = QueueOffset(group.cursor - 1)
    with pytest.raises(Broken, match="seek"):
        world.town.book._sought(machine, SeekApplied(sought, group))


def test_replica_that_is_behind_at_the_end_is_not_asked_for_what_came_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    ahead, behind = world.town.apps()[0], SimpleNamespace(applied_index=1, node=None)
    monkeypatch.setattr(world.town, "apps", lambda: [behind, ahead])
    assert world.town._whole() == [ahead]
