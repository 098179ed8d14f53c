"""Asking the other nodes for their part: who does not answer is shown as such."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias, TypeVar

import grpc

from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

TIMEOUT_S: Final = 1.5

Peers: TypeAlias = "Mapping[str, tuple[str, Stub]]"
"""The other nodes: name -> (address, stub)."""
Stub: TypeAlias = "rpc.AdminServiceAsyncStub"
_Part = TypeVar("_Part", pb.NodeStatus, pb.NodeCheckpoint)


async def ask_all(
    peers: Peers, ask: Callable[[str, str, Stub], Awaitable[_Part]]
) -> list[_Part]:
    """Return every other node's part, asked at the same time."""
    asked = (ask(name, address, stub) for name, (address, stub) in peers.items())
    return list(await asyncio.gather(*asked))


async def status_of(name: str, address: str, stub: Stub) -> pb.NodeStatus:
    """Return a node's status; an unreachable one's says why."""
    try:
        answer = await stub.GetStatus(pb.GetStatusRequest(local=True), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        why = f"{error.code().name}: {error.details()}"
        return pb.NodeStatus(name=name, address=address, role="unreachable", error=why)
    return answer.nodes[0]


async def checkpoint_of(
    name: str, address: str, stub: Stub
) -> pb.NodeCheckpoint:
    """Return a node's checkpoint; an unreachable one's says why."""
    del address
    try:
        answer = await stub.GetCheckpoint(pb.GetCheckpointRequest(local=True), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        why = f"{error.code().name}: {error.details()}"
        return pb.NodeCheckpoint(node=name, role="unreachable", error=why)
    return answer.nodes[0]
