"""Every error reaches the wire with its code, reason and details."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.rpc.grpc_errors import (
    STATUSES,
    TEXT_SIZE_MAX,
    TRAILER,
    abort,
    code_of,
    reason_of,
    to_wire,
    trailers_of,
)
from timer.model import timer_errors
from timerclient.proto import timer_pb2
from timerclient.values import errors as client_errors
from timerclient.values.reasons import Reason

PROTO = Path(timer_pb2.__file__).parent / "timer" / "v1" / "timer.proto"
INSTANCES: list[timer_errors.EngineError] = [
    timer_errors.InvalidRequestError("due_ms", -1, "at least 0"),
    timer_errors.NotFoundError("topic", "bills"),
    timer_errors.AlreadyExistsError("topic", "bills", "another type"),
    timer_errors.NotLeaderError("node2:7100"),
    timer_errors.NotReadyError("no leader is known"),
    timer_errors.OverloadedError("the log", retry_after_ms=250),
    timer_errors.CallerLimitError("rate.rows of client/a", "must be at most 5", 9),
    timer_errors.DiskFullError([("n1", 5, 10)], retry_after_ms=1000),
    timer_errors.QuotaReachedError("bills", "ready_max", 2, "topic", used=2, requested=1),
    timer_errors.LimitReachedError("limits.topics_max", 2, "the cluster", 2),
    timer_errors.CommitTimeoutError("no majority within 5000 ms"),
    timer_errors.LeadershipLostError("deposed by epoch 4"),
    timer_errors.SequenceGapError(expected=7, got=9),
    timer_errors.OutcomeForgottenError(3),
    timer_errors.UnknownProducerError(12),
    timer_errors.GroupHeldError("bills", "g", "c"),
    timer_errors.GroupDeletedError("bills", "g"),
    timer_errors.TopicDeletedError("bills"),
    timer_errors.ShuttingDownError("draining"),
    timer_errors.StorageError("disk"),
    timer_errors.CorruptFileError("log/1", 40, "checksum"),
    timer_errors.UnreadableFileError("log/1", 40, "EIO"),
    timer_errors.UnopenedFileError("log/1", OSError("no such file")),
    timer_errors.UnknownVersionError("manifest", 2, 1),
    timer_errors.UnsupportedLevelError("/data", 9),
    timer_errors.PromiseLostError("formatted again"),
    timer_errors.WrongDirectoryError("another cluster's"),
    timer_errors.DiskFailedError("fsync", errno=5),
    timer_errors.PermissionDeniedError("client/a may not schedule"),
    timer_errors.TokenRejectedError("token/ci expired"),
    timer_errors.ConfigError("tick_ms", 0, "at least 1"),
    timer_errors.CertificateDateError("tls.ca", "ca.pem", "expired"),
]


def error_classes() -> Iterator[type[timer_errors.EngineError]]:
    """Yield every class of the tree below `EngineError`, nested ones included."""
    waiting = [*timer_errors.EngineError.__subclasses__()]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(found.__subclasses__())


def test_every_error_class_has_exactly_one_status() -> None:
    ours = {each for each in error_classes() if each.__module__ == "timer.model.timer_errors"}
    assert set(STATUSES) == ours
    assert {type(each) for each in INSTANCES} == ours


def test_every_error_is_defined_in_the_one_tree() -> None:
    assert [each for each in error_classes() if each.__module__ != "timer.model.timer_errors"] == []


def test_every_reason_stands_for_some_error() -> None:
    reasons = {status.reason for status in STATUSES.values()}
    # An ack returns ACK_RESULT_LEASE_LOST, and streams between nodes carry no reason.
    unsent = {timer_pb2.REASON_FENCED, timer_pb2.REASON_LEASE_LOST}
    assert reasons == set(timer_pb2.Reason.values()) - {timer_pb2.REASON_UNSPECIFIED} - unsent


@pytest.mark.parametrize("error", INSTANCES, ids=lambda each: type(each).__name__)
def test_status_code_is_the_one_the_proto_promises(error: timer_errors.EngineError) -> None:
    promised = dict(
        re.findall(r"^  REASON_(\w+) = \d+; +// ([A-Z_]+)", PROTO.read_text(), re.MULTILINE)
    )
    assert code_of(error).name == promised[reason_of(error)]


@pytest.mark.parametrize("error", INSTANCES, ids=lambda each: type(each).__name__)
def test_wire_error_says_what_the_classes_of_server_and_client_say(
    error: timer_errors.EngineError,
) -> None:
    wire = to_wire(error)
    assert wire.message == str(error)
    assert (wire.retryable, wire.outcome_known) == (error.retryable, error.outcome_known)
    known = client_errors.BY_REASON.get(Reason(wire.reason))
    assert known is None or known.outcome_known == error.outcome_known


def test_details_of_an_error_reach_their_own_fields() -> None:
    refused = to_wire(timer_errors.InvalidRequestError("due_ms", -1, "at least 0"))
    assert (refused.field, refused.limit) == ("due_ms", "at least 0")
    full = to_wire(
        timer_errors.QuotaReachedError("bills", "ready_max", 2, "topic", used=2, requested=1)
    )
    assert (full.field, full.limit) == ("ready_max", "must be at most 2 (ready_max of the topic)")
    assert to_wire(timer_errors.NotLeaderError("node2:7100")).leader == "node2:7100"
    assert to_wire(timer_errors.DiskFullError([], retry_after_ms=9)).retry_after_ms == 9
    assert to_wire(timer_errors.NotLeaderError(None)).leader == ""
    assert to_wire(timer_errors.OverloadedError("x", retry_after_ms=250)).retry_after_ms == 250
    assert (
        to_wire(timer_errors.OverloadedError("x", retry_after_ms=1 << 40)).retry_after_ms
        == (1 << 32) - 1
    )
    assert to_wire(timer_errors.SequenceGapError(expected=7, got=9)).expected_sequence == 7


def test_text_from_a_hostile_request_is_cut_and_escaped() -> None:
    wire = to_wire(
        timer_errors.InvalidRequestError("f" * 9_000, "v\ud800" * 9_000, "\udfff" * 9_000)
    )
    assert len(wire.message) == len(wire.field) == TEXT_SIZE_MAX
    assert wire.limit == "\\udfff" * TEXT_SIZE_MAX
    assert timer_pb2.Error.FromString(wire.SerializeToString()) == wire


@pytest.fixture
async def failing() -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]:
    """A method that fails with the error of INSTANCES at the index that its request names."""

    async def fail(request: bytes, context: "grpc.aio.ServicerContext[object, object]") -> bytes:
        await abort(context, INSTANCES[int(request)])

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Fail": grpc.unary_unary_rpc_method_handler(fail)
    }
    server.add_registered_method_handlers("test", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_unary("/test/Fail")
    await server.stop(None)


async def test_aborted_rpc_carries_code_details_and_the_whole_error(
    failing: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes],
) -> None:
    for at, error in enumerate(INSTANCES):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await failing(str(at).encode())
        assert failed.value.code() == code_of(error)
        assert failed.value.details() == str(error)
        trailers = dict(failed.value.trailing_metadata())
        assert timer_pb2.Error.FromString(trailers[TRAILER]) == to_wire(error)


async def test_status_has_the_error_and_the_pause_among_its_details(
    failing: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes],
) -> None:
    statuses: Any = pytest.importorskip("google.rpc.status_pb2")
    retries: Any = pytest.importorskip("google.rpc.error_details_pb2")
    for at, error in enumerate(INSTANCES):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await failing(str(at).encode())
        trailers = dict(failed.value.trailing_metadata())
        status = statuses.Status.FromString(trailers["grpc-status-details-bin"])
        code: Any = code_of(error).value
        assert (status.code, status.message) == (code[0], str(error))
        found, retry, wire = timer_pb2.Error(), retries.RetryInfo(), to_wire(error)
        assert status.details[0].Unpack(found)
        assert found == wire
        assert [each.Unpack(retry) for each in status.details[1:]] == [True] * bool(
            wire.retry_after_ms
        )
        assert retry.retry_delay.ToMilliseconds() == wire.retry_after_ms


def test_long_error_has_no_details_for_which_metadata_has_no_room() -> None:
    wire = to_wire(timer_errors.NotReadyError("x" * TEXT_SIZE_MAX))
    assert len(dict(trailers_of(code_of(INSTANCES[4]), wire, is_repeatable=True))) == 2
    wire.field = "x" * TEXT_SIZE_MAX
    assert [*dict(trailers_of(code_of(INSTANCES[4]), wire, is_repeatable=True))] == [TRAILER]
