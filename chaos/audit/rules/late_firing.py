"""Late firings without an excuse: the second half of P3.

    late  P3  fired more than LATE_MS after it was due, or after it was scheduled if that was
              later; time that is excused does not count

All times are those of the log, on the cluster's clock. The excuses are:

- a fault of the timeline, and its recovery
- a change of leader, by the log
- a backlog after one of these: RATE timers per millisecond
- a pause of the topic, and the release after it: it excuses the whole wait, because the release
  takes longer for a larger topic
"""

from collections.abc import Iterable, Sequence
from typing import Final

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.fault_windows import Phase

LATE_MS: Final = 5_000
"""Far more than the tick, the commit and a full queue of due timers take on a slow machine."""
AFTER_MS: Final = 5_000
"""An excuse lasts this much longer than its cause, because overdue timers fire in order."""

RECOVERY_MS: Final = 120_000
"""The recovery from a fault is an excuse for at most this long."""
RATE: Final = 10
"""Timers per millisecond that a cluster with a backlog fires, at least."""

Stretch = tuple[int, int]
"""[from, to), Unix milliseconds."""


def excuses(phases: Iterable[Phase], epochs: Sequence[Row]) -> list[Stretch]:
    """Return the stretches in which timers may be late: faults, and changes of leader.

    `epochs`: from `node_logs.epochs`, in order.
    """
    found = []
    for phase in phases:
        end_ms = phase.end_ms
        if phase.name == "recovery":  # it lasts until a timer fires, so a stall prolongs it
            end_ms = min(end_ms, phase.start_ms + RECOVERY_MS)
        found.append((phase.start_ms, end_ms + AFTER_MS))
    for row in epochs:
        times = [row[name] for name in ("since_ms", "began_ms", "fired_ms")]
        end_ms = max(time_ms for time_ms in times if time_ms is not None)
        found.append((row["since_ms"], end_ms + AFTER_MS))
    return _merged(found)


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def late(found: DataFrame, excused: Sequence[Stretch], pauses: DataFrame) -> DataFrame:
    """Return the timers that fired late without an excuse: seq, mark, topic, due_ms, late_ms, …

    `found`: the verdict table. `pauses`: the replay's table: topic, from_ms, until_ms.
    """
    since = F.greatest("due_ms", "scheduled_at_ms").alias("since_ms")
    times = ("due_ms", "scheduled_at_ms", "ended_at_ms")
    fired = found.where("end = 'fired' AND from_topic IS NULL")
    waits = fired.select("seq", "mark", "topic", *times, since)
    waits = waits.withColumn("late_ms", F.col("ended_at_ms") - F.col("since_ms"))
    waits = unexcused(waits, "ended_at_ms", excused)
    paused = pauses.withColumnRenamed("topic", "of")
    meanwhile = f"from_ms < ended_at_ms AND until_ms + {AFTER_MS} > since_ms"
    was_paused = F.expr(f"of = topic AND {meanwhile}")
    left = waits.join(F.broadcast(paused), was_paused, "left_anti").cache()
    if left.where("excused_ms > 0").head(1):
        left = _beyond_backlog(left, fired)
    return left.drop("since_ms", "excused_ms")


def planned_late(occurrences: DataFrame, excused: Sequence[Stretch]) -> DataFrame:
    """Return the occurrences of the replay for which their series waited too long."""
    waits = occurrences.where("since_ms IS NOT NULL AND NOT untrue")
    return unexcused(waits.withColumn("late_ms", F.expr("at_ms - since_ms")), "at_ms", excused)


def unexcused(waits: DataFrame, until: str, excused: Sequence[Stretch]) -> DataFrame:
    """Return the waits [since_ms, until) with more than LATE_MS outside of excuses: excused_ms.

    `waits`: with `late_ms`, the length.
    """
    excuses = waits.sparkSession.createDataFrame(
        [([*excused],)], "excuses ARRAY<STRUCT<start_ms: BIGINT, end_ms: BIGINT>>"
    )
    excused_ms = F.expr(
        "aggregate(excuses, 0L, (sum, each) -> sum + greatest(0L,"
        f" least(each.end_ms, {until}) - greatest(each.start_ms, since_ms)))"
    )
    waits = waits.where(F.col("late_ms") > LATE_MS).crossJoin(F.broadcast(excuses))
    waits = waits.withColumn("excused_ms", excused_ms).drop("excuses")
    return waits.where(F.col("late_ms") - F.col("excused_ms") > LATE_MS)


def _beyond_backlog(waits: DataFrame, fired: DataFrame) -> DataFrame:
    """Return the waits without those that a backlog after an excuse explains."""
    second = F.expr("ended_at_ms DIV 1000").alias("second")
    seconds = fired.groupBy(second).agg(F.count("*").alias("n"))
    within = F.expr("second BETWEEN since_ms DIV 1000 AND ended_at_ms DIV 1000")
    each = waits.join(F.broadcast(seconds), within).groupBy(*waits.columns)
    rows = each.agg(F.sum("n").alias("came"))
    backlog_ms = F.when(F.col("excused_ms") > 0, F.col("came") / RATE).otherwise(0)
    late_ms = F.col("late_ms") - F.col("excused_ms") - backlog_ms
    return rows.where(late_ms > LATE_MS).drop("came")
