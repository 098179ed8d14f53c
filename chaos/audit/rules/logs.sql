---- agreed
-- The frames that a majority holds. `nodes`: the number of nodes that hold the frame. Snapshots
-- prove that the entries up to :floor are committed: for them one node is enough. If their frames
-- differ, the one of the latest epoch counts.
SELECT best.*
FROM (
    SELECT max_by(
        struct(index, epoch, kind, time_ms, crc32, rows, nodes),
        struct(nodes >= :majority, epoch, nodes)
    ) AS best
    FROM (
        SELECT index, epoch, kind, time_ms, crc32, rows, count(DISTINCT node) AS nodes
        FROM entries GROUP BY ALL
    )
    GROUP BY index
)
WHERE best.nodes >= :majority OR best.index <= :floor

---- epochs
-- The epochs of a majority's entries. `since_ms`: the time of the EPOCH entry, which is the time of
-- the entry before it. `began_ms`: of the next entry. `fired_ms`: of the first FIRE; null: none.
SELECT epoch, min(time_ms) AS since_ms, count(*) AS entries, max(index) AS last,
    min(if(kind != 'EPOCH', time_ms, NULL)) AS began_ms,
    min(if(kind = 'FIRE', time_ms, NULL)) AS fired_ms
FROM common GROUP BY epoch ORDER BY epoch

---- missing
-- The gaps from entry 1 to the majority's last entry, both ends inclusive.
SELECT before + 1 AS `from`, index - 1 AS `to`
FROM (SELECT index, lag(index, 1, 0) OVER (ORDER BY index) AS before FROM common)
WHERE before + 1 < index

---- thin
-- The stretches of entries that fewer than a majority hold, both ends inclusive.
SELECT min(index) AS `from`, max(index) AS `to`
FROM (
    SELECT index, index - row_number() OVER (ORDER BY index) AS run
    FROM common WHERE nodes < :majority
)
GROUP BY run ORDER BY min(index)

---- disputes
-- The frames that differ from the majority's. Frames after its last entry are not judged.
--
-- A stale frame was appended by a deposed leader and not committed, and its node has not followed a
-- later leader since. It has an older epoch than the majority's frame, and no frame of the majority
-- follows it in its life: a leader removes stale frames before it appends to a log. Any other frame
-- is a divergence.
WITH compared AS (
    SELECT node, life, index, entries.epoch, common.epoch AS their_epoch,
        coalesce(common.crc32 = entries.crc32 AND common.epoch = entries.epoch, false) AS same
    FROM entries LEFT JOIN common USING (index) WHERE index <= :last
)
SELECT node, life, index, epoch,
    coalesce(epoch < their_epoch, false) AND index > coalesce(matched, 0) AS stale
FROM compared
LEFT JOIN (SELECT node, life, max(index) AS matched FROM compared WHERE same GROUP BY ALL)
    USING (node, life)
WHERE NOT same

---- ends
-- A row per life of a node's log. It agrees with the majority up to `upto`. `stale` and `diverged`
-- are numbers of frames.
SELECT node, life, first, last, least(last, :last, dispute - 1) AS upto,
    coalesce(stale, 0) AS stale, coalesce(diverged, 0) AS diverged
FROM (SELECT node, life, min(index) AS first, max(index) AS last FROM entries GROUP BY ALL)
LEFT JOIN (
    SELECT node, life, min(index) AS dispute, count_if(stale) AS stale,
        count_if(NOT stale) AS diverged
    FROM disputes GROUP BY ALL
) USING (node, life)
ORDER BY node, life

---- falling_entries
-- Frames whose epoch or time is below the previous frame's. In a correct log neither value falls.
SELECT node, life, index, epoch, time_ms
FROM (
    SELECT *, lag(epoch) OVER before > epoch OR lag(time_ms) OVER before > time_ms AS falls
    FROM entries WINDOW before AS (PARTITION BY node, life ORDER BY index)
)
WHERE falls
