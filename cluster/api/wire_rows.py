"""Conversions between the API's messages (timerclient/proto/timer/v1/timer.proto) and columns.

All client input is checked here before anything takes effect. An error names the field, the value
and the limit.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from cluster.api.lease_ids import LeaseIds
from cluster.api.owners import owned_request_id
from cluster.rpc.request_bounds import size_of
from timer.entries.policies import DEFAULT_NAMESPACE
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.admission import WAYS, Rules, WantedTimes
from timer.leader.intake.admission import wanted_times_of as when_of_ways
from timer.leader.leader import Leader
from timer.model import row_traits, timer_id
from timer.model.columns import (
    I64,
    REQUEST_ID_BYTES_MAX,
    U32,
    U64,
    Binary,
    OnConflict,
    Part,
    RequestId,
    gather,
)
from timer.model.feature_level import LEVEL_OF_TRAITS
from timer.model.row_traits import PRIORITY_DEFAULT, PRIORITY_MAX, Traits
from timer.model.timer_errors import HIDDEN, InvalidRequestError, NotFoundError
from timer.model.units import DUE_MS_MAX, Now, ProducerId, TopicId, UnixMs
from timer.ready.queue import Queue
from timer.ready.topic import Topic
from timer.state.key_conflicts import Verdict
from timer.state.producers import RequestAnswer
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import (
    BOUND_LIMIT,
    DUE_LIMIT,
    DUE_MS_MIN,
    NAME_SIZE_MAX,
    TOPIC_NAME,
    UNIX_SECONDS,
    name_limit,
)

TOKEN_SIZE_MAX: Final = 64
COLUMNS_MAX: Final = 1_024
"""Most `TimerColumns` in one request: they take about 40 ms to check, in portions."""
HEADERS_MAX: Final = 32_768
"""Most names and values in one request: they take about 20 ms to check."""
BYTES: Final = ("payload", "key", "headers")
"""The columns with bytes of variable length."""
NO_TOPIC: Final = TopicId(0)
"""Stands for the deleted topic of a repeated request, which gets its first answer again."""

AnyScheduling: TypeAlias = pb.ScheduleRequest | pb.ScheduleStreamRequest
_MODES: Final = frozenset(pb.OnConflict.values())

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request."""

    key_bytes_max: int
    headers_bytes_max: int
    request_rows_max: int
    request_bytes_max: int


def check_name(
    field: str, name: str, pattern: re.Pattern[str] = TOPIC_NAME, bytes_max: int = NAME_SIZE_MAX
) -> str:
    """Return `name` if a topic or group may have it.

    Raises:
        InvalidRequestError: the name is not allowed.
    """
    if limit := name_limit(name, pattern, bytes_max):
        raise InvalidRequestError(field, name, limit)
    return name


def check_level(field: str, level: int, needed: int) -> None:
    """Check that the cluster has reached the feature level that a field needs.

    Raises:
        InvalidRequestError: some node may run a program that does not know the field.
    """
    if level < needed:
        limit = f"needs feature level {needed} (docs/upgrade.md)"
        raise InvalidRequestError(field, f"set at feature level {level}", limit)


def topic_name(name: str, field: str = "topic") -> str:
    """Return a topic's name in its plain form: without the default namespace.

    Raises:
        InvalidRequestError: the name is not allowed.
    """
    prefix = f"{DEFAULT_NAMESPACE}/"
    plain = name.removeprefix(prefix)
    if plain.startswith(prefix):  # its listed name would find another topic
        raise InvalidRequestError(field, name, f"must not begin with {prefix} twice")
    return check_name(field, plain)


def topic_of(topics: Mapping[str, Topic], name: str) -> Topic:
    """Return the topic of this name.

    Raises:
        InvalidRequestError: the name is not allowed.
        NotFoundError: the topic does not exist.
    """
    topic = topics.get(topic_name(name))
    if topic is None:
        raise NotFoundError("topic", name)
    return topic


def check_request(request: AnyScheduling, limits: RequestLimits) -> None:
    """Check the limits that do not depend on the topic; write topics' names in their plain form.

    Raises:
        InvalidRequestError: a field is out of its limits.
    """
    if request.producer_id and request.sequence < 1:
        raise InvalidRequestError("sequence", request.sequence, "must be 1 or more")
    if request.request_id:
        _check_request_id(request)
    if request.on_conflict not in _MODES:
        raise InvalidRequestError(
            "on_conflict", request.on_conflict, "must be REJECT, REPLACE, KEEP or UPDATE"
        )
    if len(request.timers) > COLUMNS_MAX:
        limit = f"a request has at most {COLUMNS_MAX} columns of timers"
        raise InvalidRequestError("timers", f"{len(request.timers)} columns", limit)
    rows = sum(len(timers.payload_sizes) for timers in request.timers)
    if not 1 <= rows <= limits.request_rows_max:
        limit = f"a request holds 1 to {limits.request_rows_max} timers"
        raise InvalidRequestError("timers", rows, limit)
    bytes_max = limits.request_bytes_max
    if size_of(request) > bytes_max and (size := _column_bytes(request)) > bytes_max:
        limit = f"payloads, keys and headers of a request have at most {bytes_max} bytes"
        raise InvalidRequestError("payloads", f"{size} bytes", limit)
    for timers in request.timers:
        if timers.topic != (name := topic_name(timers.topic)):
            timers.topic = name
        if not (rows := len(timers.payload_sizes)):
            raise InvalidRequestError(
                "payload_sizes", "none", f"topic {timers.topic!r} has no timers"
            )
        for way in WAYS:
            check_count(way, getattr(timers, way), 0, 1, rows)
        for sizes in ("key_sizes", "headers_sizes", "ordering_key_sizes", "priorities"):
            check_count(sizes, getattr(timers, sizes), 0, rows)


def _column_bytes(request: AnyScheduling) -> int:
    """Return the bytes of payloads, keys and headers. Each is copied."""
    return sum(
        len(t.payloads) + len(t.keys) + len(t.headers) + len(t.ordering_keys)
        for t in request.timers
    )


def check_count(field: str, column: Sized, *counts: int) -> None:
    """Check the number of a column's values before they are converted.

    Raises:
        InvalidRequestError: the number is not one of `counts`.
    """
    if len(column) not in counts:
        limit = f"must have {' or '.join(map(str, dict.fromkeys(counts)))} values"
        raise InvalidRequestError(field, f"{len(column)} values", limit)


def _check_request_id(request: AnyScheduling) -> None:
    size = len(request.request_id.encode())
    if size > REQUEST_ID_BYTES_MAX:
        limit = f"must have at most {REQUEST_ID_BYTES_MAX} bytes"
        raise InvalidRequestError("request_id", f"{size} bytes", limit)
    if "\0" in request.request_id:
        raise InvalidRequestError("request_id", request.request_id, "must have no zero byte")
    if request.producer_id:
        limit = "must be empty with a producer: its sequences do the same"
        raise InvalidRequestError("request_id", request.request_id, limit)


def body_of(request: AnyScheduling) -> int:
    """Return a hash of a checked request's content, 64 bits, the same for each encoding."""
    digest = hashlib.blake2b(bytes([request.on_conflict]), digest_size=8)
    for timers in request.timers:
        digest.update(timers.topic.encode() + b"\0")
        for way in WAYS:
            digest.update(np.array(getattr(timers, way), np.int64).tobytes() + b"\0")
        for name in ("payload_sizes", "key_sizes", "headers_sizes"):
            digest.update(np.array(getattr(timers, name), np.uint32).tobytes() + b"\0")
        for name in ("payloads", "keys", "headers"):
            digest.update(getattr(timers, name))
        if _has_traits(timers):
            for numbers in (timers.ordering_key_sizes, timers.priorities):
                digest.update(np.array(numbers, np.uint32).tobytes() + b"\0")
            digest.update(timers.ordering_keys)
    return int.from_bytes(digest.digest(), "little")


def _request_id_of(request: AnyScheduling, leader: Leader, now: Now) -> RequestId | None:
    if not request.request_id:
        return None
    return leader.request_id(owned_request_id(request.request_id), body_of(request), now)


def is_repeated(request: AnyScheduling, leader: Leader, now: Now) -> bool:
    """Return whether a request was applied before; it then needs no topic.

    Raises:
        InvalidRequestError: its id belongs to a request with another content.
    """
    request_id = _request_id_of(request, leader, now)
    return leader.was_applied(ProducerId(request.producer_id), request.sequence, request_id)


def pieces_of(
    request: AnyScheduling,
    topics: Mapping[str, TopicId],
    limits: RequestLimits,
    leader: Leader,
    now: Now,
) -> Iterator["CheckedColumns"]:
    """Check and yield each TimerColumns of a request, with its times decided by `now`.

    Raises:
        InvalidRequestError: a field is out of its limits.
    """
    producer_id, floor_ms = ProducerId(request.producer_id), leader.machine.last_read_time_ms
    request_id = _request_id_of(request, leader, now)
    texts, rows = 0, 0
    rows_in_all = sum(len(timers.payload_sizes) for timers in request.timers)
    for timers in request.timers:
        if _has_traits(timers):
            check_level("ordering_keys, priorities", leader.machine.level, LEVEL_OF_TRAITS)
        sequence, name = request.sequence, timers.topic
        rules = leader.rules(topics[name], producer_id, sequence, request_id, name)
        try:
            piece = CheckedColumns.of(timers, limits, rules, now, floor_ms, texts)
            _check_keyed(request.on_conflict, piece.key)
        except InvalidRequestError as error:
            if error.field in WAYS and len(timers.payload_sizes) == 1:
                error = error.at_rows([0])
            raise error.in_request(rows, rows_in_all) from None
        texts += piece.texts
        rows += len(timers.payload_sizes)
        yield piece


def part_of(
    request: AnyScheduling,
    topics: Mapping[str, TopicId],
    pieces: Sequence["CheckedColumns"],
    leader: Leader,
    now: Now,
) -> Part:
    """Return the request as columns: those of all its pieces."""
    producer_id = ProducerId(request.producer_id)
    ids = [
        np.full(len(piece.requested_ms), topics[timers.topic], np.uint32)
        for piece, timers in zip(pieces, request.timers, strict=True)
    ]
    return Part(
        producer_id=producer_id,
        sequence=request.sequence if request.producer_id else 0,
        due_ms=_join([piece.due_ms for piece in pieces]),
        requested_ms=_join([piece.requested_ms for piece in pieces]),
        topic=_join(ids),
        payload=_join_binary([piece.payload for piece in pieces]),
        key=_optional([piece.key for piece in pieces]),
        headers=_optional([piece.headers for piece in pieces]),
        on_conflict=OnConflict(request.on_conflict),
        request=_request_id_of(request, leader, now),
        body=_checksum(request, pieces) if producer_id else 0,
    )


def _checksum(request: AnyScheduling, pieces: Sequence["CheckedColumns"]) -> int:
    """Return 64 bits of a producer's request: a CRC-32 of the payloads, and one of the rest.

    It detects a sequence that a client uses twice by mistake, so a cheap checksum is enough.
    """
    payloads, rest = 0, 1 + request.on_conflict
    for timers, piece in zip(request.timers, pieces, strict=True):
        payloads = isal_zlib.crc32(piece.payload.blob, payloads)
        rest = isal_zlib.crc32(f"{timers.topic}\0{piece.when.way}\0".encode(), rest)
        rest = isal_zlib.crc32(piece.when.values.data, rest)
        for column in (piece.key, piece.headers):
            rest = isal_zlib.crc32(column.blob, isal_zlib.crc32(column.sizes.data, rest))
        rest = isal_zlib.crc32(piece.payload.sizes.data, rest)
    return payloads << 32 | rest


@dataclass(frozen=True, slots=True)
class CheckedColumns:
    """One checked TimerColumns."""

    requested_ms: I64
    due_ms: I64
    payload: Binary
    key: Binary
    headers: Binary
    texts: int
    """Names and values in `headers`."""
    when: WantedTimes
    """The times as requested."""

    @classmethod
    def of(
        cls,
        timers: pb.TimerColumns,
        limits: RequestLimits,
        rules: Rules,
        now: Now,
        floor_ms: UnixMs,
        texts_before: int,
    ) -> "CheckedColumns":
        """Check one TimerColumns. `texts_before`: texts in the headers of the request's earlier."""
        rows = len(timers.payload_sizes)
        headers = _binary("headers", timers.headers_sizes, timers.headers, rows)
        _limit_sizes("headers", headers, limits.headers_bytes_max)
        texts = _count_headers(headers, HEADERS_MAX - texts_before)
        if _has_traits(timers):
            headers = row_traits.join(headers, _traits(timers, rows, limits))
        payload = _binary("payload", timers.payload_sizes, timers.payloads, rows)
        _limit_sizes("payload", payload, *rules.payload_limit)
        key = checked_keys(timers.key_sizes, timers.keys, rows, limits.key_bytes_max)
        when = wanted_times_of(timers, rows)
        times = rules.times(when, rows, now, floor_ms)
        return cls(*times, payload, key, headers, texts, when)


def _has_traits(timers: pb.TimerColumns) -> bool:
    return bool(timers.ordering_key_sizes or timers.ordering_keys or timers.priorities)


def _traits(timers: pb.TimerColumns, rows: int, limits: RequestLimits) -> Traits:
    """Return ordering keys and priorities.

    Raises:
        InvalidRequestError: one is out of its limits.
    """
    sizes, blob = timers.ordering_key_sizes, timers.ordering_keys
    ordering = _binary("ordering_key", sizes, blob, rows)
    _limit_sizes("ordering_key", ordering, limits.key_bytes_max)
    _check_keys(ordering, "ordering_keys")
    priority = np.full(rows, PRIORITY_DEFAULT, np.uint8)
    if timers.priorities:
        given = np.array(timers.priorities, np.uint32)
        if (high := int(given.max())) > PRIORITY_MAX:
            limit = f"must be 0 to {PRIORITY_MAX}"
            raise InvalidRequestError("priority", high, limit, row=int(given.argmax()))
        priority = given.astype(np.uint8)
    return Traits(ordering, priority)


def wanted_times_of(request: pb.TimerColumns | pb.RescheduleRequest, rows: int) -> WantedTimes:
    """Return the times that a request gives for its timers.

    Raises:
        InvalidRequestError: none or several ways are given, a wrong number of values, or a due
            time below DUE_MS_MIN.
    """
    given: dict[str, Sequence[int]] = {way: getattr(request, way) for way in WAYS}
    when = when_of_ways(given, rows)
    values = when.values
    if when.way == "due_ms" and int(values.min()) < DUE_MS_MIN:
        row = int((values < DUE_MS_MIN).argmax())
        place = row if len(values) == rows else None
        raise InvalidRequestError("due_ms", int(values[row]), DUE_LIMIT, row=place)
    return when


def check_instant(field: str, unix_ms: int) -> None:
    """Check a time of a request, which may be early in 1970.

    Raises:
        InvalidRequestError: it is out of range, or of UNIX_SECONDS.
    """
    if not 0 <= unix_ms <= DUE_MS_MAX:
        raise InvalidRequestError(field, unix_ms, f"must be 0 to {DUE_MS_MAX}")
    if unix_ms in UNIX_SECONDS:
        raise InvalidRequestError(field, unix_ms, "must be in Unix milliseconds, not seconds")


def check_bound(field: str, unix_ms: int, most_ms: int = DUE_MS_MAX) -> None:
    """Check a bound of a request. 0 passes: there is none.

    Raises:
        InvalidRequestError: it is out of range, or below DUE_MS_MIN.
    """
    if unix_ms and not DUE_MS_MIN <= unix_ms <= most_ms:
        raise InvalidRequestError(field, unix_ms, BOUND_LIMIT)


def _check_keyed(mode: int, key: Binary) -> None:
    """Check that each row has a key, except with REJECT."""
    if mode != OnConflict.REJECT and not key.sizes.all():
        limit = f"must be given with on_conflict = {OnConflict(mode).name.lower()}"
        raise InvalidRequestError("key", HIDDEN, limit, row=int(key.sizes.argmin()))


def checked_keys(sizes: Sequence[int], blob: bytes, rows: int, bytes_max: int) -> Binary:
    """Return a column of keys.

    Raises:
        InvalidRequestError: a key is too long or not UTF-8, or the sizes do not fit.
    """
    key = _binary("key", sizes, blob, rows)
    _limit_sizes("key", key, bytes_max)
    _check_keys(key)
    return key


def _binary(name: str, sizes: Sequence[int], blob: bytes, rows: int) -> Binary:
    if not len(sizes) and not blob:
        return Binary(sizes=np.zeros(rows, np.uint32), blob=b"")
    check_count(f"{name}_sizes", sizes, rows)
    if rows == 1:  # numpy would take as long as all of this
        total = sizes[0]
        column: U32 = np.array((total,), np.uint32)
    else:
        column = np.array(sizes, np.uint32)
        total = int(column.sum(dtype=np.int64))
    if total != len(blob):
        raise InvalidRequestError(
            f"{name}_sizes", f"{total} in all", f"there are {len(blob)} bytes"
        )
    return Binary(sizes=column, blob=blob)


def _limit_sizes(name: str, column: Binary, bytes_max: int, whose: str = "") -> None:
    sizes = column.sizes
    largest = int(sizes[0]) if len(sizes) == 1 else int(sizes.max())
    if largest > bytes_max:
        limit = f"must have at most {bytes_max} bytes{whose}"
        raise InvalidRequestError(name, f"{largest} bytes", limit, row=int(sizes.argmax()))


def _check_keys(column: Binary, name: str = "keys") -> None:
    """Refuse keys that are not UTF-8: check the whole column, then the first byte of each key."""
    if not column.blob:
        return
    data = bytes(column.blob)
    ends = np.cumsum(column.sizes, dtype=np.int64)
    starts = (ends - column.sizes)[column.sizes > 0]
    try:
        data.decode()
        split = (np.frombuffer(data, np.uint8)[starts] & 0xC0) == 0x80
    except UnicodeDecodeError:
        raise InvalidRequestError(name, "bytes", "must be UTF-8") from None
    if split.any():
        raise InvalidRequestError(name, "bytes", "each key must be UTF-8")


def _count_headers(column: Binary, texts_max: int) -> int:
    """Return the number of texts in a column's headers.

    Raises:
        InvalidRequestError: the headers are malformed, or have more than `texts_max` texts.
    """
    position = texts = 0
    for size in column.sizes.tolist() if column.blob else ():
        try:
            texts += count_texts(column.blob, position, position + size, texts_max - texts)
        except ValueError as malformed:
            raise InvalidRequestError("headers", "bytes", str(malformed)) from None
        position += size
    return texts


def count_texts(blob: bytes | memoryview, start: int, end: int, texts_max: int) -> int:
    """Return the number of texts in a row's headers: names and values.

    Raises:
        ValueError: the headers are malformed, or have more than `texts_max` texts.
    """
    texts, unnamed = 0, False
    while start < end:
        texts += 1
        if texts > texts_max:
            raise ValueError(f"a request holds at most {HEADERS_MAX} names and values")
        size = int.from_bytes(blob[start : start + 2], "little")
        unnamed |= not size and texts % 2 == 1
        start += 2 + size
        if start > end:
            raise ValueError(f"headers end at byte {end}, a text at {start}")
        bytes(blob[start - size : start]).decode()
    if texts % 2:
        raise ValueError("a header without a value")
    if unnamed:
        raise ValueError("the name of a header must not be empty")
    return texts


def _join(columns: list[npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _join_binary(columns: list[Binary]) -> Binary:
    if len(columns) == 1:
        return columns[0]
    sizes = np.concatenate([column.sizes for column in columns])
    return Binary(sizes=sizes, blob=b"".join(column.blob for column in columns))


def _optional(columns: list[Binary]) -> Binary | None:
    return _join_binary(columns) if any(column.blob for column in columns) else None


def response_of(
    request: AnyScheduling, part: Part, answer: RequestAnswer, *, duplicate: bool, salt: int
) -> pb.ScheduleResponse:
    """Return the answer to an applied request."""
    due_ms = answer.due_ms
    seq = np.arange(answer.first_seq, answer.first_seq + len(due_ms), dtype=np.uint64)
    verdicts = answer.verdicts
    if verdicts is not None:
        kept = verdicts.verdict == Verdict.KEPT
        due_ms = np.where(kept, verdicts.due_ms, due_ms)
        seq = np.where(kept, verdicts.seq, seq)
        seq[verdicts.verdict >= Verdict.REJECTED] = 0
    response = pb.ScheduleResponse(
        request_no=request.request_no,
        timer_ids=ids_or_zeros(due_ms, seq, salt),
        duplicate=duplicate,
    )
    if verdicts is not None:
        response.results.extend(verdicts.verdict.tolist())
        response.other_ids = ids_or_zeros(verdicts.due_ms, verdicts.seq, salt)
    delayed = any(not len(timers.due_ms) for timers in request.timers)
    if delayed or duplicate or not np.array_equal(due_ms, part.requested_ms):
        response.due_ms.extend(due_ms.tolist())
    return response


def ids_or_zeros(due_ms: I64, seq: U64, salt: int) -> bytes:
    """Return raw ids, one after another; zeros where seq = 0."""
    raw = timer_id.encode(due_ms, seq, salt)
    if seq.all():
        return raw
    table = np.frombuffer(raw, np.uint8).reshape(-1, timer_id.SIZE).copy()
    table[seq == 0] = 0
    return table.tobytes()


def timers_of(raw: bytes, rows_max: int, salt: int) -> tuple[I64, U64, npt.NDArray[np.bool_]]:
    """Return (due_ms, seq, genuine) of raw ids, each (n,).

    Raises:
        InvalidRequestError: no ids, too many, or an incomplete one.
    """
    if not 1 <= -(-len(raw) // timer_id.SIZE) <= rows_max:
        value = f"{len(raw)} bytes"
        limit = f"a request holds 1 to {rows_max} ids of {timer_id.SIZE} bytes"
        raise InvalidRequestError("timer_ids", value, limit)
    return timer_id.decode(raw, salt)


def put_delivery(out: pb.Deliveries, delivery: Delivery, ids: LeaseIds, salt: int) -> None:
    """Put a lease and its messages into `out`. Only here are they copied from the queue's pages."""
    lease = delivery.lease
    out.epoch, out.lease_ms = delivery.epoch, lease.consumer.lease_ms
    out.lease_id = ids.id_of(lease.lease_id)
    out.handed_out_ms = delivery.at_ms
    out.handed_out_mono_ms = lease.deadline_ms - lease.consumer.lease_ms
    out.group_id = lease.group_id
    out.queue_offsets.extend(lease.offsets.tolist())
    out.attempts.extend(delivery.attempts.tolist())
    if delivery.failures.any():
        out.failures.extend(delivery.failures.tolist())
    put_messages(out, delivery.topic.queue, lease.offsets, salt)


def put_messages(out: pb.Deliveries, queue: Queue, offsets: U64, salt: int) -> None:
    """Put messages of a queue into `out`, without their offsets. All of them are in memory."""
    timer_ids: list[bytes] = []
    columns: dict[str, list[Binary]] = {name: [] for name in BYTES}
    for page, at in queue.slices(offsets):
        rows = page.rows[at.astype(np.int64)]
        timer_ids.append(timer_id.encode(rows["due_ms"], rows["seq"], salt))
        out.due_ms.extend(rows["requested_ms"].tolist())
        out.fired_at_ms.extend(page.fired_at_ms[at.astype(np.int64)].tolist())
        for name, column in columns.items():
            column.append(gather(rows, page.bufs, name))
    out.timer_ids = b"".join(timer_ids)
    put_bytes(out, *map(_join_binary, columns.values()))


def put_bytes(
    out: pb.Deliveries | pb.PendingTimers, payload: Binary, key: Binary, headers: Binary
) -> None:
    """Put the columns of n rows into a message; keys, headers and traits only if a row has one."""
    out.payload_sizes.extend(payload.sizes.tolist())
    out.payloads = bytes(payload.blob)
    if key.blob:
        out.key_sizes.extend(key.sizes.tolist())
        out.keys = bytes(key.blob)
    headers, traits = row_traits.split(headers)
    if traits is not None:
        out.priorities.extend(traits.priority.tolist())
        if traits.ordering.blob:
            out.ordering_key_sizes.extend(traits.ordering.sizes.tolist())
            out.ordering_keys = bytes(traits.ordering.blob)
    if headers.blob:
        out.headers_sizes.extend(headers.sizes.tolist())
        out.headers = bytes(headers.blob)
