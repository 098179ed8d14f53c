"""A worker: runs all handlers of an app until it is stopped, then drains.

    stop ──► fetch no more, return messages that were not begun
         ──► wait for running handlers, at most `drain` ──► return the rest

A second `stop` ends the wait. Messages that were fetched and not begun have not failed.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

from timerclient.rows import rows
from timerclient.values.errors import InvalidRequest, TimerError
from timerclient.worker.handler_runner import LOG, HandlerRunner
from timerclient.worker.timer_app import CONCURRENCY_MAX, TimerApp, TimerHandler

DRAIN_S: Final = 25.0
"""Default of the drain: Kubernetes kills a pod 30 seconds after SIGTERM."""
CANCEL_S: Final = 2.0
"""Longest wait for handlers that were cancelled."""
CLOSE_S: Final = 2.0
"""Longest wait for acks and other calls after that. A short drain leaves them more time."""
CLOSE_S_MIN: Final = 0.5
"""Time of each close in any case: of the consumers, and of the clients of the loop and threads."""
BEAT_S: Final = 1.0
STUCK_S: Final = 10.0
"""Seconds without a beat of the event loop after which the worker is not healthy."""


class Worker:
    """Runs the handlers of an app.

    Args:
        app: With at least one handler.
        handlers: Those of the app that it runs. None: all of them.
        concurrency: Calls of each handler at a time, in place of the handler's own number.
        drain: Longest wait for running handlers after a stop, a timedelta or seconds.
        executor: Runs functions that are not async. None: threads of the worker.
    """

    def __init__(
        self,
        app: TimerApp,
        *,
        handlers: Iterable[TimerHandler[..., Any]] | None = None,
        concurrency: int | None = None,
        drain: float | timedelta = DRAIN_S,
        executor: Executor | None = None,
    ) -> None:
        if not app.handlers:
            raise InvalidRequest.of("app", "no handler", "decorate a function with @app.timer")
        chosen = app.handlers if handlers is None else [*handlers]
        if not chosen or any(each not in app.handlers for each in chosen):
            raise InvalidRequest.of("handlers", chosen, "must be handlers of the app, at least one")
        if concurrency is not None:
            rows.whole_number("concurrency", concurrency, 1, CONCURRENCY_MAX)
        self.app = app
        self._drain_s = rows.span_ms("drain", drain) / 1000
        self._own_threads: ThreadPoolExecutor | None = None
        if executor is None:
            wanted = sum(
                concurrency or each.options.concurrency for each in chosen if not each.is_async
            )
            self._own_threads = ThreadPoolExecutor(max(1, wanted), "timer-handler")
        used = executor or self._own_threads
        assert used is not None
        self.runners = [HandlerRunner(each, used, concurrency) for each in chosen]
        self._stops = 0
        self._ended_count = 0
        """Handlers that had ended at the last `until_idle`."""
        self._stop_event = asyncio.Event()
        self._beat_s = time.monotonic()
        self._until_s = 0.0
        """End of the stop on the monotonic clock, once the worker drains."""
        self._drain_wait: asyncio.Future[Any] | None = None
        """The drain's wait for handlers."""
        self.left_running = 0
        """Handlers that the drain did not wait for. Those in threads may still run."""

    # ---- state, for any thread

    def __repr__(self) -> str:
        state = "stopping" if self.is_stopping else "ready" if self.is_ready else "not connected"
        running = sum(len(each.running) for each in self.runners)
        names = ", ".join(each.handler.name for each in self.runners)
        return f"Worker({names}; {state}, {running} running)"

    @property
    def is_alive(self) -> bool:
        """The worker needs no restart: it has no `problem`."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why the worker needs a restart. None: the event loop runs, and no handler is stuck."""
        if time.monotonic() - self._beat_s >= STUCK_S:
            return "event loop blocked"
        for each in self.runners:
            if each.metrics.overdue >= each.concurrency:
                return f"all {each.concurrency} calls of {each.handler.name} exceed hold_max"
        return None

    @property
    def is_ready(self) -> bool:
        """All consumers are connected, and the worker is not stopping."""
        return not self.is_stopping and all(each.metrics.is_connected for each in self.runners)

    @property
    def is_stopping(self) -> bool:
        """The worker drains, or has ended."""
        return self._stops > 0

    def close_s(self, after: int = 0) -> float:
        """Return the seconds that a close may take. `after`: number of closes that follow."""
        return max(CLOSE_S_MIN, self._until_s - after * CLOSE_S_MIN - time.monotonic())

    # ---- life

    async def run(self) -> None:
        """Run handlers until `stop`, or until a handler's consumer is rejected.

        The app's last worker on an event loop closes the app's client of that loop.

        Raises:
            TimerError: A consumer was rejected, such as by the rules of access.
        """
        loop, workers = asyncio.get_running_loop(), self.app.connection.workers
        workers[loop] += 1
        beating = loop.create_task(self._beat())
        try:
            await self._run_until_stopped()
        finally:  # also if the drain is cancelled
            beating.cancel()
            workers[loop] -= 1
            if not workers[loop]:
                del workers[loop]
                await _close_all(self.close_s(1), self.app.close())

    async def _run_until_stopped(self) -> None:
        fetching = [asyncio.create_task(each.fetch()) for each in self.runners]
        stopped = asyncio.create_task(self._wait_until_stopped())
        try:
            await asyncio.wait([*fetching, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stops = max(1, self._stops)
            for task in [*fetching, stopped]:
                task.cancel()
            ended = await asyncio.gather(*fetching, stopped, return_exceptions=True)
            await self._drain()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _wait_until_stopped(self) -> None:
        # Its own coroutine: `timerctl worker` tells the worker's tasks from those of handlers.
        await self._stop_event.wait()

    def stop(self) -> None:
        """Stop fetching and drain; a second call ends the drain. On the event loop only."""
        self._stops += 1
        self._stop_event.set()
        if self._stops > 1:
            self._cancel_calls()
            if self._drain_wait is not None:
                self._drain_wait.cancel()

    async def _drain(self) -> None:
        for each in self.runners:
            each.begin_leaving()
        self._until_s = time.monotonic() + self._drain_s + CANCEL_S + CLOSE_S
        if self._stops < 2 and (running := self._running_tasks()):
            LOG.info("draining: %d handlers run, at most %g s", len(running), self._drain_s)
            self._drain_wait = asyncio.ensure_future(asyncio.wait(running, timeout=self._drain_s))
            await asyncio.wait([self._drain_wait])
        self._cancel_calls()
        if running := self._running_tasks():
            await asyncio.wait(running, timeout=CANCEL_S)
        if self._stops > 1:
            self._until_s = time.monotonic() + CLOSE_S
        await _close_all(self.close_s(2), *(each.close() for each in self.runners))
        for each in self.runners:
            await each.handler.close()
        if self._own_threads is not None:
            self._own_threads.shutdown(wait=False, cancel_futures=True)

    def _cancel_calls(self) -> None:
        count = sum(each.cancel_calls() for each in self.runners)
        if count:
            self.left_running += count
            LOG.warning("drain ended: %d handlers were cut off; their timers run again", count)

    def _running_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for each in self.runners for task in each.running]

    async def _beat(self) -> None:
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(BEAT_S)

    async def until_idle(self) -> bool:
        """Wait until a handler that runs ends; return whether one ran since the last call."""
        before, self._ended_count = (
            self._ended_count,
            sum(each.ended_count for each in self.runners),
        )
        if not (running := self._running_tasks()):
            return self._ended_count > before
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return True


async def _close_all(within_s: float, *closes: Coroutine[Any, Any, None]) -> None:
    """Wait for closes; cancel those that take longer."""
    tasks = [asyncio.create_task(each) for each in closes]
    await asyncio.wait(tasks, timeout=within_s)
    for each in tasks:
        each.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception) and not isinstance(error, TimerError):
            raise error
