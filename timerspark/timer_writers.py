"""Writers of timers: each partition of a table or of a micro-batch is one idempotent producer.

    (job, partition) --hash--> token --RegisterProducer--> a producer's id, always the same
    rows --> request 1, 2, 3, ...      an applied number is not applied again
             if 2 has to wait for a new leader, 3 and 4 are rejected, and sent again after 2

A task that Spark repeats, also on another machine or after the driver's restart, registers the same
token and sends the same numbers. The cluster applies each once. It rejects a number with other rows
than at the first attempt. A partition that gives other rows each time therefore fails, and writes
nothing twice.

The producers stay registered: a late attempt of a task would otherwise begin again. The cluster
forgets a producer after seven days, or after an hour if it has many (`limits.producers_max`).
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from timerclient.client.aio import AsyncTimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.values.errors import (
    AlreadyExists,
    InvalidRequest,
    OutcomeForgotten,
    SequenceGap,
    TimerError,
)
from timerclient.values.results import ScheduleResult
from timerspark.format_options import FormatOptions
from timerspark.timer_requests import check_columns, requests_of

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""Spark's names for the properties of a task of a streaming query."""
TOKEN_BYTES: Final = 16
REQUESTS_IN_FLIGHT: Final = 16
BYTES_IN_FLIGHT: Final = 8 << 20
"""Unanswered requests of a partition, at most: two of the largest, if a payload is no larger."""
KEYS_NAMED_MAX: Final = 3
"""Keys in an error, at most."""
_OTHER_REQUESTS: Final = (
    "an earlier write of this name had other rows, another on_conflict, or requests of other sizes:"
    " rows_per_request, bytes_per_request or spark.sql.execution.arrow.maxRecordsPerBatch"
)
_NOT_SCHEDULED: Final = (int(ScheduleResult.REJECTED), int(ScheduleResult.NOT_PENDING))


@dataclass
class WrittenRows(WriterCommitMessage):
    """Result of one task."""

    rows: int = 0
    repeated: int = 0
    """Rows that an earlier attempt of the task had written."""
    not_scheduled: int = 0
    """Rows that were not scheduled for their keys. The driver raises the error: a failed task would
    be repeated, and the answers to its first requests may be forgotten by then."""
    keys: list[str] = field(default_factory=list)
    """The first keys of these rows."""


class TableWriter(DataSourceArrowWriter):
    """Writes a table; `job`: a name that no other write has."""

    def __init__(
        self, schema: StructType, options: FormatOptions, job: str, *, overwrite: bool
    ) -> None:
        _check_mode(overwrite=overwrite)
        check_columns(schema, options)
        self._options = options
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Schedule the rows of a partition."""
        return _write(iterator, self._options, f"table/{self._job}/{_task().partitionId()}")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """End the write.

        Raises:
            AlreadyExists: Some rows were not scheduled for their keys; all others were.
        """
        _check_scheduled(messages, self._options)


class MicroBatchWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a streaming query."""

    def __init__(self, schema: StructType, options: FormatOptions, *, overwrite: bool) -> None:
        _check_mode(overwrite=overwrite)
        check_columns(schema, options)
        if options.job_id:
            limit = "is for tables; a stream has the id of its query, from its checkpoint"
            raise InvalidRequest.of("job_id", options.job_id, limit)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Schedule the rows of a micro-batch's partition."""
        task = _task()
        names = [task.getLocalProperty(name) for name in (QUERY_ID, BATCH_ID)]
        if None in names:
            limit = "must be set by Spark: without them a repeated micro-batch would not be known"
            raise InvalidRequest.of("query and batch", names, limit)
        job = "/".join(map(str, (*names, task.partitionId())))
        return _write(iterator, self._options, f"stream/{job}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """End a micro-batch.

        Raises:
            AlreadyExists: Some rows were not scheduled for their keys; all others were.
        """
        _check_scheduled(messages, self._options)


def _check_mode(*, overwrite: bool) -> None:
    if overwrite:
        raise InvalidRequest.of("mode", "overwrite", "must be append: timers are only added")


def _check_scheduled(messages: list[WriterCommitMessage | None], options: FormatOptions) -> None:
    written = [each for each in messages if isinstance(each, WrittenRows)]
    missing = sum(each.not_scheduled for each in written)
    if missing and options.fail_on_conflict:
        count = sum(each.rows for each in written)
        keys = [key for each in written for key in each.keys][:KEYS_NAMED_MAX]
        text = f"{missing} of {count} rows were not scheduled for their keys, such as {keys}"
        go_on = "set fail_on_conflict to false to go on without them"
        raise AlreadyExists(f"on_conflict = {options.on_conflict}: {text}: {go_on}")


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "a writer runs in a task"
    return task


def _write(
    batches: Iterator[pa.RecordBatch], options: FormatOptions, partition: str
) -> WrittenRows:
    return asyncio.run(_schedule(batches, options, partition))


async def _schedule(
    batches: Iterator[pa.RecordBatch], options: FormatOptions, partition: str
) -> WrittenRows:
    """Schedule all rows.

    Raises:
        InvalidRequest: A value exceeds a limit, or an earlier attempt sent other rows.
    """
    async with AsyncTimerClient(options.cluster, timeout=options.timeout_s) as client:
        return await _Sender(client, partition).run(requests_of(batches, options))


class _Sender:
    """Sends the requests of one partition: several at once, applied in their order."""

    def __init__(self, client: AsyncTimerClient, partition: str) -> None:
        self.written = WrittenRows()
        self._client = client
        self._partition = partition
        self._unanswered: deque[tuple[asyncio.Task[None], int]] = deque()
        """Unanswered requests in their order, with their sizes in bytes."""
        self._in_order = True
        """No unanswered request overtook another one."""
        self._uncompared_no = 0
        """The last request whose rows the cluster could not compare. 0: none."""

    async def run(self, requests: Iterator[pb.ScheduleRequest]) -> WrittenRows:
        """Send all requests; return the number of their rows.

        Raises:
            InvalidRequest: A value exceeds a limit, or an earlier attempt sent other rows.
        """
        producer_id = number = 0
        previous: asyncio.Task[None] | None = None
        try:
            # In a thread, so that answers are read while Spark computes the next rows.
            while (request := await asyncio.to_thread(next, requests, None)) is not None:
                number += 1
                with _noting_request(number, self._partition):
                    producer_id = producer_id or await self._register()
                request.producer_id, request.sequence = producer_id, number
                size = request.ByteSize()
                await self._wait_until_fits(size)
                previous = asyncio.create_task(self._send(request, previous))
                self._unanswered.append((previous, size))
            await self._wait_for_answers(0)
            with _noting_request(number, self._partition):
                self._check_compared(number)
        finally:
            for task, _ in self._unanswered:
                task.cancel()
            await asyncio.gather(*(task for task, _ in self._unanswered), return_exceptions=True)
        return self.written

    async def _register(self) -> int:
        token = hashlib.blake2b(self._partition.encode(), digest_size=TOKEN_BYTES).digest()
        request = pb.RegisterProducerRequest(token=token)
        answer = await self._client.nodes().call(
            lambda node, left_s: node.timers.RegisterProducer(request, timeout=left_s),
            within_s=self._client.within_s(None),
        )
        return answer.producer_id

    def _check_compared(self, number: int) -> None:
        """Check that the cluster compared the last request's rows, or applied them just now.

        The cluster keeps the answer to a producer's last request. So an attempt whose last request
        is forgotten sent fewer requests than an earlier one.
        """
        if number and self._uncompared_no == number:
            limit = "must be the last request of its name: an earlier write sent more of them"
            raise InvalidRequest.of("sequence", number, limit)

    async def _wait_until_fits(self, size: int) -> None:
        """Wait until a request of this size may be sent."""
        await self._wait_for_answers(REQUESTS_IN_FLIGHT - 1)
        while (
            self._unanswered and sum(each for _, each in self._unanswered) + size > BYTES_IN_FLIGHT
        ):
            await self._wait_for_answers(len(self._unanswered) - 1)
        if not self._in_order:  # each further request would be rejected, and sent again
            await self._wait_for_answers(0)
            self._in_order = True

    async def _wait_for_answers(self, unanswered_max: int) -> None:
        """Wait until at most `unanswered_max` requests are unanswered.

        Raises:
            TimerError: The first that failed has this error.
        """
        while len(self._unanswered) > unanswered_max:
            await self._unanswered[0][0]
            self._unanswered.popleft()

    async def _send(self, request: pb.ScheduleRequest, previous: asyncio.Task[None] | None) -> None:
        """Send a request until it is applied; count its rows."""
        with _noting_request(request.sequence, self._partition):
            try:
                await self._attempt(request)
            except SequenceGap:  # it arrived before its predecessor
                if previous is None:
                    raise
                self._in_order = False
                await previous
                await self._attempt(request)

    async def _attempt(self, request: pb.ScheduleRequest) -> None:
        count = sum(len(timers.payload_sizes) for timers in request.timers)
        try:
            answer = await self._client.nodes().call(
                lambda node, left_s: node.timers.Schedule(request, timeout=left_s),
                within_s=self._client.within_s(None),
            )
        except OutcomeForgotten:  # applied by an earlier attempt, whose answer is no longer kept
            self._uncompared_no = max(self._uncompared_no, request.sequence)
            self.written.rows += count
            self.written.repeated += count
            return
        self.written.rows += count
        self.written.repeated += count if answer.duplicate else 0
        missing = [at for at, each in enumerate(answer.results) if each in _NOT_SCHEDULED]
        self.written.not_scheduled += len(missing)
        if missing and len(self.written.keys) < KEYS_NAMED_MAX:
            keys = [key for timers in request.timers for key in _keys_of(timers)]
            self.written.keys += [keys[at].decode() for at in missing[:KEYS_NAMED_MAX]]


def _keys_of(timers: pb.TimerColumns) -> list[bytes]:
    """Return a key for each row; empty: none."""
    return rows.slices(timers.key_sizes, timers.keys, len(timers.payload_sizes))


@contextlib.contextmanager
def _noting_request(number: int, partition: str) -> Iterator[None]:
    """Note the request and its partition in a rejection."""
    try:
        yield
    except TimerError as error:
        if not getattr(error, "__notes__", None):
            error.add_note(f"request {number} of the partition {partition}")
            if isinstance(error, InvalidRequest) and error.field == "sequence":
                error.add_note(_OTHER_REQUESTS)
        raise
