"""A fake cluster and a client for each test."""

import io
from collections.abc import Callable, Iterator

import pytest

from timerclient import TimerClient
from timerclient.cli import timerctl
from timerfake import FakeCluster

Ctl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[TimerClient]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def ctl(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ctl:
    """Run timerctl without a terminal; return (exit code, stdout, stderr)."""
    monkeypatch.setattr(timerctl, "_client", lambda _: cluster.client())
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(*argv: str) -> tuple[int, str, str]:
        code = timerctl.main(argv)
        return code, *capsys.readouterr()

    return run
