"""A check of the HTTP port's JSON against its OpenAPI document."""

import asyncio
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.rpc import (
    openapi,
)
from cluster.rpc.http import (
    LocalState,
)
from tests.cluster import http_document
from tests.cluster.running import RPC_S, Running

DOCUMENT = openapi.document()
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def wrong_in_answer(verb: str, path: str, status: int, body: Any) -> list[str]:
    """Return the places where an answer differs from the document. HEAD and others: none."""
    bare = path.partition("?")[0]
    for template, verbs in DOCUMENT["paths"].items():
        pattern = re.sub(r"{\w+}", "[^/]+", template)
        if re.fullmatch(pattern, bare) and verb.lower() in verbs:
            responses = verbs[verb.lower()]["responses"]
            [found] = responses.get(str(status), responses["default"])["content"].values()
            return [*_wrong(body, found["schema"], "answer")]
    return []


def _wrong(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from _wrong(value, DOCUMENT["components"]["schemas"][name], where)
    elif value is None:
        if "type" in schema and not schema.get("nullable"):
            yield f"{where} is null"
    elif "allOf" in schema:
        yield from _wrong(value, schema["allOf"][0], where)
    elif "type" in schema:
        kind = schema["type"]
        if not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool)):
            yield f"{where} is no {kind}"
        elif value not in schema.get("enum", [value]):
            yield f"{where} is {value}"
        elif kind == "array":
            for at, each in enumerate(value):
                yield from _wrong(each, schema["items"], f"{where}[{at}]")
        elif kind == "object":
            yield from _wrong_object(value, schema, where)


def _wrong_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is absent"
    for name, each in value.items():
        if name in known:
            yield from _wrong(each, known[name], f"{where}.{name}")
        elif "additionalProperties" in schema:
            yield from _wrong(each, schema["additionalProperties"], f"{where}.{name}")
        elif known:
            yield f"{where}.{name} is not known"


FOLLOWER = LocalState(role="follower", serving=False, leader="n1", silent_ms=90, silent_ms_max=550)


@dataclass
class FakeNode:
    """A node with answers that the test sets."""

    state: LocalState = FOLLOWER
    failure: Exception | None = None
    hangs: bool = False
    padding: str = ""
    """In each answer."""
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
        return {"what": what, "epoch": 1 << 60} | ({"text": self.padding} if self.padding else {})


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
        read = answer.read()
        assert read.endswith(b"}\n") or not read, "no final newline"
        found = Reply(answer.status, json.loads(read or b"null"), answer.headers)
        wrong = http_document.wrong_in_answer(verb, path, found.status, found.body)
        assert not wrong, (verb, path, wrong)
        return found
    finally:
        connection.close()
