"""The format "timerlog", view `entries`: files that it opens. Without Spark."""

import json
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition

from tests.chaos.world import Log, write_log
from timer.entries.entry_frame import EntryKind
from timer.model.timer_errors import CorruptFileError
from timerspark.log.log_options import ENTRIES
from timerspark.log.log_readers import EntryFrames, SegmentFile

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


def reader(run: Path, **options: str) -> EntryFrames:
    return EntryFrames(NAMES, {"path": str(run), **options})


def opened(source: EntryFrames) -> list[tuple[str, int]]:
    parts = [part for part in source.partitions() if isinstance(part, SegmentFile)]
    return [(part.node, part.part.first) for part in parts]


def indexes(source: EntryFrames) -> list[int]:
    return [
        index
        for part in source.partitions() or [InputPartition(None)]  # as Spark does
        for batch in source.read(part)
        for index in batch.column(NAMES.index("index")).to_pylist()
    ]


def test_every_segment_is_a_partition(run: Path) -> None:
    assert opened(reader(run)) == [(node, first) for node in ("n1", "n2") for first in (1, 4, 7)]
    assert indexes(reader(run)) == 2 * [*range(1, 10)]


def test_node_without_a_log_has_no_partition(run: Path) -> None:
    nodes = [{"name": name, "data": name} for name in ("n1", "n3")]
    (run / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    assert opened(reader(run)) == [("n1", first) for first in (1, 4, 7)]


def test_options_open_only_the_files_that_may_hold_something(run: Path) -> None:
    source = reader(run, node="n2", index_min="4", index_max="6")
    assert opened(source) == [("n2", 4)]
    assert indexes(source) == [4, 5, 6]
    assert indexes(reader(run, node="n1,n2", index_max="2")) == 2 * [1, 2]
    assert indexes(reader(run, index_max="0")) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"index_min": "5", "index_max": "5"}, [5]),
        ({"index_max": "2"}, [1, 2]),
        ({"index_min": "8"}, [8, 9]),
        ({"index_min": "6", "index_max": "5"}, []),
        ({"kind": "EPOCH"}, [1]),
        ({"kind": "EPOCH,TOPIC"}, [1, 2]),
    ],
)
def test_option_lets_through_what_it_says(
    run: Path, options: dict[str, str], expected: list[int]
) -> None:
    assert indexes(reader(run, **options)) == 2 * expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "FIRE,fire"}, "kind = fire: must be of .'CANCEL'"),
        ({"index_min": "-1"}, "index_min = '-1': must be an entry's index"),
        ({"index_max": ""}, "index_max = '': must be"),
        ({"node": "n2, n3"}, "node = n3: must be of .'n1', 'n2'"),
        ({"time_min": "yesterday"}, "time_min = 'yesterday': must be a time such as"),
        ({"time_max": "2026-11-01T12:00:00"}, "time_max = .*: must be a time such as"),
    ],
)
def test_option_that_says_nothing_is_named(run: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        reader(run, **options).partitions()


def test_damaged_segment_is_named(run: Path) -> None:
    path = sorted((run / "n1/log").iterdir())[1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=path.name):
        indexes(reader(run))


def test_entry_that_cannot_be_decoded_has_no_rows(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    log.schedule(log.topic("t"), [(100, 1)])
    log.entry(EntryKind.SCHEDULE, b"garbage")  # its checksum is right
    write_log(tmp_path / "n1" / "log", log.frames)
    source = reader(tmp_path)
    [batch] = [batch for part in source.partitions() for batch in source.read(part)]
    assert batch.column(NAMES.index("rows")).to_pylist() == [0, 0, 1, 0]
