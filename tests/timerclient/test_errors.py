"""The client's errors mirror the contract's reasons."""

import grpc
import pytest

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_names
from timerclient.values import errors
from timerclient.values.reasons import Reason
from timerclient.values.wire_errors import from_rpc, from_wire


def test_reasons_are_those_of_the_contract() -> None:
    assert {reason.name: reason.value for reason in Reason} == short_names(pb.Reason.DESCRIPTOR)


def test_every_reason_has_one_class() -> None:
    assert set(errors.BY_REASON) == set(Reason) - {Reason.REASON_UNSPECIFIED}


@pytest.mark.parametrize("reason", sorted(errors.BY_REASON))
def test_error_of_the_wire_keeps_reason_and_flags(reason: Reason) -> None:
    for flag in (True, False):
        wire = pb.Error(message="m", retryable=flag, outcome_known=not flag)
        wire.reason = reason.value  # type: ignore[assignment]
        error = from_wire(wire)
        assert error.reason == reason
        assert (error.retryable, error.outcome_known, str(error)) == (flag, not flag, "m")


def test_details_arrive_with_their_errors() -> None:
    invalid = from_wire(pb.Error(reason=pb.REASON_INVALID_REQUEST, field="f", limit="l"))
    assert isinstance(invalid, errors.InvalidRequest)
    assert (invalid.field, invalid.limit) == ("f", "l")
    moved = from_wire(pb.Error(reason=pb.REASON_NOT_LEADER, leader="h:1", retry_after_ms=9))
    assert isinstance(moved, errors.NotLeader)
    assert (moved.leader, moved.retry_after_ms) == ("h:1", 9)


def test_reason_of_a_later_version_still_says_whether_to_retry() -> None:
    error = from_wire(pb.Error(reason=999, message="new", retryable=True))  # type: ignore[arg-type]
    assert isinstance(error, errors.RpcFailed)
    assert errors.means_wait(error)
    assert not error.outcome_known


def rpc_error(
    code: grpc.StatusCode, trailer: bytes | None = None, details: str = "d"
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    if trailer is not None:
        metadata.add("timer-error-bin", trailer)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)


def test_rpc_that_failed_is_read_by_its_trailer() -> None:
    trailer = pb.Error(reason=pb.REASON_NOT_FOUND, message="no such topic", outcome_known=True)
    error = from_rpc(rpc_error(grpc.StatusCode.NOT_FOUND, trailer.SerializeToString()))
    assert isinstance(error, errors.NotFound)


def test_http_port_with_tls_is_told_apart() -> None:
    details = "Cannot check peer: missing selected ALPN property."
    error = from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details=details))
    assert "give the node's gRPC port, not its HTTP port" in str(error)


def test_proxy_without_a_node_behind_it_is_asked_again() -> None:
    details = (
        "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:80: Failed"
        " parsing HTTP/2 (Trying to connect an http1.x server (HTTP status 503))"
    )
    error = from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details=details))
    assert isinstance(error, errors.Unreachable)
    assert error.retryable
    assert "a proxy answers that it reaches no node" in str(error)


def test_call_that_found_no_connection_had_certainly_no_effect() -> None:
    refused = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7401: "
        "Failed to connect to remote host: Connection refused"
    )
    error = from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details=refused))
    assert type(error) is errors.Unreachable
    assert error.outcome_known
    assert str(error) == "UNAVAILABLE: Connection refused"
    for details in ("Socket closed", f"upstream: {refused}"):
        assert not from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details=details)).outcome_known


@pytest.mark.parametrize(
    ("code", "kind", "known"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ConnectionLost, False),
        (grpc.StatusCode.CANCELLED, errors.ConnectionLost, False),
        (grpc.StatusCode.UNIMPLEMENTED, errors.RpcFailed, True),
        (grpc.StatusCode.INTERNAL, errors.ConnectionLost, False),
    ],
)
def test_rpc_that_failed_without_a_reason_goes_by_its_status(
    code: grpc.StatusCode, kind: type, known: bool
) -> None:
    for trailer in (None, b"\xff garbage"):
        error = from_rpc(rpc_error(code, trailer))
        assert type(error) is kind
        assert error.outcome_known is known
