"""Cancelled timers against a naive model: a dict of due times."""

from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.model.columns import I64, U64
from timer.model.units import UnixMs
from timer.state import cancel_outcomes
from timer.state.cancel_outcomes import BUCKET_MS, Cancels

TIMERS = st.lists(st.tuples(st.integers(0, 5 * BUCKET_MS), st.integers(1, 50)), max_size=6)


def columns(timers: list[tuple[int, int]]) -> tuple[I64, U64]:
    due = np.array([due_ms for due_ms, _ in timers], np.int64)
    return due, np.array([seq for _, seq in timers], np.uint64)


@settings(derandomize=True, deadline=None)
@given(st.lists(TIMERS, max_size=20), st.integers(-1, 7 * BUCKET_MS))
def test_every_cancel_is_remembered_until_its_due_time_is_forgotten(
    steps: list[list[tuple[int, int]]], through_ms: int
) -> None:
    cancels, model = Cancels(), set[tuple[int, int]]()
    for timers in steps:
        fresh = sorted(set(timers) - model)
        cancels.add(*columns(fresh))
        model.update(fresh)
    cancels.forget(UnixMs(through_ms))
    asked = [*sorted(model), (1, 51), (5 * BUCKET_MS, 0)]
    for timer, found in zip(asked, cancels.contain(*columns(asked)).tolist(), strict=True):
        if timer not in model:
            assert not found, timer
        elif timer[0] > through_ms:
            assert found, timer
        elif timer[0] <= through_ms - BUCKET_MS:
            assert not found, timer


def test_sum_does_not_depend_on_order_and_forgets_what_is_forgotten() -> None:
    one, other = Cancels(), Cancels()
    one.add(*columns([(5, 1), (70_000, 2), (6, 3)]))
    other.add(*columns([(70_000, 2)]))
    other.add(*columns([(6, 3), (5, 1)]))
    assert one.sum == other.sum != 0
    one.forget(UnixMs(BUCKET_MS))
    assert one.sum != other.sum
    one.forget(UnixMs(10 * BUCKET_MS))
    assert one.sum == 0


class Unwalked(dict[int, list[U64]]):
    """Buckets that nobody may go through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError


def test_forgetting_visits_what_it_forgets_and_no_other_bucket() -> None:
    cancels = Cancels(buckets=Unwalked())
    minutes = [(7 * step) % 1_009 for step in range(1_009)]
    for minute in minutes:
        cancels.add(*columns([(minute * BUCKET_MS, minute + 1)]))
    for through in (-1, 0, 1, 2, 500, 500, 1_008, 2_000):
        cancels.forget(UnixMs(through * BUCKET_MS))
        left = [minute for minute in minutes if minute >= through]
        assert [*dict.__iter__(cancels.buckets)] == left  # in the order in which they came
        plain = Cancels()
        plain.add(*columns([(minute * BUCKET_MS, minute + 1) for minute in left]))
        assert cancels.sum == plain.sum
    assert cancels.sum == 0


def test_many_cancels_of_one_minute_lie_in_few_arrays_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_outcomes, "ARRAY_ROWS_MAX", 16)
    cancels = Cancels()
    for seq in range(100, 0, -1):
        cancels.add(*columns([(7, seq)]))
    assert cancels.contain(*columns([(7, seq) for seq in range(1, 101)])).all()
    assert not cancels.contain(*columns([(7, 0), (7, 101)])).any()
    [arrays] = cancels.buckets.values()
    assert [len(array) for array in arrays] == [16] * 6 + [4]
    assert all((array[1:] > array[:-1]).all() for array in arrays)


def test_nothing_asked_nothing_found() -> None:
    cancels = Cancels()
    cancels.add(*columns([]))
    assert cancels.buckets == {}
    cancels.add(*columns([(1, 3)]))
    assert cancels.contain(*columns([])).tolist() == []
