"""S7, S8, S10: the cost of millions of pending timers for their nodes, and of cancels among them.

    an empty cluster        memory of each node
    fill                    timers due in an hour or later, in batches: half of them, then all
    a minute of load        after each half: peak memory of the leader, above that of the empty one
    rest                    disk of each node per timer, once its merges are done
    cancels                 of timers of every age: one after the other, then by many callers
    kill -9 and start       a follower, then the leader, then all at once: until they serve

All steps share one cluster, as filling it takes longest.

A single awaited cancel, as the leader processes it:

    request -- checked, appended --| ... a majority has it on disk ... |-- applied --> answer
             <---- own part ------>|<--------- waiting ---------------->|<-- own part ->

Server time is the leader's own part. It is the handler's duration less the time from append to
commit of the entry, both from the leader's metrics. Both are means over the cancels, one entry
each. It excludes the leader's work during the wait (the sync, two followers' streams) and gRPC's
work around the handler. The CPU time includes them. It is that of the leader's process, all
threads, less its use without cancels (heartbeats, checkpoints, clock), which is measured just
before. Both are measured at rest; otherwise merges of the filled data would count.

A single cancel pays for a whole round. Several of many callers share a round, and each waits for
the others too. Server time is therefore measured for single cancels only.
"""

import asyncio
import random
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench import cpu
from bench.feed import BATCH_SIZE, Feed
from bench.footprint import Resident, disk_bytes
from bench.measure import Form, Measure, Series, check, cost
from bench.rig import BenchError, Rig
from deploy.local import LocalNode
from timerclient import AsyncTimerClient, CancelResult, Timer

PENDING: Final = {Form.SHORT: 500_000, Form.FULL: 10_000_000}
LOAD_S: Final = {Form.SHORT: 5.0, Form.FULL: 60.0}
LOAD_PER_S: Final = 20_000
RESTARTS: Final = {Form.SHORT: 1, Form.FULL: 5}
BATCHES_IN_FLIGHT: Final = 16
CANCELS: Final = 400
"""Cancels made one after the other."""
CANCELS_OF_MANY: Final = 1_200
CALLERS: Final = 64
SOME_OF_BATCH: Final = 4
IDLE_S: Final = 5.0
SAMPLE_S: Final = 0.1
FILL_LIMIT_S: Final = 900.0
REST_S: Final = 5.0
"""Seconds without a change of the files' sizes after which a disk is at rest."""
REST_LIMIT_S: Final = 300.0


async def fill(client: AsyncTimerClient, topic: str, count: int) -> list[Timer]:
    """Schedule `count` timers, due in an hour or later. Return SOME_OF_BATCH of each batch."""
    feed, batches, some = Feed(), iter(range(count // BATCH_SIZE)), list[Timer]()

    async def keep_scheduling() -> None:
        for _ in batches:
            timers = await client.schedule_batch(topic, feed.payloads(), due_ms=feed.far())
            some.extend(timers[:SOME_OF_BATCH])

    await asyncio.gather(*(keep_scheduling() for _ in range(BATCHES_IN_FLIGHT)))
    return some


def pending(rig: Rig, form: Form) -> Series:
    """Fill a cluster, and return the cost of its timers."""
    leader = rig.cluster.wait_for_leader()
    empty = Resident.of(rig.cluster.nodes[leader].pid)
    series, timers = rig.within(FILL_LIMIT_S, _filled_under_load(rig, form, leader, empty))
    if rig.cluster.wait_for_leader() != leader:
        raise BenchError(f"{leader} lost its leadership, and its memory was to be measured")
    return {
        **series,
        "disk": [disk_bytes(_data(rig, name)) / timers for name in rig.cluster.nodes],
        **_restarts(rig, form),
    }


async def _filled_under_load(
    rig: Rig, form: Form, leader: str, empty: Resident
) -> tuple[Series, int]:
    """Return the leader's memory under load, the cost of cancels, and the number pending then."""
    topic, node = rig.topic("pending"), rig.cluster.nodes[leader]
    half = PENDING[form] // 2
    async with AsyncTimerClient(rig.endpoints) as client:
        some = await fill(client, topic, half)
        loaded, peak_of_half = await _load_watched(client, topic, form, node)
        some += await fill(client, topic, half)
        runs = _last_run(rig, leader)
        more, peak = await _load_watched(client, topic, form, node)
        series: Series = {
            "memory": [(peak.total - empty.total) / 1e6],
            "memory_of_half": [(peak_of_half.total - empty.total) / 1e6],
            "memory_anonymous": [(peak.anonymous - empty.anonymous) / 1e6],
            "runs_written": [float(_last_run(rig, leader) - runs)],
        }
        await asyncio.to_thread(_wait_for_rest, rig)
        chosen = random.Random(7).sample(some, CANCELS + CANCELS_OF_MANY)
        series |= await _cancels(client, node, chosen)
        [status] = [each for each in await client.topics() if each.name == topic]
    timers = 2 * half + loaded + more - len(chosen)
    check(status.pending == timers, f"{timers} timers expected, {status.pending} pending")
    return series, timers


async def _load_watched(
    client: AsyncTimerClient, topic: str, form: Form, node: LocalNode
) -> tuple[int, Resident]:
    """Schedule for LOAD_S seconds. Return the number of timers, and the node's peak memory."""
    peak = Resident(0, 0)
    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(_load(client, topic, LOAD_S[form]))
        while not load.done():
            now = Resident.of(node.pid)
            peak = Resident(max(peak.total, now.total), max(peak.anonymous, now.anonymous))
            await asyncio.sleep(SAMPLE_S)
    return load.result(), peak


async def _cancels(client: AsyncTimerClient, leader: LocalNode, chosen: list[Timer]) -> Series:
    """Cancel `chosen`. Return single cancels' latency and server time, and the leader's CPU, ms."""
    latencies_s: list[float] = []

    async def keep_cancelling(timers: Iterator[Timer]) -> None:
        for timer in timers:
            began = time.perf_counter()
            result = await client.cancel(timer)
            latencies_s.append(time.perf_counter() - began)
            check(result is CancelResult.CANCELLED, f"cancel of {timer.id}: {result}")

    async def cpu_ms(timers: list[Timer], callers: int) -> float:
        left = iter(timers)
        work = asyncio.gather(*(keep_cancelling(left) for _ in range(callers)))
        used_s, took_s = await _used(leader.pid, work)
        return (used_s - idle_cores * took_s) * 1000 / len(timers)

    used_s, took_s = await _used(leader.pid, asyncio.sleep(IDLE_S))
    idle_cores = used_s / took_s
    before = await asyncio.to_thread(_spent, leader)
    alone_ms = await cpu_ms(chosen[:CANCELS], 1)
    after = await asyncio.to_thread(_spent, leader)
    in_all, waited = (now.mean_ms_since(then) for then, now in zip(before, after, strict=True))
    p50, p99 = np.percentile(latencies_s, [50, 99]) * 1000
    return {
        "cancel_p50": [float(p50)],
        "cancel_p99": [float(p99)],
        "cancel_server": [in_all - waited],
        "cancel_waited": [waited],
        "cancel_cpu": [alone_ms],
        "cancel_cpu_of_many": [await cpu_ms(chosen[CANCELS:], CALLERS)],
    }


class _Spent(NamedTuple):
    """The totals of a histogram of seconds."""

    total_s: float
    values: float

    def mean_ms_since(self, before: "_Spent") -> float:
        """Return the mean of the values since `before`, in milliseconds.

        Raises:
            BenchError: there were no values.
        """
        values = self.values - before.values
        check(values > 0, "the leader has recorded no durations meanwhile")
        return 1000 * (self.total_s - before.total_s) / values


def _spent(leader: LocalNode) -> tuple[_Spent, _Spent]:
    """Return the durations of cancels, and of entries from append to commit."""
    with urllib.request.urlopen(f"http://{leader.http}/metrics", timeout=10) as answer:
        page = answer.read().decode()

    def read(name: str) -> float:
        found = re.search(rf"^timer_{re.escape(name)} (\S+)$", page, re.MULTILINE)
        if found is None:
            raise BenchError(f"{leader.name} has no metric timer_{name}")
        return float(found[1])

    cancels, commits = (
        _Spent(read(f"{name}_seconds_sum{label}"), read(f"{name}_seconds_count{label}"))
        for name, label in (("cancel", ""), ("commit", '{kind="cancel"}'))
    )
    return cancels, commits


async def _used(pid: int, work: Awaitable[object]) -> tuple[float, float]:
    """Await `work`. Return the CPU seconds of a process meanwhile, and the elapsed seconds."""
    began, used_s = time.monotonic(), cpu.of_process(pid)
    await work
    return cpu.of_process(pid) - used_s, time.monotonic() - began


async def _load(client: AsyncTimerClient, topic: str, lasting_s: float) -> int:
    """Schedule LOAD_PER_S timers a second. Return their number."""
    feed, began, count = Feed(seed=2), time.monotonic(), 0
    while (at_s := count / LOAD_PER_S) < lasting_s:
        await asyncio.sleep(began + at_s - time.monotonic())
        await client.schedule_batch(topic, feed.payloads(), due_ms=feed.far())
        count += BATCH_SIZE
    return count


def _data(rig: Rig, name: str) -> Path:
    return rig.cluster.directory / rig.cluster.nodes[name].data


def _last_run(rig: Rig, name: str) -> int:
    numbers = [int(path.stem) for path in _data(rig, name).rglob("*.arrow")]
    return max(numbers, default=0)


def _wait_for_rest(rig: Rig) -> None:
    """Wait until no node's files change any more."""
    seen: list[int] = []
    since = began = time.monotonic()
    while time.monotonic() - since < REST_S:
        now = [disk_bytes(_data(rig, name)) for name in rig.cluster.nodes]
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - began > REST_LIMIT_S:
            raise BenchError(f"files still change {REST_LIMIT_S:g} s after the load")
        time.sleep(SAMPLE_S)


def _restarts(rig: Rig, form: Form) -> Series:
    cluster = rig.cluster
    series: Series = {"restart_follower": [], "restart_leader": [], "restart_all": []}
    for _ in range(RESTARTS[form]):
        leader = cluster.wait_for_leader()
        follower = next(name for name in cluster.nodes if name != leader)
        cluster.kill(follower)
        series["restart_follower"].append(_timed(cluster.restart, follower))
        cluster.kill(leader)
        cluster.wait_for_leader()
        series["restart_leader"].append(_timed(cluster.restart, leader))
        cluster.kill_together(*cluster.nodes)
        series["restart_all"].append(_timed(cluster.start))
        cluster.wait_for_leader()
    return series


def _timed(call: Callable[..., object], *names: str) -> float:
    began = time.monotonic()
    call(*names)
    return time.monotonic() - began


S7_S8_S10: Final = Measure(
    name="pending",
    title="S7, S8, S10: ten million pending (short form: half a million)",
    run=pending,
    figures=(
        cost("S7 leader's peak memory", "memory", "MB", 300, 150),
        cost("  with half as many pending", "memory_of_half", "MB"),
        cost("  without mapped files", "memory_anonymous", "MB"),
        cost("  runs written meanwhile", "runs_written", "runs"),
        cost("a cancel, awaited: p50", "cancel_p50", "ms"),
        cost("a cancel, awaited: p99", "cancel_p99", "ms"),
        cost("  server time of it", "cancel_server", "ms", 1, 0.5),
        cost("  mean wait of entries for a majority", "cancel_waited", "ms"),
        cost("  the leader's CPU for it, all threads", "cancel_cpu", "ms", 1, 0.5),
        cost(f"  for one of {CALLERS} callers'", "cancel_cpu_of_many", "ms", 1, 0.5),
        cost("S8 restart of a follower", "restart_follower", "s", 5, 1),
        cost("S8 restart of the old leader", "restart_leader", "s", 5, 1),
        cost("  all three killed at once", "restart_all", "s"),
        cost("S10 disk per timer and node", "disk", "B", 220, 165),
    ),
    runs={Form.SHORT: 1, Form.FULL: 1},
)
