"""Errors in `grpc-status-details-bin`, where gRPC's libraries for Go, Java and others read them.

    google.rpc.Status    code, message
        details: Any of timer.v1.Error
                 Any of google.rpc.RetryInfo, if the error has retry_after_ms

The messages of google.rpc are small. They are encoded here, so that no package is needed for them.
"""

from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration

from timerclient.proto import timer_pb2 as pb

KEY: Final = "grpc-status-details-bin"
ERROR_BYTES_MAX: Final = 1_500
"""Size of an error in the details, at most. Java's client takes 8 KiB of metadata in an answer."""


def details_of(code: grpc.StatusCode, error: pb.Error) -> bytes | None:
    """Return a google.rpc.Status, encoded. None: the error is too long."""
    data = error.SerializeToString()
    if len(data) > ERROR_BYTES_MAX:
        return None
    number: int = code.value[0]
    status = bytes([1 << 3, number]) + _field(2, error.message.encode())
    status += _field(3, _any(error.DESCRIPTOR.full_name, data))
    if error.retry_after_ms:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        status += _field(3, _any("google.rpc.RetryInfo", _field(1, delay.SerializeToString())))
    return status


def _any(name: str, data: bytes) -> bytes:
    return Any(type_url=f"type.googleapis.com/{name}", value=data).SerializeToString()


def _field(number: int, data: bytes) -> bytes:
    """Return a field with a length, encoded."""
    out, size = bytearray([number << 3 | 2]), len(data)
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + data
