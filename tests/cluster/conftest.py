"""One cluster of real processes per module."""

from collections.abc import Callable, Iterator

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


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic's name, unique to the test."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print figures past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n    {text}")

    return say
