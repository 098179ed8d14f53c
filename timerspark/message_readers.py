"""Readers of fired messages: ranges of queue offsets, one for each task.

    driver: read_messages --> begin and end of the queue, the topic's id
    [begin, end) --> [0, 100000) [100000, 200000) ...   one OffsetRange for each task
    task:   read_messages, page after page --> Arrow batches

The message at an offset never changes, so a repeated task reads the same rows. A stream's position
is an offset and the topic's id, which Spark keeps in the query's checkpoint. Nothing is leased.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import MapType, StringType, StructType

from timerclient.client.timer_client import TimerClient
from timerclient.rows.peeked_messages import MessagePage
from timerclient.rows.rows import UINT64_MAX
from timerclient.values.errors import InvalidRequest, TimerError
from timerspark.arrow_messages import batch_of
from timerspark.format_options import MESSAGE_COLUMNS, FormatOptions

_SQL_TYPES: Final = {name: kind.lower().replace(" ", "") for name, kind in MESSAGE_COLUMNS.items()}


class MessagesLost(TimerError):
    """Messages in the range of a query were deleted, or the topic was."""


@dataclass
class OffsetRange(InputPartition):
    """The messages of one task."""

    topic_id: int
    start: int
    end: int
    """The offset after the last message."""


def _ranges(topic_id: int, start: int, end: int, most: int) -> list[OffsetRange]:
    starts = range(start, end, most)
    return [OffsetRange(topic_id, first, min(first + most, end)) for first in starts]


class _Messages:
    """A topic's messages, as tasks and the driver read them."""

    def __init__(self, schema: StructType, options: FormatOptions) -> None:
        self._topic = options.need_topic()
        self._options = options
        self._columns = [each.name for each in schema.fields]
        for each in schema.fields:
            kind = each.dataType.simpleString()
            known = _SQL_TYPES.get(each.name)
            if kind != known or (
                isinstance(each.dataType, MapType) and each.dataType.valueType != StringType()
            ):
                columns = ", ".join(f"{name} {of}" for name, of in MESSAGE_COLUMNS.items())
                raise InvalidRequest.of("schema", f"{each.name} {kind}", f"must be of {columns}")

    def client(self) -> TimerClient:
        return TimerClient(self._options.cluster, timeout=self._options.timeout_s)

    def bounds(self, client: TimerClient) -> MessagePage:
        """Return a page without messages: the bounds of the queue."""
        return client.read_messages(self._topic, UINT64_MAX, payloads=False)

    def check(self, found: MessagePage, topic_id: int, start: int, end: int) -> None:
        """Check that the messages of a range, all of which had fired, are there.

        Raises:
            MessagesLost: They are not, and the query must not go on without them.
        """
        if not self._options.fail_on_loss:
            return
        go_on = "set fail_on_loss to false to read what is left"
        if found.topic_id != topic_id:
            text = f"topic {self._topic!r} was deleted and created anew: {go_on}"
            raise MessagesLost(text)
        if found.begin_offset > start:
            text = f"topic {self._topic!r} keeps messages from offset {found.begin_offset} on"
            raise MessagesLost(f"{text}; {start} is below it: {go_on}")
        if found.end_offset < end:
            text = f"topic {self._topic!r} ends at offset {found.end_offset}, below {end}"
            raise MessagesLost(f"{text}, as after a restored backup: {go_on}")

    def read(self, of: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range."""
        at, payloads = of.start, "payload" in self._columns
        with self.client() as client:
            while at < of.end:
                page = client.read_messages(self._topic, at, end_offset=of.end, payloads=payloads)
                self.check(page, of.topic_id, at, of.end)
                if page.topic_id != of.topic_id:
                    return  # its offsets are those of other messages
                if len(page):
                    yield batch_of(page, self._topic, self._columns)
                elif page.next_offset <= at:
                    return
                at = page.next_offset


class MessageReader(DataSourceReader):
    """Reads a range of offsets once."""

    def __init__(self, schema: StructType, options: FormatOptions) -> None:
        self._messages = _Messages(schema, options)
        self._options = options

    def partitions(self) -> list[OffsetRange]:
        """Return the ranges of the tasks."""
        options = self._options
        with self._messages.client() as client:
            found = self._messages.bounds(client)
        start = found.begin_offset if options.start_offset is None else options.start_offset
        end = found.end_offset
        if options.end_offset is not None:
            end = min(end, options.end_offset)
        if options.from_latest:
            start = end
        if start < end:
            self._messages.check(found, found.topic_id, start, end)
        start = max(start, found.begin_offset)
        return _ranges(found.topic_id, start, end, options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range."""
        if isinstance(partition, OffsetRange):  # without ranges Spark passes an object of its own
            yield from self._messages.read(partition)


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads messages as they fire; its position is {"topic_id": …, "offset": …}."""

    def __init__(self, schema: StructType, options: FormatOptions) -> None:
        if options.end_offset is not None:
            raise InvalidRequest.of("end_offset", options.end_offset, "a stream has no end")
        self._messages = _Messages(schema, options)
        self._options = options
        self._last: tuple[int, int] | None = None
        """Topic id, and offset after the last message, of a query that ends by itself."""

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end with the messages that have fired."""
        with self._messages.client() as client:
            found = self._messages.bounds(client)
        self._last = found.topic_id, found.end_offset

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the position at which a query without a checkpoint begins."""
        options = self._options
        with self._messages.client() as client:
            found = self._messages.bounds(client)
        start = found.begin_offset if options.start_offset is None else options.start_offset
        if options.from_latest:
            start = found.end_offset
        return {"topic_id": str(found.topic_id), "offset": start}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the option `rows_per_batch`."""
        most = self._options.rows_per_batch
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the position after the messages of the next micro-batch."""
        with self._messages.client() as client:
            found = self._messages.bounds(client)
        topic_id, at = int(start["topic_id"]), int(start["offset"])
        self._messages.check(found, topic_id, at, at)
        if found.topic_id != topic_id:
            topic_id, at = found.topic_id, 0
            if self._last is not None and self._last[0] != topic_id:
                self._last = topic_id, found.end_offset
        end = max(at, found.end_offset)
        if self._last is not None and self._last[0] == topic_id:
            end = max(at, self._last[1])
        if isinstance(limit, ReadMaxRows):
            end = min(end, max(at, found.begin_offset) + limit.max_rows)
        return {"topic_id": str(topic_id), "offset": end}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetRange]:
        """Return the ranges between two positions."""
        topic_id = int(end["topic_id"])
        first = int(start["offset"]) if start["topic_id"] == end["topic_id"] else 0
        if not self._options.fail_on_loss:
            with self._messages.client() as client:
                found = self._messages.bounds(client)
            if found.topic_id == topic_id:
                first = max(first, found.begin_offset)
        return _ranges(topic_id, first, int(end["offset"]), self._options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range."""
        assert isinstance(partition, OffsetRange)
        return self._messages.read(partition)
