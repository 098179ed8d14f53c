"""Quotas in the simulator: the model agrees with production code, and it finds differences."""

import json
from dataclasses import replace
from typing import Any

import pytest

from chaos.sim.checks.fatebook import FateBook
from chaos.sim.checks.keybook import weigh
from chaos.sim.checks.policybook import PolicyBook, QuotaBook
from chaos.sim.timers import operators
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.options import WorldOptions
from chaos.sim.world.referee import Broken
from chaos.sim.world.simdisk import SimDisk
from tests.chaos.planted.planted import calm
from tests.seeds import seeds
from tests.timer.leading import Play
from tests.timer.machines import EVERY, Log, machine_on, part_of
from timer.entries.entry_frame import Entry
from timer.entries.policies import CLUSTER, QUOTAS, Scope, ScopePolicy
from timer.entries.series_payloads import CreateSeries
from timer.model.units import TopicId, UnixMs
from timer.state.apply_results import ScheduleApplied


def of_quotas(seed: int) -> WorldOptions:
    return calm(seed).aim(quotas=True, proposals_per_s=12)


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_quotas_are_reached_refuse_and_are_lifted(seed: int) -> None:
    world = TimerWorld(seed, options=of_quotas(seed))
    world.run(30)
    book = world.town.book
    assert book.quotas.refused > 3
    said = [json.loads(fields) for _, _, fields in book.fates.story.policies]
    assert {name for each in said for name, v in each.items() if v is not None} == {*QUOTAS}
    last = {scope: fields for scope, _, fields in book.fates.story.policies}
    assert {value for each in last.values() for value in json.loads(each).values()} == {None}


def test_all_quotas_are_drawn() -> None:
    assert {*operators.QUOTAS} == {*QUOTAS}


# ---- the book


class Pages:
    """A log with one topic, and the book that checks it."""

    def __init__(self, **said: int) -> None:
        self.log, self.fates = Log(), FateBook()
        self.book = QuotaBook(PolicyBook(self.fates))
        self.machine = machine_on(SimDisk(), leads=False)
        self.log.begin_epoch()
        self.log.topic("a")
        self.log.policy(CLUSTER, **said)
        for entry in self.log.entries:
            self.apply(entry)

    def apply(self, entry: Entry) -> Any:
        self.fates.on_commit(entry)
        return self.machine.apply(entry)

    def schedule(self, sizes: list[int], *, took: bool = True) -> None:
        due_ms = self.log.now_ms + 1_000
        entry = self.log.schedule(part_of([(1, due_ms, b"x" * size) for size in sizes]))
        if took:
            self.book.taken.add((entry.epoch, (0, 0)))
        self.check(entry)

    def check(self, entry: Entry) -> None:
        applied = self.apply(entry)
        assert isinstance(applied, ScheduleApplied)
        self.book.check(entry, applied, self.machine)


@pytest.mark.parametrize(
    ("said", "fits", "breaks"),
    [
        ({"pending_max": 2}, [1, 1], [1]),
        ({"pending_bytes_max": 8}, [3, 5], [1]),
        ({"pending_max": 0}, [], [0]),
    ],
)
def test_book_knows_how_much_may_be_pending(
    said: dict[str, Any], fits: list[int], breaks: list[int]
) -> None:
    pages = Pages(**said)
    if fits:
        pages.schedule(fits)
    with pytest.raises(Broken, match="quota"):
        pages.schedule(breaks)


def test_book_knows_that_no_quota_rejects_an_occurrence() -> None:
    pages = Pages(pending_max=2, pending_bytes_max=8)
    pages.apply(pages.log.begin_epoch(level=2))
    due_ms = pages.log.now_ms + 1_000
    made = pages.apply(pages.log.series(CreateSeries(TopicId(1), b"k", EVERY, UnixMs(0))))
    pages.apply(pages.log.occur([(made.series, 1, due_ms, due_ms)]))
    pages.schedule([4, 4])
    with pytest.raises(Broken, match="3 in a, pending_max = 2"):
        pages.schedule([0])


def test_book_goes_by_what_was_said_before() -> None:
    pages = Pages(pending_max=2)
    pages.schedule([1, 1])
    pages.apply(pages.log.policy(Scope("", TopicId(1)), pending_max=3))
    pages.schedule([1])
    with pytest.raises(Broken, match="quota"):
        pages.schedule([1])


def test_book_knows_what_was_taken_and_what_it_weighs() -> None:
    pages = Pages(pending_max=9)
    with pytest.raises(Broken, match="was not taken"):
        pages.schedule([1], took=False)
    [topic] = pages.machine.topics.values()
    store = pages.machine.store
    rows, *_ = store._live_due_rows(store.position, pages.log.now_ms + 1_000, 10)
    weigh("n", topic, rows)
    topic.pending_bytes += 1
    with pytest.raises(Broken, match="1 bytes in a, not 2"):
        weigh("n", topic, rows)


def test_book_knows_that_a_reached_backlog_takes_nothing() -> None:
    play, book = Play(), QuotaBook(PolicyBook(FateBook()))
    play.schedule("s", 0)
    play.settle()
    part = part_of([(play.topic_id, play.now.clock_ms + 50, b"x")])
    book.took(play.leader, replace(part, sequence=1), repeated=False)
    play.leader.set_policy(CLUSTER, ScopePolicy(ready_max=1), (), play.now, lambda _: None)
    book.took(play.leader, replace(part, sequence=2), repeated=True)
    with pytest.raises(Broken, match="ready_max"):
        book.took(play.leader, replace(part, sequence=3), repeated=False)
