"""A fake cluster for coroutines (`cluster`) and one on its own thread (`threaded`)."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.timerclient.fake_cluster import Cluster, Order
from timerclient import AsyncTimerClient, ClientSettings
from timerclient.cli import timerctl
from timerclient.streams import first_calls, subscription
from timerclient.threads.background import _on_loop_error

Ctl = Callable[..., tuple[int, str, str]]
QUICK = ClientSettings(stall_s=0.2, probe_s=1, pause_s_min=0.002, pause_s_max=0.05)


def once(*orders: Order) -> Callable[[object], Order]:
    """Give these orders, one per request, then none."""
    rest = list(orders)
    return lambda _: rest.pop(0) if rest else None


class Answering:
    """A client whose methods return given answers."""

    def __init__(self, **answers: object) -> None:
        self._answers = answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[[], object]:
        return lambda: self._answers[name]


@pytest.fixture(autouse=True)
def closing_waits_for_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a closing consumer wait for its answers, so that its messages are free at once."""
    monkeypatch.setattr(subscription, "LEAVE_S", 60.0)


@pytest.fixture(autouse=True)
def producer_from_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a producer from the first call; only the tests of first calls do without."""
    monkeypatch.setattr(first_calls, "FIRST_CALLS", 0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncTimerClient]:
    """A client of `cluster` with short pauses."""
    async with AsyncTimerClient(cluster.address, timeout=60, settings=QUICK) as client:
        yield client


class Threaded:
    """A cluster with its loop on a thread, for clients that block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_on_loop_error)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.cluster = Cluster()
        self.run(self.cluster.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def seed(self, topic: str, payloads: Iterable[bytes]) -> None:
        self.run(self.cluster.seed(topic, payloads))

    def stop(self) -> None:
        self.run(self.cluster.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    threaded = Threaded()
    yield threaded
    threaded.stop()


@pytest.fixture
def ctl(
    threaded: Threaded,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Ctl:
    """Run timerctl against the fake cluster: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # no contexts of this user
    monkeypatch.setenv("TIMERCTL_ENDPOINTS", threaded.cluster.address)

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = timerctl.main(argv)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
