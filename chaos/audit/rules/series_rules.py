"""Recurring timers: changes of series, planned times, and deliveries of occurrences.

docs/audit.md lists these violations.

The replay computes the next time of a series by itself (chaos/oracle/series_story.py). The log
makes occurrences, so no client requests them. Their verdicts are those of other timers, with the
planned time as the requested one (verdict.py). A SERIES entry may cancel a pending occurrence.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules import late_firing
from chaos.audit.rules.client_tables import Tables, id_parts, name_of
from chaos.audit.rules.node_logs import no
from chaos.audit.rules.settings_rules import unlogged

CHANGES: Final = "op IN ('create_series', 'alter_series', 'delete_series')"
_CHANGE: Final = ("topic", "key", "op")


def with_occurrences(log: DataFrame, story: Tables) -> DataFrame:
    """Return the fates with `planned_ms` of occurrences, and `revoked`: a SERIES entry ended it."""
    made = story["occurrences"].where("seq > 0 AND since_ms IS NOT NULL")
    by = story["series"].select(F.col("series_index").alias("end_index"), (~no()).alias("revoked"))
    log = log.join(F.broadcast(by), "end_index", "left")
    return log.join(made.select("seq", "planned_ms"), "seq", "left")


def untrue_changes(lines: DataFrame, series: DataFrame) -> DataFrame:
    """Return the confirmed changes that the log does not have: topic, key, op, said."""
    told = lines.where(CHANGES).where("outcome = 'ok'").select(*_CHANGE, "said")
    logged = series.withColumn("topic", name_of("topic")).select(*_CHANGE, "fields")
    return unlogged(told, logged)


def unasked_changes(lines: DataFrame, series: DataFrame) -> DataFrame:
    """Return the changes of the log that no client requested: topic, key, op, fields.

    A client may repeat a request, so the log may have it twice. Topics are judged in which a
    history changes a series.
    """
    asked: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for *place, said in lines.where(CHANGES).select(*_CHANGE, "said").distinct().collect():
        asked.setdefault(tuple(place), []).append(json.loads(said or "{}"))
    topics = {topic for topic, *_ in asked}
    logged = series.select(name_of("topic").alias("topic"), "key", "op", "fields")
    wrong = [
        (*place, fields)
        for *place, fields in logged.collect()
        if place[0] in topics
        and not any(e.items() <= json.loads(fields).items() for e in asked.get((*place,), ()))
    ]
    return lines.sparkSession.createDataFrame(wrong, logged.schema)


def _given(lines: DataFrame) -> DataFrame:
    """Return the messages of histories that name series: topic, seq, series, number, client."""
    return (
        lines.where("op = 'deliver' AND occurrences IS NOT NULL")
        .select("client", "topic", F.inline(F.arrays_zip("ids", "series", "occurrences")))
        .select("client", "topic", id_parts("ids")[1].alias("seq"), "series", "occurrences")
        .withColumnRenamed("occurrences", "number")
    )


def untrue_deliveries(lines: DataFrame, story: Tables) -> DataFrame:
    """Return the messages whose series or number is not the log's. Carried ones are left out."""
    known = story["occurrences"].where("seq > 0").select(
        "seq", *(F.col(name).alias(f"logged_{name}") for name in ("series", "number"))
    )  # fmt: skip
    given = _given(lines).join(story["carried"].select("seq"), "seq", "left_anti")
    both = given.join(known, "seq", "left")
    same = (F.col(name).eqNullSafe(F.col(f"logged_{name}")) for name in ("series", "number"))
    return both.where(~(next(same) & next(same))).distinct()


def doubled(lines: DataFrame, carried: DataFrame) -> DataFrame:
    """Return the numbers with which several timers were delivered: series, number, first, last."""
    given = _given(lines).where("number IS NOT NULL")
    given = given.join(carried.select("seq"), "seq", "left_anti")
    seqs = F.min("seq").alias("first"), F.max("seq").alias("last")
    return given.groupBy("series", "number").agg(*seqs).where("first < last")


def judged(lines: DataFrame, story: Tables, excused: Sequence[late_firing.Stretch]) -> Tables:
    """Return violation -> offenders. `excused`: from `late_firing.excuses`."""
    rows, series = story["occurrences"], story["series"]
    if not (lines.where(CHANGES).head(1) or series.head(1)):
        return {}
    waits = rows.where("since_ms IS NOT NULL AND NOT untrue")
    waits = waits.withColumn("late_ms", F.col("at_ms") - F.col("since_ms"))
    return {
        "series_untrue": untrue_changes(lines, series),
        "series_unasked": unasked_changes(lines, series),
        "misplanned": rows.where("untrue"),
        "planned_late": late_firing.unexcused(waits, "at_ms", excused),
        "occurrence_untrue": untrue_deliveries(lines, story),
        "occurrence_doubled": doubled(lines, story["carried"]),
    }
