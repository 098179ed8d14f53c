"""Columns of a group against a dict; the memory that they take, and the work of a change."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.ready import group_column
from timer.ready.group import FLAGS, NUMBERS, TIMES
from timer.ready.group_column import GroupColumn, empty_column

CHUNK = 1 << GroupColumn.bits


def u64(values: Any) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def values_of(column: GroupColumn, floor: int, end: int) -> dict[int, int]:
    values = column.of(u64(range(floor, end))).tolist()
    return {floor + at: int(value) for at, value in enumerate(values) if value}


step_of = st.tuples(
    st.lists(st.integers(0, 90), min_size=1, max_size=30, unique=True),
    st.integers(0, 3),
    st.integers(0, 20),
    st.booleans(),
)


@pytest.mark.parametrize("dtype", [FLAGS, NUMBERS, TIMES])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sampled_from([2, 6]), st.integers(0, 9), st.lists(step_of, max_size=8))
def test_column_agrees_with_a_dict(
    dtype: np.dtype[Any], bits: int, floor: int, steps: list[tuple[list[int], int, int, bool]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupColumn, "bits", bits)
        column, model = empty_column(dtype), dict[int, int]()
        for at, number, further, many in steps:
            offsets = [floor + each for each in at]
            value = min(number, 1) if dtype == FLAGS else number
            values = np.full(len(offsets), value, dtype) if many else value
            frozen, before = column.freeze(floor), dict(model)
            column = column.put(u64(offsets), values, floor)
            model |= dict.fromkeys(offsets, value)
            model = {offset: each for offset, each in model.items() if each}
            assert_agrees(column, model, floor)
            again = GroupColumn.unpack(frozen.pack(), dtype, floor)
            assert values_of(again, floor, floor + 200) == before
            assert_agrees(again, before, floor)
            floor += further
            model = {offset: each for offset, each in model.items() if offset >= floor}
            assert_agrees(column, model, floor)
        assert not empty_column(dtype).value_count


def assert_agrees(column: GroupColumn, model: dict[int, int], floor: int) -> None:
    end = max(model, default=floor) + 20
    assert values_of(column, floor, end) == model
    assert {*column.offsets().tolist()} - {*range(floor)} == model.keys()
    assert {*column.offsets(floor + 9).tolist()} >= {o for o in model if o < floor + 9}
    for start in range(floor, end, 3):
        assert column.count_from(start) == sum(offset >= start for offset in model)
        span = column.span(start, end).tolist()
        assert span == [model.get(offset, 0) for offset in range(start, end)]
        if column.span(0, 1).dtype == FLAGS:
            unset = [offset for offset in range(start, end) if offset not in model]
            assert column.first_unset(start) == unset[0]
            for count in (0, 1, 3, 300):
                assert column.unset_offsets(start, end, count).tolist() == unset[:count]


@pytest.mark.parametrize("far", [2**63, 2**64 - 1])
def test_offsets_outside_are_unset(far: int) -> None:
    for offsets in ([5, 6], [5, CHUNK * 2 + 7]):
        column = empty_column(FLAGS).put(u64(offsets), 1, 5)
        assert column.of(u64([0, 4, 5, far, 40 * CHUNK])).tolist() == [0, 0, 1, 0, 0]


def test_flags_of_millions_take_memory_only_where_some_differ() -> None:
    column = empty_column(FLAGS)
    for start in range(1, 40 * CHUNK, 50_000):  # the first one stays unset
        column = column.put(np.arange(start, start + 50_000, dtype=np.uint64), 1, 0)
        assert column.nbytes <= 3 * CHUNK
    assert column.value_count >= 39 * CHUNK
    times = empty_column(TIMES).put(u64([0, 30 * CHUNK]), 7, 0)
    assert times.nbytes == 2 * 8 * CHUNK
    times = times.put(u64([0]), 0, 0)
    assert times.nbytes == 8 * CHUNK
    assert times.put(u64([30 * CHUNK]), 0, 0) is empty_column(TIMES)


def test_change_after_a_freeze_copies_only_its_chunk() -> None:
    column = empty_column(NUMBERS).put(np.arange(0, 20 * CHUNK, 2, dtype=np.uint64), 3, 0)
    frozen, before = column.freeze(0), [*column._chunks]
    column.put(u64([5 * CHUNK + 1]), 9, 0)
    changed = [at for at, chunk in enumerate(column._chunks) if chunk is not before[at]]
    assert changed == [5]
    assert all(not chunk.flags.writeable for chunk in before)
    column.put(u64([5 * CHUNK + 3]), 9, 0)
    assert column._chunks[5].flags.writeable, "a second change copies nothing"
    again = GroupColumn.unpack(frozen.pack(), NUMBERS, 0)
    assert (again.value_count, again.top) == (10 * CHUNK, 20 * CHUNK - 1)


def test_short_array_follows_the_cursor() -> None:
    column = empty_column(FLAGS)
    for start in range(1, 1_000_000, 1000):
        column = column.put(np.arange(start, start + 1000, dtype=np.uint64), 1, start)
        assert column.nbytes <= 4096
    assert column.nbytes > group_column.SIZE_MIN
