"""The report as one HTML page, light and dark. It needs no network, no script and no other file."""

import html as _html
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, Final

from chaos.audit.report import about
from chaos.audit.report.chart import Axis, Band, ChartLine, chart, short
from chaos.audit.report.facts import facts
from chaos.audit.report.figures import FAULT_LATE, PLANES, QUANTILES
from chaos.audit.rules.verdict import FINE, VIOLATIONS

Row = Sequence[Any]

_CSS: Final = "\n" + (files(__package__) / "page.css").read_text()
_NOT_RECOVERED: Final = '<span class="breach">not recovered</span>'
_LATENESS: Final = """Time after the due time, or after the request if that was later. Percentiles
are exact. The phase is the phase at the time when the timer could fire."""


def html(name: str, summary: dict[str, Any], line: str) -> str:
    """Return the page of one run."""
    s = summary
    verdict = s["verdict"]
    body = [
        f'<h1>{_text(name)}: <span class="{verdict}">{verdict}</span></h1>',
        f'<p class="line">{_text(line)}</p>',
        *_run(s["run"]),
        *_charts(s),
        "<h2>Verdicts</h2>",
        _verdicts(s),
        *_offenders(s),
        *_faults(s),
        "<h2>Lateness</h2>",
        f"<p>{_LATENESS}</p>",
        _lateness(s),
        *_redeliveries(s),
        *_operations(s),
        "<h2>Nodes</h2>",
        _nodes(s),
        *_conservation(s),
        "<h2>Facts</h2>",
        *(f"<p>{_text(fact[0].upper() + fact[1:])}.</p>" for fact in facts(s)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {_text(name)}: {verdict}</title><style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(value: Any) -> str:
    return _html.escape(str(value))


def _run(said: dict[str, Any]) -> Iterator[str]:
    """Yield the run's own description and failures, separate from the verdict."""
    if words := about.title(said):
        yield f"<p>{_text(words)}</p>"
    if why := about.why_bad(said):
        yield f'<p class="breach">{_text(why[0].upper() + why[1:])}:</p>'
        yield "".join(f"<pre>{_text(failure)}</pre>" for failure in said["failures"])
    yield from (f"<p>{_text(line[0].upper() + line[1:])}</p>" for line in about.limits(said))


def _charts(s: dict[str, Any]) -> Iterator[str]:
    flow = s["timeline"]
    step = flow["bucket_ms"]
    moments, rows = _filled(flow, step)
    bands = [
        Band(
            f["fault"],
            f["start_ms"],
            f["start_ms"] + f["healed_after_ms"],
            flow["to_ms"]
            if f["recovered_after_ms"] is None
            else f["start_ms"] + f["healed_after_ms"] + f["recovered_after_ms"],
        )
        for f in s["faults"]
    ]
    axis = Axis(flow["from_ms"], flow["to_ms"], moments, bands)
    names = (("schedule", "blue"), ("fire", "green"), ("deliver", "violet"), ("failed", "red"))
    words = {"schedule": "scheduled", "fire": "fired", "deliver": "delivered"}
    rates = [
        ChartLine(
            words.get(name, name), colour, [1000 * (row.get(name) or 0) / step for row in rows]
        )
        for name, colour in names
        if name != "failed" or any(flow["failed"])
    ]
    yield '<div class="wide">' + chart("Throughput, timers per second", "/s", axis, rates)
    late = [
        ChartLine(name, colour, [row.get(name) for row in rows])
        for name, colour in (("p50", "blue"), ("p99", "orange"), ("max", "red"))
    ]
    yield chart("Lateness of firing", "ms", axis, late, logarithmic=True) + "</div>"
    if bands:
        yield (
            "<p>Red: a fault, from strike to heal. Yellow: recovery, until schedules were answered"
            " and timers fired again. Times are since the run's first success.</p>"
        )


def _filled(flow: dict[str, Any], step: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the middles of all buckets in Unix ms, and the row of each; empty: no row."""
    names = [name for name, values in flow.items() if isinstance(values, list)]
    columns = zip(*(flow[name] for name in names), strict=True)
    known = {row["bucket"]: row for row in (dict(zip(names, c, strict=True)) for c in columns)}
    if not known:
        return [], []
    buckets = range(min(known), max(known) + 1, step)
    return [at + step // 2 for at in buckets], [known.get(at, {}) for at in buckets]


def _table(heads: Sequence[str], rows: Sequence[Row], *, texts: int = 1) -> str:
    """Return a table that scrolls if it is wide. The first `texts` columns are left-aligned."""

    def cells(tag: str, row: Row) -> str:
        return "".join(
            f"<{tag}{' class=text' if at < texts else ''}>{_cell(value)}</{tag}>"
            for at, value in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return '<span class="zero">&ndash;</span>'
    if isinstance(value, bool | str):
        return value if isinstance(value, _Html) else _text(value)
    return f"{value:,}" if value else '<span class="zero">0</span>'


class _Html(str):
    """Text that is HTML already and is not escaped."""

    __slots__ = ()


def _verdicts(s: dict[str, Any]) -> str:
    counts = {**s["verdicts"], **s["violations"]}
    names = (*VIOLATIONS, *(name for name in s["violations"] if name not in VIOLATIONS))
    rows: list[Row] = [
        (_Html(f'<span class="breach">{name}</span>'), "violation", counts[name])
        for name in names
        if counts.get(name)
    ]
    rows += [(name, "fine", counts[name]) for name in FINE if counts.get(name)]
    none = ", ".join(name for name in names if not counts.get(name))
    meanings = f"Not seen: {none}. The page docs/audit.md tells what each name means."
    return f"{_table(('verdict', '', 'count'), rows, texts=2)}<p>{meanings}</p>"


def _offenders(s: dict[str, Any]) -> Iterator[str]:
    if s["not_looked_at"]:
        lines = "".join(f"<li>{_text(what)}</li>" for what in s["not_looked_at"])
        yield f"<h2>Not judged</h2><ul>{lines}</ul>"
    if not s["violations"]:
        return
    yield "<h2>Violations</h2>"
    named = ("verdict", "mark", "id", "seq", "topic", "end", "outcome")
    more = ("due_ms", "asked_due_ms", "scheduled_at_ms", "ended_at_ms", "queue_offset", "copies")
    last = ("key", "told", "other_seq", "old_due_ms", "deliveries", "received_ms")
    if s["offenders"]:
        yield f"<p>The first {len(s['offenders'])}; verdicts.parquet has all.</p>"
        heads = (*named, *more, *last)
        rows = [[_raw(row.get(name)) for name in heads] for row in s["offenders"]]
        yield _table(heads, rows, texts=len(named))
    others = s["other_offenders"]
    for verdict in dict.fromkeys(row["verdict"] for row in others):
        some = [{k: v for k, v in row.items() if k != "verdict"} for row in others
                if row["verdict"] == verdict]  # fmt: skip
        yield f"<p>{verdict}, the first {len(some)}:</p>"
        yield _table([*some[0]], [[*map(_raw, row.values())] for row in some], texts=len(some[0]))


def _raw(value: Any) -> Any:
    """Return an integer as digits without commas, so that ids and times can be searched for."""
    return str(value) if isinstance(value, int) else value


def _faults(s: dict[str, Any]) -> Iterator[str]:
    if not s["faults"]:
        return
    yield "<h2>Faults</h2>"
    yield (
        "<p>For schedules, firings and deliveries: the longest time without a success that the"
        " fault touches, and its beginning after the strike. &ldquo;To the end&rdquo;: there were"
        " later requests or due timers, and none succeeded. A time without requests or due timers"
        " does not count. Late: timers that could fire from the strike to the recovery, and at"
        " least in the two seconds after the strike.</p>"
    )
    begin = s["timeline"]["from_ms"]
    heads = ["fault", "at, s", "healed after, ms", "recovered after, ms"]
    for plane in PLANES:
        heads += [f"no {plane}, ms", "from, ms"]
    heads += [f"{what} late, {name}, ms" for what, name in FAULT_LATE]
    rows = []
    for f in s["faults"]:
        row = [f["fault"], short((f["start_ms"] - begin) / 1000), f["healed_after_ms"]]
        after_ms = f["recovered_after_ms"]
        row.append(_Html(_NOT_RECOVERED) if after_ms is None else after_ms)
        for plane in PLANES:
            gap_ms = f[f"{plane}_gap_ms"]
            row.append(f"{gap_ms:,}, to the end" if f[f"{plane}_gap_open"] else gap_ms)
            row.append(f[f"{plane}_gap_after_ms"])
        rows.append(row + [f[f"{what}_late_{name}_ms"] for what, name in FAULT_LATE])
    yield _table(heads, rows)


def _lateness(s: dict[str, Any]) -> str:
    heads = ("", "phase", "timers", *(f"{name}, ms" for name in QUANTILES))
    rows = [
        [{"fire": "fired", "deliver": "delivered"}[what], phase, row["n"]]
        + [row[name] for name in QUANTILES]
        for what, phases in s["lateness_ms"].items()
        for phase, row in phases.items()
    ]
    return _table(heads, rows, texts=2)


def _redeliveries(s: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Redeliveries</h2>"
    if not s["redeliveries"]:
        yield "<p>None.</p>"
        return
    yield _table(("reason", "deliveries"), [*s["redeliveries"].items()])


def _operations(s: dict[str, Any]) -> Iterator[str]:
    if not s["operations"]:
        return
    yield "<h2>Keys and changes</h2>"
    names = ("op", "by", "on_conflict", "result", "n")
    rows = [[row[name] for name in names] for row in s["operations"]]
    yield _table(("operation", "by", "on conflict", "answer", "timers"), rows, texts=4)


def _nodes(s: dict[str, Any]) -> str:
    heads = ("node", "life", "from", "to", "agrees up to", "stale", "diverged", "replayed")
    replayed = s["replayed"]["node"].split(", ")
    rows = [
        [
            *(n[name] for name in ("node", "life", "first", "last", "upto", "stale", "diverged")),
            "yes" if n["node"] in replayed else "",
        ]
        for n in s["nodes"]
    ]
    return _table(heads, rows)


def _conservation(s: dict[str, Any]) -> Iterator[str]:
    points = s["conservation"]
    yield "<h2>Conservation</h2>"
    yield "<p>scheduled = pending + fired + cancelled + dropped. The last checkpoint:</p>"
    names = ("index", "scheduled", "pending", "fired", "cancelled", "dropped", "balanced")
    if rows := [[row[name] for name in names] for row in points["last"]]:
        yield _table(names, rows, texts=0)
