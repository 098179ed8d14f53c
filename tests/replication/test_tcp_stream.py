"""Messages over TCP: who may send them, and what ends a connection."""

import asyncio
import contextlib
import gc
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from replication.shell import tcp_stream
from replication.shell.accepting import connections_of, listen_at
from replication.shell.tcp_stream import (
    BUFFER_BYTES,
    GREETINGS_MAX,
    HALF,
    KEY_SIZE,
    SIZE_BYTES,
    TcpPort,
    TcpStream,
)
from tests.waiting import until

DEADLINE_S = 60.0


STREAMS: list[TcpStream] = []
"""Of the test that runs."""


@pytest.fixture
async def port() -> AsyncIterator[TcpPort]:
    port = TcpPort("127.0.0.1", 0)
    await port.open()
    yield port
    await port.close()
    for stream in STREAMS:
        stream.abort()
    STREAMS.clear()
    await asyncio.sleep(0)  # both ends close their sockets
    gc.collect()


async def connect(_: str, port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
    await asyncio.get_running_loop().create_connection(protocol, "127.0.0.1", port)


async def stream_to(
    port: TcpPort, key: bytes, on_lost: Callable[[], object] = lambda: None
) -> TcpStream:
    async with asyncio.timeout(DEADLINE_S):
        stream = await TcpStream.connect(connect, "n2", port.port, key, on_lost)
    STREAMS.append(stream)
    return stream


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the connection ends."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def raw(port: TcpPort, data: bytes) -> bytes:
    """Send bytes on a new connection; return all that comes until its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(data)
    found = await rest_of(reader)
    await close(writer)
    return found


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def took(received: list[bytes]) -> Callable[[bytes], bool]:
    def take(data: bytes) -> bool:
        received.append(data)
        return True

    return take


async def test_messages_of_all_sizes_arrive_whole_and_in_order(port: TcpPort) -> None:
    received: list[bytes] = []
    stream = await stream_to(port, port.expect(took(received)).key)
    sizes = [0, 1, 3, 65_535, 5_000_000, 2, 300_000, *range(200)]
    sent = [bytes([at % 251]) * size for at, size in enumerate(sizes)]
    for each in sent:
        await stream.write(each)
    await until(lambda: len(received) == len(sent))
    assert received == sent


async def test_connection_without_the_key_is_closed_and_nothing_of_it_is_taken(
    port: TcpPort,
) -> None:
    received: list[bytes] = []
    expected = port.expect(took(received))
    message = (5).to_bytes(4, "little") + b"hello"
    assert await raw(port, bytes(HALF) + message) == b""
    assert await raw(port, expected.key[:HALF] + message) == b"", "messages before the answer"
    assert await raw(port, expected.key[HALF:]) == b"", "the half that proves the acceptor"
    assert not received
    lost: list[bool] = []
    await stream_to(port, expected.key, lambda: lost.append(True))
    await stream_to(port, expected.key)
    await until(lambda: bool(lost))  # a key is for one connection at a time


async def test_connection_that_is_not_expected_any_more_ends(port: TcpPort) -> None:
    received: list[bytes] = []
    lost: list[bool] = []
    open_, late = port.expect(took(received)), port.expect(took(received))
    stream = await stream_to(port, open_.key, lambda: lost.append(True))
    open_.end()
    late.end()
    await until(lambda: bool(lost))
    with pytest.raises(ConnectionError):
        await stream.write(b"lost")
    with pytest.raises(ConnectionError):
        await stream_to(port, late.key)
    assert not received


async def test_refused_message_and_a_size_above_the_limit_end_the_connection(port: TcpPort) -> None:
    lost: list[str] = []
    refused = await stream_to(
        port, port.expect(lambda data: data != b"bad").key, lambda: lost.append("refused")
    )
    for each in (b"good", b"bad", b"good"):
        await refused.write(each)
    await until(lambda: lost == ["refused"])
    key = port.expect(took([])).key
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(key[:HALF])
    assert await reader.readexactly(HALF) == key[HALF:]
    writer.write((tcp_stream.MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"))
    assert await rest_of(reader) == b""
    await close(writer)


async def test_silent_connections_do_not_keep_a_peer_out(
    port: TcpPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = [
        await asyncio.open_connection("127.0.0.1", port.port) for _ in range(GREETINGS_MAX * 2)
    ]
    received: list[bytes] = []
    stream = await stream_to(port, port.expect(took(received)).key)
    await stream.write(b"here")
    await until(lambda: received == [b"here"])
    assert await rest_of(opened[0][0]) == b"", "the oldest ones are closed"
    monkeypatch.setattr(tcp_stream, "GREETING_S", 0.01)
    assert await raw(port, b"") == b"", "too late"
    for _, writer in opened:
        await close(writer)


def test_messages_that_have_waited_do_not_hold_the_event_loop() -> None:
    message = (1_000).to_bytes(SIZE_BYTES, "little") + bytes(1_000)
    turns: list[int] = []

    async def run() -> None:
        port = TcpPort("127.0.0.1", 0)
        await port.open()
        received: list[bytes] = []
        key = port.expect(took(received)).key
        sender = socket.socket()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        await asyncio.get_running_loop().run_in_executor(
            None, sender.connect, ("127.0.0.1", port.port)
        )
        sender.sendall(key[:HALF])
        assert await asyncio.to_thread(sender.recv, HALF) == key[HALF:]
        sending = threading.Thread(target=sender.sendall, args=(message * 10_000,))
        sending.start()
        time.sleep(0.2)  # noqa: ASYNC251 - the event loop does nothing while bytes come
        while len(received) < 10_000:
            before = len(received)
            await asyncio.sleep(0)
            turns.append(len(received) - before)
        sending.join()
        sender.close()
        await port.close()

    uvloop.run(asyncio.wait_for(run(), DEADLINE_S))
    assert max(turns) < 1_000


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return socket.has_dualstack_ipv6()
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
async def test_port_at_a_wildcard_takes_ipv4_and_ipv6(host: str) -> None:
    port = TcpPort(host, 0)
    await port.open()
    received: list[bytes] = []
    for at in ("127.0.0.1", "::1"):
        with socket.create_connection((at, port.port)):
            pass
    stream = await stream_to(port, port.expect(took(received)).key)
    await stream.write(b"over IPv4")
    await until(lambda: received == [b"over IPv4"])
    stream.abort()
    await port.close()


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
async def test_port_at_a_wildcard_takes_ipv4_without_ipv6(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    port = TcpPort(host, 0)
    await port.open()
    with socket.create_connection(("127.0.0.1", port.port)):
        pass
    await port.close()


async def test_port_at_a_name_takes_connections_at_each_of_its_addresses_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["192.0.2.1", "127.0.0.1", "127.0.0.2"]  # the first is no machine's

    async def found(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    port = TcpPort("name", 0)
    await port.open()
    for at in ("127.0.0.1", "127.0.0.2"):
        with socket.create_connection((at, port.port)):
            pass
    with socket.create_server(("127.0.0.3", 0)) as other:
        addresses[:] = ["127.0.0.4", "127.0.0.3"]
        with pytest.raises(OSError, match="in use"):
            await TcpPort("name", int(other.getsockname()[1])).open()
    addresses[:] = ["192.0.2.1"]
    with pytest.raises(OSError, match="assign requested address"):
        await TcpPort("name", 0).open()
    await port.close()


async def test_connection_whose_bytes_nobody_confirms_ends_in_seconds(port: TcpPort) -> None:
    stream = await stream_to(port, port.expect(took([])).key)
    made = stream._connection.transport.get_extra_info("socket")
    limit_ms = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == tcp_stream.UNCONFIRMED_MS


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2),
    reason="CVE-2024-12254: there, asyncio's writelines never pauses; nodes run uvloop's",
)
async def test_sender_waits_for_a_peer_that_does_not_read() -> None:
    key, ended = secrets.token_bytes(KEY_SIZE), asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HALF)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(key[HALF:])
        await ended.wait()
        writer.transport.abort()

    async with await asyncio.start_server(peer, "127.0.0.1", 0) as server:
        at = server.sockets[0].getsockname()[1]
        stream = await TcpStream.connect(connect, "n2", at, key, lambda: None)

        async def send() -> None:
            while True:
                await stream.write(bytes(1 << 20))

        sending = asyncio.create_task(send())
        await until(lambda: not stream._connection.writable.is_set())
        waiting = stream._connection.transport.get_write_buffer_size()
        assert BUFFER_BYTES < waiting <= BUFFER_BYTES + (1 << 20) + SIZE_BYTES
        stream.abort()
        with pytest.raises(ConnectionError):
            await sending
        ended.set()


async def test_connection_that_came_as_its_port_closes_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, closing = TcpPort("127.0.0.1", 0), list[asyncio.Task[None]]()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def connections(_: socket.socket) -> AsyncIterator[socket.socket]:
        closing.append(asyncio.create_task(port.close()))  # runs before the greeting
        yield theirs
        await asyncio.Event().wait()

    monkeypatch.setattr(tcp_stream, "connections_of", connections)
    await port.open()
    await until(lambda: any(each.done() for each in closing))
    with ours:
        await until(lambda: theirs.fileno() == -1)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_that_wait_are_accepted_together(run: Any) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        [listening] = await listen_at("127.0.0.1", 0)
        clients = [socket.create_connection(listening.getsockname()) for _ in range(40)]
        counting, accepting = asyncio.create_task(count()), connections_of(listening)
        found = [await anext(accepting) for _ in clients]
        counting.cancel()
        assert not any(each.getblocking() for each in found)
        for each in (*found, *clients, listening):
            each.close()

    run(main())
    assert turns < 20


@pytest.mark.parametrize("turns", range(4))
async def test_connection_is_not_lost_if_the_wait_for_it_is_cancelled(turns: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        accepting: Any = connections_of(listening)
        waiting: asyncio.Task[Any] = asyncio.create_task(anext(accepting))
        await asyncio.sleep(0)
        with socket.create_connection(listening.getsockname()):
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            found: Any = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(found, asyncio.CancelledError):
                found, _ = listening.accept()
            assert isinstance(found, socket.socket)
            found.close()
        await accepting.aclose()
