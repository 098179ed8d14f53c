"""What is judged beside the table of verdicts: how its violations come into the summary."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame


def judged(
    summary: dict[str, Any], about: str, found: Mapping[str, DataFrame], *,
    offenders_max: int, order: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the summary's part about one kind of violations: verdict, violations, X_offenders.

    `about`: that X. `found`: violation -> one row per offender. All are counted, and the first of
    each collected: by `order`, then by all their columns.
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
