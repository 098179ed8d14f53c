"""Virtual time: one queue of calls, in microseconds.

The trace is a running hash over the time and number of every call, and over all bytes that were
sent and committed. The same seed gives the same trace. Two runs that differ give different traces.
"""

import hashlib
import heapq
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

TRAIL_LENGTH = 40
_CALL = struct.Struct("<QQ")


class Timeline:
    """The only clock and the only scheduler of a world."""

    def __init__(self) -> None:
        self.now_us = 0
        self.events = 0
        """Number of calls made so far."""
        self.trail: deque[tuple[int, str, object]] = deque(maxlen=TRAIL_LENGTH)
        """The last events as (time in microseconds, subject, event), newest last."""
        self._queue: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0
        self._trace = hashlib.blake2b(digest_size=8)
        self.record = self._trace.update
        """Add bytes to the trace."""

    @property
    def trace(self) -> str:
        """The hash of all calls so far, 16 hex digits."""
        return self._trace.hexdigest()

    def after(self, delay_us: int, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` in `delay_us`; calls of one instant run in the order of `after`."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_us + delay_us, self._number, call, args))

    def note(self, subject: str, what: object) -> None:
        """Add an event to the trail; it is formatted only for a report."""
        self.trail.append((self.now_us, subject, what))

    def run_until(self, end_us: int) -> None:
        """Make every call up to `end_us`."""
        queue = self._queue
        while queue and queue[0][0] <= end_us:
            self.now_us, number, call, args = heapq.heappop(queue)
            self.events += 1
            self.record(_CALL.pack(self.now_us, number))
            call(*args)
        self.now_us = end_us
