---- run_sums
-- The number of pending timers in each node's runs, the sum of their hashes, and damaged runs. A
-- hundred million sums of 32 bits stay below 2^63.
SELECT node, coalesce(sum(weight), 0) AS pending,
    coalesce(sum(weight * (xxhash64(seq, due_ms) & 4294967295)), 0) AS hash,
    count(damage) AS damaged, min(damage) AS damage
FROM run_rows GROUP BY node

---- fate_sums
-- The same by the log, for the timers that are pending after the entry of each manifest.
SELECT /*+ BROADCAST(manifests) */ node, count(*) AS pending,
    sum(xxhash64(seq, due_ms) & 4294967295) AS hash
FROM fates JOIN manifests
    ON schedule_index <= index AND (end_index IS NULL OR end_index > index)
GROUP BY node

---- wrong
-- The timers in which a node's runs and the log after entry :index differ. `topic`: null if the
-- timer is not pending by the log. `times`: the sum of its rows' weights; -1 if only its tombstone
-- is there. 1 is right for a pending timer, 0 for any other.
SELECT seq, due_ms, topic, coalesce(times, 0) AS times
FROM (
    SELECT seq, due_ms, topic FROM fates
    WHERE schedule_index <= :index AND (end_index IS NULL OR end_index > :index)
)
FULL JOIN (
    SELECT seq, due_ms, sum(weight) AS times FROM run_rows GROUP BY seq, due_ms
    HAVING sum(weight) != 0
) USING (seq, due_ms)
WHERE topic IS NULL OR coalesce(times, 0) != 1

---- untrue_in_queues
-- Messages of spill files that are not those of the log, or not at its places.
SELECT node, index, seq, queued.topic, queued.queue_offset
FROM queued JOIN manifests USING (node) LEFT JOIN queue_places AS places USING (seq)
WHERE damage IS NULL AND NOT coalesce(
    queued.topic = name_of(places.topic) AND queued.queue_offset = places.queue_offset
    AND queued.due_ms = places.due_ms AND fired_at_ms = ended_at_ms AND end_index <= index, false
)

---- missing_in_queues
-- Messages that had fired by the manifest's entry and were acked after it: they must be there.
SELECT node, index, seq, topic, queue_offset
FROM (
    SELECT DISTINCT node, index, topic, offset AS queue_offset
    FROM acks JOIN manifests ON ack_index > index
    LATERAL VIEW explode(sequence(queue_offset, queue_offset + count - 1)) AS offset
)
JOIN queue_places USING (topic, queue_offset)
LEFT ANTI JOIN queued USING (node, seq)
WHERE end_index <= index
