"""The table: what people read."""

import pytest

from bench.bench_results import MeasureOutcome
from bench.measure import Figure, Form, Measure, Series, cost, rate
from bench.rig import Rig
from bench.table import number, render, verdict


def no_run(rig: Rig, form: Form) -> Series:
    raise AssertionError("nothing runs here")


FIGURES = (
    rate("for 5 s", "rate", "timers/s", 500_000, 1_000_000),
    rate("for 60 s", "rate_60s", "timers/s", 250_000, 400_000),
    cost("p99", "p99", "ms", 10, 3),
    cost("  CPU leader", "cores", "cores"),
)
MEASURE = Measure(name="s1", title="ingest", run=no_run, figures=FIGURES, runs={Form.SHORT: 2})


def test_figures_stand_beside_the_last_ones_and_their_targets() -> None:
    outcome = MeasureOutcome(MEASURE)
    outcome.add({"rate": [600_000.0], "p99": [12.34], "cores": [0.5]})
    outcome.add({"rate": [700_000.0], "p99": [12.34], "cores": [0.5]})
    text = render([outcome], {("s1", "for 5 s"): 500_000.0, ("s2", "p99"): 1.0})
    head, title, *rows = text.splitlines()
    assert head.split() == ["now", "last", "now/last", "must", "aim", "unit"]
    assert title == "S1 ingest (2 runs)"
    assert [" ".join(row.split()) for row in rows] == [
        "for 5 s 650,000 500,000 1.30 500,000 1,000,000 timers/s reaches",
        "p99 12.3 10 3 ms BELOW",
        "CPU leader 0.50 cores",
    ]


def test_what_spoilt_a_measure_is_said() -> None:
    outcome = MeasureOutcome(MEASURE, busy_cores_before=0.4, error="BenchError: no answer")
    assert render([outcome], {}).splitlines()[1:] == [
        "S1 ingest (0 runs)",
        "   disturbed: 0.40 cores were busy before it began",
        "   failed: BenchError: no answer",
    ]


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        (FIGURES[0], 1_000_000.0, "reaches the aim"),
        (FIGURES[0], 999_999.0, "reaches"),
        (FIGURES[0], 499_999.0, "BELOW"),
        (FIGURES[2], 3.0, "reaches the aim"),
        (FIGURES[2], 10.0, "reaches"),
        (FIGURES[2], 10.1, "BELOW"),
        (FIGURES[3], 9.0, ""),
    ],
)
def test_a_verdict_per_target(figure: Figure, value: float, said: str) -> None:
    assert verdict(figure, value) == said


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3.0, "3"), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
