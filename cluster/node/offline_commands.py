"""What cluster/ adds to timerctl: commands on the data directory of a stopped node.

`timerctl --help` imports this module, so the modules with the work are imported by the
commands.
"""

import argparse
from pathlib import Path

from timerclient.cli.cli_args import add_yes, help_arguments


def register_recover(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `timerctl recover`."""
    text = "repair a stopped node's data directory, as the last resort: docs/recovery.md"
    parser = commands.add_parser("recover", **help_arguments(text))
    kinds = parser.add_subparsers(dest="recover", required=True, metavar="WHAT")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, **help_arguments(text))
        kind.add_argument("--data", type=Path, required=True, help="the node's data directory")
        add_yes(kind)
        kind.set_defaults(run=_recover)
        return kind

    majority = add("majority", "make this node the only voter, if a majority is lost for good")
    majority.add_argument("--voters", required=True, help="the name of this node, the only voter")
    add("epoch", "lower a promise or a Raft term that is too great for the other nodes")
    entry = add("entry", "replace a log entry that crashes every node by one without an effect")
    entry.add_argument("--index", type=int, required=True, help="the entry's index in the log")
    entry.add_argument(
        "--crc32",
        type=lambda text: int(text, 16),
        required=True,
        help="the entry's checksum, hexadecimal; 0 is refused, with an error that names it",
    )


def _recover(args: argparse.Namespace) -> int:
    from cluster.files.recover import run

    return run(args)
