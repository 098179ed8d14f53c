"""A thread that repeats a request to nodes while a call of the store takes long.

A node keeps the files of a backup, and the log for a shipper, for a minute after the last request
for them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from timerclient.values.errors import TimerError

KEEP_S: Final = 20.0
"""Interval of the requests, in seconds."""


@contextmanager
def keeping_pin(request: Callable[[], object]) -> Iterator[None]:
    """Call `request` every KEEP_S during the block, in another thread.

    Errors of the cluster are ignored: the next call of the block meets them, too.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(KEEP_S):
            with suppress(TimerError):
                request()

    # A request may outlive the block. It does not delay the end of the process.
    threading.Thread(target=run, name="pins", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
