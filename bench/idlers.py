"""S14: the cost of 100,000 idle topics and 50,000 idle groups.

The cluster is measured empty and then filled. In both states single schedules are timed. Then the
full cluster rests for a while, in which no leader may change. At the end a scrape of the metrics is
timed, and the restart of a killed follower.
"""

import asyncio
import itertools
import time
import urllib.request
from typing import Final

from bench import cpu
from bench.busy_topics import AT_ONCE
from bench.feed import Feed, now_ms
from bench.measure import Figure, Form, Measure, Series, cost
from bench.rig import BenchError, Rig, some_at_once
from timerclient import AsyncTimerClient

NAMESPACES: Final = 10
TOPICS: Final = {Form.SHORT: 10_000, Form.FULL: 100_000}
GROUPS: Final = {Form.SHORT: 5_000, Form.FULL: 50_000}
IDLE_S: Final = {Form.SHORT: 20.0, Form.FULL: 300.0}
FILL_LIMIT_S: Final = 1_200.0
SCHEDULES: Final = 1_000
PACE_S: Final = 0.01
SCRAPES: Final = 5
RESTART_LIMIT_S: Final = 60.0
POLL_S: Final = 0.02
STILL_S: Final = 10.0
"""Seconds after the filling until its remaining work is done."""


def idlers(rig: Rig, form: Form) -> Series:
    """Return schedule latencies, changes of leader, and the times of a scrape and a restart."""
    return rig.within(FILL_LIMIT_S + IDLE_S[form], _idlers(rig, form))


async def _idlers(rig: Rig, form: Form) -> Series:
    async with AsyncTimerClient(rig.endpoints) as client:
        empty = await _schedules(client)
        topics = [f"s14-{n % NAMESPACES}/idle-{n}" for n in range(1, TOPICS[form])]
        await some_at_once(AT_ONCE, topics, client.create_topic)
        groups = topics[: GROUPS[form]]
        await some_at_once(AT_ONCE, groups, lambda topic: client.create_group(topic, "idle"))
        await asyncio.sleep(STILL_S)
        epoch = (await client.status()).epoch
        full = await _schedules(client)
        await asyncio.sleep(IDLE_S[form])
        changes = (await client.status()).epoch - epoch
        scrapes = [await asyncio.to_thread(_scrape, rig) for _ in range(SCRAPES)]
        restart_s, restart_cpu_s = await _restart(rig, client)
    return {
        "schedule_empty": empty,
        "schedule_full": full,
        "changes": [float(changes)],
        "scrape": scrapes,
        "restart": [restart_s],
        "restart_cpu": [restart_cpu_s],
    }


async def _schedules(client: AsyncTimerClient) -> list[float]:
    """Schedule one timer at a time, an hour ahead. Return the latency of each in ms."""
    feed, took = Feed(size=1), list[float]()
    for _ in itertools.repeat(None, SCHEDULES):
        began = time.perf_counter()
        await client.schedule_batch("s14", feed.payloads(), due_ms=now_ms() + 3_600_000)
        took.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(PACE_S)
    return took


def _scrape(rig: Rig) -> float:
    """Return the time of the leader's /metrics in ms."""
    address = rig.cluster.nodes[rig.cluster.wait_for_leader()].http
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        answer.read()
    return 1000 * (time.perf_counter() - began)


async def _restart(rig: Rig, client: AsyncTimerClient) -> tuple[float, float]:
    """Kill a follower and start it. Return the seconds until it has applied the whole log.

    Also return its CPU seconds, as elapsed time means little on a busy machine.
    """
    leader = await asyncio.to_thread(rig.cluster.wait_for_leader)
    name = next(each for each in rig.cluster.nodes if each != leader)
    await asyncio.to_thread(rig.cluster.kill, name)
    began = time.monotonic()
    await asyncio.to_thread(rig.cluster.restart, name)
    while time.monotonic() - began < RESTART_LIMIT_S:
        nodes = {node.name: node for node in (await client.status()).nodes}
        there, most = nodes[name], nodes[leader].commit_index
        if there.reachable and 0 < most <= there.applied_index + 1:
            return time.monotonic() - began, cpu.of_process(rig.cluster.nodes[name].pid)
        await asyncio.sleep(POLL_S)
    raise BenchError(f"{name} has not caught up {RESTART_LIMIT_S:g} s after its start")


S14: Final = Measure(
    name="s14",
    title="idle topics and groups (full: 100,000 and 50,000)",
    run=idlers,
    figures=(
        Figure(name="empty: schedule, p99", series="schedule_empty", unit="ms", percentile=99),
        Figure(name="full: schedule, p99", series="schedule_full", unit="ms", percentile=99),
        cost("changes of leader", "changes", "", 0, 0),
        cost("a scrape", "scrape", "ms", 1_000, 100),
        cost("a node's restart", "restart", "s", 5, 3),
        cost("  its CPU", "restart_cpu", "s"),
    ),
    runs={Form.SHORT: 1, Form.FULL: 1},
    fresh=True,
)
