"""The clock by which consumers hold leases: the machine's, or that of an in-memory cluster."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
"""On macOS, CLOCK_MONOTONIC continues in a sleep, and `time.monotonic` stops. None: Windows."""


class ClockAlarm(Protocol):
    """A callback that is scheduled for one time."""

    def cancel(self) -> None:
        """Prevent the callback."""


class LeaseClock(Protocol):
    """A clock in seconds that never goes back."""

    now_s: Callable[[], float]
    """Returns the time; for any thread."""

    settle: Callable[[], Coroutine[Any, Any, None]] | None
    """Waits on the event loop until all effects of the present time have happened. None: the clock
    runs by itself."""

    def call_at(self, when_s: float, callback: Callable[[], object]) -> ClockAlarm:
        """Schedule `callback` on the running event loop, at `when_s` or later."""


def boot_time_s() -> float:
    """Return a monotonic time, in seconds. On Linux and macOS it counts sleep of the machine."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class BootClock:
    """This machine's monotonic clock: a lease ends while the machine sleeps."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = boot_time_s
        self.settle: Callable[[], Coroutine[Any, Any, None]] | None = None

    def call_at(self, when_s: float, callback: Callable[[], object]) -> ClockAlarm:
        """See LeaseClock. A sleep of the machine delays the callback."""
        left_s = max(0.0, when_s - self.now_s())
        return asyncio.get_running_loop().call_later(left_s, callback)


BOOT_CLOCK: Final = BootClock()


def clock_of(dial: object) -> LeaseClock:
    """Return the attribute `clock` of a `dial`, as an in-memory cluster has it; else BOOT_CLOCK."""
    clock: LeaseClock = getattr(dial, "clock", BOOT_CLOCK)
    return clock
