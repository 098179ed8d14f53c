---- series_untrue [create_series alter_series delete_series series]
-- Confirmed changes that the log does not have.
SELECT topic, key, op, said
FROM (SELECT * FROM series_changes WHERE outcome = 'ok') AS changed
LEFT ANTI JOIN series_entries AS had
    ON changed.topic = had.topic AND changed.key = had.key AND changed.op = had.op
    AND size(array_except(told, logged)) = 0

---- series_unasked [create_series alter_series delete_series series]
-- Changes of the log that no client requested, in topics in which a history changes a series. A
-- client may repeat a request, so the log may have it twice.
SELECT topic, key, op, fields
FROM (SELECT * FROM series_entries LEFT SEMI JOIN series_changes USING (topic)) AS changed
LEFT ANTI JOIN series_changes AS asked
    ON changed.topic = asked.topic AND changed.key = asked.key AND changed.op = asked.op
    AND size(array_except(told, logged)) = 0

---- misplanned [occurrences]
SELECT * FROM occurrences WHERE untrue

---- occurrence_untrue [occurrences]
-- Messages whose series or number is not the log's.
SELECT DISTINCT client, topic, seq, given.series, given.number, logged.series AS logged_series,
    logged.number AS logged_number
FROM occurrence_deliveries AS given
LEFT JOIN (SELECT seq, series, number FROM occurrences WHERE seq > 0) AS logged USING (seq)
WHERE NOT (given.series <=> logged.series AND given.number <=> logged.number)

---- occurrence_doubled [occurrences]
-- Numbers with which several timers were delivered.
SELECT series, number, min(seq) AS first, max(seq) AS last
FROM occurrence_deliveries WHERE number IS NOT NULL
GROUP BY series, number HAVING min(seq) < max(seq)
