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

-- name: subject_keys
-- Keys by subject and by id; subject_key_live, subject_key_destroyed and the primary key.
SELECT key_id, subject, wrapped, created_at, destroyed_at FROM subject_key
WHERE subject IN (SELECT value FROM json_each(:subjects)) AND destroyed_at IS NULL
UNION ALL
SELECT key_id, subject, wrapped, created_at, destroyed_at FROM subject_key
WHERE subject IN (SELECT value FROM json_each(:subjects)) AND destroyed_at IS NOT NULL
UNION ALL
SELECT key_id, subject, wrapped, created_at, destroyed_at FROM subject_key
WHERE key_id IN (SELECT value FROM json_each(:key_ids));

-- name: insert_subject_keys
-- The primary key and subject_key_live.
INSERT INTO subject_key (key_id, subject, wrapped, created_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: destroy_subject_key
-- subject_key_live.
UPDATE subject_key SET wrapped = NULL, destroyed_at = :now, subject = :erased
WHERE subject = :subject AND destroyed_at IS NULL
RETURNING key_id;

-- name: subject_key_page
-- The primary key.
SELECT key_id, subject, wrapped, created_at, destroyed_at FROM subject_key
WHERE key_id > :after AND destroyed_at IS NULL ORDER BY key_id LIMIT :limit;

-- name: rewrap_subject_keys
-- The primary key.
UPDATE subject_key SET wrapped = ? WHERE key_id = ? AND wrapped = ?;

-- name: count_subject_keys
-- The whole table.
SELECT count(*) FILTER (WHERE destroyed_at IS NULL), count(*) FILTER (WHERE destroyed_at IS NOT NULL)
FROM subject_key;

-- name: event_copies
-- The unique index of ids.
SELECT event_id, event_type, payload AS text, headers FROM outbox
WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: rewrite_event
-- The unique index of ids.
UPDATE outbox SET payload = ? WHERE event_id = ? AND payload = ?;

-- name: dead_letter_copies
-- The unique index of ids.
SELECT event_id, event_type, payload AS text, headers FROM outbox_dead_letter
WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: rewrite_dead_letter
-- The unique index of ids.
UPDATE outbox_dead_letter SET payload = ? WHERE event_id = ? AND payload = ?;

-- name: held_event_copies
-- The unique index of consumers and ids.
SELECT event_id, consumer, event_type, body AS text, headers FROM inbox_held
WHERE (consumer, event_id) > (?, ?) ORDER BY consumer, event_id LIMIT ?;

-- name: rewrite_held_event
-- The unique index of consumers and ids.
UPDATE inbox_held SET body = ? WHERE consumer = ? AND event_id = ? AND body = ?;

-- name: consumer_dead_letter_copies
-- The unique index of consumers and ids.
SELECT event_id, consumer, event_type, body AS text, headers FROM inbox_dead_letter
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

-- name: saga_state_copies
-- The primary key.
SELECT saga_id, saga_type AS event_type, state AS text, subject FROM saga_instance WHERE saga_id > ? ORDER BY saga_id LIMIT ?;

-- name: rewrite_saga_state
-- The primary key.
UPDATE saga_instance SET state = ? WHERE saga_id = ? AND state = ?;

-- name: saga_journal_copies
-- The primary keys.
SELECT s.saga_id, s.step, s.phase, '' AS event_type, s.data AS text, i.subject
FROM saga_step AS s JOIN saga_instance AS i USING (saga_id)
WHERE (s.saga_id, s.step, s.phase) > (?, ?, ?) AND s.data IS NOT NULL ORDER BY s.saga_id, s.step, s.phase LIMIT ?;

-- name: rewrite_saga_journal
-- The primary key.
UPDATE saga_step SET data = ? WHERE saga_id = ? AND step = ? AND phase = ? AND data = ?;

-- name: participant_reply_copies
-- The primary key.
SELECT participant, key, phase, json_extract(reply, '$.reply.event_type') AS event_type, reply AS text FROM saga_barrier
WHERE (participant, key, phase) > (?, ?, ?) AND reply IS NOT NULL ORDER BY participant, key, phase LIMIT ?;

-- name: rewrite_participant_reply
-- The primary key.
UPDATE saga_barrier SET reply = ? WHERE participant = ? AND key = ? AND phase = ? AND reply = ?;

-- name: archived_event_copies
-- The unique index of ids.
SELECT event_id, event_type, payload AS text, headers FROM outbox_archive
WHERE event_id > ? ORDER BY event_id LIMIT ?;

-- name: rewrite_archived_event
-- The unique index of ids.
UPDATE outbox_archive SET payload = ? WHERE event_id = ? AND payload = ?;
