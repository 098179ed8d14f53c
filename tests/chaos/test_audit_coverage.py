"""Gaps in the evidence: groups that no history read, unknown outcomes, late deliveries excused."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules.coverage import UNKNOWN_SHARE_MAX, not_looked_at
from chaos.audit.rules.verdict import Clocks
from chaos.history import history

pytestmark = pytest.mark.spark


def schedule(outcome: str, timers: int) -> dict[str, Any]:
    return {"op": "schedule", "client": "p", "outcome": outcome, "marks": [*range(timers)]}


def told(
    spark: SparkSession,
    *lines: dict[str, Any],
    acked: tuple[str, ...] = (),
    unjudged: int = 0,
    deliveries: int = 0,
    fired: tuple[int, int] = (0, 0),
) -> list[str]:
    """Return the gaps of a run that lacks nothing else."""
    crcs = {"op": "deliver", "client": "c", "topic": "t", "group": "read", "payload_crcs": [1]}
    table = spark.createDataFrame([crcs, *lines], history.SCHEMA)
    groups = spark.createDataFrame(
        [("t", group, 1) for group in ("read", *acked)], "topic STRING, group STRING, acked LONG"
    )
    summary = {
        "waits": {"unjudged": unjudged}, "delivered": deliveries, "redelivered": 0,
        "fired_answers": {"answers": fired[0], "unjudged": fired[1]},
        "conservation": {"said": {"counts": 1, "digests": 1}}, "nodes": [], "files": [],
    }  # fmt: skip
    return not_looked_at({"lines": table, "groups": groups}, summary, Clocks(0, 0, 0), ())


def test_group_with_acks_that_no_history_read_is_named(spark: SparkSession) -> None:
    assert told(spark) == []
    named = "deliveries of 2 groups, which no history opened: a of t, b of t"
    assert told(spark, acked=("a", "b")) == [named]


def test_unknown_outcomes_are_a_gap_above_their_share(spark: SparkSession) -> None:
    assert UNKNOWN_SHARE_MAX == 0.2
    assert told(spark, schedule("ok", 8), schedule("unknown", 2)) == []
    gap = "3 of 10 schedules, whose outcome no client knows"
    assert told(spark, schedule("ok", 7), schedule("unknown", 3)) == [gap]


def test_excused_deliveries_are_a_gap_above_their_share(spark: SparkSession) -> None:
    assert told(spark, unjudged=20, deliveries=100) == []
    gap = "whether 21 of 100 deliveries were late without a reason"
    assert told(spark, unjudged=21, deliveries=100) == [gap]


def test_answers_that_nothing_judges_are_a_gap_above_their_share(spark: SparkSession) -> None:
    assert told(spark, fired=(10, 2)) == []
    gap = "whether 3 of 10 answers ALREADY_FIRED came after the firing"
    assert told(spark, fired=(10, 3)) == [gap]
