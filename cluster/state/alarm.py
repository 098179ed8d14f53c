"""A timer of the event loop that rings within a tenth of a millisecond.

    set_in(n) --> |...|...|...| begin of the n-th millisecond from now --> ring

The loop's own timers count whole milliseconds from its last look at the clock: they are half a
millisecond late in the mean, and up to one and a half. The kernel's timers are files that become
readable (timerfd_create(2)).
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

_NS_PER_MS: Final = 1_000_000
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME in sys/timerfd.h
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """One timer. For the event loop that runs when it is made."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """`ring`: called at the time.

        Raises:
            OSError: the process has no file descriptor left.
        """
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._file = _LIBC.timerfd_create(time.CLOCK_BOOTTIME, _FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "timerfd")
        self._time = (ctypes.c_long * 4)()  # interval and time, each in seconds and nanoseconds
        self._loop.add_reader(self._file, self._expired)

    def set_in(self, wait_ms: int) -> None:
        """Ring when CLOCK_BOOTTIME has counted `wait_ms` more. Replaces the last order.

        The present millisecond has partly passed, so the wait is up to a millisecond shorter.
        """
        at_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _NS_PER_MS + wait_ms
        self._time[2], self._time[3] = at_ms // 1000, at_ms % 1000 * _NS_PER_MS
        _LIBC.timerfd_settime(self._file, _ABSOLUTE, self._time, None)

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._file)
        os.close(self._file)
        self._file = -1  # its number may soon be that of another file

    def _expired(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set anew since it expired
            return
        self._ring()
