---- received
-- A row per delivered timer, with counts of its deliveries and their faults. `groups`: those that
-- received it. `reached`: those of them that are not over at the run's end. `again`: deliveries
-- after the ack, by the log's order (verdict.py). `unmarked`: the same attempt again.
WITH numbered AS (
    SELECT *, lag(attempt) OVER (PARTITION BY seq, `group` ORDER BY attempt) AS before
    FROM (
        -- one exchange serves the window and the grouping
        SELECT /*+ REPARTITION(seq) */ given.*, xxhash64(given.topic) AS topic_hash, over, unkept,
            epoch > ack_epoch OR attempt > ack_attempts AS again
        FROM given
        LEFT JOIN (SELECT *, true AS unkept FROM unkept) USING (topic, `group`, queue_offset)
        LEFT JOIN (SELECT topic, `group`, true AS over FROM groups WHERE over)
            USING (topic, `group`)
        LEFT JOIN acked ON given.topic = acked.topic AND given.`group` = acked.`group`
            AND shiftright(queue_offset, 8) = stretch AND queue_offset BETWEEN first AND last
    )
)
SELECT seq, count(*) AS deliveries, count_if(before IS NULL) AS groups,
    count_if(before IS NULL AND over IS NULL) AS reached, count_if(before = attempt) AS unmarked,
    count_if(again) AS again, count_if(unkept) AS unkept, min(received_ms) AS received_ms,
    min(topic_hash) AS topic_hash_min, max(topic_hash) AS topic_hash_max,
    min(queue_offset) AS offset_min, max(queue_offset) AS offset_max,
    min(due_ms) AS due_ms_min, max(due_ms) AS due_ms_max,
    min(mark) AS mark_min, max(mark) AS mark_max,
    min(fired_at_ms) AS fired_at_ms_min, max(fired_at_ms) AS fired_at_ms_max
FROM numbered GROUP BY seq

---- expiry
-- A row per expired message. `expired_groups`: the groups read to the end in which it expired
-- without a delivery. `late`: such a group received it after it had expired there. `over_ms`: the
-- latest due time with which it was allowed to expire; -1: none.
SELECT topic, queue_offset, count_if(read AND epoch IS NULL) AS expired_groups,
    bool_or(read AND (epoch > expire_epoch OR attempt > attempts)) AS late,
    min(if(ttl_ms > 0, expired_at_ms - ttl_ms, -1)) AS over_ms
FROM expired LEFT JOIN (SELECT topic, `group`, true AS read FROM readers) USING (topic, `group`)
LEFT JOIN (
    SELECT topic, `group`, queue_offset, max(epoch) AS epoch, max(attempt) AS attempt
    FROM given GROUP BY ALL
) USING (topic, `group`, queue_offset)
GROUP BY topic, queue_offset

---- carried_off
-- A row per message that was moved unseen. `carried_groups`: the groups read to the end from which
-- it was moved to another topic without a delivery.
SELECT topic, queue_offset, count(*) AS carried_groups
FROM moved LEFT SEMI JOIN readers USING (topic, `group`)
LEFT ANTI JOIN given USING (topic, `group`, queue_offset)
GROUP BY topic, queue_offset

---- log
-- The fates of timers, and the messages that were moved, in topics that clients used. An entry of a
-- node differs at an index of those that `disagree`. `gone`: dropped with its topic. `by_ms`: time
-- by which policies of the topic may have moved the due time back. `revoked`: a SERIES entry ended
-- it. `planned_ms`: of an occurrence.
--
-- A timer is requested by its mark, one that a reschedule made by its seq. The log itself makes
-- moved messages and occurrences: for them `by_mark` is null.
WITH made AS (
    SELECT *, CAST(NULL AS STRING) AS from_topic FROM fates
    LEFT SEMI JOIN asking_topics ON name_of(topic) = name
    UNION ALL
    SELECT * EXCEPT (from_group, from_offset, redriven, from_topic), from_topic FROM carried
    LEFT SEMI JOIN used_topics ON name_of(topic) = name
), kinds AS (
    SELECT made.*, planned_ms,
        if(from_topic IS NULL AND planned_ms IS NULL, old_due_ms IS NULL, NULL) AS by_mark
    FROM made LEFT JOIN (
        SELECT seq, planned_ms FROM occurrences WHERE seq > 0 AND since_ms IS NOT NULL
    ) USING (seq)
)
SELECT *, if(by_mark, mark, seq) AS number, count(*) OVER (
        PARTITION BY by_mark, if(by_mark, mark, seq)
    ) AS copies
FROM kinds
LEFT JOIN expiry USING (topic, queue_offset)
LEFT JOIN carried_off USING (topic, queue_offset)
LEFT JOIN postponed USING (topic)
LEFT JOIN (SELECT delete_index AS end_index, true AS gone FROM deletions) USING (end_index)
LEFT JOIN (SELECT DISTINCT series_index AS end_index, true AS revoked FROM series)
    USING (end_index)
LEFT JOIN (SELECT DISTINCT index AS schedule_index, true AS begin_differs FROM disputes WHERE NOT stale)
    USING (schedule_index)
LEFT JOIN (SELECT DISTINCT index AS end_index, true AS end_differs FROM disputes WHERE NOT stale)
    USING (end_index)

---- known
-- Requests and deliveries beside the log, a row per timer that any of the three witnesses knows.
--
-- An answer to a reschedule by id or key requests the new timer. A reschedule without one may have
-- made it, too: `moved_outcome` of the query `flags`, and `tried_outcome` of a request that named
-- the old timer. An answer that contradicts the log is a violation of the old timer.
WITH requests AS (
    SELECT true AS by_mark, mark AS number, topic AS asked_topic, outcome, on_conflict,
        asked_due_ms, id, key, told, existing_seq, answered_due_ms, answered_seq, least_due_ms,
        most_due_ms, NULL AS told_old_seq, NULL AS times
    FROM asks
    UNION ALL
    SELECT false, seq, asked_topic, outcome, NULL, asked_due_ms, id, NULL, NULL, NULL,
        answered_due_ms, answered_seq, NULL, NULL, told_old_seq, times
    FROM moves
), requested AS (
    SELECT log.* EXCEPT (by_mark, number, topic, mark, seq), requests.* EXCEPT (by_mark, number),
        topic AS log_topic, coalesce(mark, if(requests.by_mark, requests.number, NULL)) AS own_mark,
        coalesce(seq, if(requests.by_mark, NULL, requests.number)) AS seq
    FROM log FULL JOIN requests
        ON log.by_mark = requests.by_mark AND log.number = requests.number
), beside AS (
    SELECT *, coalesce(log_topic, asked_topic) AS topic, coalesce(own_mark, mark_min) AS mark,
        if(log_topic IS NULL, NULL, xxhash64(log_topic)) AS log_topic_hash,
        if(end = 'fired', ended_at_ms, NULL) AS fired_ms
    FROM requested
    LEFT JOIN (
        SELECT seq AS other_seq, CASE
                WHEN move_unknown > 0 THEN 'unknown'
                WHEN move_fired + move_already + move_dropped > 0 OR move_missing_ms IS NOT NULL
                    THEN 'ok'
            END AS tried_outcome
        FROM tried_changes
    ) USING (other_seq)
    LEFT JOIN flags USING (seq)
    FULL JOIN received USING (seq)
    LEFT JOIN tried_changes USING (seq)
)
SELECT * EXCEPT (outcome, asked_due_ms, key, starts),
    CASE
        WHEN from_topic IS NOT NULL OR planned_ms IS NOT NULL THEN 'ok'
        WHEN old_due_ms IS NOT NULL THEN coalesce(outcome, tried_outcome, moved_outcome)
        ELSE outcome
    END AS outcome,
    CASE
        WHEN planned_ms IS NOT NULL THEN planned_ms
        WHEN old_due_ms IS NOT NULL THEN coalesce(asked_due_ms, moved_due_ms)
        ELSE asked_due_ms
    END AS asked_due_ms,
    coalesce(key, if(old_due_ms IS NULL, NULL, logged_key)) AS key,
    size(filter(starts, start -> start <= queue_offset)) AS expected_groups
FROM beside LEFT JOIN (
    SELECT topic, collect_list(start_offset) AS starts FROM readers GROUP BY topic
) USING (topic)

---- verdicts
-- A row per timer, with its verdict and the evidence. The first violation in this order counts. Of
-- a timer without one, the fine verdict is mostly its end. Null is no violation.
WITH judged AS (
    SELECT *,
        coalesce(cancel_ok + cancel_already + cancel_unknown, 0) > 0
            OR coalesce(asked_cancel, false) OR coalesce(revoked, false) AS asked_to_end,
        coalesce(begin_differs, end_differs, false) AS disagree,
        offset_min != offset_max OR topic_hash_min != topic_hash_max AS several,
        offset_min != queue_offset OR offset_max != queue_offset
            OR due_ms_min != due_ms OR due_ms_max != due_ms OR mark_min != mark OR mark_max != mark
            OR topic_hash_min != log_topic_hash OR topic_hash_max != log_topic_hash
            OR fired_at_ms_min != fired_ms OR fired_at_ms_max != fired_ms AS differs,
        due_ms - :tick_ms - coalesce(by_ms, 0) AS undated_ms,
        end IN ('rejected', 'kept') AS no_timer,
        -- The product has forgotten timers that were dropped with their topic. For them it returns
        -- NOT_FOUND, and ALREADY_FIRED after the due time in the id.
        gone IS NULL AS remembered,
        -- The mode of a row whose key was taken. In a reschedule `other_seq` is the old timer.
        if(on_conflict = 'update', 'replace', on_conflict) AS asked_mode,
        CASE
            WHEN old_due_ms IS NOT NULL THEN NULL WHEN end = 'rejected' THEN 'reject'
            WHEN end = 'kept' THEN 'keep' ELSE 'replace'
        END AS mode
    FROM known
)
SELECT CASE
    WHEN disagree OR (copies = 1 AND (answered_seq != seq OR answered_due_ms != due_ms))
        OR asked_topic != name_of(log_topic) OR (NOT several AND differs)
        THEN 'diverged'
    WHEN copies > 1 OR several THEN 'duplicate_fire'
    WHEN outcome IS NULL OR (end IS NOT NULL AND outcome = 'fail')
        OR (deliveries > 0 AND (end IS NULL OR end IN ('pending', 'held', 'dropped')))
        THEN 'phantom'
    WHEN overlaps OR (no_timer AND deliveries > 0)
        OR (no_timer AND told IN ('SCHEDULED', 'REPLACED'))
        THEN 'key_doubled'
    WHEN (cancel_ok > 0 AND end = 'fired') OR (overtold AND end = 'fired')
        OR (end = 'cancelled' AND deliveries > 0)
        THEN 'cancelled_delivered'
    WHEN (replace_ok > 0 AND end = 'fired') OR (end = 'replaced' AND deliveries > 0)
        THEN 'replaced_delivered'
    WHEN (move_ok > 0 AND end = 'fired') OR (end = 'rescheduled' AND deliveries > 0)
        THEN 'rescheduled_delivered'
    WHEN (end = 'fired' AND ended_at_ms < due_ms) OR fired_at_ms_min < due_ms
        OR due_ms < asked_due_ms  -- docs/adr/0006-past-due.md
        OR due_ms + :error_ms < least_due_ms OR received_ms + :error_ms < due_ms
        THEN 'early'
    WHEN undated_ms - :error_ms > most_due_ms OR (
            old_due_ms IS NULL AND asked_due_ms IS NOT NULL
            AND undated_ms > greatest(asked_due_ms, scheduled_at_ms)
        )
        THEN 'misdated'
    WHEN again > 0 THEN 'acked_again'
    WHEN late THEN 'expired_delivered'
    WHEN end = 'fired' AND due_ms > over_ms THEN 'expired_early'
    WHEN unkept > 0 THEN 'ack_lost'
    WHEN unmarked > 0 THEN 'unmarked_redelivery'
    -- ALREADY_CANCELLED may be caused by the same client: the first answer was lost, and the client
    -- retried.
    WHEN (remembered AND cancel_fired > 0 AND end != 'fired')
        OR (remembered AND cancel_fired_ms + :error_ms < ended_at_ms)
        OR (remembered AND cancel_later_index < end_index)
        OR (cancel_already > 0 AND end NOT IN ('cancelled', 'replaced', 'rescheduled'))
        OR (cancel_dropped > 0 AND end != 'dropped')
        OR (cancel_missing_ms IS NOT NULL AND end = 'held')
        OR (cancel_ok > 0 AND end != 'cancelled') OR cancel_ok > 1
        OR (remembered AND cancel_missing_ms < coalesce(ended_at_ms, due_ms) + :horizon_ms)
        OR undertold OR denied
        THEN 'cancel_untrue'
    WHEN (replace_ok > 0 AND end != 'replaced') OR replace_ok > 1
        OR (told IN ('REJECTED', 'KEPT') AND end != lower(told))
        OR (end IS NOT NULL AND told NOT IN ('SCHEDULED', 'NOT_PENDING') AND other_seq IS NULL)
        OR (told = 'NOT_PENDING' AND (end != 'rejected' OR other_seq IS NOT NULL))
        OR (told = 'NOT_PENDING' AND on_conflict != 'update')
        OR (told != 'SCHEDULED' AND existing_seq != other_seq)
        OR (told = 'SCHEDULED' AND other_seq IS NOT NULL)
        OR (other_seq IS NOT NULL AND NOT asked_mode <=> mode)
        THEN 'conflict_untrue'
    WHEN (remembered AND move_fired > 0 AND end != 'fired')
        OR (remembered AND move_fired_ms + :error_ms < ended_at_ms)
        OR (remembered AND move_later_index < end_index)
        OR (move_already > 0 AND end NOT IN ('cancelled', 'replaced', 'rescheduled'))
        OR (move_dropped > 0 AND end != 'dropped')
        OR (move_missing_ms IS NOT NULL AND end = 'held')
        OR (move_ok > 0 AND end != 'rescheduled') OR move_ok > 1
        OR (remembered AND move_missing_ms < coalesce(ended_at_ms, due_ms) + :horizon_ms)
        OR told_old_seq != other_seq OR times > 1
        THEN 'reschedule_untrue'
    WHEN (outcome = 'ok' AND end IS NULL) OR (end = 'pending' AND due_ms + :lost_ms <= :until_ms)
        OR (end = 'fired' AND coalesce(reached, 0) + coalesce(expired_groups, 0)
            + coalesce(carried_groups, 0) < expected_groups)
        OR (end = 'cancelled' AND NOT asked_to_end)
        THEN 'lost'
    -- fine
    WHEN end IS NULL OR (no_timer AND outcome != 'ok')
        THEN if(outcome = 'fail', 'refused', 'unknown_not_fired')
    WHEN end = 'fired' AND expired_groups > 0 THEN 'expired'
    WHEN end IN ('pending', 'held') AND outcome = 'unknown' THEN 'unknown_not_fired'
    WHEN end != 'fired' THEN end
    WHEN outcome = 'unknown' THEN 'unknown_fired_once'
    WHEN from_topic IS NOT NULL THEN 'carried'
    ELSE 'ok'
END AS verdict,
    id, mark, seq, topic, due_ms, asked_due_ms, outcome, copies, end, key, told, other_seq,
    old_due_ms, scheduled_at_ms, ended_at_ms, end_epoch, queue_offset, deliveries, groups,
    received_ms, from_topic
FROM judged
