"""Probes tell the truth, pages answer, start and stop are clean."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, MagicMock, Mock

import aiohttp
import pytest
import uvloop
from prometheus_client import CollectorRegistry

import cluster.rpc.http
from cluster.files.standby_ports import Standby, Wait
from cluster.node.ports import Ports
from cluster.observe.metrics import Levels, Telemetry
from cluster.page.page_routes import StatusPages
from cluster.rpc import caller_usages, http_connections, http_listener
from cluster.rpc.endpoints import Endpoints
from cluster.rpc.http import (
    NO_HTTP_HOOKS,
    HttpHooks,
    HttpServer,
    HttpTls,
    LocalState,
    why_not_ready,
)
from cluster.rpc.http_api import HttpApi
from cluster.rpc.http_call import LocalCalls
from cluster.rpc.http_connections import HttpConnection
from cluster.rpc.metrics_pages import MEASURE_INTERVAL_S
from cluster.rpc.node_tls import Withdrawn
from cluster.security.identities import IdentityKind
from cluster.settings.config import NodeConfig, TlsConfig
from deploy.certificate_store import CertificateStore
from deploy.local import free_ports
from tests.cluster.http_document import FOLLOWER, FakeNode
from tests.waiting import until
from timer.model.timer_errors import CallerLimitError, ConfigError, NotReadyError

LEADER = LocalState(role="leader", serving=True, leader="n2", silent_ms=0, silent_ms_max=550)


class Answer(NamedTuple):
    status: int
    text: str
    content_type: str


class Page:
    """A server on a free port, and a client of it."""

    def __init__(self, node: FakeNode, session: aiohttp.ClientSession, port: int) -> None:
        self.node = node
        self.port = port
        self._session = session

    async def get(self, path: str) -> Answer:
        async with self._session.get(f"http://127.0.0.1:{self.port}{path}") as answer:
            return Answer(answer.status, await answer.text(), answer.headers["Content-Type"])


def server_of(
    node: FakeNode,
    address: str = "127.0.0.1:0",
    tls: HttpTls | None = None,
    hooks: HttpHooks = NO_HTTP_HOOKS,
    connections_max: int = 256,
) -> HttpServer:
    telemetry = Telemetry(node="n2", version="0.1.0", read_levels=lambda: Levels(pending=7))
    return HttpServer(
        address, node, telemetry.registry, tls=tls, hooks=hooks, connections_max=connections_max
    )


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    node = FakeNode()
    server = server_of(node)
    port = await server.start()
    async with aiohttp.ClientSession() as session:
        yield Page(node, session, port)
    await server.stop()


# ---- verdicts


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (FOLLOWER, ""),
        (replace(FOLLOWER, silent_ms=550), ""),
        (replace(FOLLOWER, silent_ms=551), "has not heard the leader n1 for 551 ms"),
        (replace(FOLLOWER, leader=""), "knows no leader"),
        (replace(FOLLOWER, behind_ms=5_000), ""),
        (replace(FOLLOWER, behind_ms=5_001), "has lacked entries of the leader n1 for 5 s"),
        (replace(FOLLOWER, behind_ms=None), "has not caught up with the leader n1 since its start"),
        (LEADER, ""),
        (replace(LEADER, serving=False), "leads, but does not serve: no lease, or not caught up"),
        (replace(FOLLOWER, role="candidate"), "is candidate"),
        (replace(FOLLOWER, role="learner"), ""),
        (replace(FOLLOWER, role="learner", leader=""), "knows no leader"),
        (replace(LEADER, role="stopping"), "is stopping"),
    ],
)
def test_ready_is_who_leads_or_hears_the_leader(state: LocalState, why: str) -> None:
    assert why_not_ready(state) == why


async def test_probes_answer_with_the_verdict_and_its_reason(page: Page) -> None:
    assert await page.get("/readyz") == Answer(200, "ok\n", "text/plain; charset=utf-8")
    page.node.state = replace(FOLLOWER, leader="")
    assert (await page.get("/readyz"))[:2] == (503, "knows no leader\n")
    assert (await page.get("/healthz"))[:2] == (200, "ok\n")


# ---- pages


async def test_metrics_are_prometheus_text(page: Page) -> None:
    answer = await page.get("/metrics")
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain; version=")
    assert "timer_pending 7.0\n" in answer.text
    assert page.node.measured == 1


@pytest.mark.parametrize("what", ["status", "checkpoint"])
async def test_state_is_json_of_this_node_or_of_all(page: Page, what: str) -> None:
    answer = await page.get(f"/v1/{what}")
    assert answer.status == 200
    assert answer.content_type.startswith("application/json")
    assert answer.text == f'{{"what": "{what}", "epoch": {1 << 60}}}\n'
    await page.get(f"/v1/{what}?scope=cluster")
    assert page.node.asked == [(what, False), (what, True)]


async def test_state_that_cannot_be_had_is_unavailable_with_its_reason(page: Page) -> None:
    page.node.failure = NotReadyError("starting")
    answer = await page.get("/v1/status")
    assert answer.status == 503
    assert answer.content_type.startswith("application/problem+json")
    problem = json.loads(answer.text)
    assert (problem["detail"], problem["reason"]) == ("starting", "NOT_READY")


async def test_state_that_takes_too_long_is_unavailable(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.rpc.http, "ANSWER_TIMEOUT_S", 0.01)
    page.node.hangs = True
    answer = await page.get("/v1/checkpoint")
    assert (answer.status, json.loads(answer.text)["reason"]) == (503, "NOT_READY")


async def test_bug_in_the_node_is_an_answer_too(page: Page) -> None:
    page.node.failure = RuntimeError("bug")
    answer = await page.get("/v1/status")
    assert (answer.status, json.loads(answer.text)["status"]) == (500, 500)
    assert "bug" not in answer.text
    assert (await page.get("/healthz")).status == 200


async def test_front_page_says_the_role_and_its_links_work(page: Page) -> None:
    page.node.state = replace(FOLLOWER, leader="<n1>")
    front = await page.get("/")
    assert front.content_type.startswith("text/html")
    assert "follower, leader &lt;n1&gt;: ready" in front.text
    links = [each.split('"')[0] for each in front.text.split('href="')[1:]]
    assert len(links) == 8
    assert [(await page.get(link)).status for link in links] == [200] * 8


async def test_scrapes_share_renderings_which_have_pauses(page: Page) -> None:
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    for _ in range(2):
        answers = await asyncio.gather(*(page.get("/metrics") for _ in range(30)))
        assert {each.status for each in answers} == {200}
    assert 2 <= page.node.measured <= 1 + (clock() - begun_s) / MEASURE_INTERVAL_S


@pytest.mark.parametrize(
    ("request_line", "header", "status", "detail"),
    [
        ("GET //v1/status", "", 404, "no such path: '//v1/status'"),
        ("PATCH /metrics", "", 405, "not PATCH"),
        ("GET /v1/topics/t/keys/%ff", "", 400, "keys/%ff': must be percent-encoded UTF-8"),
        ("GET /v1/policies?topic=%ff", "", 400, "topic=%ff': must be percent-encoded UTF-8"),
        ("GET /v1/status", "Expect: gifts\r\n", 417, "Expect = 'gifts': must be 100-continue"),
    ],
)
async def test_refusals_of_any_path_are_problems(
    page: Page, request_line: str, header: str, status: int, detail: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    writer.write(
        f"{request_line} HTTP/1.1\r\nHost: n2\r\n{header}Connection: close\r\n\r\n".encode()
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"Content-Type: application/problem+json" in head
    found = json.loads(body)
    assert (found["status"], detail in found["detail"]) == (status, True), found
    assert body.endswith(b"}\n")


# ---- start and stop


async def test_port_in_use_is_an_error_that_names_the_setting(page: Page) -> None:
    second = server_of(FakeNode(), f"127.0.0.1:{page.port}")
    with pytest.raises(ConfigError, match="can't listen: in use") as error:
        await second.start()
    assert error.value.key == "http"
    assert second._runner is None


async def test_address_of_another_machine_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        await server_of(FakeNode(), "192.0.2.1:7990").start()


async def test_stopped_server_frees_its_port() -> None:
    (port,) = free_ports(1)
    server = server_of(FakeNode(), f"127.0.0.1:{port}")
    assert await server.start() == port
    await server.stop()
    await server.stop()
    again = server_of(FakeNode(), f"127.0.0.1:{port}")
    assert await again.start() == port
    await again.stop()


async def test_stop_does_not_wait_for_an_answer_that_hangs(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.rpc.http, "DRAIN_TIMEOUT_S", 0.01)
    node = FakeNode(hangs=True)
    server = server_of(node)
    port = await server.start()
    async with aiohttp.ClientSession() as session:

        async def ask() -> None:
            async with session.get(f"http://127.0.0.1:{port}/v1/status"):
                pass

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(120):
            await node.was_asked.wait()
            await server.stop()
            with pytest.raises(aiohttp.ClientError):
                await asking


# ---- connections


@pytest.fixture
def context(tmp_path: Path) -> ssl.SSLContext:
    """A context for a server that the same context, as a client's, accepts."""
    store = CertificateStore(tmp_path)
    store.create("c")
    store.issue(IdentityKind.NODE, "n1")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(store.path("node-n1"), store.path("node-n1", key=True))
    return made


async def test_connections_of_a_withdrawn_authority_end_at_a_port_that_the_system_chose(
    context: ssl.SSLContext, tmp_path: Path
) -> None:
    endpoints = Endpoints(config_with_tls(tmp_path))
    http = endpoints.http_server(FakeNode(), CollectorRegistry())
    parts: Any = dict.fromkeys(("relay", "servers", "health_service"), Mock())
    Ports(endpoints, Mock(), http, **parts)
    assert endpoints.tls is not None
    port = await http.start()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1",
        port,
        ssl=ssl.create_default_context(cafile=tmp_path / "ca.pem"),
        server_hostname="n1.nodes.c.timer",
    )
    withdrawn = Withdrawn(nodes=False, clients=True)
    await asyncio.to_thread(endpoints.tls.on_withdrawal, withdrawn)
    async with asyncio.timeout(10):
        assert not await _rest(reader)
    writer.close()
    await http.stop()


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")  # as aiohttp itself does
async def test_pages_count_for_the_limits_of_their_caller(
    context: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_usages, "time", SimpleNamespace(monotonic=lambda: 5.0))
    rule = 'who = ["client/a"]\nmay = ["observe"]\nrate = { requests = 2 }\nmost = { streams = 1 }'
    (tmp_path / "access.toml").write_text(f"[[rule]]\n{rule}")
    store = CertificateStore(tmp_path)
    files = store.issue(IdentityKind.CLIENT, "a"), store.path("client-a", key=True)
    client = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    client.load_cert_chain(*files)
    node, released = FakeNode(), asyncio.Event()
    answers = Mock(close=AsyncMock(), timer=AsyncMock(return_value={}))

    async def status(*, cluster: bool) -> Mapping[str, object]:
        node.was_asked.set()
        await released.wait()
        return {"whole": cluster}

    monkeypatch.setattr(node, "status", status)
    http = Endpoints(config_with_tls(tmp_path)).http_server(
        node, CollectorRegistry(), StatusPages(answers)
    )
    url = f"https://127.0.0.1:{await http.start()}"
    async with aiohttp.ClientSession() as session:

        async def get(path: str) -> tuple[int, str]:
            asked = session.get(url + path, ssl=client, server_hostname="n1.nodes.c.timer")
            async with asked as answer:
                return answer.status, await answer.text()

        waiting = asyncio.create_task(get("/v1/status"))
        await asyncio.wait_for(node.was_asked.wait(), 10)
        code, text = await get("/v1/policies")
        assert (code, json.loads(text)["reason"]) == (429, "OVERLOADED")
        assert "most.streams of client/a: 1 are open" in text
        released.set()
        assert (await waiting)[0] == (await get("/metrics"))[0] == 200
        code, text = await get("/")
        assert (code, text[:53]) == (429, "rate.requests of client/a: must be at most 2 a second")
        assert [(await get(path))[0] for path in ("/healthz", "/readyz", "/v1/timer")] == [200] * 3
    await http.stop()


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")  # as aiohttp itself does
async def test_call_is_admitted_and_counted_before_its_body_arrives(
    context: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_usages, "time", SimpleNamespace(monotonic=lambda: 5.0))
    rule = 'who = ["client/a"]\nmay = ["produce", "observe"]\nrate = { requests = 1 }\n'
    (tmp_path / "access.toml").write_text(f"[[rule]]\n{rule}most = {{ streams = 1 }}")
    store, clients = CertificateStore(tmp_path), {}
    for name in ("a", "denied"):
        client = clients[name] = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        files = store.issue(IdentityKind.CLIENT, name), store.path(f"client-{name}", key=True)
        client.load_cert_chain(*files)
    endpoints: Any = Endpoints(config_with_tls(tmp_path))
    api = HttpApi(LocalCalls([], endpoints.http_guard()), [], secure=True)
    pages = Mock(routes=api.routes, close=AsyncMock())
    http = endpoints.http_server(FakeNode(), CollectorRegistry(), pages)
    url = f"https://127.0.0.1:{await http.start()}/v1"
    released = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await released.wait()

    async with asyncio.timeout(30), aiohttp.ClientSession() as session:

        async def post(name: str) -> tuple[int, str]:
            sent = session.post(
                f"{url}/topics/t/timers/batch",
                data=body(),
                headers={"Content-Type": "application/json"},
                ssl=clients[name],
                server_hostname="n1.nodes.c.timer",
            )
            async with sent as answer:
                return answer.status, (await answer.json())["detail"]

        assert (await post("denied"))[0] == 403
        first = asyncio.create_task(post("a"))
        await until(lambda: any(usages.addresses for usages in endpoints._usages._of.values()))
        code, detail = await post("a")
        assert (code, detail[:38]) == (429, "most.streams of client/a: 1 are open o")
        released.set()
        assert (await first)[0] == 400  # the body ends early
        read = session.get(
            f"{url}/openapi.json", ssl=clients["a"], server_hostname="n1.nodes.c.timer"
        )
        async with read as answer:
            assert (answer.status, "rate.requests" in await answer.text()) == (429, True)
    await http.stop()


async def test_waiting_node_queries_the_others_with_its_present_certificate(
    context: ssl.SSLContext, tmp_path: Path
) -> None:
    public, link = (f"127.0.0.1:{port}" for port in free_ports(2))
    config = replace(
        config_with_tls(tmp_path),
        peers={"n1": public, "n2": "127.0.0.1:1"},
        grpc=public,
        links={"n1": link, "n2": "127.0.0.1:2"},
        link=link,
    )
    standby = Standby(config, lambda: Wait("waiting", "its disk is full"))
    await standby.start()
    assert standby._channels is not None
    assert standby._endpoints.tls is not None
    before = standby._channels.stubs["n2"]
    standby._endpoints.tls.on_renewal()
    assert standby._channels.stubs["n2"] is not before
    await standby.stop()


def config_with_tls(directory: Path) -> NodeConfig:
    """Return the settings of a node n1 whose files are those of a CertificateStore."""
    files = {
        "ca": "ca.pem",
        "client_ca": "client-ca.pem",
        "certificate": "node-n1.pem",
        "key": "node-n1-key.pem",
        "access": "access.toml",
    }
    return NodeConfig(
        name="n1",
        cluster_id="c",
        data=directory / "data",
        peers={"n1": "127.0.0.1:1"},
        links={"n1": "127.0.0.1:2"},
        http="127.0.0.1:0",
        tls=TlsConfig(**{name: str(directory / file) for name, file in files.items()}),
    )


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_unfinished_handshakes_are_limited_in_number_and_time(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setattr(http_listener, "HANDSHAKE_S", 60.0)
    nothing: Any = None
    tls = HttpTls(lambda: context, "c", nothing, None, nothing, nothing)
    server = server_of(FakeNode(), tls=tls, connections_max=4)

    async def main() -> None:
        port = await server.start()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for reader, _ in idle[:8]:  # the oldest are closed
            assert not await _rest(reader)
        monkeypatch.setattr(http_listener, "HANDSHAKE_S", 0.1)
        url = f"https://127.0.0.1:{port}/healthz"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as answer:
            assert answer.status == 200
        late, writer = await asyncio.open_connection("127.0.0.1", port)
        assert not await _rest(late)
        await server.stop()
        for reader, _ in idle:
            assert not await _rest(reader)
        for _, each in [*idle, (late, writer)]:
            each.close()

    run(_within(20, main()))  # asyncio's own limit of a handshake is 60 s


async def test_limits_of_a_caller_hide_no_error_of_the_handler() -> None:
    nothing, usages, request = Mock(), MagicMock(), MagicMock(path="/v1/status")
    request.headers.getall.return_value = ["Bearer x"]
    tls = HttpTls(nothing, "c", nothing, nothing, nothing, usages)
    error = CallerLimitError("rate.rows of client/a", "must be at most 5", 9)
    with pytest.raises(CallerLimitError):
        await tls.admit(request, AsyncMock(side_effect=error))
    assert usages.open_call.return_value.__exit__.called
    usages.charge.side_effect = error
    handler = AsyncMock()
    assert (await tls.admit(request, handler)).status == 429
    assert not handler.called


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_requests_above_the_limit_get_503_and_probes_an_answer(
    monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    released, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def status(*, cluster: bool) -> Mapping[str, object]:
        waiting.release()
        await released.wait()
        return {}

    node = FakeNode()
    monkeypatch.setattr(node, "status", status)
    server = server_of(node, connections_max=4)

    async def main() -> None:
        port = await server.start()
        writers: list[asyncio.StreamWriter] = []

        async def connected(path: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(_get(path))
            if path == "/healthz":
                assert (await reader.read(1_000)).endswith(b"ok\n")
            else:
                await waiting.acquire()
            return reader

        try:
            busy = [await connected("/v1/status") for _ in range(2)]
            idle = [await connected("/healthz") for _ in range(2)]
            writers[2].write(_get("/healthz"))  # so the other one is idle for longer
            assert await idle[0].read(1_000)
            busy.append(await connected("/v1/status"))
            assert not await _rest(idle[1])
            for _ in range(2):
                await connected("/healthz")
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writers.append(writer)
                writer.write(_get("/metrics"))
                refused = await _rest(reader)
                assert refused.startswith(b"HTTP/1.1 503 ")
                assert b"Retry-After: 1\r\n" in refused
                assert b'"reason": "OVERLOADED"' in refused
            released.set()
            for reader in busy:
                assert b"200 OK" in await reader.read(1_000)
        finally:
            released.set()
            for each in writers:
                each.close()
            await server.stop()

    run(_within(20, main()))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_that_come_together_to_a_full_port_get_503(run: Any) -> None:
    node = FakeNode()
    node.hangs = True
    server = server_of(node)

    async def main() -> None:
        port = await server.start()
        clients = []
        for _ in range(320):
            clients.append(socket.create_connection(("127.0.0.1", port)))
            clients[-1].sendall(_get("/v1/status"))
        try:
            heads: list[bytes] = []
            for _ in range(1_000):
                heads = [*filter(None, map(_head, clients))]
                if len(heads) >= 80:
                    break
                await asyncio.sleep(0.01)
            assert heads == [b"HTTP/1.1 503 "] * 80
        finally:
            for each in clients:
                each.close()
            await server.stop()

    run(_within(30, main()))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("tls", [False, True])
def test_client_that_reads_no_answers_is_disconnected_and_a_reader_is_not(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, run: Any, tls: bool
) -> None:
    monkeypatch.setattr(http_connections, "WAIT_S", 0.3)
    monkeypatch.setattr(http_connections, "PACE", 1 << 40)
    monkeypatch.setattr(http_connections, "CHECK_INTERVAL_S", 0.05)
    server = _padded(16 << 10, context if tls else None, monkeypatch)

    async def main() -> None:
        port = await server.start()
        many = b"GET /v1/status HTTP/1.1\r\nHost: n2\r\n\r\n" * 1_000
        deaf = [await _connect(port, tls=tls) for _ in range(2)]
        sending = [asyncio.create_task(_send_until_closed(each, many)) for each in deaf]
        url = f"http{'s' if tls else ''}://127.0.0.1:{port}/healthz"
        async with aiohttp.ClientSession() as session:
            while not all(each.done() for each in sending):
                async with session.get(url, ssl=False) as answer:
                    assert answer.status == 200
                await asyncio.sleep(0.01)
        await server.stop()
        for each in deaf:
            each.abort()

    run(_within(20, main()))


@pytest.mark.parametrize("tls", [False, True])
def test_unread_answers_together_have_a_limit_of_bytes(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(http_connections, "ANSWERS_BYTES_MAX", 33 << 20)
    monkeypatch.setattr(http_connections, "WAIT_S", 60.0)
    ended = asyncio.Semaphore(0)
    hooks = HttpHooks(on_ended=ended.release)
    server = _padded(8 << 20, context if tls else None, monkeypatch, hooks)

    async def main() -> None:
        port = await server.start()
        deaf = [await _connect(port, tls=tls) for _ in range(7)]
        for each in deaf:
            each.write(b"GET /v1/status HTTP/1.1\r\nHost: n2\r\n\r\n")
        for _ in range(3):  # 4 answers of 8 MiB may wait
            await ended.acquire()
        assert ended.locked()
        await server.stop()
        for each in deaf:
            each.abort()

    uvloop.run(_within(20, main()))


def test_slow_client_has_time_for_the_bytes_of_its_answers() -> None:
    nothing: Any = None
    connection = HttpConnection(nothing, answer_bytes=10 * http_connections.PACE)
    assert not connection.is_late(100.0, full=True)
    assert not connection.is_late(119.9, full=True)
    assert connection.is_late(120.1, full=True)
    assert not connection.is_late(121.0, full=False)
    assert not connection.is_late(122.0, full=True)


def _padded(
    size: int,
    context: ssl.SSLContext | None,
    monkeypatch: pytest.MonkeyPatch,
    hooks: HttpHooks = NO_HTTP_HOOKS,
) -> HttpServer:
    """Return a server whose status has a field of `size` bytes. `context`: None without TLS."""
    nothing: Any = None
    monkeypatch.setattr(cluster.rpc.http, "PROBES", {"/healthz", "/v1/status"})
    monkeypatch.setattr(cluster.rpc.http, "DRAIN_TIMEOUT_S", 0.01)
    tls = (
        HttpTls(lambda: context, "c", nothing, None, nothing, nothing)
        if context is not None
        else None
    )
    return server_of(FakeNode(padding="x" * size), tls=tls, hooks=hooks)


async def _connect(port: int, *, tls: bool) -> asyncio.Transport:
    """Return a connection that reads nothing after the TLS handshake."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    loop, secure = asyncio.get_running_loop(), trusting if tls else None
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    made.setblocking(False)
    await loop.sock_connect(made, ("127.0.0.1", port))
    connection, _ = await loop.create_connection(
        asyncio.Protocol, sock=made, ssl=secure, server_hostname="n2" if tls else None
    )
    connection.pause_reading()
    return connection


async def _send_until_closed(connection: asyncio.Transport, text: bytes) -> None:
    """Send a text again and again until the server closes the connection."""
    while not connection.is_closing():
        if connection.get_write_buffer_size() < 1 << 20:
            connection.write(text)
        await asyncio.sleep(0.02)


async def _within(seconds: float, work: Coroutine[None, None, None]) -> None:
    async with asyncio.timeout(seconds):
        await work


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: n2\r\n\r\n".encode()


def _head(client: socket.socket) -> bytes:
    """Return the beginning of an answer; empty: there is none yet."""
    try:
        return client.recv(13, socket.MSG_DONTWAIT | socket.MSG_PEEK) or b"closed"
    except BlockingIOError:
        return b""
    except ConnectionError:
        return b"closed"


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes until the connection is closed."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
