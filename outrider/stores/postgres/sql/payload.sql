-- Payloads: registered schemas, and pages of stored documents. Pages are in the order of an index: $1.. is the key after
-- which a page begins, and the last parameter is its size.

-- name: register
-- Index: payload_schema_pkey.
INSERT INTO {schema}.payload_schema (event_type, version, document, registered_at, registered_by)
VALUES ($1, $2, $3::text::json, {schema}.outbox_clock(), $4)
ON CONFLICT (event_type, version) DO NOTHING
RETURNING version

-- name: replace_schema
-- Index: payload_schema_pkey.
INSERT INTO {schema}.payload_schema (event_type, version, document, registered_at, registered_by)
VALUES ($1, $2, $3::text::json, {schema}.outbox_clock(), $4)
ON CONFLICT (event_type, version) DO UPDATE SET document = excluded.document, registered_at = excluded.registered_at,
    registered_by = excluded.registered_by
RETURNING version

-- name: schemas
-- Index: payload_schema_pkey.
SELECT event_type, version, document::text AS document, registered_at, registered_by FROM {schema}.payload_schema
WHERE $1::text IS NULL OR event_type = $1
ORDER BY event_type, version

-- name: event_page
-- Index: outbox_pkey.
SELECT event_id, payload::text AS body, event_type, schema_version, topic, coalesce(key, aggregate_id) AS key, state
FROM {schema}.outbox WHERE event_id > $1::uuid ORDER BY event_id LIMIT $2

-- name: dead_letter_page
-- Index: outbox_dead_letter_pkey.
SELECT event_id, payload::text AS body, event_type, schema_version, topic, key, reason
FROM {schema}.outbox_dead_letter WHERE event_id > $1::uuid ORDER BY event_id LIMIT $2

-- name: held_event_page
-- Index: inbox_held_event.
SELECT event_id, consumer, body, topic, raw_key, headers::text AS headers, partition, position
FROM {schema}.inbox_held WHERE (event_id, consumer) > ($1::uuid, $2::text) ORDER BY event_id, consumer LIMIT $3

-- name: consumer_dead_letter_page
-- Index: inbox_dead_letter_event.
SELECT event_id, consumer, body, topic, raw_key, headers::text AS headers, partition, position, reason
FROM {schema}.inbox_dead_letter WHERE (event_id, consumer) > ($1::uuid, $2::text) ORDER BY event_id, consumer LIMIT $3

-- name: saga_message_page
-- Index: saga_mailbox_unseen.
SELECT saga_type, definition_version, message_id, saga_id, event_id, name AS event_type, schema_version, body::text AS body
FROM {schema}.saga_mailbox
WHERE NOT seen AND kind = 'reply' AND (saga_type, definition_version, message_id) > ($1::text, $2::integer, $3::bigint)
ORDER BY saga_type, definition_version, message_id LIMIT $4

-- name: participant_reply_page
-- Index: saga_barrier_pkey.
SELECT key, participant, phase, reply::text AS body FROM {schema}.saga_barrier
WHERE (key, participant, phase) > ($1::text, $2::text, $3::text) AND reply IS NOT NULL
ORDER BY key, participant, phase LIMIT $4

-- name: saga_state_page
-- Index: saga_instance_pkey.
SELECT saga_id, saga_type, definition_version, correlation_id, status, state::text AS body FROM {schema}.saga_instance
WHERE saga_id > $1::uuid AND (ended_at IS NULL OR needs_attention) ORDER BY saga_id LIMIT $2
