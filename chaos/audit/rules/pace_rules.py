"""Rates of delivery and priorities, from the leaders' times of delivery (`handed_out_ms`).

    rate_exceeded  more messages of a topic or a group were delivered in some span than its rate
                   allows: rate * (T + error) + max(rate / 10, 1) in T seconds of one epoch
    starved        a message of a `shared` group was passed by more deliveries than priorities allow

`error` is the difference of clocks that the run states: a clock may be set during a span. The first
POLICY_MS after a change of a rate are not judged.

**Starvation.** A message behind k earlier ready ones is among the next (k // 8 + 1) * 72 deliveries
of its group (docs/adr/0087-ordering-keys-and-priorities.md). k is at most the distance of its queue
offset from the lowest one that was delivered later than it fired. One round of 72 more is allowed,
because the leader looks at a message some time after it fired. First attempts are judged, by the
deliveries of their epoch that a history has.
"""

from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import Tables, name_of
from chaos.audit.rules.handout_rules import POLICY_MS
from timer.entries.payloads import SHARED

ROUND: Final = 72
OLDEST: Final = 8
"""Messages of a round that are the oldest ones."""
_MS_BITS: Final = 44
"""Of a place in the order of deliveries: epoch, then time."""
_GROUP: Final = ("topic", "group")


def exceeded(lines: DataFrame, rates: DataFrame, error_ms: int) -> DataFrame:
    """Return the spans with too many deliveries: whose, topic, group, epoch, rate, count, at_ms.

    `count`: the messages above the rate in the worst span of an epoch, which ends at `at_ms`.
    """
    until = F.lead("from_ms", 1, 1 << 62).over(Window.partitionBy("topic").orderBy("from_ms"))
    spans = F.broadcast(rates.withColumn("until_ms", until))
    since_ms = F.col("from_ms") + POLICY_MS
    given = lines.where("op = 'deliver' AND handed_out_ms IS NOT NULL").select(
        *("topic", "epoch", F.col("handed_out_ms").alias("at_ms")),
        name_of("group").alias("group"), F.size("offsets").alias("n"),
    )  # fmt: skip
    given = given.join(spans, "topic").where(
        F.col("at_ms").between(since_ms, F.col("until_ms") - 1)
    )
    found = []
    for whose in ("topic", "group"):
        group = F.col("group") if whose == "group" else F.lit("")
        rows = given.withColumns({"group": group, "rate": F.col(f"{whose}_rate")}).where("rate > 0")
        place = ("topic", "group", "epoch", "from_ms", "rate")
        rows = rows.groupBy(*place, "at_ms").agg(F.sum("n").alias("n"))
        order = Window.partitionBy(*place).orderBy("at_ms")
        above = F.sum("n").over(order) - F.col("rate") * F.col("at_ms") / 1000
        rows = rows.withColumn("above", above)
        count = F.col("above") - F.min(F.col("above") - F.col("n")).over(order)
        allowed = F.greatest(F.col("rate") / 10, F.lit(1)) + F.col("rate") * (error_ms + 1) / 1000
        rows = rows.withColumn("count", count).where(F.col("count") > allowed)
        worst = F.max(F.struct("count", "at_ms")).alias("worst")
        rows = (
            rows.groupBy(*place).agg(worst).select(F.lit(whose).alias("whose"), *place, "worst.*")
        )
        found.append(rows.drop("from_ms"))
    return found[0].unionByName(found[1])


def starved(lines: DataFrame, groups: DataFrame) -> DataFrame:
    """Return the messages that too many deliveries passed: topic, group, offsets, passed, allowed.

    `groups`: the replay's table.
    """
    topics = lines.where("op = 'schedule' AND priorities IS NOT NULL").select("topic").distinct()
    topics = topics.withColumnRenamed("topic", "name")
    shared = groups.where(f"type = '{SHARED}'").select(*_GROUP, name_of("topic").alias("name"))
    shared = F.broadcast(shared.join(topics, "name").drop("name"))
    each = F.inline(F.arrays_zip("offsets", "attempts", "fired_at_ms"))
    given = lines.where("op = 'deliver' AND handed_out_ms IS NOT NULL").join(shared, [*_GROUP])
    given = given.select(*_GROUP, "epoch", "handed_out_ms", each)
    schema = "topic STRING, `group` STRING, offsets BIGINT, passed BIGINT, allowed BIGINT"
    return given.groupBy(*_GROUP).applyInArrow(_passed, schema)


def _passed(given: pa.Table) -> pa.Table:
    names = ("epoch", "handed_out_ms", "fired_at_ms", "offsets", "attempts")
    epoch, at_ms, fired_ms, offset, attempt = (given[name].to_numpy() for name in names)
    epoch = epoch << _MS_BITS
    order = np.argsort(epoch | at_ms, kind="stable")
    place = (epoch | at_ms)[order]
    begin = np.searchsorted(place, epoch | fired_ms, "right")
    passed = np.searchsorted(place, epoch | at_ms, "left") - begin
    lowest = np.minimum.accumulate(offset[order][::-1])[::-1]
    earlier = np.maximum(offset - lowest[np.minimum(begin, len(offset) - 1)], 0)
    allowed = (earlier // OLDEST + 2) * ROUND
    found = given.select(["topic", "group", "offsets"]).append_column("passed", pa.array(passed))
    found = found.append_column("allowed", pa.array(allowed))
    return found.filter(pa.array((attempt == 1) & (passed > allowed)))


def judged(lines: DataFrame, story: Tables, error_ms: int | None) -> Tables:
    """Return violation -> offenders. `error_ms`: greatest difference of clocks; None: unknown."""
    found = {}
    if error_ms is not None and story["rates"].head(1):
        found["rate_exceeded"] = exceeded(lines, story["rates"], error_ms)
    if lines.where("op = 'schedule' AND priorities IS NOT NULL").head(1):
        found["starved"] = starved(lines, story["groups"])
    return found
