"""The nodes' logs: the frames that a majority holds, and the frames that differ from them.

**One replay is enough.** Frames are compared first, by epoch, kind, time and CRC-32, entry by entry
over all nodes. Entries decide all fates, so logs with equal frames have equal fates. One log that
agrees with the majority is replayed, for all nodes. If a node's entry differs, the entry is
reported. Each timer that the majority's entry at that index scheduled, fired or cancelled is
`diverged`.

**Lives.** A node whose log was lost or damaged begins a new log after a snapshot. The new log is
another life of the node, and is compared with the other nodes from its beginning. The entries of
the old life count as held by the node, too. A snapshot covers committed entries only. Below its end
fewer than a majority of logs may be left. If these differ, the frame of the latest epoch counts.
The replay reads lives that agree with the majority, one after the other.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom


def agreed(entries: DataFrame, majority: int, floor: int = 0) -> DataFrame:
    """Return the frames that a majority holds: index, epoch, kind, time_ms, crc32, rows, nodes.

    `nodes` is the number of nodes that hold the frame. Snapshots prove that the entries up to
    `floor` are committed: for them one node is enough.
    """
    frame = ("index", "epoch", "kind", "time_ms", "crc32", "rows")
    held = entries.groupBy(*frame).agg(F.count_distinct("node").alias("nodes"))
    order = F.struct(F.col("nodes") >= majority, "epoch", "nodes")
    best = held.groupBy("index").agg(F.max_by(F.struct(*frame, "nodes"), order).alias("best"))
    return best.select("best.*").where((F.col("nodes") >= majority) | (F.col("index") <= floor))


def epochs(common: DataFrame) -> DataFrame:
    """Return one row per epoch: epoch, since_ms, entries, last, began_ms, fired_ms.

    `entries` is their number, `last` the index of the last one. `since_ms` is the time of the EPOCH
    entry, which is the time of the entry before it. `began_ms` is the time of the next entry, and
    `fired_ms` of the first FIRE; null if there is none.
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
    """Return the gaps of `common` from entry 1 to its last entry: from, to, both inclusive."""
    before = F.lag("index", 1, 0).over(Window.orderBy("index"))
    holes = common.select((before + 1).alias("from"), (F.col("index") - 1).alias("to"))
    return holes.where(F.col("from") <= F.col("to"))


def thin(common: DataFrame, majority: int) -> DataFrame:
    """Return the stretches of entries that fewer than a majority hold: from, to, both inclusive."""
    rows = common.where(F.col("nodes") < majority)
    run = F.col("index") - F.row_number().over(Window.orderBy("index"))
    return (
        rows.withColumn("run", run)
        .groupBy("run")
        .agg(F.min("index").alias("from"), F.max("index").alias("to"))
        .drop("run")
    )


def conflicts(entries: DataFrame, common: DataFrame, end: int) -> DataFrame:
    """Return the frames that differ from the majority's: node, life, index, epoch, `stale`.

    A stale frame was appended by a deposed leader and not committed, and its node has not followed
    a later leader since. It has an older epoch than the majority's frame, and no frame of the
    majority follows it in its life: a leader removes stale frames before it appends to a log. Any
    other frame is a divergence. Frames above `end`, the majority's last entry, are not committed
    and not judged.
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
    """Return the frames whose epoch or time is below the previous frame's.

    Columns: node, life, index, epoch, time_ms. In a correct log neither value falls.
    """
    order = Window.partitionBy("node", "life").orderBy("index")
    falls = [F.col(name) < F.lag(name).over(order) for name in ("epoch", "time_ms")]
    frames = entries.withColumn("falls", F.coalesce(falls[0] | falls[1], no()))
    return frames.where("falls").select("node", "life", "index", "epoch", "time_ms")


def short(
    held: Sequence[Mapping[str, Any]], known: Mapping[str, int], lost: Container[str]
) -> list[dict[str, Any]]:
    """Return the nodes whose logs end before an entry that they had: node, last, known.

    `held`: from `ends`. `known`: node -> the last entry in its manifest or its reports. `lost`:
    nodes that lost their disks; they are not judged.
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
    """Return one row per life of a node's log: node, life, first, last, upto, stale, diverged.

    The life agrees with the majority up to `upto`. `end`: the majority's last entry. `stale` and
    `diverged` are numbers of frames.
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
    """Return the fates with `disagree`: whether a node's entry differs at one of their indexes.

    `disputes`: the frames from `conflicts` that are not stale; None: there are none.
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
