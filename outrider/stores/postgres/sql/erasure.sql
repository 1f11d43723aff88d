-- Erasure of subjects. Rows are found by a part of a table, from one block to another, which is read in the order of the
-- disk: no index has to be kept for it, and no statement reads more than the part. $1 and $2 are the blocks. A pattern
-- finds the subject in the text of the headers, and the caller reads the headers to be sure.

-- fragment: run_columns
id, subject_hash, actor, started_at, finished_at, counts::text AS counts, receipt::text AS receipt

-- fragment: erased_reply
json_build_object('rejection', b.reply -> 'rejection', '$erased', true)

-- name: runs
-- Index: gdpr_erasure_log_subject.
SELECT {run_columns} FROM {schema}.gdpr_erasure_log WHERE subject_hash = ANY ($1::text[]) ORDER BY id

-- name: open_run
-- Index: gdpr_erasure_log_open.
INSERT INTO {schema}.gdpr_erasure_log (subject_hash, actor, started_at) VALUES ($1, $2, {schema}.outbox_clock())
ON CONFLICT (subject_hash) WHERE finished_at IS NULL DO NOTHING

-- name: finish_run
-- Index: gdpr_erasure_log_pkey.
UPDATE {schema}.gdpr_erasure_log SET finished_at = {schema}.outbox_clock(), receipt = $2::text::json
WHERE id = $1 AND finished_at IS NULL
RETURNING id

-- name: run_counts
-- Index: gdpr_erasure_log_pkey.
SELECT counts::text FROM {schema}.gdpr_erasure_log WHERE id = $1 AND finished_at IS NULL FOR UPDATE

-- name: save_counts
-- Index: gdpr_erasure_log_pkey.
UPDATE {schema}.gdpr_erasure_log SET counts = $2::text::json WHERE id = $1 AND finished_at IS NULL

-- name: undelivered_events
-- Reads the outbox.
SELECT event_id AS id, event_type AS name, coalesce(topic, '-') || ' ' || {stream_key} AS place, headers::text AS headers
FROM {schema}.outbox AS o WHERE headers::text LIKE ANY ($1::text[]) ORDER BY o.id LIMIT $2 OFFSET $3

-- name: blocking_dead_letters
-- Reads the dead letters.
SELECT event_id AS id, event_type AS name, topic || ' ' || key AS place, headers::text AS headers
FROM {schema}.outbox_dead_letter AS o WHERE policy = 'block' AND headers::text LIKE ANY ($1::text[]) ORDER BY o.id LIMIT $2 OFFSET $3

-- name: held_events
-- Reads the events that wait at consumers.
SELECT event_id AS id, event_type AS name, consumer || ' ' || topic AS place, headers::text AS headers, consumer
FROM {schema}.inbox_held WHERE headers::text LIKE ANY ($1::text[]) ORDER BY id LIMIT $2 OFFSET $3

-- name: blocking_consumer_dead_letters
-- Reads the dead letters of consumers.
SELECT id, event_type AS name, consumer || ' ' || topic AS place, headers::text AS headers
FROM {schema}.inbox_dead_letter WHERE policy = 'block' AND headers::text LIKE ANY ($1::text[]) ORDER BY id LIMIT $2 OFFSET $3

-- name: unended_sagas
-- Sagas that have not ended, and ended children whose parent may still compensate them. Index: saga_instance_subject.
SELECT i.saga_id AS id, i.saga_type AS name, i.status AS place, i.subject
FROM {schema}.saga_instance AS i
WHERE i.subject = ANY ($1::text[]) AND (i.status NOT IN ('completed', 'compensated') OR EXISTS (
    SELECT FROM {schema}.saga_instance AS p
    WHERE p.saga_id = i.parent_id AND p.status NOT IN ('completed', 'compensated')))
ORDER BY i.saga_id LIMIT $2 OFFSET $3

-- name: skip_held
-- The event becomes the marker of a skipped event, so that its stream goes on in order. Index: inbox_held_event.
UPDATE {schema}.inbox_held SET event_type = '{skipped_type}', headers = $4::text::json, body = 'null'
WHERE (event_id, consumer) IN (
    SELECT h.event_id, h.consumer FROM {schema}.inbox_held AS h
    WHERE h.event_id = $1 AND h.consumer = $2 AND h.headers::text = $3 FOR UPDATE SKIP LOCKED)
RETURNING event_id

-- name: blocks
-- The blocks of the largest part of a table, and the number of its partitions.
SELECT max(pg_relation_size(t.relid) / current_setting('block_size')::bigint) AS blocks, count(*) AS parts
FROM pg_partition_tree(('{schema}.' || $1)::regclass) AS t WHERE t.isleaf

-- name: dead_letter_part
SELECT event_id, event_type, headers::text AS headers, false AS sealed FROM {schema}.outbox_dead_letter
WHERE ctid >= $1::tid AND ctid < $2::tid AND policy <> 'block' AND headers::text LIKE ANY ($3::text[])

-- name: consumer_dead_letter_part
SELECT id, event_type, headers::text AS headers, false AS sealed FROM {schema}.inbox_dead_letter
WHERE ctid >= $1::tid AND ctid < $2::tid AND policy <> 'block' AND headers::text LIKE ANY ($3::text[])

-- name: archived_event_part
-- The same blocks of all partitions. A payload with the id of a subject's key is sealed.
SELECT event_id, sent_at, event_type, headers::text AS headers, payload::text LIKE '%"s-________________"%' AS sealed
FROM {schema}.outbox_archive
WHERE ctid >= $1::tid AND ctid < $2::tid AND headers::text LIKE ANY ($3::text[])

-- name: saga_part
SELECT saga_id, saga_type, subject FROM {schema}.saga_instance
WHERE ctid >= $1::tid AND ctid < $2::tid AND subject = ANY ($3::text[]) AND status IN ('completed', 'compensated')

-- name: removed_saga_part
-- Heads of which some line has details. Indexes: saga_audit_head_subject, saga_audit_log_pkey.
SELECT DISTINCT h.saga_id, h.subject_hash FROM {schema}.saga_audit_head AS h
WHERE h.subject_hash = ANY ($1::text[]) AND h.saga_id > $3::uuid AND EXISTS (
    SELECT FROM {schema}.saga_audit_log AS n
    WHERE n.saga_id = h.saga_id AND n.id <= h.place AND n.digest IS NULL AND n.salt IS NOT NULL)
ORDER BY h.saga_id LIMIT $2

-- name: erase_dead_letter
-- Index: outbox_dead_letter_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[]) AS given (event_id, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id FROM {schema}.outbox_dead_letter AS l JOIN c ON l.event_id = c.event_id
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.outbox_dead_letter AS o
SET payload = '{erased}', headers = c.new::json, failure = '{erased_failure}'
FROM c JOIN free USING (event_id)
WHERE o.event_id = c.event_id AND o.headers::text = c.old
RETURNING o.event_id

-- name: erase_consumer_dead_letter
-- Index: inbox_dead_letter_pkey.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[]) AS given (id, old, new)
), free AS MATERIALIZED (
    SELECT l.id FROM {schema}.inbox_dead_letter AS l JOIN c ON l.id = c.id FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.inbox_dead_letter AS o
SET body = '{erased}', headers = c.new::json, failure = '{erased_failure}'
FROM c JOIN free USING (id)
WHERE o.id = c.id AND o.headers::text = c.old
RETURNING o.id

-- name: erase_archived_event
-- Index: outbox_archive_event_id.
WITH c AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::text[]) AS given (event_id, sent_at, old, new)
), free AS MATERIALIZED (
    SELECT l.event_id, l.sent_at FROM {schema}.outbox_archive AS l JOIN c ON l.event_id = c.event_id AND l.sent_at = c.sent_at
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.outbox_archive AS o SET payload = '{erased}', headers = c.new::json
FROM c JOIN free USING (event_id, sent_at)
WHERE o.event_id = c.event_id AND o.sent_at = c.sent_at AND o.headers::text = c.old
RETURNING o.event_id

-- name: erase_replies
-- The replies of participants to commands. Index: saga_barrier_pkey.
UPDATE {schema}.saga_barrier AS b SET reply = {erased_reply}
WHERE b.key = ANY ($1::text[]) AND b.reply IS NOT NULL

-- name: lock_saga
-- An ended saga whose row nobody has locked. Index: saga_instance_pkey.
SELECT saga_id FROM {schema}.saga_instance
WHERE saga_id = $1 AND subject = $2 AND status IN ('completed', 'compensated')
FOR UPDATE SKIP LOCKED

-- name: detailed_lines
-- Lines whose details are there. Index: saga_audit_log_pkey.
SELECT {audit_line} FROM {schema}.saga_audit_log WHERE saga_id = $1 AND digest IS NULL AND salt IS NOT NULL ORDER BY id

-- name: erase_details
SELECT {schema}.saga_audit_erase($1, $2, $3, $4)

-- name: erase_saga
-- Journal, mailbox, replies of participants, and the row of an ended saga. Indexes: saga_step_pkey, saga_mailbox_event,
-- saga_barrier_pkey, saga_instance_pkey.
WITH journal AS (
    UPDATE {schema}.saga_step SET error = NULL, data = NULL WHERE saga_id = $1 RETURNING step
), mail AS (
    UPDATE {schema}.saga_mailbox SET body = '{erased}' WHERE saga_id = $1
), replies AS (
    UPDATE {schema}.saga_barrier AS b SET reply = {erased_reply}
    FROM (SELECT DISTINCT step FROM journal) AS j
    WHERE b.key = $1::uuid::text || ':' || j.step AND b.reply IS NOT NULL
)
UPDATE {schema}.saga_instance SET state = '{erased}', last_error = NULL, subject = NULL WHERE saga_id = $1
