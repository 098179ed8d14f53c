"""Requests in JSON: what is read of them, and the field and limit of each refusal."""

import json
from typing import Any
from unittest.mock import Mock, PropertyMock

import pytest

from cluster.rpc import json_bodies, json_fields, openapi
from cluster.rpc.field_names import with_field
from cluster.rpc.json_bodies import BodyAccount, BodyCharge, parse_object
from cluster.rpc.json_messages import check_message
from cluster.rpc.payload_json import payload_json
from cluster.rpc.route_forms import FORMS
from cluster.rpc.timer_forms import outcomes_of
from timer.leader.leader import KEYS_MAX
from timer.model.timer_errors import InvalidRequestError, NotReadyError, OverloadedError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import DUE_MS_MAX, decode_headers

TOPIC = {"topic": "orders"}
ID = "0" * 24


def scheduled(body: str | bytes | dict[str, Any]) -> pb.ScheduleRequest:
    data = json.dumps(body) if isinstance(body, dict) else body
    fields = parse_object(data.encode() if isinstance(data, str) else data)
    message = FORMS["ScheduleTimer"].message(TOPIC, fields)
    assert isinstance(message, pb.ScheduleRequest)
    return message


def refusal(body: str | bytes | dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        scheduled(body)
    assert len(str(refused.value)) < 500
    return refused.value


def test_timer_of_each_kind_of_payload_and_time() -> None:
    row = scheduled(
        {"json": {"ä": [1, None]}, "delay": 1.5, "key": "k", "headers": {"a": "b"}}
    ).timers[0]
    assert (row.payloads.decode(), [*row.payload_sizes]) == ('{"ä":[1,null]}', [15])
    assert decode_headers(row.headers) == {"content-type": "application/json", "a": "b"}
    own = {"content-type": "application/json; version=2"}
    assert decode_headers(scheduled({"json": 1, "headers": own}).timers[0].headers) == own
    assert (row.topic, [*row.delay_ms], row.keys) == ("orders", [1_500], b"k")
    assert scheduled({"json": None}).timers[0].payloads == b"null"
    text = scheduled({"payload": "ä", "due": "2026-11-25t08:00:00.0005z"}).timers[0]
    assert (text.payloads, text.headers) == ("ä".encode(), b"")
    assert [*text.due_ms] == [1_764_057_600_001 + 31_536_000_000]  # never early
    raw = scheduled({"payload_base64": "AP8=", "due_ms": DUE_MS_MAX}).timers[0]
    assert (raw.payloads, [*raw.due_ms]) == (b"\x00\xff", [DUE_MS_MAX])
    for some in ({"payload": ""}, {"delay": 0}):
        empty = scheduled({"key": None, "payload": None} | some).timers[0]
        assert (empty.payloads, [*empty.delay_ms], [*empty.key_sizes]) == (b"", [0], [])
    assert [*scheduled({"delay": 1, "due": None, "due_ms": None}).timers[0].delay_ms] == [1_000]
    for level in (3, 3.0, "3"):
        assert [*scheduled({"delay_level": level}).timers[0].delay_level] == [3]
    assert (
        scheduled({"on_conflict": "update", "key": "k", "delay": 1}).on_conflict
        == pb.ON_CONFLICT_UPDATE
    )


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("PT1H30M", 5_400_000),
        ("P1W", 604_800_000),
        ("P1DT0.25S", 86_400_250),
        ("PT1.001S", 1_001),
        ("PT1.0004S", 1_001),
        ("PT0S", 0),
    ],
)
def test_delay_is_seconds_or_a_duration(text: str, ms: int) -> None:
    assert [*scheduled({"delay": text}).timers[0].delay_ms] == [ms]
    assert [*scheduled({"delay": ms / 1000}).timers[0].delay_ms] == [ms]


@pytest.mark.parametrize(
    ("body", "field", "limit"),
    [
        ("{", "body", "must be JSON"),
        ("[]", "body", "JSON object"),
        ('{"payload": NaN}', "body", "NaN is no number of JSON"),
        ('{"json": [-Infinity]}', "body", "-Infinity is no number"),
        ('{"json": 1e999}', "body", "1e999 is beyond the range"),
        ('{"json": "\\ud800"}', "json", "UTF-8"),
        ('{"payload": "\\ud800"}', "payload", "lone surrogates"),
        ('{"key": "\\udfff"}', "key", "lone surrogates"),
        ('{"headers": {"\\udfff": "a"}}', "headers", "lone surrogates"),
        (b'{"payload": "\xff"}', "body", "utf-8"),
        (b'{"payload": "\xed\xa0\x80"}', "body", "utf-8"),
        (b'\xef\xbb\xbf{"payload": "a"}', "body", "must be JSON"),
        ('{"a": 1}'.encode("utf-16"), "body", "must be JSON"),
        ('{"json": {"a": 1, "a": 2}}', "body", "'a' is given twice"),
        ('{"json": ' + "[" * 30_000 + "]" * 30_000 + "}", "body", "900 levels"),
        ('{"json": ' + "9" * 5_000 + "}", "body", "4300"),
        ('{"json": [' + "0," * json_bodies.VALUES_MAX + "0]}", "body", "at most 100000"),
        ('{"payload": "' + "," * 200_000 + '"}', "body", "payload_base64"),
        ({}, "payload", "or one of due, due_ms, delay"),
        ({"key": "k", "payload": None, "delay": None}, "payload", "give it, json or"),
        ({"payload": 1}, "payload", "any other value is `json`"),
        ({"payload": "a", "json": 1}, "json", "not both"),
        ({"payload_base64": "a"}, "payload_base64", "must be base64"),
        ({"payload_base64": "Äa=="}, "payload_base64", "must be base64"),
        ({"payload_base64": 7}, "payload_base64", "must be a string"),
        ({"delay": -1}, "delay", "must be 0 to"),
        ({"delay": 10**400}, "delay", "must be 0 to"),
        ({"delay": "PT"}, "delay", "duration"),
        ({"delay": "P1M"}, "delay", "duration"),
        ({"delay": "PT٢S"}, "delay", "duration"),
        ({"delay": "1"}, "delay", "duration"),
        ({"delay": True}, "delay", "must be seconds"),
        ({"delay": {}}, "delay", "must be seconds"),
        ({"delay": 1, "due_ms": 2}, "due_ms", "only one of due_ms, delay"),
        ({"due": "2026-11-25T09:00:00"}, "due", "offset"),
        ({"due": "soon"}, "due", "RFC 3339"),
        ({"due": 1}, "due", "Unix time is due_ms"),
        ({"due": "1960-01-01T00:00:00Z"}, "due", "1970"),
        ({"due": "1970-01-21T18:49:16Z"}, "due", "1970-04-26T17:46:40.000Z or later"),
        ({"due_ms": 0}, "due_ms", "a delay of 0 means at once"),
        ({"payload": "p", "delay": None}, "delay", "must not be null"),
        ({"payload": "p", "due": None}, "due", "must not be null"),
        ({"payload": "p", "due_ms": None}, "due_ms", "must not be null"),
        ({"due_ms": -1}, "due_ms", f"must be 10000000000 to {DUE_MS_MAX}"),
        ({"due_ms": DUE_MS_MAX + 1}, "due_ms", f"must be 10000000000 to {DUE_MS_MAX}"),
        ({"due_ms": 10**300}, "due_ms", "must be 10000000000 to"),
        ({"due_ms": 1.5}, "due_ms", "whole number"),
        ({"due_ms": True}, "due_ms", "whole number"),
        ({"delay_level": 1 << 31}, "delay_level", "must be 0 to"),
        ({"key": 4711}, "key", "must be a string"),
        ({"headers": []}, "headers", "object of strings"),
        ({"headers": {"a": 1}}, "headers.a", "must be a string"),
        ({"headers": {"a": "b" * 65_536}}, "headers.a", "at most 65535 bytes"),
        (
            {"delay": 0, "on_conflict": "drop"},
            "on_conflict",
            "one of reject, replace, keep, update",
        ),
        ({"delay": 0, "on_conflict": 1}, "on_conflict", "must be a string"),
        ({"dealy": 1}, "dealy", "is not known; did you mean delay? known: json, payload"),
        ({"colour": 1}, "colour", "is not known; known: json, payload"),
        ({"topic": "other"}, "topic", "is not known"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusal_names_the_field_and_the_limit(
    body: str | bytes | dict[str, Any], field: str, limit: str
) -> None:
    error = refusal(body)
    assert (error.field, limit in error.limit) == (field, True), error
    assert "given'" not in str(error)


def settled(operation: str, body: dict[str, Any]) -> Any:
    named = {"topic": "orders", "group": "billing"}
    return FORMS[operation].message(named, parse_object(json.dumps(body).encode()))


def test_refusal_shows_a_text_in_one_pair_of_quotes() -> None:
    assert str(refusal('{"payload": "\\ud800"}')).startswith(r"payload = '\ud800': must have")


def test_refusal_shows_true_as_json_has_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"priority = true: must be a whole number"):
        json_fields.whole_number({"priority": True}, "priority", 0, 9)


def test_durations_of_consumers_are_seconds_or_iso() -> None:
    asked = settled("ReceiveMessages", {"max_messages": 5, "wait": "PT20S", "lease": 1.5})
    assert (asked.max_messages, asked.wait_ms, asked.lease_ms) == (5, 20_000, 1_500)
    assert settled("ReceiveMessages", {"start": "latest"}).start == pb.GROUP_START_LATEST
    held = {"lease_id": "3-4611686018427387903", "offsets": ["0", 18_446_744_073_709_551_615]}
    nack = settled("NackMessages", held | {"delay": "P1D", "detail": "no stock"})
    assert nack.detail == "no stock"
    assert (nack.epoch, nack.lease_id, nack.delay_ms) == (3, (1 << 62) - 1, 86_400_000)
    assert [*nack.offsets] == [0, (1 << 64) - 1]
    assert not settled("NackMessages", held).HasField("delay_ms")
    assert settled("NackMessages", held | {"delay": 0}).HasField("delay_ms")
    assert settled("AckMessages", held | {"cumulative": True}).cumulative


@pytest.mark.parametrize(
    ("operation", "body", "field"),
    [
        ("ReceiveMessages", {"max_messages": 1_001}, "max_messages"),
        ("ReceiveMessages", {"wait": 21}, "wait"),
        ("ReceiveMessages", {"lease": 0}, "lease"),
        ("ReceiveMessages", {"start": "middle"}, "start"),
        ("ReceiveMessages", {"group": "other"}, "group"),
        ("AckMessages", {"offsets": [1]}, "lease_id"),
        ("NackMessages", {"lease_id": "1-1", "offsets": [1], "detail": 7}, "detail"),
        ("AckMessages", {"lease_id": 7, "offsets": [1]}, "lease_id"),
        ("AckMessages", {"lease_id": "7", "offsets": [1]}, "lease_id"),
        ("AckMessages", {"lease_id": "1-1"}, "offsets"),
        ("AckMessages", {"lease_id": "1-1", "offsets": []}, "offsets"),
        ("AckMessages", {"lease_id": "1-1", "offsets": [-1]}, "offsets[0]"),
        ("AckMessages", {"lease_id": "1-1", "offsets": [1, None]}, "offsets[1]"),
        ("AckMessages", {"lease_id": "1-1", "offsets": [1.5]}, "offsets[0]"),
        ("AckMessages", {"lease_id": "1-1", "offsets": [1 << 64]}, "offsets[0]"),
        ("AckMessages", {"lease_id": "1-1", "offsets": [1], "cumulative": 1}, "cumulative"),
        ("NackMessages", {"lease_id": "1-1", "offsets": [1], "delay": -1}, "delay"),
        ("NackMessages", {"lease_id": "1-1", "offsets": [1], "delay": 2_592_001}, "delay"),
    ],
)
def test_refusal_of_consumers_names_the_field(
    operation: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        settled(operation, body)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"a":[1,2.5,null]}', {"json": {"a": [1, 2.5, None]}}),
        (b"NaN", {"payload": "NaN"}),
        (b"1e999", {"payload": "1e999"}),
        (b"{", {"payload": "{"}),
        (b'{"a":1,"a":2}', {"payload": '{"a":1,"a":2}'}),
        (b'"\xff"', {"payload_base64": "Iv8i"}),
        (b"[" * 101 + b"]" * 101, {"payload": "[" * 101 + "]" * 101}),
    ],
)
def test_payload_is_shown_as_json_if_it_can_be(payload: bytes, shown: dict[str, Any]) -> None:
    assert payload_json(payload, {"content-type": "Application/JSON; charset=utf-8"}) == shown
    assert "json" not in payload_json(payload, {})


def test_number_of_too_many_digits_is_refused_without_advice_for_python() -> None:
    assert str(refusal(f'{{"json": {"9" * 5_000}}}')).endswith("value has 5000 digits")


def test_outcomes_of_many_timers_take_one_copy_of_their_ids() -> None:
    looked = PropertyMock(return_value=bytes(range(30)))
    answer = Mock(results=[], other_ids=b"")
    type(answer).timer_ids = looked
    outcomes = outcomes_of(answer)
    assert [each["result"] for each in outcomes] == ["SCHEDULED"] * 2
    assert (len({each["id"] for each in outcomes}), looked.call_count) == (2, 1)


def test_error_of_a_timer_in_a_list_names_its_place() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        FORMS["ScheduleTimers"].message(TOPIC, {"timers": [{"delay": 0}, {"delay": -1}]})
    assert refused.value.field == "timers[1].delay"
    several: Any = FORMS["ScheduleTimers"].message(
        TOPIC,
        {"timers": [{"delay": 1}, {"payload": "b", "delay": 2, "key": "k"}, {"due_ms": 10**12}]},
    )
    assert [[*each.delay_ms, *each.due_ms] for each in several.timers] == [[1_000, 2_000], [10**12]]


def test_timer_that_found_no_room_is_not_said_to_be_missing() -> None:
    left = pb.RescheduleResponse(results=[pb.RESCHEDULE_RESULT_LEFT], timer_ids=bytes(15))
    with pytest.raises(NotReadyError, match="repeat the request"):
        FORMS["RescheduleTimer"].answer(pb.RescheduleRequest(timer_ids=bytes(15)), left)


@pytest.mark.parametrize(
    ("operation", "body", "field", "limit"),
    [
        ("CancelTimers", {}, "ids", "must be a list of 1 to 1024 ids of timers"),
        ("CancelTimers", {"ids": []}, "ids", "must be a list of 1 to 1024"),
        ("CancelTimers", {"ids": "a" * 24}, "ids", "must be a list of 1 to 1024"),
        ("CancelTimers", {"ids": [ID, 7]}, "ids[1]", "must be a string"),
        ("CancelTimers", {"ids": [ID, None]}, "ids[1]", "must be a string"),
        ("CancelTimers", {"ids": [ID, "z" * 24]}, "ids[1]", "must be 24 characters"),
        ("CancelTimersByKey", {"keys": ["k"] * 257}, "keys", "must be a list of 1 to 256 keys"),
        ("CancelTimersByKey", {"keys": ["k", ""]}, "keys[1]", "one character or more"),
        ("CancelTimersByKey", {"keys": ["k", "\ud800"]}, "keys[1]", "UTF-8"),
        ("CancelTimersByKey", {"keys": ["k", "l", "k"]}, "keys[2]", "must not repeat keys[0]"),
        ("CancelTimersByFilter", {"due_from": "today"}, "due_from", "RFC 3339"),
        ("CancelTimersByFilter", {"due_from_ms": 0}, "due_from_ms", "must be 10000000000 to"),
        ("CancelTimersByFilter", {"due_to_ms": 0}, "due_to_ms", "must be 10000000000 to"),
        ("CancelTimersByFilter", {"due_to": "1970-01-01T00:00:00Z"}, "due_to", "or later"),
        ("RescheduleTimersByFilter", {"delay": 1, "due_to_ms": 0}, "due_to_ms", "must be 1000"),
        ("AlterSeries", {"end": "1970-01-01T00:00:00Z"}, "end", "1970-01-01T00:00:00.001Z or l"),
        ("CancelTimersByFilter", {"page_token": "????"}, "page_token", "next_page_token of an"),
        ("RescheduleTimers", {"timers": [ID]}, "timers[0]", "must be an object"),
        ("RescheduleTimers", {"timers": [{"delay": 1}]}, "timers[0].id", "must be a string"),
        ("RescheduleTimers", {"timers": [{"id": ID}]}, "timers[0].delay", "give one of"),
        (
            "RescheduleTimers",
            {"timers": [{"id": ID, "delay": 1}, {"id": ID, "due_ms": 10**12}]},
            "timers[1].due_ms",
            "must be delay, as in timers[0]",
        ),
        (
            "RescheduleTimersByKey",
            {"timers": [{"key": "k", "delay": 1}, {"key": "k", "delay": 1}]},
            "timers[1].key",
            "must not repeat timers[0].key",
        ),
        ("RescheduleTimersByKey", {"timers": [{"id": ID}]}, "timers[0].id", "known: key, due"),
        ("RescheduleTimersByFilter", {}, "delay", "give one of"),
    ],
)
def test_refusal_of_many_changes_names_the_element(
    operation: str, body: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        FORMS[operation].message(TOPIC, body)
    assert (refused.value.field, limit in refused.value.limit) == (field, True), refused.value


def test_timer_of_many_that_found_no_room_is_left() -> None:
    results = [pb.RESCHEDULE_RESULT_RESCHEDULED, pb.RESCHEDULE_RESULT_LEFT]
    left = pb.RescheduleResponse(results=results, timer_ids=bytes([1] * 15 + [0] * 15))
    made = FORMS["RescheduleTimers"].answer(None, left)["timers"]
    assert [each["result"] for each in made] == ["RESCHEDULED", "LEFT"]
    assert made[1] == {"result": "LEFT", "id": None, "due_ms": None, "successor_id": None}


def test_large_bodies_share_one_account() -> None:
    account = BodyAccount()
    with BodyCharge(account) as first, BodyCharge(account) as second:
        first.hold(json_bodies.ACCOUNT_BYTES_MAX)
        with pytest.raises(OverloadedError):
            second.hold(1)
        first.hold(1)
        second.hold(1)
        assert account.bytes == 2
    assert account.bytes == 0


@pytest.mark.parametrize(
    ("message", "fields", "field", "limit"),
    [
        (pb.PeekRequest, {"from_offset": "a"}, "from_offset", "whole number"),
        (pb.PeekRequest, {"max_messages": -1}, "max_messages", "must be at least 0"),
        (pb.SeekGroupRequest, {"offset": 1, "time_ms": 1}, "to", "only one of offset, time_ms"),
        (pb.AlterPoliciesRequest, {"set": {"ttl_ms": 1.5}}, "set.ttl_ms", "whole number"),
        (pb.AlterPoliciesRequest, {"set": {"bogus": 1}}, "set.bogus", "known: delayed_delivery"),
        (pb.AlterPoliciesRequest, {"set": {"paused": "yes"}}, "set.paused", "true or false"),
        (pb.AlterPoliciesRequest, {"scope": 5}, "scope", "an object"),
        (pb.AlterPoliciesRequest, {"unset": "ttl_ms"}, "unset", "a list"),
        (pb.AlterPoliciesRequest, {"unset": ["paused", None]}, "unset[1]", "null"),
        (pb.CreateGroupRequest, {"settings": []}, "settings", "an object"),
        (pb.ChangeMembersRequest, {"change": "BOGUS"}, "change", "ADD, REPLACE, REMOVE"),
        (pb.ChangeMembersRequest, {"change": []}, "change", "of ADD, REPLACE, REMOVE"),
        (pb.SetLogLevelRequest, {"level": 5}, "level", "a string"),
        (pb.PeekRequest, {"from_offset": 1, "fromOffset": 1}, "fromOffset", "given, too"),
    ],
)
def test_field_of_a_message_of_the_contract_is_refused_with_its_name_and_limit(
    message: Any, fields: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as refused:
        check_message(fields, message.DESCRIPTOR)
    assert refused.value.field == field


def test_numbers_as_text_names_of_enums_and_null_are_fields_of_a_message() -> None:
    for fields in ({"offset": str((1 << 64) - 1)}, {"start": "EARLIEST"}, {"start": 1}):
        check_message(fields | {"topic": None}, pb.SeekGroupRequest.DESCRIPTOR)


def test_document_declares_the_errors_of_schedules_and_the_limits_of_lists() -> None:
    made = openapi.document()
    for path in ("", "/batch"):
        answers = made["paths"][f"/v1/topics/{{topic}}/timers{path}"]["post"]["responses"]
        assert {"200", "404", "409", "429", "default"} == answers.keys()
        assert "Retry-After" in answers["429"]["headers"]
    keys = made["components"]["schemas"]["CancelKeysBody"]["properties"]["keys"]
    assert keys["maxItems"] == KEYS_MAX


def test_each_nullable_schema_has_a_type() -> None:
    """In OpenAPI 3.0.3 `nullable` has no effect without a `type` beside it."""

    def typeless(schema: Any) -> list[Any]:
        if isinstance(schema, list):
            return [found for each in schema for found in typeless(each)]
        if not isinstance(schema, dict):
            return []
        mine = [schema] if schema.get("nullable") is True and "type" not in schema else []
        return mine + typeless([*schema.values()])

    assert typeless(openapi.document()) == []


def test_numbers_in_an_error_get_the_unit_of_the_field_and_names_stay() -> None:
    limit = "must be at most 2500 (of topic orders-2024-7)"
    said = pb.Error(field="delay_ms", message=f"delay_ms = -5: {limit}", limit=limit)
    made = with_field(said, "delay")
    assert made.limit == "must be at most 2.5 s (of topic orders-2024-7)"
    assert made.message == f"delay = -0.005 s: {made.limit}"
