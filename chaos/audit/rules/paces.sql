---- rate_exceeded [rates]
-- Spans with more deliveries of a topic or a group than its rate allows, by the leaders' times of
-- delivery: rate * (T + error) + max(rate / 10, 1) in T seconds of one epoch. The error is the
-- difference of clocks that the run states: a clock may be set during a span. `count`: the messages
-- above the rate in the worst span of an epoch, which ends at `at_ms`.
WITH spans AS (
    SELECT *, lead(from_ms, 1, 1L << 62) OVER (PARTITION BY topic ORDER BY from_ms) AS until_ms
    FROM rates
), given AS (
    SELECT whose, topic, if(whose = 'group', name_of(`group`), '') AS `group`, epoch, from_ms,
        if(whose = 'group', group_rate, topic_rate) AS rate, handed_out_ms AS at_ms,
        sum(size(offsets)) AS n
    FROM lines JOIN spans USING (topic) LATERAL VIEW explode(array('topic', 'group')) AS whose
    WHERE op = 'deliver' AND handed_out_ms BETWEEN from_ms + :policy_ms AND until_ms - 1
    GROUP BY ALL
), levels AS (
    SELECT *, (sum(n) OVER so_far) - rate * at_ms / 1000 AS above FROM given WHERE rate > 0
    WINDOW so_far AS (PARTITION BY whose, topic, `group`, epoch, from_ms ORDER BY at_ms)
), counts AS (
    SELECT *, above - min(above - n) OVER so_far AS count FROM levels
    WINDOW so_far AS (PARTITION BY whose, topic, `group`, epoch, from_ms ORDER BY at_ms)
)
SELECT whose, topic, `group`, epoch, rate, worst.count, worst.at_ms
FROM (
    SELECT whose, topic, `group`, epoch, from_ms, rate, max(struct(count, at_ms)) AS worst
    FROM counts
    WHERE count > greatest(rate / 10, 1) + rate * (:error_ms + 1) / 1000
    GROUP BY ALL
)
