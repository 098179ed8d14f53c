"""Figures of the audit, against figures that were counted by hand or by numpy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.testing import assertDataFrameEqual

from chaos.audit.report import figures
from chaos.audit.rules.fault_windows import Fault, Phase, windows
from chaos.audit.rules.queries import RunEvidence, query

pytestmark = pytest.mark.spark


def test_percentiles_are_exact(spark: SparkSession) -> None:
    late = np.random.default_rng(1).geometric(0.01, 5000)
    values, counts = np.unique(late, return_counts=True)
    rows = [(("fire",), int(v), int(n)) for v, n in zip(values, counts, strict=True)]
    table = spark.createDataFrame(rows, "part STRUCT<what: STRING>, late_ms BIGINT, n BIGINT")
    shares = (0.5, 0.9, 0.99, 0.999, 1.0)
    wanted = [int(np.quantile(late, share, method="inverted_cdf")) for share in shares]
    schema = "what STRING, n BIGINT, " + ", ".join(f"{q} BIGINT" for q in figures.QUANTILES)
    row = ("fire", 5000, *wanted)
    assertDataFrameEqual(
        query("figures", "percentiles", {"late": table}), spark.createDataFrame([row], schema)
    )


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
    evidence = RunEvidence({"found": found}, bucket_ms=1000)
    table = figures.lateness(evidence, stretches)
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
    done = [(plane, times[0], times[-1], False) for plane, times in moments.items()]
    evidence = successes(spark, moments, done)
    told = figures.with_recoveries(evidence, faults, 60_000)
    assert [(each.recovered_ms, each.recovered) for each in told] == [
        (1800, True),
        (51_000, True),  # nothing was left to do
    ]
    first, second = figures.unavailability(evidence, told)
    assert first == {
        "fault": "pause n1", "start_ms": 1000, "healed_after_ms": 500, "recovered_after_ms": 300,
        "schedule_gap_ms": 18_190, "schedule_gap_after_ms": 810, "schedule_gap_open": False,
        "fire_gap_ms": 47_900, "fire_gap_after_ms": 1600, "fire_gap_open": False,
        "deliver_gap_ms": 0, "deliver_gap_after_ms": 0, "deliver_gap_open": False,
    }  # fmt: skip
    assert (second["schedule_gap_ms"], second["fire_gap_after_ms"]) == (0, -47_400)


Work = tuple[str, int, int, bool]
"""(plane, begin, end, whether later work never succeeded)."""


def successes(spark: SparkSession, moments: dict[str, list[int]], done: list[Work]) -> RunEvidence:
    rows = [(plane, at_ms) for plane, times in moments.items() for at_ms in times]
    works = "plane STRING, begin_ms BIGINT, end_ms BIGINT, undone BOOLEAN"
    return RunEvidence(
        {
            "moments": spark.createDataFrame(rows, "plane STRING, at_ms BIGINT"),
            "works": spark.createDataFrame(done, works),
        }
    )


def test_outage_that_never_ends_lasts_until_nobody_waits_any_more(
    spark: SparkSession, faults: list[Fault]
) -> None:
    done = [
        ("schedule", 900, 58_000, True),  # producers asked until then
        ("fire", 950, 60_000, True),
        ("deliver", 40_000, 60_000, True),  # not one
    ]
    evidence = successes(spark, {"schedule": [900, 1400, 50_500], "fire": [950, 1450]}, done)
    told = figures.with_recoveries(evidence, faults, 60_000)
    # Schedules were answered after the first fault, and nothing fired after it.
    assert [(each.recovered_ms, each.recovered) for each in told] == [(60_000, False)] * 2
    first, second = figures.unavailability(evidence, told)
    assert [each["recovered_after_ms"] for each in (first, second)] == [None, None]
    assert [(first[f"{p}_gap_ms"], first[f"{p}_gap_open"]) for p in figures.PLANES] == [
        (7500, True),  # also before one of 49,100 ms that is over
        (58_550, True),
        (20_000, True),
    ]
    assert second["fire_gap_after_ms"] == 1450 - 50_000


def test_fault_that_was_over_before_the_last_outage_is_recovered_from(
    spark: SparkSession, faults: list[Fault]
) -> None:
    moments = {"schedule": [900, 1600, 49_000], "fire": [950, 1600, 40_000]}
    done = [("schedule", 900, 55_000, True), ("fire", 900, 40_000, False)]
    told = figures.with_recoveries(successes(spark, moments, done), faults, 60_000)
    assert [(each.recovered_ms, each.recovered) for each in told] == [(1600, True), (60_000, False)]


def test_silence_before_the_first_success_is_a_gap(
    spark: SparkSession, faults: list[Fault]
) -> None:
    evidence = successes(spark, {"fire": [9000]}, [("fire", 1100, 9000, False)])
    first, _ = figures.unavailability(evidence, faults)
    assert (first["fire_gap_ms"], first["fire_gap_after_ms"]) == (7900, 100)


LINES = """op STRING, outcome STRING, start_ms BIGINT, end_ms BIGINT"""
FOUND = (
    "verdict STRING, end STRING, due_ms BIGINT, scheduled_at_ms BIGINT, ended_at_ms BIGINT,"
    " received_ms BIGINT"
)
FIRED = [("ok", "fired", 100, 90, 110, 130), ("ok", "fired", 400, 90, 410, 420)]


@pytest.mark.parametrize(
    ("lines", "found", "wanted"),
    [
        (
            [("schedule", "ok", 90, 95), ("schedule", "unknown", 94, 300)],  # all but one answered
            [("lost", "fired", 150, 90, 160, None)],  # others came later: that was no outage
            {"schedule": (90, 95, False), "fire": (100, 410, False), "deliver": (110, 420, False)},
        ),
        (
            [
                ("schedule", "ok", 90, 95),
                ("schedule", "fail", 96, 1_096),
                ("open", None, 120, None),
            ],
            [("lost", "pending", 600, 90, None, None), ("lost", "fired", 405, 90, 425, None)],
            {"schedule": (90, 1_096, True), "fire": (100, 900, True), "deliver": (120, 900, True)},
        ),
        (
            [("schedule", "ok", 90, 95), ("schedule", "fail", 96, 1_095)],  # refused: an answer
            [],
            {"schedule": (90, 95, False), "fire": (100, 410, False), "deliver": (110, 420, False)},
        ),
        (
            [("schedule", "unknown", 90, 95)],
            [("held", "pending", 600, 90, None, None), ("pending", "pending", 950, 90, None, None)],
            {"schedule": (90, 95, True), "fire": (100, 410, False), "deliver": (110, 420, False)},
        ),
    ],
)
def test_work_of_a_plane_ends_with_its_last_success_or_when_it_is_given_up(
    spark: SparkSession, lines: list[Any], found: list[Any], wanted: dict[str, Any]
) -> None:
    tables = {
        "lines": spark.createDataFrame(lines, LINES),
        "found": spark.createDataFrame([*FIRED, *found], FOUND),
    }
    told = RunEvidence(tables, until_ms=900).query("figures", "works").collect()
    assert {each.plane: tuple(each[1:]) for each in told} == wanted


def test_lateness_of_a_fault_is_that_of_what_could_fire_in_it(
    spark: SparkSession, faults: list[Fault]
) -> None:
    # due, scheduled, fired, received
    rows = [
        (999, 1, 9000, 9000),
        (1000, 1, 1700, None),
        (1, 2999, 3100, 3111),  # the fault's aftermath, longer than its recovery
        (3000, 1, 9000, 9000),
        (51_999, 1, 52_000, 52_000),
    ]
    found = spark.createDataFrame([("ok", "fired", *row) for row in rows], FOUND)
    evidence = RunEvidence({"found": found})
    later = replace(faults[0], number=3, start_ms=90_000, recovered_ms=90_001)
    faults = [*faults, replace(faults[0], number=2), later]
    assert figures.lateness_by_fault(evidence, faults) == [
        {"fire_late_p99_ms": 700, "fire_late_max_ms": 700}
        | {"deliver_late_p99_ms": 112, "deliver_late_max_ms": 112},
        {"fire_late_p99_ms": 1, "fire_late_max_ms": 1}
        | {"deliver_late_p99_ms": 1, "deliver_late_max_ms": 1},
        {"fire_late_p99_ms": 700, "fire_late_max_ms": 700}
        | {"deliver_late_p99_ms": 112, "deliver_late_max_ms": 112},
        dict.fromkeys(f"{what}_late_{name}_ms" for what, name in figures.FAULT_LATE),
    ]
    assert figures.of_faults(evidence, [], 60_000) == ([], [])


def test_redeliveries_are_told_apart_by_their_reason(spark: SparkSession) -> None:
    # seq, attempt, epoch, received
    rows = [
        (1, 1, 1, 10),
        (2, 1, 1, 10), (2, 2, 1, 20), (2, 3, 2, 30),
        (3, 2, 1, 10),
        (4, 1, 1, 10), (4, 1, 1, 20),
        (5, 1, 1, 10), (5, 2, 1, 20), (5, 3, 1, 30), (5, 5, 2, 40),
        (6, 1, 1, 10), (6, 2, 1, 20),
    ]  # fmt: skip
    slot = "topic STRING, `group` STRING, queue_offset BIGINT"
    given = spark.createDataFrame(
        [(seq, "t", "g", seq, attempt, epoch, at) for seq, attempt, epoch, at in rows],
        f"seq BIGINT, {slot}, attempt INT, epoch BIGINT, received_ms BIGINT",
    )
    # seq, attempts, why: the fourth delivery of 5, and what ended it, nobody has seen
    came_back = [
        (2, 1, "ended"), (4, 1, "nacked"), (5, 1, "nacked"), (5, 2, "recalled"), (5, 3, "nacked"),
        (5, 4, "ended"),
    ]  # fmt: skip
    returns = spark.createDataFrame(
        [
            *(("t", "g", seq, attempts, why) for seq, attempts, why in came_back),
            *(("t", "h", seq, 1, "nacked") for seq in range(7)),
            *(("u", "g", seq, 1, "nacked") for seq in range(7)),
        ],
        f"{slot}, attempts BIGINT, why STRING",
    )
    times = {seq: sum(row[0] == seq for row in rows) for seq in range(1, 7)}
    found = spark.createDataFrame(
        [(seq, n, 1) for seq, n in times.items()], "seq BIGINT, deliveries BIGINT, groups BIGINT"
    )
    wanted = [("lease ended", 1), ("failover", 1), ("first to arrive", 1), ("unmarked", 1)]
    wanted += [("nacked", 2), ("recalled", 1), ("not in the log", 1)]
    seqs = query("figures", "repeated", {"given": given, "found": found})
    some = given.join(seqs, "seq", "left_semi")
    assertDataFrameEqual(
        query("figures", "redeliveries", {"redelivered": some, "returns": returns}),
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
    tables = {"redelivered": some, "confirmed": confirmed}
    assert query("figures", "arrived_after_ack", tables).collect() == [Row(n=1)]
