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
    from cluster.files.verify import run

    return run(args)


def register_recover(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `timerctl recover`."""
    text = "last means on a stopped node's data directory: data may be lost"
    parser = commands.add_parser("recover", help=text, description=f"{text}. See docs/recovery.md.")
    kinds = parser.add_subparsers(dest="recover", required=True, metavar="WHAT")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        kind.add_argument("--data", type=Path, required=True, help="the node's data directory")
        kind.add_argument("--yes", action="store_true", help="don't ask")
        kind.set_defaults(run=_recover)
        return kind

    majority = add("majority", "a majority is lost for good: make this node the only voter")
    majority.add_argument("--voters", required=True, help="who votes then: the directory's node")
    add("epoch", "take back a promise, or a Raft term, that the other nodes can't follow")
    entry = add("entry", "replace an entry that ends every node by one without an effect")
    entry.add_argument("--index", type=int, required=True, help="the entry's index in the log")
    entry.add_argument(
        "--crc32",
        type=lambda text: int(text, 16),
        required=True,
        help="the entry's checksum, hexadecimal; with another one the command says which it is",
    )


def _recover(args: argparse.Namespace) -> int:
    from cluster.files.recover import run

    return run(args)
