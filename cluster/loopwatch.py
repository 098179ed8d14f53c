"""Measures how long the event loop is held by one step (P9: 20 ms at most).

    loop    |-tick-|-tick-|####### one step #######|-tick-
                          due here ^               ^ ran here: held for the difference

A callback asks to run every few milliseconds; by how much it comes late is how long something
else held the loop (up to one interval less, never more). It can't say who: that is what the
profiler is for. A machine without CPU to spare looks the same.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

INTERVAL_S: Final = 0.005
"""A hold is seen too short by up to this; 200 wake-ups a second are 0.3 % of a core."""
LOG_ABOVE_S: Final = 0.1

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """What `call_at` returns."""

    def cancel(self) -> None:
        """Don't call."""


class Loop(Protocol):
    """The part of an event loop that is needed here."""

    def time(self) -> float:
        """Return seconds on the loop's clock."""

    def call_at(self, when: float, callback: Callable[[], object], /) -> Handle:
        """Call back at `when`, or as soon after as the loop is free."""


class LoopWatch:
    """Watches from `start` to `stop`."""

    def __init__(self, loop: Loop, observe: Callable[[float], object]) -> None:
        """`observe` gets every hold, in seconds, also the tiny ones."""
        self._loop = loop
        self._observe = observe
        self._handle: Handle | None = None
        self.longest_s = 0.0
        """The longest hold so far."""

    def start(self) -> None:
        """Begin to watch."""
        assert self._handle is None, "started twice"
        self._arm()

    def stop(self) -> None:
        """End it; may be called at any time."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        due = self._loop.time() + INTERVAL_S
        self._handle = self._loop.call_at(due, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        held_s = max(0.0, self._loop.time() - due)
        self._observe(held_s)
        self.longest_s = max(self.longest_s, held_s)
        if held_s > LOG_ABOVE_S:
            logger.warning("event loop held", extra={"held_ms": round(held_s * 1000)})
        self._arm()
