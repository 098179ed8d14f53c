"""The same steps give the same results, however fast the test's thread and the loop's run."""

import random
import time
from datetime import UTC, datetime
from typing import Any

from timerclient.client.sync import Consumer
from timerfake import FakeCluster

START = datetime(2026, 1, 1, tzinfo=UTC)
RUNS = 5
JOBS = 24


def played(pause: random.Random) -> list[Any]:
    """Let a slow consumer shed messages to another one; return all that is seen.

    `pause`: how long the test's thread rests between its steps, in real time.
    """
    seen: list[Any] = []
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        client.schedule_batch("t", [b"%d" % job for job in range(JOBS)], delay=[*range(JOBS)])

        def takes(name: str, consumer: Consumer, most: int, work_s: float) -> None:
            for message in consumer.receive(1, timeout=0) + consumer.receive(most, timeout=0):
                cluster.advance(work_s)
                seen.append((name, cluster.now_ms, message.id, message.payload, message.attempt))
                _ = message.ack()
                time.sleep(pause.random() / 2_000)
            seen.append((name, consumer.dropped_stale, consumer.leases_lost))

        with client.consumer("t", "g", lease=4) as slow:
            cluster.advance(20)
            takes("slow", slow, 1, 5)
            with client.consumer("t", "g", lease=4) as quick:
                for turn in range(16):
                    cluster.advance(1)
                    takes("slow", slow, 1 + turn % 3, 3)
                    takes("quick", quick, 2, 0.1)
                    cluster.settle()  # the acks count
                    [group] = client.topics()[0].groups
                    seen.append((group.unacked, group.leased))
    return seen


def test_slow_consumer_sheds_the_same_messages_every_time() -> None:
    first = played(random.Random(0))
    done = [step[3] for step in first if len(step) == 5]
    assert sorted(done, key=int) == [b"%d" % job for job in range(JOBS)]
    assert {step[0] for step in first if len(step) == 5} == {"slow", "quick"}
    for run in range(1, RUNS):
        assert played(random.Random(run)) == first


def test_shed_messages_wait_for_a_consumer_that_asks() -> None:
    attempts = dict[bytes, int]()
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        client.schedule_batch("t", [b"%d" % job for job in range(60)], delay=[*range(60)])
        with (
            client.consumer("t", "g", lease=4) as slow,
            client.consumer("t", "g", lease=4) as quick,
        ):
            for turn in range(100):
                cluster.advance(0.5)
                for message in slow.receive(1, timeout=0):
                    cluster.advance(5)
                    attempts[message.payload] = message.attempt
                    _ = message.ack()
                for message in quick.receive(2, timeout=0) if turn % 2 else []:
                    attempts[message.payload] = message.attempt
                    _ = message.ack()
                cluster.settle()
    assert len(attempts) == 60
    assert max(attempts.values()) <= 5, "each delivery was asked for"
