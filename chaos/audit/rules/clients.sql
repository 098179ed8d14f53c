---- asks
-- A row per requested timer. `id`: null if the request made no timer. `told`: the answer about it;
-- null if the request was not answered OK. `existing_seq`: of the timer that it replaced, or that
-- already has its key. `least_due_ms`, `most_due_ms`: bounds of the due time of a delay, on the
-- client's clock: the cluster received the request between its start and its answer.
SELECT topic, outcome, on_conflict, mark, asked_due_ms, id, key, told,
    seq_of(existing) AS existing_seq, due_of(id) AS answered_due_ms, seq_of(id) AS answered_seq,
    least_due_ms, most_due_ms
FROM (
    SELECT *, if(told IN ('SCHEDULED', 'REPLACED'), any_id, NULL) AS id
    FROM (
        SELECT topic, outcome, coalesce(on_conflict, 'reject') AS on_conflict, mark,
            get(due_ms, nth) AS asked_due_ms, get(ids, nth) AS any_id, get(keys, nth) AS key,
            if(outcome = 'ok', coalesce(get(results, nth), 'SCHEDULED'), NULL) AS told,
            get(existing, nth) AS existing, start_ms + delay_ms AS least_due_ms,
            if(outcome = 'ok', end_ms, NULL) + delay_ms AS most_due_ms
        FROM lines LATERAL VIEW posexplode(marks) AS nth, mark
        WHERE op = 'schedule'
    )
)

---- given
-- A row per delivery of a message, duplicates included.
SELECT topic, `group`, epoch, received_ms, group_id, queue_offset, mark, attempt, fired_at_ms,
    due_of(id) AS due_ms, seq_of(id) AS seq
FROM deliveries

---- confirmed
-- A row per confirmed ack of a message.
SELECT topic, `group`, queue_offset, end_ms AS confirmed_ms
FROM answers WHERE op = 'ack' AND result IN ('ACKED', 'ALREADY_ACKED')

---- unkept
-- The messages with a confirmed ack that is not in the log, and those for which a consumer received
-- EXPIRED although they neither expired nor were acked. No row twice.
SELECT DISTINCT topic, `group`, queue_offset
FROM (
    SELECT topic, `group`, queue_offset, result = 'EXPIRED' AS told_expired FROM answers
    WHERE result = 'EXPIRED' OR (op = 'ack' AND result IN ('ACKED', 'ALREADY_ACKED'))
) AS told
LEFT ANTI JOIN acked ON told.topic = acked.topic AND told.`group` = acked.`group`
    AND shiftright(queue_offset, 8) = stretch AND queue_offset BETWEEN first AND last
LEFT ANTI JOIN expired ON told_expired AND told.topic = expired.topic
    AND told.`group` = expired.`group` AND told.queue_offset = expired.queue_offset

---- ack_unfounded
-- Those of which no client received the message.
SELECT * FROM unkept
LEFT ANTI JOIN (SELECT topic, `group`, queue_offset FROM given) USING (topic, `group`, queue_offset)

---- asking_topics
-- Topics in which clients requested timers or series.
SELECT DISTINCT topic AS name FROM lines WHERE op IN ('schedule', 'create_series')

---- unasked
-- Topics with timers in the log, in which no client requested any.
SELECT name_of(topic) AS name, count(*) AS timers
FROM fates LEFT ANTI JOIN asking_topics ON name_of(topic) = name GROUP BY ALL ORDER BY name

---- used_topics
-- Those, and topics whose messages clients read.
SELECT DISTINCT topic AS name FROM lines
WHERE op IN ('schedule', 'create_series', 'open', 'deliver', 'redrive')

---- readers
-- The groups that clients read to the run's end. Deleted groups are left out. A group appears with
-- its last life. `start_offset` is 0 if the log does not know the group.
SELECT coalesce(topic, name) AS topic, coalesce(`group`, group_name) AS `group`,
    coalesce(start_offset, 0) AS start_offset
FROM read_groups LEFT JOIN (
    SELECT topic, `group`, start_offset, over, name_of(topic) AS name,
        name_of(`group`) AS group_name
    FROM groups
) USING (name, group_name)
WHERE NOT coalesce(over, false)

---- unread
-- The groups with acks for which no history has an `open` or a delivery.
SELECT DISTINCT name_of(topic) AS name, name_of(`group`) AS group_name
FROM groups LEFT ANTI JOIN read_groups
    ON name_of(topic) = name AND name_of(`group`) = group_name
WHERE acked > 0
ORDER BY name, group_name

---- lines_by_topic
-- The lines in which consumers' topics have the replay's names. A deleted topic and a later one of
-- the same name are two lives with two names in the replay. A history has only the topic's name.
-- The first id of a delivery tells its life; acks and nacks have that of their lease's delivery.
-- Lines of such topics without a life are left out.
WITH handed AS (
    SELECT client, topic, `group`, epoch, lease_id, min(life) AS life
    FROM lines JOIN topic_lives ON seq_of(get(ids, 0)) = seq AND topic = name
    WHERE op = 'deliver' AND lease_id IS NOT NULL
    GROUP BY ALL
)
SELECT lines.* EXCEPT (topic),
    if(name IS NOT NULL AND op IN ('deliver', 'ack', 'nack', 'extend'), life, lines.topic) AS topic
FROM lines LEFT JOIN (SELECT DISTINCT name FROM topic_lives) ON lines.topic = name
LEFT JOIN handed USING (client, topic, `group`, epoch, lease_id)
WHERE name IS NULL OR life IS NOT NULL OR op NOT IN ('deliver', 'ack', 'nack', 'extend')

---- given_by_topic
-- The deliveries likewise, each by its own id.
SELECT given.* EXCEPT (topic), coalesce(life, topic) AS topic
FROM given LEFT JOIN topic_lives ON given.seq = topic_lives.seq AND topic = name

---- lines_by_group
-- The lines in which consumers' groups have the replay's names. A group that was sought, or deleted
-- and created again, has several lives, and one name in a history. A delivery names its life; acks
-- and nacks have that of their lease's delivery. Lines of such groups without a life are left out.
-- So are groups with a delivery that does not name its life.
WITH handed AS (
    SELECT client, topic, `group`, epoch, lease_id, min(group_id) AS group_id
    FROM lines WHERE op = 'deliver' AND lease_id IS NOT NULL
    GROUP BY ALL
)
SELECT lines.* EXCEPT (`group`),
    if(name IS NOT NULL AND op IN ('deliver', 'ack', 'nack', 'extend'), life, lines.`group`)
        AS `group`
FROM lines LEFT ANTI JOIN untold USING (topic, `group`)
LEFT JOIN sought ON name_of(topic) = name AND `group` = group_name
LEFT JOIN handed USING (client, topic, `group`, epoch, lease_id)
LEFT JOIN (SELECT group_id, `group` AS life FROM groups) AS lives
    ON handed.group_id = lives.group_id
WHERE name IS NULL OR life IS NOT NULL OR op NOT IN ('deliver', 'ack', 'nack', 'extend')

---- given_by_group
-- The deliveries likewise, each by its own life.
SELECT given.* EXCEPT (`group`), if(name IS NULL, given.`group`, life) AS `group`
FROM given LEFT ANTI JOIN untold USING (topic, `group`)
LEFT JOIN sought ON name_of(topic) = name AND given.`group` = group_name
LEFT JOIN (SELECT group_id, `group` AS life FROM groups) AS lives
    ON given.group_id = lives.group_id
WHERE name IS NULL OR life IS NOT NULL
