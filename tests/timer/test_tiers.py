"""Tiers against a sorted list, with small tiers and chunks."""

import random
from typing import Any

import numpy as np
import pytest

from tests.seeds import seeds
from timer.model.firing_order import sort_pairs
from timer.pending.memory import tiers as tiers_module
from timer.pending.memory.tiers import FAN, FRESH_MAX, Tiers

START = (0, -1)
ALL = 1 << 20


def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def add(tiers: Tiers, pairs: list[tuple[int, int]]) -> None:
    due, ref = column([due for due, _ in pairs]), column([ref for _, ref in pairs])
    tiers.add(due, ref, int(due.min()))


def taken(
    tiers: Tiers, after: tuple[int, int], until: int, count: int = ALL
) -> list[tuple[int, int]]:
    """Return the rows of repeated peeks, as a FIRE makes them."""
    found: list[tuple[int, int]] = []
    more = True
    while more and len(found) < count:
        due, ref, more = tiers.peek(after, until, count - len(found))
        found += zip(due.tolist(), ref.tolist(), strict=True)
        assert len(due) or not more
        after = found[-1] if found else after
    return found


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_pairs_come_in_order_whatever_is_added_between_peeks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(tiers_module, "FAN", 3)
    monkeypatch.setattr(tiers_module, "FRESH_MAX", 6)
    monkeypatch.setattr(tiers_module, "CHUNK", chance.choice([1, 3, 1_000]))
    tiers, model = Tiers(), set[tuple[int, int]]()
    position, refs = START, iter(chance.sample(range(100_000), 100_000))
    for _ in range(200):
        fresh = [
            (position[0] + chance.choice([1, 2, 5, 50]), next(refs))
            for _ in range(chance.randint(1, 10))
        ]
        add(tiers, fresh)
        model |= set(fresh)
        asked = chance.sample(sorted(p for p in model if p > position), chance.choice([0, 1, 1]))
        asked += fresh[: chance.choice([1, 10])]
        asked += [(due + chance.choice([0, 1]), next(refs)) for due, _ in asked]
        due, ref = column([due for due, _ in asked]), column([ref for _, ref in asked])
        assert tiers.contains(due, ref).tolist() == [pair in model for pair in asked]
        until = position[0] + chance.choice([0, 1, 5])
        count = chance.choice([1, 3, 20, ALL])
        found = taken(tiers, position, until, count)
        assert found == sorted(pair for pair in model if pair[0] <= until)[:count]
        position = found[-1] if len(found) == count else (until, ALL)
        tiers.drop(position)
        model = {pair for pair in model if pair > position}
        wanted = chance.sample(sorted(model), min(5, len(model)))
        asked = [*wanted, (position[0] + 1, ALL + 1), (1 << 40, 5)]
        due, ref = column([due for due, _ in asked]), column([ref for _, ref in asked])
        assert tiers.contains(due, ref).tolist() == [pair in model for pair in asked]
    assert taken(tiers, position, 1 << 40) == sorted(model)


def test_pairs_too_far_apart_to_pack_into_one_word_are_sorted_all_the_same() -> None:
    tiers = Tiers()
    pairs = [(1 << 47, 1 << 40), (5, 1 << 47), (5, 3), (1 << 47, 0)]
    add(tiers, pairs)
    assert taken(tiers, START, 1 << 48) == sorted(pairs)


def test_million_due_at_once_become_ready_a_chunk_at_a_time() -> None:
    tiers = Tiers()
    places = np.arange(1_000_000)
    for start in range(0, len(places), 10_000):
        tiers.add(np.full(10_000, 7), places[start : start + 10_000], 7)
    _, ref, more = tiers.peek(START, 7, 65_536)
    assert more
    assert 0 < len(ref) < 1_000_000
    assert ref.tolist() == list(range(len(ref)))
    assert len(tiers._ready.due) < 300_000
    assert len(taken(tiers, START, 7, 65_536)) == 65_536


def test_next_due_looks_through_fresh_pairs_that_came_one_by_one_as_one_array() -> None:
    chance = random.Random(4)
    tiers, pairs = Tiers(), [(chance.randrange(1 << 20), ref) for ref in range(5_000)]
    for pair in pairs:
        add(tiers, [pair])
    assert len(tiers._fresh) == len(pairs)
    alive = np.ones(len(pairs), np.bool_)
    for due, ref in sorted(pairs)[:50]:
        assert tiers.next_due(alive) == due
        assert len(tiers._fresh) == 1
        alive[ref] = False
    add(tiers, [(0, 0)])
    assert taken(tiers, START, ALL << 1) == sorted([*pairs, (0, 0)])


def test_tiers_are_merged_as_sorted_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = list[tuple[int, bool]]()

    def noted(due: Any, ref: Any, *, in_runs: bool = False) -> Any:
        sorts.append((len(due), in_runs))
        return sort_pairs(due, ref, in_runs=in_runs)

    monkeypatch.setattr(tiers_module, "sort_pairs", noted)
    chance, tiers = np.random.default_rng(4), Tiers()
    pairs = FAN**2 * FRESH_MAX
    for start in range(0, pairs, FRESH_MAX):
        due = chance.integers(0, 1 << 20, FRESH_MAX)
        tiers.add(due, np.arange(start, start + FRESH_MAX), int(due.min()))
    assert [len(tier.due) for tier in tiers._tiers] == [pairs]
    assert (np.diff(tiers._tiers[0].due) >= 0).all()
    assert max(size for size, in_runs in sorts if not in_runs) == FRESH_MAX
