"""Nemeses of clients: consumers that die while they lease messages, and floods of requests."""

import asyncio
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Final

from chaos.history.history import now_ms
from chaos.suite.nemeses.nemesis import Nemesis, NoEffect
from chaos.suite.stage.stage import Stage
from chaos.workloads.history_books import Books
from chaos.workloads.recorded_requests import RecordedRequests
from timerclient import AsyncTimerClient, TimerClient
from timerclient.threads.background import Background
from timerclient.values.errors import TimerError, Unavailable

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


@Nemesis
def kill_consumer(
    stage: Stage, chance: random.Random, life_s: float = 1.0, lease_ms: int = 3000
) -> Iterator[None]:
    """A consumer receives messages of an existing group, acks none, and dies by kill -9.

    Start the consumer, let it receive messages, kill it; no effect if it had none.

    `life_s`: from the first messages to the kill. `lease_ms`: of the consumer's messages.
    """
    with TimerClient(stage.cluster.endpoints) as client:
        groups = [(t.name, g.name) for t in client.topics() for g in t.groups if g.consumers]
    if not groups:
        raise NoEffect("no group has a consumer: no consumer was killed")
    topic, group = chance.choice(groups)
    name = f"doomed-{next(_numbers)}"
    words = [str(stage.run.root), name, ",".join(stage.cluster.endpoints), topic, group]
    doomed = subprocess.Popen(
        [sys.executable, "-m", "chaos.suite.stage.doomed", *words, str(lease_ms)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert doomed.stdout is not None
    with doomed.stdout:
        # Readable: a line, so the consumer has messages, or the end, so it died. Neither:
        # its group has no messages.
        select.select([doomed.stdout], [], [], TAKE_S)
        time.sleep(life_s)
        doomed.kill()
        took = bool(doomed.stdout.readline())
        doomed.wait()
    stage.record("kill-consumer", topic=topic, group=group, client=name)
    who = f"a consumer of {topic}, group {group}, died with"
    if not took:
        raise NoEffect(f"{who} no messages leased")
    stage.say(f"{who} messages leased")
    yield


@Nemesis
def flood(
    stage: Stage, chance: random.Random, clients: int = 4, size_mb: int = 64, *,
    has_to_be_refused: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Requests faster than the cluster accepts them, from several clients at once.

    It waits for all answers. It has no effect if no node could accept any.

    `clients`: each sends an equal share. `size_mb`: megabytes of payload, all clients together.
    `has_to_be_refused`: the strike counts only if the nodes refuse some requests.
    """
    before = stage.refusals()
    requests = max(1, size_mb * 1_000_000 // (_SIZE * _ROWS * clients))
    number = next(_numbers)

    async def pour_all() -> list[list[TimerError | None]]:
        pours = [_pour(stage, number, each, requests) for each in range(clients)]
        return await asyncio.gather(*pours)

    answers = [error for errors in Background().call(pour_all()) for error in errors]
    taken = answers.count(None)
    # A node that started again counts from 0, so the difference may be negative.
    refused = max(0, stage.refusals() - before)
    stage.record("flood", asked=len(answers), taken=taken, refused=refused)
    stage.say(
        f"a flood: {len(answers)} requests of {_SIZE * _ROWS:,} bytes, {taken} accepted,"
        f" {refused} refusals as overloaded"
    )
    if all(isinstance(each, Unavailable) and each.outcome_known for each in answers):
        raise NoEffect(f"no node accepted any of the flood: {answers[-1]!r}")
    if has_to_be_refused and not refused:
        raise NoEffect("no request of the flood was refused")
    yield


async def _pour(stage: Stage, number: int, each: int, requests: int) -> list[TimerError | None]:
    """Send one client's requests, several at once; return their errors, None for accepted ones.

    `number`: of this flood among all. `each`: of this client in the flood.
    """
    first = FLOOD_MARKS + (number * 1000 + each) * 10_000_000
    name, books = f"flood-{number}-{each}", Books(payload_size=_SIZE)
    due_ms = [now_ms() + FLOOD_DUE_MS] * _ROWS
    client = AsyncTimerClient(stage.cluster.endpoints)
    recorded = RecordedRequests(stage.run, name, client, books, topic=FLOOD)
    errors: list[TimerError | None] = []
    with closing(recorded):
        async with client:
            for start in range(first, first + requests * _ROWS, _UNDER_WAY * _ROWS):
                end = min(start + _UNDER_WAY * _ROWS, first + requests * _ROWS)
                under_way = [
                    recorded.batch(range(marks, marks + _ROWS), due_ms, timeout_s=5.0)
                    for marks in range(start, end, _ROWS)
                ]
                errors += [ended.error for ended in await asyncio.gather(*under_way)]
    return errors
