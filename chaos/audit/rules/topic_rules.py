"""Topics, groups and quotas: answers that contradict the log, and quotas that were exceeded.

docs/audit.md lists these violations. `judged` has the function of each.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.client_tables import Tables, name_of


def exceeded(fates: DataFrame, quotas: DataFrame) -> DataFrame:
    """Return the entries that exceeded a quota: topic, index, quota, there, most.

    `there`: the value after the entry, or the ready messages before it. `most`: the quota's limit.
    """
    mine = fates.where(~F.col("end").isin("rejected", "kept"))
    mine = mine.join(F.broadcast(quotas.select("topic").distinct()), "topic", "left_semi")
    steps = (
        mine.selectExpr("topic", "schedule_index AS index", "1 AS n", "payload_size AS size")
        .unionByName(
            mine.where("end_index IS NOT NULL").selectExpr(
                "topic", "end_index AS index", "-1 AS n", "-payload_size AS size"
            )
        )
        .groupBy("topic", "index")
        .agg(F.sum("n").alias("n"), F.sum("size").alias("size"))
    )
    so_far = Window.partitionBy("topic").orderBy("index")
    pending = steps.withColumns({n: F.sum(n).over(so_far) for n in ("n", "size")})
    found = quotas.withColumnRenamed("schedule_index", "index").join(pending, ["topic", "index"])
    there = F.expr("coalesce(ready, CASE quota WHEN 'pending_max' THEN n ELSE size END)")
    # A quota of ready messages rejects every timer once it is reached.
    over = F.expr("there > most OR (ready IS NOT NULL AND there = most)")
    return (
        found.withColumn("there", there)
        .where(over)
        .select("topic", "index", "quota", "there", "most")
    )


def untrue_deletions(lines: DataFrame, fates: DataFrame, deletions: DataFrame) -> DataFrame:
    """Return untrue answers to deletions: topic, topic_id, told, dropped.

    `told`, `dropped`: the number of timers by the answer and by the log; null: not deleted.
    """
    told = lines.where("op = 'delete' AND topic_id IS NOT NULL").select(
        "topic", "topic_id", F.col("pending").alias("told")
    )
    dropped = (
        fates.where("end = 'dropped'")
        .groupBy(F.col("end_index").alias("delete_index"))
        .agg(F.count("*").alias("dropped"))
    )
    logged = deletions.join(dropped, "delete_index", "left").select(
        name_of("topic").alias("topic"),
        "topic_id",
        F.coalesce("dropped", F.lit(0)).alias("dropped"),
    )
    both = told.join(logged, ["topic", "topic_id"], "left")
    return both.where("dropped IS NULL OR dropped != told")


def lost_policies(lines: DataFrame, policies: DataFrame) -> DataFrame:
    """Return scopes with more confirmed policy changes than the log has: topic, told, logged."""
    told = lines.where("op = 'policy' AND outcome = 'ok'").groupBy("topic")
    logged = policies.groupBy(name_of("topic").alias("topic"))
    return _overtold(
        told.agg(F.count("*").alias("told")), logged.agg(F.count("*").alias("logged")), "topic"
    )


def _overtold(told: DataFrame, logged: DataFrame, *by: str) -> DataFrame:
    """Return the rows in which more changes were confirmed (`told`) than the log has (`logged`)."""
    return told.join(logged, [*by], "left").fillna(0, ["logged"]).where("told > logged")


def untrue_seeks(lines: DataFrame, groups: DataFrame) -> DataFrame:
    """Return untrue answers to seeks: topic, group, group_id, to_offset, start_offset.

    `to_offset`: requested. `start_offset`: the beginning of the life by the log; null: no such
    life.
    """
    told = lines.where("op = 'seek' AND outcome = 'ok'").select(
        "topic", "group", "group_id", "to_offset"
    )
    lives = groups.select(
        name_of("topic").alias("topic"), name_of("group").alias("group"), "group_id",
        "start_offset", "kept_offset",
    )  # fmt: skip
    elsewhere = "to_offset IS NOT NULL AND start_offset != greatest(to_offset, kept_offset)"
    return (
        told.join(lives, ["topic", "group", "group_id"], "left")
        .where(f"start_offset IS NULL OR ({elsewhere})")
        .drop("kept_offset")
    )


def lost_deletions(lines: DataFrame, groups: DataFrame) -> DataFrame:
    """Return groups with more confirmed deletions than the log has: topic, group, told, logged."""
    told = lines.where("op = 'delete_group' AND outcome = 'ok'").groupBy("topic", "group")
    logged = groups.groupBy(name_of("topic").alias("topic"), name_of("group").alias("group"))
    deleted = logged.agg(F.count_if("deleted").alias("logged"))
    return _overtold(told.agg(F.count("*").alias("told")), deleted, "topic", "group")


def untrue_redrives(lines: DataFrame, carried: DataFrame) -> DataFrame:
    """Return topics with more confirmed redriven letters than the log has: topic, told, logged."""
    told = lines.where("op = 'redrive' AND outcome = 'ok'").groupBy("topic")
    logged = carried.where("redriven").groupBy(name_of("from_topic").alias("topic"))
    return _overtold(
        told.agg(F.sum("changed").alias("told")), logged.agg(F.count("*").alias("logged")), "topic"
    )


def untrue_carries(fates: DataFrame, carried: DataFrame) -> DataFrame:
    """Return moved messages with another payload or a wrong topic: seq, mark, topic, from_topic, …

    `was_mark`: the mark of the source message; null: no such message. `was_from`: the topic from
    which the source message had become a dead letter.
    """
    was_from = F.when(~F.col("redriven"), F.col("from_topic"))
    sources = carried.select("topic", "queue_offset", "mark", was_from.alias("was_from"))
    fired = fates.where("end = 'fired'").join(
        F.broadcast(carried.select(F.col("from_topic").alias("topic")).distinct()),
        "topic",
        "left_semi",
    )
    sources = sources.unionByName(
        fired.select("topic", "queue_offset", "mark"), allowMissingColumns=True
    ).toDF("from_topic", "from_offset", "was_mark", "was_from")
    elsewhere = F.col("redriven") & (name_of("topic") != name_of("was_from"))
    return (
        carried.join(sources, ["from_topic", "from_offset"], "left")
        .where(F.col("was_mark").isNull() | (F.col("was_mark") != F.col("mark")) | elsewhere)
        .select("seq", "mark", "topic", "from_topic", "from_offset", "was_mark", "was_from")
    )


def judged(lines: DataFrame, story: Tables) -> Tables:
    """Return violation -> offenders."""
    fates = story["fates"]
    ops = {row["op"] for row in lines.select("op").distinct().collect()}
    found = {}
    if story["quotas"].head(1):
        found["quota_exceeded"] = exceeded(fates, story["quotas"])
    if ops & {"delete", "policy"}:
        found["delete_untrue"] = untrue_deletions(lines, fates, story["deletions"])
        found["policy_lost"] = lost_policies(lines, story["policies"])
    if ops & {"seek", "delete_group"}:
        found["seek_untrue"] = untrue_seeks(lines, story["groups"])
        found["group_delete_lost"] = lost_deletions(lines, story["groups"])
    if "redrive" in ops or story["carried"].head(1):
        found["redrive_untrue"] = untrue_redrives(lines, story["carried"])
        found["carried_untrue"] = untrue_carries(fates, story["carried"])
    return found
