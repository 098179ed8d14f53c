"""The client for asyncio.

    async with AsyncTimerClient("127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403") as client:
        timer = await client.schedule("orders", b"cancel 4711", delay=timedelta(minutes=30))
        async with client.consumer("orders", group="billing") as consumer:
            async for message in consumer:
                message.ack()

A client is one idempotent producer: a retried request schedules its timers once, through failovers
too. The first single calls need no producer (timerclient/streams/first_calls.py). Requests are sent
in the order of the calls, so concurrent calls (tasks, `asyncio.gather`) are pipelined. Calls of
`schedule` that are made close together share a request. The number of concurrent calls bounds the
memory. A client belongs to the event loop on which it is first used.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import grpc

from timerclient.client.consumers import (
    CLOSE_AFTER_ERROR_S,
    CLOSE_CANCELLED_S,
    WINDOW,
    AsyncConsumer,
    Consumers,
    hold_max_s,
    make_credit,
    make_opening,
)
from timerclient.client.group_calls import Start
from timerclient.client.series_calls import SeriesCalls
from timerclient.client.timer_calls import Seconds, timeout_s
from timerclient.client.tracing import Tracing
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.rows.rows import DueTime, Headers, NewTimer, OnConflict, WhenMany
from timerclient.rows.scheduled_timers import RequestOutcome, Timer, Timers
from timerclient.streams.credit import Credit
from timerclient.streams.first_calls import REPEAT_S, FirstCalls
from timerclient.streams.node_channel import Dial, check_not_forked, tcp
from timerclient.streams.nodes import RANK_MAX, Nodes
from timerclient.streams.producer import ProducerStream, SingleRow, WaitingCall, encode_rows
from timerclient.streams.shared_calls import SharedCalls
from timerclient.streams.subscription import Subscription
from timerclient.threads.background import check_threads
from timerclient.values.client_events import Events, OnEvent
from timerclient.values.client_settings import ClientSettings
from timerclient.values.client_tls import ClientTls
from timerclient.values.cluster_url import ClusterUrl, default_cluster, is_url
from timerclient.values.codecs import NO_VALUE, EncodedValue, Payload, payload_of
from timerclient.values.errors import Closed, InvalidRequest, Overloaded, TimerError
from timerclient.values.node_addresses import parse_addresses
from timerclient.values.policy_names import NOTHING, PolicyFields
from timerclient.values.same_fields import as_type

T = TypeVar("T")

Change = Literal["add", "replace", "remove"]
"""A change of the voters."""
CHANGES: dict[str, pb.ChangeMembersRequest.Change.ValueType] = {
    "add": pb.ChangeMembersRequest.CHANGE_ADD,
    "replace": pb.ChangeMembersRequest.CHANGE_REPLACE,
    "remove": pb.ChangeMembersRequest.CHANGE_REMOVE,
}
REPEAT_NAMED_S = 240.0
"""Seconds in which a request with an id is retried; below the default limits.request_window_ms."""


def make_row(  # noqa: PLR0913 -- the arguments of one call
    topic: str,
    payload: Payload,
    key: str | None,
    headers: Headers | None,
    on_conflict: OnConflict,
    when: DueTime,
    ordering_key: str | None = None,
    priority: int | None = None,
) -> SingleRow:
    """Return the row of one call.

    Raises:
        InvalidRequest: An argument is of the wrong type, or out of range.
    """
    way, values = rows.moment(when)
    rows.utf8("topic", topic)  # checked here: other calls may share the request
    if isinstance(payload, EncodedValue):
        headers, payload = payload.headers(headers), payload.payload()
    row = SingleRow(topic, rows.payload_bytes(payload), way, values[0])
    conflict_mode = rows.conflict_mode(on_conflict)
    rows.check_keyed("key", on_conflict, [key])
    if key is not None and (encoded := rows.utf8("key", key)):
        row.key, row.on_conflict = encoded, conflict_mode
    row.headers = rows.encode_headers(headers)
    if ordering_key is not None:
        row.ordering_key = rows.utf8("ordering_key", ordering_key)
    if priority is not None:
        row.priority = rows.priority(priority)
    if row.size > rows.REQUEST_SIZE_MAX:
        limit = f"at most {rows.REQUEST_SIZE_MAX} bytes"
        raise InvalidRequest.of("payload", rows.kind_of(payload), limit)
    return row


def encode_timers(timers: Iterable[NewTimer], on_conflict: OnConflict) -> tuple[bytes, list[int]]:
    """Return the request of new timers and the order of its rows, as `encode_rows`.

    Raises:
        InvalidRequest: There is no timer, or one exceeds a limit.
    """
    mode = rows.conflict_mode(on_conflict)
    given = enumerate(rows.sequence_of("timers", timers))
    made = [_nth_row(at, each, on_conflict) for at, each in given]
    if not made:
        raise InvalidRequest.of("timers", None, "give at least one")
    body, order = encode_rows(made, mode)
    return rows.check_size(body), order


def _nth_row(at: int, t: object, on_conflict: OnConflict) -> SingleRow:
    """Return the row of an element of the argument `timers`.

    Raises:
        InvalidRequest: It is no NewTimer, or it exceeds a limit; the field has its index.
    """
    if not isinstance(t, NewTimer):
        raise InvalidRequest.of(f"timers[{at}]", rows.kind_of(t), "must be a NewTimer")
    try:
        payload, more = payload_of(t.payload, t.json), (t.ordering_key, t.priority)
        return make_row(t.topic, payload, t.key, t.headers, on_conflict, t.when, *more)
    except InvalidRequest as refused:
        raise refused.with_field(f"timers[{at}].{refused.field}") from None


def error_in_order(order: Sequence[int], refused: InvalidRequest) -> InvalidRequest:
    """Return the cluster's error, such as of payload[1], with the place among the caller's timers.

    `order`: as `encode_timers` returned it.
    """
    if not (row := re.fullmatch(r"(\w+)\[(\d+)\]", refused.field)):
        return refused
    return refused.with_field(f"timers[{order[int(row[2])]}].{row[1]}")


def timers_in_order(
    order: Sequence[int], keys: Sequence[str | None], outcome: RequestOutcome
) -> Timers:
    """Return the timers in the caller's order, from the order that `encode_timers` returned.

    `keys`: in the caller's order.
    """
    return Timers(outcome.ordered(order), keys)


class ClientOptions(TypedDict, total=False):
    """Options of a client; see `AsyncTimerClient`."""

    timeout: Seconds | None
    credentials: grpc.ChannelCredentials | ClientTls | None
    token: str | Path | None
    dial: Dial | None
    settings: ClientSettings
    on_event: OnEvent | None
    tracing: Tracing | None


class AsyncTimerClient(SeriesCalls):
    """A client of a cluster, for one event loop.

    Args:
        cluster: "host:port,host:port", a sequence of addresses, or a URL
            (timerclient/values/cluster_url.py). Some of the nodes suffice. None: $TIMERS_URL.
        timeout: Default timeout of calls, failovers included. None: `ClientSettings.call_s`.
        credentials: TLS: the files of a certificate, or gRPC's credentials. None: no TLS.
        token: A bearer token or the path of its file. Needs TLS and all nodes' ports for tokens.
        dial: Makes the channel to an address; `credentials` are then ignored. None: TCP.
        settings: Limits and waits.
        on_event: Called with each event (timerclient/values/client_events.py). All are also logged.
        tracing: Makes OpenTelemetry's spans of schedules. None: no traces.

    Raises:
        InvalidRequest: An argument is wrong, or neither `cluster` nor $TIMERS_URL names a cluster.
    """

    def __init__(  # noqa: PLR0913 -- options, by keyword
        self,
        cluster: str | Sequence[str] | None = None,
        *,
        timeout: Seconds | None = None,
        credentials: grpc.ChannelCredentials | ClientTls | None = None,
        token: str | Path | None = None,
        dial: Dial | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 -- frozen
        on_event: OnEvent | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        if cluster is None:
            cluster = default_cluster()
        if is_url(cluster):
            place = ClusterUrl.read(str(cluster))
            cluster = place.addresses
            credentials, token = credentials or place.tls, token or place.token
        self._addresses = parse_addresses(cluster)
        self.settings = settings
        self.events = Events(on_event)
        self._dial, self._over_tcp = dial or tcp(credentials, token), dial is None
        self._calls_others = token is None
        if self._over_tcp:
            check_threads()
            check_not_forked()
        self._call_s = settings.call_s if timeout is None else timeout_s(timeout)
        self._nodes: Nodes | None = None
        self._producer: ProducerStream | None = None
        self._first_calls = FirstCalls()
        self.shared = SharedCalls()
        self._consumers: Consumers[AsyncConsumer] = Consumers()
        self._closed = False
        self.tracing = tracing
        if tracing is not None:
            tracing.instrument(self)

    # ---- scheduling

    async def schedule(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        payload: Payload | None = None,
        *,
        json: Any = NO_VALUE,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | None = None,
        ordering_key: str | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Timer:
        """Schedule a timer; return it once a majority of the cluster has it on disk.

        Give the `payload`, as bytes or as an `EncodedValue`, or a value as `json`. The header
        `content-type` then has the type of an encoded value, if `headers` do not.

        The due time is one of `delay` (a timedelta, or seconds), `delay_level` (n: the topic's nth
        delay), `due` (an aware datetime) and `due_ms` (Unix milliseconds). Without any, the timer
        fires at once. Policies may change the due time: see `describe_policies`.

        A `key` is unique among the pending timers of its topic; an empty key is no key. If a
        pending timer has the key, `on_conflict` decides: "reject" raises AlreadyExists, "replace"
        cancels the pending timer, "keep" returns the pending timer and schedules nothing. If no
        pending timer has the key, these three schedule the new timer. "update" replaces a pending
        timer; if there is none, it raises NotPending. All but "reject" need a key.

        Groups of type key_shared keep the order of messages with one `ordering_key`, or without one
        of those with one `key`. Any number of pending timers may share an ordering key. Shared
        groups deliver ready messages of a higher `priority` first: 0 to 9, None: 4.

        A `request_id` (up to 64 bytes) lets any process repeat the call. Within the cluster's
        window (limits.request_window_ms, five minutes) the same call with the same id schedules
        nothing more and returns the same timer. The client retries for four minutes. If the window
        is shorter, use a `timeout` below it.

        Raises:
            AlreadyExists: A pending timer has the key; `existing` is its id.
            NotPending: `on_conflict` is "update", and no pending timer has the key.
            InvalidRequest: An argument is wrong, or a different call had the request id.
            OutcomeUnknown: No answer in time; the timer may have been scheduled, or may still be.
            TimerError: The call was rejected; no timer was scheduled.
        """
        payload = payload_of(payload, json)
        row = make_row(topic, payload, key, headers, on_conflict, when, ordering_key, priority)
        if request_id is not None:
            body, _ = encode_rows([row], row.on_conflict)
            return (await self._schedule_named(body, request_id, timeout)).timer(key or "")
        future: asyncio.Future[Timer] = asyncio.get_running_loop().create_future()
        make = partial(RequestOutcome.timer, key=key) if key else RequestOutcome.timer
        call = WaitingCall(future, 1, make, self.within_s(timeout))
        if self.is_new:
            with contextlib.suppress(Overloaded):  # too many request ids are kept: use a producer
                return (await self._schedule_first(row, timeout)).timer(key or "")
        else:
            await self._after_first_calls(call)
        self.producer().submit_row(row, call)
        return await self._await_answer(future, call)

    @property
    def is_new(self) -> bool:
        """Whether the next single call sends a request id, and needs no producer."""
        return self._producer is None and self._first_calls.is_one

    async def _after_first_calls(self, call: WaitingCall) -> None:
        self.nodes().loop()  # checked before the wait, which is for one event loop
        await self._first_calls.wait(call.within_s)

    async def _schedule_first(self, row: SingleRow, timeout: Seconds | None) -> RequestOutcome:
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
        ordering_keys: Iterable[str | None] | None = None,
        priorities: int | Iterable[int | None] | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> Timers:
        """Schedule the timers of one request, all or none; return once a majority has them on disk.

        The due time and `priorities` are one value for all, or a sequence with one for each
        payload; see `schedule`. If a pending timer has a key of the batch, `on_conflict` decides
        about the new timer with that key only: see `Timers.results`. A `request_id` is of the whole
        batch. A request holds up to 65,536 timers, of which up to 1,024 have keys.

        Raises:
            InvalidRequest: An argument exceeds a limit, or a datetime is naive.
            OutcomeUnknown: No answer in time; the timers may have been scheduled, or may still be.
            TimerError: The batch was rejected; no timer was scheduled.
        """
        named = None if keys is None else tuple(rows.texts("keys", keys))
        body, n = rows.encode_batch(
            topic, payloads, when, named, headers, on_conflict, ordering_keys, priorities
        )
        make = partial(Timers, keys=named or ())
        if request_id is not None:
            return make(await self._schedule_named(body, request_id, timeout))
        future: asyncio.Future[Timers] = asyncio.get_running_loop().create_future()
        call = WaitingCall(future, n, make, self.within_s(timeout))
        await self._after_first_calls(call)
        self.producer().submit(body, call)
        return await self._await_answer(future, call)

    async def schedule_all(
        self,
        timers: Iterable[NewTimer],
        *,
        on_conflict: OnConflict = "reject",
        request_id: str | None = None,
        timeout: Seconds | None = None,
    ) -> Timers:
        """Schedule timers of any topics in one request, all or none; return them in their order.

        One entry of the log holds all of them. A key that a pending timer has concerns its own
        timer only, as in a batch. Up to 1,024 timers have keys.

        Raises:
            InvalidRequest: An argument exceeds a limit, or there is no timer.
            OutcomeUnknown: No answer in time; all may have been scheduled, or may still be.
            TimerError: The request was rejected; no timer was scheduled.
        """
        given = tuple(rows.sequence_of("timers", timers))
        body, order = encode_timers(given, on_conflict)
        make = partial(timers_in_order, order, [each.key for each in given])
        try:
            if request_id is not None:
                return make(await self._schedule_named(body, request_id, timeout))
            future: asyncio.Future[Timers] = asyncio.get_running_loop().create_future()
            call = WaitingCall(future, len(order), make, self.within_s(timeout))
            await self._after_first_calls(call)
            self.producer().submit(body, call)
            return await self._await_answer(future, call)
        except InvalidRequest as refused:
            raise error_in_order(order, refused) from None

    async def _schedule_named(
        self,
        body: bytes,
        request_id: str,
        timeout: Seconds | None,
        *,
        repeat_s: float | None = None,
        at_once: tuple[type[TimerError], ...] = (),
    ) -> RequestOutcome:
        """Send a request with an id, and retry while the cluster knows the id."""
        request = pb.ScheduleRequest.FromString(body)
        request.request_id = rows.request_name(request_id)
        answer = await self.nodes().call(
            lambda node, left_s: node.timers.Schedule(request, timeout=left_s),
            within_s=self.within_s(timeout),
            repeat_s=REPEAT_NAMED_S if repeat_s is None else repeat_s,
            at_once=at_once,
        )
        return RequestOutcome(answer.timer_ids, answer.duplicate, answer.results, answer.other_ids)

    async def _await_answer(self, future: asyncio.Future[T], call: WaitingCall) -> T:
        try:
            return await future
        except asyncio.CancelledError:
            self.producer().withdraw(call)
            raise

    # ---- consumers

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
    ) -> AsyncConsumer:
        """Return a consumer of a group. Use `with`: an open one keeps messages from the others.

        For asyncio, `async with` connects it and raises the errors below. Without it, the first use
        connects, and waits until a leader accepts or rejects it. For threads, it is connected on
        return. A missing group is created, and a missing topic if topics are created automatically.

        Args:
            lease: Duration of a lease, a timedelta or seconds; None: the group's setting. A group
                that is created by this call has it as its setting.
            hold_max: Time after the receipt of a message in which its lease is extended; 0: leases
                are not extended; None: `ClientSettings.hold_s_max`, ten minutes.
            start: First message of a group that is created by this call.
            window: Messages in flight or waiting in the consumer, 1 to 1,000,000. Fewer, if the
                application receives single messages slowly.
            max_messages: The iteration ends after this many; no more are leased. None: no limit.
            name: Of the consumer, for people.

        Raises:
            Unreachable: No leader accepted it in time.
            TimerError: The consumer was rejected.
        """
        credit = make_credit(window, max_messages)
        return self._consumer(make_opening(topic, group, lease, start, name), credit, hold_max)

    def _consumer(
        self, opening: pb.OpenConsumer, credit: Credit, hold_max: Seconds | None
    ) -> AsyncConsumer:
        hold_s = hold_max_s(hold_max, self.settings)
        subscribe = partial(Subscription, self.nodes(), opening, credit, hold_s)
        consumer = AsyncConsumer(opening, subscribe, self._call_s)
        self._consumers.register(consumer)
        return consumer

    # ---- administration: the results are messages of the contract

    async def status(self, *, local: bool = False) -> pb.GetStatusResponse:
        """Return the cluster's status, as one node knows it.

        The status is that of the first node that knows a serving leader; if there is none, of the
        node with the highest epoch. `local`: the first answer, with that node's own status only.
        """
        request = pb.GetStatusRequest(local=local)

        def rank(answer: pb.GetStatusResponse) -> int:
            leads = any(
                node.serving and (node.name, node.epoch) == (answer.leader, answer.epoch)
                for node in answer.nodes
            )
            return RANK_MAX if local or leads else answer.epoch

        return await self._anywhere(lambda node: node.admin.GetStatus, request, rank=rank)

    async def checkpoint(
        self, *, local: bool = False, at_index: int = 0
    ) -> pb.GetCheckpointResponse:
        """Return the nodes' checkpoints and the shared one, from a node that reaches most nodes.

        Args:
            local: Only of the first node that answers.
            at_index: Index of a CHECKPOINT entry: the digests are those there, empty if a node has
                not applied it, or has forgotten it. 0: of the last one that each node applied.
        """
        request = pb.GetCheckpointRequest(
            local=local, at_index=rows.whole_number("at_index", at_index, 0, (1 << 64) - 1)
        )

        def rank(answer: pb.GetCheckpointResponse) -> int:
            up = [node for node in answer.nodes if node.reachable]
            leads = any(node.role == "leader" for node in up)
            return RANK_MAX if local or (leads and 2 * len(up) > len(answer.nodes)) else len(up)

        return await self._anywhere(lambda node: node.admin.GetCheckpoint, request, rank=rank)

    async def topics(self) -> list[pb.TopicStatus]:
        """Return the topics that the caller may see, with groups, by name, from the leader."""
        return [topic async for topic in self._all_topics()]

    async def create_topic(self, topic: str) -> int:
        """Create a topic if it does not exist; return its id."""
        request = pb.CreateTopicRequest(topic=rows.text("topic", topic))
        answer = await self._call(lambda node: node.admin.CreateTopic, request)
        return answer.topic_id

    async def transfer(self, target: str = "") -> bool:
        """Transfer the leadership to the node named `target`; empty: to any other node.

        Returns True when the successor serves, and False if the target was the leader already.

        Raises:
            InvalidRequest: The target lags and did not catch up; the leader is unchanged.
        """
        request = pb.TransferLeadershipRequest(target=rows.text("target", target))
        answer = await self._call(
            lambda node: node.admin.TransferLeadership, request, repeatable=False
        )
        return not answer.unchanged

    async def members(self) -> pb.ListMembersResponse:
        """Return the voters, and the learners that answer.

        The answer is that of the first node that reaches the leader and a majority of the voters;
        if there is none, of the node with the highest epoch.
        """
        request = pb.ListMembersRequest()

        def rank(answer: pb.ListMembersResponse) -> int:
            voters = [member for member in answer.members if member.voter]
            up = sum(member.role != "unreachable" for member in voters)
            leads = any((one.name, one.role) == (answer.leader, "leader") for one in voters)
            return RANK_MAX if leads and 2 * up > len(voters) else answer.epoch

        return await self._anywhere(lambda node: node.admin.ListMembers, request, rank=rank)

    async def change_members(self, change: Change, name: str) -> pb.ListMembersResponse:
        """Make a learner a voter (`add`, `replace`), or a voter a learner (`remove`).

        Raises:
            InvalidRequest: There is no such change.
            OutcomeUnknown: The change was proposed and may still be committed.
        """
        rows.utf8("name", name)
        request = pb.ChangeMembersRequest(change=rows.choice("change", change, CHANGES), name=name)
        answer = await self._call(lambda node: node.admin.ChangeMembers, request, repeatable=False)
        return as_type(pb.ListMembersResponse, answer)

    async def describe_policies(
        self, *, namespace: str | None = None, topic: str | None = None
    ) -> pb.DescribePoliciesResponse:
        """Return the policy of the cluster, a namespace or a topic: own and effective fields.

        Raises:
            NotFound: There is no such topic.
        """
        request = pb.DescribePoliciesRequest(scope=policy_fields.scope(namespace, topic))
        return await self._call(lambda node: node.admin.DescribePolicies, request)

    async def alter_policies(
        self,
        fields: PolicyFields = NOTHING,
        *,
        unset: Iterable[str] = (),
        namespace: str | None = None,
        topic: str | None = None,
        cluster: bool = False,
    ) -> pb.DescribePoliciesResponse:
        """Set and unset policy fields of one scope: a namespace, a topic, or the cluster.

        A field applies to timers that are scheduled later. Pauses, quotas, ttl and retention also
        apply to existing timers and messages.

        Args:
            fields: Names and values of fields to set.
            unset: Names of fields to unset; they follow the wider scope again.

        Raises:
            InvalidRequest: Not exactly one scope is given, a field is unknown, or a value is out
                of range.
            NotFound: There is no such topic. If topics are created automatically, `fields` do so.
            OutcomeUnknown: No answer in time; the policy may have been changed.
        """
        scope = policy_fields.change_scope(namespace, topic, cluster=cluster)
        policy = policy_fields.policy_of(fields)
        names = rows.texts("unset", unset)
        request = pb.AlterPoliciesRequest(scope=scope, set=policy, unset=names)
        answer = await self._call(lambda node: node.admin.AlterPolicies, request, repeatable=False)
        return as_type(pb.DescribePoliciesResponse, answer)

    # ---- life

    async def close(self, timeout: Seconds | None = None) -> None:
        """Wait for submitted calls, close all consumers, then close all connections.

        The future of a call without an answer in time has an error: OutcomeUnknown or Closed.

        Raises:
            OutcomeUnknown: A consumer's acks were not answered; everything is closed nonetheless.
        """
        if self._closed:
            return
        await self.close_with([each.close for each in self._consumers], self.within_s(timeout))

    async def __aenter__(self) -> Self:
        """Return the client; it connects at its first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the client; after an error, within two seconds."""
        if error is None:
            await self.close()
            return
        with contextlib.suppress(TimerError):  # the error that ends the block matters more
            await self.close(min(self._call_s, CLOSE_AFTER_ERROR_S))

    def __repr__(self) -> str:
        return f"AsyncTimerClient({self._repr_text()})"

    # ---- for the synchronous client

    def _repr_text(self) -> str:
        return ",".join(self._addresses) + (", closed" if self._closed else "")

    async def close_with(
        self, consumers: Iterable[Callable[[float], Awaitable[None]]], within_s: float
    ) -> None:
        """Close consumers and the producer concurrently, then all connections.

        Raises:
            OutcomeUnknown: A consumer's acks were not answered; everything is closed nonetheless.
        """
        self._closed = True
        closes = [*consumers]
        if self._producer is not None:
            closes.append(self._producer.close)
        elif self._nodes is not None:
            closes.append(self._first_calls.close)
        try:
            outcomes = await asyncio.gather(*(f(within_s) for f in closes), return_exceptions=True)
        except asyncio.CancelledError:  # maybe before the closes have begun
            await asyncio.gather(*(f(CLOSE_CANCELLED_S) for f in closes), return_exceptions=True)
            raise
        finally:
            if self._nodes is not None:
                await self._nodes.close()
        for error in outcomes:
            if error is not None:
                raise error

    def within_s(self, timeout: Seconds | None) -> float:
        """Return the seconds that a call may take."""
        return self._call_s if timeout is None else timeout_s(timeout)

    def nodes(self) -> Nodes:
        """Return the cluster's nodes, on the running event loop.

        Raises:
            Closed: The client is closed.
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
                call_others=self._calls_others,
            )
        return self._nodes

    def producer(self) -> ProducerStream:
        """Return the client's producer.

        Raises:
            Closed: The client is closed.
            RuntimeError: The client is used on another event loop than before.
        """
        if self._producer is None:
            nodes = self.nodes()
            nodes.loop()  # checked first, as a producer keeps the loop on which it is made
            self._producer = ProducerStream(nodes)
        elif self._nodes is not None:
            self._nodes.loop()
        return self._producer
