"""Streams between replicas: each node dials every other node and sends on its own stream.

    A --Hello, messages--> B        (B answers with its own Hello and nothing else)
    B --Hello, messages--> A

A stream belongs to a node name, as an address does. The two Hellos state the replica behind each
name. A learner therefore needs only a name that the others know. A node that is replaced under the
same name is recognized as a new replica.

If B has a TCP port, its Hello states that, and A sends its messages there, as they take a fraction
of the processor time (tcp_stream.py). The gRPC stream then stays open without messages: one ends
with the other. If A can't connect to that port, its messages go over gRPC until it can.

A stream keeps its order and is either whole or broken. Messages queued at a break are lost. The
core expects such losses, and receives `Reconnected` once the stream is rebuilt. gRPC's flow control
slows a fast sender. The queue that then grows here is limited in bytes; further messages are lost.

A peer that dies resets its streams at once. A peer that is cut off falls silent. Its answers come
on its own stream. If none came for SILENCE_S, this node rebuilds its stream on a new connection.
The old connection would wait for TCP's ever longer retransmissions after the network heals.
"""

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from replication.core.message_check import ID_MAX
from replication.proto import replication_pb2 as pb
from replication.shell.peer_complaints import Complaints, readable_details
from replication.shell.tasks import TaskSet
from replication.shell.tcp_stream import TcpEnds, TcpStream
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease
from timer.model.units import ReplicaId

logger = logging.getLogger(__name__)

VERSION: Final = 1
"""Programs with another version refuse the stream. Feature levels have fields of their own."""
METHOD: Final = "/replication.v1.Peer/Link"
HELLO_TIMEOUT_S: Final = 2.0
NO_CONNECTION: Final = "no connection in time; if its address is a name, DNS may not answer"
"""gRPC does not tell the two apart, and asks DNS also for names in /etc/hosts."""
RECONNECT_S: Final = 0.1
FAILING_S: Final = 10.0
"""A stream that fails for longer is logged: its peer is not just starting again."""
SILENCE_S: Final = 2.0
TCP_RETRY_S: Final = 300.0
"""Interval of the next attempts, while the stream goes over gRPC. A busy peer misses the first."""
WRITE_TIMEOUT_S: Final = 10.0
SLOW_BYTES_S: Final = 128 << 10
"""A link that carries less each second is broken. Large messages have more time to be written."""
QUEUE_BYTES_MAX: Final = 64 << 20

Dial = Callable[[], grpc.aio.Channel]
"""Returns a new channel to a peer; the transport closes it."""
Identify = Callable[["grpc.aio.ServicerContext[Any, Any]"], str]
"""Returns the node name in a caller's certificate; empty: it is not a node's."""


class Transport:
    """All streams of one node. For the event loop."""

    def __init__(  # noqa: PLR0913 - identity, peers and callbacks of a node
        self,
        *,
        cluster_id: str,
        me: ReplicaId,
        name: str,
        dials: Mapping[str, Dial],
        on_message: Callable[[ReplicaId, bytes], None],
        on_connected: Callable[[ReplicaId], None],
        on_failure: Callable[[BaseException], None],
        identify: Identify | None = None,
        release: ProgramRelease = FIRST_RELEASE,
        level: Callable[[], int] = lambda: 0,
        tcp: TcpEnds,
    ) -> None:
        """`name`: this node's name. `dials`: name of each other node -> its channel factory.

        `on_message` raises ValueError for a message that no peer of this version sends.
        `on_failure` receives an unexpected exception of a stream's task.
        `identify`: None: without TLS a peer's name is not verified.
        `release`: this program. `level`: returns the feature level of this node's log; 0: none.
        """
        assert name not in dials, name
        self._cluster_id = cluster_id
        self._me = me
        self._name = name
        self._on_message = on_message
        self._on_connected = on_connected
        self._identify = identify
        self._release, self._level = release, level
        self.tcp = tcp
        self._out = {peer: _Outbound(self, peer, dial) for peer, dial in dials.items()}
        self._streams = TaskSet(on_failure)
        self._name_by_replica: dict[ReplicaId, str] = {}
        """Replica -> the node name under which it was last connected."""
        self._inbound: dict[str, _Inbound] = {}
        self.complaints = Complaints(logger)
        self._heard_s: dict[str, float] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for the node's gRPC server."""
        link: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._link
        )
        service, method = METHOD.strip("/").split("/")
        return grpc.method_handlers_generic_handler(service, {method: link})

    def start(self) -> None:
        """Begin to dial the peers."""
        for outbound in self._out.values():
            self._streams.spawn(outbound.run())

    async def stop(self) -> None:
        """Close every outgoing stream, and the TCP port."""
        await self._streams.end()
        if self.tcp.port is not None:
            await self.tcp.port.close()

    def send(self, to: ReplicaId, data: bytes) -> None:
        """Queue a message. It is lost if no stream reaches the replica, or the queue is full."""
        name = self._name_by_replica.get(to)
        if name is not None:
            self._out[name].put(data)

    def overtake(self, to: ReplicaId, data: bytes) -> None:
        """Send a small message past those that wait for the connection, if there is a way."""
        name = self._name_by_replica.get(to)
        if name is not None:
            self._out[name].overtake(data)

    @property
    def tcp_port(self) -> int:
        """The port at which peers may send over TCP without gRPC; 0: none is open."""
        return self.tcp.port.port if self.tcp.port is not None else 0

    def name_of(self, replica: ReplicaId) -> str | None:
        """Return the node name of a replica, own or last connected. None: it never was."""
        return self._name if replica == self._me else self._name_by_replica.get(replica)

    def hello(self, to: str, tcp_key: bytes = b"") -> bytes:
        """Return the first message of a stream to or from the node named `to`.

        `tcp_key`: the key with which that node may send its messages over TCP. Empty: it may not.
        """
        hello = pb.Hello(
            version=VERSION,
            cluster_id=self._cluster_id,
            sender=self._me,
            name=self._name,
            receiver_name=to,
            program=self._release.program,
            level_min=self._release.level_min,
            level_max=self._release.level_max,
            level=self._level(),
            tcp_port=self.tcp_port if tcp_key else 0,
            tcp_key=tcp_key,
        )
        return hello.SerializeToString()

    def heard_s(self, peer: str) -> float:
        """Return the loop time of the last message from the node named `peer`; 0: none."""
        return self._heard_s.get(peer, 0.0)

    def set_connected(self, peer: str, replica: ReplicaId) -> None:
        """Record that the stream to `peer` is up and that `replica` runs there."""
        self._name_by_replica = {
            r: name for r, name in self._name_by_replica.items() if name != peer
        }
        self._name_by_replica[replica] = peer
        self._on_connected(replica)

    def check_hello(self, data: bytes) -> tuple[str, ReplicaId] | str:
        """Return the sender's (name, replica) of a Hello, or why the Hello is refused."""
        try:
            hello = pb.Hello.FromString(data)
        except DecodeError:
            return "damaged Hello"
        for field, value, limit in (
            ("version", hello.version, VERSION),
            ("cluster_id", hello.cluster_id, self._cluster_id),
            ("receiver_name", hello.receiver_name, self._name),
        ):
            if value != limit:
                return f"{field} = {value!r} of {hello.name!r}: must be {limit!r}"
        if why := self._level_conflict(hello):
            return why
        if not 1 <= hello.sender <= ID_MAX:
            return f"sender = {hello.sender} of {hello.name!r}: must be in 1 .. {ID_MAX}"
        if hello.name not in self._out:
            return f"name = {hello.name!r}: not among the peers of {self._name!r}"
        replica = ReplicaId(hello.sender)
        namesake = (
            self._name if replica == self._me else self._name_by_replica.get(replica, hello.name)
        )
        if namesake != hello.name:
            return f"replica id {replica:016x} of {hello.name!r} is that of {namesake!r}: a copy?"
        return hello.name, replica

    def _level_conflict(self, hello: pb.Hello) -> str:
        """Return why one of both nodes can't run at the other one's level; empty: each can."""
        theirs = FIRST_RELEASE
        if hello.level_max:
            theirs = ProgramRelease(hello.program, hello.level_min, hello.level_max)
        for level, at, release, of in (
            (hello.level, hello.name, self._release, self._name),
            (self._level(), self._name, theirs, hello.name),
        ):
            if level and not release.supports(level):
                return f"feature level = {level} at {at!r}: {of!r} of {release}"
        return ""

    def unreachable(self, peer: str, why: str) -> None:
        """Warn that there has been no stream to `peer` for a while."""
        more = {"peer_name": peer, "error": why}
        self.complaints.log(f"stream {peer}", "no stream to a peer", **more)

    def refuse(self, sender: ReplicaId, why: str) -> None:
        """End the stream of `sender`: at its next message, or at the one being processed."""
        for inbound in self._inbound.values():
            if inbound.sender == sender:
                inbound.refusal = why

    async def _link(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        hello = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await anext(messages, b"")
        checked = self.check_hello(hello)
        if not isinstance(checked, str) and self._identify is not None:
            certified = self._identify(context)
            if certified != checked[0]:
                checked = f"name = {checked[0]!r}: the certificate is that of {certified!r}"
        if isinstance(checked, str):
            more = {"peer": context.peer(), "error": f"{checked:.400}"}
            self.complaints.log("", "refused a stream", **more)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, checked)
        name, sender = checked
        inbound = self._inbound[name] = _Inbound(sender)
        expected = self.tcp.expect(functools.partial(self._take, name, inbound))
        try:
            yield self.hello(name, expected.key if expected is not None else b"")
            async for data in messages:
                if not self._take(name, inbound, data):
                    is_newest = self._inbound.get(name) is inbound
                    code = (
                        grpc.StatusCode.INVALID_ARGUMENT if is_newest else grpc.StatusCode.ABORTED
                    )
                    await context.abort(code, inbound.refusal[:400])
        finally:
            if expected is not None:
                expected.end()

    def _take(self, name: str, inbound: "_Inbound", data: bytes) -> bool:
        """Process a message of a stream. Return whether the stream may go on."""
        self._heard_s[name] = asyncio.get_running_loop().time()
        if self._inbound.get(name) is not inbound:
            inbound.refusal = "superseded by a newer stream"
            return False
        try:
            self._on_message(inbound.sender, data)
        except ValueError as error:
            inbound.refusal = str(error)
        if inbound.refusal:
            more = {"peer_name": name, "error": f"{inbound.refusal:.400}"}
            self.complaints.log(name, "bad message", **more)
        return not inbound.refusal


@dataclass(slots=True)
class _Inbound:
    """The stream from one peer."""

    sender: ReplicaId
    refusal: str = ""
    """Why the stream has to end; empty: it may go on."""


class _Outbound:
    """The stream to one peer. It is rebuilt for as long as the transport runs."""

    def __init__(self, transport: Transport, peer: str, dial: Dial) -> None:
        self._transport = transport
        self._peer = peer
        self._dial = dial
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._up = False
        self._waiting_since_s: float | None = None
        """Loop time of the first message that the peer has not answered. None: none was sent."""
        self._written_s = 0.0
        """Loop time of the last message."""
        self._n_unanswered = 0
        """Messages since the peer was last heard."""
        self._idle_call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        """The gRPC stream beside the TCP connection. None: messages go over gRPC, or none go."""
        self._overtake_task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        self._complaint = ""
        """Why there is no stream, as last logged."""
        self._failing_since_s: float | None = None
        """Loop time of the first failure since the stream was up. None: there was none."""

    def put(self, data: bytes) -> None:
        if not self._up or self._queued_bytes + len(data) > QUEUE_BYTES_MAX:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._more.set()

    def overtake(self, data: bytes) -> None:
        """Send a message on the gRPC stream, which has no others if they go over TCP."""
        if self._idle_call is None:
            self.put(data)
        elif self._overtake_task is None or self._overtake_task.done():
            self._overtake_task = asyncio.ensure_future(
                self._write_past_queue(self._idle_call, data)
            )

    async def _write_past_queue(
        self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", data: bytes
    ) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(data)  # the stream's own task learns of its end

    async def run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            channel = self._dial()
            try:
                await self._speak(channel)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError) as error:
                self._note_failure(error)
            except asyncio.CancelledError:
                if task.cancelling():  # by the transport's `stop`
                    raise
                self._note_failure(ConnectionError("the call was cancelled"))  # see `_retry_tcp`
            finally:
                self._up, self._idle_call = False, None
                self._queue.clear()
                self._queued_bytes = 0
                await channel.close()
            await asyncio.sleep(RECONNECT_S)

    async def _speak(self, channel: grpc.aio.Channel) -> None:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await call.write(self._transport.hello(self._peer))
                first = await call.read()
        except TimeoutError:
            if channel.get_state() is grpc.ChannelConnectivity.READY:
                raise
            raise TimeoutError(NO_CONNECTION) from None
        if first is grpc.aio.EOF:
            self._complain(f"refuses: {await call.details()}")
            return
        assert isinstance(first, bytes), first
        checked = self._transport.check_hello(first)
        if isinstance(checked, str) or checked[0] != self._peer:
            self._complain(f"answers {checked}")
            call.cancel()
            return
        hello = pb.Hello.FromString(first)
        tcp = await self._tcp_of(hello, call)
        write = call.write if tcp is None else tcp.write
        retry = asyncio.ensure_future(self._retry_tcp(hello, call)) if tcp is None else None
        self._idle_call = call if tcp is not None else None
        self._up, self._waiting_since_s, self._complaint = True, None, ""
        self._failing_since_s = None
        self._transport.set_connected(*checked)
        # The peer sends nothing more. A read that ends therefore means that the stream broke.
        broken = asyncio.ensure_future(call.read())
        broken.add_done_callback(lambda _: self._more.set())
        size = 0
        try:
            while not broken.done():
                self._more.clear()
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    self._check_silence()
                    size, before = len(data), size  # a write over TCP waits for the one before
                    async with asyncio.timeout(WRITE_TIMEOUT_S + (before + size) / SLOW_BYTES_S):
                        await write(data)
                await self._more.wait()
        finally:
            if tcp is not None:
                tcp.abort()
            if retry is not None:
                retry.cancel()
            broken.cancel()
            call.cancel()
            await asyncio.gather(broken, return_exceptions=True)  # raises if `stop` comes now

    async def _tcp_of(
        self, hello: pb.Hello, call: "grpc.aio.StreamStreamCall[bytes, bytes]"
    ) -> TcpStream | None:
        """Return a connection to the peer's TCP port. None: messages go over gRPC."""
        port, key, complaints = hello.tcp_port, hello.tcp_key, self._transport.complaints
        return await self._transport.tcp.reach(self._peer, port, key, call.cancel, complaints)

    async def _retry_tcp(
        self, hello: pb.Hello, call: "grpc.aio.StreamStreamCall[bytes, bytes]"
    ) -> None:
        """End a stream over gRPC once the peer's TCP port can be reached. The next one uses it."""
        while hello.tcp_port:
            await asyncio.sleep(TCP_RETRY_S)
            if (tcp := await self._tcp_of(hello, call)) is not None:
                tcp.abort()  # and with it the call, also while a message is being written

    def _note_failure(self, error: Exception) -> None:
        """Log the reason if the stream has failed for FAILING_S."""
        now_s = asyncio.get_running_loop().time()
        since_s = self._failing_since_s = self._failing_since_s or now_s
        text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        why = f"{readable_details(text or 'no answer in time'):.400}"
        logger.debug("no stream to a peer", extra={"peer_name": self._peer, "error": why})
        if now_s - since_s >= FAILING_S:
            self._transport.unreachable(self._peer, why)

    def _complain(self, why: str) -> None:
        """Log once why no stream to this peer is possible. Attempts go on."""
        if why != self._complaint:
            more = {"peer_name": self._peer, "error": why}
            logger.warning("no stream to a peer", extra=more)
            self._complaint = why

    def _check_silence(self) -> None:
        """Raise TimeoutError if the peer has not answered for over SILENCE_S.

        A pause after one message begins the wait again: some messages are never answered.
        """
        now_s = asyncio.get_running_loop().time()
        waiting_s, written_s = self._waiting_since_s, self._written_s
        self._written_s = now_s
        heard_s = self._transport.heard_s(self._peer)
        self._n_unanswered += 1
        if waiting_s is None or heard_s >= waiting_s:
            self._waiting_since_s, self._n_unanswered = now_s, 1
        elif self._n_unanswered == 2 and now_s - written_s > SILENCE_S:
            self._waiting_since_s = now_s
        elif now_s - waiting_s > SILENCE_S:
            raise TimeoutError(f"no message for {now_s - waiting_s:.1f} s")
