"""Forms of timers: schedule, look up, cancel and reschedule over HTTP.

Ids of timers are text. Times of answers are Unix milliseconds. A result is the name of the outcome,
as in the Python client: timerclient/values/results.py.
"""

import base64
from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc import json_fields, payload_json
from cluster.rpc.grpc_errors import to_wire
from cluster.rpc.http_form import HttpForm
from cluster.rpc.json_bodies import LARGE_BYTES_MAX
from cluster.rpc.json_fields import Fields, refused
from cluster.rpc.problem_details import PROBLEM_SCHEMA, ProblemError
from cluster.rpc.schemas import FLAG, HEADERS, MS, TEXT, WHOLE, listed, named, nullable, words
from cluster.rpc.timer_rows import (
    MODE_SCHEMA,
    ROW,
    ROW_SCHEMA,
    TIME_SCHEMA,
    TIMES,
    TimerRow,
    request_of,
    row_of,
    way_of,
)
from timer.model import timer_id
from timer.model.timer_errors import (
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import pending_timers
from timerclient.rows.pending_timers import TimerInfo
from timerclient.values import ids
from timerclient.values.results import CancelResult, ScheduleResult, TimerState

PAGE_SIZE_MAX: Final = 1_000
_ID: Final = TEXT | {"description": "a timer's id: 24 characters"}
_ID_OR_NULL: Final = nullable(TEXT)
_SCHEDULED: Final = {
    "result": words(*(each.name for each in ScheduleResult)),
    "id": _ID_OR_NULL,
    "due_ms": nullable(MS),
    "other_id": _ID_OR_NULL
    | {"description": "the timer that this one replaced, or that has its key"},
}
_NO_ID: Final = bytes(timer_id.SIZE)


# ---- schedule


def _one(fields: Fields) -> pb.ScheduleRequest:
    return request_of(json_fields.text(fields, "topic"), [row_of(fields)], fields)


def outcomes_of(answer: pb.ScheduleResponse) -> list[dict[str, Any]]:
    """Return the outcome of each row of an answer."""
    count = len(answer.timer_ids) // timer_id.SIZE
    results = answer.results or [ScheduleResult.SCHEDULED] * count
    return [
        _outcome(
            result,
            answer.timer_ids[at * timer_id.SIZE : (at + 1) * timer_id.SIZE],
            answer.other_ids[at * timer_id.SIZE : (at + 1) * timer_id.SIZE],
        )
        for at, result in enumerate(results)
    ]


def _outcome(result: int, raw: bytes, other: bytes) -> dict[str, Any]:
    there = raw != _NO_ID
    return {
        "result": ScheduleResult(result).name,
        "id": timer_id.to_text(raw) if there else None,
        "due_ms": ids.due_ms_of(raw) if there else None,
        "other_id": timer_id.to_text(other) if other and other != _NO_ID else None,
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


def _many(fields: Fields) -> pb.ScheduleRequest:
    given = fields.get("timers")
    if not isinstance(given, list) or not given:
        raise refused("timers", given, "must be a list of one timer or more")
    rows = [_numbered(at, each) for at, each in enumerate(given)]
    return request_of(json_fields.text(fields, "topic"), rows, fields)


def _numbered(at: int, given: Any) -> TimerRow:
    """Return the row of a timer in a list; errors name its place."""
    if not isinstance(given, dict):
        raise refused(f"timers[{at}]", given, "must be an object")
    try:
        json_fields.check_known(given, ROW)
        return row_of(given)
    except InvalidRequestError as error:
        wrong = error
    raise InvalidRequestError(f"timers[{at}].{wrong.field}", wrong.value, wrong.limit)


def _many_answer(_: Any, answer: pb.ScheduleResponse) -> Mapping[str, Any]:
    return {"timers": outcomes_of(answer), "duplicate": answer.duplicate}


# ---- look up


_TIMER: Final = named(
    "Timer",
    {
        "id": _ID,
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
        "successor_id": _ID_OR_NULL
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


def _key(fields: Fields) -> pb.TimerKeys:
    key = json_fields.text(fields, "key").encode()
    return pb.TimerKeys(topic=json_fields.text(fields, "topic"), key_sizes=[len(key)], keys=key)


def _raw_id(fields: Fields) -> bytes:
    return timer_id.from_text(json_fields.text(fields, "id"))


def _got(request: pb.GetTimerRequest, answer: pb.GetTimerResponse) -> Mapping[str, Any]:
    return _document(pending_timers.info(answer, request.timer_id))


def _by_key(fields: Fields) -> pb.GetTimerRequest:
    topic, key = json_fields.text(fields, "topic"), json_fields.text(fields, "key")
    return pb.GetTimerRequest(topic=topic, key=key)


def _page(fields: Fields) -> pb.ListTimersRequest:
    token = json_fields.text(fields, "page_token")
    try:
        raw = base64.urlsafe_b64decode(token.encode())
    except ValueError:
        raise refused("page_token", token, "must be next_page_token of an answer") from None
    bounds = {f"due_{end}": json_fields.instant_ms(fields, f"due_{end}") for end in ("from", "to")}
    return pb.ListTimersRequest(
        filter=pb.TimerFilter(
            topic=json_fields.text(fields, "topic"),
            due_from_ms=bounds["due_from"] or 0,
            due_to_ms=bounds["due_to"] or 0,
            key_prefix=json_fields.text(fields, "key_prefix"),
        ),
        page_size=json_fields.whole(fields, "page_size", 1, PAGE_SIZE_MAX),
        page_token=raw,
    )


def _listed(request: pb.ListTimersRequest, answer: pb.ListTimersResponse) -> Mapping[str, Any]:
    found = pending_timers.infos(request.filter.topic, answer.timers)
    token = base64.urlsafe_b64encode(answer.next_page_token).decode()
    return {"timers": [_document(each) for each in found], "next_page_token": token or None}


def _counted(_: Any, answer: pb.CountTimersResponse) -> Mapping[str, Any]:
    within = zip(answer.horizon_ms, answer.within, strict=True)
    return {
        "pending": answer.pending,
        "within": [{"horizon_ms": horizon, "pending": count} for horizon, count in within],
        "clock_ms": answer.clock_ms,
    }


# ---- cancel and reschedule


def _cancelled(request: pb.CancelRequest, answer: pb.CancelResponse) -> Mapping[str, Any]:
    raw = answer.timer_ids if request.HasField("keys") else request.timer_ids
    [successor] = pending_timers.successors(answer.successor_ids, 1)
    return {
        "result": CancelResult(answer.results[0]).name,
        "id": timer_id.to_text(raw) if raw != _NO_ID else None,
        "successor_id": successor,
    }


def _times(fields: Fields) -> dict[str, list[int]]:
    way = way_of(fields)
    if way is None:
        limit = f"give one of {', '.join(TIMES)}; a delay of 0: at once"
        raise InvalidRequestError("delay", None, limit)
    return {way[0]: [way[1]]}


def _rescheduled(request: pb.RescheduleRequest, answer: pb.RescheduleResponse) -> Mapping[str, Any]:
    [done] = pending_timers.rescheduled(answer)
    if done is None:
        raise NotReadyError("no entry had room for the timer: repeat the request")
    if done.timer is None:
        keys = request.keys
        name = keys.keys.decode() if keys.topic else timer_id.to_text(request.timer_ids)
        error = to_wire(NotFoundError("pending timer", name))
        more = {"result": done.result.name, "successor_id": done.replaced_by}
        raise ProblemError(error, more=more)
    return {"result": done.result.name, "id": done.timer.id, "due_ms": done.timer.due_ms}


_CANCELLED: Final = named(
    "CancelledTimer",
    {
        "result": words(
            *(each.name for each in CancelResult if each is not CancelResult.RESCHEDULED)
        ),
        "id": _ID_OR_NULL,
        "successor_id": _ID_OR_NULL,
    },
)
_RESCHEDULED: Final = named("RescheduledTimer", {"result": TEXT, "id": _ID, "due_ms": MS})
_ROW_AND_MODE: Final = {**ROW_SCHEMA, "on_conflict": MODE_SCHEMA}
_BODY: Final = named("ScheduleTimerBody", _ROW_AND_MODE, optional=_ROW_AND_MODE)
_TIMES: Final = named("RescheduleBody", TIME_SCHEMA, optional=TIME_SCHEMA)
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
        answered=named("ScheduledTimer", {**_SCHEDULED, "duplicate": FLAG}),
        bytes_max=LARGE_BYTES_MAX,
        takes_request_id=True,
    ),
    "ScheduleTimers": HttpForm(
        request=_many,
        answer=_many_answer,
        body=named(
            "ScheduleTimersBody",
            {
                "timers": listed(named("NewTimer", ROW_SCHEMA, optional=ROW_SCHEMA)),
                "on_conflict": MODE_SCHEMA,
            },
            optional=("on_conflict",),
        ),
        answered=named(
            "ScheduledTimers",
            {"timers": listed(named("TimerOutcome", _SCHEDULED)), "duplicate": FLAG},
        ),
        bytes_max=LARGE_BYTES_MAX,
        takes_request_id=True,
    ),
    "StreamTimers": HttpForm(
        request=_one,
        answer=lambda _, answer: outcomes_of(answer)[0] | {"duplicate": answer.duplicate},
        body=_BODY,
        answered=named("StreamedTimer", _LINE, optional=[name for name in _LINE if name != "line"]),
        takes_request_id=True,
    ),
    "ShowTimer": HttpForm(
        request=lambda fields: pb.GetTimerRequest(timer_id=_raw_id(fields)),
        answer=_got,
        answered=_TIMER,
    ),
    "ShowTimerByKey": HttpForm(request=_by_key, answer=_got, answered=_TIMER),
    "ListPendingTimers": HttpForm(
        request=_page,
        answer=_listed,
        answered=named("TimerPage", {"timers": listed(_TIMER), "next_page_token": nullable(TEXT)}),
    ),
    "CountPendingTimers": HttpForm(
        request=lambda fields: pb.CountTimersRequest(topic=json_fields.text(fields, "topic")),
        answer=_counted,
        answered=named(
            "TimerCount",
            {
                "pending": WHOLE,
                "within": listed(named("TimersWithin", {"horizon_ms": WHOLE, "pending": WHOLE})),
                "clock_ms": MS,
            },
        ),
    ),
    "CancelTimer": HttpForm(
        request=lambda fields: pb.CancelRequest(timer_ids=_raw_id(fields)),
        answer=_cancelled,
        answered=_CANCELLED,
    ),
    "CancelTimerByKey": HttpForm(
        request=lambda fields: pb.CancelRequest(keys=_key(fields)),
        answer=_cancelled,
        answered=_CANCELLED,
    ),
    "RescheduleTimer": HttpForm(
        request=lambda fields: pb.RescheduleRequest(timer_ids=_raw_id(fields), **_times(fields)),  # type: ignore[arg-type]
        answer=_rescheduled,
        body=_TIMES,
        answered=_RESCHEDULED,
    ),
    "RescheduleTimerByKey": HttpForm(
        request=lambda fields: pb.RescheduleRequest(keys=_key(fields), **_times(fields)),  # type: ignore[arg-type]
        answer=_rescheduled,
        body=_TIMES,
        answered=_RESCHEDULED,
    ),
}
"""Name of an operation -> its form."""
