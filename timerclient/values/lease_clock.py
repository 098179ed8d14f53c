"""The clock by which consumers hold leases: the machine's, or that of a cluster in memory."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol


class ClockAlarm(Protocol):
    """What rings once."""

    def cancel(self) -> None:
        """Let it not ring."""


class LeaseClock(Protocol):
    """Seconds that never go back."""

    now_s: Callable[[], float]
    """Returns the time; for any thread."""

    settle: Callable[[], Coroutine[Any, Any, None]] | None
    """Waits on the event loop until nothing happens any more. None: real time passes."""

    def call_at(self, when_s: float, callback: Callable[[], object]) -> ClockAlarm:
        """Call back on the running event loop, at that time or later."""


class Monotonic:
    """This machine's."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = time.monotonic
        self.settle: Callable[[], Coroutine[Any, Any, None]] | None = None

    def call_at(self, when_s: float, callback: Callable[[], object]) -> ClockAlarm:
        """See Clock."""
        left_s = max(0.0, when_s - time.monotonic())
        return asyncio.get_running_loop().call_later(left_s, callback)


MONOTONIC: Final = Monotonic()


def clock_of(dial: object) -> LeaseClock:
    """Return the clock that a `dial` brings along, as a cluster in memory's does; else ours."""
    clock: LeaseClock = getattr(dial, "clock", MONOTONIC)
    return clock
