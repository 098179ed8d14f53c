"""Nodes' timer logs as Spark tables: `spark.read.format("timerlog").load(run_folder)`.

One partition per segment file. Option `view`:

    entries   one row per frame: node, life, index, epoch, kind, time_ms, crc32, rows. A log that
              began anew has several lives, 0, 1, …: two lives may hold the same frame. An entry
              that can't be decoded has 0 rows: the comparison of the logs, or the replay, finds it
    rows      one row per row of a SCHEDULE entry, as it lies in the log: node, index, epoch,
              position, producer, sequence, due_ms, requested_ms, topic_id, payload_size, mark

Options that filter:

    node                    n1 or n1,n2
    kind                    SCHEDULE or SCHEDULE,FIRE
    index_min, index_max    both inclusive

Segments of other nodes, and segments that end before `index_min` or begin after `index_max`, are
not opened. Filters that Spark would push down are not used (docs/adr/0036-filters-as-options.md).

The log does not hold the outcome of a row. The outcome follows from applying the log
(chaos/oracle/).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from chaos.history import nodelog
from chaos.history.history import RunFolder
from chaos.history.nodelog import Segment
from chaos.oracle.story import marks_of
from timer.entries.entry_frame import Entry, EntryKind
from timer.model.columns import decode_schedule
from timer.model.units import LogIndex

ENTRIES: Final = (
    "node STRING, life INT, index BIGINT, epoch BIGINT, kind STRING, time_ms BIGINT, crc32 BIGINT,"
    " rows INT"
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
    life: int
    path: str
    first: int
    end: int | None

    @property
    def part(self) -> Segment:
        """The segment, as the readers of chaos/history/nodelog.py take it."""
        end = None if self.end is None else LogIndex(self.end)
        return Segment(Path(self.path), LogIndex(self.first), end)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The filter of a reader's options; None in a field: no limit."""

    nodes: frozenset[str] | None = None
    kinds: frozenset[str] | None = None
    index_min: int = 0
    index_max: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Wanted":
        """Return the filter of the options.

        Raises:
            ValueError: a kind is unknown, or an index is not a number.
        """
        nodes, kinds = (_names(options.get(name)) for name in ("node", "kind"))
        known = {kind.name for kind in EntryKind}
        if kinds is not None and (unknown := kinds - known):
            raise ValueError(f"kind = {', '.join(sorted(unknown))}: must be of {sorted(known)}")
        bounds = {}
        for name in ("index_min", "index_max"):
            if (text := options.get(name)) is not None:
                if not text.isdecimal():
                    raise ValueError(f"{name} = {text!r}: must be an entry's index")
                bounds[name] = int(text)
        return cls(nodes, kinds, **bounds)

    def check(self, nodes: Collection[str]) -> None:
        """Return if all nodes of the options exist.

        Raises:
            ValueError: a node does not exist.
        """
        if self.nodes is not None and (unknown := self.nodes - {*nodes}):
            raise ValueError(f"node = {', '.join(sorted(unknown))}: must be of {sorted(nodes)}")

    def file(self, node: str, part: Segment) -> bool:
        """Whether a segment may hold an entry that the filter accepts."""
        return (
            (self.nodes is None or node in self.nodes)
            and (part.end is None or part.end > self.index_min)
            and (self.index_max is None or part.first <= self.index_max)
        )

    def entry(self, item: Entry) -> bool:
        """Whether the filter accepts an entry, whose node it has accepted."""
        return (
            (self.kinds is None or item.kind.name in self.kinds)
            and item.index >= self.index_min
            and (self.index_max is None or item.index <= self.index_max)
        )


def _names(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(each.strip() for each in text.split(","))


class TimerLog(DataSource):
    """The format "timerlog"."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return "timerlog"

    def schema(self) -> str:
        """Return the columns of the view."""
        view = self.options.get("view", "entries")
        if view not in VIEWS:
            raise ValueError(f"view = {view!r}: must be one of {sorted(VIEWS)}")
        return VIEWS[view]

    def reader(self, schema: StructType) -> "TimerLogReader":
        """Return the reader of the view."""
        return TimerLogReader(schema.names, self.options)


class TimerLogReader(DataSourceReader):
    """Reads segment files; runs in Spark's Python workers."""

    def __init__(self, names: list[str], options: Mapping[str, Any]) -> None:
        self._names = names
        self._view = options.get("view", "entries")
        self._path = options["path"]
        self._wanted = Wanted.of(options)

    def partitions(self) -> list[InputPartition]:
        """Return the segments that may hold an entry that the filter accepts."""
        logs = RunFolder(Path(self._path)).logs()
        self._wanted.check(logs)
        return [
            SegmentFile(node, life, str(part.path), part.first, part.end)
            for node, lives in logs.items()
            for life, parts in enumerate(lives)
            for part in parts
            if self._wanted.file(node, part)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one segment's frames, or their rows, as Arrow batches.

        Raises:
            CorruptFileError: the segment is damaged.
            ValueError: in the view `rows`, a SCHEDULE entry can't be decoded.
        """
        assert isinstance(partition, SegmentFile)
        found = (
            (crc32, item)
            for crc32, item in nodelog.entries(partition.part)
            if self._wanted.entry(item)
        )
        view = _entries if self._view == "entries" else _rows
        for columns in view(partition, found):
            yield pa.RecordBatch.from_arrays([*map(pa.array, columns)], names=self._names)


def _entries(file: SegmentFile, found: Iterable[tuple[int, Entry]]) -> Iterator[list[Any]]:
    frames: list[tuple[Any, ...]] = []
    for crc32, item in found:
        head = (file.node, file.life, item.index, item.epoch, item.kind.name)
        frames.append((*head, item.time_ms, crc32, _row_count(item)))
        if len(frames) == _FRAMES_PER_BATCH:
            yield _columns(frames)
            frames.clear()
    if frames:
        yield _columns(frames)


def _row_count(item: Entry) -> int:
    if item.kind is not EntryKind.SCHEDULE:
        return 0
    try:
        return len(decode_schedule(item.payload).rows)
    except ValueError:
        return 0


def _columns(frames: list[tuple[Any, ...]]) -> list[Any]:
    columns: list[Any] = [list(column) for column in zip(*frames, strict=True)]
    for at in (1, -1):
        columns[at] = np.array(columns[at], np.int32)
    return columns


def _rows(file: SegmentFile, found: Iterable[tuple[int, Entry]]) -> Iterator[list[Any]]:
    for _, item in found:
        if item.kind is not EntryKind.SCHEDULE:
            continue
        try:
            schedule = decode_schedule(item.payload)
        except ValueError as error:
            text = f"{file.path}: entry {item.index} can't be decoded: {error}"
            raise ValueError(text) from error
        rows, sizes = schedule.rows, schedule.parts["rows"]
        n = len(rows)
        yield [
            pa.repeat(file.node, n),
            np.full(n, item.index, np.int64),
            np.full(n, item.epoch, np.int64),
            np.arange(n, dtype=np.int32),
            np.repeat(schedule.parts["producer_id"], sizes).astype(np.int64),
            np.repeat(schedule.parts["sequence"], sizes).astype(np.int64),
            np.ascontiguousarray(rows["due_ms"]),
            np.ascontiguousarray(rows["requested_ms"]),
            rows["topic"].astype(np.int64),
            rows["payload_size"].astype(np.int32),
            marks_of(item.payload, rows),
        ]


def register(spark: SparkSession) -> None:
    """Register the format "timerlog" in a session."""
    spark.dataSource.register(TimerLog)
