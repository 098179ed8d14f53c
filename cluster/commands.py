"""What cluster/ adds to timerctl: commands on the data directory of a stopped node.

timerctl imports this module at each start, so the modules with the work are imported by the
commands.
"""

import argparse
from pathlib import Path


def register_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `timerctl verify`."""
    text = "read all files of a stopped node's data directory and check their checksums"
    parser = commands.add_parser("verify", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--data", type=Path, required=True, help="the node's data directory")
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "wide", "json"),
        default=argparse.SUPPRESS,
        help="default: table",
    )
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from cluster.verify import run

    return run(args)
