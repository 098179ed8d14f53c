"""Logs: one line per record on stderr, as key=value (logfmt).

    time=2026-01-31T12:00:00.123Z level=info node=n1 logger=cluster.node.node msg="leader" epoch=4

The fields of `extra` follow the message, so that a line can be found by a field. A value with other
than plain characters is quoted as in JSON. A traceback is one such value.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:/@+,\[\]-]+", re.ASCII)
_GRPC: Final = "grpc._cython.cygrpc"
_HTTP: Final = "aiohttp.server"
FLOOD_S: Final = 10.0
"""Length of a window in which lines are counted."""
LINES_MAX: Final = 100
"""Lines that one place of the code may log in a window."""
_PEERS_FAULTS: Final = frozenset({"ExecuteBatchError", "DecodeError"})
_STANDARD: Final = frozenset(
    [*vars(logging.LogRecord("", 0, "", 0, "", None, None)), "message", "asctime", "taskName"]
)


class LineFormatter(logging.Formatter):
    """Formats a record as one line."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as key=value, without a line break."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        values |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info and record.exc_info[0] is not None:
            values["exc"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = record.stack_info
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in values.items())


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class _PeersFault(logging.Filter):
    """Shortens errors of the other side that gRPC or aiohttp log as ours, with a traceback.

    Clients that disconnect during a write, or send malformed messages, must not fill the log with
    tracebacks. Such a record becomes one line of level INFO.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True; the record may have been changed."""
        kind = record.exc_info[0] if record.exc_info else None
        if kind is not None and (
            kind.__name__ in _PEERS_FAULTS or kind.__module__.startswith("aiohttp.")
        ):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]}", None  # type: ignore[index]
            record.exc_info = record.exc_text = None
        return True


class _Flood(logging.Filter):
    """Limits the lines that one place of the code logs in ten seconds.

    The next line of that place has the number of the lines dropped as `left_out`. Critical lines
    and reports requested by a signal are not limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._window = 0
        self._lines: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; add `left_out` to a place's first after a flood."""
        if record.levelno >= logging.CRITICAL or record.name == "cluster.node.signal_handlers":
            return True
        place, window = (record.pathname, record.lineno), int(self._clock() // FLOOD_S)
        if window != self._window:
            self._window = window
            self._lines = {key: LINES_MAX - n for key, n in self._lines.items() if n > LINES_MAX}
        lines = self._lines.get(place, 0)
        if lines < 0:  # lines dropped in the previous window, negated
            record.left_out, lines = -lines, 0
        self._lines[place] = lines + 1
        return lines < LINES_MAX


def setup_logs(*, level: str, node: str, stream: TextIO | None = None) -> logging.Handler:
    """Log all records of the process from `level` (a name) on, and remove earlier handlers.

    Returns the handler; a test removes it.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(node))
    handler.addFilter(_Flood())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    for each in (_GRPC, _HTTP):
        logging.getLogger(each).addFilter(_PeersFault())
    return handler
