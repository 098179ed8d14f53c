"""Work for later: a few threads that do things at their time."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from chaos.workloads.history_books import Books


class Agenda:
    """Does things in the order of their times, none before its own, until it is stopped."""

    def __init__(self, name: str, books: Books, *, threads: int = 1) -> None:
        self._books = books
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def after(self, delay_s: float, work: Callable[[], object]) -> None:
        """Do `work` once `delay_s` has passed, unless stopped before."""
        with self._changed:
            entry = (time.monotonic() + delay_s, next(self._numbers), work)
            heapq.heappush(self._heap, entry)
            self._changed.notify()

    def stop(self) -> None:
        """Start nothing any more. Returns at once; see `join`."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Return whether its threads have ended, each within `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with self._books.noting_failure():
            while (work := self._next()) is not None:
                work()

    def _next(self) -> Callable[[], object] | None:
        """Return the next work when its time has come. None: stopped."""
        with self._changed:
            while not self._stopped:
                left_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(left_s)
            return None
