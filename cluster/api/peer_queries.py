"""Asking the other nodes for their part: who does not answer is shown as such."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias, TypeVar

import grpc

from timer.model.units import LogIndex
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

PART_S: Final = 1.0
"""How long another node's part is waited for. Less than a client waits for a node that it asks
(`stall_s` of timerclient/values/client_settings.py, 1.5 s), with time for the way there and back:
else one silent node, and no node answers. A leader that asks for the others' room, or before it
heals, waits so
long, too, and asks again."""
DIGEST_S: Final = 1.5
"""How long another node's digest is waited for. No client waits; who is late has no say."""

Peers: TypeAlias = "Mapping[str, tuple[str, Stub]]"
"""The other nodes: name -> (address, stub)."""
Stub: TypeAlias = "rpc.AdminServiceAsyncStub"
_Part = TypeVar("_Part", pb.NodeStatus, pb.NodeCheckpoint)


async def ask_all(peers: Peers, ask: Callable[[str, str, Stub], Awaitable[_Part]]) -> list[_Part]:
    """Return every other node's part, asked at the same time."""
    asked = (ask(name, address, stub) for name, (address, stub) in peers.items())
    return list(await asyncio.gather(*asked))


async def status_of(name: str, address: str, stub: Stub) -> pb.NodeStatus:
    """Return a node's status; an unreachable one's says why."""
    try:
        answer = await stub.GetStatus(pb.GetStatusRequest(local=True), timeout=PART_S)
    except grpc.aio.AioRpcError as error:
        return pb.NodeStatus(name=name, address=address, role="unreachable", error=why(error))
    return answer.nodes[0]


async def checkpoint_of(name: str, address: str, stub: Stub) -> pb.NodeCheckpoint:
    """Return a node's checkpoint; an unreachable one's says why."""
    del address
    try:
        answer = await stub.GetCheckpoint(pb.GetCheckpointRequest(local=True), timeout=PART_S)
    except grpc.aio.AioRpcError as error:
        return pb.NodeCheckpoint(node=name, role="unreachable", error=why(error))
    return answer.nodes[0]


def why(failed: grpc.aio.AioRpcError) -> str:
    """Return in a few words why a node did not answer."""
    details = failed.details() or ""
    if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {PART_S:g} s"
    if failed.code() is grpc.StatusCode.UNAVAILABLE:  # the cause stands last, behind every address
        return details.rpartition(": ")[2].lower() or "not reachable"
    return f"{failed.code().name}: {details}"


async def digests_at(peers: Peers, index: LogIndex) -> tuple[dict[str, str], bool]:
    """Return the voters' digests at a CHECKPOINT, by name, and whether one has yet to get there.

    Of the others, that is. Who is gone, or has forgotten that checkpoint, is absent.
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


def judge(mine: str, others: Mapping[str, str], voters: int, *, votes: bool = True) -> str:
    """Return why this replica can't go on, or nothing: a majority must hold the same state (P6).

    A replica goes on while a majority of `voters` agrees with it (itself included, if it
    `votes`), or nobody contradicts it.
    """
    agree = sum(digest == mine for digest in others.values())
    if agree + votes > voters // 2 or agree == len(others):
        return ""
    return f"{mine} here, {', '.join(f'{d} on {n}' for n, d in sorted(others.items()))}"


def majority_of(others: Mapping[str, str], voters: int) -> bool:
    """Return whether a majority of `voters`, this replica not among them, agrees."""
    digests = [*others.values()]
    return any(digests.count(digest) > voters // 2 for digest in digests)
