"""Administration over HTTP: every node takes it, with the rules and errors of gRPC."""

import collections
import contextlib
import functools
import http.client
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from cluster.rpc import http_api, json_bodies, openapi, timer_stream
from cluster.rpc.http_call import HttpContext
from cluster.rpc.http_routes import ROUTES
from cluster.rpc.problem_details import problem_of
from tests.cluster.http_document import JSON, send
from tests.cluster.running import RPC_S, Running, until
from timerclient import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound

pytestmark = pytest.mark.slow


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


def test_document_has_what_generators_of_clients_need() -> None:
    made = openapi.document()
    operations = []
    for verbs in made["paths"].values():
        for verb, one in verbs.items():
            operations.append(one["operationId"])
            assert one.get("requestBody", {"required": True})["required"], one
            assert "requestBody" not in one or verb not in {"get", "delete"}, one
    assert len(operations) == len({*operations})
    assert all(re.fullmatch(r"([A-Z][a-z]+)+", each) for each in operations), operations
    # A generator for Go makes a type of this name for each operation.
    assert made["components"]["schemas"].keys().isdisjoint(f"{each}Response" for each in operations)
    for each in _schemas(made):
        assert isinstance(each.get("type", ""), str), each  # lists of types are of OpenAPI 3.1
        assert each.get("type") != "integer" or each["format"] == "int64", each
        assert "$ref" not in each or len(each) == 1, each
        assert "default" not in each, each  # openapi-typescript would require such fields


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get("type"), str | list) or "$ref" in value:
            yield value
        value = [*value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from _schemas(inner)


async def test_error_of_grpc_itself_has_a_reason_too() -> None:
    context = HttpContext("ipv4:127.0.0.1:1", 1)
    with pytest.raises(grpc.aio.AbortError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    answer = problem_of(context.error)
    assert (answer.status, context.error.outcome_known) == (504, False)
    busy = problem_of(pb.Error(reason=pb.REASON_OVERLOADED, retry_after_ms=1))
    assert (busy.status, busy.headers["Retry-After"]) == (429, "1")


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
    change = {"set": {"ttl_ms": "60000"}}
    lacking = send(cluster, node, "PATCH", "/v1/policies", change)
    assert (lacking.status, lacking.body["field"]) == (400, "scope")
    at_cluster = send(cluster, node, "PATCH", "/v1/policies", {"scope": {}, "unset": ["ttl_ms"]})
    assert (at_cluster.status, at_cluster.body["scope"]) == (200, {"namespace": "", "topic": ""})
    change["scope"] = {"topic": topic}
    altered = send(cluster, node, "PATCH", "/v1/policies", change)
    policies = f"/v1/policies?topic={quote(topic, safe='')}"
    until(lambda: send(cluster, node, "GET", policies).status == 200)
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
        begun = send(cluster, node, "POST", f"/v1/nodes/{name}/verification", {})
        [mine] = begun.body["nodes"]
        assert (begun.status, mine["node"], bool(mine["began_at_ms"])) == (200, name, True)
        until(functools.partial(is_verified, cluster, node, f"/v1/nodes/{name}/verification", None))
    begun = send(cluster, node, "POST", "/v1/verification", {}).body
    assert [each["node"] for each in begun["nodes"]] == [*cluster.nodes]
    until(functools.partial(is_verified, cluster, node, "/v1/verification", "SAME"))
    assert send(cluster, node, "DELETE", f"{at}/groups/g").status == 200
    assert send(cluster, node, "DELETE", at).body["messages"] == 2
    with pytest.raises(NotFound):
        client.describe_topic(topic)
    moved = send(cluster, node, "POST", "/v1/leadership/transfer", {"target": node})
    assert (moved.status, moved.body) == (200, {"unchanged": False})
    assert cluster.wait_for_leader() == node


def is_verified(cluster: Running, node: str, path: str, agreement: str | None) -> bool:
    found = send(cluster, node, "GET", path).body
    has_digests = all(each["digest"] for each in found["nodes"])
    has_ended = all(each["ended_at_ms"] for each in found["nodes"])
    return has_digests and has_ended and found["agreement"] == agreement


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
        ("POST", "/v1/nodes/n9/verification", {}, 404, "NOT_FOUND"),
        ("GET", "/v1/nodes/n9/verification", None, 404, "NOT_FOUND"),
        ("GET", "/v1/verification?at_index=x", None, 400, "INVALID_REQUEST"),
        ("GET", "/v1/verification?at_index=-1", None, 400, "INVALID_REQUEST"),
        ("POST", "/v1/verification", {"node": 1}, 400, "INVALID_REQUEST"),
        ("POST", "/v1/status", {}, 405, "INVALID_REQUEST"),
        ("OPTIONS", "/v1/policies", None, 405, "INVALID_REQUEST"),
        ("GET", "/v1/none", None, 404, "NOT_FOUND"),
        ("PATCH", "/v1/policies", "x" * (json_bodies.SMALL_BYTES_MAX + 1), 413, "INVALID_REQUEST"),
    ):
        found = send(cluster, node, verb, path, body)
        assert (found.status, found.body["reason"]) == (status, reason), (verb, path, found.body)
        assert found.headers["Content-Type"].startswith("application/problem+json")
    for path, field, limit in (
        ("status?scope=bogus", "scope", "must be node or cluster"),
        ("checkpoint?scope=", "scope", "must be node or cluster"),
        ("status?scope=node&scope=node", "scope", "must be given once"),
        ("status?scop=cluster", "scop", "is not known: this path takes scope"),
        ("policies?topics=a", "topics", "is not known: this path takes namespace, topic"),
        ("openapi.json?x=", "x", "is not known: this path takes no parameters"),
        ("overview?scope=cluster", "scope", "is not known: this path takes no parameters"),
        ("topics?size=x", "size", "1 to 100"),
        ("topics?page_size=5", "page_size", "is not known: this path takes prefix, after, size"),
        ("timer?idd=x", "idd", "is not known: this path takes id, topic, key"),
        ("members?x=1", "x", "is not known: this path takes no parameters"),
        ("topics/t?lateness=bogus", "lateness", "true or false"),
        ("topics/t/messages?max_messages=many", "max_messages", "must be a whole number"),
        ("topics/t/timers?due_from=soon", "due_from", "RFC 3339"),
        ("topics/t/timers?page_size=0", "page_size", "1 to 1000"),
    ):
        found = send(cluster, node, "GET", f"/v1/{path}")
        assert (found.status, found.body["field"]) == (400, field), (path, found.body)
        assert limit in found.body["limit"], (path, found.body)
    assert send(cluster, node, "GET", "/v1/status?scope=node").status == 200
    assert send(cluster, node, "POST", "/v1/status", {}).headers["Allow"] == "GET,HEAD"
    wrong = send(cluster, node, "POST", f"/v1/nodes/{node}/drain", {"drained": False}).body
    assert (wrong["field"], wrong["limit"]) == ("drained", "is not known; known: undo, holder")
    wrong = send(cluster, node, "PATCH", "/v1/policies", {"set": {"ttl": 1}}).body
    assert (wrong["field"], "ttl_ms" in wrong["limit"]) == ("set.ttl", True)


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
            assert send(cluster, node, "GET", "/v1/timer?id=x", headers=headers).status == 403
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
    for _ in range(2):  # an empty key is no key
        keyless = send(cluster, node, "POST", at, timer | {"key": "", "on_conflict": "reject"})
        assert keyless.body["result"] == "SCHEDULED"
    for body, headers, status, reason, detail in (
        (timer, JSON, 409, "ALREADY_EXISTS", replaced["id"]),
        ({"delay": 1, "key": "none", "on_conflict": "update"}, JSON, 404, "NOT_FOUND", "none"),
        ({"delay": 1, "on_conflict": "update"}, JSON, 400, "INVALID_REQUEST", "key: must be given"),
        (timer | {"delay": 1}, named, 400, "INVALID_REQUEST", "order-4711"),
        ({"delay": 1}, JSON | {"Idempotency-Key": "x" * 65}, 400, "INVALID_REQUEST", "64"),
        ({"delay": 1}, JSON | {"Idempotency-Key": "ä"}, 400, "INVALID_REQUEST", "ASCII"),
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


def test_follower_shows_moves_and_cancels_timers(cluster: Running, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}"
    rows = [
        {"payload": "a", "delay": "PT1H", "key": "a/1"},
        {"payload_base64": "/w==", "delay": 1e5},
    ]
    named = JSON | {"Idempotency-Key": topic}
    made = send(cluster, node, "POST", f"{at}/timers/batch", {"timers": rows}, named).body
    assert [each["result"] for each in made["timers"]] == ["SCHEDULED"] * 2
    again = send(cluster, node, "POST", f"{at}/timers/batch", {"timers": rows}, named).body
    assert again == made | {"duplicate": True}
    first, second = (each["id"] for each in made["timers"])
    shown = send(cluster, node, "GET", f"/v1/timers/{second}").body
    assert (shown["state"], shown["payload_base64"], shown["key"]) == ("PENDING", "/w==", None)
    by_key = send(cluster, node, "GET", f"{at}/keys/a%2F1").body
    assert (by_key["id"], by_key["payload"], by_key["topic"]) == (first, "a", topic)
    page = send(cluster, node, "GET", f"{at}/timers?page_size=1").body
    assert [each["id"] for each in page["timers"]] == [first]
    rest = f"{at}/timers?page_size=1&page_token={quote(page['next_page_token'])}"
    assert [each["id"] for each in send(cluster, node, "GET", rest).body["timers"]] == [second]
    for query, wanted in (
        (f"key_prefix=a&due_to_ms={shown['due_ms']}&due_from=2020-01-01T00:00:00Z", first),
        (f"due_from_ms={shown['due_ms']}", second),
    ):
        within = send(cluster, node, "GET", f"{at}/timers?{query}").body["timers"]
        assert [each["id"] for each in within] == [wanted]
        counted = send(cluster, node, "GET", f"{at}/timers/count?{query}").body
        assert (counted["pending"], counted["next_page_token"]) == (1, None)
    counted = send(cluster, node, "GET", f"{at}/timers/count").body
    assert (counted["pending"], counted["within"][-1]["pending"]) == (2, 2)
    moved = send(cluster, node, "PATCH", f"{at}/keys/a%2F1", {"delay": 7200}).body
    assert (moved["result"], moved["due_ms"] > by_key["due_ms"]) == ("RESCHEDULED", True)
    lost = send(cluster, node, "PATCH", f"/v1/timers/{first}", {"delay": 1})
    assert (lost.status, lost.body["result"]) == (404, "ALREADY_CANCELLED")
    assert lost.body["successor_id"] == moved["id"]
    far = {"due": "2999-01-01T00:00:00Z"}
    assert send(cluster, node, "PATCH", f"/v1/timers/{second}", far).status == 200
    gone = send(cluster, node, "DELETE", f"{at}/keys/a%2F1").body
    assert gone == {"result": "CANCELLED", "id": moved["id"], "successor_id": None}
    assert send(cluster, node, "DELETE", f"{at}/keys/a%2F1").body["result"] == "NOT_FOUND"
    assert send(cluster, node, "DELETE", f"/v1/timers/{moved['id']}").body["result"] == (
        "ALREADY_CANCELLED"
    )
    assert send(cluster, node, "GET", f"/v1/timers/{moved['id']}").body["state"] == "CANCELLED"
    for verb, path, body, status in (
        ("GET", "/v1/timers/0", None, 400),
        ("GET", f"/v1/timers/{'0' * 24}", None, 404),
        ("GET", f"{at}/timers?page_token=x", None, 400),
        ("GET", f"{at}/timers?page_size=0", None, 400),
        ("GET", f"{at}/timers?size=1", None, 400),
        ("GET", f"{at}/keys/none", None, 404),
        ("PATCH", f"/v1/timers/{second}", {}, 400),
        ("POST", f"{at}/timers/batch", {"timers": []}, 400),
        ("POST", f"{at}/timers/batch", {"timers": [{"delay": 0}, {"a": 1}]}, 400),
    ):
        assert send(cluster, node, verb, path, body).status == status, path
    set_ = send(cluster, node, "PATCH", f"{at}/policies", {"set": {"tick_ms": 100}})
    assert (set_.status, set_.body["own"]["tick_ms"]) == (200, 100)
    assert send(cluster, node, "GET", f"{at}/policies").body["own"]["tick_ms"] == 100
    assert send(cluster, node, "PATCH", f"{at}/policies", {"scope": {}}).status == 400


def test_follower_cancels_and_reschedules_many_timers(cluster: Running, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}"

    def post(path: str, body: dict[str, Any]) -> Any:
        return send(cluster, node, "POST", path, body).body

    def results(path: str, body: dict[str, Any]) -> list[str]:
        return [each["result"] for each in post(path, body)["timers"]]

    keys = ["cancel", "b", "c", "d"]  # the first one is also the end of a path
    rows = [{"payload": key, "key": key, "delay": "PT1H"} for key in keys]
    made = [each["id"] for each in post(f"{at}/timers/batch", {"timers": rows})["timers"]]
    assert send(cluster, node, "GET", f"{at}/keys/cancel").body["id"] == made[0]
    moves = [{"id": made[1], "delay": 7200}, {"id": "0" * 24, "delay": 1}]
    moved, unknown = post("/v1/timers/reschedule", {"timers": moves})["timers"]
    assert (moved["result"], unknown["result"], unknown["id"]) == ("RESCHEDULED", "NOT_FOUND", None)
    again, first = post("/v1/timers/cancel", {"ids": [made[1], made[0]]})["timers"]
    assert again == {"result": "ALREADY_CANCELLED", "id": made[1], "successor_id": moved["id"]}
    assert first == {"result": "CANCELLED", "id": made[0], "successor_id": None}
    far = [{"key": key, "due": "2999-01-01T00:00:00Z"} for key in ("b", "none", "c")]
    told = post(f"{at}/keys/reschedule", {"timers": far})["timers"]
    assert [each["result"] for each in told] == ["RESCHEDULED", "NOT_FOUND", "RESCHEDULED"]
    assert results(f"{at}/keys/cancel", {"keys": ["none", "b", "d"]}) == [
        *("NOT_FOUND", "CANCELLED", "CANCELLED"),
    ]
    later = [{"id": told[2]["id"], "delay": 60}, {"id": moved["id"], "delay": 60}]
    assert results("/v1/timers/reschedule", {"timers": later}) == [
        *("RESCHEDULED", "ALREADY_CANCELLED"),
    ]
    assert send(cluster, node, "GET", f"{at}/timers/count").body["pending"] == 1
    for path, body, field in (
        ("/v1/timers/cancel", {"ids": [made[0], "x"]}, "ids[1]"),
        ("/v1/timers/cancel", {"ids": [made[0]] * 1_025}, "ids"),
        ("/v1/timers/reschedule", {"timers": [{"id": made[0], "dealy": 1}]}, "timers[0].dealy"),
        (f"{at}/keys/cancel", {"keys": ["a", "k" * 5_000]}, "keys[1]"),
        (f"{at}/keys/cancel", {"keys": ["k" * 5_000]}, "keys[0]"),
        (f"{at}/keys/cancel", {"keys": ["a", "b", "a"]}, "keys[2]"),
        (
            f"{at}/keys/reschedule",
            {"timers": [{"key": "a", "delay": 1}, {"key": "k" * 5_000, "delay": 1}]},
            "timers[1].key",
        ),
        (f"{at}/timers/cancel", {"key_prefix": "k" * 5_000}, "key_prefix"),
    ):
        refused = send(cluster, node, "POST", path, body)
        assert (refused.status, refused.body["field"]) == (400, field), refused.body
        assert refused.body["detail"].startswith(field)


def test_follower_changes_the_timers_that_a_filter_selects(cluster: Running, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}"
    rows = [{"key": f"{name}{n}", "delay": 3600} for name in "ab" for n in range(3)]
    send(cluster, node, "POST", f"{at}/timers/batch", {"timers": rows})

    def changed(path: str, body: dict[str, Any], field: str) -> list[int]:
        """Return the number that each request changed."""
        counts: list[int] = []
        token: str | None = ""
        while token is not None:
            page = send(cluster, node, "POST", path, body | {"page_token": token}).body
            counts.append(page[field])
            token = page["next_page_token"]
        return counts

    far = {"key_prefix": "a", "due": "2999-01-01T00:00:00Z"}
    assert changed(f"{at}/timers/reschedule", far, "rescheduled") == [0, 3]
    assert changed(f"{at}/timers/cancel", {"due_to": far["due"]}, "cancelled") == [0, 3]
    left = send(cluster, node, "GET", f"{at}/timers").body["timers"]
    assert sorted(each["key"] for each in left) == ["a0", "a1", "a2"]
    other = send(cluster, node, "POST", f"{at}/timers/cancel", {"page_token": "AAAA"})
    assert (other.status, other.body["field"]) == (400, "page_token")


def test_error_of_a_batch_names_the_timer_and_its_field_as_sent(
    cluster: Running, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}"
    limits = {"payload_bytes_max": 10, "delay_ms_max": 60_000}
    send(cluster, node, "PUT", at)
    assert send(cluster, node, "PATCH", f"{at}/policies", {"set": limits}).status == 200
    first = {"payload": "a", "delay": 60, "key": "k"}
    made = send(cluster, node, "POST", f"{at}/timers", first).body["id"]
    fine, late = {"payload": "b", "delay": 0}, {"key": "k", "delay": 61}
    for path, timers, field in (
        ("timers/batch", [fine, {"payload": "x" * 11}], "timers[1].payload"),
        ("timers/batch", [{"json": "x" * 11}], "timers[0].payload"),
        ("timers/batch", [fine, {"payload": "", "delay": 61}], "timers[1].delay"),
        ("timers/batch", [fine, {"payload": "", "key": "k" * 5_000}], "timers[1].key"),
        ("timers/batch", [fine, fine | {"headers": {"a": "b" * 60_000}}], "timers[1].headers"),
        ("timers/batch", [fine, fine | {"headers": {"": "b"}}], "timers[1].headers"),
        ("keys/reschedule", [late | {"delay": 1}, late | {"key": "n"}], "timers[1].delay"),
        ("keys/reschedule", [late], "timers[0].delay"),
        ("timers/batch", [fine, {"due": "2999-01-01T00:00:00Z"}], "timers[1].due"),
        ("timers/batch", [fine, {"payload": "", "due_ms": 9 * 10**12}], "timers[1].due_ms"),
    ):
        refused = send(cluster, node, "POST", f"{at}/{path}", {"timers": timers})
        assert (refused.status, refused.body.get("field")) == (400, field), refused.body
        assert refused.body["detail"].startswith(field)
    keyless = {"timers": [fine | {"key": "n"}, fine], "on_conflict": "keep"}
    assert (
        send(cluster, node, "POST", f"{at}/timers/batch", keyless).body["field"] == "timers[1].key"
    )
    by_id = [{"id": "0" * 24, "delay": 1}, {"id": made, "delay": 61}]
    refused = send(cluster, node, "POST", "/v1/timers/reschedule", {"timers": by_id})
    assert refused.body["field"] == "timers[1].delay", refused.body
    for when in ({"delay": 61}, {"due": "2999-01-01T00:00:00Z"}):
        one = send(cluster, node, "PATCH", f"/v1/timers/{made}", when)
        assert [one.body["field"]] == [*when]


def test_follower_delivers_and_settles_messages(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/groups/g"
    one = {"max_messages": 1, "wait": 20}
    send(cluster, node, "PUT", at, {})

    def consumers() -> int:
        [group] = client.describe_topic(topic).groups
        return group.consumers

    host, _, port = cluster.node(node).http.rpartition(":")
    with socket.create_connection((host, int(port)), RPC_S) as leaver:
        body = json.dumps({"max_messages": 10, "wait": 20})
        leaver.sendall(
            f"POST {at}/receive HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        until(lambda: consumers() == 1)
    until(lambda: consumers() == 0)  # a client that is gone gets no message
    client.schedule_batch(topic, [b"0", b"1", b"2"], delay=0)
    client.schedule(topic, json={"a": 1}, key="k", headers={"b": "c"}, delay=0)
    seen: list[dict[str, Any]] = []
    leases: list[str] = []
    while len(seen) < 4:
        got = send(cluster, node, "POST", f"{at}/receive", one | {"lease": "PT1H"}).body
        seen += got["messages"]
        leases += [got["lease_id"]] * len(got["messages"])
    assert [each["payload"] for each in seen[:3]] == ["0", "1", "2"]
    assert (seen[3]["json"], seen[3]["key"], seen[3]["headers"]["b"]) == ({"a": 1}, "k", "c")
    assert [each["attempt"] for each in seen] == [1] * 4

    def settle(word: str, at_: int, **more: Any) -> Any:
        held = {"lease_id": leases[at_], "offsets": [seen[at_]["queue_offset"]]}
        return send(cluster, node, "POST", f"{at}/{word}", held | more).body

    assert settle("ack", 0)["results"] == ["ACKED"]
    assert settle("ack", 0)["results"] == ["ALREADY_ACKED"]
    assert settle("extend", 1, lease=60)["results"] == ["EXTENDED"]
    assert settle("nack", 1, delay=0, unseen=True)["results"] == ["NACKED"]
    again = send(cluster, node, "POST", f"{at}/receive", one).body
    [back] = again["messages"]
    assert (back["payload"], back["attempt"], back["failures"]) == ("1", 2, 0)
    assert settle("ack", 1)["results"] == ["LEASE_LOST"]
    none = send(cluster, node, "POST", f"{at}/receive", {}).body
    assert none == {"lease_id": None, "lease_ms": None, "messages": []}
    assert settle("ack", 2, cumulative=True)["reason"] == "INVALID_REQUEST"  # a shared group


def test_follower_creates_changes_and_deletes_series(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{quote(f'space/{topic}', safe='')}/series"
    daily = {"json": {"a": 1}, "cron": "0 7 * * *", "zone": "Europe/Berlin", "misfire": "skip"}
    made = send(cluster, node, "PUT", f"{at}/preview", daily | {"end": "2999-01-01T00:00:00Z"}).body
    assert (made["existed"], made["key"], made["json"]) == (False, "preview", {"a": 1})
    assert (made["every_ms"], made["zone"], made["max_count"]) == (None, "Europe/Berlin", None)
    daily["end_ms"] = made["end_ms"]
    again = send(cluster, cluster.wait_for_leader(), "PUT", f"{at}/preview", daily).body
    assert (again["existed"], again["id"]) == (True, made["id"])
    hourly = {"payload": "x", "every": "PT1H", "max_count": 3, "headers": {"b": "c"}}
    probe = send(cluster, node, "PUT", f"{at}/a%2Fb", hourly).body
    assert (probe["every_ms"], probe["max_count"], probe["misfire"]) == (3_600_000, 3, "fire_once")
    found = until(lambda: client.get_series(f"space/{topic}", "a/b").timer_id)
    shown = send(cluster, node, "GET", f"{at}/a%2Fb?next_times=5").body
    assert (shown["timer_id"], shown["payload"], shown["headers"]) == (found, "x", {"b": "c"})
    first = shown["planned_ms"]
    assert shown["next_times_ms"] == [first, first + 3_600_000, first + 7_200_000]
    unset = {"json": None, "headers": None}  # as generated clients send them
    paused = send(cluster, node, "PATCH", f"{at}/a%2Fb", unset | {"paused": True}).body
    assert (paused["paused"], paused["timer_id"], paused["planned_ms"]) == (True, None, None)
    assert (paused["payload"], paused["headers"]) == ("x", {"b": "c"})
    change = {"paused": False, "every": 60, "max_count": 0, "start_ms": first, "payload": "y"}
    moved = send(cluster, node, "PATCH", f"{at}/a%2Fb", change).body
    assert (moved["paused"], moved["every_ms"], moved["max_count"]) == (False, 60_000, None)
    assert (moved["start_ms"], moved["payload"], moved["headers"]) == (first, "y", {"b": "c"})
    declared = {"every": 60, "payload": "z", "paused": True, "on_conflict": "alter"}
    again = send(cluster, node, "PUT", f"{at}/a%2Fb", declared).body
    assert (again["existed"], again["id"], again["start_ms"]) == (True, moved["id"], first)
    assert (again["payload"], again["headers"], again["paused"]) == ("z", {}, True)
    page = send(cluster, node, "GET", f"{at}?page_size=1").body
    assert [each["key"] for each in page["series"]] == ["preview"]
    rest = send(cluster, node, "GET", f"{at}?page_token={page['next_page_token']}").body
    assert [[each["key"] for each in rest["series"]], rest["next_page_token"]] == [["a/b"], None]
    every = {(each["topic"], each["key"]) for each in pages_of_series(cluster, node)}
    assert {(f"space/{topic}", "preview"), (f"space/{topic}", "a/b")} <= every
    times = send(cluster, node, "POST", f"{at}/preview", hourly | {"next_times": 2}).body
    assert times["next_times_ms"][1] - times["next_times_ms"][0] == 3_600_000
    for verb, path, body, status, detail in (
        ("PUT", f"{at}/preview", daily | {"zone": "UTC", "paused": True}, 409, "in paused, zone"),
        ("PUT", f"{at}/c", {"every": 60, "on_conflict": "keep"}, 400, "one of reject, alter"),
        ("PUT", f"{at}/c", {"every": -1}, 400, "every = -1: must be 1 to 316224000 s"),
        ("PUT", f"{at}/c", {}, 400, "every, cron = 'neither'"),
        ("PATCH", f"{at}/b", {"every": 5, "cron": "* * * * *"}, 400, "every, cron = 'both'"),
        ("PUT", f"{at}/c", {"cron": "0 7 * * *", "zone": "Mars/Olympus"}, 400, "IANA"),
        ("PUT", f"{at}/c", {"payload": "x" * 16_384, "every": 60}, 400, "at most 16384 bytes"),
        ("PUT", f"{at}/c", {"evry": 60}, 400, "known: json"),
        ("PUT", f"{at}/{'k' * 1_100}", {"every": 60}, 400, "key"),
        ("PATCH", f"{at}/preview", unset, 400, "at least one"),
        ("PATCH", f"{at}/none", {"paused": True}, 404, "none"),
        ("DELETE", f"{at}/none", None, 404, "none"),
        ("GET", f"{at}/preview?next_times=101", None, 400, "next_times"),
        ("GET", f"{at}?page_size=101", None, 400, "page_size"),
        ("GET", f"{at}?page_token=x", None, 400, "page_token"),
        ("GET", "/v1/topics/none/series", None, 404, "none"),
    ):
        refused = send(cluster, node, verb, path, body)
        assert (refused.status, detail in refused.body["detail"]) == (status, True), refused.body
        assert refused.headers["Content-Type"].startswith("application/problem+json")
    named = JSON | {"Idempotency-Key": "1"}
    assert send(cluster, node, "PUT", f"{at}/c", {"every": 60}, named).status == 400
    foreign = {"Origin": "http://evil.example"}
    assert send(cluster, node, "GET", f"{at}/preview", headers=foreign).status == 403
    assert send(cluster, node, "DELETE", f"{at}/a%2Fb").body == {}
    assert send(cluster, node, "GET", f"{at}/a%2Fb").status == 404


def pages_of_series(cluster: Running, node: str) -> list[dict[str, Any]]:
    """Return the series of all topics, one on a page."""
    found: list[dict[str, Any]] = []
    at = "/v1/series?page_size=1"
    page = send(cluster, node, "GET", at).body
    while token := page["next_page_token"]:
        found += page["series"]
        page = send(cluster, node, "GET", f"{at}&page_token={token}").body
    return [*found, *page["series"]]


def test_follower_reads_messages_by_their_offsets(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/queue"
    client.create_group(topic, "g")
    timer = {"json": {"a": 1}, "delay": 0, "ordering_key": "o", "priority": 9, "key": "k"}
    send(cluster, node, "POST", f"/v1/topics/{topic}/timers", timer)
    client.schedule_batch(topic, [b"1", b"\xff"], delay=0)
    read = until(lambda: (got := send(cluster, node, "GET", at).body)["end_offset"] == 3 and got)
    first = next(each for each in read["messages"] if each["key"] == "k")
    assert (first["json"], first["ordering_key"], first["priority"]) == ({"a": 1}, "o", 9)
    assert [each["queue_offset"] for each in read["messages"]] == [0, 1, 2]
    assert {"payload": "1", "payload_base64": "/w=="}.items() <= {
        name: value for each in read["messages"] for name, value in each.items()
    }.items()
    assert (read["next_offset"], read["begin_offset"], read["topic_id"].isdecimal()) == (3, 0, True)
    one = send(cluster, node, "GET", f"{at}?from_offset=1&end_offset=3&max_messages=1").body
    assert [each["queue_offset"] for each in one["messages"]] == [1]
    assert one["next_offset"] == 2
    received: list[dict[str, Any]] = []
    receive = {"max_messages": 10, "wait": 20}
    while len(received) < 3:
        path = f"/v1/topics/{topic}/groups/g/receive"
        received += send(cluster, node, "POST", path, receive).body["messages"]
    [leased] = [each for each in received if each["key"] == "k"]
    assert leased == first | {"attempt": 1, "failures": 0}
    sizes = [3 << 20, 600 << 10, 600 << 10]  # more than a mebibyte together, and the first alone
    for offset, size in enumerate(sizes, 3):
        timer = {"payload": "x" * size, "delay": 0}
        assert send(cluster, node, "POST", f"/v1/topics/{topic}/timers", timer).status == 200
        path = f"{at}?from_offset={offset}"
        until(
            functools.partial(lambda path: send(cluster, node, "GET", path).body["messages"], path)
        )
    for offset, size in enumerate(sizes, 3):
        one = send(cluster, node, "GET", f"{at}?from_offset={offset}").body
        assert [len(each["payload"]) for each in one["messages"]] == [size]
    for query in ("from_offset=2&end_offset=1", "end_offset=0", "max_messages=1001", "from=1"):
        assert send(cluster, node, "GET", f"{at}?{query}").status == 400, query


def test_lines_of_a_stream_have_results_of_their_own(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/timers/stream"
    lines = [json.dumps({"payload": f"{n}", "delay": 3600, "key": f"{n % 50}"}) for n in range(100)]
    lines[7] = "{"
    lines[8:11] = '{"dealy": 1}', "", '{"due": "2999-01-01T00:00:00Z"}'
    client.alter_policies({"delay_ms_max": 4_000_000}, topic=topic)
    text = "\n".join(lines)
    headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": topic}

    def results() -> list[dict[str, Any]]:
        connection = http.client.HTTPConnection(cluster.node(node).http, timeout=RPC_S)
        with contextlib.closing(connection):
            connection.request("POST", at, text, headers)
            return [json.loads(line) for line in connection.getresponse().read().splitlines()]

    found = results()
    assert [each["line"] for each in found] == [n for n in range(1, 101) if n != 10]
    refused = {each["line"]: each["error"]["field"] for each in found if "error" in each}
    assert refused == {8: "line", 9: "dealy", 11: "due"}
    kinds = collections.Counter(each.get("result") for each in found)
    assert kinds == {"SCHEDULED": 50, "REJECTED": 46, None: 3}
    again = [each | {"duplicate": True} for each in found if "result" in each]
    assert [each for each in results() if "result" in each] == again
    assert client.count_timers(topic).pending == 50
    assert send(cluster, node, "POST", at, text).status == 415


def test_stream_that_ends_early_says_so_after_its_results(cluster: Running, topic: str) -> None:
    host, _, port = cluster.node(cluster.followers()[0]).http.rpartition(":")
    seen = b""

    def exchange(line: bytes, until_seen: bytes) -> None:
        nonlocal seen
        connection.sendall(b"%x\r\n%s\r\n" % (len(line), line))
        while until_seen not in seen:
            piece = connection.recv(65_536)
            assert piece, seen
            seen += piece

    with socket.create_connection((host, int(port)), RPC_S) as connection:
        connection.sendall(
            f"POST /v1/topics/{topic}/timers/stream HTTP/1.1\r\nHost: localhost\r\n"
            "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        exchange(b'{"delay": 3600}\n', b'{"line": 1, "result": "SCHEDULED"')
        exchange(b"x" * (timer_stream.LINE_BYTES_MAX + 1), b'{"line": 2, "error": ')
    assert b"1048576" in seen


@pytest.mark.parametrize(("path", "kind"), [("timers", "json"), ("timers/stream", "x-ndjson")])
def test_body_that_is_not_encoded_as_its_headers_say_is_refused(
    cluster: Running, topic: str, path: str, kind: str
) -> None:
    headers = {"Content-Type": f"application/{kind}", "Content-Encoding": "gzip"}
    at = f"/v1/topics/{topic}/{path}"
    refused = send(cluster, cluster.followers()[0], "POST", at, "x" * 20, headers)
    assert (refused.status, refused.body["field"]) == (400, "body")
    assert "encoded as the headers say: Error -3" in refused.body["detail"]


def test_refusals_before_a_path_is_known_are_problems_too(cluster: Running, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/timers"
    for coding in ("br", "zstd", "lz4"):
        found = send(cluster, node, "POST", at, {}, JSON | {"Content-Encoding": coding})
        assert (found.status, found.body["field"]) == (415, "Content-Encoding"), coding
        assert found.body["limit"] == "must be gzip or deflate, or absent"
    for verb, path, status, detail in (
        ("BREW", at, 400, "must be HTTP/1.1: Invalid method"),
        ("GET", f"/v1/{'x' * 9_000}", 400, "more than 8190 bytes"),
        ("GET", "/v1", 404, "no such path: '/v1'; /v1/openapi.json has all paths"),
        ("POST", "/v1/topics/a/b/timers", 404, "write a / in a name as %2F"),
        ("PATCH", at, 405, "this path takes GET,HEAD,POST, not PATCH"),
    ):
        found = send(cluster, node, verb, path, {})
        assert (found.status, detail in found.body["detail"]) == (status, True), found.body
        assert found.headers["Content-Type"].startswith("application/problem+json")


def test_changes_without_a_body_need_no_content_type(cluster: Running, topic: str) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}"
    assert send(cluster, node, "PUT", at, None, {}).status == 200
    assert send(cluster, node, "DELETE", f"{at}/keys/none", None, {}).body["result"] == "NOT_FOUND"
    assert send(cluster, node, "DELETE", at, None, {}).status == 200
    for body in (None, "{}"):  # a form of another origin may send a POST
        assert send(cluster, node, "POST", f"{at}/timers", body, {}).status == 415


def test_due_time_of_zero_or_seconds_is_refused_and_whole_numbers_have_any_form(
    cluster: Running, topic: str
) -> None:
    node, at = cluster.followers()[0], f"/v1/topics/{topic}/timers"
    for due_ms in (0, 1, 1_893_456_000, 10**10 - 1):
        found = send(cluster, node, "POST", at, {"due_ms": due_ms}).body
        assert (found["field"], "not seconds" in found["limit"]) == ("due_ms", True), due_ms
    for number, due in (("1.893456e12", 1_893_456_000_000), ("253402300799999.0", 253402300799999)):
        assert send(cluster, node, "POST", at, f'{{"due_ms": {number}}}').body["due_ms"] == due
    assert send(cluster, node, "POST", at, {"due_ms": 10**10}).status == 200
    # as generated clients for Java send them
    body = {"json": None, "payload": "a", "payload_base64": None, "delay": 60}
    made = send(cluster, node, "POST", at, body).body
    assert send(cluster, node, "GET", f"/v1/timers/{made['id']}").body["payload"] == "a"
    made = send(cluster, node, "POST", at, {"json": None, "delay": 60}).body
    assert send(cluster, node, "GET", f"/v1/timers/{made['id']}").body["json"] is None


def test_client_of_plain_http_repeats_a_request_after_the_leader_is_killed(
    cluster: Running, topic: str
) -> None:
    leader = cluster.wait_for_leader()
    others = [name for name in cluster.nodes if name != leader]
    at = f"/v1/topics/{topic}/timers"
    first = send(cluster, others[0], "POST", at, {"delay": 3600}, JSON | {"Idempotency-Key": "1"})
    cluster.kill(leader)

    def scheduled(key: str, turn: list[str]) -> Any:
        turn.append(turn.pop(0))
        named = JSON | {"Idempotency-Key": key}
        answer = send(cluster, turn[0], "POST", at, {"delay": 3600}, named)
        if answer.status != 200:
            assert answer.body["retryable"] or not answer.body["outcome_known"], answer.body
        return answer.body if answer.status == 200 else None

    try:
        made = [until(functools.partial(scheduled, key, [*others])) for key in ("1", "2", "3")]
        assert made[0] == first.body | {"duplicate": True}
        assert len({each["id"] for each in made}) == 3
        assert send(cluster, others[1], "GET", f"{at}/count").body["pending"] == 3
    finally:
        cluster.up()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_examples_of_the_documents_work_as_they_stand(cluster: Running) -> None:
    node = cluster.node(cluster.followers()[0]).http
    root = Path(__file__).parents[2]
    blocks = re.findall(r"```sh\n(.*?)```", (root / "docs/http.md").read_text(), re.S)
    blocks += re.findall(r"```\n(curl .*?)```", (root / "README.md").read_text(), re.S)
    assert len(blocks) >= 7
    script = re.sub(r"127\.0\.0\.1:\d+", node, "\n".join(blocks)).replace("curl ", "curl -f ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=RPC_S * 4,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert '{"results": ["ACKED"]}' in done.stdout
    assert '"line": 2, "result": "SCHEDULED"' in done.stdout
    assert '"result": "CANCELLED"' in done.stdout
