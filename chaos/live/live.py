"""The live audit: a Structured Streaming job that follows a running cluster's exported events.

    timerctl audit DIR --live --checkpoint C --alerts OUT

    exporter (log) ──────┬─► DIR/*.parquet ─► micro-batches ─► judge ─► OUT/<time>.jsonl, stdout
    witness (messages) ──┘                        │
                                                  └─► DIR/judged/*.parquet

The driver has one judge (chaos/live/judge.py), which takes in each micro-batch. Then the files of
the batch are moved aside. A restart first judges those again, from the log's first entry: the state
of the judge is nowhere else. Violations that OUT has are not written again, so every violation is
in OUT exactly once. A line is printed after its file is written, and may be missing after a crash.

Silence is not health. The job reports `stalled` if the export, the log's clock or the witness does
not move for a while, by this machine's clock and without Spark.
"""

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery

from chaos.live import export, exported_events, judge, witness
from chaos.live.judge import Judge
from chaos.spark.session import spark_session, why_no_java

STALLED_MS: Final = 10_000
"""More than a failover and the interval of CHECKPOINT entries."""
TRIGGER: Final = "1 second"
BYTES_PER_BATCH: Final = 64 << 20
FILES_AT_ONCE: Final = 256
"""Files of one step of a restart."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """The bounds of a job."""

    overdue_ms: int = judge.OVERDUE_MS
    horizon_ms: int = judge.HORIZON_MS
    trigger: str = TRIGGER


class AlertFiles:
    """The sink: a file of JSON lines per batch with violations. Each violation is written once."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._say = say
        lines = (line for path in folder.glob("*.jsonl") for line in path.open())
        self._raised = {_key(json.loads(line)) for line in lines}

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows that are new."""
        new = [row for row in rows if _key(row) not in self._raised]
        if not new:
            return
        raised_at_ms = exported_events.now_ms()
        lines = [json.dumps(row | {"raised_at_ms": raised_at_ms}) for row in new]
        hidden = self._folder / ".alerts.tmp"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        hidden.rename(self._folder / f"{raised_at_ms:013d}-{len(self._raised):09d}.jsonl")
        self._raised.update(map(_key, new))
        for line in lines:
            self._say(line)


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    seq = row.get("seq", 0)
    return row["kind"], seq, "" if seq else row["detail"]


class LiveAudit:
    """The judge with its files; `batch` takes in one micro-batch."""

    def __init__(self, folder: Path, spill: Path, sink: AlertFiles, settings: LiveSettings) -> None:
        """Judge the files of `folder` that were judged before."""
        self.judge = Judge(spill, overdue_ms=settings.overdue_ms, horizon_ms=settings.horizon_ms)
        self._sink = sink
        self._judged = folder / export.JUDGED
        self._judged.mkdir(parents=True, exist_ok=True)
        known = sorted(self._judged.glob("*.parquet"), key=_written)
        for start in range(0, len(known), FILES_AT_ONCE):
            some = known[start : start + FILES_AT_ONCE]
            tables = [pq.read_table(path, schema=exported_events.ARROW) for path in some]
            self._step(pa.concat_tables(tables))

    def _step(self, told: pa.Table) -> None:
        self._sink.write(each._asdict() for each in self.judge.step(told))

    def batch(self, told: DataFrame, number: int) -> None:
        """Judge a micro-batch, and put its files aside."""
        del number
        table = told.toArrow()
        self._step(table.drop_columns(["file"]))
        for name in table["file"].unique().to_pylist():
            path = Path(unquote(urlsplit(name).path))
            path.rename(self._judged / path.name)


def _written(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


class Watch:
    """Reports the export, the log's clock or the witness if it does not move."""

    def __init__(self, folder: Path, stalled_ms: int) -> None:
        self._folder = folder
        self._stalled_ms = stalled_ms
        self._moved: dict[str, tuple[int, int]] = {}
        """Name -> (its last reading, this machine's time at which that was new)."""
        self._said: set[str] = set()

    def look(self, now_ms: int, clock_ms: int) -> list[str]:
        """Return a line about each that stopped since the last look; `clock_ms`: the log's."""
        for name, reading in self._readings(clock_ms):
            if self._moved.get(name, (None, 0))[0] != reading:
                self._moved[name] = reading, now_ms
        since = {name: at for name, (_, at) in self._moved.items()}
        stopped = {name for name, at in since.items() if now_ms - at > self._stalled_ms}
        new, self._said = sorted(stopped - self._said), stopped
        return [f"{name} stands still since {since[name]}" for name in new]

    def _readings(self, clock_ms: int) -> Iterator[tuple[str, int]]:
        alive = self._folder / export.ALIVE
        yield "the export", alive.stat().st_mtime_ns if alive.exists() else 0
        if clock_ms:
            yield "the log's clock", clock_ms
        alive = self._folder / witness.ALIVE
        if alive.exists():
            yield "the witness", alive.stat().st_mtime_ns


def start(
    spark: SparkSession, folder: Path, checkpoint: Path, audit: LiveAudit, trigger: str = TRIGGER
) -> StreamingQuery:
    """Start the job on the files of the folder that are not judged."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)  # the folder says what is judged
    spark = spark.newSession()  # these settings are the job's alone
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    told = (
        spark.readStream.schema(from_arrow_schema(exported_events.ARROW))
        .option("maxBytesPerTrigger", BYTES_PER_BATCH)
        .option("pathGlobFilter", "*.parquet")
        .parquet(str(folder.resolve()))
        .withColumn("file", F.input_file_name())
    )
    return (
        told.writeStream.queryName("live-audit")
        .foreachBatch(audit.batch)
        .option("checkpointLocation", str(checkpoint.resolve()))
        .trigger(processingTime=trigger)
        .start()
    )


def run(args: argparse.Namespace) -> int:
    """Run the job with the arguments of the command; see chaos/audit_options.py."""
    folder: Path = args.folder.resolve()
    for option in ("overdue_ms", "horizon_ms", "stalled_ms"):
        if (value := getattr(args, option)) is not None and value <= 0:
            name = option.replace("_", "-")
            print(f"live audit: --{name} {value}: must be above 0", file=sys.stderr)
            return 2
    if why := why_no_java():
        print(f"live audit: {why}", file=sys.stderr)
        return 2
    given = {name: getattr(args, name) for name in ("overdue_ms", "horizon_ms", "trigger")}
    return run_live(
        folder,
        args.checkpoint or folder.with_name(f"{folder.name}.checkpoint"),
        args.alerts or folder.with_name(f"{folder.name}.alerts"),
        LiveSettings(**{name: value for name, value in given.items() if value is not None}),
        stalled_ms=STALLED_MS if args.stalled_ms is None else args.stalled_ms,
    )


def run_live(
    folder: Path, checkpoint: Path, alerts: Path, settings: LiveSettings, *, stalled_ms: int
) -> int:
    """Run the job until it is stopped or fails; return the exit status."""
    stopped: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(1))
    sink = AlertFiles(alerts, lambda line: print(line, flush=True))
    watch = Watch(folder, stalled_ms)
    failure: Exception | None = None
    spark = spark_session("timer-live-audit", quick=True)
    try:
        audit = LiveAudit(folder, checkpoint / "spill", sink, settings)
        query = start(spark, folder, checkpoint / "spark", audit, settings.trigger)
        while query.isActive and not stopped:
            silent = watch.look(exported_events.now_ms(), audit.judge.clock_ms)
            sink.write({"kind": "stalled", "detail": detail} for detail in silent)
            time.sleep(1)
        failure = query.exception()
        query.stop()
    except (PySparkException, ValueError) as wrong:
        failure = wrong
    finally:
        spark.stop()
    if failure is not None and not stopped:
        print(f"live audit: {failure}", file=sys.stderr)
        return 2
    return 0
