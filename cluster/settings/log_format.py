"""Logs: one line per record on stderr, as key=value (logfmt) or as a JSON object.

    time=2026-01-31T12:00:00.123Z level=info node=n1 logger=cluster.node.node msg="leader" epoch=4
    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "node": "n1", …, "epoch": 4}

The fields of `extra` follow the message, so that a line can be found by a field. A value with other
than plain characters is quoted as in JSON. A traceback is one such value.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable
from typing import Final

from cluster.settings.config import LOG_LEVELS
from cluster.settings.log_writer import LogWriter
from timer.model.timer_errors import InvalidRequestError, NotFoundError

AUDIT: Final = "cluster.audit"
"""Logger of the audit log. No call changes its level."""
DEFAULT: Final = "default"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:/@+,\[\]-]+", re.ASCII)
_GRPC: Final = "grpc._cython.cygrpc"
_HTTP: Final = "aiohttp.server"
STDERR: Final = 2
FLOOD_S: Final = 10.0
"""Length of a window in which lines are counted."""
LINES_MAX: Final = 100
"""Lines that one place of the code may log in a window."""
_UNLIMITED: Final = frozenset({AUDIT, "cluster.rpc.audit_log", "cluster.node.signal_handlers"})
"""Loggers without that limit. The second one has lines that the audit log's file can't take."""
_PEERS_FAULTS: Final = frozenset({"ExecuteBatchError", "DecodeError", "CancelledError"})
"""Names of such errors. gRPC logs the last one for a call that ended before its handler began."""
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
        fields = self.fields(record).items()
        return " ".join(f"{key}={_quote(str(value))}" for key, value in fields)

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Return the fields of a record, in the order of its line."""
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
        return values


class JsonFormatter(LineFormatter):
    """Formats a record as one JSON object. Numbers, true and false stay such; the rest is text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object, without a line break."""
        fields = self.fields(record).items()
        return json.dumps({str(key): _json_value(value) for key, value in fields})


def _json_value(value: object) -> object:
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, int | float | None) and finite else str(value)


def _quote(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _shorten_peers_fault(record: logging.LogRecord) -> bool:
    """Shorten an error of the other side that gRPC or aiohttp log as ours, with a traceback.

    Clients that disconnect, cancel a call as it begins, or send malformed messages must not fill
    the log with tracebacks. Such a record becomes one line of level INFO. Returns True: it is
    logged.
    """
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

    The next line of that place has the number of the lines dropped as `left_out`. Critical lines,
    lines of the audit log and reports requested by a signal are not limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._window = 0
        self._lines: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; add `left_out` to a place's first after a flood."""
        if record.levelno >= logging.CRITICAL or record.name in _UNLIMITED:
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


def set_level(logger: str, level: str) -> str:
    """Set the level of a logger of this process; return the level that was in force.

    Args:
        logger: A logger or a package, such as `cluster.control`; empty: all without their own.
        level: One of LOG_LEVELS. For a named logger also `default`: it follows its package again.

    Raises:
        InvalidRequestError: there is no such level, or the logger is the audit log.
        NotFoundError: there is no such logger.
    """
    levels = (*LOG_LEVELS, *([DEFAULT] if logger else []))
    if level not in levels:
        raise InvalidRequestError("level", level[:32], f"must be one of {', '.join(levels)}")
    if logger == AUDIT:
        raise InvalidRequestError("logger", logger, "must not be the audit log")
    if logger and logger not in logging.root.manager.loggerDict:
        raise NotFoundError("logger", logger[:128])
    found = logging.getLogger(logger)
    before = logging.getLevelName(found.getEffectiveLevel()).lower()
    found.setLevel(logging.NOTSET if level == DEFAULT else level.upper())
    logging.getLogger(__name__).warning(
        "log level is set", extra={"of": logger or "all", "before": before, "now": level}
    )
    return before


def setup_logs(
    *, level: str, node: str, form: str = "text", descriptor: int = STDERR
) -> logging.Handler:
    """Log all records of the process from `level` (a name) on, and remove earlier handlers.

    `form`: one of LOG_FORMATS. Returns the handler; a test removes it.
    """
    handler = LogWriter(descriptor)
    handler.setFormatter(JsonFormatter(node) if form == "json" else LineFormatter(node))
    handler.addFilter(_Flood())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    for each in (_GRPC, _HTTP):
        logging.getLogger(each).addFilter(_shorten_peers_fault)
    # gRPC logs one line of the level `debug` for each channel and stream.
    logging.getLogger(_GRPC).addFilter(lambda record: record.levelno > logging.DEBUG)
    return handler
