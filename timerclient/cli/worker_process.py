"""The process of a worker: the signals that stop it, and its end.

A process that a handler forks inherits asyncio's signal handlers, which do nothing, and the file
descriptor that wakes the worker's event loop. Without a reset, a signal to the child would not end
the child, and would stop the worker.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, util
from typing import TYPE_CHECKING, Final, NoReturn

from timerclient.values.errors import TimerError

if TYPE_CHECKING:
    from timerclient.worker.worker import Worker

LOG: Final = logging.getLogger("timerclient.worker")
STOP_SIGNALS: Final = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGINT", "SIGHUP")]
PROCESSES_S: Final = 1.0
"""Longest wait for processes that handlers have left; then they are killed."""

_end_multiprocessing: Final[Callable[[], None]] = vars(util)["_exit_function"]

_handled: Final = set[signal.Signals]()
"""Signals that stop the worker of this process."""


class _Masks(threading.local):
    """The signal masks of a thread before its forks; a signal handler may fork during a fork."""

    def __init__(self) -> None:
        self.saved = list[set[int | signal.Signals] | None]()


_masks: Final = _Masks()


@contextmanager
def stopping_on_signals(worker: "Worker") -> Iterator[None]:
    """Stop the worker at each signal to this process. After the block, a signal ends the process.

    In a forked child, a signal to the child ends the child. A closed terminal may send SIGHUP
    twice, so SIGHUP ends neither a drain nor, after the block, the process. A handler of the
    application for SIGHUP stays, as does SIG_IGN, which nohup sets.
    """
    from asyncio import get_running_loop

    def hang_up() -> None:
        if not worker.is_stopping:
            worker.stop()

    loop = get_running_loop()
    for each in STOP_SIGNALS:
        is_hang_up = each.name == "SIGHUP"
        if is_hang_up and signal.getsignal(each) != signal.SIG_DFL:
            continue
        with suppress(NotImplementedError):  # Windows: an interrupt ends the worker at once
            loop.add_signal_handler(each, hang_up if is_hang_up else worker.stop)
            _handled.add(each)
    try:
        yield
    finally:
        for each in [s for s in _handled if s.name != "SIGHUP"]:
            loop.remove_signal_handler(each)
            _handled.remove(each)


def _block_signals() -> None:
    # The mask is read first: a handler that raises an exception ends `pthread_sigmask`. The fork
    # follows nonetheless. None: no signals were blocked.
    _masks.saved.append(None)
    _masks.saved[-1] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _restore_mask() -> None:
    if _masks.saved and (mask := _masks.saved.pop()) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_signals() -> None:
    if _handled:
        signal.set_wakeup_fd(-1)
    for each in _handled:
        signal.signal(each, signal.SIG_DFL)  # for SIGINT, too: the hook would lose an exception
    _handled.clear()
    _restore_mask()


if hasattr(os, "register_at_fork"):  # not on Windows
    # A signal that the child gets before its reset waits for it.
    os.register_at_fork(
        before=_block_signals, after_in_parent=_restore_mask, after_in_child=_reset_signals
    )


def end_process(worker: "Worker", code: int) -> NoReturn:
    """Close the client of threads, run the exit handlers, and end the process with `code`.

    Handlers may have left tasks, threads and processes. The ends of an event loop and of the
    interpreter wait for these, so the process ends before. Errors are logged, SystemExit and
    KeyboardInterrupt of signal handlers, too. The next step then follows.
    """
    try:
        close = partial(worker.app.close_sync, worker.close_s())
        flushes = sys.stdout.flush, sys.stderr.flush
        for step in (close, _run_exit_functions, _end_processes, *flushes):
            try:
                with suppress(TimerError):
                    step()
            except BaseException:
                LOG.exception("an error at the end of the worker's process")
    finally:
        os._exit(code)


def _run_exit_functions() -> None:
    """Run the exit handlers, those of logging, too, except that of multiprocessing."""
    atexit.unregister(_end_multiprocessing)
    atexit._run_exitfuncs()  # noqa: SLF001


def _end_processes() -> None:
    """End processes of multiprocessing.

    Its exit function ends daemons, such as those of a Pool, in their order. It waits for other
    processes, such as those of a ProcessPoolExecutor, so they are terminated first.
    """
    for each in active_children():
        if not each.daemon:
            each.terminate()
    ending = threading.Thread(target=_end_multiprocessing, daemon=True)
    ending.start()
    try:
        ending.join(PROCESSES_S)
    finally:
        for each in active_children():
            each.kill()
