-- Privacy: keys, and pages of stored payloads in the order of an index. A page begins after the key in the first
-- parameters, and the last one is its size. A rewrite takes the columns of keys, old texts and new texts; rows that another
-- transaction has locked are skipped, so that no relay and no consumer meets a lock that waits.

-- name: keys
-- Reads all keys, which are few.
SELECT key_id, wrapped::text, rank, created_at, created_by, activated_at, activated_by FROM {schema}.encryption_key

-- name: insert_key
-- Index: encryption_key_pkey.
INSERT INTO {schema}.encryption_key (key_id, wrapped, rank, created_at, created_by, activated_at, activated_by)
SELECT $1, $2::text::json, CASE WHEN first THEN 1 END, at, $3, CASE WHEN first THEN at END, CASE WHEN first THEN $3 END
FROM (SELECT {schema}.outbox_clock() AS at, NOT EXISTS (SELECT FROM {schema}.encryption_key) AS first) AS facts
ON CONFLICT (key_id) DO NOTHING
RETURNING key_id

-- name: activate_key
-- Index: encryption_key_pkey.
UPDATE {schema}.encryption_key
SET rank = (SELECT coalesce(max(rank), 0) + 1 FROM {schema}.encryption_key), activated_at = {schema}.outbox_clock(),
    activated_by = $2
WHERE key_id = $1
RETURNING key_id

-- name: rewrap_key
-- Index: encryption_key_pkey.
UPDATE {schema}.encryption_key SET wrapped = $3::text::json WHERE key_id = $1 AND wrapped::text = $2
RETURNING key_id

-- name: subject_keys
-- Keys by subject and by id. Indexes: subject_key_live, subject_key_destroyed, subject_key_pkey.
SELECT key_id, subject, wrapped::text, created_at, destroyed_at FROM {schema}.subject_key
WHERE subject = ANY ($1::text[]) AND destroyed_at IS NULL
UNION ALL
SELECT key_id, subject, wrapped::text, created_at, destroyed_at FROM {schema}.subject_key
WHERE subject = ANY ($1) AND destroyed_at IS NOT NULL
UNION ALL
SELECT key_id, subject, wrapped::text, created_at, destroyed_at FROM {schema}.subject_key WHERE key_id = ANY ($2::text[])

-- name: insert_subject_keys
-- Sorted, so that two processes that insert the same keys wait for each other and never in a circle.
-- Indexes: subject_key_live, subject_key_pkey.
INSERT INTO {schema}.subject_key (key_id, subject, wrapped, created_at)
SELECT g.key_id, g.subject, g.wrapped::json, {schema}.outbox_clock()
FROM unnest($1::text[], $2::text[], $3::text[]) AS g (key_id, subject, wrapped)
ORDER BY g.subject
ON CONFLICT DO NOTHING

-- name: destroy_subject_key
-- Index: subject_key_live.
UPDATE {schema}.subject_key SET wrapped = NULL, destroyed_at = {schema}.outbox_clock(), subject = $2
WHERE subject = $1 AND destroyed_at IS NULL
RETURNING key_id

-- name: subject_key_page
-- Index: subject_key_pkey.
SELECT key_id, subject, wrapped::text, created_at, destroyed_at FROM {schema}.subject_key
WHERE key_id > $1 AND destroyed_at IS NULL ORDER BY key_id LIMIT $2

-- name: rewrap_subject_keys
-- Index: subject_key_pkey.
UPDATE {schema}.subject_key AS k SET wrapped = g.new::json
FROM unnest($1::text[], $2::text[], $3::text[]) AS g (key_id, old, new)
WHERE k.key_id = g.key_id AND k.wrapped::text = g.old
RETURNING k.key_id

-- name: count_subject_keys
-- The whole table.
SELECT count(*) FILTER (WHERE destroyed_at IS NULL), count(*) FILTER (WHERE destroyed_at IS NOT NULL)
FROM {schema}.subject_key

-- name: event_copies
-- Index: outbox_pkey.
SELECT event_id, event_type, payload::text AS text, headers::text AS headers FROM {schema}.outbox
WHERE event_id > $1::uuid ORDER BY event_id LIMIT $2

-- name: rewrite_event
-- Index: outbox_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[]) AS given (event_id, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id FROM {schema}.outbox AS l JOIN c ON l.event_id = c.event_id
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.outbox AS o SET payload = c.new::json FROM c JOIN free USING (event_id)
WHERE o.event_id = c.event_id AND o.payload::text = c.old
RETURNING o.event_id

-- name: dead_letter_copies
-- Index: outbox_dead_letter_pkey.
SELECT event_id, event_type, payload::text AS text, headers::text AS headers FROM {schema}.outbox_dead_letter
WHERE event_id > $1::uuid ORDER BY event_id LIMIT $2

-- name: rewrite_dead_letter
-- Index: outbox_dead_letter_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[]) AS given (event_id, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id FROM {schema}.outbox_dead_letter AS l JOIN c ON l.event_id = c.event_id
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.outbox_dead_letter AS o SET payload = c.new::json FROM c JOIN free USING (event_id)
WHERE o.event_id = c.event_id AND o.payload::text = c.old
RETURNING o.event_id

-- name: held_event_copies
-- Index: inbox_held_event.
SELECT event_id, consumer, event_type, body AS text, headers::text AS headers FROM {schema}.inbox_held
WHERE (event_id, consumer) > ($1::uuid, $2::text) ORDER BY event_id, consumer LIMIT $3

-- name: rewrite_held_event
-- Index: inbox_held_event.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[]) AS given (event_id, consumer, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id, l.consumer FROM {schema}.inbox_held AS l JOIN c ON l.event_id = c.event_id AND l.consumer = c.consumer
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.inbox_held AS o SET body = c.new FROM c JOIN free USING (event_id, consumer)
WHERE o.event_id = c.event_id AND o.consumer = c.consumer AND o.body = c.old
RETURNING o.event_id

-- name: consumer_dead_letter_copies
-- Index: inbox_dead_letter_event.
SELECT event_id, consumer, event_type, body AS text, headers::text AS headers FROM {schema}.inbox_dead_letter
WHERE (event_id, consumer) > ($1::uuid, $2::text) ORDER BY event_id, consumer LIMIT $3

-- name: rewrite_consumer_dead_letter
-- Index: inbox_dead_letter_event.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[]) AS given (event_id, consumer, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id, l.consumer FROM {schema}.inbox_dead_letter AS l JOIN c ON l.event_id = c.event_id AND l.consumer = c.consumer
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.inbox_dead_letter AS o SET body = c.new FROM c JOIN free USING (event_id, consumer)
WHERE o.event_id = c.event_id AND o.consumer = c.consumer AND o.body = c.old
RETURNING o.event_id

-- name: saga_message_copies
-- Index: saga_mailbox_event.
SELECT event_id, saga_id, name AS event_type, body::text AS text FROM {schema}.saga_mailbox
WHERE kind = 'reply' AND (saga_id, event_id) > ($1::uuid, $2::uuid) ORDER BY saga_id, event_id LIMIT $3

-- name: rewrite_saga_message
-- Index: saga_mailbox_event.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[]) AS given (saga_id, event_id, old, new)
), free AS MATERIALIZED (
    SELECT l.saga_id, l.event_id FROM {schema}.saga_mailbox AS l JOIN c ON l.saga_id = c.saga_id AND l.event_id = c.event_id
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.saga_mailbox AS o SET body = c.new::json FROM c JOIN free USING (saga_id, event_id)
WHERE o.saga_id = c.saga_id AND o.event_id = c.event_id AND o.body::text = c.old
RETURNING o.event_id

-- name: saga_state_copies
-- Index: saga_instance_pkey.
SELECT saga_id, saga_type AS event_type, state::text AS text, subject FROM {schema}.saga_instance
WHERE saga_id > $1::uuid ORDER BY saga_id LIMIT $2

-- name: rewrite_saga_state
-- Index: saga_instance_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[]) AS given (saga_id, old, new)
), free AS MATERIALIZED (
    SELECT l.saga_id FROM {schema}.saga_instance AS l
    JOIN c ON l.saga_id = c.saga_id
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.saga_instance AS o SET state = c.new::json FROM c JOIN free USING (saga_id)
WHERE o.saga_id = c.saga_id AND o.state::text = c.old
RETURNING o.saga_id

-- name: saga_journal_copies
-- Indexes: saga_step_pkey, saga_instance_pkey.
SELECT saga_id, s.step, s.phase, '' AS event_type, s.data AS text, i.subject
FROM {schema}.saga_step AS s JOIN {schema}.saga_instance AS i USING (saga_id)
WHERE (s.saga_id, s.step, s.phase) > ($1::uuid, $2::text, $3::text) AND s.data IS NOT NULL
ORDER BY s.saga_id, s.step, s.phase LIMIT $4

-- name: rewrite_saga_journal
-- Index: saga_step_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[]) AS given (saga_id, step, phase, old, new)
), free AS MATERIALIZED (
    SELECT l.saga_id, l.step, l.phase FROM {schema}.saga_step AS l
    JOIN c ON l.saga_id = c.saga_id AND l.step = c.step AND l.phase = c.phase
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.saga_step AS o SET data = c.new FROM c JOIN free USING (saga_id, step, phase)
WHERE o.saga_id = c.saga_id AND o.step = c.step AND o.phase = c.phase AND o.data = c.old
RETURNING o.saga_id

-- name: participant_reply_copies
-- Index: saga_barrier_pkey.
SELECT key, participant, phase, reply -> 'reply' ->> 'event_type' AS event_type, reply::text AS text FROM {schema}.saga_barrier
WHERE (key, participant, phase) > ($1::text, $2::text, $3::text) AND reply IS NOT NULL ORDER BY key, participant, phase LIMIT $4

-- name: rewrite_participant_reply
-- Index: saga_barrier_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[]) AS given (key, participant, phase, old, new)
), free AS MATERIALIZED (
    SELECT l.key, l.participant, l.phase FROM {schema}.saga_barrier AS l
    JOIN c ON l.key = c.key AND l.participant = c.participant AND l.phase = c.phase
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.saga_barrier AS o SET reply = c.new::json FROM c JOIN free USING (key, participant, phase)
WHERE o.key = c.key AND o.participant = c.participant AND o.phase = c.phase AND o.reply::text = c.old
RETURNING o.key

-- name: archived_event_copies
-- Index: outbox_archive_event_id.
SELECT event_id, sent_at, event_type, payload::text AS text, headers::text AS headers FROM {schema}.outbox_archive
WHERE event_id >= $1::uuid AND (event_id, sent_at) > ($1::uuid, $2::timestamptz) ORDER BY event_id, sent_at LIMIT $3

-- name: rewrite_archived_event
-- Index: outbox_archive_event_id.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::text[]) AS given (event_id, sent_at, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id, l.sent_at FROM {schema}.outbox_archive AS l JOIN c ON l.event_id = c.event_id AND l.sent_at = c.sent_at
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.outbox_archive AS o SET payload = c.new::json FROM c JOIN free USING (event_id, sent_at)
WHERE o.event_id = c.event_id AND o.sent_at = c.sent_at AND o.payload::text = c.old
RETURNING o.event_id
