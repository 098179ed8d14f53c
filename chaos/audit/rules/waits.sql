---- long_waits
-- Receipts more than :bound_ms after the firing. An attempt appears once, with its first receipt.
-- `since_ms`: the last event that explains the wait. It is at or after the receipt if an excuse
-- covers the receipt.
WITH receipts AS (
    SELECT topic, `group`, queue_offset, attempt, first.client, first.fired_at_ms,
        first.received_ms, name_of(topic) AS name, name_of(`group`) AS group_name
    FROM (
        SELECT topic, `group`, queue_offset, get(attempts, nth) AS attempt,
            min(struct(received_ms, client, get(fired_at_ms, nth) AS fired_at_ms)) AS first
        FROM lines LATERAL VIEW posexplode(offsets) AS nth, queue_offset
        WHERE op = 'deliver' AND received_ms - array_min(fired_at_ms) > :bound_ms
        GROUP BY ALL
    )
    WHERE first.received_ms - first.fired_at_ms > :bound_ms
), events AS (
    SELECT name_of(topic) AS of, if(op = 'redrive', 'dead-letters', name_of(`group`)) AS of_group,
        if(op = 'open', client, NULL) AS by, coalesce(end_ms, start_ms) AS event_ms
    FROM lines WHERE op IN ('open', 'seek', 'delete_group', 'redrive')
), explained AS (
    SELECT *, fired_at_ms AS at_ms FROM receipts
    UNION ALL
    SELECT receipts.*, greatest(returned_at_ms, not_before_ms)
    FROM receipts JOIN returns USING (topic, `group`, queue_offset) WHERE attempts < attempt
    UNION ALL
    SELECT receipts.*, ended_at_ms
    FROM receipts JOIN carried
        ON receipts.topic = carried.topic AND receipts.queue_offset = carried.queue_offset
    UNION ALL
    SELECT receipts.*, event_ms
    FROM receipts JOIN events ON name = of AND group_name = of_group AND event_ms <= received_ms
    WHERE by IS NULL OR by = client
    UNION ALL
    SELECT receipts.*, excused_to_ms
    FROM receipts JOIN excuses ON excused_from_ms <= received_ms
)
SELECT topic, `group`, queue_offset, attempt, client, fired_at_ms, received_ms,
    max(at_ms) AS since_ms
FROM explained
GROUP BY ALL

---- delivered_late
-- Waits in which the consumer was free for too long: longer than :bound_ms, and a millisecond for
-- each message that came to the group during the wait. `waiting`: from `long_waits`.
WITH places AS (
    SELECT DISTINCT topic, `group`, together IS NOT NULL AS together
    FROM waiting LEFT JOIN (
        SELECT topic, `group`, true AS together FROM ordered
        UNION
        SELECT topic, `group`, true FROM settings WHERE max_in_flight > 0
    ) USING (topic, `group`)
), got AS (
    SELECT client, topic, `group`, together, offset, received_ms AS at_ms
    FROM lines JOIN places USING (topic, `group`) LATERAL VIEW explode(offsets) AS offset
    WHERE op = 'deliver'
), done AS (
    SELECT client, topic, `group`, offset,
        end_ms + if(op = 'nack' AND together, coalesce(delay_ms, :late_ms), 0) AS done_ms
    FROM lines JOIN places USING (topic, `group`) LATERAL VIEW explode(offsets) AS offset
    WHERE op IN ('ack', 'nack')
), held AS (
    SELECT client, topic, `group`, together, offset, at_ms, coalesce(
        min(if(done_ms >= at_ms, done_ms, NULL)), at_ms + :held_ms
    ) AS over_ms
    FROM got LEFT JOIN done USING (client, topic, `group`, offset)
    GROUP BY ALL
), steps AS (
    SELECT topic, `group`, if(together, '', client) AS whose, at_ms, over_ms, 1 AS n,
        NULL AS receipt
    FROM held
    UNION ALL
    SELECT topic, `group`, if(together, '', client), at_ms, at_ms, 0,
        struct(queue_offset, attempt, client, fired_at_ms, received_ms)
    FROM waiting JOIN places USING (topic, `group`)
    LATERAL VIEW explode(array(since_ms, received_ms)) AS at_ms
), gaps AS (
    SELECT *, greatest(0, at_ms - coalesce(max(over_ms) OVER (
        PARTITION BY topic, `group`, whose ORDER BY at_ms, n
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), at_ms)) AS gap_ms FROM steps
), sums AS (
    SELECT *, sum(n) OVER (PARTITION BY topic, `group` ORDER BY at_ms) AS arrived,
        sum(gap_ms) OVER (
            PARTITION BY topic, `group`, whose ORDER BY at_ms, n
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS idle_ms
    FROM gaps
), waits AS (
    SELECT topic, `group`, receipt.*, max(idle_ms) - min(idle_ms) AS free_ms,
        max(arrived) - min(arrived) AS came
    FROM sums WHERE n = 0 GROUP BY topic, `group`, receipt
)
SELECT *, received_ms - fired_at_ms AS late_ms
FROM waits LEFT ANTI JOIN rates USING (topic)
WHERE free_ms > :bound_ms + came

---- late
-- Timers that fired late: more than :fired_ms after they were due, or were scheduled if that was
-- later. Excused time does not count, nor does a backlog after it: :rate timers per millisecond. A
-- pause of the topic excuses the whole wait, for the release takes longer for a larger topic.
WITH fired AS (
    SELECT seq, mark, topic, due_ms, scheduled_at_ms, ended_at_ms,
        greatest(due_ms, scheduled_at_ms) AS since_ms
    FROM found WHERE end = 'fired' AND from_topic IS NULL
), waits AS (
    SELECT *, ended_at_ms - since_ms AS late_ms, excused(spans, since_ms, ended_at_ms) AS excused_ms
    FROM fired CROSS JOIN excused_spans WHERE ended_at_ms - since_ms > :fired_ms
), unpaused AS (
    SELECT * EXCEPT (spans) FROM waits
    LEFT ANTI JOIN (SELECT topic AS of, from_ms, until_ms FROM pauses) ON of = topic
        AND from_ms < ended_at_ms AND until_ms + :after_ms > since_ms
    WHERE late_ms - excused_ms > :fired_ms
), seconds_fired AS (
    SELECT ended_at_ms DIV 1000 AS second, count(*) AS n FROM fired GROUP BY 1
), waited AS (
    SELECT unpaused.*, coalesce(sum(n), 0) / :rate AS backlog_ms
    FROM unpaused LEFT JOIN seconds_fired
        ON excused_ms > 0 AND second BETWEEN since_ms DIV 1000 AND ended_at_ms DIV 1000
    GROUP BY ALL
)
SELECT seq, mark, topic, due_ms, scheduled_at_ms, ended_at_ms, late_ms
FROM waited WHERE late_ms - excused_ms - backlog_ms > :fired_ms

---- planned_late
-- Occurrences for which their series waited too long.
SELECT * EXCEPT (spans)
FROM (SELECT *, at_ms - since_ms AS late_ms FROM occurrences CROSS JOIN excused_spans)
WHERE since_ms IS NOT NULL AND NOT untrue
    AND late_ms - excused(spans, since_ms, at_ms) > :fired_ms
