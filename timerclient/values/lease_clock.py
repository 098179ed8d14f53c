"""The clock by which consumers hold leases: the machine's, or that of an in-memory cluster."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol


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


class Monotonic:
    """This machine's monotonic clock."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = time.monotonic
        self.settle: Callable[[], Coroutine[Any, Any, None]] | None = None

    def call_at(self, when_s: float, callback: Callable[[], object]) -> ClockAlarm:
        """See LeaseClock."""
        left_s = max(0.0, when_s - time.monotonic())
        return asyncio.get_running_loop().call_later(left_s, callback)


MONOTONIC: Final = Monotonic()


def clock_of(dial: object) -> LeaseClock:
    """Return the attribute `clock` of a `dial`, as an in-memory cluster has it; else MONOTONIC."""
    clock: LeaseClock = getattr(dial, "clock", MONOTONIC)
    return clock
