"""Figures of a run: lateness, throughput, gaps in service, redeliveries. None is sampled.

Lateness is in whole milliseconds. So its histogram is small for any number of timers, and the
percentiles are exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import SLOT
from chaos.audit.rules.fault_windows import Fault, Phase
from chaos.oracle.group_story import ENDED

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
PLANES: Final = ("schedule", "fire", "deliver")
"""The services that a client sees: schedules answered, timers fired, messages delivered."""
GAP_MS_MIN: Final = 50
"""Shorter gaps between successes are ignored."""
WAITED_MS: Final = 1_000
"""A schedule that failed sooner was refused, and a refusal is an answer. A slower one waited."""
AFTERMATH_MS: Final = 2_000
"""A gap that begins within this time after a strike belongs to the fault, even after the heal."""
FAULT_LATE: Final = tuple((what, name) for what in ("fire", "deliver") for name in ("p99", "max"))
"""Lateness figures of a fault, of the timers that could fire in it."""
_BUCKET_MS: Final = 1000


def in_phases(rows: DataFrame, at: str, phases: Sequence[Phase]) -> DataFrame:
    """Return rows with a column `phase`: steady, fault or recovery at the time in column `at`."""
    stretches = ((each.name, each.start_ms, each.end_ms) for each in phases)
    joined = _within(rows, at, stretches, "phase_name STRING", "left")
    return joined.withColumn("phase", F.coalesce("phase_name", F.lit("steady"))).drop("phase_name")


def _within(
    rows: DataFrame, at: str, stretches: Iterable[tuple[Any, int, int]], name: str, how: str
) -> DataFrame:
    """Return rows joined with the stretches, (name, start_ms, end_ms), that contain their time.

    Rows and stretches are joined by equal seconds first, and then by the exact bounds. `name`: the
    added column, with its type.
    """
    table = [
        (each, second, start_ms, end_ms)
        for each, start_ms, end_ms in stretches
        for second in range(start_ms // _BUCKET_MS, (end_ms - 1) // _BUCKET_MS + 1)
    ]
    bounds = ("at_second", "from_ms", "to_ms")
    schema = ", ".join((name, *(f"{bound} BIGINT" for bound in bounds)))
    touched = rows.sparkSession.createDataFrame(table, schema)
    second = f"floor({at} / {_BUCKET_MS}) = at_second"
    inside = F.expr(f"{second} AND {at} >= from_ms AND {at} < to_ms")
    return rows.join(F.broadcast(touched), inside, how).drop(*bounds)


def lateness(found: DataFrame, phases: Sequence[Phase], bucket_ms: int) -> DataFrame:
    """Return a histogram of the fired timers: what, phase, bucket, late_ms, n.

    `what` is fire, or deliver for the first delivery. `bucket` is the start of the `bucket_ms` in
    which the timer fired or was delivered. Lateness counts from the time when the timer could fire:
    its due time, or the time of its schedule if that is later. The phase is the phase at that time.
    """
    rows = in_phases(_timely(found), "could_fire_ms", phases)
    bucket = F.floor(F.col("at") / bucket_ms) * bucket_ms
    return rows.groupBy("what", "phase", bucket.alias("bucket"), "late_ms").agg(
        F.count("*").alias("n")
    )


def _could() -> Column:
    """Return the time when a timer could fire: when it was both due and scheduled."""
    return F.greatest("due_ms", "scheduled_at_ms")


def _timely(found: DataFrame) -> DataFrame:
    """Return a row per firing and first delivery: what, could_fire_ms, at, late_ms."""
    fired = found.where("end = 'fired'")
    # Two scans of three columns are faster than one scan that makes two rows of each.
    ended, received = (
        fired.select(
            F.lit(what).alias("what"), _could().alias("could_fire_ms"), F.col(at).alias("at")
        )
        for what, at in (("fire", "ended_at_ms"), ("deliver", "received_ms"))
    )
    rows = ended.union(received).where("at IS NOT NULL")
    return rows.withColumn("late_ms", F.col("at") - F.col("could_fire_ms"))


def lateness_by_fault(
    found: DataFrame, faults: Sequence[Fault]
) -> dict[int, dict[str, dict[str, int]]]:
    """Return fault number -> what, as in `lateness`, -> percentiles of late_ms, and n.

    The timers of a fault are those that could fire from its strike to its recovery, and at least
    for AFTERMATH_MS. If faults overlap, a timer counts for each. A timer that never fired is not
    counted here: it is lost.
    """
    if not faults:
        return {}
    stretches = ((each.number, each.start_ms, _reach_ms(each)) for each in faults)
    rows = _within(_timely(found), "could_fire_ms", stretches, "number INT", "inner")
    histogram = rows.groupBy("number", "what", "late_ms").agg(F.count("*").alias("n"))
    by_fault: dict[int, dict[str, dict[str, int]]] = {}
    for row in percentiles(histogram, "number", "what").collect():
        told = {name: row[name] for name in ("n", *QUANTILES)}
        by_fault.setdefault(row["number"], {})[row["what"]] = told
    return by_fault


def _reach_ms(fault: Fault) -> int:
    return max(fault.start_ms + AFTERMATH_MS, fault.recovered_ms)


def percentiles(histogram: DataFrame, *by: str) -> DataFrame:
    """Return the exact QUANTILES of late_ms per group of `by`, and n."""
    per_value = histogram.groupBy(*by, "late_ms").agg(F.sum("n").alias("n"))
    group = Window.partitionBy(*by)
    so_far = group.orderBy("late_ms").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = per_value.select(
        *by, "late_ms", "n", F.sum("n").over(so_far).alias("upto"),
        F.sum("n").over(group).alias("all"),
    )  # fmt: skip
    reached = [
        F.min(F.when(F.col("upto") >= F.ceil(F.col("all") * share), F.col("late_ms"))).alias(name)
        for name, share in QUANTILES.items()
    ]
    return ranked.groupBy(*by).agg(F.sum("n").alias("n"), *reached)


def breakdowns(histogram: DataFrame) -> DataFrame:
    """Return three views of a histogram of `lateness` in one table: by phase, in all, by bucket.

    Columns: what, phase, bucket, late_ms, n. `phase` is `all` in the second view and null in the
    third; `bucket` is null except in the third.
    """
    none = F.lit(None)
    views = [
        F.struct(F.col("phase").alias("phase"), none.cast("bigint").alias("bucket")),
        F.struct(F.lit("all").alias("phase"), none.cast("bigint").alias("bucket")),
        F.struct(none.cast("string").alias("phase"), F.col("bucket").alias("bucket")),
    ]
    return histogram.select("what", "late_ms", "n", F.inline(F.array(*views)))


def throughput(lines: DataFrame, bucket_ms: int) -> DataFrame:
    """Return the numbers of timers per bucket: bucket, schedule, failed, deliver."""
    at = F.coalesce("end_ms", "received_ms")
    bucket = (F.floor(at / bucket_ms) * bucket_ms).alias("bucket")
    answered, given = F.col("outcome") == "ok", F.col("op") == "deliver"
    counts = {
        "schedule": F.when(~given & answered, F.size("marks")),
        "failed": F.when(~given & ~answered, F.size("marks")),
        "deliver": F.when(given, F.size("offsets")),
    }
    return (
        lines.where("op IN ('schedule', 'deliver')")
        .groupBy(bucket)
        .agg(*(F.coalesce(F.sum(n), F.lit(0)).alias(name) for name, n in counts.items()))
    )


def successes(lines: DataFrame, found: DataFrame) -> DataFrame:
    """Return the times of all successes: plane, at_ms; no row twice."""
    answers = lines.where("op = 'schedule' AND outcome = 'ok'")
    given, fired = lines.where("op = 'deliver'"), found.where("end = 'fired'")
    moments = answers.selectExpr("'schedule' AS plane", "end_ms AS at_ms")
    moments = moments.union(given.selectExpr("'deliver'", "received_ms"))
    return moments.union(fired.selectExpr("'fire'", "ended_at_ms")).distinct()


class Work(NamedTuple):
    """The stretch of time in which one plane had work, in Unix ms."""

    plane: str
    begin_ms: int
    """The first request, the first time when a timer could fire, or the first firing that a
    consumer waited for."""
    end_ms: int
    """The last success. If `undone`, the end of the last wait: a client gave the request up, or the
    run ended."""
    undone: bool
    """Whether later work was waited for after the last success, and none of it succeeded."""


def works(lines: DataFrame, found: DataFrame, end_ms: int) -> list[Work]:
    """Return the work of each plane that had any. `found`: from `verdict.verdicts`."""
    columns = ("plane", "begin_ms", "done_ms", "waited_ms")
    never = F.lit(None).cast("bigint")
    until = F.when(F.col("verdict") == "lost", F.lit(end_ms).cast("bigint"))
    answered = F.col("outcome") == "ok"
    refused = (F.col("outcome") == "fail") & (F.col("end_ms") - F.col("start_ms") < WAITED_MS)
    asked = lines.where("op = 'schedule'").select(
        F.lit("schedule"), "start_ms", F.when(answered, F.col("end_ms")),
        F.when(answered | refused, never).otherwise(F.col("end_ms")),
    )  # fmt: skip
    due = found.where("end = 'fired' OR (end = 'pending' AND verdict = 'lost')").select(
        F.lit("fire"), _could(), "ended_at_ms",
        F.when(F.col("end") == "pending", until),
    )  # fmt: skip
    owed = found.where("end = 'fired' AND (received_ms IS NOT NULL OR verdict = 'lost')").select(
        F.lit("deliver"), "ended_at_ms", "received_ms", until
    )
    rows = asked.toDF(*columns).union(due.toDF(*columns)).union(owed.toDF(*columns))
    waited = F.when(F.col("waited_ms").isNotNull(), F.struct("begin_ms", "waited_ms"))
    sums = rows.groupBy("plane").agg(
        F.min("begin_ms").alias("begin_ms"), F.max("done_ms").alias("done_ms"),
        F.max(waited).alias("waited"),
    )  # fmt: skip
    opened = lines.where("op = 'open'").agg(F.min("start_ms")).first()
    told = []
    for row in sums.collect():
        begin_ms, done_ms, waited_for = row["begin_ms"], row["done_ms"], row["waited"]
        if row["plane"] == "deliver" and opened and opened[0] is not None:
            begin_ms = max(begin_ms, opened[0])
        undone = waited_for is not None and (done_ms is None or waited_for["begin_ms"] > done_ms)
        told.append(
            Work(row["plane"], begin_ms, waited_for["waited_ms"] if undone else done_ms, undone)
        )
    return told


def gaps(moments: DataFrame, done: Sequence[Work]) -> DataFrame:
    """Return the gaps without a success of at least GAP_MS_MIN: plane, from_ms, to_ms, over.

    A gap lies between two successes, or between the begin of the plane's work and its first
    success. A gap after the last success, with work that never succeeded, is not `over`.
    """
    edges = [(each.plane, each.begin_ms, True) for each in done]
    edges += [(each.plane, each.end_ms, False) for each in done if each.undone]
    schema = "plane STRING, at_ms BIGINT, over BOOLEAN"
    bounds = moments.sparkSession.createDataFrame(edges, schema)
    rows = moments.select("plane", "at_ms", F.expr("true").alias("over")).union(bounds)
    before = F.lag("at_ms").over(Window.partitionBy("plane").orderBy("at_ms"))
    return (
        rows.select("plane", before.alias("from_ms"), F.col("at_ms").alias("to_ms"), "over")
        .where("from_ms IS NOT NULL")
        .where(F.col("to_ms") - F.col("from_ms") >= GAP_MS_MIN)
    )


def recovered(
    moments: DataFrame, between: DataFrame, faults: Sequence[Fault], end_ms: int
) -> list[Fault]:
    """Return the faults with their recoveries: a schedule answered and a timer fired after a heal.

    A fault that touches a gap of schedules or firings that is not over is not recovered. A plane
    without a success after the heal does not delay the recovery otherwise. `between`: from `gaps`.
    """
    if not faults:
        return []
    healed = _table(moments.sparkSession, faults).select("number", "heal_ms")
    vital = "plane IN ('schedule', 'fire')"
    first = (
        moments.where(vital)
        .crossJoin(F.broadcast(healed))
        .where("at_ms >= heal_ms")
        .groupBy("number", "plane")
        .agg(F.min("at_ms").alias("at_ms"))
        .groupBy("number")
        .agg(F.max("at_ms").alias("at_ms"))
    )
    back = {row["number"]: row["at_ms"] for row in first.collect()}
    lasting = between.where(vital).where("NOT over").collect()
    told = []
    for each in faults:
        reach_ms = max(each.start_ms + AFTERMATH_MS, each.heal_ms)
        if any(row["to_ms"] > each.start_ms and row["from_ms"] < reach_ms for row in lasting):
            told.append(replace(each, recovered_ms=end_ms, recovered=False))
        else:
            told.append(replace(each, recovered_ms=back.get(each.number, each.heal_ms)))
    return told


def unavailability(
    spark: SparkSession, between: DataFrame, faults: Sequence[Fault]
) -> list[dict[str, Any]]:
    """Return the longest gap of each plane per fault: its length, its start, and if it is open.

    A gap belongs to a fault if it ends after the strike and begins before the recovery, or less
    than AFTERMATH_MS after the strike. Length 0: no gap of at least GAP_MS_MIN. A gap that is not
    over is `open`, and is preferred to longer ones. `between`: from `gaps`.
    """
    if not faults:
        return []
    reach = F.greatest(F.col("start_ms") + AFTERMATH_MS, F.col("recovered_ms"))
    mine = between.join(
        F.broadcast(_table(spark, faults)),
        (F.col("to_ms") > F.col("start_ms")) & (F.col("from_ms") < reach),
    )
    gap = F.expr("struct(NOT over AS open, to_ms - from_ms AS ms, -from_ms AS minus_from_ms)")
    longest = mine.groupBy("number", "plane").agg(F.max(gap).alias("gap")).collect()
    by_fault = {(row["number"], row["plane"]): row["gap"] for row in longest}
    return [{**_named(each), **dict(_gaps_of(each, by_fault))} for each in faults]


def _gaps_of(fault: Fault, found: dict[Any, Any]) -> Iterator[tuple[str, int | bool]]:
    for plane in PLANES:
        gap = found.get((fault.number, plane))
        yield f"{plane}_gap_ms", gap["ms"] if gap else 0
        yield f"{plane}_gap_after_ms", -gap["minus_from_ms"] - fault.start_ms if gap else 0
        yield f"{plane}_gap_open", bool(gap and gap["open"])


def late_in(fault: Fault, found: dict[int, dict[str, dict[str, int]]]) -> dict[str, int | None]:
    """Return a fault's FAULT_LATE from `lateness_by_fault`; None: no timer of that fault."""
    mine = found.get(fault.number, {})
    return {f"{what}_late_{name}_ms": mine.get(what, {}).get(name) for what, name in FAULT_LATE}


def _named(fault: Fault) -> dict[str, Any]:
    after_ms = fault.recovered_ms - fault.heal_ms if fault.recovered else None
    return {
        "fault": fault.label,
        "start_ms": fault.start_ms,
        "healed_after_ms": fault.heal_ms - fault.start_ms,
        "recovered_after_ms": after_ms,
    }


def _table(spark: SparkSession, faults: Sequence[Fault]) -> DataFrame:
    rows = [(each.number, each.start_ms, each.heal_ms, each.recovered_ms) for each in faults]
    schema = "number INT, start_ms BIGINT, heal_ms BIGINT, recovered_ms BIGINT"
    return spark.createDataFrame(rows, schema)


def repeated(given: DataFrame, found: DataFrame) -> DataFrame:
    """Return the seqs of timers with more deliveries than groups, or with a redelivery.

    `given`: from `client_tables.deliveries`. `found`: from `verdict.verdicts`.
    """
    several = found.where("deliveries > groups").select("seq")
    return several.union(given.where("attempt > 1").select("seq")).distinct()


def arrived_after_ack(some: DataFrame, confirmed: DataFrame) -> int:
    """Return the number of deliveries of `repeated` timers that arrived after a confirmed ack."""
    slots = some.select(*SLOT).distinct()
    first = (
        confirmed.join(slots, [*SLOT], "left_semi")
        .groupBy(*SLOT)
        .agg(F.min("confirmed_ms").alias("confirmed_ms"))
    )
    return some.join(first, [*SLOT]).where("received_ms > confirmed_ms").count()


def redeliveries(some: DataFrame, returns: DataFrame) -> DataFrame:
    """Return the number of redeliveries by reason: reason, n.

    `some`: the deliveries of `repeated` timers. `returns`: the replay's table of returned messages
    (tables.py). The end of the previous delivery is found by slot and attempt:

        nacked          its consumer nacked the message
        lease ended     its lease ended before an ack
        recalled        in an ordered group, an earlier message came back
        failover        none of these, and the redelivery has a later epoch
        first to arrive marked as a redelivery, and no consumer received an earlier delivery: it was
                        reserved or in flight when the leadership or the consumer ended
        unmarked        the same attempt again
        not in the log  none of these: the reason is unknown
    """
    order = Window.partitionBy("seq", *SLOT).orderBy("attempt", "epoch", "received_ms")
    told = some.select(
        *SLOT, "attempt", "epoch",
        F.lag("attempt").over(order).alias("attempt_before"),
        F.lag("epoch").over(order).alias("epoch_before"),
    ).where("attempt_before IS NOT NULL OR attempt > 1")  # fmt: skip
    before = returns.select(*SLOT, F.col("attempts").alias("attempt_before"), "why")
    reason = (
        F.when(F.col("attempt_before").isNull(), "first to arrive")
        .when(F.col("attempt") == F.col("attempt_before"), "unmarked")
        .when(F.col("why") == ENDED, "lease ended")
        .when(F.col("why").isNotNull(), F.col("why"))
        .when(F.col("epoch") > F.col("epoch_before"), "failover")
        .otherwise("not in the log")
    )
    told = told.join(before, [*SLOT, "attempt_before"], "left")
    return told.groupBy(reason.alias("reason")).agg(F.count("*").alias("n"))
