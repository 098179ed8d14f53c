"""The wheel: the same results as tiers, with far rows unsorted."""

import random

import numpy as np
import pytest

from tests.seeds import seeds
from timer.model.columns import I64
from timer.model.units import DUE_MS_MAX
from timer.pending.memory import wheel as wheel_module
from timer.pending.memory.tiers import Tiers
from timer.pending.memory.wheel import FAR_MAX, NEAR_BITS, Wheel

ALL = 1 << 30
FAR = [1, 100, 20_000, 40_000, 1 << 20, (1 << 20) + 1, 1 << 26, 1 << 33, 1 << 47]


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_wheel_and_tiers_show_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(wheel_module, "FAR_MAX", chance.choice([1, 7, 1_000]))
    now = chance.choice([0, 5, (1 << 41) - 3])
    wheel, tiers = Wheel(now), Tiers()
    alive = np.ones(10_000, np.bool_)
    position, ref = (now, ALL), 0
    for _ in range(150):
        due = np.array(
            [
                min(now + chance.choice(FAR) + chance.randrange(5), DUE_MS_MAX)
                for _ in range(chance.randint(1, 20))
            ]
        )
        places = np.arange(ref, ref + len(due))
        ref += len(due)
        for index in (wheel, tiers):
            index.add(due, places, int(due.min()))
        alive[chance.sample(range(ref), min(ref, 6))] = False
        assert wheel.next_due(alive) == tiers.next_due(alive)
        if chance.random() < 0.5:
            wheel.keep_up(alive)
            assert wheel.next_due(alive) == tiers.next_due(alive)
        now += chance.choice([0, 1, 50, 16_384, 1 << 18, 1 << 27])
        ours, theirs = (index.peek(position, now, ALL) for index in (wheel, tiers))
        # Dead pairs may have been skipped on the way: only live ones must be shown.
        live = [
            [(d, r) for d, r in zip(due, ref, strict=True) if alive[r]]
            for due, ref, _ in (ours, theirs)
        ]
        assert live[0] == live[1]
        position = (now, ALL)
        for index in (wheel, tiers):
            index.drop(position)


def test_next_due_looks_through_far_rows_that_came_one_by_one_as_one_array() -> None:
    chance = random.Random(3)
    wheel, dues = Wheel(0), [(1 << 20) + chance.randrange(1 << 30) for _ in range(5_000)]
    alive = np.ones(len(dues), np.bool_)
    for ref, due in enumerate(dues):
        wheel.add(np.array([due]), np.array([ref]), due)
        if ref % 500 == 0:
            assert wheel.next_due(alive) == min(dues[: ref + 1])
    assert len(wheel._far) > 1
    for ref in sorted(range(len(dues)), key=dues.__getitem__)[:50]:
        assert wheel.next_due(alive) == dues[ref]
        assert len(wheel._far) == 1
        alive[ref] = False
    wheel._spread()
    left = [due for due, is_alive in zip(dues, alive, strict=True) if is_alive]
    assert wheel.next_due(alive) == min(left)
    until = min(left) + (1 << 26)
    shown, refs, more = wheel.peek((0, 0), until, ALL)
    assert not more
    assert [d for d, r in zip(shown, refs, strict=True) if alive[r]] == sorted(
        due for due in left if due <= until
    )


def test_far_rows_lie_unsorted_in_few_slots() -> None:
    wheel = Wheel(0)
    chance = np.random.default_rng(1)
    for start in range(0, 100_000, 1_000):
        due = chance.integers(1 << 15, 1 << 36, 1_000)
        wheel.add(due, np.arange(start, start + 1_000), int(due.min()))
    assert len(wheel._slots) < 64 * 4
    assert wheel._near.next_due(np.ones(100_000, np.bool_)) is None


def test_slots_start_after_the_near_window_and_hold_no_earlier_row() -> None:
    wheel = Wheel(12_345_678)
    due = np.random.default_rng(2).integers(12_345_679, DUE_MS_MAX, 50_000)
    wheel.add(due, np.arange(len(due)), int(due.min()))
    for now in (12_345_678, 1 << 30, 1 << 40):
        wheel.peek((0, 0), now, 1)
        assert wheel._near_end > now + (1 << NEAR_BITS)
        for start, chunks in wheel._slots.items():
            assert start >= wheel._near_end
            assert all((chunk >= start).all() for chunk, _ in chunks)


def test_rows_of_a_slot_that_is_reached_are_moved_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed, place = list[int](), Wheel._place

    def counted(self: Wheel, chunks: list[tuple[I64, I64]]) -> None:
        placed.append(sum(len(due) for due, _ in chunks))
        place(self, chunks)

    wheel, count, due = Wheel(0), 10 * FAR_MAX, 600_000
    alive = np.ones(count, np.bool_)
    for start in range(0, count, 1_024):
        wheel.add(np.full(1_024, due), np.arange(start, start + 1_024), due)
    monkeypatch.setattr(Wheel, "_place", counted)
    now = 0
    while now < due:  # through slots of 17 minutes and of 16 seconds, into the near window
        now += 1_000
        _, refs, _ = wheel.peek((0, 0), min(now, due - 1), ALL)
        assert not len(refs)
        while wheel.keep_up(alive):
            pass
        assert wheel.next_due(alive) == due
    assert max(placed) < 2 * FAR_MAX
    assert sum(placed) >= count
    placed.clear()
    found = 0
    while found < count:
        _, refs, _ = wheel.peek((due, found - 1), due, ALL)
        assert refs[0] == found
        found += len(refs)
    assert not placed
