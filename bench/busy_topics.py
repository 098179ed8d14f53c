"""S13: the lateness that 10,000 topics and 1,000 groups add, each group with a consumer.

The same timers are scheduled twice on one cluster, in the same small batches. First all go to one
topic with one consumer. Then the crowd exists, and each batch goes to another of its topics. A
tenth of those topics have a group. Their timers' lateness is compared with the single topic's.
"""

import asyncio
import gc
import itertools
from collections import Counter
from typing import Final

from bench.delivery import AHEAD_MS, GROUP, MeasuredLateness, Tally
from bench.feed import PACE_MS, Feed, paces
from bench.measure import Form, Measure, Series, wait
from bench.rig import Rig, some_at_once
from timerclient import AsyncConsumer, AsyncTimerClient

TOPICS: Final = 10_000
GROUPS: Final = 1_000
AT_ONCE: Final = 50
"""Topics or groups that are created concurrently."""
PER_S: Final = 1_000
"""Timers a second, in requests of TOGETHER timers. An overloaded machine would show the lateness of
its own queue, with one topic as with many. 5,000 a second overloaded two slow cores."""
TOGETHER: Final = 10
"""Timers in one batch; a batch goes to one topic."""
BATCHES: Final = PER_S * PACE_MS // 1000 // TOGETHER
"""Batches per pace of PACE_MS."""
WINDOW: Final = 1_000


def crowd(rig: Rig, form: Form) -> Series:
    """Return the lateness of PER_S timers a second to one topic, and to the crowd."""
    lasting_s = 20.0 if form is Form.FULL else 4.0
    return rig.within(2 * lasting_s + 240, _crowd(rig, lasting_s))


async def _crowd(rig: Rig, lasting_s: float) -> Series:
    async with AsyncTimerClient(rig.endpoints) as client:
        single = rig.topic("s13")
        alone = await _lateness(client, [single], [single], lasting_s)
        topics = [rig.topic("s13/crowd") for _ in range(TOPICS)]
        await some_at_once(AT_ONCE, topics, client.create_topic)
        within = await _lateness(client, topics, topics[:: TOPICS // GROUPS], lasting_s)
    return alone.series("alone") | within.series("crowd")


async def _lateness(
    client: AsyncTimerClient, topics: list[str], read: list[str], lasting_s: float
) -> MeasuredLateness:
    """Schedule to `topics` in turn. Consume the topics in `read`, and return their lateness."""
    late, tally = MeasuredLateness(), Tally()

    async def consume(consumer: AsyncConsumer) -> None:
        async for batch in consumer.batches():
            late.note(batch)
            tally.ack(batch)

    consumers = [client.consumer(topic, GROUP, window=WINDOW) for topic in read]
    await some_at_once(AT_ONCE, consumers, AsyncConsumer.__aenter__)
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(consume(consumer)) for consumer in consumers]
        gc.collect()
        gc.freeze()  # a thousand consumers share this process; its collector is not measured
        sent = await _play(client, topics, lasting_s)
        await tally.reach(sum(sent[topic] for topic in read))
        for reader in readers:
            reader.cancel()
    await some_at_once(AT_ONCE, consumers, AsyncConsumer.close)
    return late


async def _play(client: AsyncTimerClient, topics: list[str], lasting_s: float) -> Counter[str]:
    """Schedule each timer a second ahead. Return the number of timers per topic."""
    feed, sent, turns = Feed(size=TOGETHER), Counter[str](), itertools.cycle(topics)
    async with asyncio.TaskGroup() as tasks:
        async for at_ms in paces(lasting_s):
            for topic in itertools.islice(turns, BATCHES):
                due_ms = feed.spread(at_ms + AHEAD_MS, PACE_MS)
                tasks.create_task(client.schedule_batch(topic, feed.payloads(), due_ms=due_ms))
                sent[topic] += TOGETHER
    return sent


S13: Final = Measure(
    name="s13",
    title="lateness among 10,000 topics, 1,000 groups",
    run=crowd,
    figures=(
        wait("one topic: fired - due, p50", "fired_p50_alone"),
        wait("one topic: fired - due, p99", "fired_p99_alone"),
        wait("the crowd: fired - due, p50", "fired_p50_crowd"),
        wait("the crowd: fired - due, p99", "fired_p99_crowd"),
        wait("the crowd: fired - due, max", "fired_max_crowd"),
        wait("one topic: received - due, p50", "p50_alone"),
        wait("one topic: received - due, p99", "p99_alone"),
        wait("the crowd: received - due, p50", "p50_crowd"),
        wait("the crowd: received - due, p99", "p99_crowd"),
        wait("the crowd: received - due, max", "max_crowd"),
    ),
    runs={Form.SHORT: 1, Form.FULL: 5},
    fresh=True,
)
