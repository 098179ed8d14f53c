"""Rules of the audit as queries. Each *.sql file has those of one subject; `views.sql` is for all.

    ---- outlived [ttls]
    -- Deliveries of messages that had expired.
    SELECT … FROM deliveries … WHERE … :policy_ms …

The first line of a query has its name: the violation, of which each row is an offender. In brackets
are operations of histories, tables and views. The query is asked if one of them occurs in the run;
without brackets it is always asked. A query is left out if one of its parameters is unknown (None).

A query reads the tables of the run by their names: `lines` (history.SCHEMA), those of the replay
(chaos/oracle/tables.py), and `epochs`. A name that is no table is that of a view: a query of
`views.sql`, or one above in the same file.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from chaos.oracle.story import LIFE

Tables = dict[str, DataFrame]
"""The tables of a run by name, or offenders by violation."""
BOUNDS: Final = {
    # Time for which an old policy may still be applied after its change: by a leader that was
    # deposed and has not learned it yet.
    "policy_ms": 5_000,
    # The longest wait for a redelivery after the nack's time: more than any lease of a workload.
    "grace_ms": 15_000,
    # A delivery this long after a lease's end, on the same stream, proves that the stream went on.
    "alive_ms": 1_000,
    # The longest wait for a free consumer: far more than a batch, a busy leader and a waiting
    # thread take on a slow machine.
    "late_ms": 10_000,
    # The longest time for which a message that was neither acked nor nacked counts as held.
    "held_ms": 60_000,
    # A timer that was due this long before the run's end must have fired.
    "lost_ms": 5_000,
    # A timer fires late after this time: far more than the tick, the commit and a full queue of due
    # timers take on a slow machine.
    "fired_ms": 5_000,
    # An excuse lasts this much longer than its cause, because overdue timers fire in order.
    "after_ms": 5_000,
    # Timers per millisecond that a cluster with a backlog fires, at least.
    "rate": 10,
    # The longest tick of a node. Due times are rounded up to it (timing.tick_ms); it is not logged.
    "tick_ms": 1_000,
    # Time after a timer's end for which a cancel must not return NOT_FOUND: the product's ten
    # minutes, less one minute for the client's clock.
    "horizon_ms": 540_000,
    # Shorter gaps between successes are ignored.
    "gap_ms": 50,
    # A schedule that failed sooner was refused, and a refusal is an answer. A slower one waited.
    "waited_ms": 1_000,
    # A gap that begins within this time after a strike belongs to the fault, even after the heal.
    "aftermath_ms": 2_000,
}
"""Parameters of the queries that are the same in each run."""
_PART: Final = "cast(conv(substring(id, {}, 10), 32, 10) AS BIGINT)"


def _of_id(part: str) -> str:
    return f"if(id IS NULL OR id RLIKE '^[0-9a-vA-V]{{24}}$', {part}, -1)"


_FUNCTIONS: Final = {
    # The plain name of a topic or group with the replay's name.
    "name_of(name STRING) RETURNS STRING": f"substring_index(name, '{LIFE}', 1)",
    # The effective due time and the seq of a timer id, as timer/model/timer_id.py lays it out: 48
    # bits due, 48 bits seq, 24 bits check, in 24 digits of base 32. -1: the id is malformed.
    "due_of(id STRING) RETURNS BIGINT": _of_id(f"shiftright({_PART.format(1)}, 2)"),
    "seq_of(id STRING) RETURNS BIGINT": _of_id(
        f"shiftleft({_PART.format(1)} & 3, 46) | shiftright({_PART.format(11)}, 4)"
    ),
    # The length of the part of a wait that the excuses cover, which do not overlap.
    "excused(spans ARRAY<STRUCT<start_ms: BIGINT, end_ms: BIGINT>>, since_ms BIGINT,"
    " until_ms BIGINT) RETURNS BIGINT": (
        "aggregate(spans, 0L, (sum, each) -> sum + greatest(0L,"
        " least(each.end_ms, until_ms) - greatest(each.start_ms, since_ms)))"
    ),
}
_HEAD: Final = re.compile(r"^---- (\w+)(?: \[([\w ]+)\])?$", re.MULTILINE)
_PARAMETER: Final = re.compile(r"(?<!:):(\w+)")
_READ: Final = re.compile(r"\b(?:FROM|JOIN|TABLE)\s+(\w+)")


class Query(NamedTuple):
    """One query."""

    text: str
    """Without comments."""
    occasions: frozenset[str]
    """Operations, tables and views; empty: it is always asked."""


class RunEvidence:
    """The tables and parameters of one run, which queries read."""

    def __init__(self, tables: Tables, work: Path = Path(), **values: int | None) -> None:
        self.tables = tables
        self.values: dict[str, int | None] = {**BOUNDS, **values}
        """Parameter -> its value; None: unknown."""
        self._work = work
        self._seen: dict[str, bool] = {}

    @property
    def spark(self) -> SparkSession:
        """The session of its tables."""
        return next(iter(self.tables.values())).sparkSession

    def keep(self, name: str, table: DataFrame, file: str = "") -> DataFrame:
        """Add a table, stored in the work folder; return the stored one. `file`: else `name`."""
        path = self._work / (file or name)
        table.write.mode("overwrite").parquet(str(path))
        self.tables[name] = stored_table(table.sparkSession, path, table.schema)
        return self.tables[name]

    def violations(self, subject: str) -> Tables:
        """Return violation -> offenders, by the queries of a subject."""
        return {
            name: _query(subject, query.text, self.tables, self.values)
            for name, query in queries(subject).items()
            if not query.occasions or any(map(self.has, query.occasions))
            if all(self.values[each] is not None for each in _PARAMETER.findall(query.text))
        }

    def query(self, subject: str, name: str, **tables: DataFrame) -> DataFrame:
        """Return the rows of one query. `tables`: further ones that it reads."""
        return _query(subject, queries(subject)[name].text, self.tables | tables, self.values)

    def has(self, occasion: str) -> bool:
        """Return whether an operation occurs in the histories, or a table or view has rows."""
        if not self._seen:
            rows = self.tables["lines"].select("op").distinct().collect()
            self._seen = {row["op"]: True for row in rows}
        if occasion not in self._seen and (occasion in self.tables or occasion in queries("views")):
            found = _query("views", f"TABLE {occasion}", self.tables, self.values)
            self._seen[occasion] = bool(found.head(1))
        return self._seen.get(occasion, False)


def stored_table(spark: SparkSession, path: Path, schema: StructType) -> DataFrame:
    """Return the table in a folder of Parquet files. Without rows, Spark's plans leave it out."""
    table = spark.read.schema(schema).parquet(str(path))  # to infer the schema is a job of its own
    rows = any(pq.read_metadata(file).num_rows for file in path.glob("*.parquet"))
    return table if rows else table.limit(0)


def query(subject: str, name: str, tables: Tables, **values: int | None) -> DataFrame:
    """Return the rows of one query of some tables."""
    return _query(subject, queries(subject)[name].text, tables, values)


def _query(subject: str, text: str, tables: Tables, values: Mapping[str, int | None]) -> DataFrame:
    views: dict[str, str] = {}
    names = {*_READ.findall(text)}
    known = queries("views") | queries(subject)
    for name, view in reversed(known.items()):  # a view reads those above it
        if name in names and name not in tables:
            views[name] = view.text
            names |= {*_READ.findall(view.text)}
    read = {name: table for name, table in tables.items() if name in names}
    for name, table in read.items():
        table.createOrReplaceTempView(name)
    spark = next(iter(read.values())).sparkSession
    _define_functions(spark)
    heads = [f"{name} AS ({view})" for name, view in reversed(views.items())]
    if heads:
        own = text.removeprefix("WITH ")
        text = f"WITH {', '.join(heads)}{' ' if own == text else ', '}{own}"
    return spark.sql(text, args={name: values[name] for name in {*_PARAMETER.findall(text)}})


@cache
def queries(subject: str) -> dict[str, Query]:
    """Return the queries of a file by their names, in its order."""
    _, *parts = _HEAD.split((files(__package__) / f"{subject}.sql").read_text())
    texts = (re.sub(r" *--.*", "", text).strip() for text in parts[2::3])
    occasions = (frozenset((words or "").split()) for words in parts[1::3])
    return dict(zip(parts[::3], map(Query, texts, occasions), strict=True))


@cache
def _define_functions(spark: SparkSession) -> None:
    for head, body in _FUNCTIONS.items():
        spark.sql(f"CREATE OR REPLACE TEMPORARY FUNCTION {head} RETURN {body}")
