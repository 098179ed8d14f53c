"""Probes tell the truth, pages answer, start and stop are clean."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import uvloop

import cluster.rpc.http
from cluster.observe.metrics import Levels, Telemetry
from cluster.rpc import http_listener
from cluster.rpc.http import HttpServer, HttpTls, LocalState, why_not_ready
from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from deploy.local import free_ports
from timer.model.timer_errors import ConfigError, NotReadyError

FOLLOWER = LocalState(role="follower", serving=False, leader="n1", silent_ms=90, silent_ms_max=550)
LEADER = LocalState(role="leader", serving=True, leader="n2", silent_ms=0, silent_ms_max=550)


@dataclass
class FakeNode:
    """A node with answers that the test sets."""

    state: LocalState = FOLLOWER
    failure: Exception | None = None
    hangs: bool = False
    measured: int = 0
    asked: list[tuple[str, bool]] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def local(self) -> LocalState:
        return self.state

    async def measure(self) -> None:
        self.measured += 1

    async def status(self, *, cluster: bool) -> Mapping[str, object]:
        return await self._answer("status", cluster=cluster)

    async def checkpoint(self, *, cluster: bool) -> Mapping[str, object]:
        return await self._answer("checkpoint", cluster=cluster)

    async def policies(self, *, namespace: str, topic: str) -> Mapping[str, object]:
        return await self._answer(f"policies of {namespace!r} and {topic!r}", cluster=False)

    async def _answer(self, what: str, *, cluster: bool) -> Mapping[str, object]:
        self.asked.append((what, cluster))
        self.was_asked.set()
        if self.failure:
            raise self.failure
        if self.hangs:
            await asyncio.Event().wait()
        return {"what": what, "epoch": 1 << 60}


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
    node: FakeNode, address: str = "127.0.0.1:0", tls: HttpTls | None = None
) -> HttpServer:
    telemetry = Telemetry(node="n2", version="0.1.0", read_levels=lambda: Levels(pending=7))
    return HttpServer(address, node, telemetry.registry, tls=tls)


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
        (LEADER, ""),
        (replace(LEADER, serving=False), "leads, but does not serve: no lease, or not caught up"),
        (replace(FOLLOWER, role="candidate"), "is candidate"),
        (replace(FOLLOWER, role="learner"), ""),
        (replace(FOLLOWER, role="learner", leader=""), "knows no leader"),
        (replace(LEADER, role="stopping"), "is stopping"),
        (replace(LEADER, disk_error="no space left"), "disk: no space left"),
    ],
)
def test_ready_is_who_leads_or_hears_the_leader(state: LocalState, why: str) -> None:
    assert why_not_ready(state) == why


async def test_probes_answer_with_the_verdict_and_its_reason(page: Page) -> None:
    assert await page.get("/readyz") == Answer(200, "ok\n", "text/plain; charset=utf-8")
    page.node.state = replace(FOLLOWER, leader="")
    assert (await page.get("/readyz"))[:2] == (503, "knows no leader\n")
    assert (await page.get("/healthz"))[:2] == (200, "ok\n")
    page.node.state = replace(FOLLOWER, disk_error="fsync hangs")
    assert (await page.get("/healthz"))[:2] == (503, "disk: fsync hangs\n")


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
    assert json.loads(answer.text) == {"what": what, "epoch": 1 << 60}
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
    assert answer.status == 500
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


async def test_nothing_can_be_changed(page: Page) -> None:
    url = f"http://127.0.0.1:{page.port}/v1/status"
    async with aiohttp.ClientSession() as session, session.post(url) as answer:
        assert answer.status == 405
    assert (await page.get("/v1/other")).status == 404


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


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_unfinished_handshakes_are_limited_in_number_and_time(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setattr(http_listener, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(http_listener, "HANDSHAKE_S", 60.0)
    nothing: Any = None
    server = server_of(FakeNode(), tls=HttpTls(lambda: context, "c", nothing, None, nothing))

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

    async def bounded() -> None:
        async with asyncio.timeout(20):  # asyncio's own limit of a handshake is 60 s
            await main()

    run(bounded())


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes until the connection is closed."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
