"""Deleted topics in the simulator: worlds with them, and the errors that the book finds."""

import pytest

from chaos.sim.checks.dropbook import DropBook
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.referee import Broken
from chaos.sim.world.simdisk import SimDisk
from tests.chaos.planted.planted import calm
from tests.timer.machines import START_MS, Log, machine_on, part_of
from timer.entries.payloads import DeleteTopic
from timer.model.units import TopicId
from timer.state.apply_results import CANCELLED, CancelApplied, DeleteTopicApplied

DUE = START_MS + 1_000


@pytest.mark.parametrize("seed", [1, 4])
def test_topics_come_and_go_while_timers_are_pending_and_consumers_consume(seed: int) -> None:
    world = TimerWorld(seed, options=calm(seed).aim(deletions=True, proposals_per_s=16))
    world.run(30)
    book = world.town.book
    assert len(book.drops.queue_ends) > 3
    assert book.drops.dropped
    assert book.deliveries


class Pages:
    """A log, a machine, and the book that checks both."""

    def __init__(self) -> None:
        self.log, self.machine, self.book = Log(), machine_on(SimDisk(), leads=True), DropBook()
        for name in ("a", "b"):
            self.machine.apply(self.log.topic(name))
        timers = [(1, DUE, b"x"), (2, DUE, b"y"), (1, DUE + 1, b"z")]
        entry = self.log.schedule(part_of(timers))
        self.book.check(entry, self.machine.apply(entry), self.machine)

    def deleted(self) -> None:
        entry = self.log.delete_topic(1)
        self.book.check(entry, self.machine.apply(entry), self.machine)


def test_book_knows_what_went_along() -> None:
    pages = Pages()
    pages.deleted()
    assert (pages.book.dropped, pages.book.pending) == ({1: 1, 3: 1}, {2: 2})
    fire = pages.log.fire(DUE + 5)
    pages.book.check(fire, pages.machine.apply(fire), pages.machine)
    assert not pages.book.pending


def test_book_notices_a_wrong_count_and_what_is_ended_or_fired_though_it_went_along() -> None:
    pages = Pages()
    entry = pages.log.delete_topic(1)
    topic = pages.machine.topics[TopicId(1)]
    wrong = DeleteTopicApplied(DeleteTopic(TopicId(1)), topic, dropped=1)
    with pytest.raises(Broken, match="1 of 2"):
        pages.book.check(entry, wrong, pages.machine)
    pages = Pages()
    pages.deleted()
    cancel = pages.log.cancel([(DUE, 1)])
    applied = pages.machine.apply(cancel)
    assert isinstance(applied, CancelApplied)
    applied.results[:] = CANCELLED
    with pytest.raises(Broken, match="went with topic 1"):
        pages.book.check(cancel, applied, pages.machine)
    other = Pages()
    fire = pages.log.fire(DUE)
    fired = other.machine.apply(other.log.fire(DUE))  # of a machine without a deletion
    with pytest.raises(Broken, match="1 fired, which went"):
        pages.book.check(fire, fired, pages.machine)
