"""Nodes' files against the log: every pending timer is there once, and no other (files.sql).

A node's newest manifest names the entry after which its runs hold the pending timers. So a timer
that a flush or a merge has lost is found even if it is due in a year.

    fates   pending after that entry   ─┬─ count, and sum of hashes, per node: equal, nearly always
    runs    timers less tombstones     ─┘  else joined, to name the timers that differ

A key file must have the keys of its run (chaos/spark/state_files.py). The rows of a spill file must
be messages that fired by that entry, at the places that the log has for them. Each message that a
group acked after the entry must be in a spill file.
"""

from collections.abc import Container, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules.findings import Findings
from chaos.audit.rules.queries import Tables, query
from chaos.history.history import RunFolder
from chaos.spark import state_files
from chaos.spark.timerstate import ManifestState, node_states, pending_rows


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


def in_queues(story: Tables, queued: DataFrame, states: Sequence[ManifestState]) -> Tables:
    """Return the untrue messages of spill files, and those that are missing.

    `queued`: the rows of the files of `states`, state_files.QUEUED.
    """
    tables = story | {"queued": queued, "manifests": _manifests(queued.sparkSession, states)}
    return {n: query("files", n, tables) for n in ("untrue_in_queues", "missing_in_queues")}


def _manifests(spark: SparkSession, states: Sequence[ManifestState]) -> DataFrame:
    return spark.createDataFrame([(s.node, s.index) for s in states], "node STRING, index LONG")


def _judge_queues(findings: Findings, story: Tables, states: Sequence[ManifestState]) -> None:
    """Add the violations of spill files."""
    spark = story["fates"].sparkSession
    blocks = spark.createDataFrame([b for s in states for b in s.blocks], state_files.BLOCKS)
    rows = blocks.mapInArrow(state_files.queued, from_arrow_schema(state_files.QUEUED)).cache()
    damage = rows.where("damage IS NOT NULL").select("node", "damage").distinct().collect()
    findings.note("damaged_files", [row.asDict() for row in damage])
    broken = {row["node"] for row in damage}
    sound = [each for each in states if each.node not in broken]
    findings.add(in_queues(story, rows, sound), order=["node", "seq"])
    rows.unpersist()


def judge_files(
    findings: Findings, run: RunFolder, story: Tables, states: Sequence[ManifestState]
) -> dict[str, Any]:
    """Add the violations of nodes' files; return their pending timers as a part of the summary.

    Violations: `missing_in_files`, `extra_in_files` (not pending, or more than once),
    `damaged_files`, `untrue_in_queues`, `missing_in_queues`.
    """
    if not states:
        return {"files": [], "files_unread": []}
    spark, files = story["fates"].sparkSession, []
    tables = story | {"manifests": _manifests(spark, states)}
    has = _by_node(query("files", "run_sums", {"run_rows": pending_rows(spark, states)}))
    says = _by_node(query("files", "fate_sums", tables))
    for each in states:
        pending, its_hash, damaged, why = has.get(each.node, (0, 0, 0, None))
        files.append({"node": each.node, "index": each.index, "pending": pending})
        if damaged:
            findings.note("damaged_files", [{"node": each.node, "damage": why}], damaged)
        elif (pending, its_hash) != says.get(each.node, (0, 0)):
            tables["run_rows"] = pending_rows(spark, [each])
            place = {"node": F.lit(each.node), "index": F.lit(each.index)}
            bad = query("files", "wrong", tables, index=each.index).withColumns(place).cache()
            missing, extra = bad.where("times < 1"), bad.where("times >= 1")
            findings.add({"missing_in_files": missing, "extra_in_files": extra}, order=["seq"])
            bad.unpersist()
    _judge_queues(findings, story, [each for each in states if not each.damage])
    unread = sorted(run.data().keys() - {each.node for each in states})
    return {"files": files, "files_unread": unread}


def _by_node(sums: DataFrame) -> dict[str, tuple[Any, ...]]:
    return {node: tuple(told) for node, *told in sums.collect()}
