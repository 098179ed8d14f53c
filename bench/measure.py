"""A measure: a function that is one run, and the figures computed from all runs.

    run(rig, form) -> series      {"rate": [512_300.0]}    one list of samples per run
    all runs       -> samples     {"rate": [512_300.0, 498_000.0, ...]}
    a figure       =  one percentile of one series, beside its required and desired value

A throughput or a latency percentile is one sample per run. Its figure is the median of the runs. A
series of single events, such as failovers, has one sample per event; p50 and p99 are two figures of
it. A series without a figure is stored in the file as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from bench.rig import BenchError, Rig

Series = dict[str, list[float]]
"""Name of a series -> its samples."""

MEDIAN: Final = 50.0
_TIMES: Final = ("us", "ms", "s", "% of a core")
"""Units of costs in time."""


class Form(StrEnum):
    """The duration of the benchmarks."""

    SHORT = "short"
    """All measures within three minutes: a check for large changes."""
    FULL = "full"
    """The form by which SPEED's table is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the table."""

    name: str
    series: str
    unit: str
    must: float | None = None
    """The required value. None: the figure only explains another one."""
    aim: float | None = None
    percentile: float = MEDIAN
    more_is_better: bool = False
    waits: bool = False
    """Whether clocks decide the value more than the processor: leases, ticks, pauses."""

    @property
    def by_speed(self) -> bool:
        """Whether the machine's speed decides the value."""
        return not self.waits and (self.unit.endswith("/s") or self.unit in _TIMES)

    def versus(self, value: float, calibration_s: float) -> float:
        """Return a value that speed decides in units of the calibration (bench/calibration.py).

        `calibration_s`: seconds of one calibration near the measurement.
        """
        return value * calibration_s if self.more_is_better else value / calibration_s

    def value(self, samples: Sequence[float]) -> float:
        """Return the figure of at least one sample."""
        return float(np.percentile(samples, self.percentile))

    def reaches(self, value: float, limit: float) -> bool:
        """Return whether `value` is at least as good as `limit`."""
        return value >= limit if self.more_is_better else value <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One row of the table, or several from the same runs."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    runs: Mapping[Form, int]
    run: Callable[[Rig, Form], Series] | None = None
    alone: Callable[[Form], Series] | None = None
    """Used in place of `run` by a measure without a cluster. None: `run` is used."""
    fresh: bool = False
    """Whether each run gets its own cluster, so that earlier data can't slow it down."""
    recorded: bool = False
    """Whether the rig's clients make all its traffic, so that it can be audited."""

    def __post_init__(self) -> None:
        assert (self.run is None) != (self.alone is None), self.name


def rate(
    name: str, series: str, unit: str, must: float | None = None, aim: float | None = None
) -> Figure:
    """Return the figure for the median of a throughput."""
    return Figure(name=name, series=series, unit=unit, must=must, aim=aim, more_is_better=True)


def cost(
    name: str, series: str, unit: str, must: float | None = None, aim: float | None = None
) -> Figure:
    """Return the figure for the median of a cost: smaller is better."""
    return Figure(name=name, series=series, unit=unit, must=must, aim=aim)


def wait(name: str, series: str, must: float | None = None, aim: float | None = None) -> Figure:
    """Return the figure for the median of a wait in milliseconds, which clocks decide."""
    return Figure(name=name, series=series, unit="ms", must=must, aim=aim, waits=True)


def check(whole: bool, why: str) -> None:  # noqa: FBT001 -- it reads as an assertion
    """Reject a run that lost work, as its speed means nothing.

    Raises:
        BenchError: not `whole`.
    """
    if not whole:
        raise BenchError(why)
