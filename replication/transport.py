"""Streams between replicas: each node dials every other one and speaks on its own stream.

    A --Hello, messages--> B        (B answers the Hello with an empty message, nothing else)
    B --Hello, messages--> A

A stream is in order and either whole or broken: what was queued when it breaks is lost, which the
core expects; once it is rebuilt the core hears so. gRPC's flow control holds a fast sender; what
then piles up here is bounded in bytes, and the rest is lost.

A peer that dies resets its streams at once. One that is cut off is noticed by its silence: its
answers come on its own stream, so when none came for SILENCE_S ours is built anew, on a new
connection. Otherwise it would wait for TCP's ever longer retransmissions after the cut is healed.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from replication.proto import replication_pb2 as pb
from timer.units import ReplicaId

logger = logging.getLogger(__name__)

VERSION: Final = 1
METHOD: Final = "/replication.v1.Peer/Link"
HELLO_TIMEOUT_S: Final = 2.0
RECONNECT_S: Final = 0.1
SILENCE_S: Final = 2.0
WRITE_TIMEOUT_S: Final = 10.0
"""A message of some megabytes gets through in this, or never."""
QUEUE_BYTES_MAX: Final = 64 << 20

Dial = Callable[[], grpc.aio.Channel]
"""Make a new channel to a peer; it is closed here."""


class Transport:
    """All streams of one node. For the event loop."""

    def __init__(
        self,
        *,
        cluster_id: str,
        me: ReplicaId,
        peers: Mapping[ReplicaId, Dial],
        on_message: Callable[[ReplicaId, bytes], None],
        on_connected: Callable[[ReplicaId], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_message` raises ValueError for what no peer of this version would say.

        `on_failure` hears of what should never end a stream's task.
        """
        self._cluster_id = cluster_id
        self._me = me
        self._on_message = on_message
        self._out = {peer: _Outbound(self, peer, dial) for peer, dial in peers.items()}
        self._on_connected = on_connected
        self.on_failure = on_failure
        self._inbound: dict[ReplicaId, object] = {}
        self._heard_s: dict[ReplicaId, float] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what the node's gRPC server needs."""
        link: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._link
        )
        service, method = METHOD.strip("/").split("/")
        return grpc.method_handlers_generic_handler(service, {method: link})

    def start(self) -> None:
        """Begin to dial."""
        for outbound in self._out.values():
            outbound.start()

    async def stop(self) -> None:
        """Close every stream."""
        for outbound in self._out.values():
            await outbound.stop()

    def send(self, to: ReplicaId, data: bytes) -> None:
        """Queue a message; lost if the stream is broken or too much waits."""
        self._out[to].put(data)

    def hello(self, to: ReplicaId) -> bytes:
        """Return the first message of a stream."""
        return pb.Hello(
            version=VERSION, cluster_id=self._cluster_id, sender=self._me, receiver=to
        ).SerializeToString()

    def heard_s(self, peer: ReplicaId) -> float:
        """Return the loop's time at which `peer` last said something."""
        return self._heard_s.get(peer, 0.0)

    def connected(self, peer: ReplicaId) -> None:
        """A stream to `peer` was built."""
        self._on_connected(peer)

    async def _link(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        sender = self._greet(await anext(messages, b""))
        if sender is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a peer of this replica")
        generation = self._inbound[sender] = object()
        yield b""
        loop = asyncio.get_running_loop()
        async for data in messages:
            self._heard_s[sender] = loop.time()
            if self._inbound.get(sender) is not generation:
                await context.abort(grpc.StatusCode.ABORTED, "superseded by a newer stream")
            try:
                self._on_message(sender, data)
            except ValueError as error:
                logger.warning("bad message from replica %016x: %s", sender, error)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _greet(self, data: bytes) -> ReplicaId | None:
        try:
            hello = pb.Hello.FromString(data)
        except DecodeError:
            return None
        sender = ReplicaId(hello.sender)
        known = (hello.version, hello.cluster_id, hello.receiver) == (
            VERSION,
            self._cluster_id,
            self._me,
        )
        return sender if known and sender in self._out else None


class _Outbound:
    """The stream to one peer, rebuilt for as long as the transport runs."""

    def __init__(self, transport: Transport, peer: ReplicaId, dial: Dial) -> None:
        self._transport = transport
        self._peer = peer
        self._dial = dial
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._up = False
        self._waiting_since_s: float | None = None
        """Of the first message that the peer has said nothing after. None: there is none."""
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._transport.on_failure(error)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def put(self, data: bytes) -> None:
        if not self._up or self._queued_bytes + len(data) > QUEUE_BYTES_MAX:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._more.set()

    async def _run(self) -> None:
        while True:
            channel = self._dial()
            try:
                await self._speak(channel)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                logger.debug("stream to replica %016x: %r", self._peer, error)
            finally:
                self._up = False
                self._queue.clear()
                self._queued_bytes = 0
                await channel.close()
            await asyncio.sleep(RECONNECT_S)

    async def _speak(self, channel: grpc.aio.Channel) -> None:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await call.write(self._transport.hello(self._peer))
            first = await call.read()
        if first is grpc.aio.EOF:
            logger.warning("replica %016x refuses: %s", self._peer, await call.details())
            return
        self._up, self._waiting_since_s = True, None
        self._transport.connected(self._peer)
        # Nothing more is read: a read that ends says at once that the stream broke.
        broken = asyncio.ensure_future(call.read())
        try:
            while not broken.done():
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    self._check_silence()
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await call.write(data)
                self._more.clear()
                more = asyncio.ensure_future(self._more.wait())
                await asyncio.wait({more, broken}, return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
        finally:
            broken.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await broken

    def _check_silence(self) -> None:
        """Return unless the peer has long been owing an answer; raise TimeoutError if it has."""
        now_s = asyncio.get_running_loop().time()
        waiting_s = self._waiting_since_s
        if waiting_s is None or self._transport.heard_s(self._peer) >= waiting_s:
            self._waiting_since_s = now_s
        elif now_s - waiting_s > SILENCE_S:
            raise TimeoutError(f"nothing heard for {now_s - waiting_s:.1f} s")
