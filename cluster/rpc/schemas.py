"""Schemas of the HTTP port's JSON, as its OpenAPI document has them.

    named("Timer", {"id": TEXT, "due_ms": MS, "key": nullable(TEXT)})

The document is of OpenAPI 3.0: few generators of clients read 3.1. Whole numbers have 64 bits: a
generator for Java takes 32 without a format, which have no room for a time.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

Schema = dict[str, Any]
TEXT: Final[Schema] = {"type": "string"}
WHOLE: Final[Schema] = {"type": "integer", "format": "int64"}
FLAG: Final[Schema] = {"type": "boolean"}
MS: Final[Schema] = WHOLE | {"description": "Unix milliseconds"}
MOMENT: Final[Schema] = {"type": "string", "format": "date-time"}
HEADERS: Final[Schema] = {"type": "object", "additionalProperties": TEXT}
SPAN: Final[Schema] = {
    "title": "Duration",
    "description": "seconds, or a duration of ISO 8601 such as PT1H30M",
    "oneOf": [{"type": "number", "format": "double"}, TEXT],
}


def span(text: str) -> Schema:
    """Return the schema of a duration with a description."""
    return {"description": text, "allOf": [SPAN]}


def nullable(schema: Schema) -> Schema:
    """Return the schema of a value or null."""
    return schema | {"nullable": True}


def list_schema(schema: Schema, most: int | None = None) -> Schema:
    """Return the schema of a list. `most`: its elements, at most; None: any number."""
    bound = {} if most is None else {"minItems": 1, "maxItems": most}
    return {"type": "array", "items": schema} | bound


def words(*names: str) -> Schema:
    """Return the schema of a text that is one of `names`."""
    return {"type": "string", "enum": [*names]}


def object_schema(
    title: str, properties: Mapping[str, Schema], optional: Collection[str] = ()
) -> Schema:
    """Return the schema of an object, which the document has once, as a component.

    `optional`: properties that may be absent.
    """
    required = [name for name in properties if name not in optional]
    made = {"title": title, "type": "object", "properties": dict(properties)}
    return made | {"required": required} if required else made


def hoist(schema: Schema, components: dict[str, Schema]) -> Schema:
    """Return a schema with references in place of the schemas that have a title.

    These are added to `components`.
    """
    out = {name: _inner(name, value, components) for name, value in schema.items()}
    title = out.pop("title", None)
    if title is None:
        return out
    null = out.pop("nullable", False)
    assert components.setdefault(title, out) == out, f"two schemas have the name {title}"
    reference = {"$ref": f"#/components/schemas/{title}"}
    if not null:
        return reference
    return {"type": out["type"], "nullable": True, "allOf": [reference]}  # only a type can be null


def _inner(name: str, value: Any, components: dict[str, Schema]) -> Any:
    if name == "properties":
        return {each: hoist(one, components) for each, one in value.items()}
    if name in ("items", "additionalProperties") and isinstance(value, dict):
        return hoist(value, components)
    if name in ("allOf", "oneOf"):
        return [hoist(each, components) for each in value]
    return value
