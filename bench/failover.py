"""S9: the time without firings after a leader's death; in the full form with millions pending.

A few timers are due at every moment. They were scheduled well ahead, so that the successor has work
as soon as it leads:

    kill -9                                   first message that the successor fired
    |                                         |
    |<--- fired: wait of the timers --------->|<-- received: wait of the application ----->|

Messages that the old leader fired are delivered again by the successor. They don't count.
"""

import asyncio
import itertools
import random
import time
from typing import Final

from bench.delivery import GROUP, consuming
from bench.feed import PACE_MS, Feed, now_ms, paces
from bench.measure import MEDIAN, Figure, Form, Measure, Series
from bench.pending_costs import FILL_LIMIT_S, fill
from bench.rig import BenchError, Rig
from timerclient import AsyncTimerClient, Batch
from timerclient.values.errors import OutcomeUnknown

KILLS: Final = {Form.SHORT: 3, Form.FULL: 30}
PENDING: Final = {Form.SHORT: 0, Form.FULL: 10_000_000}
"""Timers due in an hour or later. They never fire, and must not lengthen a failover."""
PER_PACE: Final = 10
"""200 timers a second: one is due every 5 ms."""
AHEAD_MS: Final = 4_000
"""Milliseconds from schedule to due time: longer than a failover."""
LAST_MS: Final = 1_000
"""Milliseconds by which the last timer is due after all others. A run ends when it is received, so
that an audit finds no message that no consumer was there for."""
SETTLED_S: Final = 1.0
KILL_LIMIT_S: Final = 60.0
POLL_S: Final = 0.05


class Firings:
    """The first message fired by each leadership."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._seen: list[tuple[int, int, float]] = []
        """(epoch of the delivery, fired at, received at); times in Unix milliseconds."""
        self._last_due_ms = 0

    def note(self, batch: Batch) -> None:
        """Record a batch that arrives now, and acknowledge it."""
        received_ms = time.time_ns() / 1e6
        self._last_due_ms = max(self._last_due_ms, *batch.due_ms)
        self._seen.extend((batch.epoch, fired_ms, received_ms) for fired_ms in batch.fired_at_ms)
        self._changed.set()
        _ = batch.ack()  # fails for messages of the old leader, which does not matter here

    async def first(self, above_epoch: int, after_ms: int) -> tuple[int, float]:
        """Return (fired at, received at) of the first message that a later leader fired."""
        checked = 0
        while True:
            for epoch, fired_ms, received_ms in itertools.islice(self._seen, checked, None):
                if epoch > above_epoch and fired_ms > after_ms:
                    return fired_ms, received_ms
            checked = len(self._seen)
            self._changed.clear()
            await self._changed.wait()

    async def due(self, due_ms: int) -> None:
        """Wait for a message that was due at `due_ms` or later."""
        while self._last_due_ms < due_ms:
            self._changed.clear()
            await self._changed.wait()


def failover(rig: Rig, form: Form) -> Series:
    """Kill the leader repeatedly. Return milliseconds from each kill."""
    kills = KILLS[form]
    rig.within(FILL_LIMIT_S, _fill(rig, PENDING[form]))
    return rig.within(kills * KILL_LIMIT_S, _failover(rig, kills))


async def _fill(rig: Rig, count: int) -> None:
    async with rig.client() as client:
        await fill(client, rig.topic("s9-pending"), count)


async def _failover(rig: Rig, kills: int) -> Series:
    topic, firings, chance = rig.topic("s9"), Firings(), random.Random(9)
    series: Series = {"fired": [], "received": []}
    async with (
        rig.client() as client,
        consuming(rig, client.consumer(topic, GROUP), topic, firings.note),
        asyncio.TaskGroup() as tasks,
    ):
        load = tasks.create_task(_load(client, topic))
        await asyncio.sleep(AHEAD_MS / 1000)
        for _ in range(kills):
            # Kills must not fall at the same point between two heartbeats.
            await asyncio.sleep(SETTLED_S + chance.random())
            fired_ms, received_ms, killed = await _kill_leader(rig, firings)
            series["fired"].append(fired_ms)
            series["received"].append(received_ms)
            await asyncio.to_thread(rig.cluster.restart, killed)
            rig.fault("restart", killed)
            await _whole(rig, client)
        load.cancel()
        last_ms = now_ms() + AHEAD_MS + LAST_MS
        await client.schedule_batch(topic, Feed(size=1).payloads(), due_ms=[last_ms])
        await firings.due(last_ms)
    return series


async def _load(client: AsyncTimerClient, topic: str) -> None:
    """Schedule 200 timers a second until cancelled, without waiting for answers."""
    feed = Feed(size=PER_PACE)
    async with asyncio.TaskGroup() as tasks:
        async for at_ms in paces():
            due_ms = feed.spread(at_ms + AHEAD_MS, PACE_MS)
            tasks.create_task(_schedule(client, topic, feed.payloads(), due_ms))


async def _schedule(
    client: AsyncTimerClient, topic: str, payloads: list[bytes], due_ms: list[int]
) -> None:
    try:
        await client.schedule_batch(topic, payloads, due_ms=due_ms)
    except OutcomeUnknown:
        return  # this load is only a background; other tests check for lost timers


async def _kill_leader(rig: Rig, firings: Firings) -> tuple[float, float, str]:
    """Return (ms to the first firing, ms to its receipt, name of the killed node)."""
    leader = await asyncio.to_thread(rig.cluster.wait_for_leader)
    state = await asyncio.to_thread(rig.cluster.state, leader)
    if state is None:
        raise BenchError(f"{leader}, the leader, does not answer")
    killed_ms = time.time_ns() / 1e6
    await asyncio.to_thread(rig.cluster.kill, leader)
    rig.fault("kill", leader, role="leader", epoch=state.epoch)
    # The leader is dead, and its lease not over. A later firing is another leader's.
    fired_ms, received_ms = await firings.first(state.epoch, after_ms=now_ms())
    return fired_ms - killed_ms, received_ms - killed_ms, leader


async def _whole(rig: Rig, client: AsyncTimerClient) -> None:
    """Wait until all nodes are connected and have the entries committed so far."""
    await asyncio.to_thread(rig.cluster.wait_for_leader)
    committed = max(node.commit_index for node in (await client.status()).nodes)
    while True:
        nodes = (await client.status()).nodes
        if all(node.reachable and node.log_end >= committed for node in nodes):
            return
        await asyncio.sleep(POLL_S)


S9: Final = Measure(
    name="s9",
    title="leader killed: to its successor's first firing",
    run=failover,
    figures=(
        Figure(
            name="p50", series="fired", unit="ms", waits=True, must=1000, aim=700, percentile=MEDIAN
        ),
        Figure(
            name="p99", series="fired", unit="ms", waits=True, must=2000, aim=1000, percentile=99
        ),
        Figure(
            name="  until received: p50",
            series="received",
            unit="ms",
            waits=True,
            percentile=MEDIAN,
        ),
        Figure(
            name="  until received: p99", series="received", unit="ms", waits=True, percentile=99
        ),
    ),
    runs={Form.SHORT: 1, Form.FULL: 1},
    fresh=True,
    recorded=True,
)
