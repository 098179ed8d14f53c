"""The report as one HTML page, light and dark. It needs no network, no script and no other file.

page.html is the template of a page. Its fields are made here.
"""

import html as _html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any, Final

from chaos.audit.report import about
from chaos.audit.report.chart import Axis, Band, ChartLine, chart, short
from chaos.audit.report.figures import PLANES
from chaos.audit.rules.verdict import FINE, VIOLATIONS

Row = Mapping[str, Any]
"""Head of a column -> its value."""

_PAGE: Final = Template((files(__package__) / "page.html").read_text())
_OFFENDER: Final = (
    *("verdict", "mark", "id", "seq", "topic", "end", "outcome", "due_ms", "asked_due_ms"),
    *("scheduled_at_ms", "ended_at_ms", "queue_offset", "copies", "key", "told", "other_seq"),
    *("old_due_ms", "deliveries", "received_ms"),
)
"""The columns of the verdict table that the page shows."""
_PAST: Final = {"fire": "fired", "deliver": "delivered"}
_OF_CHARTS: Final = """<p>Red: a fault, from strike to heal. Yellow: recovery, until schedules were
answered and timers fired again. Times are since the run's first success.</p>"""
_OF_FAULTS: Final = """<h2>Faults</h2>
<p>For schedules, firings and deliveries: the longest gap, a time without a success that the fault
touches, and its beginning after the strike. &ldquo;To the end&rdquo;: there were later requests or
due timers, and none succeeded. A time without requests or due timers does not count. Late: timers
that could fire from the strike to the recovery, and at least in the two seconds after the
strike.</p>"""


def html(name: str, summary: dict[str, Any], line: str) -> str:
    """Return the page of one run."""
    s = summary
    counts = {**s["verdicts"], **s["violations"]}
    violations = dict.fromkeys([*VIOLATIONS, *s["violations"]])
    operations = [{n: row[n] for n in ("op", "by", "on_conflict", "result", "n")}
                  for row in s["operations"]]  # fmt: skip
    returns = [{"reason": why, "deliveries": n} for why, n in s["redeliveries"].items()]
    fields = {
        "name": _text(name),
        "verdict": s["verdict"],
        "line": _text(line),
        "run": _lines(_run(s["run"])),
        "charts": _lines(_charts(s)),
        "about_charts": _OF_CHARTS if s["faults"] else "",
        "verdicts": _table(_verdicts(counts, violations), texts=2),
        "unseen": ", ".join(each for each in violations if not counts.get(each)),
        "not_judged": _not_judged(s["not_looked_at"]),
        "violations": _lines(_violations(s)) if s["violations"] else "",
        "faults": _OF_FAULTS + _table([*_faults(s)]) if s["faults"] else "",
        "lateness": _table([*_lateness(s["lateness_ms"])], texts=2),
        "redeliveries": _table(returns) if returns else "<p>None.</p>",
        "operations": operations and "<h2>Keys and changes</h2>" + _table(operations, texts=4),
        "nodes": _table([*_nodes(s)]),
        "conservation": _table(s["conservation"]["last"], texts=0),
        "facts": _lines(f"<p>{_sentence(fact)}.</p>" for fact in about.facts(s)),
    }
    return _PAGE.substitute({field: text or "" for field, text in fields.items()})


def _text(value: Any) -> str:
    return _html.escape(str(value))


def _sentence(text: str) -> str:
    return _text(text[0].upper() + text[1:])


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)


class _Html(str):
    """Text that is HTML already and is not escaped."""

    __slots__ = ()


def _breach(text: str) -> str:
    return _Html(f'<span class="breach">{text}</span>')


def _table(rows: Sequence[Row], *, texts: int = 1) -> str:
    """Return a table that scrolls if it is wide. The first `texts` columns are left-aligned."""
    if not rows:
        return ""

    def cells(tag: str, row: Iterable[Any]) -> str:
        return "".join(
            f"<{tag}{' class=text' if at < texts else ''}>{_cell(value)}</{tag}>"
            for at, value in enumerate(row)
        )

    heads = (name.replace("_ms", ", ms").replace("_", " ") for name in rows[0])
    body = "".join(f"<tr>{cells('td', row.values())}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return '<span class="zero">&ndash;</span>'
    if isinstance(value, bool | str):
        return value if isinstance(value, _Html) else _text(value)
    return f"{value:,}" if value else '<span class="zero">0</span>'


def _run(said: dict[str, Any]) -> Iterator[str]:
    """Yield the run's own description and failures, separate from the verdict."""
    if words := about.title(said):
        yield f"<p>{_text(words)}</p>"
    if why := about.why_bad(said):
        yield f'<p class="breach">{_sentence(why)}:</p>'
        yield "".join(f"<pre>{_text(failure)}</pre>" for failure in said["failures"])
    yield from (f"<p>{_sentence(line)}</p>" for line in about.limits(said))


def _charts(s: dict[str, Any]) -> Iterator[str]:
    flow = s["timeline"]
    step = flow["bucket_ms"]
    moments, rows = _filled(flow, step)
    axis = Axis(flow["from_ms"], flow["to_ms"], moments, [_band(f, flow) for f in s["faults"]])
    rates = [
        ChartLine(name, colour, [1000 * (row.get(of) or 0) / step for row in rows])
        for of, name, colour in (
            ("schedule", "scheduled", "blue"), ("fire", "fired", "green"),
            ("deliver", "delivered", "violet"), ("failed", "failed", "red"),
        )
        if of != "failed" or any(flow["failed"])
    ]  # fmt: skip
    yield chart("Throughput, timers per second", "/s", axis, rates)
    late = [
        ChartLine(name, colour, [row.get(name) for row in rows])
        for name, colour in (("p50", "blue"), ("p99", "orange"), ("max", "red"))
    ]
    yield chart("Lateness of firing", "ms", axis, late, logarithmic=True)


def _band(fault: dict[str, Any], flow: dict[str, Any]) -> Band:
    healed_ms, after_ms = fault["start_ms"] + fault["healed_after_ms"], fault["recovered_after_ms"]
    tail_ms = flow["to_ms"] if after_ms is None else healed_ms + after_ms
    return Band(fault["fault"], fault["start_ms"], healed_ms, tail_ms)


def _filled(flow: dict[str, Any], step: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the middles of all buckets in Unix ms, and the row of each; empty: no row."""
    names = [name for name, values in flow.items() if isinstance(values, list)]
    columns = zip(*(flow[name] for name in names), strict=True)
    known = {row["bucket"]: row for row in (dict(zip(names, c, strict=True)) for c in columns)}
    if not known:
        return [], []
    buckets = range(min(known), max(known) + 1, step)
    return [at + step // 2 for at in buckets], [known.get(at, {}) for at in buckets]


def _verdicts(counts: dict[str, int], violations: Iterable[str]) -> list[Row]:
    """Return the rows of violations, and then of fine verdicts."""
    named = [(name, _breach(name), "violation") for name in violations]
    named += [(name, name, "fine") for name in FINE]
    return [
        {"verdict": text, "": kind, "count": counts[name]}
        for name, text, kind in named
        if counts.get(name)
    ]


def _not_judged(parts: Sequence[str]) -> str:
    lines = "".join(f"<li>{_text(what)}</li>" for what in parts)
    return f"<h2>Not judged</h2><ul>{lines}</ul>" if parts else ""


def _violations(s: dict[str, Any]) -> Iterator[str]:
    """Yield the offenders: first those of the verdict table."""
    yield "<h2>Violations</h2>"
    if s["offenders"]:
        yield f"<p>The first {len(s['offenders'])}; verdicts.parquet has all.</p>"
        rows = [{name: _raw(row.get(name)) for name in _OFFENDER} for row in s["offenders"]]
        yield _table(rows, texts=_OFFENDER.index("due_ms"))
    others = s["other_offenders"]
    for verdict in dict.fromkeys(row["verdict"] for row in others):
        rows = [
            {name: _raw(value) for name, value in row.items() if name != "verdict"}
            for row in others
            if row["verdict"] == verdict
        ]
        yield f"<p>{verdict}, the first {len(rows)}:</p>"
        yield _table(rows, texts=len(rows[0]))


def _raw(value: Any) -> Any:
    """Return an integer as digits without commas, so that ids and times can be searched for."""
    return str(value) if isinstance(value, int) else value


def _faults(s: dict[str, Any]) -> Iterator[Row]:
    for fault in s["faults"]:
        at_s = (fault["start_ms"] - s["timeline"]["from_ms"]) / 1000
        row = {"fault": fault["fault"], "at, s": short(at_s)} | fault
        if fault["recovered_after_ms"] is None:
            row["recovered_after_ms"] = _breach("not recovered")
        for plane in PLANES:
            if row.pop(f"{plane}_gap_open"):
                row[f"{plane}_gap_ms"] = f"{fault[f'{plane}_gap_ms']:,}, to the end"
        del row["start_ms"]
        yield row


def _lateness(lateness_ms: dict[str, Any]) -> Iterator[Row]:
    for what, phases in lateness_ms.items():
        for phase, row in phases.items():
            values = {f"{name}_ms": value for name, value in row.items() if name != "n"}
            yield {"": _PAST[what], "phase": phase, "timers": row["n"]} | values


def _nodes(s: dict[str, Any]) -> Iterator[Row]:
    replayed = s["replayed"]["node"].split(", ")
    for node in s["nodes"]:
        yield node | {"replayed": "yes" if node["node"] in replayed else ""}
