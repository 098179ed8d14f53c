"""Requests are bounded in what looking at them costs."""

import time

import pytest

from cluster.wire import HEADERS_MAX, RequestLimits, count_texts, part_of, put_bytes
from tests.timer.leading import Play
from timer.columns import Binary, encode_headers
from timer.errors import InvalidRequest
from timer.leader import Now
from timer.units import MonoMs, TopicId, UnixMs
from timerclient.proto import timer_pb2 as pb


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


def test_request_with_too_many_headers_in_all_is_refused_though_no_row_has_too_many() -> None:
    limits = RequestLimits(
        key_bytes_max=100,
        headers_bytes_max=32_768,
        request_rows_max=100,
        request_bytes_max=1 << 24,
    )
    row = bytes(2 * (HEADERS_MAX // 4))  # empty texts, a quarter of the limit
    timers = pb.TimerColumns(topic="t", delay_ms=[0], payload_sizes=[0] * 5)
    timers.headers_sizes.extend([len(row)] * 5)
    timers.headers = row * 5
    request = pb.ScheduleRequest(timers=[timers])
    now = Now(MonoMs(0), UnixMs(1))
    with pytest.raises(InvalidRequest, match=f"at most {HEADERS_MAX}"):
        part_of(request, {"t": TopicId(1)}, limits, Play().leader, now)
