"""One cluster of real processes per module."""

from collections.abc import Iterator

import pytest

from tests.cluster.running import Running
from timerclient import TimerClient


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    """Three nodes, with the module's SETTINGS, if it has such."""
    settings = getattr(request.module, "SETTINGS", ())
    with Running(tmp_path_factory.mktemp("cluster"), settings).cleaned() as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Running) -> Iterator[TimerClient]:
    """A client of the cluster."""
    with cluster.client() as client:
        yield client
