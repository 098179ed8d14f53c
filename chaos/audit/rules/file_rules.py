"""Nodes' files against the log: every pending timer is there once, and no other.

A node's newest manifest names the entry after which its runs hold the pending timers. So a timer
that a flush or a merge has lost is found even if it is due in a year.

    fates   pending after that entry   ─┬─ count, and sum of hashes, per node: equal, nearly always
    runs    timers less tombstones     ─┘  else joined, to name the timers that differ

A key file must have the keys of its run (chaos/spark/state_files.py). The rows of a spill file must
be messages that fired by that entry, at the places that the log has for them. Each message that a
group acked after the entry must be in a spill file.
"""

import itertools
from collections.abc import Container, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import Tables, name_of
from chaos.audit.rules.findings import Findings
from chaos.history.history import RunFolder
from chaos.spark import state_files
from chaos.spark.timerstate import ManifestState, node_states, pending_rows

_HASH_BITS: Final = 0xFFFF_FFFF
"""Bits of a timer's hash that are summed: a hundred million of them stay below 2**63."""


def pending_after(fates: DataFrame, index: int) -> DataFrame:
    """Return the timers that are pending after an entry: seq, due_ms, topic."""
    return fates.where(_is_pending(index)).select("seq", "due_ms", "topic")


def _is_pending(index: int) -> Column:
    """Whether a timer is pending after an entry. Rejected and kept ones end at once."""
    goes_on = F.col("end_index").isNull() | (F.col("end_index") > index)
    return (F.col("schedule_index") <= index) & goes_on


def _sums(weight: Column) -> tuple[Column, Column]:
    """Return the number of timers, and the sum of their hashes."""
    its_hash = F.xxhash64("seq", "due_ms").bitwiseAND(_HASH_BITS)
    return F.coalesce(F.sum(weight), F.lit(0)), F.coalesce(F.sum(weight * its_hash), F.lit(0))


def wrong(fates: DataFrame, rows: DataFrame, index: int) -> DataFrame:
    """Return the timers that one node's rows and the log differ in: seq, due_ms, topic, times.

    `topic`: null if the timer is not pending by the log. `times`: the sum of its rows' weights; -1
    if only its tombstone is there. 1 is right for a pending timer, 0 for any other.
    """
    mine = rows.groupBy("seq", "due_ms").agg(F.sum("weight").alias("times"))
    both = pending_after(fates, index).join(mine.where("times != 0"), ["seq", "due_ms"], "full")
    both = both.withColumn("times", F.coalesce("times", F.lit(0)))
    return both.where("topic IS NULL OR times != 1")


def states_within(run: RunFolder, *, lost: Container[str], end: int) -> list[ManifestState]:
    """Return the manifests of the nodes that were not `lost` for good.

    Raises:
        ValueError: one is of an entry after the majority's last one, `end`. A manifest covers
            committed entries only. So the logs in the folder end too early, and later answers would
            seem to be lost.
        UnknownVersionError: another version wrote a manifest, or a run.
    """
    states = [each for each in node_states(run) if each.node not in lost]
    for each in states:
        if each.index > end:
            raise ValueError(
                f"the state of {each.node} is of entry {each.index}, and the logs of a majority end"
                f" at {end}: an archive ended before its node, or a log was copied before it did"
            )
    return states


def in_queues(
    story: Tables, rows: DataFrame, states: Sequence[ManifestState]
) -> tuple[DataFrame, DataFrame]:
    """Return the untrue messages of spill files, and those that are missing: node, seq, topic, …

    `rows`: state_files.QUEUED.
    """
    fired = "end = 'fired' AND queue_offset IS NOT NULL"
    names = ("seq", "topic", "queue_offset", "due_ms", "ended_at_ms", "end_index")
    places = story["fates"].where(fired).select(*names)
    places = places.unionByName(story["carried"].where(fired).select(*names))
    spark = places.sparkSession
    indexes = spark.createDataFrame([(s.node, s.index) for s in states], "node STRING, index LONG")
    indexes = F.broadcast(indexes)
    held = rows.join(indexes, "node").withColumnsRenamed(
        {"topic": "held_topic", "queue_offset": "held_offset", "due_ms": "held_due_ms"}
    )
    same = "held_offset = queue_offset AND held_due_ms = due_ms AND fired_at_ms = ended_at_ms"
    as_logged = (F.col("held_topic") == name_of("topic")) & F.expr(f"{same} AND end_index <= index")
    both = held.join(places, "seq", "left").where(~F.coalesce(as_logged, F.lit(False)))  # noqa: FBT003
    untrue = both.select(
        "node", "index", "seq",
        F.col("held_topic").alias("topic"), F.col("held_offset").alias("queue_offset"),
    )  # fmt: skip
    last = F.col("queue_offset") + F.col("count") - 1
    acked = story["acks"].join(indexes, F.col("ack_index") > F.col("index")).select(
        "node", "index", "topic", F.explode(F.sequence("queue_offset", last)).alias("queue_offset")
    )  # fmt: skip
    needed = acked.distinct().join(places, ["topic", "queue_offset"]).where("end_index <= index")
    missing = needed.join(rows.select("node", "seq"), ["node", "seq"], "left_anti")
    return untrue, missing.select("node", "index", "seq", "topic", "queue_offset")


def _judge_queues(findings: Findings, story: Tables, states: Sequence[ManifestState]) -> None:
    """Add the violations of spill files."""
    spark = story["fates"].sparkSession
    blocks = spark.createDataFrame([b for s in states for b in s.blocks], state_files.BLOCKS)
    rows = blocks.mapInArrow(state_files.queued, state_files.QUEUED).cache()
    damage = rows.where("damage IS NOT NULL").select("node", "damage").distinct().collect()
    findings.note("damaged_files", [row.asDict() for row in damage])
    broken = {row["node"] for row in damage}
    sound = [each for each in states if each.node not in broken]
    untrue, missing = in_queues(story, rows.where("damage IS NULL"), sound)
    found = {"untrue_in_queues": untrue, "missing_in_queues": missing}
    findings.add(found, order=["node", "seq"])
    rows.unpersist()


def judged(
    findings: Findings, run: RunFolder, story: Tables, states: Sequence[ManifestState]
) -> dict[str, Any]:
    """Add the violations of nodes' files; return their pending timers as a part of the summary.

    Violations: `missing_in_files`, `extra_in_files` (not pending, or more than once),
    `damaged_files`, `untrue_in_queues`, `missing_in_queues`.
    """
    if not states:
        return {"files": [], "files_unread": []}
    fates, files = story["fates"], []
    rows = pending_rows(fates.sparkSession, states)
    sound = F.col("damage").isNull()
    timers, hashes = _sums(F.when(sound, F.col("weight")))
    found = rows.groupBy("node").agg(timers, hashes, F.count("damage"), F.min("damage")).collect()
    has = {node: told for node, *told in found}
    says = _said(fates, sorted({each.index for each in states}))
    for each in states:
        pending, its_hash, damaged, why = has.get(each.node, (0, 0, 0, None))
        files.append({"node": each.node, "index": each.index, "pending": pending})
        if damaged:
            findings.note("damaged_files", [{"node": each.node, "damage": why}], damaged)
        elif (pending, its_hash) != says[each.index]:
            rows = pending_rows(fates.sparkSession, [each])
            place = {"node": F.lit(each.node), "index": F.lit(each.index)}
            bad = wrong(fates, rows, each.index).withColumns(place).cache()
            missing, extra = bad.where("times < 1"), bad.where("times >= 1")
            findings.add({"missing_in_files": missing, "extra_in_files": extra}, order=["seq"])
            bad.unpersist()
    _judge_queues(findings, story, [each for each in states if not each.damage])
    unread = sorted(run.data().keys() - {each.node for each in states})
    return {"files": files, "files_unread": unread}


def _said(fates: DataFrame, indexes: list[int]) -> dict[int, tuple[int, int]]:
    """Return entry -> (number of timers pending after it, sum of their hashes)."""
    sums = (_sums(F.when(_is_pending(index), F.lit(1))) for index in indexes)
    row = fates.agg(*itertools.chain(*sums)).first()
    assert row is not None
    return dict(zip(indexes, zip(row[::2], row[1::2], strict=True), strict=True))
