---- deliveries
-- A row per message that a consumer received, repetitions included.
SELECT client, topic, `group`, group_id, epoch, lease_id, stream, received_ms, handed_out_ms,
    queue_offset, get(ids, nth) AS id, get(marks, nth) AS mark, get(attempts, nth) AS attempt,
    get(fired_at_ms, nth) AS fired_at_ms
FROM lines LATERAL VIEW posexplode(offsets) AS nth, queue_offset
WHERE op = 'deliver'

---- answers
-- A row per message about which a consumer received an answer.
SELECT op, client, topic, `group`, epoch, lease_id, start_ms, end_ms, delay_ms, queue_offset,
    get(results, nth) AS result
FROM lines LATERAL VIEW posexplode(offsets) AS nth, queue_offset
WHERE op IN ('ack', 'nack', 'extend') AND outcome = 'ok'

---- asked_acks
-- A row per message: the time of the first request to ack it. A rejected one had no effect.
SELECT topic, `group`, queue_offset, min(start_ms) AS asked_ms
FROM lines LATERAL VIEW explode(offsets) AS queue_offset
WHERE op = 'ack' AND outcome != 'fail'
GROUP BY topic, `group`, queue_offset

---- acked
-- The log's acks: runs of messages. A run has a row for each stretch of 256 offsets that it
-- touches, so that messages are joined with runs by equal stretches first.
SELECT topic, `group`, queue_offset AS first, queue_offset + count - 1 AS last, stretch, ack_epoch,
    attempts AS ack_attempts
FROM acks LATERAL VIEW explode(sequence(
    shiftright(queue_offset, 8), shiftright(queue_offset + count - 1, 8)
)) AS stretch

---- moved
-- Messages that were moved to another topic.
SELECT from_topic AS topic, from_group AS `group`, from_offset AS queue_offset FROM carried

---- queue_places
-- Fired messages, with their places in the queues.
SELECT seq, topic, queue_offset, due_ms, ended_at_ms, end_index
FROM fates WHERE end = 'fired' AND queue_offset IS NOT NULL
UNION ALL
SELECT seq, topic, queue_offset, due_ms, ended_at_ms, end_index
FROM carried WHERE end = 'fired' AND queue_offset IS NOT NULL

---- opened
-- Groups that a history opened, by their plain names.
SELECT DISTINCT name_of(topic) AS name, name_of(`group`) AS group_name FROM lines WHERE op = 'open'

---- read_groups
-- Groups that clients read, by their plain names. A client that redrives reads the dead letters.
SELECT name_of(topic) AS name, name_of(`group`) AS group_name
FROM lines WHERE op IN ('open', 'deliver')
UNION
SELECT name_of(topic), 'dead-letters' FROM lines WHERE op = 'redrive'

---- topic_lives
-- Fired timers of topics that have the name of a deleted one.
WITH made AS (
    SELECT seq, topic AS life, name_of(topic) AS name FROM fates
    UNION ALL
    SELECT seq, topic, name_of(topic) FROM carried
)
SELECT seq, life, name
FROM made LEFT SEMI JOIN (SELECT name FROM made WHERE life != name) USING (name)

---- sought
-- Groups with several lives, by their plain names.
SELECT DISTINCT name_of(topic) AS name, name_of(`group`) AS group_name FROM groups WHERE sought

---- untold
-- Those with a delivery that does not name its life.
SELECT DISTINCT topic, `group`
FROM lines JOIN sought ON name_of(topic) = name AND `group` = group_name
WHERE op = 'deliver' AND group_id IS NULL

---- ordered
-- Groups that keep an order.
SELECT topic, `group`, type FROM groups WHERE type != 'shared'

---- nacks
SELECT * FROM returns WHERE why = 'nacked'

---- after_nacks
-- Deliveries after a nack, by their attempt, as for acks (verdict.py).
SELECT topic, `group`, queue_offset, return_index, not_before_ms, handed_out_ms
FROM nacks JOIN deliveries USING (topic, `group`, queue_offset)
WHERE attempt > attempts

---- leases
-- Deliveries with the length of their lease: the one that the consumer requested, or else the
-- shortest that the group ever had.
SELECT *, coalesce(own_ms, least_ms) AS lease_ms
FROM deliveries
JOIN (SELECT topic, `group`, min(lease_ms) AS least_ms FROM settings GROUP BY ALL)
    USING (topic, `group`)
LEFT JOIN (
    SELECT client, topic, `group`, min(lease_ms) AS own_ms FROM lines WHERE op = 'open' GROUP BY ALL
) USING (client, topic, `group`)
WHERE handed_out_ms IS NOT NULL

---- occurrence_deliveries
-- Messages of histories that name series. Those that were moved are left out.
SELECT client, topic, seq_of(id) AS seq, get(series, nth) AS series, get(occurrences, nth) AS number
FROM lines LATERAL VIEW posexplode(ids) AS nth, id
WHERE op = 'deliver' AND occurrences IS NOT NULL AND seq_of(id) NOT IN (SELECT seq FROM carried)

---- series_changes
-- Confirmed changes of series, with the items of their fields.
SELECT DISTINCT topic, key, op, outcome, said,
    map_entries(from_json(coalesce(said, '{}'), 'MAP<STRING, STRING>')) AS told
FROM lines WHERE op IN ('create_series', 'alter_series', 'delete_series')

---- series_entries
SELECT name_of(topic) AS topic, key, op, fields,
    map_entries(from_json(fields, 'MAP<STRING, STRING>')) AS logged
FROM series

---- limited
-- Groups that always had a limit of messages in flight, and its greatest value.
SELECT topic, `group`, max(max_in_flight) AS most
FROM settings GROUP BY ALL HAVING min(max_in_flight) > 0

---- prioritized
-- Topics for which a client requested priorities.
SELECT DISTINCT topic FROM lines WHERE op = 'schedule' AND priorities IS NOT NULL

---- named_timers
-- A row per timer that a cancel or a reschedule (`what`: cancel, move) named by id or by key, with
-- the answer about it.
SELECT op, if(op = 'cancel', 'cancel', 'move') AS what, client, topic, outcome, start_ms, end_ms,
    request, answered, ids IS NOT NULL AS by_id, seq_of(get(ids, nth)) AS seq,
    get(keys, nth) AS key, get(results, nth) AS result, get(new_ids, nth) AS new_id,
    get(due_ms, nth) AS asked_due_ms
FROM lines LATERAL VIEW posexplode(coalesce(ids, keys)) AS nth, named
WHERE op IN ('cancel', 'reschedule')

---- tried
-- A row per timer that a request named by id, or that an answer REPLACED named, with the numbers of
-- answers: cancel_* to cancels, move_* to reschedules. *_missing_ms and *_fired_ms: the first time
-- when an answer was that there is no such timer, or that it had fired. `replace_ok`: the number of
-- schedules that were answered as replacing it.
SELECT seq,
    count_if(what = 'cancel' AND result = 'CANCELLED') AS cancel_ok,
    count_if(what = 'cancel' AND result IN ('ALREADY_CANCELLED', 'RESCHEDULED')) AS cancel_already,
    count_if(what = 'cancel' AND result = 'ALREADY_FIRED') AS cancel_fired,
    count_if(what = 'cancel' AND result = 'DROPPED') AS cancel_dropped,
    count_if(what = 'cancel' AND outcome = 'unknown') AS cancel_unknown,
    count_if(what = 'move' AND result = 'RESCHEDULED') AS move_ok,
    count_if(what = 'move' AND result = 'ALREADY_CANCELLED') AS move_already,
    count_if(what = 'move' AND result = 'ALREADY_FIRED') AS move_fired,
    count_if(what = 'move' AND result = 'DROPPED') AS move_dropped,
    count_if(what = 'move' AND outcome = 'unknown') AS move_unknown,
    min(if(what = 'cancel' AND result IN ('NOT_FOUND', 'TIMER_NOT_FOUND'), end_ms, NULL))
        AS cancel_missing_ms,
    min(if(what = 'cancel' AND result = 'ALREADY_FIRED', end_ms, NULL)) AS cancel_fired_ms,
    min(if(what = 'move' AND result IN ('NOT_FOUND', 'TIMER_NOT_FOUND'), end_ms, NULL))
        AS move_missing_ms,
    min(if(what = 'move' AND result = 'ALREADY_FIRED', end_ms, NULL)) AS move_fired_ms,
    count_if(what = 'replace') AS replace_ok
FROM (
    SELECT what, seq, result, outcome, end_ms FROM named_timers WHERE by_id
    UNION ALL
    SELECT 'replace', existing_seq, NULL, NULL, NULL FROM keyed WHERE told = 'REPLACED'
)
GROUP BY seq

---- filters
-- Changes by filter. Requests with the same op, topic and prefix are one row, with the earliest
-- `from_ms` and the latest `to_ms`. `ok` and `unknown` are numbers of requests by outcome. `told`
-- is the number of timers in the answers. `due_ms_min` is the earliest due time that a reschedule
-- set.
SELECT op, topic, coalesce(key_prefix, '') AS prefix, min(coalesce(due_from_ms, 0)) AS from_ms,
    max(coalesce(nullif(due_to_ms, 0), 9223372036854775807)) AS to_ms,
    count_if(outcome = 'ok') AS ok, count_if(outcome = 'unknown') AS unknown, sum(changed) AS told,
    min(coalesce(get(due_ms, 0), 0)) AS due_ms_min
FROM lines WHERE op IN ('cancel', 'reschedule') AND ids IS NULL AND keys IS NULL
GROUP BY ALL

---- changeable
-- Timers of the log with a key, and those that were cancelled or made by a reschedule.
SELECT seq, name_of(topic) AS topic, key, end, due_ms, old_due_ms, schedule_index, end_index,
    scheduled_at_ms, ended_at_ms
FROM fates LEFT JOIN (SELECT mark, key FROM keyed) USING (mark)
WHERE key IS NOT NULL OR end = 'cancelled' OR old_due_ms IS NOT NULL

---- filtered
-- Timers that filters match.
SELECT seq, bool_or(op = 'cancel' AND ok + unknown > 0) AS filter_cancels,
    bool_or(op = 'reschedule' AND ok > 0) AS filter_ok,
    bool_or(op = 'reschedule' AND unknown > 0) AS filter_unknown,
    min(if(op = 'reschedule', due_ms_min, NULL)) AS filter_due_ms
FROM (
    SELECT seq, topic, key, 'cancel' AS op, due_ms FROM changeable WHERE end = 'cancelled'
    UNION ALL
    SELECT seq, topic, key, 'reschedule', old_due_ms FROM changeable WHERE old_due_ms IS NOT NULL
)
JOIN filters USING (op, topic)
WHERE due_ms >= from_ms AND due_ms < to_ms AND startswith(coalesce(key, ''), prefix)
GROUP BY seq

---- key_requests
-- Requests about each key: confirmed cancels (`told`), and those that may have cancelled or moved
-- the timer with the key. Null: there were none of the kind.
SELECT topic, key, count_if(op = 'cancel' AND result = 'CANCELLED') AS told,
    if(bool_or(op = 'cancel'),
        count_if(op = 'cancel' AND (result = 'CANCELLED' OR outcome = 'unknown')), NULL)
        AS key_cancels,
    count_if(op = 'reschedule' AND outcome = 'unknown') AS key_moves
FROM named_timers WHERE NOT by_id
GROUP BY topic, key

---- timely
-- A row per firing and per first delivery of a timer. Lateness counts from the time when the timer
-- could fire: its due time, or the time of its schedule if that is later. Two scans of three
-- columns are faster than one scan that makes two rows of each.
SELECT what, could_fire_ms, at, at - could_fire_ms AS late_ms
FROM (
    SELECT 'fire' AS what, greatest(due_ms, scheduled_at_ms) AS could_fire_ms, ended_at_ms AS at
    FROM found WHERE end = 'fired'
    UNION ALL
    SELECT 'deliver', greatest(due_ms, scheduled_at_ms), received_ms FROM found WHERE end = 'fired'
)
WHERE at IS NOT NULL

---- seconds
-- A row per second of each stretch [start_ms, end_ms) of `stretches`, so that times are joined with
-- stretches by equal seconds first.
SELECT name, start_ms, end_ms, second FROM stretches
LATERAL VIEW explode(sequence(start_ms DIV 1000, (end_ms - 1) DIV 1000)) AS second

---- excused_spans
-- The excuses as one list.
SELECT collect_list(struct(excused_from_ms, excused_to_ms)) AS spans FROM excuses
