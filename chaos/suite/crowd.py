"""Nemeses of clients: consumers that die with messages in hand, floods of requests."""

import random
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Final

from chaos.history import History, Outcome, payload_of
from chaos.suite.nemesis import NOTHING, Fizzled, Undo, nothing
from chaos.suite.stage import Stage, now_ms
from timerclient import TimerClient
from timerclient.errors import TimerError

FLOOD: Final = "flood"
"""The topic of floods. Nobody consumes it: its timers are due long after the run."""
FLOOD_DUE_MS: Final = 3_600_000
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
            [sys.executable, "-m", "chaos.suite.doomed", *words, str(self.lease_ms)],
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

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Send it, and wait for all answers."""
        requests = max(1, self.size_mb * 1_000_000 // (_SIZE * _ROWS * self.clients))
        answers: list[Outcome] = []
        number = next(_numbers)
        threads = [
            threading.Thread(target=_pour, args=(stage, number, each, requests, answers))
            for each in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = sum(outcome is Outcome.OK for outcome in answers)
        stage.record("flood", asked=len(answers), taken=taken)
        stage.say(f"a flood: {len(answers)} requests of {_SIZE * _ROWS:,} bytes, {taken} taken")
        return nothing


def _pour(stage: Stage, number: int, each: int, requests: int, answers: list[Outcome]) -> None:
    """Send requests, some at once, without asking twice: a refusal is final."""
    name = f"flood-{number}-{each}"
    first = FLOOD_MARKS + (number * 1000 + each) * 10_000_000
    due_ms = [now_ms() + FLOOD_DUE_MS] * _ROWS
    history = History(stage.run, name)
    with TimerClient(stage.cluster.endpoints) as client:
        for start in range(0, requests, _UNDER_WAY):
            at_ms, under_way = now_ms(), []
            for request in range(start, min(start + _UNDER_WAY, requests)):
                marks = range(first + request * _ROWS, first + (request + 1) * _ROWS)
                payloads = [payload_of(mark, _SIZE) for mark in marks]
                future = client.submit_batch(FLOOD, payloads, due_ms=due_ms, timeout=5.0)
                under_way.append((marks, future))
            for marks, future in under_way:
                ids, outcome, more = None, Outcome.OK, {}
                try:
                    ids = future.result().ids
                except TimerError as error:
                    outcome = Outcome.FAIL if error.outcome_known else Outcome.UNKNOWN
                    more = {"detail": repr(error)}
                answers.append(outcome)
                history.schedule(
                    marks, ids=ids, due_ms=due_ms, topic=FLOOD, span_ms=(at_ms, now_ms()),
                    outcome=outcome, **more,
                )  # fmt: skip
    history.close()
