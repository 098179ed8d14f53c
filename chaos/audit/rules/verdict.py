"""Verdicts: each timer that any of the three witnesses knows gets one, by joins of their tables.

docs/audit.md lists the fine verdicts and the violations, each with its promise. `FINE` and
`VIOLATIONS` have their names, and `_violations` the conditions.

**Dead letters.** A dead letter is a message of its own, and so is the message that a redrive makes
of it. No client requests them: the log makes them, by the entry that ends the original message in
its group. They are judged as fired timers.

**Lives of a group.** A seek, or a deletion and new creation, begins another life of the group. The
life must receive all messages from its start on. P5 holds within a life. In an earlier life no
message needs to be delivered.

**Reschedules.** A reschedule ends one timer, by seq, and begins another. Each has a verdict. The
first must not be delivered. The second was requested by the reschedule, for the new time.

**Clocks.** P5 is judged by the log's order. The log counts an attempt when a lease ends (ENDED,
which is applied before the next delivery), or when a new epoch finds the message delivered. So each
(group, message, attempt) is delivered at most once. The replay knows the highest attempt before the
ack's entry. A delivery is after the ack if its attempt or its epoch is higher than the ack's.

The time of a receipt proves nothing: a message that was delivered before the ack may have been in
flight, or its client may have been suspended. Such receipts are counted (`arrived_after_ack`) and
not judged. Clocks are compared only if the run states their greatest difference (clock_error_ms),
and only beyond it. These comparisons find a cluster with a wrong clock, whose log looks right.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.change_answers import ChangeTables
from chaos.audit.rules.client_tables import SLOT, Tables, name_of, with_runs
from chaos.audit.rules.node_logs import no
from chaos.audit.rules.plain_timers import TICK_MS_MAX, VERDICTS

FINE: Final = (
    *("ok", "cancelled", "dropped", "replaced", "rescheduled", "rejected", "kept", "expired"),
    *("carried", "pending", "held", "refused", "unknown_not_fired", "unknown_fired_once"),
)
VIOLATIONS: Final = (
    *("diverged", "duplicate_fire", "phantom", "key_doubled", "cancelled_delivered"),
    *("replaced_delivered", "rescheduled_delivered", "early", "misdated", "acked_again"),
    *("expired_delivered", "expired_early", "ack_lost", "unmarked_redelivery", "cancel_untrue"),
    *("conflict_untrue", "reschedule_untrue", "lost"),
)
"""In order of precedence: a timer that breaks several promises counts for the first."""

GRACE_MS: Final = 5_000
"""A timer that was due this long before the run's end must have fired."""
HORIZON_MS: Final = 9 * 60_000
"""Time after a timer's end for which a cancel must not return NOT_FOUND: the product's ten minutes,
less one minute for the client's clock."""


class Clocks(NamedTuple):
    """The run's end, and the greatest differences between clocks."""

    until_ms: int
    """The time of the last look by the clients or the harness, Unix ms."""
    error_ms: int | None = None
    """Greatest difference between the clients' clocks and the cluster's; None: unknown."""
    clients_error_ms: int | None = None
    """Greatest difference among the clients' clocks; None: unknown."""


def unkept_acks(
    confirmed: DataFrame, log_acks: DataFrame, told_expired: DataFrame, expired: DataFrame
) -> DataFrame:
    """Return the slots with a confirmed ack that is not in the log; no row twice.

    Also the slots for which a consumer received EXPIRED although the message neither expired nor
    was acked. `confirmed` and `told_expired`: from `client_tables`. `log_acks` and `expired`: the
    replay's tables.
    """
    acks = with_runs(confirmed, log_acks, "left_anti").select(*SLOT)
    alive = with_runs(told_expired, log_acks, "left_anti").select(*SLOT)
    alive = alive.join(expired.select(*SLOT), [*SLOT], "left_anti")
    return acks.unionByName(alive).distinct()


def judged_deliveries(
    given: DataFrame, unkept: DataFrame, log_acks: DataFrame, over: DataFrame | None = None
) -> DataFrame:
    """Return one row per delivered timer, with counts of its deliveries and their faults.

    `reached` is the number of its groups that received it and are not over.

    Args:
        given: from `client_tables.deliveries`.
        unkept: from `unkept_acks`.
        log_acks: the replay's table.
        over: the groups that are over at the run's end (topic, group); None: none is.
    """
    again = (F.col("epoch") > F.col("ack_epoch")) | (F.col("attempt") > F.col("attempts"))
    same = ("topic_hash", "queue_offset", "due_ms", "mark", "fired_at_ms")
    acks = log_acks.select(*SLOT, "count", "ack_epoch", "attempts")
    before = F.lag("attempt").over(Window.partitionBy("seq", "group").orderBy("attempt"))
    given = given.withColumn("over", no())
    if over is not None:
        gone = F.broadcast(over.select("topic", "group", (~no()).alias("gone")))
        given = given.join(gone, ["topic", "group"], "left")
        given = given.withColumn("over", F.coalesce("gone", no()))
    rows = (
        with_runs(given, acks, "left")
        .join(unkept.withColumn("unkept", ~no()), [*SLOT], "left")
        .select(
            *("seq", "group", "attempt", "received_ms", "over", *same[1:]),
            F.xxhash64("topic").alias("topic_hash"),
            *(
                F.coalesce(flag.cast("bigint"), F.lit(0)).alias(name)
                for name, flag in (("again", again), ("unkept", F.col("unkept")))
            ),
        )
        .repartition("seq")  # one exchange serves the window and the grouping
        .withColumn("before", before)
    )
    ranges = [f(name).alias(f"given_{name}_{f.__name__}") for name in same for f in (F.min, F.max)]
    return rows.groupBy("seq").agg(
        F.count("*").alias("deliveries"),
        F.count_if(F.col("before").isNull()).alias("groups"),
        F.count_if(F.col("before").isNull() & ~F.col("over")).alias("reached"),
        F.count_if(F.col("before") == F.col("attempt")).alias("unmarked"),
        *(F.sum(name).alias(name) for name in ("again", "unkept")),
        F.min("received_ms").alias("received_ms"),
        *ranges,
    )


def expiry(expired: DataFrame, given: DataFrame, read: DataFrame) -> DataFrame:
    """Return one row per expired message: topic, queue_offset, expired_groups, late, over_ms.

    `expired_groups` is the number of `read` groups in which it expired without a delivery. `late`:
    a `read` group received it after it had expired there. `over_ms`: the latest due time with which
    it was allowed to expire; -1: none.

    Args:
        expired: slot, attempts, expire_epoch, expired_at_ms, ttl_ms.
        given: from `client_tables.deliveries`.
        read: the groups that clients read to the end: topic, group.
    """
    last = given.groupBy(*SLOT).agg(
        F.max("epoch").alias("epoch"), F.max("attempt").alias("attempt")
    )
    late = (F.col("epoch") > F.col("expire_epoch")) | (F.col("attempt") > F.col("attempts"))
    unseen = F.col("read") & F.col("epoch").isNull()
    over_ms = F.when(F.col("ttl_ms") > 0, F.col("expired_at_ms") - F.col("ttl_ms")).otherwise(-1)
    return (
        expired.join(
            F.broadcast(read.select("topic", "group", (~no()).alias("read"))),
            ["topic", "group"],
            "left",
        )
        .join(last, [*SLOT], "left")
        .groupBy("topic", "queue_offset")
        .agg(
            F.count_if(unseen).alias("expired_groups"),
            F.max(late & F.col("read")).alias("late"),
            F.min(over_ms).alias("over_ms"),
        )
    )


def carried_off(carried: DataFrame, given: DataFrame, read: DataFrame) -> DataFrame:
    """Return one row per message that was moved unseen: topic, queue_offset, carried_groups.

    `carried_groups` is the number of `read` groups from which it was moved to another topic without
    a delivery. `carried`: the replay's table. `given`: from `client_tables.deliveries`.
    """
    from_slot = ("from_topic", "from_group", "from_offset")
    gone = carried.select(
        *(F.col(name).alias(to) for name, to in zip(from_slot, SLOT, strict=True))
    )
    return (
        gone.join(F.broadcast(read.select("topic", "group")), ["topic", "group"], "left_semi")
        .join(given.select(*SLOT).distinct(), [*SLOT], "left_anti")
        .groupBy("topic", "queue_offset")
        .agg(F.count("*").alias("carried_groups"))
    )


def with_occurrences(log: DataFrame, story: Tables) -> DataFrame:
    """Return the fates with `planned_ms` of occurrences, and `revoked`: a SERIES entry ended it."""
    made = story["occurrences"].where("seq > 0 AND since_ms IS NOT NULL")
    by = story["series"].select(F.col("series_index").alias("end_index"), (~no()).alias("revoked"))
    log = log.join(F.broadcast(by), "end_index", "left")
    return log.join(made.select("seq", "planned_ms"), "seq", "left")


def verdicts(
    asks: DataFrame, log: DataFrame, given: DataFrame, changes: ChangeTables, groups: DataFrame,
    clocks: Clocks,
) -> DataFrame:  # fmt: skip
    """Return one row per timer that any witness knows, with its verdict and the evidence.

    Args:
        asks: from `client_tables.asked`.
        log: the fates and the moved messages, with `disagree`. Optional columns: those of `expiry`
            and `carried_off`; `gone` of timers that were dropped with their topic; `by_ms`, the
            time by which policies of the topic may make a timer due later than requested.
        given: from `judged_deliveries`.
        changes: from `change_answers.changes`.
        groups: topic, group, start_offset of the groups that clients read to the end.
        clocks: the run's end, and the differences between clocks.
    """
    nobody = {
        "expired_groups": F.lit(0), "late": no(), "over_ms": F.lit(None).cast("bigint"),
        "gone": no(), "by_ms": F.lit(0), "carried_groups": F.lit(0),
        "from_topic": F.lit(None).cast("string"), "revoked": no(),
        "planned_ms": F.lit(None).cast("bigint"),
    }  # fmt: skip
    log = log.withColumns({n: none for n, none in nobody.items() if n not in log.columns})
    starts = groups.groupBy("topic").agg(F.collect_list("start_offset").alias("starts"))
    known = (
        _asked_in_log(asks, log.withColumnRenamed("topic", "log_topic"), changes)
        .join(given, "seq", "full")
        .join(changes.tried, "seq", "left")
        .withColumn("topic", F.coalesce("log_topic", "asked_topic"))
        .join(F.broadcast(starts), "topic", "left")
        .withColumn("mark", F.coalesce("mark", "given_mark_min"))
        .withColumn("expected_groups", F.expr("size(filter(starts, s -> s <= queue_offset))"))
    )
    breaks = _violations(clocks)
    assert tuple(breaks) == VIOLATIONS
    chain = reduce(
        lambda chain, name: chain.when(breaks[name], name),
        VIOLATIONS[1:],
        F.when(breaks[VIOLATIONS[0]], VIOLATIONS[0]),
    )
    fine = """
        CASE WHEN end IS NULL OR (end IN ('rejected', 'kept') AND outcome != 'ok')
                THEN if(outcome = 'fail', 'refused', 'unknown_not_fired')
            WHEN end = 'fired' AND expired_groups > 0 THEN 'expired'
            WHEN end IN ('pending', 'held') AND outcome = 'unknown' THEN 'unknown_not_fired'
            WHEN end != 'fired' THEN end
            WHEN outcome = 'unknown' THEN 'unknown_fired_once'
            WHEN from_topic IS NOT NULL THEN 'carried'
            ELSE 'ok' END"""
    chain = chain.otherwise(F.expr(fine))
    return known.withColumn("verdict", chain).select(*VERDICTS.names)


def _asked_in_log(asks: DataFrame, log: DataFrame, changes: ChangeTables) -> DataFrame:
    """Return the requests joined with the log: by mark, or by seq for a reschedule.

    The request for a timer that a reschedule made is the reschedule: its outcome and its due time.
    Moved messages and occurrences of series have no request; their outcome is `ok`. The requested
    time of an occurrence is the planned one.
    """
    carried = log.where("from_topic IS NOT NULL").withColumns(
        {"outcome": F.lit("ok"), "copies": F.lit(1).cast("bigint")}
    )
    log = log.where("from_topic IS NULL")
    flags = changes.flags.drop("key", "moved_outcome", "moved_due_ms")
    planned = log.where("planned_ms IS NOT NULL").withColumns(
        {"outcome": F.lit("ok"), "copies": F.lit(1), "asked_due_ms": F.col("planned_ms")}
    )
    planned = planned.join(flags, "seq", "left")
    log = log.where("planned_ms IS NULL")
    copies = F.count("*").over(Window.partitionBy("mark"))
    asked = asks.withColumnRenamed("topic", "asked_topic")
    first = (
        log.where("old_due_ms IS NULL")
        .withColumn("copies", copies)
        .join(asked, "mark", "full")
        .join(flags, "seq", "left")
    )
    # An answer that contradicts the log is a violation of the old timer.
    answered = "move_fired + move_already + move_dropped > 0 OR move_missing_ms IS NOT NULL"
    unsure = changes.tried.where(f"move_unknown > 0 OR {answered}").select(
        F.col("seq").alias("other_seq"),
        F.when(F.col("move_unknown") > 0, "unknown").otherwise("ok").alias("tried_outcome"),
    )
    moved = (
        log.where("old_due_ms IS NOT NULL")
        .withColumn("copies", F.lit(1).cast("bigint"))
        .join(changes.moves, "seq", "full")
        .join(changes.flags, "seq", "left")
        .join(unsure, "other_seq", "left")
        .withColumns(
            {
                "outcome": F.coalesce("outcome", "tried_outcome", "moved_outcome"),
                "asked_due_ms": F.coalesce("asked_due_ms", "moved_due_ms"),
            }
        )
        .drop("tried_outcome", "moved_outcome", "moved_due_ms")
    )
    parts = (first, moved, planned, carried)
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), parts)


def _violations(clocks: Clocks) -> dict[str, Column]:
    """Return violation -> its condition, in order of precedence. Null is no violation."""
    error_ms = "CAST(NULL AS BIGINT)" if clocks.error_ms is None else f"{clocks.error_ms}L"
    several = (
        "(given_queue_offset_min != given_queue_offset_max"
        " OR given_topic_hash_min != given_topic_hash_max)"
    )
    logged = {name: name for name in ("queue_offset", "due_ms", "mark")}
    logged["topic_hash"] = "if(log_topic IS NULL, NULL, xxhash64(log_topic))"
    logged["fired_at_ms"] = "if(end = 'fired', ended_at_ms, NULL)"
    otherwise_given = " OR ".join(
        f"given_{name}_{least} != {log}" for name, log in logged.items() for least in ("min", "max")
    )
    # ALREADY_CANCELLED may be caused by the same client: the first answer was lost, and the client
    # retried.
    cancelled = (
        "(coalesce(cancel_ok + cancel_already + cancel_unknown, 0) > 0"
        " OR coalesce(asked_cancel, false) OR coalesce(revoked, false))"
    )
    reached = "coalesce(reached, 0) + coalesce(expired_groups, 0) + coalesce(carried_groups, 0)"
    asked = "old_due_ms IS NULL AND asked_due_ms IS NOT NULL"
    undated = f"due_ms - {TICK_MS_MAX} - coalesce(by_ms, 0)"
    conditions: dict[str, list[str | Column]] = {
        "diverged": [
            "disagree",
            "copies = 1 AND (answered_seq != seq OR answered_due_ms != due_ms)",
            F.col("asked_topic") != name_of("log_topic"),
            f"NOT {several} AND ({otherwise_given})",
        ],
        "duplicate_fire": ["copies > 1", several],
        "phantom": [
            "outcome IS NULL",
            "end IS NOT NULL AND outcome = 'fail'",
            "deliveries > 0 AND (end IS NULL OR end IN ('pending', 'held', 'dropped'))",
        ],
        "early": [
            "end = 'fired' AND ended_at_ms < due_ms",
            "given_fired_at_ms_min < due_ms",
            "due_ms < asked_due_ms",  # docs/adr/0006-past-due.md
            f"due_ms + {error_ms} < least_due_ms",
            f"received_ms + {error_ms} < due_ms",
        ],
        "misdated": [
            f"{undated} - {error_ms} > most_due_ms",
            f"{asked} AND {undated} > greatest(asked_due_ms, scheduled_at_ms)",
        ],
        "acked_again": ["again > 0"],
        "expired_delivered": ["late"],
        "expired_early": ["end = 'fired' AND due_ms > over_ms"],
        "ack_lost": ["unkept > 0"],
        "unmarked_redelivery": ["unmarked > 0"],
        "lost": [
            "outcome = 'ok' AND end IS NULL",
            f"end = 'pending' AND due_ms + {GRACE_MS} <= {clocks.until_ms}",
            f"end = 'fired' AND {reached} < expected_groups",
            f"end = 'cancelled' AND NOT {cancelled}",
        ],
    }
    conditions |= _of_changes(error_ms)
    return {name: _any(conditions[name]) for name in VIOLATIONS}


def _of_changes(error_ms: str) -> dict[str, list[str | Column]]:
    """Return the conditions of the violations about keys, cancels and reschedules."""
    no_timer, given = "end IN ('rejected', 'kept')", "deliveries > 0"
    # Of a row whose key was taken. In a reschedule `other_seq` is the rescheduled timer.
    asked = "if(on_conflict = 'update', 'replace', on_conflict)"
    acted = "CASE end WHEN 'rejected' THEN 'reject' WHEN 'kept' THEN 'keep' ELSE 'replace' END"
    return {
        "key_doubled": [
            "overlaps",
            f"{no_timer} AND {given}",
            f"{no_timer} AND told IN ('SCHEDULED', 'REPLACED')",
        ],
        "cancelled_delivered": [
            "cancel_ok > 0 AND end = 'fired'",
            "overtold AND end = 'fired'",
            f"end = 'cancelled' AND {given}",
        ],
        "replaced_delivered": [
            "replace_ok > 0 AND end = 'fired'",
            f"end = 'replaced' AND {given}",
        ],
        "rescheduled_delivered": [
            "move_ok > 0 AND end = 'fired'",
            f"end = 'rescheduled' AND {given}",
        ],
        "cancel_untrue": [*_untrue("cancel", "cancelled", error_ms), "undertold", "denied"],
        "conflict_untrue": [
            "replace_ok > 0 AND end != 'replaced'",
            "replace_ok > 1",
            "told IN ('REJECTED', 'KEPT') AND end != lower(told)",
            "end IS NOT NULL AND told NOT IN ('SCHEDULED', 'NOT_PENDING') AND other_seq IS NULL",
            "told = 'NOT_PENDING' AND (end != 'rejected' OR other_seq IS NOT NULL)",
            "told = 'NOT_PENDING' AND on_conflict != 'update'",
            "told != 'SCHEDULED' AND existing_seq != other_seq",
            "told = 'SCHEDULED' AND other_seq IS NOT NULL",
            f"other_seq IS NOT NULL AND NOT ({asked} <=> if(old_due_ms IS NULL, {acted}, NULL))",
        ],
        "reschedule_untrue": [
            *_untrue("move", "rescheduled", error_ms),
            "told_old_seq != other_seq",
            "times > 1",
        ],
    }


def _untrue(what: str, end: str, error_ms: str) -> list[str]:
    """Return the conditions under which an answer to a change of a timer by id is untrue.

    Args:
        what: the prefix of the answers in `changes.tried`.
        end: the end that the change gives a timer.
        error_ms: the greatest difference between the client's clock and the cluster's; null:
            unknown.
    """
    # The product has forgotten timers that were dropped with their topic. For them it returns
    # NOT_FOUND, and ALREADY_FIRED after the due time in the id.
    known = "NOT coalesce(gone, false)"
    return [
        f"{known} AND {what}_fired > 0 AND end != 'fired'",
        f"{known} AND {what}_fired_ms + {error_ms} < ended_at_ms",
        f"{known} AND {what}_later_index < end_index",
        f"{what}_already > 0 AND end NOT IN ('cancelled', 'replaced', 'rescheduled')",
        f"{what}_dropped > 0 AND end != 'dropped'",
        f"{what}_missing_ms IS NOT NULL AND end = 'held'",
        f"{what}_ok > 0 AND end != '{end}'",
        f"{what}_ok > 1",
        f"{known} AND {what}_missing_ms < coalesce(ended_at_ms, due_ms) + {HORIZON_MS}",
    ]


def _any(conditions: Sequence[str | Column]) -> Column:
    """Return whether any condition holds. A null condition does not hold."""
    columns = (F.expr(each) if isinstance(each, str) else each for each in conditions)
    return reduce(lambda a, b: a | b, (F.coalesce(each, no()) for each in columns))
