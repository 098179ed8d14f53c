"""Redrives, altered groups and cumulative acks in the simulator, and errors that the book finds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.sim.checks.book import PromiseBook
from chaos.sim.checks.keybook import TimerName
from chaos.sim.checks.letterbook import LetterBook
from chaos.sim.checks.orderbook import OrderBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.referee import Broken
from tests.chaos.planted.planted import calm
from timer.entries.payloads import GroupOp, Move, Op
from timer.model.columns import Binary, Part, encode_schedule
from timer.model.units import (
    GroupId,
    ProducerId,
    QueueOffset,
    Seq,
    TopicId,
)
from timer.ready.queue import Queue
from timer.ready.topic import Topic
from timer.state.apply_results import MoveApplied


def test_letters_are_redriven_while_messages_die() -> None:
    world = TimerWorld(6, options=calm(6).aim(redrives=True, proposals_per_s=16))
    world.run(8)
    letters = world.town.book.letters
    assert len(letters.home) > 5
    assert sum(letters.ends.values()) > len(letters.home)


def test_messages_are_acked_by_the_last_of_them_where_groups_are_sought_and_altered() -> None:
    world = TimerWorld(12, options=calm(12).aim(types=True, redrives=True, proposals_per_s=16))
    world.run(8)
    book = world.town.book
    assert book.ups
    assert book.seeks


LIFE = "t", "g#1"


def asked_up_to(offset: int, acked: list[int]) -> PromiseBook:
    """Return the book of a group with three messages, the last of them delivered.

    A consumer requests an ack of all messages up to `offset`; the log has an ack of `acked`.
    """
    book = PromiseBook()
    book.lives[GroupId(1)] = LIFE
    book.starts[LIFE] = QueueOffset(0)
    book.delivered.add((*LIFE, 2))
    book.asks_up_to(LIFE, offset)
    book._passes(GroupOp(Op.ACK, TopicId(1), GroupId(1), np.array(acked, np.uint64)))
    return book


def all_came(book: PromiseBook) -> None:
    group = SimpleNamespace(name="g", group_id=1, is_acked=lambda offsets: offsets >= 0)
    queue = SimpleNamespace(end=3)
    topic = SimpleNamespace(name="t", topic_id=1, queue=queue, groups={"g": group})
    machine: Any = SimpleNamespace(topics={1: topic})
    book._groups_at_end(machine)


def test_messages_below_an_ack_of_all_up_to_one_need_not_come_once_the_log_has_it() -> None:
    all_came(asked_up_to(2, [0, 1, 2]))


@pytest.mark.parametrize(
    ("offset", "acked", "lost"),
    [(2, [], 0), (2, [0], 1), (0, [0, 1, 2], 1)],
    ids=["refused, or never there", "in part", "not of that one"],
)
def test_message_that_nobody_got_is_lost_below_an_ack_that_was_refused(
    offset: int, acked: list[int], lost: int
) -> None:
    with pytest.raises(Broken, match=f"lost: .* never got {lost} of 3"):
        all_came(asked_up_to(offset, acked))


def test_what_fired_may_be_unseen_only_where_something_was_passed_over() -> None:
    a, b, c, d = (TimerName(5, seq) for seq in range(1, 5))
    nobody: Any = None
    order = OrderBook(names={1: [a, b], 2: [c], 3: [d]})
    assert order.unseen(()) == set()
    order.committed(GroupOp(Op.SEEK, TopicId(2), GroupId(7), np.array([0], np.uint64)))
    assert order.unseen([(1, 9, 1)]) == {b, c}
    topic = Topic(TopicId(3), "t", Queue(begin=QueueOffset(1), end=QueueOffset(1)))
    machine: Any = SimpleNamespace(topics={TopicId(3): topic})
    topic.groups["g"] = nobody
    order.fired(machine)
    assert order.unseen(()) == {c}
    topic.groups.clear()
    order.fired(machine)
    topic.groups["late"] = nobody
    order.fired(machine)
    assert order.unseen(()) == {c, d}, "it let go while nobody read it"


DEAD, HOME = TopicId(2), TopicId(1)


def moved(topic: TopicId, to: TopicId, letters: dict[int, bytes], first_seq: int) -> MoveApplied:
    """Return the result of a MOVE of these offsets with these payloads."""
    times = np.full(len(letters), 5, np.int64)
    part = Part(
        producer_id=ProducerId(0), sequence=0, due_ms=times, requested_ms=times,
        topic=np.zeros(len(letters), np.uint32), payload=Binary.of([*letters.values()]),
    )  # fmt: skip
    offsets = np.array([*letters], np.uint64)
    op = Move(Op.MOVE, topic, GroupId(1), offsets, "?", "", b"".join(encode_schedule([part])))
    return MoveApplied(op, np.ones(len(letters), np.bool_), to, Seq(first_seq), None)


MACHINE: Any = SimpleNamespace(
    topics={HOME: SimpleNamespace(name="t"), TopicId(3): SimpleNamespace(name="u")}
)
FIRED = {TimerName(5, seq) for seq in range(1, 30)}


@pytest.fixture
def book() -> LetterBook:
    book = LetterBook()
    book.buried(moved(HOME, DEAD, {4: b"x", 7: b"y"}, 10), "t")
    return book


def test_letter_goes_home_once_as_it_was(book: LetterBook) -> None:
    book.redriven(MACHINE, moved(DEAD, HOME, {0: b"x", 1: b"y"}, 20), FIRED)
    assert book.home == {TimerName(5, 20): b"x", TimerName(5, 21): b"y"}
    with pytest.raises(Broken, match="redrive: 1 of topic 2"):
        book.redriven(MACHINE, moved(DEAD, HOME, {1: b"y"}, 22), FIRED)


@pytest.mark.parametrize(
    ("to", "letters", "first_seq", "checker"),
    [
        (HOME, {0: b"y"}, 20, "redrive"),
        (HOME, {2: b"x"}, 20, "redrive"),
        (TopicId(3), {0: b"x"}, 20, "redrive"),
        (HOME, {0: b"x"}, 30, "lost"),
    ],
    ids=["another payload", "no such letter", "another topic", "it never fired"],
)
def test_letter_that_goes_astray_is_noticed(
    book: LetterBook, to: TopicId, letters: dict[int, bytes], first_seq: int, checker: str
) -> None:
    with pytest.raises(Broken) as found:
        book.redriven(MACHINE, moved(DEAD, to, letters, first_seq), FIRED)
    assert found.value.checker == checker
