"""Pending timers of all topics by the time until they are due.

    cut, on the loop --> counts from the memtables and the indexes of runs, in a thread

The counts come from this node's applied state, so a follower has them, too. The cost depends on the
rows in memory and the number of runs, and not on the number of topics or of rows in runs.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cluster.state.host import Host
from timer.model.timer_errors import NotReadyError, StorageError
from timer.model.units import DUE_MS_MAX
from timer.pending.read_view import Cut

BUCKETS_S: Final = (0, 60, 600, 3_600, 86_400, 604_800)
"""Upper bounds of the buckets, in seconds from now; the last bucket has none. 0: overdue."""
CUTS_MAX: Final = 3
"""Cuts that a count may take. It takes a new one if a merge has deleted files of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueCounts:
    """Pending timers by bucket."""

    counts: tuple[int, ...]
    """One more than BUCKETS_S: due within this bound and after the one before."""
    exact: bool
    """False: cancelled timers or deleted topics in runs make some counts estimates."""
    held: int
    """Timers of paused topics among the overdue ones."""
    cpu_ms: float
    """Processor time of the count, in milliseconds."""


class DueHistogram:
    """Counts the pending timers of a node; see the module."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._threads = ThreadPoolExecutor(1, "due-histogram")

    async def measure(self) -> DueCounts:
        """Return the counts of this moment.

        Raises:
            NotReadyError: merges deleted files of each cut.
            StorageError: this node's files are damaged; see Host.read_failed.
        """
        clock_ms = self._host.now().clock_ms
        until = [*(min(clock_ms + 1_000 * bound, DUE_MS_MAX) for bound in BUCKETS_S), DUE_MS_MAX]
        loop = asyncio.get_running_loop()
        for _ in range(CUTS_MAX):
            store = self._host.engine.machine.store
            cut, held = store.cut(), store.held
            with suppress(FileNotFoundError):
                within, exact, cpu_ms = await loop.run_in_executor(
                    self._threads, self._count, loop, cut, until
                )
                counts = (b - a for a, b in zip([0, *within], within, strict=False))
                return DueCounts(
                    counts=tuple(max(0, count) for count in counts),
                    exact=exact,
                    held=held,
                    cpu_ms=cpu_ms,
                )
        raise NotReadyError("merges delete runs faster than the count reads them")

    def close(self) -> None:
        """End the thread after a count under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _count(
        self, loop: asyncio.AbstractEventLoop, cut: Cut, until: list[int]
    ) -> tuple[list[int], bool, float]:
        began_s = time.thread_time()
        try:
            within, exact = cut.count_all(until)
        except StorageError as error:  # reported even if the caller has given up
            loop.call_soon_threadsafe(self._host.read_failed, error)
            raise
        return within, exact, 1_000 * (time.thread_time() - began_s)
