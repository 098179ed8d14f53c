"""Histories of clients and reports of nodes, as tables.

A crash may tear the last line of a file. Any other malformed line ends the audit.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.queries import stored_table
from chaos.history import history
from chaos.history.history import RunFolder

SMALL_SIZE: Final = 512 << 20
"""The most bytes of histories that are kept in memory, parsed."""
LINE_SIZE_MAX: Final = 64 << 20
"""The most bytes of a history's last line."""
GLOBBED: Final = frozenset("[]{}*?:\\,")
"""Characters of a path that have a meaning for Spark's readers."""


@contextlib.contextmanager
def plain_path(run: RunFolder) -> Iterator[RunFolder]:
    """Yield the run under a path without such characters: a link to it if necessary."""
    if GLOBBED.isdisjoint(str(run.root)):
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="timer-audit-") as folder:
        link = Path(folder) / "run"
        link.symlink_to(run.root.resolve(), target_is_directory=True)
        yield RunFolder(link)


def read_histories(spark: SparkSession, run: RunFolder) -> DataFrame:
    """Return the lines of all histories, in any of their forms (history.SCHEMA).

    The outcome `asked` does not occur in them: each request has its outcome, or `unknown`.

    Raises:
        FileNotFoundError: there are no histories.
        ValueError: a file has another suffix, or a line is malformed. A malformed last line is left
            out: a crash may have torn it.
    """
    files = run.history_files()
    for number, path in enumerate(files):
        if not GLOBBED.isdisjoint(path.name):
            link = run.audit / "work" / "histories" / f"{number}{path.suffix}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
            files[number] = link
    reader = spark.read.schema(history.SCHEMA).option("lineSep", "\n")
    texts, columns = ([str(p) for p in files if p.suffix == s] for s in history.HISTORIES)
    parts: list[DataFrame] = []
    if texts:
        parsed = reader.json(texts).withColumn("file", F.input_file_name())
        small = sum(os.stat(path).st_size for path in texts) <= SMALL_SIZE
        parts.append(parsed.cache() if small else _written(parsed, run, "parsed"))
    if columns:
        parts.append(reader.parquet(*columns).withColumn("file", F.input_file_name()))
    lines = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
    for bad in lines.where("op IS NULL").groupBy("file").count().collect():
        path = Path(unquote(urlsplit(bad["file"]).path))
        if bad["count"] > _torn(path):
            raise ValueError(f"{path.resolve()}: {bad['count']} lines are not lines of a history")
    lines = lines.where("op IS NOT NULL").drop("file")
    is_asked = F.col("outcome").eqNullSafe("asked")
    return _one_outcome_each(lines, is_asked, run) if lines.where(is_asked).head(1) else lines


def _one_outcome_each(lines: DataFrame, is_asked: Column, run: RunFolder) -> DataFrame:
    """Return the lines with one outcome per request.

    A request with only a line of outcome `asked` gets the outcome `unknown`, and its start as its
    end. The other `asked` lines are left out.
    """
    ids = ["client", "request"]
    told = lines.where(~is_asked & F.col("request").isNotNull()).select(*ids)
    lost = lines.where(is_asked).join(told, ids, "left_anti")
    lost = lost.withColumns({"end_ms": F.col("start_ms"), "outcome": F.lit("unknown")})
    return _written(lines.where(~is_asked).unionByName(lost), run, "told")


def _written(lines: DataFrame, run: RunFolder, name: str) -> DataFrame:
    path = run.audit / "work" / name
    lines.write.mode("overwrite").parquet(str(path))
    return stored_table(lines.sparkSession, path, lines.schema)


def _torn(history_file: Path) -> int:
    """Return the number of lines that a crash left half written: 1 if the last one is malformed."""
    if history_file.suffix != ".jsonl":
        return 0
    with history_file.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_SIZE_MAX))
        last = file.read().rpartition(b"\n")[2]
    try:
        json.loads(last or b"null")
    except ValueError:
        return 1
    return 0


def read_states(spark: SparkSession, run: RunFolder) -> DataFrame:
    """Return the nodes' counts of their states, without a torn last line.

    Raises:
        ValueError: another line is malformed.
    """
    if not run.states.exists():
        return spark.createDataFrame([], history.STATES_SCHEMA)
    rows = spark.read.schema(history.STATES_SCHEMA).json(str(run.states))
    bad = rows.where("node IS NULL OR index IS NULL").count()
    if bad > _torn(run.states):
        raise ValueError(f"{run.states.resolve()}: {bad} lines lack a `node` or an `index`")
    return rows.where("node IS NOT NULL AND index IS NOT NULL")
