"""Forms of messages: receive, ack, nack, extend and read over HTTP.

A receive answers its messages with one `lease_id`, a text of the leader's epoch and the lease. Acks
name it, and the offsets of their messages. Durations of requests are seconds or ISO 8601.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from cluster.rpc import json_fields, payload_json
from cluster.rpc.http_form import HttpForm
from cluster.rpc.json_fields import Fields, field_error
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.schemas import (
    FLAG,
    HEADERS,
    MS,
    TEXT,
    WHOLE,
    list_schema,
    nullable,
    object_schema,
    span,
    words,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.peeked_messages import PeekedMessage, messages_of
from timerclient.values.results import AckResult, ExtendResult, NackResult

RECEIVE_MAX: Final = 1_000
READ_DEFAULT: Final = 100
READ_BYTES_MAX: Final = 1 << 20
"""Bytes of messages that are read by their offsets, at most, except a single one. JSON may need six
times as many."""
WAIT_MS_MAX: Final = 20_000
OFFSETS_MAX: Final = 16_384
_STARTS: Final = {"earliest": pb.GROUP_START_UNSPECIFIED, "latest": pb.GROUP_START_LATEST}
_LEASE: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
"""The leader's epoch, and the lease."""
RESULTS: Final[Mapping[int, str]] = {
    **{each.value: each.name for kind in (AckResult, NackResult, ExtendResult) for each in kind},
    pb.ACK_RESULT_LEASE_LOST: "LEASE_LOST",
    pb.ACK_RESULT_NOT_DELIVERED: "NOT_DELIVERED",
}
_Settlement = TypeVar("_Settlement", pb.AckRequest, pb.NackRequest, pb.ExtendRequest)


def _span(fields: Fields, name: str, most_ms: int) -> int:
    return json_fields.span_ms(fields, name, most_ms) or 0


def _lease_ms(fields: Fields) -> int:
    """Return a lease in milliseconds; 0: that of the group."""
    return json_fields.span_ms(fields, "lease", rows.LEASE_MS_MAX, 1) or 0


def _receive(fields: Fields) -> pb.ReceiveRequest:
    return pb.ReceiveRequest(
        topic=json_fields.text(fields, "topic"),
        group=json_fields.text(fields, "group"),
        max_messages=json_fields.whole_number(fields, "max_messages", 1, RECEIVE_MAX, 1),
        wait_ms=_span(fields, "wait", WAIT_MS_MAX),
        lease_ms=_lease_ms(fields),
        start=json_fields.choice(fields, "start", _STARTS, "earliest"),  # type: ignore[arg-type]
    )


def _receive_answer(_: Any, answer: pb.ReceiveResponse) -> Mapping[str, Any]:
    found = messages_of(answer)
    return {
        "lease_id": f"{answer.epoch}-{answer.lease_id}" if found else None,
        "lease_ms": answer.lease_ms if found else None,
        "messages": [
            _document(each, attempt=attempt, failures=each.failures)
            for each, attempt in zip(found, answer.attempts, strict=True)
        ],
    }


def _document(message: PeekedMessage, **more: int) -> dict[str, Any]:
    return {
        "queue_offset": message.queue_offset,
        "id": message.id,
        "due_ms": message.due_ms,
        "requested_ms": message.requested_ms,
        "fired_at_ms": message.fired_at_ms,
        **more,
        "key": message.key,
        "ordering_key": message.ordering_key,
        "priority": message.priority,
        "headers": message.headers,
        **payload_json.payload_json(message.payload, message.headers),
    }


def _read(fields: Fields) -> pb.ReadMessagesRequest:
    return pb.ReadMessagesRequest(
        topic=json_fields.text(fields, "topic"),
        from_offset=json_fields.whole_number(fields, "from_offset", 0, rows.UINT64_MAX),
        end_offset=json_fields.whole_number(fields, "end_offset", 1, rows.UINT64_MAX),
        max_messages=json_fields.whole_number(fields, "max_messages", 1, RECEIVE_MAX, READ_DEFAULT),
        max_bytes=READ_BYTES_MAX,
    )


def _were_read(_: Any, answer: pb.ReadMessagesResponse) -> Mapping[str, Any]:
    return {
        "messages": [_document(each) for each in messages_of(answer.messages)],
        "next_offset": answer.next_offset,
        "begin_offset": answer.begin_offset,
        "end_offset": answer.end_offset,
        "topic_id": str(answer.topic_id),
    }


def _settlement_of(kind: type[_Settlement], fields: Fields) -> _Settlement:
    """Return an ack, nack or extension with its messages.

    Raises:
        InvalidRequestError: the lease or an offset is malformed.
    """
    lease = json_fields.text(fields, "lease_id")
    found = _LEASE.fullmatch(lease)
    if found is None:
        raise field_error("lease_id", lease, "must be lease_id of a receive")
    offsets = json_fields.wholes(fields, "offsets", rows.UINT64_MAX, OFFSETS_MAX)
    epoch, lease_id = map(int, found.groups())
    return kind(
        topic=json_fields.text(fields, "topic"),
        group=json_fields.text(fields, "group"),
        epoch=epoch,
        lease_id=lease_id,
        offsets=offsets,
    )


def _ack(fields: Fields) -> pb.AckRequest:
    request = _settlement_of(pb.AckRequest, fields)
    request.cumulative = json_fields.flag(fields, "cumulative")
    return request


def _nack(fields: Fields) -> pb.NackRequest:
    request = _settlement_of(pb.NackRequest, fields)
    request.unseen = json_fields.flag(fields, "unseen")
    if (delay_ms := json_fields.span_ms(fields, "delay", rows.PAUSE_MS_MAX)) is not None:
        request.delay_ms = delay_ms
    request.detail = json_fields.text(fields, "detail")
    return request


def _extend(fields: Fields) -> pb.ExtendRequest:
    request = _settlement_of(pb.ExtendRequest, fields)
    request.lease_ms = _lease_ms(fields)
    return request


def _settle_answer(_: Any, answer: pb.AckResponse) -> Mapping[str, Any]:
    if answer.HasField("error"):
        raise ProblemError(answer.error)
    return {"results": [RESULTS[each] for each in answer.results]}


_SETTLED_MESSAGES: Final = {
    "lease_id": TEXT | {"description": "of the receive"},
    "offsets": list_schema(WHOLE) | {"description": "queue offsets of its messages"},
}
_MESSAGE: Final = {
    "queue_offset": WHOLE,
    "id": TEXT,
    "due_ms": MS,
    "requested_ms": MS,
    "fired_at_ms": MS,
    "key": nullable(TEXT),
    "ordering_key": nullable(TEXT),
    "priority": WHOLE,
    "headers": HEADERS,
    **payload_json.SCHEMA,
}


def _settle_form(name: str, request: Any, fields: Mapping[str, Any], results: Any) -> HttpForm:
    found = words(*(each.name for each in results), "LEASE_LOST", "NOT_DELIVERED")
    return HttpForm(
        request=request,
        answer=_settle_answer,
        body=object_schema(f"{name}Body", {**_SETTLED_MESSAGES, **fields}, optional=fields),
        answered=object_schema(
            f"{name}Results",
            {"results": list_schema(found) | {"description": "one for each offset"}},
        ),
    )


_RECEIVE: Final = {
    "max_messages": WHOLE | {"description": f"1 to {RECEIVE_MAX}; default: 1"},
    "wait": span("for the first message; at most 20 s; default: 0"),
    "lease": span("default: that of the group"),
    "start": words(*_STARTS),
}
FORMS: Final[Mapping[str, HttpForm]] = {
    "ReceiveMessages": HttpForm(
        request=_receive,
        answer=_receive_answer,
        body=object_schema("ReceiveBody", _RECEIVE, optional=_RECEIVE),
        answered=object_schema(
            "ReceivedMessages",
            {
                "lease_id": nullable(TEXT),
                "lease_ms": nullable(WHOLE),
                "messages": list_schema(
                    object_schema(
                        "ReceivedMessage",
                        {**_MESSAGE, "attempt": WHOLE, "failures": WHOLE},
                        optional=payload_json.SCHEMA,
                    )
                ),
            },
        ),
    ),
    "ReadMessages": HttpForm(
        request=_read,
        answer=_were_read,
        answered=object_schema(
            "MessagePage",
            {
                "messages": list_schema(
                    object_schema("Message", _MESSAGE, optional=payload_json.SCHEMA)
                )
                | {"description": "in the order of their offsets"},
                "next_offset": WHOLE | {"description": "from_offset of a request that continues"},
                "begin_offset": WHOLE
                | {"description": "of the oldest message that the topic keeps"},
                "end_offset": WHOLE | {"description": "of the next message that will fire"},
                "topic_id": TEXT
                | {"description": "another one, with offsets from 0, if the topic was recreated"},
            },
        ),
    ),
    "AckMessages": _settle_form(
        "Ack", _ack, {"cumulative": FLAG | {"description": "all up to the one offset"}}, AckResult
    ),
    "NackMessages": _settle_form(
        "Nack",
        _nack,
        {
            "delay": span("default: the group's backoff"),
            "unseen": FLAG | {"description": "the failure does not count"},
            "detail": TEXT
            | {"description": "the reason, for the header dead-letter-detail; up to 1,024 bytes"},
        },
        NackResult,
    ),
    "ExtendMessages": _settle_form(
        "Extend",
        _extend,
        {"lease": span("from now; default: that of the group")},
        ExtendResult,
    ),
}
"""Name of an operation -> its form."""
