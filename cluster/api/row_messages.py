"""The row-shaped messages of the API, for clients that would rather not read columns.

    ScheduleTimerRequest --> a ScheduleRequest with one row; its answer --> ScheduleTimerResponse
    columns of a delivery --> DeliveredMessage, one each

The columns stay the only way in: limits, topics, ids and groups are those of wire_rows.
"""

import asyncio
import struct
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from timer.model import timer_id
from timer.model.columns import encode_headers
from timer.model.timer_errors import (
    HIDDEN,
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.peeked_messages import messages_of

TEXT_BYTES_MAX: Final = 65_535
"""Of the name or the value of a header."""
INLINE_ROWS: Final = 64
INLINE_BYTES: Final = 4096
"""Messages of a delivery, and bytes of their headers, that become rows on the event loop: 3 ms. A
delivery of a thousand small headers each takes 4 ms for each message."""
_LEASE: Final = struct.Struct("<QQQ")
"""A lease as clients have it: epoch, lease id, queue offset."""
_NANOS: Final = 1_000_000_000
_TIMESTAMP_S: Final = range(-62_135_596_800, 253_402_300_800)
"""Seconds of a Timestamp: the years 1 to 9999."""
_DURATION_S: Final = range(-315_576_000_000, 315_576_000_001)
_FIELDS: Final = {"due_ms": "due", "delay_ms": "delay"}


# ---- schedule


def columns_of(request: pb.ScheduleTimerRequest) -> pb.ScheduleRequest:
    """Return a request for one timer as columns.

    Raises:
        InvalidRequestError: a time or a header is malformed, or there is neither payload nor time.
    """
    out = pb.ScheduleRequest(on_conflict=request.on_conflict, request_id=request.request_id)
    row = out.timers.add(
        topic=request.topic, payload_sizes=[len(request.payload)], payloads=request.payload
    )
    match request.WhichOneof("when"):
        case "due":
            row.due_ms.append(_milliseconds("due", request.due, _TIMESTAMP_S))
        case "delay":
            row.delay_ms.append(_milliseconds("delay", request.delay, _DURATION_S))
        case "delay_level":
            row.delay_level.append(request.delay_level)
        case _:
            if not (request.payload or request.key or request.headers):  # such as an empty message
                limit = "give it, or one of due, delay, delay_level"
                raise InvalidRequestError("payload", HIDDEN, limit)
            row.delay_ms.append(0)
    if key := request.key.encode():
        row.key_sizes.append(len(key))
        row.keys = key
    if ordering_key := request.ordering_key.encode():
        row.ordering_key_sizes.append(len(ordering_key))
        row.ordering_keys = ordering_key
    if request.HasField("priority"):
        row.priorities.append(request.priority)
    if headers := _encode(request):
        row.headers_sizes.append(len(headers))
        row.headers = headers
    return out


def _milliseconds(field: str, value: Timestamp | Duration, seconds: range) -> int:
    """Return a time in milliseconds, rounded up: a timer never fires early."""
    if value.seconds not in seconds:
        limit = f"must be from {seconds[0]} to {seconds[-1]}"
        raise InvalidRequestError(f"{field}.seconds", value.seconds, limit)
    least = -_NANOS if isinstance(value, Duration) else -1
    if not least < value.nanos < _NANOS or (value.nanos * value.seconds < 0 and least < -1):
        limit = "must have less than a second, and the sign of a duration's seconds"
        raise InvalidRequestError(f"{field}.nanos", value.nanos, limit)
    return value.seconds * 1000 - -value.nanos // 1_000_000


def _encode(request: pb.ScheduleTimerRequest) -> bytes:
    pairs = sorted(request.headers.items())  # equal maps are equal requests
    longest = max((len(text.encode()) for pair in pairs for text in pair), default=0)
    if longest > TEXT_BYTES_MAX:
        limit = f"a name or value has at most {TEXT_BYTES_MAX} bytes"
        raise InvalidRequestError("headers", f"{longest} bytes", limit)
    return encode_headers(dict(pairs))


def named_as_sent(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about a column with the name of the row's field."""
    name = _FIELDS.get(error.field)
    return error if name is None else InvalidRequestError(name, error.value, error.limit)


def row_answer(answer: pb.ScheduleResponse, salt: int) -> pb.ScheduleTimerResponse:
    """Return the answer for one timer."""
    result = answer.results[0] if answer.results else pb.SCHEDULE_RESULT_SCHEDULED
    out = pb.ScheduleTimerResponse(result=result, duplicate=answer.duplicate)
    if any(answer.timer_ids):
        due_ms, _, _ = timer_id.decode(answer.timer_ids, salt)
        out.timer_id = answer.timer_ids
        _set_time(out.due, int(due_ms[0]))
    if any(answer.other_ids):
        out.other_id = answer.other_ids
    return out


def check_conflict(key: str, answer: pb.ScheduleTimerResponse) -> None:
    """Check that a conflict of keys has not prevented the schedule.

    Raises:
        AlreadyExistsError: another timer has the key.
        NotFoundError: no timer has the key of an update.
    """
    if answer.result == pb.SCHEDULE_RESULT_REJECTED:
        why = f"the pending timer {timer_id.to_text(answer.other_id)} has it"
        raise AlreadyExistsError("key", key, why)
    if answer.result == pb.SCHEDULE_RESULT_NOT_PENDING:
        raise NotFoundError("pending timer with the key", key)


def _set_time(to: Timestamp, ms: int) -> None:
    to.seconds, rest = divmod(ms, 1000)
    to.nanos = rest * 1_000_000


# ---- deliveries


def rows_of(columns: pb.Deliveries) -> pb.Deliveries:
    """Return a delivery with messages in place of columns."""
    out = pb.Deliveries(
        epoch=columns.epoch,
        lease_ms=columns.lease_ms,
        handed_out_ms=columns.handed_out_ms,
        group_id=columns.group_id,
    )
    for at, message in enumerate(messages_of(columns)):
        row = out.messages.add(
            lease=_LEASE.pack(columns.epoch, columns.lease_id, message.queue_offset),
            queue_offset=message.queue_offset,
            timer_id=message.raw,
            key=message.key,
            headers=message.headers,
            payload=message.payload,
            attempts=columns.attempts[at],
            failures=message.failures,
            ordering_key=message.ordering_key,
            priority=message.priority,
        )
        _set_time(row.due, message.requested_ms)
        _set_time(row.fired_at, message.fired_at_ms)
    return out


async def rows_beside(columns: pb.Deliveries) -> pb.Deliveries:
    """Return a delivery with messages in place of columns; in a thread if there are many values."""
    if len(columns.queue_offsets) <= INLINE_ROWS and len(columns.headers) <= INLINE_BYTES:
        return rows_of(columns)
    return await asyncio.to_thread(rows_of, columns)


def lease_in(lease: bytes) -> tuple[int, int, int]:
    """Return (epoch, lease id, queue offset) of a message's lease.

    Raises:
        InvalidRequestError: it is malformed.
    """
    if len(lease) != _LEASE.size:
        limit = "must be the `lease` of a delivered message"
        raise InvalidRequestError("leases", f"{len(lease)} bytes", limit)
    epoch, lease_id, offset = _LEASE.unpack(lease)
    return epoch, lease_id, offset
