"""S7, S8, S10: what millions of pending timers cost the nodes that hold them.

    an empty cluster        memory of each node
    fill                    timers due in an hour or later, in batches
    a minute of load        peak memory of the leader, over the empty one's
    rest                    disk of each node, once its merges are done, per timer
    kill -9 and start       a follower, then the leader, then all at once: until they serve

They share one cluster, as filling it takes longest.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.feed import BATCH_SIZE, Feed
from bench.measure import Form, Measure, Series, check, cost
from bench.rig import BenchError, Rig
from timerclient import AsyncTimerClient

PENDING: Final = {Form.SHORT: 500_000, Form.FULL: 10_000_000}
LOAD_S: Final = {Form.SHORT: 5.0, Form.FULL: 60.0}
LOAD_PER_S: Final = 20_000
RESTARTS: Final = {Form.SHORT: 1, Form.FULL: 5}
BATCHES_IN_FLIGHT: Final = 16
SAMPLE_S: Final = 0.1
FILL_LIMIT_S: Final = 600.0
REST_S: Final = 5.0
"""Disk use that has not changed for so long is at rest."""
REST_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Resident:
    """Memory of a process, bytes."""

    total: int
    """VmRSS: pages of mapped files count, too."""
    anonymous: int

    @classmethod
    def of(cls, pid: int) -> "Resident":
        """Read it from /proc."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return cls(*(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon")))


async def fill(client: AsyncTimerClient, topic: str, count: int) -> None:
    """Schedule `count` timers, due in an hour or later, as fast as they are taken."""
    feed, batches = Feed(), iter(range(count // BATCH_SIZE))

    async def keep_scheduling() -> None:
        for _ in batches:
            await client.schedule_batch(topic, feed.payloads(), due_ms=feed.far())

    await asyncio.gather(*(keep_scheduling() for _ in range(BATCHES_IN_FLIGHT)))


def pending(rig: Rig, form: Form) -> Series:
    """Fill a cluster and see what its timers cost."""
    leader = rig.cluster.wait_for_leader()
    empty = Resident.of(rig.cluster.nodes[leader].pid)
    peak, timers, written = rig.within(FILL_LIMIT_S, _filled_under_load(rig, form, leader))
    if rig.cluster.wait_for_leader() != leader:
        raise BenchError(f"{leader}, whose memory was measured, lost its leadership")
    _wait_for_rest(rig)
    return {
        "memory": [(peak.total - empty.total) / 1e6],
        "memory_anonymous": [(peak.anonymous - empty.anonymous) / 1e6],
        "runs_written": [float(written)],
        "disk": [_disk_size(rig, name) / timers for name in rig.cluster.nodes],
        **_restarts(rig, form),
    }


async def _filled_under_load(rig: Rig, form: Form, leader: str) -> tuple[Resident, int, int]:
    """Return the leader's peak memory under load, how many are pending, how many runs it wrote."""
    topic, node = rig.topic("pending"), rig.cluster.nodes[leader]
    peak = Resident(0, 0)
    async with AsyncTimerClient(rig.endpoints) as client, asyncio.TaskGroup() as tasks:
        await fill(client, topic, PENDING[form])
        before = _last_run(rig, leader)
        load = tasks.create_task(_load(client, topic, LOAD_S[form]))
        while not load.done():
            now = Resident.of(node.pid)
            peak = Resident(max(peak.total, now.total), max(peak.anonymous, now.anonymous))
            await asyncio.sleep(SAMPLE_S)
        added = load.result()
        [status] = [each for each in await client.topics() if each.name == topic]
    timers = PENDING[form] + added
    check(status.pending == timers, f"{timers} timers acked, {status.pending} pending")
    return peak, timers, _last_run(rig, leader) - before


async def _load(client: AsyncTimerClient, topic: str, lasting_s: float) -> int:
    """Schedule LOAD_PER_S timers a second; return how many."""
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


def _disk_size(rig: Rig, name: str) -> int:
    total = 0
    for path in _data(rig, name).rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # dropped meanwhile
            continue
    return total


def _wait_for_rest(rig: Rig) -> None:
    """Wait until no node's files change any more."""
    seen: list[int] = []
    since = began = time.monotonic()
    while time.monotonic() - since < REST_S:
        now = [_disk_size(rig, name) for name in rig.cluster.nodes]
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
        cost("  without mapped files", "memory_anonymous", "MB"),
        cost("  runs written meanwhile", "runs_written", "runs"),
        cost("S8 restart of a follower", "restart_follower", "s", 5, 1),
        cost("S8 restart of the old leader", "restart_leader", "s", 5, 1),
        cost("  all three killed at once", "restart_all", "s"),
        cost("S10 disk per timer and node", "disk", "B", 220, 165),
    ),
    runs={Form.SHORT: 1, Form.FULL: 1},
)
