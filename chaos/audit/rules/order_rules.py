"""Ordered groups: messages that were delivered while the message before was unfinished.

A message may be delivered if the message before it is finished, or is held by the same consumer. In
an `exclusive` or `failover` group, the message before is the one at the previous offset. In a
`key_shared` group it is the previous one with the same ordering key, or key if it has none. A
message is finished if it was acked, expired or moved. Its holder is the consumer of its last
delivery, in the order of epochs and then of `handed_out_ms`, or of `received_ms` without that.
Lease ids are random and have no order.

No history has the time when the leader processed an ack. An ack is not older than its request. So a
message came too early if it was received before the ack of the message before was requested, by the
clients' clocks.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import SLOT, Tables, messages, or_nulls, with_runs
from timer.entries.payloads import KEY_SHARED, SHARED

WHOSE: Final = ("client", "topic", "group", "epoch", "handed_out_ms")
"""Columns that name an offending delivery."""
_KEY: Final = ("topic", "group", "key")


def ordered(story: Tables) -> DataFrame:
    """Return the groups that keep an order: topic, group, type."""
    return story["groups"].where(f"type != '{SHARED}'").select("topic", "group", "type")


def disordered(lines: DataFrame, story: Tables, clients_error_ms: int | None) -> DataFrame:
    """Return deliveries that came too early: WHOSE, lease_id, offset, mark, behind, holder.

    `behind` is the offset of the message before; `holder` is the consumer that held it, null if
    none. Keys come from the schedules in the histories. In a `key_shared` group a message without a
    known key is not judged. `clients_error_ms`: the greatest difference between the clients'
    clocks; None: unknown, so any requested ack may have come first.
    """
    given = _given(lines, ordered(story))
    queue = given.select(*_KEY, "offset").distinct()
    before = Window.partitionBy(*_KEY).orderBy("offset")
    pairs = queue.withColumn("behind", F.lag("offset").over(before)).where("behind IS NOT NULL")
    pairs = pairs.withColumn("queue_offset", F.col("behind"))
    pairs = pairs.join(_over(story), [*SLOT], "left_anti").join(_asked(lines), [*SLOT], "left")
    untold = with_runs(pairs.where("asked_ms IS NULL"), story["acks"], "left_anti")
    pairs = pairs.where("asked_ms IS NOT NULL").unionByName(untold.select(*pairs.columns))
    known_ms = F.lit(1 << 60 if clients_error_ms is None else clients_error_ms)
    undone = F.col("asked_ms").isNull() | (F.col("asked_ms") > F.col("received_ms") + known_ms)
    given = given.withColumn("given_ms", F.coalesce("handed_out_ms", "received_ms"))
    early = given.join(pairs.drop("queue_offset"), [*_KEY, "offset"]).where(undone)
    last = _holders(early, given)
    return (
        early.join(last, [*_KEY, "offset", "epoch", "lease_id"], "left")
        .where(~F.col("holder").eqNullSafe(F.col("client")))
        .select(*WHOSE, "lease_id", "offset", "mark", "behind", "holder")
    )


def _given(lines: DataFrame, groups: DataFrame) -> DataFrame:
    """Return the messages that ordered groups received: client, topic, group, offset, key, …

    `key` is empty except in `key_shared` groups.
    """
    heads = [*WHOSE, "received_ms", "lease_id", "type"]
    leased = lines.where("lease_id IS NOT NULL").join(F.broadcast(groups), ["topic", "group"])
    rows = messages(leased, heads, offset="offsets", mark="marks")
    whole = rows.where(f"type != '{KEY_SHARED}'").withColumn("key", F.lit(""))
    keys = lines.where("op = 'schedule' AND coalesce(keys, ordering_keys) IS NOT NULL")
    keys = keys.withColumn("n", F.size("marks"))
    keys = keys.select("marks", *(or_nulls(name, "string") for name in ("keys", "ordering_keys")))
    keys = keys.select(F.inline(F.arrays_zip("marks", "keys", "ordering_keys")))
    key = F.coalesce("ordering_keys", "keys").alias("key")
    keys = keys.select(F.col("marks").alias("mark"), key).where("key IS NOT NULL")
    return whole.unionByName(rows.where(f"type = '{KEY_SHARED}'").join(keys, "mark"))


def _over(story: Tables) -> DataFrame:
    """Return the slots of messages that expired or were moved."""
    moved = story["carried"].select("from_topic", "from_group", "from_offset").toDF(*SLOT)
    return story["expired"].select(*SLOT).unionByName(moved).distinct()


def _asked(lines: DataFrame) -> DataFrame:
    """Return the time of the first request to ack each message: slot, asked_ms."""
    rows = lines.where("op = 'ack' AND outcome != 'fail'").select(
        "topic", "group", "start_ms", F.explode("offsets").alias("queue_offset")
    )
    return rows.groupBy(*SLOT).agg(F.min("start_ms").alias("asked_ms"))


def _holders(early: DataFrame, given: DataFrame) -> DataFrame:
    """Return the last consumer of the message `behind` before each early lease: …, holder.

    Deliveries to other consumers in the same millisecond are ignored: they may be later.
    """

    def place(epoch: str, given_ms: str) -> Column:
        return F.struct(F.col(epoch), F.col(given_ms))

    held = given.select(
        *_KEY, F.col("offset").alias("behind"), F.col("client").alias("held_by"),
        F.col("epoch").alias("held_epoch"), F.col("given_ms").alias("held_ms"),
    )  # fmt: skip
    at, held_at = place("epoch", "given_ms"), place("held_epoch", "held_ms")
    own = (held_at == at) & (F.col("held_by") == F.col("client"))
    return (
        early.select(*_KEY, "offset", "behind", "epoch", "lease_id", "given_ms", "client")
        .join(held, [*_KEY, "behind"])
        .where((held_at < at) | own)
        .groupBy(*_KEY, "offset", "epoch", "lease_id")
        .agg(F.max_by("held_by", held_at).alias("holder"))
    )
