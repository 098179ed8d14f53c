---- quota_exceeded [quotas]
-- Entries that exceeded a quota. `there`: the value after the entry, or the ready messages before
-- it. A quota of ready messages rejects every timer once it is reached.
WITH made AS (
    SELECT * FROM fates LEFT SEMI JOIN quotas USING (topic) WHERE end NOT IN ('rejected', 'kept')
), steps AS (
    SELECT topic, schedule_index AS index, 1 AS n, payload_size AS size FROM made
    UNION ALL
    SELECT topic, end_index, -1, -payload_size FROM made WHERE end_index IS NOT NULL
), pending AS (
    SELECT topic, index, sum(sum(n)) OVER so_far AS n, sum(sum(size)) OVER so_far AS size
    FROM steps GROUP BY topic, index
    WINDOW so_far AS (PARTITION BY topic ORDER BY index)
)
SELECT topic, index, quota, coalesce(ready, if(quota = 'pending_max', n, size)) AS there, most
FROM pending JOIN quotas USING (topic)
WHERE index = schedule_index AND (
    coalesce(ready, if(quota = 'pending_max', n, size)) > most OR ready = most
)

---- delete_untrue [delete]
-- Untrue answers to deletions. `told`, `dropped`: the number of timers by the answer and by the
-- log; null: not deleted.
WITH logged AS (
    SELECT name_of(topic) AS topic, topic_id, count_if(end = 'dropped') AS dropped
    FROM deletions LEFT JOIN (SELECT end, end_index AS delete_index FROM fates) USING (delete_index)
    GROUP BY ALL
)
SELECT topic, topic_id, pending AS told, dropped
FROM lines LEFT JOIN logged USING (topic, topic_id)
WHERE op = 'delete' AND topic_id IS NOT NULL AND (dropped IS NULL OR dropped != pending)

---- policy_lost [policy]
-- Scopes with more confirmed policy changes than the log has.
SELECT topic, told, coalesce(logged, 0) AS logged
FROM (
    SELECT topic, count(*) AS told FROM lines WHERE op = 'policy' AND outcome = 'ok' GROUP BY topic
)
LEFT JOIN (SELECT name_of(topic) AS topic, count(*) AS logged FROM policies GROUP BY ALL)
    USING (topic)
WHERE told > coalesce(logged, 0)

---- seek_untrue [seek]
-- Untrue answers to seeks. `to_offset`: requested. `start_offset`: the beginning of the life by the
-- log; null: no such life.
SELECT topic, `group`, group_id, to_offset, start_offset
FROM lines
LEFT JOIN (
    SELECT name_of(topic) AS topic, name_of(`group`) AS `group`, group_id, start_offset, kept_offset
    FROM groups
) USING (topic, `group`, group_id)
WHERE op = 'seek' AND outcome = 'ok' AND (
    start_offset IS NULL
    OR (to_offset IS NOT NULL AND start_offset != greatest(to_offset, kept_offset))
)

---- group_delete_lost [delete_group]
-- Groups with more confirmed deletions than the log has.
SELECT topic, `group`, told, coalesce(logged, 0) AS logged
FROM (
    SELECT topic, `group`, count(*) AS told
    FROM lines WHERE op = 'delete_group' AND outcome = 'ok' GROUP BY ALL
)
LEFT JOIN (
    SELECT name_of(topic) AS topic, name_of(`group`) AS `group`, count_if(deleted) AS logged
    FROM groups GROUP BY ALL
) USING (topic, `group`)
WHERE told > coalesce(logged, 0)

---- redrive_untrue [redrive]
-- Topics with more confirmed redriven letters than the log has.
SELECT topic, told, coalesce(logged, 0) AS logged
FROM (
    SELECT topic, sum(changed) AS told FROM lines WHERE op = 'redrive' AND outcome = 'ok'
    GROUP BY topic
)
LEFT JOIN (
    SELECT name_of(from_topic) AS topic, count(*) AS logged
    FROM carried WHERE redriven GROUP BY ALL
) USING (topic)
WHERE told > coalesce(logged, 0)

---- carried_untrue [carried]
-- Moved messages with another payload or a wrong topic. `was_mark`: the mark of the source message;
-- null: no such message. `was_from`: the topic from which the source had become a dead letter.
WITH sources AS (
    SELECT topic AS from_topic, queue_offset AS from_offset, mark AS was_mark,
        if(redriven, NULL, from_topic) AS was_from
    FROM carried
    UNION ALL
    SELECT topic, queue_offset, mark, NULL FROM fates
    WHERE end = 'fired' AND topic IN (SELECT from_topic FROM carried)
)
SELECT seq, mark, topic, from_topic, from_offset, was_mark, was_from
FROM carried LEFT JOIN sources USING (from_topic, from_offset)
WHERE was_mark IS NULL OR was_mark != mark OR (redriven AND name_of(topic) != name_of(was_from))
