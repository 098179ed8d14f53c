"""Threads in which queries read the pending timers of a node, beside the event loop.

    view, on the loop --> read, in a thread --> result

A thread reads a view, or files that never change, and no other state. After a merge that deleted
files of the view, the query takes a new one.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from cluster.state.host import Host
from timer.model.timer_errors import NotReadyError, StorageError
from timer.pending.read_view import ReadView
from timer.pending.store import Store

CUTS_MAX: Final = 3
"""Cuts that a query may take."""
_T = TypeVar("_T")


class QueryThreads:
    """Runs queries in threads, and reports the damage that they find."""

    def __init__(self, host: Host, threads: Executor) -> None:
        self._host, self._threads = host, threads

    async def with_view(self, store: Callable[[], Store], read: Callable[[ReadView], _T]) -> _T:
        """Return the result of `read` on a view of the present store.

        Raises:
            NotReadyError: merges deleted files of each view.
            StorageError: this node's files are damaged; see Host.on_read_error.
        """
        for _ in range(CUTS_MAX):
            view = store().read_view()
            with suppress(FileNotFoundError):
                return await self.run(partial(read, view))
        raise NotReadyError("merges delete runs faster than the query reads them")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which needs no view.

        Raises:
            StorageError: this node's files are damaged; see Host.on_read_error.
        """
        loop = asyncio.get_running_loop()

        def run() -> _T:
            try:
                return work()
            except StorageError as error:  # reported even if the caller has given up
                loop.call_soon_threadsafe(self._host.on_read_error, error)
                raise

        return await loop.run_in_executor(self._threads, run)
