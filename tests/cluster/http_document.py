"""A check of the HTTP port's JSON against its OpenAPI document."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.rpc import openapi

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
