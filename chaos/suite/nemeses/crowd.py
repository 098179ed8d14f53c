"""Nemeses of clients: consumers that die while they lease messages, and floods of requests."""

import random
import select
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Final

from chaos.history.history import History, payload_of
from chaos.suite.nemeses.nemesis import Fizzled, Nemesis, Undo, nothing
from chaos.suite.stage.stage import Stage
from chaos.workloads.workload_producer import RecordedRequest, now_ms
from timerclient import TimerClient
from timerclient.values.errors import OutcomeUnknown, TimerError, Unavailable

FLOOD: Final = "flood"
"""The topic of floods. It has no group, so its messages are never delivered."""
FLOOD_DUE_MS: Final = 30_000
"""From a request to the due time of its timers, so that few of them are pending at a time."""
FLOOD_MARKS: Final = 1 << 62
"""The lowest mark of floods. No workload's marks reach it."""
TAKE_S: Final = 5.0
"""A doomed consumer starts and receives its first messages within this, if its group has any."""
_SIZE: Final = 4096
_ROWS: Final = 1000
_UNDER_WAY: Final = 4
"""Unanswered requests of one flooding client."""
_numbers = count()


@dataclass(frozen=True, slots=True)
class KillConsumer(Nemesis):
    """A consumer receives messages of an existing group, acks none, and dies by kill -9."""

    life_s: float = 1.0
    """From the first messages to the kill."""
    lease_ms: int = 3000
    """Of the consumer's messages."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Start the consumer, let it receive messages, kill it; no effect if it had none."""
        with TimerClient(stage.cluster.endpoints) as client:
            groups = [(t.name, g.name) for t in client.topics() for g in t.groups if g.consumers]
        if not groups:
            raise Fizzled("no group has a consumer: no consumer was killed")
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
            # Readable: a line, so the consumer has messages, or the end, so it died. Neither:
            # its group has no messages.
            select.select([doomed.stdout], [], [], TAKE_S)
            time.sleep(self.life_s)
            doomed.kill()
            took = bool(doomed.stdout.readline())
            doomed.wait()
        stage.record("kill-consumer", topic=topic, group=group, client=name)
        who = f"a consumer of {topic}, group {group}, died with"
        if not took:
            raise Fizzled(f"{who} no messages leased")
        stage.say(f"{who} messages leased")
        return nothing


@dataclass(frozen=True, slots=True)
class Flood(Nemesis):
    """Requests faster than the cluster accepts them, from several clients at once."""

    clients: int = 4
    """Each sends an equal share."""
    size_mb: int = 64
    """Megabytes of payload, all clients together."""
    has_to_be_refused: bool = False
    """The strike counts only if the nodes refuse some requests."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Send all requests and wait for all answers; no effect if no node could accept any."""
        before = stage.refusals()
        requests = max(1, self.size_mb * 1_000_000 // (_SIZE * _ROWS * self.clients))
        answers: list[TimerError | None] = []
        number = next(_numbers)
        with ThreadPoolExecutor(self.clients, "flood") as pool:  # its end waits for all
            pours = [
                pool.submit(_pour, stage, number, each, requests, answers)
                for each in range(self.clients)
            ]
        taken = answers.count(None)
        # A node that started again counts from 0, so the difference may be negative.
        refused = max(0, stage.refusals() - before)
        stage.record("flood", asked=len(answers), taken=taken, refused=refused)
        stage.say(
            f"a flood: {len(answers)} requests of {_SIZE * _ROWS:,} bytes, {taken} accepted,"
            f" {refused} refusals as overloaded"
        )
        for pour in pours:
            pour.result()
        if all(isinstance(each, Unavailable) and each.outcome_known for each in answers):
            raise Fizzled(f"no node accepted any of the flood: {answers[-1]!r}")
        if self.has_to_be_refused and not refused:
            raise Fizzled("no request of the flood was refused")
        return nothing


def _pour(
    stage: Stage, number: int, each: int, requests: int, answers: list[TimerError | None]
) -> None:
    """Send one client's requests, several at once, and retry none.

    Args:
        stage: of the run.
        number: of this flood among all.
        each: number of this client in the flood.
        requests: to send.
        answers: one is appended per request; None: accepted.
    """
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
    """The requests of one flooding client. Its history has all, even if the client fails."""

    def __init__(self, history: History, answers: list[TimerError | None]) -> None:
        self.due_ms: Final = [now_ms() + FLOOD_DUE_MS] * _ROWS
        self._history = history
        self._answers = answers
        self._asked: dict[range, RecordedRequest] = {}
        """Marks of unanswered requests -> the request."""

    def asks(self, marks: range) -> None:
        """Record a request that is about to be sent."""
        named = {"topic": FLOOD, "marks": [*marks], "due_ms": self.due_ms}
        self._asked[marks] = RecordedRequest(self._history, "schedule", **named)

    def answered(self, marks: range, known: Sequence[str] | TimerError) -> None:
        """Record the answer to a request: the ids of its timers, or the error."""
        error = known if isinstance(known, TimerError) else None
        crcs = [zlib.crc32(payload_of(mark, _SIZE)) for mark in marks]
        ids = None if error else known
        self._asked.pop(marks).ended(error, ids=ids, payload_crcs=crcs)
        self._answers.append(error)

    def close(self) -> None:
        """Record unanswered requests as unknown and close the history. The client has ended."""
        for marks in [*self._asked]:
            self.answered(marks, OutcomeUnknown("no answer was awaited: the client failed"))
        self._history.close()
