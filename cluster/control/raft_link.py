"""Streams between the control planes of the nodes, over each node's own gRPC port.

Every node dials every peer and sends only on that stream. The peer answers with one hello.

    A                                         B
    |-- stream A -> B: hello, frames ... ---->|   messages from A to B
    |<------------------------------ hello ---|
    |<---- stream B -> A: hello, frames ... --|   messages from B to A

The first frame is the sender's release: its program's version and feature levels. Version 0.1
sends none, and ignores it, as all kinds of frames that it does not know. Its hello must have four
items; this program ignores further ones.

A message on a stream is a msgpack list of frames [kind, body]: all waiting frames are sent at once.
An empty list keeps the stream alive. Nothing is acknowledged or sent twice: a message may be lost
with its stream. Raft and the reports tolerate that. Frames keep their order within a stream. A
second stream from the same peer ends the first.

If the peer has a TCP port for messages between nodes, it states the port and a key in its metadata
at the start of a stream. Then frames go there, as they take a fraction of the processor time
(replication/shell/tcp_stream.py). The gRPC stream stays open without messages: one ends with the
other. A port that can't be reached is not tried again by the streams of the next minutes.

A link is *up* while the stream to the peer is open. If the peer's process dies, the stream breaks
at once, because the peer's kernel resets the connection. If the network is cut, it breaks after
`silence_s` without a message. Each new stream uses a new channel, because gRPC's own reconnects
wait longer each time. A stream that cannot be opened again at once indicates a dead node.

Everything here runs on the event loop, except `send_raft`.
"""

import asyncio
import contextlib
import enum
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import astuple, dataclass, field
from typing import Any, Final, TypeAlias

import grpc
import msgpack

from cluster.control.raft_codec import MESSAGE_SIZE_MAX, BadRaftMessage, RaftMessage, decode, unpack
from replication.shell.peer_complaints import Complaints
from replication.shell.tcp_stream import CONNECT_S, ExpectedConnection, TcpEnds, TcpStream
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease

logger = logging.getLogger(__name__)

METHOD: Final = "/timer.cluster.Control/Link"
VERSION: Final = 2
QUEUE_FRAMES_MAX: Final = 4_096
"""Frames that wait for a peer, at most. Above this the stream is ended, and both start again."""
TAKE_SIZE: Final = MESSAGE_SIZE_MAX // 2
"""Bytes of the frames in one message; a single longer frame is sent alone."""
PROGRAM_SIZE_MAX: Final = 64
"""Characters of a program's version that are kept."""
_FRAME_OVERHEAD: Final = 16
KEEPALIVE_S: Final = 0.5
"""Interval of messages on an idle stream."""
HELLO_S: Final = 1.0
RETRY_S: Final = 0.1
RETRY_LATER_S: Final = 0.5
RETRY_LATER_AFTER_S: Final = 3.0
RETRY_TCP_S: Final = 300.0
"""Time for which an unreachable port is not tried again: each attempt delays the link, and a link
that is late looks like the loss of a node."""

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, without back-off
    ("grpc.enable_retries", 0),
)
"""Options that the channels of a link need."""


class FrameKind(enum.IntEnum):
    """The content of a frame."""

    RAFT = 0
    REPORT = 1
    ASK = 2
    ANSWER = 3
    RELEASE = 4
    """[program, level_min, level_max]"""
    VOTERS = 5
    """The voter sets in force in the sender's log, as lists of ids. They come before the report
    that they belong to: earlier programs take no longer report."""


PORT_METADATA: Final = "tcp-port"
KEY_METADATA: Final = "tcp-key-bin"
"""Metadata of an accepted stream: the port and the key for its frames. Absent: they go over gRPC.
Earlier programs send none, and ignore it."""

_Call: TypeAlias = grpc.aio.StreamStreamCall[Any, Any]
_Write: TypeAlias = Callable[[bytes], Awaitable[None]]


class _Broken(Exception):
    """The stream must be ended."""


@dataclass(slots=True)
class _Peer:
    """The link to one peer."""

    name: str
    frames: list[tuple[FrameKind, bytes]] = field(default_factory=list)
    lazy: dict[FrameKind, bytes] = field(default_factory=dict)
    """Frames that are sent with the next others; a newer one replaces an older of its kind."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    retry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer has dialled this node: it is alive, so dial it at once."""
    up: bool = False
    heard_at_s: float = 0.0
    """Time of the last message from the peer, on the loop's clock."""
    tcp_retry_s: float = 0.0
    """No connection to its TCP port is tried before, on the loop's clock."""

    def take_frames(self) -> bytes:
        """Return the waiting frames, up to TAKE_SIZE; `wake` stays set if some are left."""
        count = size = 0
        for _, body in self.frames:
            size += len(body) + _FRAME_OVERHEAD
            if count and size > TAKE_SIZE:
                break
            count += 1
        frames = self.frames[:count]
        del self.frames[:count]
        if not self.frames:
            frames += self.lazy.items()
            self.lazy.clear()
            self.wake.clear()
        data: bytes = msgpack.packb(frames)
        return data


class RaftLink(grpc.GenericRpcHandler):
    """Streams to and from all peers. Register it before the server starts."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        name: str,
        cluster_id: str,
        peers: Iterable[str],
        channel_for: Callable[[str], grpc.aio.Channel],
        on_raft: Callable[[str, RaftMessage], None],
        on_up: Callable[[str, bool], None],
        on_frame: Callable[[str, FrameKind, object], None],
        before_raft: Callable[[], None] = lambda: None,
        on_release: Callable[[str, ProgramRelease], None] = lambda peer, release: None,
        release: ProgramRelease = FIRST_RELEASE,
        identify: Callable[[grpc.aio.ServicerContext[Any, Any]], str] | None = None,
        silence_s: float,
        tcp: TcpEnds,
    ) -> None:
        """Args:
        channel_for: Returns a new channel to the peer, made with CHANNEL_OPTIONS; the link
            closes it.
        before_raft: Called when a message of Raft is about to be sent, before its frame is taken.
            Frames that it queues go along.
        on_release: Called with a peer's name and release, at the start of each of its streams.
        release: This program, with the highest feature level that the settings allow.
        silence_s: A stream without a message of its peer for this time is ended.
        identify: Returns the node name in the caller's certificate. None: without TLS a peer's
            name is not verified.
        tcp: How frames may go over TCP. The link neither opens nor closes the port.
        """
        self._tcp = tcp
        self._name, self._cluster_id = name, cluster_id
        self._channel_for = channel_for
        self._on_raft, self._on_up, self._on_frame = on_raft, on_up, on_frame
        self._identify = identify
        self._on_release, self._release, self._before_raft = on_release, release, before_raft
        self._silence_s = silence_s
        self._complaints = Complaints(logger)
        self._breaks = Complaints(logger, level=logging.INFO)
        self._peers = {peer: _Peer(peer) for peer in peers}
        self._newest: dict[str, asyncio.Task[Any]] = {}
        """Peer -> the task of its newest stream, from before this node's hello."""
        self._inbound: dict[str, asyncio.Task[Any]] = {}
        """Peer -> the same task, from after this node's hello: it may be cancelled."""
        self._dialling: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = False

    def start(self) -> None:
        """Dial every peer."""
        self._loop = asyncio.get_running_loop()
        self._running = True
        self._dialling = [
            self._loop.create_task(self._dial(peer), name=f"link to {peer.name}")
            for peer in self._peers.values()
        ]

    async def stop(self) -> None:
        """End all streams."""
        self._running = False
        tasks = [*self._dialling, *self._inbound.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)

    def is_up(self, peer: str) -> bool:
        """Return whether the link to `peer` is up."""
        return self._peers[peer].up

    def send(self, peer: str, kind: FrameKind, body: object, *, lazily: bool = False) -> None:
        """Queue a frame; it is dropped if the link is down.

        Args:
            lazily: Send it with the next frame. The next frame of the kind replaces it and is
                sent at once.
        """
        to = self._peers.get(peer)
        if to is None or not to.up:
            return
        if not lazily:
            to.lazy.pop(kind, None)  # it is older, and would arrive later
            self._enqueue(to, kind, msgpack.packb(body))
            return
        if kind in to.lazy:
            to.wake.set()
        to.lazy[kind] = msgpack.packb(body)

    def send_raft(self, peer: str, data: bytes) -> None:
        """Queue an encoded message of Raft. From any thread."""
        assert self._loop is not None, "not started"
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._enqueue_raft, self._peers[peer], data)

    def _enqueue_raft(self, peer: _Peer, data: bytes) -> None:
        self._enqueue(peer, FrameKind.RAFT, data)
        self._before_raft()

    def _enqueue(self, peer: _Peer, kind: FrameKind, body: bytes) -> None:
        if peer.up:
            peer.frames.append((kind, body))
            peer.wake.set()

    # Outbound

    async def _dial(self, peer: _Peer) -> None:
        """Open a stream to `peer`, again and again."""
        loop = asyncio.get_running_loop()
        lost_at_s = loop.time()
        while True:
            dialled_at_s = loop.time()
            try:
                await self._stream_to(peer)
            except (
                *(_Broken, BadRaftMessage, grpc.aio.AioRpcError, TimeoutError),
                asyncio.InvalidStateError,  # a write to a call that has just ended
            ) as error:
                if peer.up:
                    more = {"peer_name": peer.name, "error": _brief(error)}
                    self._breaks.log(peer.name, "the link broke", **more)
            except Exception:  # `channel_for` resolves a name, which may fail in any way
                logger.exception("link to %s", peer.name)
            if peer.up:
                self._set_up(peer, up=False)
                lost_at_s = loop.time()
                if lost_at_s - dialled_at_s >= RETRY_S:  # the peer may end each stream at once
                    continue
            late = loop.time() - lost_at_s >= RETRY_LATER_AFTER_S
            peer.retry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_LATER_S if late else RETRY_S):
                    await peer.retry.wait()

    async def _stream_to(self, peer: _Peer) -> None:
        """Send frames until the stream breaks."""
        channel = self._channel_for(peer.name)
        try:
            call: _Call = channel.stream_stream(METHOD)()
            try:
                async with asyncio.timeout(HELLO_S):
                    await call.write(_hello(self._name, peer.name, self._cluster_id))
                    answer = await call.read()
                if not isinstance(answer, bytes):  # end of stream
                    raise _Broken("refused")
                _check_hello(answer, peer.name, self._name, self._cluster_id)
                tcp = await self._tcp_of(peer, call)
                try:
                    await self._pump(peer, call, call.write if tcp is None else tcp.write)
                finally:
                    if tcp is not None:
                        tcp.abort()
            finally:
                call.cancel()
        finally:
            await channel.close(None)

    async def _tcp_of(self, peer: _Peer, call: _Call) -> TcpStream | None:
        """Return a connection to the peer's TCP port. None: frames go over gRPC."""
        metadata = dict(await call.initial_metadata())
        port, key = metadata.get(PORT_METADATA, ""), metadata.get(KEY_METADATA)
        if not isinstance(port, str) or not isinstance(key, bytes):
            return None
        loop = asyncio.get_running_loop()
        if loop.time() < peer.tcp_retry_s:
            return None
        # While this waits, the peer hears nothing, and must not take that for silence.
        limit_s = min(CONNECT_S, self._silence_s / 4)
        complaints = self._complaints
        tcp = await self._tcp.reach(
            peer.name, _port_of(port), key, call.cancel, complaints, limit_s
        )
        if tcp is None:
            peer.tcp_retry_s = loop.time() + RETRY_TCP_S
        return tcp

    async def _pump(self, peer: _Peer, call: _Call, write: _Write) -> None:
        loop = asyncio.get_running_loop()
        peer.heard_at_s = loop.time()
        self._set_up(peer, up=True)
        writing = loop.create_task(self._write(peer, write))
        ending = loop.create_task(call.read())  # the peer sends nothing: it ends with the stream
        try:
            await asyncio.wait({writing, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, ending):
                task.cancel()
            results = await asyncio.gather(writing, ending, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        raise _Broken("ended by the peer")

    async def _write(self, peer: _Peer, write: _Write) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    await peer.wake.wait()
            if loop.time() - peer.heard_at_s > self._silence_s:
                raise _Broken("silence")
            if len(peer.frames) > QUEUE_FRAMES_MAX:
                raise _Broken("the peer does not read")
            try:
                async with asyncio.timeout(self._silence_s):
                    await write(peer.take_frames())
            except TimeoutError:
                raise _Broken("the peer does not read") from None
            except OSError as error:
                raise _Broken(str(error)) from None

    def _set_up(self, peer: _Peer, *, up: bool) -> None:
        peer.up = up
        peer.frames.clear()
        peer.lazy.clear()
        self._enqueue(peer, FrameKind.RELEASE, msgpack.packb(astuple(self._release)))
        self._on_up(peer.name, up)

    # Inbound

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of METHOD."""
        if handler_call_details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(
        self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        if not self._running:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting or stopping")
        try:
            peer = await self._greet(context)
        except BadRaftMessage as error:
            self._complaints.log("", "refused a link", peer=context.peer(), error=str(error))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"link from {peer.name} at {context.peer()}")
        expected = self._tcp.expect(functools.partial(self._process_tcp, peer, task))
        try:
            await self._process_stream(peer, task, context, expected)
        finally:
            if self._newest.get(peer.name) is task:
                del self._newest[peer.name]
            if expected is not None:
                expected.end()

    async def _process_stream(
        self,
        peer: _Peer,
        task: asyncio.Task[Any],
        context: grpc.aio.ServicerContext[bytes, bytes],
        expected: ExpectedConnection | None,
    ) -> None:
        """Process a stream's frames until it ends, after the end of the one before."""
        self._newest[peer.name] = task
        older = self._inbound.pop(peer.name, None)
        if older is not None:
            text = "a second link of a peer ended its first"
            links = {"first": older.get_name(), "second": task.get_name()}
            self._complaints.log(f"second {peer.name}", text, peer_name=peer.name, **links)
            older.cancel()  # before the first frame of this one, so that no old frame comes later
        self._on_release(peer.name, FIRST_RELEASE)  # until it announces another
        if expected is not None and self._tcp.port is not None:
            port = str(self._tcp.port.port)
            metadata = ((PORT_METADATA, port), (KEY_METADATA, expected.key))
            await context.send_initial_metadata(metadata)
        # A newer stream must not cancel this write: gRPC can't abort a call whose first write was
        # cancelled, and the peer would wait for its end for ever.
        await context.write(_hello(self._name, peer.name, self._cluster_id))
        if self._newest.get(peer.name) is not task or not self._running:
            await context.abort(grpc.StatusCode.ABORTED, "superseded, or stopping")
        self._inbound[peer.name] = task
        try:
            await self._receive(peer, context)
        except BadRaftMessage as error:
            self._complain(peer, error)
            if self._inbound.get(peer.name) is task:
                del self._inbound[peer.name]  # else a newer stream cancels the abort
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if self._inbound.get(peer.name) is task and self._running:
                raise  # the peer ended it; else this node did, and must send that to the peer
            await context.abort(grpc.StatusCode.ABORTED, "superseded, or stopping")
        finally:
            if self._inbound.get(peer.name) is task:
                del self._inbound[peer.name]

    async def _greet(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> _Peer:
        try:
            async with asyncio.timeout(HELLO_S):
                hello: object = await context.read()
        except TimeoutError:
            raise BadRaftMessage(f"no hello within {HELLO_S:g} s") from None
        if not isinstance(hello, bytes):
            raise BadRaftMessage("no hello")
        name = _check_hello(hello, None, self._name, self._cluster_id)
        peer = self._peers.get(name)
        if peer is None:
            raise BadRaftMessage(f"{name!r} is not a peer")
        if self._identify is not None and self._identify(context) != name:
            raise BadRaftMessage(f"the certificate is not that of {name!r}")
        peer.retry.set()
        peer.heard_at_s = asyncio.get_running_loop().time()
        return peer

    async def _receive(self, peer: _Peer, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while True:
            data: object = await context.read()  # EOF is not bytes
            if not isinstance(data, bytes):
                return
            self._process_frames(peer, data)

    def _process_tcp(self, peer: _Peer, task: asyncio.Task[Any], data: bytes) -> bool:
        """Process a message of the connection of a stream. Return whether it may go on."""
        if self._newest.get(peer.name) is not task or not self._running:
            return False
        try:
            self._process_frames(peer, data)
        except BadRaftMessage as error:
            self._complain(peer, error)
            return False
        return True

    def _process_frames(self, peer: _Peer, data: bytes) -> None:
        """Process the frames of a message."""
        peer.heard_at_s = asyncio.get_running_loop().time()
        for kind, body in _frames(data):
            if kind is FrameKind.RAFT:
                self._on_raft(peer.name, decode(body))
            elif kind is FrameKind.RELEASE:
                self._on_release(peer.name, _parse_release(body))
            else:
                self._on_frame(peer.name, kind, unpack(body))

    def _complain(self, peer: _Peer, error: BadRaftMessage) -> None:
        more = {"peer_name": peer.name, "error": str(error)}
        self._complaints.log(peer.name, "broke off the link", **more)


def _port_of(text: str) -> int:
    """Return a port; 0 if it is none."""
    return int(text) if text.isdecimal() and len(text) <= 5 and int(text) < 1 << 16 else 0


def _hello(sender: str, receiver: str, cluster_id: str) -> bytes:
    data: bytes = msgpack.packb([VERSION, sender, receiver, cluster_id])
    return data


def _check_hello(data: bytes, sender: str | None, receiver: str, cluster_id: str) -> str:
    """Return the sender's name, after a check of version, receiver, cluster and sender."""
    match unpack(data):
        case (version, str(name), str(to), str(of), *_):
            if version != VERSION:
                raise BadRaftMessage(f"link version {version!r}; this program knows {VERSION}")
            if to != receiver or of != cluster_id or sender not in {None, name}:
                raise BadRaftMessage(f"hello from {name!r} to {to!r} of cluster {of!r}")
            return name
        case other:
            raise BadRaftMessage(f"hello {other!r:.80}")


def _parse_release(body: bytes) -> ProgramRelease:
    match unpack(body):
        case (str(program), int(level_min), int(level_max), *_) if 1 <= level_min <= level_max:
            return ProgramRelease(program[:PROGRAM_SIZE_MAX], level_min, level_max)
        case other:
            raise BadRaftMessage(f"release {other!r:.80}")


def _frames(data: bytes) -> list[tuple[FrameKind, bytes]]:
    frames = unpack(data)
    if not isinstance(frames, tuple):
        raise BadRaftMessage("not a list of frames")
    parsed: list[tuple[FrameKind, bytes]] = []
    for frame in frames:
        match frame:
            case (int(kind), bytes(body)):
                # A newer peer may send more kinds, for newer nodes.
                if kind in FrameKind.__members__.values():
                    parsed.append((FrameKind(kind), body))
            case _:
                raise BadRaftMessage(f"frame {frame!r:.80}")
    return parsed


def _brief(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
