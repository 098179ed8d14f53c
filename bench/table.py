"""The table: each figure beside its targets and its last result.

A ratio compares the result with the last one in units of the calibration (bench/calibration.py), so
that a slower hour of the machine does not show as a slower program. Values that clocks decide are
compared as they are. Targets are absolute: they hold for a machine at its full speed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bench.bench_results import LastValue, MeasureOutcome
from bench.measure import Figure

BUSY_CORES_MAX: Final = 0.15
"""Cores used by other work above which figures mean little."""
WORSE_FROM: Final = 1.25
"""Ratio to the last result from which a figure is marked. Runs of one commit differ by up to a
fifth."""
_ROW: Final = "{:<34}{:>11}{:>11}{:>10}{:>11}{:>11}  {:<12} {}"


def render(outcomes: Sequence[MeasureOutcome], last: Mapping[tuple[str, str], LastValue]) -> str:
    """Return the table as text."""
    head = _ROW.format("", "now", "last", "now/last", "must", "aim", "unit", "")
    lines = [head.rstrip()]
    for outcome in outcomes:
        lines.extend(_measure(outcome, last))
    return "\n".join(lines)


def _measure(outcome: MeasureOutcome, last: Mapping[tuple[str, str], LastValue]) -> Iterator[str]:
    measure, values = outcome.measure, outcome.values()
    runs = f"{outcome.runs} run{'' if outcome.runs == 1 else 's'}"
    yield f"{measure.name.upper()} {measure.title} ({runs}{_calibration(outcome)})"
    for figure in measure.figures:
        if figure.name in values:
            before = last.get((measure.name, figure.name))
            yield _figure(figure, values[figure.name], outcome.calibration_s, before)
    if outcome.busy_cores_before > BUSY_CORES_MAX:
        yield f"   disturbed: {outcome.busy_cores_before:.2f} cores were busy before it began"
    for audited in outcome.audits:
        yield f"   audit: {audited.text()}"
    if outcome.error is not None:
        yield f"   failed: {outcome.error}"


def _calibration(outcome: MeasureOutcome) -> str:
    seconds = outcome.calibration_s
    return "" if seconds is None else f", calibration {seconds * 1_000:.0f} ms"


def _figure(
    figure: Figure, value: float, calibration_s: float | None, last: LastValue | None
) -> str:
    ratio = _ratio(figure, value, calibration_s, last)
    worse = ratio is not None and (1 / ratio if figure.more_is_better else ratio) >= WORSE_FROM
    return _ROW.format(
        "   " + figure.name,
        number(value),
        "" if last is None else number(last.value),
        "" if ratio is None else f"{ratio:.2f}",
        "" if figure.must is None else number(figure.must),
        "" if figure.aim is None else number(figure.aim),
        figure.unit,
        ", ".join(filter(None, [verdict(figure, value), "WORSE" if worse else ""])),
    ).rstrip()


def _ratio(
    figure: Figure, value: float, calibration_s: float | None, last: LastValue | None
) -> float | None:
    """Return value / last value, at equal speed of the machine. None: they can't be compared."""
    if last is None or not last.value or not value:
        return None
    if not figure.by_speed:
        return value / last.value
    if calibration_s is None or last.calibration_s is None:
        return None
    return figure.versus(value, calibration_s) / figure.versus(last.value, last.calibration_s)


def verdict(figure: Figure, value: float) -> str:
    """Return how a value compares with the figure's targets; empty if it has none."""
    if figure.aim is not None and figure.reaches(value, figure.aim):
        return "reaches the aim"
    if figure.must is None:
        return ""
    return "reaches" if figure.reaches(value, figure.must) else "BELOW"


def number(value: float) -> str:
    """Return a number with about three significant digits."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
