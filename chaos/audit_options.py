"""Options of the audits that both their commands and `timerctl audit` take."""

import argparse
from pathlib import Path
from typing import Final


def add_check_history(parser: argparse.ArgumentParser) -> None:
    """Add the option of that name; what is not given is None."""
    parser.add_argument(
        "--check-history",
        action=argparse.BooleanOptionalAction,
        help="hold the histories against their format first (default: up to 256 MB of them)",
    )


LIVE: Final = (
    ("--checkpoint", Path, "where the job remembers (default: <DIR>.checkpoint)"),
    ("--alerts", Path, "the folder for the alerts (default: <DIR>.alerts)"),
    ("--overdue-ms", int, "until a timer is lost (default: 5000)"),
    ("--horizon-ms", int, "how long what has ended is remembered (default: 600000)"),
    ("--stalled-ms", int, "until silence is told (default: 10000)"),
    ("--trigger", str, "time between batches (default: 1 second)"),
)
"""Options of the live audit alone: name, type, help."""


def add_live_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of the live audit; what is not given is None."""
    for name, of, what in LIVE:
        parser.add_argument(name, type=of, help=what)
