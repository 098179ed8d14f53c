"""What nodes' files hold: every timer that the log says is pending, once, and no other.

A node's newest manifest says after which entry its runs hold what is pending. So a timer that a
flush or a merge has lost is found though it is due in a year, when no consumer waits for it.

    fates   pending after that entry   ─┬─ count, and sum of hashes, per node: equal, nearly always
    runs    timers less tombstones     ─┘  else joined, timer by timer, to name what differs
"""

import itertools
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.history import Run
from chaos.timerstate import NodeState, node_states

_HASH_BITS: Final = 0xFFFF_FFFF
"""Of a timer's hash: sums of a hundred million stay below 2**63."""


def pending_after(fates: DataFrame, index: int) -> DataFrame:
    """Return the timers that are pending after an entry: seq, due_ms, topic."""
    return fates.where(_is_pending(index)).select("seq", "due_ms", "topic")


def _is_pending(index: int) -> Column:
    """Whether a fate is of a timer that is pending then; what is rejected or kept ends at once."""
    goes_on = F.col("end_index").isNull() | (F.col("end_index") > index)
    return (F.col("schedule_index") <= index) & goes_on


def _sums(weight: Column) -> tuple[Column, Column]:
    """Return how many timers there are, and the sum of their hashes."""
    its_hash = F.xxhash64("seq", "due_ms").bitwiseAND(_HASH_BITS)
    return F.coalesce(F.sum(weight), F.lit(0)), F.coalesce(F.sum(weight * its_hash), F.lit(0))


def wrong(fates: DataFrame, rows: DataFrame, index: int) -> DataFrame:
    """Return what one node's rows say of timers otherwise than the log: seq, due_ms, topic, times.

    `times`: that it is pending in the files; -1: only that it is not, a trace of one that was. Once
    is right if `topic` is not null, else not at all.
    """
    mine = rows.groupBy("seq", "due_ms").agg(F.sum("weight").alias("times"))
    both = pending_after(fates, index).join(mine.where("times != 0"), ["seq", "due_ms"], "full")
    both = both.withColumn("times", F.coalesce("times", F.lit(0)))
    return both.where("topic IS NULL OR times != 1")


def states_within(run: Run, *, lost: Container[str], end: int) -> list[NodeState]:
    """Return what the manifests say of those that were not `lost` for good.

    Raises:
        ValueError: one is of an entry after the majority's last one, `end`. What a manifest covers
            is committed, so the logs in the folder end too early: what is answered later would be
            taken for lost.
        UnknownVersion: another version wrote a manifest, or a run.
    """
    states = [each for each in node_states(run) if each.node not in lost]
    for each in states:
        if each.index > end:
            raise ValueError(
                f"the state of {each.node} is of entry {each.index}, and the logs of a majority end"
                f" at {end}: an archive ended before its node, or a log was copied before it did"
            )
    return states


def judged(
    run: Run, fates: DataFrame, summary: dict[str, Any], *, states: Sequence[NodeState],
    offenders_max: int,
) -> dict[str, Any]:  # fmt: skip
    """Return what nodes' files hold, and what of it is not what the log says, for the summary.

    Violations: `missing_in_files`, `extra_in_files` (or there more than once), `damaged_files`.
    """
    if not states:
        return {"files": [], "files_unread": [], "file_offenders": []}
    reader = fates.sparkSession.read.format("timerstate")
    nodes = ",".join(each.node for each in states)
    rows = reader.option("node", nodes).load(str(run.root))
    sound = F.col("damage").isNull()
    timers, hashes = _sums(F.when(sound, F.col("weight")))
    found = rows.groupBy("node").agg(timers, hashes, F.count("damage"), F.min("damage")).collect()
    has = {node: told for node, *told in found}
    says = _said(fates, sorted({each.index for each in states}))
    violations, files, offenders = Counter[str](summary["violations"]), [], []
    for each in states:
        pending, its_hash, damaged, why = has.get(each.node, (0, 0, 0, None))
        files.append({"node": each.node, "index": each.index, "pending": pending})
        if damaged:
            violations["damaged_files"] += damaged
            offenders.append({"verdict": "damaged_files", "node": each.node, "damage": why})
        elif (pending, its_hash) != says[each.index]:
            rows = reader.option("node", each.node).load(str(run.root))
            bad = wrong(fates, rows, each.index)
            bad = bad.withColumn(
                "verdict",
                F.expr("if(times < 1, 'missing', 'extra') || '_in_files'"),
            ).cache()
            for verdict, n in bad.groupBy("verdict").count().collect():
                violations[verdict] += n
            named = bad.orderBy(F.desc("verdict"), "seq").limit(offenders_max).collect()
            offenders += [{"node": each.node, "index": each.index} | row.asDict() for row in named]
            bad.unpersist()
    return {
        "verdict": "VIOLATED" if violations else "OK",
        "violations": dict(violations),
        "files": files,
        "files_unread": sorted(run.data().keys() - {each.node for each in states}),
        "file_offenders": offenders,
    }


def _said(fates: DataFrame, indexes: list[int]) -> dict[int, tuple[int, int]]:
    """Return how many timers are pending after each entry, and the sum of their hashes."""
    sums = (_sums(F.when(_is_pending(index), F.lit(1))) for index in indexes)
    row = fates.agg(*itertools.chain(*sums)).first()
    assert row is not None
    return dict(zip(indexes, zip(row[::2], row[1::2], strict=True), strict=True))
