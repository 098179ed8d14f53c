"""`timerctl verify --data DIR`: reads every file of a stopped node and checks every checksum.

It writes nothing but its pid into LOCK, which keeps a node from starting meanwhile. Of a running
node `timerctl status` shows what its own scrub has found (cluster/scrub.py).
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster import raft_files
from replication.promise import PromiseFile
from timer import scrub
from timer.directory import IDENTITY_NAME, LOCK_NAME, read_identity
from timer.disk import Disk, RealDisk
from timer.errors import CorruptFile, TimerError, UnknownVersion, WrongDirectory
from timer.incoming import ready
from timer.scrub import Checked

DAMAGED = 1
"""Exit code: something is."""


def verify(disk: Disk, data: Path) -> Iterator[Checked]:
    """Yield every file of a stopped node's data directory, checked.

    Raises:
        WrongDirectory: it is no data directory, or in use.
    """
    if not disk.exists(data / IDENTITY_NAME):
        raise WrongDirectory(f"{data} has no {IDENTITY_NAME}: it is no timerd's data directory")
    lock = disk.lock(data / LOCK_NAME)
    try:
        yield _checked(data / IDENTITY_NAME, lambda: read_identity(disk, data))
        promise = data / "promise"
        if disk.exists(promise):
            yield _checked(promise, lambda: PromiseFile.load(disk, promise))
        for path, check in raft_files.checks(data).items():
            yield _checked(path, check)
        state, log, order = data / "state", data / "log", data / "incoming" / "ready"
        if disk.exists(order):  # the next start replaces state and log, whatever they are
            yield _checked(order, lambda: ready(disk, order.parent))
        elif disk.exists(state) or disk.exists(log):
            yield from scrub.verify(disk, state=state, log=log)
        noted = data / "damaged"
        if disk.exists(noted):
            why = f"noted by the node: {disk.read(noted).decode(errors='replace')}"
            yield Checked(noted, 0, CorruptFile(noted, 0, why))
    finally:
        lock.release()


def _checked(path: Path, check: Callable[[], object]) -> Checked:
    try:
        check()
    except (CorruptFile, UnknownVersion) as error:
        return Checked(path, 0, error)
    return Checked(path, path.stat().st_size, None)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to timerctl."""
    text = "read all files of a stopped node's data directory and check their checksums"
    parser = commands.add_parser("verify", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--data", type=Path, required=True, help="the node's data directory")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        found = list(verify(RealDisk(), args.data))
    except TimerError as error:
        print(f"timerctl: {error}", file=sys.stderr)  # noqa: T201
        return DAMAGED
    damaged = [each for each in found if each.damage is not None]
    size = sum(each.size for each in found)
    if args.output == "json":
        lines: list[dict[str, Any]] = [_line(each) for each in damaged]
        print(json.dumps({"files": len(found), "bytes": size, "damaged": lines}, indent=2))  # noqa: T201
    else:
        for each in damaged:
            print(each.damage)  # noqa: T201
        print(f"{len(found)} files, {size} bytes: {len(damaged) or 'none'} damaged")  # noqa: T201
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    return DAMAGED if damaged else 0


def _line(each: Checked) -> dict[str, Any]:
    position = each.damage.position if isinstance(each.damage, CorruptFile) else 0
    return {"file": str(each.path), "byte": position, "what": str(each.damage)}
