"""`timerctl verify [NODE]`: the nodes of a running cluster read all their files and compare states.

`timerctl verify --data DIR` reads the directory of a stopped node. That is a function of the
server's package: the entry point `verify` of the group `timerctl.stopped` names it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands, UsageError, duration
from timerclient.cli.cli_nodes import known_fields
from timerclient.cli.missing_modules import DISTRIBUTION, why_missing
from timerclient.rows.message_json import as_dict

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.proto import timer_pb2 as pb

ENTRY_POINTS: Final = "timerctl.stopped"
EXITS: Final = {"ok": 0, "damaged": 1, "differ": 1, "incomplete": 3}
"""Verdict -> exit status."""
CHECK_INTERVAL_S: Final = 0.5
"""A node with damage answers for two seconds before its repair."""
_HEADINGS: Final = ("NODE", "FILES", "BYTES", "DAMAGED", "BEGAN", "ENDED", "DIGEST", "NOTE")
_WIDE: Final = frozenset(("ENDED",))


class VerifyCommands(Commands):
    """The command `verify`."""

    def register_verify(self, verify: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `verify`."""
        verify.set_defaults(run=self.verify)
        text = "default: all nodes, whose states are also compared"
        verify.add_argument("node", metavar="NODE", nargs="?", default="", help=text)
        text = "longest wait for the result, then exit with 3; the nodes read on; default: no limit"
        verify.add_argument("--wait", metavar="DURATION", type=duration, help=text)
        text = "read a stopped node's data directory instead, on its machine"
        verify.add_argument("--data", metavar="DIR", type=Path, help=text)

    def verify(self, args: argparse.Namespace) -> int:
        """Let nodes read their files; show the damage, and whether their states agree."""
        if args.data is not None:
            return _read_stopped(args)
        wait_s = math.inf if args.wait is None else args.wait.total_seconds()
        until_s = time.monotonic() + wait_s
        with self._connect(args) as client:
            from timerclient.cli.pass_follower import PassFollower

            follower = PassFollower(client, args.node, args.timeout.total_seconds())
            try:
                while follower.poll() and time.monotonic() < until_s:
                    _show_progress(follower.progress)
                    time.sleep(CHECK_INTERVAL_S)
            finally:
                _show_progress("")
        return self._report(args, follower.result())

    def _report(self, args: argparse.Namespace, found: pb.GetVerificationResponse) -> int:
        document = as_dict(found)
        nodes = document["nodes"] = [known_fields(each) for each in document["nodes"]]
        agreement, index = document["agreement"], found.digest_index
        if any(each.damages for each in found.nodes):
            verdict = "damaged"
        elif agreement == "DIFFER":
            verdict = "differ"
        else:
            unread = not all(each.ended_at_ms for each in found.nodes)
            verdict = "incomplete" if unread or agreement == "UNKNOWN" else "ok"
        lines = [one.what for each in found.nodes for one in each.damages]
        lines += [f"{each.node}: {each.repair}" for each in found.nodes if each.repair]
        if agreement == "SAME":
            lines.append(f"checkpoint {index}: the nodes have the same state")
        elif agreement == "DIFFER":
            lines.append(f"checkpoint {index}: the nodes DIFFER")
        elif agreement == "UNKNOWN":
            silent = ", ".join(each.node for each in found.nodes if not each.digest)
            lines.append(f"the states are not compared: no digest of {silent}")
        table = cli_args.table(args, _HEADINGS, [_row(each) for each in nodes], _WIDE)
        text = "\n".join((table, "", *lines) if lines else (table,))
        self._put(args, document | {"verdict": verdict}, text)
        return EXITS[verdict]


def _row(node: Mapping[str, Any]) -> tuple[object, ...]:
    if not node["reachable"]:
        return (node["node"], *[None] * (len(_HEADINGS) - 2), node["error"] or "does not answer")
    if not node["ended_at_ms"]:
        note = "reads on" if node["began_at_ms"] else "has not begun"
    else:
        note = "" if node["files"] else "no file is complete yet"
    return (
        *(node["node"], node["files"], node["bytes"], len(node["damages"])),
        *(output.instant(node["began_at_ms"]), output.instant(node["ended_at_ms"])),
        *(node["digest"], note),
    )


def _show_progress(text: str) -> None:
    """Rewrite the line of progress on a terminal's stderr. `text`: empty: remove it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _read_stopped(args: argparse.Namespace) -> int:
    """Read the directory of a stopped node; return the exit status.

    Raises:
        UsageError: The server's package is not installed, or not with all that it needs.
    """
    import importlib.metadata

    if args.node or args.wait is not None:
        raise UsageError("--data goes without NODE and --wait", "timerctl verify")
    why = f"needs the distribution {DISTRIBUTION}"
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name="verify"):
        try:
            run = entry.load()
        except ImportError as error:
            why = why_missing(error, "server")
        else:
            return int(run(args))
    raise UsageError(f"--data {why}", "timerctl verify")
