"""Against three real processes: quotas over failover and restart, and what operators see."""

import re
from typing import cast

import pytest

from tests.cluster.hosted import flushed
from tests.cluster.running import Running, take, until
from timerclient import PolicyFields, QuotaReached, TimerClient

pytestmark = pytest.mark.slow

HOUR = 3600.0
SETTINGS = ("storage.flush_interval_ms = 1000",)


def used(client: TimerClient, topic: str) -> dict[str, tuple[int, int]]:
    return {each.field: (each.used, each.limit) for each in client.describe_topic(topic).quotas}


def test_quota_and_what_is_used_of_it_outlive_failover_and_restart(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.create_group(topic, "g")
    client.schedule_batch(topic, [b"12345"] * 3)
    client.schedule_batch(topic, [b"123"] * 2, delay=HOUR)
    gone = client.schedule(topic, b"1234567", delay=HOUR)
    limits: dict[str, int] = {
        "pending_max": 3,
        "pending_bytes_max": 16,
        "ready_max": 3,
        "ready_bytes_max": 99,
    }
    client.alter_policies(cast("PolicyFields", limits), topic=topic)
    flushed(cluster)
    client.cancel(gone)
    numbers = {"pending_max": 2, "pending_bytes_max": 6, "ready_max": 3, "ready_bytes_max": 15}
    wanted = {name: (numbers[name], limits[name]) for name in limits}
    assert until(lambda: used(client, topic) == wanted)
    cluster.kill(cluster.wait_for_leader())
    assert used(client, topic) == wanted
    with pytest.raises(QuotaReached, match="ready_max"):
        client.schedule(topic, b"1", delay=HOUR)
    cluster.kill_together(*cluster.nodes)
    cluster.up()
    assert used(client, topic) == wanted
    with pytest.raises(QuotaReached, match="ready_max"):
        client.schedule(topic, b"1", delay=HOUR)
    with client.consumer(topic, group="g") as consumer:
        assert [message.payload for message in take(consumer, 3)] == [b"12345"] * 3
    with pytest.raises(QuotaReached, match="has 6 bytes of pending payloads; 11 more"):
        client.schedule(topic, b"12345678901", delay=HOUR)
    client.schedule(topic, b"1234567890", delay=HOUR)
    with pytest.raises(QuotaReached, match="pending_max"):
        client.schedule(topic, b"", delay=HOUR)
    cluster.digests_agree()
    cluster.counts_add_up()


def test_metrics_show_what_is_used(cluster: Running, client: TimerClient, topic: str) -> None:
    client.create_topic(topic)
    client.alter_policies({"pending_max": 4}, topic=topic)
    client.schedule_batch(topic, [b""] * 3, delay=HOUR)
    _, page = cluster.get(cluster.wait_for_leader(), "/metrics")
    labels = rf'{{quota="pending_max",topic="{topic}"}}'
    shown = re.findall(rf"^timer_quota_(\w+){labels} (\S+)$", page, re.MULTILINE)
    assert dict(shown) == {"used": "3.0", "limit": "4.0"}
