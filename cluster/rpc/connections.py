"""Finds the connections of the gRPC ports for clients, and ends those that hold most memory.

gRPC for Python reports no incomplete messages and has no call that ends a connection. The kernel
has both: it counts the bytes that a socket has received, and it shuts sockets down.

    weight = bytes received - bytes of the requests taken + bytes that consumers have not read yet
"""

import asyncio
import contextlib
import inspect
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import grpc

from cluster.rpc.request_bounds import size_of

REQUEST_BYTES: Final = 512
"""Bytes on the wire beside a request itself, at most: headers and frames."""
SHAPES: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
"""Fields of gRPC's method handlers; one of them has the function that serves."""
_RECEIVED: Final = struct.Struct("=128xQ")
"""`tcpi_bytes_received` of linux/tcp.h."""


class Connections:
    """Weighs and ends connections; see the module. Connections of other nodes are never ended."""

    def __init__(self, ports: AbstractSet[int], unread: Mapping[str, int]) -> None:
        """`ports`: of clients.

        `unread`: bytes that consumers have not read, by remote address in gRPC's form.
        """
        self._ports, self._unread = ports, unread
        self._peers: set[str] = set()
        """Remote addresses of other nodes."""
        self._taken: Counter[str] = Counter()
        """Bytes of the requests taken, by remote address."""

    def count_request(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Count a request's bytes."""
        self._taken[context.peer()] += size_of(request) + REQUEST_BYTES

    def of_nodes(self, handler: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """Wrap a handler for other nodes, so that their connections are never ended."""
        return _CallerRecorder(handler, self._peers)

    async def end_heaviest(self, excess: int) -> list[tuple[str, int]]:
        """End the heaviest connections, of `excess` bytes together; return (address, weight).

        Connections that weigh less than a hundredth of the remaining excess are not ended.
        """
        weights = await self.weigh()
        ended: list[tuple[str, int]] = []
        for peer, weight in sorted(weights.items(), key=lambda each: -each[1]):
            if excess <= 0 or weight < excess // 100:
                break
            ended.append((peer, weight))
            excess -= weight
        await self.end({peer for peer, _ in ended})
        return ended

    async def end(self, peers: AbstractSet[str]) -> None:
        """End the connections with these remote addresses."""
        if peers:
            await asyncio.to_thread(self._end, peers)

    @property
    def used_addresses(self) -> AbstractSet[str]:
        """Remote addresses with an accepted request, and those of other nodes."""
        return self._taken.keys() | self._peers

    async def by_port(self) -> dict[int, set[str]]:
        """Return port -> remote addresses of its open connections."""
        return await asyncio.to_thread(self._by_port)

    def _by_port(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for peer, each in self._open():
            found.setdefault(each.getsockname()[1], set()).add(peer)
        return found

    async def weigh(self) -> dict[str, int]:
        """Return address -> weight of each open connection, and forget those that are closed."""
        taken, peers = {*self._taken}, {*self._peers}  # later ones may be too new for the snapshot
        weights = await asyncio.to_thread(self._weights, dict(self._unread))
        for address in taken - weights.keys():
            del self._taken[address]
        self._peers -= peers - weights.keys()
        return weights

    def _weights(self, unread: Mapping[str, int]) -> dict[str, int]:
        found = {}
        for peer, each in self._open():
            received = _RECEIVED.unpack(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136))
            weight = received[0] - self._taken[peer] + unread.get(peer, 0)
            found[peer] = 0 if peer in self._peers else max(0, weight)
        return found

    def _end(self, peers: AbstractSet[str]) -> None:
        for peer, each in self._open():
            if peer in peers:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _open(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield (remote address, socket) of each connection; a socket is valid for one step."""
        for port, each in _sockets():
            if port in self._ports:
                with contextlib.suppress(OSError):
                    yield grpc_address(each.getpeername()), each


def end_connections(*, accepted_at: AbstractSet[int], dialled_to: AbstractSet[int]) -> int:
    """End the connections to these ports of this process, and its own to these remote ports.

    Returns their number.
    """
    count = 0
    for port, each in _sockets():
        with contextlib.suppress(OSError):
            if each.getpeername()[1] in dialled_to or port in accepted_at:
                each.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections_of(ports: Mapping[str, int]) -> dict[str, int]:
    """Return the number of this process's open connections to each of its ports, by name."""
    found: Counter[int] = Counter()
    for port, each in _sockets():
        with contextlib.suppress(OSError):
            each.getpeername()  # fails for the one that listens
            found[port] += 1
    return {name: found[port] for name, port in ports.items()}


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield (local port, socket) of each TCP socket of this process, each valid for one step."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    yield each.getsockname()[1], each


def grpc_address(address: tuple[Any, ...]) -> str:
    """Return an address in gRPC's form."""
    host, port = str(address[0]).removeprefix("::ffff:"), address[1]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


class _CallerRecorder(grpc.GenericRpcHandler):
    """Adds the callers of another handler's methods, which are asynchronous, to `peers`."""

    def __init__(self, inner: grpc.GenericRpcHandler, peers: set[str]) -> None:
        self._inner, self._peers = inner, peers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method; see grpc.GenericRpcHandler."""
        handler: Any = self._inner.service(handler_call_details)
        if handler is None:
            return None
        shape = next(each for each in SHAPES if getattr(handler, each) is not None)
        serve = getattr(handler, shape)

        async def answer(request: Any, context: Any) -> Any:
            self._peers.add(context.peer())
            return await serve(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            self._peers.add(context.peer())
            async with contextlib.aclosing(serve(request, context)) as responses:
                async for response in responses:
                    yield response

        noted = stream if inspect.isasyncgenfunction(serve) else answer
        return handler._replace(**{shape: noted})
