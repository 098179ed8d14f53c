"""Any node takes any request: followers of a real cluster send on what only the leader can do."""

import asyncio
import contextlib
import gc
import json
import queue
import re
import socket
import threading
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.rpc import handlers
from cluster.rpc import relay as relay_module
from cluster.rpc.endpoints import READ_AHEAD_BYTES, RELAY_OPTIONS
from cluster.rpc.handlers import Service, ServiceHooks, unary_handler
from cluster.rpc.outboxes import Outboxes
from cluster.rpc.relay import DIRECT, PATHS, Relay, is_repeatable
from cluster.security.access_rules import Permission
from cluster.security.method_rules import CONTRACT_RULES, Repeat
from tests.cluster.http_document import send
from tests.cluster.running import RPC_S, Running, error_of, streamed, until
from tests.waiting import until as until_true
from timer.model.timer_errors import (
    LeadershipLostError,
    NotLeaderError,
    NotReadyError,
    OverloadedError,
)
from timerclient import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.client_events import Connected, LeaderMissing
from timerclient.values.errors import Unreachable
from timerclient.values.reasons import Reason
from timerclient.values.wire_errors import TRAILER

NOW = 10**10  # a due time that has passed


def one_timer(topic: str, payload: bytes = b"x") -> pb.ScheduleRequest:
    timers = pb.TimerColumns(
        topic=topic, due_ms=[NOW], payload_sizes=[len(payload)], payloads=payload
    )
    return pb.ScheduleRequest(timers=[timers])


def reason(failed: Any) -> str:
    trailer = dict(failed.trailing_metadata())[TRAILER]
    return Reason(pb.Error.FromString(trailer).reason).name


def test_methods_that_need_observe_are_reads() -> None:
    rules = CONTRACT_RULES.items()
    observe = {name for name, rule in rules if rule.permission is Permission.OBSERVE}
    reads = {name for name, rule in rules if rule.repeat is Repeat.READ}
    assert observe <= reads
    changes = {
        name for name in observe if not re.match("Get|List|Count|Tell|Describe|Peek|Read", name)
    }
    assert changes == set(), "these need `observe`, and a caller repeats them"


def test_a_follower_sends_requests_on(cluster: Running, topic: str) -> None:
    follower = cluster.followers()[0]
    timers, consuming = cluster.timers(follower), cluster.consuming(follower)
    before = cluster.metric(follower, "timer_relayed_total")
    answer = timers.Schedule(one_timer(topic, b"paid"), timeout=RPC_S)
    assert len(answer.timer_ids) == 15
    assert cluster.admin(follower).ListTopics(pb.ListTopicsRequest(topic=topic)).count == 1

    asked = pb.ReceiveRequest(topic=topic, group="g", wait_ms=1_000)

    def receive() -> pb.ReceiveResponse | None:
        taken = consuming.Receive(asked, timeout=RPC_S)
        return taken if taken.queue_offsets else None

    received = until(receive)
    assert received.payloads == b"paid"
    ack = pb.AckRequest(
        topic=topic,
        group="g",
        epoch=received.epoch,
        lease_id=received.lease_id,
        offsets=received.queue_offsets,
    )
    assert list(consuming.Ack(ack, timeout=RPC_S).results) == [pb.ACK_RESULT_ACKED]
    assert cluster.metric(follower, "timer_relayed_total") >= before + 4


def test_rpcs_are_measured_where_they_arrive_and_where_they_are_answered(
    cluster: Running, topic: str
) -> None:
    follower, leader = cluster.followers()[0], cluster.wait_for_leader()
    labels = 'method="{}",relayed="{}"'.format
    refused = f'timer_rpc_seconds_count{{code="NOT_FOUND",{labels("GetTimer", "yes")}}}'
    counted = {
        follower: [
            f'timer_rpc_seconds_count{{code="OK",{labels("Schedule", "yes")}}}',
            f'timer_streams_ended_total{{code="OK",{labels("ScheduleStream", "yes")}}}',
            refused,
        ],
        leader: [
            f'timer_rpc_seconds_count{{code="OK",{labels("Schedule", "no")}}}',
            f'timer_rpc_seconds_count{{code="OK",{labels("ScheduleStream", "no")}}}',
            refused.replace("yes", "no"),
        ],
    }

    def numbers() -> list[float]:
        return [cluster.metric(node, each) for node, names in counted.items() for each in names]

    before = numbers()
    cluster.timers(follower).Schedule(one_timer(topic), timeout=RPC_S)
    assert [*cluster.timers(follower).ScheduleStream(streamed(one_timer(topic)), timeout=RPC_S)]
    with pytest.raises(grpc.RpcError):
        cluster.timers(follower).GetTimer(
            pb.GetTimerRequest(topic=topic, key="none"), timeout=RPC_S
        )
    until(lambda: numbers() == [each + 1 for each in before])
    assert cluster.metric(leader, 'timer_connections{port="grpc"}') >= 1
    assert cluster.metric(leader, 'timer_connections_limit{port="grpc"}') >= 1_000
    peers = 'timer_connections{port="replication"}'
    until(lambda: all(cluster.metric(node, peers) == 4 for node in cluster.nodes))
    name = f'timer_topic_scheduled_total{{topic="{topic}"}}'
    until(lambda: all(cluster.metric(node, name) == 2 for node in counted))


def test_a_follower_takes_rows(cluster: Running, topic: str) -> None:
    follower = cluster.followers()[0]
    timers, consuming = cluster.timers(follower), cluster.consuming(follower)
    request = pb.ScheduleTimerRequest(
        topic=topic, payload=b"paid", key="k", headers={"a": "b"}, request_id=topic
    )
    names = ("timer_request_ids", "timer_request_id_timers")

    def remembered() -> list[float]:
        return [cluster.metric(cluster.wait_for_leader(), name) for name in names]

    before = remembered()
    answer = timers.ScheduleTimer(request, timeout=RPC_S)
    again = timers.ScheduleTimer(request, timeout=RPC_S)
    assert remembered() == [each + 1 for each in before]
    assert (answer.duplicate, again.duplicate) == (False, True)
    assert (again.timer_id, again.due) == (answer.timer_id, answer.due)
    request.request_id, request.due.seconds = "", 1 << 62
    with pytest.raises(grpc.RpcError) as refused:
        timers.ScheduleTimer(request, timeout=RPC_S)
    assert error_of(refused.value).field == "due.seconds"

    def stream() -> Iterator[pb.ConsumeRequest]:
        opening = pb.OpenConsumer(topic=topic, group="g", credit=1, rows=True)
        yield pb.ConsumeRequest(open=opening)
        yield pb.ConsumeRequest(nack=pb.NackRequest(leases=[leases.get()], delay_ms=0))

    leases: queue.Queue[bytes] = queue.Queue()
    responses = consuming.Consume(stream(), timeout=2 * RPC_S)
    assert next(responses).HasField("opened")
    [seen] = next(responses).deliveries.messages
    leases.put(seen.lease)
    assert [*next(responses).acked.results] == [pb.ACK_RESULT_NACKED]
    responses.cancel()

    asked = pb.ReceiveRequest(topic=topic, group="g", wait_ms=1_000, rows=True)
    message = until(lambda: [*consuming.Receive(asked, timeout=RPC_S).messages])[0]
    assert (message.payload, message.key, dict(message.headers)) == (b"paid", "k", {"a": "b"})
    assert (message.timer_id, message.attempts, message.failures) == (answer.timer_id, 2, 1)
    extension = pb.ExtendRequest(topic=topic, group="g", leases=[message.lease])
    extended = consuming.Extend(extension, timeout=RPC_S)
    assert [*extended.results] == [pb.ACK_RESULT_EXTENDED]
    ack = pb.AckRequest(topic=topic, group="g", leases=[message.lease, seen.lease])
    assert consuming.Ack(ack, timeout=RPC_S).results[0] == pb.ACK_RESULT_ACKED
    ack.leases[0] += b"x"
    with pytest.raises(grpc.RpcError) as refused:
        consuming.Ack(ack, timeout=RPC_S)
    assert error_of(refused.value).field == "leases"


def test_conflict_of_keys_is_an_error_for_requests_that_want_one(
    cluster: Running, topic: str
) -> None:
    timers = cluster.timers(cluster.followers()[0])
    request = pb.ScheduleTimerRequest(topic=topic, key="k")
    request.delay.seconds = 600
    first = timers.ScheduleTimer(request, timeout=RPC_S)
    second = timers.ScheduleTimer(request, timeout=RPC_S)
    assert (second.result, second.other_id) == (pb.SCHEDULE_RESULT_REJECTED, first.timer_id)
    request.conflict_is_error, request.request_id = True, topic
    for _ in range(2):  # a repetition, too
        with pytest.raises(grpc.RpcError) as refused:
            timers.ScheduleTimer(request, timeout=RPC_S)
        assert error_of(refused.value).reason == pb.REASON_ALREADY_EXISTS
    request.on_conflict, request.key, request.request_id = pb.ON_CONFLICT_UPDATE, "other", ""
    with pytest.raises(grpc.RpcError) as refused:
        timers.ScheduleTimer(request, timeout=RPC_S)
    assert error_of(refused.value).reason == pb.REASON_NOT_FOUND


def test_streams_pass_a_follower(cluster: Running, topic: str) -> None:
    follower = cluster.followers()[0]
    requests = [one_timer(topic, b"%d" % n) for n in range(5)]
    for number, request in enumerate(requests, 1):
        request.request_no = number
    answers = [*cluster.timers(follower).ScheduleStream(streamed(*requests), timeout=RPC_S)]
    assert [each.request_no for each in answers] == [1, 2, 3, 4, 5]

    opening = pb.OpenConsumer(topic=topic, group="g", credit=10)
    over = threading.Event()

    def told() -> Iterator[pb.ConsumeRequest]:
        yield pb.ConsumeRequest(open=opening)
        over.wait(RPC_S)

    payloads, stream = b"", cluster.consuming(follower).Consume(told(), timeout=RPC_S)
    for response in stream:
        payloads += response.deliveries.payloads
        if len(payloads) == len(requests):
            break
    over.set()
    stream.cancel()
    assert payloads == b"01234"


def test_refusals_are_the_leaders(cluster: Running) -> None:
    follower = cluster.followers()[0]
    empty = pb.ScheduleRequest(timers=[pb.TimerColumns(topic="t", payload_sizes=[0])])
    refused = []
    for node in (follower, cluster.wait_for_leader()):
        with pytest.raises(grpc.RpcError) as failed:
            cluster.timers(node).Schedule(empty, timeout=RPC_S)
        error: Any = failed.value
        refused.append((error.code(), error.details(), reason(error)))
    assert refused[0] == refused[1]
    assert refused[0][2] == "INVALID_REQUEST"


class Follower(Service):
    """Knows no leader."""

    @unary_handler
    async def GetTimer(  # noqa: N802
        self, request: pb.GetTimerRequest, context: Any
    ) -> pb.GetTimerResponse:
        del request, context
        raise NotLeaderError(None)


async def test_only_clients_that_look_for_the_leader_get_not_leader() -> None:
    server, address = await serving("GetTimer", Follower().GetTimer)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            get: Any = channel.unary_unary(PATHS["GetTimer"])
            for metadata, code, name in (
                ((), grpc.StatusCode.UNAVAILABLE, "NOT_READY"),
                (((DIRECT, "test"),), grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await get(b"", metadata=metadata)
                assert (failed.value.code(), reason(failed.value)) == (code, name)
    finally:
        await server.stop(None)


RETRIES = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.02s",
                    "maxBackoff": "0.02s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["ABORTED", "RESOURCE_EXHAUSTED"],
                },
            }
        ]
    }
)


class Leaving(Service):
    """Loses its leadership with each request in flight."""

    def __init__(self, relay: Relay | None = None) -> None:
        super().__init__(ServiceHooks(relay=relay))
        self.calls = 0

    @unary_handler
    async def ScheduleTimer(  # noqa: N802
        self, request: pb.ScheduleTimerRequest, context: Any
    ) -> pb.ScheduleTimerResponse:
        del context
        self.calls += 1
        if request.topic == "full":
            raise OverloadedError("it", retry_after_ms=1)
        raise LeadershipLostError("deposed")


async def test_grpc_itself_repeats_only_requests_that_may_be_applied_twice() -> None:
    leader = Leaving()
    parse = pb.ScheduleTimerRequest.FromString
    server, address = await serving("ScheduleTimer", leader.ScheduleTimer, parse=parse)
    relay = Relay("n1", lambda: "n2", lambda _: grpc.aio.insecure_channel(address))
    follower, second = await serving("ScheduleTimer", Leaving(relay).ScheduleTimer, parse=parse)
    options = [("grpc.service_config", RETRIES)]
    try:
        for target in (address, second):
            for request, calls in (
                (pb.ScheduleTimerRequest(topic="t"), 1),
                (pb.ScheduleTimerRequest(topic="t", request_id="r"), 3),
                (pb.ScheduleTimerRequest(topic="full"), 3),
            ):
                leader.calls = 0
                async with grpc.aio.insecure_channel(target, options=options) as channel:
                    call: Any = channel.unary_unary(PATHS["ScheduleTimer"])
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call(request.SerializeToString())
                assert leader.calls == calls, (target, request)
    finally:
        await relay.close()
        await follower.stop(None)
        await server.stop(None)


@pytest.mark.parametrize(
    ("request_", "repeatable"),
    [
        (pb.ScheduleRequest(), False),
        (pb.ScheduleRequest(producer_id=1, sequence=1), True),
        (pb.CancelRequest(timer_ids=b"x"), True),
        (pb.CancelRequest(keys=pb.TimerKeys(topic="t")), False),
        (pb.RescheduleRequest(timer_ids=b"x"), True),
        (pb.RescheduleRequest(keys=pb.TimerKeys(topic="t")), False),
        (pb.AckRequest(), True),
        (pb.CreateSeriesRequest(), True),
        (pb.CreateSeriesRequest(alter=True), False),
        (pb.AlterPoliciesRequest(), False),
        (pb.RedriveRequest(), False),
        (pb.DeleteTopicRequest(), False),
        (pb.GetTimerRequest(), True),
    ],
)
def test_request_that_names_keys_is_not_repeatable(request_: Any, *, repeatable: bool) -> None:
    method = type(request_).__name__.removesuffix("Request")
    assert is_repeatable(method, request_) is repeatable


class FakeContext:
    """A context of an RPC without metadata and without a deadline."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize(
    ("method", "error"), [("GetTimer", NotReadyError), ("Cancel", LeadershipLostError)]
)
async def test_a_leader_that_dies_leaves_changes_in_doubt(
    method: str, error: type[Exception]
) -> None:
    async def broken(request: bytes, context: Any) -> bytes:
        del request
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return b""

    context: Any = FakeContext()
    async with relaying(method, broken) as relay:
        assert relay.target(method, context) == "n2"
        with pytest.raises(error, match="the node n2 did not answer"):
            await relay.answer("n2", method, pb.CancelRequest(), context)


async def test_a_leader_without_a_connection_gets_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def streamed() -> Any:
        return relay.stream("n2", "ScheduleStream", pb.ScheduleRequest(), context)

    context: Any = FakeContext()
    relay = Relay("n1", lambda: "n2", lambda _: grpc.aio.insecure_channel("127.0.0.1:1"))
    with pytest.raises(NotReadyError, match="no connection to the node n2: retry"):
        await relay.answer("n2", "Cancel", pb.CancelRequest(), context)
    with pytest.raises(NotReadyError, match="no connection to the node n2: retry"):
        await anext(streamed())
    await relay.close()

    monkeypatch.setattr(relay_module, "CONNECT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        relay = Relay("n1", lambda: "n2", lambda _: grpc.aio.insecure_channel(address))
        with pytest.raises(NotReadyError, match=r"n2 took no connection within 0\.01 s: retry"):
            await relay.answer("n2", "Cancel", pb.CancelRequest(), context)
        await relay.close()


@contextlib.asynccontextmanager
async def relaying(
    method: str,
    answer: Callable[..., Any],
    leader: Callable[[], str] = lambda: "n2",
    *,
    options: Sequence[tuple[str, int]] = (),
    shape: Callable[..., Any] = grpc.unary_unary_rpc_method_handler,
) -> AsyncIterator[Relay]:
    """A relay to a server with one method. Each of its connections is a TCP connection."""
    server, address = await serving(method, answer, options, shape=shape)
    local = [("grpc.use_local_subchannel_pool", 1)]
    relay = Relay("n1", leader, lambda _: grpc.aio.insecure_channel(address, options=local))
    try:
        yield relay
    finally:
        await relay.close()
        await server.stop(None)


async def serving(
    method: str,
    answer: Callable[..., Any],
    options: Sequence[tuple[str, int]] = (),
    parse: Callable[[bytes], Any] | None = None,
    shape: Callable[..., Any] = grpc.unary_unary_rpc_method_handler,
) -> tuple[grpc.aio.Server, str]:
    """Start a server with one method; return it and its address."""
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    methods = {method: shape(answer, parse)}
    generic = grpc.method_handlers_generic_handler(PATHS[method].split("/")[1], methods)
    server.add_generic_rpc_handlers((generic,))
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_two_nodes_that_name_each_other_end_at_the_second() -> None:
    async def get_timer(request: bytes, context: Any) -> bytes:
        del request
        second = Relay("n2", lambda: "n1", lambda _: pytest.fail("sent on twice"))
        assert second.target("GetTimer", context) is None
        trailer = pb.Error(reason=pb.REASON_NOT_LEADER).SerializeToString()
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "", ((TRAILER, trailer),))
        return b""

    context: Any = FakeContext()
    async with relaying("GetTimer", get_timer) as relay:
        with pytest.raises(NotReadyError, match="moving to another node"):
            await relay.answer("n2", "GetTimer", pb.GetTimerRequest(), context)


async def test_a_silent_leader_is_given_up_once_another_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "WATCH_S", 0.01)
    leader, asked = "n2", asyncio.Event()

    async def silent(request: bytes, context: Any) -> bytes:
        del request, context
        asked.set()
        await asyncio.Event().wait()
        return b""

    context: Any = FakeContext()
    async with relaying("Cancel", silent, lambda: leader) as relay:
        answer = asyncio.create_task(relay.answer("n2", "Cancel", pb.CancelRequest(), context))
        await asked.wait()
        leader = "n3"
        with pytest.raises(LeadershipLostError, match="another node leads now"):
            await answer


async def test_stopping_node_gives_up_the_calls_that_wait_for_messages_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "WATCH_S", 0.001)
    asked, answers, looks = list[str](), asyncio.Event(), 0

    def leader() -> str:
        nonlocal looks
        looks += 1
        return "n2"

    async def answer(request: bytes, context: Any) -> bytes:
        del request, context
        asked.append("")
        await answers.wait()
        return b"done"

    methods = "Cancel", "GetStatus", "Receive"
    servers = [await serving(method, answer) for method in methods]
    addresses = [address for _, address in (*servers, servers[2])]
    relay = Relay("n1", leader, lambda _: grpc.aio.insecure_channel(addresses.pop(0)))
    context: Any = FakeContext()
    request, calls = pb.ReceiveRequest(), list[asyncio.Task[bytes]]()
    try:
        for target, method in zip(("n2", "n3", "n2"), methods, strict=True):  # n3 is no leader
            relay.renew()  # a further connection
            calls.append(asyncio.create_task(relay.answer(target, method, request, context)))
            await until_true(lambda: len(asked) == len(calls))
        cancel, status, receive = calls
        relay.end_waiting()
        given_up = "this node gave up the call of n2: this node stops; the request may have been"
        with pytest.raises(LeadershipLostError, match=given_up):
            await receive
        with pytest.raises(NotReadyError, match="this node stops: retry at another one"):
            await relay.answer("n2", "Receive", request, context)
        looks = 0
        await until_true(lambda: looks >= 3)
        answers.set()
        assert [await cancel, await status] == [b"done", b"done"]
    finally:
        await relay.close()
        await asyncio.gather(*(server.stop(None) for server, _ in servers))


class Relaying(Service):
    """Sends each stream on."""

    @handlers.stream_handler
    async def ScheduleStream(  # noqa: N802
        self, requests: AsyncIterator[pb.ScheduleStreamRequest], context: Any
    ) -> AsyncGenerator[bytes, None]:
        yield pytest.fail("it was not sent on")


async def test_relayed_stream_ends_after_the_answers_before_a_refused_request() -> None:
    request, high = pb.ScheduleStreamRequest(request_no=1), False
    left, answers = [request, request], list[bytes]()

    async def schedule(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        sent = [request async for request in requests]
        for request in sent:
            yield request

    def admit(method: str, size: int) -> None:
        if high:
            raise OverloadedError(f"memory for {method}", retry_after_ms=1)

    async def read() -> Any:
        nonlocal high
        high = len(left) == 1
        return left.pop() if left else grpc.aio.EOF

    async def abort(code: Any, details: str, trailers: Any) -> None:
        raise ConnectionAbortedError(details)

    context: Any = FakeContext()
    context.read, context.peer, context.abort = read, lambda: "ipv4:10.0.0.1:1", abort

    async def collect(relay: Relay) -> None:
        stream: Any = Relaying(ServiceHooks(relay=relay, admit=admit)).ScheduleStream
        async for answer in stream(SimpleNamespace(__aiter__=None), context):
            answers.append(answer)

    shape = grpc.stream_stream_rpc_method_handler
    async with relaying("ScheduleStream", schedule, shape=shape) as relay:
        with pytest.raises(ConnectionAbortedError, match="memory for ScheduleStream"):
            await collect(relay)
    assert answers == [request.SerializeToString()]


async def test_answer_of_a_relayed_stream_counts_and_leaves_memory_at_once() -> None:
    outboxes = Outboxes(1 << 30)

    async def schedule(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield bytes(1 << 22)
        await asyncio.sleep(RPC_S)

    async def read() -> Any:
        return grpc.aio.EOF

    context: Any = FakeContext()
    context.read, context.peer = read, lambda: "ipv4:10.0.0.1:1"
    shape = grpc.stream_stream_rpc_method_handler
    async with relaying("ScheduleStream", schedule, shape=shape) as relay:
        hooks = ServiceHooks(relay=relay, while_unread=outboxes.relayed)
        stream: Any = Relaying(hooks).ScheduleStream
        gc.disable()
        tracemalloc.start()
        try:
            answers = stream(SimpleNamespace(__aiter__=None), context)
            assert len(await anext(answers)) == outboxes.total == 1 << 22
            await answers.aclose()
            await until_true(lambda: tracemalloc.get_traced_memory()[0] < 1 << 20)
        finally:
            tracemalloc.stop()
            gc.enable()
    assert not outboxes.total
    assert not outboxes.unread


async def test_connection_to_the_leader_reads_little_ahead_of_a_client() -> None:
    sent = 0

    async def serve(_: bytes, __: Any) -> AsyncIterator[bytes]:
        nonlocal sent
        for _number in range(3_000):
            yield bytes(1 << 14)
            sent += 1 << 14

    methods: Any = {"Consume": grpc.unary_stream_rpc_method_handler(serve)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=RELAY_OPTIONS) as channel:
        consume: Any = channel.unary_stream("/t/Consume")
        async for _ in consume(b""):  # gRPC measures how much the link carries
            pass
        sent, seen = 0, -1
        call = consume(b"")
        await call.read()
        while sent > seen:
            seen = sent
            await asyncio.sleep(0.2)
        call.cancel()
    await server.stop(None)
    assert READ_AHEAD_BYTES // 2 < sent <= 2 * READ_AHEAD_BYTES


async def test_answer_of_a_stream_leaves_memory_when_it_is_encoded() -> None:
    found = dict[str, Any]()

    async def consume(requests: Any, context: Any) -> AsyncIterator[pb.ConsumeResponse]:
        yield pb.ConsumeResponse(leaving=True)

    server = SimpleNamespace(add_registered_method_handlers=lambda _, each: found.update(each))
    handler = grpc.stream_stream_rpc_method_handler(
        consume, pb.ConsumeRequest.FromString, pb.ConsumeResponse.SerializeToString
    )
    handlers.Registrar(server, 1).add_registered_method_handlers("s", {"Consume": handler})
    (answer,) = [each async for each in found["Consume"].stream_stream(None, None)]
    encoded = found["Consume"].response_serializer(answer)
    assert pb.ConsumeResponse.FromString(encoded).leaving
    assert not answer, "gRPC keeps it until the next one"


async def test_open_calls_do_not_crowd_out_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINE_CALLS_MAX", 2)
    waiting, all_wait, over = 0, asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        nonlocal waiting
        del request, context
        waiting += 1
        if waiting == 5:
            all_wait.set()
        await over.wait()
        return b""

    options = [("grpc.max_concurrent_streams", 2)]
    context: Any = FakeContext()
    async with relaying("Cancel", wait, options=options) as relay:
        answers = [
            asyncio.create_task(relay.answer("n2", "Cancel", pb.CancelRequest(), context))
            for _ in range(5)
        ]
        async with asyncio.timeout(RPC_S):
            await all_wait.wait()
        over.set()
        assert await asyncio.gather(*answers) == [b""] * 5
        assert len(relay._lines) == 1


async def test_renewal_ends_no_open_call_and_gives_old_connections_no_further_one() -> None:
    over, asked, made = asyncio.Event(), asyncio.Event(), list[str]()

    async def wait(request: bytes, context: Any) -> bytes:
        del request, context
        asked.set()
        await over.wait()
        return b"done"

    server, address = await serving("Cancel", wait)

    def channel(target: str) -> grpc.aio.Channel:
        made.append(target)
        return grpc.aio.insecure_channel(address)

    relay = Relay("n1", lambda: "n2", channel)
    context: Any = FakeContext()
    try:
        before = asyncio.create_task(relay.answer("n2", "Cancel", pb.CancelRequest(), context))
        await asked.wait()
        relay.renew()
        after = asyncio.create_task(relay.answer("n2", "Cancel", pb.CancelRequest(), context))
        await asyncio.sleep(0)
        over.set()
        assert [await before, await after] == [b"done", b"done"]
        assert made == ["n2", "n2"]
        assert [line.outdated for line in relay._lines] == [False]
    finally:
        await relay.close()
        await server.stop(None)


def test_receive_that_waits_at_a_stopping_follower_gets_an_answer(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/groups/g"
    send(cluster, node, "PUT", at, {})
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(send, cluster, node, "POST", f"{at}/receive", {"wait": 20})
        until(lambda: client.describe_topic(topic).groups[0].consumers == 1)
        cluster.stop(node)
        try:
            refused = waiting.result()
            assert (refused.status, refused.body["retryable"]) == (504, True), refused
            assert "this node stops" in refused.body["detail"]
        finally:
            cluster.up()


def test_client_that_reaches_one_node_only_can_do_everything(cluster: Running, topic: str) -> None:
    follower, other = cluster.followers()
    address = cluster.node(follower).grpc

    def reach(asked: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(asked if asked == address else "not-known.invalid:7401")

    events: list[object] = []
    with TimerClient(address, dial=reach, on_event=events.append) as client:
        client.schedule(topic, b"1", delay=0)
        connected = next(each for each in events if isinstance(each, Connected))
        assert str(connected).startswith(f"connected: {address} relays to the leader, epoch ")
        late = client.schedule(topic, b"late", delay=3_600)
        assert client.cancel(late)
        assert client.status().leader
        with client.consumer(topic, "g") as consumer:
            messages = iter(consumer)
            first = next(messages)
            first.ack().result()
            with cluster.client() as operator:
                cluster.change_leader(operator, other)
            client.schedule(topic, b"2", delay=0)
            second = next(messages)
            second.ack().result()
            cluster.kill(other)
            client.schedule(topic, b"3", delay=0)
            third = next(messages)
            third.ack().result()
        assert [first.payload, second.payload, third.payload] == [b"1", b"2", b"3"]
    cluster.up()


def test_client_of_a_cluster_without_a_majority_finds_no_leader(
    cluster: Running, topic: str
) -> None:
    follower, other = cluster.followers()
    leader = cluster.wait_for_leader()
    events: list[object] = []
    with TimerClient(cluster.node(follower).grpc, on_event=events.append) as client:
        client.schedule(topic, b"1", delay=0)
        cluster.kill(other)
        cluster.kill(leader)
        until(lambda: not client.status(local=True).hears_leader)
        assert client.status(local=True).leader_address  # it names the dead leader on
        events.clear()
        with pytest.raises(Unreachable):
            client.schedule(topic, b"2", timeout=3)
    cluster.up()
    assert any(isinstance(each, LeaderMissing) for each in events)
    assert not any(getattr(each, "relayed", False) for each in events)
