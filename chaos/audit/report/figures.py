"""Figures of a run: lateness, throughput, gaps in service, redeliveries. None is sampled.

Lateness is in whole milliseconds. So its histogram is small for any number of timers, and the
percentiles are exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.fault_windows import Fault, Phase
from chaos.audit.rules.queries import BOUNDS, RunEvidence

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
PLANES: Final = ("schedule", "fire", "deliver")
"""The services that a client sees: schedules answered, timers fired, messages delivered."""
FAULT_LATE: Final = tuple((what, name) for what in ("fire", "deliver") for name in ("p99", "max"))
"""Lateness figures of a fault, of the timers that could fire in it."""


def lateness(evidence: RunEvidence, phases: Sequence[Phase]) -> DataFrame:
    """Return a histogram of the fired timers: what, phase, bucket, late_ms, n."""
    stretches = ((each.name, each.start_ms, each.end_ms) for each in phases)
    return evidence.ask("figures", "lateness", stretches=_stretches(evidence, stretches))


def _stretches(evidence: RunEvidence, rows: Iterable[tuple[object, int, int]]) -> DataFrame:
    texts = [(str(name), start_ms, end_ms) for name, start_ms, end_ms in rows]
    return evidence.spark.createDataFrame(texts, "name STRING, start_ms BIGINT, end_ms BIGINT")


def of_faults(
    evidence: RunEvidence, faults: Sequence[Fault], end_ms: int
) -> tuple[list[Fault], list[dict[str, Any]]]:
    """Return the faults with their recoveries, and the figures of each.

    `evidence`: lines, the verdict table as `found`, and `moments`: the times of all successes.
    """
    if not faults:
        return [], []
    evidence.keep("gaps", evidence.ask("figures", "gaps"))
    faults = recovered(evidence, faults, end_ms)
    late, gaps = lateness_by_fault(evidence, faults), unavailability(evidence, faults)
    return faults, [told | late_in(each, late) for each, told in zip(faults, gaps, strict=True)]


def lateness_by_fault(
    evidence: RunEvidence, faults: Sequence[Fault]
) -> dict[int, dict[str, dict[str, int]]]:
    """Return fault number -> what, as in `lateness`, -> percentiles of late_ms, and n.

    The timers of a fault are those that could fire from its strike to its recovery, and at least
    for `aftermath_ms`. If faults overlap, a timer counts for each. A timer that never fired is not
    counted here: it is lost.
    """
    stretches = ((each.number, each.start_ms, _reach_ms(each.start_ms, each.recovered_ms))
                 for each in faults)  # fmt: skip
    histogram = evidence.ask("figures", "lateness_in", stretches=_stretches(evidence, stretches))
    by_fault: dict[int, dict[str, dict[str, int]]] = {}
    for row in percentiles(histogram, "number", "what").collect():
        told = {name: row[name] for name in ("n", *QUANTILES)}
        by_fault.setdefault(int(row["number"]), {})[row["what"]] = told
    return by_fault


def _reach_ms(start_ms: int, end_ms: int) -> int:
    return max(start_ms + BOUNDS["aftermath_ms"], end_ms)


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


def recovered(evidence: RunEvidence, faults: Sequence[Fault], end_ms: int) -> list[Fault]:
    """Return the faults with their recoveries: a schedule answered and a timer fired after a heal.

    A fault that touches a gap of schedules or firings that is not over is not recovered. A plane
    without a success after the heal does not delay the recovery otherwise.
    """
    rows = evidence.ask("figures", "recoveries", faults=_table(evidence, faults)).collect()
    back = {row["number"]: row["at_ms"] for row in rows}
    gaps = evidence.ask("figures", "gaps")
    lasting = gaps.where("plane IN ('schedule', 'fire') AND NOT over").collect()
    told = []
    for each in faults:
        reach_ms = _reach_ms(each.start_ms, each.heal_ms)
        if any(row["to_ms"] > each.start_ms and row["from_ms"] < reach_ms for row in lasting):
            told.append(replace(each, recovered_ms=end_ms, recovered=False))
        else:
            told.append(replace(each, recovered_ms=back.get(each.number, each.heal_ms)))
    return told


def unavailability(evidence: RunEvidence, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return the longest gap of each plane per fault: its length, its start, and if it is open.

    Length 0: no gap of at least `gap_ms`.
    """
    rows = evidence.ask("figures", "longest_gaps", faults=_table(evidence, faults)).collect()
    by_fault = {(row["number"], row["plane"]): row["gap"] for row in rows}
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


def _table(evidence: RunEvidence, faults: Sequence[Fault]) -> DataFrame:
    rows = [(each.number, each.start_ms, each.heal_ms, each.recovered_ms) for each in faults]
    schema = "number INT, start_ms BIGINT, heal_ms BIGINT, recovered_ms BIGINT"
    return evidence.spark.createDataFrame(rows, schema)
