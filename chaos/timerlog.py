"""Nodes' timer logs as Spark tables: `spark.read.format("timerlog").load(run_folder)`.

One partition per segment file. Option `view`:

    entries   one row per frame: node, index, epoch, kind, time_ms, crc32, rows
    rows      one row per row of a SCHEDULE entry, as it lies in the log: node, index, epoch,
              position, producer, sequence, due_ms, requested_ms, topic_id, payload_size, mark

What became of the rows is not in the log as such: it follows from applying it (chaos/replay.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from chaos import replay
from chaos.history import Run
from timer.columns import decode_schedule
from timer.entry import Kind

ENTRIES: Final = (
    "node STRING, index BIGINT, epoch BIGINT, kind STRING, time_ms BIGINT, crc32 BIGINT, rows INT"
)
ROWS: Final = (
    "node STRING, index BIGINT, epoch BIGINT, position INT, producer BIGINT, sequence BIGINT,"
    " due_ms BIGINT, requested_ms BIGINT, topic_id BIGINT, payload_size INT, mark BIGINT"
)
VIEWS: Final = {"entries": ENTRIES, "rows": ROWS}

_FRAMES_PER_BATCH: Final = 65_536


@dataclass
class SegmentFile(InputPartition):
    """One segment of one node's log."""

    node: str
    path: str
    last: bool
    """Only a log's last segment may end torn."""


class TimerLog(DataSource):
    """The format "timerlog"."""

    @classmethod
    def name(cls) -> str:
        """Return the name that `spark.read.format` knows it by."""
        return "timerlog"

    def schema(self) -> str:
        """Return the columns of the view."""
        view = self.options.get("view", "entries")
        if view not in VIEWS:
            raise ValueError(f"view = {view!r}: one of {sorted(VIEWS)}")
        return VIEWS[view]

    def reader(self, schema: StructType) -> "TimerLogReader":
        """Return what reads the view."""
        return TimerLogReader(schema.names, self.options)


class TimerLogReader(DataSourceReader):
    """Reads segment files; runs in Spark's Python workers."""

    def __init__(self, names: list[str], options: Mapping[str, Any]) -> None:
        self._names = names
        self._view = options.get("view", "entries")
        self._path = options["path"]

    def partitions(self) -> list[InputPartition]:
        """Return the segments of all nodes."""
        return [
            SegmentFile(node, str(path), last=path == paths[-1])
            for node, log in Run(Path(self._path)).nodes().items()
            for paths in [replay.segments(log)]
            for path in paths
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one segment's frames, or their rows, as Arrow batches."""
        assert isinstance(partition, SegmentFile)
        table = _entries(partition) if self._view == "entries" else _rows(partition)
        for columns in table:
            yield pa.RecordBatch.from_arrays([*map(pa.array, columns)], names=self._names)


def _entries(part: SegmentFile) -> Iterator[list[Any]]:
    frames: list[tuple[Any, ...]] = []
    for crc32, item in replay.entries(Path(part.path), last=part.last):
        rows = len(decode_schedule(item.payload).rows) if item.kind is Kind.SCHEDULE else 0
        frames.append(
            (part.node, item.index, item.epoch, item.kind.name, item.time_ms, crc32, rows)
        )
        if len(frames) == _FRAMES_PER_BATCH:
            yield _columns(frames)
            frames.clear()
    if frames:
        yield _columns(frames)


def _columns(frames: list[tuple[Any, ...]]) -> list[Any]:
    columns: list[Any] = [list(column) for column in zip(*frames, strict=True)]
    columns[-1] = np.array(columns[-1], np.int32)
    return columns


def _rows(part: SegmentFile) -> Iterator[list[Any]]:
    for _, item in replay.entries(Path(part.path), last=part.last):
        if item.kind is not Kind.SCHEDULE:
            continue
        schedule = decode_schedule(item.payload)
        rows, sizes = schedule.rows, schedule.parts["rows"]
        n = len(rows)
        yield [
            pa.repeat(part.node, n),
            np.full(n, item.index, np.int64),
            np.full(n, item.epoch, np.int64),
            np.arange(n, dtype=np.int32),
            np.repeat(schedule.parts["producer_id"], sizes).astype(np.int64),
            np.repeat(schedule.parts["sequence"], sizes).astype(np.int64),
            np.ascontiguousarray(rows["due_ms"]),
            np.ascontiguousarray(rows["requested_ms"]),
            rows["topic"].astype(np.int64),
            rows["payload_size"].astype(np.int32),
            replay.marks_of(item.payload, rows),
        ]


def register(spark: SparkSession) -> None:
    """Make the format known to a session."""
    spark.dataSource.register(TimerLog)
