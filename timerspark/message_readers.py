"""Readers of fired messages: ranges of queue offsets, one for each task.

    driver: read_messages --> begin and end of the queue, and its identity
    [begin, end) --> [0, 100000) [100000, 200000) ...   one OffsetRange for each task
    task:   read_messages, page after page --> Arrow batches

The message at an offset never changes, so a repeated task reads the same rows. A stream's position
is an offset and the identity of the queue, which Spark keeps in the query's checkpoint. Nothing is
leased.

    {"topic_id": "3", "offset": 40, "topic": "orders", "cluster": "prod", "epoch": 7}

Positions of version 0.1 have `topic_id` and `offset` only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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


RESTORE_STEP: Final = 1 << 19
"""A restore or a recovery raises the epoch by more than this. A new leader raises it by one."""


class MessagesLost(TimerError):
    """Messages in the range of a query were deleted, or the checkpoint is of another queue."""


@dataclass(frozen=True, slots=True)
class QueueIdentity:
    """The queue whose offsets a position counts; None: not known."""

    topic_id: int
    topic: str | None = None
    cluster: str | None = None
    epoch: int | None = None
    """Of the leader that told the offset."""

    @classmethod
    def of(cls, position: Mapping[str, Any]) -> "QueueIdentity":
        """Return the identity in a position."""
        more = (position.get(name) for name in ("topic", "cluster", "epoch"))
        return cls(int(position["topic_id"]), *more)

    def position_at(self, offset: int) -> dict[str, Any]:
        """Return a position in the queue."""
        return {**asdict(self), "topic_id": str(self.topic_id), "offset": offset}

    def why_replaced(self, now: "QueueIdentity") -> str:
        """Return the reason why a queue is another one than this; empty: it is this one."""
        for name in ("cluster", "topic"):
            old, new = getattr(self, name), getattr(now, name)
            if None not in (old, new) and old != new:
                return f"the checkpoint is of the {name} {old!r}, and the query reads {new!r}"
        if self.topic_id != now.topic_id:
            return f"topic {now.topic!r} was deleted and created again"
        return ""

    def why_changed(self, now: "QueueIdentity") -> str:
        """Return the reason why the queue may have other messages than before; empty: it can't."""
        if reason := self.why_replaced(now):
            return reason
        if self.epoch is None or now.epoch is None or 0 <= now.epoch - self.epoch < RESTORE_STEP:
            return ""
        return f"the cluster of topic {now.topic!r} was restored from a backup, or recovered"


@dataclass
class OffsetRange(InputPartition):
    """The messages of one task."""

    queue: QueueIdentity
    start: int
    end: int
    """The offset after the last message."""


def _ranges(queue: QueueIdentity, start: int, end: int, most: int) -> list[OffsetRange]:
    starts = range(start, end, most)
    return [OffsetRange(queue, first, min(first + most, end)) for first in starts]


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

    def bounds(
        self, client: TimerClient, known: QueueIdentity | None = None
    ) -> tuple[MessagePage, QueueIdentity]:
        """Return a page without messages, which has the bounds of the queue; and its identity.

        `known`: the identity at the last call. Another epoch may be that of another cluster.
        """
        found = client.read_messages(self._topic, UINT64_MAX, payloads=False)
        if known is None or known != self._queue(found, known.cluster):
            known = self._queue(found, client.status(local=True).cluster_id)
        return found, known

    def _queue(self, found: MessagePage, cluster: str | None = None) -> QueueIdentity:
        return QueueIdentity(found.topic_id, self._topic, cluster, found.columns.epoch)

    def check(
        self,
        found: MessagePage,
        now: QueueIdentity,
        before: QueueIdentity,
        start: int,
        end: int,
    ) -> None:
        """Check that the messages of a range, all of which had fired before, are there now.

        Raises:
            MessagesLost: They are not, and the query must not go on without them.
        """
        if not self._options.fail_on_loss:
            return
        go_on = "set fail_on_loss to false to read what is left"
        if reason := before.why_changed(now):
            raise MessagesLost(f"{reason}: {go_on}")
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
                self.check(page, self._queue(page), of.queue, at, of.end)
                if page.topic_id != of.queue.topic_id:
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
            found, queue = self._messages.bounds(client)
        start = found.begin_offset if options.start_offset is None else options.start_offset
        end = found.end_offset
        if options.end_offset is not None:
            end = min(end, options.end_offset)
        if options.from_latest:
            start = end
        if start < end:
            self._messages.check(found, queue, queue, start, end)
        start = max(start, found.begin_offset)
        return _ranges(queue, start, end, options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range."""
        if isinstance(partition, OffsetRange):  # without ranges Spark passes an object of its own
            yield from self._messages.read(partition)


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads messages as they fire."""

    def __init__(self, schema: StructType, options: FormatOptions) -> None:
        if options.end_offset is not None:
            raise InvalidRequest.of("end_offset", options.end_offset, "a stream has no end")
        self._messages = _Messages(schema, options)
        self._options = options
        self._last: tuple[QueueIdentity, int] | None = None
        """Queue, and offset after the last message, of a query that ends by itself."""
        self._client: TimerClient | None = None
        """Open from the first look on: Spark looks for new messages many times a second."""
        self._queue: QueueIdentity | None = None

    def _bounds(self) -> tuple[MessagePage, QueueIdentity]:
        if self._client is None:
            self._client = self._messages.client()
        found, self._queue = self._messages.bounds(self._client, self._queue)
        return found, self._queue

    def stop(self) -> None:
        """End the reader: the query has ended."""
        if self._client is not None:
            self._client.close()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end with the messages that have fired."""
        found, queue = self._bounds()
        self._last = queue, found.end_offset

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the position at which a query without a checkpoint begins.

        Raises:
            InvalidRequest: `start_offset` is above the end of the queue.
        """
        options = self._options
        found, queue = self._bounds()
        start = found.begin_offset if options.start_offset is None else options.start_offset
        if options.from_latest:
            start = found.end_offset
        if start > found.end_offset:
            limit = f"must be at most {found.end_offset}, the end of topic {options.need_topic()!r}"
            raise InvalidRequest.of("start_offset", start, limit)
        return queue.position_at(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the option `rows_per_batch`."""
        most = self._options.rows_per_batch
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the position after the messages of the next micro-batch.

        Raises:
            MessagesLost: Messages at the position may have been deleted before they were read.
        """
        before, offset = QueueIdentity.of(start), int(start["offset"])
        found, now = self._bounds()
        self._messages.check(found, now, before, offset, offset)
        end = found.end_offset
        first = 0 if before.why_replaced(now) else min(offset, end)
        if self._last is not None:
            if self._last[0].why_replaced(now):
                self._last = now, end
            end = max(first, min(end, self._last[1]))
        if isinstance(limit, ReadMaxRows):
            end = min(end, max(first, found.begin_offset) + limit.max_rows)
        if end == offset and not before.why_changed(now):
            return start  # another text would be new data for Spark
        return now.position_at(end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetRange]:
        """Return the ranges between two positions.

        Raises:
            MessagesLost: Some of their messages may have been deleted.
        """
        queue, stop = QueueIdentity.of(end), int(end["offset"])
        first = 0 if QueueIdentity.of(start).why_replaced(queue) else int(start["offset"])
        if first >= stop:
            return []
        found, now = self._bounds()
        self._messages.check(found, now, queue, first, stop)
        if queue.why_replaced(now):
            return []  # its offsets are those of other messages
        first = max(first, found.begin_offset)
        return _ranges(queue, first, stop, self._options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range."""
        assert isinstance(partition, OffsetRange)
        return self._messages.read(partition)
