---- deposed_handed_out
-- Deliveries by deposed leaders, by their times of delivery. An epoch begins with the first entry
-- after its EPOCH entry, and ends with the start of a later one.
SELECT client, topic, `group`, epoch, handed_out_ms, lease_id, over_ms
FROM lines
JOIN (
    SELECT epoch, first(began_ms) IGNORE NULLS OVER (
        ORDER BY epoch ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING
    ) AS over_ms FROM epochs
) USING (epoch)
WHERE op = 'deliver' AND handed_out_ms > over_ms + :error_ms

---- outlived [ttls]
-- Deliveries of messages that had expired by each time to live that their topic had at the
-- delivery, or within :policy_ms before. A leader also applies policies that it has appended and
-- then fails to commit.
SELECT client, topic, `group`, epoch, handed_out_ms, queue_offset AS offset, due_ms
FROM (
    SELECT *, due_of(id) AS due_ms FROM deliveries LEFT SEMI JOIN ttls USING (topic)
    WHERE handed_out_ms IS NOT NULL
) AS given
LEFT ANTI JOIN (
    SELECT *, lead(from_ms, 1, 1L << 62) OVER (PARTITION BY topic ORDER BY from_ms) AS until_ms
    FROM ttls
) AS spans ON given.topic = spans.topic AND from_ms <= handed_out_ms
    AND until_ms > handed_out_ms - :policy_ms
    AND (ttl_ms = 0 OR due_ms + ttl_ms >= handed_out_ms)

---- disordered [ordered]
-- Messages of ordered groups that were delivered while the message before was unfinished.
--
-- A message may be delivered if the message before it is finished, or is held by the same consumer.
-- In an `exclusive` or `failover` group, the message before is the one at the previous offset. In a
-- `key_shared` group it is the previous one with the same ordering key, or key if it has none; keys
-- come from the schedules in the histories. A message is finished if it was acked, expired or
-- moved. Its holder is the consumer of its last delivery, in the order of epochs and then of
-- `handed_out_ms`, or of `received_ms` without that. Lease ids are random and have no order.
--
-- No history has the time when the leader processed an ack. An ack is not older than its request.
-- So a message came too early if it was received before the ack of the message before was
-- requested, by the clients' clocks. `behind`: the offset of the message before; `holder`: the
-- consumer that held it. Deliveries to other consumers in the same millisecond are ignored: they
-- may be later.
WITH row_keys AS (
    SELECT mark, coalesce(get(ordering_keys, nth), get(keys, nth)) AS key
    FROM lines LATERAL VIEW posexplode(marks) AS nth, mark
    WHERE op = 'schedule' AND coalesce(keys, ordering_keys) IS NOT NULL
), given AS (
    SELECT client, topic, `group`, epoch, handed_out_ms, lease_id, queue_offset, received_ms,
        deliveries.mark, coalesce(handed_out_ms, received_ms) AS given_ms,
        if(type = 'key_shared', key, '') AS key
    FROM deliveries JOIN ordered USING (topic, `group`)
    LEFT JOIN row_keys ON type = 'key_shared' AND deliveries.mark = row_keys.mark
    WHERE lease_id IS NOT NULL AND (type != 'key_shared' OR key IS NOT NULL)
), queue AS (
    SELECT topic, `group`, key, queue_offset AS offset,
        lag(queue_offset) OVER (PARTITION BY topic, `group`, key ORDER BY queue_offset)
            AS queue_offset
    FROM (SELECT DISTINCT topic, `group`, key, queue_offset FROM given)
), pairs AS (
    SELECT topic, `group`, key, offset AS queue_offset, queue_offset AS behind, asked_ms
    FROM queue
    LEFT JOIN asked_acks USING (topic, `group`, queue_offset)
    LEFT ANTI JOIN expired USING (topic, `group`, queue_offset)
    LEFT ANTI JOIN moved USING (topic, `group`, queue_offset)
    LEFT ANTI JOIN acked ON asked_ms IS NULL
        AND queue.topic = acked.topic AND queue.`group` = acked.`group`
        AND shiftright(queue_offset, 8) = stretch AND queue_offset BETWEEN first AND last
    WHERE queue_offset IS NOT NULL
), early AS (
    SELECT * FROM given JOIN pairs USING (topic, `group`, key, queue_offset)
    WHERE asked_ms IS NULL OR asked_ms > received_ms + :known_ms
), holders AS (
    SELECT early.topic, early.`group`, early.key, early.queue_offset, early.epoch, early.lease_id,
        max_by(given.client, struct(given.epoch, given.given_ms)) AS holder
    FROM early JOIN given ON early.topic = given.topic AND early.`group` = given.`group`
        AND early.key = given.key AND early.behind = given.queue_offset
    WHERE struct(given.epoch, given.given_ms) < struct(early.epoch, early.given_ms)
        OR (given.epoch = early.epoch AND given.given_ms = early.given_ms
            AND given.client = early.client)
    GROUP BY ALL
)
SELECT client, topic, `group`, epoch, handed_out_ms, lease_id, queue_offset AS offset, mark, behind,
    holder
FROM early LEFT JOIN holders USING (topic, `group`, key, queue_offset, epoch, lease_id)
WHERE NOT holder <=> client
