"""Readers of the format "timerlog": events of one log, and frames of all logs."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import MapType, StringType, StructType

from timer.entries.entry_frame import Entry, EntryKind
from timer.model.columns import decode_schedule
from timerspark.arrow_columns import join
from timerspark.format_options import is_true
from timerspark.log import log_stores, segment_files
from timerspark.log.log_events import EventReader
from timerspark.log.log_options import EVENT_COLUMNS, LogFilter
from timerspark.log.log_plan import PlannedSegment, decode_error, plan
from timerspark.log.node_folders import NodeFolders
from timerspark.log.segment_files import Segment

_ROWS_PER_BATCH: Final = 65_536
_BYTES_PER_BATCH: Final = 16 << 20


class LogEvents(DataSourceReader):
    """Reads one node's log as events."""

    def __init__(self, schema: StructType, options: Mapping[str, Any]) -> None:
        """Make the plan: Spark sends it to the tasks with this object.

        Raises:
            FileNotFoundError, LogGap, ValueError: see `plan`.
        """
        for each in schema.fields:
            kind = each.dataType.simpleString()
            known = EVENT_COLUMNS.get(each.name, "").lower().replace(" ", "")
            if kind != known or (
                isinstance(each.dataType, MapType) and each.dataType.valueType != StringType()
            ):
                columns = ", ".join(f"{name} {of}" for name, of in EVENT_COLUMNS.items())
                raise ValueError(f"schema = {each.name} {kind}: must be of {columns}")
        self._names = schema.names
        self._filter = LogFilter.of(options)
        fail_on_loss = is_true("fail_on_loss", options.get("fail_on_loss", "true"))
        self._path = options["path"]
        with log_stores.plan_files(self._path) as root:
            self._plan = plan(NodeFolders(root), self._filter, fail_on_loss=fail_on_loss)
        if log_stores.is_uri(self._path):
            for planned in self._plan.segments:
                path = planned.part.path.relative_to(root)
                planned.part = replace(planned.part, path=path)

    def partitions(self) -> list[InputPartition]:
        """Return the segments that may hold an entry that the filter accepts."""
        return [*self._plan.segments]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one segment's events.

        Raises:
            CorruptFileError: the segment is damaged.
            ValueError: an entry can't be decoded.
        """
        if not isinstance(partition, PlannedSegment):
            return  # without partitions Spark calls this once, with an object of its own
        with log_stores.segment_file(self._path, str(partition.part.path)) as path:
            yield from self._events(partition, replace(partition.part, path=path))

    def _events(self, partition: PlannedSegment, part: Segment) -> Iterator[pa.RecordBatch]:
        of = self._plan
        reader = EventReader(of.names, partition.seqs(), of.salt, self._names)
        ready: list[pa.RecordBatch] = []
        rows = size = 0
        for _, item in segment_files.entries(part):
            if partition.end_index is not None and item.index >= partition.end_index:
                break
            try:
                if not self._filter.accepts_entry(item):
                    reader.skip(item)
                    continue
                found = [*reader.read(item)]
            except (ValueError, struct.error) as error:
                raise decode_error(part, item.index, error) from error
            if not found:
                continue
            ready += found
            rows, size = rows + sum(map(len, found)), size + len(item.payload)
            if rows >= _ROWS_PER_BATCH or size >= _BYTES_PER_BATCH:
                yield join(ready)
                ready, rows, size = [], 0, 0
        if ready:
            yield join(ready)


@dataclass
class SegmentFile(InputPartition):
    """One segment of one node's log."""

    node: str
    life: int
    part: Segment


class EntryFrames(DataSourceReader):
    """Reads the frames of all nodes' logs; runs in Spark's Python workers."""

    def __init__(self, names: list[str], options: Mapping[str, Any]) -> None:
        self._names = names
        self._path = options["path"]
        self._filter = LogFilter.of(options)

    def partitions(self) -> list[InputPartition]:
        """Return the segments that may hold an entry that the filter accepts."""
        logs = NodeFolders(Path(self._path)).logs()
        self._filter.check_nodes(logs)
        return [
            SegmentFile(node, life, part)
            for node, lives in logs.items()
            for life, parts in enumerate(lives)
            for part in parts
            if self._filter.accepts_file(node, part)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one segment's frames as Arrow batches.

        Raises:
            CorruptFileError: the segment is damaged.
        """
        if not isinstance(partition, SegmentFile):
            return  # without partitions Spark calls this once, with an object of its own
        frames: list[tuple[Any, ...]] = []
        for crc32, item in segment_files.entries(partition.part):
            if not self._filter.accepts_entry(item):
                continue
            head = (partition.node, partition.life, item.index, item.epoch, item.kind.name)
            frames.append((*head, item.time_ms, crc32, _row_count(item)))
            if len(frames) == _ROWS_PER_BATCH:
                yield self._batch(frames)
                frames.clear()
        if frames:
            yield self._batch(frames)

    def _batch(self, frames: list[tuple[Any, ...]]) -> pa.RecordBatch:
        columns: list[Any] = [list(column) for column in zip(*frames, strict=True)]
        for at in (1, -1):
            columns[at] = np.array(columns[at], np.int32)
        return pa.RecordBatch.from_arrays([*map(pa.array, columns)], names=self._names)


def _row_count(item: Entry) -> int:
    if item.kind is not EntryKind.SCHEDULE:
        return 0
    try:
        return len(decode_schedule(item.payload).rows)
    except ValueError:
        return 0
