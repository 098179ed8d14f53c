"""Figures of a run: lateness, throughput, gaps in service, redeliveries. None is sampled.

Lateness is in whole milliseconds. So its histogram is small for any number of timers, and the
percentiles are exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.fault_windows import Fault, Phase
from chaos.audit.rules.queries import ask

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


def lateness(found: DataFrame, phases: Sequence[Phase], bucket_ms: int) -> DataFrame:
    """Return a histogram of the fired timers: what, phase, bucket, late_ms, n."""
    stretches = ((each.name, each.start_ms, each.end_ms) for each in phases)
    tables = {"found": found, "stretches": _stretches(found.sparkSession, stretches)}
    return ask("figures", "lateness", tables, bucket_ms=bucket_ms)


def _stretches(spark: SparkSession, rows: Iterable[tuple[object, int, int]]) -> DataFrame:
    texts = ((str(name), start_ms, end_ms) for name, start_ms, end_ms in rows)
    return spark.createDataFrame(texts, "name STRING, start_ms BIGINT, end_ms BIGINT")


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
    tables = {"found": found, "stretches": _stretches(found.sparkSession, stretches)}
    histogram = ask("figures", "lateness_in", tables)
    by_fault: dict[int, dict[str, dict[str, int]]] = {}
    for row in percentiles(histogram, "number", "what").collect():
        told = {name: row[name] for name in ("n", *QUANTILES)}
        by_fault.setdefault(int(row["number"]), {})[row["what"]] = told
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
    opened = lines.where("op = 'open'").agg(F.min("start_ms")).first()
    told = []
    rows = ask(
        "figures", "works", {"lines": lines, "found": found}, end_ms=end_ms, waited_ms=WAITED_MS
    )
    for row in rows.collect():
        begin_ms, done_ms, waited_for = row["begin_ms"], row["done_ms"], row["waited"]
        if row["plane"] == "deliver" and opened and opened[0] is not None:
            begin_ms = max(begin_ms, opened[0])
        undone = waited_for is not None and (done_ms is None or waited_for["begin_ms"] > done_ms)
        told.append(
            Work(row["plane"], begin_ms, waited_for["waited_ms"] if undone else done_ms, undone)
        )
    return told


def gaps(moments: DataFrame, done: Sequence[Work]) -> DataFrame:
    """Return the gaps without a success of at least GAP_MS_MIN: plane, from_ms, to_ms, over."""
    edges = [(each.plane, each.begin_ms, True) for each in done]
    edges += [(each.plane, each.end_ms, False) for each in done if each.undone]
    schema = "plane STRING, at_ms BIGINT, over BOOLEAN"
    tables = {"moments": moments, "edges": moments.sparkSession.createDataFrame(edges, schema)}
    return ask("figures", "gaps", tables, least_ms=GAP_MS_MIN)


def recovered(
    moments: DataFrame, between: DataFrame, faults: Sequence[Fault], end_ms: int
) -> list[Fault]:
    """Return the faults with their recoveries: a schedule answered and a timer fired after a heal.

    A fault that touches a gap of schedules or firings that is not over is not recovered. A plane
    without a success after the heal does not delay the recovery otherwise. `between`: from `gaps`.
    """
    if not faults:
        return []
    tables = {"moments": moments, "faults": _table(moments.sparkSession, faults)}
    back = {row["number"]: row["at_ms"] for row in ask("figures", "recoveries", tables).collect()}
    lasting = between.where("plane IN ('schedule', 'fire') AND NOT over").collect()
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

    Length 0: no gap of at least GAP_MS_MIN. `between`: from `gaps`.
    """
    if not faults:
        return []
    tables = {"gaps": between, "faults": _table(spark, faults)}
    longest = ask("figures", "longest_gaps", tables, aftermath_ms=AFTERMATH_MS).collect()
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
