"""Policies in the simulator: the model agrees with production code, and it finds differences."""

import json
from typing import Any

import numpy as np
import pytest

from chaos.sim.checks.fatebook import FateBook
from chaos.sim.checks.policybook import LEVELS_MS, Acceptance, PolicyBook
from chaos.sim.timers.operators import POLICIES
from chaos.sim.timers.timers import TimerWorld
from chaos.sim.world.options import WorldOptions
from chaos.sim.world.referee import Broken
from tests.chaos.planted.planted import calm
from tests.seeds import seeds
from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.policies import CLUSTER, Scope, ScopePolicy, encode_policy
from timer.model.columns import Binary, Part, encode_schedule
from timer.model.units import Epoch, LogIndex, ProducerId, Seq, TopicId, UnixMs
from timer.state.apply_results import Accepted, ScheduleApplied
from timer.state.producers import RequestAnswer

NOW = 1_000_003


def of_policies(seed: int) -> WorldOptions:
    return calm(seed).aim(policies=True, proposals_per_s=8)


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_times_follow_policies_that_change_all_the_time(seed: int) -> None:
    world = TimerWorld(seed, options=of_policies(seed))
    world.run(30)
    book = world.town.book.policies
    policies = world.town.book.fates.story.policies
    assert len(policies) > 10
    assert {taken.way for each in book.requests.values() for taken in each} == {
        "due_ms",
        "delay_ms",
        "delay_level",
    }
    assert book.moves
    said = [json.loads(fields) for _, _, fields in policies]
    fields = {name for each in said for name, value in each.items() if value is not None}
    assert fields == {*POLICIES, "paused", "catch_up"}


# ---- the book


class Pages:
    """A log of one producer, and the book that checks it."""

    def __init__(self) -> None:
        self.fates = FateBook()
        self.book = PolicyBook(self.fates)
        self.index = 0
        self.entry(EntryKind.TOPIC, payloads.encode_topic("n/a"))

    def entry(self, kind: EntryKind, *payload: bytes) -> Entry:
        self.index += 1
        data = memoryview(b"".join(payload))
        entry = Entry(kind, Epoch(1), LogIndex(self.index), UnixMs(NOW), data)
        self.fates.on_commit(entry)
        return entry

    def says(self, scope: Scope, **said: Any) -> None:
        self.entry(EntryKind.POLICY, encode_policy(scope, ScopePolicy(**said)))

    def schedule(self, way: str, value: int, due_ms: int, *, size: int = 1) -> None:
        """Append one timer with a due time, and tell the book of its request."""
        requested = {"due_ms": value, "delay_ms": NOW + value}.get(way)
        if requested is None:
            requested = NOW + [0, *LEVELS_MS][min(value, len(LEVELS_MS))]
        self.book.requests[1, 1] = [Acceptance(way, (value,), NOW, NOW - 50)]
        due = np.array([due_ms], np.int64)
        part = Part(
            producer_id=ProducerId(1),
            sequence=1,
            due_ms=due,
            requested_ms=np.array([requested], np.int64),
            topic=np.ones(1, np.uint32),
            payload=Binary.of([b"x" * size]),
        )
        entry = self.entry(EntryKind.SCHEDULE, *encode_schedule([part]))
        self.book.check(entry, ScheduleApplied((Accepted(RequestAnswer(1, Seq(1), due)),), ()))


TOPIC = Scope("", TopicId(1))


@pytest.mark.parametrize(
    ("said", "way", "value", "due_ms"),
    [
        ([], "delay_ms", 0, NOW),
        ([], "delay_ms", 1, NOW + 1),
        ([], "due_ms", 5, NOW - 50),
        ([], "delay_level", 1, NOW + 1_000),
        ([], "delay_level", 40, NOW + 15_000),
        ([(CLUSTER, {"tick_ms": 7})], "delay_ms", 1, 1_000_006),
        ([(CLUSTER, {"fixed_delay_ms": 8, "tick_ms": 1})], "delay_ms", 500, NOW + 8),
        ([(CLUSTER, {"delayed_delivery": False})], "delay_ms", 500, NOW),
        ([(Scope("n"), {"delay_ms_min": 30})], "delay_ms", 1, NOW + 30),
        ([(Scope("m"), {"delay_ms_min": 30})], "delay_ms", 1, NOW + 1),
        ([(Scope("n"), {"tick_ms": 7}), (TOPIC, {"tick_ms": 1})], "delay_ms", 1, NOW + 1),
        ([(TOPIC, {"tick_ms": 7}), (TOPIC, {})], "delay_ms", 1, NOW + 1),
    ],
)
def test_book_knows_when_a_timer_is_due(
    said: list[tuple[Scope, dict[str, Any]]], way: str, value: int, due_ms: int
) -> None:
    for wrong in (due_ms - 1, due_ms + 1):
        pages = Pages()
        for scope, fields in said:
            pages.says(scope, **fields)
        with pytest.raises(Broken, match="policy"):
            pages.schedule(way, value, wrong)
    pages = Pages()
    for scope, fields in said:
        pages.says(scope, **fields)
    pages.schedule(way, value, due_ms)
    pages.says(CLUSTER, fixed_delay_ms=1)  # a later policy does not change the timer


def test_book_notices_what_should_have_been_refused() -> None:
    pages = Pages()
    pages.says(CLUSTER, delay_ms_max=4)
    with pytest.raises(Broken, match="policy"):
        pages.schedule("delay_ms", 5, NOW + 5)
    pages = Pages()
    pages.says(TOPIC, payload_bytes_max=2)
    pages.schedule("delay_ms", 5, NOW + 5, size=2)
    with pytest.raises(Broken, match="3 bytes"):
        pages.schedule("delay_ms", 5, NOW + 5, size=3)
