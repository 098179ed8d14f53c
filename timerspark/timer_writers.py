"""Writers of timers: each partition of a table or of a micro-batch is one idempotent producer.

    (job, partition) --hash--> token --RegisterProducer--> a producer's id, always the same
    rows --> request 1, 2, 3, ...      an applied number is not applied again

A task that Spark repeats, also on another machine or after the driver's restart, registers the same
token and sends the same numbers. The cluster applies each once. It rejects a number with other rows
than at the first attempt. A partition that gives other rows each time therefore fails, and writes
nothing twice.

The producers stay registered: a late attempt of a task would otherwise begin anew. The cluster
forgets a producer after seven days, or after an hour if it has many (`limits.producers_max`).
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
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
from timerclient.values.errors import AlreadyExists, InvalidRequest, OutcomeForgotten, TimerError
from timerclient.values.results import ScheduleResult
from timerspark.format_options import FormatOptions
from timerspark.timer_requests import check_columns, requests_of

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""Spark's names for the properties of a task of a streaming query."""
TOKEN_BYTES: Final = 16
_NOT_SCHEDULED: Final = (ScheduleResult.REJECTED, ScheduleResult.NOT_PENDING)


@dataclass
class WrittenRows(WriterCommitMessage):
    """Result of one task."""

    rows: int
    repeated: int
    """Rows that an earlier attempt of the task had written."""


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


def _check_mode(*, overwrite: bool) -> None:
    if overwrite:
        raise InvalidRequest.of("mode", "overwrite", "must be append: timers are only added")


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "a writer runs in a task"
    return task


def _write(
    batches: Iterator[pa.RecordBatch], options: FormatOptions, partition: str
) -> WrittenRows:
    return asyncio.run(_scheduled(batches, options, partition))


async def _scheduled(
    batches: Iterator[pa.RecordBatch], options: FormatOptions, partition: str
) -> WrittenRows:
    """Schedule all rows.

    Raises:
        AlreadyExists: Some rows were not scheduled for their keys; all others were.
        InvalidRequest: A value exceeds a limit, or an earlier attempt sent other rows.
    """
    token = hashlib.blake2b(partition.encode(), digest_size=TOKEN_BYTES).digest()
    written = WrittenRows(0, 0)
    producer_id = refused = 0
    async with AsyncTimerClient(options.cluster, timeout=options.timeout_s) as client:
        for number, request in enumerate(requests_of(batches, options), 1):
            with _named(number, partition):
                producer_id = producer_id or await _register(client, token)
                request.producer_id, request.sequence = producer_id, number
                refused += await _send(client, request, written)
    if refused:
        text = f"{refused} of {written.rows} rows were not scheduled for their keys"
        raise AlreadyExists(f"on_conflict = {options.on_conflict}: {text}")
    return written


async def _register(client: AsyncTimerClient, token: bytes) -> int:
    request = pb.RegisterProducerRequest(token=token)
    answer = await client.nodes().call(
        lambda node, left_s: node.timers.RegisterProducer(request, timeout=left_s),
        within_s=client.within_s(None),
    )
    return answer.producer_id


@contextlib.contextmanager
def _named(number: int, partition: str) -> Iterator[None]:
    """Note the request and its partition in a rejection."""
    try:
        yield
    except TimerError as error:
        error.add_note(f"request {number} of the partition {partition}")
        raise


async def _send(client: AsyncTimerClient, request: pb.ScheduleRequest, written: WrittenRows) -> int:
    """Send a request until it is applied; count its rows. Return the number of refused rows."""
    count = sum(len(timers.payload_sizes) for timers in request.timers)
    written.rows += count
    try:
        answer = await client.nodes().call(
            lambda node, left_s: node.timers.Schedule(request, timeout=left_s),
            within_s=client.within_s(None),
        )
    except OutcomeForgotten:  # applied by an earlier attempt, whose answer is no longer kept
        written.repeated += count
        return 0
    written.repeated += count if answer.duplicate else 0
    return sum(ScheduleResult(result) in _NOT_SCHEDULED for result in answer.results)
