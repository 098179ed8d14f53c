---- acks_unasked
-- The number of messages that are acked in the log without a request in any history. It is no
-- violation: a client that died may not have recorded its last acks. Only groups that a history
-- opened count. Moved messages are left out: the log itself acks them. So are topics and groups
-- with several lives: histories need not name the life.
SELECT count(*) AS n
FROM (
    SELECT topic, `group`, offset
    FROM acks LATERAL VIEW explode(sequence(queue_offset, queue_offset + count - 1)) AS offset
)
LEFT SEMI JOIN (
    SELECT topic, `group` FROM lines
    LEFT ANTI JOIN (SELECT name_of(topic) AS topic FROM deletions) USING (topic)
    LEFT ANTI JOIN (
        SELECT name_of(topic) AS topic, name_of(`group`) AS `group` FROM groups WHERE sought
    ) USING (topic, `group`)
    WHERE op = 'open'
) USING (topic, `group`)
LEFT ANTI JOIN (SELECT topic, `group`, queue_offset AS offset FROM asked_acks)
    USING (topic, `group`, offset)
LEFT ANTI JOIN (SELECT topic, `group`, queue_offset AS offset FROM moved)
    USING (topic, `group`, offset)

---- shared_deliveries [prioritized]
-- Deliveries of groups without an order, of topics with priorities.
SELECT topic, `group`, epoch, handed_out_ms, fired_at_ms, queue_offset AS offset, attempt
FROM deliveries
LEFT SEMI JOIN (
    SELECT shared.topic, `group`
    FROM (SELECT *, name_of(topic) AS name FROM groups WHERE type = 'shared') AS shared
    JOIN prioritized ON name = prioritized.topic
) USING (topic, `group`)
WHERE handed_out_ms IS NOT NULL

---- lateness
-- A histogram of the fired timers. `what` is fire, or deliver for the first delivery. `bucket` is
-- the start of the :bucket_ms in which the timer fired or was delivered. The phase is the one at
-- the time when the timer could fire.
SELECT what, coalesce(name, 'steady') AS phase, at DIV :bucket_ms * :bucket_ms AS bucket, late_ms,
    count(*) AS n
FROM timely LEFT JOIN seconds
    ON could_fire_ms DIV 1000 = second AND could_fire_ms >= start_ms AND could_fire_ms < end_ms
GROUP BY ALL

---- reaches
-- The stretch of each fault: from its strike to its recovery, and at least :aftermath_ms.
SELECT cast(number AS STRING) AS name, start_ms,
    greatest(start_ms + :aftermath_ms, recovered_ms) AS end_ms
FROM faults

---- lateness_in
-- The same for each stretch in which timers could fire. If stretches overlap, a timer counts for
-- each. A timer that never fired is not counted here: it is lost.
SELECT struct(name AS number, what) AS part, late_ms, count(*) AS n
FROM timely JOIN seconds
    ON could_fire_ms DIV 1000 = second AND could_fire_ms >= start_ms AND could_fire_ms < end_ms
GROUP BY ALL

---- breakdowns
-- Three views of the histogram in one table: by phase, in all, by bucket. `phase` is `all` in the
-- second view and null in the third; `bucket` is null except in the third.
SELECT struct(what, phase, bucket) AS part, late_ms, n
FROM (
    SELECT what, phase, NULL AS bucket, late_ms, n FROM histogram
    UNION ALL
    SELECT what, 'all', NULL, late_ms, n FROM histogram
    UNION ALL
    SELECT what, NULL, bucket, late_ms, n FROM histogram
)

---- percentiles
-- The exact percentiles of each part of the histogram `late`.
SELECT part.*, n, p50, p90, p99, p999, max
FROM (
    SELECT part, sum(n) AS n, min(if(upto >= ceil(0.5 * whole), late_ms, NULL)) AS p50,
        min(if(upto >= ceil(0.9 * whole), late_ms, NULL)) AS p90,
        min(if(upto >= ceil(0.99 * whole), late_ms, NULL)) AS p99,
        min(if(upto >= ceil(0.999 * whole), late_ms, NULL)) AS p999, max(late_ms) AS max
    FROM (
        SELECT *, sum(n) OVER (PARTITION BY part ORDER BY late_ms) AS upto,
            sum(n) OVER (PARTITION BY part) AS whole
        FROM (SELECT part, late_ms, sum(n) AS n FROM late GROUP BY part, late_ms)
    )
    GROUP BY part
)

---- throughput
-- The numbers of timers per bucket.
SELECT coalesce(end_ms, received_ms) DIV :bucket_ms * :bucket_ms AS bucket,
    coalesce(sum(if(op = 'schedule' AND outcome = 'ok', size(marks), NULL)), 0) AS schedule,
    coalesce(sum(if(op = 'schedule' AND outcome != 'ok', size(marks), NULL)), 0) AS failed,
    coalesce(sum(if(op = 'deliver', size(offsets), NULL)), 0) AS deliver
FROM lines WHERE op IN ('schedule', 'deliver')
GROUP BY ALL

---- successes
-- The times of all successes; no row twice.
SELECT 'schedule' AS plane, end_ms AS at_ms FROM lines WHERE op = 'schedule' AND outcome = 'ok'
UNION
SELECT 'deliver', received_ms FROM lines WHERE op = 'deliver'
UNION
SELECT 'fire', ended_at_ms FROM found WHERE end = 'fired'

---- works
-- The work of each plane that had any. `begin_ms`: the first request, the first time when a timer
-- could fire, or the first firing that a consumer waited for. `end_ms`: the last success. If the
-- work is `undone`, later work was waited for and none of it succeeded: then it is the end of the
-- last wait, at which a client gave the request up or the run ended. A schedule that failed within
-- :waited_ms was refused, and a refusal is an answer.
WITH parts AS (
    SELECT 'schedule' AS plane, start_ms AS begin_ms, if(outcome = 'ok', end_ms, NULL) AS done_ms,
        if(outcome = 'ok' OR (outcome = 'fail' AND end_ms - start_ms < :waited_ms), NULL, end_ms)
            AS waited_ms
    FROM lines WHERE op = 'schedule'
    UNION ALL
    SELECT 'fire', greatest(due_ms, scheduled_at_ms), ended_at_ms,
        if(end = 'pending', :until_ms, NULL)
    FROM found WHERE end = 'fired' OR (end = 'pending' AND verdict = 'lost')
    UNION ALL
    SELECT 'deliver', ended_at_ms, received_ms, if(verdict = 'lost', :until_ms, NULL)
    FROM found WHERE end = 'fired' AND (received_ms IS NOT NULL OR verdict = 'lost')
), planes AS (
    SELECT plane, min(begin_ms) AS begin_ms, max(done_ms) AS done_ms,
        max(if(waited_ms IS NULL, NULL, struct(begin_ms, waited_ms))) AS waited
    FROM parts GROUP BY plane
)
SELECT plane, if(plane = 'deliver', greatest(begin_ms, opened_ms), begin_ms) AS begin_ms,
    if(undone, waited.waited_ms, done_ms) AS end_ms, undone
FROM (
    SELECT *, waited IS NOT NULL AND coalesce(waited.begin_ms > done_ms, true) AS undone
    FROM planes
)
CROSS JOIN (SELECT min(start_ms) AS opened_ms FROM lines WHERE op = 'open')

---- gaps
-- The gaps without a success of at least :gap_ms. A gap lies between two successes (`moments`), or
-- between the start of the plane's work and its first success. A gap after the last success, with
-- work that never succeeded, is not `over`.
SELECT plane, from_ms, to_ms, over
FROM (
    SELECT plane, lag(at_ms) OVER (PARTITION BY plane ORDER BY at_ms) AS from_ms, at_ms AS to_ms,
        over
    FROM (
        SELECT plane, at_ms, true AS over FROM moments
        UNION ALL
        SELECT plane, begin_ms, true FROM works
        UNION ALL
        SELECT plane, end_ms, false FROM works WHERE undone
    )
)
WHERE to_ms - from_ms >= :gap_ms

---- recoveries
-- The time of each fault by which a schedule was answered and a timer fired after its heal. A plane
-- without a success after the heal does not delay it. Null: the fault touches a gap of schedules or
-- firings that is not over.
SELECT number, if(bool_or(lasting), NULL, max(at_ms)) AS at_ms
FROM (
    SELECT number, heal_ms AS at_ms, false AS lasting FROM faults
    UNION ALL
    SELECT /*+ BROADCAST(faults) */ number, min(at_ms), false
    FROM moments JOIN faults ON at_ms >= heal_ms WHERE plane IN ('schedule', 'fire')
    GROUP BY number, plane
    UNION ALL
    SELECT /*+ BROADCAST(faults) */ number, NULL, true
    FROM gaps JOIN faults
        ON to_ms > start_ms AND from_ms < greatest(start_ms + :aftermath_ms, heal_ms)
    WHERE plane IN ('schedule', 'fire') AND NOT over
)
GROUP BY number

---- longest_gaps
-- The longest gap of each plane per fault. A gap belongs to a fault if it ends after the strike and
-- begins before the recovery, or less than :aftermath_ms after the strike. A gap that is not over
-- is `open`, and is preferred to longer ones.
SELECT number, plane, gap.ms, -gap.minus_from_ms - start_ms AS after_ms, gap.open
FROM (
    SELECT /*+ BROADCAST(faults) */ number, plane, start_ms,
        max(struct(NOT over AS open, to_ms - from_ms AS ms, -from_ms AS minus_from_ms)) AS gap
    FROM gaps JOIN faults
        ON to_ms > start_ms AND from_ms < greatest(start_ms + :aftermath_ms, recovered_ms)
    GROUP BY number, plane, start_ms
)

---- repeated
-- The seqs of timers with more deliveries than groups, or with a redelivery.
SELECT seq FROM found WHERE deliveries > groups
UNION
SELECT seq FROM given WHERE attempt > 1

---- redelivered
-- The deliveries of `repeated` timers.
SELECT * FROM given LEFT SEMI JOIN repeated USING (seq)

---- arrived_after_ack
-- The number of deliveries of `repeated` timers that arrived after a confirmed ack.
SELECT count(*) AS n
FROM redelivered JOIN (
    SELECT topic, `group`, queue_offset, min(confirmed_ms) AS confirmed_ms
    FROM confirmed LEFT SEMI JOIN redelivered USING (topic, `group`, queue_offset) GROUP BY ALL
) USING (topic, `group`, queue_offset)
WHERE received_ms > confirmed_ms

---- redeliveries
-- The number of redeliveries of `repeated` timers by reason. The end of the previous delivery is
-- found by slot and attempt:
--
--     nacked          its consumer nacked the message
--     lease ended     its lease ended before an ack
--     recalled        in an ordered group, an earlier message came back
--     failover        none of these, and the redelivery has a later epoch
--     first to arrive marked as a redelivery, and no consumer received an earlier delivery: it was
--                     reserved or in flight when the leadership or the consumer ended
--     unmarked        the same attempt again
--     not in the log  none of these: the reason is unknown
SELECT CASE
        WHEN attempts IS NULL THEN 'first to arrive'
        WHEN attempt = attempts THEN 'unmarked'
        WHEN why = 'ended' THEN 'lease ended'
        WHEN why IS NOT NULL THEN why
        WHEN epoch > epoch_before THEN 'failover'
        ELSE 'not in the log'
    END AS reason, count(*) AS n
FROM (
    SELECT topic, `group`, queue_offset, attempt, epoch, lag(attempt) OVER before AS attempts,
        lag(epoch) OVER before AS epoch_before
    FROM redelivered WINDOW before AS (
        PARTITION BY seq, topic, `group`, queue_offset ORDER BY attempt, epoch, received_ms
    )
)
LEFT JOIN returns USING (topic, `group`, queue_offset, attempts)
WHERE attempts IS NOT NULL OR attempt > 1
GROUP BY 1 ORDER BY 1
