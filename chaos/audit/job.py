"""The job: from a run's folder to verdicts, figures and reports.

    histories ─► lines ─► asks, given, … ───────────────────────────┐
    node logs ─► entries ─► common, disputes ─► replay ─► fates, … ─┴► verdicts ─► figures ─► report

The tables have names, by which queries read them (rules/queries.py). The larger ones are Parquet
files in the run's `audit/work` folder. Each is computed once, and no step needs memory for a whole
run. Only counts and figures are collected.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.histories import plain_path, read_histories, read_states
from chaos.audit.report import figures
from chaos.audit.report.about import about
from chaos.audit.report.report import Report, write
from chaos.audit.rules import coverage, late_rules, node_logs, pace_rules
from chaos.audit.rules import file_rules as files
from chaos.audit.rules.fault_windows import Fault, phases, windows
from chaos.audit.rules.findings import Findings, head
from chaos.audit.rules.queries import BOUNDS, RunEvidence, stored_table
from chaos.audit.rules.verdict import VIOLATIONS, Clocks
from chaos.history import history
from chaos.history.history import RunFolder
from chaos.oracle import tables
from chaos.oracle.group_story import NACKED
from chaos.oracle.story import ENDS
from timer.model.units import LogIndex
from timerspark.log.segment_files import Piece

DAY_MS: Final = 86_400_000
ACKS_MAX: Final = 5_000_000
"""With more acks in the log, those without a request are not counted."""
SUBJECTS: Final = {
    "topics": (), "nacks": (), "handouts": ("handed_out_ms",), "settings": (), "series": (),
    "paces": (),
}  # fmt: skip
"""Files of queries -> the order of their offenders; () is that of all columns."""
REPORTED: Final = ("miscounted", "diverged_states", "frozen_digests")
"""Violations in the nodes' reports of their states (counts.sql)."""
STRETCHES_MAX: Final = 600
"""The most stretches of the timeline."""
_NONE: Final = dict.fromkeys(("p50", "p99", "max"))
_EMPTY: Final = dict.fromkeys(("schedule", "failed", "fire", "deliver"), 0) | _NONE
"""The figures of a stretch without any."""


def audit(spark: SparkSession, run: RunFolder) -> Report:
    """Audit a run; write the verdict table, the summary and the report into its `audit` folder.

    Raises:
        FileNotFoundError: the folder holds no histories, or no node's log.
        StorageError: a node's log is damaged.
        ValueError: entries are in no node's log, or can't be decoded, so the log can't be replayed;
            a history, states.jsonl or run.json is damaged.
    """
    with plain_path(run) as reachable:
        return _audit(spark, reachable)


def _audit(spark: SparkSession, run: RunFolder) -> Report:
    errors_ms = run.error_ms(history.CLOCK_ERROR), run.error_ms(history.CLIENTS_ERROR)
    said, timeline = about(run), history.read_faults(run.faults)
    evidence = RunEvidence({"lines": read_histories(spark, run)}, run.audit / "work")
    lines, logs = evidence.tables["lines"], run.logs()
    frames = spark.read.format("timerlog").option("view", "entries").load(str(run.root))
    evidence.keep("entries", frames)
    begun = [life[0].first - 1 for lives in logs.values() for life in lives[1:] if life]
    evidence.values |= {"majority": len(logs) // 2 + 1, "floor": max(begun, default=0)}
    evidence.keep("common", evidence.query("logs", "agreed"))
    epochs = _epochs(evidence)
    end = max(epoch["last"] for epoch in epochs)
    evidence.values["last"] = end
    lost = {str(line.get("node")) for line in timeline if line["event"] == "lost"}
    spoken = read_states(spark, run)
    states = files.states_within(run, lost=lost, end=end)
    clocks = Clocks(until_ms(lines, timeline, epochs), *errors_ms)
    evidence.keep("disputes", evidence.query("logs", "disputes"))
    held = [row.asDict() for row in evidence.query("logs", "ends").collect()]
    has_crcs = bool(lines.where("payload_crcs IS NOT NULL").head(1))
    with ThreadPoolExecutor(1) as pool:  # the replay has one core
        telling = pool.submit(_replay, spark, run, held, checksums=has_crcs)
        for name in ("asks", "given"):
            evidence.keep(name, evidence.query("clients", name))
        replayed = telling.result()
    for name, schema in tables.STORY.items():
        path = run.audit / "work/replay" / name
        evidence.tables[name] = stored_table(spark, path, from_arrow_schema(schema))
    tell_times(evidence, epochs, clocks)
    _name_lives(evidence)
    story = evidence.tables
    found = _write_verdicts(evidence)
    findings = Findings()
    summary = _counts(findings, found, story["disputes"], held)
    findings.add({"falling_entries": evidence.query("logs", "falling_entries")})
    findings.note("short_log", node_logs.short(held, spoken, states, lost))
    summary |= _conservation(findings, evidence, spoken.where(F.col("index") <= end))
    summary |= _changes(findings, evidence)
    for subject, order in SUBJECTS.items():
        findings.add(evidence.violations(subject), order=order)
    summary["nacked"] = story["returns"].where(F.col("why") == NACKED).count()
    leaders = story["leaders"].orderBy("epoch_index").collect()
    findings.note("epoch_untrue", node_logs.untrue_epochs(leaders, run.replicas()))
    summary |= files.judge_files(findings, run, story, states)
    thin = evidence.query("logs", "thin").collect() if begun else []
    summary |= {"holes": _holes(held, logs, end), "thin": [row.asDict() for row in thin]}
    summary |= _failovers(epochs, timeline)
    all_groups = RunEvidence({"lines": lines, "found": found}, run.audit / "work")
    all_groups.values["until_ms"] = clocks.until_ms
    faults, figured = _figures(all_groups, timeline, clocks.until_ms)
    summary |= {"replayed": replayed, **figured}
    excuses = late_rules.excuses(phases(faults), epochs)
    late, summary["waits"] = late_rules.firings(evidence, excuses)
    findings.add(late | {"ack_unfounded": evidence.query("clients", "ack_unfounded")})
    if evidence.has("prioritized"):
        rows = evidence.query("figures", "shared_deliveries")
        findings.add({"starved": pace_rules.starved_messages(rows)})
    summary |= _redeliveries(evidence)
    summary |= {"run": said, "acks_unasked": unasked_acks(evidence)}
    kept = run.data().keys() - lost
    summary["not_looked_at"] = coverage.not_looked_at(story, summary, clocks, kept)
    summary |= {"violations": findings.violations, "other_offenders": findings.offenders}
    report = Report(summary)
    summary["verdict"] = report.verdict
    return write(run, report)


def _epochs(evidence: RunEvidence) -> list[Row]:
    """Return the majority's entries of each epoch (logs.sql), in order.

    Raises:
        ValueError: no entry is on a majority, or some are in no log.
    """
    rows = evidence.query("logs", "epochs").collect()
    if not rows:
        raise ValueError("no entry is on a majority of the nodes: there is nothing to audit")
    if sum(row["entries"] for row in rows) < max(row["last"] for row in rows):
        missing = evidence.query("logs", "missing").collect()
        holes = [f"{row['from']} .. {row['to']}" for row in missing]
        raise ValueError(
            f"entries {', '.join(holes)} are in no node's log, or in too few: the audit needs the"
            " whole log (`timerctl archive` archives the entries that nodes delete)"
        )
    return rows


def _pieces(held: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Return lives that together are the majority's log, and the first entry to read of each."""
    pieces: list[tuple[dict[str, Any], int]] = []
    end, upto = max(life["upto"] for life in held), 0
    while upto < end:
        there = [life for life in held if life["first"] <= upto + 1 <= life["upto"]]
        if not there:
            why = "is in no log that agrees with the majority up to it"
            raise ValueError(f"entry {upto + 1} {why}")
        best = max(there, key=lambda life: int(life["upto"]))
        pieces.append((best, upto + 1))
        upto = best["upto"]
    return pieces


def _replay(
    spark: SparkSession, run: RunFolder, held: list[dict[str, Any]], *, checksums: bool
) -> dict[str, Any]:
    """Replay the majority's log in a worker; return its figures. `checksums`: of payloads, too.

    Raises:
        ValueError: no lives that agree with the majority reach from the first entry to the last; or
            an entry can't be decoded.
    """
    chosen = _pieces(held)
    logs, work = run.logs(), run.audit / "work"
    pieces = [
        Piece(logs[life["node"]][life["life"]], LogIndex(first), LogIndex(life["upto"]))
        for life, first in chosen
    ]
    names = ", ".join(dict.fromkeys(life["node"] for life, _ in chosen))

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            try:
                row = tables.replay(pieces, work / "replay", work / "spill", checksums=checksums)
            except ValueError as error:
                raise ValueError(f"log of {names}: {error}") from error
            yield pa.RecordBatch.from_pylist([row])

    [row] = spark.range(1, numPartitions=1).mapInArrow(each, tables.FIGURES).collect()
    return {"node": names, **row.asDict()}


def _holes(held: list[dict[str, Any]], logs: Iterable[str], end: int) -> list[dict[str, Any]]:
    """Return the entries up to `end` that a node's own log never held: node, from, to."""
    holes = []
    for node in sorted(logs):
        mine = sorted((life["first"], life["last"]) for life in held if life["node"] == node)
        upto = 0
        for first, last in (*mine, (end + 1, end)):
            if first > upto + 1:
                holes.append({"node": node, "from": upto + 1, "to": first - 1})
            upto = max(upto, last)
    return holes


def until_ms(lines: DataFrame, timeline: list[dict[str, Any]], epochs: list[Row]) -> int:
    """Return the time of the last look by the clients or the harness.

    Raises:
        ValueError: the clients' times differ from the log's by more than a day. All timers would be
            judged as too young.
    """
    latest = F.greatest(F.max("received_ms"), F.max("end_ms"), F.max("start_ms"))
    [row] = lines.agg(latest).collect()
    last_ms = int(row[0] or 0)
    began_ms = min((int(e["began_ms"]) for e in epochs if e["began_ms"] is not None), default=0)
    if last_ms and last_ms + DAY_MS < began_ms:
        raise ValueError(
            f"the histories end at {last_ms}, and the log begins at {began_ms}: are their times"
            " Unix milliseconds?"
        )
    return max(last_ms, *(int(line["at_ms"]) for line in timeline), 0)


def tell_times(evidence: RunEvidence, epochs: list[Row], clocks: Clocks) -> None:
    """Add the epochs and the parameters about clocks."""
    evidence.tables["epochs"] = evidence.spark.createDataFrame(epochs, node_logs.EPOCHS)
    error_ms, clients_error_ms = clocks.error_ms, clocks.clients_error_ms
    evidence.values |= {
        "until_ms": clocks.until_ms,
        "error_ms": error_ms,
        # Without a known difference of clocks, any requested ack may have come first.
        "known_ms": 1 << 60 if clients_error_ms is None else clients_error_ms,
        "bound_ms": None if error_ms is None else BOUNDS["late_ms"] + error_ms,
    }


def _name_lives(evidence: RunEvidence) -> None:
    """Give the topics and groups of lines and deliveries the names that tell their lives apart."""
    story = evidence.tables
    if story["deletions"].head(1):
        named = {name: evidence.query("clients", f"{name}_by_topic") for name in ("lines", "given")}
        story.update(named)
    if story["groups"].where("sought").head(1):
        named = {name: evidence.query("clients", f"{name}_by_group") for name in ("lines", "given")}
        # Stored: Spark takes minutes to plan queries that repeat these joins.
        for name, table in named.items():
            evidence.keep(name, table, f"{name}_by_group")


def _write_verdicts(evidence: RunEvidence) -> DataFrame:
    """Write the verdict table; return it.

    Tables about few timers are stored first, so that Spark knows that they are few.
    """
    for name in ("unkept", "readers", "asking_topics", "used_topics"):
        evidence.keep(name, evidence.query("clients", name))
    evidence.keep("keyed", evidence.tables["asks"].where("key IS NOT NULL"))
    for name in ("fired_answers", "tried_changes", "moves", "flags"):
        evidence.keep(name, evidence.query("changes", name))
    return evidence.keep("found", evidence.query("verdicts", "verdicts"), "../verdicts.parquet")


def _counts(
    findings: Findings, found: DataFrame, disputes: DataFrame, held: list[dict[str, Any]]
) -> dict[str, Any]:
    """Add the violations of the verdict table and of disputed entries; return the counts."""
    carried = F.col("from_topic").isNotNull().alias("carried")
    cells = found.groupBy("verdict", "end", carried).agg(
        F.count("*").alias("n"),
        F.sum("deliveries").alias("deliveries"),
        F.sum("groups").alias("messages"),
    )
    rows = [row.asDict() for row in cells.collect()]
    counts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + row["n"]
        if not row["carried"]:
            ends[row["end"]] = ends.get(row["end"], 0) + row["n"]
    violated = {name: counts[name] for name in VIOLATIONS if name in counts}
    findings.violations.update(violated)
    if any(node["diverged"] for node in held):
        differing = disputes.where("NOT stale").drop("stale")
        findings.add({"diverged_entries": differing}, order=["index", "node", "life"])
    totals = [sum(row[name] or 0 for row in rows) for name in ("deliveries", "messages")]
    delivered, messages = totals
    bad = found.where(F.col("verdict").isin(*VIOLATIONS))
    return {
        "verdicts": dict(sorted(counts.items())),
        "scheduled": sum(n for end, n in ends.items() if end not in (None, "rejected", "kept")),
        **{end: ends.get(end, 0) for end in ENDS},
        "delivered": messages,
        "redelivered": delivered - messages,
        "stale_entries": sum(node["stale"] for node in held),
        "nodes": held,
        "offenders": head(bad, ["verdict", "seq", "mark"]) if violated else [],
    }


def unasked_acks(evidence: RunEvidence) -> int | None:
    """Return the number of acked messages whose ack no history requested; None: too many acks."""
    [total] = evidence.tables["acks"].agg(F.sum("count")).collect()
    if (total[0] or 0) > ACKS_MAX:
        return None
    [row] = evidence.query("figures", "acks_unasked").collect()
    return int(row["n"])


def _conservation(findings: Findings, evidence: RunEvidence, states: DataFrame) -> dict[str, Any]:
    """Return P7 at the checkpoints, the nodes' counts of their states, and P6 by their digests.

    A mismatch is a violation. `states`: of entries up to the majority's last.
    """
    story = evidence.tables
    story["states"] = states = states.cache()
    at = story["checkpoints"].select("index")
    story["points"] = at.union(states.where("digest IS NULL").select("index"))
    evidence.keep("counted", evidence.query("counts", "counted"))
    points = evidence.query("counts", "conservation")
    last = F.max_by(F.struct(*points.columns), "index")
    [found] = points.agg(F.count("*"), last).collect()
    numbers = F.count("scheduled"), F.count("digest"), F.count_distinct("node")
    [said] = states.agg(*numbers).collect()
    findings.add(
        {
            "unbalanced_checkpoints": points.where("NOT balanced"),
            **{name: evidence.query("counts", name) for name in REPORTED},
        },
        order=["index"],
    )
    return {
        "conservation": {
            "checkpoints": found[0],
            "last": [found[1].asDict()] if found[1] else [],
            "said": dict(zip(("counts", "digests", "nodes"), said, strict=True)),
        }
    }


def _changes(findings: Findings, evidence: RunEvidence) -> dict[str, Any]:
    """Return the changes by key and of existing timers, and answers with wrong counts."""
    operations = evidence.query("changes", "operations").collect()
    filtered = any(row["by"] == "filter" for row in operations)
    told = evidence.query("changes", "miscounted").collect() if filtered else []
    rows = [row.asDict() for row in told]
    findings.note("overcounted", [row for row in rows if row["told"] > row["logged"]])
    findings.note("undercounted", [row for row in rows if row["told"] < row["least"]])
    [figures_of_fired] = evidence.query("changes", "fired_figures").collect()
    return {
        "operations": [row.asDict() for row in operations],
        "fired_answers": figures_of_fired.asDict(),
    }


def _figures(
    evidence: RunEvidence, timeline: list[dict[str, Any]], end_ms: int
) -> tuple[list[Fault], dict[str, Any]]:
    """Return the faults; and lateness by phase, gaps by fault, and the timeline.

    `evidence`: lines of all groups, and the verdict table as `found`.
    """
    moments = evidence.keep("moments", evidence.query("figures", "successes"))
    faults, of_faults = figures.of_faults(evidence, windows(timeline, end_ms), end_ms)
    [begin] = moments.agg(F.min("at_ms")).collect()
    begin_ms = end_ms if begin[0] is None else begin[0]
    bucket_ms = 1000 * max(1, -(-(end_ms - begin_ms) // (1000 * STRETCHES_MAX)))
    evidence.values["bucket_ms"] = bucket_ms
    evidence.keep("histogram", figures.lateness(evidence, phases(faults)))
    broken = evidence.query("figures", "breakdowns")
    percentiles = evidence.query("figures", "percentiles", late=broken).collect()
    series = _series(evidence.query("figures", "throughput").collect(), percentiles)
    return faults, {
        "lateness_ms": _lateness(percentiles),
        "faults": of_faults,
        "timeline": {"bucket_ms": bucket_ms, "from_ms": begin_ms, "to_ms": end_ms, **series},
    }


def _redeliveries(evidence: RunEvidence) -> dict[str, Any]:
    """Return redeliveries by reason, and the number of deliveries after the ack."""
    evidence.keep("repeated", evidence.query("figures", "repeated"))
    evidence.keep("redelivered", evidence.query("figures", "redelivered"))
    evidence.tables["confirmed"] = evidence.query("clients", "confirmed")
    reasons = evidence.query("figures", "redeliveries").collect()
    [after_ack] = evidence.query("figures", "arrived_after_ack").collect()
    return {
        "redeliveries": {row["reason"]: row["n"] for row in reasons},
        "arrived_after_ack": after_ack["n"],
    }


def _lateness(late: list[Row]) -> dict[str, dict[str, dict[str, int]]]:
    """Return measure -> phase -> percentiles, "all" among the phases."""
    out: dict[str, dict[str, dict[str, int]]] = {"fire": {}, "deliver": {}}
    by_phase = [row for row in late if row["phase"] is not None]
    for row in sorted(by_phase, key=lambda row: (row["what"], row["phase"])):
        out[row["what"]][row["phase"]] = {name: row[name] for name in ("n", *figures.QUANTILES)}
    return out


def _series(flow: list[Row], late: list[Row]) -> dict[str, Any]:
    """Return the timeline's columns: parallel lists, one value per stretch that has any."""
    fired = [row for row in late if row["what"] == "fire" and row["phase"] is None]
    stretches: dict[int, dict[str, Any]] = {}
    for row in (*flow, *fired):
        if row["bucket"] is not None:
            of = row.asDict()
            stretches.setdefault(row["bucket"], {**_EMPTY}).update(of | {"fire": of.get("n", 0)})
    rows = [stretches[at] for at in sorted(stretches)]
    return {name: [row[name] for row in rows] for name in ("bucket", *_EMPTY)}


def _failovers(epochs: list[Row], timeline: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of entries and failovers, and the gap of each killed leader.

    The gap ends at the first firing of a later epoch.
    """
    gaps = []
    kills = [line for line in timeline if line["event"] == "kill"]
    for kill in (line for line in kills if line.get("role") == "leader"):
        was, at_ms = kill.get("epoch") or 0, kill["at_ms"]
        fired = ((row["epoch"], row["fired_ms"]) for row in epochs if row["fired_ms"] is not None)
        later = [(epoch, ms) for epoch, ms in fired if epoch > was and ms >= at_ms]
        if later:
            epoch, fired_ms = later[0]
            gap_ms = fired_ms - at_ms
            gaps.append({"node": kill.get("node"), "epoch": epoch, "fired_after_ms": gap_ms})
    return {
        "entries": sum(row["entries"] for row in epochs),
        "kills": len(kills),
        "failovers": len(epochs) - 1,
        "failover_gaps": gaps,
        "leader_kills": history.leader_kills(timeline),
    }


def folder_size(root: Path) -> int:
    """Return the bytes of all files in a run's folder."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
