"""A fake cluster and a client for each test."""

from collections.abc import Iterator

import pytest

from timerclient import TimerClient
from timerfake import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[TimerClient]:
    with cluster.client() as client:
        yield client
