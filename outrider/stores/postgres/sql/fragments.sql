-- Pieces that statements share. A piece may use those before it.

-- name: stream_key
coalesce(o.key, o.aggregate_id, o.event_id::text)

-- name: fence
-- Locks the lanes that are still the lease's own; $1 is the owner, $2 the lanes, $3 their epochs. A statement with it
-- reads, or writes what a crash may lose because it is only published again, so its commit need not wait for the disk.
l AS MATERIALIZED (
    SELECT k.lane, set_config('synchronous_commit', 'off', true)
    FROM {schema}.outbox_lane AS k JOIN unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch) USING (lane)
    WHERE k.owner = $1 AND k.epoch = w.epoch
    ORDER BY k.lane
    FOR SHARE OF k
)

-- name: held
(o.state = 'optimistic' AND o.held_until > (SELECT {schema}.outbox_clock()))

-- name: event_columns
o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, o.topic, {stream_key} AS key,
    o.routing_key, o.lane, o.schema_version, o.saga_id, o.sequence, o.max_attempts, o.retry, o.attempts, o.state,
    o.created_at, o.available_at,
    CASE WHEN {held} THEN 'held' WHEN o.available_at > (SELECT {schema}.outbox_clock()) THEN 'early' ELSE 'ready' END
        AS readiness,
    coalesce(o.failure ->> 'kind' = 'unresolved', false) AS suspect

-- name: waiting_rows
SELECT FROM {schema}.outbox AS o
    WHERE o.lane = b.lane AND o.topic = b.topic AND {stream_key} = b.key AND o.state IN ({waiting})

-- name: archive_columns
id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, sequence, attempts, created_at, sent_at

-- name: gone_columns
o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, o.topic, {stream_key},
    o.routing_key, o.priority, o.schema_version, o.saga_id, o.sequence, o.attempts, o.created_at,
    (SELECT {schema}.outbox_clock())

-- name: draft_columns
event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, max_attempts, retry, created_at, available_at, sequence

-- name: drafts
unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
    $10::smallint[], $11::integer[], $12::text[], $13::bigint[], $14::smallint[], $15::text[], $16::timestamptz[],
    $17::timestamptz[]) WITH ORDINALITY AS g (event_id, event_type, aggregate_type, aggregate_id, payload, headers,
    topic, key, routing_key, priority, schema_version, saga_id, sequence, max_attempts, retry, created_at,
    available_at, ord)

-- name: draft_values
g.event_id, g.event_type, g.aggregate_type, g.aggregate_id, g.payload::json, g.headers::json, g.topic, g.key,
    g.routing_key, g.priority, g.schema_version, g.saga_id, g.max_attempts, g.retry::json,
    coalesce(g.created_at, {schema}.outbox_clock()), g.available_at

-- name: one_draft
-- A single draft, without the array functions: the planner makes short work of it.
$1::uuid, $2::text, $3::text, $4::text, $5::text::json, $6::text::json, $7::text, $8::text, $9::text, $10::smallint,
    $11::integer, $12::text, $14::smallint, $15::text::json,
    coalesce($16::timestamptz, {schema}.outbox_clock()), $17::timestamptz

-- name: draft_lane
{schema}.outbox_lane_of(coalesce(g.key, g.aggregate_id, g.event_id::text), g.priority)

-- name: quiet
-- Asked only if there is a holder: a writer may hold an event when nothing undelivered lies before it. At a stricter
-- isolation level the statement would look at an old snapshot, so the event is left to the relay.
CROSS JOIN LATERAL (
    SELECT $18::text IS NOT NULL AND current_setting('transaction_isolation') = 'read committed'
        AND NOT EXISTS (
            SELECT FROM {schema}.outbox AS o WHERE o.lane = {draft_lane} AND o.state IN ({fetchable}))
        AND NOT EXISTS (
            SELECT FROM {schema}.outbox_blocked AS b
            WHERE b.lane = {draft_lane} AND b.topic = g.topic
                AND b.key = coalesce(g.key, g.aggregate_id, g.event_id::text)) AS quiet
) AS q

-- name: staged_state
CASE WHEN q.quiet THEN 'optimistic' ELSE 'pending' END, CASE WHEN q.quiet THEN $18 END,
    CASE WHEN q.quiet THEN {schema}.outbox_clock() + $19::float8 * interval '1 second' END

-- name: replayed_draft
event_id, event_type, aggregate_type, aggregate_id, payload, (headers::jsonb || '{"replayed": "true"}')::json, topic,
    key, routing_key, priority, schema_version, saga_id, max_attempts, retry, created_at, available_at, sequence

-- name: dead_columns
id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, sequence, max_attempts, retry, created_at, available_at, lane, attempts, reason, failure,
    policy, buried_at
