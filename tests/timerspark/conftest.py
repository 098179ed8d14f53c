"""Clusters of the tests of Spark's formats; most share one node."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from tests.cluster.running import Forking
from timerclient import TimerClient


@contextmanager
def started(directory: Path, nodes: int) -> Iterator[LocalCluster]:
    """Run a cluster that has a leader; destroy it at the end."""
    cluster = Forking(directory, nodes)
    try:
        cluster.start()
        cluster.wait_for_leader()
        yield cluster
    finally:
        cluster.destroy()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of one node."""
    with started(tmp_path_factory.mktemp("cluster"), 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(one: LocalCluster) -> str:
    """The address of the cluster."""
    return ",".join(one.endpoints)


@pytest.fixture(scope="module")
def client(cluster: str) -> Iterator[TimerClient]:
    with TimerClient(cluster) as client:
        yield client
