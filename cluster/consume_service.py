"""ConsumeService: one stream per consumer.

    client: open, credit, acks ->    reader --> leader (join, credit, ack)
                                                  |
    client: <- opened, deliveries    writer <-- outbox <-- sink, ack results

The outbox is bounded: a consumer whose stream does not drain is paused, and its acks are read no
faster than it reads their answers, so that a slow reader costs a bounded amount of memory and
holds nobody up.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import numpy as np
import numpy.typing as npt

from cluster import status, wire
from cluster.config import Groups
from cluster.host import Host
from cluster.rpc import Context, Service
from cluster.timer_service import TimerService
from timer.errors import InvalidRequest, NotLeader, TimerError
from timer.groups import Group
from timer.leader import Delivery, Leader
from timer.leases import Consumer
from timer.payloads import CreateGroup, Start
from timer.units import Epoch, LeaseId
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

OUTBOX_BYTES_MAX: Final = 8 << 20
CREDIT_MAX: Final = 1_000_000
ACK_OFFSETS_MAX: Final = 65_536
UNREAD_ACKS_MAX: Final = 1 << 20
"""Offsets acked whose answers the consumer has not read yet; beyond it no request is read."""

_RESULTS: Final = np.array(
    [
        pb.ACK_RESULT_UNSPECIFIED,
        pb.ACKED,
        pb.ALREADY_ACKED,
        pb.ACK_LEASE_LOST,
        pb.ACK_NOT_DELIVERED,
    ]
)
"""timer.leases' verdicts to AckResult."""


class ConsumeService(Service, rpc.ConsumeServiceServicer):
    """Hands messages out and takes acks, on the leader."""

    def __init__(
        self,
        host: Host,
        timers: TimerService,
        *,
        salt: int,
        groups: Groups,
        group_name_bytes_max: int,
    ) -> None:
        self._host = host
        self._timers = timers
        self._salt = salt
        self._groups = groups
        self._group_name_bytes_max = group_name_bytes_max
        self._streams: set[_Stream] = set()

    def end_streams(self) -> None:
        """This node leads no more: send its consumers away."""
        for stream in list(self._streams):
            stream.end(NotLeader(self._host.leader_address()))

    async def Consume(  # noqa: N802
        self, requests: AsyncIterator[pb.ConsumeRequest], context: Context
    ) -> AsyncIterator[pb.ConsumeResponse]:
        """Serve one consumer until its stream ends, or this node's leadership."""
        try:
            stream = await self._open(requests)
        except TimerError as error:
            self.on_error("Consume", error)
            await status.abort(context, error)
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            while (response := await stream.next()) is not None:
                yield response
        finally:
            self._streams.discard(stream)
            reader.cancel()
            stream.close()
        if stream.ended is not None:
            self.on_error("Consume", stream.ended)
            await status.abort(context, stream.ended)

    async def _open(self, requests: AsyncIterator[pb.ConsumeRequest]) -> "_Stream":
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("kind") != "open":
            raise InvalidRequest("kind", first and first.WhichOneof("kind"), "must begin with open")
        opening = first.open
        name = wire.topic_name(opening.topic)
        wire.check_name("group", opening.group, wire.GROUP_NAME, self._group_name_bytes_max)
        lease_ms = opening.lease_ms
        low, high = self._groups.visibility_timeout_ms_min, self._groups.visibility_timeout_ms_max
        if lease_ms and not low <= lease_ms <= high:
            limit = f"must be {low} to {high}, or 0 for the group's default"
            raise InvalidRequest("lease_ms", lease_ms, limit)
        leader = self._host.require_leader()
        topic = await self._timers.topic(leader, name)
        start = Start.LATEST if opening.start == pb.LATEST else Start.EARLIEST
        create = CreateGroup(
            topic.topic_id, opening.group, start, lease_ms or self._groups.visibility_timeout_ms
        )
        group = await self._host.ask(lambda done: leader.create_group(create, done))
        assert isinstance(group, Group)
        if leader.closed is not None:
            raise leader.closed
        stream = _Stream(self._host, leader, group, self._salt)
        stream.join(opening.consumer or "?", lease_ms or group.lease_ms)
        stream.credit(opening.credit)
        return stream


class _Stream:
    """One open consumer."""

    def __init__(self, host: Host, leader: Leader, group: Group, salt: int) -> None:
        self._host = host
        self._leader = leader
        self._group = group
        self._salt = salt
        self._outbox: asyncio.Queue[tuple[pb.ConsumeResponse | None, int, int]] = asyncio.Queue()
        """Responses, each with its bytes and the acks that it answers. None: the end."""
        self._outbox_bytes = 0
        self._consumer: Consumer | None = None
        self._acking = 0
        """Ack requests that are not answered yet."""
        self._reading = True
        self._unread_acks = 0
        self._read = asyncio.Event()
        """Set when the consumer has read something."""
        self.ended: TimerError | None = None

    def join(self, name: str, lease_ms: int) -> None:
        """Become a consumer of the group."""
        opened = pb.ConsumerOpened(
            epoch=self._leader.epoch,
            lease_ms=lease_ms,
            topic_id=self._group.topic,
            group_id=self._group.group_id,
        )
        self._put(pb.ConsumeResponse(opened=opened), 0)
        self._consumer = Consumer(name, lease_ms, self._deliver)
        self._leader.join(self._group, self._consumer)
        self._host.kick()

    def credit(self, messages: int) -> None:
        """The client takes so many messages more."""
        assert self._consumer is not None
        allowed = CREDIT_MAX - self._consumer.credit
        self._leader.credit(self._group, self._consumer, min(messages, allowed))
        self._host.kick()

    async def read(self, requests: AsyncIterator[pb.ConsumeRequest]) -> None:
        """Take what the client sends, until it ends or breaks a rule; then answer every ack."""
        try:
            async for request in requests:
                while self._unread_acks > UNREAD_ACKS_MAX:
                    self._read.clear()
                    await self._read.wait()
                kind = request.WhichOneof("kind")
                if kind == "credit":
                    self.credit(request.credit)
                elif kind == "ack":
                    self._ack(request.ack)
                else:
                    raise InvalidRequest("kind", kind, "must be credit or ack once open")
        except TimerError as error:
            self.end(error)
        finally:
            self._reading = False
            self._end_if_answered()

    def _end_if_answered(self) -> None:
        if not self._reading and not self._acking:
            self._put(None, 0)

    def _ack(self, request: pb.AckRequest) -> None:
        offsets = np.array(request.offsets, np.uint64)
        if not 1 <= len(offsets) <= ACK_OFFSETS_MAX:
            raise InvalidRequest("offsets", len(offsets), f"1 to {ACK_OFFSETS_MAX} in one ack")
        request_no = request.request_no
        self._acking += 1
        self._unread_acks += len(offsets)

        def done(result: npt.NDArray[np.uint8] | TimerError) -> None:
            acked = pb.AckResponse(request_no=request_no)
            if isinstance(result, TimerError):
                acked.error.CopyFrom(status.to_wire(result))
            else:
                acked.results.extend(_RESULTS[result].tolist())
            self._acking -= 1
            self._put(pb.ConsumeResponse(acked=acked), 0, acks=len(offsets))
            self._end_if_answered()

        lease_id, epoch = LeaseId(request.lease_id), Epoch(request.epoch)
        try:
            self._leader.ack(self._group, epoch, lease_id, offsets, done)
        except TimerError as refused:
            done(refused)
        self._host.kick()

    def _deliver(self, delivery: Delivery) -> None:
        assert self._consumer is not None
        deliveries = wire.deliveries_of(delivery, self._leader.epoch, self._salt)
        size = len(deliveries.payloads) + len(deliveries.keys) + len(deliveries.headers)
        size += 64 * len(delivery.lease.offsets)
        self._outbox_bytes += size
        self._consumer.paused = self._outbox_bytes > OUTBOX_BYTES_MAX
        self._put(pb.ConsumeResponse(deliveries=deliveries), size)

    def _put(self, response: pb.ConsumeResponse | None, size: int, acks: int = 0) -> None:
        self._outbox.put_nowait((response, size, acks))

    async def next(self) -> pb.ConsumeResponse | None:
        """Return what to write next. None: the stream is over."""
        response, size, acks = await self._outbox.get()
        self._outbox_bytes -= size
        self._unread_acks -= acks
        self._read.set()
        consumer = self._consumer
        if consumer is not None and consumer.paused and self._outbox_bytes < OUTBOX_BYTES_MAX // 2:
            consumer.paused = False
            self._leader.credit(self._group, consumer, 0)
            self._host.kick()
        return response

    def end(self, why: TimerError) -> None:
        """Close the stream with an error, after what is in the outbox."""
        self.ended = self.ended or why
        self._put(None, 0)

    def close(self) -> None:
        """Leave the group; what was held goes back at once."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._leader.leave(self._group, consumer)
            self._host.kick()
