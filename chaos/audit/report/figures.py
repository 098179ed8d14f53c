"""Figures of a run: lateness, throughput, gaps in service, redeliveries. None is sampled.

Lateness is in whole milliseconds. So its histogram is small for any number of timers, and the
percentiles are exact. The queries are in chaos/audit/rules/figures.sql.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame

from chaos.audit.rules.fault_windows import Fault, Phase
from chaos.audit.rules.queries import RunEvidence

QUANTILES: Final = ("p50", "p90", "p99", "p999", "max")
PLANES: Final = ("schedule", "fire", "deliver")
"""The services that a client sees: schedules answered, timers fired, messages delivered."""
FAULT_LATE: Final = tuple((what, name) for what in ("fire", "deliver") for name in ("p99", "max"))
"""Lateness figures of a fault, of the timers that could fire in it."""
_NO_GAP: Final = {"ms": 0, "after_ms": 0, "open": False}


def lateness(evidence: RunEvidence, phases: Sequence[Phase]) -> DataFrame:
    """Return a histogram of the fired timers: what, phase, bucket, late_ms, n."""
    rows = [(each.name, each.start_ms, each.end_ms) for each in phases]
    schema = "name STRING, start_ms BIGINT, end_ms BIGINT"
    stretches = evidence.spark.createDataFrame(rows, schema)
    return evidence.query("figures", "lateness", stretches=stretches)


def of_faults(
    evidence: RunEvidence, faults: Sequence[Fault], end_ms: int
) -> tuple[list[Fault], list[dict[str, Any]]]:
    """Return the faults with their recoveries, and the figures of each.

    `evidence`: lines, the verdict table as `found`, and `moments`: the times of all successes.
    """
    if not faults:
        return [], []
    evidence.keep("gaps", evidence.query("figures", "gaps"))
    faults = with_recoveries(evidence, faults, end_ms)
    late, gaps = lateness_by_fault(evidence, faults), unavailability(evidence, faults)
    return faults, [of_gaps | of_late for of_gaps, of_late in zip(gaps, late, strict=True)]


def with_recoveries(evidence: RunEvidence, faults: Sequence[Fault], end_ms: int) -> list[Fault]:
    """Return the faults with their recoveries, by the query `recoveries`."""
    rows = evidence.query("figures", "recoveries", faults=_table(evidence, faults)).collect()
    back = {row["number"]: row["at_ms"] for row in rows}
    return [
        replace(each, recovered_ms=end_ms, recovered=False)
        if back[each.number] is None
        else replace(each, recovered_ms=back[each.number])
        for each in faults
    ]


def lateness_by_fault(
    evidence: RunEvidence, faults: Sequence[Fault]
) -> list[dict[str, int | None]]:
    """Return FAULT_LATE of each fault; None: no timer could fire in it, or none was delivered."""
    reaches = evidence.query("figures", "reaches", faults=_table(evidence, faults))
    histogram = evidence.query("figures", "lateness_in", stretches=reaches)
    rows = evidence.query("figures", "percentiles", late=histogram).collect()
    found = {(int(row["number"]), row["what"]): row.asDict() for row in rows}
    return [
        {
            f"{what}_late_{name}_ms": found.get((each.number, what), {}).get(name)
            for what, name in FAULT_LATE
        }
        for each in faults
    ]


def unavailability(evidence: RunEvidence, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return the longest gap of each plane per fault: its length, its start, and if it is open.

    Length 0: no gap of at least `gap_ms`.
    """
    rows = evidence.query("figures", "longest_gaps", faults=_table(evidence, faults)).collect()
    found = {(row["number"], row["plane"]): row.asDict() for row in rows}
    return [
        {
            "fault": each.label,
            "start_ms": each.start_ms,
            "healed_after_ms": each.heal_ms - each.start_ms,
            "recovered_after_ms": each.recovered_ms - each.heal_ms if each.recovered else None,
        }
        | {
            f"{plane}_gap_{name}": found.get((each.number, plane), _NO_GAP)[name]
            for plane in PLANES
            for name in _NO_GAP
        }
        for each in faults
    ]


def _table(evidence: RunEvidence, faults: Sequence[Fault]) -> DataFrame:
    rows = [(each.number, each.start_ms, each.heal_ms, each.recovered_ms) for each in faults]
    schema = "number INT, start_ms BIGINT, heal_ms BIGINT, recovered_ms BIGINT"
    return evidence.spark.createDataFrame(rows, schema)
