"""The audit: a Spark job that gives every timer one verdict, from three independent witnesses.

    asked   what clients asked and were answered      histories/*.jsonl    chaos/history.py
    log     what the nodes' own logs say happened     <node>/log           chaos/replay.py
    given   what consumers received and acked         histories/*.jsonl

        asked  --- mark ---  log  --- seq ---  given        full outer joins: whatever any
                                                            one witness knows is judged

The log is the nodes' word, so it is cross-examined: frames on a majority must be the same on all
nodes, and what clients were told (ids, due times, offsets, firing times) must be what follows
from it. Duplicates are counted before anything is grouped away. The audit judges a run that was
drained: clients went on until everything due had come.

    fine        ok, cancelled, pending (due after the run's end), refused (asked, certainly not
                taken), unknown_not_fired, unknown_fired_once
    violation   breaks
    diverged    P6  nodes disagree, or what was answered or given is not what the log says
    duplicate_fire  P2  one timer asked for, two in the log or two queue offsets
    phantom     P2  in the log or given, but nobody asked; or given, but the log never fired it
    cancelled_delivered  P4  fired or given although a cancel said CANCELLED
    early       P3  fired before its due time
    acked_again P5  given after its ack was confirmed, or by a later epoch than the one of its ack
    ack_lost    P5  its ack was confirmed, but the log has none
    unmarked_redelivery  P5  given twice to one group as a first attempt
    cancel_untrue  P4  a cancel's answer contradicts the log
    lost        P1  answered OK, but not in the log, never fired, or not given to every group

Spark lives in a run's folder only: Parquet in, Parquet out, nothing collected but figures.
"""

import argparse
import atexit
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos import history, replay, timerlog
from chaos.history import Run
from timer.errors import StorageError
from timer.units import LogIndex

FINE: Final = ("ok", "cancelled", "pending", "refused", "unknown_not_fired", "unknown_fired_once")
VIOLATIONS: Final = (
    "diverged",
    "duplicate_fire",
    "phantom",
    "cancelled_delivered",
    "early",
    "acked_again",
    "ack_lost",
    "unmarked_redelivery",
    "cancel_untrue",
    "lost",
)
"""In order of precedence: a timer that breaks several promises counts for the first."""

GRACE_MS: Final = 5_000
"""A timer due this long before the run's end has to have fired."""
QUICK_SIZE_MAX: Final = 512 << 20
"""Bytes of logs and histories up to which a run is audited by a `quick` session."""
OFFENDERS_MAX: Final = 100
"""Named in the summary; the verdict table has all of them."""
_SLOT: Final = ("topic", "group", "queue_offset")
"""What one message of one group is known by."""


# ---- what clients say: histories -> one row per timer, answer, delivery or ack


def asked(lines: DataFrame) -> DataFrame:
    """Return what was asked for: mark, id, answered_seq, answered_due_ms, asked_due_ms, …"""
    rows = (
        lines.where("op = 'schedule'")
        .withColumn("n", F.size("marks"))
        .select(
            *("client", "topic", "outcome", "start_ms", "end_ms"),
            F.inline(F.arrays_zip("marks", _or_nulls("ids", "string"), _or_nulls("due_ms"))),
        )
        .toDF("client", "topic", "outcome", "start_ms", "end_ms", "mark", "id", "asked_due_ms")
    )
    due_ms, seq = _id_parts("id")
    return rows.select("*", due_ms.alias("answered_due_ms"), seq.alias("answered_seq"))


def cancels(lines: DataFrame) -> DataFrame:
    """Return one row per timer that somebody tried to cancel: seq and how often each answer."""
    rows = (
        lines.where("op = 'cancel'")
        .withColumn("n", F.size("ids"))
        .select("outcome", F.inline(F.arrays_zip("ids", _or_nulls("results", "string"))))
        .toDF("outcome", "id", "result")
    )
    answers = {
        "cancel_ok": F.col("result") == "CANCELLED",
        "cancel_already": F.col("result") == "ALREADY_CANCELLED",
        "cancel_fired": F.col("result") == "ALREADY_FIRED",
        "cancel_unknown": F.col("outcome") == "unknown",
    }
    return rows.groupBy(_id_parts("id")[1].alias("seq")).agg(
        *(F.count_if(condition).alias(name) for name, condition in answers.items())
    )


def deliveries(lines: DataFrame) -> DataFrame:
    """Return every delivery of a message, none merged."""
    heads = ("topic", "group", "epoch", "received_ms")
    lists = ("offsets", "ids", "marks", "attempts", "fired_at_ms")
    names = ("queue_offset", "id", "mark", "attempt", "fired_at_ms")
    rows = (
        lines.where("op = 'deliver'")
        .select(*heads, F.inline(F.arrays_zip(*lists)))
        .toDF(*heads, *names)
    )
    due_ms, seq = _id_parts("id")
    return rows.select("*", due_ms.alias("due_ms"), seq.alias("seq"))


def confirmed_acks(lines: DataFrame) -> DataFrame:
    """Return one row per message whose ack was confirmed: its slot and when it first was."""
    rows = (
        lines.where("op = 'ack' AND outcome = 'ok'")
        .select("topic", "group", "end_ms", F.inline(F.arrays_zip("offsets", "results")))
        .toDF("topic", "group", "end_ms", "queue_offset", "result")
    )
    rows = rows.where(F.col("result").isin("ACKED", "ALREADY_ACKED"))
    return rows.groupBy(*_SLOT).agg(F.min("end_ms").alias("confirmed_ms"))


def consumed(lines: DataFrame) -> DataFrame:
    """Return the (topic, group) pairs that the run's consumers read."""
    return lines.where("op IN ('open', 'deliver')").select("topic", "group").distinct()


def _or_nulls(name: str, of: str = "bigint") -> Column:
    """Return a list column; where it is null, as many nulls as the row's `n`."""
    return F.coalesce(name, F.array_repeat(F.lit(None).cast(of), F.col("n"))).alias(name)


def _id_parts(name: str) -> tuple[Column, Column]:
    """Return (effective due, seq) of a timer id, as timer/timer_id.py lays it out.

    48 bits due, 48 bits seq, 24 bits check, in 24 digits of base 32: ten digits are 50 bits.
    """
    high, low = (F.conv(F.substring(name, at, 10), 32, 10).cast("bigint") for at in (1, 11))
    seq = F.shiftleft(high.bitwiseAND(3), 46).bitwiseOR(F.shiftright(low, 4))
    return F.shiftright(high, 2), seq


# ---- what the nodes say


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
    stale = F.coalesce(F.col("epoch") < F.col("their_epoch"), _false())
    return both.select("node", "index", "epoch", stale.alias("stale"))


def agreed_fates(fates: DataFrame) -> DataFrame:
    """Return one row per seq from the nodes' replays, and whether any two disagree.

    A node that is behind may not know a timer, or not its end: that is no disagreement.
    """
    start = F.struct("mark", "due_ms", "requested_ms", "topic", "payload_size", "schedule_index")
    end = F.when(
        F.col("end") != "pending",
        F.struct("end", "end_index", "end_epoch", "ended_at_ms", "queue_offset"),
    )
    merged = fates.groupBy("seq").agg(
        F.min(start).alias("start"),
        F.min(end).alias("finish"),
        ((F.min(start) != F.max(start)) | F.coalesce(F.min(end) != F.max(end), _false()))
        .alias("disagree"),
        F.min("scheduled_at_ms").alias("scheduled_at_ms"),
    )  # fmt: skip
    return merged.select(
        "seq",
        "start.*",
        F.coalesce("finish.end", F.lit("pending")).alias("end"),
        *(f"finish.{name}" for name in ("end_index", "end_epoch", "ended_at_ms", "queue_offset")),
        *("disagree", "scheduled_at_ms"),
    )


def agreed_acks(acks: DataFrame) -> DataFrame:
    """Return one row per acked slot: the epoch of the entry that acked it."""
    return acks.groupBy(*_SLOT).agg(F.min("ack_epoch").alias("ack_epoch"))


# ---- verdicts


def judged_deliveries(given: DataFrame, confirmed: DataFrame, log_acks: DataFrame) -> DataFrame:
    """Return one row per timer that was given to somebody; what is wrong with it is counted."""
    after = (F.col("received_ms") > F.col("confirmed_ms")) & (F.col("epoch") >= F.col("ack_epoch"))
    later = F.col("epoch") > F.col("ack_epoch")
    marked = given.join(confirmed, [*_SLOT], "left").join(log_acks, [*_SLOT], "left")
    same = ("topic", "queue_offset", "due_ms", "mark", "fired_at_ms")
    per_group = marked.groupBy("seq", "group").agg(
        F.count("*").alias("times"),
        F.count_if(F.col("attempt") == 1).alias("firsts"),
        F.count_if(after | later).alias("again"),
        F.count_if(F.col("confirmed_ms").isNotNull() & F.col("ack_epoch").isNull()).alias("unkept"),
        F.min("received_ms").alias("received_ms"),
        *(f(name).alias(f"{name}_{f.__name__}") for name in same for f in (F.min, F.max)),
    )
    return per_group.groupBy("seq").agg(
        F.sum("times").alias("deliveries"),
        F.count("*").alias("groups"),
        F.max("firsts").alias("firsts"),
        F.sum("again").alias("again"),
        F.sum("unkept").alias("unkept"),
        F.min("received_ms").alias("received_ms"),
        *(
            f(f"{name}_{f.__name__}").alias(f"given_{name}_{f.__name__}")
            for name in same
            for f in (F.min, F.max)
        ),
    )


def verdicts(
    asks: DataFrame, log: DataFrame, given: DataFrame, tried: DataFrame, groups: DataFrame,
    *, until_ms: int,
) -> DataFrame:  # fmt: skip
    """Return one row per timer that any witness knows, with its verdict and the evidence.

    `asks` as from `asked`, `log` from `agreed_fates`, `given` from `judged_deliveries`, `tried`
    from `cancels`, `groups`: (topic, group, start_offset) of the groups that were read to the
    end, `until_ms`: when the clients looked last.
    """
    copies = log.groupBy("mark").agg(F.count("*").alias("copies"))
    starts = groups.groupBy("topic").agg(F.collect_list("start_offset").alias("starts"))
    known = (
        log.withColumnRenamed("topic", "log_topic")
        .join(asks.withColumnRenamed("topic", "asked_topic"), "mark", "full")
        .join(copies, "mark", "left")
        .join(given, "seq", "full")
        .join(tried, "seq", "left")
        .withColumn("topic", F.coalesce("log_topic", "asked_topic", "given_topic_min"))
        .join(F.broadcast(starts), "topic", "left")
        .withColumn("mark", F.coalesce("mark", "given_mark_min"))
        .withColumn("expected_groups", F.expr("size(filter(starts, s -> s <= queue_offset))"))
    )
    breaks = _violations(until_ms)
    assert tuple(breaks) == VIOLATIONS
    chain = reduce(
        lambda chain, name: chain.when(breaks[name], name),
        VIOLATIONS[1:],
        F.when(breaks[VIOLATIONS[0]], VIOLATIONS[0]),
    )
    end, outcome = F.col("end"), F.col("outcome")
    chain = (
        chain.when(
            end.isNull(), F.when(outcome == "fail", "refused").otherwise("unknown_not_fired")
        )
        .when(end == "cancelled", "cancelled")
        .when((end == "pending") & (outcome == "unknown"), "unknown_not_fired")
        .when(end == "pending", "pending")
        .when(outcome == "unknown", "unknown_fired_once")
        .otherwise("ok")
    )
    evidence = (
        *("id", "mark", "seq", "topic", "due_ms", "asked_due_ms", "outcome", "copies", "end"),
        *("scheduled_at_ms", "ended_at_ms", "end_epoch", "queue_offset"),
        *("deliveries", "groups", "received_ms"),
    )
    return known.select(chain.alias("verdict"), *evidence)


def _violations(until_ms: int) -> dict[str, Column]:
    """Return violation -> its condition, in order of precedence. Unknown (null) is no violation."""
    c = F.col
    in_log, was_given, was_asked = (
        c("end").isNotNull(),
        c("deliveries") > 0,
        c("outcome").isNotNull(),
    )
    several = (c("given_queue_offset_min") != c("given_queue_offset_max")) | (
        c("given_topic_min") != c("given_topic_max")
    )
    otherwise_given = [
        (c(f"given_{name}_min") != c(log)) | (c(f"given_{name}_max") != c(log))
        for name, log in (
            ("queue_offset", "queue_offset"),
            ("due_ms", "due_ms"),
            ("mark", "mark"),
            ("fired_at_ms", "ended_at_ms"),
        )
    ]
    otherwise_answered = (c("copies") == 1) & (
        (c("answered_seq") != c("seq")) | (c("answered_due_ms") != c("due_ms"))
    )
    # ALREADY_CANCELLED may be one's own doing: the first answer was lost, the retry told of it.
    tried = c("cancel_ok") + c("cancel_already") + c("cancel_unknown")
    conditions = {
        "diverged": _any(c("disagree"), otherwise_answered, ~several & _any(*otherwise_given)),
        "duplicate_fire": _any(c("copies") > 1, several),
        "phantom": _any(
            ~was_asked,
            in_log & (c("outcome") == "fail"),
            was_given & (~in_log | (c("end") == "pending")),
        ),
        "cancelled_delivered": _any(
            (c("cancel_ok") > 0) & (c("end") == "fired"), (c("end") == "cancelled") & was_given
        ),
        "early": _any(
            (c("end") == "fired") & (c("ended_at_ms") < c("due_ms")),
            c("given_fired_at_ms_min") < c("due_ms"),
            c("due_ms") < c("asked_due_ms"),  # docs/adr/0006-past-due.md
        ),
        "acked_again": c("again") > 0,
        "ack_lost": c("unkept") > 0,
        "unmarked_redelivery": c("firsts") > 1,
        "cancel_untrue": _any(
            (c("cancel_fired") > 0) & (c("end") != "fired"),
            ((c("cancel_ok") > 0) | (c("cancel_already") > 0)) & (c("end") != "cancelled"),
            c("cancel_ok") > 1,
        ),
        "lost": _any(
            (c("outcome") == "ok") & ~in_log,
            (c("end") == "pending") & (c("due_ms") + GRACE_MS <= until_ms),
            (c("end") == "fired") & (F.coalesce("groups", F.lit(0)) < c("expected_groups")),
            (c("end") == "cancelled") & (F.coalesce(tried, F.lit(0)) == 0),
        ),
    }
    return {name: F.coalesce(wrong, _false()) for name, wrong in conditions.items()}


def _false() -> Column:
    return F.lit(False)  # noqa: FBT003 - the literal itself


def _any(*conditions: Column) -> Column:
    """Return whether any condition holds; one that is null does not."""
    return reduce(lambda a, b: a | b, (F.coalesce(each, _false()) for each in conditions))


# ---- a whole run


@dataclass(frozen=True, slots=True)
class Report:
    """What the audit found."""

    summary: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.summary["violations"]

    def line(self) -> str:
        """Return the verdict in one line."""
        s, counts = self.summary, self.summary["verdicts"]
        figures = {
            name: s[name]
            for name in ("kills", "failovers", "scheduled", "fired", "delivered", "cancelled")
        }
        figures["redelivered"] = s["redelivered"]
        for name, verdict in (("lost",) * 2, ("duplicated", "duplicate_fire"), ("early",) * 2):
            figures[name] = counts.get(verdict, 0)
        others = {k: v for k, v in s["violations"].items() if k not in _IN_LINE}
        text = " ".join(f"{name}={value}" for name, value in (figures | others).items())
        return f"verdict: {'OK' if self.ok else 'VIOLATED'} {text}"


_IN_LINE: Final = ("lost", "duplicate_fire", "early")


def spark_session(name: str, *, quick: bool = False, master: str = "local[*]") -> SparkSession:
    """Return a quiet session on this machine that knows the format "timerlog".

    `quick` is for runs of a few million timers: what starts and compiles soonest wins there.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    scratch = Path(tempfile.mkdtemp(prefix="audit-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    (scratch / "log4j2.properties").write_text(_LOGGING)
    options = f"-Dlog4j2.configurationFile={(scratch / 'log4j2.properties').as_uri()}"
    if quick:
        options += " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings: dict[str, bool | float | int | str | None] = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": options,
        "spark.driver.memory": "1g" if quick else "4g",
        "spark.local.dir": str(scratch),
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2" if quick else "64",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    session = SparkSession.builder.master(master).appName(name).config(map=settings).getOrCreate()
    timerlog.register(session)
    return session


_LOGGING: Final = """rootLogger.level = error
rootLogger.appenderRef.a.ref = a
appender.a.type = Console
appender.a.name = a
appender.a.target = SYSTEM_ERR
appender.a.layout.type = PatternLayout
appender.a.layout.pattern = %p %c{1}: %m%n
"""


def audit(spark: SparkSession, run: Run) -> Report:
    """Audit a run; write the verdict table and the summary into its `audit` folder.

    Raises:
        FileNotFoundError: the folder holds no histories, or no node's log.
        StorageError: a node's log is damaged.
        ValueError: a log's beginning is gone, so that it can't be replayed.
    """
    if not [*run.histories.glob("*.jsonl")]:
        raise FileNotFoundError(f"{run.histories}: no histories")
    nodes = run.nodes()
    lines = spark.read.schema(history.SCHEMA).json(str(run.histories)).where("op IS NOT NULL")
    lines = lines.cache()
    entries = spark.read.format("timerlog").load(str(run.root)).cache()
    common = agreed(entries, len(nodes) // 2 + 1).cache()
    disputes = conflicts(entries, common).cache()
    figures = _replayed(spark, run, nodes, _ends(entries, common, disputes))
    tables = {
        name: spark.read.parquet(str(run.audit / "replay" / name))
        for name in ("fates", "acks", "groups")
    }
    asks, given = asked(lines), deliveries(lines)
    log = agreed_fates(tables["fates"]).join(
        F.broadcast(asks.select("topic").distinct()), "topic", "left_semi"
    )
    starts = consumed(lines).join(
        tables["groups"].groupBy("topic", "group").agg(F.min("start_offset").alias("start_offset")),
        ["topic", "group"],
        "left",
    )
    found = verdicts(
        asks,
        log,
        judged_deliveries(given, confirmed_acks(lines), agreed_acks(tables["acks"])),
        cancels(lines),
        starts.select("topic", "group", F.coalesce("start_offset", F.lit(0)).alias("start_offset")),
        until_ms=_until_ms(lines, run),
    )
    table = str(run.audit / "verdicts.parquet")
    found.write.mode("overwrite").parquet(table)
    summary = _summary(spark.read.parquet(table), given, common, disputes)
    summary |= {"nodes": figures, **_faults(run, common)}
    (run.audit / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return Report(summary)


def _ends(entries: DataFrame, common: DataFrame, disputes: DataFrame) -> dict[str, int]:
    """Return node -> the last index up to which its log is the majority's."""
    end = common.agg(F.max("index")).first()
    assert end is not None
    if end[0] is None:
        raise ValueError("no entry is on a majority of the nodes: there is nothing to audit")
    lasts = entries.groupBy("node").agg(F.max("index").alias("last"))
    firsts = disputes.groupBy("node").agg(F.min("index").alias("first"))
    upto = F.least("last", F.lit(end[0]), F.col("first") - 1)
    rows = lasts.join(firsts, "node", "left").select("node", upto.alias("upto")).collect()
    return {row["node"]: row["upto"] for row in rows}


def _replayed(
    spark: SparkSession, run: Run, nodes: dict[str, Path], ends: dict[str, int]
) -> list[dict[str, Any]]:
    """Replay every node's log in a worker of its own; return their figures."""
    work = [(name, str(nodes[name]), upto) for name, upto in sorted(ends.items())]
    into = str(run.audit / "replay")

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for (number,) in zip(batch.column(0).to_pylist(), strict=True):
                name, log, upto = work[number]
                row = replay.job(Path(log), name, upto=LogIndex(upto), into=Path(into))
                yield pa.RecordBatch.from_pylist([row])

    tasks = spark.range(len(work), numPartitions=len(work))
    return [row.asDict() for row in tasks.mapInArrow(each, replay.FIGURES).collect()]


def _until_ms(lines: DataFrame, run: Run) -> int:
    """Return when the clients, or the harness, looked last."""
    latest = F.greatest(F.max("received_ms"), F.max("end_ms"), F.max("start_ms"))
    row = lines.agg(latest).first()
    assert row is not None
    latest_ms: int = row[0] or 0
    times: list[int] = (
        [line["at_ms"] for line in history.read(run.faults)] if run.faults.exists() else []
    )
    return max(latest_ms, *times, 0)


def _summary(
    found: DataFrame, given: DataFrame, common: DataFrame, disputes: DataFrame
) -> dict[str, Any]:
    counts = {row["verdict"]: row["count"] for row in found.groupBy("verdict").count().collect()}
    violations = {name: counts[name] for name in VIOLATIONS if name in counts}
    disputed = disputes.agg(F.count_if("stale"), F.count_if(~F.col("stale"))).first()
    assert disputed is not None
    if disputed[1]:
        violations["diverged_entries"] = disputed[1]
    ends = {row["end"]: row["count"] for row in found.groupBy("end").count().collect()}
    messages = given.agg(F.count("*"), F.count_distinct("seq", "group")).first()
    assert messages is not None
    # What was due before it was asked for could not be fired before that.
    fired = found.where("end = 'fired'").withColumn(
        "could_fire_ms", F.greatest("due_ms", "scheduled_at_ms")
    )
    bad = found.where(F.col("verdict").isin(*VIOLATIONS)).orderBy("verdict", "seq", "mark")
    return {
        "verdict": "VIOLATED" if violations else "OK",
        "violations": violations,
        "verdicts": counts,
        "scheduled": sum(n for end, n in ends.items() if end),
        "fired": ends.get("fired", 0),
        "cancelled": ends.get("cancelled", 0),
        "pending": ends.get("pending", 0),
        "delivered": messages[1],
        "redelivered": messages[0] - messages[1],
        "fire_lateness_ms": _percentiles(fired, F.col("ended_at_ms") - F.col("could_fire_ms")),
        "delivery_lateness_ms": _percentiles(fired, F.col("received_ms") - F.col("could_fire_ms")),
        "entries": common.count(),
        "stale_entries": disputed[0],
        "offenders": [row.asDict() for row in bad.limit(OFFENDERS_MAX).collect()],
    }


def _percentiles(rows: DataFrame, lateness: Column) -> dict[str, int]:
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    row = rows.agg(F.percentile_approx(lateness, [*names.values()], 10_000)).first()
    assert row is not None
    return dict(zip(names, row[0], strict=True)) if row[0] else {}


def _faults(run: Run, common: DataFrame) -> dict[str, Any]:
    """Return the kills, and how soon after each a later epoch fired for the first time."""
    first = common.groupBy("epoch").agg(
        F.min(F.when(F.col("kind") == "FIRE", F.col("time_ms"))).alias("fired_ms")
    )
    epochs = [(row["epoch"], row["fired_ms"]) for row in first.orderBy("epoch").collect()]
    events = [*history.read(run.faults)] if run.faults.exists() else []
    kills = [event for event in events if event["event"] == "kill"]
    gaps = []
    for kill in kills:
        later = [(e, ms) for e, ms in epochs if ms is not None and e > (kill.get("epoch") or e)]
        if kill.get("role") == "leader" and later:
            epoch, fired_ms = later[0]
            gap_ms = fired_ms - kill["at_ms"]
            gaps.append({"node": kill.get("node"), "epoch": epoch, "fired_after_ms": gap_ms})
    return {"kills": len(kills), "failovers": max(0, len(epochs) - 1), "gaps": gaps}


def describe(report: Report) -> Iterator[str]:
    """Yield the report for people, line by line; the verdict last."""
    s = report.summary
    yield f"{s['entries']:,} log entries on a majority; {s['stale_entries']} stale ones beside them"
    for gap in s["gaps"]:
        text = f"leader {gap['node']} killed: epoch {gap['epoch']} fired first"
        yield f"{text} {gap['fired_after_ms']} ms later"
    for name, of in (("fire_lateness_ms", "fired"), ("delivery_lateness_ms", "delivered")):
        figures = " ".join(f"{key} {value} ms" for key, value in s[name].items())
        yield f"{of} after due: {figures or 'nothing'}"
    yield "timers: " + ", ".join(f"{name} {n:,}" for name, n in sorted(s["verdicts"].items()))
    for row in s["offenders"][:10]:
        yield "  " + " ".join(f"{k}={v}" for k, v in row.items() if v is not None)
    yield report.line()


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Let what is started here, a chatty JVM, write its stderr to a file for good."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(ours, 2)
            os.close(ours)


def run_audit(folder: Path, *, output: str = "table") -> int:
    """Audit a folder and print what was found; return the exit status: 0, or 1 if violated."""
    run = Run(folder.resolve())
    size = sum(path.stat().st_size for path in run.root.rglob("*") if path.is_file())
    try:
        with _stderr_to(run.audit / "spark.log"):
            spark = spark_session("timer-audit", quick=size <= QUICK_SIZE_MAX)
        try:
            report = audit(spark, run)
        finally:
            spark.stop()
    except (FileNotFoundError, StorageError, ValueError) as broken:
        print(f"audit: {broken}", file=sys.stderr)
        return 2
    if output == "json":
        print(json.dumps(report.summary, indent=2))
    else:
        print("\n".join(describe(report)))
    return 0 if report.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.audit`."""
    parser = argparse.ArgumentParser(description="check a run's folder against the promises")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args(argv)
    return run_audit(args.run, output=args.output)


if __name__ == "__main__":
    sys.exit(main())
