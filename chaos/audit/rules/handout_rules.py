"""Deliveries: violations by leaders and order, and acks without a request.

docs/audit.md lists these violations. `acks_unasked` is a figure: messages that are acked in the log
without a request in any history.

The leader recorded the time of a delivery (`handed_out_ms`). An epoch begins with the first entry
after its EPOCH entry. The two times are compared only if the run states the greatest difference
between clocks, and only beyond it. A client that died may not have recorded its last acks. So
`acks_unasked` is no violation: the suite knows whether clients died, and judges it.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import SLOT, Tables, id_parts, messages, name_of
from chaos.audit.rules.order_rules import WHOSE, disordered, ordered
from chaos.audit.rules.verdict import Clocks

ACKS_MAX: Final = 5_000_000
"""With more acks in the log, `acks_unasked` is not counted."""
POLICY_MS: Final = 5_000
"""Time for which an old policy may still be applied after its change: by a leader that was deposed
and has not learned it yet."""


def deposed_handed_out(
    lines: DataFrame, epochs: Sequence[Row], clock_error_ms: int | None
) -> DataFrame | None:
    """Return the deliveries by deposed leaders: WHOSE, lease_id, over_ms.

    None: nothing can be judged, because no epoch was over or `clock_error_ms` is unknown. `epochs`:
    from `node_logs.epochs`, in order.
    """
    over, next_ms = [], None
    for row in reversed(epochs):
        if next_ms is not None:
            over.append((row["epoch"], next_ms))
        next_ms = next_ms if row["began_ms"] is None else row["began_ms"]
    if clock_error_ms is None or not over:
        return None
    table = lines.sparkSession.createDataFrame(over, "epoch BIGINT, over_ms BIGINT")
    given = lines.where("op = 'deliver'").select(*WHOSE, "lease_id")
    late = F.col("handed_out_ms") > F.col("over_ms") + clock_error_ms
    return given.join(F.broadcast(table), "epoch").where(late).select(*WHOSE, "lease_id", "over_ms")


def outlived(lines: DataFrame, ttls: DataFrame) -> DataFrame:
    """Return the messages that were delivered after they had expired: WHOSE, offset, due_ms.

    Such a message was over by each time to live that its topic had at the delivery or within
    POLICY_MS before. A leader also applies policies that it has appended and then fails to commit.
    `ttls`: the replay's table.
    """
    until = F.lead("from_ms", 1, 1 << 62).over(Window.partitionBy("of").orderBy("from_ms"))
    spans = ttls.withColumnRenamed("topic", "of").withColumn("until_ms", until)
    topics = F.broadcast(ttls.select("topic").distinct())
    timed = lines.where("handed_out_ms IS NOT NULL").join(topics, "topic", "left_semi")
    given = messages(timed, WHOSE, offset="offsets", id="ids")
    given = given.withColumn("due_ms", id_parts("id")[0]).drop("id")
    lets = F.expr(
        f"topic = of AND from_ms <= handed_out_ms AND until_ms > handed_out_ms - {POLICY_MS}"
        " AND (ttl_ms = 0 OR due_ms + ttl_ms >= handed_out_ms)"
    )
    return given.join(F.broadcast(spans), lets, "left_anti")


def unasked_acks(lines: DataFrame, story: Tables) -> int | None:
    """Return the number of messages that are acked in the log without a request in any history.

    None: the log has more than ACKS_MAX acks. Only groups that a history opened count. Moved
    messages are left out: the log itself acks them. So are topics and groups with several lives:
    histories need not name the life.
    """
    total = story["acks"].agg(F.sum("count")).first()
    assert total is not None
    if (total[0] or 0) > ACKS_MAX:
        return None
    span = F.sequence("queue_offset", F.col("queue_offset") + F.col("count") - 1)
    acked = story["acks"].select("topic", "group", F.explode(span).alias("queue_offset"))
    asked = lines.where("op = 'ack' AND outcome != 'fail'").select(
        "topic", "group", F.explode("offsets").alias("queue_offset")
    )
    moved = story["carried"].select("from_topic", "from_group", "from_offset").toDF(*SLOT)
    read = lines.where("op = 'open'").select("topic", "group").distinct()
    topics = story["deletions"].select(name_of("topic").alias("topic"))
    groups = (
        story["groups"]
        .where("sought")
        .select(*(name_of(name).alias(name) for name in ("topic", "group")))
    )
    once = read.join(topics, "topic", "left_anti").join(groups, ["topic", "group"], "left_anti")
    left = acked.join(F.broadcast(once), ["topic", "group"], "left_semi")
    return left.join(asked, [*SLOT], "left_anti").join(moved, [*SLOT], "left_anti").count()


def judged(lines: DataFrame, epochs: Sequence[Row], story: Tables, clocks: Clocks) -> Tables:
    """Return violation -> offenders.

    `lines`: with the replay's names of topics and groups. `story`: the replay's tables.
    """
    deposed = deposed_handed_out(lines, epochs, clocks.error_ms)
    found = {} if deposed is None else {"deposed_handed_out": deposed}
    if story["ttls"].head(1):
        found["outlived"] = outlived(lines, story["ttls"])
    if ordered(story).head(1):
        found["disordered"] = disordered(lines, story, clocks.clients_error_ms)
    return found
