"""Found: who hands out after its epoch, or what has expired; acks that nobody asked for."""

from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit import job
from chaos.audit.job import unasked_acks
from chaos.audit.rules.queries import BOUNDS, query
from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.history.history_check import check_line
from chaos.oracle.story import LIFE
from chaos.oracle.tables import ACKS, CARRIED, GROUPS, TTLS
from tests.chaos.evidence import evidence_of
from tests.chaos.world import id_of

pytestmark = pytest.mark.spark

HEAD = {"client": "c", "topic": "t", "group": "g"}
BEGAN_MS = {1: 0, 4: 5_000, 5: None, 6: 9_000}
EPOCHS = [
    Row(epoch=number, since_ms=0, entries=1, last=1, began_ms=at_ms, fired_ms=None)
    for number, at_ms in BEGAN_MS.items()
]


def test_an_epoch_begins_with_what_its_leader_writes_first(spark: SparkSession) -> None:
    # The header of EPOCH has the time of the entry before it: no clock is asked.
    entries = [
        (1, 1, "EPOCH", 0), (2, 1, "TOPIC", 0), (3, 1, "FIRE", 70), (4, 4, "EPOCH", 70),
        (5, 4, "CHECKPOINT", 5_000), (6, 4, "FIRE", 5_100), (7, 5, "EPOCH", 5_100),
        (8, 6, "EPOCH", 5_100), (9, 6, "GROUP", 9_000),
    ]  # fmt: skip
    common = spark.createDataFrame(
        entries, "index BIGINT, epoch BIGINT, kind STRING, time_ms BIGINT"
    )
    rows = query("logs", "epochs", {"common": common}).collect()
    assert {row["epoch"]: row["began_ms"] for row in rows} == BEGAN_MS
    assert [row["fired_ms"] for row in rows] == [70, 5_100, None, None]


def given(epoch: int, at_ms: int | None, lease_id: int = 1) -> dict[str, Any]:
    columns = {"offsets": [3], "ids": ["0" * 24], "marks": [3], "due_ms": [5], "attempts": [1]}
    when = {"received_ms": 9, "epoch": epoch, "handed_out_ms": at_ms, "lease_id": lease_id}
    return {"op": "deliver", "fired_at_ms": [6]} | HEAD | columns | when


def lines_of(spark: SparkSession, lines: list[dict[str, Any]]) -> DataFrame:
    assert [complaint for line in lines for complaint in check_line(line)] == []
    return spark.createDataFrame(lines, history.SCHEMA)


def story_of(spark: SparkSession, ttls: Sequence[Any] = ()) -> dict[str, DataFrame]:
    return {
        "ttls": spark.createDataFrame([*ttls], from_arrow_schema(TTLS)),
        "groups": spark.createDataFrame([], from_arrow_schema(GROUPS)),
    }


def test_who_hands_out_after_the_next_epoch_began_is_found_beyond_what_clocks_may_differ(
    spark: SparkSession,
) -> None:
    lines = lines_of(
        spark,
        [
            given(1, 4_000),
            given(1, 5_100),  # as far as clocks may differ
            given(1, 5_101, 2),
            given(1, None),
            given(4, 8_000),
            given(4, 20_000, 3),
            given(5, 20_000, 4),
            given(6, 20_000),
        ],
    )
    none = story_of(spark)
    found = evidence_of(lines, none, EPOCHS, Clocks(0, 100)).violations("handouts")
    rows = found.pop("deposed_handed_out").orderBy("epoch").collect()
    assert not found
    assert [(row["epoch"], row["lease_id"], row["over_ms"]) for row in rows] == [
        (1, 2, 5_000),
        (4, 3, 9_000),
        (5, 4, 9_000),
    ]
    for known, error_ms in ((EPOCHS, None), (EPOCHS[:1], 100), (EPOCHS, 60_000)):
        found = evidence_of(lines, none, known, Clocks(0, error_ms)).violations("handouts")
        assert not any(rows.head(1) for rows in found.values())


def test_what_is_handed_out_long_after_its_life_is_found(spark: SparkSession) -> None:
    def of(topic: str, *messages: tuple[int, int], at_ms: int | None) -> dict[str, Any]:
        offsets, due_ms = zip(*messages, strict=True)
        columns = ("marks", "due_ms", "attempts", "fired_at_ms")
        line = given(1, at_ms) | {"topic": topic, "offsets": [*offsets]}
        line |= {name: [1] * len(messages) for name in columns}
        return line | {"ids": [id_of(due, at) for at, due in zip(offsets, due_ms, strict=True)]}

    at_ms = 100_000
    lines = lines_of(
        spark,
        [
            of("t", (1, at_ms - 50), (2, at_ms - 51), (3, at_ms), at_ms=at_ms),
            of("t", (4, at_ms - 51), at_ms=None),
            of("t", (5, 9), at_ms=40_000),  # it had no time to live then
            of("t", (6, 9), at_ms=50_000 + BOUNDS["policy_ms"] - 1),  # nor had it just before
            of("t", (7, 9), at_ms=50_000 + BOUNDS["policy_ms"]),
            of("longer", (8, at_ms - 60_000), (9, at_ms - 60_001), at_ms=at_ms),
            of("free", (10, 9), at_ms=at_ms),
        ],
    )
    ttls = [("t", 0, 0), ("t", 50_000, 50), ("longer", 0, 60_000), ("longer", 99_000, 50)]
    story = story_of(spark, ttls)
    found = evidence_of(lines, story, EPOCHS[:1], Clocks(0, None)).violations("handouts")
    rows = found.pop("outlived").orderBy("offset").collect()
    assert [(row["topic"], row["offset"]) for row in rows] == [("t", 2), ("t", 7), ("longer", 9)]
    assert not found


def test_acks_that_nobody_asked_for_are_counted_unless_there_are_too_many(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ack(*offsets: int, outcome: str = "ok", **other: Any) -> dict[str, Any]:
        results = {"results": ["ACKED"] * len(offsets)} if outcome == "ok" else {}
        span = {"start_ms": 1, "end_ms": 2, "outcome": outcome}
        return {"op": "ack", "offsets": [*offsets]} | HEAD | span | results | other

    topics = ("t", "other", "lived", "unread")
    lines = lines_of(
        spark,
        [
            *({"op": "open", "start_ms": 0} | HEAD | {"topic": topic} for topic in topics[:3]),
            {"op": "open", "start_ms": 0} | HEAD | {"group": "sought"},
            ack(1, 2, 5),
            ack(3, outcome="unknown"),
            ack(4, outcome="fail"),  # found: it had no effect
            ack(9, topic="other"),
        ],
    )

    def acked(offset: int, count: int, topic: str = "t", group: str = "g") -> tuple[Any, ...]:
        return (topic, group, offset, 1, 7, 1, 9, count)

    acks = [
        acked(1, 4), acked(5, 1),
        acked(8, 3),  # 8 and 10 are found; 9 was moved
        acked(9, 1, "other"), acked(8, 1, "other"),
        acked(1, 9, "unread"), acked(1, 9, "lived"), acked(1, 9, f"lived{LIFE}7"),
        acked(1, 9, "t", "sought"), acked(1, 9, "t", f"sought{LIFE}8"),
    ]  # fmt: skip
    columns = {"from_topic": "t", "from_group": "g", "from_offset": 9}
    story = {
        "acks": spark.createDataFrame(acks, from_arrow_schema(ACKS)),
        "carried": spark.createDataFrame([columns], from_arrow_schema(CARRIED)),
        "deletions": spark.createDataFrame([("lived",)], "topic STRING"),
        "groups": spark.createDataFrame(
            [("t", "sought", True), ("t", "g", False)],
            "topic STRING, `group` STRING, sought BOOLEAN",
        ),
    }
    evidence = evidence_of(lines, story, [], Clocks(0))
    assert unasked_acks(evidence) == 4
    monkeypatch.setattr(job, "ACKS_MAX", sum(row[-1] for row in acks) - 1)
    assert unasked_acks(evidence) is None
