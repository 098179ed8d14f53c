"""The violations of a run, and the offenders that are no timers of the verdict table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import DataFrame

from chaos.audit.rules.queries import Tables

OFFENDERS_MAX: Final = 100
"""The most offenders of a violation in the summary. The verdict table has all timers."""


@dataclass(slots=True)
class Findings:
    """The violations so far. All offenders are counted, and the first ones are listed."""

    most: int = OFFENDERS_MAX
    """Offenders of each violation that are listed."""
    violations: Counter[str] = field(default_factory=Counter[str])
    offenders: list[dict[str, Any]] = field(default_factory=list)
    """Each has the violation as its `verdict`."""

    def add(self, found: Tables, *, order: Sequence[str] = ()) -> None:
        """Add violations: name -> one row per offender.

        They are listed in order of the columns `order`, and then of all columns.
        """
        for name, rows in found.items():
            if number := rows.count():
                self.note(name, head(rows, [*order, *rows.columns], self.most), number)

    def note(self, name: str, rows: Sequence[Mapping[str, Any]], number: int | None = None) -> None:
        """Add the offenders of one violation. `number`: how many there are; None: all are here."""
        if number or rows:
            self.violations[name] += number or len(rows)
            self.offenders += [{"verdict": name} | dict(row) for row in rows]


def head(rows: DataFrame, order: Sequence[str], most: int = OFFENDERS_MAX) -> list[dict[str, Any]]:
    """Return the first rows in order of these columns."""
    return [row.asDict() for row in rows.orderBy(*order).limit(most).collect()]
