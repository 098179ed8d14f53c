"""Found: what was handed out before the message that it comes behind was done with."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.history.history_check import check_line
from chaos.oracle.story import LIFE
from chaos.oracle.tables import ACKS, CARRIED, EXPIRED, GROUPS, TTLS
from tests.chaos.evidence import evidence_of

pytestmark = pytest.mark.spark

TYPES = {
    "queue": "failover", "later": "failover", f"queue{LIFE}7": "failover", "keys": "key_shared",
    "any": "shared",
}  # fmt: skip
KEYS = ["a", "b", "a", None, "b", "a", "a"]
"""Of the messages at offsets 1 to 7."""


def given(group: str, client: str, lease_id: int | None, at_ms: int, *offsets: int, epoch: int = 1,
          attempt: int = 1) -> dict[str, Any]:  # fmt: skip
    n = len(offsets)
    line = {
        "op": "deliver", "client": client, "topic": "t", "group": group, "epoch": epoch,
        "received_ms": at_ms, "handed_out_ms": at_ms, "offsets": [*offsets],
        "marks": [100 + each for each in offsets], "ids": ["0" * 24] * n, "due_ms": [1] * n,
        "fired_at_ms": [1] * n, "attempts": [attempt] * n,
    }  # fmt: skip
    return line if lease_id is None else line | {"lease_id": lease_id}


def ack(group: str, client: str, at_ms: int, *offsets: int, outcome: str = "ok") -> dict[str, Any]:
    results = {"results": ["ACKED"] * len(offsets)} if outcome == "ok" else {}
    where = {"op": "ack", "client": client, "topic": "t", "group": group, "offsets": [*offsets]}
    return where | results | {"start_ms": at_ms, "end_ms": at_ms + 5, "outcome": outcome}


def lines_of(spark: SparkSession, *lines: dict[str, Any]) -> DataFrame:
    keyed = {
        "op": "schedule", "client": "p", "topic": "t", "start_ms": 1, "end_ms": 2,
        "outcome": "unknown", "marks": [*range(101, 108)], "due_ms": [1] * 7, "keys": KEYS,
        "on_conflict": "reject",
    }  # fmt: skip
    ordered = keyed | {
        "marks": [108, 109], "due_ms": [1] * 2, "keys": ["x", "y"], "ordering_keys": ["o"] * 2,
    }  # fmt: skip
    said = [keyed, ordered, *lines]
    assert [complaint for line in said for complaint in check_line(line)] == []
    return spark.createDataFrame(said, history.SCHEMA)


@dataclass(frozen=True)
class Case:
    """What is told of one topic, and what has to be found: client, offset, behind, holder."""

    lines: list[dict[str, Any]]
    found: list[tuple[Any, ...]]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def found(rows: DataFrame) -> dict[str, list[tuple[Any, ...]]]:
    """Return what was found in each topic."""
    by_topic: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows.orderBy("epoch", "lease_id", "offset").collect():
        what = row["client"], row["offset"], row["behind"], row["holder"]
        by_topic.setdefault(row["topic"], []).append(what)
    return by_topic


def disordered(lines: DataFrame, story: dict[str, DataFrame], error_ms: int | None) -> DataFrame:
    found = evidence_of(lines, story, [], Clocks(0, None, error_ms)).violations("handouts")
    assert [*found] == ["disordered"]
    return found["disordered"]


def moved(rows: list[dict[str, Any]], topic: str) -> list[dict[str, Any]]:
    """Return lines, or rows of tables, in another topic."""
    return [row | dict.fromkeys(row.keys() & {"topic", "from_topic"}, topic) for row in rows]


def story_of(
    spark: SparkSession, topics: Iterable[str] = ("t",), **tables: list[Any]
) -> dict[str, DataFrame]:
    groups = [
        {"topic": topic, "group": group, "type": kind}
        for topic in topics
        for group, kind in TYPES.items()
    ]
    schemas = {"acks": ACKS, "carried": CARRIED, "expired": EXPIRED, "ttls": TTLS}
    story = {
        name: spark.createDataFrame(tables.get(name, []), from_arrow_schema(schema))
        for name, schema in schemas.items()
    }
    return story | {"groups": spark.createDataFrame(groups, from_arrow_schema(GROUPS))}


def message_waits_for_the_one_before_it_unless_they_are_with_one_consumer() -> Case:
    return Case(
        [
            given("queue", "c", 1, 10, 1, 2),
            given("queue", "c", 2, 11, 3),
            ack("queue", "c", 20, 3),
            given("queue", "d", 3, 20, 4),
            ack("queue", "d", 31, 4),
            given("queue", "c", 4, 30, 5),  # found: 4 is with d, who has not asked yet to ack it
            ack("queue", "c", 40, 5, outcome="fail"),
            given("queue", "d", 5, 50, 6),  # found: it had no effect
            given("any", "c", 6, 10, 1),
            given("any", "d", 7, 10, 2),
            given("later", "c", 99, 10, 1),  # lease ids are random: 1 is with c when 2 is delivered
            given("later", "c", 8, 11, 2),
            ack("later", "c", 20, 2),
        ],
        [("c", 5, 4, "d"), ("d", 6, 5, "c")],
    )


def what_is_passed_over_or_came_back_holds_up_what_is_behind_it() -> Case:
    return Case(
        [
            given("queue", "c", 1, 10, 1),
            given("queue", "c", 2, 11, 3),  # nobody was given 2 before
            given("queue", "d", 3, 12, 2),  # 1 is with c
            given("queue", "c", 1, 13, 4, epoch=2),  # a later epoch counts from zero
            given("queue", "c", 2, 14, 3, epoch=2, attempt=2),  # 2 is with d
            given("queue", "d", 3, 15, 3, epoch=2, attempt=3),
            given("queue", "c", 4, 16, 4, epoch=2, attempt=2),  # 3 went to d again
            given("queue", "d", 5, 17, 4, epoch=2, attempt=3),
        ],
        [("c", 3, 2, None), ("d", 2, 1, "c"), ("c", 3, 2, "d"), ("c", 4, 3, "d")],
    )


def deliveries_of_one_millisecond_may_have_had_either_order() -> Case:
    return Case(
        [
            given("queue", "c", 1, 10, 1),
            given("queue", "c", 2, 11, 2),
            given("queue", "d", 3, 12, 2, attempt=2),  # found: 1 is with c
            given("queue", "c", 4, 12, 3),  # 2 may have gone to d later in that millisecond
            given("queue", "c", 5, 13, 3, attempt=2),  # found: 2 is with d
        ],
        [("d", 2, 1, "c"), ("c", 3, 2, "d")],
    )


def only_what_has_the_same_key_is_waited_for() -> Case:
    return Case(
        [
            given("keys", "c", 1, 10, 1),
            given("keys", "d", 2, 11, 2),
            given("keys", "d", 3, 12, 4),  # it has no key
            given("keys", "d", 4, 13, 3),  # found: 1 is with c
            given("keys", "d", 5, 14, 5),
            given("keys", "d", None, 15, 6),  # of no known place
        ],
        [("d", 3, 1, "c")],
    )


def messages_with_one_ordering_key_wait_for_each_other_whatever_their_keys() -> Case:
    lines = [given("keys", "c", 1, 10, 8), given("keys", "d", 2, 11, 9)]
    return Case([*lines, given("keys", "c", 3, 12, 2)], [("d", 9, 8, "c")])


def what_ended_otherwise_is_waited_for_no_more() -> Case:
    slots = {n: {"topic": "t", "group": "queue", "queue_offset": n} for n in (1, 2, 3)}
    carried = {"from_topic": "t", "from_group": "queue", "from_offset": 2}
    given_out = [given("queue", "cd"[n % 2], n, 10 + n, n) for n in (1, 2, 3, 4, 5)]
    return Case(
        [*given_out, ack("queue", "c", 99, 4)],
        [("d", 5, 4, "c")],
        {"expired": [slots[1]], "carried": [carried], "acks": [slots[3] | {"count": 1}]},
    )


CASES = {
    case.__name__: case()
    for case in (
        message_waits_for_the_one_before_it_unless_they_are_with_one_consumer,
        what_is_passed_over_or_came_back_holds_up_what_is_behind_it,
        deliveries_of_one_millisecond_may_have_had_either_order,
        only_what_has_the_same_key_is_waited_for,
        messages_with_one_ordering_key_wait_for_each_other_whatever_their_keys,
        what_ended_otherwise_is_waited_for_no_more,
    )
}


@pytest.fixture(scope="module")
def all_found(spark: SparkSession) -> dict[str, list[tuple[Any, ...]]]:
    """Judge all cases at once, each in a topic of its name."""
    lines = [row for name, case in CASES.items() for row in moved(case.lines, name)]
    tables = {
        table: [
            row for name, case in CASES.items() for row in moved(case.tables.get(table, []), name)
        ]
        for table in ("acks", "carried", "expired")
    }
    return found(disordered(lines_of(spark, *lines), story_of(spark, CASES, **tables), 0))


@pytest.mark.parametrize("name", CASES)
def test_order_of(name: str, all_found: dict[str, list[tuple[Any, ...]]]) -> None:
    assert all_found[name] == CASES[name].found


@pytest.mark.long  # the order of deliveries is audited twice
def test_clocks_that_differ_accuse_nobody_within_that(spark: SparkSession) -> None:
    lines = [
        line
        for group, acked_ms in (("queue", 50), ("later", 51))
        for line in (
            given(group, "c", 1, 10, 1),
            given(group, "d", 2, 20, 2),
            ack(group, "c", acked_ms, 1),
        )
    ]
    story = story_of(spark)
    assert found(disordered(lines_of(spark, *lines), story, 30)) == {"t": [("d", 2, 1, "c")]}
    # If it is not known how far they differ, only what nobody ever asked to ack is found.
    assert disordered(lines_of(spark, *lines[:-1]), story, None).count() == 1
