"""One cluster of real processes per module."""

from collections.abc import Iterator

import pytest

from tests.cluster.running import Running


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    """Three nodes, with the settings of the module's SETTINGS, if it has any."""
    settings = getattr(request.module, "SETTINGS", ())
    with Running(tmp_path_factory.mktemp("cluster"), settings).cleaned() as running:
        yield running
