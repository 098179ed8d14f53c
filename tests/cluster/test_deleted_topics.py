"""Against real processes: a deleted topic stays so through kills, and the disks get it back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.running import Running, take, until
from timerclient import CancelResult
from timerclient.values.errors import NotFound

pytestmark = pytest.mark.slow

MIB = 1 << 20
SETTINGS = (
    f"storage.memtable_bytes_flush = {MIB}",
    "storage.flush_interval_ms = 1000",
    "limits.payload_bytes_max = 65536",
    "limits.request_bytes_max = 524288",
)
HOUR = 3600.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path, SETTINGS).cleaned() as cluster:
        yield cluster


def in_runs(data: Path) -> int:
    """Return the bytes of a node's runs."""
    sizes = []
    for path in data.glob("**/runs/*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue  # removed while we looked
    return sum(sizes)


@pytest.mark.long  # all nodes are killed, and runs are merged
def test_deleted_topic_stays_deleted_through_kills_and_its_disk_space_comes_back(
    cluster: Running,
) -> None:
    datas = [cluster.directory / name for name in cluster.nodes]
    with cluster.client() as client:
        far = [
            client.schedule_batch("big", [bytes(50_000)] * 10, delay=HOUR).ids for _ in range(16)
        ]
        kept = client.schedule("small", b"kept", delay=HOUR)
        until(lambda: min(map(in_runs, datas)) > 7 * MIB)
        gone = client.delete_topic("big")
        assert gone is not None
        assert gone.pending == 160
        leader = cluster.wait_for_leader()
        cluster.kill(leader)
        assert client.cancel_batch(far[0]) == [CancelResult.NOT_FOUND] * 10
        for name in cluster.nodes:
            if name != leader:
                cluster.kill(name)
        cluster.up()
        with pytest.raises(NotFound):
            client.count_timers("big")
        assert client.cancel_batch(far[-1]) == [CancelResult.NOT_FOUND] * 10
        until(lambda: max(map(in_runs, datas)) < MIB)
        assert client.get_timer(kept).payload == b"kept"
        client.schedule("big", b"anew", delay=0)
        with client.consumer("big", group="g") as consumer:
            assert [message.payload for message in take(consumer, 1)] == [b"anew"]
    counts = cluster.counts_add_up()
    assert (counts.pending, counts.dropped) == (1, 160)
    cluster.digests_agree()
