"""The report of the audit: one line, text, JSON and a page."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from chaos.audit.report import about, page
from chaos.history.history import RunFolder

SHOWN_MAX: Final = 10
"""The most offenders of a kind in the text. The summary has more, the verdict table all."""
_IN_LINE: Final = ("lost", "duplicate_fire", "early")


@dataclass(frozen=True, slots=True)
class Report:
    """The audit's findings; `summary` is the content of summary.json."""

    summary: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether all promises were judged and none was broken."""
        return self.verdict == "OK"

    @property
    def verdict(self) -> str:
        """VIOLATED: a promise was broken. INCOMPLETE: evidence is missing. OK: neither."""
        if self.summary["violations"]:
            return "VIOLATED"
        return "INCOMPLETE" if self.summary["not_looked_at"] else "OK"

    @property
    def why_bad(self) -> str:
        """The failure of the run itself, apart from the promises; empty: none."""
        return about.why_bad(self.summary["run"])

    def line(self) -> str:
        """Return the verdict in one line."""
        s, counts = self.summary, self.summary["verdicts"]
        names = "kills", "failovers", "scheduled", "fired", "delivered", "cancelled", "redelivered"
        figures = {name: s[name] for name in names}
        for name, verdict in (("lost",) * 2, ("duplicated", "duplicate_fire"), ("early",) * 2):
            figures[name] = counts.get(verdict, 0)
        others = {k: v for k, v in s["violations"].items() if k not in _IN_LINE}
        text = " ".join(f"{name}={value}" for name, value in (figures | others).items())
        return f"verdict: {self.verdict} {text}"


def describe(report: Report) -> Iterator[str]:
    """Yield the report as text, line by line; the verdict is last."""
    s = report.summary
    yield from about.describe(s["run"])
    yield from about.facts(s)
    for what, past in (("fire", "fired"), ("deliver", "delivered")):
        for phase, row in s["lateness_ms"][what].items():
            values = " ".join(f"{key} {value} ms" for key, value in row.items() if key != "n")
            yield f"{past} after the due time, {phase}: {values} ({row['n']:,})"
    if s["redeliveries"]:
        reasons = ", ".join(f"{name} {n:,}" for name, n in s["redeliveries"].items())
        yield f"redeliveries: {reasons}"
    for row in s["operations"]:
        how = " ".join(filter(None, (row["op"], "by", row["by"], row["on_conflict"])))
        yield f"{how}: {row['result']} {row['n']:,}"
    yield "timers: " + ", ".join(f"{name} {n:,}" for name, n in sorted(s["verdicts"].items()))
    yield from _offenders(s)
    yield from (f"not judged: {what}" for what in s["not_looked_at"])
    yield from about.failure_texts(s["run"])  # at the end, which is often all that is kept
    yield report.line()


def _offenders(s: dict[str, Any]) -> Iterator[str]:
    shown = Counter[str]()
    for row in (*s["offenders"][:SHOWN_MAX], *s["other_offenders"]):
        shown[row["verdict"]] += 1
        if shown[row["verdict"]] <= SHOWN_MAX:
            yield "  " + " ".join(f"{k}={v}" for k, v in row.items() if v is not None)
    named = len(s["offenders"])
    total = sum(n for name, n in s["verdicts"].items() if name in s["violations"])
    if total > SHOWN_MAX:
        yield f"  … {total:,} in total; summary.json has {named}, verdicts.parquet has all"


def write(run: RunFolder, report: Report) -> Report:
    """Write summary.json and report.html into the run's `audit` folder; return the report."""
    run.audit.mkdir(parents=True, exist_ok=True)
    (run.audit / "summary.json").write_text(json.dumps(report.summary, indent=2) + "\n")
    (run.audit / "report.html").write_text(page.html(run.root.name, report.summary, report.line()))
    return report
