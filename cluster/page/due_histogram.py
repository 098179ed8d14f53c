"""Pending timers of all topics by the time until they are due.

    view, on the loop --> counts from the memtables and the indexes of runs, in a thread

The counts come from this node's applied state, so a follower has them, too. The cost depends on the
rows in memory and the number of runs, and not on the number of topics or of rows in runs.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cluster.state.host import Host
from cluster.state.query_threads import QueryThreads
from timer.model.units import DUE_MS_MAX
from timer.pending.read_view import ReadView
from timer.pending.store import Store

BUCKETS_S: Final = (0, 60, 600, 3_600, 86_400, 604_800)
"""Upper bounds of the buckets, in seconds from now; the last bucket has none. 0: overdue."""


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
        self._executor = ThreadPoolExecutor(1, "due-histogram")
        self._threads = QueryThreads(host, self._executor)

    async def measure(self) -> DueCounts:
        """Return the counts of this moment.

        Raises:
            NotReadyError: merges deleted files of each view.
            StorageError: this node's files are damaged; see Host.on_read_error.
        """
        clock_ms = self._host.now().clock_ms
        until = [*(min(clock_ms + 1_000 * bound, DUE_MS_MAX) for bound in BUCKETS_S), DUE_MS_MAX]
        held = self._store().held
        within, exact, cpu_ms = await self._threads.with_view(
            self._store, lambda view: _count(view, until)
        )
        counts = (b - a for a, b in zip([0, *within], within, strict=False))
        return DueCounts(
            counts=tuple(max(0, count) for count in counts),
            exact=exact,
            held=held,
            cpu_ms=cpu_ms,
        )

    def close(self) -> None:
        """End the thread after a count under way."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _store(self) -> Store:
        return self._host.engine.machine.store


def _count(view: ReadView, until: list[int]) -> tuple[list[int], bool, float]:
    """Return the results of ReadView.count_all, and its processor time in milliseconds."""
    began_s = time.thread_time()
    within, exact = view.count_all(until)
    return within, exact, 1_000 * (time.thread_time() - began_s)
