"""Redis: a sorted set by due time, a Lua script that claims, and a set of leases.

The expiry of leases is left out. Its users write it, as they write the scripts.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

import redis.asyncio as redis

from bench.peers import installs
from bench.peers.peer import Peer, Receipts
from bench.peers.server import PeerError, PeerServer
from deploy.local import free_ports

CLAIM = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1000)
if #due > 0 then
  local leases = {}
  for i, member in ipairs(due) do
    leases[2 * i - 1] = ARGV[2]
    leases[2 * i] = member
  end
  redis.call('ZREM', KEYS[1], unpack(due))
  redis.call('ZADD', KEYS[2], unpack(leases))
end
return due
"""
LEASE_MS = 30_000
POLL_S = 0.001


class Redis(Peer):
    """One server that syncs its log before each answer."""

    title = "Redis, AOF always, alone"
    lacks = ("not replicated", "leases, retries and deletion are the user's scripts")
    replicas: ClassVar[int] = 0

    @classmethod
    def install(cls) -> str:
        installs.debian()
        return installs.debian_version("redis-server")

    async def start(self) -> None:
        ports = free_ports(1 + self.replicas)
        for number, port in enumerate(ports):
            home = self.directory / f"r{number}"
            words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
            words += ["--dir", str(home), "--appendonly", "yes", "--appendfsync", "always"]
            if number:
                words += ["--replicaof", f"127.0.0.1 {ports[0]}", "--repl-diskless-sync-delay", "0"]
            self.servers.append(PeerServer(installs.in_debian(home, *words), home / "log"))
        for server, port in zip(self.servers, ports, strict=True):
            await server.ready(port)
        self.client = redis.Redis(port=ports[0], protocol=3)
        self._claim = self.client.register_script(CLAIM)
        await self._replicated()

    async def _replicated(self) -> None:
        until = time.monotonic() + 30
        while (await self.client.info("replication"))["connected_slaves"] < self.replicas:
            if time.monotonic() > until:
                raise PeerError("the replicas are not connected")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self.client.aclose()

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await self.client.zadd("due", {payload: due_ms})

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        await self.client.zadd("due", dict(zip(payloads, due_ms, strict=True)))

    async def consume(self, receipts: Receipts) -> None:
        while True:
            now_ms = time.time_ns() // 1_000_000
            due = await self._claim(keys=["due", "leases"], args=[now_ms, now_ms + LEASE_MS])
            if not due:
                await asyncio.sleep(POLL_S)
                continue
            receipts.received(due)
            receipts.acked(await self.client.zrem("leases", *due))


class RedisReplicated(Redis):
    """A server with two replicas. A call waits until one of them has synced too."""

    title = "Redis, AOF always, 2 replicas, WAITAOF 1 1"
    lacks = (
        "no failover without other parts",
        "leases, retries and deletion are the user's scripts",
    )
    replicas = 2

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await self.schedule_many([due_ms], [payload])

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        async with self.client.pipeline(transaction=False) as pipeline:
            pipeline.zadd("due", dict(zip(payloads, due_ms, strict=True)))
            pipeline.execute_command("WAITAOF", 1, 1, 5000)
            _, (local, replicas) = await pipeline.execute()
        if local < 1 or replicas < 1:
            raise PeerError("not synced by a replica within 5 s")
