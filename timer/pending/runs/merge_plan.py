"""Compaction: which runs are merged next. A pure function of what the runs look like.

    due time -->
    small    ~~~ ~~~~ ~~ ~~~ ~~~~~ ~~       below 64 MiB, by size: eight of about a size -> one
    parts    |------ part ------|---- part ----|
             |--- part ---|------- part -------|   at most eleven lie over each other anywhere:
                    ^ twelve here -> merged        twelve that do become twelve side by side

A merge writes parts of at least 64 MiB, cut in the order of firing. So parts whose time has passed
leave as whole files, unread; none is rewritten because its time came nearer; and a merge takes
inputs of a bounded size, however much is pending. How often a row is rewritten grows with the
logarithm of how many are pending: each merge of parts makes their ranges twelve times narrower.

A tombstone meets its target in the first merge that takes both. Where tombstones gather before
that, their runs are merged with what lies under them. A run of which much is of topics that are
gone is written anew by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np

from timer.model.firing_order import Position

PART_SIZE: Final = 64 << 20
"""Bytes of a part, at least; twice that at most."""
FAN: Final = 8
"""Small runs of one size that become one."""
DEPTH: Final = 12
"""Parts over each other that become as many side by side."""
SMALL_SIZE: Final = 1 << 20
"""Runs below this are of about the same size."""
BURIED: Final = 4
"""Merge where at least one row in so many is a tombstone."""
VACANT: Final = 4
"""Or is of a topic that is gone."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """What the policy knows of a run."""

    first: Position
    """Of the rows that are left: not before the fire position."""
    last: Position
    size: int
    """Bytes of the file, gone rows included: a part does not become small as its time passes."""
    rows: int
    """That are left, about; tombstones included."""
    tombstones: int
    gone: int = 0
    """Rows of topics that are gone, about."""

    def overlaps(self, other: "Sketch") -> bool:
        """Return whether the ranges of the two have a position in common."""
        return self.first <= other.last and other.first <= self.last


def plan(runs: Sequence[Sketch]) -> list[int]:
    """Return which runs to merge now, ascending; none if all is well. DEPTH of them at most.

    The runs have rows left. It is asked again after each merge until it returns nothing; it does,
    because no merge leaves two runs that overlap among what it writes.
    """
    return sorted(_of_one_size(runs) or _over_each_other(runs) or _buried(runs) or _vacant(runs))


def _tier(size: int) -> int:
    """Return the tier of a small run: 0 below SMALL_SIZE, one more at each FAN-fold of it."""
    tier = 0
    while size >= SMALL_SIZE * FAN**tier:
        tier += 1
    return tier


def _of_one_size(runs: Sequence[Sketch]) -> list[int]:
    """Return FAN small runs of the smallest tier that has so many: those of the earliest dues."""
    tiers: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        if run.size < PART_SIZE:
            tiers.setdefault(_tier(run.size), []).append(number)
    for _, members in sorted(tiers.items()):
        if len(members) >= FAN:
            return sorted(members, key=lambda number: runs[number].last)[:FAN]
    return []


def _over_each_other(runs: Sequence[Sketch]) -> list[int]:
    """Return the DEPTH widest of those parts that lie over each other, where the most do."""
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


def _buried(runs: Sequence[Sketch]) -> list[int]:
    """Return a run and the tombstones that lie over it, if there are enough for a merge."""
    graves = [number for number, run in enumerate(runs) if run.tombstones]
    graves.sort(key=lambda number: runs[number].tombstones, reverse=True)
    first = np.array([runs[number].first.due_ms for number in graves], np.int64)
    last = np.array([runs[number].last.due_ms for number in graves], np.int64)
    for place, run in enumerate(runs if graves else ()):
        near = np.flatnonzero((first <= run.last.due_ms) & (last >= run.first.due_ms)).tolist()
        over = [graves[n] for n in near if graves[n] != place and run.overlaps(runs[graves[n]])]
        chosen = [place, *over[: DEPTH - 1]]
        tombstones = sum(runs[number].tombstones for number in chosen)
        if over and BURIED * tombstones >= sum(runs[number].rows for number in chosen):
            return chosen
    return []


def _vacant(runs: Sequence[Sketch]) -> list[int]:
    """Return a run of which enough is gone to write it anew."""
    for number, run in enumerate(runs):
        if run.gone and VACANT * run.gone >= run.rows:
            return [number]
    return []


def part_size(size: int) -> int:
    """Return how large to make each part of `size` bytes: equal ones, PART_SIZE or more."""
    # A little more, so that the last is no smaller than that where fewer bytes come.
    return -(-size // max(1, size // (PART_SIZE + PART_SIZE // 16)))
