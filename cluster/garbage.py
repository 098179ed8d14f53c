"""Cyclic garbage is collected without a look at all that a node holds.

    made --young--> old --sweep: collected--> (more than 20,000 left?) --> aside, looked at no more
                                              (twice as much aside?) ----> all of it, once

By itself Python looks at everything that has survived, again each time that there is a quarter
more: with ten thousand topics that held the event loop for a quarter of a second (P9). What is of
no use and in no cycle goes at once, here as ever; a cycle that had been set aside waits until there
is twice as much, and half a million objects more, or for six hours. Then the loop is held for that
quarter of a second, too. What a flush holds of each topic for a second is not swept meanwhile.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Any, Final, Protocol

SWEEP_S: Final = 0.25
YOUNG_ROUNDS: Final = 4
"""Collections of what is young between two sweeps: 31,000 new objects, unless most went at once."""
ALL_EVERY_S: Final = 6 * 3600.0
LEFT_MAX: Final = 20_000
"""Objects that the next sweep looks at again; a slow core takes 0.3 microseconds for each."""
SINCE_MIN: Final = 500_000
"""Objects that are set aside before all are looked at again, however few there were: 50 MB or so,
if all of them were of no use."""
NEVER: Final = 1 << 30


class Collector(Protocol):
    """The part of the module `gc` that is needed here."""

    def collect(self) -> int:
        """Collect everything that is not aside."""

    def freeze(self) -> None:
        """Set aside whatever is there."""

    def unfreeze(self) -> None:
        """Bring back what is aside."""

    def get_freeze_count(self) -> int:
        """Return how many objects are aside. It takes a while for many."""

    def get_count(self) -> tuple[int, int, int]:
        """Return (new objects, collections of the first, collections of the second generation)."""

    def get_objects(self, generation: int | None = None) -> list[Any]:
        """Return what is not aside, of one generation or all."""

    def get_threshold(self) -> tuple[int, int, int]:
        """Return when each generation is collected."""

    def set_threshold(self, young: int, middle: int, old: int, /) -> None:
        """Set that."""


class Sweeper:
    """See the module. There is one collector in a process."""

    def __init__(self, collector: Collector = gc) -> None:
        self._gc = collector
        self._aside = 0
        """Objects that were there when all were looked at last."""
        self._since = 0
        """Objects that were set aside since then; some of them may be gone."""
        self._sweeps = 0

    def start(self) -> None:
        """Set aside what is there; from now on old objects are looked at in sweeps alone."""
        young, middle, _ = self._gc.get_threshold()
        self._gc.set_threshold(young, middle, NEVER)
        self._look_at_all()

    def sweep(self, *, busy: bool = False) -> None:
        """Collect what is not aside, if enough has been made since the last time.

        Nothing while the process is busy with much that soon goes.
        """
        self._sweeps += 1
        if busy:
            return
        if self._sweeps * SWEEP_S >= ALL_EVERY_S:
            self._look_at_all()
        if self._gc.get_count()[2] < YOUNG_ROUNDS:
            return
        self._gc.collect()
        left = len(self._gc.get_objects(generation=2))
        if left <= LEFT_MAX:
            return
        self._gc.freeze()
        self._since += left
        enough = max(self._aside, SINCE_MIN)
        if self._since > enough:
            self._since = self._gc.get_freeze_count() - self._aside
            if self._since > enough:
                self._look_at_all()

    async def run(self, busy: Callable[[], bool]) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(busy=busy())

    def _look_at_all(self) -> None:
        self._gc.unfreeze()
        self._gc.collect()
        self._gc.freeze()
        self._aside, self._since, self._sweeps = self._gc.get_freeze_count(), 0, 0
