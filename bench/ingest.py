"""S1 to S3: the rate of new timers. All are due in an hour or later, so that none fires."""

import asyncio
import time
from typing import Final

import numpy as np

from bench.feed import HOUR_MS, PAYLOAD_SIZE, Feed, now_ms
from bench.measure import Figure, Form, Measure, Series, check, cost, rate
from bench.rig import Rig

BATCHES_IN_FLIGHT: Final = 32
"""3.2 MB: enough to hide one process's round trips, and far below the cluster's limits."""
CALLERS: Final = 400
SINGLES_MAX: Final = 3_000
SHORT_S: Final = 5.0
LONG_S: Final = 60.0
"""Seconds: long enough to include flushes and compaction."""


def batches(rig: Rig, form: Form) -> Series:
    """Schedule batches of 1,000 for 5 s; in the full form also for 60 s."""
    series = rig.within(60, _batches(rig, SHORT_S, "5s"))
    if form is Form.FULL:
        series |= rig.within(240, _batches(rig, LONG_S, "60s"))
    return series


async def _batches(rig: Rig, lasting_s: float, label: str) -> Series:
    feed, topic = Feed(), rig.topic("s1")
    async with rig.client() as client:
        first = len(await client.schedule_batch(topic, feed.payloads(), due_ms=feed.far()))
        with rig.cpu_use() as use:
            began = time.perf_counter()

            async def keep_scheduling() -> int:
                count = 0
                while time.perf_counter() - began < lasting_s:
                    timers = await client.schedule_batch(topic, feed.payloads(), due_ms=feed.far())
                    count += len(timers)
                return count

            callers = [keep_scheduling() for _ in range(BATCHES_IN_FLIGHT)]
            count = sum(await asyncio.gather(*callers))
            took_s = time.perf_counter() - began
        [status] = [each for each in await client.topics() if each.name == topic]
        check(
            status.pending == first + count,
            f"{first + count} timers acked, {status.pending} pending",
        )
    cores = {f"{name}_{label}": samples for name, samples in use.series().items()}
    return {f"rate_{label}": [count / took_s], **cores}


def singles(rig: Rig, form: Form) -> Series:
    """Call `schedule` from 400 concurrent callers. The client combines the calls into batches."""
    return rig.within(60, _singles(rig, 15.0 if form is Form.FULL else 3.0))


async def _singles(rig: Rig, lasting_s: float) -> Series:
    [payload, *_], topic, due_ms = Feed().payloads(), rig.topic("s2"), now_ms() + HOUR_MS
    async with rig.client() as client:
        await client.schedule(topic, payload, due_ms=due_ms)
        with rig.cpu_use() as use:
            began = time.perf_counter()

            async def keep_scheduling(number: int) -> int:
                count = 0
                while time.perf_counter() - began < lasting_s:
                    await client.schedule(topic, payload, due_ms=due_ms + number)
                    count += 1
                return count

            count = sum(await asyncio.gather(*map(keep_scheduling, range(CALLERS))))
            took_s = time.perf_counter() - began
    return {"rate": [count / took_s], **use.series()}


def one_at_a_time(rig: Rig, form: Form) -> Series:
    """Call `schedule` and await it, one at a time. Return latencies in milliseconds."""
    return rig.within(60, _one_at_a_time(rig, 10.0 if form is Form.FULL else 3.0))


async def _one_at_a_time(rig: Rig, lasting_s: float) -> Series:
    [payload, *_], topic, due_ms = Feed().payloads(), rig.topic("s3"), now_ms() + HOUR_MS
    latencies_s: list[float] = []
    async with rig.client() as client:
        for _ in range(20):
            await client.schedule(topic, payload, due_ms=due_ms)
        until = time.perf_counter() + lasting_s
        while time.perf_counter() < until and len(latencies_s) < SINGLES_MAX:
            began = time.perf_counter()
            await client.schedule(topic, payload, due_ms=due_ms)
            latencies_s.append(time.perf_counter() - began)
    p50, p99 = np.percentile(latencies_s, [50, 99]) * 1000
    return {"p50": [float(p50)], "p99": [float(p99)], "max": [max(latencies_s) * 1000]}


_CORES_5S: Final[tuple[Figure, ...]] = (
    cost("  CPU client", "cores_client_5s", "cores"),
    cost("  CPU leader", "cores_leader_5s", "cores"),
    cost("  CPU both followers", "cores_followers_5s", "cores"),
)

S1: Final = Measure(
    name="s1",
    title=f"ingest in batches of 1,000 x {PAYLOAD_SIZE} B",
    run=batches,
    figures=(
        rate("for 5 s", "rate_5s", "timers/s", 500_000, 1_000_000),
        rate("for 60 s", "rate_60s", "timers/s", 250_000, 400_000),
        *_CORES_5S,
    ),
    runs={Form.SHORT: 2, Form.FULL: 5},
    fresh=True,
    recorded=True,
)
S2: Final = Measure(
    name="s2",
    title=f"single schedule() calls, {CALLERS} callers",
    run=singles,
    figures=(rate("rate", "rate", "timers/s", 40_000, 100_000),),
    runs={Form.SHORT: 2, Form.FULL: 5},
    recorded=True,
)
S3: Final = Measure(
    name="s3",
    title="one schedule() at a time",
    run=one_at_a_time,
    figures=(
        cost("p50", "p50", "ms", 3, 1),
        cost("p99", "p99", "ms", 10, 3),
    ),
    runs={Form.SHORT: 2, Form.FULL: 5},
    recorded=True,
)
