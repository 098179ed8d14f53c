"""One cluster of real processes per module, and a store of backups."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.backup.backup_store import BackupStore
from tests.cluster.running import Running
from timerclient import TimerClient
from timerclient.cli import timerctl

Ctl = Callable[..., str]


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
def store(tmp_path: Path) -> BackupStore:
    """A store of backups in a directory."""
    return BackupStore(str(tmp_path / "store"))


@pytest.fixture
def ctl(cluster: Running, capsys: pytest.CaptureFixture[str]) -> Ctl:
    """Run timerctl on the cluster; return its output. It succeeds and has no complaint."""

    def run(*argv: str) -> str:
        code = timerctl.main(["--endpoints", ",".join(cluster.endpoints), *argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, ""), argv
        return out

    return run
