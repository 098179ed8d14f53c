"""Nemeses of clients: consumers that die with messages in hand, floods of requests."""

import random
import select
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final

from chaos.history.history import History, OpOutcome, payload_of
from chaos.suite.nemeses.nemesis import NOTHING, Aside, Fizzled, Undo, nothing
from chaos.suite.stage.stage import Stage, now_ms
from chaos.workloads.workload_producer import outcome_of
from timerclient import TimerClient
from timerclient.values.errors import OutcomeUnknown, TimerError, Unavailable

FLOOD: Final = "flood"
"""The topic of floods. Nobody consumes it: what has fired is gone."""
FLOOD_DUE_MS: Final = 30_000
"""Half a minute later, so that a lost disk's node does not have to fetch all floods of a run."""
FLOOD_MARKS: Final = 1 << 62
"""Marks of floods begin here: no workload counts so far."""
TAKE_S: Final = 5.0
"""Time for a doomed consumer to start and to get something: its group may have nothing for it."""
_SIZE: Final = 4096
_ROWS: Final = 1000
_UNDER_WAY: Final = 4
"""Requests of one flooding client."""
_numbers = count()


@dataclass(frozen=True, slots=True)
class KillConsumer:
    """A consumer takes messages of somebody's group, acks none, and dies by kill -9."""

    needs: ClassVar = NOTHING
    life_s: float = 1.0
    lease_ms: int = 3000

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Start it, let it take what it gets, kill it; it had no effect if that was nothing."""
        with TimerClient(stage.cluster.endpoints) as client:
            groups = [(t.name, g.name) for t in client.topics() for g in t.groups if g.consumers]
        if not groups:
            raise Fizzled("nobody consumes anything: no consumer was killed")
        topic, group = chance.choice(groups)
        name = f"doomed-{next(_numbers)}"
        words = [str(stage.run.root), name, ",".join(stage.cluster.endpoints), topic, group]
        doomed = subprocess.Popen(
            [sys.executable, "-m", "chaos.suite.stage.doomed", *words, str(self.lease_ms)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert doomed.stdout is not None
        with doomed.stdout:
            # A line: it has messages; an end: it died; neither: there is nothing for its group.
            select.select([doomed.stdout], [], [], TAKE_S)
            time.sleep(self.life_s)
            doomed.kill()
            took = bool(doomed.stdout.readline())
            doomed.wait()
        stage.record("kill-consumer", topic=topic, group=group, client=name)
        who = f"a consumer of {topic}, group {group}, died with"
        if not took:
            raise Fizzled(f"{who} nothing in hand")
        stage.say(f"{who} messages in hand")
        return nothing


@dataclass(frozen=True, slots=True)
class Flood:
    """More than the cluster takes, from several clients at once, up to a limit in bytes."""

    needs: ClassVar = NOTHING
    clients: int = 4
    size_mb: int = 64
    has_to_be_refused: bool = False
    """In part, by the nodes: else it had no effect."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Send it, and wait for all answers; it had no effect if nobody was there to take it."""
        before = stage.refusals()
        requests = max(1, self.size_mb * 1_000_000 // (_SIZE * _ROWS * self.clients))
        answers: list[TimerError | None] = []
        number = next(_numbers)
        pours = [
            Aside("flood", partial(_pour, stage, number, each, requests, answers))
            for each in range(self.clients)
        ]
        for pour in pours:
            pour.wait()
        taken = answers.count(None)
        refused = max(0, stage.refusals() - before)  # less than none: a node has started again
        stage.record("flood", asked=len(answers), taken=taken, refused=refused)
        stage.say(
            f"a flood: {len(answers)} requests of {_SIZE * _ROWS:,} bytes, {taken} taken,"
            f" {refused} times told to come again"
        )
        for pour in pours:
            pour.check()
        if all(isinstance(each, Unavailable) and each.outcome_known for each in answers):
            raise Fizzled(f"nobody was there to take any of it: {answers[-1]!r}")
        if self.has_to_be_refused and not refused:
            raise Fizzled("none of it was too much")
        return nothing


def _pour(
    stage: Stage, number: int, each: int, requests: int, answers: list[TimerError | None]
) -> None:
    """Send requests, some at once, without asking twice: a refusal is final."""
    first = FLOOD_MARKS + (number * 1000 + each) * 10_000_000
    book = _Book(History(stage.run, f"flood-{number}-{each}"), answers)
    with closing(book), TimerClient(stage.cluster.endpoints) as client:
        for start in range(0, requests, _UNDER_WAY):
            under_way = []
            for request in range(start, min(start + _UNDER_WAY, requests)):
                marks = range(first + request * _ROWS, first + (request + 1) * _ROWS)
                payloads = [payload_of(mark, _SIZE) for mark in marks]
                book.asks(marks)
                try:
                    future = client.submit_batch(FLOOD, payloads, due_ms=book.due_ms, timeout=5.0)
                except TimerError as error:
                    book.answered(marks, error)
                else:
                    under_way.append((marks, future))
            for marks, future in under_way:
                try:
                    book.answered(marks, future.result().ids)
                except TimerError as error:
                    book.answered(marks, error)


class _Book:
    """One flooding client's requests. All are in its history in the end, whatever it fails with."""

    def __init__(self, history: History, answers: list[TimerError | None]) -> None:
        self.due_ms: Final = [now_ms() + FLOOD_DUE_MS] * _ROWS
        self._history = history
        self._answers = answers
        self._asked: dict[range, tuple[int, int]] = {}
        """Marks -> when, and the request's number: of those without an answer."""

    def asks(self, marks: range) -> None:
        """A request is about to be sent."""
        at_ms, named = now_ms(), {"topic": FLOOD, "marks": [*marks], "due_ms": self.due_ms}
        self._asked[marks] = at_ms, self._history.asks("schedule", start_ms=at_ms, **named)

    def answered(self, marks: range, known: Sequence[str] | TimerError) -> None:
        """It was taken, and these are its timers' ids; or this is what is known of it instead."""
        asked_ms, request = self._asked[marks]
        ids, outcome, span_ms = None, OpOutcome.OK, (asked_ms, now_ms())
        more: dict[str, Any] = {"request": request}
        if isinstance(known, TimerError):
            outcome = outcome_of(known)
            more["detail"] = repr(known)
        else:
            ids = known
        crcs = [zlib.crc32(payload_of(mark, _SIZE)) for mark in marks]
        self._history.schedule(
            marks, ids=ids, due_ms=self.due_ms, topic=FLOOD, span_ms=span_ms, outcome=outcome,
            payload_crcs=crcs, **more,
        )  # fmt: skip
        del self._asked[marks]
        self._answers.append(known if isinstance(known, TimerError) else None)

    def close(self) -> None:
        """Write down what nobody waited for, and close the history. The client has ended."""
        for marks in [*self._asked]:
            self.answered(marks, OutcomeUnknown("not waited for: its client failed"))
        self._history.close()
