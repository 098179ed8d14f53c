"""Whole timer clusters in the simulator: the promises hold, and the book finds broken ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from chaos.oracle import story
from chaos.oracle.group_story import GroupStory
from chaos.oracle.pending_rows import ROW
from chaos.sim.checks.book import AHEAD_MS_MAX, DeliveredRow, PromiseBook
from chaos.sim.checks.keybook import AnsweredRow, TimerName
from chaos.sim.checks.orderbook import OrderBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.referee import Broken
from chaos.sim.world.simdisk import STATE_PATH
from tests.chaos.planted.planted import calm
from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Fire, GroupOp, GroupSettings, Op
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream, Lease
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
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    DROPPED,
    SeekApplied,
)
from timer.state.key_conflicts import Verdict

NAME = TimerName(1_000, 7)
TOPIC = ("a", b"")
PLACE = 1, 0


def test_timer_promises_hold() -> None:
    world = TimerWorld(0)  # a quick one: `make test` plays many beside
    world.run(60)
    book = world.town.book
    assert book.timers
    assert len(book.delivered) >= len(book.fired)
    assert book.digests
    assert world.rows() > 3 * len(book.timers) // 2


def test_clients_reach_a_leader_whose_disk_is_damaged() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    leader = world.town.leader()
    assert leader is not None
    leader.node.damage.append(STATE_PATH)
    assert world.town.leader() is leader


def book_of(*fired: TimerName) -> PromiseBook:
    """Return a book after a log with a pending timer, NAME, or with these that fired."""
    book = PromiseBook()
    rows = np.zeros(1, ROW)
    rows["due_ms"], rows["seq"], rows["topic"] = NAME.due_ms, NAME.seq, 1
    book.fates.story._pending.add(rows)
    book.fates.story.groups[1] = GroupStory(1, 1, "g", 0, 9, 0)
    book.fates.queues[1] += fired
    book.fates.ends.update({name.seq: story.FIRED for name in fired})
    book.note_request([b"x"])
    book.check_scheduled(NAME, TOPIC, NAME.due_ms)
    return book


def told(
    name: TimerName = NAME, verdict: Verdict = Verdict.SCHEDULED, other: int = 0
) -> AnsweredRow:
    return AnsweredRow(name.seq, verdict, name, TimerName(1_000, other) if other else None)


def row(name: TimerName = NAME, fired_at_ms: int = 1_000, payload: bytes = b"x") -> DeliveredRow:
    return DeliveredRow(name, fired_at_ms, payload)


def entry(index: int, time_ms: int, read_time_ms: int) -> Entry:
    payload = memoryview(payloads.encode_fire(Fire(UnixMs(read_time_ms))))
    return Entry(EntryKind.FIRE, Epoch(1), LogIndex(index), UnixMs(time_ms), payload)


def test_delivery_of_what_nobody_scheduled_is_a_phantom() -> None:
    with pytest.raises(Broken, match="phantom"):
        book_of(NAME).seen(PLACE, row(payload=b"y"), 1)


def test_timer_at_another_offset_and_request_with_two_timers_are_told_twice() -> None:
    other = TimerName(1_000, 8)
    book = book_of(NAME, other)
    book.seen(PLACE, row(), 1)
    with pytest.raises(Broken, match="twice"):
        book.seen((1, 1), row(), 1)
    with pytest.raises(Broken, match="twice"):
        book.seen((1, 1), row(other), 1)
    with pytest.raises(Broken, match="twice"):
        book.check_repeat([told(NAME)], [told(other)])


def test_letter_that_is_not_the_message_that_it_was_is_told() -> None:
    letter = TimerName(1_000, 9)
    book = book_of(NAME, letter)
    book.fates.origins[letter] = NAME
    book.seen(PLACE, row(), 1)
    book.seen((1, 1), row(letter), 1)
    book.fates.origins[letter] = TimerName(1_000, 8)
    with pytest.raises(Broken, match="redrive"):
        book.seen((1, 1), row(letter), 2)


def test_firing_before_the_due_time_is_early() -> None:
    with pytest.raises(Broken, match="early"):
        book_of(NAME).seen(PLACE, row(fired_at_ms=999), 1)
    with pytest.raises(Broken, match="early"):
        book_of().check_scheduled(NAME, TOPIC, 1_001)


def test_promised_timer_that_is_not_in_the_log_is_lost() -> None:
    with pytest.raises(Broken, match="lost"):
        book_of().check_scheduled(TimerName(1_000, 8), TOPIC)


def test_clock_of_the_log_is_compared_with_the_true_time_and_never_goes_back() -> None:
    book = PromiseBook()
    book.on_commit(entry(1, 50_000, 40_000), 50_000 - AHEAD_MS_MAX)
    book.on_commit(entry(1, 99_000_000, 0), 0)  # of another replica; the book has read the entry
    with pytest.raises(Broken, match="clock"):
        book.on_commit(entry(2, 50_001, 40_000), 50_000 - AHEAD_MS_MAX)
    with pytest.raises(Broken, match="time"):
        book.on_commit(entry(3, 50_001, 39_999), None)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (CANCELLED, None),
        (CANCELLED, story.FIRED),
        (ALREADY_CANCELLED, story.FIRED),
        (ALREADY_FIRED, story.CANCELLED),
        (ALREADY_FIRED, story.DROPPED),
        (DROPPED, story.CANCELLED),
    ],
)
def test_cancel_whose_answer_differs_from_the_log_lies(outcome: int, end: int | None) -> None:
    book = book_of()
    if end is not None:
        book.fates.ends[NAME.seq] = end
    with pytest.raises(Broken, match="cancel"):
        book.check_cancel(NAME, outcome)


def test_timer_is_cancelled_once_and_that_of_a_deleted_topic_is_not_judged() -> None:
    book = book_of()
    book.fates.ends[NAME.seq] = story.CANCELLED
    book.check_cancel(NAME, CANCELLED)
    book.check_cancel(NAME, ALREADY_CANCELLED)
    with pytest.raises(Broken, match="cancel"):
        book.check_cancel(NAME, CANCELLED)
    book.fates.ends[NAME.seq] = story.DROPPED
    book.fates.gone.add(NAME.seq)
    book.check_cancel(NAME, ALREADY_FIRED)


def test_delivery_after_its_ack_and_one_that_does_not_say_again_are_told() -> None:
    book = book_of(NAME)
    book.seen(PLACE, row(), 1)
    with pytest.raises(Broken, match="unmarked"):
        book.seen(PLACE, row(), 1)
    book.seen(PLACE, row(), 2)
    book.fates.done.add(PLACE)
    book.check_ack(PLACE, counts=True)
    with pytest.raises(Broken, match="acked"):
        book.seen(PLACE, row(), 3)


@pytest.mark.parametrize(
    ("ended", "checker"), [("", "lost"), ("over", "expiry"), ("moved", "dead")]
)
def test_ack_that_the_log_lacks_is_told(ended: str, checker: str) -> None:
    book = book_of(NAME)
    if ended:
        getattr(book.fates, ended).add(PLACE)
    with pytest.raises(Broken, match=checker):
        book.check_ack(PLACE, counts=True)


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
    PromiseBook().check_delivery("node 1", handed_out(3, 5), Epoch(3))
    with pytest.raises(Broken, match="handout"):
        PromiseBook().check_delivery("node 1", handed_out(2, 5), Epoch(3))


def test_nacked_message_that_comes_before_its_time_is_told() -> None:
    book = PromiseBook(nacks={(1, 7): 5, (1, 8): 99, (2, 7): 99})
    book.check_delivery("node 1", handed_out(3, 5), Epoch(3))
    with pytest.raises(Broken, match="nack"):
        book.check_delivery("node 1", handed_out(3, 4), Epoch(3))


def test_counts_that_do_not_add_up_are_told() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    machine = world.town.apps()[0].engine.machine
    book = world.town.book
    book.check_counts("node 1", machine, machine.voters)  # type: ignore[arg-type]
    machine.counts.fired += 1
    with pytest.raises(Broken, match="conservation"):
        book.check_counts("node 1", machine, machine.voters)  # type: ignore[arg-type]


def test_offset_that_a_group_never_got_is_lost() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    book = world.town.book
    app = world.town.apps()[0]
    book.at_end(app)
    book.delivered.remove(min(book.delivered - book.fates.moved))
    with pytest.raises(Broken, match="lost"):
        book.at_end(app)


# ---- keys


def test_answer_about_a_key_is_compared_with_the_log() -> None:
    book = book_of()
    book.fates.ends |= {8: story.REJECTED, 9: story.KEPT, 10: story.REJECTED}
    book.fates.others |= {8: 7, 9: 7, 10: 0, 11: 7}
    fine = [(8, Verdict.REJECTED, 7), (9, Verdict.KEPT, 7), (10, Verdict.NOT_PENDING, 0)]
    for seq, verdict, other in fine:
        book.check_key(told(TimerName(1_000, seq), verdict, other))
    lies = [(7, Verdict.KEPT, 0), (8, Verdict.KEPT, 7), (9, Verdict.KEPT, 8)]
    lies += [(8, Verdict.NOT_PENDING, 0), (10, Verdict.REJECTED, 7), (11, Verdict.SCHEDULED, 0)]
    for seq, verdict, other in lies:
        with pytest.raises(Broken, match="key"):
            book.check_key(told(TimerName(1_000, seq), verdict, other))
    with pytest.raises(Broken, match="lost"):
        book.check_scheduled(TimerName(1_000, 8), TOPIC)


def test_timer_ends_for_one_other_timer_and_as_the_log_has_it() -> None:
    book, after = book_of(), TimerName(1_000, 9)
    book.fates.others |= {9: NAME.seq, 10: NAME.seq}
    with pytest.raises(Broken, match="key"):
        book.check_key(told(after, Verdict.REPLACED, NAME.seq))
    book.fates.ends[NAME.seq] = story.REPLACED
    book.check_key(told(after, Verdict.REPLACED, NAME.seq))
    with pytest.raises(Broken, match="key"):
        book.check_key(told(TimerName(1_000, 10), Verdict.REPLACED, NAME.seq))
    with pytest.raises(Broken, match="key"):
        book.check_reschedule(NAME, after)


def test_key_of_a_timer_that_nobody_heard_of_is_known_by_its_reschedule() -> None:
    book, key = book_of(), ("a", b"k")
    book.fates.ends[9] = story.RESCHEDULED
    book.check_reschedule(TimerName(5, 9), NAME, key)
    assert book.timers[NAME] == key


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
    book.check_delivery(ordered("key_shared", 0, 2, consumer=x))
    book.check_delivery(ordered("key_shared", 1, consumer=y))
    book.note_commit(op(Op.ACK, 0))
    book.note_commit(op(Op.NACK, 2))
    book.check_delivery(ordered("key_shared", 2, 4, consumer=y))
    book.note_ack_request(1, [1])
    book.check_delivery(ordered("key_shared", 3, consumer=x))
    book.check_delivery(ordered("failover", 1, 2, 3, consumer=x, epoch=4))


def test_message_before_an_earlier_one_of_its_key_is_told() -> None:
    book, x, y = order_book()
    with pytest.raises(Broken, match=r"order: g .key_shared. of t gets 2 before 0"):
        book.check_delivery(ordered("key_shared", 2, consumer=x))
    book.check_delivery(ordered("key_shared", 0, consumer=x))
    with pytest.raises(Broken, match="gets 2 before 0"):
        book.check_delivery(ordered("key_shared", 2, consumer=y))
    with pytest.raises(Broken, match="gets 2 before 0"):
        book.check_delivery(ordered("exclusive", 2, consumer=x, epoch=4))


def test_message_that_expired_alone_is_waited_for_until_then_and_no_longer() -> None:
    book, x, _ = order_book()
    book.check_delivery(ordered("exclusive", 0, consumer=x))
    with pytest.raises(Broken, match="gets 2 before 1"):
        book.check_delivery(ordered("exclusive", 2, consumer=x))
    book.note_commit(op(Op.EXPIRE, 1))
    book.check_delivery(ordered("exclusive", 2, consumer=x))


def test_message_that_comes_again_behind_what_was_not_taken_back_is_told() -> None:
    book, x, _ = order_book()
    book.check_delivery(ordered("failover", 0, 1, consumer=x))
    book.note_commit(op(Op.NACK, 0))
    with pytest.raises(Broken, match="gets 0 again behind 1"):
        book.check_delivery(ordered("failover", 0, consumer=x))
    book.note_commit(op(Op.RECALL, 1))
    book.check_delivery(ordered("failover", 0, 1, consumer=x))


def test_group_that_is_not_where_it_was_sought_to_is_told() -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    machine = world.town.apps()[0].engine.machine
    topic = next(each for each in machine.topics.values() if each.groups)
    group = next(iter(topic.groups.values()))
    sought = GroupOp(Op.SEEK, topic.topic_id, group.group_id, np.array([group.cursor], np.uint64))
    world.town.book._check_seek(machine, SeekApplied(sought, group))
    world.town.book.first_lives.clear()
    group.cursor = QueueOffset(group.cursor - 1)
    with pytest.raises(Broken, match="seek"):
        world.town.book._check_seek(machine, SeekApplied(sought, group))


def test_replica_that_is_behind_at_the_end_is_not_asked_for_what_came_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = TimerWorld(1, options=calm(1))
    world.run(5)
    ahead, behind = world.town.apps()[0], SimpleNamespace(applied_index=1, node=None)
    monkeypatch.setattr(world.town, "apps", lambda: [behind, ahead])
    assert world.town._newest_apps() == [ahead]
