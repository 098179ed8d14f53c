"""Timers that fired late: excused time does not count, and the rest of the wait does."""

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules import late_rules
from chaos.audit.rules.fault_windows import Phase
from chaos.audit.rules.late_rules import RECOVERY_MS
from chaos.audit.rules.queries import BOUNDS, query

pytestmark = pytest.mark.spark

LATE_MS, AFTER_MS = BOUNDS["fired_ms"], BOUNDS["after_ms"]

HOUR_MS = 3_600_000
FAULT = (HOUR_MS + 1_000, HOUR_MS + 21_000)
"""An excuse of 20 s."""
WAITS = {
    "steady": (0, 2 * LATE_MS),
    "in time": (0, LATE_MS),
    "longer than the fault": (0, 2 * HOUR_MS),
    "through the fault": (FAULT[0] - LATE_MS, FAULT[1]),
    "before and after it": (FAULT[0] - LATE_MS, FAULT[1] + 10),
    "scheduled in it": (0, FAULT[1] + LATE_MS),
    "paused": (0, 2 * HOUR_MS),
}
"""Topic -> when its timer was due, and fired."""


def late(spark: SparkSession, waits: dict[str, tuple[int, int]], rate: int) -> set[str]:
    rows = [
        (
            1,
            1,
            topic,
            due_ms,
            FAULT[0] if topic == "scheduled in it" else 0,
            fired_ms,
            "fired",
            None,
        )
        for topic, (due_ms, fired_ms) in waits.items()
    ]
    columns = "seq BIGINT, mark BIGINT, topic STRING, due_ms BIGINT, scheduled_at_ms BIGINT"
    columns += ", ended_at_ms BIGINT, end STRING, from_topic STRING"
    pauses = spark.createDataFrame([("paused", 5, 6)], "topic STRING, from_ms LONG, until_ms LONG")
    excuses = spark.createDataFrame([(-2, -1), FAULT], late_rules.EXCUSES)
    tables = {"found": spark.createDataFrame(rows, columns), "pauses": pauses, "excuses": excuses}
    bounds = {"fired_ms": LATE_MS, "after_ms": AFTER_MS, "rate": rate}
    return {row["topic"] for row in query("waits", "late", tables, **bounds).collect()}


def test_wait_is_late_by_the_time_that_nothing_excuses(spark: SparkSession) -> None:
    found = late(spark, WAITS, 1_000_000)  # few timers are no backlog
    assert found == {"steady", "longer than the fault", "before and after it"}


def test_backlog_after_a_fault_takes_its_time(spark: SparkSession) -> None:
    due_ms, fired_ms = FAULT[0], FAULT[1] + LATE_MS
    waits = {f"timer {at}": (due_ms, fired_ms + 1) for at in range(3)}
    assert late(spark, waits, 1_000_000) == {*waits}
    assert late(spark, waits, 3) == set(), "a millisecond for three of them"
    assert late(spark, waits | {"later": (due_ms, fired_ms + 2)}, 4) == {"later"}
    assert late(spark, {"a": (0, LATE_MS + 1), "b": (0, LATE_MS + 1)}, 1) == {"a", "b"}, "no fault"


def test_recovery_that_does_not_end_excuses_only_its_beginning() -> None:
    phases = [Phase("fault", 0, HOUR_MS), Phase("recovery", HOUR_MS, 3 * HOUR_MS)]
    assert late_rules.excuses(phases, []) == [(0, HOUR_MS + RECOVERY_MS + AFTER_MS)]
    phases[1] = Phase("recovery", HOUR_MS, HOUR_MS + 1)
    assert late_rules.excuses(phases, []) == [(0, HOUR_MS + 1 + AFTER_MS)]
