"""The format "timerlog": which files it opens for which filters. Without Spark's help."""

from pathlib import Path

import pytest
from pyspark.sql import datasource as ds

from chaos.timerlog import ENTRIES, SegmentFile, TimerLogReader
from tests.chaos.world import Log, write_log
from timer.errors import CorruptFile

NAMES = [part.split()[0] for part in ENTRIES.split(", ")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = Log()
    log.epoch(1)
    topic = log.topic("t")
    for mark in range(7):
        log.schedule(topic, [(100, mark)])
    for node in ("n1", "n2"):
        write_log(tmp_path / node / "log", log.frames, frames_per_segment=3)
    return tmp_path


def reader(run: Path) -> TimerLogReader:
    return TimerLogReader(NAMES, {"path": str(run)})


def opened(source: TimerLogReader) -> list[tuple[str, int]]:
    parts = [part for part in source.partitions() if isinstance(part, SegmentFile)]
    return [(part.node, part.first) for part in parts]


def indexes(source: TimerLogReader) -> list[int]:
    return [
        index
        for part in source.partitions()
        for batch in source.read(part)
        for index in batch.column(NAMES.index("index")).to_pylist()
    ]


def test_every_segment_is_a_partition(run: Path) -> None:
    assert opened(reader(run)) == [(node, first) for node in ("n1", "n2") for first in (1, 4, 7)]
    assert indexes(reader(run)) == 2 * [*range(1, 10)]


def test_filters_open_only_the_files_that_may_hold_something(run: Path) -> None:
    source = reader(run)
    left = ds.StringContains(("kind",), "FIRE")
    filters: list[ds.Filter] = [
        ds.EqualTo(("node",), "n2"),
        ds.IsNotNull(("node",)),
        ds.GreaterThan(("index",), 3),
        ds.LessThanOrEqual(("index",), 6),
        left,
    ]
    assert [*source.pushFilters(filters)] == [left]
    assert opened(source) == [("n2", 4)]
    assert indexes(source) == [4, 5, 6]


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (ds.EqualTo(("index",), 5), [5]),
        (ds.LessThan(("index",), 3), [1, 2]),
        (ds.GreaterThanOrEqual(("index",), 8), [8, 9]),
        (ds.EqualTo(("kind",), "EPOCH"), [1]),
        (ds.In(("kind",), ("EPOCH", "TOPIC")), [1, 2]),
    ],
)
def test_filter_lets_through_what_it_says(run: Path, each: ds.Filter, expected: list[int]) -> None:
    source = reader(run)
    assert [*source.pushFilters([each])] == []
    assert indexes(source) == 2 * expected


def test_damaged_segment_is_named(run: Path) -> None:
    path = sorted((run / "n1/log").iterdir())[1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=path.name):
        indexes(reader(run))
