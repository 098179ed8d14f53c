"""Calls of a store that a signal can interrupt.

Python runs the handlers of signals in the main thread, between its instructions. A call of pyarrow
may last minutes while a store does not answer. So the main thread gives each call to another
thread, and waits. A call can't be cancelled: when a signal ends the wait, the process must end.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from timerclient.cli.cli_errors import INTERRUPTED

GRACE_S: Final = 5.0
"""Time for a call to end after a signal, in seconds."""
POLL_S: Final = 0.5
"""Bound of one wait, in seconds: a signal that arrives just before a wait does not end it."""

_T = TypeVar("_T")
_THREAD: Final = ThreadPoolExecutor(1, thread_name_prefix="store")
_last: Future[Any] = Future()
"""The last call of the main thread."""
_last.set_result(None)


def interruptible(call: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Return the result of a call. If a handler of a signal raises, the call may go on.

    Raises:
        OSError: a call from before a signal has not ended. It may use the same stream.
    """
    global _last  # noqa: PLW0603 -- of the main thread only
    if threading.current_thread() is not threading.main_thread():
        return call(*args, **options)
    if not is_idle():
        raise InterruptedError("a signal interrupted a call before")
    _last = running = _THREAD.submit(call, *args, **options)
    try:
        while not running.done():
            wait([running], POLL_S)
    except BaseException:
        wait([running], GRACE_S)
        raise
    return running.result()


def is_idle() -> bool:
    """Return whether the last call has ended."""
    return _last.done()


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
    """End the process if a signal ends the block and a call still runs.

    Python would wait for the call's thread. Its exit status is that of the exception.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as ended:
        if not is_idle():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code or 0) if isinstance(ended, SystemExit) else INTERRUPTED)
        raise
