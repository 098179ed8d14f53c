"""The pace of background writing: so fast that it keeps up, so slow that the log is not disturbed.

    ingest, bytes/s  --x 2-->  rate  -->  after each megabyte a flush or merge waits for its turn

Three flushes on one disk, each as fast as it could, took the log's fdatasync from 1 ms to 100 ms.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

RATE_MIN: Final = 16 << 20
"""Bytes a second, however little comes in: a flush of 64 MB then takes four seconds."""
INGEST_FACTOR: Final = 2
OBSERVE_S: Final = 0.25
FORGET: Final = 0.9
"""What is left of an old rate after each OBSERVE_S in which less came."""


class Abandoned(Exception):
    """A merge was given up, because the process ends. The next one begins it anew."""


class IngestRate:
    """Bytes a second that come in: at once when it rises, slowly when it falls."""

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._bytes = 0
        self.rate = 0.0

    def add(self, size: int, now_s: float) -> None:
        """So many bytes came since the last call."""
        self._bytes += size
        passed = now_s - self._at_s
        if passed >= OBSERVE_S:
            self.rate = max(self._bytes / passed, self.rate * FORGET ** (passed / OBSERVE_S))
            self._at_s, self._bytes = now_s, 0

    def writing(self) -> float:
        """Return how many bytes a second a flush or a merge may write."""
        return max(RATE_MIN, INGEST_FACTOR * self.rate)


class Pacer:
    """Called by a writing thread after each step. `rate` says what is allowed now, in bytes/s."""

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
        """Wait until `size` bytes more may be written.

        Raises:
            Abandoned: nobody wants the result any more.
        """
        if self._abandoned:
            raise Abandoned("the process ends")
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s) + size / self._rate()
        if not self._hurry.is_set() and self._next_s > now_s:
            self._wait(self._next_s - now_s)

    def hurry(self) -> None:
        """Wait no more."""
        self._hurry.set()

    def abandon(self) -> None:
        """Let the writing end at its next step."""
        self._abandoned = True
        self._hurry.set()
