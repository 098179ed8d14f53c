"""Timer ids: exact, sorted as they fire, and hard to mistype."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.model.timer_errors import InvalidRequestError
from timer.model.timer_id import SEQ_MAX, SIZE, TEXT_SIZE, decode, encode, from_text, mix, to_text
from timer.model.units import DUE_MS_MAX
from timerclient.values import ids as client_ids

quick = settings(derandomize=True, deadline=None)
keys = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0, 1, DUE_MS_MAX - 1, DUE_MS_MAX]), st.integers(0, DUE_MS_MAX)),
        st.one_of(st.sampled_from([0, 1, SEQ_MAX - 1, SEQ_MAX]), st.integers(0, SEQ_MAX)),
    ),
    max_size=8,
)
salts = st.integers(0, 2**64 - 1)


def ids_of(pairs: list[tuple[int, int]], salt: int) -> list[bytes]:
    due = np.array([due for due, _ in pairs], np.int64)
    seq = np.array([seq for _, seq in pairs], np.uint64)
    raw = encode(due, seq, salt)
    return [raw[at : at + SIZE] for at in range(0, len(raw), SIZE)]


@quick
@given(keys, salts)
def test_ids_give_back_due_and_seq_and_are_genuine(pairs: list[tuple[int, int]], salt: int) -> None:
    due, seq, genuine = decode(b"".join(ids_of(pairs, salt)), salt)
    assert list(zip(due.tolist(), seq.tolist(), strict=True)) == pairs
    assert genuine.all()


@quick
@given(keys, salts)
def test_ids_and_their_texts_sort_as_their_timers_fire(
    pairs: list[tuple[int, int]], salt: int
) -> None:
    pairs = sorted(set(pairs))
    ids = ids_of(pairs, salt)
    assert ids == sorted(ids)
    texts = [to_text(raw) for raw in ids]
    assert texts == sorted(texts)
    assert [from_text(text) for text in texts] == ids
    assert [client_ids.from_text(text) for text in texts] == ids  # the client has its own
    assert [client_ids.to_text(raw) for raw in ids] == texts
    assert {len(text) for text in texts} <= {TEXT_SIZE}


def test_id_with_any_bit_flipped_or_of_another_cluster_is_not_genuine() -> None:
    (raw,) = ids_of([(1_700_000_000_000, 12_345)], salt=99)
    for bit in range(8 * SIZE):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not decode(bytes(flipped), 99)[2].any(), bit
    assert not decode(raw, 98)[2].any()


def test_text_is_read_in_either_case() -> None:
    (raw,) = ids_of([(1_700_000_000_000, 12_345)], salt=1)
    assert from_text(to_text(raw).upper()) == raw


@pytest.mark.parametrize(
    "text", ["", "0" * 23, "0" * 25, "w" * 24, "0" * 16 + "====", "é" * 24, "0" * 23 + "\ud800"]
)
def test_text_that_is_no_id_is_an_invalid_request(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        from_text(text)


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1])
def test_bytes_that_are_no_whole_number_of_ids_are_an_invalid_request(size: int) -> None:
    with pytest.raises(InvalidRequestError):
        decode(bytes(size), 0)


def test_mix_is_splitmix64() -> None:
    # The generator's published first outputs for the seed 0 are mix of 0, golden, 2 golden, …
    golden = 0x9E3779B97F4A7C15
    inputs = np.array([0, golden, 2 * golden % 2**64], np.uint64)
    assert [hex(value) for value in mix(inputs).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
