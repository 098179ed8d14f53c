"""A node's bounds towards its clients: memory, files, outboxes, lines of its log."""

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from cluster.api.public_services import services_of
from cluster.node.build import MEMTABLE_DIVISOR, flush_limits
from cluster.rpc import audit_log, memory, open_files
from cluster.rpc.connections import Connections, grpc_address
from cluster.rpc.endpoints import LINKS_MAX, SERVER_OPTIONS, Endpoints
from cluster.rpc.handlers import Registrar, ServiceHooks
from cluster.rpc.http_call import HttpContext
from cluster.rpc.memory import MemoryGuard
from cluster.rpc.outboxes import (
    ANSWER_BYTES,
    DELIVERY_BYTES_MIN,
    OUTBOX_BYTES_MAX,
    STEP_DELIVERIES,
    Outboxes,
)
from cluster.rpc.port_guard import PortGuard
from cluster.rpc.rpc_caller import CALLER
from cluster.security.access_rules import Permission
from cluster.security.method_rules import CONTRACT_RULES
from cluster.settings.config import NodeConfig
from cluster.settings.log_format import AUDIT, FLOOD_S, LINES_MAX, _Flood
from deploy.local import free_ports
from tests.cluster.hosted import Hosted
from timer.model.timer_errors import ConfigError, EngineError, OverloadedError
from timerclient.proto import timer_pb2 as pb

MIB = 1 << 20


class EndOfTest(Exception):
    """Ends a task that runs for ever."""


async def test_new_work_is_refused_while_memory_is_above_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident, asked = 0, list[int]()
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident)

    async def end_heaviest(excess: int) -> list[tuple[str, int]]:
        asked.append(excess)
        return [("ipv4:127.0.0.1:1", excess)]

    connections: Any = SimpleNamespace(end_heaviest=end_heaviest)
    guard = MemoryGuard(100, connections)
    refused, complaints = [], []
    for resident in (100, 101, 95, 90, 89, 100):
        await guard.check()
        guard.admit("Ack")
        try:
            guard.admit("Schedule")
        except OverloadedError:
            refused.append(resident)
        complaints += [resident] * len(guard.complaints())
    assert refused == complaints == [101, 95, 90]
    assert asked == [1]


async def test_large_requests_that_would_exceed_the_limit_are_refused_between_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 100 * MIB)
    host: Any = Hosted()
    nothing: Any = None
    guard = MemoryGuard(108 * MIB, nothing)
    config = NodeConfig(name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"})
    services = services_of(host, host, host, config, hooks=ServiceHooks(admit=guard.admit))
    results = []
    for payload in (MIB // 2, 3 * MIB // 2, 5 * MIB // 2):
        timers = pb.TimerColumns(topic="t", delay_ms=[1], payload_sizes=[payload])
        timers.payloads = bytes(payload)
        context = HttpContext("", None)
        schedule: Any = services.timers.Schedule
        with contextlib.suppress(grpc.aio.AbortError):
            await schedule(pb.ScheduleRequest(timers=[timers]), context)
        results.append(context.error.message)
    guard.admit("Cancel", 16 * MIB)
    assert results[:2] == ["", ""]
    assert "limits.memory_bytes_max = 113246208 is full" in results[2]


async def test_open_stream_gets_a_refusal_for_each_request_while_memory_is_high() -> None:
    host: Any = Hosted()
    nothing: Any = None
    guard = MemoryGuard(1 << 50, nothing)
    config = NodeConfig(name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"})
    errors: list[EngineError] = []
    hooks = ServiceHooks(admit=guard.admit, on_error=lambda _, error: errors.append(error))
    services = services_of(host, host, host, config, hooks=hooks)
    timers = pb.TimerColumns(topic="t", payload_sizes=[0], delay_ms=[1_000])
    answered = asyncio.Event()

    async def requests() -> AsyncIterator[pb.ScheduleStreamRequest]:
        for number, guard.high in enumerate((False, True, True, False), start=1):
            yield pb.ScheduleStreamRequest(request_no=number, timers=[timers])
            await answered.wait()
            answered.clear()

    schedule: Any = services.timers.ScheduleStream
    found = []
    async for answer in schedule(requests(), SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:1")):
        found.append((answer.request_no, answer.error.reason, answer.error.retry_after_ms))
        answered.set()
    refused = pb.REASON_OVERLOADED, memory.RETRY_AFTER_MS
    assert found == [(1, 0, 0), (2, *refused), (3, *refused), (4, 0, 0)]
    assert [error.__traceback__ for error in errors] == [None, None], "it refers to the request"


async def test_unread_answers_of_a_stream_of_timers_count_and_hold_up_its_requests() -> None:
    host: Any = Hosted()
    outboxes, rows = Outboxes(32 * MIB), 40_000
    config = NodeConfig(name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"})
    services = services_of(host, host, host, config, outboxes=outboxes)
    timers = pb.TimerColumns(topic="t", payload_sizes=[0] * rows, delay_ms=[1_000] * rows)
    read = 0

    async def requests() -> AsyncIterator[pb.ScheduleStreamRequest]:
        nonlocal read
        for read in range(1, 31):
            for _ in range(5):  # the leader answers the one before
                await asyncio.sleep(0)
            yield pb.ScheduleStreamRequest(request_no=read, timers=[timers])

    schedule: Any = services.timers.ScheduleStream
    answers = schedule(requests(), SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:1"))
    size = (await anext(answers)).ByteSize()
    for first in (2, 9):
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert 8 * MIB < outboxes.total == outboxes.unread["ipv4:10.0.0.1:1"] < 8 * MIB + 4 * size
        assert outboxes._shares.used("ipv4:10.0.0.1:1") == outboxes.total
        assert read < 30
        found = [(await anext(answers)).request_no for _ in range(7)]
        assert found == [*range(first, first + 7)]
    await answers.aclose()
    assert (outboxes.total, dict(outboxes.unread)) == (0, {})


async def test_memory_is_watched_while_no_file_can_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    async def end_heaviest(excess: int) -> list[tuple[str, int]]:
        ended.append(excess)
        if len(ended) == 1:
            raise OSError(24, "Too many open files")
        raise EndOfTest

    connections: Any = SimpleNamespace(end_heaviest=end_heaviest)
    monkeypatch.setattr(memory, "resident_bytes", lambda: 101)
    monkeypatch.setattr(memory, "CHECK_INTERVAL_S", 0.001)
    guard = MemoryGuard(100, connections)
    with pytest.raises(EndOfTest):
        await guard.run()
    assert (ended, guard.high) == ([1, 1], True)


async def test_closed_connections_are_forgotten_each_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections, rounds = Connections({1}, {}), list[float]()
    request = SimpleNamespace(ByteSize=lambda: 1)

    def take(address: str) -> None:
        connections.count_request(request, SimpleNamespace(peer=lambda: address))  # type: ignore[arg-type]

    def weights(_: object) -> dict[str, int]:
        take("new")  # accepted after the snapshot
        return {"open": 0}

    async def next_round(seconds: float) -> None:
        if sum(rounds) >= memory.FORGET_S:
            raise TimeoutError
        rounds.append(seconds)

    monkeypatch.setattr(memory, "next_round", next_round)
    monkeypatch.setattr(connections, "_weights", weights)
    for address in ("open", "closed"):
        take(address)
    with pytest.raises(TimeoutError):
        await MemoryGuard(1 << 50, connections, release_pages=pytest.fail).run()
    assert connections._taken.keys() == {"open", "new"}


async def test_free_pages_return_to_the_system_while_memory_is_above_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, given, looks = list[float](), list[float](), list[bool]()

    async def next_round(seconds: float) -> None:
        rounds.append(seconds)
        if sum(rounds) > 40:
            raise TimeoutError

    async def end_heaviest(excess: int) -> list[tuple[str, int]]:
        return []

    monkeypatch.setattr(memory, "next_round", next_round)
    freed = memory.GIVEN_BYTES_MIN // 2
    monkeypatch.setattr(
        memory, "resident_bytes", lambda: 10 * freed - freed * len(given) if sum(rounds) < 38 else 0
    )
    guard = MemoryGuard(
        100,
        Mock(end_heaviest=end_heaviest),
        on_check=lambda: looks.append(guard.high),
        release_pages=lambda: given.append(sum(rounds)),
    )
    with pytest.raises(TimeoutError):
        await guard.run()
    pauses = [each - before for before, each in itertools.pairwise([0.0, *given])]
    assert pauses == [memory.GIVE_BACK_S, 2 * memory.GIVE_BACK_S, 4 * memory.GIVE_BACK_S]
    assert looks.index(False) == looks.count(True) == round(38 / memory.CHECK_INTERVAL_S) - 1


def test_operators_calls_are_served_while_memory_is_above_its_limit() -> None:
    rules = CONTRACT_RULES.items()
    operators = {name for name, rule in rules if rule.permission is Permission.OPERATE}
    reads = {"BeginVerification", "TraceHops", "OpenBackup", "FetchBackup", "FetchLog"}
    assert operators - {name for name, rule in rules if rule.while_memory_is_high} == reads


def test_memory_is_read_when_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.resident_bytes() > MIB

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.open", full)
    monkeypatch.setattr("io.open", full)
    with pytest.raises(OSError, match="Too many"):
        Path("/proc/self/statm").read_bytes()
    assert memory.resident_bytes() > MIB


async def test_link_port_has_a_limit_of_connections(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    addresses = {"n1": f"127.0.0.1:{port}", "n2": "127.0.0.1:1"}
    config = NodeConfig(
        name="n1",
        cluster_id="c",
        data=tmp_path,
        peers={"n1": "127.0.0.1:2", "n2": "127.0.0.1:3"},
        links=addresses,
    )
    server = Endpoints(config).link_server()
    assert server is not None
    server.add_insecure_port(addresses["n1"])
    await server.start()

    async def is_served() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        with contextlib.suppress(ConnectionError):
            return await reader.read(1) != b""  # a frame of settings
        return False

    with contextlib.ExitStack() as stack:
        served = [await is_served() for _ in range(LINKS_MAX + 9)]
    await server.stop(None)
    assert served == [True] * LINKS_MAX + [False] * 9


async def test_connection_to_a_busy_node_has_time_to_open(tmp_path: Path) -> None:
    attempts = 0

    async def accept_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            await asyncio.sleep(0.3)
            writer.write(b"\0\0\0\4\0\0\0\0\0")  # an empty frame of settings
            await reader.read()

    server = await asyncio.start_server(accept_late, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    peers = {"n1": "127.0.0.1:2", "n2": f"127.0.0.1:{port}"}
    config = NodeConfig(name="n1", cluster_id="c", data=tmp_path, peers=peers)
    async with Endpoints(config).channel("n2") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        assert attempts == 1
        server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("lines", "within", "name"),
    [
        ("0::/outer/inner\n", "", "memory.max"),
        ("4:memory:/outer/inner\n1:cpu:/\n0::/\n", "memory", "memory.limit_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
def test_default_is_part_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, within: str, name: str
) -> None:
    cgroup = tmp_path / "cgroup"
    cgroup.write_text(lines)
    outer = tmp_path / within / "outer"
    (outer / "inner").mkdir(parents=True)
    (outer / "inner" / name).write_text("max\n")
    (outer / name).write_text(f"{400 * MIB}\n")
    monkeypatch.setattr(memory, "_CGROUP", cgroup)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    nothing: Any = None
    assert MemoryGuard(0, nothing).bytes_max == 300 * MIB


@pytest.mark.parametrize(("available", "part"), [(4096, 1), (1024, 4), (256, 16)])
def test_little_memory_lowers_the_limits_of_flushes(
    monkeypatch: pytest.MonkeyPatch, available: int, part: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: available * MIB)
    config = NodeConfig(
        name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"}, insecure=True
    )
    limits = flush_limits(config)
    assert limits.unspilled_bytes == 256 * MIB // part
    assert limits.memtable_bytes == min(64 * MIB, available * MIB * 3 // 4 // MEMTABLE_DIVISOR)
    assert limits.log_bytes == config.storage.log_bytes_flush


def test_too_few_files_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 4_095))
    with pytest.raises(ConfigError, match="RLIMIT_NOFILE = 4095: must be at least 4096 open files"):
        open_files.raise_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 4_096))
    assert open_files.raise_limit() == 4_096
    assert raised[-1] == (4_096, 4_096)


def test_streams_that_do_not_read_share_one_limit() -> None:
    outboxes, held = Outboxes(256 * MIB), [0] * 1_000
    for _ in range(20):
        for stream in range(len(held)):
            if held[stream] <= outboxes.most(f"peer {stream}"):
                held[stream] += MIB // 8
                outboxes.add("peer", f"peer {stream}", MIB // 8)
    assert outboxes.total < 256 * MIB + len(held) * MIB // 8
    assert max(held) < OUTBOX_BYTES_MAX
    for stream, size in enumerate(held):
        outboxes.add("peer", f"peer {stream}", -size)
    assert (outboxes.most("peer 1"), dict(outboxes.unread)) == (OUTBOX_BYTES_MAX, {})


def test_streams_of_one_caller_that_do_not_read_leave_as_much_as_they_hold() -> None:
    outboxes, held = Outboxes(256 * MIB), [0] * 192
    for _ in range(40):
        for begin in range(0, len(held), STEP_DELIVERIES):
            sizes = dict[int, int]()
            for stream in range(begin, begin + STEP_DELIVERIES):
                if held[stream] <= outboxes.most("client/evil"):
                    sizes[stream] = min(MIB, outboxes.delivery_max("client/evil"))
            for stream, size in sizes.items():
                held[stream] += size
                outboxes.add("peer", "client/evil", size)
    assert 120 * MIB < outboxes.total <= 128 * MIB + len(held) * DELIVERY_BYTES_MIN
    assert outboxes.is_over_share("client/evil")
    assert not outboxes.is_over_share("client/other")
    assert outboxes.most("client/other") == OUTBOX_BYTES_MAX
    left = 256 * MIB - outboxes.total
    assert MIB <= outboxes.delivery_max("client/other") <= left // STEP_DELIVERIES


def test_bytes_count_for_their_caller_and_without_one_for_the_connection() -> None:
    outboxes, context, ends = Outboxes(4 * ANSWER_BYTES), Mock(), list[Any]()
    context.peer.return_value, context.add_done_callback = "peer", ends.append
    caller: Any = SimpleNamespace(identity="client/a")
    token = CALLER.set(caller)
    outboxes.answer(2 * ANSWER_BYTES, context)
    assert not outboxes.is_over_share("client/a"), "it leaves as much as it has"
    with outboxes.relayed(1, context):
        assert outboxes.is_over_share("client/a")
        assert not outboxes.is_over_share("client/b")
    CALLER.reset(token)
    ends.pop()(context)
    assert not outboxes._shares._used, "who has nothing unread takes no memory"
    outboxes.answer(4 * ANSWER_BYTES, context)
    assert outboxes.is_over_share("peer"), "without an identity a connection is a caller"
    assert not outboxes.is_over_share("another peer"), "it has read everything"


async def test_unary_answers_are_unread_until_their_calls_have_ended(tmp_path: Path) -> None:
    host: Any = Hosted()
    outboxes = Outboxes(2 * MIB)
    config = NodeConfig(name="n1", cluster_id="c", data=tmp_path, peers={"n1": "127.0.0.1:1"})
    services = services_of(host, host, host, config, outboxes=outboxes)
    found = pb.Deliveries(payload_sizes=[3 * MIB], payloads=bytes(3 * MIB))

    async def receive(*asked: object) -> pb.Deliveries:
        assert asked[-1] == context.peer(), "who must read the answer"
        return found

    services.consumers._receive = receive  # type: ignore[assignment, method-assign]
    ends: list[Any] = []
    context = HttpContext("ipv4:10.0.0.1:1", None)
    vars(context)["add_done_callback"] = ends.append
    handlers = dict[str, Any]()
    server = SimpleNamespace(add_registered_method_handlers=lambda _, each: handlers.update(each))
    services.add_to(Registrar(server, MIB, outboxes.answer))
    call = handlers["Receive"].unary_unary
    request = pb.ReceiveRequest(topic="t", group="g")
    await call(request, context)
    assert 3 * MIB < outboxes.unread["ipv4:10.0.0.1:1"] < 3 * MIB + 64
    with pytest.raises(grpc.aio.AbortError):
        await call(request, context)
    assert context.error.reason == pb.REASON_OVERLOADED
    ends.pop()(context)
    assert (outboxes.total, ends) == (0, [])
    await call(request, context)
    outboxes.add("ipv4:10.0.0.2:1", "client/a", 2 * MIB)
    for name, reason in (("a", pb.REASON_OVERLOADED), ("b", pb.REASON_INVALID_REQUEST)):
        token = CALLER.set(SimpleNamespace(identity=f"client/{name}"))  # type: ignore[arg-type]
        for method, empty in (
            ("Peek", pb.PeekRequest()),
            ("ReadMessages", pb.ReadMessagesRequest()),
        ):
            with pytest.raises(grpc.aio.AbortError):
                await handlers[method].unary_unary(empty, context)
            assert context.error.reason == reason, (name, method)
        CALLER.reset(token)
    reader = HttpContext("ipv4:10.0.0.3:1", None)
    vars(reader)["add_done_callback"] = ends.append
    context = reader
    await call(request, reader)  # those who read are served, whatever others leave unread
    for method in ("Receive", "Peek", "ReadMessages"):
        with pytest.raises(grpc.aio.AbortError):
            await handlers[method].unary_unary(request, reader)
        assert reader.error.reason == pb.REASON_OVERLOADED, method


def test_place_of_the_code_logs_so_many_lines() -> None:
    now_s = 0.0
    flood = _Flood(lambda: now_s)

    def record(line: int, level: int = logging.INFO, name: str = "a") -> logging.LogRecord:
        return logging.LogRecord(name, level, "a.py", line, "text", None, None)

    assert sum(flood.filter(record(1)) for _ in range(3 * LINES_MAX)) == LINES_MAX
    assert flood.filter(record(2))
    assert flood.filter(record(1, logging.CRITICAL))
    for name in (AUDIT, audit_log.logger.name):  # also of lines that the file does not take
        assert all(flood.filter(record(3, name=name)) for _ in range(3 * LINES_MAX))
    now_s += FLOOD_S
    first, second = record(1), record(1)
    assert flood.filter(first)
    assert flood.filter(second)
    assert vars(first)["left_out"] == 2 * LINES_MAX
    assert "left_out" not in vars(second)


async def test_unused_connections_of_a_port_that_is_nearly_full_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        at, ended = listening.getsockname(), list[None]()
        connections = Connections({at[1]}, {})
        guard = PortGuard(connections, 32, lambda: ended.append(None))

        def connect() -> socket.socket:
            client = stack.enter_context(socket.create_connection(at, 10))
            stack.enter_context(listening.accept()[0])
            return client

        used, *unused = [connect() for _ in range(29)]
        address = grpc_address(used.getsockname())
        connections.count_request(pb.GetTimerRequest(), SimpleNamespace(peer=lambda: address))  # type: ignore[arg-type]
        for _ in range(3):
            await guard.check()
        assert (ended, caplog.messages) == ([], []), "the port has room"
        unused.append(connect())
        await guard.check()
        assert ended == [], "each has time for its first request"
        late = connect()
        await guard.check()
        assert [each.recv(1) for each in unused] == [b""] * 29
        for each in (used, late):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        await guard.check()  # the others are not closed here, so the port is still full
        late.settimeout(10)
        assert late.recv(1) == b""
    assert len(ended) == 30, "each is counted once"
    assert [record.ended for record in caplog.records] == [0, 29, 1]  # type: ignore[attr-defined]


async def test_calls_that_come_at_once_while_the_loop_is_busy_are_all_answered() -> None:
    async def answer(_: bytes, __: Any) -> bytes:
        return b"answer"

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: Any = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/t/Call")
        assert await asyncio.to_thread(call, b"") == b"answer"
        calls = [call.future(b"") for _ in range(3_200)]
        time.sleep(0.5)  # noqa: ASYNC251 - the loop takes none of them meanwhile
        answers = await asyncio.to_thread(lambda: [each.code() for each in calls])
    await server.stop(None)
    assert set(answers) == {grpc.StatusCode.OK}


async def test_transfer_to_another_node_goes_on_while_the_port_is_full() -> None:
    async def fetch(_: bytes, __: object) -> AsyncIterator[bytes]:
        yield b"first"
        for _look in range(2):
            await guard.check()
        yield b"last"

    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    connections = Connections({port}, {})
    guard = PortGuard(connections, 1)
    method: Any = grpc.unary_stream_rpc_method_handler(fetch)
    handler = grpc.method_handlers_generic_handler("timer.Snapshots", {"Fetch": method})
    server.add_generic_rpc_handlers((connections.of_nodes(handler),))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_stream("/timer.Snapshots/Fetch")
        assert [part async for part in call(b"")] == [b"first", b"last"]
    await server.stop(0)
