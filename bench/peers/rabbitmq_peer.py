"""RabbitMQ: quorum queues on three nodes; a message's TTL ends in a queue of delayed messages, and
dead-lettering moves it to the work queue.

Only the head of a queue expires. Each 100 ms of due time has therefore a queue of its own.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pika
from pika.adapters.asyncio_connection import AsyncioConnection

from bench.peers import installs
from bench.peers.peer import Peer, Receipts
from bench.peers.server import PeerError, PeerServer
from deploy.local import free_ports

NODES = 3
BUCKET_MS = 100
KEPT_MS = 120_000
"""Time after its due time at which an unused queue is deleted."""
PREFETCH = 1_000


class RabbitMq(Peer):
    """Three nodes."""

    title = "RabbitMQ quorum queues, 3 nodes, TTL and dead-lettering"
    lacks = (
        "a queue for each 100 ms of due time",
        "no deletion of a pending timer",
        "acks of consumers are not confirmed",
        "its client does not reconnect by itself",
        "a repeated call schedules twice",
    )
    fails_over = True

    @classmethod
    def install(cls) -> str:
        installs.debian()
        return installs.debian_version("rabbitmq-server")

    async def start(self) -> None:
        ports, links, [mapper] = free_ports(NODES), free_ports(NODES), free_ports(1)
        env = {"ERL_EPMD_PORT": str(mapper), "HOME": str(self.directory)}
        (self.directory / "home").mkdir(parents=True)
        cookie = self.directory / ".erlang.cookie"
        cookie.write_text("peers")
        cookie.chmod(0o400)
        epmd = installs.in_debian(self.directory, "epmd", "-port", str(mapper))
        self.servers.append(PeerServer(epmd, self.directory / "epmd.log", env))
        await self.servers[0].ready(mapper)
        for number, port in enumerate(ports):
            self._start_node(number, port, links[number], env)
        for server, port in zip(self.servers[1:], ports, strict=True):
            await server.ready(port)
        await self._joined()
        # The work queue's leader is the first node, which is killed. The client uses the second.
        arguments = {"x-queue-type": "quorum", "x-queue-leader-locator": "client-local"}
        first = await connect(ports[0])
        channel = await open_channel(first)
        await declare(channel, "fired", arguments)
        first.close()
        self._connection = await connect(ports[1])
        self._channel = await open_channel(self._connection)
        self._confirms = Confirms(self._channel)
        self._queues: dict[int, asyncio.Task[str]] = {}

    def _start_node(self, number: int, port: int, link: int, env: dict[str, str]) -> None:
        home = self.directory / f"r{number}"
        home.mkdir()
        nodes = "\n".join(
            f"cluster_formation.classic_config.nodes.{n} = r{n}@localhost" for n in range(NODES)
        )
        (home / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{port}\n"
            "cluster_formation.peer_discovery_backend = classic_config\n"
            f"{nodes}\nqueue_leader_locator = balanced\n"
        )
        (home / "plugins").write_text("[].\n")
        env = env | {
            "RABBITMQ_NODENAME": f"r{number}@localhost",
            "RABBITMQ_DIST_PORT": str(link),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_MNESIA_BASE": str(home),
            "RABBITMQ_LOG_BASE": str(home),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_PID_FILE": str(home / "pid"),
        }
        root = installs.debian()
        [script] = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
        words = installs.in_debian(self.directory, f"/{script.relative_to(root)}")
        self.servers.append(PeerServer(words, home / "output", env))
        self._env = env

    async def _joined(self) -> None:
        """Wait until each node knows the others."""
        root = installs.debian()
        [script] = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmqctl")
        words = ["-q", "-n", "r0@localhost", "await_online_nodes", str(NODES), "--timeout", "90"]
        command = installs.in_debian(self.directory, f"/{script.relative_to(root)}", *words)
        await asyncio.to_thread(installs.run, command, self._env)

    async def close(self) -> None:
        self._connection.close()

    async def _queue(self, bucket: int) -> str:
        """Return the name of the queue for 100 ms of due time. It is declared once."""
        if bucket not in self._queues:
            self._queues[bucket] = asyncio.ensure_future(self._declare(bucket))
        return await asyncio.shield(self._queues[bucket])

    async def _declare(self, bucket: int) -> str:
        left_ms = max(0, bucket * BUCKET_MS - round(time.time() * 1000))
        arguments = {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "fired",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
            "x-expires": left_ms + KEPT_MS,
        }
        name = f"due.{bucket}"
        await declare(self._channel, name, arguments)
        return name

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await self.schedule_many([due_ms], [payload])

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        names = {
            bucket: await self._queue(bucket) for bucket in {due // BUCKET_MS for due in due_ms}
        }
        now_ms = round(time.time() * 1000)
        call = self._confirms.begin(len(payloads))
        for due, payload in zip(due_ms, payloads, strict=True):
            properties = pika.BasicProperties(delivery_mode=2, expiration=str(max(0, due - now_ms)))
            self._channel.basic_publish("", names[due // BUCKET_MS], payload, properties)
        await call

    async def consume(self, receipts: Receipts) -> None:
        def take(channel: Any, method: Any, _: object, body: bytes) -> None:
            receipts.received([body])
            channel.basic_ack(method.delivery_tag)
            receipts.acked(1)

        channel = await open_channel(self._connection)
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume("fired", take)
        try:
            await asyncio.Event().wait()
        finally:
            channel.close()

    async def kill_leader(self) -> None:
        self.servers[1].kill()


class Confirms:
    """The broker's confirms of a channel, gathered for each call."""

    def __init__(self, channel: Any) -> None:
        """Ask for confirms."""
        self._next = 1
        self._waiting: dict[int, list[Any]] = {}
        """Delivery tag -> [future, confirms that it still needs]; in the order of tags."""
        channel.confirm_delivery(self._confirmed)

    def begin(self, count: int) -> asyncio.Future[None]:
        """Return a future that is done when the next `count` messages are confirmed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call = [done, count]
        self._waiting |= dict.fromkeys(range(self._next, self._next + count), call)
        self._next += count
        return done

    def _confirmed(self, frame: Any) -> None:
        tag, failed = frame.method.delivery_tag, isinstance(frame.method, pika.spec.Basic.Nack)
        tags = [tag]
        if frame.method.multiple:
            tags = list(itertools.takewhile(lambda each: each <= tag, self._waiting))
        for each in tags:
            call = self._waiting.pop(each)
            call[1] -= 1
            if call[0].done():
                continue  # the caller has given up
            if failed:
                call[0].set_exception(PeerError("the broker refused a message"))
            elif not call[1]:
                call[0].set_result(None)


async def connect(port: int) -> AsyncioConnection:
    """Return an open connection."""
    done: asyncio.Future[AsyncioConnection] = asyncio.get_running_loop().create_future()
    AsyncioConnection(
        pika.ConnectionParameters("127.0.0.1", port),
        on_open_callback=done.set_result,
        on_open_error_callback=lambda _, error: done.set_exception(PeerError(str(error))),
    )
    return await done


async def open_channel(connection: AsyncioConnection) -> Any:
    """Return an open channel."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    connection.channel(on_open_callback=done.set_result)
    return await done


async def declare(channel: Any, name: str, arguments: Mapping[str, object]) -> None:
    """Declare a durable queue."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    channel.queue_declare(name, durable=True, arguments=arguments, callback=done.set_result)
    await done
