"""The live audit: follows the logs of a running cluster and what a witness receives.

    timerctl audit RUN_DIR --live

    the nodes' logs, or their archives ─► follow.py ──────┐
                                                          ├─► judge.py ─► alerts/*.jsonl, stdout
    RUN_DIR/live/histories/*.jsonl ─► recorded_messages.py ┘

A step takes the entries that were committed since the last one, and the messages that the witness
recorded. The judge has no saved form: a restart begins with the first entry of the log. Violations
that the folder of alerts has are not written again, so every violation is there exactly once. A
line is printed after its file is written, and may be missing after a crash.

Silence is not health. The job reports `stalled` if the log's clock or the witness does not move for
a while, by this machine's clock.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from chaos.history.history import RunFolder, now_ms
from chaos.live import judge
from chaos.live.follow import Follower, LogDropped
from chaos.live.judge import Judge
from chaos.live.recorded_messages import LIVE, RecordedMessages
from timer.model.timer_errors import StorageError
from timer.model.units import LogIndex
from timerspark.log.segment_files import lives

POLL_S: Final = 0.5
BACKLOG: Final = 10_000
"""A step with at least this many entries is followed by the next at once."""
STATUS_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """The bounds of a job, in milliseconds."""

    overdue_ms: int = judge.OVERDUE_MS
    horizon_ms: int = judge.HORIZON_MS
    stalled_ms: int = 10_000
    """More than a failover and the interval of CHECKPOINT entries."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be above 0")


class AlertFiles:
    """The sink: a file of JSON lines per step with violations. Each violation is written once."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._say = folder, say
        lines = (line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines())
        self._raised = {_key(json.loads(line)) for line in lines}

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows that are new."""
        new = {_key(row): row for row in rows if _key(row) not in self._raised}
        if not new:
            return
        raised_at_ms = now_ms()
        lines = [json.dumps(row | {"raised_at_ms": raised_at_ms}) for row in new.values()]
        hidden = self._folder / ".alerts.tmp"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        hidden.rename(self._folder / f"{raised_at_ms:013d}-{len(self._raised):09d}.jsonl")
        self._raised.update(new)
        for line in lines:
            self._say(line)


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    timer = row.get("seq", 0), row.get("due_ms"), row.get("topic")
    return row["kind"], *timer, "" if timer[0] else row["detail"]


class Watch:
    """Reports the log's clock or the witness if it does not move."""

    def __init__(self, stalled_ms: int) -> None:
        self._stalled_ms = stalled_ms
        self._readings: dict[str, tuple[int, int]] = {}
        """Name -> (its last reading, the monotonic time at which that was new)."""
        self._reported: set[str] = set()

    def observe(self, at_ms: int, readings: Mapping[str, int]) -> list[str]:
        """Return a line about each that stopped since the last look. `readings`: name -> value."""
        for name, reading in readings.items():
            if self._readings.get(name, (None, 0))[0] != reading:
                self._readings[name] = reading, at_ms
        since = {name: moved_ms for name, (_, moved_ms) in self._readings.items()}
        stopped = {name for name, moved_ms in since.items() if at_ms - moved_ms > self._stalled_ms}
        new, self._reported = sorted(stopped - self._reported), stopped
        return [f"{name} stands still since {now_ms() - at_ms + since[name]}" for name in new]


class LiveAudit:
    """The judge of one run, with its files; `step` is one look at them."""

    def __init__(
        self, run: RunFolder, sink: AlertFiles, settings: LiveSettings, status: str = ""
    ) -> None:
        """Begin with the first entry of the log.

        Args:
            run: the logs of all voters, or the log of one node.
            sink: the place of the alerts.
            settings: the bounds.
            status: the HTTP address of that one node, which says how far it has applied.
        """
        logs = {node: [log, *lives(log)][-1] for node, log in run.nodes().items()}
        if bool(status) != (len(logs) == 1 and not run.cluster_file.exists()):
            raise ValueError(
                f"{run.root} has the logs of {', '.join(logs)}: it must have those of all voters;"
                " or that of one node, with --status HOST:PORT of that node"
            )
        applied = partial(applied_index, status) if status else None
        self._follower = Follower(logs, applied=applied)
        folder = run.root / LIVE
        bounds = {"overdue_ms": settings.overdue_ms, "horizon_ms": settings.horizon_ms}
        self.judge = Judge(folder / "spill", **bounds)
        self._messages = RecordedMessages(folder)
        self._sink, self._watch = sink, Watch(settings.stalled_ms)

    def step(self) -> int:
        """Judge the present state; return how many entries are new.

        Raises:
            LogDropped: no log has the next entry any more.
            ValueError: an entry can't be replayed, or a line of the witness is malformed.
        """
        frames, divergences = self._follower.poll()
        self.judge.apply(each.frame for each in frames)
        given, reaches = self._messages.read(self.judge.clock_ms)
        found = self.judge.violations(given, reaches, divergences)
        self._sink.write(each._asdict() for each in found)
        readings = {"the log's clock": self.judge.clock_ms}
        if written_ms := self._messages.written_ms:
            readings["the witness"] = written_ms
        silent = self._watch.observe(int(1_000 * time.monotonic()), readings)
        self._sink.write({"kind": "stalled", "detail": detail} for detail in silent)
        return len(frames)


def applied_index(address: str) -> LogIndex:
    """Return the index up to which a node has applied the log; 0 while it does not answer."""
    try:
        with urlopen(f"http://{address}/v1/status", timeout=STATUS_TIMEOUT_S) as answer:
            return LogIndex(int(json.load(answer)["nodes"][0]["applied_index"]))
    except (OSError, HTTPException, ValueError, LookupError):
        return LogIndex(0)


def run_live(args: argparse.Namespace) -> int:
    """Run the job until SIGINT or SIGTERM, with the arguments of the command.

    Returns:
        The exit status: 2 if the arguments are wrong or the job failed.
    """
    given = {each.name: getattr(args, each.name) for each in fields(LiveSettings)}
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    try:
        settings = LiveSettings(**{name: ms for name, ms in given.items() if ms is not None})
        run = RunFolder(args.folder.resolve())
        run.nodes()  # raises before a folder is made in one that is no run
        alerts = args.alerts or run.root / LIVE / "alerts"
        sink = AlertFiles(alerts, lambda line: print(line, flush=True))
        audit = LiveAudit(run, sink, settings, args.status or "")
        while not stopped:
            if audit.step() < BACKLOG:
                time.sleep(POLL_S)
    except (LogDropped, StorageError, ValueError, OSError) as wrong:
        print(f"live audit: {wrong}", file=sys.stderr)
        return 2
    return 0
