"""Figures: what is read off samples, and what targets say of it."""

import pytest

from bench.__main__ import MEASURES
from bench.measure import Figure, Form, check, cost, rate
from bench.rig import BenchError


def test_a_rate_is_the_median_of_its_runs() -> None:
    assert rate("r", "rate", "timers/s").value([100.0, 900.0, 300.0]) == 300
    assert rate("r", "rate", "timers/s").value([100.0, 300.0]) == 200


def test_a_percentile_of_events_is_of_all_of_them() -> None:
    p99 = Figure(name="p99", series="fired", unit="ms", percentile=99)
    assert p99.value([float(n) for n in range(101)]) == 99


@pytest.mark.parametrize(
    ("value", "more_is_better", "less_is_better"),
    [(99.0, False, True), (100.0, True, True), (101.0, True, False)],
)
def test_a_target_is_reached_from_its_own_side(
    value: float, more_is_better: bool, less_is_better: bool
) -> None:
    assert rate("r", "r", "timers/s").reaches(value, 100) is more_is_better
    assert cost("c", "c", "ms").reaches(value, 100) is less_is_better


@pytest.mark.parametrize("measure", MEASURES.values(), ids=lambda each: each.name)
def test_measures_have_runs_in_both_forms_and_figures_with_names_of_their_own(measure) -> None:  # type: ignore[no-untyped-def]
    assert measure.runs.keys() == {*Form}
    assert min(measure.runs.values()) >= 1
    names = [figure.name for figure in measure.figures]
    assert len(names) == len({*names}) > 0
    for figure in measure.figures:
        if figure.must is not None:
            assert figure.aim is not None
            assert figure.reaches(figure.aim, figure.must), "the aim is beyond what must be"


def test_a_run_that_lost_something_is_refused() -> None:
    check(True, "fine")
    with pytest.raises(BenchError, match="2 of 3"):
        check(False, "2 of 3")
