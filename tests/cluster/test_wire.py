"""The cost of decoding a request is bounded."""

import time

import pytest

from cluster.api.wire_rows import (
    COLUMNS_MAX,
    HEADERS_MAX,
    RequestLimits,
    check_request,
    count_texts,
    part_of,
    pieces_of,
    put_bytes,
    wanted_times_of,
)
from tests.timer.leading import Play
from timer.leader.leader import Leader
from timer.model.columns import Binary, Part, encode_headers
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import MonoMs, Now, TopicId, UnixMs
from timerclient.proto import timer_pb2 as pb
from timerclient.streams import producer

LIMITS = RequestLimits(
    key_bytes_max=100,
    headers_bytes_max=32_768,
    request_rows_max=65_536,
    request_bytes_max=1 << 24,
)


def test_texts_of_a_row_are_counted() -> None:
    blob = b"xx" + encode_headers({"a": "1", "bb": ""}) + b"y"
    assert count_texts(blob, 2, len(blob) - 1, HEADERS_MAX) == 4
    assert count_texts(blob, 2, 2, HEADERS_MAX) == 0


def test_counting_stops_at_the_limit_whatever_follows() -> None:
    # Empty texts are two bytes each: a request could hold eight million.
    blob = bytes(16 << 20)
    began_s = time.process_time()
    with pytest.raises(ValueError, match=f"at most {HEADERS_MAX}"):
        count_texts(blob, 0, len(blob), HEADERS_MAX)
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"\x01\x00a", "without a value"),
        (b"\x05\x00a", "headers end"),
        (b"\x01\x00\xff\x00\x00", "utf-8"),
        (b"\x01", "headers end"),
    ],
)
def test_malformed_headers_are_refused(blob: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        count_texts(blob, 0, len(blob), HEADERS_MAX)


@pytest.mark.parametrize("message", [pb.Deliveries, pb.PendingTimers])
def test_message_has_a_column_of_keys_or_headers_only_where_a_row_has_one(
    message: type[pb.Deliveries | pb.PendingTimers],
) -> None:
    payload, nothing = Binary.of([b"p", b""]), Binary.of([b"", b""])
    out = message()
    put_bytes(out, payload, nothing, nothing)
    assert out == message(payload_sizes=[1, 0], payloads=b"p")
    put_bytes(out, nothing, Binary.of([b"", b"key"]), Binary.of([b"hd", b""]))
    assert (list(out.key_sizes), out.keys) == ([0, 3], b"key")
    assert (list(out.headers_sizes), out.headers) == ([2, 0], b"hd")


def columns_of(request: pb.ScheduleRequest, leader: Leader, now: Now) -> Part:
    topics = {"t": TopicId(1)}
    return part_of(request, topics, [*pieces_of(request, topics, LIMITS, leader, now)], leader, now)


@pytest.mark.parametrize(("columns", "rows"), [(1, 5), (5, 1)])
def test_request_with_too_many_headers_in_all_is_refused_though_no_row_has_too_many(
    columns: int, rows: int
) -> None:
    row = b"\x01\0n\0\0" * (HEADERS_MAX // 8)  # names and empty values, a quarter of the limit
    request = pb.ScheduleRequest()
    for _ in range(columns):
        timers = request.timers.add(topic="t", delay_ms=[0], payload_sizes=[0] * rows)
        timers.headers_sizes.extend([len(row)] * rows)
        timers.headers = row * rows
    now = Now(MonoMs(0), UnixMs(1))
    check_request(request, LIMITS)
    with pytest.raises(InvalidRequestError, match=f"at most {HEADERS_MAX}"):
        columns_of(request, Play().leader, now)
    if columns > 1:
        del request.timers[-1]  # as many as may be, in several columns
        part = columns_of(request, Play().leader, now)
        assert part.headers is not None
        assert part.headers.blob == row * 4


def test_traits_need_a_feature_level_that_all_nodes_know() -> None:
    leader, now = Play().leader, Now(MonoMs(0), UnixMs(1))
    request = pb.ScheduleRequest()
    request.timers.add(topic="t", delay_ms=[0], payload_sizes=[0], priorities=[7])
    assert leader.machine.level == 1
    with pytest.raises(InvalidRequestError, match=r"set at feature level 1.*needs feature level 2"):
        columns_of(request, leader, now)
    leader.machine.level = 2
    headers = columns_of(request, leader, now).headers
    assert headers is not None
    out = pb.Deliveries()
    put_bytes(out, Binary.of([b""]), Binary.of([b""]), headers)
    assert ([*out.priorities], out.headers) == ([7], b"")


def test_request_of_too_many_columns_is_refused_by_field_value_and_limit() -> None:
    column = pb.TimerColumns(topic="t", delay_ms=[0], payload_sizes=[0])
    check_request(pb.ScheduleRequest(timers=[column] * COLUMNS_MAX), LIMITS)
    with pytest.raises(InvalidRequestError, match=f"at most {COLUMNS_MAX} columns") as refused:
        check_request(pb.ScheduleRequest(timers=[column] * (COLUMNS_MAX + 1)), LIMITS)
    assert refused.value.field == "timers"
    assert f"{COLUMNS_MAX + 1} columns" in str(refused.value)


@pytest.mark.parametrize("seconds", [0, 1, 1_795_824_060, 10**10 - 1])
def test_due_times_of_no_time_or_unix_seconds_are_refused(seconds: int) -> None:
    one = pb.TimerColumns(due_ms=[seconds], payload_sizes=[0])
    with pytest.raises(InvalidRequestError, match=f"due_ms = {seconds}: .* a delay of 0 means"):
        wanted_times_of(one, 1)
    many = pb.RescheduleRequest(due_ms=[10**12, 10**10, seconds])
    with pytest.raises(InvalidRequestError) as refused:
        wanted_times_of(many, 3)
    assert refused.value.row == 2
    delays = pb.TimerColumns(delay_ms=[seconds], payload_sizes=[0])
    assert wanted_times_of(delays, 1).values.tolist() == [seconds]


def test_client_puts_no_more_columns_into_a_request_than_are_taken() -> None:
    assert producer.COLUMNS_MAX <= COLUMNS_MAX
