"""Errors of the contract and of failed RPCs as exceptions of the client.

timer.v1.Error      --from_wire--> the class of its reason, else RpcFailed
grpc.aio.AioRpcError --from_rpc--> by its trailer; without one Unreachable, RpcFailed or
                                    ConnectionLost
"""

import re
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import (
    BY_REASON,
    ConnectionLost,
    InvalidRequest,
    NotLeader,
    QuotaReached,
    RpcFailed,
    SequenceGap,
    TimerError,
    Unreachable,
)
from timerclient.values.reasons import Reason

TRAILER: Final = "timer-error-bin"
"""Trailing metadata of a failed RPC: its `timer.v1.Error`."""


def from_wire(wire: pb.Error) -> TimerError:
    """Return the exception of an error of the contract."""
    error = BY_REASON.get(Reason(wire.reason), RpcFailed)(wire.message)
    error.retryable = wire.retryable
    error.outcome_known = wire.outcome_known
    error.retry_after_ms = wire.retry_after_ms
    if isinstance(error, InvalidRequest | QuotaReached):
        error.field, error.limit = wire.field, wire.limit
    elif isinstance(error, NotLeader):
        error.leader = wire.leader
    elif isinstance(error, SequenceGap):
        error.expected_sequence = wire.expected_sequence
    return error


_REFUSED = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""Statuses of a call that was rejected unprocessed. Others may come after it had an effect."""


_HTTP_1: Final = "this port speaks HTTP/1: give the node's gRPC port, not its HTTP port"
_HINTS: Final = {
    "ping timeout": "the node is gone, or the link too slow for a request of this size",
    "(HTTP status 5": "a proxy answers that it reaches no node",
    "Failed parsing HTTP/2": _HTTP_1,
    "Trying to connect an http1.x server": _HTTP_1,
    "missing selected ALPN property": _HTTP_1,  # with TLS
    "WRONG_VERSION_NUMBER": "this port speaks no TLS: leave out the certificates",
    "certificate has expired": (
        "the node's certificate or its authority has expired, or this machine's clock is wrong"
    ),
    "certificate is not yet valid": (
        "the node's certificate or its authority is not valid yet, or this machine's clock is wrong"
    ),
    "CERTIFICATE_VERIFY_FAILED": "the node's certificate does not fit the client's `ca`",
    "failed to connect to all addresses; last error: UNAVAILABLE": (
        "the node closed the connection: if it has TLS, the client needs a valid certificate of"
        " its cluster: timers+tls:// with TIMERS_TLS_CA, TIMERS_TLS_CERT and TIMERS_TLS_KEY,"
        " ClientTls(...), or timerctl --tls-ca, --tls-cert and --tls-key. A token needs the port of"
        " the setting `tokens` instead"
    ),
}
"""Part of gRPC's message about a connection -> the probable cause. The first that fits counts."""
_NOT_CONNECTED: Final = re.compile(
    r"failed to connect to all addresses; last error: (?:[A-Z_]+: )?(?:ipv[46]:\S+: )?"
    r"(?:Failed to connect to remote host: )?"
)
"""Beginning of gRPC's message about a failed connection, before the cause. No call was sent."""


def from_rpc(failed: grpc.aio.AioRpcError) -> TimerError:
    """Return the exception of a failed RPC: by its trailer, else by its status."""
    for name, value in failed.trailing_metadata() or ():
        if name == TRAILER and isinstance(value, bytes):
            try:
                return from_wire(pb.Error.FromString(value))
            except DecodeError:
                break
    details = failed.details() or "no details"
    text = f"{failed.code().name}: {_NOT_CONNECTED.sub('', details) or details}"
    hint = next((hint for sign, hint in _HINTS.items() if sign in details), "")
    text = f"{hint} ({text})" if hint else text
    if failed.code() is grpc.StatusCode.UNAVAILABLE and _NOT_CONNECTED.match(details):
        unreachable = Unreachable(text)
        unreachable.retryable = hint != _HTTP_1
        return unreachable
    return RpcFailed(text) if failed.code() in _REFUSED else ConnectionLost(text)
