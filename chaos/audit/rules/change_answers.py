"""Answers to changes: cancels and reschedules by id, key and filter, and replacements by key.

A request or an answer with an id concerns one timer: `tried` and `moves`, by seq. An answer to a
key or a filter gives only a number of timers. The log shows the timers, and `flags` has for each
whether a client requested its change. An answer is untrue if it counts more or fewer timers than
the log has. So is NOT_FOUND for a key while a timer with the key was pending.
"""

from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import id_parts, name_of, or_nulls
from chaos.audit.rules.node_logs import no

_ENDLESS: Final = (1 << 63) - 1
_OF_LINE: Final = ("client", "topic", "outcome", "start_ms", "end_ms", "request", "answered")


class ChangeTables(NamedTuple):
    """The three tables of changes."""

    tried: DataFrame
    """A row per timer that was named by id: the numbers of its answers. See `tried`."""
    moves: DataFrame
    """A row per answer RESCHEDULED, with its request. See `moves`."""
    flags: DataFrame
    """A row per timer with a key, and per cancelled or rescheduled timer. See `flags`."""


def changes(
    lines: DataFrame, asks: DataFrame, log: DataFrame, fired: DataFrame,
    clock_error_ms: int | None = None,
) -> ChangeTables:  # fmt: skip
    """Return what `lines` say; `asks` as from `client_tables.asked`, `log`: the fates.

    `fired` as from `fired_answers`. `clock_error_ms`: the clients' clocks and the cluster's differ
    by at most this; None: unknown.
    """
    named = tried(lines, asks)
    later = fired.groupBy("seq").agg(
        *(
            F.min(F.when(F.col("what") == what, F.col("later_index"))).alias(f"{what}_later_index")
            for what in ("cancel", "move")
        )
    )
    flagged = flags(lines, asks, log, named, clock_error_ms)
    return ChangeTables(named.join(later, "seq", "left"), moves(lines), flagged)


def named(lines: DataFrame, asks: DataFrame) -> DataFrame:
    """Return the seqs of `tried` and of `moves`."""
    return tried(lines, asks).select("seq").union(moves(lines).select("seq")).distinct()


def shared_keys(lines: DataFrame, keyed: DataFrame) -> DataFrame:
    """Return the keys that several schedules, or a change, named: `hash`.

    `keyed`: requested timers with a key, with the `hash` of `key_hash`.
    """
    several = keyed.groupBy("hash").agg(F.count("*").alias("n")).where("n > 1").select("hash")
    changed = lines.where(F.col("op").isin("cancel", "reschedule") & F.col("keys").isNotNull())
    keys = changed.select("topic", F.explode("keys").alias("key"))
    return several.union(keys.select(key_hash())).distinct()


def key_hash() -> Column:
    """Return the hash of a topic and a key. Keys with equal hashes are judged by the full rules."""
    return F.xxhash64("topic", "key").alias("hash")


def _each(lines: DataFrame, op: str, name: str, *lists: str) -> DataFrame:
    """Return one row per element of list `name` of the lines that have it."""
    columns = [or_nulls(each, "bigint" if each == "due_ms" else "string") for each in lists]
    rows = lines.where((F.col("op") == op) & F.col(name).isNotNull()).withColumn("n", F.size(name))
    each = F.inline(F.arrays_zip(F.col(name), *columns))
    return rows.select(*_OF_LINE, each).toDF(*_OF_LINE, name, *lists)


def tried(lines: DataFrame, asks: DataFrame) -> DataFrame:
    """Return one row per timer that a request, or an answer REPLACED, named: seq, and its answers.

    Numbers of answers: cancel_* to cancels, move_* to reschedules: ok, already (cancelled), fired,
    dropped, unknown.
    *_missing_ms and *_fired_ms: the first time when an answer was that there is no such timer, or
    that it had fired. `replace_ok`: the number of schedules that were answered as replacing it.
    """
    rows = _of_ids(lines)
    taken = asks.where("told = 'REPLACED'").select(
        F.lit("replace").alias("what"), F.col("existing_seq").alias("seq")
    )
    moved = "results = 'RESCHEDULED' AND what"
    answers = {
        "ok": f"results = 'CANCELLED' OR ({moved} = 'move')",
        "already": f"results = 'ALREADY_CANCELLED' OR ({moved} != 'move')",
        "fired": "results = 'ALREADY_FIRED'",
        "dropped": "results = 'DROPPED'",
        "unknown": "outcome = 'unknown'",
    }
    told = {"missing_ms": "results IN ('NOT_FOUND', 'TIMER_NOT_FOUND')"}
    told["fired_ms"] = answers["fired"]
    counts, times = [], []
    for what in ("cancel", "move"):
        for name, which in answers.items():
            count = F.expr(f"count_if(what = '{what}' AND ({which}))")
            counts.append(count.alias(f"{what}_{name}"))
        for name, which in told.items():
            first = F.expr(f"min(if(what = '{what}' AND ({which}), end_ms, NULL))")
            times.append(first.alias(f"{what}_{name}"))
    replaced = F.count_if(F.col("what") == "replace").alias("replace_ok")
    both = rows.unionByName(taken, allowMissingColumns=True)
    return both.groupBy("seq").agg(*counts, *times, replaced)


def _of_ids(lines: DataFrame) -> DataFrame:
    """Return one row per timer of the cancels and reschedules by id: what, seq, results, …"""
    named = [
        _each(lines, op, "ids", "results").withColumn("what", F.lit(what))
        for op, what in (("cancel", "cancel"), ("reschedule", "move"))
    ]
    return named[0].unionByName(named[1]).withColumn("seq", id_parts("ids")[1])


def fired_answers(lines: DataFrame, fates: DataFrame) -> DataFrame:
    """Return the answers ALREADY_FIRED about timers named by id: what, seq, end_ms, later_index.

    `later_index`: the lowest log entry of a request that the same client made after the answer.
    A FIRE behind that entry proves the answer untrue, without any clock: `request` and `answered`
    are numbers of one sequence. Null: no such entry is known.
    """
    named = _of_ids(lines)
    answers = named.where("results = 'ALREADY_FIRED'").select(
        "client", F.col("answered").alias("number"), "what", "seq", "end_ms"
    )
    clients = F.broadcast(answers.where("number IS NOT NULL").select("client").distinct())
    made = lines.where("op = 'schedule' AND request IS NOT NULL")
    made = made.select("client", "request", F.col("marks")[0].alias("mark"))
    done = named.where(
        "request IS NOT NULL AND results = if(what = 'cancel', 'CANCELLED', 'RESCHEDULED')"
    ).select("client", "request", "what", "seq")
    ended = F.when(F.col("end").isin("cancelled", "rescheduled"), F.col("end_index"))
    entries = [
        made.join(clients, "client", "left_semi")
        .join(fates.select("mark", F.col("schedule_index").alias("index")), "mark")
        .select("client", "request", "index"),
        done.join(clients, "client", "left_semi")
        .join(fates.select("seq", ended.alias("index")), "seq")
        .select("client", "request", "index"),
    ]
    points = answers.unionByName(
        entries[0].unionByName(entries[1]).withColumnRenamed("request", "number"),
        allowMissingColumns=True,
    )
    later = F.min("index").over(Window.partitionBy("client").orderBy(F.desc("number")))
    later = F.when(F.col("number").isNotNull(), later).alias("later_index")
    return points.select("what", "seq", "end_ms", later).where("what IS NOT NULL")


def fired_figures(fired: DataFrame, fates: DataFrame, clock_error_ms: int | None) -> dict[str, int]:
    """Return how many answers ALREADY_FIRED about fired timers there are, and are not judged.

    An answer is judged by a later entry of its client, or by clocks if it came long before the
    firing or after it. `fired` as from `fired_answers`.
    """
    both = F.broadcast(fired).join(fates.where("end = 'fired'").select("seq", "ended_at_ms"), "seq")
    near = F.abs(F.col("end_ms") - F.col("ended_at_ms")) <= F.lit(clock_error_ms)
    unjudged = F.col("later_index").isNull() & F.coalesce(near, ~no())
    row = both.agg(F.count("*"), F.count_if(unjudged)).first()
    assert row is not None
    return {"answers": row[0], "unjudged": row[1]}


def moves(lines: DataFrame) -> DataFrame:
    """Return one row per answer RESCHEDULED: seq, id, told_old_seq, times, …

    `seq` and `id` are those of the new timer. `told_old_seq` is the seq of the named timer; null if
    the request named a key. `times` is the number of rows with the same new id.
    """
    lists = ("results", "new_ids", "due_ms")
    rows = _each(lines, "reschedule", "ids", *lists).unionByName(
        _each(lines, "reschedule", "keys", *lists), allowMissingColumns=True
    )
    due_ms, seq = id_parts("new_ids")
    return rows.where("results = 'RESCHEDULED'").select(
        seq.alias("seq"),
        F.col("new_ids").alias("id"),
        F.lit("ok").alias("outcome"),
        F.col("topic").alias("asked_topic"),
        F.col("due_ms").alias("asked_due_ms"),
        due_ms.alias("answered_due_ms"),
        seq.alias("answered_seq"),
        F.when(F.col("ids").isNotNull(), id_parts("ids")[1]).alias("told_old_seq"),
        F.count("*").over(Window.partitionBy("new_ids")).alias("times"),
    )


def filters(lines: DataFrame) -> DataFrame:
    """Return the changes by filter: op, topic, prefix, [from_ms, to_ms), ok, unknown, told, …

    Requests with the same op, topic and prefix are one row, with the earliest `from_ms` and the
    latest `to_ms`. `ok` and `unknown` are numbers of requests by outcome. `told` is the number of
    timers in the answers. `due_ms_min` is the earliest due time that a reschedule set.
    """
    asked = lines.where("op IN ('cancel', 'reschedule') AND ids IS NULL AND keys IS NULL")
    beyond = F.when(F.coalesce("due_to_ms", F.lit(0)) == 0, _ENDLESS).otherwise(F.col("due_to_ms"))
    return asked.groupBy("op", "topic", F.coalesce("key_prefix", F.lit("")).alias("prefix")).agg(
        F.min(F.coalesce("due_from_ms", F.lit(0))).alias("from_ms"),
        F.max(beyond).alias("to_ms"),
        F.count_if(F.col("outcome") == "ok").alias("ok"),
        F.count_if(F.col("outcome") == "unknown").alias("unknown"),
        F.sum("changed").alias("told"),
        F.min(F.coalesce(F.col("due_ms")[0], F.lit(0))).alias("due_ms_min"),
    )


def miscounted(lines: DataFrame, log: DataFrame, asks: DataFrame) -> DataFrame:
    """Return where answers by filter are not what the log has: op, topic, told, logged, least.

    `logged`: the timers of the topic that were cancelled, or moved, in whichever way: no more may
    be answered. `least`: those that no request of this kind may have changed by id, less the
    answers of such requests by key: no fewer may be answered, if every answer is known.
    """
    told = (
        filters(lines)
        .groupBy("op", "topic")
        .agg(F.sum("told").alias("told"), F.sum("unknown").alias("unknown"))
    )
    done = F.when(F.col("end") == "cancelled", "cancel").when(
        F.col("end") == "rescheduled", "reschedule"
    )
    # A cancel by id is retried: the answer ALREADY_CANCELLED may be of its own doing.
    cancels, moves = ("cancel_ok", "cancel_already", "cancel_unknown"), ("move_ok", "move_unknown")
    by_id = F.when(F.col("op") == "cancel", F.greatest(*cancels)).otherwise(F.greatest(*moves))
    ended = log.withColumns({"op": done, "topic": name_of("topic")}).where("op IS NOT NULL")
    ended = ended.join(F.broadcast(told.select("op", "topic")), ["op", "topic"], "left_semi")
    logged = (
        ended.join(tried(lines, asks), "seq", "left")
        .groupBy("op", "topic")
        .agg(
            F.count("*").alias("logged"),
            F.count_if(F.coalesce(by_id, F.lit(0)) == 0).alias("others"),
        )
    )
    by_key = [
        _each(lines, op, "keys", "results").select(
            F.lit(op).alias("op"),
            "topic",
            (F.col("results").eqNullSafe(result) | (F.col("outcome") == "unknown")).alias("may"),
        )
        for op, result in (("cancel", "CANCELLED"), ("reschedule", "RESCHEDULED"))
    ]
    answers = by_key[0].unionByName(by_key[1]).groupBy("op", "topic")
    keyed = answers.agg(F.count_if("may").alias("by_key"))
    return (
        told.join(logged, ["op", "topic"], "left")
        .join(keyed, ["op", "topic"], "left")
        .fillna(0, ["told", "logged", "others", "by_key"])
        .withColumn("least", F.greatest(F.col("others") - F.col("by_key"), F.lit(0)))
        .where("told > logged OR (unknown = 0 AND told < least)")
        .select("op", "topic", "told", "logged", "least")
    )


def flags(
    lines: DataFrame, asks: DataFrame, log: DataFrame, named: DataFrame,
    clock_error_ms: int | None,
) -> DataFrame:  # fmt: skip
    """Return the evidence of changes by key and by filter, one row per timer: seq, key, and

    overlaps        it was pending while another timer of its topic had its key
    asked_cancel    a client may have cancelled it by key or filter
    overtold        more cancels of its key were confirmed than the log has
    undertold       it was cancelled, only cancels of its key can have done it, and fewer of them
                    can have succeeded than the log has
    denied          a client received NOT_FOUND for its key while it was pending
    moved_outcome   of a timer made by a reschedule: ok or unknown, if the reschedule may have been
                    by filter or by key; else null
    moved_due_ms    the earliest due time that a reschedule by filter may have given it

    `named`: from `tried`. `clock_error_ms`: as in `changes`.
    """
    keys = asks.where("key IS NOT NULL").select("mark", "key")
    rows = (
        log.join(keys, "mark", "left")
        .where("key IS NOT NULL OR end = 'cancelled' OR old_due_ms IS NOT NULL")
        .select("seq", "topic", "key", "end", "due_ms", "old_due_ms", "schedule_index", "end_index",
                "scheduled_at_ms", "ended_at_ms")
    )  # fmt: skip
    filtered = _by_filter(lines, rows)
    others = named.select("seq", F.lit(1).alias("by_id"))
    others = rows.where("key IS NOT NULL").join(others, "seq", "left")
    others = others.join(filtered.select("seq", "filter_cancels"), "seq", "left")
    keyed = _by_key(lines, others)
    denied = _denied(lines, rows.where("key IS NOT NULL"), clock_error_ms)
    cancelled = F.coalesce(F.col("key_cancels") > 0, no()) | F.coalesce("filter_cancels", no())
    outcome = F.when(F.col("filter_ok"), "ok").when(
        F.col("filter_unknown") | (F.col("key_moves") > 0), "unknown"
    )
    return (
        rows.select("seq", "key")
        .join(keyed, "seq", "left")
        .join(filtered, "seq", "left")
        .join(denied, "seq", "left")
        .select(
            *("seq", "key", "overlaps", "overtold", "undertold", "denied"),
            cancelled.alias("asked_cancel"),
            outcome.alias("moved_outcome"),
            F.col("filter_due_ms").alias("moved_due_ms"),
        )
    )


def _by_key(lines: DataFrame, rows: DataFrame) -> DataFrame:
    """Return one row per timer with a key: overlaps, overtold, undertold, key_cancels, key_moves.

    `key_cancels` and `key_moves` are the numbers of requests by key that may have changed it.
    `rows` has `by_id` and `filter_cancels`: whether other requests may have cancelled it.
    """
    done, unknown = F.col("results") == "CANCELLED", F.col("outcome") == "unknown"
    cancels = (
        _each(lines, "cancel", "keys", "results")
        .groupBy("topic", F.col("keys").alias("key"))
        .agg(F.count_if(done).alias("told"), F.count_if(done | unknown).alias("key_cancels"))
    )
    unsure = (
        _each(lines, "reschedule", "keys")
        .groupBy("topic", F.col("keys").alias("key"))
        .agg(F.count_if(unknown).alias("key_moves"))
    )
    name = Window.partitionBy("topic", "key")
    before = name.orderBy("schedule_index", "seq").rowsBetween(Window.unboundedPreceding, -1)
    was_pending = ~F.col("end").isin("rejected", "kept") & ~F.coalesce(
        (F.col("end") == "fired") & (F.col("end_index") == F.col("schedule_index")), no()
    )
    until = F.when(was_pending, F.coalesce("end_index", F.lit(_ENDLESS)))
    overlaps = was_pending & (F.max(until).over(before) > F.col("schedule_index"))
    ended = F.col("end") == "cancelled"
    alone = ended & F.col("by_id").isNull() & ~F.coalesce("filter_cancels", no())
    few = alone & (F.col("key_cancels") < F.col("alone"))
    return (
        rows.withColumn("overlaps", F.coalesce(overlaps, no()))
        .withColumn("logged", F.count_if(ended).over(name))
        .withColumn("alone", F.count_if(alone).over(name))
        .join(cancels, ["topic", "key"], "left")
        .join(unsure, ["topic", "key"], "left")
        .select("seq", "overlaps", (F.col("told") > F.col("logged")).alias("overtold"),
                few.alias("undertold"), "key_cancels", "key_moves")
    )  # fmt: skip


def _denied(lines: DataFrame, rows: DataFrame, clock_error_ms: int | None) -> DataFrame:
    """Return the timers that were pending while a client received NOT_FOUND for their key."""
    if clock_error_ms is None:
        return rows.select("seq", F.lit(None).cast("boolean").alias("denied")).limit(0)
    asked = [_each(lines, op, "keys", "results") for op in ("cancel", "reschedule")]
    told = asked[0].unionByName(asked[1]).where("results IN ('NOT_FOUND', 'TIMER_NOT_FOUND')")
    told = told.select("topic", F.col("keys").alias("key"), "start_ms", "end_ms")
    ended_ms = F.coalesce("ended_at_ms", F.lit(_ENDLESS))
    throughout = (ended_ms - clock_error_ms > F.col("end_ms")) & F.expr(
        f"scheduled_at_ms + {clock_error_ms} < start_ms AND end NOT IN ('rejected', 'kept')"
    )
    there = rows.join(told, ["topic", "key"]).where(throughout)
    return there.select("seq", (~no()).alias("denied")).distinct()


def _by_filter(lines: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the timers that filters match: seq, filter_cancels, filter_ok, filter_unknown, …"""
    asked = F.broadcast(filters(lines).withColumnsRenamed({"op": "by", "topic": "of"}))
    ends = rows.where("end = 'cancelled'").withColumn("op", F.lit("cancel"))
    starts = rows.where("old_due_ms IS NOT NULL").withColumn("op", F.lit("reschedule"))
    both = ends.unionByName(starts.withColumn("due_ms", F.col("old_due_ms")))
    inside = "due_ms >= from_ms AND due_ms < to_ms AND startswith(coalesce(key, ''), prefix)"
    picked = both.join(asked, F.expr(f"by = op AND of = topic AND {inside}"))
    return picked.groupBy("seq").agg(
        F.expr("bool_or(op = 'cancel' AND ok + unknown > 0)").alias("filter_cancels"),
        F.expr("bool_or(op = 'reschedule' AND ok > 0)").alias("filter_ok"),
        F.expr("bool_or(op = 'reschedule' AND unknown > 0)").alias("filter_unknown"),
        F.expr("min(if(op = 'reschedule', due_ms_min, NULL))").alias("filter_due_ms"),
    )


def operations(lines: DataFrame) -> DataFrame:
    """Return the numbers of answers to changes: op, by, on_conflict, result, n.

    Only schedules with keys are counted. `result` is the answer per timer, or the outcome of a
    request without an answer. For a filter and a redrive it is `changed`, and `n` counts timers.
    Deletions, seeks and redrives are `by` name.
    """
    ruled = lines.where(F.col("op").isin("delete", "seek", "delete_group", "redrive")).select(
        "op", F.lit("name").alias("by"), F.lit("").alias("on_conflict"),
        F.when(F.col("changed").isNotNull(), "changed").otherwise(F.col("outcome")).alias("result"),
        F.coalesce("changed", F.lit(1)).alias("n"),
    )  # fmt: skip
    keyed, scheduled = F.col("keys").isNotNull(), F.col("op") == "schedule"
    filtered = F.col("ids").isNull() & ~keyed
    by = F.when(keyed, "key").when(filtered, "filter").otherwise("id")
    mode = F.when(scheduled, F.coalesce("on_conflict", F.lit("reject"))).otherwise("")
    answers = F.when(filtered, F.array(F.lit("changed"))).otherwise(or_nulls("results", "string"))
    times = F.when(filtered, F.coalesce("changed", F.lit(1))).otherwise(1)
    rows = (
        lines.where(F.col("op").isin("cancel", "reschedule") | (scheduled & keyed))
        .withColumn("n", F.size(F.coalesce("keys", "ids")))
        .select(
            *("op", "outcome", by.alias("by"), mode.alias("on_conflict"), times.alias("n")),
            F.explode(answers).alias("answer"),
        )
    )
    answer = F.coalesce("answer", F.when(F.col("op") == "schedule", "SCHEDULED"))
    result = F.when(F.col("outcome") == "ok", answer).otherwise(F.col("outcome")).alias("result")
    of = ("op", "by", "on_conflict")
    both = rows.select(*of, result, "n").unionByName(ruled)
    return both.groupBy(*of, "result").agg(F.sum("n").alias("n"))
