"""Violations that concern no timer of the verdict table, as a part of the summary."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame


def judged(
    summary: dict[str, Any], about: str, found: Mapping[str, DataFrame], *,
    offenders_max: int, order: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the summary's part about one subject: verdict, violations, <about>_offenders.

    `found`: violation -> one row per offender. All rows are counted. The first `offenders_max` of
    each violation are listed, in order of the columns `order` and then of all columns.
    `violations` continues those of the summary.
    """
    violations, offenders = dict(summary["violations"]), []
    for name, rows in found.items():
        if number := rows.count():
            violations[name] = number
            shown = rows.orderBy(*order, *rows.columns).limit(offenders_max).collect()
            offenders += [{"verdict": name} | row.asDict() for row in shown]
    return {
        "verdict": "VIOLATED" if violations else "OK",
        "violations": violations,
        f"{about}_offenders": offenders,
    }
