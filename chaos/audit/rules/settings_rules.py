"""Settings of groups, policies, payloads and epochs: answers and effects that contradict the log.

docs/audit.md lists these violations.

A message is certainly held from its receipt until its consumer requests its ack. This holds only if
the ack counted under the same lease, the lease was not over, and no later epoch had begun. Other
deliveries are not counted: the message may have been returned without the consumer's knowledge.
Times of two clocks are compared only if the run states their greatest difference.
"""

import itertools
import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import SLOT, answers, messages, name_of
from chaos.oracle.group_story import ENDED

ALIVE_MS: Final = 1_000
"""A delivery this long after a lease's end, on the same stream, proves that the stream went on."""


def untrue_policies(lines: DataFrame, policies: DataFrame) -> DataFrame:
    """Return confirmed changes of policies that no entry of their scope has: topic, said."""
    told = lines.where("op = 'policy' AND outcome = 'ok' AND said IS NOT NULL")
    logged = policies.select(name_of("topic").alias("topic"), "fields")
    return unlogged(told.select("topic", "said"), logged)


def unlogged(told: DataFrame, logged: DataFrame) -> DataFrame:
    """Return the rows of `told` whose last column, fields as JSON, no entry has.

    `logged`: with the same columns. An entry may have more fields.
    """
    known: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for *place, fields in logged.collect():
        known.setdefault(tuple(place), []).append(json.loads(fields))
    wrong = [
        (*place, said)
        for *place, said in told.distinct().collect()
        if not any(json.loads(said or "{}").items() <= e.items() for e in known.get((*place,), ()))
    ]
    return told.sparkSession.createDataFrame(wrong, told.schema)


def untrue_groups(lines: DataFrame, settings: DataFrame) -> DataFrame:
    """Return settings that clients received and the group never had: topic, group, field, told.

    Groups that the log does not know are left out.
    """
    names = [name_of(name).alias(name) for name in ("topic", "group")]
    fields = {"group_lease_ms": "lease_ms", "max_attempts": "max_attempts"}
    found = []
    for field, logged in (fields | {"max_in_flight": "max_in_flight"}).items():
        told = lines.where(f"op = 'open' AND {field} IS NOT NULL")
        told = told.select(*names, F.lit(field).alias("field"), F.col(field).alias("told"))
        had = F.broadcast(settings.select(*names, F.col(logged).alias("told")).distinct())
        known = told.join(had.select("topic", "group").distinct(), ["topic", "group"], "left_semi")
        found.append(known.join(had, ["topic", "group", "told"], "left_anti").distinct())
    return found[0].unionByName(found[1]).unionByName(found[2])


def cut_leases(
    lines: DataFrame, returns: DataFrame, settings: DataFrame, clock_error_ms: int
) -> DataFrame:
    """Return the leases that ended too early: slot, client, handed_out_ms, returned_at_ms, …"""
    held = _held(lines, settings)
    ended = returns.where(F.col("why") == ENDED).select(*SLOT, "attempts", "returned_at_ms")
    early = held.join(ended, [*SLOT]).where(
        f"attempt = attempts AND returned_at_ms + {2 * clock_error_ms} < handed_out_ms + lease_ms"
    )
    mine = "by = client AND of = topic AND of_group = `group`"
    whose = [F.col(name).alias(to) for name, to in (("client", "by"), ("topic", "of"))]
    whose.append(F.col("group").alias("of_group"))
    opened = lines.where("op = 'open'").select(*whose, F.col("start_ms").alias("opened_ms"))
    anew = F.expr(f"{mine} AND opened_ms >= handed_out_ms - {clock_error_ms}")
    early = early.join(opened, anew, "left_anti")
    going = lines.where("op = 'deliver' AND stream IS NOT NULL").select(
        *whose, F.col("handed_out_ms").alias("later_ms"),
        F.col("epoch").alias("later_epoch"), F.col("stream").alias("same"),
    )  # fmt: skip
    later = f"later_epoch = epoch AND same = stream AND later_ms > returned_at_ms + {ALIVE_MS}"
    return early.join(going, F.expr(f"{mine} AND {later}"), "left_semi").drop("attempts")


def _held(lines: DataFrame, settings: DataFrame) -> DataFrame:
    """Return the deliveries with the length of their lease: slot, client, attempt, lease_ms, …

    `lease_ms`: the one that the consumer requested, or else the shortest that the group ever had.
    """
    shortest = settings.groupBy("topic", "group").agg(F.min("lease_ms").alias("least_ms"))
    own = (
        lines.where("op = 'open'")
        .groupBy("client", "topic", "group")
        .agg(F.min("lease_ms").alias("own_ms"))
    )
    heads = ("client", "topic", "group", "epoch", "lease_id", "handed_out_ms", "received_ms")
    timed = lines.where("handed_out_ms IS NOT NULL")
    rows = messages(timed, (*heads, "stream"), queue_offset="offsets", attempt="attempts")
    both = rows.join(F.broadcast(shortest), ["topic", "group"])
    both = both.join(F.broadcast(own), ["client", "topic", "group"], "left")
    return both.withColumn("lease_ms", F.coalesce("own_ms", "least_ms")).drop("own_ms", "least_ms")


def over_in_flight(
    lines: DataFrame, settings: DataFrame, epochs: Sequence[Row], clock_error_ms: int
) -> DataFrame:
    """Return the groups that held too many messages at once: topic, group, most, held, at_ms."""
    most = settings.groupBy("topic", "group").agg(
        F.max("max_in_flight").alias("most"), F.min("max_in_flight").alias("least")
    )
    limited = F.broadcast(most.where("least > 0").drop("least"))
    whose = ["client", "topic", "group", "epoch", "lease_id"]
    acked = answers(lines, ["ack"], ["ACKED"], "client", "epoch", "lease_id", "start_ms")
    acked = acked.where("lease_id IS NOT NULL")
    ends = {int(a["epoch"]): int(b["since_ms"]) for a, b in itertools.pairwise(epochs)}
    over = F.create_map(*(F.lit(n) for pair in ends.items() for n in pair)) if ends else None
    over_ms = F.lit(None).cast("bigint") if over is None else over[F.col("epoch")]
    lease_over_ms = F.col("handed_out_ms") + F.col("lease_ms") - 2 * clock_error_ms
    until = F.least("start_ms", lease_over_ms, F.coalesce(over_ms, F.col("start_ms")))
    held = _held(lines, settings).where("lease_id IS NOT NULL")
    spans = held.join(acked, [*whose, "queue_offset"]).join(limited, ["topic", "group"])
    spans = spans.withColumn("until_ms", until).where("until_ms > received_ms")
    where = ["topic", "group", "most"]
    steps = spans.select(*where, F.col("received_ms").alias("at_ms"), F.lit(1).alias("step"))
    steps = steps.unionByName(
        spans.select(*where, F.col("until_ms").alias("at_ms"), F.lit(-1).alias("step"))
    )
    order = Window.partitionBy("topic", "group").orderBy("at_ms", "step")
    rows = steps.withColumn("held", F.sum("step").over(order)).where("held > most")
    return rows.groupBy(*where).agg(F.max("held").alias("held"), F.min("at_ms").alias("at_ms"))


def untrue_payloads(lines: DataFrame, payloads: DataFrame) -> DataFrame:
    """Return the timers whose payload differs from the request: mark, topic, asked, logged.

    `asked`, `logged`: the CRC-32 of the payload by the history and by the log.
    """
    asked = lines.where("op = 'schedule' AND payload_crcs IS NOT NULL").select(
        "topic", F.inline(F.arrays_zip("marks", "payload_crcs"))
    )
    asked = asked.withColumnsRenamed({"marks": "mark", "payload_crcs": "asked"})
    return asked.join(payloads, "mark").where("asked != logged")


def untrue_epochs(leaders: Sequence[Row], replicas: Collection[str]) -> list[dict[str, Any]]:
    """Return the EPOCH entries that contradict the rules: index, epoch, why.

    `leaders`: the replay's rows, in order. `replicas`: the replicas of the folder's nodes; empty:
    not all are known.
    """
    found, before = [], frozenset[str]()
    for at, row in enumerate(leaders):
        voters, why = frozenset(row["voters"]), ""
        if row["said_epoch"] != row["epoch"]:
            why = f"it names epoch {row['said_epoch']}"
        elif row["leader"] not in voters | before:
            why = f"its leader {row['leader']} is no voter"
        elif before and (len(voters - before) > 1 or len(before - voters) > 1):
            why = "more than one voter came or went"
        elif at == len(leaders) - 1 and replicas and not voters <= {*replicas}:
            why = f"voters {', '.join(sorted(voters - {*replicas}))} are none of the nodes"
        if why:
            found.append({"index": row["epoch_index"], "epoch": row["epoch"], "why": why})
        before = voters
    return found
