"""Forms of timers: schedule and look up over HTTP. `timer_change_forms.py` has the changes.

Ids of timers are text. Times of answers are Unix milliseconds. A result is the name of the outcome,
as in the Python client: timerclient/values/results.py.
"""

from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc import json_fields, payload_json, timer_change_forms
from cluster.rpc.field_names import TIMERS, field_of_row
from cluster.rpc.grpc_errors import to_wire
from cluster.rpc.http_form import HttpForm
from cluster.rpc.json_bodies import LARGE_BYTES_MAX
from cluster.rpc.json_fields import Fields
from cluster.rpc.problem_details import PROBLEM_SCHEMA, ProblemError
from cluster.rpc.schemas import (
    FLAG,
    HEADERS,
    MS,
    TEXT,
    WHOLE,
    list_schema,
    nullable,
    object_schema,
    words,
)
from cluster.rpc.timer_change_forms import (
    ID,
    ID_OR_NULL,
    NO_ID,
    filter_of,
    raw_id,
    token_of,
    token_text,
)
from cluster.rpc.timer_rows import MODE_SCHEMA, ROW, ROW_SCHEMA, request_of, row_of
from timer.leader.leader import ENTRY_ROWS_MAX
from timer.model import timer_id
from timer.model.timer_errors import AlreadyExistsError, EngineError, NotFoundError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import pending_timers
from timerclient.rows.pending_timers import TimerInfo
from timerclient.values import ids
from timerclient.values.results import ScheduleResult, TimerState

PAGE_SIZE_MAX: Final = 1_000
_SCHEDULED: Final = {
    "result": words(*(each.name for each in ScheduleResult)),
    "id": ID_OR_NULL,
    "due_ms": nullable(MS),
    "other_id": ID_OR_NULL
    | {"description": "the timer that this one replaced, or that has its key"},
}


# ---- schedule


def _one(fields: Fields) -> pb.ScheduleRequest:
    return request_of(json_fields.text(fields, "topic"), [row_of(fields)], fields)


def outcomes_of(answer: pb.ScheduleResponse) -> list[dict[str, Any]]:
    """Return the outcome of each row of an answer."""
    made = ids.split(answer.timer_ids)  # once: each look at a field of bytes copies it
    others = ids.split(answer.other_ids) or [b""] * len(made)
    results = answer.results or [ScheduleResult.SCHEDULED] * len(made)
    return [_outcome(*row) for row in zip(results, made, others, strict=True)]


def _outcome(result: int, raw: bytes, other: bytes) -> dict[str, Any]:
    there = raw != NO_ID
    return {
        "result": ScheduleResult(result).name,
        "id": timer_id.to_text(raw) if there else None,
        "due_ms": ids.due_ms_of(raw) if there else None,
        "other_id": timer_id.to_text(other) if other and other != NO_ID else None,
    }


def _one_answer(request: pb.ScheduleRequest, answer: pb.ScheduleResponse) -> Mapping[str, Any]:
    [found] = outcomes_of(answer)
    if found["id"] is None:
        key = request.timers[0].keys.decode()
        error: EngineError = NotFoundError("pending timer with the key", key)
        if found["result"] == ScheduleResult.REJECTED.name:
            error = AlreadyExistsError("key", key, f"the pending timer {found['other_id']} has it")
        more = {name: found[name] for name in ("result", "other_id")}
        raise ProblemError(to_wire(error), more=more)
    return found | {"duplicate": answer.duplicate}


def _batch_request(fields: Fields) -> pb.ScheduleRequest:
    given = json_fields.elements(fields, "timers", "timers")
    rows = [json_fields.element("timers", at, each, ROW, row_of) for at, each in enumerate(given)]
    return request_of(json_fields.text(fields, "topic"), rows, fields, TIMERS)


def _batch_field(request: pb.ScheduleRequest, name: str) -> str:
    rows = sum(len(timers.payload_sizes) for timers in request.timers)
    return field_of_row(name, rows, TIMERS)


def _batch_answer(_: Any, answer: pb.ScheduleResponse) -> Mapping[str, Any]:
    return {"timers": outcomes_of(answer), "duplicate": answer.duplicate}


# ---- look up


_TIMER: Final = object_schema(
    "Timer",
    {
        "id": ID,
        "state": words(*(each.name for each in TimerState)),
        "topic": nullable(TEXT),
        "due_ms": MS,
        "requested_ms": nullable(MS),
        "key": nullable(TEXT),
        "ordering_key": nullable(TEXT),
        "priority": nullable(WHOLE),
        "headers": nullable(HEADERS),
        **payload_json.SCHEMA,
        "held": FLAG | {"description": "overdue in a paused topic"},
        "successor_id": ID_OR_NULL
        | {"description": "of a rescheduled timer: the timer that fires instead"},
    },
    optional=payload_json.SCHEMA,
)


def _document(found: TimerInfo) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": found.id,
        "state": found.state.name,
        "topic": found.topic or None,
        "due_ms": found.due_ms,
        "requested_ms": found.requested_ms,
        "key": found.key,
        "ordering_key": found.ordering_key,
        "priority": found.priority,
        "headers": found.headers,
        "held": found.held,
        "successor_id": found.replaced_by,
    }
    if found.payload is None:
        return made
    return made | payload_json.payload_json(found.payload, found.headers or {})


def _got(request: pb.GetTimerRequest, answer: pb.GetTimerResponse) -> Mapping[str, Any]:
    return _document(pending_timers.info(answer, request.timer_id))


def _by_key(fields: Fields) -> pb.GetTimerRequest:
    topic, key = json_fields.text(fields, "topic"), json_fields.text(fields, "key")
    return pb.GetTimerRequest(topic=topic, key=key)


def _page(fields: Fields) -> pb.ListTimersRequest:
    return pb.ListTimersRequest(
        filter=filter_of(fields),
        page_size=json_fields.whole_number(fields, "page_size", 1, PAGE_SIZE_MAX),
        page_token=token_of(fields),
    )


def _list_answer(request: pb.ListTimersRequest, answer: pb.ListTimersResponse) -> Mapping[str, Any]:
    found = pending_timers.infos(request.filter.topic, answer.timers, answer.held)
    token = token_text(answer.next_page_token)
    return {"timers": [_document(each) for each in found], "next_page_token": token}


def _count_request(fields: Fields) -> pb.CountTimersRequest:
    what, token = filter_of(fields), token_of(fields)
    if not token and what == pb.TimerFilter(topic=what.topic):
        return pb.CountTimersRequest(topic=what.topic)
    return pb.CountTimersRequest(filter=what, page_token=token)


def _count_answer(_: Any, answer: pb.CountTimersResponse) -> Mapping[str, Any]:
    within = zip(answer.horizon_ms, answer.within, strict=True)
    return {
        "pending": answer.pending,
        "within": [{"horizon_ms": horizon, "pending": count} for horizon, count in within],
        "clock_ms": answer.clock_ms,
        "next_page_token": token_text(answer.next_page_token),
    }


_ROW_AND_MODE: Final = {**ROW_SCHEMA, "on_conflict": MODE_SCHEMA}
_BODY: Final = object_schema("ScheduleTimerBody", _ROW_AND_MODE, optional=_ROW_AND_MODE)
_LINE: Final = {
    "line": WHOLE | {"description": "of the request, from 1"},
    **_SCHEDULED,
    "duplicate": FLAG,
    "error": PROBLEM_SCHEMA,
}
FORMS: Final[Mapping[str, HttpForm]] = {
    "ScheduleTimer": HttpForm(
        request=_one,
        answer=_one_answer,
        body=_BODY,
        answered=object_schema("ScheduledTimer", {**_SCHEDULED, "duplicate": FLAG}),
        bytes_max=LARGE_BYTES_MAX,
        takes_request_id=True,
    ),
    "ScheduleTimers": HttpForm(
        request=_batch_request,
        answer=_batch_answer,
        body=object_schema(
            "ScheduleTimersBody",
            {
                "timers": list_schema(
                    object_schema("NewTimer", ROW_SCHEMA, optional=ROW_SCHEMA), ENTRY_ROWS_MAX
                )
                | {"description": "at most 1,024 of them with keys"},
                "on_conflict": MODE_SCHEMA,
            },
            optional=("on_conflict",),
        ),
        answered=object_schema(
            "ScheduledTimers",
            {"timers": list_schema(object_schema("TimerOutcome", _SCHEDULED)), "duplicate": FLAG},
        ),
        bytes_max=LARGE_BYTES_MAX,
        field_in_json=_batch_field,
        takes_request_id=True,
    ),
    "StreamTimers": HttpForm(
        request=_one,
        answer=lambda _, answer: outcomes_of(answer)[0] | {"duplicate": answer.duplicate},
        body=_BODY,
        answered=object_schema(
            "StreamedTimer", _LINE, optional=[name for name in _LINE if name != "line"]
        ),
        takes_request_id=True,
    ),
    "ShowTimer": HttpForm(
        request=lambda fields: pb.GetTimerRequest(timer_id=raw_id(fields)),
        answer=_got,
        answered=_TIMER,
    ),
    "ShowTimerByKey": HttpForm(request=_by_key, answer=_got, answered=_TIMER),
    "ListPendingTimers": HttpForm(
        request=_page,
        answer=_list_answer,
        answered=object_schema(
            "TimerPage", {"timers": list_schema(_TIMER), "next_page_token": nullable(TEXT)}
        ),
    ),
    "CountPendingTimers": HttpForm(
        request=_count_request,
        answer=_count_answer,
        answered=object_schema(
            "TimerCount",
            {
                "pending": WHOLE,
                "within": list_schema(
                    object_schema("TimersWithin", {"horizon_ms": WHOLE, "pending": WHOLE})
                ),
                "clock_ms": MS,
                "next_page_token": nullable(TEXT),
            },
        ),
    ),
    **timer_change_forms.FORMS,
}
"""Name of an operation -> its form."""
