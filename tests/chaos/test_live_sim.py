"""The live audit's judge on simulated clusters' logs, in which all of it happens at once."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.live import judge
from chaos.live.judge import GIVEN, Judge, Violation
from chaos.sim.checks.book import PromiseBook
from chaos.sim.checks.fatebook import SEARCH_ROWS_MAX, SWEEP_ROWS, SWEEP_TOPICS
from chaos.sim.timers.operators import GROUPS
from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import calm
from tests.seeds import seeds
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind
from timer.model.columns import RowArray
from timer.model.units import LogIndex, UnixMs
from timer.state.firing_trace import Trace

OVERDUE_MS = 2_000
STEP = 20
"""Entries of one step of the judge."""


class Heard:
    """The log of a world, and its messages: each comes to a witness at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[Entry] = []
        self.given: dict[int, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        """Index -> seq -> (topic, due_ms, queue offset) of the messages that fired there."""
        noted, fired = PromiseBook.on_commit, Trace.add_fired

        def on_commit(book: PromiseBook, item: Entry, true_ms: int | None) -> None:
            if item.index == len(self.entries) + 1:
                self.entries.append(item)
            noted(book, item, true_ms)

        def on_fired(trace: Trace, index: Any, topic: Any, first: Any, rows: RowArray) -> None:
            for at, row in enumerate(rows):
                seq, due_ms = int(row["seq"]), int(row["due_ms"])
                self.given[int(index)][seq] = int(topic), due_ms, int(first) + at
            fired(trace, index, topic, first, rows)

        monkeypatch.setattr(PromiseBook, "on_commit", on_commit)
        monkeypatch.setattr(Trace, "add_fired", on_fired)
        # A group of the world stands for the witness's: the messages from its start on must come.
        monkeypatch.setattr(judge, "WITNESS_GROUP", GROUPS[0])

    def grow_old(self) -> None:
        """Let the log's clock move on, so that all is judged."""
        last = self.entries[-1]
        for at in range(1, 2 * STEP):
            index, time_ms = LogIndex(last.index + at), UnixMs(last.time_ms + 3 * OVERDUE_MS)
            frame = entry_frame.encode(EntryKind.CHECKPOINT, last.epoch, index, time_ms, [])
            found = entry_frame.frame_at(memoryview(frame), 0)
            assert isinstance(found, Entry)
            self.entries.append(found)


def a_judge() -> Judge:
    """Return a judge that releases held timers as the machines of the world do."""
    mine = Judge(Path(), overdue_ms=OVERDUE_MS)
    held = mine.story.held
    held.sweep_rows, held.sweep_topics = SWEEP_ROWS, SWEEP_TOPICS
    held.search_rows_max = SEARCH_ROWS_MAX
    return mine


def frames(items: Sequence[Entry]) -> list[bytes]:
    return [
        entry_frame.encode(each.kind, each.epoch, each.index, each.time_ms, [bytes(each.payload)])
        for each in items
    ]


def topics_of(heard: Heard) -> dict[int, str]:
    """Return the name of each topic that ever existed."""
    mine = a_judge()
    mine.apply(frames(heard.entries))
    return mine.story.topics


def judged(
    heard: Heard, topics: dict[int, str], without: int = 0, twice: int = 0
) -> list[Violation]:
    """Return the violations, if a witness did not get one timer's message, or got one twice."""
    mine, found = a_judge(), dict[tuple[str, int, str], Violation]()
    reaches = dict.fromkeys(topics.values(), 1 << 60)
    for start in range(0, len(heard.entries), STEP):
        items = heard.entries[start : start + STEP]
        given: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for item in items:
            for seq, (topic, due_ms, offset) in heard.given.get(item.index, {}).items():
                row = seq, due_ms, offset, item.time_ms, due_ms
                far = seq, due_ms, offset + 10**6, item.time_ms, due_ms
                given[topics[topic]] += [row] * (seq != without) + [far] * (seq == twice)
        mine.apply(frames(items))
        told = {topic: np.array(rows, GIVEN) for topic, rows in given.items()}
        for each in mine.violations(told, reaches):
            found.setdefault((each.kind, each.seq, "" if each.seq else each.detail), each)
    return [each for each in found.values() if each.kind not in ("late", "moved_early")]


def some(seqs: Sequence[int], count: int) -> list[int]:
    return [*np.random.default_rng(1).choice(seqs, count, replace=False).tolist()]


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_simulated_log_raises_nothing_and_lies_are_raised(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(monkeypatch)
    world = TimerWorld(
        seed, options=calm(seed).aim(expiry=True, deletions=True, policies=True, proposals_per_s=8)
    )
    world.run(20)
    heard.grow_old()
    seqs = [seq for each in heard.given.values() for seq in each]
    # Redriven messages are not heard of: they come by no FIRE.
    topics = topics_of(heard)
    found = judged(heard, topics)
    assert [each for each in found if each.kind != "lost" or each.seq in seqs] == []
    raised = 0
    for tried, seq in enumerate(some(seqs, len(seqs))):
        if raised and tried >= 4:
            break
        lost = [each.kind for each in judged(heard, topics, without=seq) if each.seq == seq]
        assert lost in ([], ["lost"])
        raised += bool(lost)
        doubled = [each.kind for each in judged(heard, topics, twice=seq) if each.seq == seq]
        assert doubled == ["duplicate_fire"]
    assert raised
