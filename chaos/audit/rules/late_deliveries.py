"""Late deliveries to a free consumer, without an excuse.

    delivered_late  P3  a message waited for a consumer that held no message, for longer than
                        LATE_MS plus a millisecond for each message that came to the group (RATE)

A wait begins when the message fired, was moved from another topic, or came back and its delay was
over. It begins anew with each event that explains it:

- its consumer opened the group
- the group was sought, redriven or deleted
- a fault or a change of leader ended, and its excuse was over (late_firing.AFTER_MS)

So a message that waits long after an excuse is late, too.

A consumer is free while each message that it received is acked, nacked or over. In an ordered
group, or one with `max_in_flight`, all consumers of the group must be free. The time of a receipt
is on a client's clock: the run must state the greatest difference between clocks.

A long wait is not judged if an excuse covers the receipt, if the consumer was not free for that
long, or if the topic ever had a rate of delivery. Such waits are counted. With too many of them no
verdict is OK.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import LETTERS, SLOT, Tables, messages, name_of
from chaos.audit.rules.late_firing import Stretch
from chaos.audit.rules.order_rules import ordered

LATE_MS: Final = 10_000
"""Far more than a batch, a busy leader and a waiting thread take on a slow machine."""
RATE: Final = 1
"""The least rate at which a group with a backlog receives messages, per millisecond."""
HELD_MS: Final = 60_000
"""The longest time for which a message that was neither acked nor nacked counts as held."""

_GROUP: Final = ("topic", "group")
_RECEIPT: Final = (*SLOT, "attempt", "client", "fired_at_ms", "received_ms")


def waits(lines: DataFrame, story: Tables, excused: Sequence[Stretch], bound_ms: int) -> DataFrame:
    """Return the receipts more than `bound_ms` after the firing: _RECEIPT, since_ms.

    An attempt appears once, with its first receipt. `since_ms`: the last event that explains the
    wait. It is at or after the receipt if an excuse covers the receipt.
    """
    heads = ("client", *_GROUP, "received_ms")
    long = F.col("received_ms") - F.array_min("fired_at_ms") > bound_ms
    lists = {"queue_offset": "offsets", "attempt": "attempts", "fired_at_ms": "fired_at_ms"}
    rows = messages(lines.where(long), heads, **lists)
    first = F.min(F.struct("received_ms", "client", "fired_at_ms")).alias("first")
    rows = rows.groupBy(*SLOT, "attempt").agg(first).select(*SLOT, "attempt", "first.*")
    rows = rows.where(F.col("received_ms") - F.col("fired_at_ms") > bound_ms).cache()
    starts = [
        rows.withColumn("at_ms", F.col("fired_at_ms")),
        _back(rows, story["returns"]),
        rows.join(
            story["carried"].select("topic", "queue_offset", F.col("ended_at_ms").alias("at_ms")),
            ["topic", "queue_offset"],
        ),
        _opened(rows, lines),
        rows.join(
            F.broadcast(lines.sparkSession.createDataFrame([*excused], "from_ms LONG, at_ms LONG")),
            F.col("from_ms") <= F.col("received_ms"),
        ),
    ]
    every = reduce(DataFrame.union, (each.select(*_RECEIPT, "at_ms") for each in starts))
    return every.groupBy(*_RECEIPT).agg(F.max("at_ms").alias("since_ms"))


def _back(rows: DataFrame, returns: DataFrame) -> DataFrame:
    """Return the times when earlier attempts had come back and could be delivered again: at_ms."""
    again = F.greatest("returned_at_ms", "not_before_ms").alias("at_ms")
    before = returns.select(*SLOT, F.col("attempts").alias("before"), again)
    return rows.join(before, [*SLOT]).where("before < attempt")


def _opened(rows: DataFrame, lines: DataFrame) -> DataFrame:
    """Return the times when the consumer opened the group, or a client changed it: at_ms."""
    group = F.when(F.col("op") == "redrive", F.lit(LETTERS)).otherwise(name_of("group"))
    events = lines.where("op IN ('open', 'seek', 'delete_group', 'redrive')").select(
        F.when(F.col("op") == "open", F.col("client")).alias("by"),
        name_of("topic").alias("of"), group.alias("in"),
        F.coalesce("end_ms", "start_ms").alias("at_ms"),
    )  # fmt: skip
    mine = (name_of("topic") == F.col("of")) & (name_of("group") == F.col("in"))
    before = F.col("at_ms") <= F.col("received_ms")
    theirs = F.coalesce("by", "client") == F.col("client")
    return rows.join(F.broadcast(events), mine & before & theirs)


def free_hands(waiting: DataFrame, lines: DataFrame, story: Tables) -> DataFrame:
    """Return the waits with two columns: free_ms, came.

    `free_ms`: the part of the wait in which the consumer was free; in an ordered or limited group,
    in which all its consumers were free (`together`). `came`: the messages that came to the group
    during the wait. `waiting`: from `waits`.
    """
    together = ordered(story).select(*_GROUP)
    together = together.union(story["settings"].where("max_in_flight > 0").select(*_GROUP))
    together = together.distinct().withColumn("together", F.lit(True))  # noqa: FBT003
    groups = F.broadcast(waiting.select(*_GROUP).distinct().join(together, [*_GROUP], "left"))
    columns = (*_RECEIPT, "at_ms", "over_ms", "n")
    probes = [
        waiting.withColumns({"at_ms": F.col(at), "over_ms": F.col(at), "n": F.lit(0)})
        for at in ("since_ms", "received_ms")
    ]
    nothing = {name: F.lit(None) for name in _RECEIPT if name not in ("client", *_GROUP)}
    held = _held(lines.join(groups, [*_GROUP])).withColumns(nothing | {"n": F.lit(1)})
    events = reduce(DataFrame.union, (each.select(*columns) for each in (*probes, held)))
    whose = F.when(F.col("together"), F.lit("")).otherwise(F.col("client"))
    events = events.join(groups, [*_GROUP]).withColumn("whose", whose)
    hands = Window.partitionBy(*_GROUP, "whose").orderBy("at_ms", "n")
    start = Window.unboundedPreceding
    busy_ms = F.coalesce(F.max("over_ms").over(hands.rowsBetween(start, -1)), "at_ms")
    gap_ms = F.greatest(F.col("at_ms") - busy_ms, F.lit(0))
    events = events.withColumn("gap_ms", gap_ms)
    free_ms = F.sum("gap_ms").over(hands.rowsBetween(start, Window.currentRow))
    came = F.sum("n").over(Window.partitionBy(*_GROUP).orderBy("at_ms"))
    told = events.withColumns({"free_ms": free_ms, "came": came}).where("n = 0")
    spans = [(F.max(name) - F.min(name)).alias(name) for name in ("free_ms", "came")]
    return told.groupBy(*_RECEIPT).agg(*spans)


def _held(lines: DataFrame) -> DataFrame:
    """Return one row per held message: client, topic, group, together, offset, at_ms, over_ms.

    It is held in [at_ms, over_ms). In a group with `together`, a nacked message is held until its
    delay is over. `lines`: with a column `together`.
    """
    whose = ("client", *_GROUP, "together", "offset")
    heads = ("client", *_GROUP, "together")
    got = lines.where("op = 'deliver'").select(
        *heads, F.col("received_ms").alias("at_ms"), F.explode("offsets").alias("offset")
    )
    delay_ms = F.when(
        F.col("together") & (F.col("op") == "nack"), F.coalesce("delay_ms", F.lit(LATE_MS))
    )
    done = lines.where("op IN ('ack', 'nack')").select(
        *heads[:3], (F.col("end_ms") + F.coalesce(delay_ms, F.lit(0))).alias("done_ms"),
        F.explode("offsets").alias("offset"),
    )  # fmt: skip
    both = got.join(done, ["client", *_GROUP, "offset"], "left")
    later_ms = F.when(F.col("done_ms") >= F.col("at_ms"), F.col("done_ms"))
    over_ms = F.coalesce(F.min(later_ms), F.col("at_ms") + HELD_MS).alias("over_ms")
    return both.groupBy(*whose, "at_ms").agg(over_ms)


def judged(
    lines: DataFrame, story: Tables, excused: Sequence[Stretch], error_ms: int | None
) -> tuple[Tables, dict[str, int]]:
    """Return violation -> offenders; and the numbers of long waits, and of those not judged.

    `excused`: from `late_firing.excuses`. `error_ms`: the greatest difference between clocks; None:
    unknown, and nothing is judged.
    """
    if error_ms is None:
        return {}, {"long": 0, "unjudged": 0}
    bound_ms = LATE_MS + error_ms
    found = waits(lines, story, excused, bound_ms).cache()
    long, covered = found.count(), found.where("since_ms >= received_ms").count()
    waiting = found.where(F.col("received_ms") - F.col("since_ms") > bound_ms)
    left = waiting.count()
    if not left:
        return {}, {"long": long, "unjudged": covered}
    hands = free_hands(waiting, lines, story)
    late = hands.where(F.col("free_ms") > bound_ms + F.col("came") / RATE).cache()
    late = late.join(F.broadcast(story["rates"].select("topic").distinct()), "topic", "left_anti")
    late = late.withColumn("late_ms", F.col("received_ms") - F.col("fired_at_ms"))
    return {"delivered_late": late}, {"long": long, "unjudged": covered + left - late.count()}
