"""Messages between nodes over a plain TCP connection, without gRPC.

    dialler                                 acceptor
       |--- gRPC stream: Hello ------------->|
       |<-- Hello with a port and a key -----|    the key: 32 random bytes, for one
       |=== TCP, with TLS if it is set =====>|    connection at a time
       |--- first half of the key ---------->|
       |<-- second half ---------------------|    and nothing more
       |--- size (u32), message ------------>|
       |--- size (u32), message ------------>|

The gRPC stream proves who the dialler is, and stays open without messages. The connection ends with
it. A message costs a fraction of the processor time that it takes over gRPC (docs/adr/0097).

Messages are taken only from a connection with the key, which goes over the gRPC stream, with its
TLS. A connection without the key is closed after GREETING_S, and the oldest of more than
GREETINGS_MAX at once.
"""

import asyncio
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Self, cast

from replication.shell.accepting import connections_of, listen_at
from replication.shell.peer_complaints import Complaints

KEY_SIZE: Final = 32
HALF: Final = KEY_SIZE // 2
SIZE_BYTES: Final = 4
"""Of the size that precedes each message, little-endian."""
MESSAGE_BYTES_MAX: Final = 64 << 20
"""The same as gRPC's limit for the nodes' messages."""
BUFFER_BYTES: Final = 1 << 20
"""A sender waits while its connection has more bytes to send."""
TURN_BYTES: Final = 64 << 10
"""Bytes after which a connection waits for the loop's next turn. libuv reads up to 8 MB in a turn,
and their messages took 0.3 s of a follower that was behind."""
CONNECT_S: Final = 1.0
"""For a connection to a peer's port. A firewall that drops packets delays a stream by this."""
GREETING_S: Final = 5.0
"""Limit for the TLS handshake and the key together."""
GREETINGS_MAX: Final = 64
"""Connections without a key so far. Each other node needs two: one per stream."""
UNCONFIRMED_MS: Final = 10_000
"""A connection ends after this time without a byte confirmed by the peer's machine. Linux waits 15
minutes."""


Receive = Callable[[bytes], bool]
"""Takes a message. Returns whether the connection may go on."""
Connect = Callable[[str, int, Callable[[], asyncio.Protocol]], Awaitable[None]]
"""Connects to a port of the node of that name, with TLS if it is set. Raises OSError."""


class TcpPort:
    """Accepts the connections of the other nodes. For the event loop."""

    def __init__(
        self, host: str, port: int, context: Callable[[], ssl.SSLContext | None] = lambda: None
    ) -> None:
        """`port` 0: any free one. `context` returns that of the next handshake; None: no TLS."""
        self._host, self._port_setting, self._context = host, port, context
        self.port = 0
        """0: not open."""
        self._sockets: list[socket.socket] = []
        self._accept_tasks: list[asyncio.Task[None]] = []
        self._greetings: dict[asyncio.Task[None], None] = {}
        """Of connections without a key so far, the oldest first."""
        self._expected: dict[bytes, ExpectedConnection] = {}
        """First half of the key -> the connection that is to come."""

    async def open(self) -> None:
        """Listen on each address of the host.

        Raises:
            OSError: an address is in use, or not this machine's.
        """
        self._sockets = await listen_at(self._host, self._port_setting)
        self.port = int(self._sockets[0].getsockname()[1])
        loop = asyncio.get_running_loop()
        self._accept_tasks = [loop.create_task(self._accept(each)) for each in self._sockets]

    async def close(self) -> None:
        """Accept no more connections, and end the greetings; allowed at any time."""
        self.port = 0
        for task in self._accept_tasks:
            task.cancel()
        await asyncio.sleep(0)  # a greeting that has not begun would leave its connection open
        for task in self._greetings:
            task.cancel()
        await asyncio.gather(*self._accept_tasks, *self._greetings, return_exceptions=True)
        for each in self._sockets:
            each.close()
        self._sockets.clear()
        self._accept_tasks.clear()

    def expect(self, receive: Receive) -> "ExpectedConnection":
        """Return a new key. `receive` is called with each message of its connection."""
        expected = ExpectedConnection(self._expected, receive)
        self._expected[expected.key[:HALF]] = expected
        return expected

    async def _accept(self, listening: socket.socket) -> None:
        async for connection in connections_of(listening):
            if len(self._greetings) >= GREETINGS_MAX:
                oldest = next(iter(self._greetings))
                del self._greetings[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._greet(connection))
            self._greetings[task] = None
            task.add_done_callback(lambda task: self._greetings.pop(task, None))

    async def _greet(self, connection: socket.socket) -> None:
        """Wait for the key of a connection; close it if there is none."""
        made = _AcceptedConnection(self._expected)
        try:
            async with asyncio.timeout(GREETING_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: made, connection, ssl=self._context()
                )
                await made.greeted
        except OSError:  # no TLS, or too late
            pass
        finally:
            if not made.has_key:
                made.abort()


class TcpEnds(NamedTuple):
    """How one node's messages may go over TCP."""

    port: TcpPort | None
    """Takes the peers' messages. None: they come over gRPC."""
    connect: Connect
    """Connects to the peers' ports."""

    def expect(self, receive: Receive) -> "ExpectedConnection | None":
        """Return a new key, as `TcpPort.expect`. None: messages come over gRPC."""
        return self.port.expect(receive) if self.port is not None and self.port.port else None

    async def reach(
        self,
        peer: str,
        port: int,
        key: bytes,
        on_lost: Callable[[], object],
        complaints: Complaints,
        limit_s: float = CONNECT_S,
    ) -> "TcpStream | None":
        """Return a connection to a peer's TCP port. None: messages go over gRPC.

        `on_lost`: see `TcpStream.connect`. `complaints` gets a warning if the port can't be
        reached within `limit_s`.
        """
        if not port:
            return None
        try:
            async with asyncio.timeout(limit_s):
                return await TcpStream.connect(self.connect, peer, port, key, on_lost)
        except (OSError, ValueError) as error:  # ValueError: a name that TLS or DNS can't have
            more = {"peer_name": peer, "port": port, "error": str(error) or "no answer in time"}
            complaints.log(f"tcp {peer}", "no TCP to a peer: its stream is slower", **more)
            return None


class ExpectedConnection:
    """A connection that may come, or is there, from `TcpPort.expect` to `end`."""

    def __init__(self, among: dict[bytes, "ExpectedConnection"], receive: Receive) -> None:
        self.key, self.receive = secrets.token_bytes(KEY_SIZE), receive
        self.connection: _AcceptedConnection | None = None
        self._among = among

    def end(self) -> None:
        """End the connection if it is there; else refuse it."""
        self._among.pop(self.key[:HALF], None)
        if self.connection is not None:
            self.connection.abort()


class _AcceptedConnection(asyncio.Protocol):
    """One accepted connection: half a key, then messages."""

    def __init__(self, among: dict[bytes, ExpectedConnection]) -> None:
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the key is there, or the connection has ended."""
        self._among = among
        self._expected: ExpectedConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        """The begin of a message, or of the key."""
        self._needed_bytes = HALF
        """Bytes up to the end of that message, as far as known."""

    @property
    def has_key(self) -> bool:
        """Whether the key was received."""
        return self._expected is not None

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed_bytes:
                return
            data, self._rest = bytes(self._rest), bytearray()
        if self._expected is None:
            self._take_key(data)
        else:
            self._take_messages(data, self._expected.receive)
        if len(data) >= TURN_BYTES:
            assert self._transport is not None
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _take_key(self, data: bytes) -> None:
        assert self._transport is not None
        if len(data) < HALF:
            self._rest += data
            return
        self._expected = self._among.get(data)
        if self._expected is None:
            self._transport.abort()
            return
        if self._expected.connection is not None:
            self._expected.connection.abort()  # the dialler did not wait for its answer
        self._expected.connection = self
        self._needed_bytes = SIZE_BYTES
        self._transport.write(self._expected.key[HALF:])
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _take_messages(self, data: bytes, receive: Receive) -> None:
        at, end = 0, len(data)
        while end - at >= SIZE_BYTES:
            size = int.from_bytes(data[at : at + SIZE_BYTES], "little")
            if size > MESSAGE_BYTES_MAX:
                self.abort()
                return
            self._needed_bytes = SIZE_BYTES + size
            if end - at < self._needed_bytes:
                break
            if not receive(data[at + SIZE_BYTES : at + self._needed_bytes]):
                self.abort()
                return
            at += self._needed_bytes
            self._needed_bytes = SIZE_BYTES
        self._rest += data[at:]


class TcpStream:
    """One dialled connection."""

    def __init__(self, dialled: "_DialledConnection") -> None:
        self._connection = dialled

    @classmethod
    async def connect(
        cls, connect: Connect, peer: str, port: int, key: bytes, on_lost: Callable[[], object]
    ) -> Self:
        """Connect, and exchange the halves of the key.

        `on_lost`: called when the connection ends afterwards, for any reason.

        Raises:
            OSError: it failed, or the port is not the peer's.
        """
        dialled = _DialledConnection()
        try:
            await connect(peer, port, lambda: dialled)
            dialled.transport.write(key[:HALF])
            answer = await dialled.answer
        except BaseException:
            dialled.abort()
            raise
        if answer != key[HALF:]:
            dialled.abort()
            raise ConnectionError("the peer's process did not answer at this port")
        dialled.on_lost = on_lost
        return cls(dialled)

    def abort(self) -> None:
        """End the connection at once. Messages that are not sent yet are lost."""
        self._connection.abort()

    async def write(self, data: bytes) -> None:
        """Send a message, after those before it.

        Raises:
            OSError: the connection has ended.
        """
        await self._connection.writable.wait()
        transport = self._connection.transport
        if transport.is_closing():
            raise ConnectionError("the connection has ended")
        transport.writelines((len(data).to_bytes(SIZE_BYTES, "little"), data))


class _DialledConnection(asyncio.Protocol):
    """The callbacks of a dialled connection."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """What the peer sent. Empty: the connection ended before."""
        self.writable = asyncio.Event()
        self.writable.set()
        self.on_lost: Callable[[], object] = lambda: None
        self._answer_bytes = b""

    def abort(self) -> None:
        if hasattr(self, "transport"):
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        made = self.transport.get_extra_info("socket")
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNCONFIRMED_MS)

    def data_received(self, data: bytes) -> None:
        self._answer_bytes += data
        if len(self._answer_bytes) > HALF:
            self.abort()
        elif len(self._answer_bytes) == HALF and not self.answer.done():
            self.answer.set_result(self._answer_bytes)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        if not self.answer.done():
            self.answer.set_result(b"")
        self.on_lost()
