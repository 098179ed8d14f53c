"""What the nodes' logs say: what a majority of them holds, and who holds something else.

**One replay is enough.** Frames are compared first, by epoch, kind, time and CRC-32, entry by entry
over all nodes. Entries decide everything, so logs whose frames are equal have equal fates: one log
that agrees with the majority is replayed, for all. A node that differs is judged by its conflict:
the entry is reported, and every timer that the majority's entry at that index scheduled, fired or
cancelled is `diverged`.

**Lives.** A node that lost its log, or found it damaged, begins anew after a snapshot: it has
another life, compared with the others from there on. What its old life held was held. A snapshot
has committed entries alone, so below its end fewer than a majority may be left to bear witness; of
these the latest epoch's counts. What is replayed is put together of lives that agree.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom


def agreed(entries: DataFrame, majority: int, floor: int = 0) -> DataFrame:
    """Return the frames that a majority holds: index, epoch, kind, time_ms, crc32, rows, nodes.

    Up to entry `floor`, which snapshots say to be committed, one of the `nodes` that have it is
    enough.
    """
    frame = ("index", "epoch", "kind", "time_ms", "crc32", "rows")
    held = entries.groupBy(*frame).agg(F.count_distinct("node").alias("nodes"))
    order = F.struct(F.col("nodes") >= majority, "epoch", "nodes")
    best = held.groupBy("index").agg(F.max_by(F.struct(*frame, "nodes"), order).alias("best"))
    return best.select("best.*").where((F.col("nodes") >= majority) | (F.col("index") <= floor))


def epochs(common: DataFrame) -> DataFrame:
    """Return what is held of each epoch: epoch, entries, last (its index), and three times.

    since_ms: of its first entry, EPOCH, which has the time of the entry before it; began_ms: of the
    first entry after that; fired_ms: of its first FIRE. Null where there is none.
    """
    fired_ms = F.min(F.when(F.col("kind") == "FIRE", F.col("time_ms"))).alias("fired_ms")
    return common.groupBy("epoch").agg(
        F.min("time_ms").alias("since_ms"),
        F.count("*").alias("entries"),
        F.max("index").alias("last"),
        F.min(F.when(F.col("kind") != "EPOCH", F.col("time_ms"))).alias("began_ms"),
        fired_ms,
    )


def missing(common: DataFrame) -> DataFrame:
    """Return the entries, from the first to the last in `common`, that it lacks: from, to."""
    before = F.lag("index", 1, 0).over(Window.orderBy("index"))
    holes = common.select((before + 1).alias("from"), (F.col("index") - 1).alias("to"))
    return holes.where(F.col("from") <= F.col("to"))


def thin(common: DataFrame, majority: int) -> DataFrame:
    """Return the stretches that fewer than a majority have, once others began anew: from, to."""
    rows = common.where(F.col("nodes") < majority)
    run = F.col("index") - F.row_number().over(Window.orderBy("index"))
    return (
        rows.withColumn("run", run)
        .groupBy("run")
        .agg(F.min("index").alias("from"), F.max("index").alias("to"))
        .drop("run")
    )


def conflicts(entries: DataFrame, common: DataFrame, end: int) -> DataFrame:
    """Return a node's frames that are not the majority's: node, life, index, epoch, `stale`.

    A stale one is what a deposed leader had appended and could not commit, on a node that was not
    back since: of an older epoch than the majority's frame, and at the end of its life. A leader
    that brings a log up to date cuts such frames off before it appends: a frame of the majority
    behind one proves that it is none. Anything else is a divergence. Frames above the majority's
    last, `end`, are not committed, and not judged.
    """
    theirs = common.select(
        "index", F.col("epoch").alias("their_epoch"), F.col("crc32").alias("crc")
    )
    both = entries.where(F.col("index") <= end).join(theirs, "index", "left")
    same = F.coalesce(
        (F.col("crc") == F.col("crc32")) & (F.col("epoch") == F.col("their_epoch")), no()
    )
    matched = both.where(same).groupBy("node", "life").agg(F.max("index").alias("matched"))
    differ = both.where(~same).join(F.broadcast(matched), ["node", "life"], "left")
    is_last = F.col("index") > F.coalesce("matched", F.lit(0))
    stale = F.coalesce(F.col("epoch") < F.col("their_epoch"), no()) & is_last
    return differ.select("node", "life", "index", "epoch", stale.alias("stale"))


def falling(entries: DataFrame) -> DataFrame:
    """Return the frames whose epoch or time is below that of the frame before: node, life, index.

    In one log neither ever falls.
    """
    order = Window.partitionBy("node", "life").orderBy("index")
    falls = [F.col(name) < F.lag(name).over(order) for name in ("epoch", "time_ms")]
    frames = entries.withColumn("falls", F.coalesce(falls[0] | falls[1], no()))
    return frames.where("falls").select("node", "life", "index", "epoch", "time_ms")


def short(
    held: Sequence[Mapping[str, Any]], known: Mapping[str, int], lost: Container[str]
) -> list[dict[str, Any]]:
    """Return the nodes whose logs end before an entry that they had: node, last, known.

    `held` as from `ends`; `known`: node -> the last entry that its manifest or its own words tell
    of. Nothing is asked of the `lost`, whose disks are gone.
    """
    lasts = dict.fromkeys(known, 0)
    for life in held:
        lasts[life["node"]] = max(lasts.get(life["node"], 0), int(life["last"]))
    return [
        {"node": node, "last": lasts[node], "known": index}
        for node, index in sorted(known.items())
        if index > lasts[node] and node not in lost
    ]


def ends(entries: DataFrame, disputes: DataFrame, end: int) -> DataFrame:
    """Return what each life of a node's log holds: node, life, first, last, upto, stale, diverged.

    Up to `upto` it is the majority's, whose last entry is `end`.
    """
    spans = entries.groupBy("node", "life").agg(
        F.min("index").alias("first"), F.max("index").alias("last")
    )
    counts = disputes.groupBy("node", "life").agg(
        F.min("index").alias("dispute"),
        F.count_if("stale").alias("stale"),
        F.count_if(~F.col("stale")).alias("diverged"),
    )
    upto = F.least("last", F.lit(end), F.col("dispute") - 1).alias("upto")
    both = spans.join(counts, ["node", "life"], "left")
    return both.select("node", "life", "first", "last", upto, "stale", "diverged").fillna(
        0, ["stale", "diverged"]
    )


def disputed(fates: DataFrame, disputes: DataFrame | None) -> DataFrame:
    """Return the fates with `disagree`: a node holds another entry where this timer's lies.

    `disputes` as from `conflicts`, those that are no stale ones; None: there are none.
    """
    if disputes is None:
        return fates.withColumn("disagree", no())
    index = disputes.select("index").distinct()
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


def no() -> Column:
    """Return the literal false."""
    return F.expr("false")
