---- counted
-- The counts after each entry of `points`: scheduled = pending + fired + cancelled + dropped. A
-- dead letter counts as a timer that was scheduled and fired. A rejected or kept row made no timer.
WITH made AS (
    SELECT schedule_index, end_index, end FROM fates WHERE end NOT IN ('rejected', 'kept')
    UNION ALL
    SELECT schedule_index, end_index, end FROM carried
), events AS (
    SELECT schedule_index AS index, 'scheduled' AS what FROM made
    UNION ALL
    SELECT end_index, if(end IN ('replaced', 'rescheduled'), 'cancelled', end)
    FROM made WHERE end_index IS NOT NULL
    UNION ALL
    SELECT index, 'point' FROM points
), sums AS (
    SELECT index, count_if(what = 'point') AS points,
        sum(count_if(what = 'scheduled')) OVER so_far AS scheduled,
        sum(count_if(what = 'fired')) OVER so_far AS fired,
        sum(count_if(what = 'cancelled')) OVER so_far AS cancelled,
        sum(count_if(what = 'dropped')) OVER so_far AS dropped
    FROM events GROUP BY index WINDOW so_far AS (ORDER BY index)
)
SELECT index, scheduled, scheduled - fired - cancelled - dropped AS pending, fired, cancelled,
    dropped
FROM sums WHERE points > 0

---- conservation
-- P7 at every CHECKPOINT entry. `scheduled` is the replay's own count at the entry. A row is
-- balanced if the replay's `scheduled` and `fired` equal those of the fates.
SELECT index, time_ms, checkpoints.scheduled, pending, counted.fired, cancelled, dropped,
    checkpoints.scheduled = counted.scheduled AND checkpoints.fired = counted.fired
        AND pending >= 0 AS balanced
FROM counted JOIN checkpoints USING (index)

---- miscounted
-- Reports of nodes that differ from the log.
WITH said AS (
    SELECT DISTINCT node, index, scheduled AS said_scheduled, pending AS said_pending,
        fired AS said_fired, cancelled AS said_cancelled, dropped AS said_dropped
    FROM states WHERE scheduled IS NOT NULL
)
SELECT node, index, said_scheduled, said_pending, said_fired, said_cancelled, said_dropped,
    scheduled, pending, fired, cancelled, dropped
FROM said JOIN counted USING (index)
WHERE NOT array(said_scheduled, said_pending, said_fired, said_cancelled, said_dropped)
    <=> array(scheduled, pending, fired, cancelled, dropped)

---- diverged_states
-- CHECKPOINTs with more than one digest, of several nodes or of one: P6. `digests`: of each node.
SELECT index, concat_ws(', ', array_sort(collect_set(node || ' ' || digest))) AS digests
FROM states WHERE digest IS NOT NULL
GROUP BY index HAVING count(DISTINCT digest) > 1

---- frozen_digests
-- Digests that were reported for states with different counts: a digest that does not change with
-- its state proves nothing.
SELECT min(index) AS index, digest
FROM states JOIN counted USING (index) WHERE digest IS NOT NULL
GROUP BY digest
HAVING count(DISTINCT counted.scheduled, counted.fired, counted.cancelled, counted.dropped) > 1
