"""Three nodes on loopback in front of one fake node (timerfake/), with faults that a test orders.

    client --gRPC--> Node 0, 1, 2 --in memory--> the node of an AsyncFakeCluster

The fake node has the state and the rules. The nodes here decide which of them leads, record
requests, and refuse, lose or delay answers. The clock stands at NOW_MS until `advance`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import repeat
from typing import Any

import grpc

from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.rows.rows import slices
from timerclient.values import ids
from timerclient.values.reasons import Reason
from timerfake import AsyncFakeCluster

RETRYABLE = {
    pb.REASON_DISK_FULL,
    pb.REASON_GROUP_HELD,
    pb.REASON_NOT_LEADER,
    pb.REASON_NOT_READY,
    pb.REASON_OVERLOADED,
    pb.REASON_QUOTA_REACHED,
    *(UNKNOWN := {pb.REASON_COMMIT_TIMEOUT, pb.REASON_LEADERSHIP_LOST}),
}
NOW_MS = 1_700_000_000_000
SERVICES = ("TimerService", "ConsumeService", "AdminService")


def wire_error(reason: int, message: str = "", **detail: Any) -> pb.Error:
    return pb.Error(
        reason=reason,  # type: ignore[arg-type]
        message=message or Reason(reason).name,
        retryable=reason in RETRYABLE,
        outcome_known=reason not in UNKNOWN,
        **detail,
    )


Settlement = pb.AckRequest | pb.NackRequest | pb.ExtendRequest
Order = Any
"""None serves a request. An Error, or another message, is the answer in place of the fake node's.
"lose" serves it, and breaks the connection in place of the answer. "break", for unary calls only,
does not serve it. A unary call may await its order. The order for TellStory is the parts of the
answer."""


@dataclass
class Row:
    """A timer as it was requested, and its id."""

    topic: str
    payload: bytes
    key: bytes
    headers: bytes
    raw: bytes

    @property
    def due_ms(self) -> int:
        return ids.due_ms_of(self.raw)


class Cluster:
    """The nodes, their fake node, and what a test orders and reads of them."""

    def __init__(self) -> None:
        self.core = AsyncFakeCluster(start=datetime.fromtimestamp(NOW_MS / 1000, UTC))
        self.stubs: dict[str, Any] = {}
        """Methods of the fake node by name."""
        self.nodes: list[Node] = []
        self.leader: int | None = 0
        self.epoch_shift = 0
        """Added to the epoch of streams that are opened."""
        self.rows: list[Row] = []
        """Scheduled timers in the order of the answers."""
        self.requests: list[pb.ScheduleRequest] = []
        self.calls: list[Any] = []
        """Requests of unary calls, except GetStatus and Schedule."""
        self.deadlines_s: list[float | None] = []
        """Deadline of each of `calls` in seconds. None: no deadline."""
        self.opened: list[pb.OpenConsumer] = []
        self.delivered: list[int] = []
        """Queue offsets of deliveries to all groups."""
        self.credits: list[int] = []
        self.acks: list[Settlement] = []
        self.acked: set[int] = set()
        """Queue offsets that were acked, of all groups."""
        self.given_back: list[int] = []
        """Offsets of messages that consumers returned unseen."""
        self.credit_ends = 0
        """Number of returns that ended the credit of their stream."""
        self.probes = 0
        """Number of GetStatus calls."""
        self.on_schedule: Callable[[pb.ScheduleRequest], Order] = lambda _: None
        self.on_call: Callable[[Any], Order] = lambda _: None
        self.on_open: Callable[[pb.OpenConsumer], Order] = lambda _: None
        self.on_ack: Callable[[Settlement], Order] = lambda _: None
        self.gone: Order = "lose"
        """The end of streams that the order "lose" breaks; an Error is a node's reason."""
        self.answers_leaving = True
        self.hold: asyncio.Event | None = None
        """Answers of schedule streams wait for this event. None: they do not wait."""

    @property
    def address(self) -> str:
        return ",".join(node.address for node in self.nodes)

    @property
    def epoch(self) -> int:
        return self.core._running_node().log.epoch

    @property
    def payloads(self) -> list[bytes]:
        """Payloads of `rows`."""
        return [row.payload for row in self.rows]

    @property
    def named(self) -> set[str]:
        """Ids of the requests that have one."""
        return {request.request_id for request in self.requests} - {""}

    @property
    def registrations(self) -> int:
        """Number of calls of RegisterProducer."""
        return len(self.called(pb.RegisterProducerRequest))

    def called(self, kind: type[Any]) -> list[Any]:
        """Return the recorded requests of one type."""
        return [request for request in self.calls if isinstance(request, kind)]

    async def start(self) -> None:
        await self.core.start()
        for service in SERVICES:
            self.stubs |= vars(getattr(rpc, f"{service}Stub")(self.core.dial("")))
        for index in range(3):
            node = Node(self, index)
            await node.start()
            self.nodes.append(node)

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()
        await self.core.close()

    async def fail_over(self, to: int) -> None:
        """Let another node lead. Leases end, and streams to the old leader end with NOT_LEADER."""
        self.leader = to
        await self.core.fail_over()

    async def seed(self, topic: str, payloads: Iterable[bytes]) -> None:
        """Fire messages into a topic."""
        async with self.core.client() as client:
            await client.schedule_batch(topic, [*payloads])
        await self.core.settle()

    def record(self, request: pb.ScheduleRequest, answer: pb.ScheduleResponse) -> None:
        """Add the timers that a request made to `rows`."""
        if answer.duplicate or answer.HasField("error"):
            return
        made = zip(ids.split(answer.timer_ids), answer.results or repeat(0), strict=False)
        for of in request.timers:
            payloads = slices(of.payload_sizes, of.payloads)
            keys = slices(of.key_sizes, of.keys) or repeat(b"")
            headers = slices(of.headers_sizes, of.headers) or repeat(b"")
            for payload, key, header in zip(payloads, keys, headers, strict=False):
                raw, result = next(made)
                if result in (0, pb.SCHEDULE_RESULT_SCHEDULED, pb.SCHEDULE_RESULT_REPLACED):
                    self.rows.append(Row(of.topic, payload, key, header, raw))


async def refuse(context: Any, error: pb.Error) -> None:
    trailer = (("timer-error-bin", error.SerializeToString()),)
    await context.abort(grpc.StatusCode.UNAVAILABLE, error.message, trailing_metadata=trailer)


async def lose(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")


class Node:
    """One node. It answers GetStatus; other methods go to the fake node while it leads."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.address = ""
        self.paused: asyncio.Event | None = None
        """Event that is set when the pause ends. None: the node is not paused."""
        self.status_s = 0.0
        """Delay of an answer to GetStatus in seconds."""
        self.server: Any = None

    async def start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        for service in SERVICES:
            getattr(rpc, f"add_{service}Servicer_to_server")(self, self.server)
        port = self.server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def stop(self) -> None:
        self.resume()
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def pause(self) -> None:
        """Stop answering, as a stopped process does."""
        self.paused = asyncio.Event()

    def resume(self) -> None:
        if self.paused is not None:
            self.paused.set()
            self.paused = None

    async def _alive(self) -> None:
        if self.paused is not None:
            await self.paused.wait()

    @property
    def leads(self) -> bool:
        return self.cluster.leader == self.index

    async def _must_lead(self, context: Any) -> None:
        await self._alive()
        if not self.leads:
            leader = self.cluster.leader
            address = "" if leader is None else self.cluster.nodes[leader].address
            await refuse(context, wire_error(pb.REASON_NOT_LEADER, leader=address))

    async def _fail(self, context: Any, error: grpc.aio.AioRpcError) -> None:
        """End a call as the fake node ended it; its NOT_LEADER names this cluster's leader."""
        await self._must_lead(context)
        trailer = tuple(error.trailing_metadata())
        await context.abort(error.code(), error.details(), trailing_metadata=trailer)

    def __getattr__(self, method: str) -> Any:
        if not method[0].isupper():
            raise AttributeError(method)

        async def call(request: Any, context: Any) -> Any:
            self.cluster.calls.append(request)
            self.cluster.deadlines_s.append(context.time_remaining())
            return await self._unary(method, request, context, self.cluster.on_call)

        return call

    async def _unary(
        self, method: str, request: Any, context: Any, on_call: Callable[[Any], Order]
    ) -> Any:
        await self._must_lead(context)
        order = on_call(request)
        if inspect.isawaitable(order):
            order = await order
        if isinstance(order, pb.Error):
            await refuse(context, order)
        if order == "break":
            await lose(context)
        if order not in (None, "lose"):
            return order
        try:
            answer = await self.cluster.stubs[method](request)
        except grpc.aio.AioRpcError as error:
            return await self._fail(context, error)
        if isinstance(request, pb.ScheduleRequest):
            self.cluster.record(request, answer)
        if order == "lose":
            await lose(context)
        return answer

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        cluster = self.cluster
        cluster.probes += 1
        await self._alive()
        await asyncio.sleep(self.status_s)
        nodes = [node.status() for node in ([self] if request.local else cluster.nodes)]
        status = pb.GetStatusResponse(cluster_id="fake", epoch=cluster.epoch, nodes=nodes)
        if cluster.leader is not None:
            status.leader = status.controller = f"n{cluster.leader + 1}"
            status.leader_address = "" if self.leads else cluster.nodes[cluster.leader].address
        return status

    def status(self) -> pb.NodeStatus:
        role = "leader" if self.leads else "follower"
        status = pb.NodeStatus(name=f"n{self.index + 1}", replica_id=self.index + 1, role=role)
        status.reachable, status.serving, status.address = True, self.leads, self.address
        status.epoch, status.scheduled = self.cluster.epoch, len(self.cluster.rows)
        return status

    async def ListMembers(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._must_lead(context)
        rows = [node.status() for node in self.cluster.nodes]
        members = [pb.Member(name=row.name, replica_id=row.replica_id, voter=True) for row in rows]
        return self.cluster.on_call(request) or pb.ListMembersResponse(members=members)

    async def Schedule(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.cluster.requests.append(request)
        return await self._unary("Schedule", request, context, self.cluster.on_schedule)

    async def ScheduleStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        cluster = self.cluster
        stream = cluster.stubs["ScheduleStream"]()
        try:
            async for request in requests:
                await self._must_lead(context)
                cluster.requests.append(request)
                order = cluster.on_schedule(request)
                if isinstance(order, pb.Error):
                    if order.field == "request":  # too large: a node ends the stream
                        await refuse(context, order)
                    yield pb.ScheduleResponse(request_no=request.request_no, error=order)
                    continue
                await stream.write(request)
                answer = await stream.read()
                cluster.record(request, answer)
                if order == "lose":
                    await lose(context)
                if cluster.hold is not None:
                    await cluster.hold.wait()
                await self._alive()
                yield answer
        finally:
            stream.cancel()

    async def Consume(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await self._must_lead(context)
        first = await anext(aiter(requests))
        self.cluster.opened.append(first.open)
        order = self.cluster.on_open(first.open)
        if order is not None:
            await refuse(context, order)
        link = Link(self.cluster)
        tasks = [asyncio.ensure_future(each) for each in (link.send(first, requests), link.read())]
        try:
            while (answer := await link.answers.get()) is not None:
                await self._must_lead(context)
                if isinstance(answer, pb.Error):
                    await refuse(context, answer)
                elif isinstance(answer, grpc.aio.AioRpcError):
                    await self._fail(context, answer)
                elif answer == "lose":
                    await lose(context)
                yield answer
        finally:
            link.stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def TellStory(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await self._must_lead(context)
        for part in self.cluster.on_call(request):
            yield part


class Link:
    """A Consume stream to the fake node, and the answers that go to the client."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.stream = cluster.stubs["Consume"]()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        """Messages, then an error or "lose" with which the stream breaks, or None: its end."""
        self.sent: dict[int, tuple[Settlement, Order]] = {}

    async def send(self, first: Any, requests: Any) -> None:
        cluster = self.cluster
        await self.stream.write(first)
        async for request in requests:
            kind = request.WhichOneof("kind")
            of: Any = getattr(request, kind) if kind else None
            if kind == "credit":
                cluster.credits.append(of)
            elif isinstance(of, pb.NackRequest) and of.unseen:
                cluster.given_back += of.offsets
                cluster.credit_ends += of.ends_credit
            elif isinstance(of, Settlement):
                cluster.acks.append(of)
                order = cluster.on_ack(of)
                if isinstance(order, pb.Error):
                    order = pb.AckResponse(error=order)
                if isinstance(order, pb.AckResponse):
                    answer = pb.AckResponse(request_no=of.request_no)
                    answer.MergeFrom(order)
                    self.answers.put_nowait(pb.ConsumeResponse(acked=answer))
                    continue
                self.sent[of.request_no] = of, order
            await self.stream.write(request)
        await self.stream.done_writing()

    async def read(self) -> None:
        try:
            while (answer := await self.stream.read()) is not grpc.aio.EOF:
                self._pass(answer)
            self.answers.put_nowait(None)
        except grpc.aio.AioRpcError as error:
            self.answers.put_nowait(error)

    def _pass(self, answer: Any) -> None:
        cluster = self.cluster
        if answer.HasField("opened"):
            answer.opened.epoch += cluster.epoch_shift
        cluster.delivered += answer.deliveries.queue_offsets
        request, order = self.sent.get(answer.acked.request_no, (None, None))
        if isinstance(request, pb.AckRequest):
            for offset, result in zip(request.offsets, answer.acked.results, strict=False):
                if result == pb.ACK_RESULT_ACKED:
                    cluster.acked |= {*range(offset + 1)} if request.cumulative else {offset}
        if order is not None:
            self.answers.put_nowait(cluster.gone)
        elif cluster.answers_leaving or not answer.leaving:
            self.answers.put_nowait(answer)
