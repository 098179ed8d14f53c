"""Deadlines of many waiting calls: one timer of the event loop for all that end within 10 ms.

A timer of the loop for each call takes a quarter of the time of a client with many callers, and
hardly any of them ever rings. Nothing ends before its deadline, and all of it up to 10 ms later.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

STEP_S: Final = 0.01


class Deadlines(Generic[T]):
    """Calls `expire` with each item at its deadline. It belongs to the running event loop."""

    def __init__(self, expire: Callable[[T], object]) -> None:
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._known: dict[int, Deadline[T]] = {}

    def add(self, item: T, within_s: float) -> "Deadline[T]":
        """Let `item` expire after `within_s`; 0 or less: in the loop's next turn.

        Return where to remove it before.
        """
        number = int((self._loop.time() + within_s) / STEP_S) + (within_s > 0)
        deadline = self._known.get(number)
        if deadline is None:
            deadline = self._known[number] = Deadline(self._known, number)
            deadline.timer = self._loop.call_at(number * STEP_S, self._ring, deadline)
        deadline.items[item] = None
        return deadline

    def _ring(self, deadline: "Deadline[T]") -> None:
        deadline.end()
        for item in [*deadline.items]:
            if item in deadline.items:  # the end of another item may have removed it
                self._expire(item)


class Deadline(Generic[T]):
    """The items that end within the same 10 ms, in the order in which they came."""

    __slots__ = ("_known", "_number", "items", "timer")

    def __init__(self, known: "dict[int, Deadline[T]]", number: int) -> None:
        self._known, self._number = known, number
        self.items: dict[T, None] = {}
        self.timer: asyncio.TimerHandle | None = None

    def remove(self, item: T) -> None:
        """Let `item` not expire, if it has not done so."""
        self.items.pop(item, None)
        if not self.items:
            self.end()

    def end(self) -> None:
        """Stop the timer."""
        if self._known.get(self._number) is self:
            del self._known[self._number]
        if self.timer is not None:
            self.timer.cancel()
