"""What clients say, as tables: ids taken apart, runs of messages."""

from typing import Any

import numpy as np
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.testing import assertDataFrameEqual

from chaos.audit.rules import client_tables
from chaos.history import history
from chaos.oracle.story import LIFE
from chaos.oracle.tables import GROUPS
from tests.chaos.world import SALT, id_of
from timer.model import timer_id

pytestmark = pytest.mark.spark


def test_id_parts_are_those_that_timer_id_encodes(spark: SparkSession) -> None:
    due = np.array([0, 1, 1_700_000_000_123, (1 << 48) - 1, 5], np.int64)
    seq = np.array([1, (1 << 48) - 1, 123_456_789, 7, 1 << 46], np.uint64)
    raw = timer_id.encode(due, seq, SALT)
    ids = [timer_id.to_text(raw[at : at + 15]) for at in range(0, len(raw), 15)]
    rows = spark.createDataFrame([(text,) for text in ids], "id STRING")
    due_of, seq_of = client_tables.id_parts("id")
    wanted = [Row(due=d, seq=s) for d, s in zip(due.tolist(), seq.tolist(), strict=True)]
    assertDataFrameEqual(rows.select(due_of.alias("due"), seq_of.alias("seq")), wanted)


def test_messages_are_found_in_the_runs_that_hold_them(spark: SparkSession) -> None:
    slot = "topic STRING, `group` STRING, queue_offset BIGINT"
    # Longer than a stretch, across its edges, of one message; nothing at 999, 1601 and 2000.
    held = [(0, 999, 1), (1000, 601, 2), (1602, 1, 3), (2001, 255, 4)]
    runs = spark.createDataFrame(
        [("t", "g", first, count, number) for first, count, number in held]
        + [("t", "other", 0, 5000, 9), ("other", "g", 0, 5000, 9)],
        slot + ", count BIGINT, number INT",
    )
    places = (0, 255, 256, 998, 999, 1000, 1024, 1600, 1601, 1602, 2000, 2001, 2255, 2256)
    rows = spark.createDataFrame([("t", "g", at) for at in places], slot)
    found = client_tables.with_runs(rows, runs, "left").select("queue_offset", "number").collect()
    assert {row.queue_offset: row.number for row in found} == {
        at: next((n for first, count, n in held if first <= at < first + count), None)
        for at in places
    }
    assert len(found) == len(places)
    missing = client_tables.with_runs(rows, runs, "left_anti").collect()
    assert sorted(row.queue_offset for row in missing) == [999, 1601, 2000, 2256]


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
    table = spark.createDataFrame(groups, from_arrow_schema(GROUPS))
    told, given = client_tables.with_group_lives(lines, client_tables.deliveries(lines), table)
    wanted = {("sought", 1), (f"sought{LIFE}7", 2), ("plain", 5)}
    assert {(row["group"], row["lease_id"]) for row in told.collect()} == wanted
    assert {(row["group"], row["queue_offset"]) for row in given.collect()} == wanted
    owed = {row["group"] for row in client_tables.consumed(told, table).collect()}
    assert owed == {f"sought{LIFE}7", "plain"}
