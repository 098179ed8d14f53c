"""Calls of a store that a signal can interrupt.

Python runs the handlers of signals in the main thread, between its instructions. A call of pyarrow
may last minutes while a store does not answer. So the main thread gives each call to another
thread, and waits. That thread makes the calls one after the other, in their order. A call can't be
cancelled: after a signal the main thread waits for GRACE_S at most, and the process ends without
waiting for the thread.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeVar

GRACE_S: Final = 5.0
"""Time for all calls after a signal, in seconds."""
POLL_S: Final = 0.5
"""Bound of one wait, in seconds: a signal that arrives just before a wait does not end it."""

_T = TypeVar("_T")
_THREAD: Final = ThreadPoolExecutor(1, thread_name_prefix="store")


@dataclass
class _Command:
    """The command that makes the calls. See `leaving_calls`."""

    status: int = 0
    """Exit status of a process that the signal ended; 0: there was no signal."""
    until_s: float = inf
    """When the main thread waits no longer, of the monotonic clock."""
    has_called: bool = False
    """Whether a call was given to the thread."""


_command = _Command()


def interruptible(call: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Return the result of a call. If a handler of a signal raises, the call goes on.

    Raises:
        OSError: the call has not ended GRACE_S after a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return call(*args, **options)
    _command.has_called = True
    running = _THREAD.submit(call, *args, **options)
    while not running.done():
        left_s = _command.until_s - time.monotonic()
        if left_s <= 0:
            raise InterruptedError("a signal interrupted the call")
        wait([running], min(left_s, POLL_S))
    return running.result()


class Interruptible:
    """An object of pyarrow, such as a file system or a stream, with methods as `interruptible`."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; of a method, a function."""
        found = getattr(self._wrapped, name)
        if not callable(found):
            return found
        return lambda *args, **options: interruptible(found, *args, **options)


@contextmanager
def leaving_calls() -> Iterator[None]:
    """End the process after a block with calls in which SIGTERM or SIGINT was handled.

    Python would wait for the call's thread, and a stream of pyarrow for its upload.
    """
    global _command  # noqa: PLW0603 -- of the main thread only
    _command = own = _Command()
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    def noted(number: int, frame: Any) -> None:
        own.status = 128 + number
        own.until_s = min(own.until_s, time.monotonic() + GRACE_S)
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    for number, handler in handlers.items():
        if callable(handler):  # not ignored
            signal.signal(number, noted)
    try:
        yield
    finally:
        if own.status and own.has_called:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(own.status)
        for number, handler in handlers.items():
            signal.signal(number, handler)
