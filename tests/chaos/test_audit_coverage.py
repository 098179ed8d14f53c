"""Gaps in the evidence: groups that no history read, unknown outcomes, nodes without files."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules.coverage import UNKNOWN_SHARE_MAX, not_looked_at
from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.oracle.story import LIFE

pytestmark = pytest.mark.spark

DELIVERY = {"op": "deliver", "client": "c", "topic": "t", "group": "read", "handed_out_ms": 1,
            "lease_id": 1}  # fmt: skip
STATES = (
    *({"node": name, "index": 80, "scheduled": 1} for name in ("n1", "n2")),
    *({"node": name, "index": 80, "digest": "d"} for name in ("n1", "n2")),
)


def schedule(outcome: str, timers: int) -> dict[str, Any]:
    marks = [*range(timers)]
    return {"op": "schedule", "client": "p", "topic": "t", "outcome": outcome, "marks": marks,
            "payload_crcs": marks}  # fmt: skip


def told(
    spark: SparkSession,
    *lines: dict[str, Any],
    acked: tuple[str, ...] = (),
    unjudged: int = 0,
    deliveries: int = 0,
    fired: tuple[int, int] = (0, 0),
    logs: tuple[str, ...] = ("n1", "n2"),
    files: tuple[str, ...] = ("n1", "n2"),
    states: tuple[dict[str, Any], ...] = STATES,
    fired_in: tuple[str, ...] = (),
) -> list[str]:
    """Return the gaps of a run that lacks nothing else."""
    table = spark.createDataFrame([DELIVERY, *lines], history.SCHEMA)
    groups = spark.createDataFrame(
        [("t", group, 1) for group in ("read", *acked)], "topic STRING, group STRING, acked LONG"
    )
    summary = {
        "waits": {"unjudged": unjudged}, "delivered": deliveries, "redelivered": 0,
        "fired_answers": {"answers": fired[0], "unjudged": fired[1]},
        "nodes": [{"node": name, "last": 100} for name in logs],
        "files": [{"node": name} for name in files],
    }  # fmt: skip
    said = spark.createDataFrame([*states], history.STATES_SCHEMA)
    fates = spark.createDataFrame([(topic,) for topic in fired_in], "topic STRING")
    tables = {"lines": table, "groups": groups, "states": said, "fates": fates}
    return not_looked_at(tables, summary, Clocks(0, 0, 0), {"n1", "n2"})


def test_group_with_acks_that_no_history_read_is_named(spark: SparkSession) -> None:
    assert told(spark) == []
    named = "deliveries of 2 groups, which no history opened: a of t, b of t"
    assert told(spark, acked=("a", "b")) == [named]


def test_timers_of_topics_that_no_history_requests_timers_in_are_counted(
    spark: SparkSession,
) -> None:
    deleted = f"t{LIFE}7"
    assert told(spark, schedule("ok", 1), fired_in=("t", deleted)) == []
    named = "3 timers of topics in which no history requests any: n/b, u"
    found = told(spark, schedule("ok", 1), fired_in=("u", "t", "n/b", f"u{LIFE}2"))
    assert found == [named]


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


def test_each_node_that_lacks_evidence_is_named(spark: SparkSession) -> None:
    assert told(spark, logs=("n1",), files=("n1",), states=STATES[:1]) == [
        "counts of n2: states.jsonl has none of the last fifth of the log",
        "digests of n1, n2: states.jsonl has none of the last fifth of the log",
        "entries of n2: no log has one",
        "files of n2: no manifest is in the folder",
    ]


def test_reports_that_stop_before_the_last_fifth_of_the_log_are_a_gap(spark: SparkSession) -> None:
    cut = [row | {"index": 79} for row in (STATES[0], STATES[3])]
    assert told(spark, states=(*STATES[1:3], *cut)) == [
        "counts of n1: states.jsonl has none of the last fifth of the log",
        "digests of n2: states.jsonl has none of the last fifth of the log",
    ]


def test_each_client_whose_lines_lack_evidence_is_named(spark: SparkSession) -> None:
    bare = {"payload_crcs": None}
    lines = (schedule("ok", 8), schedule("ok", 1) | bare | {"client": "q"})
    unsent = schedule("unknown", 1) | bare  # by a client that ended before its answer
    unleased = DELIVERY | {"lease_id": None}
    timeless = DELIVERY | {"client": "d", "handed_out_ms": None}
    assert told(spark, *lines, unsent, unleased, timeless) == [
        "payloads beyond their marks: lines of q have no payload_crcs",
        "times of deliveries: lines of d have no handed_out_ms",
        "orders of deliveries: lines of c have no lease_id",
    ]
