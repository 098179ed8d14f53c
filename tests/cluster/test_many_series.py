"""Very many series tick over the kill of the leader: no occurrence is missed, none is doubled."""

import asyncio
import os
import time
from collections import defaultdict
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.cluster.running import AS_SHIPPED, Running, until
from timerclient import AsyncTimerClient
from timerclient.rows.messages import Message

SERIES = int(os.environ.get("SERIES", "100000"))
EVERY_S = float(os.environ.get("SERIES_EVERY_S", "10"))
TICKS = 4
"""Occurrences of each series."""
AT_ONCE = 200
CREATED_PER_S = 200
"""Series that a slow machine creates in a second, by single calls."""
WAIT_S = 600.0


async def create_all(cluster: list[str], start_ms: int) -> None:
    """Create the series, which begin at the same time, spread over one interval."""
    client = AsyncTimerClient(cluster, timeout=WAIT_S)
    numbers = iter(range(SERIES))

    async def some() -> None:
        for number in numbers:
            start = start_ms + round(1000 * EVERY_S * number / SERIES)
            options = {"every": EVERY_S, "start": start, "max_count": TICKS}
            await client.create_series(
                "ticks",
                f"s{number}",
                misfire="fire_all",
                **options,  # type: ignore[arg-type]
            )

    async with client, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_each_of_many_series_ticks_once_each_time_over_the_kill_of_the_leader(
    tmp_path: Path,
) -> None:
    settings = (*AS_SHIPPED, f"limits.series_max = {SERIES}")
    with Running(tmp_path, settings).cleaned() as cluster, cluster.client() as client:
        client.create_group("ticks", "g")
        ahead_s = 10 + SERIES / CREATED_PER_S
        start_ms = client.count_timers("ticks").clock_ms + round(1000 * ahead_s)
        began = time.monotonic()
        addresses = cluster.endpoints
        asyncio.run(create_all(addresses, start_ms))
        created_s = time.monotonic() - began
        assert client.count_timers("ticks").clock_ms < start_ms, f"created in {created_s:.0f} s"
        seen: dict[tuple[int, int], set[str]] = defaultdict(set)
        late_ms: list[int] = []

        def note(message: Message) -> None:
            occurrence = message.occurrence
            assert occurrence is not None
            seen[occurrence.series, occurrence.number].add(message.id)
            late_ms.append(message.handed_out_ms - message.due_ms)

        killer = Thread(target=lambda: kill(cluster, seen))
        killer.start()
        with client.consumer("ticks", "g") as consumer:
            give_up = time.monotonic() + ahead_s + EVERY_S * TICKS + WAIT_S
            while len(seen) < SERIES * TICKS and time.monotonic() < give_up:
                for message in consumer.receive(1_000, timeout=5):
                    note(message)
                    _ = message.ack()
        killer.join()
        assert len(seen) == SERIES * TICKS
        assert {len(timers) for timers in seen.values()} == {1}
        assert {number for _, number in seen} == set(range(1, TICKS + 1))
        [topic] = [each for each in client.topics() if each.name == "ticks"]
        assert (topic.fired, topic.pending) == (SERIES * TICKS, 0)
        until(lambda: all(each.finished for each in client.list_series("ticks")))
        cluster.digests_agree()
    late = np.percentile(late_ms, [50, 99, 100]).round().tolist()
    print(f"\n{SERIES} series, created in {created_s:.1f} s; late ms p50, p99, most: {late}")


def kill(cluster: Running, seen: dict[tuple[int, int], set[str]]) -> None:
    """Kill the leader in the middle of the second tick, and start it again."""
    until(lambda: len(seen) > SERIES * 3 // 2, WAIT_S)
    leader = cluster.leader()
    assert leader is not None
    cluster.kill(leader)
    cluster.start(leader)
