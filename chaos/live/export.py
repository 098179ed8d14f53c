"""The exporter: a running cluster's committed log as events for the live audit.

    python -m chaos.live.export RUN_DIR --into DIR           a local cluster: all its nodes' logs
    python -m chaos.live.export --data n1=D1 n2=D2 --into DIR       the nodes' data directories
    python -m chaos.live.export --data n1=D1 --status HOST:PORT --into DIR     one node, by its word

A data directory may be the node's archive instead (chaos/history/archive.py). An export begins with
the log's first entry.

Its files are `log-<first>-<last>`, by the indexes of their entries in 16 hexadecimal digits. At a
restart the export continues after the last file, so every entry is exported exactly once. The file
`export.alive` is touched at least once a second.
"""

import argparse
import contextlib
import http.client
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from chaos.history.history import RunFolder
from chaos.live import exported_events
from chaos.live.exported_events import EventColumns, EventKind
from chaos.live.follow import Follower, LogGone
from timer.model.timer_errors import StorageError
from timer.model.units import LogIndex
from timerspark.log.segment_files import lives

FLUSH_S: Final = 0.5
ALIVE: Final = "export.alive"
JUDGED: Final = "judged"
"""The folder in which the job puts the files that it has judged."""
PREFIX: Final = "log-"
STATUS_TIMEOUT_S: Final = 2.0


class Exporter:
    """Follows logs and writes their entries; `step` is one look."""

    def __init__(self, logs: dict[str, Path], into: Path, *, status: str = "") -> None:
        """Continue after the last file of `into`.

        Args:
            logs: node -> the folder of its log: of all voters, or of one.
            into: the folder for the events.
            status: the HTTP address of that one node, which says how far it has applied.
        """
        into.mkdir(parents=True, exist_ok=True)
        self._into = into
        self._first = max(map(last_of, into.rglob(f"{PREFIX}*.parquet")), default=0) + 1
        applied = (lambda: applied_index(status)) if status else None
        self._follower = Follower(logs, LogIndex(self._first), applied=applied)

    def step(self) -> bool:
        """Write a file if there is anything new; return whether there was.

        Raises:
            LogGone: the log was dropped before it was exported.
        """
        frames, divergences = self._follower.poll()
        told = [
            EventColumns(
                EventKind.DIVERGED, 1,
                {"node": each.node, "index": each.index, "detail": each.detail},
            )
            for each in divergences
        ]  # fmt: skip
        if frames:
            columns = {
                "index": [each.index for each in frames],
                "frame": [bytes(each.frame) for each in frames],
            }
            told.append(EventColumns(EventKind.ENTRY, len(frames), columns))
        if told:
            last = self._first + len(frames) - 1
            name = f"{PREFIX}{self._first:016x}-{last:016x}"
            if not frames:
                name = f"diverged-{exported_events.now_ms():013d}"
            exported_events.put(self._into, name, told)
            self._first = last + 1
        (self._into / ALIVE).touch()
        return bool(told)


def last_of(path: Path) -> int:
    """Return the last index of a file of entries, by its name."""
    return int(path.stem.rpartition("-")[2], 16)


def applied_index(address: str) -> LogIndex:
    """Return the index up to which a node has applied the log; 0 while it does not answer."""
    with contextlib.closing(
        http.client.HTTPConnection(address, timeout=STATUS_TIMEOUT_S)
    ) as connection:
        try:
            connection.request("GET", "/v1/status")
            node = json.loads(connection.getresponse().read())["nodes"][0]
            return LogIndex(int(node["applied_index"]))
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            return LogIndex(0)


def logs_of_run(run: RunFolder) -> dict[str, Path]:
    """Return node -> its log in a local cluster, or the archive of that log if there is one."""
    return {n: (lives(run.archive_of(n)) or [data / "log"])[-1] for n, data in run.data().items()}


def logs_of(words: Sequence[str]) -> dict[str, Path]:
    """Return node -> log, of words NODE=DIR.

    Raises:
        ValueError: a word is malformed, or repeats a node or a directory.
        NotADirectoryError: the directory does not exist.
    """
    data: dict[str, Path] = {}
    for word in words:
        node, _, folder = word.partition("=")
        if not node or not folder:
            raise ValueError(f"--data {word}: must be NODE=DIR")
        if node in data or Path(folder).resolve() in map(Path.resolve, data.values()):
            raise ValueError(f"--data {word}: each must name another node and another directory")
        data[node] = Path(folder)
    for path in data.values():
        if not path.is_dir():
            raise NotADirectoryError(f"--data {path}: no such directory")
    return {node: [path / "log", *lives(path)][-1] for node, path in data.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.live.export`."""
    parser = argparse.ArgumentParser(description="export a running cluster's log as events")
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a local cluster")
    parser.add_argument(
        "--data", nargs="+", metavar="NODE=DIR", default=[],
        help="data directories or archives: of all voters, or of one with --status",
    )  # fmt: skip
    parser.add_argument("--status", default="", metavar="HOST:PORT", help="that node's HTTP port")
    parser.add_argument("--into", type=Path, required=True, help="the folder for the events")
    args = parser.parse_args(argv)
    if bool(args.run) == bool(args.data):
        parser.error("name a local cluster's folder, or --data, and not both")
    if bool(args.status) != (len(args.data) == 1):
        parser.error("--data: those of all voters; or one, with that node's --status")
    stopped: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(1))
    try:
        logs = logs_of(args.data) if args.data else logs_of_run(RunFolder(args.run))
        exporter = Exporter(logs, args.into, status=args.status)
        while not stopped:
            exporter.step()
            time.sleep(FLUSH_S)
    except (LogGone, StorageError, ValueError, OSError) as broken:
        print(f"export: {broken}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
