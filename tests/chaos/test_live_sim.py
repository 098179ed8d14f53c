"""What the live audit makes of simulated clusters' logs, in which all of it happens at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chaos.live import exported_events, standing, whole_topics
from chaos.live.export import ExportStory
from chaos.live.exported_events import EventColumns, EventKind
from chaos.live.judge import Alert
from chaos.sim.checks.book import PromiseBook
from chaos.sim.timers.timers import TimerWorld
from tests.chaos.planted.planted import calm
from tests.chaos.test_judge import Court
from timer.entries.entry_frame import Entry
from timer.model.columns import RowArray
from timer.state.firing_trace import Trace

OVERDUE_MS = 2_000


class Heard:
    """The log of a world, and what fired by it: given to a witness at once, before it expires."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[Entry] = []
        self.given: dict[int, dict[int, dict[str, Any]]] = {}
        """Index -> seq -> columns of what fired there."""
        noted, fired = PromiseBook.on_commit, Trace.fired

        def on_commit(book: PromiseBook, item: Entry, true_ms: int | None) -> None:
            if item.index == len(self.entries) + 1:
                self.entries.append(item)
            noted(book, item, true_ms)

        def on_fired(trace: Trace, index: Any, topic: Any, first: Any, rows: RowArray) -> None:
            here = self.given.setdefault(int(index), {})
            for at, row in enumerate(rows):
                seq, due_ms = int(row["seq"]), int(row["due_ms"])
                here[seq] = {"seq": seq, "due_ms": due_ms, "queue_offset": int(first) + at,
                             "number": int(topic)}  # fmt: skip
            fired(trace, index, topic, first, rows)

        monkeypatch.setattr(PromiseBook, "on_commit", on_commit)
        monkeypatch.setattr(Trace, "fired", on_fired)


def judged(heard: Heard, without: int = 0, twice: int = 0) -> list[Alert]:
    """Return what is raised, if a witness was not given one timer, or one twice."""
    story, court, names = ExportStory(), Court(OVERDUE_MS), dict[int, str]()
    alerts: list[Alert] = []

    def reach(at_ms: int) -> None:
        for name in {*names.values()}:
            court.tell(EventKind.REACH, topic=name, read_ms=at_ms, at_ms=at_ms)

    for item in heard.entries:
        told = story.apply(item)
        made = [each.columns for each in told if each.kind is EventKind.MADE]
        names |= {columns["topic_id"]: columns["topic"] for columns in made}
        read = [EventColumns(EventKind.WITNESSED, 1, columns | {"at_ms": 0}) for columns in made]
        court.told.append(exported_events.table([*told, *read]))
        if made:
            for columns in made:
                court.tell(EventKind.REACH, topic=columns["topic"], read_ms=1, at_ms=1)
        for seq, fired in heard.given.get(item.index, {}).items():
            at_ms = item.time_ms
            lives_ms = story.topics.lives_ms.get(fired["number"], 1 << 40)
            handed_out_ms = min(at_ms, fired["due_ms"] + lives_ms - 1)
            row = {"topic": names[fired["number"]], "at_ms": at_ms, "fired_at_ms": at_ms,
                   "handed_out_ms": handed_out_ms, **fired}  # fmt: skip
            del row["number"]
            if seq != without:
                court.tell(EventKind.GIVEN, **row)
            if seq == twice:
                court.tell(EventKind.GIVEN, **row | {"queue_offset": row["queue_offset"] + 10**6})
        if item.index % 20 == 0:
            court.told.append(exported_events.table([story.clock()]))
            reach(story.time_ms)
            alerts += court.step()
    last = story.clock().columns
    for later_ms in (0, 4 * OVERDUE_MS, 8 * OVERDUE_MS):
        at_ms = last["at_ms"] + later_ms
        court.told.append(
            exported_events.table([EventColumns(EventKind.CLOCK, 1, last | {"at_ms": at_ms})])
        )
        reach(at_ms)
        alerts += court.step()
    return [alert for alert in alerts if not alert.detail.startswith("no FIRE")]


def some(seqs: Sequence[int], count: int) -> list[int]:
    return [*np.random.default_rng(1).choice(seqs, count, replace=False).tolist()]


@pytest.mark.parametrize("seed", range(3))
def test_simulated_log_raises_nothing_and_lies_are_raised(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (standing, whole_topics):
        monkeypatch.setattr(module, "RELEASE_MS", OVERDUE_MS)
    heard = Heard(monkeypatch)
    world = TimerWorld(
        seed, options=calm(seed).aim(expiry=True, deletions=True, policies=True, proposals_per_s=8)
    )
    world.run(20)
    assert judged(heard) == []
    seqs = [seq for each in heard.given.values() for seq in each]
    raised = 0
    for tried, seq in enumerate(some(seqs, len(seqs))):
        if raised and tried >= 4:
            break
        lost = [(alert.kind, alert.seq) for alert in judged(heard, without=seq)]
        assert lost in ([], [("lost", seq)])
        raised += bool(lost)
        doubled = [(alert.kind, alert.seq) for alert in judged(heard, twice=seq)]
        assert doubled == [("duplicate", seq)]
    assert raised
