"""A client that is gone without a word is missed, though nothing is sent to it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc

from cluster.node import SERVER_OPTIONS
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

CLIENT = """
import asyncio, sys
from timerclient import AsyncTimerClient

async def main():
    async with AsyncTimerClient(sys.argv[1]).consumer("t", "g") as consumer:
        print("consumes", flush=True)
        await consumer.receive()

asyncio.run(main())
"""


class Consuming(rpc.ConsumeServiceServicer, rpc.AdminServiceServicer):
    """Opens a consumer that gets nothing, and notes its end."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def GetStatus(self, *_: object) -> pb.GetStatusResponse:  # noqa: N802
        return pb.GetStatusResponse(nodes=[pb.NodeStatus(role="leader", serving=True, epoch=1)])

    async def Consume(  # noqa: N802
        self, requests: AsyncIterator[pb.ConsumeRequest], _: object
    ) -> AsyncIterator[pb.ConsumeResponse]:
        yield pb.ConsumeResponse(opened=pb.ConsumerOpened(epoch=1))
        try:
            async for _request in requests:
                pass
        finally:
            self.gone.set()


async def missed() -> None:
    # A tenth of the times that a node gives.
    times = {"grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms"}
    assert times < {name for name, _ in SERVER_OPTIONS}
    options = [(name, value // 10 if name in times else value) for name, value in SERVER_OPTIONS]
    server, consuming = grpc.aio.server(options=options), Consuming()  # type: ignore[abstract]
    rpc.add_ConsumeServiceServicer_to_server(consuming, server)
    rpc.add_AdminServiceServicer_to_server(consuming, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, stdout=subprocess.PIPE
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
        await server.stop(None)


def test_consumer_whose_machine_is_gone_is_missed() -> None:
    asyncio.run(missed())
