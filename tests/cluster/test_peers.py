"""Who is waited for how long; P6: who goes on when replicas hold different states at one index."""

import grpc
import pytest

from cluster.api.peer_queries import PART_S, agreement_of, stop_reason, why
from timerclient import ClientSettings
from timerclient.proto import timer_pb2 as pb


def test_silent_node_is_given_up_before_a_client_gives_up_the_node_that_it_asks() -> None:
    assert ClientSettings().stall_s - 0.5 >= PART_S


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (
            "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "its certificate: certificate has expired",
        ),
        ("Failed to connect to remote host: Connection refused]", "connection refused"),
        ("tcp handshaker shutdown", "no connection in time"),
    ],
)
def test_reason_of_a_node_that_does_not_answer_is_the_cause_in_the_text_of_grpc(
    cause: str, reason: str
) -> None:
    none = grpc.aio.Metadata()
    details = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: {cause}"
    failed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details)
    assert why(failed) == reason


@pytest.mark.parametrize(
    ("others", "voters"),
    [
        ({}, 3),  # nobody answers: nobody contradicts
        ({"n2": "a"}, 3),
        ({"n2": "a", "n3": "b"}, 3),  # n3 is wrong
        ({"n2": "a", "n3": "a"}, 3),
        ({"n2": "a", "n3": "a", "n4": "b", "n5": "c"}, 5),
        ({}, 1),
    ],
)
def test_replica_that_a_majority_agrees_with_or_nobody_contradicts_goes_on(
    others: dict[str, str], voters: int
) -> None:
    assert stop_reason("a", others, voters) == ""


@pytest.mark.parametrize(
    ("others", "voters"),
    [
        ({"n2": "b", "n3": "b"}, 3),  # we are the minority
        ({"n2": "b"}, 3),  # one against one: no majority
        ({"n2": "b", "n3": "c"}, 3),
        ({"n2": "a", "n3": "b", "n4": "b"}, 5),
    ],
)
def test_replica_in_the_minority_or_without_a_majority_stops_and_names_all(
    others: dict[str, str], voters: int
) -> None:
    why = stop_reason("a", others, voters)
    assert all(text in why for text in ("a here", *(f"{d} on {n}" for n, d in others.items())))


def test_learner_goes_by_the_voters_majority_without_a_voice_of_its_own() -> None:
    assert stop_reason("a", {"n1": "a", "n2": "a", "n3": "b"}, 3, votes=False) == ""
    assert stop_reason("a", {"n1": "a"}, 3, votes=False) == ""
    assert stop_reason("a", {"n1": "a", "n2": "b"}, 3, votes=False)


@pytest.mark.parametrize(
    ("digests", "agreement"),
    [
        (["a", "a", "a"], pb.AGREEMENT_SAME),
        (["a", "b", "a"], pb.AGREEMENT_DIFFER),
        (["a", "", "b"], pb.AGREEMENT_DIFFER),
        (["a", "", "a"], pb.AGREEMENT_UNKNOWN),  # the silent node may have another state
        (["", "", ""], pb.AGREEMENT_UNKNOWN),
    ],
)
def test_states_are_the_same_only_if_each_node_has_a_digest(
    digests: list[str], agreement: pb.Agreement.ValueType
) -> None:
    assert agreement_of(digests) == agreement
