"""Plots of outcomes, as SVG: each peer has a row, with a dot for each turn on a log axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from bench.peers.contestants import OURS, ROSTER, peer_class
from bench.peers.outcome import ContestOutcome

WIDTH: Final = 945
LEFT: Final = 415
RIGHT: Final = 45
ROW: Final = 26
TOP: Final = 66
COLORS: Final = ("#0b6e99", "#e07b00", "#a8324a")
"""Of the first, second and third figure of a plot."""


_HEAD: Final = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture."""

    title: str
    unit: str
    figures: tuple[tuple[str, str], ...]
    """Name of the figure, and its name in the legend."""


PLOTS: Final[dict[str, Plot]] = {
    "rates": Plot(
        "Timers scheduled per second (more is better)",
        "timers/s",
        (("single_per_s", "one at a time"), ("batched_per_s", "batched")),
    ),
    "lateness": Plot(
        "Lateness at 2,000 timers due per second (less is better)",
        "ms",
        (("late_2000_p50_ms", "p50"), ("late_2000_p99_ms", "p99"), ("late_2000_max_ms", "max")),
    ),
    "burst": Plot(
        "100,000 timers due at one instant: until the last ack (less is better)",
        "s",
        (("burst_100000_s", "last ack"),),
    ),
    "failover": Plot(
        "Leader killed at 2,000 timers due per second (less is better)",
        "ms",
        (("failover_gap_ms", "longest gap"), ("failover_worst_ms", "worst lateness")),
    ),
}


def draw(outcomes: Sequence[ContestOutcome]) -> dict[str, str]:
    """Return the SVG of each plot that has figures, by name."""
    pictures = {}
    for name, plot in PLOTS.items():
        rows = {peer: _dots(plot, peer, outcomes) for peer in ROSTER}
        shown = {peer: dots for peer, dots in rows.items() if any(dots)}
        if shown:
            pictures[name] = _svg(plot, shown)
    return pictures


def _dots(plot: Plot, peer: str, outcomes: Sequence[ContestOutcome]) -> list[list[float]]:
    """Return the positive values of each figure."""
    return [
        [value for each in outcomes for value in each.values(peer, figure) if value > 0]
        for figure, _ in plot.figures
    ]


def _svg(plot: Plot, rows: dict[str, list[list[float]]]) -> str:
    values = [value for dots in rows.values() for each in dots for value in each]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    height = TOP + ROW * len(rows) + 34

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / (high - low)

    parts = [
        f'<svg {_HEAD} viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(plot.title)}</text>',
    ]
    for at, (_, name) in enumerate(plot.figures):
        left = LEFT + 120 * at
        parts.append(f'<circle cx="{left}" cy="44" r="5" fill="{COLORS[at]}"/>')
        parts.append(f'<text x="{left + 10}" y="48">{escape(name)}</text>')
    bottom = TOP + ROW * len(rows)
    for power in range(low, high + 1):
        place = x(10.0**power)
        parts.append(f'<path d="M{place:.1f} {TOP - 6}V{bottom}" stroke="#ddd"/>')
        text = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        parts.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="12" y="{bottom + 16}">{plot.unit}, logarithmic</text>')
    for row, (peer, dots) in enumerate(rows.items()):
        y = TOP + ROW * row + ROW / 2
        weight, title = "bold" if peer == OURS else "normal", escape(peer_class(peer).title)
        parts.append(f'<text x="12" y="{y + 4}" font-weight="{weight}">{title}</text>')
        each = [value for values in dots for value in values]
        parts.append(f'<path d="M{x(min(each)):.1f} {y}H{x(max(each)):.1f}" stroke="#bbb"/>')
        parts.extend(
            f'<circle cx="{x(value):.1f}" cy="{y}" r="5" fill="{color}" fill-opacity="0.75"/>'
            for values, color in zip(dots, COLORS, strict=False)
            for value in values
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
