"""The table: each figure beside its targets and its last result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bench.bench_results import MeasureOutcome
from bench.measure import Figure

BUSY_CORES_MAX: Final = 0.15
"""Cores used by other work above which figures mean little."""
_ROW: Final = "{:<34}{:>11}{:>11}{:>10}{:>11}{:>11}  {:<12} {}"


def render(outcomes: Sequence[MeasureOutcome], last: Mapping[tuple[str, str], float]) -> str:
    """Return the table as text."""
    head = _ROW.format("", "now", "last", "now/last", "must", "aim", "unit", "")
    lines = [head.rstrip()]
    for outcome in outcomes:
        lines.extend(_measure(outcome, last))
    return "\n".join(lines)


def _measure(outcome: MeasureOutcome, last: Mapping[tuple[str, str], float]) -> Iterator[str]:
    measure, values = outcome.measure, outcome.values()
    runs = f"{outcome.runs} run{'' if outcome.runs == 1 else 's'}"
    yield f"{measure.name.upper()} {measure.title} ({runs})"
    for figure in measure.figures:
        if figure.name in values:
            yield _figure(figure, values[figure.name], last.get((measure.name, figure.name)))
    if outcome.busy_cores_before > BUSY_CORES_MAX:
        yield f"   disturbed: {outcome.busy_cores_before:.2f} cores were busy before it began"
    if outcome.error is not None:
        yield f"   failed: {outcome.error}"


def _figure(figure: Figure, value: float, last: float | None) -> str:
    ratio = "" if not last else f"{value / last:.2f}"
    return _ROW.format(
        "   " + figure.name,
        number(value),
        "" if last is None else number(last),
        ratio,
        "" if figure.must is None else number(figure.must),
        "" if figure.aim is None else number(figure.aim),
        figure.unit,
        verdict(figure, value),
    ).rstrip()


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
