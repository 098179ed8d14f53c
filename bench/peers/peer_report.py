"""The report: a table of all peers, their limits, and plots. One outcome or several make it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.peers import plots
from bench.peers.contestants import OURS, ROSTER, peer_class
from bench.peers.outcome import ContestOutcome
from bench.table import number

Summary = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: figures, divided by slashes."""

    title: str
    figures: tuple[str, ...]
    ratio: bool = True
    """Whether the first figure's ratio to ours stands beside it."""
    of_turns: Summary = statistics.median
    """A figure of all turns, from the figure of each."""


def _lateness(per_s: int) -> Column:
    names = ("p50", "p99", "max")
    return Column(
        f"{per_s:,}/s: p50 / p99 / max, ms", tuple(f"late_{per_s}_{name}_ms" for name in names)
    )


def _faults(title: str, figures: str) -> Column:
    names = tuple(figures.format(fault) for fault in ("early", "doubled", "lost"))
    return Column(f"{title}: early / doubled / lost", names, ratio=False, of_turns=max)


SPEED: Final = (
    Column("one at a time, /s", ("single_per_s",)),
    Column("p50 / p99, ms", ("single_p50_ms", "single_p99_ms")),
    Column("batched, /s", ("batched_per_s",)),
    Column("memory, B", ("memory_bytes",)),
    Column("disk, B", ("disk_bytes",)),
)
FIRING: Final = (
    _lateness(2_000),
    _faults("2,000/s", "{}_2000"),
    _lateness(10_000),
    _faults("10,000/s", "{}_10000"),
    Column("burst of 100,000: first message, ms", ("burst_100000_first_ms",)),
    Column("last ack, s", ("burst_100000_s",)),
    _faults("burst", "burst_100000_{}"),
    Column("a million: last ack, s", ("burst_1000000_s",)),
)
FAILOVER: Final = (
    Column("lost", ("failover_lost",), ratio=False, of_turns=max),
    Column("doubled", ("failover_doubled",), ratio=False, of_turns=max),
    Column("over 1 s late", ("failover_late",), ratio=False, of_turns=max),
    Column("worst, ms late", ("failover_worst_ms",), of_turns=max),
    Column("longest gap, ms", ("failover_gap_ms",), of_turns=max),
    Column("timers of failed calls", ("failover_failed_calls",), ratio=False, of_turns=max),
)
_LEGEND: Final = """\
A cell is the median of the turns, and for faults and failover that of the worst turn. In
parentheses stands its first figure divided by ours of the same run. A hyphen means that the peer
has no such figure, or did not finish within the limit. Memory and disk are of all nodes together,
per pending timer of 100 bytes."""


def write(directory: Path, stem: str, outcomes: Sequence[ContestOutcome]) -> Path:
    """Write `stem`.md and its plots into a directory. Return the path of the first."""
    directory.mkdir(parents=True, exist_ok=True)
    names = []
    for name, svg in plots.draw(outcomes).items():
        names.append(f"{stem}-{name}.svg")
        (directory / names[-1]).write_text(svg)
    path = directory / f"{stem}.md"
    images = "\n".join(f"![{name}]({name})" for name in names)
    path.write_text(f"{render(outcomes)}\n{images}\n")
    return path


def render(outcomes: Sequence[ContestOutcome]) -> str:
    """Return the tables as Markdown."""
    first = outcomes[0].head
    machine = first.machine
    head = f"{machine['cores']} cores, {machine['cpu']}, kernel {machine['kernel']}"
    head += f"; fdatasync {machine['fdatasync_ms']} ms; {first.form} form"
    runs = ", ".join(f"{each.head.utc} ({each.head.commit})" for each in outcomes)
    tables = [_table(SPEED, outcomes), _table(FIRING, outcomes), _table(FAILOVER, outcomes)]
    left_out = {n: reason for each in outcomes for n, reason in each.left_out.items()}
    notes = [
        f"- {peer_class(n).title}: {', '.join(peer_class(n).lacks)}." for n in _others(outcomes)
    ]
    notes += [f"- {name} was left out: {reason}" for name, reason in left_out.items()]
    notes += [f"- {turn}" for turn in _errors(outcomes)]
    return "\n\n".join([f"{head}. Runs: {runs}.", _LEGEND, *tables, "\n".join(notes)]) + "\n"


def _table(columns: Sequence[Column], outcomes: Sequence[ContestOutcome]) -> str:
    """Return a table of the columns and peers that have figures."""
    rows = {}
    for name in [OURS, *_others(outcomes)]:
        cells = [_cell(column, name, outcomes) for column in columns]
        if any(cell != "-" for cell in cells):
            rows[name] = cells
    kept = [at for at in range(len(columns)) if any(cells[at] != "-" for cells in rows.values())]
    lines = ["| system | " + " | ".join(columns[at].title for at in kept) + " |"]
    lines.append("|---" * (len(kept) + 1) + "|")
    for name, cells in rows.items():
        lines.append(f"| {label(name, outcomes)} | " + " | ".join(cells[at] for at in kept) + " |")
    return "\n".join(lines)


def label(name: str, outcomes: Sequence[ContestOutcome]) -> str:
    """Return the title of a contestant, with its version."""
    version = next(each.versions[name] for each in outcomes if name in each.versions)
    title = peer_class(name).title
    return title if name == OURS else f"{title} ({version.rpartition(':')[2]})"


def _cell(column: Column, name: str, outcomes: Sequence[ContestOutcome]) -> str:
    each = [[v for o in outcomes for v in o.values(name, figure)] for figure in column.figures]
    if not all(each):
        return "-"
    text = " / ".join(number(column.of_turns(values)) for values in each)
    ratios = [
        r for o in outcomes if (r := o.ratio(name, column.figures[0], column.of_turns)) is not None
    ]
    if name == OURS or not column.ratio or not ratios:
        return text
    return f"{text} ({number(statistics.median(ratios))}x)"


def _others(outcomes: Sequence[ContestOutcome]) -> list[str]:
    taken = {turn.peer for each in outcomes for turn in each.turns}
    return [name for name in ROSTER if name in taken and name != OURS]


def _errors(outcomes: Sequence[ContestOutcome]) -> list[str]:
    return [
        f"{peer_class(turn.peer).title}: {error}"
        for each in outcomes
        for turn in each.turns
        for error in turn.result.errors
    ]
