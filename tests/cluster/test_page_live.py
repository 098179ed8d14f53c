"""The status page of real nodes, as JSON and in a browser."""

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import pytest

from tests.cluster import chromium
from tests.cluster.running import Running, until
from timerclient import NewTimer, TimerClient

pytestmark = pytest.mark.slow

HOSTILE: Final = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>&amp;\u202e'
DELAYS_S: Final = (30, 300, 1_800, 40_000, 300_000, 3_000_000)
"""One for each bucket after the overdue one."""


SLOW_FIRST: Final = """async (section, find, first, second) => {
  const real = window.fetch, field = $("topics-form").elements.prefix;
  let go;
  const wait = new Promise((resolve) => { go = resolve; });
  window.fetch = async (path, ...more) => {
    const answer = await real(path, ...more);
    if (path.includes(first)) await wait;
    return answer;
  };
  const search = (what) => {
    field.value = section === "topics" ? what : "";
    return find({ id: what });
  };
  const earlier = search(first);
  await search(second);
  go();
  await earlier;
  window.fetch = real;
  return $(section).textContent;
}"""
"""Makes two searches, whose answers come in the other order; returns the text of the section."""


def overview(cluster: Running, name: str, known: Callable[[Any], bool] = lambda _: True) -> Any:
    """Return a node's overview, once it is counted and has the answers of all nodes."""

    def found() -> Any:
        state = cluster.json(name, "/v1/overview")
        asked = any(node["role"] == "asked" for node in state["nodes"])
        return None if asked or state["pending"]["counts"] is None or not known(state) else state

    return until(found)


def is_leader_of(state: Any) -> bool:
    """Return whether the leader answered, and serves."""
    [leader] = [node for node in state["nodes"] if node["name"] == state["leader"]]
    return bool(leader.get("serving"))


def test_overview_has_nodes_counts_and_equal_digests_on_each_node(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule_all([NewTimer(topic, b"x", delay=s) for s in DELAYS_S for _ in range(3)])
    client.schedule(topic, b"now")
    leader = cluster.wait_for_leader()
    until(lambda: client.topics()[0].fired)
    cluster.digests_agree()

    def counted(state: Any) -> bool:
        return bool(
            state["pending"]["counts"][1:] == [3] * 6
            and state["lags"] is not None
            and all(node["checkpoint"]["digest"] == "equal" for node in state["nodes"])
        )

    for name in cluster.nodes:
        state = overview(cluster, name, counted)
        assert (state["viewed"], state["leader"]) == (name, leader)
        assert [node["name"] for node in state["nodes"]] == ["n1", "n2", "n3"]
        assert all(node["reachable"] and node["rss_bytes"] > 0 for node in state["nodes"])
        addresses = [node["http_address"] for node in state["nodes"]]
        assert addresses == [node.http for node in cluster.nodes.values()]
        assert state["pending"]["total"] == sum(state["pending"]["counts"]) == 18
        assert state["pending"]["exact"]
        assert state["counters"]["fired"] == 1
        assert (state["figures_of"], state["figures_error"]) == (leader, "")
        assert state["counters"]["delivered"] == 0
        assert state["changes"][0]["leader"] == leader
    late = overview(cluster, leader)["lateness"]
    assert (sum(late["fired"]), len(late["fired"])) == (1, len(late["bounds_ms"]) + 1)


def test_group_that_lags_is_among_the_worst_on_each_node(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.create_group(topic, "g")
    client.schedule(topic, b"now")

    def lags(state: Any) -> bool:
        return any(each["topic"] == topic for each in (state["lags"] or {"groups": ()})["groups"])

    for name in cluster.nodes:
        found = overview(cluster, name, lags)["lags"]["groups"]
        [group] = [each for each in found if each["topic"] == topic]
        assert (group["group"], group["unacked"]) == ("g", 1)
        assert group["unacked_ms"] >= group["undelivered_ms"] > 0


@pytest.mark.chromium
async def test_page_of_a_follower_shows_lag_and_deliveries_or_why_not(
    cluster: Running, client: TimerClient, topic: str, tmp_path: Path
) -> None:
    client.create_group(topic, "g")
    client.schedule(topic, b"now")
    follower = until(cluster.followers)[0]
    text = "document.querySelector('{}').textContent"
    async with chromium.opened(tmp_path, f"http://{cluster.node(follower).http}/") as tab:
        await tab.until("document.querySelectorAll('#rates .spark').length === 6")
        await tab.until(f"{text.format('#lags')}.includes('{topic}')")
        assert await tab.value(text.format("#rates-note")) == "since you opened this page"
        silent = "{...last, lags: null, figures_of: last.viewed, figures_error: 'it is silent'}"
        shown = await tab.value(
            f"draw({silent}), `${{{text.format('#lags')}}} ${{{text.format('#rates-note')}}}`"
        )
        assert "Only the leader knows lag. Not known: it is silent. See the page of n" in shown
        assert "deliveries and acks are not known: it is silent" in shown
        gone = "last.nodes.map((n) => ({...n, reachable: n.name === last.viewed}))"
        gone = f"[...{gone}, {{...last.nodes[0], reachable: true, role: 'learner'}}]"
        shown = await tab.value(
            f"draw({{...{silent}, nodes: {gone}}}), "
            f"`${{{text.format('#lags')}}} ${{{text.format('#state')}}}`"
        )
        assert "See the page" not in shown
        assert (
            "No majority: 1 of 3 nodes answers and votes. Nothing fires until 1 more does." in shown
        )
        assert tab.complaints == []


@pytest.mark.chromium
async def test_page_lists_the_first_topics_once_and_names_the_time(
    cluster: Running, client: TimerClient, topic: str, tmp_path: Path
) -> None:
    timer, other = (client.schedule(topic, b"x", delay=delay) for delay in (600, 601))
    leader, follower = cluster.wait_for_leader(), until(cluster.followers)[0]
    text = "document.querySelector('{}').textContent"
    for name, foreign in ((leader, False), (follower, True)):
        directory = tmp_path / name
        async with chromium.opened(directory, f"http://{cluster.node(name).http}/") as tab:
            note = await tab.until("document.querySelector('#topics-note')?.textContent")
            assert re.fullmatch(r"\d+ in all · as of \d\d:\d\d:\d\d", note)
            listed = await tab.value(text.format("#topics"))
            assert topic in listed
            assert ("known on the leader's page only" in listed) == foreign
            assert ("Overdue" in listed.split("Groups")[0]) != foreign
            await tab.until("series.fired.length >= 3")
            assert sum("/v1/topics" in each for each in tab.requested) == 1
            assert topic in await tab.value(f"({SLOW_FIRST})('topics', findTopics, 'nosuch', '')")
            found = f"({SLOW_FIRST})('timer', findTimer, '{other.id}', '{timer.id}')"
            assert timer.id in await tab.value(found)
            assert tab.complaints == []


@pytest.mark.chromium
async def test_lag_is_folded_dead_letters_are_apart_and_timers_due_now_are_not_late(
    cluster: Running, client: TimerClient, topic: str, tmp_path: Path
) -> None:
    client.schedule(topic, b"x", delay=600)
    url = f"http://{cluster.node(cluster.wait_for_leader()).http}/"
    async with chromium.opened(tmp_path, url) as tab:
        await tab.until("document.querySelectorAll('#pending rect').length === 7")
        await tab.until("last.lags")
        await tab.value("draw = ((drawn) => (o) => o.drawn && drawn(o))(draw), true")  # no polls
        group = "{topic: 't', unacked: 9, unacked_ms: 7000, undelivered_ms: 5000}"
        waiting = f"[1, 2, 3, 4, 5, 6, 7].map((n) => ({{...{group}, group: `g${{n}}`}}))"
        letters = f"{{...{group}, topic: 't.dead', group: 'dead-letters'}}"
        pending = "{...last.pending, counts: [3, ...last.pending.counts.slice(1)], held: 0}"
        for age_ms, late in ((999, False), (1_001, True)):
            topics = f"[{{topic: 'due', overdue_ms: {age_ms}, pending: 3}}]"
            lags = f"{{topics: {topics}, groups: [...{waiting}, {letters}]}}"
            await tab.value(
                f"draw({{...last, drawn: true, lags: {lags}, pending: {pending}}}), true"
            )
            amber = "document.querySelectorAll('#pending .overdue').length"
            assert (await tab.value(amber), late) in ((0, False), (1, True))
            assert ("due" in await tab.value("$('lags').textContent.split('Groups')[0]")) == late
        groups = "$('lags').querySelectorAll('table:last-of-type tbody tr').length"
        assert await tab.value(groups) == 5
        await tab.value("document.querySelector('[data-fold]').click()")
        assert await tab.value(groups) == 7
        assert "dead" not in await tab.value("$('lags').textContent")
        assert await tab.value("$('dead-letters').hidden") is False
        assert "t.dead97.0 s" in await tab.value("$('letters').textContent")
        await tab.value("draw({...last, drawn: true, lags: {topics: [], groups: []}}), true")
        assert await tab.value("$('dead-letters').hidden") is True


def test_topics_are_found_by_prefix_page_by_page(cluster: Running, client: TimerClient) -> None:
    names = [f"paged/{number:02}" for number in range(5)]
    for name in ("page", "paged0", *names):
        client.create_topic(name)

    def found(node: str, prefix: str, count: int) -> bool:
        page = cluster.json(node, f"/v1/topics?{urlencode({'prefix': prefix})}")
        return bool(page["count"] == count)

    for node in (cluster.wait_for_leader(), until(cluster.followers)[0]):
        until(partial(found, node, prefix="paged/", count=5))
        seen, after = [], ""
        while True:
            asked = urlencode({"prefix": "paged/", "after": after, "size": "2"})
            page = cluster.json(node, f"/v1/topics?{asked}")
            assert page["count"] == 5
            seen += [each["name"] for each in page["topics"]]
            if not (after := page["next_after"]):
                break
        assert seen == names
    for size in ("0", "101", "-1", "x", "٣"):
        status, body = cluster.get(node, f"/v1/topics?size={quote(size)}")
        assert (status, json.loads(body)["reason"]) == (400, "INVALID_REQUEST"), size
        assert "size" in json.loads(body)["detail"]


def test_timer_is_found_by_key_and_by_id_with_its_story(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    leader = cluster.wait_for_leader()
    timer = client.schedule(topic, b"four", delay=600, key="k")
    by_key = cluster.json(leader, f"/v1/timer?{urlencode({'topic': topic, 'key': 'k'})}")
    by_id = cluster.json(leader, f"/v1/timer?id={timer.id}")
    for each in (by_key, by_id):  # the log grows between the requests
        each["story"] = {k: v for k, v in each["story"].items() if not k.startswith("log_last")}
    assert by_key == by_id
    assert (by_id["timer_id"], by_id["state"], by_id["key"]) == (str(timer.id), "pending", "k")
    assert (by_id["topic"], by_id["payload_bytes"]) == (topic, 4)
    client.cancel(timer)
    found = cluster.json(leader, f"/v1/timer?id={timer.id}")
    assert found["state"] == "cancelled"
    assert [each["what"] for each in found["story"]["events"]] == ["scheduled", "cancelled"]
    assert found["story"]["gaps"] == []
    series = client.create_series(topic, "s", every=600)
    occurrence = until(lambda: client.get_series(topic, "s").timer_id)
    [event] = cluster.json(leader, f"/v1/timer?id={occurrence}")["story"]["events"]
    assert (event["what"], event["series"], event["number"]) == ("occurrence", str(series.id), 1)
    for query, status, detail in (
        ("id=1", 400, "id = '1': "),
        (f"id={'0' * 24}", 404, "no such timer"),
        ("topic=t", 400, "id, topic, key = "),
        ("", 400, "id, topic, key = "),
    ):
        refused, body = cluster.get(leader, f"/v1/timer?{query}")
        problem = json.loads(body)
        assert (refused, problem["detail"].startswith(detail)) == (status, True), problem
    other = until(cluster.followers)[0]
    until(lambda: cluster.get(other, f"/v1/timer?id={timer.id}")[0] != 503)  # once it is connected
    assert cluster.json(other, f"/v1/timer?id={timer.id}")["state"] == "cancelled"
    status, body = cluster.get(other, f"/v1/timer?id={'0' * 24}")
    assert (status, json.loads(body)["reason"]) == (404, "NOT_FOUND")


@pytest.mark.chromium
async def test_page_shows_nodes_histogram_and_story_in_a_browser(
    cluster: Running, client: TimerClient, topic: str, tmp_path: Path
) -> None:
    client.schedule_all([NewTimer(topic, b"x", delay=s) for s in DELAYS_S])
    client.schedule(topic, b"x", delay=900, key=HOSTILE)
    leader = cluster.wait_for_leader()
    query = urlencode({"timer": topic, "key": HOSTILE})
    url = f"http://{cluster.node(leader).http}/#{query}"
    text = "document.querySelector('{}').textContent"
    async with chromium.opened(tmp_path, url) as tab:
        await tab.until("document.querySelectorAll('#nodes tbody tr').length === 3")
        nodes = await tab.until(
            f"{text.format('#nodes')}.includes('serves') && {text.format('#nodes')}"
        )
        assert all(name in nodes for name in cluster.nodes)
        await tab.until("document.querySelectorAll('#pending rect').length === 7")
        assert "within 1 hour" in await tab.value(text.format("#pending"))
        story = await tab.until(f"document.querySelector('.story') && {text.format('#timer')}")
        assert HOSTILE.replace("\u202e", r"\u202e") in story
        await tab.until(
            "document.querySelector('.story').getBoundingClientRect().bottom <= innerHeight"
        )
        assert "Scheduled, for" in story
        utc = await tab.value("document.querySelector('.story time').title")
        assert utc.endswith(" UTC")
        assert not await tab.value(
            "window.hit || document.querySelector('#timer img, #timer script')"
        )
        await tab.until("document.querySelectorAll('#rates .spark').length === 6")
        for width in (320, 1280):
            await tab.show(width, 800, dark=width == 320)
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await tab.value(wide) <= 0, width
        learns = f"({{...n, role: n.name === '{leader}' ? n.role : 'learner'}})"
        drawn = f"draw({{...last, nodes: last.nodes.map((n) => {learns})}})"
        # In one turn of the page, which also draws by itself.
        shown = await tab.value(
            f"{drawn}, `${{{text.format('#state')}}} "
            f"${{document.querySelector('#state').className}} ${{{text.format('#nodes')}}}`"
        )
        assert "without a vote: n" in shown
        assert "state warn" in shown
        assert "does not vote" in shown
        full = "({...n, disk_low: true, disk_free_bytes: 9, disk_reserve_bytes: 8})"
        shown = await tab.value(
            f"draw({{...last, nodes: last.nodes.map((n) => {full})}}), "
            f"`${{{text.format('#state')}}} ${{{text.format('#nodes')}}}`"
        )
        assert "rejects new timers: disks have too little free space" in shown
        assert "free disk not yet an eighth above the reserve of 8 B" in shown
        assert re.search(
            r"^\d+ now, in \d+ topics? · counted by due time ",
            await tab.value(text.format("#pending-note")),
        )
        own = f"http://{cluster.node(leader).http}/"
        assert tab.requested
        assert [each for each in tab.requested if not each.startswith((own, "data:"))] == []
        assert tab.complaints == []
        await asyncio.to_thread(cluster.kill, leader)
        await tab.until("document.body.classList.contains('stale')")
        assert "does not answer" in await tab.value(text.format("#state"))
    await asyncio.to_thread(cluster.up)


def test_lost_leader_is_unreachable_and_its_successor_is_in_the_history(
    cluster: Running, client: TimerClient
) -> None:
    del client
    leader = cluster.wait_for_leader()
    other = next(name for name in cluster.nodes if name != leader)
    overview(cluster, other, is_leader_of)
    cluster.kill(leader)

    def replaced(state: Any) -> bool:
        roles = {node["name"]: node["role"] for node in state["nodes"]}
        return roles[leader] == "unreachable" and is_leader_of(state)

    state = overview(cluster, other, replaced)
    [gone] = [node for node in state["nodes"] if node["name"] == leader]
    assert gone["error"]
    assert "epoch" not in gone
    newest = state["changes"][0]
    assert (newest["leader"], newest["epoch"]) == (state["leader"], state["epoch"])
    assert leader in newest["reason"]
    assert not newest["earlier"]
    cluster.up()
