"""Charts as SVG text: lines over time, with bands behind them. No library, script or network.

Colours come from the page's CSS variables, so one chart serves light and dark.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 1000
HEIGHT: Final = 200
LEFT: Final = 64
RIGHT: Final = 12
TOP: Final = 26
BOTTOM: Final = 26
LABELS_MAX: Final = 24
"""If a chart has more bands, their names are only in the tooltips."""

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One series: a value per moment of the chart; None: no value."""

    name: str
    colour: str
    """Name of a CSS variable, without its dashes."""
    values: Values


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of time behind the lines: a fault, and its recovery in a paler colour."""

    label: str
    start_ms: int
    end_ms: int
    tail_ms: int


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis that the charts of a page share: [start_ms, end_ms), and its bands."""

    start_ms: int
    end_ms: int
    moments: Sequence[int] = ()
    """Unix ms, one for each value of a line."""
    bands: Sequence[Band] = ()

    def x(self, at_ms: float) -> float:
        """Return the x coordinate of a moment, limited to the plot."""
        share = (at_ms - self.start_ms) / max(1, self.end_ms - self.start_ms)
        return round(LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT), 1)


def chart(
    title: str, unit: str, axis: Axis, lines: Sequence[ChartLine], *, logarithmic: bool = False
) -> str:
    """Return one chart as an `<svg>` element. `unit` stands behind each tick's value."""
    top = max((v for line in lines for v in line.values if v is not None), default=1) or 1
    scale = _Scale(top, TOP, HEIGHT - BOTTOM, logarithmic=logarithmic)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        *_bands(axis),
        *_grid(scale, unit),
        *_clock(axis),
        *(_path(axis, scale, line) for line in lines),
        *_legend(title, lines),
        "</svg>",
    ]
    return "\n".join(parts)


class _Scale:
    """Values to y coordinates. A logarithmic scale starts at 1."""

    def __init__(self, top: float, upper: int, lower: int, *, logarithmic: bool) -> None:
        self._log = logarithmic
        self._upper, self._lower = upper, lower
        step = 10 ** math.floor(math.log10(max(top, 1)))
        self._top = (
            10 ** math.ceil(math.log10(max(top, 10)))
            if logarithmic
            else next(step * n for n in (1, 2, 5, 10) if step * n >= top)
        )

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        share: float = value / self._top
        if self._log:
            share = math.log10(max(value, 1)) / math.log10(self._top)
        return round(self._lower - min(1.0, share) * (self._lower - self._upper), 1)

    def ticks(self) -> list[float]:
        """Return the values that have a grid line."""
        if self._log:
            return [10**n for n in range(round(math.log10(self._top)) + 1)]
        return [self._top * n / 4 for n in range(5)]


def short(value: float) -> str:
    """Return a number with about three digits: 12.3k, 4M, 0.25."""
    for limit, letter in ((1_000_000, "M"), (10_000, "k")):
        if abs(value) >= limit:
            return f"{value / (1_000_000 if letter == 'M' else 1000):.3g}{letter}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10 else f"{value:.2g}"


def _grid(scale: _Scale, unit: str) -> Iterator[str]:
    for value in scale.ticks():
        y = scale.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        text = f"{short(value)} {unit}"
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>'


def _clock(axis: Axis) -> Iterator[str]:
    """Mark the time since the run's start, at round seconds, minutes or hours."""
    total_s = max(1, (axis.end_ms - axis.start_ms) // 1000)
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200)
    step_s = next((s for s in steps if total_s / s <= 12), 86_400)
    for at_s in range(0, total_s + 1, step_s):
        x = axis.x(axis.start_ms + 1000 * at_s)
        hours, rest = divmod(at_s, 3600)
        text = f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if total_s >= 3600 else (
            f"{rest // 60}:{rest % 60:02d}"
        )  # fmt: skip
        yield f'<line class="notch" x1="{x}" x2="{x}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - 21}"/>'
        yield f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'


def _bands(axis: Axis) -> Iterator[str]:
    for band in axis.bands:
        start, end, tail = map(axis.x, (band.start_ms, band.end_ms, band.tail_ms))
        size = HEIGHT - TOP - BOTTOM
        title = f"<title>{html.escape(band.label)}</title>"
        for name, left, right in (("fault", start, end), ("recovery", end, tail)):
            if right > left or name == "fault":
                yield (
                    f'<rect class="{name}" x="{left}" y="{TOP}" height="{size}"'
                    f' width="{max(2.0, round(right - left, 1))}">{title}</rect>'
                )
        if len(axis.bands) <= LABELS_MAX:
            yield (
                f'<text class="band" transform="translate({start + 10} {TOP + 4}) rotate(90)">'
                f"{html.escape(band.label)}</text>"
            )


def _path(axis: Axis, scale: _Scale, line: ChartLine) -> str:
    """Return the stroke of a line; it is interrupted at missing values."""
    text, pen_up = [], True
    for at_ms, value in zip(axis.moments, line.values, strict=True):
        if value is None:
            pen_up = True
            continue
        text.append(f"{'M' if pen_up else 'L'}{axis.x(at_ms)} {scale.y(value)}")
        pen_up = False
    return f'<path style="stroke:var(--{line.colour})" d="{" ".join(text)}"/>'


def _legend(title: str, lines: Sequence[ChartLine]) -> Iterator[str]:
    yield f'<text class="title" x="{LEFT}" y="15">{html.escape(title)}</text>'
    x = WIDTH - RIGHT
    for line in reversed(lines):
        x -= 9 * len(line.name) + 26
        yield (
            f'<line x1="{x}" x2="{x + 16}" y1="11" y2="11" stroke-width="3"'
            f' style="stroke:var(--{line.colour})"/>'
            f'<text class="tick" x="{x + 21}" y="15">{html.escape(line.name)}</text>'
        )
