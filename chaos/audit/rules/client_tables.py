"""Tables of the histories: one row per requested timer, delivery or ack.

A line of a history has lists; here they become rows. The functions take and return DataFrames.
`lines` has the columns of `history.SCHEMA`.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.history import flat
from chaos.oracle.story import LIFE

Tables = dict[str, DataFrame]
"""The replay's tables by name (`story`), or offenders by violation."""
SLOT: Final = ("topic", "group", "queue_offset")
"""Columns that identify a message in a group."""
LETTERS: Final = "dead-letters"
"""The group whose dead letters a redrive takes."""
_STRETCH_BITS: Final = 8
_SAID: Final = ("ack", "nack", "extend")


def with_unanswered(lines: DataFrame) -> DataFrame:
    """Return the lines with one outcome per request.

    A request with only a line of outcome `asked` gets the outcome `unknown`, and its start as its
    end. The other `asked` lines are left out.
    """
    is_asked = F.col("outcome").eqNullSafe("asked")
    if not lines.where(is_asked).head(1):
        return lines
    ids = ["client", "request"]
    told = lines.where(~is_asked & F.col("request").isNotNull()).select(*ids)
    lost = (
        lines.where(is_asked).join(told, ids, "left_anti").withColumn("end_ms", F.col("start_ms"))
    )
    lost = lost.withColumn("outcome", F.lit("unknown")).select(*lines.columns)
    return lines.where(~is_asked).unionByName(lost)


def schedules(lines: DataFrame) -> DataFrame:
    """Return the lines and columns that `flat.asked` reads."""
    return lines.where("op = 'schedule'").select(*flat.ASKED_OF)


def asked(lines: DataFrame) -> DataFrame:
    """Return one row per requested timer: `flat.ASKED`."""
    return schedules(lines).mapInArrow(flat.asked_batches, from_arrow_schema(flat.ASKED))


def delivers(lines: DataFrame) -> DataFrame:
    """Return the lines and columns that `flat.given` reads."""
    return lines.where("op = 'deliver'").select(*flat.GIVEN_OF)


def deliveries(lines: DataFrame) -> DataFrame:
    """Return one row per delivery of a message, duplicates included: `flat.GIVEN`."""
    return delivers(lines).mapInArrow(flat.given_batches, from_arrow_schema(flat.GIVEN))


def answers(
    lines: DataFrame, ops: Sequence[str], results: Sequence[str], *columns: str
) -> DataFrame:
    """Return the messages about which a consumer received one of the results: slot, `columns`."""
    each = F.inline(F.arrays_zip("offsets", "results"))
    rows = lines.where(F.col("op").isin(*ops) & (F.col("outcome") == "ok"))
    rows = rows.select("topic", "group", *columns, each).where(F.col("results").isin(*results))
    return rows.withColumnRenamed("offsets", "queue_offset").select(*SLOT, *columns)


def confirmed_acks(lines: DataFrame) -> DataFrame:
    """Return one row per confirmed ack of a message: slot, confirmed_ms."""
    rows = answers(lines, ["ack"], ["ACKED", "ALREADY_ACKED"], "end_ms")
    return rows.withColumnRenamed("end_ms", "confirmed_ms")


def told_expired(lines: DataFrame) -> DataFrame:
    """Return the slots of messages for which a consumer received EXPIRED."""
    return answers(lines, _SAID, ["EXPIRED"])


def with_lives(lines: DataFrame, given: DataFrame, fates: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return lines and deliveries in which the consumers' topics have the replay's names.

    A deleted topic and a later one of the same name are two lives with two names in the replay. A
    history has only the topic's name. The ids of timers assign a delivery to a life. Epoch and
    lease assign acks and nacks to a delivery. Lines without these are left out.
    """
    lives = fates.select("topic").distinct().where(F.col("topic").contains(LIFE))
    names = [row["topic"].partition(LIFE)[0] for row in lives.collect()]
    if not names:
        return lines, given
    mine = F.col("topic").isin(names)
    life = fates.where(name_of("topic").isin(names)).select("seq", F.col("topic").alias("life"))
    said = lines.where(mine & F.col("op").isin("deliver", *_SAID))
    lease = ("client", "topic", "group", "epoch", "lease_id")
    handed = (
        said.where("op = 'deliver' AND lease_id IS NOT NULL")
        .select(*lease, id_parts(F.col("ids")[0])[1].alias("seq"))
        .join(life, "seq")
        .groupBy(*lease)
        .agg(F.min("life").alias("life"))
    )
    known = said.join(handed, [*lease]).withColumn("topic", F.col("life"))
    others = lines.where(~mine | ~F.col("op").isin("deliver", *_SAID))
    lived = given.where(mine).join(life, "seq", "left")
    lived = lived.withColumn("topic", F.coalesce("life", "topic"))
    return (
        others.unionByName(known.select(*lines.columns)),
        given.where(~mine).unionByName(lived.select(*given.columns)),
    )


def with_group_lives(
    lines: DataFrame, given: DataFrame, groups: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Return lines and deliveries in which the consumers' groups have the replay's names.

    A group that was sought, or deleted and created again, has several lives, and one name in a
    history. A delivery names its life (`group_id`); acks and nacks are assigned by its lease. Lines
    without these are left out. A group with a delivery without `group_id` is left out altogether.
    `groups`: the replay's table.
    """
    named = F.broadcast(groups.where("sought").select(*_names()).distinct())
    names = [name_of("topic").eqNullSafe(F.col("name")), F.col("group") == F.col("group_name")]
    ours = names[0] & names[1]
    untold = lines.where("op = 'deliver' AND group_id IS NULL")
    untold = F.broadcast(untold.join(named, ours, "left_semi").select("topic", "group").distinct())
    lines, given = (each.join(untold, ["topic", "group"], "left_anti") for each in (lines, given))
    lives = F.broadcast(groups.select("group_id", F.col("group").alias("life")))
    said = lines.where(F.col("op").isin("deliver", *_SAID)).join(named, ours, "left_semi")
    others = lines.where(F.col("op").isin("deliver", *_SAID)).join(named, ours, "left_anti")
    lease = ("client", "topic", "group", "epoch", "lease_id")
    handed = (
        said.where("op = 'deliver' AND lease_id IS NOT NULL")
        .groupBy(*lease)
        .agg(F.min("group_id").alias("of"))
    )
    known = (
        said.join(handed, [*lease])
        .join(lives.withColumnRenamed("group_id", "of"), "of")
        .withColumn("group", F.col("life"))
    )
    parts = (others, lines.where(~F.col("op").isin("deliver", *_SAID)), known)
    first, second, third = (each.select(*lines.columns) for each in parts)
    lived = given.join(named, ours, "left_semi").join(lives, "group_id")
    lived = lived.withColumn("group", F.col("life")).select(*given.columns)
    rest = given.join(named, ours, "left_anti")
    return first.unionByName(second).unionByName(third), rest.unionByName(lived)


def name_of(topic: str) -> Column:
    """Return the plain name in a column of topics or groups with the replay's names."""
    return F.substring_index(topic, LIFE, 1)


def _names() -> tuple[Column, Column]:
    """Return the columns name and group_name: the plain names of a topic and a group."""
    return name_of("topic").alias("name"), name_of("group").alias("group_name")


def with_runs(rows: DataFrame, runs: DataFrame, how: str) -> DataFrame:
    """Return `rows`, which have a slot, joined with the runs of `count` messages that contain them.

    Rows and runs are joined by equal stretches of queue offsets first, and then by the exact
    bounds. `how`: Spark's kind of join.
    """
    names = {"queue_offset": "run_from", "topic": "run_topic", "group": "run_group"}
    runs = runs.withColumnsRenamed(names).withColumn("run_to", F.expr("run_from + count - 1"))
    first, last = (F.shiftright(name, _STRETCH_BITS) for name in ("run_from", "run_to"))
    runs = runs.drop("count").withColumn("stretch", F.explode(F.sequence(first, last)))
    inside = F.expr(
        f"topic = run_topic AND `group` = run_group"
        f" AND shiftright(queue_offset, {_STRETCH_BITS}) = stretch"
        " AND queue_offset BETWEEN run_from AND run_to"
    )
    joined = rows.join(runs, inside, how)
    return joined.drop("run_topic", "run_group", "stretch", "run_from", "run_to")


def consumed(lines: DataFrame, groups: DataFrame) -> DataFrame:
    """Return the groups that clients read to the run's end: topic, group, start_offset.

    Groups that were deleted are left out. A group appears with its last life. `start_offset` is 0
    if the log does not know the group. A client that redrives reads the group `dead-letters`.
    `groups`: the replay's table.
    """
    read = lines.where("op IN ('open', 'deliver')").select("topic", "group")
    redriven = lines.where("op = 'redrive'").select("topic", F.lit(LETTERS).alias("group"))
    there = groups.select("topic", "group", "start_offset", "over", *_names())
    return (
        read.union(redriven)
        .select(*_names())
        .distinct()
        .join(there, ["name", "group_name"], "left")
        .where("NOT coalesce(over, false)")
        .select(
            F.coalesce("topic", "name").alias("topic"),
            F.coalesce("group", "group_name").alias("group"),
            F.coalesce("start_offset", F.lit(0)).alias("start_offset"),
        )
    )


def id_parts(name: str | Column) -> tuple[Column, Column]:
    """Return (effective due, seq) of a timer id, as timer/model/timer_id.py lays it out.

    48 bits due, 48 bits seq, 24 bits check, in 24 digits of base 32: ten digits are 50 bits.
    """
    high, low = (F.conv(F.substring(name, at, 10), 32, 10).cast("bigint") for at in (1, 11))
    seq = F.shiftleft(high.bitwiseAND(3), 46).bitwiseOR(F.shiftright(low, 4))
    return F.shiftright(high, 2), seq
