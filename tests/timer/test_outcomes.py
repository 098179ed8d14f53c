"""Outcomes of ended timers against a naive model: a dict of seqs."""

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timer.machine_world import begun, cancel, schedule
from tests.timer.machines import START_MS
from timer.model.columns import U64
from timer.model.units import Seq, UnixMs
from timer.state import cancel_outcomes
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    DROPPED,
    NOT_FOUND,
)
from timer.state.cancel_outcomes import CHUNK_SIZE, LOWS_MAX, Outcomes

KINDS = (ALREADY_FIRED, ALREADY_CANCELLED, DROPPED)
CHUNK = 65_536
EDGES = [1, 2, 7, 8, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9, 1 << 40]
TIMERS = st.lists(
    st.tuples(st.sampled_from(EDGES) | st.integers(1, 40), st.integers(0, 9)),
    max_size=6,
    unique_by=lambda timer: timer[0],
)


def u64(*seqs: int) -> U64:
    return np.array(seqs, np.uint64)


def add(outcomes: Outcomes, outcome: int, *timers: tuple[int, int]) -> None:
    """Record (seq, until)."""
    outcomes.add(
        outcome, u64(*(seq for seq, _ in timers)), np.array([until for _, until in timers])
    )


def results_of(outcomes: Outcomes, *seqs: int) -> list[int]:
    results = np.full(len(seqs), NOT_FOUND, np.uint8)
    outcomes.fill(u64(*seqs), results)
    return results.tolist()


def restored(outcomes: Outcomes) -> Outcomes:
    again = Outcomes()
    again.restore(msgpack.unpackb(msgpack.packb(outcomes.pack())))
    return again


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), TIMERS), max_size=20), st.integers(-1, 10))
def test_every_outcome_is_known_until_its_time_and_its_chunk_not_for_ever(
    steps: list[tuple[int, list[tuple[int, int]]]], before: int
) -> None:
    outcomes, model = Outcomes(), dict[int, tuple[int, int]]()
    for outcome, timers in steps:
        fresh = [timer for timer in timers if timer[0] not in model]
        add(outcomes, outcome, *fresh)
        model |= {seq: (outcome, until) for seq, until in fresh}
    asked = [*model, 41, 3 * CHUNK, 0]
    assert results_of(outcomes, *asked[:-3]) == [outcome for outcome, _ in model.values()]
    outcomes.forget(UnixMs(before))
    for seq, result in zip(asked, results_of(outcomes, *asked), strict=True):
        kind, _ = model.get(seq, (NOT_FOUND, 0))
        mine = [u for s, (k, u) in model.items() if (k, s // CHUNK) == (kind, seq // CHUNK)]
        assert result == (kind if max(mine, default=-2) >= before else NOT_FOUND), seq
    again = restored(outcomes)
    assert (again.words, again.pack()) == (outcomes.words, outcomes.pack())
    assert results_of(again, *asked) == results_of(outcomes, *asked)


@pytest.mark.parametrize("at_once", [1, 700, LOWS_MAX, CHUNK // 2])
def test_chunk_with_few_and_with_many_ended_timers_knows_the_same(at_once: int) -> None:
    outcomes = Outcomes()
    seqs = np.random.default_rng(1).permutation(CHUNK)[: CHUNK // 2].astype(np.uint64)
    for start in range(0, len(seqs), at_once):
        mine = seqs[start : start + at_once]
        outcomes.add(DROPPED, mine, np.full(len(mine), 5))
        if start in {0, LOWS_MAX - 2, LOWS_MAX - 1, LOWS_MAX, len(seqs) - at_once}:
            ended = {*seqs[: start + len(mine)].tolist()}
            known = results_of(outcomes, *range(CHUNK))
            assert {seq for seq, result in enumerate(known) if result == DROPPED} == ended
            assert restored(outcomes).words == outcomes.words
    packed = outcomes.pack()
    assert len(packed) == 3, "one chunk"
    assert len(packed[2][4]) == CHUNK // 8


def test_sum_does_not_depend_on_order_and_forgets_with_the_chunk() -> None:
    one, other = Outcomes(), Outcomes()
    add(one, DROPPED, (5, 1), (CHUNK, 7), (6, 3))
    add(other, DROPPED, (CHUNK, 7))
    add(other, DROPPED, (6, 3), (5, 1))
    assert one.words == other.words != Outcomes().words
    one.forget(UnixMs(4))
    assert one.words != other.words
    one.forget(UnixMs(8))
    assert one.words == Outcomes().words


def test_what_a_manifest_captured_does_not_change_afterwards() -> None:
    for more in (1, 2, LOWS_MAX):
        outcomes = Outcomes()
        add(outcomes, DROPPED, (1, 1))
        packed = outcomes.pack()
        before = msgpack.packb(packed)
        outcomes.add(DROPPED, np.arange(2, 2 + more, dtype=np.uint64), np.full(more, 1))
        assert msgpack.packb(packed) == before


def test_client_that_cancels_all_it_schedules_costs_a_bit_for_each_timer() -> None:
    outcomes, rows = Outcomes(), 1_000
    for first in range(1, 2_000_000, rows):  # due in any of a million minutes
        seqs = np.arange(first, first + rows, dtype=np.uint64)
        outcomes.add(ALREADY_CANCELLED, seqs, seqs.astype(np.int64) * 60_000)
    assert len(msgpack.packb(outcomes.pack())) < 2_000_000 / 8 * 1.1


def test_oldest_timers_of_all_outcomes_are_forgotten_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_outcomes, "SIZE_MAX", 10 * (CHUNK_SIZE + 2))
    outcomes = Outcomes()
    for chunk in range(10):
        add(outcomes, KINDS[chunk % 3], (chunk * CHUNK + 1, 99))
    assert outcomes.unknown_below == 0
    assert NOT_FOUND not in results_of(outcomes, *(chunk * CHUNK + 1 for chunk in range(10)))
    add(outcomes, DROPPED, (10 * CHUNK + 1, 99), (11 * CHUNK + 1, 99), (CHUNK + 2, 99))
    # Chunk 1 has two outcomes. Nine chunks of ten stay, so that there is room.
    assert outcomes.unknown_below == 3 * CHUNK
    known = results_of(outcomes, *(chunk * CHUNK + 1 for chunk in range(12)))
    assert [chunk for chunk, result in enumerate(known) if result == NOT_FOUND] == [0, 1, 2]
    assert restored(outcomes).words == outcomes.words
    assert restored(outcomes).unknown_below == 3 * CHUNK


def test_old_timer_that_ends_later_is_known_and_nothing_is_unknown_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_outcomes, "SIZE_MAX", 10 * (CHUNK_SIZE + 2))
    outcomes = Outcomes()
    for chunk in range(11):
        add(outcomes, DROPPED, (chunk * CHUNK + 1, 99))
    assert outcomes.unknown_below == 2 * CHUNK
    add(outcomes, ALREADY_CANCELLED, (7, 300))
    assert results_of(outcomes, 1, 7) == [NOT_FOUND, ALREADY_CANCELLED]
    outcomes.forget(UnixMs(99))
    assert outcomes.unknown_below == 2 * CHUNK
    outcomes.forget(UnixMs(100))
    assert outcomes.unknown_below == 0, "no forgotten timer is needed any more"
    assert results_of(outcomes, 7) == [ALREADY_CANCELLED]
    assert restored(outcomes).words == outcomes.words


def test_end_that_was_forgotten_for_lack_of_memory_is_not_found_and_never_another_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # P4
    monkeypatch.setattr(cancel_outcomes, "SIZE_MAX", (CHUNK_SIZE + 2) * 3 // 2)
    machine, log = begun()
    cancelled, fires = schedule(machine, log, START_MS, START_MS)
    assert cancel(machine, log, cancelled) == [CANCELLED]
    machine.next_seq = Seq(1 << 16)  # timers after these two
    later, fires_later = schedule(machine, log, START_MS, START_MS)
    machine.apply(log.fire(log.now_ms))
    known = [ALREADY_CANCELLED, ALREADY_FIRED, ALREADY_FIRED]
    assert cancel(machine, log, cancelled, fires, fires_later) == known
    last, _ = schedule(machine, log, START_MS + 1, START_MS + 1)
    assert cancel(machine, log, last) == [CANCELLED]
    unknown = [NOT_FOUND, NOT_FOUND, ALREADY_CANCELLED]
    assert cancel(machine, log, cancelled, fires, last) == unknown
    assert cancel(machine, log, later, fires_later) == [ALREADY_FIRED] * 2
