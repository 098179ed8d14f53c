"""A rig's directory: gone after success and after Ctrl-C, kept after a failure."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import rig
from bench.rig import BenchError, new_rig
from deploy.local import LocalCluster


class NoCluster(LocalCluster):
    """One that starts nothing."""

    def start(self, *names: str, timeout_s: float = 0.0, **_: object) -> None:
        """Make the directory."""
        self.directory.mkdir(parents=True)

    def wait_for_leader(self, timeout_s: float = 0.0, *, above_epoch: int = 0) -> str:
        """Return a name."""
        return "n1"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    monkeypatch.setattr(rig, "LocalCluster", NoCluster)
    with asyncio.Runner() as runner:
        yield runner


def test_success_leaves_nothing(tmp_path: Path, loop: asyncio.Runner) -> None:
    with new_rig(tmp_path / "data", loop) as made:
        assert made.topic("s1") != made.topic("s1")
        assert (tmp_path / "data").exists()
    assert not (tmp_path / "data").exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path, loop: asyncio.Runner) -> None:
    with pytest.raises(KeyboardInterrupt), new_rig(tmp_path / "data", loop):
        raise KeyboardInterrupt
    assert not (tmp_path / "data").exists()


def test_a_failure_leaves_the_files_and_names_them(tmp_path: Path, loop: asyncio.Runner) -> None:
    with pytest.raises(BenchError) as raised, new_rig(tmp_path / "data", loop):
        raise BenchError("no answer")
    assert (tmp_path / "data").exists()
    assert "data" in raised.value.__notes__[0]


def test_work_that_takes_too_long_is_ended(tmp_path: Path, loop: asyncio.Runner) -> None:
    with new_rig(tmp_path / "data", loop) as made:
        assert made.within(60, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(BenchError, match=r"within 0\.01 s"):
            made.within(0.01, asyncio.Event().wait())
        assert made.within(60, asyncio.sleep(0, "done")) == "done", "the loop still works"
