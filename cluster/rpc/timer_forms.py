"""Forms of timers: schedule, look up, cancel and reschedule over HTTP.

Ids of timers are text. Times of answers are Unix milliseconds. A result is the name of the outcome,
as in the Python client: timerclient/values/results.py.
"""

from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc import json_fields
from cluster.rpc.http_form import HttpForm
from cluster.rpc.json_bodies import LARGE_BYTES_MAX
from cluster.rpc.json_fields import Fields
from cluster.rpc.timer_rows import (
    MODE_SCHEMA,
    ROW_SCHEMA,
    request_of,
    row_of,
)
from timer.model import timer_id
from timer.model.timer_errors import AlreadyExistsError, NotFoundError
from timerclient.proto import timer_pb2 as pb
from timerclient.values import ids
from timerclient.values.results import ScheduleResult

_ID: Final = {"type": "string", "description": "a timer's id: 24 characters"}
_ID_OR_NULL: Final = {"type": ["string", "null"]}
_MS: Final = {"type": "integer", "description": "Unix milliseconds"}
_MS_OR_NULL: Final = {"type": ["integer", "null"], "description": "Unix milliseconds"}
_SCHEDULED: Final = {
    "result": {"type": "string", "enum": [each.name for each in ScheduleResult]},
    "id": _ID_OR_NULL,
    "due_ms": _MS_OR_NULL,
    "other_id": {
        "type": ["string", "null"],
        "description": "the timer that this one replaced, or that has its key",
    },
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
        if found["result"] == ScheduleResult.REJECTED.name:
            raise AlreadyExistsError("key", key, f"the pending timer {found['other_id']} has it")
        raise NotFoundError("pending timer with the key", key)
    return found | {"duplicate": answer.duplicate}


SCHEDULE: Final = HttpForm(
    request=_one,
    answer=_one_answer,
    body={**ROW_SCHEMA, "on_conflict": MODE_SCHEMA},
    answered={**_SCHEDULED, "duplicate": {"type": "boolean"}},
    bytes_max=LARGE_BYTES_MAX,
    takes_request_id=True,
)
FORMS: Final[Mapping[str, HttpForm]] = {"ScheduleTimer": SCHEDULE}
"""Name of an operation -> its form."""
