"""All planted cases of test_audit.py, judged together."""

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit import job
from chaos.audit.rules.queries import RunEvidence
from chaos.audit.rules.verdict import Clocks
from chaos.oracle.tables import STORY
from tests.chaos.audit_cases import (
    ERROR_MS,
    POSTPONED_MS,
    UNTIL_MS,
    Case,
    given_by_others,
    honest,
    honest_changes,
    of_changes,
    postponed,
    told_by,
    violations,
)

DISPUTED = 77

CASES = (violations, of_changes, honest_changes, honest, given_by_others, postponed)


def verdicts(spark: SparkSession, folder: Path, cases: Sequence[Case]) -> DataFrame:
    """Judge all cases; return the verdict table."""
    tables = told_by(spark, cases)
    index = F.when(F.col("disagree"), DISPUTED).otherwise(F.col("schedule_index"))
    fates = tables["fates"].withColumn("schedule_index", index.cast("bigint")).drop("disagree")
    by_ms = [(f"t{len(cases) - 1}", POSTPONED_MS)]
    story = {
        **{
            name: spark.createDataFrame([], from_arrow_schema(schema))
            for name, schema in STORY.items()
        },
        "acks": tables["acks"],
        "expired": tables["expired"],
        "postponed": spark.createDataFrame(by_ms, "topic STRING, by_ms BIGINT"),
        "disputes": spark.createDataFrame([(DISPUTED, False)], "index BIGINT, stale BOOLEAN"),
    }
    evidence = RunEvidence({"lines": tables["lines"]} | story, folder)
    job.tell_times(evidence, [], Clocks(UNTIL_MS, ERROR_MS))
    evidence.keep("fates", fates)
    for name in ("asks", "given"):
        evidence.keep(name, evidence.query("clients", name))
    return job._write_verdicts(evidence)
