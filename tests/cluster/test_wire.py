"""Requests are bounded in what looking at them costs."""

import time

import pytest

from cluster.wire import HEADERS_MAX, count_texts
from timer.columns import encode_headers


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
