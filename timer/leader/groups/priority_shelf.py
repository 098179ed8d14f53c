"""Priority in a shared group: its first ready messages, sorted by priority.

    ready --the first SHELF_MAX--> 9: o o o      RUN messages of the highest level, then
                                   4: o o o o    the OLDEST of all levels, and again
                                   0: o o

A delivery has messages of one level, or some of the OLDEST, so that a consumer with a long inbox
gets them in this order. While messages of several levels wait, each RUN messages of the highest one
are followed by the OLDEST ones, by their queue offset. A message behind k earlier ready ones is
therefore among the next WAIT_MAX(k) deliveries, whatever has a higher priority:

    (k // OLDEST + 1) * (RUN + OLDEST)

Messages beyond the first SHELF_MAX are not sorted. A pure core, in the leader's memory; a new
leader fills it again.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import U64
from timer.model.row_traits import PRIORITY_MAX

SHELF_MAX: Final = 65_536
FILL_MAX: Final = 8_192
"""Messages that one look for free messages adds: their priorities take about a millisecond."""
RUN: Final = 64
OLDEST: Final = 8


class PriorityShelf:
    """See the module. It may have messages that are not free any more; the caller removes them."""

    __slots__ = ("_levels", "_oldest_left", "_run_taken", "count")

    def __init__(self) -> None:
        self._levels = [np.zeros(0, np.uint64) for _ in range(PRIORITY_MAX + 1)]
        """Offsets of each priority, ascending."""
        self.count = 0
        self._run_taken = 0
        """Messages of the highest level taken since the oldest ones, while others waited."""
        self._oldest_left = 0
        """Messages to be taken by their age now."""

    @property
    def levels(self) -> list[U64]:
        """Offsets of each priority that has some, ascending; the highest priority first."""
        return [offsets for offsets in reversed(self._levels) if len(offsets)]

    def put(self, offsets: U64, priority: npt.NDArray[np.uint8]) -> None:
        """Add messages, ascending, which are not on the shelf."""
        for level in np.unique(priority).tolist():
            old, new = self._levels[level], offsets[priority == level]
            both = np.concatenate([old, new])
            self._levels[level] = both if not len(old) or old[-1] < new[0] else np.sort(both)
        self.count += len(offsets)

    def choose(self, most: int) -> U64:
        """Return up to `most` messages that are next, ascending. They stay on the shelf.

        They are copied: a lease that kept a view would keep its whole level in memory.
        """
        levels = self.levels
        if not levels:
            return np.zeros(0, np.uint64)
        if len(levels) == 1:
            return levels[0][:most].copy()
        if not self._oldest_left:
            return levels[0][: min(most, RUN - self._run_taken)].copy()
        most = min(most, self._oldest_left)
        return np.sort(np.concatenate([offsets[:most] for offsets in levels]))[:most]

    def take(self, offsets: U64) -> None:
        """Remove messages that `choose` returned, or the first of them: they are delivered."""
        if self._oldest_left:
            self._oldest_left = max(0, self._oldest_left - len(offsets))
            last = offsets[-1]  # all older ones go with it
            self._levels = [_rest(held, held.searchsorted(last, "right")) for held in self._levels]
        else:
            level = max(at for at, held in enumerate(self._levels) if len(held))
            if self.count > len(self._levels[level]):  # others wait
                self._run_taken += len(offsets)
                if self._run_taken >= RUN:
                    self._run_taken, self._oldest_left = 0, OLDEST
            self._levels[level] = _rest(self._levels[level], len(offsets))
        self.count -= len(offsets)

    def retain(self, retained: Callable[[U64], U64]) -> None:
        """Keep those messages that `retained` returns, of one priority at a time, ascending."""
        self._levels = [retained(offsets) if len(offsets) else offsets for offsets in self._levels]
        self.count = sum(map(len, self._levels))


def _rest(held: U64, count: int | np.intp) -> U64:
    """Return a level behind its first messages: a view, unless most of its memory is not needed."""
    left: U64 = held[count:]
    whole = left.base
    return left.copy() if whole is not None and 2 * len(left) < len(whole) else left
