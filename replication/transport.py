"""Streams between replicas: each node dials every other one and speaks on its own stream.

    A --Hello, messages--> B        (B answers with its own Hello, and nothing else)
    B --Hello, messages--> A

Links are by node name, as addresses are; which replica is behind a name, the two Hellos say. So a
learner needs no more than a name that the others know, and a node that is replaced under its name
is met as the new replica that it is.

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
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from replication.complaints import Complaints
from replication.plausible import ID_MAX
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

    def __init__(  # noqa: PLR0913 - who it is, whom it dials, who hears of it
        self,
        *,
        cluster_id: str,
        me: ReplicaId,
        name: str,
        dials: Mapping[str, Dial],
        on_message: Callable[[ReplicaId, bytes], None],
        on_connected: Callable[[ReplicaId], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`name` is this node's, `dials` says how to reach the others by theirs.

        `on_message` raises ValueError for what no peer of this version would say.
        `on_failure` hears of what should never end a stream's task.
        """
        assert name not in dials, name
        self._cluster_id = cluster_id
        self._me = me
        self._name = name
        self._on_message = on_message
        self._on_connected = on_connected
        self.on_failure = on_failure
        self._out = {peer: _Outbound(self, peer, dial) for peer, dial in dials.items()}
        self._behind: dict[ReplicaId, str] = {}
        """Replica -> the name that it was last met under."""
        self._inbound: dict[str, _Inbound] = {}
        self._complaints = Complaints(logger)
        self._heard_s: dict[str, float] = {}

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
        """Queue a message; lost if no stream goes to that replica or too much waits."""
        name = self._behind.get(to)
        if name is not None:
            self._out[name].put(data)

    def name_of(self, replica: ReplicaId) -> str | None:
        """Return the name that a replica was last met under, this one included."""
        return self._name if replica == self._me else self._behind.get(replica)

    def hello(self, to: str) -> bytes:
        """Return the first message of a stream to or from the node of that name."""
        hello = pb.Hello(
            version=VERSION,
            cluster_id=self._cluster_id,
            sender=self._me,
            name=self._name,
            receiver_name=to,
        )
        return hello.SerializeToString()

    def heard_s(self, peer: str) -> float:
        """Return the loop's time at which the node of that name last said something."""
        return self._heard_s.get(peer, 0.0)

    def connected(self, peer: str, replica: ReplicaId) -> None:
        """A stream to `peer` was built; `replica` is there."""
        self._behind = {r: name for r, name in self._behind.items() if name != peer}
        self._behind[replica] = peer
        self._on_connected(replica)

    def met(self, data: bytes) -> tuple[str, ReplicaId] | str:
        """Return who says this Hello; a text says why it can't be talked with."""
        try:
            hello = pb.Hello.FromString(data)
        except DecodeError:
            return "not a Hello"
        for field, said, limit in (
            ("version", hello.version, VERSION),
            ("cluster_id", hello.cluster_id, self._cluster_id),
            ("receiver_name", hello.receiver_name, self._name),
        ):
            if said != limit:
                return f"{field} = {said!r} of {hello.name!r}: here it is {limit!r}"
        if not 1 <= hello.sender <= ID_MAX:
            return f"sender = {hello.sender} of {hello.name!r}: must be in 1 .. {ID_MAX}"
        if hello.name not in self._out:
            return f"name = {hello.name!r}: not among the peers of {self._name!r}"
        replica = ReplicaId(hello.sender)
        namesake = self._name if replica == self._me else self._behind.get(replica, hello.name)
        if namesake != hello.name:
            return f"replica id {replica:016x} of {hello.name!r} is that of {namesake!r}: a copy?"
        return hello.name, replica

    def refuse(self, sender: ReplicaId, why: str) -> None:
        """End the stream of that replica: at its next message, or at the one being taken."""
        for inbound in self._inbound.values():
            if inbound.sender == sender:
                inbound.refused = why

    async def _link(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        hello = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await anext(messages, b"")
        who = self.met(hello)
        if isinstance(who, str):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, who)
        name, sender = who
        inbound = self._inbound[name] = _Inbound(sender)
        yield self.hello(name)
        loop = asyncio.get_running_loop()
        async for data in messages:
            self._heard_s[name] = loop.time()
            if self._inbound.get(name) is not inbound:
                await context.abort(grpc.StatusCode.ABORTED, "superseded by a newer stream")
            try:
                self._on_message(sender, data)
            except ValueError as error:
                inbound.refused = str(error)
            if inbound.refused:
                self._complaints.say(name, f"bad message from {name}: {inbound.refused:.400}")
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, inbound.refused[:400])


@dataclass(slots=True)
class _Inbound:
    """The stream from one peer."""

    sender: ReplicaId
    refused: str = ""
    """Why it has to end."""


class _Outbound:
    """The stream to one peer, rebuilt for as long as the transport runs."""

    def __init__(self, transport: Transport, peer: str, dial: Dial) -> None:
        self._transport = transport
        self._peer = peer
        self._dial = dial
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._up = False
        self._waiting_since_s: float | None = None
        """Of the first message that the peer has said nothing after. None: there is none."""
        self._more = asyncio.Event()
        self._complaint = ""
        """Why the peer can't be talked with, as last logged."""
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
                logger.debug("stream to %s: %r", self._peer, error)
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
            self._complain(f"refuses: {await call.details()}")
            return
        assert isinstance(first, bytes), first
        who = self._transport.met(first)
        if isinstance(who, str) or who[0] != self._peer:
            self._complain(f"answers {who}")
            call.cancel()
            return
        self._up, self._waiting_since_s, self._complaint = True, None, ""
        self._transport.connected(*who)
        # Nothing more is read: a read that ends says at once that the stream broke.
        broken = asyncio.ensure_future(call.read())
        broken.add_done_callback(lambda _: self._more.set())
        try:
            while not broken.done():
                self._more.clear()
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    self._check_silence()
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await call.write(data)
                await self._more.wait()
        finally:
            broken.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await broken

    def _complain(self, why: str) -> None:
        """Say once why this peer can't be talked with; it is tried again and again."""
        if why != self._complaint:
            logger.warning("%s %s", self._peer, why)
            self._complaint = why

    def _check_silence(self) -> None:
        """Return unless the peer has long been owing an answer; raise TimeoutError if it has."""
        now_s = asyncio.get_running_loop().time()
        waiting_s = self._waiting_since_s
        if waiting_s is None or self._transport.heard_s(self._peer) >= waiting_s:
            self._waiting_since_s = now_s
        elif now_s - waiting_s > SILENCE_S:
            raise TimeoutError(f"nothing heard for {now_s - waiting_s:.1f} s")
