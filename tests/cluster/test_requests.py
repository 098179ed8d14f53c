"""A client's message is counted before it is parsed, and forgotten once it is refused."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest

from cluster.api import wire_rows
from cluster.api.group_admin import GroupDesk
from cluster.api.owners import CreationLimits
from cluster.api.policy_admin import policy_of
from cluster.api.timer_service import TOPICS_AT_ONCE, TimerService
from cluster.api.wire_rows import COLUMNS_MAX, RequestLimits, check_request
from cluster.rpc.call_guard import CallGuard
from cluster.rpc.caller_usages import _amounts
from cluster.rpc.connections import REQUEST_BYTES, Connections
from cluster.rpc.fair_queue import weight_of
from cluster.rpc.handlers import (
    Context,
    Registrar,
    RequestStream,
    Service,
    ServiceHooks,
    _boxed,
    stream_handler,
    unary_handler,
)
from cluster.rpc.relay import PATHS, Relay
from cluster.rpc.request_bounds import (
    _RECEIVED,
    COUNTED_FROM,
    FIELDS_MAX,
    UnreadableRequest,
    reader_of,
)
from cluster.settings.config import GroupsConfig
from cluster.state.host import Host
from tests.calls import calls_of
from tests.cluster.hosted import Hosted
from tests.timer.leading import Play
from timer.entries.policies import CLUSTER, ScopePolicy
from timer.leader.intake import request_shares
from timer.leader.intake.count_limits import CountLimits
from timer.leader.intake.request_shares import Use
from timer.leader.leader import LeaderConfig
from timer.model.columns import Part
from timer.model.feature_level import LEVEL_OF_SERIES
from timer.model.timer_errors import (
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    OverloadedError,
)
from timerclient.proto import timer_pb2 as pb

LIMIT = 1 << 20
LIMITS = RequestLimits(
    key_bytes_max=64, headers_bytes_max=64, request_rows_max=65_536, request_bytes_max=LIMIT
)
FEW = bytes([pb.AlterPoliciesRequest.DESCRIPTOR.fields_by_name["unset"].number << 3 | 2, 0])


@pytest.fixture(autouse=True)
def received() -> Iterator[None]:
    """Forget the size of a request that a test has parsed."""
    before = _RECEIVED.set(0)
    yield
    _RECEIVED.reset(before)


def refusal(made: object) -> str:
    assert isinstance(made, UnreadableRequest), made
    assert isinstance(made.error, InvalidRequestError)
    return f"{made.error.value}: {made.error.limit}"


def served(*, creates: bool = True) -> tuple[Hosted, TimerService]:
    """Return a leader and its service. `creates`: a request creates its topics."""
    host, parts = Hosted(), {"threads": Mock(), "outboxes": Mock(), "hooks": Mock()}
    of: Any = {"limits": LIMITS, "salt": 0, "topic_name_bytes_max": 10, **parts}
    return host, TimerService(cast("Host", host), auto_create_topics=creates, **of)


async def test_new_topics_of_a_request_are_created_together_some_at_a_time() -> None:
    count, creating, most = 2 * TOPICS_AT_ONCE + 1, 0, 0

    async def topic(_: object, name: str) -> object:
        nonlocal creating, most
        creating += 1
        most = max(most, creating)
        await asyncio.sleep(0)
        creating -= 1
        return SimpleNamespace(topic_id=int(name))

    checked = AsyncMock()
    service: Any = SimpleNamespace(topic=topic, _auto_create_topics=True, _check_new_topics=checked)
    timers = [pb.TimerColumns(topic=str(at % count)) for at in range(count + 5)]
    leader: Any = None
    request = pb.ScheduleRequest(timers=timers)
    found = await TimerService._create_topics(service, leader, request, "")
    checked.assert_awaited_once()
    assert found == {str(number): number for number in range(count)}
    assert most == TOPICS_AT_ONCE


async def test_no_topic_is_created_before_all_names_and_limits_are_checked() -> None:
    play, creations = Play(LeaderConfig(limits=CountLimits(groups_max=0))), Mock()
    service: Any = SimpleNamespace(_host=SimpleNamespace(now=lambda: play.now), _limits=LIMITS)

    async def part_of(*args: Any) -> Part:
        part = await TimerService._part_of(service, *args)
        if "made" in args[2]:  # by another request meanwhile
            play.make_topic("made")
        return part

    service._part_of = part_of
    service._topic_name_bytes_max, service.creations = 4, creations
    columns = pb.TimerColumns(payload_sizes=[1], payloads=b"x", delay_ms=[5])

    async def check(*names: str) -> None:
        timers = [pb.TimerColumns(topic=name) for name in names]
        for each in timers:
            each.MergeFrom(columns)
        request = pb.ScheduleRequest(timers=timers)
        await TimerService._check_new_topics(service, play.leader, request, names, "")

    await check("a", "b", "made", "ccc")
    assert creations.check_topics.call_args.args[1] == ["b", "ccc"]
    with pytest.raises(InvalidRequestError, match="must be 1 to 4 of"):
        await check("b", "ddddd")
    desk = GroupDesk(Mock(), Mock(topic=AsyncMock()), GroupsConfig(), 100)
    desk._host.require_leader.return_value = play.leader  # type: ignore[attr-defined]
    desk._timers.creations = CreationLimits()
    with pytest.raises(LimitReachedError, match="groups_max"):
        await desk.open("new", "g", 0, pb.GroupSettings())
    desk._timers.topic.assert_not_called()  # type: ignore[attr-defined]
    desk._timers.topic.side_effect = KeyError  # type: ignore[attr-defined]
    with pytest.raises(KeyError):  # its topic exists, and the group may exist, too
        await desk.open("a", "g", 0, pb.GroupSettings())


@pytest.mark.parametrize("creates", [False, True])
async def test_share_of_a_sender_is_checked_before_a_topic_is_created(
    monkeypatch: pytest.MonkeyPatch, *, creates: bool
) -> None:
    monkeypatch.setattr(request_shares, "WHOLE", Use(10, 10))
    host, service = served(creates=creates)
    timers = pb.TimerColumns(topic="new", payload_sizes=[0] * 6, delay_ms=[5])
    request = pb.ScheduleRequest(request_id="r", timers=[timers])
    with pytest.raises(OverloadedError if creates else NotFoundError, match=r"the share of me|new"):
        await (await service._schedule(request, "me"))
    assert not host.leader._topics_in_flight


async def test_series_that_is_refused_does_not_create_a_topic_in_deletion_anew() -> None:
    host, service = served()
    machine = host.leader.machine
    machine.level = LEVEL_OF_SERIES
    fields = pb.SeriesFields(every_ms=1_000, payload=b"12")
    request = pb.CreateSeriesRequest(topic="t", key="k", fields=fields)
    await service._series.create(request)
    lower = ScopePolicy(payload_bytes_max=1)
    host.leader.set_policy(CLUSTER, lower, (), host.now(), lambda _: None)
    host.leader.delete_topic(machine.topic_by_name["t"].topic_id, host.now(), lambda _: None)
    with pytest.raises(InvalidRequestError, match="payload_bytes_max of the cluster"):
        await service._series.create(request)
    host.step()
    assert not machine.topic_by_name


@pytest.mark.parametrize("changed", [False, True])
async def test_many_topics_are_checked_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, *, changed: bool
) -> None:
    play = Play()
    service: Any = SimpleNamespace(_host=SimpleNamespace(now=lambda: play.now), _limits=LIMITS)
    columns = pb.TimerColumns(topic="a", payload_sizes=[1], payloads=b"x", delay_ms=[5])
    request = pb.ScheduleRequest(timers=[columns] * (2 * TOPICS_AT_ONCE + 1))
    checked = calls_of(monkeypatch, wire_rows.CheckedColumns, "of")
    part = TimerService._part_of(service, play.leader, request, {"a": play.topic_id})
    work, counts = asyncio.create_task(part), [0]
    while not work.done():
        await asyncio.sleep(0)
        if changed and len(counts) == 2:
            play.leader.admission.change(CLUSTER, ScopePolicy(fixed_delay_ms=77))
        counts.append(len(checked))
    part_ms = (await work).due_ms - play.now.clock_ms
    assert part_ms.tolist() == [77 if changed else 5] * len(request.timers)
    if not changed:
        assert max(np.diff(counts)) == TOPICS_AT_ONCE


def test_message_of_too_many_bytes_is_not_parsed() -> None:
    read = reader_of(pb.ScheduleRequest.FromString, LIMIT)
    assert refusal(read(bytes(LIMIT + 1))) == f"{LIMIT + 1} bytes: must have at most {LIMIT} bytes"


@pytest.mark.parametrize("inner", [False, True])
def test_message_of_too_many_fields_is_not_parsed(*, inner: bool) -> None:
    if inner:  # numbers that are not packed, in a message of the message
        one = pb.TimerColumns(payloads=b"").SerializeToString() + bytes([4 << 3 | 5, 0, 0, 0, 0])
        body = one * (FIELDS_MAX + 1)
        data = b"\x1a" + _varint(len(body)) + body
        read = reader_of(pb.ScheduleRequest.FromString, LIMIT)
    else:
        data = FEW * max(COUNTED_FROM, FIELDS_MAX + 1)
        read = reader_of(pb.AlterPoliciesRequest.FromString, LIMIT)
    assert refusal(read(data)).startswith(f"more than {FIELDS_MAX} fields: must have at most")


def test_largest_request_that_is_allowed_is_parsed() -> None:
    columns = pb.TimerColumns(
        topic="t" * 255,
        delay_level=[1, 1],
        payload_sizes=[1, 0],
        payloads=b"x",
        key_sizes=[1, 0],
        keys=b"k",
        headers_sizes=[4, 0],
        headers=bytes(4),
    )
    request = pb.ScheduleRequest(timers=[columns] * COLUMNS_MAX, producer_id=1, sequence=1)
    data = request.SerializeToString()
    assert len(data) > COUNTED_FROM
    assert reader_of(pb.ScheduleRequest.FromString, LIMIT)(data) == request


def test_size_of_a_request_is_the_number_of_bytes_received() -> None:
    timers = pb.TimerColumns(topic="t", payload_sizes=[LIMIT], payloads=bytes(LIMIT), delay_ms=[1])
    data = pb.ScheduleRequest(timers=[timers]).SerializeToString()
    unmeasured: Any = object()  # it has no ByteSize
    for size_max in (len(data), LIMIT):  # the second one is unreadable
        reader_of(pb.ScheduleRequest.FromString, size_max)(data)
        connections = Connections({1}, {})
        connections.count_request(unmeasured, SimpleNamespace(peer=lambda: "a"))  # type: ignore[arg-type]
        assert connections._taken == {"a": len(data) + REQUEST_BYTES}
        assert weight_of(unmeasured) == weight_of(pb.GetTimerRequest()) == 16 + len(data) // 128
        assert _amounts(unmeasured)["bytes"] == len(data)


def test_what_is_no_message_is_refused() -> None:
    read = reader_of(pb.ScheduleRequest.FromString, LIMIT)
    for data in (b"\xff", b"\xff" * (COUNTED_FROM + 1)):
        assert refusal(read(data)).endswith("must be a timer.v1.ScheduleRequest")


class Counted:
    """A column that can be counted, and nothing else."""

    def __init__(self, values: int) -> None:
        self._values = values

    def __len__(self) -> int:
        return self._values

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("converted before it was counted")


@pytest.mark.parametrize("column", ["delay_level", "due_ms", "delay_ms", "key_sizes"])
def test_column_is_counted_before_it_is_converted(column: str) -> None:
    timers = pb.TimerColumns(topic="t", payload_sizes=[1], payloads=b"x")
    getattr(timers, column).extend([1, 1, 1])
    with pytest.raises(
        InvalidRequestError, match=f"{column} = '3 values': must have 0 or 1 values"
    ):
        check_request(pb.ScheduleRequest(timers=[timers]), LIMITS)
    many: Any = Counted(3)
    with pytest.raises(InvalidRequestError):
        wire_rows.checked_keys(many, b"", 1, 64)


def test_ids_and_levels_are_counted_before_they_are_converted() -> None:
    with pytest.raises(
        InvalidRequestError, match="timer_ids = '45 bytes': a request holds 1 to 2 ids"
    ):
        wire_rows.timers_of(bytes(45), 2, salt=0)
    levels: Any = Counted(1_000_000)
    field: Any = type("Field", (), {"name": "delay_levels_ms"})
    policy: Any = type("Policy", (), {"ListFields": lambda self: [(field, self)], "ms": levels})
    with pytest.raises(InvalidRequestError, match="delay_levels_ms = '1000000 values'"):
        policy_of(policy())


class Request:
    """Large, if it were real."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - as of a message
        return b"x"


class Refusing(Service):
    """Rejects every request, with the request's content in every frame of the error."""

    def _check(self, request: object) -> None:
        checked = [request]
        with suppress(KeyError):
            raise KeyError
        raise InvalidRequestError("request", len(checked), "must not be")

    @unary_handler
    async def Receive(self, request: Request, context: Context) -> None:  # noqa: N802
        self._check(request)

    @stream_handler
    async def Consume(  # noqa: N802
        self, request: AsyncGenerator[Request, None], context: Context
    ) -> AsyncGenerator[None, None]:
        async for one in RequestStream(request, context):
            self._check(one)
            yield


def _contexts() -> list[object]:
    return [each for each in gc.get_objects() if type(each).__name__ == "_ServicerContext"]


def _guard(refusal: str) -> CallGuard:
    """Return a guard of calls of another node, which has no caller. No mock: it keeps arguments."""

    def admit(*_: object) -> None:
        if refusal == "by the gate":
            Refusing()._check(object())

    gate: Any = SimpleNamespace(admit=admit, claimed_identity=lambda _: "")
    access: Any = SimpleNamespace(on_change=[])
    audit: Any = SimpleNamespace(record_denial=lambda *_: None)
    return CallGuard(gate, access, audit)


@pytest.mark.parametrize(
    "refusal", ["no guard", "behind the guard", "by the gate", "by the leader"]
)
@pytest.mark.parametrize("method", ["Receive", "Consume"])
async def test_refused_request_leaves_memory_at_once(method: str, refusal: str) -> None:
    made, counted = [], Registrar(None, LIMIT)._counted
    # The leader is the same server: it gets the request once more, and sends none on.
    relay = Relay("n1", lambda: "n2", lambda _: grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    service = Refusing(ServiceHooks(relay=relay if refusal == "by the leader" else None))

    def parse(data: bytes) -> Request:
        request = Request()
        made.append(weakref.ref(request))
        return request

    handlers: Any = {
        "Receive": grpc.unary_unary_rpc_method_handler(counted(service.Receive, bytes), parse),
        "Consume": grpc.stream_stream_rpc_method_handler(_boxed(service.Consume), parse),
    }
    guards = [_guard(refusal)] if "the g" in refusal else []
    server = grpc.aio.server(interceptors=guards)
    generic = grpc.method_handlers_generic_handler("timer.v1.ConsumeService", handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(PATHS[method])(iter([b"x"]))  # type: ignore[arg-type]
            with pytest.raises(grpc.RpcError, match="must not be"):
                await call.read()
            async with asyncio.timeout(10):
                while any(each() is not None for each in made) or _contexts():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await relay.close()
        await server.stop(None)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
