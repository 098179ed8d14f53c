"""Forms of changes: cancel and reschedule timers over HTTP.

    DELETE /v1/timers/ID                        one timer; PATCH reschedules it
    DELETE /v1/topics/TOPIC/keys/KEY            one timer by its key, likewise
    POST   /v1/timers/cancel                    timers of any topics, by their ids
    POST   /v1/topics/TOPIC/keys/cancel         timers by their keys
    POST   /v1/topics/TOPIC/timers/cancel       timers that a filter selects, page by page
    POST   …/reschedule                         likewise

A list has one result for each element, in the same order.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cluster.rpc import json_fields
from cluster.rpc.field_names import KEYS, TIMERS, field_of_one, field_of_row
from cluster.rpc.grpc_errors import to_wire
from cluster.rpc.http_form import HttpForm
from cluster.rpc.json_bodies import LARGE_BYTES_MAX
from cluster.rpc.json_fields import Fields, field_error
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.schemas import (
    MOMENT,
    MS,
    TEXT,
    WHOLE,
    Schema,
    list_schema,
    nullable,
    object_schema,
    words,
)
from cluster.rpc.timer_rows import TIME_SCHEMA, TIMES, way_of
from timer.leader.leader import CANCEL_ROWS_MAX, KEYS_MAX
from timer.model import timer_id
from timer.model.timer_errors import HIDDEN, InvalidRequestError, NotFoundError, NotReadyError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import pending_timers
from timerclient.rows.rows import BOUND_LIMIT, DUE_MS_MIN, Way
from timerclient.values import ids
from timerclient.values.results import CancelResult, RescheduleResult

IDS_MAX: Final = CANCEL_ROWS_MAX
"""Ids of one request, as over gRPC."""
LEFT: Final = "LEFT"
"""Result of a timer that no entry of the log had room for. It is unchanged."""
NO_ID: Final = bytes(timer_id.SIZE)
ID: Final = TEXT | {"description": "a timer's id: 24 characters"}
ID_OR_NULL: Final = nullable(TEXT)


# ---- targets and times


def raw_id(fields: Fields) -> bytes:
    """Return the id in a path.

    Raises:
        InvalidRequestError: it is malformed.
    """
    return id_in("id", fields.get("id"))


def id_in(field: str, value: object) -> bytes:
    """Return an id. `field`: its place in the request.

    Raises:
        InvalidRequestError: it is malformed.
    """
    if not isinstance(value, str):
        raise field_error(field, value, "must be a string")
    try:
        return timer_id.from_text(value)
    except InvalidRequestError as error:
        wrong = error
    raise field_error(field, value, wrong.limit)


def _key(fields: Fields) -> pb.TimerKeys:
    return _timer_keys(fields, [json_fields.text(fields, "key").encode()], KEYS)


def _timer_keys(fields: Fields, keys: Sequence[bytes], place: str) -> pb.TimerKeys:
    """Return timers of a topic by their keys. `place`: of a key in the request, for errors.

    Raises:
        InvalidRequestError: a key is repeated.
    """
    first: dict[bytes, int] = {}
    for at, key in enumerate(keys):
        if (before := first.setdefault(key, at)) != at:
            limit = f"must not repeat {place.format(at=before, name='key')}"
            raise field_error(place.format(at=at, name="key"), key.decode(), limit)
    topic = json_fields.text(fields, "topic")
    return pb.TimerKeys(topic=topic, key_sizes=map(len, keys), keys=b"".join(keys))


def _listed_key(field: str, value: object) -> bytes:
    """Return a key in a list."""
    if not isinstance(value, str) or not value:
        raise field_error(field, value, "must be a string of one character or more")
    return json_fields.utf8(field, value)


def filter_of(fields: Fields) -> pb.TimerFilter:
    """Return the filter of path, query and body.

    Raises:
        InvalidRequestError: a field is wrong.
    """
    due_from_ms, due_to_ms = (
        json_fields.instant_ms(fields, name, DUE_MS_MIN, BOUND_LIMIT)
        for name in ("due_from", "due_to")
    )
    return pb.TimerFilter(
        topic=json_fields.text(fields, "topic"),
        due_from_ms=due_from_ms or 0,
        due_to_ms=due_to_ms or 0,
        key_prefix=json_fields.text(fields, "key_prefix"),
    )


def token_of(fields: Fields) -> bytes:
    """Return `page_token`; empty: there is none.

    Raises:
        InvalidRequestError: it is malformed.
    """
    token = json_fields.text(fields, "page_token")
    try:
        return base64.b64decode(token.encode(), b"-_", validate=True)
    except ValueError:
        raise field_error("page_token", token, "must be next_page_token of an answer") from None


def token_text(raw: bytes) -> str | None:
    """Return `next_page_token` of an answer. None: there is no further page."""
    return base64.urlsafe_b64encode(raw).decode() or None


def _time(fields: Fields) -> tuple[Way, int]:
    way = way_of(fields)
    if way is None:
        limit = f"give one of {', '.join(TIMES)}; a delay of 0: at once"
        raise InvalidRequestError("delay", HIDDEN, limit)
    return way


def _times(fields: Fields) -> dict[str, list[int]]:
    way, value = _time(fields)
    return {way: [value]}


# ---- cancel


def _cancel_ids(fields: Fields) -> pb.CancelRequest:
    given = json_fields.elements(fields, "ids", "ids of timers", IDS_MAX)
    raw = (id_in(f"ids[{at}]", each) for at, each in enumerate(given))
    return pb.CancelRequest(timer_ids=b"".join(raw))


def _cancel_keys(fields: Fields) -> pb.CancelRequest:
    given = json_fields.elements(fields, "keys", "keys", KEYS_MAX)
    keys = [_listed_key(f"keys[{at}]", each) for at, each in enumerate(given)]
    return pb.CancelRequest(keys=_timer_keys(fields, keys, KEYS))


def _cancel_filter(fields: Fields) -> pb.CancelRequest:
    return pb.CancelRequest(filter=filter_of(fields), page_token=token_of(fields))


def _cancel_answer(request: pb.CancelRequest, answer: pb.CancelResponse) -> Mapping[str, Any]:
    return _cancel_outcomes(request, answer)[0]


def _cancel_outcomes(request: pb.CancelRequest, answer: pb.CancelResponse) -> list[dict[str, Any]]:
    """Return the outcome of each timer."""
    raw = answer.timer_ids if request.HasField("keys") else request.timer_ids
    successors = pending_timers.successors(answer.successor_ids, len(answer.results))
    each = zip(answer.results, ids.split(raw), successors, strict=True)
    return [
        {
            "result": CancelResult(result).name,
            "id": timer_id.to_text(one) if one != NO_ID else None,
            "successor_id": successor,
        }
        for result, one, successor in each
    ]


# ---- reschedule


def _targets_and_times(
    fields: Fields, name: str, count_max: int
) -> tuple[list[bytes], dict[str, list[int]]]:
    """Return the targets and the times of a list of timers. `name`: id or key, of the targets.

    Raises:
        InvalidRequestError: one is wrong, or the times are given in different ways.
    """
    given = json_fields.elements(fields, "timers", "timers", count_max)
    read = id_in if name == "id" else _listed_key

    def move(one: Fields) -> tuple[bytes, Way, int]:
        return (read(name, one.get(name)), *_time(one))

    known = (name, *TIMES)
    moves = [json_fields.element("timers", at, one, known, move) for at, one in enumerate(given)]
    first = moves[0][1]
    for at, (_, way, _) in enumerate(moves):
        if way != first:
            limit = f"must be {field_of_one(first)}, as in timers[0]: give all times in one way"
            raise InvalidRequestError(f"timers[{at}].{field_of_one(way)}", HIDDEN, limit)
    return [target for target, _, _ in moves], {first: [value for _, _, value in moves]}


def _reschedule_ids(fields: Fields) -> pb.RescheduleRequest:
    raw, times = _targets_and_times(fields, "id", IDS_MAX)
    return pb.RescheduleRequest(timer_ids=b"".join(raw), **times)  # type: ignore[arg-type]


def _reschedule_keys(fields: Fields) -> pb.RescheduleRequest:
    keys, times = _targets_and_times(fields, "key", KEYS_MAX)
    return pb.RescheduleRequest(keys=_timer_keys(fields, keys, TIMERS), **times)  # type: ignore[arg-type]


def _reschedule_filter(fields: Fields) -> pb.RescheduleRequest:
    what, token = filter_of(fields), token_of(fields)
    return pb.RescheduleRequest(filter=what, page_token=token, **_times(fields))  # type: ignore[arg-type]


def _reschedule_answer(
    request: pb.RescheduleRequest, answer: pb.RescheduleResponse
) -> Mapping[str, Any]:
    [done] = pending_timers.reschedule_outcomes(answer)
    if done is None:
        raise NotReadyError("no entry had room for the timer: repeat the request")
    if done.timer is None:
        keys = request.keys
        name = keys.keys.decode() if keys.topic else timer_id.to_text(request.timer_ids)
        error = to_wire(NotFoundError("pending timer", name))
        more = {"result": done.result.name, "successor_id": done.replaced_by}
        raise ProblemError(error, more=more)
    return {"result": done.result.name, "id": done.timer.id, "due_ms": done.timer.due_ms}


def _reschedule_list_answer(_: Any, answer: pb.RescheduleResponse) -> Mapping[str, Any]:
    return {"timers": [*map(_outcome, pending_timers.reschedule_outcomes(answer))]}


def _outcome(done: pending_timers.Rescheduled | None) -> dict[str, Any]:
    timer = None if done is None else done.timer
    return {
        "result": LEFT if done is None else done.result.name,
        "id": None if timer is None else timer.id,
        "due_ms": None if timer is None else timer.due_ms,
        "successor_id": None if done is None else done.replaced_by,
    }


# ---- forms


def _targets(request: pb.CancelRequest | pb.RescheduleRequest) -> int:
    return len(request.keys.key_sizes) or len(request.timer_ids) // timer_id.SIZE


_CANCELLED: Final = object_schema(
    "CancelledTimer",
    {
        "result": words(
            *(each.name for each in CancelResult if each is not CancelResult.RESCHEDULED)
        ),
        "id": ID_OR_NULL,
        "successor_id": ID_OR_NULL,
    },
)
_RESCHEDULED: Final = object_schema("RescheduledTimer", {"result": TEXT, "id": ID, "due_ms": MS})
_CANCELLED_LIST: Final = object_schema("CancelledTimers", {"timers": list_schema(_CANCELLED)})
_RESCHEDULED_LIST: Final = object_schema(
    "RescheduledTimers",
    {
        "timers": list_schema(
            object_schema(
                "RescheduleOutcome",
                {
                    "result": words(*(each.name for each in RescheduleResult), LEFT)
                    | {"description": "LEFT: the timer is unchanged; send it again"},
                    "id": ID_OR_NULL | {"description": "of the new timer"},
                    "due_ms": nullable(MS),
                    "successor_id": ID_OR_NULL
                    | {"description": "the timer that fires instead of one rescheduled before"},
                },
            )
        )
    },
)
_FILTER: Final[dict[str, Schema]] = {
    "due_from": MOMENT | {"description": "effective due time at or after this one"},
    "due_from_ms": MS,
    "due_to": MOMENT | {"description": "before this time"},
    "due_to_ms": MS,
    "key_prefix": TEXT | {"description": "the beginning of the keys"},
    "page_token": TEXT
    | {"description": "next_page_token of the answer before; the first request has none"},
}
_MOVING_FILTER: Final = {**_FILTER, **TIME_SCHEMA}
_NEXT: Final = nullable(TEXT) | {"description": "null: the change is complete"}
_TIME: Final = object_schema("RescheduleBody", TIME_SCHEMA, optional=TIME_SCHEMA)


def _filter_form(
    request: Callable[[Fields], pb.CancelRequest | pb.RescheduleRequest],
    title: str,
    body: dict[str, Schema],
    count: str,
) -> HttpForm:
    """Return the form of a change by filter, with the name of the answer's field that counts."""
    number = WHOLE | {"description": "timers that this request changed; of the first request: 0"}
    return HttpForm(
        request=request,
        answer=lambda _, answer: {
            count: getattr(answer, count),
            "next_page_token": token_text(answer.next_page_token),
        },
        body=object_schema(title, body, optional=body),
        answered=object_schema(f"{count.title()}Page", {count: number, "next_page_token": _NEXT}),
    )


def _list_move_form(
    request: Callable[[Fields], pb.RescheduleRequest], what: str, by: dict[str, Schema], most: int
) -> HttpForm:
    """Return the form of moves of at most `most` listed timers, with the field that names each."""
    move = object_schema(f"{what}Move", by | TIME_SCHEMA, optional=TIME_SCHEMA)
    return HttpForm(
        request=request,
        answer=_reschedule_list_answer,
        body=object_schema(f"Reschedule{what}sBody", {"timers": list_schema(move, most)}),
        answered=_RESCHEDULED_LIST,
        bytes_max=LARGE_BYTES_MAX,
        field_in_json=lambda request, name: field_of_row(name, _targets(request), TIMERS),
    )


FORMS: Final[Mapping[str, HttpForm]] = {
    "CancelTimer": HttpForm(
        request=lambda fields: pb.CancelRequest(timer_ids=raw_id(fields)),
        answer=_cancel_answer,
        answered=_CANCELLED,
    ),
    "CancelTimerByKey": HttpForm(
        request=lambda fields: pb.CancelRequest(keys=_key(fields)),
        answer=_cancel_answer,
        answered=_CANCELLED,
    ),
    "CancelTimers": HttpForm(
        request=_cancel_ids,
        answer=lambda request, answer: {"timers": _cancel_outcomes(request, answer)},
        body=object_schema("CancelTimersBody", {"ids": list_schema(ID, IDS_MAX)}),
        answered=_CANCELLED_LIST,
        bytes_max=LARGE_BYTES_MAX,
    ),
    "CancelTimersByKey": HttpForm(
        request=_cancel_keys,
        answer=lambda request, answer: {"timers": _cancel_outcomes(request, answer)},
        body=object_schema("CancelKeysBody", {"keys": list_schema(TEXT, KEYS_MAX)}),
        answered=_CANCELLED_LIST,
        bytes_max=LARGE_BYTES_MAX,
        field_in_json=lambda request, name: field_of_row(name, _targets(request), KEYS),
    ),
    "CancelTimersByFilter": _filter_form(_cancel_filter, "CancelFilterBody", _FILTER, "cancelled"),
    "RescheduleTimer": HttpForm(
        request=lambda fields: pb.RescheduleRequest(timer_ids=raw_id(fields), **_times(fields)),  # type: ignore[arg-type]
        answer=_reschedule_answer,
        body=_TIME,
        answered=_RESCHEDULED,
    ),
    "RescheduleTimerByKey": HttpForm(
        request=lambda fields: pb.RescheduleRequest(keys=_key(fields), **_times(fields)),  # type: ignore[arg-type]
        answer=_reschedule_answer,
        body=_TIME,
        answered=_RESCHEDULED,
    ),
    "RescheduleTimers": _list_move_form(_reschedule_ids, "Timer", {"id": ID}, IDS_MAX),
    "RescheduleTimersByKey": _list_move_form(_reschedule_keys, "Key", {"key": TEXT}, KEYS_MAX),
    "RescheduleTimersByFilter": _filter_form(
        _reschedule_filter, "RescheduleFilterBody", _MOVING_FILTER, "rescheduled"
    ),
}
"""Name of an operation -> its form."""
