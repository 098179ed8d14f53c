"""The policy of compaction, for days of traffic in virtual time; only descriptors, no files."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from tests.seeds import seeds
from timer.model.firing_order import Position
from timer.pending.runs import merge_plan
from timer.pending.runs.merge_plan import DEPTH, FAN, PART_SIZE, Sketch, part_size, plan

STEP_MS = 600_000
"""Length of a step; each has at least one flush."""
FLUSH_ROWS = 370_000
"""Rows that fill a memtable."""
DAY = 144
"""Steps of a day."""
ROW_SIZE = 140
"""Bytes of a row with 100 bytes of payload in a run."""
LOG_SIZE = 128
"""Bytes of the same row in the log."""

Histogram = npt.NDArray[np.float64]
"""Rows by the step in which they are due."""


def constant(steps: int) -> Histogram:
    """Return the share of rows by delay; all rows have the same delay."""
    share = np.zeros(steps + 1)
    share[-1] = 1
    return share


def uniform(steps: int) -> Histogram:
    return np.full(steps, 1 / steps)


def exponential(mean_steps: int) -> Histogram:
    share: Histogram = np.exp(-np.arange(8 * mean_steps) / mean_steps)
    share /= share.sum()
    return share


@dataclass
class Sample:
    """The files of a node after a flush and its merges."""

    runs: int
    factor: float
    """Bytes on disk, divided by the bytes of pending rows."""
    over_each_other: int
    """Highest number of runs with rows of the same time."""


class Node:
    """The runs of a node, as histograms."""

    def __init__(self, rows_per_step: int, share: Histogram, days: int) -> None:
        self.now = 0
        self.pending = rows_per_step * float(np.cumsum(share[::-1]).sum())
        self.rows = 0.0
        self.written = 0.0
        self.largest_merge = 0.0
        self.samples: list[Sample] = []
        self._flush = rows_per_step * share
        self._runs: list[Histogram] = []
        self._end = days * DAY + len(share)
        for _ in range(days * DAY):
            self.step()

    def step(self) -> None:
        """Pass ten minutes: flushes, and after each the merges of the policy."""
        self.now += 1
        flushes = int(self._flush.sum() // FLUSH_ROWS) + 1
        for _ in range(flushes):
            rows = np.zeros(self._end + 1)
            rows[self.now : self.now + len(self._flush)] = self._flush / flushes
            self._runs.append(rows)
            self.rows += rows.sum()
            self.written += rows.sum()
            self._runs = [run for run in self._runs if run[self.now :].any()]
            while chosen := plan([self._sketch(run) for run in self._runs]):
                self._merge(chosen)
        pending = sum(run[self.now :].sum() for run in self._runs)
        depth = sum((run > 0).astype(int) for run in self._runs)
        on_disk = sum(run.sum() for run in self._runs)
        self.samples.append(Sample(len(self._runs), on_disk / pending, int(np.max(depth))))

    def _sketch(self, run: Histogram) -> Sketch:
        due = np.flatnonzero(run[self.now :]) + self.now
        first, last = Position(int(due[0]), 0), Position(int(due[-1]), 1)
        rows = int(run[self.now :].sum())
        return Sketch(first, last, int(run.sum() * ROW_SIZE), rows, 0)

    def _merge(self, chosen: list[int]) -> None:
        assert len(chosen) <= DEPTH
        rows = np.sum([self._runs[number] for number in chosen], axis=0)
        rows[: self.now] = 0
        size = rows.sum() * ROW_SIZE
        self.written += rows.sum()
        self.largest_merge = max(self.largest_merge, size)
        share = part_size(int(size)) / ROW_SIZE
        ends = np.cumsum(rows)
        parts = [
            np.clip(np.minimum(ends, stop) - np.maximum(ends - rows, stop - share), 0, None)
            for stop in np.arange(1, round(rows.sum() / share) + 1) * share
        ]
        kept = [run for number, run in enumerate(self._runs) if number not in chosen]
        self._runs = kept + parts

    @property
    def rewrites(self) -> float:
        """Mean number of times that a row was written again after its flush."""
        return self.written / self.rows - 1


@pytest.mark.parametrize(
    ("share", "rows_per_step", "rewrites_max"),
    [
        (constant(DAY), 70_000, 1.2),
        (uniform(DAY), 140_000, 2.5),
        (exponential(DAY), 70_000, 3.0),
        (exponential(7 * DAY), 10_000, 3.0),
    ],
    ids=["one day", "within a day", "about a day", "about a week"],
)
def test_ten_million_pending_are_rewritten_three_times_at_most_and_lie_in_few_files(
    share: Histogram, rows_per_step: int, rewrites_max: float
) -> None:
    node = Node(rows_per_step, share, days=6 if len(share) < 9 * DAY else 14)
    assert 9e6 < node.pending < 12e6
    later = node.samples[len(node.samples) // 2 :]
    assert node.rewrites <= rewrites_max
    assert np.median([sample.runs for sample in later]) <= 24
    assert max(sample.runs for sample in later) <= 32
    assert np.median([sample.factor for sample in later]) <= 1.2
    assert max(sample.factor for sample in later) <= 1.3
    assert max(sample.over_each_other for sample in later) <= 28
    assert node.largest_merge <= DEPTH * 2 * PART_SIZE


def test_timer_of_a_day_costs_four_hundred_bytes_of_writing() -> None:
    node = Node(70_000, constant(DAY), days=4)
    assert LOG_SIZE + node.written / node.rows * ROW_SIZE <= 420


@pytest.mark.long
def test_hundred_million_are_rewritten_hardly_more_often_and_no_merge_is_larger() -> None:
    node = Node(1_400_000, uniform(DAY), days=3)
    assert node.pending > 1e8
    assert node.rewrites <= 4
    assert max(sample.over_each_other for sample in node.samples) <= 24
    assert node.largest_merge <= DEPTH * 2 * PART_SIZE


def test_idle_node_whose_flushes_are_tiny_has_few_files() -> None:
    node = Node(3, exponential(DAY), days=6)
    assert max(sample.runs for sample in node.samples) <= FAN


# ---- single decisions

Change = Callable[[Sketch], Sketch]


def sketch(
    first: int, last: int, size: int = PART_SIZE, rows: int = 1_000, tombstones: int = 0
) -> Sketch:
    return Sketch(Position(first, 0), Position(last, 0), size, rows, tombstones)


def test_nothing_is_merged_without_need() -> None:
    assert plan([]) == []
    assert plan([sketch(0, 100)] * (DEPTH - 1)) == []
    assert plan([sketch(0, 100, 10)] * (FAN - 1) + [sketch(0, 100)] * (DEPTH - 1)) == []
    assert plan([sketch(at, at + 9) for at in range(0, 1_000, 10)]) == []


def test_small_runs_of_one_size_are_merged_and_the_smallest_first() -> None:
    large, small = [sketch(0, 100, 9 << 20)] * FAN, [sketch(0, 100, 10)] * FAN
    assert plan(large + small) == list(range(FAN, 2 * FAN))
    assert plan(large) == list(range(FAN))


def test_parts_are_merged_where_twelve_lie_over_each_other_the_widest_of_them() -> None:
    narrow = [sketch(at, at + 9) for at in range(0, 100, 10)]
    wide = [sketch(at, 95 + at) for at in range(DEPTH - 2)]
    assert plan(narrow + wide) == []
    wide.append(sketch(31, 33))
    assert plan(narrow + wide) == [3, *range(10, 10 + DEPTH - 1)]
    wide += [sketch(30, 99), sketch(30, 98)]
    assert 3 not in plan(narrow + wide)


def test_parts_that_only_touch_do_not_lie_over_each_other() -> None:
    assert plan([sketch(at * 10 + 1, at * 10 + 10) for at in range(20)]) == []


def test_part_does_not_become_small_as_its_time_passes() -> None:
    gone = [sketch(90, 100, PART_SIZE, rows=1)] * (FAN - 1)
    assert plan([*gone, sketch(0, 100, PART_SIZE - 1)]) == []


def test_tombstones_are_merged_with_what_lies_under_them_once_they_are_a_quarter() -> None:
    timers = [sketch(0, 50, rows=300), sketch(51, 99, rows=300)]
    assert plan([*timers, sketch(10, 20, 9, rows=99, tombstones=99)]) == []
    graves = [sketch(10, 20, 9, rows=60, tombstones=60), sketch(30, 40, 9, rows=60, tombstones=60)]
    assert plan([*timers, *graves]) == [0, 2, 3]
    assert plan([timers[1], *graves]) == []


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_policy_comes_to_rest_whatever_the_runs_are(seed: int) -> None:
    chance = random.Random(seed)
    runs = []
    for _ in range(60):
        first = chance.randrange(1_000)
        rows = chance.choice([1, 10, 1_000])
        graves = chance.choice([0, 0, rows // 2, rows])
        size = chance.choice([10, 1 << 20, 9 << 20, PART_SIZE, 2 * PART_SIZE])
        runs.append(sketch(first, first + chance.choice([0, 5, 500]), size, rows, graves))
    for _ in range(2_000):
        chosen = plan(runs)
        if not chosen:
            return
        inputs = [runs[number] for number in chosen]
        runs = [run for number, run in enumerate(runs) if number not in chosen]
        runs += side_by_side(inputs)
    raise AssertionError("it merges for ever")


def side_by_side(inputs: list[Sketch]) -> list[Sketch]:
    """Return the result of a merge in which no tombstone meets its target."""
    size = sum(run.size for run in inputs)
    count = -(-size // part_size(size))
    first, last = min(run.first for run in inputs), max(run.last for run in inputs)
    cuts = np.linspace(first.due_ms, last.due_ms, count + 1).astype(int).tolist()[1:-1]
    ends = [Position(due, 1 + number) for number, due in enumerate(cuts)] + [last]
    begins = [first, *(Position(end.due_ms, end.seq + 1) for end in ends[:-1])]
    rows = sum(run.rows for run in inputs) // count
    graves = sum(run.tombstones for run in inputs) // count
    return [
        Sketch(begin, max(begin, end), size // count, rows, graves)
        for begin, end in zip(begins, ends, strict=True)
    ]


@pytest.mark.parametrize("size", [1, PART_SIZE - 1, 2 * PART_SIZE, 20 * PART_SIZE, 10**12])
def test_parts_are_equal_and_of_a_bounded_size(size: int) -> None:
    each = part_size(size)
    assert each == size or PART_SIZE < each < 2.2 * PART_SIZE
    assert -(-size // each) * each - size < size / each + each / 100


def test_limits_are_those_of_the_design() -> None:
    assert (merge_plan.PART_SIZE, merge_plan.FAN, merge_plan.DEPTH) == (64 << 20, 8, 12)
