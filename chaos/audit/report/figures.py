"""Figures of a run: lateness, throughput, gaps in service, redeliveries. All counted, none sampled.

Lateness is in whole milliseconds, so its histogram is small however many timers there are, and
every percentile is read from it exactly.
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
"""What a client sees working: schedules answered, timers fired, messages delivered."""
GAP_MS_MIN: Final = 50
"""Shorter gaps between successes are not looked at."""
WAITED_MS: Final = 1_000
"""A schedule that failed sooner was refused, which is an answer; else it waited for a leader."""
AFTERMATH_MS: Final = 2_000
"""A gap that begins within this time after a strike counts as the fault's, healed or not."""
FAULT_LATE: Final = tuple((what, name) for what in ("fire", "deliver") for name in ("p99", "max"))
"""What is told of the lateness of what could fire in a fault."""
_BUCKET_MS: Final = 1000


def in_phases(rows: DataFrame, at: str, phases: Sequence[Phase]) -> DataFrame:
    """Return rows with `phase`: steady, fault or recovery, by a column of Unix ms."""
    stretches = ((each.name, each.start_ms, each.end_ms) for each in phases)
    joined = _within(rows, at, stretches, "phase_name STRING", "left")
    return joined.withColumn("phase", F.coalesce("phase_name", F.lit("steady"))).drop("phase_name")


def _within(
    rows: DataFrame, at: str, stretches: Iterable[tuple[Any, int, int]], name: str, how: str
) -> DataFrame:
    """Return rows joined with the stretches, (name, start_ms, end_ms), that they lie in.

    An equi-join by second against the seconds that stretches touch, then the exact bounds. `name`:
    the added column, with its type.
    """
    table = [
        (each, second, start_ms, end_ms)
        for each, start_ms, end_ms in stretches
        for second in range(start_ms // _BUCKET_MS, (end_ms - 1) // _BUCKET_MS + 1)
    ]
    bounds = ("at_second", "from_ms", "to_ms")
    schema = ", ".join((name, *(f"{bound} BIGINT" for bound in bounds)))
    touched = rows.sparkSession.createDataFrame(table, schema)
    second = F.floor(F.col(at) / _BUCKET_MS)
    inside = (
        (second == F.col("at_second"))
        & (F.col(at) >= F.col("from_ms"))
        & (F.col(at) < F.col("to_ms"))
    )
    return rows.join(F.broadcast(touched), inside, how).drop(*bounds)


def lateness(found: DataFrame, phases: Sequence[Phase], bucket_ms: int) -> DataFrame:
    """Return a histogram of the fired timers: what, phase, bucket, late_ms, n.

    `what` is fire or deliver (its first delivery), `bucket` the start of the stretch of
    `bucket_ms` in which the timer fired or was delivered. What was due before it was asked for
    could not fire before that; the phase is that of the time when it could.
    """
    rows = in_phases(_timely(found), "could_fire_ms", phases)
    bucket = F.floor(F.col("at") / bucket_ms) * bucket_ms
    return rows.groupBy("what", "phase", bucket.alias("bucket"), "late_ms").agg(
        F.count("*").alias("n")
    )


def _could() -> Column:
    """When a timer could fire: what was due before it was asked for could not before that."""
    return F.greatest("due_ms", "scheduled_at_ms")


def _timely(found: DataFrame) -> DataFrame:
    """Return what became of timers that fired: what, could_fire_ms, at, late_ms."""
    fired = found.where("end = 'fired'")
    # Two scans of three columns: to make two rows of one takes longer.
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
    """Return fault number -> what, as in `lateness`, -> the percentiles of what could fire in it.

    That is from the strike to the recovery, at least AFTERMATH_MS. Of faults that overlap, each has
    all. What never fired is not late, but lost.
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


class Work(NamedTuple):
    """What one plane had to do, and whether that came to an end."""

    plane: str
    begin_ms: int
    """When the first was asked for, could fire, or had fired and was listened for."""
    end_ms: int
    """When the last was done; or, if it never was, until when it was waited for: what was asked for
    until its answer was given up, what was due or had fired until the run's end."""
    undone: bool
    """Whether nothing succeeded any more, though some was asked for, due, or had fired later."""


def works(lines: DataFrame, found: DataFrame, end_ms: int) -> list[Work]:
    """Return the work of each plane that had any. `found` from `verdict.verdicts`."""
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
    """Return the times without a success of a plane: plane, from_ms, to_ms, over.

    They lie between two successes, before the first one since its work began, or, not `over`, after
    the last one while there was more to do.
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
    """Return the faults with when, from the heal on, schedules were answered and timers fired.

    `between` as from `gaps`. None is recovered from that touches a gap of theirs which is not over.
    Where nothing was left to do of a plane, it is not waited for.
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
    """Return per fault the longest gap of each plane that it touches: its length and its start.

    `between` as from `gaps`. A gap is the fault's if it ends after the strike and begins before
    the recovery, or at most AFTERMATH_MS after the strike. 0: nothing longer than GAP_MS_MIN. One
    that is not over comes before any that is longer, and is told to be `open`.
    """
    if not faults:
        return []
    reach = F.greatest(F.col("start_ms") + AFTERMATH_MS, F.col("recovered_ms"))
    mine = between.join(
        F.broadcast(_table(spark, faults)),
        (F.col("to_ms") > F.col("start_ms")) & (F.col("from_ms") < reach),
    )
    gap = F.struct(
        (~F.col("over")).alias("open"),
        (F.col("to_ms") - F.col("from_ms")).alias("ms"),
        (-F.col("from_ms")).alias("minus_from_ms"),
    )
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
    """Return a fault's figures of `lateness_by_fault`, None where nothing was due: FAULT_LATE."""
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
    """Return the seqs of timers that were given more than once to a group, or marked so.

    `given` as from `client_tables.deliveries`, `found` from `verdict.verdicts`.
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


def redeliveries(some: DataFrame, returns: DataFrame) -> DataFrame:
    """Return how often messages were given again, by reason: reason, n.

    `some`: the deliveries of timers that are `repeated`; `returns`: what came back, as the replay
    has it (tables.py). What became of the delivery before is known by slot and attempt:

        nacked          its consumer gave it back
        lease ended     unacked
        recalled        one that it came behind, in an ordered group, came back
        failover        none of these, and it is of a later epoch
        first to arrive marked as a redelivery, but no consumer has seen an earlier one: it was
                        reserved or on its way when the leadership or the consumer ended
        unmarked        the same attempt again
        not in the log  none of these: nothing says why it was given again
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
