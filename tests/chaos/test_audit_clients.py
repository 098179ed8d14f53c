"""Tables of what clients say: requested timers, deliveries, runs of acks, lives of groups."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules.queries import query
from chaos.history import history
from chaos.oracle.story import LIFE
from chaos.oracle.tables import ACKS, EXPIRED, GROUPS
from tests.chaos.world import SALT, id_of
from timer.model import timer_id

pytestmark = pytest.mark.spark

NOBODY = -1
"""The due time and the seq of a malformed id."""


def rows_of(spark: SparkSession, name: str, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a query about lines, in order of their marks or offsets."""
    table = spark.createDataFrame([*lines], history.SCHEMA)
    order = "mark" if name == "asks" else "queue_offset"
    return [
        row.asDict() for row in query("clients", name, {"lines": table}).orderBy(order).collect()
    ]


def asked(spark: SparkSession, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    return rows_of(spark, "asks", *({"op": "schedule", "client": "c"} | line for line in lines))


def id_parts(spark: SparkSession, ids: Sequence[str | None]) -> list[tuple[int, int]]:
    """Return (due, seq) of ids."""
    line = {"op": "deliver", "client": "c", "offsets": [*range(len(ids))], "ids": [*ids]}
    return [(row["due_ms"], row["seq"]) for row in rows_of(spark, "given", line)]


def test_ids_are_taken_apart_as_timer_id_puts_them_together(spark: SparkSession) -> None:
    due = np.array([0, 1, 1_700_000_000_123, (1 << 48) - 1, 5], np.int64)
    seq = np.array([1, (1 << 48) - 1, 123_456_789, 7, 1 << 46], np.uint64)
    raw = timer_id.encode(due, seq, SALT)
    ids = [timer_id.to_text(raw[at : at + 15]) for at in range(0, len(raw), 15)]
    wanted = [*zip(due.tolist(), seq.tolist(), strict=True)]
    assert id_parts(spark, [*ids, ids[2].upper()]) == [*wanted, wanted[2]]


def test_of_no_id_there_are_no_parts_and_a_malformed_one_has_nobodys(spark: SparkSession) -> None:
    sound = id_of(5, 7)
    texts = [None, sound, "", "short", sound[:-5] + "!bcde", "w" + sound[1:], sound + "0"]
    assert id_parts(spark, texts) == [(None, None), (5, 7), *[(NOBODY, NOBODY)] * 5]


def test_what_was_asked_is_one_row_per_timer(spark: SparkSession) -> None:
    plain = {"topic": "t", "outcome": "ok", "on_conflict": None, "marks": [1, 2]}
    ids = [id_of(10, 1), id_of(20, 2)]
    rows = asked(
        spark,
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


def test_only_what_made_a_timer_has_its_id(spark: SparkSession) -> None:
    results = ["SCHEDULED", "REPLACED", "KEPT", "REJECTED", "NOT_PENDING", None]
    line = {"topic": "t", "outcome": "ok", "on_conflict": "keep", "keys": ["k"]}
    line |= {"ids": [id_of(10, 4)], "existing": [id_of(10, 9)]}
    rows = asked(
        spark, *(line | {"marks": [at], "results": [each]} for at, each in enumerate(results))
    )
    for row, result in zip(rows, results, strict=True):
        made = result in ("SCHEDULED", "REPLACED", None)
        assert (row["told"], row["key"], row["on_conflict"]) == (result or "SCHEDULED", "k", "keep")
        assert (row["existing_seq"], row["answered_seq"]) == (9, 4 if made else None)
        assert row["id"] == (id_of(10, 4) if made else None)


@pytest.mark.parametrize(
    ("outcome", "most"), [("ok", 129), ("unknown", None), ("fail", None), (None, None)]
)
def test_a_delay_is_due_between_what_the_clients_clock_says(
    spark: SparkSession, outcome: str | None, most: int | None
) -> None:
    line = {"topic": "t", "outcome": outcome, "marks": [1, 2], "delay_ms": 100}
    rows = asked(spark, line | {"start_ms": 20, "end_ms": 29, "ids": [id_of(1, 1), id_of(1, 2)]})
    assert [(row["least_due_ms"], row["most_due_ms"]) for row in rows] == [(120, most)] * 2


def test_deliveries_are_rows_and_a_list_that_is_too_short_ends_in_nulls(
    spark: SparkSession,
) -> None:
    head = {"topic": "t", "group": "g", "epoch": 3, "received_ms": 99, "group_id": 4}
    line = {"offsets": [5, 6], "ids": [id_of(10, 1), id_of(20, 2)], "marks": [7, 8]}
    line |= {"attempts": [1, 2], "fired_at_ms": [11]}
    said = {"op": "deliver", "client": "c"} | head
    found = rows_of(spark, "given", said | line, said | {"offsets": [4]})
    first = {"queue_offset": 5, "mark": 7, "attempt": 1, "fired_at_ms": 11, "due_ms": 10, "seq": 1}
    second = {"queue_offset": 6, "mark": 8, "attempt": 2, "due_ms": 20, "seq": 2}
    third = {"queue_offset": 4} | dict.fromkeys(("mark", "attempt", "due_ms", "seq"))
    none = {"fired_at_ms": None}
    assert found == [head | third | none, head | first, head | second | none]


def test_acks_are_found_in_the_runs_that_hold_them(spark: SparkSession) -> None:
    # Longer than a stretch, across its edges, of one message; nothing at 999, 1601 and 2000.
    runs = [(0, 999), (1000, 601), (1602, 1), (2001, 255)]
    acks = [("t", "g", *run) for run in runs] + [("t", "h", 0, 5000), ("u", "g", 0, 5000)]
    rows = [dict(zip(("topic", "group", "queue_offset", "count"), a, strict=True)) for a in acks]
    places = [0, 255, 256, 998, 999, 1000, 1024, 1600, 1601, 1602, 2000, 2001, 2255, 2256]
    told = ["ACKED", "ALREADY_ACKED"] * (len(places) // 2)
    line = {"op": "ack", "client": "c", "topic": "t", "group": "g", "outcome": "ok"}
    expired = line | {"op": "nack", "offsets": [7, 3000, 3001], "results": 3 * ["EXPIRED"]}
    over = {"topic": "t", "group": "g", "queue_offset": 3001}
    tables = {
        "lines": [line | {"offsets": places, "results": told}, expired],
        "acks": rows, "expired": [over],
    }  # fmt: skip
    schemas = {"acks": from_arrow_schema(ACKS), "expired": from_arrow_schema(EXPIRED)}
    known = {
        name: spark.createDataFrame(each, schemas.get(name, history.SCHEMA))
        for name, each in tables.items()
    }
    found = query("clients", "unkept", known).collect()
    assert sorted(row.queue_offset for row in found) == [999, 1601, 2000, 2256, 3000]


def test_group_of_which_a_delivery_does_not_tell_the_life_is_left_out(spark: SparkSession) -> None:
    def delivery(group: str, lease_id: int, group_id: int | None) -> dict[str, Any]:
        line = {
            "op": "deliver", "client": "c", "topic": "t", "group": group, "epoch": 1,
            "received_ms": 1, "lease_id": lease_id, "offsets": [lease_id],
            "marks": [lease_id], "ids": [id_of(1, lease_id)], "due_ms": [1],
            "fired_at_ms": [1], "attempts": [1],
        }  # fmt: skip
        return line if group_id is None else line | {"group_id": group_id}

    said = [
        delivery("sought", 1, 1), delivery("sought", 2, 7),
        delivery("mute", 3, 2), delivery("mute", 4, None),
        delivery("plain", 5, None),
    ]  # fmt: skip
    where = {"client": "c", "topic": "t", "group": "mute"}
    said += [where | {"op": op, "start_ms": 1} for op in ("open", "ack", "seek")]
    lines = spark.createDataFrame(said, history.SCHEMA)
    groups = [
        {"topic": "t", "group": group, "group_id": number, "sought": sought, "over": over}
        for number, group, sought, over in (
            (1, "sought", True, True), (7, f"sought{LIFE}7", True, False),
            (2, "mute", True, True), (8, f"mute{LIFE}8", True, False), (3, "plain", False, False),
        )
    ]  # fmt: skip
    tables = {"lines": lines, "groups": spark.createDataFrame(groups, from_arrow_schema(GROUPS))}
    told, given = (query("clients", f"{name}_by_group", tables) for name in ("lines", "given"))
    wanted = {("sought", 1), (f"sought{LIFE}7", 2), ("plain", 5)}
    assert {(row["group"], row["lease_id"]) for row in told.collect()} == wanted
    assert {(row["group"], row["queue_offset"]) for row in given.collect()} == wanted
    owed = {row["group"] for row in query("clients", "readers", tables | {"lines": told}).collect()}
    assert owed == {f"sought{LIFE}7", "plain"}
