"""Python's garbage collector, without repeated visits to all objects of a node.

    made --young--> old --sweep: collected--> (more than 20,000 left?) --> frozen, visited no more
                                              (twice as many frozen?) ---> all are visited, once

By default Python visits all surviving objects again whenever their number has grown by a quarter.
With ten thousand topics that held the event loop for a quarter of a second. Garbage without a
cycle is freed at once, as always. A frozen cycle waits until twice as many objects, and at least
half a million more, are frozen, or for six hours. Then the loop is held for that quarter of a
second as well. The objects of a running flush are not swept.

A few objects can hold much memory, so bytes count, too. Growth by 64 MiB since the last sweep is a
reason for a sweep. If memory has also doubled, and has grown by at least half a gigabyte, all
objects are visited. After a burst the free pages return to the system.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Any, Final, Protocol

from cluster.node.allocator import release_free_pages
from cluster.rpc.memory import resident_bytes
from cluster.settings.rounds import next_round

SWEEP_S: Final = 0.25
YOUNG_ROUNDS: Final = 4
"""Collections of the young generation between two sweeps: 31,000 objects if most survive."""
ALL_EVERY_S: Final = 6 * 3600.0
LEFT_MAX: Final = 20_000
"""The most objects that the next sweep visits again; each takes a slow core 0.3 microseconds."""
SINCE_MIN: Final = 500_000
"""The least number of objects frozen before all are visited again: about 50 MB if all of them were
garbage.
"""
NEVER: Final = 1 << 30
GROWN_BYTES: Final = 64 << 20
"""Growth of resident memory since the last sweep that makes the next one due."""
GROWN_BYTES_BUSY: Final = 512 << 20
"""The same while the process is busy. Also the least growth, besides a doubling, before all objects
are visited again.
"""
TRIM_BYTES: Final = 16 << 20
"""Free pages return to the system after growth by this amount, followed by as many sweeps without
growth: the burst is over.
"""
TRIM_SWEEPS: Final = 4
RETRIM_SWEEPS: Final = 120
"""Sweeps after which free pages return once more: a flush and the log's cache free memory of the
burst within half a minute.
"""


class Collector(Protocol):
    """The functions of the module `gc` that are used here."""

    def collect(self) -> int:
        """Collect all objects that are not frozen; return the number of collected ones."""

    def freeze(self) -> None:
        """Freeze all present objects."""

    def unfreeze(self) -> None:
        """Unfreeze all objects."""

    def get_freeze_count(self) -> int:
        """Return the number of frozen objects. It takes a while for many."""

    def get_count(self) -> tuple[int, int, int]:
        """Return (new objects, collections of the first, collections of the second generation)."""

    def get_objects(self, generation: int | None = None) -> list[Any]:
        """Return the objects that are not frozen, of one generation or all."""

    def get_threshold(self) -> tuple[int, int, int]:
        """Return the thresholds of the three generations."""

    def set_threshold(self, young: int, middle: int, old: int, /) -> None:
        """Set the thresholds of the three generations."""


class Sweeper:
    """The sweeper; see the module. A process has one collector.

    From its creation until `start` no object is visited: the state that a start reads from disk
    stays, and visits would take a quarter of its time. Later only sweeps visit old objects.
    """

    def __init__(
        self, collector: Collector = gc, resident: Callable[[], int] = resident_bytes
    ) -> None:
        """`resident` returns the process's memory in bytes."""
        self._gc = collector
        self._resident = resident
        self._swept_bytes = 0
        """The least resident memory since the last sweep, in bytes."""
        self._visited_bytes = 0
        """Resident memory after the last visit to all objects, in bytes."""
        self._trimmed_bytes = self._last_bytes = 0
        """The least resident bytes since free pages were returned, and those at the last sweep."""
        self._quiet = 0
        """Sweeps since memory last grew."""
        self._sweeps_to_trim = 0
        """Sweeps until free pages return once more. 0 or less: they do not."""
        self._kept_objects = 0
        """Objects after the last visit to all of them."""
        self._frozen_since = 0
        """Objects frozen since then; some of them may be freed."""
        self._sweeps = 0
        self._young, self._middle, _ = collector.get_threshold()
        collector.set_threshold(NEVER, NEVER, NEVER)

    def start(self) -> None:
        """Freeze the present objects, which the start has read and made. None is visited."""
        self._gc.set_threshold(self._young, self._middle, NEVER)
        self._gc.freeze()
        self._record_visit()

    def sweep(self, *, busy: bool = False) -> None:
        """Collect objects that are not frozen, if enough are new since the last sweep.

        Skip the sweep while the process is busy with many short-lived objects.
        """
        self._sweeps += 1
        resident = self._resident()
        self._swept_bytes = min(self._swept_bytes, resident)
        grown = resident - self._swept_bytes >= (GROWN_BYTES_BUSY if busy else GROWN_BYTES)
        if busy and not grown:
            return
        if self._sweeps * SWEEP_S >= ALL_EVERY_S:
            self._visit_all()
        if self._gc.get_count()[2] < YOUNG_ROUNDS and not grown:
            return
        self._gc.collect()
        self._swept_bytes = self._resident()
        if self._swept_bytes - self._visited_bytes >= max(self._visited_bytes, GROWN_BYTES_BUSY):
            self._visit_all()
            return
        left = len(self._gc.get_objects(generation=2))
        if left <= LEFT_MAX:
            return
        self._gc.freeze()
        self._frozen_since += left
        enough = max(self._kept_objects, SINCE_MIN)
        if self._frozen_since > enough:
            self._frozen_since = self._gc.get_freeze_count() - self._kept_objects
            if self._frozen_since > enough:
                self._visit_all()

    async def run(self, busy: Callable[[], bool]) -> None:
        """Sweep until cancelled."""
        while True:
            await next_round(SWEEP_S)
            self.sweep(busy=busy())
            if self._may_trim():
                await asyncio.get_running_loop().run_in_executor(None, release_free_pages)
                self._trimmed_bytes = self._resident()

    def _may_trim(self) -> bool:
        """Return whether memory has grown and no longer grows, or did so a while ago."""
        resident = self._resident()
        self._quiet = self._quiet + 1 if resident - self._last_bytes < TRIM_BYTES // 4 else 0
        self._last_bytes = resident
        self._trimmed_bytes = min(self._trimmed_bytes, resident)
        self._sweeps_to_trim -= 1
        if self._quiet >= TRIM_SWEEPS and resident - self._trimmed_bytes >= TRIM_BYTES:
            self._sweeps_to_trim = RETRIM_SWEEPS
            return True
        return self._sweeps_to_trim == 0

    def _visit_all(self) -> None:
        self._gc.unfreeze()
        self._gc.collect()
        self._gc.freeze()
        self._record_visit()

    def _record_visit(self) -> None:
        self._kept_objects, self._frozen_since, self._sweeps = self._gc.get_freeze_count(), 0, 0
        self._swept_bytes = self._visited_bytes = self._resident()
