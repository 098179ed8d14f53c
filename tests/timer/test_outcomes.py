"""Recent cancels against a naive model: a dict of when each was cancelled."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.outcomes import ARRAYS_MAX, BUCKET_MS, HORIZON_MS, Cancels
from timer.units import UnixMs


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * BUCKET_MS), st.lists(st.integers(1, 50), max_size=5)),
        max_size=25,
    ),
    st.integers(0, HORIZON_MS + 2 * BUCKET_MS),
)
def test_every_cancel_is_remembered_for_the_horizon(
    steps: list[tuple[int, list[int]]], later_ms: int
) -> None:
    cancels, cancelled_at, now = Cancels(), dict[int, int](), 1_000_000
    for gap_ms, seqs in steps:
        now += gap_ms
        cancels.add(np.array(seqs, np.uint64), UnixMs(now))
        cancelled_at.update(dict.fromkeys(seqs, now))
        assert cancels.contains(np.array([0, 51, 2**64 - 1], np.uint64)).tolist() == [False] * 3
    now += later_ms
    cancels.expire(UnixMs(now))
    asked = list(range(51))
    found = cancels.contains(np.array(asked, np.uint64)).tolist()
    for seq, remembered in zip(asked, found, strict=True):
        age_ms = now - cancelled_at.get(seq, -(10**9))
        if age_ms <= HORIZON_MS:
            assert remembered, (seq, age_ms)
        if age_ms > HORIZON_MS + BUCKET_MS:
            assert not remembered, (seq, age_ms)


def test_many_cancels_of_one_minute_are_merged_before_they_are_searched() -> None:
    cancels = Cancels()
    for seq in range(ARRAYS_MAX + 5, 0, -1):
        cancels.add(np.array([seq], np.uint64), UnixMs(7))
    assert cancels.contains(np.arange(1, ARRAYS_MAX + 6, dtype=np.uint64)).all()
    assert [len(arrays) for arrays in cancels.buckets.values()] == [1]


def test_nothing_asked_nothing_found() -> None:
    cancels = Cancels()
    cancels.add(np.zeros(0, np.uint64), UnixMs(1))
    assert cancels.buckets == {}
    cancels.add(np.array([3], np.uint64), UnixMs(1))
    assert cancels.contains(np.zeros(0, np.uint64)).tolist() == []
