"""Columns of timers: decoding inverts encoding, and malformed bytes are rejected."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from timer.model.columns import (
    ROW,
    Binary,
    Part,
    compact,
    decode_headers,
    decode_schedule,
    encode_headers,
    encode_schedule,
    gather,
    row_bytes,
)
from timer.model.units import ProducerId

quick = settings(derandomize=True, deadline=None)
texts = st.binary(max_size=6)
rows_of = st.lists(
    st.tuples(
        st.integers(0, 2**48 - 1),
        st.integers(0, 2**48 - 1),
        st.integers(1, 2**32 - 2),
        texts,
        texts,
        texts,
    ),
    max_size=5,
)
parts_of = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), rows_of, st.booleans(), st.booleans()
    ),
    min_size=1,
    max_size=4,
).filter(lambda parts: any(part[2] for part in parts))
Row = tuple[int, int, int, bytes, bytes, bytes]
Request = tuple[int, int, list[Row], bool, bool]


def part_of(request: Request) -> Part:
    producer_id, sequence, rows, keys, headers = request
    return Part(
        producer_id=ProducerId(producer_id),
        sequence=sequence,
        due_ms=np.array([row[0] for row in rows], np.int64),
        requested_ms=np.array([row[1] for row in rows], np.int64),
        topic=np.array([row[2] for row in rows], np.uint32),
        payload=Binary.of([row[3] for row in rows]),
        key=Binary.of([row[4] for row in rows]) if keys else None,
        headers=Binary.of([row[5] for row in rows]) if headers else None,
    )


def row_of(row: Any, payload: bytes) -> Row:
    def text(name: str) -> bytes:
        start = int(row[f"{name}_start"])
        return payload[start : start + int(row[f"{name}_size"])]

    return (
        int(row["due_ms"]),
        int(row["requested_ms"]),
        int(row["topic"]),
        text("payload"),
        text("key"),
        text("headers"),
    )


SAMPLE = b"".join(
    encode_schedule(
        [
            part_of((1, 7, [(20, 19, 3, b"one", b"k", b"")], True, False)),
            part_of(
                (0, 0, [(10, 10, 4, b"", b"", b""), (11, 9, 3, b"three", b"", b"h")], False, True)
            ),
        ]
    )
)


@quick
@given(parts_of)
@example([(0, 0, [(0, 0, 1, b"", b"", b"")], False, False)])
def test_schedule_gives_back_its_parts_and_rows(requests: list[Request]) -> None:
    payload = b"".join(encode_schedule([part_of(request) for request in requests]))
    schedule = decode_schedule(memoryview(payload))
    assert [tuple(part)[:3] for part in schedule.parts.tolist()] == [
        (producer_id, sequence, len(rows)) for producer_id, sequence, rows, _, _ in requests
    ]
    assert [row_of(row, payload) for row in schedule.rows] == [
        (*row[:4], row[4] if keys else b"", row[5] if headers else b"")
        for _, _, rows, keys, headers in requests
        for row in rows
    ]
    assert not schedule.rows["seq"].any()
    assert not schedule.rows["buf"].any()


@quick
@given(parts_of)
def test_size_of_a_part_bounds_what_it_adds_to_an_entry(requests: list[Request]) -> None:
    parts = [part_of(request) for request in requests if request[3] and request[4]]
    if parts:
        encoded = sum(map(len, encode_schedule(parts)))
        assert encoded == 16 + sum(part.size for part in parts)


def test_schedule_cut_at_every_byte_or_longer_is_a_value_error() -> None:
    decode_schedule(memoryview(SAMPLE))
    for size in range(len(SAMPLE)):
        with pytest.raises(ValueError, match="SCHEDULE"):
            decode_schedule(memoryview(SAMPLE[:size]))
    with pytest.raises(ValueError, match="SCHEDULE"):
        decode_schedule(memoryview(SAMPLE + b"x"))


def test_flipped_byte_of_a_schedule_is_a_value_error_or_rows_inside_the_payload() -> None:
    for position in range(len(SAMPLE)):
        for mask in (1, 0x80, 0xFF):
            flipped = bytearray(SAMPLE)
            flipped[position] ^= mask
            try:
                rows = decode_schedule(memoryview(flipped)).rows
            except ValueError:
                continue
            for name in ("payload", "key", "headers"):
                ends = rows[f"{name}_start"].astype(np.int64) + rows[f"{name}_size"]
                assert ends.max() <= len(flipped)


@quick
@given(st.binary(max_size=80))
@example(b"")
@example(bytes(16))
@example(b"\x01" + bytes(15))
@example(b"\xff" * 80)
@example(b"\x01\0\0\0" * 2 + b"\x04\0\0\0" + bytes(60))
def test_any_bytes_are_a_schedule_or_a_value_error(data: bytes) -> None:
    try:
        schedule = decode_schedule(memoryview(data))
    except ValueError:
        return
    assert len(schedule.parts) >= 1
    assert len(schedule.rows) >= 1


@pytest.mark.parametrize("parts", [[], [part_of((1, 1, [], False, False))]])
def test_schedule_without_a_part_or_a_row_is_refused(parts: list[Part]) -> None:
    with pytest.raises(ValueError, match="SCHEDULE with"):
        decode_schedule(memoryview(b"".join(encode_schedule(parts))))


def test_binary_checks_that_sizes_and_bytes_agree() -> None:
    with pytest.raises(AssertionError):
        Binary(sizes=np.array([1, 2], np.uint32), blob=b"four")


@quick
@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
@example({"a": "x" * 65_535})
def test_headers_give_back_what_was_encoded_in_their_order(headers: dict[str, str]) -> None:
    decoded = decode_headers(encode_headers(headers))
    assert list(decoded.items()) == list(headers.items())


def test_headers_cut_at_every_byte_are_a_value_error_or_the_first_of_them() -> None:
    data = encode_headers({"a": "one", "b": "two"})
    for size in range(1, len(data)):
        if size == len(encode_headers({"a": "one"})):
            assert decode_headers(data[:size]) == {"a": "one"}
        else:
            with pytest.raises(ValueError, match="head"):
                decode_headers(data[:size])


@quick
@given(st.binary(max_size=20))
@example(b"\x01\x00\xff\x00\x00")
def test_any_bytes_are_headers_or_a_value_error(data: bytes) -> None:
    try:
        assert decode_headers(data) is not None
    except ValueError:
        return


@quick
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(0, 4)), max_size=12),
    st.booleans(),
)
@example([(0, 0, 2), (0, 2, 3), (0, 5, 1)], False)
@example([(0, 3, 0), (0, 9, 0)], False)
@example([(0, 0, 2), (1, 2, 3)], False)
def test_gather_is_the_slices_one_after_the_other(
    places: list[tuple[int, int, int]], adjacent: bool
) -> None:
    bufs: dict[int, bytes | memoryview] = {
        0: bytes(range(100)),
        1: memoryview(bytes(range(100, 200))),
    }
    rows = np.zeros(len(places), ROW)
    start = 0
    for row, (buf, at, size) in zip(rows, places, strict=True):
        row["buf"], row["payload_start"], row["payload_size"] = buf, start if adjacent else at, size
        start += size
    column = gather(rows, bufs, "payload")
    expected = [
        bytes(bufs[int(r["buf"])][int(r["payload_start"]) :][: int(r["payload_size"])])
        for r in rows
    ]
    assert column.sizes.tolist() == [len(text) for text in expected]
    assert bytes(column.blob) == b"".join(expected)


def test_row_bytes_is_payload_key_and_headers_beyond_32_bits() -> None:
    rows = np.zeros(2, ROW)
    for name in ("payload", "key", "headers"):
        rows[f"{name}_size"] = [1, 2**32 - 1]
    assert row_bytes(rows).tolist() == [3, 3 * (2**32 - 1)]


def test_compact_rows_keep_their_bytes_and_let_go_of_the_rest() -> None:
    whole = b"k1" + b"p" * 1000 + b"h" + b"PAYLOAD"
    rows = np.zeros(2, ROW)
    rows["seq"] = [7, 8]
    rows["buf"] = [3, 3]
    rows["payload_start"], rows["payload_size"] = [1003, 0], [7, 0]
    rows["key_start"], rows["key_size"] = [0, 0], [2, 0]
    rows["headers_start"], rows["headers_size"] = [0, 1002], [0, 1]
    small, bufs = compact(rows, {3: whole})
    assert sum(map(len, bufs.values())) == 10
    for name in ("payload", "key", "headers"):
        one, other = gather(rows, {3: whole}, name), gather(small, bufs, name)
        assert bytes(one.blob) == bytes(other.blob)
        assert one.sizes.tolist() == other.sizes.tolist()
    assert small["seq"].tolist() == [7, 8]


def test_compact_rows_that_fill_their_buffers_are_left_alone() -> None:
    rows = np.zeros(2, ROW)
    rows["payload_start"], rows["payload_size"] = [0, 4], [4, 4]
    bufs = {0: b"aaaabbbb----"}
    same, kept = compact(rows, bufs)
    assert same is rows
    assert kept is bufs
