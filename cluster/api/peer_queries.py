"""Queries to the other nodes. The answer for an unreachable node says so."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

import grpc

from cluster.rpc import grpc_errors
from replication.shell.peer_complaints import readable_details
from timer.model.units import LogIndex
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

PART_S: Final = 1.0
"""Limit for another node's answer. It is shorter than the wait of a client for a node (`stall_s` of
timerclient/values/client_settings.py, 1.5 s), with some time for the network. Otherwise one silent
node would make all nodes look silent. A leader that queries the others' disk space, or a node
before a repair, waits as long, too, and then repeats the query."""
DIGEST_S: Final = 1.5
"""Limit for another node's digest. No client waits for it; a late answer does not count."""

_CERTIFICATE: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:\]]+)")
"""The reason of OpenSSL for which a node's certificate is invalid, in gRPC's text."""

Peers: TypeAlias = "Mapping[str, tuple[str, Stub]]"
"""The other nodes: name -> (address, stub)."""
Stub: TypeAlias = "rpc.AdminServiceAsyncStub"
_Part = TypeVar(
    "_Part", pb.GetStatusResponse, pb.NodeStatus, pb.NodeCheckpoint, pb.NodeVerification
)


async def ask_all(peers: Peers, ask: Callable[[str, str, Stub], Awaitable[_Part]]) -> list[_Part]:
    """Return every other node's answer; all are queried at the same time."""
    asked = (ask(name, address, stub) for name, (address, stub) in peers.items())
    return list(await asyncio.gather(*asked))


async def answer_of(name: str, address: str, stub: Stub) -> pb.GetStatusResponse:
    """Return a node's status and its view of the leader; for an unreachable node: the reason."""
    try:
        return await stub.GetStatus(pb.GetStatusRequest(local=True), timeout=PART_S)
    except grpc.aio.AioRpcError as error:
        return unreachable(name, address, why(error))


def unreachable(name: str, address: str, reason: str) -> pb.GetStatusResponse:
    """Return the answer for an unreachable node."""
    node = pb.NodeStatus(name=name, address=address, role="unreachable", error=reason)
    return pb.GetStatusResponse(nodes=[node])


async def status_of(name: str, address: str, stub: Stub) -> pb.NodeStatus:
    """Return a node's status; for an unreachable node: with the reason."""
    return (await answer_of(name, address, stub)).nodes[0]


async def checkpoint_of(
    name: str, address: str, stub: Stub, at_index: LogIndex = LogIndex(0)
) -> pb.NodeCheckpoint:
    """Return a node's checkpoint; for an unreachable node: with the reason.

    `at_index`: with the digest at this index, and without queue offsets. 0: the last checkpoint.
    """
    del address
    request = pb.GetCheckpointRequest(local=True, at_index=at_index)
    try:
        answer = await stub.GetCheckpoint(request, timeout=PART_S)
    except grpc.aio.AioRpcError as error:
        return pb.NodeCheckpoint(node=name, role="unreachable", error=why(error))
    return answer.nodes[0]


async def begin_verification(name: str, address: str, stub: Stub) -> pb.NodeVerification:
    """Begin a node's pass over its files and return it; for an unreachable node: the reason."""
    del address
    request = pb.BeginVerificationRequest(node=name)
    try:
        answer = await stub.BeginVerification(request, timeout=PART_S)
    except grpc.aio.AioRpcError as error:
        return pb.NodeVerification(node=name, error=why(error))
    return answer.nodes[0]


async def verification_of(
    name: str, address: str, stub: Stub, at_index: LogIndex
) -> pb.NodeVerification:
    """Return a node's last pass over its files; for an unreachable node: with the reason.

    `at_index`: with the digest at this index.
    """
    del address
    request = pb.GetVerificationRequest(node=name, at_index=at_index)
    try:
        answer = await stub.GetVerification(request, timeout=PART_S)
    except grpc.aio.AioRpcError as error:
        return pb.NodeVerification(node=name, error=why(error))
    return answer.nodes[0]


def agreement_of(digests: Sequence[str]) -> pb.Agreement.ValueType:
    """Return whether nodes have the same state, by their digests at one index; "": unknown."""
    known = {*digests} - {""}
    if len(known) > 1:
        return pb.AGREEMENT_DIFFER
    return pb.AGREEMENT_SAME if known and all(digests) else pb.AGREEMENT_UNKNOWN


def why(failed: grpc.aio.AioRpcError) -> str:
    """Return the reason why a node did not answer, in a few words."""
    details = readable_details(failed.details() or "")
    if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {PART_S:g} s"
    if grpc_errors.TRAILER in dict(failed.trailing_metadata() or ()):  # the node's own words
        return details
    if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "its release does not serve this call"
    if failed.code() is grpc.StatusCode.UNAVAILABLE:  # the cause is last, after all addresses
        if (found := _CERTIFICATE.search(details)) is not None:
            return f"its certificate: {found[1]}"
        return details.rpartition(": ")[2].rstrip("]").lower() or "not reachable"
    return f"{failed.code().name}: {details}"


async def digests_at(peers: Peers, index: LogIndex) -> tuple[dict[str, str], bool]:
    """Return the other voters' digests at a CHECKPOINT, by name, and whether one is yet to come.

    A voter that is unreachable, or has forgotten that checkpoint, is absent.
    """

    async def digest_of(name: str, address: str, stub: Stub) -> pb.NodeCheckpoint:
        del address
        request = pb.GetCheckpointRequest(local=True, at_index=index)
        try:
            return (await stub.GetCheckpoint(request, timeout=DIGEST_S)).nodes[0]
        except grpc.aio.AioRpcError:
            return pb.NodeCheckpoint(node=name)

    answers = [answer for answer in await ask_all(peers, digest_of) if answer.role != "learner"]
    lagging = any(answer.reachable and answer.applied_index < index for answer in answers)
    return {answer.node: answer.digest for answer in answers if answer.digest}, lagging


def stop_reason(mine: str, others: Mapping[str, str], voters: int, *, votes: bool = True) -> str:
    """Return the reason why this replica must stop; empty: there is none.

    A replica may go on while a majority of `voters` has its digest, or no other digest differs.
    The replica itself counts if it `votes`.
    """
    agree = sum(digest == mine for digest in others.values())
    if agree + votes > voters // 2 or agree == len(others):
        return ""
    return f"{mine} here, {', '.join(f'{d} on {n}' for n, d in sorted(others.items()))}"


def majority_of(others: Mapping[str, str], voters: int) -> bool:
    """Return whether a majority of `voters`, without this replica, has the same digest."""
    digests = [*others.values()]
    return any(digests.count(digest) > voters // 2 for digest in digests)
