"""Redrives, altered groups and cumulative acks in the simulator, and errors that the book finds."""

from types import SimpleNamespace
from typing import Any

import pytest

from chaos.oracle.group_story import GroupStory
from chaos.sim.checks.book import PromiseBook
from chaos.sim.checks.fatebook import FateBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.referee import Broken
from tests.chaos.planted.planted import calm
from tests.timer.machines import START_MS, Log, part_of
from timer.entries.payloads import Op


def test_letters_are_redriven_while_messages_die() -> None:
    world = TimerWorld(2, options=calm(2).aim(redrives=True, proposals_per_s=16))
    world.run(8)
    book = world.town.book.fates
    redriven = book.origins.keys() - book.homes.keys()
    assert len(book.homes) > len(redriven) > 5


def test_messages_are_acked_by_the_last_of_them_where_groups_are_sought_and_altered() -> None:
    world = TimerWorld(1, options=calm(1).aim(types=True, redrives=True, proposals_per_s=16))
    world.run(8)
    book = world.town.book
    assert book.requested_up_to
    assert book.first_lives


def asked_up_to(offset: int, acked: list[int]) -> PromiseBook:
    """Return the book of a group with three messages, the last of them delivered.

    A consumer requests an ack of all messages up to `offset`; the log has an ack of `acked`.
    """
    book = PromiseBook()
    book.fates.story.groups[1] = GroupStory(1, 1, "g", 0, 3, 0)
    book.delivered.add((1, 2))
    book.asks_up_to(1, offset)
    book.fates.done.update((1, each) for each in acked)
    return book


def all_came(book: PromiseBook) -> None:
    group = SimpleNamespace(name="g", group_id=1)
    topic = SimpleNamespace(name="t", queue=SimpleNamespace(end=3), groups={"g": group})
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
    with pytest.raises(Broken, match=rf"lost: .* never got \(1, {lost}\)"):
        all_came(asked_up_to(offset, acked))


class Letters:
    """A log with two messages of topic `t`, of which one group moved both, and its book."""

    def __init__(self) -> None:
        self.log, self.book, self.read = Log(), FateBook(), 0
        self.log.topic("t")
        self.log.topic("u")
        self.log.create_group(1, "g")
        self.log.schedule(part_of([(1, START_MS, b"x"), (1, START_MS, b"y")]))
        self.log.fire(START_MS)
        self.log.op(Op.RESERVE, 1, 1, [10])
        self.log.move(1, 1, [0, 1], "t.g.dead", "dead-letters")
        self.go_on()

    def go_on(self) -> None:
        for entry in self.log.entries[self.read :]:
            self.book.on_commit(entry)
        self.read = len(self.log.entries)

    def redrive(self, to: str) -> None:
        """Redrive both letters."""
        self.log.op(Op.RESERVE, 3, 2, [10])
        self.log.move(3, 2, [0, 1], to, "")
        self.go_on()


def test_letter_that_goes_home_is_known_as_the_timer_that_it_was() -> None:
    letters = Letters()
    x, y = letters.book.queues[1]
    assert [letters.book.origins[each] for each in letters.book.queues[3]] == [x, y]
    letters.redrive("t")
    assert [letters.book.origins[each] for each in letters.book.queues[1][2:]] == [x, y]


def test_letter_that_goes_astray_is_noticed() -> None:
    with pytest.raises(Broken, match=r"redrive: .* of t is .* of u"):
        Letters().redrive("u")
