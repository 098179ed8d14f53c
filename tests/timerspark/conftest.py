"""One node for all tests of the format "timers"."""

from collections.abc import Iterator

import pytest

from deploy.local import LocalCluster
from timerclient import TimerClient


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of one node."""
    running = LocalCluster(tmp_path_factory.mktemp("cluster"), 1)
    try:
        running.start()
        running.wait_for_leader()
        yield running
    finally:
        running.destroy()


@pytest.fixture(scope="module")
def cluster(one: LocalCluster) -> str:
    """The address of the cluster."""
    return ",".join(one.endpoints)


@pytest.fixture(scope="module")
def client(cluster: str) -> Iterator[TimerClient]:
    with TimerClient(cluster) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic's name, unique to the test."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)
