"""Figures of a run: lateness, throughput, gaps in service, redeliveries. All counted, none sampled.

Lateness is in whole milliseconds, so its histogram is small however many timers there are, and
every percentile is read from it exactly.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.clients import SLOT
from chaos.audit.faults import Fault, Phase

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
PLANES: Final = ("schedule", "fire", "deliver")
"""What a client sees working: schedules answered, timers fired, messages delivered."""
GAP_MS_MIN: Final = 50
"""Shorter gaps between successes are not looked at."""
AFTERMATH_MS: Final = 2_000
"""A gap that begins within this time after a strike counts as the fault's, healed or not."""
_BUCKET_MS: Final = 1000


def in_phases(rows: DataFrame, at: str, phases: Sequence[Phase]) -> DataFrame:
    """Return rows with `phase`: steady, fault or recovery, by a column of Unix ms.

    An equi-join by second against the seconds that phases touch, then the exact bounds.
    """
    table = [
        (second, each.name, each.start_ms, each.end_ms)
        for each in phases
        for second in range(each.start_ms // _BUCKET_MS, (each.end_ms - 1) // _BUCKET_MS + 1)
    ]
    schema = "at_second BIGINT, phase_name STRING, phase_start BIGINT, phase_end BIGINT"
    touched = rows.sparkSession.createDataFrame(table, schema)
    second = F.floor(F.col(at) / _BUCKET_MS)
    inside = (
        (second == F.col("at_second"))
        & (F.col(at) >= F.col("phase_start"))
        & (F.col(at) < F.col("phase_end"))
    )
    joined = rows.join(F.broadcast(touched), inside, "left")
    return joined.withColumn("phase", F.coalesce("phase_name", F.lit("steady"))).drop(
        "at_second", "phase_name", "phase_start", "phase_end"
    )


def lateness(found: DataFrame, phases: Sequence[Phase], bucket_ms: int) -> DataFrame:
    """Return a histogram of the fired timers: what, phase, bucket, late_ms, n.

    `what` is fire or deliver (its first delivery), `bucket` the start of the stretch of
    `bucket_ms` in which the timer fired or was delivered. What was due before it was asked for
    could not fire before that; the phase is that of the time when it could.
    """
    could = F.greatest("due_ms", "scheduled_at_ms")
    fired = found.where("end = 'fired'")
    # Two scans of three columns: to make two rows of one takes longer.
    ended, received = (
        fired.select(F.lit(what).alias("what"), could.alias("could_fire_ms"), F.col(at).alias("at"))
        for what, at in (("fire", "ended_at_ms"), ("deliver", "received_ms"))
    )
    rows = in_phases(ended.union(received).where("at IS NOT NULL"), "could_fire_ms", phases)
    late = F.col("at") - F.col("could_fire_ms")
    bucket = F.floor(F.col("at") / bucket_ms) * bucket_ms
    return rows.groupBy("what", "phase", bucket.alias("bucket"), late.alias("late_ms")).agg(
        F.count("*").alias("n")
    )


def percentiles(histogram: DataFrame, *by: str) -> DataFrame:
    """Return the exact QUANTILES of late_ms per group, and n."""
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
    """Return a histogram of `lateness` by phase, over all phases, and by bucket, in one table.

    what, phase, bucket, late_ms, n: `phase` is also `all`, or null where `bucket` is not.
    """
    none = F.lit(None)
    views = [
        F.struct(F.col("phase").alias("phase"), none.cast("bigint").alias("bucket")),
        F.struct(F.lit("all").alias("phase"), none.cast("bigint").alias("bucket")),
        F.struct(none.cast("string").alias("phase"), F.col("bucket").alias("bucket")),
    ]
    return histogram.select("what", "late_ms", "n", F.inline(F.array(*views)))


def throughput(lines: DataFrame, bucket_ms: int) -> DataFrame:
    """Return what clients did per stretch of time: bucket, schedule, failed, deliver (rows)."""
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
    """Return when something worked: plane, at_ms; each moment once."""
    answers = lines.where("op = 'schedule' AND outcome = 'ok'").select(
        F.lit("schedule").alias("plane"), F.col("end_ms").alias("at_ms")
    )
    given = lines.where("op = 'deliver'").select(
        F.lit("deliver").alias("plane"), F.col("received_ms").alias("at_ms")
    )
    fired = found.where("end = 'fired'").select(
        F.lit("fire").alias("plane"), F.col("ended_at_ms").alias("at_ms")
    )
    return answers.union(given).union(fired).distinct()


def gaps(moments: DataFrame) -> DataFrame:
    """Return the times between two successes of a plane: plane, from_ms, to_ms."""
    before = F.lag("at_ms").over(Window.partitionBy("plane").orderBy("at_ms"))
    return (
        moments.select("plane", before.alias("from_ms"), F.col("at_ms").alias("to_ms"))
        .where("from_ms IS NOT NULL")
        .where(F.col("to_ms") - F.col("from_ms") >= GAP_MS_MIN)
    )


def recovered(spark: SparkSession, moments: DataFrame, faults: Sequence[Fault]) -> dict[int, int]:
    """Return fault number -> when, from its heal on, schedules were answered and timers fired."""
    if not faults:
        return {}
    healed = _table(spark, faults).select("number", "heal_ms")
    after = F.min(F.when(F.col("at_ms") >= F.col("heal_ms"), F.col("at_ms")))
    first = (
        moments.where("plane IN ('schedule', 'fire')")
        .crossJoin(F.broadcast(healed))
        .where("at_ms >= heal_ms")
        .groupBy("number", "plane")
        .agg(after.alias("at_ms"))
        .groupBy("number")
        .agg(F.max("at_ms").alias("at_ms"))
    )
    return {row["number"]: row["at_ms"] for row in first.collect()}


def unavailability(
    spark: SparkSession, between: DataFrame, faults: Sequence[Fault]
) -> list[dict[str, Any]]:
    """Return per fault the longest gap of each plane that it touches: its length and its start.

    `between` as from `gaps`. A gap is the fault's if it ends after the strike and begins before
    the recovery, or at most AFTERMATH_MS after the strike. 0: nothing longer than GAP_MS_MIN.
    """
    if not faults:
        return []
    reach = F.greatest(F.col("start_ms") + AFTERMATH_MS, F.col("recovered_ms"))
    mine = between.join(
        F.broadcast(_table(spark, faults)),
        (F.col("to_ms") > F.col("start_ms")) & (F.col("from_ms") < reach),
    )
    gap = F.struct(
        (F.col("to_ms") - F.col("from_ms")).alias("ms"), (-F.col("from_ms")).alias("minus_from_ms")
    )
    longest = mine.groupBy("number", "plane").agg(F.max(gap).alias("gap")).collect()
    by_fault = {(row["number"], row["plane"]): row["gap"] for row in longest}
    return [{**_named(each), **dict(_gaps_of(each, by_fault))} for each in faults]


def _gaps_of(fault: Fault, found: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    for plane in PLANES:
        gap = found.get((fault.number, plane))
        yield f"{plane}_gap_ms", gap["ms"] if gap else 0
        yield f"{plane}_gap_after_ms", -gap["minus_from_ms"] - fault.start_ms if gap else 0


def _named(fault: Fault) -> dict[str, Any]:
    return {
        "fault": fault.label,
        "start_ms": fault.start_ms,
        "healed_after_ms": fault.heal_ms - fault.start_ms,
        "recovered_after_ms": fault.recovered_ms - fault.heal_ms,
    }


def _table(spark: SparkSession, faults: Sequence[Fault]) -> DataFrame:
    rows = [(each.number, each.start_ms, each.heal_ms, each.recovered_ms) for each in faults]
    schema = "number INT, start_ms BIGINT, heal_ms BIGINT, recovered_ms BIGINT"
    return spark.createDataFrame(rows, schema)


def repeated(given: DataFrame, found: DataFrame) -> DataFrame:
    """Return the seqs of timers that were given more than once to a group, or marked so.

    `given` as from `clients.deliveries`, `found` from `verdict.verdicts`.
    """
    several = found.where("deliveries > groups").select("seq")
    return several.union(given.where("attempt > 1").select("seq")).distinct()


def arrived_after_ack(some: DataFrame, confirmed: DataFrame) -> int:
    """Return how many deliveries of `repeated` timers came after the ack was confirmed."""
    slots = some.select(*SLOT).distinct()
    first = (
        confirmed.join(slots, [*SLOT], "left_semi")
        .groupBy(*SLOT)
        .agg(F.min("confirmed_ms").alias("confirmed_ms"))
    )
    return some.join(first, [*SLOT]).where("received_ms > confirmed_ms").count()


def redeliveries(some: DataFrame) -> DataFrame:
    """Return how often messages were given again, by reason: reason, n.

    `some`: the deliveries of timers that are `repeated`. What was given before is known by slot
    and attempt:

        lease ended     by the same epoch; the log's ENDED entry counted the attempt
        failover        by a later epoch than the delivery before
        first to arrive marked as a redelivery, but no consumer has seen an earlier one: it was
                        reserved or on its way when the leadership or the consumer ended
        unmarked        the same attempt again
    """
    slot = ("seq", "group", "queue_offset")
    order = Window.partitionBy(*slot).orderBy("attempt", "epoch", "received_ms")
    told = some.select(
        "attempt", "epoch",
        F.lag("attempt").over(order).alias("attempt_before"),
        F.lag("epoch").over(order).alias("epoch_before"),
    )  # fmt: skip
    reason = (
        F.when(F.col("attempt_before").isNull(), _only_marked(F.lit("first to arrive")))
        .when(F.col("attempt") == F.col("attempt_before"), "unmarked")
        .when(F.col("epoch") > F.col("epoch_before"), "failover")
        .otherwise("lease ended")
    )
    return (
        told.select(reason.alias("reason"))
        .where("reason IS NOT NULL")
        .groupBy("reason")
        .agg(F.count("*").alias("n"))
    )


def _only_marked(reason: Column) -> Column:
    return F.when(F.col("attempt") > 1, reason)
