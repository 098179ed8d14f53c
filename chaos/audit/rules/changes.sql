---- tried_changes
-- The view `tried`, with the lowest entry of a later request after an answer ALREADY_FIRED.
SELECT * FROM tried LEFT JOIN (
    SELECT seq, min(if(what = 'cancel', later_index, NULL)) AS cancel_later_index,
        min(if(what = 'move', later_index, NULL)) AS move_later_index
    FROM fired_answers GROUP BY seq
) USING (seq)

---- moves
-- A row per answer RESCHEDULED, with its request. `seq` and `id` are those of the new timer.
-- `told_old_seq` is the seq of the named timer; null if the request named a key. `times` is the
-- number of rows with the same new id.
SELECT seq_of(new_id) AS seq, new_id AS id, 'ok' AS outcome, topic AS asked_topic,
    asked_due_ms, due_of(new_id) AS answered_due_ms, seq_of(new_id) AS answered_seq,
    named_timers.seq AS told_old_seq, count(*) OVER (PARTITION BY new_id) AS times
FROM named_timers WHERE op = 'reschedule' AND result = 'RESCHEDULED'

---- fired_answers
-- Answers ALREADY_FIRED about timers named by id. `later_index`: the lowest log entry of a request
-- that the same client made after the answer. A FIRE behind that entry proves the answer untrue,
-- without any clock: `request` and `answered` are numbers of one sequence. Null: none is known.
WITH fired AS (
    SELECT client, answered AS number, what, seq, end_ms
    FROM named_timers WHERE by_id AND result = 'ALREADY_FIRED'
), entries AS (
    SELECT client, request AS number, schedule_index AS index
    FROM (SELECT client, request, get(marks, 0) AS mark FROM lines WHERE op = 'schedule')
    JOIN fates USING (mark)
    UNION ALL
    SELECT client, request, if(end IN ('cancelled', 'rescheduled'), end_index, NULL)
    FROM named_timers JOIN fates USING (seq)
    WHERE by_id AND result = if(op = 'cancel', 'CANCELLED', 'RESCHEDULED')
), points AS (
    SELECT *, NULL AS index FROM fired
    UNION ALL
    SELECT client, number, NULL, NULL, NULL, index FROM entries
    LEFT SEMI JOIN (SELECT client FROM fired WHERE number IS NOT NULL) USING (client)
    WHERE number IS NOT NULL
), later AS (
    SELECT *, min(index) OVER (PARTITION BY client ORDER BY number DESC) AS least FROM points
)
SELECT what, seq, end_ms, if(number IS NULL, NULL, least) AS later_index
FROM later WHERE what IS NOT NULL

---- fired_figures
-- The answers ALREADY_FIRED about fired timers, and those that are not judged. An answer is judged
-- by a later entry of its client, or by clocks if it came long before the firing or after it.
SELECT count(*) AS answers, count_if(
    later_index IS NULL AND coalesce(abs(end_ms - ended_at_ms) <= :error_ms, true)
) AS unjudged
FROM fired_answers JOIN fates USING (seq) WHERE end = 'fired'

---- miscounted
-- Topics in which answers by filter are not as logged. `logged`: the timers that were cancelled, or
-- moved, in whichever way: no more may be answered. `least`: those that no request of this kind may
-- have changed by id, less the answers of such requests by key: no fewer may be answered, if every
-- answer is known. A cancel by id is retried: the answer ALREADY_CANCELLED may be of its own doing.
WITH answered AS (
    SELECT op, topic, sum(told) AS told, sum(unknown) AS unknown FROM filters GROUP BY ALL
), ended AS (
    SELECT seq, name_of(topic) AS topic, if(end = 'cancelled', 'cancel', 'reschedule') AS op
    FROM fates LEFT ANTI JOIN series ON end_index = series_index
    WHERE end IN ('cancelled', 'rescheduled')
), logged AS (
    SELECT op, topic, count(*) AS logged, count_if(coalesce(if(
        op = 'cancel', greatest(cancel_ok, cancel_already, cancel_unknown),
        greatest(move_ok, move_unknown)
    ), 0) = 0) AS others
    FROM ended LEFT SEMI JOIN answered USING (op, topic) LEFT JOIN tried USING (seq)
    GROUP BY op, topic
), keyed AS (
    SELECT op, topic, count_if(
        outcome = 'unknown' OR result <=> if(op = 'cancel', 'CANCELLED', 'RESCHEDULED')
    ) AS by_key
    FROM named_timers WHERE NOT by_id GROUP BY op, topic
), compared AS (
    SELECT op, topic, coalesce(told, 0) AS told, coalesce(logged, 0) AS logged, unknown,
        greatest(coalesce(others, 0) - coalesce(by_key, 0), 0) AS least
    FROM answered LEFT JOIN logged USING (op, topic) LEFT JOIN keyed USING (op, topic)
)
SELECT op, topic, told, logged, least
FROM compared WHERE told > logged OR (unknown = 0 AND told < least)

---- flags
-- The evidence of changes by key and by filter, a row per timer of `changeable`: seq, logged_key,
-- and
--
--   overlaps        it was pending while another timer of its topic had its key
--   asked_cancel    a client may have cancelled it by key or filter
--   overtold        more cancels of its key were confirmed than the log has
--   undertold       it was cancelled, only cancels of its key can have done it, and fewer of them
--                   can have succeeded than the log has
--   denied          a client received NOT_FOUND for its key while it was pending
--   moved_outcome   of a timer made by a reschedule: ok or unknown, if the reschedule may have been
--                   by filter or by key; else null
--   moved_due_ms    the earliest due time that a reschedule by filter may have given it
WITH rows AS (
    SELECT changeable.*, filter_cancels, end = 'cancelled' AS cancelled,
        end NOT IN ('rejected', 'kept')
            AND NOT coalesce(end = 'fired' AND end_index = schedule_index, false) AS was_pending,
        end = 'cancelled' AND tried.seq IS NULL AND NOT coalesce(filter_cancels, false) AS alone
    FROM changeable LEFT JOIN filtered USING (seq) LEFT JOIN tried USING (seq)
    WHERE key IS NOT NULL
), keyed AS (
    SELECT *, count_if(cancelled) OVER of_key AS logged, count_if(alone) OVER of_key AS alones,
        coalesce(was_pending AND schedule_index < max(
            if(was_pending, coalesce(end_index, 9223372036854775807), NULL)
        ) OVER (
            PARTITION BY topic, key ORDER BY schedule_index, seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), false) AS overlaps
    FROM rows WINDOW of_key AS (PARTITION BY topic, key)
), by_key AS (
    SELECT seq, overlaps, told > logged AS overtold, alone AND key_cancels < alones AS undertold,
        key_cancels, key_moves
    FROM keyed LEFT JOIN key_requests USING (topic, key)
), denials AS (
    SELECT DISTINCT keyed.seq, true AS denied
    FROM keyed JOIN named_timers USING (topic, key)
    WHERE NOT by_id AND result IN ('NOT_FOUND', 'TIMER_NOT_FOUND')
        AND coalesce(ended_at_ms, 9223372036854775807) - :error_ms > end_ms
        AND scheduled_at_ms + :error_ms < start_ms AND end NOT IN ('rejected', 'kept')
)
SELECT seq, key AS logged_key, overlaps, overtold, undertold, denied,
    coalesce(key_cancels > 0, false) OR coalesce(filter_cancels, false) AS asked_cancel,
    CASE WHEN filter_ok THEN 'ok' WHEN filter_unknown OR key_moves > 0 THEN 'unknown' END
        AS moved_outcome,
    filter_due_ms AS moved_due_ms
FROM changeable
LEFT JOIN by_key USING (seq) LEFT JOIN filtered USING (seq) LEFT JOIN denials USING (seq)

---- operations
-- The numbers of answers to changes. Only schedules with keys are counted. `result` is the answer
-- per timer, or the outcome of a request without an answer. For a filter and a redrive it is
-- `changed`, and `n` counts timers. Deletions, seeks and redrives are `by` name.
WITH changed AS (
    SELECT op, outcome, changed, results, size(coalesce(keys, ids)) AS timers,
        CASE WHEN keys IS NOT NULL THEN 'key' WHEN ids IS NULL THEN 'filter' ELSE 'id' END AS by,
        if(op = 'schedule', coalesce(on_conflict, 'reject'), '') AS on_conflict
    FROM lines
    WHERE op IN ('cancel', 'reschedule') OR (op = 'schedule' AND keys IS NOT NULL)
), answered AS (
    SELECT op, by, on_conflict, if(by = 'filter', coalesce(changed, 1), 1) AS n,
        if(outcome = 'ok', coalesce(answer, if(op = 'schedule', 'SCHEDULED', NULL)), outcome)
            AS result
    FROM changed LATERAL VIEW explode(if(by = 'filter', array('changed'),
        coalesce(results, array_repeat(cast(NULL AS STRING), timers)))) AS answer
    UNION ALL
    SELECT op, 'name', '', coalesce(changed, 1), if(changed IS NULL, outcome, 'changed')
    FROM lines WHERE op IN ('delete', 'seek', 'delete_group', 'redrive')
)
SELECT op, by, on_conflict, result, sum(n) AS n
FROM answered GROUP BY op, by, on_conflict, result ORDER BY op, by, on_conflict, result
