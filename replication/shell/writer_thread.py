"""One thread that runs functions in the order in which they were put.

A pool of one thread makes a future, takes three locks and wakes the caller for each function. Every
entry waits for one here (docs/adr/0093).
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class WriterThread:
    """Runs functions from its construction until `stop`. They must not raise."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stopping = False
        # As a daemon it does not keep a process that ends because of a disk that hangs.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Run `work` after all that was put before."""
        assert not self._stopping, work
        self._work.put(work)

    def stop(self) -> None:
        """Run all that was put, and end the thread. This blocks."""
        self._stopping = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
