"""The cluster's clock stays among the honest ones and never goes back."""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.leader.intake.cluster_clock import (
    FORGET_MS,
    SETTLE_MS,
    ClockReport,
    ClusterClock,
    Sample,
)
from timer.model.units import DUE_MS_MAX, MonoMs, ReplicaId, UnixMs

A, B, C, D = (ReplicaId(each) for each in (1, 2, 3, 4))
HOUR_MS = 3_600_000
BOOT_MS = 50_000
TRUE_MS = 1_700_000_000_000
"""The true time at BOOT_MS."""


def true_at(boot_ms: int) -> int:
    return TRUE_MS + boot_ms - BOOT_MS


def sample(
    voter: ReplicaId, off_ms: int, boot_ms: int, rtt_ms: int = 0, back_ms: int | None = None
) -> Sample:
    """Return the answer of a voter with a clock `off_ms` ahead.

    `back_ms`: the time of the answer's way back. None: half of the round trip.
    """
    back_ms = rtt_ms // 2 if back_ms is None else back_ms
    return Sample(
        voter=voter,
        wall_ms=UnixMs(true_at(boot_ms - back_ms) + off_ms),
        sent_ms=MonoMs(boot_ms - rtt_ms),
        received_ms=MonoMs(boot_ms),
    )


def clock_of(
    offs: Mapping[ReplicaId, int],
    *,
    voters: Sequence[ReplicaId] = (A, B, C),
    floor_ms: int = 0,
    floor_age_ms: int = 0,
) -> ClusterClock:
    return ClusterClock(
        voters,
        [sample(voter, off, BOOT_MS) for voter, off in offs.items()],
        floor_ms=UnixMs(floor_ms),
        floor_at_ms=MonoMs(BOOT_MS - floor_age_ms),
        boot_ms=MonoMs(BOOT_MS),
    )


def error_at(clock: ClusterClock, boot_ms: int) -> int:
    return clock.now(MonoMs(boot_ms)) - true_at(boot_ms)


# ---- the start


def test_new_leader_starts_at_the_median_of_three() -> None:
    assert error_at(clock_of({A: 7, B: HOUR_MS, C: -30}), BOOT_MS) == 7


@pytest.mark.parametrize("off_ms", [HOUR_MS, -HOUR_MS])
def test_of_two_clocks_far_apart_the_start_goes_by_the_old_leaders(off_ms: int) -> None:
    clock = clock_of({A: 0, B: off_ms}, floor_ms=true_at(BOOT_MS) - 800, floor_age_ms=800)
    assert error_at(clock, BOOT_MS) == 0
    assert error_at(clock, BOOT_MS + HOUR_MS // 100) == 0


def test_after_a_long_stop_two_clocks_start_at_the_earlier_one() -> None:
    clock = clock_of({A: 0, B: HOUR_MS}, floor_ms=true_at(BOOT_MS) - 24 * HOUR_MS)
    assert error_at(clock, BOOT_MS) == 0


@pytest.mark.parametrize("off_ms", [-HOUR_MS, -50 * 365 * 24 * HOUR_MS])
def test_after_a_long_stop_a_clock_that_is_behind_is_outvoted_by_the_third(
    off_ms: int,
) -> None:
    clock = clock_of({A: 0, B: off_ms}, floor_ms=true_at(BOOT_MS) - HOUR_MS // 6)
    assert error_at(clock, BOOT_MS + 1_000) == -HOUR_MS // 6, "which of the two is wrong?"
    clock.observe(sample(C, 40, BOOT_MS + 2_000))
    assert error_at(clock, BOOT_MS + 2_000) < -HOUR_MS // 7
    assert error_at(clock, BOOT_MS + 2_000 + SETTLE_MS) == 0


def test_jump_leads_to_the_earliest_median_that_a_slow_answer_allows() -> None:
    clock = clock_of({A: 0, B: -HOUR_MS}, floor_ms=true_at(BOOT_MS) - HOUR_MS // 6)
    clock.observe(sample(C, 0, BOOT_MS + 1, rtt_ms=10_000))
    assert error_at(clock, BOOT_MS + 1) < -HOUR_MS // 7
    assert error_at(clock, BOOT_MS + 1 + SETTLE_MS) == -5_000 + SETTLE_MS // 2


def test_third_clock_moves_none_back_that_was_ahead() -> None:
    clock = clock_of({A: 0, B: HOUR_MS}, floor_ms=true_at(BOOT_MS) + 10_000)
    clock.observe(sample(C, 0, BOOT_MS + 1_000))
    assert error_at(clock, BOOT_MS + 1_000) == 9_500, "half the rate"


def test_floor_above_every_clock_holds_and_time_does_not_stop() -> None:
    clock = clock_of({A: 0, B: 0, C: 0}, floor_ms=true_at(BOOT_MS) + 10_000)
    assert error_at(clock, BOOT_MS) == 10_000
    assert error_at(clock, BOOT_MS + 1_000) == 9_500, "half the rate"
    for voter in (A, B, C):
        clock.observe(sample(voter, 0, BOOT_MS + 19_000))
    assert clock.report(MonoMs(BOOT_MS + 19_000)).error_ms == 500
    assert error_at(clock, BOOT_MS + 20_000) == 0


def test_without_any_sample_it_runs_on_from_the_floor() -> None:
    clock = clock_of({}, floor_ms=TRUE_MS, floor_age_ms=300)
    assert error_at(clock, BOOT_MS + 50) == 300
    assert len(clock._current_estimates(MonoMs(BOOT_MS))) == 0
    assert clock.report(MonoMs(BOOT_MS)) == ClockReport()


def test_single_voter_goes_by_its_own_clock() -> None:
    clock = clock_of({A: 0}, voters=[A])
    clock.observe(sample(A, 300, BOOT_MS + 1_000))
    assert error_at(clock, BOOT_MS + 1_000) == 300


# ---- samples


def test_offset_is_taken_from_the_middle_of_the_round_trip() -> None:
    clock = ClusterClock(
        [A],
        [sample(A, 0, BOOT_MS, rtt_ms=40)],
        floor_ms=UnixMs(0),
        floor_at_ms=MonoMs(BOOT_MS),
        boot_ms=MonoMs(BOOT_MS),
    )
    assert error_at(clock, BOOT_MS) == 0


def test_sample_may_be_given_as_an_instant_and_its_error() -> None:
    given_so = Sample.at(A, UnixMs(true_at(BOOT_MS - 20)), MonoMs(BOOT_MS - 20), 19)
    assert given_so == sample(A, 0, BOOT_MS, rtt_ms=40)


@pytest.mark.parametrize("others", [(B,), (B, C)])
@pytest.mark.parametrize("way", [-1, 1])
def test_slow_answers_do_not_move_a_clock_that_agrees_with_them(
    others: tuple[ReplicaId, ...], way: int
) -> None:
    """The whole round trip was on one way: their offsets seem wrong by half of it."""
    clock = clock_of({A: 0, B: 0, C: 0})
    for boot_ms in range(BOOT_MS + 50, BOOT_MS + 3_000, 50):
        clock.observe(sample(A, 0, boot_ms))
        for voter in others:
            clock.observe(sample(voter, 10 * way, boot_ms, rtt_ms=20))
        assert error_at(clock, boot_ms) == 0


@pytest.mark.parametrize("own_ms", [-HOUR_MS, HOUR_MS])
@pytest.mark.parametrize(("back_ms", "error_ms"), [(0, 10), (10, 0), (20, -10)])
def test_own_clock_that_disagrees_follows_the_others_to_the_error_of_their_answers(
    own_ms: int, back_ms: int, error_ms: int
) -> None:
    clock = clock_of({A: 0, B: 0, C: 0})
    for boot_ms in range(BOOT_MS + 50, BOOT_MS + 4_000, 50):
        clock.observe(sample(A, own_ms, boot_ms))
        for voter in (B, C):
            clock.observe(sample(voter, 0, boot_ms, 20, back_ms))
    assert error_at(clock, boot_ms) == error_ms


def test_slow_answer_does_not_replace_a_fresh_better_one_but_an_aged_one() -> None:
    slow = Sample(
        voter=A,
        wall_ms=UnixMs(true_at(BOOT_MS + 100)),
        sent_ms=MonoMs(BOOT_MS - 100),
        received_ms=MonoMs(BOOT_MS + 100),
    )
    clock = clock_of({A: 0}, voters=[A])
    clock.observe(slow)
    assert error_at(clock, BOOT_MS + 1_000) == 0
    later = Sample(
        voter=A,
        wall_ms=UnixMs(true_at(BOOT_MS + 3_000)),
        sent_ms=MonoMs(BOOT_MS + 2_800),
        received_ms=MonoMs(BOOT_MS + 3_000),
    )
    clock.observe(later)
    assert error_at(clock, BOOT_MS + 5_000) == 100


@pytest.mark.parametrize("wall_ms", [-1, DUE_MS_MAX + 1])
def test_nonsense_from_a_voter_is_ignored(wall_ms: int) -> None:
    clock = clock_of({A: 0})
    clock.observe(
        Sample(voter=B, wall_ms=UnixMs(wall_ms), sent_ms=MonoMs(0), received_ms=MonoMs(0))
    )
    assert len(clock._current_estimates(MonoMs(BOOT_MS))) == 1


def test_only_voters_count() -> None:
    clock = clock_of({A: 0, B: 0, D: HOUR_MS})
    assert len(clock._current_estimates(MonoMs(BOOT_MS))) == 2
    clock.observe(sample(D, HOUR_MS, BOOT_MS))
    assert clock.report(MonoMs(BOOT_MS)).spread_ms == 0


def test_voter_that_fell_silent_is_forgotten_in_the_end() -> None:
    clock = clock_of({A: 0, B: 0, C: 0})
    end = BOOT_MS + FORGET_MS
    for voter in (A, B):
        clock.observe(sample(voter, 0, end))
    assert len(clock._current_estimates(MonoMs(end))) == 3
    assert len(clock._current_estimates(MonoMs(end + 1))) == 2


# ---- running


@pytest.mark.parametrize(
    ("step_ms", "after_3_s"), [(HOUR_MS, HOUR_MS), (1_000, 1_000), (200, 200), (-HOUR_MS, -1_500)]
)
@pytest.mark.parametrize("voters", [(A,), (A, B), (A, B, C), (A, B, C, D)])
def test_clocks_that_step_together_move_the_clusters_forward_soon_and_back_at_half_the_rate(
    step_ms: int, after_3_s: int, voters: Sequence[ReplicaId]
) -> None:
    """More than once in one leadership."""
    clock, sum_ms = clock_of(dict.fromkeys(voters, 0), voters=voters), 0
    for step in range(1, 3):
        boot_ms = BOOT_MS + 10_000 * step
        sum_ms = error_at(clock, boot_ms) + step_ms
        for voter in voters:
            clock.observe(sample(voter, sum_ms, boot_ms))
        assert abs(clock.report(MonoMs(boot_ms)).error_ms) == abs(step_ms)
        assert error_at(clock, boot_ms + SETTLE_MS) == sum_ms - step_ms + after_3_s
        report = clock.report(MonoMs(boot_ms + SETTLE_MS))
        assert (report.error_ms, report.spread_ms) == (after_3_s - step_ms, 0)
        assert report.jumped_ms == (step * HOUR_MS if step_ms == HOUR_MS else 0)


def test_a_wrong_reading_beside_a_wrong_clock_makes_no_jump() -> None:
    clock = clock_of({A: 0, B: 0, C: HOUR_MS})
    for second in range(1, 10):
        clock.observe(sample(B, HOUR_MS if second == 2 else 0, BOOT_MS + 1_000 * second))
        assert 0 <= error_at(clock, BOOT_MS + 1_000 * second) <= 500
    assert clock.report(MonoMs(BOOT_MS + 9_000)).jumped_ms == 0


def test_report_tells_how_far_a_wrong_clock_is_from_the_median() -> None:
    report = clock_of({A: 7, B: 7 + HOUR_MS, C: 0}).report(MonoMs(BOOT_MS))
    assert report == ClockReport(0, 0, {A: 0, B: HOUR_MS, C: -7})
    assert report.spread_ms == HOUR_MS + 7


@pytest.mark.parametrize(
    ("offs", "doubt_ms"),
    [
        ({A: 7, C: HOUR_MS}, HOUR_MS - 7),
        ({A: 7, C: 7}, 0),
        ({A: HOUR_MS, B: 0, C: 0, D: 0}, 0),
        ({A: HOUR_MS, B: 0, C: 0, D: HOUR_MS}, HOUR_MS),
    ],
)
def test_report_tells_whether_the_median_is_between_two_clocks_that_differ(
    offs: Mapping[ReplicaId, int], doubt_ms: int
) -> None:
    clock = clock_of(offs, voters=(A, B, C, *([D] if D in offs else [])))
    assert clock.report(MonoMs(BOOT_MS)).doubt_ms == doubt_ms


@pytest.mark.parametrize("known", [(A,), (A, D), (B, C), (A, B, C)])
def test_wrong_clock_moves_nothing_while_others_are_silent(known: Sequence[ReplicaId]) -> None:
    """Of five voters. The cluster's clock is right, and the others are forgotten meanwhile."""
    voters = [A, B, C, D, ReplicaId(5)]
    clock = clock_of(dict.fromkeys(voters, 0), voters=voters)
    for boot_ms in range(BOOT_MS, BOOT_MS + 3 * FORGET_MS, 1_000):
        for voter in known:
            clock.observe(sample(voter, HOUR_MS if voter == known[0] else 0, boot_ms))
        assert error_at(clock, boot_ms) == 0


def test_reading_of_a_clock_that_was_set_meanwhile_moves_nothing_once_it_is_forgotten() -> None:
    """C was an hour ahead, and is set while it is silent. Then A is an hour ahead."""
    clock = clock_of({A: 0, B: 0, C: HOUR_MS})
    for boot_ms in range(BOOT_MS + FORGET_MS + 1, BOOT_MS + 3 * FORGET_MS, 1_000):
        clock.observe(sample(A, HOUR_MS, boot_ms))
        clock.observe(sample(B, 0, boot_ms))
        assert error_at(clock, boot_ms) == 0
    clock.observe(sample(C, 0, boot_ms, rtt_ms=400))
    assert clock.report(MonoMs(boot_ms)).offsets_ms == {A: HOUR_MS, B: 0, C: 0}


def test_correction_does_not_depend_on_how_often_the_clock_is_read() -> None:
    clock = clock_of({A: 0, B: 0, C: 0})
    for voter in (A, B, C):
        clock.observe(sample(voter, 1_000, BOOT_MS))
    assert [error_at(clock, BOOT_MS + each) for each in range(1_001)][-1] == 500


def test_late_reading_of_an_earlier_instant_does_not_go_back() -> None:
    clock = clock_of({A: 0, B: 0, C: 0})
    now = clock.now(MonoMs(BOOT_MS + 100))
    assert clock.now(MonoMs(BOOT_MS + 40)) == now


# ---- properties

moments = st.lists(
    st.tuples(
        st.integers(1, 3_000),  # elapsed
        st.sampled_from([A, B, C]),  # the voter that answers
        st.integers(-5 * HOUR_MS, 5 * HOUR_MS),  # the error of the wrong clock then
        st.booleans(),  # does it jump?
    ),
    max_size=60,
)
honest = st.integers(-40, 40)


@settings(max_examples=300, deadline=None)
@given(
    offs=st.tuples(honest, honest, honest),
    wrong=st.sampled_from([A, B, C]),
    answered=st.sampled_from([(A, B), (A, C), (A, B, C)]),
    silent=st.sampled_from([None, B, C]),
    first=st.integers(-5 * HOUR_MS, 5 * HOUR_MS),
    moments=moments,
)
def test_one_wrong_clock_of_three_stays_within_the_honest_spread(
    offs: tuple[int, int, int],
    wrong: ReplicaId,
    answered: tuple[ReplicaId, ...],
    silent: ReplicaId | None,
    first: int,
    moments: list[tuple[int, ReplicaId, int, bool]],
) -> None:
    """Any voter may have the wrong clock (A is the leader itself), answer, or be dead."""
    off = dict(zip((A, B, C), offs, strict=True))
    honest_offs = [off[voter] for voter in off if voter != wrong]
    low, high = min(honest_offs), max(honest_offs)
    off[wrong] = first
    # The old leader's clock was right, because three voters had answered it.
    clock = clock_of(
        {voter: off[voter] for voter in answered},
        floor_ms=true_at(BOOT_MS) - 500 + low,
        floor_age_ms=500,
    )
    boot_ms, leaps = BOOT_MS, 0
    for elapsed_ms, voter, wrong_off, jumps in moments:
        assert low <= error_at(clock, boot_ms) <= high
        before = clock.now(MonoMs(boot_ms))
        boot_ms += elapsed_ms
        if jumps:
            off[wrong] = wrong_off
        clock.observe(sample(A, off[A], boot_ms))
        if voter != silent:
            clock.observe(sample(voter, off[voter], boot_ms))
        moved = clock.now(MonoMs(boot_ms)) - before
        assert elapsed_ms // 2 <= moved
        leaps += moved > (3 * elapsed_ms + 1) // 2
    assert low <= error_at(clock, boot_ms) <= high
    assert leaps <= (len(answered) < 3), "as the third answers"


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    voters=st.integers(3, 7),
    wrong=st.integers(0, 7),
    wrong_off=st.integers(-200, 200) | st.integers(-HOUR_MS, HOUR_MS),
)
def test_slow_answers_move_the_clock_by_no_more_than_their_errors(
    seed: int, voters: int, wrong: int, wrong_off: int
) -> None:
    """At most one clock is wrong. Any part of a round trip may be on one way.

    A leader's clock may be wrong by so little that the readings can't show it.
    """
    chance, error_ms = random.Random(seed), 30
    ids = [ReplicaId(each) for each in range(1, voters + 1)]
    off = {each: chance.randint(-40, 40) for each in ids}
    honest_offs = [off[each] for each in ids if each != wrong]
    beyond_ms = 0 if wrong != A else error_ms if abs(wrong_off) > 1_000 else 2 * error_ms
    low, high = min(honest_offs) - beyond_ms, max(honest_offs) + beyond_ms
    floor_ms = true_at(BOOT_MS) + min(honest_offs)
    if wrong in off:
        off[ReplicaId(wrong)] = wrong_off
    clock, boot_ms = clock_of(off, voters=ids, floor_ms=floor_ms), BOOT_MS
    for _ in range(40):
        assert low <= error_at(clock, boot_ms) <= high
        boot_ms += chance.randint(1, 3_000)
        clock.observe(sample(A, off[A], boot_ms))
        for voter in ids[1:]:
            rtt_ms = chance.randint(0, 2 * error_ms)
            back_ms = chance.choice([0, rtt_ms, chance.randint(0, rtt_ms)])
            clock.observe(sample(voter, off[voter], boot_ms, rtt_ms, back_ms))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    voters=st.integers(1, 5),
    answers=st.integers(1, 80),
)
def test_clock_never_goes_back_whatever_the_voters_say(
    seed: int, voters: int, answers: int
) -> None:
    chance = random.Random(seed)
    ids = [ReplicaId(each) for each in range(1, voters + 1)]
    clock = clock_of({}, voters=ids, floor_ms=chance.choice([0, TRUE_MS]))
    boot_ms, last = BOOT_MS, clock.now(MonoMs(BOOT_MS))
    for _ in range(answers):
        elapsed_ms = chance.choice([0, 1, 2, 99, 5_000, FORGET_MS, FORGET_MS + 1])
        boot_ms += elapsed_ms
        wild = Sample(
            voter=chance.choice(ids),
            wall_ms=UnixMs(chance.choice([0, TRUE_MS, chance.randrange(DUE_MS_MAX), DUE_MS_MAX])),
            sent_ms=MonoMs(boot_ms - chance.choice([-5, 0, 1, 700])),
            received_ms=MonoMs(boot_ms),
        )
        clock.observe(wild)
        now = clock.now(MonoMs(boot_ms))
        assert elapsed_ms // 2 <= now - last
        last = now
