"""The OpenAPI document of the HTTP port, made of the table of routes and the public messages.

`python -m cluster.rpc.openapi` writes it to stdout; docs/openapi.json is a copy.
"""

import functools
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cluster.rpc import peek_form
from cluster.rpc.http_routes import ROUTES, HttpRoute
from cluster.rpc.problem_details import PROBLEM
from cluster.rpc.relay import METHODS
from cluster.rpc.route_forms import FORMS
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_names

_PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "reason", "retryable", "outcome_known"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "reason": {"type": "string", "enum": [*short_names(pb.Reason.DESCRIPTOR)]},
        "retryable": {
            "type": "boolean",
            "description": "the identical request may succeed later",
        },
        "outcome_known": {
            "type": "boolean",
            "description": "true: the request certainly had no effect",
        },
        "field": {"type": "string"},
        "limit": {"type": "string"},
        "retry_after_ms": {"type": "integer"},
    },
}


_IDEMPOTENCY: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "1 to 64 characters that no other request has: a repetition of the request gets"
    " the first one's answer",
    "schema": {"type": "string", "maxLength": 64},
}


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM_SCHEMA, "PeekedMessages": peek_form.SCHEMA}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.verb.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "timer cluster",
            "version": "1",
            "description": "Timers, messages and administration of a timer cluster. Any node"
            " answers, and sends on to the leader what only the leader can do. Counts and times are"
            " numbers, times in Unix milliseconds; 64-bit ids are text.",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


@functools.cache
def text() -> str:
    """Return the document as JSON. It never changes; making it holds the event loop."""
    return json.dumps(document(), indent=1) + "\n"


def _operation(route: HttpRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    in_path = re.findall(r"{(\w+)}", route.path)
    form = FORMS.get(route.form)
    answer = route.answer or (METHODS[route.rpc].output_type.name if route.rpc else "")
    answered = _object(form.answered) if form is not None else _answer(answer, schemas)
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "description": f"Needs {route.permission} (with TLS).",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in in_path
        ]
        + [
            {"name": name, "in": "query", "description": told, "schema": {"type": "string"}}
            for name, told in route.query.items()
        ],
        "responses": {
            "200": {
                "description": "done",
                "content": {route.media: {"schema": answered}},
            },
            "default": {
                "description": "refused or failed",
                "content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            },
        },
    }
    if form is not None and form.takes_request_id:
        operation["parameters"].append(_IDEMPOTENCY)
    if route.is_change:
        if form is not None:
            schema = _object(form.body) | {"additionalProperties": False}
            schema |= {"required": [*form.required]} if form.required else {}
        else:
            schema = _message(METHODS[route.rpc].input_type, schemas, answered=False)
            for name in (route.inner,) if route.inner else in_path:
                del schema["properties"][name]
        operation["requestBody"] = {"content": {route.media: {"schema": schema}}}
    return operation


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties)}


def _answer(name: str, schemas: dict[str, Any]) -> dict[str, Any]:
    if not name:
        return {"type": "object"}
    if name == "PeekResponse":
        return {"$ref": "#/components/schemas/PeekedMessages"}
    return _reference(pb.DESCRIPTOR.message_types_by_name[name], schemas)


def _reference(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of a message in an answer."""
    if message.name not in schemas:
        schemas[message.name] = {}  # it is under way
        schemas[message.name] = _message(message, schemas, answered=True)
    return {"$ref": f"#/components/schemas/{message.name}"}


def _message(message: Descriptor, schemas: dict[str, Any], *, answered: bool) -> dict[str, Any]:
    properties = {each.name: _field(each, schemas, answered=answered) for each in message.fields}
    if answered:
        return {"type": "object", "properties": properties}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _field(field: FieldDescriptor, schemas: dict[str, Any], *, answered: bool) -> dict[str, Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = _field(inner.fields_by_name["value"], schemas, answered=answered)
        return {"type": "object", "additionalProperties": value}
    if inner is not None and answered:
        one = _reference(inner, schemas)
        if not field.is_repeated:
            one = {"anyOf": [one, {"type": "null"}]}
    elif inner is not None:
        one = _message(inner, schemas, answered=False)
    else:
        one = _scalar(field, answered=answered)
    return {"type": "array", "items": one} if field.is_repeated else one


def _scalar(field: FieldDescriptor, *, answered: bool) -> dict[str, Any]:
    if field.enum_type is not None:
        return {"type": "string", "enum": [*short_names(field.enum_type)]}
    kind = {
        FieldDescriptor.CPPTYPE_BOOL: "boolean",
        FieldDescriptor.CPPTYPE_STRING: "string",
    }.get(field.cpp_type, "integer")
    if answered and kind == "integer" and field.name.endswith("_id"):
        return {"type": ["string", "null"], "description": "a 64-bit number as text"}
    return {"type": kind}


if __name__ == "__main__":
    sys.stdout.write(text())
