"""Peeked messages as the HTTP port shows them: one object a message, as `timerctl peek -o json`."""

from typing import Any, Final

from cluster.rpc.schemas import (
    HEADERS,
    MS,
    TEXT,
    WHOLE,
    list_schema,
    nullable,
    object_schema,
    words,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.peeked_messages import PeekState, document_of, peeked_of

SCHEMA: Final = object_schema(
    "PeekedMessages",
    {
        "messages": list_schema(
            object_schema(
                "PeekedMessage",
                {
                    "id": TEXT,
                    "queue_offset": WHOLE,
                    "state": nullable(words(*(each.name for each in PeekState if each)))
                    | {"description": "null without a group"},
                    "due_ms": MS,
                    "requested_ms": MS,
                    "fired_at_ms": MS,
                    "failures": WHOLE,
                    "key": nullable(TEXT),
                    "ordering_key": nullable(TEXT),
                    "priority": WHOLE,
                    "headers": HEADERS,
                    "payload": TEXT,
                    "payload_base64": TEXT
                    | {"description": "in place of payload, if it is no UTF-8"},
                },
                optional=("payload", "payload_base64"),
            )
        ),
        "next_offset": nullable(WHOLE)
        | {"description": "from_offset of a request that continues; null: no message follows"},
    },
)


def peek_answer(answer: pb.PeekResponse) -> dict[str, Any]:
    """Return an answer of Peek for JSON."""
    found = peeked_of(answer)
    return {
        "messages": [document_of(each) for each in found.messages],
        "next_offset": found.next_offset or None,
    }
