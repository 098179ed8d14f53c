"""What became of nacks: promises about messages that were given back, judged by joins.

    nacked_early  P5  handed out again before the time that its nack named, on the cluster's clock
    nacked_lost   P1  its time came long ago, it is not acked and has not expired, and nobody was
                  given it again
    nack_lost     P5  a consumer was told NACKED, but the log has no nack of the message
    nack_untrue   P5  a consumer was told NACKED with a delay, and no nack in the log puts the
                      message off for so long

As for acks (chaos/audit/rules/verdict.py) the attempt says on which side of a nack a delivery lies:
the replay knows the highest that was possible before it. When a message was handed out, the leader
says (`handed_out_ms`); a history without that is judged by the other two alone.
"""

from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules import beside
from chaos.audit.rules.client_tables import SLOT, name_of, with_runs
from chaos.oracle.group_story import NACKED

GRACE_MS: Final = 15_000
"""After its time a message has so long to come again: the longest lease of a workload, and some."""


def judged_nacks(
    lines: DataFrame, log_nacks: DataFrame, log_acks: DataFrame, *, until_ms: int,
    clock_error_ms: int | None = None,
) -> dict[str, DataFrame]:  # fmt: skip
    """Return violation -> one row per message that breaks it, with the evidence.

    `log_nacks`: slot, attempts, not_before_ms, return_index; `log_acks`: slot, count, also of what
    expired; `until_ms`: when the clients looked last; `clock_error_ms`: how far their clocks and
    the cluster's differ at most, None: unknown.
    """
    given = _given(lines)
    after = (
        log_nacks.withColumnRenamed("attempts", "nacked")
        .join(given, [*SLOT])
        .where("attempt > nacked")
    )
    early = after.where("handed_out_ms < not_before_ms")
    again = after.select(*SLOT, "return_index").distinct()
    read = lines.where("op = 'open'").select(
        name_of("topic").alias("name"), name_of("group").alias("group_name")
    )
    ours = (name_of("topic") == F.col("name")) & (name_of("group") == F.col("group_name"))
    lost = (
        log_nacks.where(F.col("not_before_ms") + GRACE_MS <= until_ms)
        .join(F.broadcast(read.distinct()), ours, "left_semi")
        .join(again, [*SLOT, "return_index"], "left_anti")
    )
    lost = with_runs(lost, log_acks.select(*SLOT, "count"), "left_anti")
    untold = _told(lines).join(log_nacks.select(*SLOT), [*SLOT], "left_anti")
    found = {"nacked_early": early, "nacked_lost": lost, "nack_lost": untold}
    if clock_error_ms is not None:
        found["nack_untrue"] = _sooner(lines, log_nacks, clock_error_ms)
    return found


def _sooner(lines: DataFrame, log_nacks: DataFrame, clock_error_ms: int) -> DataFrame:
    """Return the messages that no nack of the log puts off for as long as a client was told."""
    told = (
        lines.where("op = 'nack' AND outcome = 'ok' AND delay_ms IS NOT NULL")
        .select(
            *("topic", "group", "start_ms", "delay_ms"),
            F.inline(F.arrays_zip("offsets", "results")),
        )
        .withColumnRenamed("offsets", "queue_offset")
        .where("results = 'NACKED'")
        .groupBy(*SLOT)
        .agg(F.max(F.col("start_ms") + F.col("delay_ms") - clock_error_ms).alias("least_ms"))
    )
    latest = log_nacks.groupBy(*SLOT).agg(F.max("not_before_ms").alias("not_before_ms"))
    return told.join(latest, [*SLOT]).where("not_before_ms < least_ms")


def _given(lines: DataFrame) -> DataFrame:
    """Return each message's deliveries: slot, attempt, handed_out_ms."""
    heads, names = ("topic", "group", "handed_out_ms"), ("queue_offset", "attempt")
    rows = lines.where("op = 'deliver'").select(
        *heads, F.inline(F.arrays_zip("offsets", "attempts"))
    )
    return rows.toDF(*heads, *names)


def _told(lines: DataFrame) -> DataFrame:
    """Return the messages of which a consumer was told NACKED."""
    rows = (
        lines.where("op = 'nack' AND outcome = 'ok'")
        .select("topic", "group", F.inline(F.arrays_zip("offsets", "results")))
        .toDF("topic", "group", "queue_offset", "result")
    )
    return rows.where("result = 'NACKED'").select(*SLOT).distinct()


def nacked(
    lines: DataFrame, story: dict[str, DataFrame], summary: dict[str, Any], *, until_ms: int,
    clock_error_ms: int | None, offenders_max: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the summary's part about nacks: how many, and what is wrong with which."""
    log_nacks = story["returns"].where(F.col("why") == NACKED)
    count = log_nacks.count()
    found: dict[str, DataFrame] = {}
    if count or lines.where("op = 'nack'").head(1):
        expired = story["expired"].select(*SLOT).withColumn("count", F.lit(1).cast("bigint"))
        done = story["acks"].select(*SLOT, "count").unionByName(expired)
        found = judged_nacks(
            lines, log_nacks, done, until_ms=until_ms, clock_error_ms=clock_error_ms
        )
        over = F.broadcast(story["groups"].where("over").select("topic", "group"))
        found["nacked_lost"] = found["nacked_lost"].join(over, ["topic", "group"], "left_anti")
    wrong = {name: rows.select(*SLOT).distinct() for name, rows in found.items()}
    return {"nacked": count} | beside.judged(summary, "nack", wrong, offenders_max=offenders_max)
