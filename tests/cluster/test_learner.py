"""A node that joins later, in the place of one whose disk is gone: fed, and counted for nothing."""

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.timerd import init
from tests.cluster.running import Running, take, until
from timerclient import TimerError

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Running]:
    cluster = Running(tmp_path)
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        for name in cluster.nodes:
            if cluster.is_running(name):
                cluster.kill(name)
    assert not cluster.complaints()


def replace_disk(cluster: Running, name: str) -> None:
    """Put an empty disk into a node that is down, and start it as a learner under its name."""
    node = cluster.node(name)
    data = cluster.directory / node.data
    shutil.rmtree(data)
    config = tomllib.loads(cluster._config_path(node).read_text())
    words = ["--data", str(data), "--name", name, "--cluster-id", config["cluster_id"]]
    assert init([*words, "--voters", ",".join(cluster.nodes), "--learner"]) == 0
    cluster._spawn(node)


def test_node_with_a_new_disk_learns_the_log_and_counts_for_nothing(cluster: Running) -> None:
    lost, other = cluster.followers()
    with cluster.client() as client:
        ids = [client.schedule("orders", b"%d" % n, delay=3600).id for n in range(20)]
        cluster.kill(lost)
        replace_disk(cluster, lost)

        def role() -> str:
            state = cluster.state(lost)
            return state.role if state else ""

        until(lambda: role() == "learner")
        cluster.digests_agree()
        client.cancel(ids[0])
        cluster.digests_agree()

        # Its disk is no vote: with the other follower down, nothing is committed.
        cluster.kill(other)
        with pytest.raises(TimerError):
            client.schedule("orders", b"in vain", delay=3600, timeout=3)
        until(lambda: role() == "learner")
        cluster.start(other)
        cluster.wait_for_leader()
        client.schedule("orders", b"the next", delay=0)
        with client.consumer("orders", group="g") as consumer:
            assert take(consumer, 1)[0].payload == b"the next"
        cluster.digests_agree()
    until(lambda: role() == "learner")
