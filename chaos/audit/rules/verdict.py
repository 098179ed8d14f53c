"""Verdicts: each timer that any of the three witnesses knows gets one, by joins of their tables.

    fine verdict
    ok                  fired, and delivered to every group
    cancelled, dropped  ended by a cancel; by the deletion of its topic, or by a logged resume
    pending, held       due after the run's end; held by a logged pause at the run's end
    refused             requested, and certainly not accepted
    unknown_not_fired, unknown_fired_once   the answer was lost
    replaced            another timer took its key
    rescheduled         another id replaces it
    rejected, kept      no timer: a pending timer has its key
    expired             fired, and expired in a group that did not receive it
    carried             a dead letter or a redriven one, delivered as a fired timer must be

    violation           promise
    diverged            P6  nodes disagree, or the request's topic, an answer or a delivery
                            contradicts the log
    duplicate_fire      P2  requested once, and two timers in the log or two queue offsets
    phantom             P2  in the log or delivered without a request; or delivered, and the log
                            never fired it
    key_doubled         P2  pending, delivered or answered as scheduled while another timer had its
                            key
    cancelled_delivered P4  fired or delivered although a cancel returned CANCELLED
    replaced_delivered, rescheduled_delivered
                        P4  fired or delivered although it was replaced or rescheduled
    early               P3  fired before its due time, or due before the requested time; or received
                            before it was due, by a client's clock
    misdated            P3  due later than the requested time or delay
    acked_again         P5  delivered after its ack, in the log's order
    expired_delivered   P5  delivered after it had expired in that group, in the log's order
    expired_early       P1  expired before its due time plus its time to live
    ack_lost            P5  its ack was confirmed, and the log has no ack
    unmarked_redelivery P5  delivered twice to one group with the same attempt
    cancel_untrue, conflict_untrue, reschedule_untrue
                        P4  the answer to a cancel, about a taken key, or to a reschedule
                            contradicts the log
    lost                P1  answered OK, and not in the log or never fired; or in some group neither
                            delivered, nor expired, nor moved from it; or cancelled without a
                            request

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

from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.change_answers import ChangeTables
from chaos.audit.rules.client_tables import SLOT, name_of, with_runs
from chaos.audit.rules.node_logs import no
from chaos.audit.rules.plain_timers import TICK_MS_MAX

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
_CHANGED: Final = ("cancelled", "replaced", "rescheduled")
"""Ends after which a cancel or reschedule returns ALREADY_CANCELLED."""
_ENDED: Final = (*_CHANGED, "dropped", "rejected", "kept")
_WAITING: Final = ("pending", "held")
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
    end, outcome = F.col("end"), F.col("outcome")
    no_timer = end.isNull() | (end.isin("rejected", "kept") & (outcome != "ok"))
    chain = (
        chain.when(no_timer, F.when(outcome == "fail", "refused").otherwise("unknown_not_fired"))
        .when(end.isin(*_ENDED), end)
        .when((end == "fired") & (F.col("expired_groups") > 0), "expired")
        .when(end.isin(*_WAITING) & (outcome == "unknown"), "unknown_not_fired")
        .when(end.isin(*_WAITING), end)
        .when(outcome == "unknown", "unknown_fired_once")
        .when(F.col("from_topic").isNotNull(), "carried")
        .otherwise("ok")
    )
    evidence = (
        *("id", "mark", "seq", "topic", "due_ms", "asked_due_ms", "outcome", "copies", "end"),
        *("key", "told", "other_seq", "old_due_ms"),
        *("scheduled_at_ms", "ended_at_ms", "end_epoch", "queue_offset"),
        *("deliveries", "groups", "received_ms", "from_topic"),
    )
    return known.select(chain.alias("verdict"), *evidence)


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
    c = F.col
    error_ms, by_ms = F.lit(clocks.error_ms).cast("bigint"), F.coalesce("by_ms", F.lit(0))
    in_log, was_given, was_asked = (
        c("end").isNotNull(),
        c("deliveries") > 0,
        c("outcome").isNotNull(),
    )
    several = (c("given_queue_offset_min") != c("given_queue_offset_max")) | (
        c("given_topic_hash_min") != c("given_topic_hash_max")
    )
    otherwise_given = [
        (c(f"given_{name}_min") != c(log)) | (c(f"given_{name}_max") != c(log))
        for name, log in (
            ("queue_offset", "queue_offset"),
            ("due_ms", "due_ms"),
            ("mark", "mark"),
        )
    ]
    log_topic = F.when(c("log_topic").isNotNull(), F.xxhash64("log_topic"))
    otherwise_given.append(
        (c("given_topic_hash_min") != log_topic) | (c("given_topic_hash_max") != log_topic)
    )
    elsewhere = c("asked_topic") != name_of("log_topic")
    otherwise_given.append(
        (c("end") == "fired")
        & (
            (c("given_fired_at_ms_min") != c("ended_at_ms"))
            | (c("given_fired_at_ms_max") != c("ended_at_ms"))
        )
    )
    otherwise_answered = (c("copies") == 1) & (
        (c("answered_seq") != c("seq")) | (c("answered_due_ms") != c("due_ms"))
    )
    # ALREADY_CANCELLED may be caused by the same client: the first answer was lost, and the client
    # retried.
    tried = c("cancel_ok") + c("cancel_already") + c("cancel_unknown")
    cancelled = (F.coalesce(tried, F.lit(0)) > 0) | _any(c("asked_cancel"), c("revoked"))
    fired = c("end") == "fired"
    reached = reduce(
        lambda a, b: a + b,
        (F.coalesce(n, F.lit(0)) for n in ("reached", "expired_groups", "carried_groups")),
    )
    conditions = _of_changes(error_ms) | {
        "diverged": _any(
            c("disagree"), otherwise_answered, elsewhere, ~several & _any(*otherwise_given)
        ),
        "duplicate_fire": _any(c("copies") > 1, several),
        "phantom": _any(
            ~was_asked,
            in_log & (c("outcome") == "fail"),
            was_given & (~in_log | c("end").isin(*_WAITING, "dropped")),
        ),
        "early": _any(
            (c("end") == "fired") & (c("ended_at_ms") < c("due_ms")),
            c("given_fired_at_ms_min") < c("due_ms"),
            c("due_ms") < c("asked_due_ms"),  # docs/adr/0006-past-due.md
            c("due_ms") + error_ms < c("least_due_ms"),
            c("received_ms") + error_ms < c("due_ms"),
        ),
        "misdated": _any(
            c("due_ms") - error_ms - TICK_MS_MAX - by_ms > c("most_due_ms"),
            c("old_due_ms").isNull()
            & c("asked_due_ms").isNotNull()
            & (c("due_ms") - TICK_MS_MAX - by_ms > F.greatest("asked_due_ms", "scheduled_at_ms")),
        ),
        "acked_again": c("again") > 0,
        "expired_delivered": c("late"),
        "expired_early": fired & (c("due_ms") > c("over_ms")),
        "ack_lost": c("unkept") > 0,
        "unmarked_redelivery": c("unmarked") > 0,
        "lost": _any(
            (c("outcome") == "ok") & ~in_log,
            (c("end") == "pending") & (c("due_ms") + GRACE_MS <= clocks.until_ms),
            fired & (reached < c("expected_groups")),
            (c("end") == "cancelled") & ~cancelled,
        ),
    }
    return {name: F.coalesce(conditions[name], no()) for name in VIOLATIONS}


def _of_changes(error_ms: Column) -> dict[str, Column]:
    """Return the conditions of the violations about keys, cancels and reschedules."""
    c = F.col
    fired, was_given, in_log = c("end") == "fired", c("deliveries") > 0, c("end").isNotNull()
    told, no_timer = c("told"), c("end").isin("rejected", "kept")
    return {
        "key_doubled": _any(
            c("overlaps"), no_timer & was_given, no_timer & told.isin("SCHEDULED", "REPLACED")
        ),
        "cancelled_delivered": _any(
            (c("cancel_ok") > 0) & fired,
            c("overtold") & fired,
            (c("end") == "cancelled") & was_given,
        ),
        "replaced_delivered": _any(
            (c("replace_ok") > 0) & fired, (c("end") == "replaced") & was_given
        ),
        "rescheduled_delivered": _any(
            (c("move_ok") > 0) & fired, (c("end") == "rescheduled") & was_given
        ),
        "cancel_untrue": _any(
            _untrue("cancel", "cancelled", error_ms), c("undertold"), c("denied")
        ),
        "conflict_untrue": _any(
            (c("replace_ok") > 0) & (c("end") != "replaced"),
            c("replace_ok") > 1,
            told.isin("REJECTED", "KEPT") & (c("end") != F.lower("told")),
            in_log & ~told.isin("SCHEDULED", "NOT_PENDING") & c("other_seq").isNull(),
            (told == "NOT_PENDING") & ((c("end") != "rejected") | c("other_seq").isNotNull()),
            (told == "NOT_PENDING") & (c("on_conflict") != "update"),
            (told != "SCHEDULED") & (c("existing_seq") != c("other_seq")),
            (told == "SCHEDULED") & c("other_seq").isNotNull(),
            c("other_seq").isNotNull() & ~_replacing(c("on_conflict")).eqNullSafe(_mode()),
        ),
        "reschedule_untrue": _any(
            _untrue("move", "rescheduled", error_ms),
            c("told_old_seq") != c("other_seq"),
            c("times") > 1,
        ),
    }


def _untrue(what: str, end: str, error_ms: Column) -> Column:
    """Return whether an answer to a change of a timer by id contradicts the log.

    Args:
        what: the prefix of the answers in `changes.tried`.
        end: the end that the change gives a timer.
        error_ms: the greatest difference between the client's clock and the cluster's; null:
            unknown.
    """
    c = F.col
    ended = c("end").isin(*_CHANGED)
    done = c(f"{what}_ok") > 0
    # The product has forgotten timers that were dropped with their topic. For them it returns
    # NOT_FOUND, and ALREADY_FIRED after the due time in the id.
    known = ~F.coalesce(c("gone"), no())
    return _any(
        known & (c(f"{what}_fired") > 0) & (c("end") != "fired"),
        known & (c(f"{what}_fired_ms") + error_ms < c("ended_at_ms")),
        known & (c(f"{what}_later_index") < c("end_index")),
        (c(f"{what}_already") > 0) & ~ended,
        (c(f"{what}_dropped") > 0) & (c("end") != "dropped"),
        c(f"{what}_missing_ms").isNotNull() & (c("end") == "held"),
        done & (c("end") != end),
        c(f"{what}_ok") > 1,
        known & (c(f"{what}_missing_ms") < F.coalesce(c("ended_at_ms"), c("due_ms")) + HORIZON_MS),
    )


def _replacing(mode: Column) -> Column:
    """Return the effective on_conflict of a row whose key was taken: `update` acts as `replace`."""
    return F.when(mode == "update", "replace").otherwise(mode)


def _mode() -> Column:
    """Return the on_conflict that the log applied to a taken key; null for a reschedule."""
    end = F.col("end")
    none = F.col("old_due_ms").isNotNull()  # a reschedule: its `other_seq` is the rescheduled timer
    met = F.when(end == "rejected", "reject").when(end == "kept", "keep").otherwise("replace")
    return F.when(~none, met)


def _any(*conditions: Column) -> Column:
    """Return whether any condition holds. A null condition does not hold."""
    return reduce(lambda a, b: a | b, (F.coalesce(each, no()) for each in conditions))
