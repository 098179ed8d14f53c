"""Timers that wake the state plane.

A node's is exact to a tenth of a millisecond. The event loop's own timers count whole milliseconds
from its last look at the clock: they are half a millisecond late in the mean, and up to one and a
half.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Final, Protocol

_NS_PER_MS: Final = 1_000_000
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME in sys/timerfd.h


class Alarm(Protocol):
    """One timer of the event loop that runs when it is made."""

    def set_in(self, wait_ms: int) -> None:
        """Ring in `wait_ms`. Replaces the last order."""

    def close(self) -> None:
        """Never ring again. No order may follow."""


class LoopAlarm:
    """A timer of the event loop, for every system."""

    def __init__(self, ring: Callable[[], object]) -> None:
        """`ring`: called at the time."""
        self._ring, self._loop = ring, asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set_in(self, wait_ms: int) -> None:
        """See Alarm."""
        self.close()
        self._handle = self._loop.call_later(wait_ms / 1000, self._ring)

    def close(self) -> None:
        """See Alarm."""
        if self._handle is not None:
            self._handle.cancel()


class KernelAlarm:
    """A timer of Linux: a file that becomes readable at the time (timerfd_create(2))."""

    def __init__(self, ring: Callable[[], object]) -> None:
        """`ring`: called at the time.

        Raises:
            OSError: the process has no file descriptor left.
        """
        self._ring, self._loop = ring, asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._file = self._check_result(self._libc.timerfd_create(time.CLOCK_BOOTTIME, flags))
        self._time = (ctypes.c_long * 4)()  # interval and time, each in seconds and nanoseconds
        self._loop.add_reader(self._file, self._on_expiry)

    def set_in(self, wait_ms: int) -> None:
        """Ring when CLOCK_BOOTTIME has counted `wait_ms` more: at the start of that millisecond."""
        at_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _NS_PER_MS + wait_ms
        self._time[2], self._time[3] = at_ms // 1000, at_ms % 1000 * _NS_PER_MS
        self._check_result(self._libc.timerfd_settime(self._file, _ABSOLUTE, self._time, None))

    def close(self) -> None:
        """See Alarm."""
        self._loop.remove_reader(self._file)
        os.close(self._file)
        self._file = -1  # its number may soon be that of another file

    def _on_expiry(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set again since it expired
            return
        self._ring()

    def _check_result(self, result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "timerfd")
        return result
