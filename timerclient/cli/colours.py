"""Colours of states in tables: green for a leader, yellow for lagging, red for dead.

The option --color decides. `auto`: on a terminal that is not `dumb`, if NO_COLOR is unset or empty.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

MODES: Final = ("auto", "always", "never")
LAGGING: Final = 10_000
"""Log entries behind, from which on a node is lagging."""
_GREEN, _YELLOW, _RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"
_STATES: Final = {
    ("ROLE", "leader"): _GREEN,
    ("ROLE", "unreachable"): _RED,
    ("LEVEL", "WARNING"): _YELLOW,
    ("LEVEL", "CRITICAL"): _RED,
    ("LEVEL", "UNKNOWN"): _RED,
}


def add_color(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the option --color. `default`: SUPPRESS: that of the outer parser stays."""
    parser.add_argument(
        "--color",
        choices=MODES,
        default=default,
        help="colours of states; auto: on a terminal, if NO_COLOR is unset; default: auto",
    )


def is_coloured(args: argparse.Namespace) -> bool:
    """Return whether tables on standard output have colours."""
    mode = getattr(args, "color", "auto")
    if mode != "auto":
        return bool(mode == "always")
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and sys.stdout.isatty()


def colours(
    args: argparse.Namespace, headings: Sequence[str], rows: Sequence[Sequence[Any]]
) -> list[list[str]] | None:
    """Return the colour of each cell; empty: none. None: the table has no colours."""
    if not is_coloured(args):
        return None
    return [
        [_colour(heading, cell, row) for heading, cell in zip(headings, row, strict=True)]
        for row in rows
    ]


def _colour(heading: str, cell: Any, row: Sequence[Any]) -> str:
    if heading == "NOTE" and cell and None in row[1:]:
        return _RED  # a node that does not answer: its figures are unknown
    if heading in ("LAG", "BEHIND") and isinstance(cell, int):
        return _YELLOW if cell > LAGGING else ""
    return _STATES.get((heading, cell), "") if isinstance(cell, str) else ""
