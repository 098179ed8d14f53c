"""Found: more deliveries than a rate allows, and messages that priorities passed for too long."""

from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules.pace_rules import OLDEST, ROUND, starved_messages
from chaos.audit.rules.queries import BOUNDS, RunEvidence
from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.history.history_check import check_line
from chaos.oracle.tables import GROUPS, STORY
from tests.chaos.evidence import evidence_of

pytestmark = pytest.mark.spark

FROM_MS = 1_000
SURE_MS = FROM_MS + BOUNDS["policy_ms"]


def given(topic: str, at_ms: int, offsets: list[int], **more: Any) -> dict[str, Any]:
    n = len(offsets)
    line = {
        "op": "deliver", "client": "c", "topic": topic, "group": "g", "epoch": 1,
        "received_ms": at_ms, "handed_out_ms": at_ms, "offsets": offsets, "marks": [*range(n)],
        "ids": ["0" * 24] * n, "due_ms": [1] * n, "fired_at_ms": [0] * n, "attempts": [1] * n,
    }  # fmt: skip
    return line | more


def evidence_in(
    spark: SparkSession, lines: list[dict[str, Any]], rates: list[tuple[str, int, int, int]]
) -> RunEvidence:
    assert [complaint for line in lines for complaint in check_line(line)] == []
    types = {"right": "shared", "passed": "shared", "ordered": "key_shared"}
    groups = [{"topic": topic, "group": "g", "type": each} for topic, each in types.items()]
    story = {
        "rates": spark.createDataFrame([*rates], from_arrow_schema(STORY["rates"])),
        "groups": spark.createDataFrame(groups, from_arrow_schema(GROUPS)),
    }
    return evidence_of(spark.createDataFrame(lines, history.SCHEMA), story, [], Clocks(0, 9))


def test_deliveries_above_a_rate_are_found_beside_those_at_it(spark: SparkSession) -> None:
    rates = [(name, FROM_MS, 100, 0) for name in ("right", "fast", "early", "two")]
    rates += [("group", FROM_MS, 0, 100), ("ended", FROM_MS, 100, 0), ("ended", SURE_MS + 1, 0, 0)]
    # 100 a second, and a burst of 10 and one more for ten milliseconds of clocks.
    right = [given("right", SURE_MS + 10 * n, [n]) for n in range(300)]
    right += [given("right", SURE_MS + 3_000, [*range(300, 310)])]
    fast = [given("fast", SURE_MS + 9 * n, [n]) for n in range(300)]
    early = [given("early", SURE_MS - 1, [*range(999)])]
    ended = [given("ended", SURE_MS + 2, [*range(999)])]
    two = [given("two", SURE_MS, [*range(11)], group=group) for group in "gh"]
    group = [given("group", SURE_MS, [*range(11)], group=group) for group in "gh"]
    group += [given("group", SURE_MS + 1, [11, 12], group="h")]
    epochs = [given("right", SURE_MS, [*range(400, 411)], epoch=2)]
    evidence = evidence_in(spark, right + fast + early + ended + two + group + epochs, rates)
    rows = evidence.violations("paces")["rate_exceeded"].orderBy("topic").collect()
    assert [(row["whose"], row["topic"], row["group"]) for row in rows] == [
        ("topic", "fast", ""), ("group", "group", "h"), ("topic", "two", "")
    ]  # fmt: skip
    assert not evidence.has("prioritized")


def test_message_that_too_many_deliveries_passed_is_found(spark: SparkSession) -> None:
    ask = {
        "op": "schedule", "client": "p", "start_ms": 1, "end_ms": 2, "outcome": "unknown",
        "marks": [1], "due_ms": [1], "priorities": [0],
    }  # fmt: skip
    lines = [ask | {"topic": topic} for topic in ("right", "passed", "ordered")]
    most = (2 * OLDEST // OLDEST + 2) * ROUND
    for topic, count in (("right", most), ("passed", most + 1), ("ordered", most + 1)):
        # 17 messages are ready; the last of them is delivered behind `count` later ones.
        lines += [given(topic, 100, [*range(2 * OLDEST)], attempts=[1] * 2 * OLDEST)]
        later = [*range(100, 100 + count - 2 * OLDEST)]
        lines += [given(topic, 101 + n, [offset]) for n, offset in enumerate(later)]
        lines += [given(topic, 5_000, [2 * OLDEST])]
        lines += [given(topic, 5_001, [2 * OLDEST + 1], fired_at_ms=[4_999])]
        lines += [given(topic, 5_002, [2 * OLDEST + 2], attempts=[2])]
    evidence = evidence_in(spark, lines, [])
    assert evidence.has("prioritized")
    rows = starved_messages(evidence.query("figures", "shared_deliveries")).collect()
    assert [tuple(row) for row in rows] == [("passed", "g", 2 * OLDEST, most + 1, most)]
