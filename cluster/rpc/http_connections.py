"""The open connections of the HTTP port, and bounds on answers to slow clients.

    request --> too many under way? 503 --> handler
    handler --answer--> deliver: its bytes count until the transport has room for more
    every LOOK_S: the buffer of a transport is full, or it is closing --too long--> abort

A transport of asyncio, also a closing one, waits without end for a client that does not read. So
does the task of the answer. With TLS a transport takes one write of any length before it reports a
full buffer. So a long answer is written in pieces, and its bytes count until the last piece is
taken.

A receive holds its connection while it waits. So some connections are kept free of requests, for
probes and for the answer 503.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from cluster.rpc.aiohttp_server import RequestHandler, web
from cluster.rpc.connections import grpc_address
from cluster.rpc.problem_details import problem_of
from cluster.settings.rounds import next_round
from timer.model.timer_errors import OverloadedError

logger = logging.getLogger(__name__)

ANSWERS_BYTES_MAX: Final = 64 << 20
"""Bytes of all answers under way. With more, the connection of the oldest one is ended."""
WAIT_S: Final = 10.0
"""Seconds for which a client may leave a buffer full. A client gets more for its answer's bytes, by
PACE."""
PACE: Final = 32 << 10
"""Bytes a second that a client must read."""
BUFFER_BYTES: Final = 64 << 10
"""A transport with more bytes in its buffer takes no further ones, with TLS and without."""
PIECE_BYTES: Final = 32 << 10
"""Of an answer, for one write."""
CHECK_INTERVAL_S: Final = 1.0
PROBES: Final = frozenset({"/healthz", "/readyz"})
"""Paths that are answered without a certificate, and with any number of requests under way."""
FREE: Final = 16
"""One of this many connections takes no request, except for a probe."""
RETRY_AFTER_MS: Final = 1_000


@dataclass(eq=False, slots=True)
class HttpConnection:
    """An accepted connection."""

    accepted: socket.socket
    transport: Any = None
    """None until the TLS handshake is over."""
    is_busy: bool = False
    """A request of it is under way."""
    answer_bytes: int = 0
    """Of the answer under way."""
    piece_bytes: int = 0
    """Of the last piece of a stream."""
    full_since_s: float | None = None
    """Monotonic time of the first look that found a full buffer or a closing transport."""
    late_bytes: int = 0
    """Of the answer and the piece under way at `full_since_s`, and of those that began since."""
    is_aborted: bool = False
    """Its socket closes in the next turn of the event loop."""

    @property
    def is_closed(self) -> bool:
        """Whether its socket is closed. Its transport may have been closing before."""
        return self.is_aborted or self.accepted.fileno() < 0

    def abort(self) -> None:
        """Close it without waiting for its client."""
        self.is_aborted = True
        self.transport.abort()

    def is_late(self, now_s: float, *, full: bool) -> bool:
        """Note whether the buffer is full; return whether that has lasted too long."""
        if not full:
            self.full_since_s = None
            return False
        if self.full_since_s is None:
            self.full_since_s, self.late_bytes = now_s, self.answer_bytes + self.piece_bytes
        return now_s - self.full_since_s > WAIT_S + self.late_bytes / PACE


_CURRENT: ContextVar[HttpConnection | None] = ContextVar("connection", default=None)
"""The connection of the request on which this task works."""


class HttpConnections:
    """Knows the connections, and ends those of slow clients; see the module."""

    def __init__(self, on_ended: Callable[[], object], connections_max: int) -> None:
        """`on_ended`: called for each connection that is ended because its client is slow.

        `connections_max`: open connections, at most.
        """
        self._on_ended = on_ended
        self._busy_max = connections_max - max(1, connections_max // FREE)
        self._busy = 0
        """Connections with a request under way."""
        self._all: dict[RequestHandler, HttpConnection] = {}
        """By protocol. The connection whose last request ended first stands first."""
        self._delivering: dict[HttpConnection, None] = {}
        """Those with an answer under way, the oldest answer first."""
        self.bytes = 0
        """Of the answers under way."""

    def begin(self, protocol: RequestHandler, accepted: socket.socket) -> HttpConnection:
        """Return a new connection; its handshake begins."""
        made = self._all[protocol] = HttpConnection(accepted)
        return made

    def forget(self, protocol: RequestHandler) -> None:
        """Forget a connection after a failed handshake: its socket is no longer held."""
        self._all.pop(protocol, None)

    def open_connections(self) -> Sequence[HttpConnection]:
        """Return the connections after their handshakes, closing ones too, in the order of the
        ends of their last requests."""
        for protocol in [each for each, found in self._all.items() if found.is_closed]:
            del self._all[protocol]
        return [each for each in self._all.values() if each.transport is not None]

    @web.middleware
    async def deliver(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Write the handler's answer. Its bytes count meanwhile."""
        protocol = request.protocol
        if (connection := self._all.get(protocol)) is None:
            return await self._answer(request, handler)
        if self._busy >= self._busy_max and request.path not in PROBES:
            return await self._answer(request, self._refuse)
        _CURRENT.set(connection)
        connection.is_busy, connection.piece_bytes = True, 0
        self._busy += 1
        try:
            return await self._answer(request, handler)
        finally:
            connection.is_busy = False
            self._busy -= 1
            if self._all.pop(protocol, None) is not None:
                self._all[protocol] = connection

    async def _refuse(self, _: web.Request) -> web.Response:
        what = f"the port's number of requests under way ({self._busy_max})"
        answer = problem_of(OverloadedError(what, retry_after_ms=RETRY_AFTER_MS), 503)
        answer.force_close()
        return answer

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refused: web.HTTPException | None = None
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            answer = refused = error
        connection = self._all.get(request.protocol)
        if connection is None:  # it is closed
            return answer
        connection.answer_bytes = 0 if request.method == "HEAD" else answer.content_length or 0
        connection.late_bytes += connection.answer_bytes
        self.bytes += connection.answer_bytes
        self._delivering[connection] = None
        try:
            self._end_oldest_answers(connection)
            with suppress(ConnectionError):
                await _write(request, answer)
        finally:
            self._end_delivery(connection)
        if refused is not None:
            raise refused
        return answer

    async def run(self) -> None:
        """Look at the connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await next_round(CHECK_INTERVAL_S)
            self.check(loop.time())

    def check(self, now_s: float) -> None:
        """End the connections of clients that are too slow. `now_s`: monotonic time."""
        self.open_connections()  # without closed ones
        for protocol, each in list(self._all.items()):
            if each.transport is None:
                continue
            full = each.transport.is_closing() or protocol.writing_paused
            if each.is_late(now_s, full=full):
                self._end(each)

    def _end_oldest_answers(self, but: HttpConnection) -> None:
        """End the connections with the oldest answers while all together are too large."""
        for each in list(self._delivering):
            if self.bytes > ANSWERS_BYTES_MAX and each is not but:
                self._end(each)
                self._end_delivery(each)

    def _end_delivery(self, connection: HttpConnection) -> None:
        self.bytes -= connection.answer_bytes
        connection.answer_bytes = 0
        self._delivering.pop(connection, None)

    def _end(self, connection: HttpConnection) -> None:
        peer = connection.transport.get_extra_info("peername") or ("", 0)
        more = {"peer": grpc_address(peer), "answer_bytes": connection.answer_bytes}
        logger.warning("HTTP connection ended: its client does not read", extra=more)
        connection.abort()
        self._on_ended()


def count_piece(size: int) -> None:
    """Give the client of this task's request time for `size` further bytes of its answer.

    It is called for each piece of an answer whose length is not known.
    """
    if (connection := _CURRENT.get()) is not None:
        connection.piece_bytes = size
        connection.late_bytes += size


async def _write(request: web.Request, answer: web.StreamResponse) -> None:
    """Write an answer; a long one in pieces.

    Raises:
        ConnectionError: the connection is closed.
    """
    await answer.prepare(request)
    if not isinstance(answer, web.Response):
        await answer.write_eof()
        return
    body = answer.body
    if isinstance(body, bytes) and len(body) > PIECE_BYTES and request.method != "HEAD":
        answer.body = None  # else the end writes it again
        for start in range(0, len(body), PIECE_BYTES):
            await answer.write(body[start : start + PIECE_BYTES])
    await answer.write_eof()
