"""A TimerApp on an in-memory cluster: its handlers run as the test advances the clock.

`AsyncFakeApp` runs them on the test's event loop. `FakeApp` runs `async` handlers on the clients'
thread, and the others on the test's own thread, while it advances: a handler then sees the test's
transaction and its thread-local values.
"""

import asyncio
import contextlib
import queue
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from datetime import datetime
from types import TracebackType
from typing import Any, Final, ParamSpec, Protocol, Self, TypeAlias, TypeVar

from timerclient import NotFound, TimerApp, Worker
from timerclient.client.timer_calls import Seconds
from timerclient.threads.background import Background
from timerclient.worker.timer_app import AppConnection, OnHandlerError, TimerContext
from timerfake.cluster import NOTHING, AsyncFakeCluster
from timerfake.thread_cluster import FakeCluster

P = ParamSpec("P")
T = TypeVar("T")

HANDLER_S: Final = 10.0
"""Default of the longest real time of a handler."""


class AsyncFakeApp:
    """An app on an in-memory cluster, with a worker, for the event loop on which it is entered.

    Args:
        app: Its clients use the in-memory cluster until the exit.
        cluster: An open cluster. None: a new one, which the exit closes.
        start: First time of a new cluster's clock, an aware datetime. None: the present.
        handler_s: Longest real time of a handler, in seconds.
        executor: Runs functions that are not async. None: threads.
    """

    def __init__(
        self,
        app: TimerApp,
        *,
        cluster: AsyncFakeCluster | None = None,
        start: datetime | None = None,
        handler_s: float = HANDLER_S,
        executor: Executor | None = None,
    ) -> None:
        self.app = app
        self.cluster = cluster or AsyncFakeCluster(start=start)
        self._owns_cluster = cluster is None
        self.errors: list[BaseException] = []
        """The errors of handlers so far, those of repeated attempts included."""
        self._handler_s = handler_s
        self._executor = executor
        self._worker: Worker | None = None
        self._worker_task: asyncio.Task[None] | None = None
        self._expected_errors: tuple[type[Exception], ...] = ()
        """Errors of the worker that the exit does not raise."""
        self._former_connection: AppConnection | None = None
        self._former_on_error: OnHandlerError | None = None

    async def advance(self, by: Seconds) -> None:
        """Advance the clock by a timedelta or seconds; run the handlers of all due timers.

        Each runs at the time of its timer, those that handlers schedule within the span included.

        Raises:
            TimeoutError: A handler runs for longer than `handler_s` of real time.
        """
        await self.cluster.advance(by)
        self._check()

    async def settle(self) -> None:
        """Run the handlers of all due timers, without letting time pass; as `advance`."""
        await self.cluster.settle()
        self._check()

    def _check(self) -> None:
        if self._worker_task is not None and self._worker_task.done():
            self._expected_errors = (Exception,)  # raised here, once
            self._worker_task.result()

    def _on_handler_error(self, context: TimerContext, error: BaseException) -> None:
        self.errors.append(error)
        if self._former_on_error is not None:
            self._former_on_error(context, error)

    async def _wait_for_handler(self) -> bool:
        assert self._worker is not None
        try:
            async with asyncio.timeout(self._handler_s):
                return await self._worker.until_idle()
        except TimeoutError:
            names = {each.handler.name for each in self._worker.runners if each.running}
            text = f"{', '.join(sorted(names))} still runs after {self._handler_s:g} s"
            raise TimeoutError(text) from None

    async def __aenter__(self) -> Self:
        """Start the cluster and the worker."""
        await self.cluster.start()
        options = {**self.app.connection.options, "dial": self.cluster.dial}
        options = {k: v for k, v in options.items() if k not in ("credentials", "token")}
        self._former_connection = self.app.connect(AppConnection(self.cluster.address, options))
        self._former_on_error, self.app.on_error = self.app.on_error, self._on_handler_error
        self._worker = Worker(self.app, drain=self._handler_s, executor=self._executor)
        self._worker_task = asyncio.create_task(self._worker.run())
        self.cluster.works.append(self._wait_for_handler)
        while not (self._worker.is_ready or self._worker_task.done()):
            await self.cluster.settle()
        if self._worker_task.done():
            await self.__aexit__(None, None, None)  # raises the worker's error
        self._expected_errors = (NotFound,)  # the test has deleted a group or topic of the worker
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop the worker, and a new cluster; the app has its former cluster again."""
        assert self._worker is not None
        assert self._worker_task is not None
        assert self._former_connection is not None
        with contextlib.suppress(ValueError):  # the test ended the calls itself
            self.cluster.works.remove(self._wait_for_handler)
        self._worker.stop()
        try:
            with contextlib.suppress(*self._expected_errors):
                await self._worker_task
            await asyncio.to_thread(self.app.close_sync)  # the client of functions in threads
        finally:
            self.app.connect(self._former_connection)
            self.app.on_error = self._former_on_error
            if self._owns_cluster:
                await self.cluster.close()


class CallerThread(Executor):
    """Runs functions on the thread that waits for the cluster."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a call for `wait`; return its future."""
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # is raised where the result is read
                    future.set_exception(error)
                    if isinstance(error, KeyboardInterrupt):  # of the user, who ends the test
                        raise

        self._calls.put(call)
        return future

    def wait(self, work: "Future[T]") -> T:
        """Return the result of `work`; run the calls that are submitted meanwhile."""
        work.add_done_callback(lambda _: self._calls.put(lambda: None))
        while not work.done():
            self._calls.get()()
        return work.result()


class FakeApp:
    """An app on an in-memory cluster, with a worker, for the thread of the test.

    Args:
        app: Its clients use the in-memory cluster until the exit.
        start: First time of the cluster's clock, an aware datetime. None: the present.
        settings: Settings of the node, as FakeCluster's.
        handler_s: Longest real time of a handler, in seconds.
    """

    def __init__(
        self,
        app: TimerApp,
        *,
        start: datetime | None = None,
        settings: Mapping[str, object] = NOTHING,
        handler_s: float = HANDLER_S,
    ) -> None:
        self.app = app
        self.cluster = FakeCluster(start=start, settings=settings)
        self._background = Background()
        self._thread = CallerThread()
        self._inner = AsyncFakeApp(
            app,
            cluster=self.cluster._cluster,  # noqa: SLF001 -- the same, for asyncio
            handler_s=handler_s,
            executor=self._thread,
        )

    @property
    def errors(self) -> list[BaseException]:
        """The errors of handlers so far, those of repeated attempts included."""
        return self._inner.errors

    def advance(self, by: Seconds) -> None:
        """Advance the clock by a timedelta or seconds; run the handlers of all due timers.

        Each runs at the time of its timer, those that handlers schedule within the span included.

        Raises:
            TimeoutError: A handler runs for longer than `handler_s` of real time.
        """
        self._run(self._inner.advance(by))

    def settle(self) -> None:
        """Run the handlers of all due timers, without letting time pass; as `advance`."""
        self._run(self._inner.settle())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.wait(asyncio.run_coroutine_threadsafe(work, self._background.loop))

    def __enter__(self) -> Self:
        """Start the worker."""
        self._run(self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker and the cluster; the app has its former cluster again."""
        try:
            self._run(self._inner.__aexit__(None, None, None))
        finally:
            self.cluster.close()


class TimerAppFixture(Protocol):
    """Type of the fixture `timer_app`: it runs an app until the end of the test."""

    def __call__(
        self,
        app: TimerApp,
        *,
        start: datetime | None = None,
        settings: Mapping[str, object] = NOTHING,
        handler_s: float = HANDLER_S,
    ) -> FakeApp:
        """Return the app on an in-memory cluster, with a worker; see `FakeApp`."""


AsyncTimerAppFixture: TypeAlias = type[AsyncFakeApp]
"""Type of the fixture `async_timer_app`."""
