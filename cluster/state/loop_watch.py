"""Measures how long the event loop is held by one step (P9: 20 ms at most).

    loop    |-tick-|-tick-|####### one step #######|-tick-
                          due here ^               ^ ran here: held for the difference

A callback asks to run every few milliseconds; by how much it comes late is how long something
else held the loop (up to one interval less, never more). `Steps` times the functions that a node's
own steps consist of, and so names the one that held it; the rest is what the profiler is for. A
machine without CPU to spare looks the same, and no function took that long. While the loop is on
time it is looked at less often: such wake-ups were half of what an idle node's loop did.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol, TypeVar

INTERVAL_S: Final = 0.005
"""A hold is seen too short by up to this."""
QUIET_INTERVAL_S: Final = 0.02
"""The same, of a loop that was on time for a while: of the first hold of many."""
QUIET_AFTER: Final = 100
"""Looks in a row at which the loop was on time."""
ON_TIME_S: Final = 0.005
"""A loop's timers are whole milliseconds, and another process adds some: neither is a hold."""
LOG_ABOVE_S: Final = 0.1
STEP_ABOVE_S: Final = 0.001
"""Shorter calls are not told of one by one."""
OTHER: Final = "other"
"""No function that `Steps` timed took half of the hold."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """What `call_at` returns."""

    def cancel(self) -> None:
        """Don't call."""


class WatchedLoop(Protocol):
    """The part of an event loop that is needed here."""

    def time(self) -> float:
        """Return seconds on the loop's clock."""

    def call_at(self, when: float, callback: Callable[[], object], /) -> Handle:
        """Call back at `when`, or as soon after as the loop is free."""


class Steps:
    """Times functions that the loop calls; `observe` gets name and seconds of each long call."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.observe: Callable[[str, float], object] = lambda name, seconds: None
        self._clock = clock
        self._longest = "", 0.0

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function."""
        began_s = self._clock()
        try:
            return work(*args, **kwargs)
        finally:
            took_s = self._clock() - began_s
            if took_s > STEP_ABOVE_S:
                self.observe(work.__qualname__, took_s)
            if took_s > self._longest[1]:
                self._longest = work.__qualname__, took_s

    def held_by(self, held_s: float) -> str:
        """Return the function that held the loop since the last call, OTHER if none did."""
        (name, took_s), self._longest = self._longest, ("", 0.0)
        return name if 2 * took_s >= held_s else OTHER


class LoopWatch:
    """Watches from `start` to `stop`."""

    def __init__(
        self, loop: WatchedLoop, observe: Callable[[float], object], steps: Steps | None = None
    ) -> None:
        """`observe` gets every hold, in seconds, also the tiny ones; `steps` name the long ones."""
        self._loop = loop
        self._observe = observe
        self._steps = steps or Steps()
        self._handle: Handle | None = None
        self._due_s = 0.0
        self._on_time = 0
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
        quiet = self._on_time >= QUIET_AFTER
        self._due_s = self._loop.time() + (QUIET_INTERVAL_S if quiet else INTERVAL_S)
        self._handle = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        held_s = max(0.0, self._loop.time() - self._due_s)
        self._on_time = self._on_time + 1 if held_s <= ON_TIME_S else 0
        self._observe(held_s)
        self.longest_s = max(self.longest_s, held_s)
        step = self._steps.held_by(held_s)
        if held_s > LOG_ABOVE_S:
            held = {"held_ms": round(held_s * 1000), "step": step}
            logger.warning("event loop held", extra=held)
        self._arm()
