"""Rules of the audit as queries. Each *.sql file has those of one subject; `views.sql` is for all.

    ---- outlived [ttls]
    -- Deliveries of messages that had expired.
    SELECT … FROM deliveries … WHERE … :policy_ms …

The first line of a query has its name: the violation, of which each row is an offender. In brackets
are operations of histories, tables and views. The query is asked if one of them occurs in the run;
without brackets it is always asked. A query is left out if one of its parameters is unknown (None).

A query reads the tables of the run by their names: `lines` (history.SCHEMA), those of the replay
(chaos/oracle/tables.py), and `epochs`. A view is a query in `views.sql`.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from chaos.audit.rules.client_tables import Tables
from chaos.oracle.story import LIFE

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
}
"""Parameters of the queries that are the same in each run."""
_PART: Final = "cast(conv(substring(id, {}, 10), 32, 10) AS BIGINT)"
_FUNCTIONS: Final = {
    # The plain name of a topic or group with the replay's name.
    "name_of(name STRING) RETURNS STRING": f"substring_index(name, '{LIFE}', 1)",
    # The effective due time and the seq of a timer id, as timer/model/timer_id.py lays it out.
    "due_of(id STRING) RETURNS BIGINT": f"shiftright({_PART.format(1)}, 2)",
    "seq_of(id STRING) RETURNS BIGINT": (
        f"shiftleft({_PART.format(1)} & 3, 46) | shiftright({_PART.format(11)}, 4)"
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

    def __init__(self, tables: Tables, **values: int | None) -> None:
        self._tables = tables
        self.values: dict[str, int | None] = {**BOUNDS, **values}
        """Parameter -> its value; None: unknown."""
        self._seen: dict[str, bool] = {}

    def judged(self, subject: str) -> Tables:
        """Return violation -> offenders, by the queries of a subject."""
        return {
            name: _asked(query.text, self._tables, self.values)
            for name, query in queries(subject).items()
            if not query.occasions or any(map(self.has, query.occasions))
            if all(self.values[each] is not None for each in _PARAMETER.findall(query.text))
        }

    def ask(self, subject: str, name: str, **tables: DataFrame) -> DataFrame:
        """Return the rows of one query. `tables`: further ones that it reads."""
        return _asked(queries(subject)[name].text, self._tables | tables, self.values)

    def has(self, occasion: str) -> bool:
        """Return whether an operation occurs in the histories, or a table or view has rows."""
        if not self._seen:
            rows = self._tables["lines"].select("op").distinct().collect()
            self._seen = {row["op"]: True for row in rows}
        if occasion not in self._seen and (occasion in self._tables or occasion in _views()):
            found = _asked(f"TABLE {occasion}", self._tables, self.values)
            self._seen[occasion] = bool(found.head(1))
        return self._seen.get(occasion, False)


def ask(subject: str, name: str, tables: Tables, **values: int | None) -> DataFrame:
    """Return the rows of one query of some tables."""
    return _asked(queries(subject)[name].text, tables, values)


def _asked(text: str, tables: Tables, values: Mapping[str, int | None]) -> DataFrame:
    views: dict[str, str] = {}
    names = {*_READ.findall(text)}
    for name, view in reversed(_views().items()):  # a view reads those above it
        if name in names:
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


def _views() -> dict[str, Query]:
    return queries("views")


@cache
def _define_functions(spark: SparkSession) -> None:
    for head, body in _FUNCTIONS.items():
        spark.sql(f"CREATE OR REPLACE TEMPORARY FUNCTION {head} RETURN {body}")
