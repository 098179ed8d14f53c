"""Frames: cut or flipped bytes are never read as an entry."""

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.entries.entry_frame import (
    HEADER_SIZE,
    PAYLOAD_SIZE_MAX,
    Damage,
    Entry,
    EntryKind,
    FrameHead,
    encode,
    frame_at,
    frames,
    head_at,
)
from timer.model.units import Epoch, LogIndex, UnixMs

entries = st.tuples(
    st.sampled_from(EntryKind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.binary(max_size=50), max_size=3),
)
SAMPLE = encode(EntryKind.FIRE, Epoch(3), LogIndex(7), UnixMs(1234), [b"pay", b"load"])


def framed(kind: EntryKind, epoch: int, index: int, time_ms: int, payload: list[bytes]) -> bytes:
    return encode(kind, Epoch(epoch), LogIndex(index), UnixMs(time_ms), payload)


def resealed(frame: bytearray) -> memoryview:
    """Return the frame with the checksum of its present bytes."""
    frame[:4] = struct.pack("<I", zlib.crc32(memoryview(frame)[4:]))
    return memoryview(frame)


@settings(derandomize=True, deadline=None)
@given(st.lists(entries, max_size=5))
def test_frames_give_back_what_was_encoded(
    items: list[tuple[EntryKind, int, int, int, list[bytes]]],
) -> None:
    data = b"".join(framed(*item) for item in items)
    found = [
        (e.kind, e.epoch, e.index, e.time_ms, bytes(e.payload)) for e in frames(memoryview(data))
    ]
    assert found == [(*item[:4], b"".join(item[4])) for item in items]


def test_frame_layout_is_the_documented_one() -> None:
    # On disk: this value can never change without a new version.
    assert SAMPLE.hex() == (
        "d9e09ff407000000544501040000000003000000000000000700000000000000d2040000000000007061796c6f6164"
    )


def test_frame_cut_at_every_byte_is_damage() -> None:
    whole = memoryview(SAMPLE)
    assert isinstance(frame_at(whole, 0), Entry)
    assert frame_at(whole, len(whole)) is None
    for size in range(1, len(whole)):
        assert isinstance(frame_at(whole[:size], 0), Damage), size
        assert head_at(whole[:size], 0) is None, size
    assert head_at(whole, len(whole)) is None
    head = FrameHead(EntryKind.FIRE, LogIndex(7), UnixMs(1234), len(b"payload"))
    assert head_at(whole, 0) == head


def test_frame_with_any_byte_flipped_is_damage() -> None:
    for position in range(len(SAMPLE)):
        for mask in (1, 0x80, 0xFF):
            flipped = bytearray(SAMPLE)
            flipped[position] ^= mask
            damage = frame_at(memoryview(flipped), 0)
            assert isinstance(damage, Damage), (position, mask)
            assert damage.position == 0


@pytest.mark.parametrize(
    ("position", "value", "why"),
    [
        (10, 2, "entry version 2"),
        (11, 0, "entry kind 0"),
        (11, 200, "entry kind 200"),
        (8, 0, "magic"),
    ],
)
def test_whole_frame_of_another_version_or_kind_is_damage_that_says_so(
    position: int, value: int, why: str
) -> None:
    frame = bytearray(SAMPLE)
    frame[position] = value
    damage = frame_at(resealed(frame), 0)
    assert isinstance(damage, Damage)
    assert why in damage.why
    assert head_at(memoryview(frame), 0) is None
    with pytest.raises(ValueError, match=why):
        list(frames(memoryview(frame)))


def test_length_is_bounded_before_it_is_trusted() -> None:
    for length in (PAYLOAD_SIZE_MAX + 1, 2**32 - 1, len(SAMPLE) - HEADER_SIZE + 1):
        frame = bytearray(SAMPLE)
        frame[4:8] = struct.pack("<I", length)
        assert isinstance(frame_at(resealed(frame), 0), Damage)


def test_damage_says_where_it_is_after_whole_frames() -> None:
    data = memoryview(SAMPLE + SAMPLE[:-1])
    with pytest.raises(ValueError, match=f"byte {len(SAMPLE)}"):
        list(frames(data))


def test_payload_has_at_most_its_limit() -> None:
    payload = [bytes(PAYLOAD_SIZE_MAX)]
    whole = frame_at(memoryview(framed(EntryKind.SCHEDULE, 1, 1, 1, payload)), 0)
    assert isinstance(whole, Entry)
    with pytest.raises(AssertionError):
        framed(EntryKind.SCHEDULE, 1, 1, 1, [*payload, b"x"])
