"""Against real processes: disks hold only pending timers and unread messages, not the history."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replication.core.replication_config import ReplicationConfig
from tests.cluster.running import SOON_DROPPED, Running, take, until

pytestmark = pytest.mark.slow

MIB = 1 << 20
WAVES = 12
ROWS, PAYLOAD = 200, 50_000
BOUND = ReplicationConfig().cache_bytes * 9 // 8 + 24 * MIB
"""The log that is in memory as well, and what a flush leaves: a wave of 10 MB in a run or a spill
file, the log since it began, segments of 1 MiB that leave only whole."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path, SOON_DROPPED).cleaned() as cluster:
        yield cluster


def used(data: Path) -> int:
    sizes = []
    for path in data.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue  # dropped while we looked
    return sum(sizes)


@pytest.mark.long  # twelve waves of timers
def test_waves_of_timers_fired_and_acked_leave_the_disks_as_they_were(cluster: Running) -> None:
    datas = [cluster.directory / name for name in cluster.nodes]
    with cluster.client() as client, client.consumer("busy", group="g") as consumer:
        with client.consumer("small", group="slow"):  # reads, and never acks
            for _ in range(WAVES):
                client.schedule("small", b"unread", delay=0.2)
                for _ in range(ROWS // 10):
                    client.schedule_batch("busy", [bytes(PAYLOAD)] * 10, delay=0.2)
                take(consumer, ROWS)
                # Nor do they hold it all in between.
                until(lambda: max(map(used, datas)) < 1.2 * BOUND)
        assert WAVES * ROWS * PAYLOAD > 1.8 * BOUND
        until(lambda: max(map(used, datas)) < BOUND)
    cluster.counts_add_up()
    cluster.digests_agree()
