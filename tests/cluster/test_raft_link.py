"""The wire: what the codec refuses, and links between two nodes over loopback."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control import raft_link
from cluster.control.raft_codec import (
    MESSAGE_SIZE_MAX,
    REGULAR,
    BadRaftMessage,
    RaftMessage,
    decode,
    encode,
)
from cluster.control.raft_link import (
    CHANNEL_OPTIONS,
    KEY_METADATA,
    METHOD,
    PORT_METADATA,
    VERSION,
    FrameKind,
    RaftLink,
)
from deploy.local import free_ports
from replication.shell.tcp_stream import HALF, Receive, TcpEnds, TcpPort, TcpStream
from tests.waiting import until
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease

DEADLINE_S = 60.0
Call: TypeAlias = grpc.aio.StreamStreamCall[Any, Any]
MESSAGES: list[RaftMessage] = [
    {"type": "request_vote", "term": 3, "last_log_index": 9, "last_log_term": 2},
    {"type": "response_vote", "term": 3},
    {
        "type": "append_entries",
        "term": 3,
        "commit_index": 8,
        "prevLogIdx": 9,
        "prevLogTerm": 2,
        "entries": ((b"\0command", 10, 3), (b"\1", 11, 3)),
    },
    {
        "type": "append_entries",
        "term": 3,
        "commit_index": 8,
        "prevLogIdx": None,
        "prevLogTerm": None,
        "entries": (),
    },
    {"type": "append_entries", "term": 3, "commit_index": 8, "serialized": (b"x", True, False)},
    {"type": "append_entries", "term": 3, "commit_index": 8, "serialized": None},
    {"type": "next_node_idx", "next_node_idx": 4, "reset": True, "success": False},
    {"type": "apply_command", "command": b"\0command", "request_id": 5},
    {"type": "apply_command_response", "request_id": 5, "log_idx": 7, "log_term": 3},
    {"type": "apply_command_response", "request_id": 5, "error": 2},
    {"type": "timeout_now", "term": 3},
]
APPEND = MESSAGES[2]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: str(message["type"]))
def test_message_survives_the_wire(message: RaftMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: str(message["type"]))
def test_message_cut_anywhere_or_with_a_wrong_field_is_refused(message: RaftMessage) -> None:
    data = encode(message)
    for size in range(len(data)):
        with pytest.raises(BadRaftMessage):
            decode(data[:size])
    for name in message:
        wrong: object
        for wrong in ("x", -1, 1.5, {}, [[]], 1 << 63):
            with pytest.raises(BadRaftMessage):
                decode(msgpack.packb(message | {name: wrong}))
    with pytest.raises(BadRaftMessage):
        decode(msgpack.packb(message | {"more": 1}))


@pytest.mark.parametrize(
    "change",
    [
        {"entries": ((b"\2change of membership", 10, 3),)},
        {"entries": ((b"\3code version", 10, 3),)},
        {"entries": ((b"", 10, 3),)},
        {"entries": ((b"\0" * ((1 << 16) + 1), 10, 3),)},
        {"entries": ((b"\0", 10),)},
        {"transmission": "start", "data": b"pickle"},
        {"serialized": (b"x", True, False)},
    ],
    ids=str,
)
def test_what_pysyncobj_would_unpickle_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadRaftMessage):
        decode(encode(APPEND | change))
    with pytest.raises(BadRaftMessage):
        decode(encode({"type": "apply_command", "command": b"\2change of membership"}))


@given(st.binary(max_size=200))
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(BadRaftMessage):
        decode(junk)


def test_oversized_message_is_refused_unread() -> None:
    with pytest.raises(BadRaftMessage, match="bytes"):
        decode(bytes(MESSAGE_SIZE_MAX + 1))


@dataclass
class End:
    """One node's link, and what it heard."""

    name: str
    address: str
    peers: dict[str, str]
    cluster_id: str = "test"
    silence_s: float = 3600  # what breaks here breaks by itself
    tcp: TcpPort | None = None
    dialled: list[Any] = field(default_factory=list)
    """The ends of its connections over TCP."""
    no_tcp: list[Exception] = field(default_factory=list)
    """Errors of the next connections over TCP."""
    tcp_hangs: bool = False
    raft: list[tuple[str, RaftMessage]] = field(default_factory=list)
    frames: list[tuple[str, FrameKind, object]] = field(default_factory=list)
    ups: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = RaftLink(
            name=self.name,
            cluster_id=self.cluster_id,
            peers=self.peers,
            channel_for=lambda peer: channel_to(self.peers[peer]),
            on_raft=lambda peer, message: self.raft.append((peer, message)),
            on_up=lambda _, up: self.ups.append(up),
            on_frame=lambda peer, kind, body: self.frames.append((peer, kind, body)),
            silence_s=self.silence_s,
            tcp=TcpEnds(self.tcp, self.connect),
        )

    async def connect(self, _: str, port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
        if self.no_tcp:
            raise self.no_tcp.pop()
        if self.tcp_hangs:
            await asyncio.Event().wait()
        self.dialled.append(protocol())
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.dialled[-1], "127.0.0.1", port)

    async def start(self) -> None:
        if self.tcp is not None:
            await self.tcp.open()
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.server.add_generic_rpc_handlers([self.link])
        self.server.add_insecure_port(self.address)
        await self.server.start()
        self.link.start()

    async def stop(self) -> None:
        await self.server.stop(None)
        await self.link.stop()
        if self.tcp is not None:
            await self.tcp.close()


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


@contextlib.asynccontextmanager
async def linked(
    *, only_b: bool = False, b_cluster: str = "test", tcp: bool = False
) -> AsyncIterator[tuple[End, End]]:
    a, b = (f"127.0.0.1:{port}" for port in free_ports(2))
    ports = [TcpPort("127.0.0.1", 0) if tcp else None for _ in range(2)]
    ends = (
        End("a", a, {"b": b}, tcp=ports[0]),
        End("b", b, {"a": a}, cluster_id=b_cluster, tcp=ports[1]),
    )
    started = ends[1:] if only_b else ends
    for end in started:
        await end.start()
    try:
        yield ends
    finally:
        for end in started:
            await end.stop()


@pytest.mark.parametrize("tcp", [False, True])
async def test_frames_arrive_in_order_and_lazy_ones_ride_along(*, tcp: bool) -> None:
    async with linked(tcp=tcp) as (a, b):
        await until(lambda: a.link.is_up("b"))
        a.link.send("b", FrameKind.REPORT, (1,), lazily=True)
        for term in range(100):
            a.link.send_raft("b", encode({"type": "timeout_now", "term": term}))
        await until(lambda: len(b.raft) == 100 and len(b.frames) == 1)
        assert [message["term"] for _, message in b.raft] == list(range(100))
        assert b.frames == [("a", FrameKind.REPORT, (1,))]
        # Alone, a lazy frame goes when the next one of its kind comes, which replaces it.
        a.link.send("b", FrameKind.REPORT, (2,), lazily=True)
        a.link.send("b", FrameKind.REPORT, (3,), lazily=True)
        await until(lambda: len(b.frames) == 2)
        assert b.frames[1] == ("a", FrameKind.REPORT, (3,))
        a.link.send("b", FrameKind.REPORT, (4,), lazily=True)
        a.link.send("b", FrameKind.REPORT, (5,))
        a.link.send("b", FrameKind.ASK, (6,))
        await until(lambda: ("a", FrameKind.ASK, (6,)) in b.frames)
        assert b.frames[2:] == [("a", FrameKind.REPORT, (5,)), ("a", FrameKind.ASK, (6,))]


@pytest.mark.parametrize("tcp", [False, True])
async def test_more_than_one_message_holds_goes_in_several(*, tcp: bool) -> None:
    async with linked(tcp=tcp) as (a, b):
        await until(lambda: a.link.is_up("b") and b.link.is_up("a"))
        entries = [(REGULAR + b"x" * 3_000, number, 1) for number in range(1, 1_001)]
        first = {"type": "append_entries", "term": 1, "commit_index": 1}
        for start in range(0, 1_000, 20):  # a follower that lacks three megabytes
            before = {"prevLogIdx": start, "prevLogTerm": 1}
            some = entries[start : start + 20]
            a.link.send_raft("b", encode({**first, **before, "entries": some}))
        a.link.send("b", FrameKind.REPORT, ("rides along",), lazily=True)
        await until(lambda: len(b.raft) == 50 and len(b.frames) == 1)
        assert [m["prevLogIdx"] for _, m in b.raft] == [20 * n for n in range(50)]
        assert (a.ups, b.ups) == ([True], [True]), "no stream broke"


@pytest.mark.parametrize("tcp", [False, True])
async def test_link_breaks_at_once_with_its_peer_and_is_rebuilt(*, tcp: bool) -> None:
    async with linked(tcp=tcp) as (a, b):
        await until(lambda: a.link.is_up("b"))
        await b.stop()
        await until(lambda: not a.link.is_up("b"))
        b.__post_init__()
        await b.start()
        await until(lambda: a.link.is_up("b") and b.link.is_up("a"))
        assert a.ups == [True, False, True]
        a.link.send("b", FrameKind.ASK, ("again",))
        await until(lambda: b.frames == [("a", FrameKind.ASK, ("again",))])


async def test_peer_that_ends_each_stream_is_dialled_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dials = list[float]()
    async with linked(only_b=True) as (a, _):

        async def end_soon(peer: Any, *_: Any) -> None:
            dials.append(asyncio.get_running_loop().time())
            a.link._set_up(peer, up=True)

        monkeypatch.setattr(a.link, "_pump", end_soon)
        a.link.start()
        await until(lambda: len(dials) == 4)
        await a.link.stop()
    assert dials[3] - dials[0] >= 3 * raft_link.RETRY_S


async def test_frames_leave_grpc_if_the_peers_port_can_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(tcp=True) as (a, b):
        await until(lambda: a.link.is_up("b") and len(a.dialled) == 1)
        a.dialled[0].transport.abort()
        await until(lambda: a.ups == [True, False, True])
        a.no_tcp.append(ConnectionRefusedError("no such port"))
        a.dialled[1].transport.abort()
        await until(lambda: a.ups == [True, False] * 2 + [True])
        a.link.send("b", FrameKind.ASK, ("over gRPC",))
        await until(lambda: b.frames == [("a", FrameKind.ASK, ("over gRPC",))])
        a.link._enqueue(a.link._peers["b"], FrameKind.RAFT, b"no message")
        await until(lambda: a.ups == [True, False] * 3 + [True])
        assert len(a.dialled) == 2, "no attempt delays the next stream"
    [told] = [each for each in caplog.records if "no TCP to a peer" in each.message]
    assert told.__dict__["error"] == "no such port"


async def test_port_that_a_firewall_hides_does_not_look_like_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raft_link, "CONNECT_S", 3600)
    async with linked(only_b=True, tcp=True) as (a, b):
        a.tcp_hangs, a.silence_s = True, 1.0
        a.__post_init__()
        a.link.start()
        heard = b.link._peers["a"]
        await until(lambda: heard.heard_at_s > 0)
        assert a.ups == [], "the hello was heard, before any frame"
        await until(lambda: a.ups == [True])
        await a.link.stop()


async def test_bad_message_over_tcp_breaks_the_link(caplog: pytest.LogCaptureFixture) -> None:
    async with linked(tcp=True) as (a, b):
        await until(lambda: a.link.is_up("b"))
        a.link._enqueue(a.link._peers["b"], FrameKind.RAFT, b"no message")
        a.link._enqueue(a.link._peers["b"], FrameKind.ASK, msgpack.packb("behind it"))
        await until(lambda: a.ups == [True, False, True])
        assert (b.raft, b.frames) == ([], [])
    assert [each for each in caplog.records if each.message == "broke off the link"]


async def test_connection_of_an_older_stream_is_refused_its_frames() -> None:
    async with linked(only_b=True, tcp=True) as (a, b), channel_to(b.address) as channel:
        older, old_stream, old_receive = await way_to(b, a, channel)
        await old_stream.write(frame(FrameKind.ASK, 1))
        await until(lambda: len(b.frames) == 1)
        _, stream, receive = await way_to(b, a, channel)
        assert not old_receive(frame(FrameKind.ASK, "of the older"))
        assert await older.code() is grpc.StatusCode.ABORTED
        await stream.write(frame(FrameKind.ASK, 2))
        await until(lambda: len(b.frames) == 2)
        stopping = asyncio.ensure_future(b.link.stop())
        await asyncio.sleep(0)
        assert not receive(frame(FrameKind.ASK, "to a node that stops"))
        await stopping
        assert [body for _, _, body in b.frames] == [1, 2]


async def test_stream_and_its_connection_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_link, "KEEPALIVE_S", 3600.0)  # no write fails
    async with linked(tcp=True) as (a, b):
        await until(lambda: a.link.is_up("b") and b.link.is_up("a"))
        a.dialled[0].transport.abort()
        await until(lambda: a.ups == [True, False, True])
    async with linked(only_b=True, tcp=True) as (a, b), channel_to(b.address) as channel:
        ended = asyncio.Event()
        call, _, _ = await way_to(b, a, channel, ended.set)
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()


async def test_write_to_a_connection_that_has_ended_breaks_the_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(tcp=True) as (a, _):
        await until(lambda: a.link.is_up("b"))
        a.dialled[0].on_lost = lambda: None  # as if it had ended before the link was up
        a.dialled[0].transport.abort()
        await until(lambda: a.ups == [True, False, True])
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


async def greeted(channel: grpc.aio.Channel, *more: str) -> Call:
    """Return a new stream of node a to node b after their hellos. `more`: fields of its hello."""
    call: Call = channel.stream_stream(METHOD)()
    await call.write(msgpack.packb([VERSION, "a", "b", "test", *more]))
    await call.read()
    return call


async def way_to(
    b: End, a: End, channel: grpc.aio.Channel, on_lost: Callable[[], object] = lambda: None
) -> tuple[Call, TcpStream, Receive]:
    """Return a stream from `a` to `b`, its connection, and the method that gets its messages."""
    call = await greeted(channel)
    told = dict(await call.initial_metadata())
    port, key = int(told[PORT_METADATA]), told[KEY_METADATA]
    assert isinstance(key, bytes)
    assert b.tcp is not None
    stream = await TcpStream.connect(a.connect, "b", port, key, on_lost)
    return call, stream, b.tcp._expected[key[:HALF]].receive


def frame(kind: FrameKind, body: object) -> bytes:
    data: bytes = msgpack.packb([[kind, msgpack.packb(body)]])
    return data


async def test_peer_that_does_not_read_is_cut_off() -> None:
    async def greet(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.write(raft_link._hello("b", "a", "test"))
        await asyncio.Event().wait()

    class Deaf(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
            return grpc.stream_stream_rpc_method_handler(greet)

    a, b = (f"127.0.0.1:{port}" for port in free_ports(2))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Deaf()])
    server.add_insecure_port(b)
    await server.start()
    end = End("a", a, {"b": b}, silence_s=1.0)
    await end.start()
    peer = end.link._peers["b"]
    try:
        await until(lambda: end.ups == [True])
        peer.heard_at_s += DEADLINE_S  # it speaks all the time
        for _ in range(1_000):
            end.link.send("b", FrameKind.REPORT, (b"x" * 60_000,))
        await until(lambda: end.ups[:2] == [True, False])
        assert FrameKind.REPORT not in [kind for kind, _ in peer.frames]  # a new stream begins
    finally:
        await end.stop()
        await server.stop(None)


def test_peer_that_is_only_reached_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As in a partition of one direction: each link is accepted, and breaks for want of a word."""

    async def scenario() -> None:
        async with linked(only_b=True) as (a, b):
            a.silence_s = 0.01
            a.__post_init__()
            a.link.start()
            await b.link.stop()  # b answers, and sends nothing of its own
            b.link._running = True
            await until(lambda: a.ups.count(False) == 3)
            await a.link.stop()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    [told] = [each for each in caplog.records if each.message == "the link broke"]
    assert told.levelname == "INFO"
    # On a busy machine, a write may take as long as the silence that is allowed.
    assert told.__dict__["error"] in {"silence", "the peer does not read"}


async def test_node_of_another_cluster_is_refused() -> None:
    async with linked(b_cluster="other") as (a, b):
        for end, peer in ((a, b), (b, a)):
            call: Call = channel_to(peer.address).stream_stream(METHOD)()
            await call.write(msgpack.packb([1, end.name, peer.name, end.cluster_id]))
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (a.ups, b.ups) == ([], [])


@pytest.mark.parametrize(
    "hello",
    [b"", b"junk", [VERSION, "x", "b", "test"], [VERSION, "b", "b", "test"],
     [VERSION, "a", "c", "test"], [VERSION + 1, "a", "b", "test"]],
    ids=str,
)  # fmt: skip
async def test_stranger_is_refused(hello: bytes | list[object]) -> None:
    async with linked(only_b=True) as (_, b), channel_to(b.address) as channel:
        call: Call = channel.stream_stream(METHOD)()
        await call.write(hello if isinstance(hello, bytes) else msgpack.packb(hello))
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_who_says_nothing_is_refused_and_that_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(raft_link, "HELLO_S", 0.05)
    async with linked(only_b=True) as (_, b), channel_to(b.address) as channel:
        call: Call = channel.stream_stream(METHOD)()
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    # grpc.aio hands late events of an earlier test's loop to this one's, and asyncio logs that.
    ours = [record for record in caplog.records if record.name == raft_link.__name__]
    assert [record.levelname for record in ours] == ["WARNING"]


async def test_junk_on_a_stream_breaks_it_off() -> None:
    async with linked(only_b=True) as (_, b):
        for junk in (b"\xc1", msgpack.packb([[0, b"no message"]]), msgpack.packb([7])):
            async with channel_to(b.address) as channel:
                call = await greeted(channel)
                await call.write(junk)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert b.raft == []


async def test_peer_that_announces_nothing_is_of_the_first_release_until_it_does() -> None:
    async with linked(only_b=True) as (_, b), channel_to(b.address) as channel:
        seen: list[tuple[str, ProgramRelease]] = []
        b.link._on_release = lambda peer, release: seen.append((peer, release))
        call = await greeted(channel, "of a later release")
        release = msgpack.packb(["0.9.0", 1, 7, "of a later release"])
        await call.write(msgpack.packb([[FrameKind.RELEASE, release]]))
        await until(lambda: len(seen) == 2)
        assert seen == [("a", FIRST_RELEASE), ("a", ProgramRelease("0.9.0", 1, 7))]
        for bad in (["0.9.0", 0, 1], ["0.9.0", 2, 1], [1, 1, 2], ["0.9.0", 1], 5):
            frame = msgpack.packb([[FrameKind.RELEASE, msgpack.packb(bad)]])
            async with channel_to(b.address) as other:
                broken = await greeted(other)
                await broken.write(frame)
                assert await broken.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_kind_of_frame_is_skipped() -> None:
    async with linked(only_b=True) as (_, b), channel_to(b.address) as channel:
        call = await greeted(channel)
        await call.write(msgpack.packb([[99, b""], [FrameKind.ASK, msgpack.packb(1)]]))
        await until(lambda: b.frames == [("a", FrameKind.ASK, 1)])


async def test_newer_stream_of_a_peer_ends_the_older(caplog: pytest.LogCaptureFixture) -> None:
    async with linked(only_b=True) as (_, b), channel_to(b.address) as channel:
        calls = [await greeted(channel) for _ in range(2)]
        assert await calls[0].code() is grpc.StatusCode.ABORTED
        await calls[1].write(msgpack.packb([[FrameKind.ASK, msgpack.packb(1)]]))
        await until(lambda: b.frames == [("a", FrameKind.ASK, 1)])
    [told] = [each for each in caplog.records if "ended its first" in each.message]
    assert told.__dict__["first"].startswith("link from a at ipv4:127.0.0.1:")


async def test_streams_opened_at_once_end_but_for_one() -> None:
    async def end(call: Call) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()

    async with linked(only_b=True) as (_, b), channel_to(b.address) as channel:
        for _ in range(50):
            calls: list[Call] = [channel.stream_stream(METHOD)() for _ in range(4)]
            for call in calls:
                await call.write(msgpack.packb([VERSION, "a", "b", "test"]))
            ends = {asyncio.create_task(end(call)) for call in calls}
            async with asyncio.timeout(DEADLINE_S):
                for done in asyncio.as_completed([*ends]):
                    assert await done is grpc.StatusCode.ABORTED
                    if sum(task.done() for task in ends) == len(calls) - 1:
                        break
            for call in calls:
                call.cancel()
            await asyncio.gather(*ends)


class SlowAbort:
    """The context of a stream whose abort waits for `sent`."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = [msgpack.packb([VERSION, "a", "b", "test"]), *messages]
        self.aborting, self.sent = asyncio.Event(), asyncio.Event()
        self.greeted = asyncio.Event()
        self.aborted: grpc.StatusCode | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> object:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, _: bytes) -> None:
        self.greeted.set()

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        self.aborting.set()
        await self.sent.wait()
        self.aborted = code


async def test_newer_stream_does_not_cancel_the_abort_of_the_older() -> None:
    async with linked(only_b=True) as (_, b):
        wrong, newer = SlowAbort(b"\xc1"), SlowAbort()
        serving: list[asyncio.Task[None]] = []
        for context in (wrong, newer):
            context_: Any = context
            serving.append(asyncio.create_task(b.link._serve(None, context_)))
            async with asyncio.timeout(DEADLINE_S):
                await (wrong.aborting if context is wrong else newer.greeted).wait()
        wrong.sent.set()
        await asyncio.gather(*serving)
        assert wrong.aborted is grpc.StatusCode.INVALID_ARGUMENT
