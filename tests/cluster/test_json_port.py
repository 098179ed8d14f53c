"""JSON over HTTP where the node's services answer late, never, or in part."""

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock, patch

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from cluster.rpc import http_connections, json_bodies, timer_stream
from cluster.rpc.http import HttpServer
from cluster.rpc.http_api import IDEMPOTENCY_KEY, IDENTITY, HttpApi
from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.http_connections import HttpConnection, HttpConnections
from cluster.rpc.http_routes import RPC_ROUTES
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.schedule_batches import BatchCaller, ScheduleBatches
from cluster.security.identities import CallerIdentity, IdentityKind
from timerclient.proto import timer_pb2 as pb

AT = "/v1/topics/t/timers"
GROUP = "/v1/topics/t/groups/g"
HELD = {"lease_id": "1-1", "offsets": [0]}
LINE = '{"delay": 0}\n'
OWN = ("10.0.0.1", "timers.lan", "", ".")
NDJSON = {"Content-Type": "application/x-ndjson"}
LOST = ProblemError(pb.Error(reason=pb.REASON_LEADERSHIP_LOST))


class Calls:
    """Answers the first `answered` lines of a stream, and fails at line `read`; no other call ends.

    The payload `bad` is refused.
    """

    def __init__(
        self, answered: int = 1_000, read: int = 1_000, failure: BaseException = LOST
    ) -> None:
        self._answered, self._read, self._failure = answered, read, failure

    def is_unlimited(self, _: object) -> bool:
        return True

    def receiving(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def unary(self, method: str, request: Any, context: HttpContext) -> Any:
        await asyncio.Event().wait()

    async def stream(self, method: str, lines: Any, _: HttpContext) -> AsyncGenerator[Any, None]:
        async for line in lines:
            if line.timers[0].payloads == b"bad":
                refusal = pb.Error(reason=pb.REASON_QUOTA_REACHED)
                yield pb.ScheduleStreamResponse(request_no=line.request_no, error=refusal)
            elif line.request_no <= self._answered:
                yield pb.ScheduleStreamResponse(request_no=line.request_no, timer_ids=bytes(15))
            elif line.request_no == self._read:
                raise self._failure


@contextlib.asynccontextmanager
async def port(
    calls: Calls, admit: Callable[[web.Request], object] = lambda _: None
) -> AsyncIterator[TestClient[Any, Any]]:
    @web.middleware
    async def admitted(request: web.Request, handler: Any) -> web.StreamResponse:
        admit(request)
        return cast("web.StreamResponse", await handler(request))

    app = web.Application(middlewares=[admitted])
    app.add_routes(HttpApi(cast("LocalCalls", calls), OWN, secure=False).routes())
    async with asyncio.timeout(30), TestClient(TestServer(app)) as client:
        yield client


@contextlib.asynccontextmanager
async def served(calls: Calls, buffer_bytes: int = 0) -> AsyncIterator[str]:
    """Yield the address of a whole server, as a node has it.

    `buffer_bytes`: the system keeps about that many unread bytes of a connection; 0: its default.
    """
    api = HttpApi(cast("LocalCalls", calls), OWN, secure=False)
    pages = Mock(routes=api.routes, close=AsyncMock())
    server = HttpServer("127.0.0.1:0", Mock(), CollectorRegistry(), pages)
    async with asyncio.timeout(30):
        port = await server.start()
        if buffer_bytes:
            assert server._listener is not None
            for each in server._listener._sockets:
                for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    each.setsockopt(socket.SOL_SOCKET, kind, buffer_bytes)
        yield f"http://127.0.0.1:{port}"
    await server.stop()


async def lines_of(calls: Calls, body: Any) -> list[dict[str, Any]]:
    async with port(calls) as client:
        answer = await client.post(f"{AT}/stream", data=body, headers=NDJSON)
        return [json.loads(line) for line in (await answer.read()).splitlines()]


@pytest.mark.parametrize(
    ("verb", "path", "status", "known"),
    [("POST", AT, 504, False), ("GET", f"{AT}/count", 503, True)],
)
async def test_change_without_an_answer_in_time_has_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch, verb: str, path: str, status: int, *, known: bool
) -> None:
    routes = [replace(each, timeout_s=0.01) for each in RPC_ROUTES]
    monkeypatch.setattr("cluster.rpc.http_api.RPC_ROUTES", routes)
    async with port(Calls()) as client:
        answer = await client.request(
            verb, path, json={"delay": 0}, headers={IDEMPOTENCY_KEY: "1"} if not known else {}
        )
        assert (answer.status, (await answer.json())["outcome_known"]) == (status, known)


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")  # as aiohttp itself does
async def test_single_timers_are_gathered_by_identity_and_those_with_limits_stay_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    class Limited(Calls):
        def is_unlimited(self, identity: Any) -> bool:
            return bool(identity.name != "limited")

        async def unary(self, *_: object) -> pb.ScheduleResponse:
            asked.append(("alone", ""))
            return pb.ScheduleResponse(timer_ids=b"1" * 15)

    async def gathered(_: object, message: object, caller: BatchCaller, context: object) -> Any:
        asked.append((caller.address, str(caller.identity)))
        return pb.ScheduleResponse(timer_ids=b"1" * 15)

    def admit(request: web.Request) -> None:  # as TLS does it
        request[IDENTITY] = CallerIdentity(IdentityKind.CLIENT, request.headers["Who"])

    monkeypatch.setattr(ScheduleBatches, "schedule", gathered)
    async with port(Limited(), admit) as client:
        for who in ("one", "limited", "two"):
            assert (await client.post(AT, json={"delay": 0}, headers={"Who": who})).status == 200
    assert asked == [
        ("ipv4:127.0.0.1", "client/one"),
        ("alone", ""),
        ("ipv4:127.0.0.1", "client/two"),
    ]


async def test_port_without_tls_takes_its_own_names_only() -> None:
    async with port(Calls()) as client:
        for host, status in (
            ("timers.lan:7411", 200),
            ("Timers.LAN", 200),
            ("timers.lan.:7411", 200),
            ("10.0.0.1", 200),
            ("timers.lan.example", 403),
            ("lan", 403),
            (".", 403),
        ):
            headers = NDJSON | {"Host": host}
            answer = await client.post(f"{AT}/stream", data='{"delay": 0}', headers=headers)
            assert answer.status == status, host
            assert status == 200 or "http_names" in await answer.text()


async def test_headers_of_a_request_are_checked() -> None:
    async with port(Calls()) as client:
        twice = [("Content-Type", "application/json"), *[(IDEMPOTENCY_KEY, "1")] * 2]
        assert (await client.post(AT, data='{"delay": 0}', headers=twice)).status == 400
        untyped = await client.post(AT, skip_auto_headers=["Content-Type"])
        assert "Content-Type: must be application/json" in await untyped.text()
        for size, status in (
            (timer_stream.KEY_SIZE_MAX, 200),
            (timer_stream.KEY_SIZE_MAX + 1, 400),
        ):
            named = NDJSON | {IDEMPOTENCY_KEY: "k" * size}
            assert (
                await client.post(f"{AT}/stream", data='{"delay": 0}', headers=named)
            ).status == status


@pytest.mark.parametrize(
    ("path", "body", "told", "shown"),
    [
        (
            AT,
            {"delay": 2},
            "delay_ms = 2000: at most 1500 (x_ms)",
            "delay = 2 s: at most 1.5 s (x_ms)",
        ),
        (
            f"{AT}/batch",
            {"timers": [{"delay": 2}]},
            "delay_ms = 9: at most 8",
            "timers[0].delay = 0.009 s: at most 0.008 s",
        ),
        (AT, {"due_ms": 10**12}, "due_ms = 9: at most 8", "due_ms = 9: at most 8"),
        (
            AT,
            {"due": "2030-01-01T01:00:00+01:00"},
            "due_ms = 1893456000000: after x_ms = 0",
            "due = 2030-01-01T00:00:00.000Z: after x = 1970-01-01T00:00:00.000Z",
        ),
        (
            f"{GROUP}/receive",
            {"lease": 0.05},
            "lease_ms = 50: 100 to 43200000",
            "lease = 0.05 s: 0.1 s to 43200 s",
        ),
        (f"{GROUP}/extend", HELD | {"lease": 1}, "lease_ms = 1000: 9", "lease = 1 s: 0.009 s"),
        (f"{GROUP}/nack", HELD | {"delay": 1}, "delay_ms = 1000: 9", "delay = 1 s: 0.009 s"),
    ],
)
async def test_errors_show_fields_in_the_units_of_the_request(
    path: str, body: dict[str, Any], told: str, shown: str
) -> None:
    class Refusing(Calls):
        async def unary(self, method: str, request: Any, context: HttpContext) -> Any:
            field, limit = told.partition(" ")[0], told.partition(": ")[2]
            error = pb.Error(message=told, field=field, limit=limit)
            if method in ("Nack", "Extend"):
                return pb.AckResponse(error=error)
            raise ProblemError(error)

    async with port(Refusing()) as client:
        found = await (await client.post(path, json=body)).json()
    assert found["detail"] == shown
    assert (found["field"], found["limit"]) == (shown.partition(" ")[0], shown.partition(": ")[2])


async def test_large_bodies_are_parsed_one_by_one_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside: list[bool] = []
    busy = threading.Lock()

    def parse(body: bytes) -> dict[str, Any]:
        beside.append(threading.current_thread() is not threading.main_thread())
        assert busy.acquire(blocking=False)
        time.sleep(0.02)
        busy.release()
        return json_bodies.parse_object(body)

    monkeypatch.setattr("cluster.rpc.http_api.parse_object", parse)
    async with port(Calls()) as client:
        for timers, calls in ((1, 1), (10_000, 3)):
            body = {"timers": [{"delay": -1}] * timers}
            sent = [client.post(f"{AT}/batch", json=body) for _ in range(calls)]
            for answer in await asyncio.gather(*sent):
                assert (answer.status, (await answer.json())["field"]) == (400, "timers[0].delay")
    assert beside == [False, True, True, True]


async def test_failed_stream_names_the_first_line_without_a_result() -> None:
    found = await lines_of(Calls(answered=2, read=5), f'{LINE}{{"payload": "bad"}}\n{7 * LINE}')
    assert [each["line"] for each in found] == [1, 2, 3]
    reasons = [each["error"]["reason"] for each in found[1:]]
    assert reasons == ["QUOTA_REACHED", "LEADERSHIP_LOST"]


async def test_lines_before_one_that_is_too_long_get_their_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(Calls):
        async def stream(
            self, method: str, lines: Any, _: HttpContext
        ) -> AsyncGenerator[Any, None]:
            for line in [each async for each in lines]:  # answers begin after the last line
                if line.request_no > self._answered:
                    return
                yield pb.ScheduleStreamResponse(request_no=line.request_no, timer_ids=bytes(15))

    monkeypatch.setattr(timer_stream, "LINE_BYTES_MAX", 100)
    body = ""
    for end in ("", "\n", f"\n{LINE}"):
        body = f"{2 * LINE}\n{LINE}{101 * 'x'}{end}"
        *found, failed = await lines_of(Late(), body)
        assert [each["line"] for each in found if "result" in each] == [1, 2, 4]
        error = failed["error"]
        assert (failed["line"], error["outcome_known"]) == (5, True)
        assert error["detail"] == "line: must have at most 100 bytes"
    _, failed = await lines_of(Late(answered=1), body)
    assert (failed["line"], failed["error"]["outcome_known"]) == (2, False)


@pytest.mark.parametrize("bug", [KeyError("bug"), asyncio.CancelledError()])
async def test_stream_that_ends_by_a_bug_does_not_look_complete(bug: BaseException) -> None:
    *found, failed = await lines_of(Calls(answered=2, read=5, failure=bug), 5 * LINE)
    assert [each["result"] for each in found] == ["SCHEDULED"] * 2
    assert (failed["line"], failed["error"]["status"]) == (3, 500)
    [refused] = await lines_of(Calls(answered=0, read=1, failure=bug), LINE)
    assert (refused["status"], refused["outcome_known"]) == (500, False)


async def test_stream_has_any_number_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_stream, "LINES_MAX", 10)
    assert [each["line"] for each in await lines_of(Calls(), 35 * LINE)] == [*range(1, 36)]


async def test_lines_of_a_stream_take_turns_with_other_work() -> None:
    turns, at_work = 0, True

    async def work() -> None:
        nonlocal turns
        while at_work:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(work())
    body = gzip.compress(b"\n" * 100_000)
    coded = NDJSON | {"Content-Encoding": "gzip"}
    async with (
        served(Calls()) as at,
        aiohttp.ClientSession() as session,
        session.post(f"{at}{AT}/stream", data=body, headers=coded) as answer,
    ):
        assert (answer.status, await answer.read()) == (200, b"")
    at_work = False
    await other
    assert turns >= 100_000 // timer_stream.LINES_PER_TURN


async def test_client_that_reads_a_stream_slowly_stays_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: list[HttpConnection] = []
    begin = HttpConnections.begin

    def note(connections: HttpConnections, *args: Any) -> HttpConnection:
        accepted.append(begin(connections, *args))
        return accepted[-1]

    monkeypatch.setattr(HttpConnections, "begin", note)
    count = 3_000
    async with served(Calls(answered=count)) as at, aiohttp.ClientSession() as session:
        async with session.post(f"{at}{AT}/stream", data=count * LINE, headers=NDJSON) as answer:
            text = await answer.read()
        [connection] = accepted
        assert text.count(b"SCHEDULED") == count
        assert connection.late_bytes > 50 * count
    now_s = 1_000.0
    assert not connection.is_late(now_s, full=True)
    part = connection.late_bytes
    assert 0 < part < len(text), "the piece that filled the buffer"
    enough_s = http_connections.WAIT_S + part / http_connections.PACE
    assert not connection.is_late(now_s + enough_s - 0.1, full=True)
    assert connection.is_late(now_s + enough_s + 0.1, full=True)


@pytest.mark.parametrize("path", [AT, f"{AT}/stream"])
async def test_compressed_body_is_expanded_in_pieces_up_to_its_limit(path: str) -> None:
    media = NDJSON if path.endswith("stream") else {"Content-Type": "application/json"}
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    many = gzip.compress(b" " * json_bodies.SMALL_BYTES_MAX * 200)
    async with served(Calls()) as at, aiohttp.ClientSession() as session:
        for coding, body, where in (
            ("gzip", gzip.compress(b'{"delay": "x"}'), "delay"),
            ("Deflate", zlib.compress(b'{"delay": "x"}'), "delay"),
            ("deflate", raw.compress(b'{"delay": "x"}') + raw.flush(), "delay"),
            ("gzip", gzip.compress(b'{"delay": "x"}')[:-9], "ends early"),
            ("gzip", many, "must have at most"),
        ):
            headers = media | {"Content-Encoding": coding}
            async with session.post(f"{at}{path}", data=body, headers=headers) as answer:
                assert where in await answer.text(), (coding, where)


async def test_each_piece_of_a_compressed_body_takes_its_turn_in_all_members_of_gzip() -> None:
    size = json_bodies.PIECE_BYTES
    body = gzip.compress(bytes(3 * size)) + gzip.compress(b"the end")
    content = Mock(readany=AsyncMock(side_effect=[body, b""]))
    reader = json_bodies.BodyReader(Mock(content=content, headers={"Content-Encoding": "gzip"}))
    turns = AsyncMock(side_effect=[None] * 10)  # an endless loop would fill the memory
    with patch("cluster.rpc.json_bodies.asyncio.sleep", turns):
        pieces = [await reader.next_piece() for _ in range(5)]
    assert pieces == [bytes(size)] * 3 + [b"the end", b""]
    assert turns.await_count >= 4


async def test_silent_client_and_large_lines_end_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield f"{LINE}{{".encode()
        await asyncio.Event().wait()

    monkeypatch.setattr(timer_stream, "SILENCE_S", 0.05)
    one, two = await lines_of(Calls(), silent())
    assert (one["result"], two["line"]) == ("SCHEDULED", 2)
    assert "within 0.05 s" in two["error"]["limit"]
    monkeypatch.setattr(json_bodies, "ACCOUNT_BYTES_MAX", json_bodies.SMALL_BYTES_MAX)
    [refused] = await lines_of(Calls(), b" " * (json_bodies.SMALL_BYTES_MAX + 1))
    assert refused["reason"] == "OVERLOADED"
