"""The thread that runs the event loop of all clients for threads of a process.

    caller's thread -- coroutine, or a submission --> the loop's thread --> grpc.aio

There is one loop for all clients, in a daemon thread. It starts with the first client and stays.
"""

import _thread
import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from timerclient.values.errors import Closed, Overloaded

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Process id -> the loop of all its clients.

grpc.aio passes the events of all loops to the first loop that polls. With a loop for each client,
late events of a closed client would disturb the others.
"""

# The first loop sets asyncio's policy, under a lock that a signal handler could not take again.
asyncio.new_event_loop().close()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_loops.clear)


def _loop_of_process() -> asyncio.AbstractEventLoop:
    """Return the running loop that this process's clients share, on its own daemon thread.

    A signal handler or another thread may start a loop meanwhile. The first one that is noted
    counts, and the others end. No loop is noted before its thread runs.
    """
    pid = os.getpid()
    if (noted := _loops.get(pid)) is not None:
        return noted
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_on_loop_error)
    threading.Thread(target=_run_loop, args=[loop], name="timerclient", daemon=True).start()
    noted = _loops.setdefault(pid, loop)
    if noted is not loop:
        loop.call_soon_threadsafe(loop.stop)
    return noted


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def is_running(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Return whether this thread runs `loop` now."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def is_clients_thread() -> bool:
    """Return whether this is the thread of the clients' loop, which must not block."""
    return is_running(_loops.get(os.getpid()))


def check_threads() -> None:
    """Check that threads are those of the system, as the clients' own thread and gRPC's must be.

    Raises:
        RuntimeError: gevent or eventlet has replaced threads.
    """
    package, _, _ = _thread.start_new_thread.__module__.partition(".")
    if package in ("gevent", "eventlet"):  # a debugger may replace it, too
        text = f"{package} has replaced threads, and a client over gRPC needs one"
        raise RuntimeError(f"{text}: use HTTP, or workers of threads or processes")


def check_process(pid: int) -> None:
    """Check that this process made the client.

    Raises:
        RuntimeError: This process is a fork of the process `pid`, which made the client.
    """
    if os.getpid() != pid:
        raise RuntimeError("this client was made before a fork; make one per process")


def check_wait() -> None:
    """Check that this thread may wait for the cluster.

    Raises:
        Closed: The interpreter is about to end, and the clients' own thread with it.
        RuntimeError: This is the clients' own thread.
    """
    if sys.is_finalizing():
        raise Closed("the interpreter is about to end")
    if is_clients_thread():
        text = "a future's callback runs on the clients' own thread, which can't wait"
        raise RuntimeError(f"{text} for the cluster: use submit, or another thread")


def call_guarded(fn: Callable[[Future[T]], object], future: Future[T]) -> None:
    """Call a callback. No error of it ends the clients' own thread, or a task that settles it."""
    try:
        fn(future)
    except (Exception, asyncio.CancelledError, GeneratorExit):
        logging.getLogger("concurrent.futures").exception(
            "exception calling callback for %r", future
        )
    except BaseException:
        if not is_clients_thread():
            raise
        _LOG.exception("a future's callback wanted to end the clients' thread")


class GuardedFuture(Future[T]):
    """A future that raises instead of waiting on the clients' own thread.

    That thread delivers the outcome, so a wait there would never end. Errors of callbacks do not
    end the thread, which all clients share.
    """

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn` with the future once it is done. An error that `fn` raises is logged."""
        super().add_done_callback(partial(call_guarded, fn))

    def result(self, timeout: float | None = None) -> T:
        """Return the result; see concurrent.futures.

        Raises:
            Closed, RuntimeError: There is no result yet, and this thread may not wait for it.
        """
        if not self.done():
            check_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None; as `result`."""
        if not self.done():
            check_wait()
        return super().exception(timeout)


class Background:
    """One client's access to the event loop."""

    def __init__(self) -> None:
        """Use the process's loop.

        Raises:
            RuntimeError: See `check_threads`.
        """
        check_threads()
        self._pid = os.getpid()
        self.loop = _loop_of_process()
        self.stopped = False

    @property
    def is_forked(self) -> bool:
        """This process is a fork of the process that made the client."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Check that this process made the client.

        Raises:
            RuntimeError: This process is a fork of the process that made it.
        """
        check_process(self._pid)

    def check(self) -> None:
        """Check that the client is open, and that this process made it.

        Raises:
            Closed: It was stopped.
            RuntimeError: See `check_process`.
        """
        self.check_process()
        if self.stopped:
            raise Closed("the client is closed")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        try:
            self.check()
            check_wait()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Accept no further calls."""
        self.stopped = True


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio wakes every loop of the process for each event. A loop that finds no event raises
    # this error, which is harmless (grpc/grpc#25364).
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)


class Budget:
    """A limit on the bytes of all submissions without an answer."""

    def __init__(self, size: int, on_blocked: Callable[[int], None] = lambda _: None) -> None:
        """`on_blocked` is called with the bytes in use, before a caller waits."""
        self._size = size
        self._on_blocked = on_blocked
        self._used = 0
        self._free_condition = threading.Condition()

    def take(self, size: int, within_s: float) -> None:
        """Take `size` bytes, once they are free.

        A submission larger than the limit is accepted when no other is unanswered. On the clients'
        own thread there is no wait.

        Raises:
            Overloaded: The bytes were not free in time; nothing was sent.
        """
        with self._free_condition:
            fits, used = self._fits(size), self._used
        if not fits:
            self._on_blocked(used)  # without the lock: it calls the application
        with self._free_condition:
            if not self._fits(size):
                within_s = 0.0 if is_clients_thread() else within_s
                if not self._free_condition.wait_for(lambda: self._fits(size), within_s):
                    text = f"{self._used} submitted bytes are unanswered after {within_s:g} s"
                    raise Overloaded(text)
            self._used += size

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._size

    def release(self, size: int) -> None:
        """Release `size` bytes."""
        with self._free_condition:
            self._used -= size
            self._free_condition.notify_all()
