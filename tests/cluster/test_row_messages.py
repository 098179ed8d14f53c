"""Rows of the API: conversions to columns and back, and their refusals."""

import threading
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cluster.api import row_messages, settlements
from cluster.api.row_messages import columns_of, lease_in, row_answer, rows_of
from cluster.api.settlements import GatheredVerdicts, leases_in
from timer.model import timer_id
from timer.model.timer_errors import InvalidRequestError, NotReadyError
from timer.model.units import MonoMs, Now, UnixMs
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import decode_headers, encode_headers

SALT = 3
DUE_MS = 1_764_057_600_001


def row(**fields: Any) -> pb.TimerColumns:
    [columns] = columns_of(pb.ScheduleTimerRequest(topic="t", **fields)).timers
    return columns


def test_a_row_becomes_columns_and_no_timer_is_early() -> None:
    due = Timestamp(seconds=DUE_MS // 1000, nanos=1)
    one = row(payload=b"x", key="ä", headers={"b": "2", "a": "1"}, due=due)
    assert (one.payloads, [*one.payload_sizes], one.keys) == (b"x", [1], "ä".encode())
    assert [*one.due_ms] == [DUE_MS]
    assert [*decode_headers(one.headers).items()] == [("a", "1"), ("b", "2")]
    assert [*row(delay=Duration(seconds=1, nanos=500_000_000)).delay_ms] == [1_500]
    assert [*row(payload=b"x").delay_ms] == [0]
    assert [*row(delay_level=3).delay_level] == [3]
    traits = row(payload=b"x", ordering_key="o", priority=0)
    assert ([*traits.ordering_key_sizes], traits.ordering_keys) == ([1], b"o")
    assert ([*traits.priorities], [*row(payload=b"x").priorities]) == ([0], [])
    for signal in ({"key": "k"}, {"headers": {"a": "b"}}):
        assert [*row(**signal).delay_ms] == [0]
    request = pb.ScheduleTimerRequest(topic="t", request_id="r", on_conflict=pb.ON_CONFLICT_KEEP)
    request.delay_level = 1
    columns = columns_of(request)
    assert (columns.request_id, columns.on_conflict) == ("r", pb.ON_CONFLICT_KEEP)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"due": Timestamp(seconds=1 << 62)}, "due.seconds"),
        ({"due": Timestamp(nanos=-1)}, "due.nanos"),
        ({"due": Timestamp(nanos=10**9)}, "due.nanos"),
        ({"delay": Duration(seconds=-(1 << 62))}, "delay.seconds"),
        ({"delay": Duration(seconds=1, nanos=-1)}, "delay.nanos"),
        ({"payload": b"x", "headers": {"a": "x" * 65_536}}, "headers"),
        ({"payload": b"x", "headers": {"x" * 65_536: "a"}}, "headers"),
        ({"ordering_key": "o"}, "payload"),
    ],
)
def test_malformed_rows_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        row(**fields)
    assert refused.value.field == field


def test_answers_have_the_effective_due_time() -> None:
    raw = timer_id.encode(np.array([DUE_MS]), np.array([7], np.uint64), SALT)
    answer = row_answer(pb.ScheduleResponse(timer_ids=raw, duplicate=True), SALT)
    assert (answer.timer_id, answer.due.ToMilliseconds()) == (raw, DUE_MS)
    assert (answer.result, answer.duplicate) == (pb.SCHEDULE_RESULT_SCHEDULED, True)
    rejected = pb.ScheduleResponse(
        timer_ids=bytes(15), results=[pb.SCHEDULE_RESULT_REJECTED], other_ids=raw
    )
    answer = row_answer(rejected, SALT)
    assert (answer.timer_id, answer.HasField("due"), answer.other_id) == (b"", False, raw)


COLUMNS = pb.Deliveries(
    epoch=2,
    lease_id=9,
    queue_offsets=[4, 6],
    timer_ids=bytes(15) + b"\1" * 15,
    due_ms=[DUE_MS, -1],
    fired_at_ms=[DUE_MS, DUE_MS],
    attempts=[1, 2],
    payload_sizes=[1, 0],
    payloads=b"x",
    failures=[0, 1],
)


def test_deliveries_become_rows_with_leases() -> None:
    first, second = rows_of(COLUMNS).messages
    assert (first.payload, first.key, dict(first.headers)) == (b"x", "", {})
    assert (second.payload, second.attempts, second.failures) == (b"", 2, 1)
    assert (second.timer_id, second.due.ToMilliseconds()) == (b"\1" * 15, -1)
    assert [lease_in(each.lease) for each in (first, second)] == [(2, 9, 4), (2, 9, 6)]
    texts = encode_headers({"a": "1"})
    keyed = pb.Deliveries(key_sizes=[1, 0], keys=b"k", headers_sizes=[0, len(texts)], headers=texts)
    keyed.MergeFrom(COLUMNS)
    assert [each.key for each in rows_of(keyed).messages] == ["k", ""]
    assert [dict(each.headers) for each in rows_of(keyed).messages] == [{}, {"a": "1"}]
    assert [(each.ordering_key, each.priority) for each in (first, second)] == [("", 4), ("", 4)]
    traits = pb.Deliveries(ordering_key_sizes=[0, 1], ordering_keys=b"o", priorities=[4, 9])
    traits.MergeFrom(COLUMNS)
    ordered = [(each.ordering_key, each.priority) for each in rows_of(traits).messages]
    assert ordered == [("", 4), ("o", 9)]


def test_leases_of_several_deliveries_are_settled_apart_and_answered_in_order() -> None:
    other = pb.Deliveries()
    other.CopyFrom(COLUMNS)
    other.lease_id = 10
    a, b = (each.lease for each in rows_of(COLUMNS).messages)
    c, _ = (each.lease for each in rows_of(other).messages)
    parts = [*leases_in(pb.NackRequest(leases=[a, c, b], topic="t", delay_ms=5))]
    assert [(at, part.lease_id, [*part.offsets]) for at, part in parts] == [
        ([0, 2], 9, [4, 6]),
        ([1], 10, [4]),
    ]
    assert all(isinstance(part, pb.NackRequest) and part.delay_ms == 5 for _, part in parts)
    assert not any(part.leases for _, part in parts)
    answers: list[Any] = []
    gathered = GatheredVerdicts(3, answers.append)
    gathered.of([0, 2])(np.array([1, 2]))
    assert answers == []
    gathered.of([1])(np.array([3]))
    assert answers[0].tolist() == [1, 3, 2]
    gathered = GatheredVerdicts(2, answers.append)
    gathered.of([0])(NotReadyError("x"))
    gathered.of([1])(np.array([3]))
    assert isinstance(answers[1], NotReadyError)


def test_a_refused_later_lease_answers_the_request_instead_of_raising(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first lease's ack is under way already."""
    other = pb.Deliveries()
    other.CopyFrom(COLUMNS)
    other.lease_id = 10
    leases = [rows_of(each).messages[0].lease for each in (COLUMNS, other)]
    answers: list[Any] = []

    def settled(_: object, part: pb.AckRequest, __: object, done: Any) -> None:
        if part.lease_id == refused_id:
            raise NotReadyError("x")
        done(np.array([1]))

    monkeypatch.setattr(settlements, "settle", settled)
    asker: Any = None
    refused_id = 10
    request = pb.AckRequest(leases=leases, topic="t", group="g")
    [*settlements.settle_all(asker, request, Now(MonoMs(0), UnixMs(0)), answers.append)]
    assert isinstance(answers[0], NotReadyError)
    refused_id = 9
    with pytest.raises(NotReadyError):
        [*settlements.settle_all(asker, request, Now(MonoMs(0), UnixMs(0)), answers.append)]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"leases": [b"short"]}, "leases"),
        ({"leases": [b""]}, "leases"),
        ({"leases": [bytes(24)], "offsets": [1]}, "offsets"),
        ({"leases": [bytes(24)], "cumulative": True}, "cumulative"),
    ],
)
def test_malformed_leases_are_refused(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        [*leases_in(pb.AckRequest(topic="t", group="g", **more))]
    assert refused.value.field == field


async def test_many_rows_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(columns: pb.Deliveries) -> pb.Deliveries:
        threads.append(threading.get_ident())
        return columns

    monkeypatch.setattr(row_messages, "rows_of", noted)
    await row_messages.rows_beside(COLUMNS)
    await row_messages.rows_beside(pb.Deliveries(queue_offsets=range(65)))
    await row_messages.rows_beside(pb.Deliveries(queue_offsets=[1], headers=bytes(4097)))
    assert [each == threading.get_ident() for each in threads] == [True, False, False]
