"""Timers that fired late: excused time does not count, and the rest of the wait does."""

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules import late_firing
from chaos.audit.rules.fault_windows import Phase
from chaos.audit.rules.late_firing import AFTER_MS, LATE_MS, RATE, RECOVERY_MS

pytestmark = pytest.mark.spark

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


def late(spark: SparkSession, waits: dict[str, tuple[int, int]]) -> set[str]:
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
    found = late_firing.late(spark.createDataFrame(rows, columns), [(-2, -1), FAULT], pauses)
    return {row["topic"] for row in found.collect()}


def test_wait_is_late_by_the_time_that_nothing_excuses(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_firing, "RATE", 1_000 * RATE)  # few timers are no backlog
    assert late(spark, WAITS) == {"steady", "longer than the fault", "before and after it"}


def test_backlog_after_a_fault_takes_its_time(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_firing, "RATE", 1 / 1_000)  # a second for each
    due_ms, fired_ms = FAULT[0], FAULT[1] + LATE_MS
    waits = {"first": (due_ms, fired_ms + 2_000), "second": (due_ms, fired_ms + 2_001)}
    assert late(spark, waits) == {"second"}
    assert late(spark, {"a": (0, LATE_MS + 1), "b": (0, LATE_MS + 1)}) == {"a", "b"}, "no fault"


def test_recovery_that_does_not_end_excuses_only_its_beginning() -> None:
    phases = [Phase("fault", 0, HOUR_MS), Phase("recovery", HOUR_MS, 3 * HOUR_MS)]
    assert late_firing.excuses(phases, []) == [(0, HOUR_MS + RECOVERY_MS + AFTER_MS)]
    phases[1] = Phase("recovery", HOUR_MS, HOUR_MS + 1)
    assert late_firing.excuses(phases, []) == [(0, HOUR_MS + 1 + AFTER_MS)]
