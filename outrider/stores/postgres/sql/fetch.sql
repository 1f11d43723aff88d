-- Reading under the fence: lanes are locked first, and only rows of those lanes are touched.

-- name: fetch
-- The start of each lane. Index: outbox_fetchable.
WITH l AS MATERIALIZED (
    SELECT k.lane, w.quota, set_config('synchronous_commit', 'off', true)
    FROM {schema}.outbox_lane AS k
    JOIN unnest($2::smallint[], $3::bigint[], $4::integer[]) AS w (lane, epoch, quota) USING (lane)
    WHERE k.owner = $1 AND k.epoch = w.epoch
    ORDER BY k.lane
    FOR SHARE OF k
), owned AS MATERIALIZED (
    SELECT l.lane, l.quota, EXISTS (SELECT FROM {schema}.outbox_blocked AS b WHERE b.lane = l.lane) AS blocked FROM l
)
SELECT owned.lane, owned.blocked, e.*
FROM owned LEFT JOIN LATERAL (
    SELECT {event_columns}
    FROM {schema}.outbox AS o
    WHERE o.lane = owned.lane AND o.state IN ({fetchable})
    ORDER BY o.id
    LIMIT owned.quota
) AS e ON true

-- name: blocked
-- Which of these streams are blocked. Index: outbox_blocked_pkey.
SELECT b.lane, b.topic, b.key
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS s (lane, topic, key)
JOIN {schema}.outbox_blocked AS b USING (lane, topic, key)

-- name: due
-- Blocked streams whose time has come, with the head, or a share of the budget once draining.
-- Indexes: outbox_blocked_due, outbox_waiting.
WITH {fence}, ripe AS MATERIALIZED (
    SELECT b.lane, b.topic, b.key, b.cause, b.until
    FROM l JOIN {schema}.outbox_blocked AS b USING (lane)
    WHERE b.until <= (SELECT {schema}.outbox_clock())
    ORDER BY b.until
    LIMIT $4
), crowd AS (
    SELECT greatest(1, $4 / greatest(1, count(*) FILTER (WHERE cause = 'draining'))) AS run FROM ripe
)
SELECT ripe.lane, ripe.topic, ripe.key, ripe.cause, e.*
FROM ripe CROSS JOIN crowd LEFT JOIN LATERAL (
    SELECT {event_columns}
    FROM {schema}.outbox AS o
    WHERE o.lane = ripe.lane AND o.topic = ripe.topic
        AND {stream_key} = ripe.key AND o.state IN ({waiting})
    ORDER BY o.id
    LIMIT CASE ripe.cause WHEN 'draining' THEN crowd.run ELSE 1 END
) AS e ON true
ORDER BY ripe.until, ripe.lane, ripe.topic, ripe.key, e.id

-- name: next_due
-- Seconds until the next blocked stream of these lanes is due. Index: outbox_blocked_due.
SELECT extract(epoch FROM min(until) - {schema}.outbox_clock())::float8
FROM {schema}.outbox_blocked
WHERE lane = ANY ($1::smallint[]) AND until > (SELECT {schema}.outbox_clock())
