"""Figures of the audit, against figures that were counted by hand or by numpy."""

from dataclasses import replace

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertDataFrameEqual

from chaos.audit import figures
from chaos.audit.faults import Fault, Phase, windows

pytestmark = pytest.mark.spark


def test_percentiles_are_exact(spark: SparkSession) -> None:
    late = np.random.default_rng(1).geometric(0.01, 5000)
    values, counts = np.unique(late, return_counts=True)
    rows = [("fire", int(v), int(n)) for v, n in zip(values, counts, strict=True)]
    table = spark.createDataFrame(rows, "what STRING, late_ms BIGINT, n BIGINT")
    wanted = [np.quantile(late, q, method="inverted_cdf") for q in figures.QUANTILES.values()]
    schema = "what STRING, n BIGINT, " + ", ".join(f"{q} BIGINT" for q in figures.QUANTILES)
    row = ("fire", 5000, *(int(value) for value in wanted))
    assertDataFrameEqual(
        figures.percentiles(table, "what"), spark.createDataFrame([row], schema)
    )  # fmt: skip


def test_lateness_is_told_by_the_phase_in_which_a_timer_could_fire(spark: SparkSession) -> None:
    # due, scheduled, fired, received
    rows = [
        (999, 1, 1001, 1005),
        (1000, 1, 1700, None),  # the first moment of the fault
        (500, 1999, 2100, 2110),  # due before it was asked for
        (2000, 1, 2003, 2004),  # recovery
        (2500, 1, 2501, 2502),
    ]
    found = spark.createDataFrame(
        [("fired", *row) for row in rows],
        "end STRING, due_ms BIGINT, scheduled_at_ms BIGINT, ended_at_ms BIGINT, received_ms BIGINT",
    )
    stretches = [Phase("fault", 1000, 2000), Phase("recovery", 2000, 2500)]
    table = figures.lateness(found, stretches, 1000)
    wanted = [
        ("fire", "steady", 1000, 2, 1), ("deliver", "steady", 1000, 6, 1),
        ("fire", "fault", 1000, 700, 1),
        ("fire", "fault", 2000, 101, 1), ("deliver", "fault", 2000, 111, 1),
        ("fire", "recovery", 2000, 3, 1), ("deliver", "recovery", 2000, 4, 1),
        ("fire", "steady", 2000, 1, 1), ("deliver", "steady", 2000, 2, 1),
    ]  # fmt: skip
    schema = "what STRING, phase STRING, bucket BIGINT, late_ms BIGINT, n BIGINT"
    assertDataFrameEqual(table, spark.createDataFrame(wanted, schema))


@pytest.fixture
def faults() -> list[Fault]:
    lines = [
        {"event": "pause", "at_ms": 1000, "node": "n1"},
        {"event": "resume", "at_ms": 1500, "node": "n1"},
        {"event": "strike", "at_ms": 50_000, "nemesis": "slow", "strike": 4},
        {"event": "healed", "at_ms": 51_000, "strike": 4},
    ]
    return windows(lines, 60_000)


def test_unavailability_is_the_longest_gap_that_a_fault_touches(
    spark: SparkSession, faults: list[Fault]
) -> None:
    moments = {
        "schedule": [900, 990, 1800, 1810, 20_000, 49_990, 50_010],
        "fire": [995, 1005, 1600, 2600, 50_500, 50_510],
        "deliver": [1, 2],
    }
    rows = [(plane, at_ms) for plane, times in moments.items() for at_ms in times]
    table = spark.createDataFrame(rows, "plane STRING, at_ms BIGINT")
    back = figures.recovered(spark, table, faults)
    assert back == {0: 1800}  # of the second, nothing is known
    told = [replace(f, recovered_ms=back.get(f.number, f.heal_ms)) for f in faults]
    first, second = figures.unavailability(spark, figures.gaps(table), told)
    assert first == {
        "fault": "pause n1", "start_ms": 1000, "healed_after_ms": 500, "recovered_after_ms": 300,
        "schedule_gap_ms": 18_190, "schedule_gap_after_ms": 810,
        "fire_gap_ms": 47_900, "fire_gap_after_ms": 1600,
        "deliver_gap_ms": 0, "deliver_gap_after_ms": 0,
    }  # fmt: skip
    assert (second["schedule_gap_ms"], second["fire_gap_after_ms"]) == (0, -47_400)


def test_redeliveries_are_told_apart_by_their_reason(spark: SparkSession) -> None:
    # seq, attempt, epoch, received
    rows = [
        (1, 1, 1, 10),
        (2, 1, 1, 10), (2, 2, 1, 20), (2, 3, 2, 30),
        (3, 2, 1, 10),
        (4, 1, 1, 10), (4, 1, 1, 20),
    ]  # fmt: skip
    given = spark.createDataFrame(
        [(seq, "g", seq, attempt, epoch, at) for seq, attempt, epoch, at in rows],
        "seq BIGINT, group STRING, queue_offset BIGINT, attempt INT, epoch BIGINT,"
        " received_ms BIGINT",
    )
    times = {seq: sum(row[0] == seq for row in rows) for seq in (1, 2, 3, 4)}
    found = spark.createDataFrame(
        [(seq, n, 1) for seq, n in times.items()], "seq BIGINT, deliveries BIGINT, groups BIGINT"
    )
    wanted = [("lease ended", 1), ("failover", 1), ("first to arrive", 1), ("unmarked", 1)]
    assertDataFrameEqual(
        figures.redeliveries(given.join(figures.repeated(given, found), "seq", "left_semi")),
        spark.createDataFrame(wanted, "reason STRING, n BIGINT"),
    )


def test_arrivals_after_the_ack_was_first_confirmed_are_counted(spark: SparkSession) -> None:
    slot = "topic STRING, `group` STRING, queue_offset BIGINT"
    some = spark.createDataFrame(
        [
            ("t", "g", 1, 9),
            ("t", "g", 1, 10),
            ("t", "g", 1, 11),
            ("t", "h", 1, 11),
            ("t", "g", 2, 11),
        ],
        slot + ", received_ms BIGINT",
    )
    confirmed = spark.createDataFrame(
        [("t", "g", 1, 10), ("t", "g", 1, 20), ("t", "g", 2, 12), ("t", "g", 3, 1)],
        slot + ", confirmed_ms BIGINT",
    )
    assert figures.arrived_after_ack(some, confirmed) == 1
