"""An application that is slower than its leases, on three real processes: no work is done twice."""

import time
from collections import Counter

import pytest

from tests.cluster.running import Running
from timerclient import AsyncTimerClient, TimerClient

pytestmark = pytest.mark.slow

JOBS = [b"%d" % number for number in range(100)]
LEASE_S = 2.0
WORK_S = 0.05
"""All jobs together take longer than two leases."""


def test_slow_loop_works_each_message_once(client: TimerClient, topic: str) -> None:
    client.schedule_batch(topic, JOBS)
    worked = Counter[bytes]()
    with client.consumer(topic, group="g", lease=LEASE_S, max_messages=len(JOBS)) as consumer:
        for message in consumer:
            time.sleep(WORK_S)
            worked[message.payload] += 1
            _ = message.ack()
    assert worked == Counter(JOBS)


def test_slow_loop_over_batches_works_each_message_once(client: TimerClient, topic: str) -> None:
    client.schedule_batch(topic, JOBS)
    worked = Counter[bytes]()
    with client.consumer(topic, group="g", lease=LEASE_S) as consumer:
        [*batch] = next(consumer.batches())
        with client.consumer(topic, group="g") as other:
            for message in batch:
                time.sleep(WORK_S)
                worked[message.payload] += 1
                _ = message.ack()
            assert other.receive(timeout=0) == []
    assert worked == Counter(JOBS)


async def test_slow_loop_that_blocks_its_event_loop_works_each_message_once(
    cluster: Running, topic: str
) -> None:
    worked = Counter[bytes]()
    async with AsyncTimerClient(cluster.endpoints) as client:
        await client.schedule_batch(topic, JOBS)
        async with client.consumer(topic, "g", lease=LEASE_S, max_messages=len(JOBS)) as consumer:
            async for message in consumer:
                time.sleep(WORK_S)  # noqa: ASYNC251 -- as applications do
                worked[message.payload] += 1
                _ = message.ack()
    assert worked == Counter(JOBS)
