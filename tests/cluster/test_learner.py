"""A node that joins in the place of one with a lost disk: it gets entries and has no vote."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.settings.exit_codes import ExitCode
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
        cluster.kill_together(*cluster.nodes)
    assert not cluster.complaints()


def replace_disk(cluster: Running, name: str) -> None:
    """Put an empty disk into a node that is down, and start it as a learner under its name."""
    node = cluster.node(name)
    shutil.rmtree(cluster.directory / node.data)
    cluster.format_learner(name)
    cluster._spawn(node)


@pytest.mark.long  # waits until a schedule without a majority times out
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


def test_founder_formatted_again_takes_no_part_and_says_what_to_do(cluster: Running) -> None:
    lost, _ = cluster.followers()
    with cluster.client() as client:
        client.schedule("orders", b"kept", delay=3600)
        cluster.kill(lost)
        shutil.rmtree(cluster.directory / cluster.node(lost).data)
        cluster._format(cluster.node(lost))
        for _ in range(2):  # a supervisor may restart it
            cluster._spawn(cluster.node(lost))
            until(lambda: cluster.exit_status(lost) == ExitCode.CORRUPT)
            assert f"`timerctl members replace {lost}`" in cluster.log(lost)
            assert "with different --voters (here n1,n2,n3)" in cluster.log(lost)
            cluster._log_path(lost).write_text("")  # its errors are expected
        client.schedule("orders", b"the others go on", delay=3600)


@pytest.mark.long  # founders wait for the last one
def test_cluster_is_founded_when_its_last_founder_comes(tmp_path: Path) -> None:
    cluster = Running(tmp_path)
    cluster._write_new([*cluster._plan().values()])

    def said() -> str:
        return cluster.log("n1") + cluster.log("n2")

    try:
        for name in ("n1", "n2"):
            cluster._spawn(cluster.node(name))
        until(lambda: said().count("; appointing") >= 2, 60)
        assert "serving" not in said(), "two of three have founded the cluster"
        cluster._spawn(cluster.node("n3"))
        with cluster.client() as client:
            client.schedule("orders", b"the first", delay=3600)
        cluster.digests_agree()
        cluster.stop()
    finally:
        cluster.kill_together(*cluster.nodes)
    assert not cluster.complaints()
