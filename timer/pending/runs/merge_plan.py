"""Compaction: which runs to merge next, as a pure function of the runs' sizes and ranges.

    due time -->
    small    ~~~ ~~~~ ~~ ~~~ ~~~~~ ~~       below 64 MiB: eight of similar size -> one
    parts    |------ part ------|---- part ----|
             |--- part ---|------- part -------|   at most eleven overlap at any time:
                    ^ twelve here -> merged        twelve that do become twelve side by side

A merge writes parts of at least 64 MiB, cut in firing order. A part whose rows have all fired is
removed as a whole file, unread. No part is rewritten because its rows are near. A merge has inputs
of bounded size, for any number of pending rows. The number of rewrites per row grows with the
logarithm of the pending rows, because each merge of parts makes their ranges twelve times narrower.

The first merge that reads a tombstone and its target drops both. Where tombstones gather, their
runs are merged early with the runs that they overlap. A run with many rows of deleted topics is
rewritten alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np

from timer.model.firing_order import Position

PART_SIZE: Final = 64 << 20
"""Bytes of a part, at least. A part has at most twice that."""
FAN: Final = 8
"""Small runs of similar size that become one."""
DEPTH: Final = 12
"""Overlapping parts that become as many side by side."""
SMALL_SIZE: Final = 1 << 20
"""Runs below this count as similar in size."""
TOMBSTONE_DIVISOR: Final = 4
"""A merge is due if at least one row in TOMBSTONE_DIVISOR is a tombstone."""
DELETED_DIVISOR: Final = 4
"""A rewrite is due if at least one row in DELETED_DIVISOR belongs to a deleted topic."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The properties of a run that the plan uses."""

    first: Position
    """Of the remaining rows: not before the fire position."""
    last: Position
    size: int
    """Bytes of the file, fired rows included: a part does not become small as its rows fire."""
    rows: int
    """Remaining rows, about; tombstones included."""
    tombstones: int
    deleted_rows: int = 0
    """Rows of deleted topics, about."""

    def overlaps(self, other: "Sketch") -> bool:
        """Return whether the two ranges have a common position."""
        return self.first <= other.last and other.first <= self.last


def plan(
    runs: Sequence[Sketch], fits: Callable[[Sequence[int]], bool] = lambda chosen: True
) -> list[int]:
    """Return the runs to merge now, ascending, at most DEPTH; none if no merge is due.

    All runs have remaining rows. The caller repeats this after each merge until no merge is due.
    This ends, because the runs that a merge writes do not overlap each other.

    Args:
        fits: whether the disk has room for a merge of these runs. A merge without room does not
            stop others: those of tombstones and deleted topics free room, and write little.
    """
    return next((sorted(chosen) for chosen in _due_merges(runs) if fits(chosen)), [])


def _due_merges(runs: Sequence[Sketch]) -> Iterator[list[int]]:
    """Yield the merges that are due, the most urgent first."""
    yield from filter(None, (_similar_runs(runs), _overlapping_parts(runs)))
    yield from _tombstone_merges(runs)
    yield from _deletion_rewrites(runs)


def _tier(size: int) -> int:
    """Return the tier of a small run: 0 below SMALL_SIZE, one more at each FAN-fold of it."""
    tier = 0
    while size >= SMALL_SIZE * FAN**tier:
        tier += 1
    return tier


def _similar_runs(runs: Sequence[Sketch]) -> list[int]:
    """Return the FAN small runs with the earliest dues, of the smallest tier that has FAN."""
    tiers: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        if run.size < PART_SIZE:
            tiers.setdefault(_tier(run.size), []).append(number)
    for _, members in sorted(tiers.items()):
        if len(members) >= FAN:
            return sorted(members, key=lambda number: runs[number].last)[:FAN]
    return []


def _overlapping_parts(runs: Sequence[Sketch]) -> list[int]:
    """Return the DEPTH widest parts where the most overlap, if at least DEPTH do; else none."""
    parts = [number for number, run in enumerate(runs) if run.size >= PART_SIZE]
    here: list[tuple[Position, int]] = []
    deepest: list[int] = []
    for number in sorted(parts, key=lambda number: runs[number].first):
        while here and here[0][0] < runs[number].first:
            heappop(here)
        heappush(here, (runs[number].last, number))
        if len(here) > len(deepest):
            deepest = [number for _, number in here]
    if len(deepest) < DEPTH:
        return []
    return sorted(deepest, key=lambda number: _width(runs[number]), reverse=True)[:DEPTH]


def _width(run: Sketch) -> int:
    return run.last.due_ms - run.first.due_ms


def _tombstone_merges(runs: Sequence[Sketch]) -> Iterator[list[int]]:
    """Yield each run with those whose tombstones overlap it, if these suffice for a merge."""
    carriers = [number for number, run in enumerate(runs) if run.tombstones]
    carriers.sort(key=lambda number: runs[number].tombstones, reverse=True)
    first = np.array([runs[number].first.due_ms for number in carriers], np.int64)
    last = np.array([runs[number].last.due_ms for number in carriers], np.int64)
    for place, run in enumerate(runs if carriers else ()):
        near = np.flatnonzero((first <= run.last.due_ms) & (last >= run.first.due_ms)).tolist()
        over = [
            carriers[n] for n in near if carriers[n] != place and run.overlaps(runs[carriers[n]])
        ]
        chosen = [place, *over[: DEPTH - 1]]
        tombstones = sum(runs[number].tombstones for number in chosen)
        if over and TOMBSTONE_DIVISOR * tombstones >= sum(runs[number].rows for number in chosen):
            yield chosen


def _deletion_rewrites(runs: Sequence[Sketch]) -> Iterator[list[int]]:
    """Yield each run with enough rows of deleted topics for a rewrite."""
    for number, run in enumerate(runs):
        if run.deleted_rows and DELETED_DIVISOR * run.deleted_rows >= run.rows:
            yield [number]


def part_size(size: int) -> int:
    """Return the size of each part of `size` bytes: equal parts of at least PART_SIZE."""
    # Slightly more, so that the last part is not below PART_SIZE if fewer bytes are written.
    return -(-size // max(1, size // (PART_SIZE + PART_SIZE // 16)))
