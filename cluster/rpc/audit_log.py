"""The audit log: one line of JSON for each change by an operator and for each denied call.

    {"time": "2026-01-31T12:00:00.123Z", "node": "n1", "identity": "admin/alice",
     "address": "ipv4:10.0.0.9:50112", "method": "DeleteTopic", "request": {"topic": "orders"},
     "result": "OK", "epoch": 3, "log_index": 4711}

`epoch` and `log_index` name the log entry of the change, if there is one; of a relayed call the
leader has it. A later epoch may have another entry at the index, and this one is lost. A call that
ends before its answer has `"outcome": "unknown"`: the change may be made later, or not at all. When
its entry ends, the leader writes a second line with `"late": true`, the result and the index.
A denied call has the result DENIED and the reason as `why`. Floods of them are cut: a line with
`left_out` follows.

Lines go to the logger `cluster.audit`: to the node's log, or to the file of the setting
`audit_log`. The file may be moved away, as logrotate does: the next line begins a new one.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from cluster.rpc import grpc_errors
from cluster.rpc.rpc_caller import Caller
from cluster.settings.log_format import AUDIT
from timer.model.timer_errors import ConfigError, EngineError
from timerclient.rows.enum_names import with_short_names

audit: Final = logging.getLogger(AUDIT)
logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX: Final = 4_096
"""Bytes of a request that a line contains. Of a longer one it has the targets and the size."""
TARGET_CHARS_MAX: Final = 512
"""Characters of each target in a line about a longer request."""
DENIED_MAX: Final = 100
"""Lines about denied calls a second, at most; further ones are counted."""
DENIED_EACH_MAX: Final = 10
"""Of these, lines about one identity."""
WRITE_S: Final = 0.05
"""Longest time of a line on its way to the file, in which the event loop waits."""
POLLED_EVERY_S: Final = 3600.0
"""Seconds between two lines about the calls of one caller to a polled method."""
_UNKNOWN: Final = frozenset({"ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNKNOWN"})
"""Results of calls that may have had an effect."""
_TARGETS: Final = ("namespace", "topic", "group", "name", "target")


class AuditLog:
    """Writes the audit log of one node."""

    def __init__(
        self, node: str, path: str = "", on_denied: Callable[[], object] = lambda: None
    ) -> None:
        """`path`: a file to append to; empty: the node's log. `on_denied`: for each denied call.

        Raises:
            ConfigError: The file can't be opened.
        """
        self._node = node
        self._on_denied = on_denied
        self._denied: Counter[str] = Counter()
        """Denied calls of the present second, by identity."""
        self._written = 0
        """Those with a line."""
        self._left_out: Counter[str] = Counter()
        """Those without a line."""
        self._next_line_s: dict[tuple[str, str], float] = {}
        """(identity, polled method) -> monotonic time from which a call has a line again."""
        audit.setLevel(logging.INFO)
        if path and not audit.handlers:
            try:
                handler = _FileInThread(path)
            except OSError as error:
                raise ConfigError("audit_log", path, error.strerror or str(error)) from None
            audit.addHandler(handler)
            audit.propagate = False

    def has_line(self, caller: Caller) -> bool:
        """Return whether a call gets a line even if it succeeds."""
        if not caller.rule.is_polled:
            return caller.rule.is_audited
        whose, now_s = (str(caller.identity), caller.method), time.monotonic()
        if now_s < self._next_line_s.get(whose, 0.0):
            return False
        self._next_line_s[whose] = now_s + POLLED_EVERY_S
        return True

    def complaints(self) -> list[str]:
        """Return why the file takes no lines; empty: it took the last one."""
        failures = [each.failure() for each in audit.handlers if isinstance(each, _FileInThread)]
        return [f"the audit log can't be written: {each}" for each in failures if each]

    def record_late_answer(
        self, request: object, caller: Caller, error: EngineError | None
    ) -> None:
        """Note the end of an entry whose call has ended before. `error`: None: it is applied."""
        result = "OK" if error is None else grpc_errors.code_of(error).name
        self.record_change(caller, request, result, late=True)

    def record_change(self, caller: Caller, request: object, result: str, **more: object) -> None:
        """Note a change of the cluster. `request`: see `request_for_log`. `result`: a status."""
        self._write(
            identity=str(caller.identity),
            address=caller.address,
            method=caller.method.rpartition("/")[2],
            request=request,
            result=result,
            **({"outcome": "unknown"} if result in _UNKNOWN else {}),
            **({"epoch": caller.epoch, "log_index": caller.log_index} if caller.log_index else {}),
            **more,
        )

    def record_denial(self, method: str, identity: str, address: str, error: EngineError) -> None:
        """Note a denied call. `identity`: see `Gate.claimed_identity`."""
        self._on_denied()
        if self._floods(identity or f"address {address.rpartition(':')[0]}"):
            return
        self._write(
            identity=identity[:512],
            address=address,
            method=method.rpartition("/")[2],
            result="DENIED",
            why=str(error),
        )

    def _floods(self, identity: str) -> bool:
        """Count a denied call; return whether its line is left out."""
        if not self._denied:
            asyncio.get_running_loop().call_later(1.0, self._end_second)
        self._denied[identity] += 1
        if self._denied[identity] <= DENIED_EACH_MAX and self._written < DENIED_MAX:
            self._written += 1
            return False
        self._left_out[identity] += 1
        return True

    def _end_second(self) -> None:
        left_out, self._left_out = self._left_out, Counter()
        self._denied.clear()
        self._written = 0
        if left_out:
            (most, _), count = left_out.most_common(1)[0], left_out.total()
            self._write(identity=most[:512], result="DENIED", left_out=count)

    def _write(self, **fields: object) -> None:
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
        begin = {"time": f"{stamp}.{int(now_s % 1 * 1000):03d}Z", "node": self._node}
        audit.info("%s", json.dumps(begin | fields))


class _FileInThread(logging.Handler):
    """Appends lines to a file in a thread, as a pipe or a disk may hang.

    The node's log has lines that fail or take longer than WRITE_S. A slow line may be in both.
    """

    def __init__(self, path: str) -> None:
        """Open the file.

        Raises:
            OSError: it can't be opened.
        """
        super().__init__()
        self._path, self._hangs = path, f"{path!r} takes no lines"
        self._descriptor = -1
        self._is_torn = False
        """The last line is written in part."""
        self._lines = SimpleQueue[tuple[bytes, Future[None]] | None]()
        self._last = Future[None]()
        """Of the last line that the thread got."""
        self._last.set_result(None)
        # No executor: the end of the interpreter would wait for its thread.
        threading.Thread(target=self._write_lines, name="audit", daemon=True).start()
        with suppress(TimeoutError):
            self._append(b"")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. The operator's call does not fail for it."""
        line, why = record.getMessage(), ""
        try:
            self._append(line.encode() + b"\n")
        except OSError as error:
            why = str(error) or self._hangs
        if why:
            logger.error("the audit log can't be written", extra={"error": why, "line": line})

    def failure(self) -> str:
        """Return why the file takes no lines. Empty: it took the last one that the thread got."""
        if not self._last.done():
            return self._hangs
        return str(self._last.exception() or "")

    def _append(self, line: bytes) -> None:
        if not self._last.done():
            raise TimeoutError
        self._last = Future()
        self._lines.put((line, self._last))
        self._last.result(WRITE_S)

    def close(self) -> None:
        """Close the file after the lines so far. Does not wait for it."""
        self._lines.put(None)
        super().close()

    def _write_lines(self) -> None:
        while (next_line := self._lines.get()) is not None:
            line, written = next_line
            try:
                self._write(line)
            except OSError as error:
                written.set_exception(error)
            else:
                written.set_result(None)
        self._close_file()

    def _write(self, line: bytes) -> None:
        """Write a line, into a new file if the last one was moved away."""
        if self._descriptor < 0 or not self._is_in_place():
            self._close_file()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor, self._is_torn = os.open(self._path, flags, mode=0o600), False
        rest = b"\n" + line if self._is_torn else line
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
            self._is_torn = bool(rest)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            closed, self._descriptor = self._descriptor, -1
            os.close(closed)


def request_for_log(request: Any) -> object:
    """Return a request for a line of the log: its fields, or its targets and size if it is long.

    Unknown fields are left out.
    """
    if not hasattr(request, "DESCRIPTOR"):
        return "unreadable"
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    size = known.ByteSize()
    if size > REQUEST_BYTES_MAX:
        return {**_targets(known), "size": f"{size} bytes"}
    fields = MessageToDict(known, preserving_proto_field_name=True, use_integers_for_enums=True)
    return with_short_names(fields, known.DESCRIPTOR)


def _targets(request: Any) -> dict[str, str]:
    """Return the names that a request is about, such as topic and group, each shortened."""
    holder = request.scope if "scope" in request.DESCRIPTOR.fields_by_name else request
    named = {name: getattr(holder, name, "") for name in _TARGETS}
    return {name: value[:TARGET_CHARS_MAX] for name, value in named.items() if value}
