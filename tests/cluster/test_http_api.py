"""Administration over HTTP: every node takes it, with the rules and errors of gRPC."""

import http.client
import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc
import pytest

from cluster.rpc import http_api, json_bodies, openapi, peek_form
from cluster.rpc.http_call import HttpContext
from cluster.rpc.http_routes import ROUTES
from cluster.rpc.problem_details import problem_of
from tests.cluster.running import RPC_S, Running, until
from timerclient import TimerClient
from timerclient.values.errors import NotFound

pytestmark = pytest.mark.slow
JSON = {"Content-Type": "application/json"}


class Reply(NamedTuple):
    status: int
    body: Any
    headers: http.client.HTTPMessage


def send(
    cluster: Running,
    node: str,
    verb: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """Return a node's answer. `body`: text, or an object that becomes JSON."""
    connection = http.client.HTTPConnection(cluster.node(node).http, timeout=RPC_S)
    text = body if isinstance(body, str) or body is None else json.dumps(body)
    try:
        connection.request(verb, path, text, JSON if headers is None else headers)
        answer = connection.getresponse()
        return Reply(answer.status, json.loads(answer.read() or b"null"), answer.headers)
    finally:
        connection.close()


def test_document_in_docs_is_current() -> None:
    path = Path(__file__).parents[2] / "docs/openapi.json"
    assert path.read_text() == openapi.text(), f"python -m cluster.rpc.openapi > {path}"


def test_document_has_every_route_and_a_schema_for_each_reference(cluster: Running) -> None:
    found = send(cluster, "n1", "GET", "/v1/openapi.json").body
    assert {(verb.upper(), path) for path, verbs in found["paths"].items() for verb in verbs} == {
        (each.verb, each.path) for each in ROUTES
    }
    names = {each["$ref"].rpartition("/")[2] for each in _references(found)}
    assert names <= set(found["components"]["schemas"])


def _references(value: Any) -> list[dict[str, str]]:
    if isinstance(value, dict):
        own = [value] if "$ref" in value else []
        return own + [each for inner in value.values() for each in _references(inner)]
    return (
        [each for inner in value for each in _references(inner)] if isinstance(value, list) else []
    )


async def test_error_of_grpc_itself_has_a_reason_too() -> None:
    context = HttpContext("ipv4:127.0.0.1:1", 1)
    with pytest.raises(grpc.aio.AbortError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    answer = problem_of(context.error)
    assert (answer.status, context.error.outcome_known) == (504, False)


def test_a_follower_takes_every_change(cluster: Running, client: TimerClient, topic: str) -> None:
    node, topic = cluster.followers()[0], f"space/{topic}"
    at = f"/v1/topics/{quote(topic, safe='')}"
    made = send(cluster, node, "PUT", at)
    assert (made.status, made.body["topic_id"].isdecimal()) == (200, True)
    group = send(cluster, node, "PUT", f"{at}/groups/g", {"settings": {"max_attempts": 3}}).body
    assert (group["name"], group["settings"]["max_attempts"]) == ("g", 3)
    send(cluster, node, "PATCH", f"{at}/groups/g", {"settings": {"lease_ms": 5_000}})
    client.schedule(topic, b"x")
    until(lambda: send(cluster, node, "GET", at).body["fired"] == 1)
    sought = send(cluster, node, "POST", f"{at}/groups/g/seek", {"offset": "1"})
    assert (sought.status, sought.body["cursor"]) == (200, 1)
    change = {"scope": {"topic": topic}, "set": {"ttl_ms": "60000"}}
    altered = send(cluster, node, "PATCH", "/v1/policies", change)
    assert (altered.status, altered.body["own"]["ttl_ms"]) == (200, 60_000)
    found = send(cluster, node, "GET", at).body
    assert [each["lease_ms"] for each in found["groups"]] == [5_000]
    members = send(cluster, node, "GET", "/v1/members").body["members"]
    assert [each["name"] for each in members] == [*cluster.nodes]
    client.schedule(topic, b"\xff", delay=0, headers={"a": "b"})
    until(lambda: send(cluster, node, "GET", at).body["fired"] == 2)
    peeked = send(cluster, node, "GET", f"{at}/messages?group=g&from_offset=1&max_messages=5").body
    assert peeked["next_offset"] is None
    [message] = peeked["messages"]
    assert (message["queue_offset"], message["state"]) == (1, "READY")
    assert (message["payload_base64"], message["headers"]) == ("/w==", {"a": "b"})
    assert {*message} <= {*peek_form.SCHEMA["properties"]["messages"]["items"]["properties"]}
    assert len(send(cluster, node, "GET", f"{at}/messages").body["messages"]) == 1
    assert send(cluster, node, "GET", f"{at}/messages?group=true").status == 404
    client.schedule(topic, bytes(http_api.PEEK_BYTES_MAX), delay=0)
    until(lambda: send(cluster, node, "GET", at).body["fired"] == 3)
    large = send(cluster, node, "GET", f"{at}/messages?from_offset=2")
    assert (large.status, "timerctl peek" in large.body["detail"]) == (400, True)
    for name in cluster.nodes:
        logger = {"level": "info", "logger": "cluster.rpc.memory"}
        set_ = send(cluster, node, "PUT", f"/v1/nodes/{name}/log-level", logger)
        assert (set_.status, set_.body) == (200, {"node": name, "before": "info"})
        stacks = send(cluster, node, "GET", f"/v1/nodes/{name}/stacks").body
        assert (stacks["node"], bool(stacks["threads"])) == (name, True)
    assert send(cluster, node, "DELETE", f"{at}/groups/g").status == 200
    assert send(cluster, node, "DELETE", at).body["messages"] == 2
    with pytest.raises(NotFound):
        client.describe_topic(topic)
    moved = send(cluster, node, "POST", "/v1/leadership/transfer", {"target": node})
    assert (moved.status, moved.body) == (200, {"unchanged": False})
    assert cluster.wait_for_leader() == node


@pytest.mark.parametrize("follower", [True, False])
def test_refusals_have_the_reasons_of_grpc(cluster: Running, *, follower: bool) -> None:
    node = cluster.followers()[0] if follower else cluster.wait_for_leader()
    for verb, path, body, status, reason in (
        ("GET", "/v1/topics/none", None, 404, "NOT_FOUND"),
        ("DELETE", "/v1/topics/none/groups/g", None, 404, "NOT_FOUND"),
        ("PATCH", "/v1/policies", {}, 400, "INVALID_REQUEST"),
        ("PATCH", "/v1/policies", {"no": 1}, 400, "INVALID_REQUEST"),
        ("PATCH", "/v1/policies", {"set": {"ttl_ms": "x"}}, 400, "INVALID_REQUEST"),
        ("PATCH", "/v1/policies", '{"set": {}, "set": {}}', 400, "INVALID_REQUEST"),
        ("PATCH", "/v1/policies", "[" * 50_000, 400, "INVALID_REQUEST"),
        ("PATCH", "/v1/policies", '{"scope": {"topic": "\\ud800"}}', 400, "INVALID_REQUEST"),
        ("PATCH", "/v1/policies?set=1", {}, 400, "INVALID_REQUEST"),
        ("PUT", "/v1/topics/a", {"topic": "b"}, 400, "INVALID_REQUEST"),
        ("POST", "/v1/members", {"change": "REMOVE", "name": "n9"}, 404, "NOT_FOUND"),
        ("POST", "/v1/leadership/transfer", {"target": "n9"}, 404, "NOT_FOUND"),
        ("POST", "/v1/status", {}, 405, "INVALID_REQUEST"),
        ("OPTIONS", "/v1/policies", None, 405, "INVALID_REQUEST"),
        ("GET", "/v1/none", None, 404, "NOT_FOUND"),
        ("PATCH", "/v1/policies", "x" * (json_bodies.SMALL_BYTES_MAX + 1), 413, "INVALID_REQUEST"),
    ):
        found = send(cluster, node, verb, path, body)
        assert (found.status, found.body["reason"]) == (status, reason), (verb, path, found.body)
        assert found.headers["Content-Type"].startswith("application/problem+json")
    assert send(cluster, node, "POST", "/v1/status", {}).headers["Allow"] == "GET,HEAD"


def test_no_page_of_another_origin_changes_the_cluster(cluster: Running, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{quote(topic, safe='')}"
    own = cluster.node(node).http
    for headers, status in (
        ({}, 415),
        ({"Content-Type": "text/plain"}, 415),
        (JSON | {"Host": "rebound.example:80"}, 403),
        (JSON | {"Host": f"{own}.example"}, 403),
        (JSON | {"Host": ""}, 403),
        (JSON | {"Origin": "http://evil.example"}, 403),
        (JSON | {"Origin": "null"}, 403),
        (JSON | {"Origin": "http://["}, 403),
        (JSON | {"Sec-Fetch-Site": "cross-site"}, 403),
    ):
        assert send(cluster, node, "PUT", at, {}, headers).status == status, headers
        assert send(cluster, node, "GET", at).status == 404
    for headers in (JSON, JSON | {"Host": "localhost:1"}, JSON | {"Origin": f"http://{own}"}):
        assert send(cluster, node, "PUT", at, {}, headers).status == 200, headers
    for path in (f"{at}/messages", f"/v1/nodes/{node}/stacks"):  # nor reads these
        for headers in ({"Host": "rebound.example:80"}, {"Origin": "http://evil.example"}):
            assert send(cluster, node, "GET", path, headers=headers).status == 403, headers
        assert send(cluster, node, "GET", path).status == 200


def test_follower_schedules_a_timer_once(cluster: Running, client: TimerClient, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/timers"
    named = JSON | {"Idempotency-Key": "order-4711"}
    timer = {"json": {"order": 4711}, "delay": 3600, "key": "4711", "headers": {"a": "b"}}
    made = send(cluster, node, "POST", at, timer, named).body
    assert (made["result"], made["other_id"], made["duplicate"]) == ("SCHEDULED", None, False)
    again = send(cluster, cluster.wait_for_leader(), "POST", at, timer, named).body
    assert again == made | {"duplicate": True}
    found = client.get_timer(made["id"])
    assert (found.payload, found.key, found.due_ms) == (b'{"order":4711}', "4711", made["due_ms"])
    assert found.headers == {"a": "b", "content-type": "application/json"}
    replaced = send(cluster, node, "POST", at, timer | {"on_conflict": "replace"}).body
    assert (replaced["result"], replaced["other_id"]) == ("REPLACED", made["id"])
    kept = send(cluster, node, "POST", at, timer | {"on_conflict": "keep"}).body
    assert (kept["result"], kept["id"], kept["due_ms"]) == (
        "KEPT",
        replaced["id"],
        replaced["due_ms"],
    )
    for body, headers, status, reason, detail in (
        (timer, JSON, 409, "ALREADY_EXISTS", replaced["id"]),
        ({"key": "none", "on_conflict": "update"}, JSON, 404, "NOT_FOUND", "none"),
        (timer | {"delay": 1}, named, 400, "INVALID_REQUEST", "order-4711"),
        ({}, JSON | {"Idempotency-Key": "x" * 65}, 400, "INVALID_REQUEST", "64"),
        ({}, JSON | {"Idempotency-Key": "ä"}, 400, "INVALID_REQUEST", "ASCII"),
        ({"dealy": 1}, JSON, 400, "INVALID_REQUEST", "dealy"),
        ("x" * (json_bodies.LARGE_BYTES_MAX + 1), JSON, 413, "INVALID_REQUEST", "at most"),
    ):
        refused = send(cluster, node, "POST", at, body, headers)
        assert (refused.status, refused.body["reason"]) == (status, reason), refused.body
        assert detail in refused.body["detail"]
    assert send(cluster, node, "PUT", at[:-7], {}, named).status == 400  # no request id there
    large = {"payload_base64": "AAAA" * (1 << 20), "delay": 3600}
    assert client.get_timer(send(cluster, node, "POST", at, large).body["id"]).payload == bytes(
        3 << 20
    )
