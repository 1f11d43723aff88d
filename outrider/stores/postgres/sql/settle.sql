-- Writing outcomes. Every write is fenced by lane and guarded by the state it comes from.

-- name: confirm_archive
-- The common case in one statement. The lanes are an array, not a join: the planner takes them for one, and would look
-- every event up again for each of them.
-- Indexes: outbox_lane_pkey, outbox_pkey.
WITH {fence}, gone AS (
    DELETE FROM {schema}.outbox AS o
    WHERE o.event_id = ANY ($4::uuid[]) AND o.lane = ANY (ARRAY(SELECT lane FROM l)) AND o.state IN ({confirm_guard})
    RETURNING {gone_columns}
)
INSERT INTO {schema}.outbox_archive ({archive_columns}) TABLE gone

-- name: confirm_delete
-- The same, where nothing is kept.
WITH {fence}
DELETE FROM {schema}.outbox AS o
WHERE o.event_id = ANY ($4::uuid[]) AND o.lane = ANY (ARRAY(SELECT lane FROM l)) AND o.state IN ({confirm_guard})

-- name: retry
-- A spent attempt. Lanes are locked by lock_lanes, here and below.
UPDATE {schema}.outbox AS o
SET state = 'failed', attempts = o.attempts + 1, topic = w.topic, failure = w.failure::json, held_by = NULL
FROM unnest($1::uuid[], $2::text[], $3::text[]) AS w (event_id, topic, failure)
WHERE o.event_id = w.event_id AND o.state IN ({retry_guard}) AND NOT {held}
RETURNING o.event_id

-- name: wait
-- Deferred or parked ($3). The guards of both moves are the same states.
UPDATE {schema}.outbox AS o SET state = w.state, topic = w.topic, held_by = NULL
FROM unnest($1::uuid[], $2::text[], $3::text[]) AS w (event_id, topic, state)
WHERE o.event_id = w.event_id AND o.state IN ({park_guard}) AND NOT {held}
RETURNING o.event_id

-- name: bury
-- Copy to the dead letters; the row itself is removed or becomes a marker in the next statement.
INSERT INTO {schema}.outbox_dead_letter ({dead_columns})
SELECT o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, w.topic,
    {stream_key}, o.routing_key, o.priority, o.schema_version, o.saga_id,
    o.sequence, o.max_attempts, o.retry, o.created_at, o.available_at, o.lane, o.attempts + w.spent, w.reason,
    w.failure::json, w.policy, {schema}.outbox_clock()
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::smallint[])
    AS w (event_id, topic, reason, failure, policy, spent)
JOIN {schema}.outbox AS o USING (event_id)
WHERE o.state IN ({bury_guard}) AND NOT {held}
RETURNING event_id

-- name: unplace
-- Buried rows leave the outbox.
DELETE FROM {schema}.outbox WHERE event_id = ANY ($1::uuid[])

-- name: mark_skipped
-- In the place of a numbered event that is skipped: same stream and number, no content.
UPDATE {schema}.outbox AS o
SET event_type = '{skipped_type}', payload = 'null', headers = json_build_object('skipped', o.event_id),
    key = {stream_key}, event_id = {schema}.outbox_uuid7(), topic = w.topic,
    state = 'failed', attempts = 0, failure = NULL, available_at = NULL, held_by = NULL
FROM unnest($1::uuid[], $2::text[]) AS w (event_id, topic)
WHERE o.event_id = w.event_id

-- name: block
-- Block streams, or change why they are blocked; only a person lifts a hold.
-- $6 is a delay in seconds, $7 a time; neither means until a person acts.
INSERT INTO {schema}.outbox_blocked AS b (lane, topic, key, head_id, cause, until)
SELECT lane, topic, key, head_id, cause, coalesce(at, {schema}.outbox_clock() + delay * interval '1 second')
FROM unnest($1::smallint[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::float8[], $7::timestamptz[])
    AS w (lane, topic, key, head_id, cause, delay, at)
ON CONFLICT (lane, topic, key) DO UPDATE
SET head_id = excluded.head_id, cause = excluded.cause, until = excluded.until
WHERE b.cause <> 'held' OR excluded.cause = 'held'

-- name: ensure_blocked
-- A parked event is found through its blocked stream, so there must be one, even if its head has vanished.
INSERT INTO {schema}.outbox_blocked (lane, topic, key, cause, until)
SELECT DISTINCT lane, topic, key, 'draining', {schema}.outbox_clock()
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
ON CONFLICT (lane, topic, key) DO NOTHING

-- name: let_go
-- Streams with nothing left waiting are free; this is the only statement that removes a blocked row.
DELETE FROM {schema}.outbox_blocked AS b
USING unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
WHERE b.lane = w.lane AND b.topic = w.topic AND b.key = w.key AND b.cause <> 'held' AND NOT EXISTS ({waiting_rows})

-- name: keep_draining
-- Streams with something left go to the end of the line.
UPDATE {schema}.outbox_blocked AS b SET cause = 'draining', head_id = NULL, until = {schema}.outbox_clock()
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
WHERE b.lane = w.lane AND b.topic = w.topic AND b.key = w.key AND b.cause <> 'held' AND EXISTS ({waiting_rows})

-- name: renew_hold
-- A writer lengthens its hold after its commit, on rows that are still its own. Index: outbox_pkey.
-- The commit need not wait for the disk: a crash that loses it lets a relay have the row sooner, and publish it again.
UPDATE {schema}.outbox AS o SET held_until = {schema}.outbox_clock() + $3 * interval '1 second'
WHERE o.event_id = ANY ($2::uuid[]) AND o.state = 'optimistic' AND o.held_by = $1
    AND o.held_until > {schema}.outbox_clock() AND set_config('synchronous_commit', 'off', true) = 'off'
RETURNING {event_columns}

-- name: confirm_hold_archive
-- What a writer delivered itself, if the row is still its own: once a hold has lapsed, a relay may have it in flight.
-- Index: outbox_pkey.
WITH gone AS (
    DELETE FROM {schema}.outbox AS o
    WHERE o.event_id = ANY ($2::uuid[]) AND {held} AND o.held_by = $1
    RETURNING o.*, set_config('synchronous_commit', 'off', true)
)
INSERT INTO {schema}.outbox_archive ({archive_columns})
SELECT {gone_columns} FROM gone AS o

-- name: confirm_hold_delete
DELETE FROM {schema}.outbox AS o
WHERE o.event_id = ANY ($2::uuid[]) AND {held} AND o.held_by = $1
    AND set_config('synchronous_commit', 'off', true) = 'off'

-- name: yield_hold
-- What a writer leaves to the relay.
UPDATE {schema}.outbox AS o SET state = 'pending', held_by = NULL, held_until = NULL
WHERE o.event_id = ANY ($2::uuid[]) AND o.state IN ({yield_optimistic_guard}) AND {held} AND o.held_by = $1
