"""The only place where engine errors become gRPC's: status codes, reasons, trailing metadata.

    EngineError --to_wire--> timer.v1.Error --abort--> status code, message, `timer-error-bin`,
                                                       `grpc-status-details-bin`

Any client sees the status code. The project's own client acts on the reason in the metadata. gRPC
itself repeats calls if an application configures that. It knows only the status code, so PUSHBACK
prevents a repetition that could apply a request twice.
"""

from typing import Final, NamedTuple, NoReturn

import grpc
import grpc.aio

from cluster.rpc import status_details
from timer.model import timer_errors
from timerclient.proto import timer_pb2
from timerclient.rows.enum_names import short_name

TRAILER: Final = "timer-error-bin"
"""Trailing metadata that carries a serialised `timer.v1.Error`."""
PUSHBACK: Final = "grpc-retry-pushback-ms"
"""Trailing metadata for gRPC's own retries: the pause before the next; negative: no retry."""
TEXT_SIZE_MAX: Final = 1024
"""Characters of one text in an `Error`. All metadata of an answer must fit into 8 KiB."""
_UINT32_MAX: Final = (1 << 32) - 1


class Status(NamedTuple):
    """The status code and reason of a class of errors."""

    code: grpc.StatusCode
    reason: timer_pb2.Reason.ValueType


_C: Final = grpc.StatusCode
_STORAGE: Final = Status(_C.INTERNAL, timer_pb2.REASON_STORAGE_FAILED)

STATUSES: Final[dict[type[timer_errors.EngineError], Status]] = {
    timer_errors.InvalidRequestError: Status(_C.INVALID_ARGUMENT, timer_pb2.REASON_INVALID_REQUEST),
    timer_errors.NotFoundError: Status(_C.NOT_FOUND, timer_pb2.REASON_NOT_FOUND),
    timer_errors.GroupDeletedError: Status(_C.NOT_FOUND, timer_pb2.REASON_NOT_FOUND),
    timer_errors.TopicDeletedError: Status(_C.NOT_FOUND, timer_pb2.REASON_NOT_FOUND),
    timer_errors.AlreadyExistsError: Status(_C.ALREADY_EXISTS, timer_pb2.REASON_ALREADY_EXISTS),
    timer_errors.NotLeaderError: Status(_C.FAILED_PRECONDITION, timer_pb2.REASON_NOT_LEADER),
    timer_errors.NotReadyError: Status(_C.UNAVAILABLE, timer_pb2.REASON_NOT_READY),
    timer_errors.OverloadedError: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.REASON_OVERLOADED),
    timer_errors.CallerLimitError: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.REASON_OVERLOADED),
    timer_errors.DiskFullError: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.REASON_DISK_FULL),
    timer_errors.QuotaReachedError: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.REASON_QUOTA_REACHED),
    timer_errors.LimitReachedError: Status(_C.RESOURCE_EXHAUSTED, timer_pb2.REASON_QUOTA_REACHED),
    timer_errors.CommitTimeoutError: Status(_C.DEADLINE_EXCEEDED, timer_pb2.REASON_COMMIT_TIMEOUT),
    timer_errors.LeadershipLostError: Status(_C.ABORTED, timer_pb2.REASON_LEADERSHIP_LOST),
    timer_errors.SequenceGapError: Status(_C.OUT_OF_RANGE, timer_pb2.REASON_SEQUENCE_GAP),
    timer_errors.OutcomeForgottenError: Status(_C.DATA_LOSS, timer_pb2.REASON_OUTCOME_FORGOTTEN),
    timer_errors.PermissionDeniedError: Status(
        _C.PERMISSION_DENIED, timer_pb2.REASON_PERMISSION_DENIED
    ),
    timer_errors.TokenRejectedError: Status(_C.UNAUTHENTICATED, timer_pb2.REASON_TOKEN_REJECTED),
    timer_errors.UnknownProducerError: Status(
        _C.UNAUTHENTICATED, timer_pb2.REASON_UNKNOWN_PRODUCER
    ),
    timer_errors.GroupHeldError: Status(_C.FAILED_PRECONDITION, timer_pb2.REASON_GROUP_HELD),
    timer_errors.ShuttingDownError: Status(_C.UNAVAILABLE, timer_pb2.REASON_SHUTTING_DOWN),
    timer_errors.StorageError: _STORAGE,
    timer_errors.CorruptFileError: _STORAGE,
    timer_errors.UnreadableFileError: _STORAGE,
    timer_errors.UnopenedFileError: _STORAGE,
    timer_errors.UnknownVersionError: _STORAGE,
    timer_errors.UnsupportedLevelError: _STORAGE,
    timer_errors.PromiseLostError: _STORAGE,
    timer_errors.WrongDirectoryError: _STORAGE,
    timer_errors.DiskFailedError: _STORAGE,
    timer_errors.ConfigError: Status(_C.INVALID_ARGUMENT, timer_pb2.REASON_CONFIG),
    timer_errors.CertificateDateError: Status(_C.INVALID_ARGUMENT, timer_pb2.REASON_CONFIG),
}


_CODES: Final = {timer_pb2.REASON_UNSPECIFIED: "OK"} | {
    status.reason: status.code.name for status in STATUSES.values()
}


def code_of(error: timer_errors.EngineError) -> grpc.StatusCode:
    """Return the status code that timer.proto defines for this error."""
    return STATUSES[type(error)].code


def reason_of(error: timer_errors.EngineError) -> str:
    """Return the name of the error's reason, such as NOT_LEADER: a label in metrics and logs."""
    return short_name(timer_pb2.Reason.DESCRIPTOR, STATUSES[type(error)].reason)


def code_in(error: timer_pb2.Error) -> str:
    """Return the name of the status code of the error in an answer; OK: it has none."""
    return _CODES[error.reason]


def to_wire(error: timer_errors.EngineError) -> timer_pb2.Error:
    """Return the error's message for clients; texts are cut to TEXT_SIZE_MAX characters."""
    wire = timer_pb2.Error(
        reason=STATUSES[type(error)].reason,
        message=_text(str(error)),
        retryable=error.retryable,
        outcome_known=error.outcome_known,
    )
    match error:
        case timer_errors.NotLeaderError():
            wire.leader = error.leader or ""
        case timer_errors.OverloadedError() | timer_errors.DiskFullError():
            wire.retry_after_ms = min(max(error.retry_after_ms, 0), _UINT32_MAX)
        case timer_errors.InvalidRequestError() | timer_errors.QuotaReachedError():
            wire.field = _text(error.field)
            wire.limit = _text(error.limit)
        case timer_errors.SequenceGapError():
            wire.expected_sequence = error.expected
        case _:
            pass
    return wire


def trailers_of(
    code: grpc.StatusCode, wire: timer_pb2.Error, *, is_repeatable: bool
) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a failed RPC.

    `is_repeatable`: the request may be applied twice without harm.
    """
    trailers: list[tuple[str, str | bytes]] = [(TRAILER, wire.SerializeToString())]
    if (details := status_details.details_of(code, wire)) is not None:
        trailers.append((status_details.KEY, details))
    if not (wire.outcome_known or is_repeatable):
        trailers.append((PUSHBACK, "-1"))
    elif wire.retry_after_ms:
        trailers.append((PUSHBACK, str(wire.retry_after_ms)))
    return tuple(trailers)


async def abort(
    context: "grpc.aio.ServicerContext[object, object]",
    error: timer_errors.EngineError,
    *,
    is_repeatable: bool = True,
    code: grpc.StatusCode | None = None,
) -> NoReturn:
    """End the RPC with a status code, and the whole error in the trailing metadata.

    `is_repeatable`: see `trailers_of`. `code`: None: the error's.

    Raises:
        grpc.aio.AbortError: always; gRPC ends a handler in this way.
    """
    wire, code = to_wire(error), code or code_of(error)
    trailers = trailers_of(code, wire, is_repeatable=is_repeatable)
    await context.abort(code, wire.message, trailers)


def _text(text: str) -> str:
    """Cut `text`, and escape characters without UTF-8: protobuf would refuse the whole answer."""
    return text[:TEXT_SIZE_MAX].encode(errors="backslashreplace").decode()
