"""ConsumeService: one stream per consumer.

    client: open, credit, acks ->    reader --> leader (join, credit, ack, nack, extend)
                                                  |
    client: <- opened, deliveries    writer <-- outbox <-- sink, ack results

The outbox is bounded: a consumer whose stream does not drain is paused. Its acks are read only as
fast as it reads the answers. A slow reader therefore costs bounded memory and delays no other
consumer. Receive joins a group as a consumer with credit for one delivery, waits and leaves.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, NamedTuple

from cluster.api import wire_rows
from cluster.api.group_admin import GroupDesk
from cluster.api.lease_ids import LeaseIds
from cluster.api.message_peek import peek
from cluster.api.queue_reads import read_messages
from cluster.api.row_messages import rows_beside
from cluster.api.settlements import LeaseAsker, Settlement, answer_to, settle_all
from cluster.rpc import grpc_errors
from cluster.rpc.handlers import (
    NO_HOOKS,
    Context,
    RequestStream,
    Service,
    ServiceHooks,
    caller_of,
    stream_handler,
    turn_of,
    unary_handler,
    within,
)
from cluster.rpc.outboxes import Outboxes, reader_of
from cluster.rpc.rpc_caller import caller_name
from cluster.rpc.shares import Places
from cluster.state.host import Host
from timer.entries.payloads import KEY_SHARED, SHARED
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import UNBOUNDED, ConsumerStream
from timer.leader.leader import Leader
from timer.model.columns import U64
from timer.model.timer_errors import (
    OVERLOAD_RETRY_MS,
    EngineError,
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
)
from timer.model.units import Epoch, LeaseId
from timer.ready.group import Group
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.same_fields import as_type

CREDIT_MAX: Final = 1_000_000
"""Messages of credit that a consumer may have, at most."""
CONSUMER_BYTES_MAX: Final = 255
"""Of a consumer's name. Errors carry it to other clients, in their trailing metadata."""
UNREAD_ACKS_MAX: Final = 1 << 20
"""Acked offsets with unread answers. Above this the consumer's requests are not read."""
ANSWER_OFFSETS: Final = 256
"""Offsets that take as much memory as an answer itself; added to each answer's own offsets."""

RECEIVE_MAX: Final = 1000
"""Messages of one Receive, at most."""
RECEIVES_MAX: Final = 2000
"""Receives that wait at the same time, at most. A caller may have as many as it leaves free."""
PEEKS_MAX: Final = 32
"""Peeks and reads that are open at the same time, at most: each may wait for the disk. A caller may
have as many as it leaves free."""
UNREAD: Final = "the buffer of messages that clients have not read"
WAIT_MS_MAX: Final = 20_000
WAIT_S_MIN: Final = 0.25
"""Seconds that a Receive waits at least: messages may have to be reserved or read from disk."""


class ConsumeService(Service, rpc.ConsumeServiceServicer):
    """Delivers messages and takes acks, on the leader."""

    def __init__(
        self,
        host: Host,
        desk: GroupDesk,
        outboxes: Outboxes,
        *,
        salt: int,
        hooks: ServiceHooks = NO_HOOKS,
    ) -> None:
        super().__init__(hooks)
        self.outboxes = outboxes
        self._host = host
        self._desk = desk
        self._salt = salt
        self._secret = secrets.token_bytes(32)
        self._lease_ids: tuple[Epoch, LeaseIds] | None = None
        self._streams: set[_Stream] = set()
        self._waiting: set[asyncio.Future[pb.Deliveries]] = set()
        """The results of open Receives."""
        self._receives = Places("the leader's waiting receives", RECEIVES_MAX)
        """Those without an identity count by the caller's address."""
        self._peeks = Places("the leader's open peeks", PEEKS_MAX)

    def _ids_of(self, leader: Leader) -> LeaseIds:
        """Return the lease ids of the leader's epoch."""
        if self._lease_ids is None or self._lease_ids[0] != leader.epoch:
            self._lease_ids = leader.epoch, LeaseIds(self._secret, leader.epoch)
        return self._lease_ids[1]

    def end_streams(self) -> None:
        """End all streams and Receives: this node no longer leads."""
        for stream in list(self._streams):
            stream.end(NotLeaderError(self._host.leader_address()))
        for delivered in self._waiting:
            if not delivered.done():
                delivered.set_exception(NotLeaderError(self._host.leader_address()))

    @stream_handler
    async def Consume(  # noqa: N802
        self, requests: AsyncIterator[pb.ConsumeRequest], context: Context
    ) -> AsyncGenerator[pb.ConsumeResponse, None]:
        """Serve one consumer until its stream or this node's leadership ends."""
        requests = RequestStream(requests, context, self.hooks.on_request)
        stream = await self._open(requests, context.peer())
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            while (response := await stream.next()) is not None:
                if stream.takes_rows and response.HasField("deliveries"):
                    response = pb.ConsumeResponse(deliveries=await rows_beside(response.deliveries))
                box = [response]
                del response  # while it is written; see _boxed
                yield box.pop()
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
                "kind",
                first and first.WhichOneof("kind"),
                "must be open in a stream's first request",
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
            self._host, leader, group, self._desk, self._salt, ids, self.outboxes, peer, self.hooks
        )
        stream.takes_rows, stream.takes_recalls = opening.rows, opening.recalls
        stream.note_window(first)
        stream.join(opening.consumer, opening.lease_ms or group.settings.lease_ms)
        stream.credit(opening.credit)
        return stream

    async def _open_group(
        self, topic: str, name: str, start: int, lease_ms: int
    ) -> tuple[Leader, Group]:
        settings = pb.GroupSettings(lease_ms=lease_ms or None)
        return await self._desk.open(topic, name, start, settings)

    # ---- unary

    @unary_handler
    async def Receive(  # noqa: N802
        self, request: pb.ReceiveRequest, context: Context
    ) -> pb.ReceiveResponse:
        """Lease ready messages, or the first that become ready within `wait_ms`."""
        check = ("max_messages", request.max_messages, RECEIVE_MAX)
        for field, value, most in (check, ("wait_ms", request.wait_ms, WAIT_MS_MAX)):
            if value > most:
                raise InvalidRequestError(field, value, f"must be at most {most}")
        self._desk.check_lease(request.lease_ms)
        with self._place(context), self.hooks.queue.present(turn_of(context)):
            leader, group = await self._open_group(
                request.topic, request.group, request.start, request.lease_ms
            )
            found = await self._receive(leader, group, request, reader_of(context.peer()))
            if request.rows:
                found = await rows_beside(found)
            return as_type(pb.ReceiveResponse, found)

    def _place(self, context: Context) -> AbstractContextManager[None]:
        """Return a context that counts one more Receive of a caller.

        Raises:
            OverloadedError: the caller has as many as are free, or none is free; or it does not
                read what it has received.
        """
        self._check_reads(context)
        return self._receives.hold(caller_name() or caller_of(context))

    def _peek_place(self, context: Context) -> AbstractContextManager[None]:
        """Return a context that counts one more peek or read of the caller.

        Raises:
            OverloadedError: as for `_place`.
        """
        self._check_reads(context)
        return self._peeks.hold(caller_name())

    def _check_reads(self, context: Context) -> None:
        """Check that a caller without unread bytes, or within its share, asks for more."""
        if self.outboxes.is_over_share(reader_of(context.peer())):
            raise OverloadedError(UNREAD, retry_after_ms=OVERLOAD_RETRY_MS)

    async def _receive(
        self, leader: Leader, group: Group, request: pb.ReceiveRequest, reader: str
    ) -> pb.Deliveries:
        delivered: asyncio.Future[pb.Deliveries] = asyncio.get_running_loop().create_future()
        ids = self._ids_of(leader)

        def take(delivery: Delivery) -> None:
            if not delivered.done():
                wire_rows.put_delivery(found := pb.Deliveries(), delivery, ids, self._salt)
                delivered.set_result(found)

        def end(why: EngineError) -> None:
            if not delivered.done():
                delivered.set_exception(why)

        lease_ms = request.lease_ms or group.settings.lease_ms
        consumer = ConsumerStream("receive", lease_ms, take, end=end, single_lease=True)
        consumer.delivery_max = partial(self.outboxes.delivery_max, reader)
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

    @unary_handler
    async def Peek(  # noqa: N802
        self, request: pb.PeekRequest, context: Context
    ) -> pb.PeekResponse:
        """Return messages without delivering them."""
        with self._peek_place(context):
            return await peek(self._host, request, self._salt)

    @unary_handler
    async def ReadMessages(  # noqa: N802
        self, request: pb.ReadMessagesRequest, context: Context
    ) -> pb.ReadMessagesResponse:
        """Return messages by their offsets without delivering them."""
        with self._peek_place(context):
            return await read_messages(self._host, request, self._salt)

    @unary_handler
    async def Ack(  # noqa: N802
        self, request: pb.AckRequest, context: Context
    ) -> pb.AckResponse:
        """Acknowledge messages, as a rule those of a Receive."""
        return await self._settle(request, context)

    @unary_handler
    async def Nack(  # noqa: N802
        self, request: pb.NackRequest, context: Context
    ) -> pb.NackResponse:
        """Return messages to the group."""
        return as_type(pb.NackResponse, await self._settle(request, context))

    @unary_handler
    async def Extend(  # noqa: N802
        self, request: pb.ExtendRequest, context: Context
    ) -> pb.ExtendResponse:
        """Extend the lease of messages."""
        return as_type(pb.ExtendResponse, await self._settle(request, context))

    async def _settle(self, request: Settlement, context: Context) -> pb.AckResponse:
        leader, _, group = self._desk.find(request.topic, request.group)
        asker = LeaseAsker(leader, group, self._ids_of(leader), None, self._desk)

        async def settled() -> object:
            verdicts, done = self._host.expect()
            for _ in settle_all(asker, request, self._host.now(), done):
                self._host.kick()
                await asyncio.sleep(0)
            self._host.kick()
            return await verdicts

        return answer_to(request, await within(settled(), context))


def _bytes_of(deliveries: pb.Deliveries) -> int:
    size = len(deliveries.payloads) + len(deliveries.keys) + len(deliveries.headers)
    return size + 64 * len(deliveries.payload_sizes)


class _Wakeup:
    """Wakes the one task that waits for it.

    An idle stream has 3.2 KB less than with an asyncio.Queue and an asyncio.Event.
    """

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task that waits, if one does."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the next ring."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Outgoing(NamedTuple):
    """A response that waits in a stream's outbox."""

    response: pb.ConsumeResponse | None
    """None: the stream ends."""
    size: int = 0
    """Its bytes."""
    acks: int = 0
    """Weight of the acks that it answers, or of the messages that it takes back."""
    lease: LeaseId = LeaseId(0)
    """0: the response delivers nothing."""
    messages: int = 0
    """Number of delivered messages."""


class _Stream:
    """The stream of one consumer."""

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
        hooks: ServiceHooks = NO_HOOKS,
    ) -> None:
        self._hooks = hooks
        self._host = host
        self._desk = desk
        self._leader = leader
        self._group = group
        self._salt = salt
        self._ids = ids
        self._outbox: deque[_Outgoing] = deque()
        self._filled = _Wakeup()
        """Rings when the outbox gets a response."""
        self._outbox_bytes = self._writing = 0
        """Bytes of the outbox and of the last response read from it, which gRPC may still hold;
        bytes of that response."""
        self._outboxes, self._peer, self._caller = outboxes, peer, reader_of(peer)
        self._window = 0
        """Bytes that may be on their way. 0: the client sets no limit."""
        self._received = 0
        """Number of deliveries that the client has received, or that no window counts."""
        self._sent = 0
        """Number of deliveries taken from the outbox."""
        self._on_way: list[int] = []
        """Bytes of each later delivery."""
        self._on_way_bytes = 0
        self._consumer: ConsumerStream | None = None
        self._acking = 0
        """Ack requests without an answer so far."""
        self._reading = True
        self._unread_acks = 0
        self._read = _Wakeup()
        """Rings when the consumer has read a response."""
        self._leaving = False
        """The client takes no more messages."""
        self.takes_rows = False
        """The client takes messages in place of columns."""
        self.takes_recalls = False
        self._last_lease = self._credit_ended = self._sent_lease = LeaseId(0)
        """The last lease delivered, the last one before the client ended its credit, and the last
        one that was taken from the outbox."""
        self.ended: EngineError | None = None

    def join(self, name: str, lease_ms: int) -> None:
        """Become a consumer of the group."""
        opened = pb.ConsumerOpened(
            epoch=self._leader.epoch,
            lease_ms=lease_ms,
            topic_id=self._group.topic,
            group_id=self._group.group_id,
            ordered=self._group.settings.type != SHARED,
            by_key=self._group.settings.type == KEY_SHARED,
        )
        self._enqueue(_Outgoing(pb.ConsumeResponse(opened=opened)))
        consumer = ConsumerStream(
            name, lease_ms, self._deliver, end=self.end, withdraw=self._withdraw
        )
        consumer.delivery_max = partial(self._outboxes.delivery_max, self._caller)
        if self.takes_recalls:
            consumer.recall = self._recall
        self._limit(consumer)
        self._leader.groups.join(self._group, consumer)
        self._consumer = consumer
        self._host.kick()

    def note_window(self, request: pb.ConsumeRequest) -> None:
        """Note the client's window in bytes, and the number of deliveries that it has received.

        Raises:
            InvalidRequestError: that number is above the number of deliveries sent.
        """
        if request.received > self._sent:
            limit = f"must be at most {self._sent}, the number of deliveries sent on this stream"
            raise InvalidRequestError("received", request.received, limit)
        self._window = request.window_bytes or self._window
        received = self._on_way[: max(0, request.received - self._received)]
        del self._on_way[: len(received)]
        self._received += len(received)
        self._on_way_bytes -= sum(received)
        if self._consumer is not None and (received or request.window_bytes):
            self._limit(self._consumer)
            self._consumer.paused |= self._consumer.bytes_left <= 0  # the window may be smaller now
            self._resume()

    def _limit(self, consumer: ConsumerStream) -> None:
        consumer.pauses_after_lease = self._outboxes.is_crowded
        consumer.bytes_left = self._window - self._on_way_bytes if self._window else UNBOUNDED

    def credit(self, messages: int) -> None:
        """Add the client's credit for `messages` more, up to CREDIT_MAX in all."""
        assert self._consumer is not None
        allowed = 0 if self._leaving else CREDIT_MAX - self._consumer.credit
        self._leader.groups.credit(self._group, self._consumer, min(messages, allowed))
        self._host.kick()

    def _begin_leaving(self) -> None:
        """Stop deliveries, and confirm that behind the deliveries in the outbox."""
        self._leaving = True
        self._end_credit()
        self._unread_acks += ANSWER_OFFSETS
        self._enqueue(_Outgoing(pb.ConsumeResponse(leaving=True), acks=ANSWER_OFFSETS))

    def _end_credit(self) -> None:
        assert self._consumer is not None
        self._consumer.end_credit()
        self._credit_ended = self._last_lease

    async def read(self, requests: AsyncIterator[pb.ConsumeRequest]) -> None:
        """Process the client's requests until they end or one is invalid; then answer every ack."""
        try:
            async for request in requests:
                while self._unread_acks > UNREAD_ACKS_MAX:
                    await self._read.wait()
                if self.ended is not None:
                    break
                kind = request.WhichOneof("kind")
                self._report_presence()
                self.note_window(request)
                if kind == "credit":
                    self.credit(request.credit)
                elif kind in ("ack", "nack", "extend"):
                    await self._settle(getattr(request, kind))
                elif kind == "leaving":
                    self._begin_leaving()
                elif kind is not None or not (request.window_bytes or request.received):
                    limit = "must be credit, ack, nack, extend or leaving once open"
                    raise InvalidRequestError("kind", kind, limit)
        except EngineError as error:
            self.end(error)
        finally:
            self._reading = False
            self._end_if_answered()

    def _report_presence(self) -> None:
        if self._consumer is not None:
            self._leader.groups.on_request(self._group, self._consumer)

    def _end_if_answered(self) -> None:
        if (self.ended is not None or not self._reading) and not self._acking:
            self._enqueue(_Outgoing(None))

    async def _settle(self, request: Settlement) -> None:
        size = len(request.offsets) + len(request.leases) + ANSWER_OFFSETS
        self._acking += 1
        self._unread_acks += size
        began = time.perf_counter()

        def done(result: object) -> None:
            self._acking -= 1
            answer = answer_to(request, result)
            code = grpc_errors.code_in(answer.error)
            self._hooks.on_answer("Consume", code, "no", time.perf_counter() - began)
            self._enqueue(_Outgoing(pb.ConsumeResponse(acked=answer), acks=size))
            self._end_if_answered()

        asker = LeaseAsker(self._leader, self._group, self._ids, self._consumer, self._desk)
        try:
            for _ in settle_all(asker, request, self._host.now(), done):
                self._after_portion(request)
                await asyncio.sleep(0)
            self._after_portion(request)
        except EngineError as refused:
            done(refused)
            self._host.kick()

    def _after_portion(self, request: Settlement) -> None:
        """Let the leader step after a portion of a request."""
        if isinstance(request, pb.NackRequest) and request.ends_credit and self._consumer:
            self._end_credit()  # else the consumer gets the same messages at once
        self._host.kick()

    def _deliver(self, delivery: Delivery) -> None:
        assert self._consumer is not None
        response = pb.ConsumeResponse()
        deliveries = response.deliveries  # filled in place: messages would be copied into it
        wire_rows.put_delivery(deliveries, delivery, self._ids, self._salt)
        lease_id, messages = delivery.lease.lease_id, len(delivery.lease.offsets)
        size = _bytes_of(deliveries)
        self._outbox_bytes += size
        if self._window:
            self._on_way.append(size)
            self._on_way_bytes += size
        else:
            self._received += 1
        self._outboxes.add(self._peer, self._caller, size)
        was_held = self._consumer.paused or self._consumer.bytes_left <= 0
        self._limit(self._consumer)
        is_full = self._outbox_bytes > self._outboxes.most(self._caller)
        self._consumer.paused = is_full or self._consumer.bytes_left <= 0
        self._last_lease = lease_id
        self._enqueue(_Outgoing(response, size, 0, lease_id, messages))
        if was_held and not self._consumer.paused:
            self.credit(0)

    def _withdraw(self, lease_id: LeaseId) -> list[LeaseId]:
        """Drop the delivery of a lease, if it was not sent, and all later ones; see ConsumerStream.

        The consumer does not read: it gets nothing more until it does. Its credit for the dropped
        messages counts again, except if the client ended its credit since.
        """
        if lease_id <= self._sent_lease:
            return []
        assert self._consumer is not None
        dropped = [each for each in self._outbox if each.lease >= lease_id]
        self._outbox = deque(each for each in self._outbox if each.lease < lease_id)
        self._release_bytes(sum(each.size for each in dropped))
        lost = self._on_way[max(0, len(self._on_way) - len(dropped)) :]
        del self._on_way[len(self._on_way) - len(lost) :]
        self._received -= len(dropped) - len(lost)
        self._on_way_bytes -= sum(lost)
        self._limit(self._consumer)
        counts = [each.messages for each in dropped if each.lease > self._credit_ended]
        self._consumer.credit += sum(counts)
        self._consumer.paused = True
        return [each.lease for each in dropped]

    def _recall(self, offsets: U64 | None) -> None:
        """Tell the client of messages that were taken back; see ConsumerStream."""
        recalled = pb.Recalled(offsets=() if offsets is None else offsets.tolist())
        weight = ANSWER_OFFSETS + len(recalled.offsets)
        self._unread_acks += weight
        self._enqueue(_Outgoing(pb.ConsumeResponse(recalled=recalled), acks=weight))

    def _enqueue(self, outgoing: _Outgoing) -> None:
        self._outbox.append(outgoing)
        self._filled.set()

    def _release_bytes(self, size: int) -> None:
        self._outbox_bytes -= size
        self._outboxes.add(self._peer, self._caller, -size)

    async def next(self) -> pb.ConsumeResponse | None:
        """Return the next response. None: the stream is over."""
        self._release_bytes(self._writing)
        self._writing = 0
        while not self._outbox:
            self._resume()
            await self._filled.wait()
        outgoing = self._outbox.popleft()
        self._writing = outgoing.size
        self._unread_acks -= outgoing.acks
        self._sent += bool(outgoing.lease)
        self._sent_lease = outgoing.lease or self._sent_lease
        self._read.set()
        self._resume()
        return outgoing.response

    def _resume(self) -> None:
        """Let the consumer have messages again, if it reads and has room for them."""
        consumer = self._consumer
        if consumer is None or not consumer.paused or consumer.bytes_left < self._window // 2:
            return
        if self._outbox_bytes <= self._outboxes.most(self._caller) // 2:
            self._limit(consumer)
            consumer.paused = False
            self._leader.groups.credit(self._group, consumer, 0)
            self._host.kick()

    def end(self, why: EngineError) -> None:
        """Close the stream with an error, after the responses in the outbox.

        Pending acks are answered first, except by a deposed leader: its consumers have to reconnect
        to the new leader.
        """
        self.ended = self.ended or why
        if isinstance(why, NotLeaderError):
            self._enqueue(_Outgoing(None))
        else:
            self._end_if_answered()

    def close(self) -> None:
        """Leave the group. Its leased messages are ready again at once.

        Deliveries in the outbox never left this node, so that they count no attempt.
        """
        self._release_bytes(self._outbox_bytes)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            unsent = [each.lease for each in self._outbox if each.lease]
            self._leader.groups.leave(self._group, consumer, unsent)
            self._host.kick()
