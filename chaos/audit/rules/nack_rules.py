"""Nacks: violations of the promises about nacked messages.

docs/audit.md lists these violations.

The attempt shows whether a delivery was made before or after a nack, as for acks (verdict.py): the
replay knows the highest attempt before the nack. The leader recorded the time of a delivery
(`handed_out_ms`). Without `handed_out_ms`, `nacked_early` is not judged.
"""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import SLOT, Tables, answers, messages, name_of, with_runs
from chaos.oracle.group_story import NACKED

GRACE_MS: Final = 15_000
"""The longest wait for a redelivery after the nack's time: more than any lease of a workload."""


def judged_nacks(
    lines: DataFrame, log_nacks: DataFrame, log_acks: DataFrame, *, until_ms: int,
    clock_error_ms: int | None = None,
) -> Tables:  # fmt: skip
    """Return violation -> one row per offending message, with the evidence.

    Args:
        lines: the histories.
        log_nacks: slot, attempts, not_before_ms, return_index.
        log_acks: slot, count; expired messages included.
        until_ms: the time of the clients' last read, Unix ms.
        clock_error_ms: the greatest difference between the clients' clocks and the cluster's; None:
            unknown, and `nack_untrue` is not judged.
    """
    heads = ("topic", "group", "handed_out_ms")
    given = messages(lines, heads, queue_offset="offsets", attempt="attempts")
    after = log_nacks.withColumnRenamed("attempts", "nacked").join(given, [*SLOT])
    after = after.where("attempt > nacked")
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
    told = answers(lines, ["nack"], ["NACKED"]).distinct()
    untold = told.join(log_nacks.select(*SLOT), [*SLOT], "left_anti")
    found = {"nacked_early": early, "nacked_lost": lost, "nack_lost": untold}
    if clock_error_ms is not None:
        found["nack_untrue"] = _sooner(lines, log_nacks, clock_error_ms)
    return found


def _sooner(lines: DataFrame, log_nacks: DataFrame, clock_error_ms: int) -> DataFrame:
    """Return the messages that no nack in the log delays for as long as a confirmed nack."""
    least_ms = F.max(F.col("start_ms") + F.col("delay_ms") - clock_error_ms).alias("least_ms")
    told = answers(lines, ["nack"], ["NACKED"], "start_ms", "delay_ms")
    told = told.where("delay_ms IS NOT NULL").groupBy(*SLOT).agg(least_ms)
    latest = log_nacks.groupBy(*SLOT).agg(F.max("not_before_ms").alias("not_before_ms"))
    return told.join(latest, [*SLOT]).where("not_before_ms < least_ms")


def judged(
    lines: DataFrame, story: Tables, *, until_ms: int, clock_error_ms: int | None
) -> tuple[Tables, int]:
    """Return violation -> offenders, and the number of nacks. Arguments as `judged_nacks`."""
    log_nacks = story["returns"].where(F.col("why") == NACKED)
    count = log_nacks.count()
    if not (count or lines.where("op = 'nack'").head(1)):
        return {}, 0
    expired = story["expired"].select(*SLOT).withColumn("count", F.lit(1).cast("bigint"))
    done = story["acks"].select(*SLOT, "count").unionByName(expired)
    found = judged_nacks(lines, log_nacks, done, until_ms=until_ms, clock_error_ms=clock_error_ms)
    over = F.broadcast(story["groups"].where("over").select("topic", "group"))
    found["nacked_lost"] = found["nacked_lost"].join(over, ["topic", "group"], "left_anti")
    return {name: rows.select(*SLOT).distinct() for name, rows in found.items()}, count
