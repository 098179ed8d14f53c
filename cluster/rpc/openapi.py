"""The OpenAPI document of the HTTP port, made of the table of routes and the public messages.

`python -m cluster.rpc.openapi` writes it to stdout; docs/openapi.json is a copy. It keeps to a part
of OpenAPI 3.0 that generators of clients for Go, Java and TypeScript read: docs/other-languages.md.
"""

import functools
import json
import re
import sys
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cluster.rpc import message_forms, peek_form, series_forms, timer_forms
from cluster.rpc.http_form import HttpForm
from cluster.rpc.http_routes import NDJSON, ROUTES, SCOPES, HttpRoute
from cluster.rpc.problem_details import PROBLEM, PROBLEM_SCHEMA
from cluster.rpc.relay import METHODS
from cluster.rpc.route_forms import FORMS
from cluster.rpc.schemas import (
    FLAG,
    MOMENT,
    TEXT,
    WHOLE,
    Schema,
    hoist,
    list_schema,
    nullable,
    object_schema,
    words,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_names

_IDEMPOTENCY: Final[Schema] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "1 to 64 characters that no other request has: a repetition of the request gets"
    " the first one's answer",
    "schema": {"type": "string", "maxLength": 64},
}
_SCHEDULE_PROBLEMS: Final = {
    "404": "no pending timer has the key of an update, or no topic the name",
    "409": "a pending timer has the key",
    "429": "too many requests, or the topic is at a quota",
}
"""Status of an answer to a schedule -> its meaning."""
_RETRY_AFTER: Final[Schema] = {
    "Retry-After": {"description": "seconds, if they are known", "schema": WHOLE}
}
_TAGS: Final = {"timers": timer_forms, "series": series_forms, "messages": message_forms}
"""Tag of the operations of a module with forms. A generator makes one class for each."""
_PARAMETERS: Final[dict[str, Schema]] = {
    **dict.fromkeys(("due_from", "due_to"), MOMENT),
    **dict.fromkeys(("due_from_ms", "due_to_ms", "from_offset", "end_offset", "at_index"), WHOLE),
    **dict.fromkeys(("page_size", "size", "max_messages", "next_times"), WHOLE),
    "lateness": FLAG,
    "scope": words(*SCOPES),
}
"""Name of a parameter of a query that is no plain text -> its schema."""


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.0 document."""
    schemas: dict[str, Schema] = {}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.verb.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "timer cluster",
            "version": "1",
            "description": "Timers, messages and administration of a timer cluster. Any node"
            " answers, and sends on to the leader what only the leader can do. Counts and times are"
            " numbers, times in Unix milliseconds; 64-bit ids are strings.",
        },
        "servers": [{"url": "http://127.0.0.1:8080", "description": "any node"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "with TLS: a bearer token, or the certificate of a client",
                }
            },
        },
    }


@functools.cache
def text() -> str:
    """Return the document as JSON. It never changes; making it holds the event loop."""
    return json.dumps(document(), indent=1) + "\n"


def _operation(route: HttpRoute, schemas: dict[str, Schema]) -> dict[str, Any]:
    in_path = re.findall(r"{(\w+)}", route.path)
    form = FORMS.get(route.form)
    answered = hoist(form.answered if form is not None else _answer(route), schemas)
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "tags": [_tag(route)],
        "summary": route.summary,
        "description": f"Needs {route.permission} (with TLS).",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in in_path
        ]
        + [
            {
                "name": name,
                "in": "query",
                "description": text,
                "schema": _PARAMETERS.get(name, TEXT),
            }
            for name, text in route.query.items()
        ],
        "responses": {
            "200": {
                "description": "done",
                "content": _content(route, answered),
            },
            "default": {
                "description": "refused or failed",
                "content": {PROBLEM: {"schema": hoist(PROBLEM_SCHEMA, schemas)}},
            },
        },
    }
    if form is not None and form.takes_request_id:
        operation["parameters"].append(_IDEMPOTENCY)
        problem = operation["responses"].pop("default")
        for status, text in _SCHEDULE_PROBLEMS.items():
            operation["responses"][status] = problem | {"description": text}
        operation["responses"]["429"]["headers"] = _RETRY_AFTER
        operation["responses"]["default"] = problem
    body = _body(route, form, in_path)
    if body["properties"] and route.is_change:
        content = _content(route, hoist(body | {"additionalProperties": False}, schemas))
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _content(route: HttpRoute, schema: Schema) -> Schema:
    """Return the content of a request or an answer. `schema`: of an object."""
    if route.media == NDJSON:  # generators know no streams of objects
        name = schema["$ref"].rpartition("/")[2]
        schema = {"type": "string", "format": "binary", "description": f"lines of {name}"}
    return {route.media: {"schema": schema}}


def _tag(route: HttpRoute) -> str:
    for tag, module in _TAGS.items():
        if route.form in module.FORMS:
            return tag
    return "administration"


def _body(route: HttpRoute, form: HttpForm | None, in_path: list[str]) -> Schema:
    """Return the schema of the body of a request."""
    if form is not None:
        return form.body
    if not route.rpc:
        return {"properties": {}}
    schema = _message(METHODS[route.rpc].input_type, answered=False)
    for name in (route.inner,) if route.inner else in_path:
        del schema["properties"][name]
    return schema | {"title": f"{route.operation}Body"}


def _answer(route: HttpRoute) -> Schema:
    name = route.answer or (METHODS[route.rpc].output_type.name if route.rpc else "")
    if not name:
        return {"type": "object"}
    if name == "PeekResponse":
        return peek_form.SCHEMA
    return _message(pb.DESCRIPTOR.message_types_by_name[name], answered=True)


def _message(message: Descriptor, *, answered: bool) -> Schema:
    properties = {each.name: _field(each, answered=answered) for each in message.fields}
    if answered:
        # A generator for Go has a `CreateTopicResponse` of its own: of the operation.
        name = message.name.replace("Response", "Answer")
        unset = [each.name for each in message.fields if each.has_presence]  # absent, or null
        return object_schema(name, properties, optional=unset)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _field(field: FieldDescriptor, *, answered: bool) -> Schema:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = _field(inner.fields_by_name["value"], answered=answered)
        return {"type": "object", "additionalProperties": value}
    if inner is not None:
        one = _message(inner, answered=answered)
    else:
        one = _scalar(field, answered=answered)
    if field.is_repeated:
        return list_schema(one)
    return nullable(one) if answered and field.has_presence else one


def _scalar(field: FieldDescriptor, *, answered: bool) -> Schema:
    if field.enum_type is not None:
        return words(*short_names(field.enum_type))
    kind = {
        FieldDescriptor.CPPTYPE_BOOL: FLAG,
        FieldDescriptor.CPPTYPE_STRING: TEXT,
    }.get(field.cpp_type, WHOLE)
    if answered and kind is WHOLE and field.name.endswith("_id"):
        return nullable(TEXT) | {"description": "a 64-bit number as a string"}
    return kind


if __name__ == "__main__":
    sys.stdout.write(text())
