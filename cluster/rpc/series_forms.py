"""Forms of series: recurring timers over HTTP.

    {"json": {"kind": "sales"}, "cron": "0 7 * * MON-FRI", "zone": "Europe/Berlin"}

The fields are those of SeriesFields. Requests have durations and times as new timers have them
(timer_rows.py), answers have milliseconds. A change keeps the fields that are absent or null. This
includes `json`: generated clients send null for each field that their caller has not set.
"""

from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc import json_fields, payload_json
from cluster.rpc.http_form import HttpForm
from cluster.rpc.json_fields import Fields
from cluster.rpc.schemas import (
    FLAG,
    HEADERS,
    MOMENT,
    MS,
    TEXT,
    WHOLE,
    Schema,
    list_schema,
    nullable,
    object_schema,
    span,
    words,
)
from cluster.rpc.timer_rows import CONTENT_SCHEMA, content_of
from timer.model import timer_id
from timer.model.recurrence import COUNT_MAX, EVERY_MS_MAX, EVERY_MS_MIN, TIMES_MAX
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.series_fields import CONFLICTS, MISFIRES

PAGE_SIZE_MAX: Final = 100
"""Series of one page. Each has up to 16 KiB, which JSON may make six times as long."""
PREVIEW_DEFAULT: Final = 5
_MISFIRE_NAMES: Final = {number: name for name, number in MISFIRES.items()}


# ---- requests


def _definition(fields: Fields, *, new: bool) -> pb.SeriesFields:
    """Return the fields that a request gives. `new`: of a whole definition."""
    payload, headers = content_of(fields)
    out = pb.SeriesFields(
        every_ms=json_fields.span_ms(fields, "every", EVERY_MS_MAX, EVERY_MS_MIN),
        start_ms=json_fields.instant_ms(fields, "start"),
        end_ms=json_fields.instant_ms(fields, "end"),
        payload=payload,
        headers=headers,
    )
    for name, value in (
        ("cron", json_fields.text(fields, "cron")),
        ("zone", json_fields.text(fields, "zone")),
        ("max_count", json_fields.whole_number(fields, "max_count", 0, COUNT_MAX)),
        ("misfire", json_fields.choice(fields, "misfire", MISFIRES, "fire_once")),
        ("paused", json_fields.flag(fields, "paused")),
    ):
        if fields.get(name) is not None:
            setattr(out, name, value)
    if (out.every_ms and out.cron) or (new and not (out.every_ms or out.cron)):
        given = "both" if out.cron else "neither"
        raise json_fields.field_error("every, cron", given, "exactly one must be given")
    return out


def _topic_and_key(fields: Fields) -> tuple[str, str]:
    """Return topic and key."""
    return json_fields.text(fields, "topic"), json_fields.text(fields, "key")


def _create(fields: Fields) -> pb.CreateSeriesRequest:
    topic, key = _topic_and_key(fields)
    return pb.CreateSeriesRequest(
        topic=topic,
        key=key,
        fields=_definition(fields, new=True),
        alter=bool(json_fields.choice(fields, "on_conflict", CONFLICTS, "reject")),
    )


def _alter(fields: Fields) -> pb.AlterSeriesRequest:
    topic, key = _topic_and_key(fields)
    given = {name: value for name, value in fields.items() if value is not None}
    return pb.AlterSeriesRequest(topic=topic, key=key, fields=_definition(given, new=False))


def _delete(fields: Fields) -> pb.DeleteSeriesRequest:
    topic, key = _topic_and_key(fields)
    return pb.DeleteSeriesRequest(topic=topic, key=key)


def _preview(fields: Fields) -> pb.CreateSeriesRequest:
    return pb.CreateSeriesRequest(
        topic=json_fields.text(fields, "topic"),
        key="preview",  # the contract requires one, and ignores it
        fields=_definition(fields, new=True),
        preview=json_fields.whole_number(fields, "next_times", 1, TIMES_MAX, PREVIEW_DEFAULT),
    )


def _get(fields: Fields) -> pb.GetSeriesRequest:
    topic, key = _topic_and_key(fields)
    times = json_fields.whole_number(fields, "next_times", 0, TIMES_MAX)
    return pb.GetSeriesRequest(topic=topic, key=key, next_times=times)


def _list(fields: Fields) -> pb.ListSeriesRequest:
    return pb.ListSeriesRequest(
        topic=json_fields.text(fields, "topic"),
        after_id=json_fields.whole_number(fields, "page_token", 0, rows.UINT64_MAX),
        page_size=json_fields.whole_number(fields, "page_size", 1, PAGE_SIZE_MAX, PAGE_SIZE_MAX),
    )


# ---- answers


def _document(series: pb.Series) -> dict[str, Any]:
    fields = series.fields
    headers = rows.decode_headers(fields.headers)
    return {
        "id": str(series.series_id),
        "topic": series.topic,
        "key": series.key,
        "every_ms": fields.every_ms or None,
        "cron": fields.cron or None,
        "zone": fields.zone or None,
        "start_ms": fields.start_ms or None,
        "end_ms": fields.end_ms or None,
        "max_count": fields.max_count or None,
        "misfire": _MISFIRE_NAMES[fields.misfire],
        "paused": fields.paused,
        "finished": series.finished,
        "ended": series.ended,
        "timer_id": timer_id.to_text(series.timer_id) if series.timer_id else None,
        "planned_ms": series.planned_ms or None,
        "headers": headers,
        **payload_json.payload_json(fields.payload, headers),
    }


def _list_answer(_: Any, answer: pb.ListSeriesResponse) -> Mapping[str, Any]:
    return {
        "series": [_document(each) for each in answer.series],
        "next_page_token": str(answer.series[-1].series_id) if answer.more else None,
    }


# ---- schemas

_MISFIRE: Final = words(*MISFIRES)
_DEFINITION: Final = {
    **CONTENT_SCHEMA,
    "every": span("the interval; this or cron"),
    "cron": TEXT | {"description": "five fields, six with seconds first, or a name: @daily"},
    "zone": TEXT | {"description": "IANA time zone of cron; default: UTC"},
    "start": MOMENT,
    "start_ms": MS,
    "end": MOMENT,
    "end_ms": WHOLE | {"description": "Unix milliseconds; 0: no end"},
    "max_count": WHOLE | {"description": "occurrences at most; 0: no limit"},
    "misfire": _MISFIRE,
    "paused": FLAG,
}
_SERIES: Final = {
    "id": TEXT,
    "topic": TEXT,
    "key": TEXT,
    "every_ms": nullable(WHOLE),
    "cron": nullable(TEXT),
    "zone": nullable(TEXT),
    "start_ms": nullable(MS),
    "end_ms": nullable(MS),
    "max_count": nullable(WHOLE),
    "misfire": _MISFIRE,
    "paused": FLAG,
    "finished": FLAG | {"description": "its end or its count is reached"},
    "ended": WHOLE | {"description": "occurrences that are over"},
    "timer_id": nullable(TEXT) | {"description": "of the pending occurrence"},
    "planned_ms": nullable(MS) | {"description": "of the next occurrence, in Unix milliseconds"},
    "headers": HEADERS,
    **payload_json.SCHEMA,
}
_TIMES: Final = {
    "next_times_ms": list_schema(WHOLE)
    | {"description": "planned times in Unix milliseconds, the pending occurrence first"}
}
_PREVIEW: Final = {
    **_DEFINITION,
    "next_times": WHOLE | {"description": f"1 to {TIMES_MAX}; default: {PREVIEW_DEFAULT}"},
}
_CONFLICT: Final = {
    "on_conflict": words(*CONFLICTS)
    | {"description": "if a series of another definition has the key; default: reject"}
}
_CREATION: Final = {**_DEFINITION, **_CONFLICT}
_EXISTED: Final = {"existed": FLAG | {"description": "a series had the key"}}


def _answer_schema(name: str, **more: Schema) -> Schema:
    return object_schema(name, {**_SERIES, **more}, optional=payload_json.SCHEMA)


_BODY: Final = object_schema("SeriesDefinition", _DEFINITION, optional=_DEFINITION)
_LIST: Final = HttpForm(
    request=_list,
    answer=_list_answer,
    answered=object_schema(
        "SeriesPage",
        {"series": list_schema(_answer_schema("Series")), "next_page_token": nullable(TEXT)},
    ),
)
FORMS: Final[Mapping[str, HttpForm]] = {
    "CreateSeries": HttpForm(
        request=_create,
        answer=lambda _, answer: _document(answer.series) | {"existed": answer.existed},
        body=object_schema("SeriesCreation", _CREATION, optional=_CREATION),
        answered=_answer_schema("CreatedSeries", **_EXISTED),
    ),
    "PreviewSeries": HttpForm(
        request=_preview,
        answer=lambda _, answer: {"next_times_ms": [*answer.next_ms]},
        body=object_schema("PreviewBody", _PREVIEW, optional=_PREVIEW),
        answered=object_schema("NextTimes", _TIMES),
    ),
    "ShowSeries": HttpForm(
        request=_get,
        answer=lambda _, answer: _document(answer.series) | {"next_times_ms": [*answer.next_ms]},
        answered=_answer_schema("SeriesAndTimes", **_TIMES),
    ),
    "AlterSeries": HttpForm(
        request=_alter,
        answer=lambda _, answer: _document(answer.series),
        body=_BODY,
        answered=_answer_schema("Series"),
    ),
    "DeleteSeries": HttpForm(
        request=_delete,
        answer=lambda _, answer: {},
    ),
    "ListSeries": _LIST,
    "ListAllSeries": _LIST,
}
"""Name of an operation -> its form."""
