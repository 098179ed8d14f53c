"""Peeked messages as the HTTP port shows them: one object a message, as `timerctl peek -o json`."""

from typing import Any, Final

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.peeked_messages import PeekState, document_of, peeked

_COUNT: Final = {"type": "integer"}
_TEXT: Final = {"type": "string"}
_ONE: Final[dict[str, Any]] = {
    "id": _TEXT,
    "queue_offset": _COUNT,
    "state": {
        "type": ["string", "null"],
        "enum": [*(each.name for each in PeekState if each), None],
    },
    "due_ms": _COUNT,
    "requested_ms": _COUNT,
    "fired_at_ms": _COUNT,
    "failures": _COUNT,
    "key": {"type": ["string", "null"]},
    "ordering_key": {"type": ["string", "null"]},
    "priority": _COUNT,
    "headers": {"type": "object", "additionalProperties": _TEXT},
    "payload": _TEXT,
    "payload_base64": {"type": "string", "description": "in place of payload, if it is no UTF-8"},
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object", "properties": _ONE}},
        "next_offset": {
            "type": ["integer", "null"],
            "description": "from_offset of a request that continues; null: no message follows",
        },
    },
}


def peek_answer(answer: pb.PeekResponse) -> dict[str, Any]:
    """Return an answer of Peek for JSON."""
    found = peeked(answer)
    return {
        "messages": [document_of(each) for each in found.messages],
        "next_offset": found.next_offset or None,
    }
