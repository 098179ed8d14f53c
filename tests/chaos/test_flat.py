"""Lines of histories become rows, whatever is missing in them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chaos.history import flat
from tests.chaos.world import SALT, id_of
from timer.model import timer_id

KINDS = {
    **dict.fromkeys(("topic", "group", "outcome", "on_conflict"), pa.string()),
    **dict.fromkeys(("epoch", "received_ms", "group_id"), pa.int64()),
    **dict.fromkeys(("start_ms", "end_ms", "delay_ms"), pa.int64()),
    **dict.fromkeys(("ids", "keys", "results", "existing"), pa.list_(pa.string())),
    **dict.fromkeys(("marks", "due_ms", "offsets", "fired_at_ms"), pa.list_(pa.int64())),
    "attempts": pa.list_(pa.int32()),
}


def lines(rows: list[dict[str, Any]], names: tuple[str, ...]) -> pa.Table:
    return pa.Table.from_pylist(rows, pa.schema([(name, KINDS[name]) for name in names]))


def asked(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = flat.asked(lines([*rows], flat.ASKED_OF)).to_pylist()
    return found


def test_ids_are_taken_apart_as_timer_id_puts_them_together() -> None:
    due = np.array([0, 1, 1_700_000_000_123, (1 << 48) - 1, 5], np.int64)
    seq = np.array([1, (1 << 48) - 1, 123_456_789, 7, 1 << 46], np.uint64)
    raw = timer_id.encode(due, seq, SALT)
    ids = [timer_id.to_text(raw[at : at + 15]) for at in range(0, len(raw), 15)]
    for some in (slice(None), slice(2, 4)):  # an array may begin anywhere in its buffers
        due_of, seq_of = flat.id_parts(pa.array(ids)[some])
        assert due_of.to_pylist() == due[some].tolist()
        assert seq_of.to_pylist() == seq[some].tolist()
    assert flat.id_parts(pa.array([ids[2].upper()]))[1].to_pylist() == [123_456_789]


def test_of_no_id_there_are_no_parts_and_what_is_no_id_has_nobodys() -> None:
    texts = [None, id_of(5, 7), "", "short", id_of(5, 7)[:-5] + "!bcde", "w" + id_of(5, 7)[1:]]
    due_ms, seq = flat.id_parts(pa.array(texts, pa.string()))
    assert seq.to_pylist() == [None, 7, *[flat.NOBODY] * 4]
    assert due_ms.to_pylist() == [None, 5, *[flat.NOBODY] * 4]
    assert flat.id_parts(pa.array([], pa.string()))[0].to_pylist() == []
    assert flat.id_parts(pa.array([None], pa.string()))[1].to_pylist() == [None]


def test_what_was_asked_is_one_row_per_timer() -> None:
    plain = {"topic": "t", "outcome": "ok", "on_conflict": None, "marks": [1, 2]}
    ids = [id_of(10, 1), id_of(20, 2)]
    rows = asked(
        plain | {"due_ms": [10, 20], "ids": ids},
        {"topic": "u", "outcome": "unknown", "marks": [3], "due_ms": None, "ids": None},
        plain | {"marks": [], "ids": []},
        {"topic": "u", "outcome": "ok", "marks": None},
    )
    nothing = {"key": None, "existing_seq": None, "on_conflict": "reject"}
    nothing |= {"least_due_ms": None, "most_due_ms": None}
    told = {"topic": "t", "outcome": "ok", "told": "SCHEDULED", **nothing}
    first = {"mark": 1, "asked_due_ms": 10, "id": ids[0], "answered_due_ms": 10, "answered_seq": 1}
    second = {"mark": 2, "asked_due_ms": 20, "id": ids[1], "answered_due_ms": 20, "answered_seq": 2}
    unsure = {"topic": "u", "outcome": "unknown", "mark": 3, "told": None, "asked_due_ms": None}
    unsure |= dict.fromkeys(("id", "answered_due_ms", "answered_seq")) | nothing
    assert rows == [told | first, told | second, unsure]


@pytest.mark.parametrize(
    "result", ["SCHEDULED", "REPLACED", "KEPT", "REJECTED", "NOT_PENDING", None]
)
def test_only_what_made_a_timer_has_its_id(result: str | None) -> None:
    line = {"topic": "t", "outcome": "ok", "on_conflict": "keep", "marks": [1], "keys": ["k"]}
    (row,) = asked(line | {"ids": [id_of(10, 4)], "results": [result], "existing": [id_of(10, 9)]})
    made = result in ("SCHEDULED", "REPLACED", None)
    assert (row["told"], row["key"], row["on_conflict"]) == (result or "SCHEDULED", "k", "keep")
    assert (row["existing_seq"], row["answered_seq"]) == (9, 4 if made else None)
    assert row["id"] == (id_of(10, 4) if made else None)


@pytest.mark.parametrize(
    ("outcome", "most"), [("ok", 129), ("unknown", None), ("fail", None), (None, None)]
)
def test_a_delay_is_due_between_what_the_clients_clock_says(
    outcome: str | None, most: int | None
) -> None:
    line = {"topic": "t", "outcome": outcome, "marks": [1, 2], "delay_ms": 100}
    rows = asked(line | {"start_ms": 20, "end_ms": 29, "ids": [id_of(1, 1), id_of(1, 2)]})
    assert [(row["least_due_ms"], row["most_due_ms"]) for row in rows] == [(120, most)] * 2


def test_deliveries_are_rows_and_a_list_that_is_too_short_ends_in_nulls() -> None:
    head = {"topic": "t", "group": "g", "epoch": 3, "received_ms": 99, "group_id": 4}
    line = {"offsets": [5, 6], "ids": [id_of(10, 1), id_of(20, 2)], "marks": [7, 8]}
    line |= {"attempts": [1, 2], "fired_at_ms": [11]}
    found = flat.given(lines([head | line, head | {"offsets": [4]}], flat.GIVEN_OF)).to_pylist()
    first = {"queue_offset": 5, "mark": 7, "attempt": 1, "fired_at_ms": 11, "due_ms": 10, "seq": 1}
    second = {"queue_offset": 6, "mark": 8, "attempt": 2, "due_ms": 20, "seq": 2}
    third = {"queue_offset": 4} | dict.fromkeys(("mark", "attempt", "due_ms", "seq"))
    none = {"fired_at_ms": None}
    assert found == [head | first, head | second | none, head | third | none]
