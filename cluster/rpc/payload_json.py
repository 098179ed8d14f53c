"""A payload in an answer: a JSON value, a text, or bytes in base64.

A payload is a JSON value if its header `content-type` says so, and if it is JSON of a usual size
and depth. Otherwise it is a text or base64: an answer is made in all cases.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc.json_bodies import decode_json, has_too_many_values
from cluster.rpc.schemas import TEXT, Schema
from timerclient.rows.message_json import payload_fields
from timerclient.values.codecs import CONTENT_TYPE, JSON

DEPTH_MAX: Final = 100
"""Arrays and objects in each other of a JSON value in an answer."""
SCHEMA: Final[dict[str, Schema]] = {
    "json": {"description": "the payload, if its content type is JSON"},
    "payload": TEXT | {"description": "or as a string, if it is UTF-8"},
    "payload_base64": TEXT | {"description": "or in base64"},
}
"""One of them is there."""
_BRACKETS: Final = re.compile(rb"[\[\]{}]")


def payload_json(data: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return a payload as one field: `json`, `payload` or `payload_base64`."""
    kind = headers.get(CONTENT_TYPE, "").partition(";")[0].strip().lower()
    if kind == JSON.content_type and not has_too_many_values(data) and _depth(data) <= DEPTH_MAX:
        try:
            return {"json": decode_json(data)}
        except (ValueError, RecursionError):
            pass
    return payload_fields(data)


def _depth(data: bytes) -> int:
    """Return the depth of a JSON text, or more: brackets in its texts count, too."""
    if (depth := data.count(b"[") + data.count(b"{")) <= DEPTH_MAX:
        return depth
    depth = deepest = 0
    for found in _BRACKETS.finditer(data):
        depth += 1 if found[0] in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
