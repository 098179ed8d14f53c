---- nacked_early [nacks]
-- Messages that were delivered before the time of their nack, by the leader's time of delivery.
SELECT DISTINCT topic, `group`, queue_offset FROM after_nacks WHERE handed_out_ms < not_before_ms

---- nacked_lost [nacks]
-- Messages that did not come again after a nack, though a client read their group to the end.
SELECT DISTINCT topic, `group`, queue_offset
FROM (SELECT *, name_of(topic) AS name, name_of(`group`) AS group_name FROM nacks) AS nacked
LEFT SEMI JOIN opened USING (name, group_name)
LEFT ANTI JOIN after_nacks USING (topic, `group`, queue_offset, return_index)
LEFT ANTI JOIN expired USING (topic, `group`, queue_offset)
LEFT ANTI JOIN (SELECT topic, `group` FROM groups WHERE over) USING (topic, `group`)
LEFT ANTI JOIN acked ON nacked.topic = acked.topic AND nacked.`group` = acked.`group`
    AND shiftright(queue_offset, 8) = stretch AND queue_offset BETWEEN first AND last
WHERE not_before_ms + :grace_ms <= :until_ms

---- nack_lost [nack nacks]
-- Confirmed nacks that are not in the log.
SELECT DISTINCT topic, `group`, queue_offset
FROM answers LEFT ANTI JOIN nacks USING (topic, `group`, queue_offset)
WHERE op = 'nack' AND result = 'NACKED'

---- nack_untrue [nack nacks]
-- Messages that no nack in the log delays for as long as a confirmed nack.
SELECT topic, `group`, queue_offset
FROM (SELECT * FROM answers WHERE op = 'nack' AND result = 'NACKED' AND delay_ms IS NOT NULL)
JOIN nacks USING (topic, `group`, queue_offset)
GROUP BY topic, `group`, queue_offset
HAVING max(not_before_ms) < max(start_ms + delay_ms - :error_ms)
