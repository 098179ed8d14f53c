"""Micro-benchmark of the log: append and sync of 100 KB frames, and reading them back.

Run: pytest bench/test_log_append.py
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from timer.entries import entry_frame
from timer.entries.entry_frame import EntryKind
from timer.files.disk import RealDisk
from timer.files.log import Log
from timer.model.units import Epoch, LogIndex, UnixMs

PAYLOAD = bytes(range(256)) * 400
"""The size of about a thousand timers of 100 bytes."""
COUNT = 400
READ_SIZE = 4 << 20


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """An empty log on the real disk."""
    log = Log.open(RealDisk(), tmp_path / "log")
    yield log
    log.close()


def _frames(first: int, count: int) -> list[bytes]:
    return [
        entry_frame.encode(EntryKind.SCHEDULE, Epoch(1), LogIndex(index), UnixMs(0), [PAYLOAD])
        for index in range(first, first + count)
    ]


@pytest.mark.parametrize("per_sync", [1, 4, 16])
def test_append_and_sync(benchmark: BenchmarkFixture, log: Log, per_sync: int) -> None:
    """MB/s of `COUNT` frames, synced after every `per_sync`."""

    def setup() -> tuple[tuple[list[bytes]], dict[str, object]]:
        log.drop_before(log.last_index)
        return (_frames(log.last_index + 1, COUNT),), {}

    def run(frames: list[bytes]) -> None:
        for start in range(0, COUNT, per_sync):
            log.append(frames[start : start + per_sync])
            log.sync()

    _measure(benchmark, run, setup)


def test_append_alone(benchmark: BenchmarkFixture, log: Log) -> None:
    """MB/s into the page cache: the log's own cost."""

    def setup() -> tuple[tuple[list[bytes]], dict[str, object]]:
        log.sync()
        log.drop_before(log.last_index)
        return (_frames(log.last_index + 1, COUNT),), {}

    def run(frames: list[bytes]) -> None:
        for each in frames:
            log.append([each])

    _measure(benchmark, run, setup)


def test_read(benchmark: BenchmarkFixture, log: Log) -> None:
    """MB/s of reading and checking every frame, as in replay and catch-up."""
    log.append(_frames(1, COUNT))

    def run() -> None:
        at = log.first_index
        while found := log.read(at, READ_SIZE):
            at = LogIndex(at + len(found))
        assert at == COUNT + 1

    _measure(benchmark, run)


def test_open(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """MB/s of recovery: every frame above the committed floor is checked."""
    disk = RealDisk()
    log = Log.open(disk, tmp_path / "log")
    log.append(_frames(1, COUNT))
    log.close()
    _measure(benchmark, lambda: Log.open(disk, tmp_path / "log").close())


def _measure(
    benchmark: BenchmarkFixture,
    run: Callable[..., None],
    setup: Callable[[], object] | None = None,
) -> None:
    benchmark.pedantic(run, setup=setup, rounds=5)  # type: ignore[no-untyped-call]
    if benchmark.stats is None:  # --benchmark-disable: run only
        return
    size = COUNT * (len(PAYLOAD) + entry_frame.HEADER_SIZE)
    benchmark.extra_info["MB/s"] = round(size / benchmark.stats.stats.median / 1e6)
