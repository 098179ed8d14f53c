"""Measures how long one step holds the event loop (at most 20 ms: P9 in docs/guarantees.md).

    loop    |-tick-|-tick-|####### one step #######|-tick-
                          due here ^               ^ ran here: held for the difference

A callback is due every few milliseconds. Its delay is the time for which another step held the
loop. The measured value is at most one interval too small, and never too large. `Steps` times the
functions of which a node's own steps consist, and so names the longest. Use the profiler for the
rest. A machine without spare CPU also delays the callback; then no function took that long, and the
loop's thread worked for less than half of the delay. Until the loop's own work delays the callback,
the callback runs less often, and on an idle node rarely: such wake-ups were half of its work.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol, TypeVar

from cluster.settings.rounds import wait_s

INTERVAL_S: Final = 0.005
"""A measured hold is too short by up to the interval, on a busy loop this one."""
QUIET_INTERVAL_S: Final = 0.02
"""The interval after QUIET_AFTER callbacks on time, until the loop's own work makes one late."""
IDLE_INTERVAL_S: Final = 0.25
"""The interval while the callbacks are also on time and the loop's thread works little. They then
run with other periodic work (cluster/settings/rounds.py)."""
IDLE_SHARE: Final = 0.05
"""A loop whose thread works for less than this share of the time is idle."""
IDLE_WORK_S: Final = 0.02
"""Work of the thread in IDLE_INTERVAL_S that ends the longer intervals: it may be one step."""
SHARE_OVER: Final = 16
"""Callbacks over which that share is averaged."""
QUIET_AFTER: Final = 100
"""Callbacks in a row that no work of the loop made late."""
ON_TIME_S: Final = 0.005
"""Smaller delays count as on time: the loop's timers have whole milliseconds, and other processes
add some."""
LOG_ABOVE_S: Final = 0.1
"""Longer holds are logged."""
STEP_ABOVE_S: Final = 0.001
"""Shorter calls are not observed one by one."""
OTHER: Final = "other"
"""The name of a hold if no timed function took half of it."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """The return value of `call_at`."""

    def cancel(self) -> None:
        """Don't call back."""


class WatchedLoop(Protocol):
    """The methods of an event loop that the watch calls."""

    def time(self) -> float:
        """Return seconds on the loop's clock."""

    def call_at(self, when: float, callback: Callable[[], object], /) -> Handle:
        """Call back at `when`, or as soon after as the loop is free."""


class Steps:
    """Times functions that the loop calls; `observe` gets name and seconds of each long call."""

    def __init__(
        self,
        observe: Callable[[str, float], object] = lambda name, seconds: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._observe = observe
        self._clock = clock
        self._longest = "", 0.0

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function and measure its time."""
        began_s = self._clock()
        try:
            return work(*args, **kwargs)
        finally:
            took_s = self._clock() - began_s
            if took_s > STEP_ABOVE_S:
                self._observe(work.__qualname__, took_s)
            if took_s > self._longest[1]:
                self._longest = work.__qualname__, took_s

    def blocking_call(self, held_s: float) -> str:
        """Return the function that held the loop since the last call; OTHER: none did."""
        (name, took_s), self._longest = self._longest, ("", 0.0)
        return name if 2 * took_s >= held_s else OTHER


class LoopWatch:
    """Watches from `start` to `stop`."""

    def __init__(
        self,
        loop: WatchedLoop,
        observe: Callable[[float], object],
        steps: Steps | None = None,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        """`observe` gets every hold in seconds, also the shortest; `steps` names the long ones.

        `worked` returns the seconds of CPU time of the loop's thread.
        """
        self._loop = loop
        self._observe = observe
        self._steps = steps or Steps()
        self._worked = worked
        self._worked_s = 0.0
        self._share = 1.0
        """Share of the time for which the loop's thread works, of late."""
        self._handle: Handle | None = None
        self._armed_s = self._due_s = 0.0
        self._on_time = 0
        self.longest_s = 0.0
        """Seconds of the longest hold so far."""

    def start(self) -> None:
        """Start the callbacks."""
        assert self._handle is None, "started twice"
        self._arm()

    def stop(self) -> None:
        """Stop the callbacks; allowed at any time."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        interval_s = INTERVAL_S
        if self._on_time >= QUIET_AFTER:
            interval_s = IDLE_INTERVAL_S if self._share < IDLE_SHARE else QUIET_INTERVAL_S
        self._armed_s = self._loop.time()
        self._due_s = self._armed_s + interval_s
        if interval_s == IDLE_INTERVAL_S:
            self._due_s = self._armed_s + wait_s(self._armed_s, interval_s)
        self._worked_s = self._worked()
        self._handle = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        now_s, worked_s = self._loop.time(), self._worked() - self._worked_s
        held_s = max(0.0, now_s - self._due_s)
        on_time = held_s <= ON_TIME_S or 2 * worked_s < held_s
        if self._due_s - self._armed_s > QUIET_INTERVAL_S and worked_s > IDLE_WORK_S:
            on_time = False
        self._on_time = self._on_time + 1 if on_time else 0
        self._share += (worked_s / (now_s - self._armed_s) - self._share) / SHARE_OVER
        self._observe(held_s)
        self.longest_s = max(self.longest_s, held_s)
        step = self._steps.blocking_call(held_s)
        if held_s > LOG_ABOVE_S:
            held = {"held_ms": round(held_s * 1000), "step": step}
            logger.warning("event loop held", extra=held)
        self._arm()
