-- Payloads: registered schemas, and pages of stored documents, in the order of an index.

-- name: register
-- The primary key.
INSERT INTO payload_schema (event_type, version, document, registered_at, registered_by)
VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: replace_schema
-- The primary key.
INSERT OR REPLACE INTO payload_schema (event_type, version, document, registered_at, registered_by)
VALUES (?, ?, ?, ?, ?);

-- name: schemas
-- The primary key.
SELECT event_type, version, document, registered_at, registered_by FROM payload_schema
WHERE ?1 IS NULL OR event_type = ?1
ORDER BY event_type, version;

-- name: event_page
-- The unique index of ids.
SELECT event_id, payload AS body, event_type, schema_version, topic, coalesce(key, aggregate_id) AS key, state
FROM outbox WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: dead_letter_page
-- The unique index of ids.
SELECT event_id, payload AS body, event_type, schema_version, topic, key, reason
FROM outbox_dead_letter WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: held_event_page
-- The unique index of consumers and ids.
SELECT event_id, consumer, body, topic, raw_key, headers, partition, position
FROM inbox_held WHERE (consumer, event_id) > (?2, ?1) ORDER BY consumer, event_id LIMIT ?3;

-- name: consumer_dead_letter_page
-- The unique index of consumers and ids.
SELECT event_id, consumer, body, topic, raw_key, headers, partition, position, reason
FROM inbox_dead_letter WHERE (consumer, event_id) > (?2, ?1) ORDER BY consumer, event_id LIMIT ?3;

-- name: saga_message_page
-- saga_mailbox_unseen.
SELECT saga_type, definition_version, message_id, saga_id, event_id, name AS event_type, schema_version, body
FROM saga_mailbox
WHERE NOT seen AND kind = 'reply' AND (saga_type, definition_version, message_id) > (?, ?, ?)
ORDER BY saga_type, definition_version, message_id LIMIT ?;

-- name: participant_reply_page
-- The primary key.
SELECT key, participant, phase, reply AS body FROM saga_barrier
WHERE (participant, key, phase) > (?2, ?1, ?3) AND reply IS NOT NULL
ORDER BY participant, key, phase LIMIT ?4;

-- name: saga_state_page
-- The primary key.
SELECT saga_id, saga_type, definition_version, correlation_id, status, state AS body FROM saga_instance
WHERE saga_id > ? AND (ended_at IS NULL OR needs_attention) ORDER BY saga_id LIMIT ?;
