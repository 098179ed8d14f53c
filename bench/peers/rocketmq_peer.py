"""RocketMQ 5: timer messages of one broker that syncs each write, with the proxy for its clients.

The proxy's gRPC interface is called here, through the stubs of the Python client. That client takes
due times in whole seconds only.
"""

import asyncio
import json
import shutil
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
from rocketmq.grpc_protocol import definition_pb2 as rmq
from rocketmq.grpc_protocol import service_pb2 as service
from rocketmq.grpc_protocol import service_pb2_grpc

from bench.peers import installs
from bench.peers.peer import Peer, Receipts
from bench.peers.server import START_LIMIT_S, PeerError, PeerServer
from deploy.local import free_ports

VERSION = "5.5.0"
ARTIFACTS = [f"org.apache.rocketmq:rocketmq-{name}" for name in ("namesrv", "proxy", "tools")]
TOPIC = GROUP = "timers"
RECEIVERS = 16
RECEIVE_MAX = 32
"""Messages of a receive call: the proxy's limit."""
OK = 20_000
BROKER = """
brokerClusterName=DefaultCluster
brokerName=b0
brokerId=0
brokerIP1=127.0.0.1
listenPort={port}
namesrvAddr=127.0.0.1:{names}
storePathRootDir={home}/store
storePathCommitLog={home}/store/commitlog
flushDiskType=SYNC_FLUSH
timerWheelEnable=true
timerPrecisionMs=100
"""


class RocketMq(Peer):
    """One broker and its proxy in one process, and a name server."""

    title = "RocketMQ timers, SYNC_FLUSH, one broker"
    lacks = (
        "its fastest client is in Java: here Python calls it over gRPC",
        "not replicated in this mode",
        "due times are rounded to 100 ms",
        "delays of at most three days, by default",
        "a repeated call schedules twice",
    )
    batches_in_flight = 1

    @classmethod
    def install(cls) -> str:
        if shutil.which("java") is None:
            raise installs.NotInstallable("java is needed")
        installs.jars("rocketmq", VERSION, *ARTIFACTS)
        return VERSION

    async def start(self) -> None:
        names, port, self._port, remoting = free_ports(4)
        home = self.directory
        home.mkdir(parents=True)
        (home / "names.conf").write_text(f"listenPort={names}\n")
        (home / "broker.conf").write_text(BROKER.format(port=port, names=names, home=home))
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": f"127.0.0.1:{names}",
            "grpcServerPort": self._port,
            "remotingListenPort": remoting,
        }
        (home / "proxy.json").write_text(json.dumps(settings))
        self._serve("namesrv.NamesrvStartup", "256m", "-c", str(home / "names.conf"))
        await self.servers[0].ready(names)
        words = ["-pm", "local", "-n", f"127.0.0.1:{names}"]
        words += ["-bc", str(home / "broker.conf"), "-pc", str(home / "proxy.json")]
        self._serve("proxy.ProxyStartup", "1g", *words)
        for each in (port, self._port):
            await self.servers[1].ready(each)
        for command in (
            ["updateTopic", "-t", TOPIC, "-a", "+message.type=DELAY"],
            ["updateSubGroup", "-g", GROUP],
        ):
            where = ["-n", f"127.0.0.1:{names}", "-b", f"127.0.0.1:{port}"]
            words = self._command("tools.command.MQAdminStartup", "256m", *command, *where)
            await asyncio.to_thread(installs.run, words)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}")
        self._stub = service_pb2_grpc.MessagingServiceStub(self._channel)
        self._metadata = (
            ("x-mq-client-id", uuid.uuid4().hex),
            ("x-mq-language", "PYTHON"),
            ("x-mq-protocol", "v2"),
            ("x-mq-client-version", VERSION),
        )
        self._settings = self._stub.Telemetry(metadata=self._metadata)
        await self._settings.write(service.TelemetryCommand(settings=self._describe()))
        await self._settings.read()
        await asyncio.wait_for(self._first(), START_LIMIT_S)

    def _serve(self, name: str, heap: str, *words: str) -> None:
        home = self.directory / name
        env = {"ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}
        log = self.directory / f"{name}.log"
        self.servers.append(PeerServer(self._command(name, heap, *words), log, env))

    def _command(self, name: str, heap: str, *words: str) -> list[str]:
        """Return the command that runs a class of RocketMQ."""
        jars, home = installs.jars("rocketmq", VERSION, *ARTIFACTS), self.directory / name
        java = ["java", f"-Xms{heap}", f"-Xmx{heap}", f"-Duser.home={home}", "-cp", f"{jars}/*"]
        return [*java, f"-Drocketmq.home.dir={home}", f"org.apache.rocketmq.{name}", *words]

    def _describe(self) -> Any:
        """Return the settings of a client that produces and consumes."""
        topic = rmq.Resource(name=TOPIC)
        settings = rmq.Settings(client_type=rmq.ClientType.SIMPLE_CONSUMER)
        settings.subscription.group.name = GROUP
        settings.subscription.subscriptions.add(topic=topic).expression.expression = "*"
        settings.user_agent.version = VERSION
        return settings

    async def _first(self) -> None:
        """Send a message until the broker has created the topic."""
        while True:
            try:
                await self.schedule_one(0, b"first")
            except (PeerError, grpc.aio.AioRpcError):
                await asyncio.sleep(0.2)
            else:
                return

    async def close(self) -> None:
        await self._channel.close()

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        message = rmq.Message(topic=rmq.Resource(name=TOPIC), body=payload)
        properties = message.system_properties
        properties.message_id = uuid.uuid4().hex
        properties.message_type = rmq.MessageType.DELAY
        properties.delivery_timestamp.FromMilliseconds(due_ms)
        request = service.SendMessageRequest(messages=[message])
        answer = await self._stub.SendMessage(request, metadata=self._metadata, timeout=15)
        if answer.status.code != OK:
            raise PeerError(f"send: {answer.status.code} {answer.status.message}")

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        await asyncio.gather(*map(self.schedule_one, due_ms, payloads))

    async def consume(self, receipts: Receipts) -> None:
        await asyncio.gather(*(self._receive(receipts) for _ in range(RECEIVERS)))

    async def _receive(self, receipts: Receipts) -> None:
        request = service.ReceiveMessageRequest(
            group=rmq.Resource(name=GROUP), batch_size=RECEIVE_MAX, auto_renew=False
        )
        request.message_queue.topic.name = TOPIC
        request.message_queue.id = -1
        request.filter_expression.type = rmq.FilterType.TAG
        request.filter_expression.expression = "*"
        request.invisible_duration.FromSeconds(30)
        request.long_polling_timeout.FromSeconds(5)
        while True:
            messages = [
                answer.message
                async for answer in self._stub.ReceiveMessage(
                    request, metadata=self._metadata, timeout=20
                )
                if answer.HasField("message")
            ]
            messages = [message for message in messages if message.body != b"first"]
            if messages:
                receipts.received([message.body for message in messages])
                receipts.acked(await self._ack(messages))

    async def _ack(self, messages: Sequence[Any]) -> int:
        request = service.AckMessageRequest()
        request.group.name, request.topic.name = GROUP, TOPIC
        for message in messages:
            properties = message.system_properties
            request.entries.add(
                message_id=properties.message_id, receipt_handle=properties.receipt_handle
            )
        answer = await self._stub.AckMessage(request, metadata=self._metadata, timeout=15)
        return sum(entry.status.code == OK for entry in answer.entries)
