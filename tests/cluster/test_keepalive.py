"""A peer that falls silent is detected: a client by its node, a node by its client."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Container, Iterable
from typing import Any

import grpc
import pytest

from cluster.files.standby_ports import Standby, Wait
from cluster.rpc.endpoints import PEER_OPTIONS, SERVER_OPTIONS
from cluster.rpc.handlers import PINGED
from cluster.settings.config import build_config
from deploy.local import free_ports
from tests.cluster.hosted import BASE
from tests.waiting import until
from timerclient import AsyncTimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.streams import node_channel

CLIENT = """
import asyncio, sys
from timerclient import AsyncTimerClient

async def main():
    async with AsyncTimerClient(sys.argv[1]).consumer("t", "g") as consumer:
        print("consumes", flush=True)
        await consumer.receive()

asyncio.run(main())
"""


@pytest.mark.parametrize("options", [PEER_OPTIONS, node_channel.CHANNEL_OPTIONS])
def test_name_of_a_node_is_looked_up_again_soon(options: tuple[tuple[str, int], ...]) -> None:
    """A pod has another address after its restart. gRPC would wait for 20 and for 30 s."""
    times_ms = dict(options)
    assert times_ms["grpc.min_reconnect_backoff_ms"] <= 5_000
    assert times_ms["grpc.dns_min_time_between_resolutions_ms"] <= 1_000


OFTEN = {"grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms"}
TIMES = OFTEN | {"grpc.http2.ping_timeout_ms"}


def soon(
    options: Iterable[tuple[str, Any]], times: Container[str] = TIMES
) -> list[tuple[str, Any]]:
    """Return options with a tenth of the times that are named."""
    return [(name, value // 10 if name in times else value) for name, value in options]


class Consuming(rpc.ConsumeServiceServicer, rpc.AdminServiceServicer):
    """Opens consumers that get nothing, and notes their end."""

    def __init__(self) -> None:
        self.opened = 0
        self.gone = asyncio.Event()

    async def GetStatus(self, *_: object) -> pb.GetStatusResponse:  # noqa: N802
        return pb.GetStatusResponse(nodes=[pb.NodeStatus(role="leader", serving=True, epoch=1)])

    async def Consume(  # noqa: N802
        self, requests: AsyncIterator[pb.ConsumeRequest], _: object
    ) -> AsyncIterator[pb.ConsumeResponse]:
        self.opened += 1
        yield pb.ConsumeResponse(opened=pb.ConsumerOpened(epoch=1))
        try:
            async for _request in requests:
                pass
        finally:
            self.gone.set()


@contextlib.asynccontextmanager
async def serving(times: Container[str] = TIMES) -> AsyncIterator[tuple[Consuming, int]]:
    """Yield a node's services, and their port."""
    server = grpc.aio.server(options=soon(SERVER_OPTIONS, times))
    consuming = Consuming()  # type: ignore[abstract]
    rpc.add_ConsumeServiceServicer_to_server(consuming, server)
    rpc.add_AdminServiceServicer_to_server(consuming, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield consuming, port
    finally:
        await server.stop(None)


class Wire:
    """A proxy between a client and a port. It can drop all further traffic of open connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._swallowed = 0
        self.connections = 0
        self.said = 0
        """Bytes that clients sent."""
        self._tasks = list[asyncio.Task[None]]()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        """Drop all further traffic of the present connections; they stay open."""
        self._swallowed = self.connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, ours), (theirs, writer)):
            carrying = self._carry(self.connections, source, sink, counts=source is reader)
            self._tasks.append(asyncio.ensure_future(carrying))

    async def _carry(
        self, no: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with contextlib.closing(sink):
            while data := await source.read(1 << 16):
                self.said += len(data) * counts
                if no > self._swallowed:
                    sink.write(data)
                    await sink.drain()
            if no <= self._swallowed:
                await asyncio.Event().wait()  # the end is swallowed, too


async def test_node_whose_machine_is_gone_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_channel, "CHANNEL_OPTIONS", soon(node_channel.CHANNEL_OPTIONS))
    async with serving() as (services, port):
        wire = Wire(port)
        async with wire as address, AsyncTimerClient(address) as client:
            receiving = asyncio.ensure_future(client.consumer("t", "g").receive())
            await until(lambda: services.opened >= 1)
            wire.swallow()
            await until(lambda: services.opened >= 2)
            assert wire.connections >= 2
            receiving.cancel()
            await asyncio.wait({receiving})


@contextlib.asynccontextmanager
async def standing_by(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Yield the port of a node that takes no part."""
    monkeypatch.setattr("cluster.files.standby_ports.PINGED", soon(PINGED, OFTEN))
    grpc_port, http_port = free_ports(2)
    ports = {"grpc": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{http_port}"}
    standby = Standby(build_config(BASE, ports), lambda: Wait("waits", ""))
    await standby.start()
    try:
        yield grpc_port
    finally:
        await standby.stop()


@contextlib.asynccontextmanager
async def port_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    if kind == "a node that waits":
        async with standing_by(monkeypatch) as port:
            yield port
    else:
        async with serving(OFTEN) as (_, port):
            yield port


@pytest.mark.parametrize("kind", ["a node", "a node that waits"])
async def test_quiet_client_is_not_sent_away_for_its_pings(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(node_channel, "CHANNEL_OPTIONS", soon(node_channel.CHANNEL_OPTIONS, OFTEN))
    async with port_of(kind, monkeypatch) as port:
        wire = Wire(port)
        async with wire as address, node_channel.tcp(None)(address) as channel:
            await rpc.AdminServiceStub(channel).GetStatus(pb.GetStatusRequest(local=True))
            before = wire.said
            await until(lambda: wire.said - before > 12 * 17)  # as many pings, or answers to pings
            assert wire.connections == 1


async def test_consumer_whose_machine_is_gone_is_missed() -> None:
    async with serving() as (consuming, port):
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, f"127.0.0.1:{port}", stdout=subprocess.PIPE
        )
        try:
            assert client.stdout is not None
            async with asyncio.timeout(60):
                assert await client.stdout.readline() == b"consumes\n"
                os.kill(client.pid, signal.SIGSTOP)  # as a machine without power: no word, no end
                await consuming.gone.wait()
        finally:
            client.kill()
            await client.wait()
