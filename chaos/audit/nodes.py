"""What the nodes say: what a majority of their logs holds, who holds something else, and P7.

**One replay is enough.** Frames are compared first, by epoch, kind, time and CRC-32, entry by
entry over all nodes. Entries decide everything, so logs whose frames are equal have equal fates:
the log of one node that agrees with the majority to its end is replayed, for all. A node that
differs is judged by its conflict: the entry is reported, and every timer that the majority's entry
at that index scheduled, fired or cancelled is `diverged`.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom


def agreed(entries: DataFrame, majority: int) -> DataFrame:
    """Return the frames that a majority holds: index, epoch, kind, time_ms, crc32, rows."""
    frame = ("index", "epoch", "kind", "time_ms", "crc32", "rows")
    held = entries.groupBy(*frame).agg(F.count_distinct("node").alias("nodes"))
    return held.where(F.col("nodes") >= majority).select(*frame)


def conflicts(entries: DataFrame, common: DataFrame) -> DataFrame:
    """Return a node's frames that are not the majority's: node, index, epoch, `stale`.

    A stale one is what a deposed leader had appended and could not commit, on a node that was
    not back since: of an older epoch than the majority's frame. Anything else is a divergence.
    Frames above the majority's last are not committed, and not judged.
    """
    theirs = common.select(
        "index", F.col("epoch").alias("their_epoch"), F.col("crc32").alias("crc")
    )
    end = common.agg(F.max("index").alias("end"))
    both = (
        entries.join(F.broadcast(end), F.col("index") <= F.col("end"))
        .join(theirs, "index", "left")
        .where(
            F.col("crc").isNull()
            | (F.col("crc") != F.col("crc32"))
            | (F.col("epoch") != F.col("their_epoch"))
        )
    )
    stale = F.coalesce(F.col("epoch") < F.col("their_epoch"), no())
    return both.select("node", "index", "epoch", stale.alias("stale"))


def ends(entries: DataFrame, common: DataFrame, disputes: DataFrame) -> DataFrame:
    """Return per node the last index up to which its log is the majority's: node, upto, last."""
    end = common.agg(F.max("index").alias("end"))
    lasts = entries.groupBy("node").agg(F.max("index").alias("last"))
    firsts = disputes.groupBy("node").agg(F.min("index").alias("first"))
    upto = F.least("last", "end", F.col("first") - 1)
    return (
        lasts.join(firsts, "node", "left").crossJoin(end).select("node", upto.alias("upto"), "last")
    )


def disputed(fates: DataFrame, disputes: DataFrame) -> DataFrame:
    """Return the fates with `disagree`: a node holds another entry where this timer's lies."""
    index = disputes.where(~F.col("stale")).select("index").distinct()
    starts, finishes = (
        F.broadcast(index.select(F.col("index").alias(name), F.expr("true").alias(flag)))
        for name, flag in (("schedule_index", "start_disputed"), ("end_index", "end_disputed"))
    )
    return (
        fates.join(starts, "schedule_index", "left")
        .join(finishes, "end_index", "left")
        .withColumn("disagree", F.coalesce("start_disputed", "end_disputed", no()))
        .drop("start_disputed", "end_disputed")
    )


def conservation(fates: DataFrame, checkpoints: DataFrame) -> DataFrame:
    """Return P7 at every CHECKPOINT entry: index, time_ms, scheduled, pending, fired, …, balanced.

    `scheduled` and `fired` are what the replay had counted at the entry; the other side counts the
    rows of the fates: scheduled by then, and ended by then or not.
    """
    fates = fates.where(~F.col("end").isin("rejected", "kept"))  # these are no timers
    starts = fates.groupBy(F.col("schedule_index").alias("index")).agg(F.count("*").alias("born"))
    finishes = fates.where("end_index IS NOT NULL").groupBy(F.col("end_index").alias("index"))
    ends = {
        "fired": ("fired",),
        "cancelled": ("cancelled", "replaced", "rescheduled"),
        "dropped": ("dropped",),
    }
    deaths = finishes.agg(
        *(F.count_if(F.col("end").isin(*of)).alias(f"{end}_now") for end, of in ends.items())
    )
    names = ("born", "fired_now", "cancelled_now", "dropped_now")
    events = starts.unionByName(deaths, allowMissingColumns=True).unionByName(
        checkpoints.select("index", "time_ms", "scheduled", F.col("fired").alias("fired_counted")),
        allowMissingColumns=True,
    )
    so_far = Window.orderBy("index").rangeBetween(Window.unboundedPreceding, Window.currentRow)
    born, fired, cancelled, dropped = (
        F.coalesce(F.sum(name).over(so_far), F.lit(0)).alias(name.removesuffix("_now"))
        for name in names
    )
    table = events.select(
        *("index", "time_ms", "scheduled", "fired_counted"), born, fired, cancelled, dropped
    ).where("time_ms IS NOT NULL")
    pending = F.col("born") - F.col("fired") - F.col("cancelled") - F.col("dropped")
    ended = F.col("fired") + F.col("cancelled") + F.col("dropped")
    balanced = (
        (F.col("scheduled") == F.col("pending") + ended)
        & (F.col("fired") == F.col("fired_counted"))
        & (F.col("pending") >= 0)
    )
    return table.withColumn("pending", pending).select(
        *("index", "time_ms", "scheduled", "pending", "fired", "cancelled", "dropped"),
        balanced.alias("balanced"),
    )


def no() -> Column:
    """Return the literal false."""
    return F.expr("false")
