"""The client for asyncio.

    async with AsyncTimerClient("127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403") as client:
        timer = await client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        async with client.consumer("orders", group="billing") as consumer:
            async for message in consumer:
                message.ack()

One client is one idempotent producer: what it retries becomes one set of timers, through failovers
too. Its first single calls need no producer (timerclient/streams/first_calls.py). Requests are sent
in the order in which their calls began, so that plain concurrency (tasks, `asyncio.gather`) is
pipelining. Calls of `schedule` that are made close together share a request. What waits for its
answer is held in memory: the callers bound that by how many calls they make at a time.

A client belongs to the event loop that it is used on first.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar, Unpack

import grpc

from timerclient.client.group_calls import STARTS, Start
from timerclient.client.timer_calls import Seconds, timeout_s
from timerclient.client.topic_calls import TopicCalls
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.rows.messages import Batch, Message
from timerclient.rows.policy_fields import PolicyFields
from timerclient.rows.rows import DueTime, Headers, NewTimer, OnConflict, WhenMany
from timerclient.rows.scheduled_timers import RequestOutcome, Timer, Timers
from timerclient.streams.credit import Credit
from timerclient.streams.first_calls import REPEAT_S, FirstCalls
from timerclient.streams.nodes import (
    RANK_MAX,
    Dial,
    Method,
    Nodes,
    check_not_forked,
    parse_addresses,
    tcp,
)
from timerclient.streams.producer import ProducerStream, SingleRow, WaitingCall, encode_rows
from timerclient.streams.subscription import Subscription
from timerclient.values.client_events import Events, OnEvent
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import Closed, InvalidRequest, Overloaded, TimerError

T = TypeVar("T")
C = TypeVar("C", bound="Registered")

WINDOW = 1_000
"""Messages on their way or waiting, unless a consumer says otherwise."""
BLOCKED_S = 0.01
"""An application that blocks the event loop for longer may keep it from renewing leases …"""
TURNS = 5
"""… so the loop gets some turns: a request is on its way after four."""
Change = Literal["add", "replace", "remove"]
"""Of the voters."""
CHANGES: dict[str, pb.ChangeMembersRequest.Change.ValueType] = {
    "add": pb.ChangeMembersRequest.ADD,
    "replace": pb.ChangeMembersRequest.REPLACE,
    "remove": pb.ChangeMembersRequest.REMOVE,
}
WINDOW_MAX = 1_000_000
"""Of one consumer; the leader grants no more."""
REPEAT_NAMED_S = 240.0
"""How long a request with an id is sent again: less than a cluster remembers it by default."""
CLOSE_AFTER_ERROR_S = 2.0


def make_row(
    topic: str,
    payload: bytes,
    key: str | None,
    headers: Headers | None,
    on_conflict: OnConflict,
    when: DueTime,
) -> SingleRow:
    """Return one call's row.

    Raises:
        InvalidRequest: an argument is of the wrong kind, or out of range.
    """
    way, values = rows.moment(when)
    if len(values) != 1:
        raise InvalidRequest.of("when", values, "one timer has one due time")
    rows.utf8("topic", topic)  # here, or it would break the request that others share with it
    row = SingleRow(topic, rows.payload_bytes(payload), way, values[0])
    mode = rows.conflict_mode(on_conflict)
    rows.check_keyed(mode, [key])
    if key:
        row.key, row.on_conflict = rows.utf8("key", key), mode
    if headers:
        row.headers = rows.encode_headers(headers)
    if row.size > rows.REQUEST_SIZE_MAX:
        limit = f"at most {rows.REQUEST_SIZE_MAX} bytes"
        raise InvalidRequest.of("payload", f"{len(payload)} bytes", limit)
    return row


def encode_together(timers: Iterable[NewTimer], on_conflict: OnConflict) -> tuple[bytes, list[int]]:
    """Return what `encode_rows` makes of new timers.

    Raises:
        InvalidRequest: there is none, or one breaks a limit.
    """
    mode = rows.conflict_mode(on_conflict)
    made = [make_row(t.topic, t.payload, t.key, t.headers, on_conflict, t.when) for t in timers]
    if not made:
        raise InvalidRequest.of("timers", "none", "give at least one")
    body, order = encode_rows(made, mode)
    return rows.checked(body), order


def in_order(order: Sequence[int], outcome: RequestOutcome) -> Timers:
    """Return the timers that `encode_together` has put in another order."""
    return Timers(outcome.ordered(order))


def make_opening(
    topic: str, group: str, lease: Seconds | None, start: Start, name: str
) -> pb.OpenConsumer:
    """Return what opens a consumer.

    Raises:
        InvalidRequest: `start` is neither "earliest" nor "latest", the lease is not positive or
            far too long, or a name is no text.
    """
    for field, text in (("topic", topic), ("group", group), ("name", name)):
        rows.utf8(field, text)
    return pb.OpenConsumer(
        topic=topic,
        group=group,
        lease_ms=0 if lease is None else rows.lease_ms(lease),
        start=rows.choice("start", start, STARTS),
        consumer=name,
    )


def make_credit(window: int, max_messages: int | None) -> Credit:
    """Return the credit of a consumer.

    Raises:
        InvalidRequest: a number is not positive, or the window is beyond WINDOW_MAX.
    """
    if max_messages is not None:
        rows.whole("max_messages", max_messages, 1, rows.UINT64_MAX)
    return Credit(rows.whole("window", window, 1, WINDOW_MAX), max_messages)


def hold_max_s(hold_max: Seconds | None, settings: ClientSettings) -> float:
    """Return for how long a consumer renews leases, in seconds.

    Raises:
        InvalidRequest: it is negative, or no duration; names `hold_max`.
    """
    if hold_max is None:
        return settings.hold_s_max
    return rows.span_ms("hold_max", hold_max) / 1000


class Registered(Protocol):
    """A consumer, as its client sees it."""

    @property
    def _over(self) -> bool:
        """It needs no closing any more."""


def register(consumer: C, consumers: set[C]) -> None:
    """Put a consumer among a client's, and let those go that are over.

    Without a moment at which one that another thread puts there could be lost.
    """
    consumers.add(consumer)
    for each in [*consumers]:
        if each._over:  # noqa: SLF001 -- no business of who has the consumer
            consumers.discard(each)


class AsyncTimerClient(TopicCalls):
    """A connection to a cluster, for one event loop.

    `cluster`: "host:port,host:port", or a sequence of addresses; some of the nodes are enough.
    `timeout`: how long a call may take, failovers included, unless it says otherwise.
    `credentials`: of TLS; None: there is none.
    `dial`: makes the channel to an address, if that is not TCP; `credentials` don't count then.
    `on_event`: is called with each event of timerclient/values/client_events.py; the log gets them,
    too.
    """

    def __init__(
        self,
        cluster: str | Sequence[str],
        *,
        timeout: Seconds | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        dial: Dial | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 -- frozen
        on_event: OnEvent | None = None,
    ) -> None:
        self._addresses = parse_addresses(cluster)
        self.settings = settings
        self.events = Events(on_event)
        self._dial, self._over_tcp = dial or tcp(credentials), dial is None
        if self._over_tcp:
            check_not_forked()
        self._call_s = settings.call_s if timeout is None else timeout_s(timeout)
        self._nodes: Nodes | None = None
        self._producer: ProducerStream | None = None
        self._first_calls = FirstCalls()
        self._consumers: set[AsyncConsumer] = set()
        self._closed = False

    # ---- scheduling

    async def schedule(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payload: bytes,
        *,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,  # noqa: ASYNC109 -- it says what the error means, too
        **when: Unpack[DueTime],
    ) -> Timer:
        """Return the timer, once a majority of the cluster has it on disk.

        When it fires: `delay` (a timedelta, or seconds), `delay_level` (the nth of the topic's
        delays), `due` (an aware datetime) or `due_ms` (Unix milliseconds); none is at once.
        Policies may have the last word: see `describe_policies`.

        A `key` is unique among the pending timers of its topic. If one has it, `on_conflict` says:
        "reject" this one, "replace" it, which cancels it, or "keep" it and return it. With none
        pending, as when it has just fired, each of these schedules this one. "update" replaces a
        pending timer, and schedules nothing if there is none.

        A `request_id` (up to 64 bytes) makes the call one that may be made again, by whatever
        process: within the cluster's window (limits.request_window_ms, five minutes) the same call
        under the same id schedules nothing more and returns the same timer. The call sends it again
        itself, for four minutes: where the window is shorter, keep `timeout` below it.

        Raises:
            AlreadyExists: a pending timer has the key; `existing` is its id.
            NotPending: on_conflict is "update", and no pending timer has the key.
            InvalidRequest: an argument breaks a limit; a naive datetime, for one. Or the request
                id was another call's.
            OutcomeUnknown: no answer in time; the timer may have been scheduled, or be yet.
            TimerError: it was refused, and not scheduled.
        """
        began_s = time.monotonic()
        row = make_row(topic, payload, key, headers, on_conflict, when)
        if request_id is not None:
            body, _ = encode_rows([row], row.on_conflict)
            return (await self._schedule_named(body, request_id, timeout)).timer(key or "")
        future: asyncio.Future[Timer] = asyncio.get_running_loop().create_future()
        make = partial(RequestOutcome.timer, key=key) if key else RequestOutcome.timer
        call = WaitingCall(future, 1, make, self.within_s(timeout))
        if self.is_new:
            with contextlib.suppress(Overloaded):  # too many ids are remembered: a producer's turn
                return (await self._schedule_first(row, timeout)).timer(key or "")
        else:
            await self._first_calls.wait(call.within_s)
        call.waited_s = time.monotonic() - began_s
        self.producer().submit_row(row, call)
        return await self._answered(future, call)

    @property
    def is_new(self) -> bool:
        """Whether the next single call names its request, so that it needs no producer."""
        return self._producer is None and self._first_calls.is_one

    async def _schedule_first(
        self,
        row: SingleRow,
        timeout: Seconds | None,  # noqa: ASYNC109
    ) -> RequestOutcome:
        body, _ = encode_rows([row], row.on_conflict)
        named = self._schedule_named(
            body, secrets.token_hex(16), timeout, repeat_s=REPEAT_S, at_once=(Overloaded,)
        )
        return await self._first_calls.run(named)

    async def schedule_batch(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payloads: Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | Iterable[Headers | None] | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,  # noqa: ASYNC109 -- it says what the error means, too
        **when: Unpack[WhenMany],
    ) -> Timers:
        """Return the timers of one request, all or none, once a majority has them on disk.

        When they fire is one value for all, or one for each payload; see `schedule`. Timers whose
        keys are taken are decided one by one: see its `on_conflict`, and `Timers.results`. A
        `request_id` names the whole batch. A request holds up to 65,536 timers, of which up to
        1,024 have keys.

        Raises:
            InvalidRequest: an argument breaks a limit; a naive datetime, for one.
            OutcomeUnknown: no answer in time; the timers may have been scheduled, or be yet.
            TimerError: the batch was refused, and none of it scheduled.
        """
        body, n = rows.encode_batch(topic, payloads, when, keys, headers, on_conflict)
        if request_id is not None:
            return Timers(await self._schedule_named(body, request_id, timeout))
        future: asyncio.Future[Timers] = asyncio.get_running_loop().create_future()
        call = WaitingCall(future, n, Timers, self.within_s(timeout))
        await self._first_calls.wait(call.within_s)
        self.producer().submit(body, call)
        return await self._answered(future, call)

    async def schedule_all(
        self,
        timers: Iterable[NewTimer],
        *,
        on_conflict: OnConflict = "reject",
        request_id: str | None = None,
        timeout: Seconds | None = None,  # noqa: ASYNC109 -- it says what the error means, too
    ) -> Timers:
        """Return the timers of one request, of whatever topics, in their order: all or none.

        One entry of the log holds them all. Those whose keys are taken are decided one by one, as
        in a batch. Up to 1,024 have keys.

        Raises:
            InvalidRequest: an argument breaks a limit; there is no timer, for one.
            OutcomeUnknown: no answer in time; all may have been scheduled, or be yet.
            TimerError: they were refused, and none was scheduled.
        """
        body, order = encode_together(timers, on_conflict)
        if request_id is not None:
            return Timers((await self._schedule_named(body, request_id, timeout)).ordered(order))
        future: asyncio.Future[Timers] = asyncio.get_running_loop().create_future()
        make = partial(in_order, order)
        call = WaitingCall(future, len(order), make, self.within_s(timeout))
        await self._first_calls.wait(call.within_s)
        self.producer().submit(body, call)
        return await self._answered(future, call)

    async def _schedule_named(
        self,
        body: bytes,
        request_id: str,
        timeout: Seconds | None,  # noqa: ASYNC109
        *,
        repeat_s: float | None = None,
        at_once: tuple[type[TimerError], ...] = (),
    ) -> RequestOutcome:
        """Send a request that has an id, again and again, while the cluster remembers it."""
        request = pb.ScheduleRequest.FromString(body)
        request.request_id = rows.request_name(request_id)
        answer = await self.nodes().call(
            lambda node, left_s: node.timers.Schedule(request, timeout=left_s),
            within_s=self.within_s(timeout),
            repeat_s=REPEAT_NAMED_S if repeat_s is None else repeat_s,
            at_once=at_once,
        )
        return RequestOutcome(answer.timer_ids, answer.duplicate, answer.results, answer.other_ids)

    async def _answered(self, future: asyncio.Future[T], call: WaitingCall) -> T:
        try:
            return await future
        except asyncio.CancelledError:
            self.producer().withdraw(call)
            raise

    # ---- consuming

    def consumer(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        group: str,
        *,
        lease: Seconds | None = None,
        hold_max: Seconds | None = None,
        start: Start = "earliest",
        window: int = WINDOW,
        max_messages: int | None = None,
        name: str = "",
    ) -> "AsyncConsumer":
        """Return a consumer of a group; the group and the topic are made if they don't exist.

        `lease`: how long a message is this consumer's before others may get it; None: the group's
        default. The consumer renews it, at most for `hold_max` (a timedelta, or seconds; 0: not at
        all; None: `ClientSettings.hold_s_max`, ten minutes) after the application got the message.
        `start`: where the group begins if this creates it; it then keeps `lease` as its default,
        too. `window`: how many messages may be on their way or waiting here; fewer, if the
        application takes them one by one and is slow. `max_messages`: iteration ends after so
        many; no more are leased. `name` is for people.
        """
        credit = make_credit(window, max_messages)
        opening = make_opening(topic, group, lease, start, name)
        hold_s = hold_max_s(hold_max, self.settings)
        consumer = AsyncConsumer(self.nodes(), opening, credit, hold_s, self._call_s)
        register(consumer, self._consumers)
        return consumer

    # ---- administration: the answers are messages of the contract

    async def status(self, *, local: bool = False) -> pb.GetStatusResponse:
        """Return the status of the cluster as one node sees it.

        It is the first one that sees a leader serve. If none does, it is one of the highest epoch:
        nodes that wait, heal or are cut off know less. `local`: of the first node that answers.
        """
        request = pb.GetStatusRequest(local=local)

        def rank(answer: pb.GetStatusResponse) -> int:
            leads = any(
                node.serving and (node.name, node.epoch) == (answer.leader, answer.epoch)
                for node in answer.nodes
            )
            return RANK_MAX if local or leads else answer.epoch

        return await self.nodes().anywhere(
            lambda node, left_s: node.admin.GetStatus(request, timeout=left_s),
            within_s=self._call_s,
            rank=rank,
        )

    async def checkpoint(self, *, local: bool = False) -> pb.GetCheckpointResponse:
        """Return the nodes' checkpoints and the shared one, from the first node that answers."""
        request = pb.GetCheckpointRequest(local=local)
        return await self._anywhere(
            lambda node, left_s: node.admin.GetCheckpoint(request, timeout=left_s)
        )

    async def topics(self) -> list[pb.TopicStatus]:
        """Return all topics with their groups, by name, as the leader has them page by page."""
        return [topic async for topic in self._all_topics()]

    async def create_topic(self, topic: str) -> int:
        """Return the id of a topic that exists from now on."""
        rows.utf8("topic", topic)
        request = pb.CreateTopicRequest(topic=topic)
        answer = await self.nodes().call(
            lambda node, left_s: node.admin.CreateTopic(request, timeout=left_s),
            within_s=self._call_s,
        )
        return answer.topic_id

    async def transfer(self, target: str = "") -> bool:
        """Hand the leadership over to the node named `target`; empty: to any other.

        Returns when the successor serves. False: the target leads already, and nothing changed.

        Raises:
            InvalidRequest: the target lags, and did not catch up; the leader stays.
        """
        rows.utf8("target", target)
        request = pb.TransferLeadershipRequest(target=target)
        answer = await self.nodes().call(
            lambda node, left_s: node.admin.TransferLeadership(request, timeout=left_s),
            within_s=self._call_s,
            repeatable=False,
        )
        return not answer.unchanged

    async def members(self) -> pb.ListMembersResponse:
        """Return the voters, and the learners that answer.

        The answer is the first one of a node that sees a leader and a majority of the voters. If
        no node does, it is one of the highest epoch. A node that is cut off knows old voters only.
        """
        request = pb.ListMembersRequest()

        def rank(answer: pb.ListMembersResponse) -> int:
            voters = [member for member in answer.members if member.voter]
            up = sum(member.role != "unreachable" for member in voters)
            leads = any((one.name, one.role) == (answer.leader, "leader") for one in voters)
            return RANK_MAX if leads and 2 * up > len(voters) else answer.epoch

        return await self.nodes().anywhere(
            lambda node, left_s: node.admin.ListMembers(request, timeout=left_s),
            within_s=self._call_s,
            rank=rank,
        )

    async def change_members(self, change: Change, name: str) -> pb.ListMembersResponse:
        """Let a learner become a voter (`add`, `replace`) or a voter a learner (`remove`).

        Raises:
            InvalidRequest: there is no such change.
            OutcomeUnknown: it was proposed and may be made yet.
        """
        rows.utf8("name", name)
        request = pb.ChangeMembersRequest(change=rows.choice("change", change, CHANGES), name=name)
        return await self.nodes().call(
            lambda node, left_s: node.admin.ChangeMembers(request, timeout=left_s),
            within_s=self._call_s,
            repeatable=False,
        )

    async def describe_policies(
        self, *, namespace: str | None = None, topic: str | None = None
    ) -> pb.DescribePoliciesResponse:
        """Return what the cluster, a namespace or a topic says of timers, and what holds for it.

        Raises:
            NotFound: there is no such topic.
        """
        request = pb.DescribePoliciesRequest(scope=policy_fields.scope(namespace, topic))
        return await self.nodes().call(
            lambda node, left_s: node.admin.DescribePolicies(request, timeout=left_s),
            within_s=self._call_s,
        )

    async def alter_policies(
        self,
        said: PolicyFields = policy_fields.NOTHING,
        *,
        unset: Iterable[str] = (),
        namespace: str | None = None,
        topic: str | None = None,
        cluster: bool = False,
    ) -> pb.DescribePoliciesResponse:
        """Set policy fields of one scope, and unset others, by name.

        A field holds for timers that are scheduled from then on. Pauses, quotas, ttl and retention
        hold for those that exist, too.

        Args:
            said: fields to set, and their values.
            unset: fields to leave to the wider scope again.
            namespace: the scope is this namespace; or
            topic: the scope is this topic; or
            cluster: True: the scope is the whole cluster.

        Raises:
            InvalidRequest: not exactly one scope is given, a field is unknown, or its value is out
                of range.
            NotFound: there is no such topic, and this sets nothing of it, or none may be made so.
            OutcomeUnknown: no answer in time; it may have been changed.
        """
        scope = policy_fields.altered(namespace, topic, cluster=cluster)
        policy = policy_fields.policy(said)
        request = pb.AlterPoliciesRequest(scope=scope, set=policy, unset=unset)
        return await self.nodes().call(
            lambda node, left_s: node.admin.AlterPolicies(request, timeout=left_s),
            within_s=self._call_s,
            repeatable=False,
        )

    async def _anywhere(self, method: Method[T]) -> T:
        return await self.nodes().anywhere(method, within_s=self._call_s)

    # ---- life

    async def close(self, timeout: Seconds | None = None) -> None:  # noqa: ASYNC109
        """Wait for what was submitted, close all consumers, then all connections.

        What is not answered in time is given up: its future says whether it may have happened.

        Raises:
            OutcomeUnknown: of some consumer's acks; all is closed nonetheless.
        """
        if self._closed:
            return
        await self.close_with([each.close for each in self._consumers], self.within_s(timeout))

    async def __aenter__(self) -> Self:
        """Return the client; it connects with its first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close; after an error don't wait long for what is unanswered."""
        if error is None:
            await self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            await self.close(min(self._call_s, CLOSE_AFTER_ERROR_S))

    # ---- for the synchronous client

    async def close_with(
        self, consumers: Iterable[Callable[[float], Awaitable[None]]], within_s: float
    ) -> None:
        """Close consumers and the producer, side by side in the same time; then all connections.

        Raises:
            OutcomeUnknown: of some consumer's acks; all is closed nonetheless.
        """
        self._closed = True
        closing = [close(within_s) for close in consumers]
        if self._producer is not None:
            closing.append(self._producer.close(within_s))
        elif self._nodes is not None:
            closing.append(self._first_calls.close(within_s))
        try:
            told = await asyncio.gather(*closing, return_exceptions=True)
        finally:
            if self._nodes is not None:
                await self._nodes.close()
        for error in told:
            if error is not None:
                raise error

    def within_s(self, timeout: Seconds | None) -> float:
        """Return the time that a call has, in seconds."""
        return self._call_s if timeout is None else timeout_s(timeout)

    def nodes(self) -> Nodes:
        """Return the cluster's nodes, on the running event loop.

        Raises:
            Closed: the client is closed.
        """
        if self._closed:
            raise Closed("the client is closed")
        if self._nodes is None:
            self._nodes = Nodes(
                self._addresses,
                self.settings,
                self._dial,
                events=self.events,
                over_tcp=self._over_tcp,
            )
        return self._nodes

    def producer(self) -> ProducerStream:
        """Return the client's one producer.

        Raises:
            Closed: the client is closed.
        """
        if self._producer is None:
            self._producer = ProducerStream(self.nodes())
        return self._producer


class AsyncConsumer:
    """Iterates over the messages of a group until it is closed; reconnects through failovers."""

    def __init__(
        self,
        nodes: Nodes,
        opening: pb.OpenConsumer,
        credit: Credit,
        hold_max_s: float,
        call_s: float,
    ) -> None:
        self._nodes = nodes
        self._opening = opening
        self._credit = credit
        self._hold_max_s = hold_max_s
        self._call_s = call_s
        self._given_s = 0.0
        """When the application got something last, on the monotonic clock."""
        self._arrived = asyncio.Event()
        self._subscription: Subscription | None = None
        self.closed = False
        """It was closed, by its user or with the client."""

    async def __aenter__(self) -> Self:
        """Return the consumer, once a leader has opened it.

        Raises:
            Unreachable: none did in time.
            TimerError: it was refused.
        """
        try:
            await self._open().opened(self._call_s)
        except BaseException:
            if self._subscription is not None:
                await self._subscription.abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Confirm all acks and leave the group; after an error don't wait long for that."""
        if error is None:
            await self.close()
        else:
            await self._leave(min(self._call_s, CLOSE_AFTER_ERROR_S))

    @property
    def dropped_stale(self) -> int:
        """Messages dropped unseen, as their leases were over: their group gets them again."""
        return 0 if self._subscription is None else self._subscription.dropped_stale

    @property
    def leases_lost(self) -> int:
        """Messages that the application had, and that were not this consumer's any more."""
        return 0 if self._subscription is None else self._subscription.leases_lost

    @property
    def _over(self) -> bool:
        """It was closed, or ended by itself, and has nothing to tell."""
        ended = self._subscription
        return self.closed or (ended is not None and ended.told)

    def __aiter__(self) -> Self:
        """Iterate over messages; an error that ends the consumer is raised."""
        return self

    async def __anext__(self) -> Message:
        """Return the next message."""
        message = await self._wait(self._open().next, None)
        if message is None:
            raise StopAsyncIteration
        return message

    async def batches(self) -> AsyncIterator[Batch]:
        """Iterate over batches as the leader leased them: the fastest way."""
        while (batch := await self._wait(self._open().take, None)) is not None:
            yield batch

    async def receive(
        self,
        max_messages: int = 1,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
    ) -> list[Message]:
        """Return 1 to `max_messages` messages; none if none comes in time, or it was closed.

        `timeout`: None waits for ever, 0 not at all.
        """
        rows.whole("max_messages", max_messages, 1, rows.UINT64_MAX)
        within_s = None if timeout is None else timeout_s(timeout, zero=True)
        subscription = self._open()
        return await self._wait(partial(subscription.receive, max_messages), within_s) or []

    async def _wait(self, look: Callable[[], T | None], within_s: float | None) -> T | None:
        """Return what `look` finds. None: nothing came in time, or the consumer was closed."""
        subscription = self._open()
        if time.monotonic() - self._given_s > BLOCKED_S:
            for _ in range(TURNS):
                await asyncio.sleep(0)
        found = look()
        if not found:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while not (found := look()):
                        if subscription.error is not None:
                            raise subscription.error
                        if subscription.ended:
                            break
                        self._arrived.clear()
                        await self._arrived.wait()
        self._given_s = time.monotonic()
        return found

    async def flush(self, timeout: Seconds | None = None) -> None:  # noqa: ASYNC109
        """Wait until every ack that was made by now is answered.

        Raises:
            OutcomeUnknown: some are not, in time. They are still sent again.
        """
        within_s = self._call_s if timeout is None else timeout_s(timeout)
        await self._open().flush(within_s)

    async def close(self, timeout: Seconds | None = None) -> None:  # noqa: ASYNC109
        """Confirm all acks, then leave the group: its messages go to others at once.

        What was fetched ahead has not failed by that; what is unacked otherwise has.

        Raises:
            OutcomeUnknown: some acks were not answered in time, or failed as it ended by an error;
                their futures say which.
        """
        self.closed = True
        if self._subscription is not None:
            within_s = self._call_s if timeout is None else timeout_s(timeout)
            await self._subscription.close(within_s)

    async def _leave(self, within_s: float) -> None:
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            await self.close(within_s)

    def _open(self) -> Subscription:
        if self._subscription is None:
            if self.closed:
                raise Closed("the consumer is closed")
            self._subscription = Subscription(
                self._nodes, self._opening, self._credit, self._hold_max_s, self._arrived.set
            )
        return self._subscription
