-- Who is alive and who owns what. Time is the database's.

-- name: beat
-- Join ($3) or renew; says how many others live and which lanes are free. Index: outbox_relay_pkey.
WITH beaten AS (
    INSERT INTO {schema}.outbox_relay AS r (relay_id, alive_until)
    SELECT $1, {schema}.outbox_clock() + $2 * interval '1 second'
    WHERE $3 OR EXISTS (
        SELECT FROM {schema}.outbox_relay WHERE relay_id = $1 AND alive_until > {schema}.outbox_clock())
    ON CONFLICT (relay_id) DO UPDATE SET alive_until = excluded.alive_until
    WHERE r.alive_until > {schema}.outbox_clock()
    RETURNING relay_id
)
SELECT
    (SELECT count(*) FROM beaten) AS beaten,
    (SELECT count(*) FROM {schema}.outbox_relay WHERE relay_id <> $1 AND alive_until > {schema}.outbox_clock()) AS others,
    ARRAY(SELECT lane FROM {schema}.outbox_lane AS k
          WHERE owner IS NULL OR NOT EXISTS (
              SELECT FROM {schema}.outbox_relay AS r
              WHERE r.relay_id = k.owner AND r.alive_until > {schema}.outbox_clock())
          ORDER BY lane) AS free

-- name: alive
-- Count living relays.
SELECT count(*) FROM {schema}.outbox_relay WHERE alive_until > {schema}.outbox_clock()

-- name: claim
-- Take free lanes; whoever holds one at this moment keeps it. Index: outbox_lane_pkey.
WITH free AS (
    SELECT k.lane FROM {schema}.outbox_lane AS k
    WHERE k.lane = ANY ($2::smallint[]) AND (k.owner IS NULL OR NOT EXISTS (
        SELECT FROM {schema}.outbox_relay AS r
        WHERE r.relay_id = k.owner AND r.alive_until > {schema}.outbox_clock()))
    ORDER BY k.lane
    FOR UPDATE OF k SKIP LOCKED
)
UPDATE {schema}.outbox_lane AS k SET owner = $1, epoch = k.epoch + 1
FROM free
WHERE k.lane = free.lane AND EXISTS (
    SELECT FROM {schema}.outbox_relay WHERE relay_id = $1 AND alive_until > {schema}.outbox_clock())
RETURNING k.lane, k.epoch

-- name: release
-- Give lanes back, if they are still ours at these epochs.
UPDATE {schema}.outbox_lane AS k SET owner = NULL
FROM unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch)
WHERE k.lane = w.lane AND k.epoch = w.epoch AND k.owner = $1

-- name: leave
-- End a heartbeat and free what is left of its lanes.
WITH gone AS (DELETE FROM {schema}.outbox_relay WHERE relay_id = $1)
UPDATE {schema}.outbox_lane SET owner = NULL WHERE owner = $1

-- name: lock_lanes
-- The fence, for writes of several statements: the lanes stay ours until the commit.
-- A client that stops in the middle must not keep its lanes locked for ever, hence the time-out.
SELECT k.lane, set_config('idle_in_transaction_session_timeout', $4, true)
FROM {schema}.outbox_lane AS k JOIN unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch) USING (lane)
WHERE k.owner = $1 AND k.epoch = w.epoch
ORDER BY k.lane
FOR SHARE OF k

-- name: seize_lane
-- A person changes what is in a lane: whatever its owner has in flight can no longer be written.
UPDATE {schema}.outbox_lane SET owner = NULL, epoch = epoch + 1 WHERE lane = $1
