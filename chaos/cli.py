"""`timerctl audit`: what chaos/ adds to the operators' command."""

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command; its parser sets `run`, called with the parsed arguments."""
    parser = subparsers.add_parser(
        "audit", help="check a run's folder against the promises (needs Java 17)"
    )
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.set_defaults(run=_audit)


def _audit(args: argparse.Namespace) -> int:
    # Spark is imported only by the command that needs it: timerctl starts quickly.
    try:
        from chaos.audit import run_audit
    except ModuleNotFoundError as missing:
        print(f"audit: {missing.name} is missing: pip install 'timer-cluster[server,audit]'")
        return 2
    return run_audit(args.folder, output=args.output)
