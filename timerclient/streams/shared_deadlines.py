"""Deadlines of many waiting calls: one timer of the event loop for all that end within 10 ms.

A timer of the loop for each call takes a quarter of the time of a client with many callers, and
hardly any of them ever rings. Nothing ends before its deadline, and all of it up to 10 ms later.
"""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

STEP_S: Final = 0.01
"""Items with deadlines within this many seconds of the loop's clock share a timer."""


class SharedDeadlines(Generic[T]):
    """Calls `expire` with each item at its deadline. It belongs to the running event loop."""

    def __init__(self, expire: Callable[[T], object]) -> None:
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, SharedTimer[T]] = {}

    def add(self, item: T, within_s: float) -> "SharedTimer[T]":
        """Let `item` expire after `within_s` seconds. 0 or less: in the loop's next turn.

        Returns: the timer of `item`, for `SharedTimer.remove`.
        """
        step = int((self._loop.time() + within_s) / STEP_S) + (within_s > 0)
        timer = self._timers.get(step)
        if timer is None:
            timer = self._timers[step] = SharedTimer(self._timers, step)
            # Without the context of this caller, as the others' callbacks run there, too.
            timer.handle = self._loop.call_at(
                step * STEP_S, self._on_alarm, timer, context=contextvars.Context()
            )
        timer.items[item] = None
        return timer

    def _on_alarm(self, timer: "SharedTimer[T]") -> None:
        timer.detach()  # an item that is added from now on gets a timer of its own
        for item in [*timer.items]:
            if item in timer.items:  # the end of another item may have removed it
                try:
                    self._expire(item)
                except Exception as error:  # noqa: BLE001 -- the other items expire, too
                    context = {"message": "a deadline failed", "exception": error}
                    self._loop.call_exception_handler(context)


class SharedTimer(Generic[T]):
    """A timer of the loop, and the items that wait for it in the order in which they came."""

    __slots__ = ("_step", "_timers", "handle", "items")

    def __init__(self, timers: "dict[int, SharedTimer[T]]", step: int) -> None:
        self._timers, self._step = timers, step
        self.items: dict[T, None] = {}
        self.handle: asyncio.TimerHandle | None = None

    def remove(self, item: T) -> None:
        """Let `item` not expire, if it has not done so."""
        self.items.pop(item, None)
        if not self.items:
            self.detach()

    def detach(self) -> None:
        """Take no further item, and don't ring any more."""
        if self._timers.get(self._step) is self:
            del self._timers[self._step]
        if self.handle is not None:
            self.handle.cancel()
