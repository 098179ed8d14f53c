"""The audit log: one line of JSON for each change by an operator and for each denied call.

    {"time": "2026-01-31T12:00:00.123Z", "node": "n1", "identity": "admin/alice",
     "address": "ipv4:10.0.0.9:50112", "method": "DeleteTopic", "request": {"topic": "orders"},
     "result": "OK"}

A denied call has the result DENIED and the reason as `why`.

Lines go to the logger `cluster.audit`: to the node's log, or to the file of the setting
`audit_log`.
"""

import json
import logging
import time
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from cluster.rpc.rpc_caller import Caller
from timer.model.timer_errors import EngineError

audit: Final = logging.getLogger("cluster.audit")

REQUEST_BYTES_MAX: Final = 4_096
"""Bytes of a request that a line contains. Of a longer one it has the size."""


class AuditLog:
    """Writes the audit log of one node."""

    def __init__(self, node: str, path: str = "") -> None:
        """`path`: a file to append to; empty: the node's log."""
        self._node = node
        audit.setLevel(logging.INFO)
        if path and not audit.handlers:
            handler = logging.FileHandler(path, encoding="utf-8", delay=True)
            handler.setFormatter(logging.Formatter("%(message)s"))
            audit.addHandler(handler)
            audit.propagate = False

    def changed(self, caller: Caller, request: object, result: str) -> None:
        """Note a call that changes the cluster. `request`: see `shown`; `result`: a status."""
        self._write(
            identity=str(caller.identity),
            address=caller.address,
            method=caller.method.rpartition("/")[2],
            request=request,
            result=result,
        )

    def denied(self, method: str, identity: str, address: str, error: EngineError) -> None:
        """Note a denied call. `identity`: as the certificate has it."""
        self._write(
            identity=identity[:512],
            address=address,
            method=method.rpartition("/")[2],
            result="DENIED",
            why=str(error),
        )

    def _write(self, **fields: object) -> None:
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
        line = {"time": f"{stamp}.{int(now_s % 1 * 1000):03d}Z", "node": self._node, **fields}
        audit.info("%s", json.dumps(line))


def shown(request: Any) -> object:
    """Return a request for a line of the log: its fields, or its size if it is long."""
    if not hasattr(request, "DESCRIPTOR"):
        return "unreadable"
    size = request.ByteSize()
    if size > REQUEST_BYTES_MAX:
        return f"{size} bytes"
    return MessageToDict(request, preserving_proto_field_name=True)
