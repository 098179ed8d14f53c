"""The status page: its files load nothing from elsewhere, its JSON holds, its parts share work."""

import asyncio
import gc
import json
import re
import weakref
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import grpc
import pytest
from grpc.aio import Metadata
from multidict import CIMultiDictProxy

import cluster.page
from cluster.control.control_state import ControlState
from cluster.observe import lag
from cluster.observe.lag import GroupLag
from cluster.observe.leader_history import CHANGES_MAX, LeaderHistory
from cluster.observe.metrics import Levels, Telemetry
from cluster.page.measurement import REST, Measurement
from cluster.page.page_data import PEER_EVERY_MS, PageData
from cluster.page.page_routes import CONTENT_POLICY, StatusPages
from cluster.page.worst_lags import WORST_MAX, worst_lags
from cluster.rpc.endpoints import AdminChannels
from cluster.rpc.http import HttpServer
from tests.cluster.http_document import FakeNode
from tests.waiting import settled
from timer.leader.groups import dead_letters
from timer.model.timer_errors import EngineError, NotFoundError, NotLeaderError
from timer.model.units import Epoch, MonoMs, ReplicaId, UnixMs
from timerclient.proto import timer_pb2 as pb

FOLDER: Final = Path(cluster.page.__file__).parent
HTML, CSS, JS = ((FOLDER / f"status_page.{suffix}").read_text() for suffix in ("html", "css", "js"))
PATHS: Final = ("/", "/page/status_page.css", "/page/status_page.js")
HOSTILE: Final = '<script>alert(1)</script>"&'


class FakeAnswers(PageData):
    """Answers that the test sets; the last question is kept."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.failure: EngineError | None = None
        self.closed = False

    async def overview(self) -> dict[str, Any]:
        return self._answer()

    async def topics(self, **fields: Any) -> dict[str, Any]:
        return self._answer(**fields)

    async def timer(self, **fields: Any) -> dict[str, Any]:
        return self._answer(**fields)

    async def close(self) -> None:
        self.closed = True

    def _answer(self, **fields: Any) -> dict[str, Any]:
        self.asked = fields
        if self.failure:
            raise self.failure
        return {"name": HOSTILE, "epoch": 1 << 53}


class Served:
    """The page on a free port, and a client of it."""

    def __init__(self, answers: FakeAnswers, session: aiohttp.ClientSession, port: int) -> None:
        self.answers, self._session, self._port = answers, session, port

    async def ask(self, path: str, method: str = "GET") -> tuple[int, str, CIMultiDictProxy[str]]:
        url = f"http://127.0.0.1:{self._port}{path}"
        async with self._session.request(method, url) as answer:
            return answer.status, await answer.text(), answer.headers


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    answers = FakeAnswers()
    telemetry = Telemetry(node="n2", version="0.1.0", read_levels=Levels)
    server = HttpServer("127.0.0.1:0", FakeNode(), telemetry.registry, StatusPages(answers))
    port = await server.start()
    async with aiohttp.ClientSession() as session:
        yield Served(answers, session, port)
    await server.stop()
    assert answers.closed


# ---- files and paths


@pytest.mark.parametrize("path", [*PATHS, "/v1/overview", "/v1/topics", "/v1/timer"])
async def test_each_answer_forbids_scripts_and_loads_from_elsewhere(
    served: Served, path: str
) -> None:
    status, _, headers = await served.ask(path)
    assert (status, headers["Content-Security-Policy"]) == (200, CONTENT_POLICY)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert [(await served.ask(path, each))[0] for each in ("POST", "PUT", "DELETE")] == [405] * 3


def test_policy_allows_nothing_but_the_pages_own_files() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_POLICY.split("; "))
    assert rules.pop("img-src") == "data:"
    assert {*rules.values()} == {"'none'", "'self'"}
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in CONTENT_POLICY


async def test_files_name_each_other_and_no_other_host(served: Served) -> None:
    linked = re.findall(r'(?:href|src)="([^"]+)"', HTML)
    own = [link for link in linked if not link.startswith(("data:", "#"))]
    assert own
    for link in own:
        assert link.startswith("/")
        assert not link.startswith("//")
        if not link.startswith(("/v1/policies", "/v1/status", "/v1/checkpoint")):
            assert (await served.ask(link))[0] == 200, link
    assert not re.search(r"url\(|@import", CSS)
    assert not re.search(r"\son\w+=|style=|<script(?! src=)|<style", HTML), "the policy forbids it"
    assert {*re.findall(r"https?://[\w.]+", HTML + CSS + JS)} == {"http://www.w3.org"}, "names"


def test_program_makes_no_html_of_data() -> None:
    """Everything becomes text nodes and attributes; so no name can become an element."""
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\(|srcdoc", JS
    )


async def test_fields_of_a_query_reach_their_answers_as_they_are(served: Served) -> None:
    await served.ask("/v1/topics?prefix=a%26b&after=c&size=7")
    expected = {"prefix": "a&b", "after": "c", "size": "7", "shown": None}
    assert served.answers.asked == expected
    status, text, headers = await served.ask("/v1/timer?topic=t&key=%3Cscript%3E")
    assert served.answers.asked.pop("context").peer().startswith("ipv4:127.0.0.1:")
    assert served.answers.asked == {"timer_id": "", "topic": "t", "key": "<script>"}
    assert headers["Content-Type"].startswith("application/json")
    assert (status, json.loads(text)["name"]) == (200, HOSTILE)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotFoundError("timer", HOSTILE), 404, "NOT_FOUND"),
        (NotLeaderError("n1:7100"), 503, "NOT_LEADER"),
    ],
)
async def test_errors_are_json_with_their_reason(
    served: Served, error: EngineError, status: int, reason: str
) -> None:
    served.answers.failure = error
    found, text, headers = await served.ask("/v1/timer?id=x")
    problem = json.loads(text)
    assert (found, problem["detail"], problem["reason"]) == (status, str(error), reason)
    assert headers["Content-Security-Policy"] == CONTENT_POLICY


# ---- measurements


class Work:
    """A work that the test ends."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.starts = 0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def mono_ms(self) -> MonoMs:
        return MonoMs(self.now_ms)

    async def run(self) -> int:
        self.starts += 1
        self.ended = asyncio.get_running_loop().create_future()
        return await self.ended


async def test_readers_share_one_work_and_get_the_last_result_while_it_runs() -> None:
    work = Work()
    measurement = Measurement(work.run, work.mono_ms, every_ms=1000)
    both = await asyncio.gather(measurement.read(0), measurement.read(0))
    assert [*both] == [None, None]
    assert (work.starts, measurement.age_ms) == (1, None)
    work.ended.set_result(7)
    await settled()
    work.now_ms = 999
    assert (await measurement.read(0), measurement.age_ms, work.starts) == (7, 999, 1)
    work.now_ms = 1000
    assert await measurement.read(0) == 7
    assert work.starts == 2
    work.ended.set_result(8)
    assert await measurement.read(60) == 8
    await measurement.stop()


async def test_costly_work_rests_longer() -> None:
    work = Work()
    measurement = Measurement(work.run, work.mono_ms, every_ms=1000, cost_ms=lambda *_: 50)
    await measurement.read(0)
    work.ended.set_result(7)
    await settled()
    for work.now_ms in (50 * REST - 1, 50 * REST):
        await measurement.read(0)
    assert work.starts == 2
    await measurement.stop()


async def test_failed_work_leaves_the_last_result_and_is_repeated_and_a_bug_is_raised() -> None:
    work = Work()
    measurement = Measurement(work.run, work.mono_ms, every_ms=1000)
    await measurement.read(0)
    work.ended.set_result(7)
    await settled()
    for work.now_ms, error in ((1000, NotFoundError("run", "7")), (2000, RuntimeError("bug"))):
        await measurement.read(0)
        work.ended.set_exception(error)
        await settled()
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError, match="bug"):
                await measurement.read(0)
        assert await measurement.read(0) == 7
    assert work.starts == 3
    await measurement.stop()


# ---- nodes


class OneNode:
    """A channel to a node, until the certificate expires."""

    expired = False

    def __getattr__(self, kind: str) -> Any:
        return lambda path, **_: partial(self.answer, path)

    async def answer(self, path: str, request: Any, **_: Any) -> Any:
        del request
        if self.expired:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata())
        if path.endswith("/GetStatus"):
            return pb.GetStatusResponse(nodes=[pb.NodeStatus(name="n2", reachable=True)])
        return pb.GetCheckpointResponse(nodes=[pb.NodeCheckpoint(node="n2")])


async def test_page_reaches_other_nodes_after_a_renewal_of_the_certificate() -> None:
    now_ms = 0
    endpoints: Any = SimpleNamespace(others=["n2"], channel=lambda name: OneNode())
    channels = AdminChannels(endpoints)
    view: Any = SimpleNamespace(
        peers=lambda: {"n2": ("n2:7400", channels.stubs["n2"])},
        shared_checkpoint=lambda *, offsets: None,
        log_end=0,
        late=None,
    )
    rest: Any = None
    data = PageData(view, rest, rest, rest, lambda: MonoMs(now_ms), channels.channel)

    async def reaches() -> bool:
        nonlocal now_ms
        now_ms += PEER_EVERY_MS
        found = await data._peers["n2"].read(60)
        assert found is not None
        return bool(found.status.reachable)

    assert await reaches()
    old: Any = channels.channel("n2")
    old.expired = True
    assert not await reaches()
    channels.renew()
    assert await reaches()
    freed, old = weakref.ref(old), None
    gc.collect()
    assert freed() is None, "renewals leave no channels"
    data._histogram.close()


# ---- lags


async def test_dead_letters_which_wait_for_days_leave_places_for_other_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic: Any = SimpleNamespace(name="t", queue=SimpleNamespace(end=9))

    def lag_of(name: str, age_ms: int) -> GroupLag:
        group: Any = SimpleNamespace(name=name, cursor=7)
        return GroupLag(topic, group, 0, age_ms)

    async def of_groups(*_: Any) -> list[GroupLag]:
        letters = [
            lag_of(dead_letters.GROUP, 1_000_000 + age_ms) for age_ms in range(WORST_MAX + 1)
        ]
        return [*letters, lag_of("g", 1)]

    async def late() -> dict[Any, int]:
        return {}

    monkeypatch.setattr(lag, "of_groups", of_groups)
    leader = SimpleNamespace(machine=SimpleNamespace(topics={}))
    host: Any = SimpleNamespace(
        leader=leader,
        now=lambda: SimpleNamespace(clock_ms=0),
        totals=SimpleNamespace(unacked_topics=lambda: ()),
    )
    found = await worst_lags(host, late)
    assert found is not None
    names = [each["group"] for each in found["groups"]]
    assert names == ["g", *[dead_letters.GROUP] * WORST_MAX]


# ---- leaders


def test_history_has_each_appointment_once_newest_first() -> None:
    history = LeaderHistory()
    history.note(ControlState(), UnixMs(1), earlier=True)
    for epoch in range(1, CHANGES_MAX + 4):
        state = ControlState(epoch=Epoch(epoch), leader=ReplicaId(epoch % 3), why=f"why {epoch}")
        for time_ms in (10 * epoch, 10 * epoch + 1):
            history.note(state, UnixMs(time_ms), earlier=epoch == 1)
    found = history.newest_first()
    assert [each.epoch for each in found] == [*range(CHANGES_MAX + 3, 3, -1)]
    assert (found[0].time_ms, found[0].reason) == (10 * (CHANGES_MAX + 3), f"why {CHANGES_MAX + 3}")
