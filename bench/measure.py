"""What a measure is: a function that runs once, and the figures that are read off its runs.

    run(rig, form) -> series      {"rate": [512_300.0]}    one list of samples per run
    all runs       -> samples     {"rate": [512_300.0, 498_000.0, ...]}
    a figure       =  one percentile of one series, beside what it must reach and should

A throughput or a latency percentile is one sample per run, and its figure is the median of the
runs. A series of single events, such as failovers, has one sample each, and p50 and p99 are two
figures of it. A series without a figure is kept in the file all the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from bench.rig import BenchError, Rig

Series = dict[str, list[float]]
"""Samples by the name of their series."""

MEDIAN: Final = 50.0


class Form(StrEnum):
    """How long the benchmarks may take."""

    SHORT = "short"
    """All of it within three minutes: is it about what it was?"""
    FULL = "full"
    """What SPEED's table is judged by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the table."""

    name: str
    series: str
    unit: str
    must: float | None = None
    """What it has to reach. None: it explains another figure."""
    aim: float | None = None
    percentile: float = MEDIAN
    more_is_better: bool = False

    def value(self, samples: Sequence[float]) -> float:
        """Return the figure of these samples; they are at least one."""
        return float(np.percentile(samples, self.percentile))

    def reaches(self, value: float, limit: float) -> bool:
        """Return whether `value` is at least as good as `limit`."""
        return value >= limit if self.more_is_better else value <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One row of the table, or a few that come from the same runs."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    runs: Mapping[Form, int]
    run: Callable[[Rig, Form], Series] | None = None
    alone: Callable[[Form], Series] | None = None
    """Instead of `run`: it needs no cluster, and gets none."""
    fresh: bool = False
    """Each run gets a cluster of its own: the last one's data would weigh on the next."""

    def __post_init__(self) -> None:
        assert (self.run is None) != (self.alone is None), self.name


def rate(
    name: str, series: str, unit: str, must: float | None = None, aim: float | None = None
) -> Figure:
    """Return the median of a throughput."""
    return Figure(name=name, series=series, unit=unit, must=must, aim=aim, more_is_better=True)


def cost(
    name: str, series: str, unit: str, must: float | None = None, aim: float | None = None
) -> Figure:
    """Return the median of something that should be small."""
    return Figure(name=name, series=series, unit=unit, must=must, aim=aim)


def check(whole: bool, why: str) -> None:  # noqa: FBT001 -- it reads as an assertion
    """Refuse a run that lost something: speed without the work counts nothing.

    Raises:
        BenchError: not `whole`.
    """
    if not whole:
        raise BenchError(why)
