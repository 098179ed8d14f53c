"""ConsumeService: one stream per consumer.

    client: open, credit, acks ->    reader --> leader (join, credit, ack, nack, extend)
                                                  |
    client: <- opened, deliveries    writer <-- outbox <-- sink, ack results

The outbox is bounded: a consumer whose stream does not drain is paused, and its acks are read no
faster than it reads their answers, so that a slow reader costs a bounded amount of memory and
holds nobody up. Receive is the same with one delivery: a consumer that joins, waits and is gone.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, TypeAlias

import numpy as np

from cluster.api import wire_rows
from cluster.api.group_admin import DELAY_MS_MAX, GroupDesk
from cluster.api.lease_ids import LeaseIds
from cluster.rpc import grpc_errors
from cluster.rpc.handlers import Context, RequestStream, Service, answered, streamed, within
from cluster.rpc.outboxes import Outboxes
from cluster.state.host import Host
from timer.leader.groups.group_batch import Done
from timer.leader.groups.group_dispatch import OVERLOAD_RETRY_MS
from timer.leader.groups.shared_leases import ConsumerStream
from timer.leader.leader import Delivery, Leader
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
)
from timer.model.units import Epoch, LeaseId, Now, QueueOffset
from timer.ready.group import Group
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc

CREDIT_MAX: Final = 1_000_000
CONSUMER_BYTES_MAX: Final = 255
"""Of a consumer's name: errors tell it to others, in their trailers."""
ACK_OFFSETS_MAX: Final = 65_536
NACK_OFFSETS_MAX: Final = 16_384
"""In one nack or extension."""
UNREAD_ACKS_MAX: Final = 1 << 20
"""Offsets acked whose answers the consumer has not read yet; beyond it no request is read."""
ANSWER_OFFSETS: Final = 256
"""An answer costs about as much memory as so many offsets in one, beside its own."""

RECEIVE_MAX: Final = 1000
"""Messages of one Receive."""
RECEIVES_MAX: Final = 1000
"""Receives that wait at the same time."""
WAIT_MS_MAX: Final = 20_000
WAIT_S_MIN: Final = 0.25
"""What a Receive that doesn't want to wait gives the leader: messages may have to be reserved, or
to be read from the disk."""

_REFUSALS: Final = [
    *(pb.ALREADY_ACKED, pb.ACK_LEASE_LOST, pb.ACK_NOT_DELIVERED, pb.ACK_EXPIRED),
    pb.ACK_DEAD_LETTERED,
]
_RESULTS: Final = {
    kind: np.array([pb.ACK_RESULT_UNSPECIFIED, accepted, *_REFUSALS])
    for kind, accepted in (
        (pb.AckRequest, pb.ACKED),
        (pb.NackRequest, pb.NACKED),
        (pb.ExtendRequest, pb.EXTENDED),
    )
}
"""timer.leader.groups.shared_leases' verdicts to AckResult."""

Settlement: TypeAlias = pb.AckRequest | pb.NackRequest | pb.ExtendRequest
"""What a consumer says of messages that it was given."""


class ConsumeService(Service, rpc.ConsumeServiceServicer):
    """Hands messages out and takes acks, on the leader."""

    def __init__(
        self,
        host: Host,
        desk: GroupDesk,
        outboxes: Outboxes,
        *,
        salt: int,
    ) -> None:
        self.outboxes = outboxes
        self._host = host
        self._desk = desk
        self._salt = salt
        self._secret = secrets.token_bytes(32)
        self._lease_ids: tuple[Epoch, LeaseIds] | None = None
        self._streams: set[_Stream] = set()
        self._waiting: set[asyncio.Future[pb.Deliveries]] = set()
        """For what Receives wait."""
        self._receiving = 0

    def _ids_of(self, leader: Leader) -> LeaseIds:
        """Return the lease ids of a leadership."""
        if self._lease_ids is None or self._lease_ids[0] != leader.epoch:
            self._lease_ids = leader.epoch, LeaseIds(self._secret, leader.epoch)
        return self._lease_ids[1]

    def end_streams(self) -> None:
        """This node leads no more: send its consumers away."""
        for stream in list(self._streams):
            stream.end(NotLeaderError(self._host.leader_address()))
        for delivered in self._waiting:
            if not delivered.done():
                delivered.set_exception(NotLeaderError(self._host.leader_address()))

    @streamed
    async def Consume(  # noqa: N802
        self, requests: AsyncIterator[pb.ConsumeRequest], context: Context
    ) -> AsyncGenerator[pb.ConsumeResponse, None]:
        """Serve one consumer until its stream ends, or this node's leadership."""
        peer = getattr(context, "peer", str)()
        stream = await self._open(requests := RequestStream(requests, context, self.taken), peer)
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
            raise stream.ended

    async def _open(self, requests: AsyncIterator[pb.ConsumeRequest], peer: str) -> "_Stream":
        first = await anext(requests, None)
        if first is None or first.WhichOneof("kind") != "open":
            raise InvalidRequestError(
                "kind", first and first.WhichOneof("kind"), "must begin with open"
            )
        opening = first.open
        if len(opening.consumer.encode()) > CONSUMER_BYTES_MAX:
            limit = f"must have at most {CONSUMER_BYTES_MAX} bytes"
            raise InvalidRequestError("consumer", opening.consumer[:32] + "…", limit)
        self._desk.check_lease(opening.lease_ms)
        if opening.existing:
            leader, _, group = self._desk.find(opening.topic, opening.group)
        else:
            leader, group = await self._open_group(
                opening.topic, opening.group, opening.start, opening.lease_ms
            )
        ids = self._ids_of(leader)
        stream = _Stream(
            self._host, leader, group, self._desk, self._salt, ids, self.outboxes, peer
        )
        stream.join(opening.consumer or "?", opening.lease_ms or group.settings.lease_ms)
        stream.credit(opening.credit)
        return stream

    async def _open_group(
        self, topic: str, name: str, start: int, lease_ms: int
    ) -> tuple[Leader, Group]:
        settings = pb.GroupSettings(lease_ms=lease_ms or None)
        return await self._desk.open(topic, name, start, settings)

    # ---- unary

    @answered
    async def Receive(  # noqa: N802
        self, request: pb.ReceiveRequest, context: Context
    ) -> pb.Deliveries:
        """Lease what is there, or comes in time."""
        del context
        check = ("max_messages", request.max_messages, RECEIVE_MAX)
        for field, value, most in (check, ("wait_ms", request.wait_ms, WAIT_MS_MAX)):
            if value > most:
                raise InvalidRequestError(field, value, f"must be at most {most}")
        self._desk.check_lease(request.lease_ms)
        leader, group = await self._open_group(
            request.topic, request.group, request.start, request.lease_ms
        )
        if self._receiving >= RECEIVES_MAX:
            raise OverloadedError("the leader's waiting receives", retry_after_ms=OVERLOAD_RETRY_MS)
        self._receiving += 1
        try:
            return await self._receive(leader, group, request)
        finally:
            self._receiving -= 1

    async def _receive(
        self, leader: Leader, group: Group, request: pb.ReceiveRequest
    ) -> pb.Deliveries:
        delivered: asyncio.Future[pb.Deliveries] = asyncio.get_running_loop().create_future()
        ids = self._ids_of(leader)

        def take(delivery: Delivery) -> None:
            if not delivered.done():
                delivered.set_result(wire_rows.deliveries_of(delivery, ids, self._salt))

        def end(why: EngineError) -> None:
            if not delivered.done():
                delivered.set_exception(why)

        lease_ms = request.lease_ms or group.settings.lease_ms
        consumer = ConsumerStream("receive", lease_ms, take, end=end, once=True)
        leader.groups.join(group, consumer)
        reached = False
        try:
            leader.groups.credit(group, consumer, request.max_messages or 1)
            self._host.kick()
            wait_s = max(request.wait_ms / 1000, WAIT_S_MIN)
            self._waiting.add(delivered)
            answer = await asyncio.wait_for(delivered, wait_s)
            reached = True
        except TimeoutError:
            return pb.Deliveries(epoch=leader.epoch)
        else:
            return answer
        finally:
            self._waiting.discard(delivered)
            (leader.groups.retire if reached else leader.groups.give_up)(group, consumer)
            self._host.kick()

    @answered
    async def Ack(  # noqa: N802
        self, request: pb.AckRequest, context: Context
    ) -> pb.AckResponse:
        """Ack messages of a unary Receive, or of anyone."""
        return await self._settle(request, context)

    @answered
    async def Nack(  # noqa: N802
        self, request: pb.NackRequest, context: Context
    ) -> pb.AckResponse:
        """Give messages back."""
        return await self._settle(request, context)

    @answered
    async def Extend(  # noqa: N802
        self, request: pb.ExtendRequest, context: Context
    ) -> pb.AckResponse:
        """Hold messages longer."""
        return await self._settle(request, context)

    async def _settle(self, request: Settlement, context: Context) -> pb.AckResponse:
        leader, _, group = self._desk.find(request.topic, request.group)
        held = lease_of(request, self._ids_of(leader), leader, group, None)
        asked = self._host.ask(
            lambda done: settle(leader, group, request, held, self._desk, self._host.now(), done)
        )
        return answer_to(request, await within(asked, context))


def lease_of(
    request: Settlement, ids: LeaseIds, leader: Leader, group: Group, asker: ConsumerStream | None
) -> LeaseId:
    """Return the number of the lease that a request shows; 0: none, or one of another consumer.

    `asker`: the consumer whose stream it came on. None: it came alone, as for what a Receive got.
    """
    number = ids.number_of(request.lease_id)
    holder = leader.groups.holder(group, Epoch(request.epoch), number)
    if holder is not None and (None if holder.once else holder) is not asker:
        return LeaseId(0)
    return number


def settle(  # noqa: PLR0913 -- who asks what, and of whom
    leader: Leader,
    group: Group,
    request: Settlement,
    lease_id: LeaseId,
    desk: GroupDesk,
    now: Now,
    done: Done,
) -> None:
    """Let the leader judge what a consumer says of messages; `done` gets the verdicts.

    Raises:
        InvalidRequestError: too many offsets at once, or none; a time is out of range.
        EngineError: it was refused.
    """
    most = ACK_OFFSETS_MAX if isinstance(request, pb.AckRequest) else NACK_OFFSETS_MAX
    if not 1 <= len(request.offsets) <= most:
        raise InvalidRequestError("offsets", len(request.offsets), f"1 to {most} in one request")
    offsets = np.array(request.offsets, np.uint64)
    held = Epoch(request.epoch), lease_id, offsets
    match request:
        case pb.AckRequest() if request.cumulative:
            if len(offsets) > 1:
                raise InvalidRequestError("offsets", len(offsets), "one, in a cumulative ack")
            last = QueueOffset(int(offsets[0]))
            leader.groups.ack_up_to(group, held[0], held[1], last, done)
        case pb.AckRequest():
            leader.groups.ack(group, *held, done)
        case pb.NackRequest() if request.unseen:
            done(leader.groups.give_back(group, *held))
        case pb.NackRequest():
            delay_ms = request.delay_ms if request.HasField("delay_ms") else None
            if (delay_ms or 0) > DELAY_MS_MAX:
                raise InvalidRequestError("delay_ms", delay_ms, f"must be at most {DELAY_MS_MAX}")
            leader.groups.nack(group, *held, delay_ms, now, done)
        case _:
            desk.check_lease(request.lease_ms)
            lease_ms = request.lease_ms or group.settings.lease_ms
            done(leader.groups.extend(group, *held, lease_ms, now))


def answer_to(request: Settlement, result: object) -> pb.AckResponse:
    """Return the verdicts, or the error that came instead, as the answer to a request."""
    answer = pb.AckResponse(request_no=request.request_no)
    if isinstance(result, EngineError):
        answer.error.CopyFrom(grpc_errors.to_wire(result))
    else:
        assert isinstance(result, np.ndarray), result
        answer.results.extend(_RESULTS[type(request)][result].tolist())
    return answer


class _Stream:
    """One open consumer."""

    def __init__(  # noqa: PLR0913 - all of a consumer's world
        self,
        host: Host,
        leader: Leader,
        group: Group,
        desk: GroupDesk,
        salt: int,
        ids: LeaseIds,
        outboxes: Outboxes,
        peer: str,
    ) -> None:
        self._host = host
        self._desk = desk
        self._leader = leader
        self._group = group
        self._salt = salt
        self._ids = ids
        self._outbox: asyncio.Queue[tuple[pb.ConsumeResponse | None, int, int]] = asyncio.Queue()
        """Responses, each with its bytes and the acks that it answers. None: the end."""
        self._outbox_bytes = self._writing = 0
        """What is in it or was read from it last, which gRPC may hold; and that last."""
        self._outboxes, self._peer = outboxes, peer
        self._consumer: ConsumerStream | None = None
        self._acking = 0
        """Ack requests that are not answered yet."""
        self._reading = True
        self._unread_acks = 0
        self._read = asyncio.Event()
        """Set when the consumer has read something."""
        self._leaving = False
        """The client wants no more."""
        self.ended: EngineError | None = None

    def join(self, name: str, lease_ms: int) -> None:
        """Become a consumer of the group."""
        opened = pb.ConsumerOpened(
            epoch=self._leader.epoch,
            lease_ms=lease_ms,
            topic_id=self._group.topic,
            group_id=self._group.group_id,
        )
        self._put(pb.ConsumeResponse(opened=opened), 0)
        consumer = ConsumerStream(name, lease_ms, self._deliver, end=self.end)
        consumer.one_by_one = self._outboxes.crowded
        self._leader.groups.join(self._group, consumer)
        self._consumer = consumer
        self._host.kick()

    def credit(self, messages: int) -> None:
        """The client takes so many messages more."""
        assert self._consumer is not None
        allowed = 0 if self._leaving else CREDIT_MAX - self._consumer.credit
        self._leader.groups.credit(self._group, self._consumer, min(messages, allowed))
        self._host.kick()

    def _want_no_more(self) -> None:
        """Hand nothing more out, and say so behind what was."""
        assert self._consumer is not None
        self._leaving, self._consumer.credit = True, 0
        self._unread_acks += ANSWER_OFFSETS
        self._put(pb.ConsumeResponse(leaving=True), 0, acks=ANSWER_OFFSETS)

    async def read(self, requests: AsyncIterator[pb.ConsumeRequest]) -> None:
        """Take what the client sends, until it ends or breaks a rule; then answer every ack."""
        try:
            async for request in requests:
                while self._unread_acks > UNREAD_ACKS_MAX:
                    self._read.clear()
                    await self._read.wait()
                if self.ended is not None:
                    break
                kind = request.WhichOneof("kind")
                self._heard()
                if kind == "credit":
                    self.credit(request.credit)
                elif kind in ("ack", "nack", "extend"):
                    self._settle(getattr(request, kind))
                elif kind == "leaving":
                    self._want_no_more()
                else:
                    limit = "must be credit, ack, nack, extend or leaving once open"
                    raise InvalidRequestError("kind", kind, limit)
        except EngineError as error:
            self.end(error)
        finally:
            self._reading = False
            self._end_if_answered()

    def _heard(self) -> None:
        if self._consumer is not None:
            self._leader.groups.heard(self._group, self._consumer)

    def _end_if_answered(self) -> None:
        if (self.ended is not None or not self._reading) and not self._acking:
            self._put(None, 0)

    def _settle(self, request: Settlement) -> None:
        size = len(request.offsets) + ANSWER_OFFSETS
        self._acking += 1
        self._unread_acks += size

        def done(result: object) -> None:
            self._acking -= 1
            self._put(pb.ConsumeResponse(acked=answer_to(request, result)), 0, acks=size)
            self._end_if_answered()

        held = lease_of(request, self._ids, self._leader, self._group, self._consumer)
        try:
            settle(self._leader, self._group, request, held, self._desk, self._host.now(), done)
        except EngineError as refused:
            done(refused)
        self._host.kick()

    def _deliver(self, delivery: Delivery) -> None:
        assert self._consumer is not None
        deliveries = wire_rows.deliveries_of(delivery, self._ids, self._salt)
        size = len(deliveries.payloads) + len(deliveries.keys) + len(deliveries.headers)
        size += 64 * len(delivery.lease.offsets)
        self._outbox_bytes += size
        self._outboxes.add(self._peer, size)
        self._consumer.one_by_one = self._outboxes.crowded
        was_paused = self._consumer.paused
        self._consumer.paused = self._outbox_bytes > self._outboxes.most()
        self._put(pb.ConsumeResponse(deliveries=deliveries), size)
        if was_paused and not self._consumer.paused:
            self.credit(0)

    def _put(self, response: pb.ConsumeResponse | None, size: int, acks: int = 0) -> None:
        self._outbox.put_nowait((response, size, acks))

    def _let_go(self, size: int) -> None:
        self._outbox_bytes -= size
        self._outboxes.add(self._peer, -size)

    async def next(self) -> pb.ConsumeResponse | None:
        """Return what to write next. None: the stream is over."""
        self._let_go(self._writing)
        response, size, acks = await self._outbox.get()
        self._writing = size
        self._unread_acks -= acks
        self._read.set()
        consumer = self._consumer
        left = self._outbox_bytes - size
        if consumer is not None and consumer.paused and left <= self._outboxes.most() // 2:
            consumer.paused = False
            self._leader.groups.credit(self._group, consumer, 0)
            self._host.kick()
        return response

    def end(self, why: EngineError) -> None:
        """Close the stream with an error, after what is in the outbox.

        Acks on their way are answered before; not by a leader that is deposed, as its consumers
        have another one to go to.
        """
        self.ended = self.ended or why
        if isinstance(why, NotLeaderError):
            self._put(None, 0)
        else:
            self._end_if_answered()

    def close(self) -> None:
        """Leave the group; what was held goes back at once."""
        self._let_go(self._outbox_bytes)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._leader.groups.leave(self._group, consumer)
            self._host.kick()
