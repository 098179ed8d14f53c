"""Delayed work: a few threads that run functions at given times."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from chaos.workloads.history_books import Books


class Agenda:
    """Runs functions in the order of their times, none early, until it is stopped."""

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
        """Run `work` after `delay_s`; drop it if the agenda is stopped first."""
        with self._changed:
            entry = (time.monotonic() + delay_s, next(self._numbers), work)
            heapq.heappush(self._heap, entry)
            self._changed.notify()

    def stop(self) -> None:
        """Drop all work that has not begun. Returns at once; see `join`."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, at most `timeout_s` for each; return whether all have ended."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with self._books.noting_failure():
            while (work := self._next()) is not None:
                work()

    def _next(self) -> Callable[[], object] | None:
        """Wait for the time of the next work and return it. None: the agenda is stopped."""
        with self._changed:
            while not self._stopped:
                left_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(left_s)
            return None
