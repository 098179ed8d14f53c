"""The sieve of a large run: plain timers are judged by columns, and only the others by rules.

    asked, log, given ── cut by mark ─► parts ── plain_timers.py ─┬► verdicts of nearly all timers
                                                           └► doubtful marks ── rules ─► the rest

The rules (verdict.py) join three tables of wide rows and check each timer for every violation.
Nearly every timer is plain and needs few of these checks. So the run is cut into parts. A part has
all rows of some marks. plain_timers.py judges a part at a time, in Spark's Python workers. The
rules get only the rows of the marks that it doubts. For the other marks the rules would return the
same verdicts: tests compare the two.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules import plain_timers
from chaos.audit.rules.client_tables import name_of
from timer.model.columns import I64
from timer.model.timer_id import mix

ROWS_PER_PART: Final = 1 << 19
"""Average rows of a part. A worker holds one part in memory, at about 300 bytes a row."""
ROWS_PER_TASK: Final = 1 << 22
"""Rows of the log that one task cuts. The task writes a file for each part that it has rows of."""
RUN_BITS: Final = 17
"""2^17 consecutive marks lie in one part. Clients mostly number their timers consecutively."""
_FULL: Final = 1 << plain_timers.STRETCH_BITS
_TABLES: Final = {"asked": plain_timers.ASKED, "log": plain_timers.LOG, "given": plain_timers.GIVEN}
_NAMES: Final = {"topic", "group", "outcome", "told", "end", "on_conflict"}
"""Text columns with few distinct values: they are written as dictionaries."""
_FACTS: Final = ("acked", "named", "doubted", "disputed")

MARK: Final = pa.schema([("mark", pa.int64())])

Batches = Iterator[pa.RecordBatch]


def cut(
    source: DataFrame, rows_of: Callable[[Batches], Batches], schema: pa.Schema, folder: Path,
    parts: int,
) -> DataFrame:  # fmt: skip
    """Write the rows of a table into a folder, cut by mark into `parts`; return the table there.

    `rows_of` makes the rows, with the columns of `schema`, from the source's batches. Arrow writes
    the files, in a fraction of the time of Spark's own writer.
    """
    clear(folder)
    folder.mkdir(parents=True)
    run_bits = RUN_BITS  # this process's value: workers import the module again

    def each(batches: Batches) -> Batches:
        context = TaskContext.get()
        assert context is not None
        files = _PartFiles(folder, f"{context.partitionId():05}.parquet", parts, run_bits)
        waiting: list[pa.RecordBatch] = []
        for batch in rows_of(batches):
            waiting.append(batch)
            if sum(map(len, waiting)) >= ROWS_PER_PART:
                files.write(pa.Table.from_batches(waiting))
                waiting.clear()
        if sum(map(len, waiting)):
            files.write(pa.Table.from_batches(waiting))
        files.close()
        yield pa.RecordBatch.from_pydict({"rows": [files.rows]})

    source.mapInArrow(each, "rows BIGINT").agg(F.sum("rows")).collect()
    reader = source.sparkSession.read.schema(from_arrow_schema(schema))
    return reader.parquet(str(folder)).select(*schema.names)


def cut_file(spark: SparkSession, file: Path, folder: Path, parts: int) -> DataFrame:
    """Cut a Parquet file; see `cut`. A task reads its row groups one after the other."""
    known = pq.read_metadata(file)

    def groups(batches: Batches) -> Batches:
        with pq.ParquetFile(file) as opened:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from opened.read_row_group(number).to_batches()

    tasks = max(1, known.num_rows // ROWS_PER_TASK)
    source = spark.range(known.num_row_groups, numPartitions=tasks)
    return cut(source, groups, known.schema.to_arrow_schema(), folder, parts)


class _PartFiles:
    """The files of one task, one per part. A file gets its name when it is complete."""

    def __init__(self, folder: Path, name: str, parts: int, run_bits: int) -> None:
        self.rows = 0
        self._parts = np.uint64(parts)
        self._run_bits = run_bits
        self._folder = folder
        self._name = name
        self._writers: dict[Path, pq.ParquetWriter] = {}

    def write(self, table: pa.Table) -> None:
        """Write rows, each to the file of its part."""
        run = pc.fill_null(table["mark"], 0).to_numpy() >> self._run_bits
        number = (mix(run.view(np.uint64)) % self._parts).astype(np.int32)
        order = np.argsort(number, kind="stable")
        number = number[order]
        table = table.combine_chunks().take(pa.array(order))
        ends = [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
        for start, end in pairwise([0, *ends]):
            path = self._folder / f"part={number[start]}" / self._name
            if path not in self._writers:
                path.parent.mkdir(exist_ok=True)
                texts = [each.name for each in table.schema if each.name in _NAMES]
                self._writers[path] = pq.ParquetWriter(
                    _unborn(path), table.schema, compression="lz4", use_dictionary=texts
                )
            self._writers[path].write_table(table.slice(start, end - start))
        self.rows += len(number)

    def close(self) -> None:
        """Close the files and rename them to their names."""
        for path, writer in self._writers.items():
            writer.close()
            _unborn(path).replace(path)


def _unborn(path: Path) -> Path:
    """Return the name of an incomplete file: readers skip names that begin with a dot."""
    return path.with_name(f".{path.name}")


def acked(acks: DataFrame) -> DataFrame:
    """Return the log's acks by stretch: topic, group, stretch, ack_epoch, attempts, held.

    A stretch is 2^STRETCH_BITS queue offsets. `ack_epoch` and `attempts` are the lowest of its
    acks; `held` is the number of its acked messages.
    """
    bits, end = plain_timers.STRETCH_BITS, F.col("queue_offset") + F.col("count")
    first, last = F.shiftright("queue_offset", bits), F.shiftright(end - 1, bits)
    begin = F.shiftleft("stretch", bits)
    rows = acks.select("*", end.alias("end"), F.explode(F.sequence(first, last)).alias("stretch"))
    held = F.least(F.col("end"), begin + _FULL) - F.greatest(F.col("queue_offset"), begin)
    return rows.groupBy("topic", "group", "stretch").agg(
        *(F.min(name).alias(name) for name in ("ack_epoch", "attempts")), F.sum(held).alias("held")
    )


def not_surely_kept(lines: DataFrame, stretches: DataFrame) -> DataFrame:
    """Return the lines of acks except those whose messages all lie in fully acked stretches.

    `stretches`: from `acked`.
    """
    number = F.row_number().over(Window.partitionBy("topic", "group").orderBy("stretch"))
    full = (
        stretches.where(F.col("held") == _FULL)
        .select(
            F.col("topic").alias("of_topic"), F.col("group").alias("of_group"), "stretch",
            (F.col("stretch") - number).alias("run"),
        )
        .groupBy("of_topic", "of_group", "run")
        .agg(F.min("stretch").alias("first"), F.max("stretch").alias("last"))
    )  # fmt: skip
    bits = plain_timers.STRETCH_BITS
    inside = F.expr(
        "topic = of_topic AND `group` = of_group"
        f" AND shiftright(array_min(offsets), {bits}) >= first"
        f" AND shiftright(array_max(offsets), {bits}) <= last"
    )
    return lines.where("op = 'ack'").join(F.broadcast(full), inside, "left_anti")


def starts(
    asked_topics: DataFrame, read: DataFrame, groups: DataFrame, deletions: DataFrame
) -> dict[str, I64]:
    """Return `starts` of plain_timers.Facts, without deleted topics and topics with sought groups.

    `read`: from `client_tables.consumed`. `groups`, `deletions`: tables of the replay.
    """
    sought = groups.where("sought").select(name_of("topic").alias("topic"))
    several = sought.union(deletions.select(name_of("topic")))
    topics = asked_topics.join(F.broadcast(several), "topic", "left_anti").distinct()
    first: dict[str, list[int]] = {row["topic"]: [] for row in topics.collect()}
    for row in read.join(F.broadcast(topics), "topic").collect():
        first[row["topic"]].append(row["start_offset"])
    return {topic: np.array(sorted(each), np.int64) for topic, each in first.items()}


def sift(
    spark: SparkSession, work: Path, into: Path, parts: int, begin: Mapping[str, I64],
    clock_error_ms: int | None,
) -> DataFrame:  # fmt: skip
    """Judge all parts: write the plain timers' verdicts into a folder, return DOUBTS.

    Args:
        spark: the session.
        work: a folder with the tables of _TABLES and `crowded`, each cut into `parts`, and the
            tables of _FACTS, not cut.
        into: the folder for the verdicts: one file per part.
        parts: the number of parts.
        begin: from `starts`.
        clock_error_ms: as in plain_timers.Facts.
    """
    into.mkdir(parents=True, exist_ok=True)

    def each(batches: Batches) -> Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                facts = _facts(work, begin, clock_error_ms)
                asks, log, given = (_part(work / n, number, of) for n, of in _TABLES.items())
                crowded = plain_timers.numbers(_part(work / "crowded", number, MARK.names), "mark")
                found = plain_timers.sifted(asks, log, given, crowded, facts)
                path = into / f"plain-{number:05}.parquet"
                pq.write_table(found.plain, _unborn(path), compression="lz4")
                _unborn(path).replace(path)
                yield from found.doubts.to_batches()

    schema = "mark BIGINT, seq BIGINT"
    return spark.range(parts, numPartitions=parts).mapInArrow(each, schema)


def _part(folder: Path, number: int, columns: Iterable[str]) -> pa.Table:
    """Return one part of a cut table; without rows if the part's folder is missing."""
    path = folder / f"part={number}"
    if not path.exists():
        return _EMPTY.select([*columns])
    names = [name for name in columns if name in _NAMES]
    return pq.read_table(path, columns=[*columns], read_dictionary=names, partitioning=None)


def _facts(work: Path, begin: Mapping[str, I64], clock_error_ms: int | None) -> plain_timers.Facts:
    tables = {name: pq.read_table(work / name, partitioning=None) for name in _FACTS}
    return plain_timers.Facts(
        starts=begin,
        acked=tables["acked"],
        named=plain_timers.numbers(tables["named"], "seq"),
        doubted=tables["doubted"],
        disputed=plain_timers.numbers(tables["disputed"], "index"),
        clock_error_ms=clock_error_ms,
    )


_EMPTY: Final = pa.schema(
    [
        (name, pa.string() if name in {*_NAMES, "id", "key"} else pa.int64())
        for name in dict.fromkeys(name for of in _TABLES.values() for name in of)
    ]
).empty_table()


def of_marks(table: DataFrame, doubts: DataFrame) -> DataFrame:
    """Return the rows of a table with a doubtful mark or without a mark."""
    marks = doubts.where("mark IS NOT NULL").select("mark").distinct()
    return table.join(marks, "mark", "left_semi").unionByName(table.where("mark IS NULL"))


def clear(*folders: Path) -> None:
    """Remove the folders of an earlier audit."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
