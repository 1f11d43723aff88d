-- Privacy: keys, and pages of stored payloads in the order of an index.

-- name: keys
-- All keys, which are few.
SELECT key_id, wrapped, rank, created_at, created_by, activated_at, activated_by FROM encryption_key;

-- name: insert_key
-- The primary key. The first key is active.
INSERT INTO encryption_key (key_id, wrapped, rank, created_at, created_by, activated_at, activated_by)
SELECT :key_id, :wrapped, CASE WHEN first THEN 1 END, :now, :actor, CASE WHEN first THEN :now END,
    CASE WHEN first THEN :actor END
FROM (SELECT NOT EXISTS (SELECT 1 FROM encryption_key) AS first) WHERE true
ON CONFLICT DO NOTHING;

-- name: activate_key
-- The primary key.
UPDATE encryption_key SET rank = (SELECT coalesce(max(rank), 0) + 1 FROM encryption_key), activated_at = :now,
    activated_by = :actor
WHERE key_id = :key_id;

-- name: rewrap_key
-- The primary key.
UPDATE encryption_key SET wrapped = :after WHERE key_id = :key_id AND wrapped = :before;

-- name: event_copies
-- The unique index of ids.
SELECT event_id, event_type, payload AS text FROM outbox
WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: rewrite_event
-- The unique index of ids.
UPDATE outbox SET payload = ? WHERE event_id = ? AND payload = ?;

-- name: dead_letter_copies
-- The unique index of ids.
SELECT event_id, event_type, payload AS text FROM outbox_dead_letter
WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: rewrite_dead_letter
-- The unique index of ids.
UPDATE outbox_dead_letter SET payload = ? WHERE event_id = ? AND payload = ?;

-- name: held_event_copies
-- The unique index of consumers and ids.
SELECT event_id, consumer, event_type, body AS text FROM inbox_held
WHERE (consumer, event_id) > (?, ?) ORDER BY consumer, event_id LIMIT ?;

-- name: rewrite_held_event
-- The unique index of consumers and ids.
UPDATE inbox_held SET body = ? WHERE consumer = ? AND event_id = ? AND body = ?;

-- name: consumer_dead_letter_copies
-- The unique index of consumers and ids.
SELECT event_id, consumer, event_type, body AS text FROM inbox_dead_letter
WHERE (consumer, event_id) > (?, ?) ORDER BY consumer, event_id LIMIT ?;

-- name: rewrite_consumer_dead_letter
-- The unique index of consumers and ids.
UPDATE inbox_dead_letter SET body = ? WHERE consumer = ? AND event_id = ? AND body = ?;

-- name: saga_message_copies
-- The unique index of sagas and events.
SELECT event_id, saga_id, name AS event_type, body AS text FROM saga_mailbox
WHERE (saga_id, event_id) > (?, ?) AND kind = 'reply' ORDER BY saga_id, event_id LIMIT ?;

-- name: rewrite_saga_message
-- The unique index of sagas and events.
UPDATE saga_mailbox SET body = ? WHERE saga_id = ? AND event_id = ? AND body = ?;

-- name: archived_event_copies
-- The unique index of ids.
SELECT event_id, event_type, payload AS text FROM outbox_archive
WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: rewrite_archived_event
-- The unique index of ids.
UPDATE outbox_archive SET payload = ? WHERE event_id = ? AND payload = ?;
