"""P7 and P6 by the nodes' own word: what is counted after each entry, and who says otherwise."""

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertDataFrameEqual

from chaos.audit.rules.queries import query
from chaos.history.history import COUNTS, STATES_SCHEMA

pytestmark = pytest.mark.spark

FATE = "schedule_index BIGINT, end STRING, end_index BIGINT"
COUNTED = "index BIGINT, " + ", ".join(f"{name} BIGINT" for name in COUNTS)


@pytest.fixture(scope="module")
def table(spark: SparkSession) -> DataFrame:
    """After some entries: every end, a key that was refused, a dead letter."""
    fates = [
        (2, "fired", 4), (2, "cancelled", 7), (2, "pending", None), (2, "held", None),
        (3, "replaced", 6), (3, "rescheduled", 7), (3, "rejected", 3), (3, "kept", 3),
        (5, "dropped", 8),
    ]  # fmt: skip
    at = spark.createDataFrame([(i,) for i in (0, 3, 6, 6, 7, 9, 11)], "index BIGINT")
    carried = spark.createDataFrame([(11, "fired", 11)], FATE)
    tables = {"fates": spark.createDataFrame(fates, FATE), "carried": carried, "points": at}
    return query("counts", "counted", tables).cache()


def test_what_is_counted_after_an_entry_is_what_began_and_ended_by_then(
    spark: SparkSession, table: DataFrame
) -> None:
    wanted = [
        (0, 0, 0, 0, 0, 0),
        (3, 6, 6, 0, 0, 0),
        (6, 7, 5, 1, 1, 0),
        (7, 7, 3, 1, 3, 0),
        (9, 7, 2, 1, 3, 1),
        (11, 8, 2, 2, 3, 1),
    ]
    assertDataFrameEqual(table, spark.createDataFrame(wanted, COUNTED))


def test_checkpoints_that_the_replay_counted_otherwise_do_not_balance(
    spark: SparkSession, table: DataFrame
) -> None:
    points = [(3, 30, 6, 0), (6, 60, 8, 1), (9, 90, 7, 2), (11, 110, 8, 2)]
    columns = "index BIGINT, time_ms BIGINT, scheduled BIGINT, fired BIGINT"
    checkpoints = spark.createDataFrame(points, columns)
    found = query("counts", "conservation", {"counted": table, "checkpoints": checkpoints})
    found = found.orderBy("index")
    assert [(row["index"], row["scheduled"], row["balanced"]) for row in found.collect()] == [
        (3, 6, True),
        (6, 8, False),  # one more than there are
        (9, 7, False),  # one more fired
        (11, 8, True),
    ]


def test_a_node_that_says_another_count_is_named_once(
    spark: SparkSession, table: DataFrame
) -> None:
    said = [
        ("n1", 1, 6, None, 7, 5, 1, 1, 0),
        ("n2", 1, 6, None, 7, 5, 1, 1, 0),
        ("n2", 1, 11, None, 8, 2, 2, 3, 1),
        ("n3", 1, 9, None, 7, 3, 1, 3, 0),
        ("n3", 5, 9, None, 7, 3, 1, 3, 0),  # said again
        ("n3", 6, 11, "ab", None, None, None, None, None),
    ]
    states = spark.createDataFrame(said, STATES_SCHEMA)
    found = query("counts", "miscounted", {"counted": table, "states": states}).collect()
    assert [tuple(row) for row in found] == [("n3", 9, 7, 3, 1, 3, 0, 7, 2, 1, 3, 1)]


def test_each_count_is_looked_at(spark: SparkSession, table: DataFrame) -> None:
    right = dict(zip(COUNTS, (8, 2, 2, 3, 1), strict=True))
    said = [(n, 1, 11, None, *(right | {n: right[n] + 1}).values()) for n in COUNTS]
    states = spark.createDataFrame(said, STATES_SCHEMA)
    found = query("counts", "miscounted", {"counted": table, "states": states}).collect()
    assert {row["node"] for row in found} == {*COUNTS}


def test_digests_of_one_checkpoint_have_to_be_one(spark: SparkSession) -> None:
    nothing = (None,) * len(COUNTS)
    said = [
        *((node, 1, 6, "aa", *nothing) for node in ("n1", "n2", "n1")),
        *((node, 1, 9, digest, *nothing) for node, digest in (("n1", "ab"), ("n2", "ac"))),
        *(("n3", 1, 12, digest, *nothing) for digest in ("b1", "b2")),  # replayed otherwise
        ("n3", 1, 15, None, 1, 1, 0, 0, 0),
    ]
    states = spark.createDataFrame(said, STATES_SCHEMA)
    found = query("counts", "diverged_states", {"states": states}).orderBy("index")
    assert [tuple(row) for row in found.collect()] == [
        (9, "n1 ab, n2 ac"),
        (12, "n3 b1, n3 b2"),
    ]
