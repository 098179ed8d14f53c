"""beanstalkd: `put` with a delay in whole seconds; each write to its log is synced.

Its protocol is spoken here, as its Python clients send one command at a time.
"""

import asyncio
import time
from collections.abc import Sequence

from bench.peers import installs
from bench.peers.peer import Peer, Receipts
from bench.peers.server import PeerError, PeerServer
from deploy.local import free_ports

CONSUMERS = 8
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Beanstalkd(Peer):
    """One server."""

    title = "beanstalkd, each write synced, alone"
    lacks = ("not replicated", "due times in whole seconds", "a repeated call schedules twice")

    @classmethod
    def install(cls) -> str:
        installs.debian()
        return installs.debian_version("beanstalkd")

    async def start(self) -> None:
        [self._port] = free_ports(1)
        home = self.directory / "b"
        words = ["beanstalkd", "-l", "127.0.0.1", "-p", str(self._port), "-b", str(home), "-f", "0"]
        self.servers.append(PeerServer(installs.in_debian(home, *words), self.directory / "log"))
        await self.servers[0].ready(self._port)
        self._one = await self._connect()
        self._free = [await self._connect() for _ in range(self.batches_in_flight)]

    async def _connect(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def close(self) -> None:
        for _, writer in (self._one, *self._free):
            writer.close()

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await _put(self._one, [due_ms], [payload])

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        connection = self._free.pop()
        await _put(connection, due_ms, payloads)
        self._free.append(connection)

    async def consume(self, receipts: Receipts) -> None:
        await asyncio.gather(*(self._reserve(receipts) for _ in range(CONSUMERS)))

    async def _reserve(self, receipts: Receipts) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(b"reserve\r\n")
            while True:
                words = (await reader.readline()).split()
                if words[0] == b"DELETED":
                    receipts.acked(1)
                    continue
                if words[0] != b"RESERVED":
                    raise PeerError(f"reserve: {words}")
                _, job, size = words
                receipts.received([(await reader.readexactly(int(size) + 2))[:-2]])
                writer.write(b"delete %s\r\nreserve\r\n" % job)
        finally:
            writer.close()


async def _put(connection: Connection, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
    """Send all commands, then read their answers."""
    reader, writer = connection
    now_ms = time.time() * 1000
    for due, payload in zip(due_ms, payloads, strict=True):
        delay_s = max(0, -int((now_ms - due) // 1000))  # rounded up
        writer.write(b"put 0 %d 60 %d\r\n%s\r\n" % (delay_s, len(payload), payload))
    for _ in payloads:
        answer = await reader.readline()
        if not answer.startswith(b"INSERTED"):
            raise PeerError(f"put: {answer!r}")
