"""The pace of flushes and merges: fast enough to keep up, slow enough not to delay the log.

    ingest, bytes/s  --x 2-->  rate  -->  after each megabyte a flush or merge waits for its turn

Three flushes on one disk at full speed raised the log's fdatasync from 1 ms to 100 ms.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

RATE_MIN: Final = 16 << 20
"""Bytes per second, at least. A flush of 64 MB then takes four seconds."""
INGEST_FACTOR: Final = 2
"""A flush or merge may write this many times the ingest rate."""
OBSERVE_S: Final = 0.25
FORGET: Final = 0.9
"""Factor by which the rate falls per OBSERVE_S while less comes in."""


class WriteAbandoned(Exception):
    """A merge was abandoned because the process ends. The next process starts the merge again."""


class IngestRate:
    """Bytes per second that come in. The rate rises at once and falls slowly."""

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._bytes = 0
        self.rate = 0.0

    def add(self, size: int, now_s: float) -> None:
        """Count `size` bytes that came since the last call."""
        self._bytes += size
        passed = now_s - self._at_s
        if passed >= OBSERVE_S:
            self.rate = max(self._bytes / passed, self.rate * FORGET ** (passed / OBSERVE_S))
            self._at_s, self._bytes = now_s, 0

    def write_rate(self) -> float:
        """Return the bytes per second that a flush or a merge may write."""
        return max(RATE_MIN, INGEST_FACTOR * self.rate)


class Pacer:
    """Delays a writing thread, which calls it after each step. `rate` returns bytes per second."""

    def __init__(
        self,
        rate: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._hurry = threading.Event()
        self._wait = wait or self._hurry.wait
        self._abandoned = False
        self._next_s = 0.0

    def __call__(self, size: int) -> None:
        """Wait until `size` more bytes may be written.

        Raises:
            WriteAbandoned: the process ends.
        """
        if self._abandoned:
            raise WriteAbandoned("the process ends")
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s) + size / self._rate()
        if not self._hurry.is_set() and self._next_s > now_s:
            self._wait(self._next_s - now_s)

    def hurry(self) -> None:
        """Stop waiting, now and at later steps."""
        self._hurry.set()

    def abandon(self) -> None:
        """Raise WriteAbandoned at the next step, and stop waiting."""
        self._abandoned = True
        self._hurry.set()
