"""NATS JetStream: scheduled messages in a stream with three replicas.

A timer is a message with the header Nats-Schedule. At its time the server publishes it to the
subject `fired` of the same stream, which is a work queue.
"""

import asyncio
import contextlib
import datetime
import itertools
import json
from collections.abc import Sequence
from typing import ClassVar

import nats

from bench.peers import installs
from bench.peers.peer import Peer, Receipts
from bench.peers.server import PeerError, PeerServer
from deploy.local import free_ports

MODULE, VERSION = "github.com/nats-io/nats-server/v2", "v2.15.3"
NODES = 3
STREAM = {
    "name": "timers",
    "subjects": ["due.*", "fired"],
    "retention": "workqueue",
    "storage": "file",
    "num_replicas": NODES,
    "allow_msg_schedules": True,
    "allow_msg_ttl": True,
    "allow_atomic": True,
}
CONFIG = """
server_name: n{number}
listen: 127.0.0.1:{port}
jetstream {{ store_dir: "{home}", {sync} }}
cluster {{ name: peers, listen: 127.0.0.1:{route}, routes: [{routes}] }}
"""


class Nats(Peer):
    """Three nodes. Each answers before it syncs, which it does every two minutes."""

    title = "NATS schedules, 3 nodes, answers before it syncs"
    lacks: ClassVar[tuple[str, ...]] = (
        "a timer is not synced when it is acked",
        "acks of consumers are not confirmed",
        "a repeated call schedules twice, unless it has an id and comes within two minutes",
    )
    fails_over = True
    batches_in_flight = 4  # a stream drops what comes when 10,000 messages wait
    sync: ClassVar[str] = "sync_interval: 2m"

    @classmethod
    def install(cls) -> str:
        installs.go(MODULE, VERSION)
        return VERSION.removeprefix("v")

    async def start(self) -> None:
        ports, routes = free_ports(NODES), free_ports(NODES)
        urls = ", ".join(f"nats://127.0.0.1:{route}" for route in routes)
        program = installs.go(MODULE, VERSION)
        for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
            home = self.directory / f"n{number}"
            home.mkdir(parents=True)
            config = self.directory / f"n{number}.conf"
            config.write_text(
                CONFIG.format(
                    number=number, port=port, home=home, route=route, routes=urls, sync=self.sync
                )
            )
            words = [str(program), "-c", str(config)]
            self.servers.append(PeerServer(words, self.directory / f"n{number}.log"))
        for server, port in zip(self.servers, ports, strict=True):
            await server.ready(port)
        self._numbers = itertools.count()
        self._client = await nats.connect(
            servers=[f"nats://127.0.0.1:{port}" for port in ports],
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.05,
            error_cb=_ignore,
        )
        await self._create()

    async def _create(self) -> None:
        answer: dict[str, object] = {}
        for _ in range(100):  # the cluster elects its leader first
            try:
                answer = await self._api("STREAM.CREATE.timers", STREAM)
            except (TimeoutError, nats.errors.NoRespondersError):
                answer = {"error": "no answer"}
            if "error" not in answer:
                break
            await asyncio.sleep(0.2)
        else:
            raise PeerError(f"no stream: {answer}")
        self._stream = self._client.jetstream(timeout=15)
        self._pull = await self._stream.pull_subscribe("fired", "consumer", "timers")

    async def _api(self, name: str, request: object) -> dict[str, object]:
        data = json.dumps(request).encode()
        answer = await self._client.request(f"$JS.API.{name}", data, timeout=5)
        content: dict[str, object] = json.loads(answer.data)
        return content

    async def close(self) -> None:
        await self._client.close()

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await self._stream.publish(self._subject(), payload, headers=_schedule(due_ms))

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Publish an atomic batch: all of it or none is stored, with one answer."""
        batch, last = f"b{next(self._numbers)}", len(payloads)
        for number, (due, payload) in enumerate(zip(due_ms, payloads, strict=True), start=1):
            headers = _schedule(due)
            headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            if number < last:
                await self._client.publish(self._subject(), payload, headers=headers)
                continue
            headers["Nats-Batch-Commit"] = "1"
            answer = await self._client.request(
                self._subject(), payload, timeout=15, headers=headers
            )
            if "error" in json.loads(answer.data):
                raise PeerError(f"batch: {answer.data!r}")

    def _subject(self) -> str:
        return f"due.{next(self._numbers)}"

    async def consume(self, receipts: Receipts) -> None:
        while True:
            try:
                messages = await self._pull.fetch(1_000, timeout=1)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.001)
                continue
            receipts.received([message.data for message in messages])
            for message in messages:
                await message.ack()
            receipts.acked(len(messages))

    async def kill_leader(self) -> None:
        """Kill the stream's leader. Under load it may answer only the second call, or the third."""
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                cluster = (await self._stream.stream_info("timers")).cluster
                if cluster is not None and cluster.leader:  # none during an election
                    self.servers[int(cluster.leader.removeprefix("n"))].kill()
                    return
        raise PeerError("the stream has no leader")


class NatsSynced(Nats):
    """Three nodes that sync each write before the answer."""

    title = "NATS schedules, 3 nodes, each write synced"
    lacks = Nats.lacks[1:]
    sync = "sync_interval: always"


def _schedule(due_ms: int) -> dict[str, str]:
    due = datetime.datetime.fromtimestamp(due_ms / 1000, datetime.UTC)
    at = due.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"Nats-Schedule": f"@at {at}", "Nats-Schedule-Target": "fired"}


async def _ignore(error: Exception) -> None:
    """Take errors of the connection; calls that they concern fail too."""
