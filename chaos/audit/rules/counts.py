"""P7 and P6 by counts and digests: those of the log, of the replay, and of the nodes' own reports.

    scheduled = pending + fired + cancelled + dropped

The counts after an entry follow from the timers' fates: the timers that were scheduled up to that
entry, and their ends up to it. They must be equal in three places:

- the fates
- the replay, which counts separately, at every CHECKPOINT
- the nodes' reports during the run (RUN/states.jsonl), which come from their states, not their logs

All nodes must report the same digest of their state at a CHECKPOINT.
"""

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.history.history import COUNTS

_ENDS: Final = {
    "fired": ("fired",),
    "cancelled": ("cancelled", "replaced", "rescheduled"),
    "dropped": ("dropped",),
}


def counted(fates: DataFrame, carried: DataFrame, at: DataFrame) -> DataFrame:
    """Return the counts after each entry of `at` (column index): index, and COUNTS.

    `fates`, `carried`: tables of the replay. A dead letter counts as a timer that was scheduled and
    fired.
    """
    columns = ("schedule_index", "end_index", "end")
    # A rejected or kept row made no timer.
    rows = fates.where(~F.col("end").isin("rejected", "kept")).select(*columns)
    rows = rows.unionByName(carried.select(*columns))
    starts = rows.groupBy(F.col("schedule_index").alias("index")).agg(
        F.count("*").alias("scheduled")
    )
    finishes = rows.where("end_index IS NOT NULL").groupBy(F.col("end_index").alias("index"))
    deaths = finishes.agg(
        *(F.count_if(F.col("end").isin(*of)).alias(end) for end, of in _ENDS.items())
    )
    asked = at.select("index", F.expr("true").alias("asked")).distinct()
    events = starts.unionByName(deaths, allowMissingColumns=True).unionByName(
        asked, allowMissingColumns=True
    )
    so_far = Window.orderBy("index").rangeBetween(Window.unboundedPreceding, Window.currentRow)
    sums = [
        F.coalesce(F.sum(name).over(so_far), F.lit(0)).alias(name) for name in ("scheduled", *_ENDS)
    ]
    pending = F.expr("scheduled - fired - cancelled - dropped")
    table = events.select("index", "asked", *sums).where("asked")
    return table.withColumn("pending", pending).select("index", *COUNTS)


def conservation(counts: DataFrame, checkpoints: DataFrame) -> DataFrame:
    """Return P7 at every CHECKPOINT entry: index, time_ms, COUNTS, balanced.

    `counts`: from `counted`. `scheduled` is the replay's own count at the entry. A row is balanced
    if the replay's `scheduled` and `fired` equal those of `counts`.
    """
    theirs = checkpoints.select(
        "index", "time_ms", F.col("scheduled").alias("told"), F.col("fired").alias("told_fired")
    )
    balanced = F.expr("told = scheduled AND told_fired = fired AND pending >= 0")
    rows = counts.join(theirs, "index").withColumn("balanced", balanced)
    return rows.withColumn("scheduled", F.col("told")).select(
        "index", "time_ms", *COUNTS, "balanced"
    )


def miscounted(counts: DataFrame, states: DataFrame) -> DataFrame:
    """Return the nodes' reports that differ from the log: node, index, said_*, COUNTS.

    `counts`: from `counted`. `states`: lines of states.jsonl.
    """
    said = states.where("scheduled IS NOT NULL")
    theirs = [F.col(name).alias(f"said_{name}") for name in COUNTS]
    said = said.select("node", "index", *theirs).distinct()
    same = F.expr(" AND ".join(f"said_{name} <=> {name}" for name in COUNTS))
    return said.join(counts, "index").where(~same).select(*said.columns, *COUNTS)


def diverged_states(states: DataFrame) -> DataFrame:
    """Return the CHECKPOINTs with more than one digest, of several nodes or of one: P6.

    index, digests: a text with each node and its digest.
    """
    said = states.where("digest IS NOT NULL").select("index", "digest", "node").distinct()
    by_index = said.groupBy("index").agg(
        F.count_distinct("digest").alias("n"),
        F.concat_ws(", ", F.array_sort(F.collect_list(F.concat_ws(" ", "node", "digest")))).alias(
            "digests"
        ),
    )
    return by_index.where("n > 1").drop("n")


def frozen_digests(states: DataFrame, counts: DataFrame) -> DataFrame:
    """Return digests that were reported for states with different counts: index (lowest), digest.

    A digest that does not change with its state proves nothing. `counts`: from `counted`.
    """
    said = states.where("digest IS NOT NULL").select("index", "digest").distinct()
    counted = F.struct(*(name for name in COUNTS if name != "pending"))
    by_digest = said.join(counts, "index").groupBy("digest")
    found = by_digest.agg(F.min("index").alias("index"), F.count_distinct(counted).alias("n"))
    return found.where("n > 1").select("index", "digest")
