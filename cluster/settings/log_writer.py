"""Writes the lines of the log in a thread, because a full pipe blocks its writer.

    caller -- formats a record --> queue of lines -- the thread "log" --> standard error

A QueueListener of the standard library is not used: its `stop` waits until all lines are written.
"""

import logging
import os
import select
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

WAITING_MAX: Final = 4_096
"""Lines that wait to be written."""
FLUSH_S: Final = 1.0
"""Longest wait of a flush for the lines before it."""


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor in the order of the calls. A call never waits for it.

    Records below CRITICAL are dropped while WAITING_MAX lines wait. The next line has their number
    as `left_out`.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines = SimpleQueue[str | threading.Event | None]()
        self._left_out = 0
        self._torn = False
        """The last line is written in part."""
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record. Later changes of its arguments don't change the line."""
        left_out = self._left_out + vars(record).get("left_out", 0)
        if self._lines.qsize() >= WAITING_MAX and record.levelno < logging.CRITICAL:
            self._left_out = left_out + 1
            return
        if left_out:
            record.left_out = left_out
        self._left_out = 0
        try:
            self._lines.put(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 -- of the arguments: a wrong call of a logger
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Queue the traceback of a record that can't be formatted."""
        self._lines.put(f"{record.pathname}:{record.lineno}\n{traceback.format_exc()}")

    def flush(self) -> None:
        """Wait for at most FLUSH_S until the lines so far are written."""
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(FLUSH_S)

    def close(self) -> None:
        """End the thread after the lines so far."""
        self._lines.put(None)
        super().close()

    def _write_lines(self) -> None:
        while True:
            first = self._lines.get()
            waiting = [first, *(self._lines.get() for _ in range(self._lines.qsize()))]
            text = "".join(each for each in waiting if isinstance(each, str))
            self._write(text.encode(errors="backslashreplace"))
            for each in waiting:
                if isinstance(each, threading.Event):
                    each.set()
            if None in waiting:
                return

    def _write(self, text: bytes) -> None:
        """Write lines; drop what the descriptor does not take, as of a file on a full disk."""
        text = b"\n" + text if self._torn else text
        with suppress(OSError):
            while text:
                try:
                    size = os.write(self._descriptor, text)
                except BlockingIOError:  # another process has changed the pipe that they share
                    select.select([], [self._descriptor], [])
                    continue
                self._torn = text[size - 1 : size] != b"\n"
                text = text[size:]
