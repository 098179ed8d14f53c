"""The live audit: a Structured Streaming job that follows a running cluster's exported events.

    timerctl audit DIR --live --checkpoint C --alerts OUT     or: python -m chaos.live.live DIR …

    exporter (log) --+--> DIR/*.parquet --> shard by seq --> judge --> OUT/<batch>.jsonl, stdout
    witness (given) -+                      clocks to all    state in RocksDB, with C

chaos/live/judge.py says what is wrong; here it is fed. Timers are split into shards by seq, each
with a judge whose rows are Spark's state, as columns: no timer is a Python object. A restart goes
on from the checkpoint: the state, the files that were read and the batch's number belong together.
A batch that is done again judges the same and finds its file written: every alert is in OUT exactly
once. (stdout is told after the file: a crash between the two leaves a line untold.)

Silence is not health: when the export, the log's clock or the witness stands still, the job says
`stalled`, by this machine's clock and without Spark.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped]
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from chaos.audit_options import add_live_arguments
from chaos.live import export, exported_events, judge, witness
from chaos.live.exported_events import EventKind
from chaos.spark.session import spark_session, why_no_java

ALERTS: Final = (
    "kind STRING, seq BIGINT, topic STRING, due_ms BIGINT, clock_ms BIGINT, detail STRING"
)
QUERY_ID: Final = "sql.streaming.queryId"
"""A local property that Spark gives each batch: the id of the query, kept in its checkpoint."""
OVERDUE_MS: Final = 5_000
STALLED_MS: Final = 10_000
"""More than a failover and the interval of CHECKPOINT entries."""
TRIGGER: Final = "1 second"
SHARDS: Final = 4
FILES_PER_BATCH: Final = 512
COMPACT_EVERY: Final = 500
_STATE_STORE: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How a job judges. The number of shards can't change while a checkpoint is kept."""

    overdue_ms: int = OVERDUE_MS
    horizon_ms: int = judge.HORIZON_MS
    shards: int = SHARDS
    trigger: str = TRIGGER


class _SparkShelf:
    """Chunks in Spark's map state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def get(self, chunk: int) -> bytes | None:
        found = self._state.getValue((chunk,))
        return bytes(found[0]) if found else None

    def put(self, chunk: int, rows: bytes) -> None:
        self._state.updateValue((chunk,), (rows,))

    def remove(self, chunk: int) -> None:
        self._state.removeKey((chunk,))


class ShardJudge(StatefulProcessor):
    """One judge per shard; runs in Spark's Python workers."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name the state."""
        self._chunks = handle.getMapState("chunks", "chunk BIGINT", "rows BINARY")
        self._head = handle.getValueState("head", "head BINARY")

    def handleInputRows(  # noqa: N802 - Spark's name
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any  # noqa: N803
    ) -> Iterator[pd.DataFrame]:  # fmt: skip
        """Judge a shard's events of one batch."""
        told = pd.concat([*rows])
        columns = {
            name: told[name].to_numpy()
            for name in (*exported_events.NUMBERS, *exported_events.TEXTS)
        }
        stored = self._head.get()
        head = judge.JudgeState.loads(bytes(stored[0])) if stored else judge.JudgeState()
        mine = judge.Judge(
            head,
            _SparkShelf(self._chunks),
            overdue_ms=self._settings.overdue_ms,
            horizon_ms=self._settings.horizon_ms,
        )
        alerts = mine.step(columns)
        self._head.update((head.dumps(),))
        yield pd.DataFrame(alerts, columns=[*judge.Alert._fields])

    def close(self) -> None:
        """Nothing is held."""


def alerts_of(told: DataFrame, settings: LiveSettings) -> DataFrame:
    """Return the alerts that follow from a stream of events."""
    kind, every = F.col("kind"), F.array(*map(F.lit, range(settings.shards)))
    shard = (
        F.when(
            kind.isin(*map(int, (EventKind.CLOCK, EventKind.REACH, *exported_events.OF_TOPICS))),
            every,
        )
        .when(kind == int(EventKind.DIVERGED), F.array(F.lit(0)))
        .otherwise(F.array((F.col("seq") % settings.shards).cast("int")))
    )
    return (
        told.withColumn("shard", F.explode(shard))
        .groupBy("shard")
        .transformWithStateInPandas(ShardJudge(settings), ALERTS, "append", "none")
    )


class AlertFiles:
    """The sink: one file of JSON lines per batch that found anything."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._say = say

    def batch(self, found: DataFrame, batch: int) -> None:
        """Raise a batch's alerts, unless they were raised before a crash.

        By the query, too: one with a new checkpoint begins to count its batches anew.
        """
        rows = [row.asDict() for row in found.collect()]  # always: it is what moves the state
        query = str(found.sparkSession.sparkContext.getLocalProperty(QUERY_ID) or "")[:8]
        self._raise(self._folder / f"{query}-{batch:012d}.jsonl", rows)

    def stalled(self, at_ms: int, details: Sequence[str]) -> None:
        """Raise that something stands still."""
        rows = [{"kind": "stalled", "detail": detail} for detail in details]
        self._raise(self._folder / f"stalled-{at_ms:013d}.jsonl", rows)

    def _raise(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        if not rows or path.exists():
            return
        lines = [json.dumps(row | {"raised_at_ms": exported_events.now_ms()}) for row in rows]
        exported_events.write_whole(path, "\n".join(lines) + "\n")
        for line in lines:
            self._say(line)


class Watch:
    """Tells, once each time, when the export, the log's clock or a witness stands still."""

    def __init__(self, folder: Path, stalled_ms: int, began_ms: int) -> None:
        self._folder = folder
        self._stalled_ms = stalled_ms
        self._began_ms = began_ms
        self._said: set[str] = set()

    def look(self, now_ms: int) -> list[str]:
        """Return what stands still since the last look."""
        standing = {what: at for what, at in self._clocks() if now_ms - at > self._stalled_ms}
        new = {what: at for what, at in standing.items() if what not in self._said}
        self._said = {*standing}
        return [f"{what} stands still since {at}" for what, at in new.items()]

    def _clocks(self) -> Iterator[tuple[str, int]]:
        log, given = (self._newest(prefix) for prefix in (export.PREFIX, witness.PREFIX))
        yield "the export", log[1] if log else self._began_ms
        if log:
            yield "the log's clock", log[0]
        if given:
            yield "the witness", given[1]

    def _newest(self, prefix: str) -> tuple[int, int] | None:
        """Return (the clock in the last file, when that was written), in Unix milliseconds."""
        paths = sorted(self._folder.glob(f"{prefix}*.parquet"))
        table = exported_events.newest(self._folder, prefix)
        if table is None or not paths:
            return None
        written_ms = int(paths[-1].stat().st_mtime * 1000)
        return int(pc.max(table["at_ms"]).as_py() or 0), written_ms


def start(
    spark: SparkSession, folder: Path, checkpoint: Path, sink: AlertFiles, settings: LiveSettings
) -> StreamingQuery:
    """Start the job; it goes on from the checkpoint, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    spark = spark.newSession()  # these settings are the job's alone
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", _STATE_STORE)
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    # The names of all files ever read are rewritten at each compaction: by default every tenth.
    spark.conf.set("spark.sql.streaming.fileSource.log.compactInterval", COMPACT_EVERY)
    spark.conf.set("spark.sql.shuffle.partitions", min(settings.shards, SHARDS))
    told = (
        spark.readStream.schema(exported_events.SCHEMA)
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .option("pathGlobFilter", "*.parquet")
        .parquet(str(folder.resolve()))
    )
    return (
        alerts_of(told, settings)
        .writeStream.queryName("live-audit")
        .foreachBatch(sink.batch)
        .outputMode("append")
        .option("checkpointLocation", str(checkpoint.resolve()))
        .trigger(processingTime=settings.trigger)
        .start()
    )


def run(args: argparse.Namespace) -> int:
    """Run the job as the command's arguments say; see chaos/audit_options.py."""
    folder: Path = args.folder.resolve()  # which has a name, whatever it was called by
    for option in ("overdue_ms", "horizon_ms", "stalled_ms"):
        if (value := getattr(args, option)) is not None and value <= 0:
            print(
                f"live audit: --{option.replace('_', '-')} {value}: must be above 0",
                file=sys.stderr,
            )
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
    checkpoint.mkdir(parents=True, exist_ok=True)
    spark = spark_session("timer-live-audit", quick=True)
    sink = AlertFiles(alerts, lambda line: print(line, flush=True))
    watch = Watch(folder, stalled_ms, exported_events.now_ms())
    failure: Exception | None = None
    try:
        query = start(spark, folder, checkpoint, sink, settings)
        while query.isActive and not stopped:
            now_ms = exported_events.now_ms()
            sink.stalled(now_ms, watch.look(now_ms))
            time.sleep(1)
        failure = query.exception()
        query.stop()
    except PySparkException as wrong:
        failure = wrong
    finally:
        spark.stop()
    if failure is not None and not stopped:
        print(f"live audit: {failure}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.live.live`."""
    parser = argparse.ArgumentParser(description="follow a running cluster's exported events")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the events")
    add_live_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
