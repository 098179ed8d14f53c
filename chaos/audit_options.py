"""Options of the audits that both their commands and `timerctl audit` take."""

import argparse
from pathlib import Path
from typing import Final


def add_check_history(parser: argparse.ArgumentParser) -> None:
    """Add `--check-history` and `--no-check-history`; without either the value is None."""
    parser.add_argument(
        "--check-history",
        action=argparse.BooleanOptionalAction,
        help="check the histories against their format first (default: if at most 256 MB)",
    )


LIVE: Final = (
    ("--status", str, "HTTP HOST:PORT of the node, if the folder has the log of one node only"),
    ("--alerts", Path, "folder of the alerts (default: <RUN_DIR>/live/alerts)"),
    ("--overdue-ms", int, "a timer is late, a message lost, after this time (default: 5000)"),
    (
        "--horizon-ms",
        int,
        "a message that came is forgotten after this time (default: 600000)",
    ),
    ("--stalled-ms", int, "alert if log or witness stand still this long (default: 10000)"),
)
"""Options that only the live audit has: name, type, help."""


def add_live_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of the live audit. An option that is not given is None."""
    for name, of, what in LIVE:
        parser.add_argument(name, type=of, help=what)
