"""Each test runs twice: on a fake cluster of its own, and on a real one that all tests share."""

from collections.abc import Iterator

import pytest

from tests.cluster.running import WAIT_S, Running
from tests.conformance.worlds import FakeWorld, RealWorld, World
from timerclient.streams import subscription
from timerfake import FakeCluster


@pytest.fixture(autouse=True)
def closing_waits_for_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a closing consumer wait for its answers, so that its messages are free at once."""
    monkeypatch.setattr(subscription, "LEAVE_S", WAIT_S)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Three nodes."""
    with Running(tmp_path_factory.mktemp("conformance")).cleaned() as running:
        yield running


@pytest.fixture(scope="package")
def real_world(cluster: Running) -> Iterator[World]:
    """The three nodes and a client."""
    with cluster.client() as client:
        yield RealWorld(cluster, client)


@pytest.fixture(params=["fake", pytest.param("cluster", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A fake cluster for this test only, or the real one."""
    if request.param == "cluster":
        yield request.getfixturevalue("real_world")
        return
    with FakeCluster() as fake, fake.client() as client:
        yield FakeWorld(fake, client)
