"""Cyclic garbage is collected without a look at all that a node holds.

    made --young--> old --sweep: collected--> (more than 20,000 left?) --> aside, looked at no more
                                              (twice as much aside?) ----> all of it, once

By itself Python looks at everything that has survived, again each time that there is a quarter
more: with ten thousand topics that held the event loop for a quarter of a second (P9). What is of
no use and in no cycle goes at once, here as ever; a cycle that had been set aside waits until there
is twice as much, and half a million objects more, or for six hours. Then the loop is held for that
quarter of a second, too. What a flush holds of each topic for a second is not swept meanwhile.

Few objects can hold much: so bytes decide as well. Memory that has grown by 64 MiB since the last
sweep is a reason to sweep, and to look at all if it has doubled, by half a gigabyte at least. After
a burst the free pages go back to the system.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Any, Final, Protocol

from cluster.node.allocator import give_back_free_pages
from cluster.rpc.memory import resident_bytes

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
GROWN_BYTES: Final = 64 << 20
"""Resident memory: more than at the last sweep by so much, and the next one is due."""
GROWN_BYTES_BUSY: Final = 512 << 20
"""The same while the process is busy; and since all was looked at, besides having doubled."""
TRIM_BYTES: Final = 16 << 20
"""Free pages go back to the system once memory has grown by so much, and for so many sweeps it has
not grown: a burst is over."""
TRIM_SWEEPS: Final = 4


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
    """See the module. There is one collector in a process.

    From the first moment old objects are looked at in sweeps alone: what a start reads from disk
    stays, and to look at it on the way would take as long as to read it.
    """

    def __init__(
        self, collector: Collector = gc, resident: Callable[[], int] = resident_bytes
    ) -> None:
        """`resident` returns the process's memory in bytes."""
        self._gc = collector
        self._resident = resident
        self._swept_bytes = 0
        """Resident after the last sweep, or less: the least since then."""
        self._looked_bytes = 0
        """Resident after all were looked at last."""
        self._trimmed_bytes = self._last_bytes = 0
        """Resident after free pages went back last, or less; and at the last sweep."""
        self._quiet = 0
        """Sweeps since memory grew."""
        self._aside = 0
        """Objects that were there when all were looked at last."""
        self._since = 0
        """Objects that were set aside since then; some of them may be gone."""
        self._sweeps = 0
        young, middle, _ = collector.get_threshold()
        collector.set_threshold(young, middle, NEVER)

    def start(self) -> None:
        """Set aside what is there."""
        self._look_at_all()

    def sweep(self, *, busy: bool = False) -> None:
        """Collect what is not aside, if enough has been made since the last time.

        Nothing while the process is busy with much that soon goes.
        """
        self._sweeps += 1
        resident = self._resident()
        self._swept_bytes = min(self._swept_bytes, resident)
        grown = resident - self._swept_bytes >= (GROWN_BYTES_BUSY if busy else GROWN_BYTES)
        if busy and not grown:
            return
        if self._sweeps * SWEEP_S >= ALL_EVERY_S:
            self._look_at_all()
        if self._gc.get_count()[2] < YOUNG_ROUNDS and not grown:
            return
        self._gc.collect()
        self._swept_bytes = self._resident()
        if self._swept_bytes - self._looked_bytes >= max(self._looked_bytes, GROWN_BYTES_BUSY):
            self._look_at_all()
            return
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
            if self._may_trim():
                await asyncio.get_running_loop().run_in_executor(None, give_back_free_pages)
                self._trimmed_bytes = self._resident()

    def _may_trim(self) -> bool:
        """Return whether memory has grown, and grows no more."""
        resident = self._resident()
        self._quiet = self._quiet + 1 if resident - self._last_bytes < TRIM_BYTES // 4 else 0
        self._last_bytes = resident
        self._trimmed_bytes = min(self._trimmed_bytes, resident)
        return self._quiet >= TRIM_SWEEPS and resident - self._trimmed_bytes >= TRIM_BYTES

    def _look_at_all(self) -> None:
        self._gc.unfreeze()
        self._gc.collect()
        self._gc.freeze()
        self._aside, self._since, self._sweeps = self._gc.get_freeze_count(), 0, 0
        self._swept_bytes = self._looked_bytes = self._resident()
