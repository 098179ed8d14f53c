"""The one place where our errors meet gRPC: status codes, wire reasons, the trailing metadata.

    TimerError --to_wire--> timer.v1.Error --abort--> status code, details, `timer-error-bin`

A status code is what a stranger's client sees; the reason in the metadata is what ours acts on.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, NoReturn

import grpc
import grpc.aio

from timer import errors
from timerclient.proto import timer_pb2

TRAILER: Final = "timer-error-bin"
"""Trailing metadata that carries a serialised `timer.v1.Error`."""
TEXT_SIZE_MAX: Final = 1024
"""Characters of one text in an `Error`: all metadata of an answer must fit into 8 KiB."""
_UINT32_MAX: Final = (1 << 32) - 1


class Status(NamedTuple):
    """What a class of errors is on the wire."""

    code: grpc.StatusCode
    reason: timer_pb2.Reason.ValueType


_C: Final = grpc.StatusCode
_STORAGE: Final = Status(_C.INTERNAL, timer_pb2.STORAGE_FAILED)

STATUSES: Final[dict[type[errors.TimerError], Status]] = {
    errors.InvalidRequest: Status(_C.INVALID_ARGUMENT, timer_pb2.INVALID_REQUEST),
    errors.NotFound: Status(_C.NOT_FOUND, timer_pb2.NOT_FOUND),
    errors.GroupDeleted: Status(_C.NOT_FOUND, timer_pb2.NOT_FOUND),
    errors.TopicDeleted: Status(_C.NOT_FOUND, timer_pb2.NOT_FOUND),
    errors.AlreadyExists: Status(_C.ALREADY_EXISTS, timer_pb2.ALREADY_EXISTS),
    errors.NotLeader: Status(_C.FAILED_PRECONDITION, timer_pb2.NOT_LEADER),
    errors.NotReady: Status(_C.UNAVAILABLE, timer_pb2.NOT_READY),
    errors.Fenced: Status(_C.ABORTED, timer_pb2.FENCED),
    errors.Overloaded: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.OVERLOADED),
    errors.DiskFull: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.DISK_FULL),
    errors.QuotaReached: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.QUOTA_REACHED),
    errors.LimitReached: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.QUOTA_REACHED),
    errors.CommitTimeout: Status(_C.DEADLINE_EXCEEDED, timer_pb2.COMMIT_TIMEOUT),
    errors.LeadershipLost: Status(_C.ABORTED, timer_pb2.LEADERSHIP_LOST),
    errors.SequenceGap: Status(_C.OUT_OF_RANGE, timer_pb2.SEQUENCE_GAP),
    errors.OutcomeForgotten: Status(_C.DATA_LOSS, timer_pb2.OUTCOME_FORGOTTEN),
    errors.UnknownProducer: Status(_C.UNAUTHENTICATED, timer_pb2.UNKNOWN_PRODUCER),
    errors.LeaseLost: Status(_C.FAILED_PRECONDITION, timer_pb2.LEASE_LOST),
    errors.GroupHeld: Status(_C.FAILED_PRECONDITION, timer_pb2.GROUP_HELD),
    errors.ShuttingDown: Status(_C.UNAVAILABLE, timer_pb2.SHUTTING_DOWN),
    errors.StorageError: _STORAGE,
    errors.CorruptFile: _STORAGE,
    errors.Unreadable: _STORAGE,
    errors.UnknownVersion: _STORAGE,
    errors.PromiseLost: _STORAGE,
    errors.WrongDirectory: _STORAGE,
    errors.DiskFailed: _STORAGE,
    errors.ConfigError: Status(_C.INVALID_ARGUMENT, timer_pb2.CONFIG),
}


def error_classes() -> Iterator[type[errors.TimerError]]:
    """Yield every class of the tree below `TimerError`, nested ones included."""
    waiting = [*errors.TimerError.__subclasses__()]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(found.__subclasses__())


def code_of(error: errors.TimerError) -> grpc.StatusCode:
    """Return the status code that timer.proto promises for this error."""
    return STATUSES[type(error)].code


def reason_of(error: errors.TimerError) -> str:
    """Return the name of this error's reason, such as NOT_LEADER: a label for metrics and logs."""
    return timer_pb2.Reason.Name(STATUSES[type(error)].reason)


def to_wire(error: errors.TimerError) -> timer_pb2.Error:
    """Return the error as clients get it: texts are cut to TEXT_SIZE_MAX characters."""
    wire = timer_pb2.Error(
        reason=STATUSES[type(error)].reason,
        message=_text(str(error)),
        retryable=error.retryable,
        outcome_known=error.outcome_known,
    )
    match error:
        case errors.NotLeader():
            wire.leader = error.leader or ""
        case errors.Overloaded() | errors.DiskFull():
            wire.retry_after_ms = min(max(error.retry_after_ms, 0), _UINT32_MAX)
        case errors.InvalidRequest() | errors.QuotaReached():
            wire.field = _text(error.field)
            wire.limit = _text(error.limit)
        case errors.SequenceGap():
            wire.expected_sequence = error.expected
        case _:
            pass
    return wire


async def abort(
    context: "grpc.aio.ServicerContext[object, object]", error: errors.TimerError
) -> NoReturn:
    """End the RPC with the error's status code, and the whole error in the trailing metadata.

    Raises:
        grpc.aio.AbortError: always; gRPC's own way out of a handler.
    """
    wire = to_wire(error)
    trailer = ((TRAILER, wire.SerializeToString()),)
    await context.abort(code_of(error), wire.message, trailer)


def _text(text: str) -> str:
    """Cut `text`, and escape what has no UTF-8: protobuf would refuse the whole answer."""
    return text[:TEXT_SIZE_MAX].encode(errors="backslashreplace").decode()
