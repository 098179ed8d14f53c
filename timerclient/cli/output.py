"""timerctl's output: JSON documents, and rows as a table."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

UNCUT_HEADINGS: Final = frozenset(("TOPIC", "GROUP", "KEY", "NAMESPACE", "DUE", "FIRED", "NEXT"))
"""Columns with names, which other commands need, and times. They are cut after all others."""
UNCUT_WIDTH: Final = 32
"""Characters of them that are cut only if the other texts are cut already."""


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Return one JSON document; in ASCII, if standard output is not UTF-8."""
    utf8 = (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "") == "utf8"
    return json.dumps(value, indent=indent, ensure_ascii=not utf8)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 topic" and "2 topics"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    width: int | None = None,
    colours: Sequence[Sequence[str]] | None = None,
) -> str:
    """Return rows under headings, in aligned columns; numbers to the right.

    Args:
        headings: One for each column.
        rows: Cells by row. "" and None are shown as "-".
        width: Of the terminal; the longest texts are cut until the lines fit. None: no limit.
        colours: Terminal command before each cell, by row; empty or None: none.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    right = [_are_numbers([row[i] for row in rows]) for i in range(len(headings))]
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    if width is not None:
        for whole in (UNCUT_WIDTH, 0):  # other texts are cut first
            least = [_least(*each, whole) for each in zip(headings, widths, strict=True)]
            widths = _shrink_widths(widths, least, width)
    lines = []
    for at, line in enumerate([list(headings), *texts]):
        cells = [
            _truncate(cell, size).rjust(size) if r else _truncate(cell, size).ljust(size)
            for cell, size, r in zip(line, widths, right, strict=True)
        ]
        if colours and at:
            named = zip(colours[at - 1], cells, strict=True)
            cells = [f"{colour}{cell}\x1b[0m" if colour else cell for colour, cell in named]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def headings_that_fit(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], width: int, spare: Iterable[str]
) -> list[str]:
    """Return the headings without those of `spare`, in its order, that the width has no room for.

    Of a text, WHOLE_WIDTH characters need room.
    """
    columns = zip(*(map(_text, row) for row in (headings, *rows)), strict=True)
    needed = {
        column[0]: max(len(_truncate(cell, UNCUT_WIDTH)) for cell in column) for column in columns
    }
    for heading in spare:
        if sum(needed.values()) + 2 * (len(needed) - 1) > width:
            needed.pop(heading, None)
    return [*needed]


def _least(heading: str, size: int, whole: int) -> int:
    """Return the least width of a column. `whole`: of one of WHOLE, if its texts are that long."""
    if heading.endswith("ID"):
        return size  # a cut id would be useless
    return max(len(heading), min(size, whole if heading in UNCUT_HEADINGS else 0))


def _shrink_widths(widths: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Return widths that fit into `total`, if the columns' least widths allow that."""
    fit = [*widths]
    over = sum(fit) + 2 * (len(fit) - 1) - total
    while over > 0:
        widest = max(range(len(fit)), key=lambda i: fit[i] - least[i])
        if fit[widest] <= least[widest]:
            break
        fit[widest] -= 1
        over -= 1
    return fit


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def print_progress(line: str) -> None:
    """Print a line to stderr at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def escape_controls(text: str) -> str:
    """Return a text with control characters escaped: one line, without terminal commands."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def instant(ms: int) -> str:
    """Return Unix milliseconds as UTC text; "-" for 0; the number, if beyond the calendar."""
    try:
        moment = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z") if ms else "-"


def pairs(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as name=value, …; "-" if it is empty."""
    return (
        escape_controls(", ".join(f"{name}={value}" for name, value in sorted(mapping.items())))
        or "-"
    )


def _are_numbers(cells: Sequence[Any]) -> bool:
    """Return whether a column has numbers and unknown cells only."""
    known = [cell for cell in cells if cell is not None]
    return bool(known) and all(
        isinstance(cell, int | float) and not isinstance(cell, bool) for cell in known
    )


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "-" if cell in ("", None) else escape_controls(str(cell))
