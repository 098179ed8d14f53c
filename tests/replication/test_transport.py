"""The greeting between nodes: the identity that each accepts of the other; a peer out of reach.

Also the ends of a stream to a peer.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import grpc
import pytest

from deploy.local import free_ports
from replication.proto import replication_pb2 as pb
from replication.shell import transport as shell
from replication.shell.tcp_stream import TcpEnds, TcpPort
from replication.shell.transport import METHOD, VERSION, Dial, Transport
from tests.waiting import until
from timer.model.feature_level import ProgramRelease
from timer.model.units import ReplicaId

ME, OTHER, NEW = map(ReplicaId, (1, 2, 99))
DEADLINE_S = 60.0


@pytest.fixture
def transport() -> Transport:
    return transport_at()


def transport_at(level: int = 0, dial: Dial | None = None) -> Transport:
    """Of node n1, replica 1, among n2 and n3; without `dial` nothing is dialled."""

    def unused(*_: object) -> None:
        raise AssertionError

    return Transport(
        cluster_id="c",
        me=ME,
        name="n1",
        dials=dict.fromkeys(("n2", "n3"), dial or unused),  # type: ignore[arg-type]
        on_message=unused,
        on_connected=lambda replica: None,
        on_failure=unused,
        tcp=TcpEnds(None, mock.AsyncMock()),
        release=ProgramRelease("0.3.0", 2, 3),
        level=lambda: level,
    )


def hello(**fields: object) -> bytes:
    """Return a greeting of n2 to n1; `fields` say otherwise."""
    usual = {
        "version": VERSION,
        "cluster_id": "c",
        "sender": OTHER,
        "name": "n2",
        "receiver_name": "n1",
    }
    return pb.Hello(**usual | fields).SerializeToString()  # type: ignore[arg-type]


def test_peer_is_known_by_its_name_whatever_its_replica_id(transport: Transport) -> None:
    assert transport.check_hello(hello()) == ("n2", OTHER)
    transport.set_connected("n2", OTHER)
    assert transport.check_hello(hello(sender=NEW)) == ("n2", NEW), "replaced under its name"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 9}, "version = 9"),
        ({"cluster_id": "d"}, "cluster_id = 'd' of 'n2': must be 'c'"),
        ({"receiver_name": "n7"}, "receiver_name = 'n7'"),
        ({"name": "n7"}, "name = 'n7': not among the peers of 'n1'"),
        ({"name": "n1"}, "name = 'n1': not among the peers of 'n1'"),
        ({"sender": ME}, "is that of 'n1': a copy?"),
    ],
)
def test_stranger_is_refused_with_the_field(
    transport: Transport, fields: dict[str, object], why: str
) -> None:
    assert why in str(transport.check_hello(hello(**fields)))


def test_copy_of_a_data_directory_under_another_name_is_refused(transport: Transport) -> None:
    transport.set_connected("n2", OTHER)
    assert "is that of 'n2': a copy?" in str(transport.check_hello(hello(name="n3")))
    transport.set_connected("n2", NEW)
    assert transport.check_hello(hello(name="n3")) == ("n3", OTHER), "n2 is another replica by now"


def test_noise_is_no_greeting(transport: Transport) -> None:
    assert transport.check_hello(b"\xff\xff") == "damaged Hello"


@pytest.mark.parametrize(
    ("mine", "fields", "why"),
    [
        (0, {}, ""),
        (0, {"level": 4}, "feature level = 4 at 'n2': 'n1' of version 0.3.0 supports feature"),
        (0, {"level": 1}, "feature level = 1 at 'n2': 'n1' of version 0.3.0 supports feature"),
        (2, {"program": "0.2.0", "level_min": 1, "level_max": 2, "level": 2}, ""),
        (
            3,
            {"program": "0.2.0", "level_min": 1, "level_max": 2},
            "feature level = 3 at 'n1': 'n2' of version 0.2.0 supports feature levels 1 to 2",
        ),
        (2, {}, "feature level = 2 at 'n1': 'n2' of version 0.1 supports feature levels 1 to 1"),
    ],
)
def test_peer_of_other_feature_levels_is_refused_and_both_are_named(
    mine: int, fields: dict[str, object], why: str
) -> None:
    met = transport_at(mine).check_hello(hello(**fields))
    assert why in met if why else met == ("n2", OTHER)


def test_hello_announces_version_and_levels() -> None:
    said = pb.Hello.FromString(transport_at(2).hello("n2"))
    assert (said.program, said.level_min, said.level_max, said.level) == ("0.3.0", 2, 3, 2)


async def test_peer_that_stays_out_of_reach_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [port] = free_ports(1)
    monkeypatch.setattr(shell, "FAILING_S", 0.3)
    transport = transport_at(dial=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    transport.start()
    await asyncio.sleep(0.2)
    assert not caplog.records
    await asyncio.sleep(2)
    await transport.stop()
    lines = {(each.getMessage(), each.peer_name) for each in caplog.records}  # type: ignore[attr-defined]
    assert lines == {("no stream to a peer", name) for name in ("n2", "n3")}
    assert len(caplog.records) == 2
    assert "refused" in caplog.records[0].error  # type: ignore[attr-defined]


async def test_log_names_dns_if_there_is_no_connection_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shell, "FAILING_S", 0.0)
    monkeypatch.setattr(shell, "HELLO_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        transport = transport_at(dial=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        transport.start()
        await until(lambda: caplog.records)
        await transport.stop()
    assert caplog.records[0].error == shell.NO_CONNECTION  # type: ignore[attr-defined]


# ---- the end of a stream


class Link:
    """The stream of n1 to n2, whose channels `dial` makes."""

    def __init__(self, dial: Dial, tcp: TcpEnds) -> None:
        self.ups: list[ReplicaId] = []
        self.errors: list[BaseException] = []
        self.transport = Transport(
            cluster_id="c",
            me=ME,
            name="n1",
            dials={"n2": dial},
            on_message=lambda *_: None,
            on_connected=self.ups.append,
            on_failure=self.errors.append,
            tcp=tcp,
        )

    @property
    def waits(self) -> bool:
        """Whether messages wait for the one that is being written."""
        return bool(self.transport._out["n2"]._queue)


async def serving(greet: Any) -> tuple[grpc.aio.Server, int]:
    """Return a server of the peers' method, and its port."""
    service, method = METHOD.strip("/").split("/")
    handler: Any = grpc.stream_stream_rpc_method_handler(greet)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    at = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, at


def greeting(port: TcpPort, take: Callable[[bytes], bool], beside: Callable[[bytes], Any]) -> Any:
    """Return a peer with a TCP port. `take`: gets what comes there; `beside`: one gRPC message."""

    async def greet(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        await anext(messages)
        yield hello(tcp_port=port.port, tcp_key=port.expect(take).key)
        beside(await anext(messages))
        await asyncio.Event().wait()

    return greet


async def connected(_: str, at: int, protocol: Callable[[], asyncio.Protocol]) -> None:
    await asyncio.get_running_loop().create_connection(protocol, "127.0.0.1", at)


async def test_stream_that_leaves_grpc_while_a_message_is_written_goes_on_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "TCP_RETRY_S", 0.0)
    received: list[bytes] = []
    port = TcpPort("127.0.0.1", 0)
    await port.open()
    is_writing = asyncio.Event()
    attempts = 0

    async def connect(_: str, at: int, protocol: Callable[[], asyncio.Protocol]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ConnectionRefusedError
        await is_writing.wait()
        await connected(_, at, protocol)

    def take(data: bytes) -> bool:
        received.append(data)
        return True

    async def greet(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        """Answer the Hello, and read nothing more: flow control then stops the writer."""
        await anext(messages)
        yield hello(tcp_port=port.port, tcp_key=port.expect(take).key)
        await asyncio.Event().wait()

    server, at = await serving(greet)
    link = Link(lambda: grpc.aio.insecure_channel(f"127.0.0.1:{at}"), TcpEnds(None, connect))
    link.transport.start()
    await until(lambda: len(link.ups) == 1)
    link.transport.send(OTHER, bytes(32 << 20))
    await until(lambda: not link.waits)
    link.transport.send(OTHER, b"lost with the stream")
    await asyncio.sleep(0)
    assert link.waits, "the large message is being written"
    is_writing.set()
    await until(lambda: len(link.ups) == 2)
    link.transport.send(OTHER, b"over TCP")
    await until(lambda: received == [b"over TCP"])
    assert not link.errors
    await link.transport.stop()
    await server.stop(None)
    await port.close()


async def test_message_that_overtakes_goes_beside_the_connection_that_is_full() -> None:
    beside: list[bytes] = []
    over_tcp: list[bytes] = []
    port = TcpPort("127.0.0.1", 0)
    await port.open()

    def take(data: bytes) -> bool:
        over_tcp.append(data)
        return True

    server, at = await serving(greeting(port, take, beside.append))
    link = Link(lambda: grpc.aio.insecure_channel(f"127.0.0.1:{at}"), TcpEnds(None, connected))
    link.transport.start()
    await until(lambda: bool(link.ups))
    link.transport.send(OTHER, b"in order")
    link.transport.overtake(OTHER, b"overtakes")
    await until(lambda: bool(beside and over_tcp))
    assert (over_tcp, beside) == ([b"in order"], [b"overtakes"])
    await link.transport.stop()
    await server.stop(None)
    await port.close()


async def test_large_message_has_more_time_on_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "WRITE_TIMEOUT_S", 0.0)
    sizes: list[int] = []
    port = TcpPort("127.0.0.1", 0)
    await port.open()

    def take(data: bytes) -> bool:
        sizes.append(len(data))
        return True

    server, at = await serving(greeting(port, take, lambda _: None))
    link = Link(lambda: grpc.aio.insecure_channel(f"127.0.0.1:{at}"), TcpEnds(None, connected))
    link.transport.start()
    await until(lambda: bool(link.ups))
    link.transport.send(OTHER, bytes(32 << 20))
    link.transport.send(OTHER, bytes(1))
    await until(lambda: len(sizes) == 2 or len(link.ups) > 1)
    assert sizes == [32 << 20, 1]
    await link.transport.stop()
    await server.stop(None)
    await port.close()


class Call:
    """A call and its channel. Its second write fails, and then something is done."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._answers = [hello()]
        self._writes = 0

    def stream_stream(self, _: str) -> Callable[[], "Call"]:
        return lambda: self

    async def write(self, _: bytes) -> None:
        self._writes += 1
        if self._writes == 2:
            self._then()
            raise ConnectionError("broken")

    async def read(self) -> bytes:
        if not self._answers:
            await asyncio.Event().wait()
        return self._answers.pop()

    def cancel(self) -> None:
        """Nothing waits for it."""

    async def close(self) -> None:
        """There is nothing to close."""


async def test_stop_ends_a_stream_that_has_just_broken() -> None:
    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        stopping.append(asyncio.create_task(link.transport.stop()))

    dial: Any = lambda: Call(stop)  # noqa: E731
    link = Link(dial, TcpEnds(None, mock.AsyncMock()))
    link.transport.start()
    await until(lambda: len(link.ups) == 1)
    link.transport.send(OTHER, b"lost")
    await until(lambda: bool(stopping))
    done, _ = await asyncio.wait(stopping, timeout=DEADLINE_S)
    assert done
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_error_of_a_stream_that_no_peer_causes_is_reported() -> None:
    dial = mock.Mock(side_effect=ValueError("planted"))
    link = Link(dial, TcpEnds(None, mock.AsyncMock()))
    link.transport.start()
    await until(lambda: link.errors == [dial.side_effect])


async def test_peer_is_silent_only_while_messages_go_to_it(transport: Transport) -> None:
    outbound = transport._out["n2"]
    with mock.patch.object(asyncio.get_running_loop(), "time") as time:
        for at_s in (100.0, 160.0, 161.5):  # what was sent at 100 needed no answer
            time.return_value = at_s
            outbound._check_silence()
        time.return_value = 162.5
        with pytest.raises(TimeoutError, match=r"2\.5 s"):
            outbound._check_silence()


async def test_silence_is_noticed_with_long_heartbeats(transport: Transport) -> None:
    outbound = transport._out["n2"]
    with mock.patch.object(asyncio.get_running_loop(), "time") as time:
        for at_s in (100.0, 105.0):
            time.return_value = at_s
            outbound._check_silence()
        time.return_value = 110.0
        with pytest.raises(TimeoutError, match=r"5\.0 s"):
            outbound._check_silence()
