"""The listening sockets of the HTTP port: accepted connections are counted before TLS.

    accept --> too many? the oldest is closed --> TLS handshake --> the HTTP protocol

Thousands of idle sockets in unfinished handshakes would take all of the process's files. So this
listener accepts connections itself (replication/shell/accepting.py).
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

from cluster.rpc.aiohttp_server import RequestHandler
from cluster.rpc.http_connections import BUFFER_BYTES, HttpConnections
from replication.shell.accepting import connections_of, listen_at
from replication.shell.tasks import cancel_and_wait

HANDSHAKE_S: Final = 5.0
"""Limit for a TLS handshake."""
ANSWER_TURNS: Final = 8
"""Turns of the event loop between two accepts of a full port. Without TLS, a fresh connection is
answered 503 and closed within six: no connection with a request has to make room for the next."""


class HttpListener:
    """Accepts connections from `start` to `stop`."""

    def __init__(
        self,
        protocol: Callable[[], RequestHandler],
        connections: HttpConnections,
        context: Callable[[], ssl.SSLContext | None],
        on_failed: Callable[[], object],
        connections_max: int,
    ) -> None:
        """`protocol` returns the protocol of a new connection. `connections`: of this listener.

        `connections_max`: open connections and unfinished handshakes. With one more an old one is
        closed, so that a probe can connect.

        `context` returns the one for the next handshake; None: without TLS.
        `on_failed`: called for each TLS handshake that fails.
        """
        self._on_failed = on_failed
        self._connections_max = connections_max
        self._protocol, self._connections, self._context = protocol, connections, context
        self._looking: list[asyncio.Task[None]] = []
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Of accepted connections without a protocol yet, the oldest first."""

    async def start(self, host: str, port: int) -> int:
        """Listen on each address of a host; return the port. Port 0: any free one.

        Raises:
            OSError: an address is in use, or not this machine's.
        """
        self._sockets = await listen_at(host, port)
        loop = asyncio.get_running_loop()
        self._looking = [loop.create_task(self._connections.run())]
        self._accepting = [loop.create_task(self._accept(each)) for each in self._sockets]
        return int(self._sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Accept no more connections, and end the handshakes; allowed at any time."""
        await cancel_and_wait(self._accepting)
        await cancel_and_wait([*self._handshakes, *self._looking])
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    async def _accept(self, listening: socket.socket) -> None:
        async for connection in connections_of(listening):
            is_full = self._close_oldest()
            task = asyncio.create_task(self._greet(connection))
            self._handshakes[task] = None
            task.add_done_callback(self._forget)
            for _ in range(ANSWER_TURNS * is_full):
                await asyncio.sleep(0)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)

    async def _greet(self, connection: socket.socket) -> None:
        """Give a connection its protocol, with TLS after the handshake."""
        context, protocol = self._context(), self._protocol()
        begun = self._connections.begin(protocol, connection)
        try:
            made, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context is not None else None,
            )
            made.set_write_buffer_limits(high=BUFFER_BYTES)
            begun.transport = made
        except OSError:  # the connection is closed
            if context is not None:
                self._on_failed()
        finally:
            if begun.transport is None:
                self._connections.forget(protocol)

    def _close_oldest(self) -> bool:
        """If there are too many, close the oldest handshake or connection: of the more frequent.

        Returns whether the port is full with one more.

        Some connections have no request (cluster/rpc/http_connections.py): they are closed first.
        """
        there = self._connections.open_connections()
        free = self._connections_max - len(self._handshakes) - len(there)
        if free > 0:
            return free == 1
        if len(self._handshakes) > len(there):
            oldest = next(iter(self._handshakes))
            self._forget(oldest)
            oldest.cancel()
        else:
            min(there, key=lambda each: each.is_busy).abort()  # the first of the least
        return True
