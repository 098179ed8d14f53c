"""The last result of a work that takes a while, renewed by its readers.

    read --> fresh: the result
         --> old: the work begins, and the reader waits a moment for it, then takes the old result

All readers share one run of the work. Without readers nothing runs. A work with a cost rests for
REST times that cost, so it takes at most 1 / REST of a processor.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from timer.model.timer_errors import EngineError
from timer.model.units import MonoMs

REST: Final = 100
"""Time from one start to the next, as a multiple of the cost."""

T = TypeVar("T")


class Measurement(Generic[T]):
    """See the module."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        mono_ms: Callable[[], MonoMs],
        *,
        every_ms: int,
        cost_ms: Callable[[T, int], float] = lambda result, took_ms: 0,
    ) -> None:
        """Args:
        work: Returns a new result.
        mono_ms: Returns the time on a monotonic clock.
        every_ms: Shortest time between two starts, in milliseconds.
        cost_ms: Returns the processor time of a work, from its result and duration; both in ms.
        """
        self._work, self._mono_ms = work, mono_ms
        self._every_ms, self._cost_ms = every_ms, cost_ms
        self._task: asyncio.Task[T] | None = None
        self._next_ms = mono_ms()
        self._result: tuple[T, MonoMs] | None = None
        """The last result, and the time of its start."""

    async def read(self, wait_s: float) -> T | None:
        """Return the last result; None: there is none yet. Wait at most `wait_s` for a new one.

        An EngineError of the work leaves the last result. Any other exception is raised, once. The
        next reader after `every_ms` starts the work again.
        """
        self._end()
        if self._task is None and self._mono_ms() >= self._next_ms:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_retrieve)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=wait_s)
            self._end()
        return None if self._result is None else self._result[0]

    @property
    def age_ms(self) -> int | None:
        """Age of the last result in milliseconds. None: there is none."""
        return None if self._result is None else self._mono_ms() - self._result[1]

    async def stop(self) -> None:
        """Cancel a work under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _end(self) -> None:
        """Forget a work that has ended; raise its error, except an EngineError."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            with suppress(EngineError):
                task.result()

    async def _run(self) -> T:
        began = self._mono_ms()
        self._next_ms = MonoMs(began + self._every_ms)
        result = await self._work()
        cost_ms = self._cost_ms(result, self._mono_ms() - began)
        self._next_ms = MonoMs(began + max(self._every_ms, round(REST * cost_ms)))
        self._result = result, began
        return result


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Read a task's error, which asyncio logs if no reader does."""
    if not task.cancelled():
        task.exception()
