"""Redrives, altered groups and cumulative acks in the simulator; what the book notices of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.sim.keybook import TimerName
from chaos.sim.letterbook import LetterBook
from chaos.sim.planted import calm
from chaos.sim.referee import Broken
from chaos.sim.timers import TimerWorld
from timer.applied import MoveApplied
from timer.columns import Binary, Part, encode_schedule
from timer.payloads import Move, Op
from timer.units import GroupId, ProducerId, Seq, TopicId


def test_letters_are_redriven_while_messages_die() -> None:
    world = TimerWorld(2, options=calm(2).aim(redrives=True, proposals_per_s=16))
    world.run(20)
    letters = world.town.book.letters
    assert len(letters.home) > 5
    assert sum(letters.ends.values()) > len(letters.home)


def test_messages_are_acked_by_the_last_of_them_where_groups_are_sought_and_altered() -> None:
    world = TimerWorld(12, options=calm(12).aim(types=True, redrives=True, proposals_per_s=16))
    world.run(20)
    book = world.town.book
    assert book.ups
    assert book.seeks


DEAD, HOME = TopicId(2), TopicId(1)


def moved(topic: TopicId, to: TopicId, letters: dict[int, bytes], first_seq: int) -> MoveApplied:
    """Return what a MOVE of these offsets, with these payloads, did."""
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
