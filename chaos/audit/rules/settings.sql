---- policy_untrue [policy]
-- Confirmed changes of policies that no entry of their scope has. An entry may have more fields.
SELECT topic, said
FROM (
    SELECT DISTINCT topic, said, map_entries(from_json(said, 'MAP<STRING, STRING>')) AS told
    FROM lines WHERE op = 'policy' AND outcome = 'ok' AND said IS NOT NULL
) AS asked
LEFT ANTI JOIN (
    SELECT name_of(topic) AS of, map_entries(from_json(fields, 'MAP<STRING, STRING>')) AS logged
    FROM policies
) ON topic = of AND size(array_except(told, logged)) = 0

---- group_untrue [open]
-- Settings that clients received and the group never had. Groups unknown to the log are left out.
WITH told AS (
    SELECT DISTINCT name_of(topic) AS topic, name_of(`group`) AS `group`, field, told
    FROM lines LATERAL VIEW stack(
        3, 'group_lease_ms', group_lease_ms, 'max_attempts', max_attempts,
        'max_in_flight', max_in_flight
    ) AS field, told
    WHERE op = 'open' AND told IS NOT NULL
), had AS (
    SELECT name_of(topic) AS topic, name_of(`group`) AS `group`, field, told
    FROM settings LATERAL VIEW stack(
        3, 'group_lease_ms', lease_ms, 'max_attempts', max_attempts, 'max_in_flight', max_in_flight
    ) AS field, told
)
SELECT topic, `group`, field, told
FROM told LEFT SEMI JOIN had USING (topic, `group`)
LEFT ANTI JOIN had USING (topic, `group`, field, told)

---- moved_early [moved_early]
-- Dead letters with fewer failures than their group allows.
SELECT * FROM moved_early

---- payload_untrue
-- Timers whose payload differs from the request. `asked`, `logged`: CRC-32 by history and log.
SELECT mark, topic, asked, logged
FROM (
    SELECT topic, get(marks, nth) AS mark, asked
    FROM lines LATERAL VIEW posexplode(payload_crcs) AS nth, asked WHERE op = 'schedule'
)
JOIN payloads USING (mark)
WHERE asked != logged

---- lease_cut
-- Leases that ended too early, except if their consumer opened the group again, or received nothing
-- later on the same stream.
SELECT leases.*, returned_at_ms
FROM leases JOIN returns USING (topic, `group`, queue_offset)
LEFT ANTI JOIN (SELECT * FROM lines WHERE op = 'open') AS anew
    ON leases.client = anew.client AND leases.topic = anew.topic AND leases.`group` = anew.`group`
    AND anew.start_ms >= leases.handed_out_ms - :error_ms
LEFT SEMI JOIN (SELECT * FROM lines WHERE op = 'deliver') AS later
    ON leases.client = later.client AND leases.topic = later.topic
    AND leases.`group` = later.`group` AND leases.epoch = later.epoch
    AND leases.stream = later.stream AND later.handed_out_ms > returned_at_ms + :alive_ms
WHERE why = 'ended' AND attempt = attempts
    AND returned_at_ms + 2 * :error_ms < leases.handed_out_ms + lease_ms

---- over_in_flight [limited]
-- Groups that held too many messages at once. A message is certainly held from its receipt until
-- its consumer requests its ack. This holds only if the ack counted under the same lease, the lease
-- was not over, and no later epoch had begun. Other deliveries are not counted: the message may
-- have been returned without the consumer's knowledge.
WITH spans AS (
    SELECT topic, `group`, most, received_ms, least(
        start_ms, leases.handed_out_ms + lease_ms - 2 * :error_ms, coalesce(over_ms, start_ms)
    ) AS until_ms
    FROM leases
    JOIN (SELECT * FROM answers WHERE op = 'ack' AND result = 'ACKED')
        USING (client, topic, `group`, epoch, lease_id, queue_offset)
    JOIN limited USING (topic, `group`)
    LEFT JOIN (SELECT epoch, lead(since_ms) OVER (ORDER BY epoch) AS over_ms FROM epochs)
        USING (epoch)
), steps AS (
    SELECT topic, `group`, most, at_ms, step
    FROM spans LATERAL VIEW stack(2, received_ms, 1, until_ms, -1) AS at_ms, step
    WHERE until_ms > received_ms
)
SELECT topic, `group`, most, max(held) AS held, min(at_ms) AS at_ms
FROM (
    SELECT *, sum(step) OVER (PARTITION BY topic, `group` ORDER BY at_ms, step) AS held FROM steps
)
WHERE held > most
GROUP BY topic, `group`, most
