"""The audit against planted faults: every violation is found, and an honest run is not blamed."""

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from chaos.audit.rules import verdict
from chaos.audit.rules.queries import query
from chaos.history import history
from chaos.oracle.story import LIFE
from tests.chaos.audit_cases import APART, DUE_MS, ERROR_MS, FATE, Case, Found, Planted, told

pytestmark = pytest.mark.spark

OF_KEYS_AND_CHANGES = (
    *("key_doubled", "replaced_delivered", "rescheduled_delivered"),
    *("conflict_untrue", "reschedule_untrue"),
)


@pytest.fixture(scope="module")
def all_found(judged: tuple[dict[str, Case], DataFrame]) -> dict[str, tuple[Case, Found]]:
    """All that is planted, judged together, by the name of its case."""
    cases, table = judged
    found: list[Found] = [[] for _ in cases]
    for mark, each, seq in table.select("mark", "verdict", "seq").collect():
        number, own_mark = divmod(mark if mark is not None else seq, APART)
        own_seq = seq and seq % APART
        found[number].append((None if mark is None else own_mark, each, own_seq))
    return dict(zip(cases, zip(cases.values(), found, strict=True), strict=True))


def test_every_violation_is_found_and_nothing_else(
    all_found: dict[str, tuple[Case, Found]],
) -> None:
    case, found = all_found["violations"]
    assert told(found) == case.wanted()
    assert {*case.expected.values()} == {*verdict.VIOLATIONS, "ok"} - {*OF_KEYS_AND_CHANGES}


def test_every_violation_by_keys_and_reschedules_is_found_and_nothing_else(
    all_found: dict[str, tuple[Case, Found]],
) -> None:
    case, found = all_found["of_changes"]
    assert [row for row in found if row[0] is None] == [(None, "lost", 1002)]
    assert told(found) == case.wanted()
    assert {*OF_KEYS_AND_CHANGES} <= {*case.expected.values(), *case.old.values()}


def miscounted(lines: DataFrame, log: DataFrame) -> list[Row]:
    series = lines.sparkSession.createDataFrame([], "series_index BIGINT")
    tables = {"lines": lines, "fates": log, "series": series}
    tables["keyed"] = query("clients", "asks", tables).where("key IS NOT NULL")
    return query("changes", "miscounted", tables).collect()


def test_honest_keys_and_changes_are_not_blamed(
    spark: SparkSession, all_found: dict[str, tuple[Case, Found]]
) -> None:
    case, found = all_found["honest_changes"]
    assert told(found) == case.wanted()
    p = case.planted
    lines = spark.createDataFrame(p.lines, history.SCHEMA)
    log = spark.createDataFrame(p.fates, FATE)
    assert miscounted(lines, log) == []
    p.lines[-1] |= {"outcome": "ok", "changed": 9}
    lines = spark.createDataFrame(p.lines, history.SCHEMA)
    [row] = miscounted(lines, log)
    assert row.asDict() == {"op": "cancel", "topic": "t", "told": 9, "logged": 4, "least": 2}


def test_filter_has_to_tell_of_what_no_other_request_of_its_kind_can_have_changed(
    spark: SparkSession,
) -> None:
    p = Planted(range(1, 7))
    for mark in range(1, 7):
        p.cancelled(mark)
        p.keyed(mark, f"k{mark}")
    p.cancel(1, "CANCELLED")
    p.cancel(2, None, "unknown")
    for number, result in ((3, "CANCELLED"), (4, "NOT_FOUND")):
        p.lines.append({"op": "cancel", "client": "c", "start_ms": 3, "end_ms": 4, "outcome": "ok",
                        "topic": "t", "keys": [f"k{number}"], "results": [result]})  # fmt: skip
    p.move(5, "ALREADY_CANCELLED")  # a request of another kind
    p.lines.append({"op": "cancel", "client": "c", "start_ms": 3, "end_ms": 4, "outcome": "ok",
                    "topic": "t", "key_prefix": "k", "changed": 3})  # fmt: skip
    for mark in (5, 6):  # in a later life of the topic
        p.change(mark, topic=f"t{LIFE}9")
    log = spark.createDataFrame(p.fates, FATE)
    for changed, least in ((3, None), (2, 3)):
        p.lines[-1] |= {"changed": changed}
        lines = spark.createDataFrame(p.lines, history.SCHEMA)
        rows = miscounted(lines, log)
        assert [(row["told"], row["logged"], row["least"]) for row in rows] == (
            [] if least is None else [(changed, 6, least)]
        )


def test_answers_that_neither_the_log_nor_clocks_judge_are_counted(spark: SparkSession) -> None:
    p = Planted(range(1, 7))
    p.cancel(1, "ALREADY_FIRED", client="n", request=1, answered=2)
    p.asked_by(6, "n", 3, 12)
    p.cancel(2, "ALREADY_FIRED", client="n", request=4, answered=5)  # no later request
    p.cancel(3, "ALREADY_FIRED", client="n")  # without a number
    p.cancel(4, "ALREADY_FIRED", client="n", request=6, answered=7)
    p.change(4, ended_at_ms=DUE_MS + 4 - ERROR_MS - 1)  # long before the answer
    p.cancelled(5)
    p.cancel(5, "ALREADY_FIRED", client="n", request=8, answered=9)  # untrue
    lines = spark.createDataFrame(p.lines, history.SCHEMA)
    log = spark.createDataFrame(p.fates, FATE)
    tables = {"lines": lines, "fates": log}
    fired = query("changes", "fired_answers", tables).cache()
    found = {row["seq"]: row["later_index"] for row in fired.collect()}
    assert found == {1: 12, 2: None, 3: None, 4: None, 5: None}
    tables |= {"fired_answers": fired}
    for error_ms, unjudged in ((ERROR_MS, 2), (None, 3)):
        [row] = query("changes", "fired_figures", tables, error_ms=error_ms).collect()
        assert row.asDict() == {"answers": 4, "unjudged": unjudged}


def test_delivery_under_another_mark_is_found(
    all_found: dict[str, tuple[Case, Found]],
) -> None:
    case, found = all_found["given_by_others"]
    assert told(found) == case.wanted()


def test_where_a_policy_postpones_timers_they_may_be_due_later_by_as_much(
    all_found: dict[str, tuple[Case, Found]],
) -> None:
    case, found = all_found["postponed"]
    assert told(found) == case.wanted()


def test_what_only_looks_wrong_is_not_blamed(all_found: dict[str, tuple[Case, Found]]) -> None:
    case, found = all_found["honest"]
    assert told(found) == case.wanted()
    assert {*case.expected.values()} == {*verdict.FINE} - {
        "replaced", "rescheduled", "rejected", "kept", "carried"
    }  # fmt: skip
