"""The table: what people read."""

import pytest

from bench.bench_results import LastValue, MeasureOutcome
from bench.measure import Figure, Form, Measure, Series, cost, rate, wait
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
    outcome = MeasureOutcome(MEASURE, calibrations_s=[0.1])
    outcome.add({"rate": [600_000.0], "p99": [12.34], "cores": [0.5]})
    outcome.add({"rate": [700_000.0], "p99": [12.34], "cores": [0.5]})
    last = {("s1", "for 5 s"): LastValue(500_000.0, 0.1), ("s2", "p99"): LastValue(1.0, 0.1)}
    head, title, *rows = render([outcome], last).splitlines()
    assert head.split() == ["now", "last", "now/last", "must", "aim", "unit"]
    assert title == "S1 ingest (2 runs, calibration 100 ms)"
    assert [" ".join(row.split()) for row in rows] == [
        "for 5 s 650,000 500,000 1.30 500,000 1,000,000 timers/s reaches",
        "p99 12.3 10 3 ms BELOW",
        "CPU leader 0.50 cores",
    ]


@pytest.mark.parametrize(
    ("figure", "now", "last", "calibration_s", "shown"),
    [
        # The machine is half as fast as it was: 250,000/s then were worth 500,000.
        (rate("x", "x", "timers/s"), 250_000.0, LastValue(500_000.0, 0.1), 0.2, "1.00"),
        (rate("x", "x", "timers/s"), 250_000.0, LastValue(500_000.0, 0.1), 0.1, "0.50 WORSE"),
        (cost("x", "x", "ms"), 8.0, LastValue(4.0, 0.1), 0.2, "1.00"),
        (cost("x", "x", "ms"), 5.0, LastValue(4.0, 0.1), 0.1, "1.25 WORSE"),
        (cost("x", "x", "ms"), 4.9, LastValue(4.0, 0.1), 0.1, "1.23"),
        # A wait, and a size, do not depend on the machine's speed.
        (wait("x", "x"), 550.0, LastValue(550.0, 0.1), 0.2, "1.00"),
        (cost("x", "x", "MB"), 300.0, LastValue(200.0), 0.2, "1.50 WORSE"),
        # An old result has no calibration.
        (cost("x", "x", "ms"), 8.0, LastValue(4.0), 0.2, ""),
    ],
)
def test_results_are_compared_at_the_machines_speed(
    figure: Figure, now: float, last: LastValue, calibration_s: float, shown: str
) -> None:
    measure = Measure(name="s", title="t", run=no_run, figures=(figure,), runs={Form.SHORT: 1})
    outcome = MeasureOutcome(measure, samples={"x": [now]}, calibrations_s=[calibration_s])
    row = render([outcome], {("s", "x"): last}).splitlines()[2].split()
    assert " ".join(each for each in row[3:] if each != figure.unit) == shown


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
