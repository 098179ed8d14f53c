"""The job: from a run's folder to verdicts, figures and reports.

    histories ─► lines ─► asked, deliveries, acks, cancels ─────────┐
    node logs ─► entries ─► agreed, conflicts ─► replay ─► fates ───┴► verdicts ─► figures ─► report

The results of the steps are Parquet files in the run's `audit/work` folder. Each is computed once,
and no step needs memory for a whole run. Only counts and figures are collected.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.columns import sieve
from chaos.audit.report import figures
from chaos.audit.report.about import about
from chaos.audit.report.report import Report, write
from chaos.audit.rules import (
    change_answers,
    client_tables,
    coverage,
    node_logs,
    pace_rules,
    verdict,
)
from chaos.audit.rules import file_rules as files
from chaos.audit.rules import late_deliveries as delivered
from chaos.audit.rules import late_firing as late
from chaos.audit.rules.fault_windows import Fault, phases, windows
from chaos.audit.rules.findings import Findings, shown
from chaos.audit.rules.queries import BOUNDS, RunEvidence, ask
from chaos.history import flat, history
from chaos.history.history import RunFolder
from chaos.oracle import tables
from chaos.oracle.group_story import NACKED
from chaos.oracle.story import ENDS
from chaos.spark.timerstate import ManifestState
from timer.model.units import LogIndex
from timerspark.log.segment_files import Piece

SMALL_SIZE: Final = 512 << 20
"""The most bytes of histories that are kept in memory, parsed."""
LINE_SIZE_MAX: Final = 64 << 20
"""The most bytes of a history's last line."""
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


GLOBBED: Final = frozenset("[]{}*?:\\,")
"""Characters of a path that have a meaning for Spark's readers."""


@contextlib.contextmanager
def plain_path(run: RunFolder) -> Iterator[RunFolder]:
    """Yield the run under a path without such characters: a link to it if necessary."""
    if GLOBBED.isdisjoint(str(run.root)):
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="timer-audit-") as folder:
        link = Path(folder) / "run"
        link.symlink_to(run.root.resolve(), target_is_directory=True)
        yield RunFolder(link)


def audit(spark: SparkSession, run: RunFolder, *, sift: bool = False) -> Report:
    """Audit a run; write the verdict table, the summary and the report into its `audit` folder.

    `sift`: judge plain timers by columns first (sieve.py), for large runs.

    Raises:
        FileNotFoundError: the folder holds no histories, or no node's log.
        StorageError: a node's log is damaged.
        ValueError: entries are in no node's log, or can't be decoded, so the log can't be replayed;
            a history, states.jsonl or run.json is damaged.
    """
    with plain_path(run) as reachable:
        return _audit(spark, reachable, sift=sift)


def _audit(spark: SparkSession, run: RunFolder, *, sift: bool) -> Report:
    errors_ms = run.error_ms(history.CLOCK_ERROR), run.error_ms(history.CLIENTS_ERROR)
    said, timeline = about(run), history.read_faults(run.faults)
    lines = read_histories(spark, run)
    logs = run.logs()
    frames = spark.read.format("timerlog").option("view", "entries").load(str(run.root))
    entries = _kept(frames, run, "entries")
    majority = len(logs) // 2 + 1
    begun = [life[0].first - 1 for lives in logs.values() for life in lives[1:] if life]
    agreed = ask(
        "logs", "agreed", {"entries": entries}, majority=majority, floor=max(begun, default=0)
    )
    common = _kept(agreed, run, "common")
    epochs = _epochs(common)
    end = max(epoch["last"] for epoch in epochs)
    lost = {str(line.get("node")) for line in timeline if line["event"] == "lost"}
    spoken = read_states(spark, run)
    states = files.states_within(run, lost=lost, end=end)
    end_ms = until_ms(lines, timeline, epochs)
    frames_of = {"entries": entries, "common": common}
    disputes = _kept(ask("logs", "disputes", frames_of, last=end), run, "disputes")
    ends = ask("logs", "ends", frames_of | {"disputes": disputes}, last=end)
    held = [row.asDict() for row in ends.collect()]
    has_crcs = bool(lines.where("payload_crcs IS NOT NULL").head(1))
    with ThreadPoolExecutor(1) as pool:  # the replay has one core
        telling = pool.submit(_replayed, spark, run, held, checksums=has_crcs)
        parts = _parts(common) if sift else 0
        asks, given = _asked_and_given(lines, run, parts)
        replayed = telling.result()
    story = {
        name: spark.read.schema(from_arrow_schema(schema)).parquet(
            str(run.audit / "work/replay" / name)
        )
        for name, schema in tables.STORY.items()
    }
    clocks = verdict.Clocks(end_ms, *errors_ms)
    diverged = any(life["diverged"] for life in held)
    disputed = disputes.where("NOT stale") if diverged else None
    if story["deletions"].head(1):
        fired = (story[name].select("seq", "topic") for name in ("fates", "carried"))
        lines, given = client_tables.with_lives(lines, given, next(fired).union(next(fired)))
    all_lines, (lines, given) = lines, _by_lives(run, lines, given, story["groups"])
    told = Witnesses(asks, story["fates"], given, disputed)
    found = _judged(run, lines, told, story, clocks=clocks, parts=parts)
    findings = Findings()
    summary = _counts(findings, found, disputes, held)
    findings.add({"falling_entries": ask("logs", "falling_entries", frames_of)})
    findings.note("short_log", node_logs.short(held, _known(spoken, states), lost))
    summary |= _conserved(findings, run, story, spoken.where(F.col("index") <= end))
    summary |= _changed(findings, run, lines, story, asks, clocks)
    evidence = evidence_of(lines, story, epochs, clocks)
    for subject, order in SUBJECTS.items():
        findings.add(evidence.judged(subject), order=order)
    summary["nacked"] = story["returns"].where(F.col("why") == NACKED).count()
    leaders = story["leaders"].orderBy("epoch_index").collect()
    findings.note("epoch_untrue", node_logs.untrue_epochs(leaders, run.replicas()))
    summary |= files.judged(findings, run, story, states)
    thin = ask("logs", "thin", frames_of, majority=majority).collect() if begun else []
    summary |= {"holes": _holes(held, logs, end), "thin": [row.asDict() for row in thin]}
    summary |= _failovers(epochs, timeline)
    faults, figured = _figures(run, all_lines, found, timeline, end_ms)
    summary |= {"replayed": replayed, **figured}
    excused = late.excuses(phases(faults), epochs)
    waited, summary["waits"] = delivered.judged(evidence, spark, excused)
    promises = {
        "late": late.late(found, excused, story["pauses"]),
        "ack_unfounded": _unfounded(run, given),
    }
    if evidence.has("occurrences"):
        promises["planned_late"] = late.planned_late(story["occurrences"], excused)
    if evidence.has("prioritized"):
        promises["starved"] = pace_rules.starved(evidence.ask("figures", "shared_deliveries"))
    findings.add(promises | waited)
    summary |= _redelivered(run, lines, given, found, story["returns"])
    summary |= {"run": said, "acks_unasked": unasked_acks(evidence, story["acks"])}
    summary["not_looked_at"] = coverage.not_looked_at(lines, story, summary, clocks, lost)
    summary |= {"violations": findings.violations, "other_offenders": findings.offenders}
    report = Report(summary)
    summary["verdict"] = report.verdict
    return write(run, report)


LIVED: Final = ("lived", "given_lived")


def _by_lives(
    run: RunFolder, lines: DataFrame, given: DataFrame, groups: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Return both tables with the names of groups that tell apart the lives of a group."""
    if groups.where("sought").head(1):
        named = client_tables.with_group_lives(lines, given, groups)
        # Stored: Spark takes minutes to plan queries that repeat these joins.
        lines, given = (_kept(each, run, name) for each, name in zip(named, LIVED, strict=True))
    return lines, given


def read_histories(spark: SparkSession, run: RunFolder) -> DataFrame:
    """Return the lines of all histories, in any of their forms (history.SCHEMA).

    The outcome `asked` does not occur in them: each request has its outcome, or `unknown`.

    Raises:
        FileNotFoundError: there are no histories.
        ValueError: a file has another suffix, or a line is malformed. A malformed last line is left
            out: a crash may have torn it.
    """
    files = run.history_files()
    for number, path in enumerate(files):
        if not GLOBBED.isdisjoint(path.name):
            link = run.audit / "work" / "histories" / f"{number}{path.suffix}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
            files[number] = link
    reader = spark.read.schema(history.SCHEMA).option("lineSep", "\n")
    texts, columns = ([str(p) for p in files if p.suffix == s] for s in history.HISTORIES)
    parts: list[DataFrame] = []
    if texts:
        parsed = reader.json(texts).withColumn("file", F.input_file_name())
        small = sum(os.stat(path).st_size for path in texts) <= SMALL_SIZE
        parts.append(parsed.cache() if small else _kept(parsed, run, "lines"))
    if columns:
        parts.append(reader.parquet(*columns).withColumn("file", F.input_file_name()))
    lines = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
    for bad in lines.where("op IS NULL").groupBy("file").count().collect():
        path = Path(unquote(urlsplit(bad["file"]).path))
        if bad["count"] > _torn(path):
            raise ValueError(f"{path.resolve()}: {bad['count']} lines are not lines of a history")
    lines = lines.where("op IS NOT NULL").drop("file")
    told = client_tables.with_unanswered(lines)
    return lines if told is lines else _kept(told, run, "told")


def _torn(history_file: Path) -> int:
    """Return the number of lines that a crash left half written: 1 if the last one is malformed."""
    if history_file.suffix != ".jsonl":
        return 0
    with history_file.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_SIZE_MAX))
        last = file.read().rpartition(b"\n")[2]
    try:
        json.loads(last or b"null")
    except ValueError:
        return 1
    return 0


def _kept(table: DataFrame, run: RunFolder, name: str) -> DataFrame:
    """Write a table into the work folder; return the stored table."""
    path = run.audit / "work" / name
    table.write.mode("overwrite").parquet(str(path))
    return _read(table, path)


def _read(like: DataFrame, path: Path) -> DataFrame:
    reader = like.sparkSession.read.schema(like.schema)  # otherwise a Spark job infers the schema
    return reader.parquet(str(path))


def _asked_and_given(lines: DataFrame, run: RunFolder, parts: int) -> tuple[DataFrame, DataFrame]:
    """Return the tables `asked` and `deliveries` of client_tables.py, stored; with `parts`, cut."""
    if not parts:
        asks = _kept(client_tables.asked(lines), run, "asked")
        return asks, _kept(client_tables.deliveries(lines), run, "given")
    work = run.audit / "work"
    schedules, delivers = client_tables.schedules(lines), client_tables.delivers(lines)
    asks = sieve.cut(schedules, flat.asked_batches, flat.ASKED, work / "asked", parts)
    return asks, sieve.cut(delivers, flat.given_batches, flat.GIVEN, work / "given", parts)


def _parts(common: DataFrame) -> int:
    """Return the number of parts into which the sieve cuts the run."""
    row = common.agg(F.sum("rows")).first()
    assert row is not None
    return -(-(row[0] or 1) // sieve.ROWS_PER_PART)


def _epochs(common: DataFrame) -> list[Row]:
    """Return the majority's entries of each epoch (logs.sql), in order.

    Raises:
        ValueError: no entry is on a majority, or some are in no log.
    """
    rows = ask("logs", "epochs", {"common": common}).collect()
    if not rows:
        raise ValueError("no entry is on a majority of the nodes: there is nothing to audit")
    if sum(row["entries"] for row in rows) < max(row["last"] for row in rows):
        missing = ask("logs", "missing", {"common": common}).collect()
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
            raise ValueError(
                f"entry {upto + 1} is in no log that agrees with the majority up to it"
            )
        best = max(there, key=lambda life: int(life["upto"]))
        pieces.append((best, upto + 1))
        upto = best["upto"]
    return pieces


def _replayed(
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

    row = spark.range(1, numPartitions=1).mapInArrow(each, tables.FIGURES).first()
    assert row is not None
    return {"node": names, **row.asDict()}


def _holes(held: list[dict[str, Any]], logs: Iterable[str], end: int) -> list[dict[str, Any]]:
    """Return the entries up to `end` that a node's own log never held: node, from, to."""
    holes = []
    for node in sorted(logs):
        mine = sorted((life["first"], life["last"]) for life in held if life["node"] == node)
        upto = 0
        for first, last in mine:
            if first > upto + 1:
                holes.append({"node": node, "from": upto + 1, "to": first - 1})
            upto = max(upto, last)
        if upto < end:
            holes.append({"node": node, "from": upto + 1, "to": end})
    return holes


class Witnesses(NamedTuple):
    """The three witnesses, and the entries that nodes dispute."""

    asks: DataFrame
    fates: DataFrame
    given: DataFrame
    disputed: DataFrame | None


def _judged(
    run: RunFolder, lines: DataFrame, told: Witnesses, story: client_tables.Tables, *,
    clocks: verdict.Clocks, parts: int,
) -> DataFrame:  # fmt: skip
    """Write the verdict table; return it. With `parts`, the witnesses are cut so, and sifted.

    Rows about few timers are written first, so that Spark knows that they are few.
    """
    asking = lines.where("op IN ('schedule', 'create_series')")
    topics = asking.select("topic").distinct()
    looked = (
        lines.where("op IN ('open', 'deliver', 'redrive')").select("topic").union(topics).distinct()
    )
    starts = client_tables.consumed(lines, story["groups"])
    acks, expired = story["acks"], story["expired"]
    stretches = _kept(sieve.acked(acks), run, "acked") if parts else None
    sayers = lines if stretches is None else sieve.not_surely_kept(lines, stretches)
    unkept = verdict.unkept_acks(
        client_tables.confirmed_acks(sayers), acks, client_tables.told_expired(lines), expired
    )
    unkept = _kept(unkept, run, "unkept")
    changes = {"lines": lines, "asks": told.asks, "fates": told.fates}
    fired = _kept(ask("changes", "fired_answers", changes), run, "fired_answers")
    into = run.audit / "verdicts.parquet"
    if parts:
        doubted = unkept.union(expired.select(*client_tables.SLOT))
        named = ask("changes", "named", changes)
        _cut_crowded(run, lines, told.asks, parts)
        begin = sieve.starts(topics, starts, story["groups"], story["deletions"])
        sift = partial(sieve.sift, parts=parts, begin=begin, clock_error_ms=clocks.error_ms)
        told = _sifted(run, told, doubted, named, sift, parts)
    log = _of_topics(told.fates, topics)
    carried = story["carried"]
    if carried.head(1):
        log = log.unionByName(_of_topics(carried, looked), allowMissingColumns=True)
        off = verdict.carried_off(carried, told.given, starts)
        log = log.join(off, ["topic", "queue_offset"], "left")
    log = node_logs.disputed(log, told.disputed)
    if expired.head(1):
        over = verdict.expiry(expired, told.given, starts)
        log = log.join(over, ["topic", "queue_offset"], "left")
    if story["deletions"].head(1):
        gone = story["deletions"].select(
            F.col("delete_index").alias("end_index"), (~node_logs.no()).alias("gone")
        )
        log = log.join(F.broadcast(gone), "end_index", "left")
    log = log.join(F.broadcast(story["postponed"]), "topic", "left")
    if story["series"].head(1):
        log = verdict.with_occurrences(log, story)
    by_name = log.withColumn("topic", client_tables.name_of("topic"))
    by_name = by_name.where("from_topic IS NULL") if "from_topic" in log.columns else by_name
    keyed = _kept(told.asks.where("key IS NOT NULL"), run, "keyed")
    changes = {"lines": lines, "asks": keyed, "log": by_name, "fired_answers": fired}
    changed = change_answers.changes(changes, clocks.error_ms)
    over = story["groups"].where("over")
    found = verdict.verdicts(
        told.asks,
        log,
        verdict.judged_deliveries(told.given, unkept, acks, over if over.head(1) else None),
        change_answers.ChangeTables(
            _kept(changed.tried, run, "tried"),
            _kept(changed.moves, run, "moves"),
            _kept(changed.flags, run, "flags"),
        ),
        starts,
        clocks,
    )
    found.write.mode("append" if parts else "overwrite").parquet(str(into))
    return _read(found, into)


def _cut_crowded(run: RunFolder, lines: DataFrame, asks: DataFrame, parts: int) -> None:
    """Write the marks of asks whose keys other asks name as well, cut into parts."""
    folder = run.audit / "work" / "crowded"
    key_hash = F.xxhash64("topic", "key").alias("hash")  # with equal ones the full rules judge
    keyed = asks.where("key IS NOT NULL").select("mark", key_hash)
    if not keyed.head(1):
        sieve.clear(folder)
        return
    shared = ask("changes", "shared_keys", {"lines": lines, "hashed": keyed})
    shared = _kept(shared, run, "shared")
    marks = keyed.join(shared, "hash", "left_semi").select("mark")
    sieve.cut(marks, lambda batches: batches, sieve.MARK, folder, parts)


def _of_topics(rows: DataFrame, topics: DataFrame) -> DataFrame:
    """Return the rows of all lives of the topics that `topics` names."""
    asked_of = client_tables.name_of("rows.topic") == F.col("topics.topic")
    return rows.alias("rows").join(F.broadcast(topics).alias("topics"), asked_of, "left_semi")


def _sifted(
    run: RunFolder, told: Witnesses, doubted: DataFrame, named: DataFrame,
    sift: Callable[[SparkSession, Path, Path], DataFrame], parts: int,
) -> Witnesses:  # fmt: skip
    """Write the verdicts of plain timers; return the witnesses of the doubtful ones.

    `doubted` and `named` are those of plain_timers.Facts. `sift`: sieve.sift with its other
    arguments.
    """
    spark, work, into = named.sparkSession, run.audit / "work", run.audit / "verdicts.parquet"
    sieve.clear(into, work / "named")
    fates = sieve.cut_file(spark, work / "replay/fates/part-0.parquet", work / "log", parts)
    _kept(doubted.select("topic", "queue_offset").distinct(), run, "doubted")
    nowhere = told.fates.select(F.col("schedule_index").alias("index")).limit(0)
    _kept(nowhere if told.disputed is None else told.disputed.select("index"), run, "disputed")
    times, more = 0, named.select("seq")
    while True:
        _kept(more, run, f"named/{times}")
        doubts = _kept(sift(spark, work, into), run, "doubts")
        foreign = doubts.where("seq IS NOT NULL").select("seq")
        if not foreign.head(1):
            break
        plain = spark.read.parquet(str(into)).select("seq")
        times, more = times + 1, plain.join(foreign, "seq", "left_semi")
        if not more.head(1):
            break
    tables = {"asked": told.asks, "log": fates, "given": told.given}
    rest = {n: _kept(sieve.of_marks(t, doubts), run, f"rest/{n}") for n, t in tables.items()}
    return Witnesses(rest["asked"], rest["log"], rest["given"], told.disputed)


def until_ms(lines: DataFrame, timeline: list[dict[str, Any]], epochs: list[Row]) -> int:
    """Return the time of the last look by the clients or the harness.

    Raises:
        ValueError: the clients' times differ from the log's by more than a day. All timers would be
            judged as too young.
    """
    latest = F.greatest(F.max("received_ms"), F.max("end_ms"), F.max("start_ms"))
    row = lines.agg(latest).first()
    assert row is not None
    last_ms = int(row[0] or 0)
    began_ms = min((int(e["began_ms"]) for e in epochs if e["began_ms"] is not None), default=0)
    if last_ms and last_ms + DAY_MS < began_ms:
        raise ValueError(
            f"the histories end at {last_ms}, and the log begins at {began_ms}: are their times"
            " Unix milliseconds?"
        )
    return max(last_ms, *(int(line["at_ms"]) for line in timeline), 0)


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
    violated = {name: counts[name] for name in verdict.VIOLATIONS if name in counts}
    findings.violations.update(violated)
    if any(node["diverged"] for node in held):
        differing = disputes.where("NOT stale").drop("stale")
        findings.add({"diverged_entries": differing}, order=["index", "node", "life"])
    delivered, messages = (
        sum(row[name] or 0 for row in rows) for name in ("deliveries", "messages")
    )
    bad = found.where(F.col("verdict").isin(*verdict.VIOLATIONS))
    return {
        "verdicts": dict(sorted(counts.items())),
        "scheduled": sum(n for end, n in ends.items() if end not in (None, "rejected", "kept")),
        **{end: ends.get(end, 0) for end in ENDS},
        "delivered": messages,
        "redelivered": delivered - messages,
        "stale_entries": sum(node["stale"] for node in held),
        "nodes": held,
        "offenders": shown(bad, ["verdict", "seq", "mark"]) if violated else [],
    }


def _known(spoken: DataFrame, states: Iterable[ManifestState]) -> dict[str, int]:
    """Return node -> the last entry in its reports or in its manifest."""
    rows = spoken.groupBy("node").agg(F.max("index").alias("index")).collect()
    known = {str(row["node"]): int(row["index"]) for row in rows}
    for each in states:
        known[each.node] = max(each.index, known.get(each.node, 0))
    return known


def evidence_of(
    lines: DataFrame, story: client_tables.Tables, epochs: list[Row], clocks: verdict.Clocks
) -> RunEvidence:
    """Return the tables and parameters for the queries."""
    error_ms, clients_error_ms = clocks.error_ms, clocks.clients_error_ms
    return RunEvidence(
        story | {
            "lines": lines,
            "epochs": lines.sparkSession.createDataFrame(epochs, node_logs.EPOCHS),
        },
        until_ms=clocks.until_ms,
        error_ms=error_ms,
        # Without a known difference of clocks, any requested ack may have come first.
        known_ms=1 << 60 if clients_error_ms is None else clients_error_ms,
        bound_ms=None if error_ms is None else BOUNDS["late_ms"] + error_ms,
    )  # fmt: skip


def unasked_acks(evidence: RunEvidence, acks: DataFrame) -> int | None:
    """Return the number of acked messages whose ack no history requested; None: too many acks."""
    total = acks.agg(F.sum("count")).first()
    if total is not None and (total[0] or 0) > ACKS_MAX:
        return None
    row = evidence.ask("figures", "acks_unasked").first()
    return None if row is None else int(row["n"])


def _unfounded(run: RunFolder, given: DataFrame) -> DataFrame:
    """Return confirmed acks of messages that no client received and that the log never acked."""
    unkept = given.sparkSession.read.parquet(str(run.audit / "work/unkept"))
    slots = given.select(*client_tables.SLOT).distinct()
    return unkept.join(slots, [*client_tables.SLOT], "left_anti")


def _conserved(
    findings: Findings, run: RunFolder, story: client_tables.Tables, states: DataFrame
) -> dict[str, Any]:
    """Return P7 at the checkpoints, the nodes' counts of their states, and P6 by their digests.

    A mismatch is a violation. `states`: of entries up to the majority's last.
    """
    checkpoints, states = story["checkpoints"], states.cache()
    at = checkpoints.select("index").union(states.where("digest IS NULL").select("index"))
    table = _kept(ask("counts", "counted", story | {"points": at}), run, "counted")
    tables = {"counted": table, "checkpoints": checkpoints, "states": states}
    points = ask("counts", "conservation", tables)
    last = F.max_by(F.struct(*points.columns), "index")
    found = points.agg(F.count("*"), last).first()
    said = states.agg(F.count("scheduled"), F.count("digest"), F.count_distinct("node")).first()
    assert found is not None
    assert said is not None
    findings.add(
        {
            "unbalanced_checkpoints": points.where("NOT balanced"),
            **{name: ask("counts", name, tables) for name in REPORTED},
        },
        order=["index"],
    )
    return {
        "conservation": {
            "checkpoints": found[0],
            "last": [found[1].asDict()] if found[1] else [],
            "said": dict(zip(("counts", "digests", "nodes"), said, strict=True)),
        },
    }


def read_states(spark: SparkSession, run: RunFolder) -> DataFrame:
    """Return the nodes' counts of their states, without a torn last line.

    Raises:
        ValueError: another line is malformed.
    """
    if not run.states.exists():
        return spark.createDataFrame([], history.STATES_SCHEMA)
    rows = spark.read.schema(history.STATES_SCHEMA).json(str(run.states))
    bad = rows.where("node IS NULL OR index IS NULL").count()
    if bad > _torn(run.states):
        raise ValueError(f"{run.states.resolve()}: {bad} lines lack a `node` or an `index`")
    return rows.where("node IS NOT NULL AND index IS NOT NULL")


def _changed(
    findings: Findings, run: RunFolder, lines: DataFrame, story: client_tables.Tables,
    asks: DataFrame, clocks: verdict.Clocks,
) -> dict[str, Any]:  # fmt: skip
    """Return the changes by key and of existing timers, and answers with wrong counts."""
    operations = ask("changes", "operations", {"lines": lines}).collect()
    filtered = any(row["by"] == "filter" for row in operations)
    revoked = story["fates"].end_index == story["series"].series_index
    fates = story["fates"].join(F.broadcast(story["series"]), revoked, "left_anti")
    fired = lines.sparkSession.read.parquet(str(run.audit / "work/fired_answers"))
    tables = {"lines": lines, "asks": asks, "fates": fates, "fired_answers": fired}
    told = ask("changes", "miscounted", tables).collect() if filtered else []
    rows = [row.asDict() for row in told]
    findings.note("overcounted", [row for row in rows if row["told"] > row["logged"]])
    findings.note("undercounted", [row for row in rows if row["told"] < row["least"]])
    [figures_of_fired] = ask("changes", "fired_figures", tables, error_ms=clocks.error_ms).collect()
    return {
        "operations": [row.asDict() for row in operations],
        "fired_answers": figures_of_fired.asDict(),
    }


def _figures(
    run: RunFolder, lines: DataFrame, found: DataFrame, timeline: list[dict[str, Any]], end_ms: int
) -> tuple[list[Fault], dict[str, Any]]:
    """Return the faults; and lateness by phase, gaps by fault, and the timeline."""
    spark = lines.sparkSession
    tables = {"lines": lines, "found": found}
    moments = _kept(ask("figures", "successes", tables), run, "successes")
    faults = windows(timeline, end_ms)
    between = figures.gaps(moments, figures.works(lines, found, end_ms) if faults else [])
    faults = figures.recovered(moments, between, faults, end_ms)
    late_in = figures.lateness_by_fault(found, faults)
    hit = zip(faults, figures.unavailability(spark, between, faults), strict=True)
    begin = moments.agg(F.min("at_ms")).first()
    begin_ms = begin[0] if begin and begin[0] is not None else end_ms
    bucket_ms = 1000 * max(1, -(-(end_ms - begin_ms) // (1000 * STRETCHES_MAX)))
    histogram = _kept(figures.lateness(found, phases(faults), bucket_ms), run, "lateness")
    broken = ask("figures", "breakdowns", {"histogram": histogram})
    percentiles = figures.percentiles(broken, "what", "phase", "bucket").collect()
    flow = ask("figures", "throughput", {"lines": lines}, bucket_ms=bucket_ms).collect()
    series = _series(flow, percentiles)
    return faults, {
        "lateness_ms": _lateness(percentiles),
        "faults": [told | figures.late_in(each, late_in) for each, told in hit],
        "timeline": {"bucket_ms": bucket_ms, "from_ms": begin_ms, "to_ms": end_ms, **series},
    }


def _redelivered(
    run: RunFolder, lines: DataFrame, given: DataFrame, found: DataFrame, returns: DataFrame
) -> dict[str, Any]:
    """Return redeliveries by reason, and the number of deliveries after the ack."""
    tables = {"given": given, "found": found, "returns": returns}
    seqs = _kept(ask("figures", "repeated", tables), run, "repeated")
    tables["redelivered"] = _kept(given.join(seqs, "seq", "left_semi"), run, "redelivered")
    tables["confirmed"] = client_tables.confirmed_acks(lines)
    reasons = ask("figures", "redeliveries", tables).collect()
    [after_ack] = ask("figures", "arrived_after_ack", tables).collect()
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
    client = {row["bucket"]: row for row in flow if row["bucket"] is not None}
    fired = {row["bucket"]: row for row in late if row["what"] == "fire" and row["phase"] is None}
    buckets = sorted(client.keys() | fired.keys())

    def column(rows: dict[int, Row], name: str, none: int | None) -> list[int | None]:
        return [rows[at][name] if at in rows else none for at in buckets]

    return {
        "bucket": buckets,
        "schedule": column(client, "schedule", 0),
        "failed": column(client, "failed", 0),
        "fire": column(fired, "n", 0),
        "deliver": column(client, "deliver", 0),
        **{name: column(fired, name, None) for name in ("p50", "p99", "max")},
    }


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
