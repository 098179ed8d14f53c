"""What is sifted gets the verdicts that the rules alone would have given."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.testing import assertDataFrameEqual

from chaos.audit import job
from chaos.audit.columns import sieve
from chaos.audit.rules import plain_timers
from chaos.audit.rules.verdict import Clocks
from chaos.history import history
from chaos.history.history import RunFolder
from chaos.oracle.tables import CARRIED, STORY
from tests.chaos.test_audit import (
    ERROR_MS,
    POSTPONED_MS,
    UNTIL_MS,
    Case,
    Planted,
    honest,
    honest_changes,
    of_changes,
    postponed,
    told_by,
    violations,
)

pytestmark = pytest.mark.spark

DISPUTED = 77


def given_by_others() -> Case:
    """Timers that are fine, but for a delivery that names them under another timer's mark.

    Most have keys of their own; two share one, one after the other.
    """
    p = Planted(range(1, 9))
    for mark in (1, 2, 3, 4, 6, 7):
        p.keyed(mark, "shared" if mark in (3, 4) else f"k{mark}")
    p.change(4, schedule_index=8)
    expected = dict.fromkeys(range(1, 9), "ok")
    for mark, other in ((2, 999), (5, 6)):
        p.give(mark, marks=[other])
        expected[mark] = "diverged"
    return Case(p, expected)


def verdicts(
    spark: SparkSession, folder: Path, cases: Sequence[Case], parts: int
) -> tuple[RunFolder, DataFrame]:
    """Judge all cases, cut into parts or not; return the run and its verdict table."""
    run = RunFolder(folder)
    clocks = Clocks(UNTIL_MS, ERROR_MS)
    tables = told_by(spark, cases)
    lines, fates = tables["lines"], tables["fates"]
    index = F.when(F.col("disagree"), DISPUTED).otherwise(F.col("schedule_index"))
    fates = fates.withColumn("schedule_index", index.cast("bigint")).drop("disagree")
    groups = "topic STRING, `group` STRING, start_offset BIGINT, over BOOLEAN, sought BOOLEAN"
    story = {
        "fates": fates,
        "acks": tables["acks"],
        "expired": tables["expired"],
        "groups": spark.createDataFrame([], groups),
        "carried": spark.createDataFrame([], from_arrow_schema(CARRIED)),
        "deletions": spark.createDataFrame([], "topic STRING, delete_index BIGINT"),
        "series": spark.createDataFrame([], from_arrow_schema(STORY["series"])),
        "postponed": spark.createDataFrame(
            [(f"t{len(cases) - 1}", POSTPONED_MS)], "topic STRING, by_ms BIGINT"
        ),
    }
    asks, given = job._asked_and_given(lines, run, parts)
    path = run.audit / "work/replay/fates/part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(fates.toArrow(), path, row_group_size=50)
    disputed = spark.createDataFrame([(DISPUTED,)], "index BIGINT")
    told = job.Witnesses(asks, fates, given, disputed)
    return run, job._judged(run, lines, told, story, clocks=clocks, parts=parts)


CASES = (violations, of_changes, honest_changes, honest, given_by_others, postponed)


@pytest.mark.long  # all cases are audited again, in three parts
def test_what_is_sifted_has_the_verdicts_of_the_rules_alone(
    spark: SparkSession,
    judged: tuple[dict[str, Case], DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sieve, "RUN_BITS", 2)
    monkeypatch.setattr(sieve, "ROWS_PER_TASK", 100)
    cases, alone = judged
    run, table = verdicts(spark, tmp_path, [*cases.values()], 3)
    assertDataFrameEqual(table, alone)
    # In every part something is plain, and of the other timers everything is left to the rules.
    plain_rows = [*map(pq.read_table, sorted((run.audit / "verdicts.parquet").glob("plain-*")))]
    assert len(plain_rows) == 3
    assert all(map(len, plain_rows))
    keys = {(row["topic"], row["key"]) for each in plain_rows for row in each.to_pylist()}
    others = f"t{[*cases].index(given_by_others.__name__)}"
    assert {key for topic, key in keys if topic == others and key} == {"k1", "k7"}
    wrong = table.where("verdict != 'ok'").count()
    assert wrong < table.count() - sum(map(len, plain_rows))
    assert len([*(run.audit / "work/named").iterdir()]) == 2  # and once more, for given_by_others


def test_the_plain_verdicts_have_the_columns_of_the_table(
    judged: tuple[dict[str, Case], DataFrame],
) -> None:
    _, table = judged
    kinds = {"bigint": "int64", "string": "string"}
    assert [(name, kinds[kind]) for name, kind in table.dtypes] == [
        (field.name, str(field.type)) for field in plain_timers.VERDICTS
    ]


def test_lines_of_acks_are_sure_where_all_of_their_stretches_are_acked(
    spark: SparkSession,
) -> None:
    size = 1 << plain_timers.STRETCH_BITS
    runs = [(0, 2 * size + 5), (2 * size + 5, size - 5), (4 * size, size - 1), (5 * size, size)]
    acks = spark.createDataFrame(
        [("t", "g", first, count, 3, 2) for first, count in runs] + [("t", "h", 5, 1, 4, 1)],
        "topic STRING, `group` STRING, queue_offset BIGINT, count BIGINT, ack_epoch BIGINT,"
        " attempts BIGINT",
    )
    found = sieve.acked(acks)
    held = {0: size, 1: size, 2: size, 4: size - 1, 5: size}
    wanted = [("t", "g", at, 3, 2, n) for at, n in held.items()] + [("t", "h", 0, 4, 1, 1)]
    names = "topic STRING, `group` STRING, stretch BIGINT, ack_epoch BIGINT, attempts BIGINT"
    assertDataFrameEqual(found, spark.createDataFrame(wanted, names + ", held BIGINT"))
    of = itertools.product("gh", ([0], [3 * size - 1, 7], [3 * size], [5 * size], [0, 5 * size]))
    lines = [
        {"op": "ack", "outcome": "ok", "topic": "t", "group": group, "offsets": offsets}
        for group, offsets in of
    ]
    left = sieve.not_surely_kept(spark.createDataFrame(lines, history.SCHEMA), found).collect()
    unsure = [row["offsets"] for row in left if row["group"] == "g"]
    assert sorted(unsure) == [[0, 5 * size], [3 * size]]
    assert len([row for row in left if row["group"] == "h"]) == 5


def test_a_topic_with_several_lives_or_sought_groups_is_left_to_the_rules(
    spark: SparkSession,
) -> None:
    def topics(*names: str) -> DataFrame:
        return spark.createDataFrame([(name,) for name in names], "topic STRING")

    read = [("a", "g", 7), ("a", "h", 0), ("sought", "g", 0), ("dropped", "g", 0), ("b", "g", 1)]
    groups = [("a", True), ("sought", True), ("b", False)]
    found = sieve.starts(
        topics("b", "silent", "sought", "dropped"),
        spark.createDataFrame(read, "topic STRING, `group` STRING, start_offset BIGINT"),
        spark.createDataFrame(groups, "topic STRING, sought BOOLEAN"),
        topics("dropped"),
    )
    assert {topic: each.tolist() for topic, each in found.items()} == {"b": [1], "silent": []}
