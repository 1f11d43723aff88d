-- Erasure of subjects. Rows are found by a part of a table, from one number of rows to another, so that no statement reads
-- more than the part. The texts in :needles are searched in the headers, and the caller reads the headers to be sure.

-- fragment: run_columns
id, subject_hash, actor, started_at, finished_at, counts, receipt

-- fragment: has_subject
EXISTS (SELECT 1 FROM json_each(:needles) AS needle WHERE instr(headers, needle.value) > 0)

-- fragment: erased_reply
json_object('rejection', json(iif(json_extract(reply, '$.rejection'), 'true', 'false')), '$erased', json('true'))

-- name: runs
-- gdpr_erasure_log_subject.
SELECT {run_columns} FROM gdpr_erasure_log WHERE subject_hash IN (SELECT value FROM json_each(:hashes)) ORDER BY id;

-- name: open_run
-- gdpr_erasure_log_open.
INSERT INTO gdpr_erasure_log (subject_hash, actor, started_at) VALUES (:hash, :actor, :now)
ON CONFLICT (subject_hash) WHERE finished_at IS NULL DO NOTHING;

-- name: finish_run
-- The primary key.
UPDATE gdpr_erasure_log SET finished_at = :now, receipt = :receipt WHERE id = :id AND finished_at IS NULL;

-- name: run_counts
-- The primary key.
SELECT counts FROM gdpr_erasure_log WHERE id = :id AND finished_at IS NULL;

-- name: save_counts
-- The primary key.
UPDATE gdpr_erasure_log SET counts = :counts WHERE id = :id AND finished_at IS NULL;

-- name: undelivered_events
-- Reads the outbox.
SELECT event_id AS id, event_type AS name, coalesce(topic, '-') || ' ' || stream_key AS place, headers FROM outbox
WHERE {has_subject} ORDER BY outbox.id;

-- name: blocking_dead_letters
-- Reads the dead letters.
SELECT event_id AS id, event_type AS name, topic || ' ' || stream_key AS place, headers FROM outbox_dead_letter
WHERE policy = 'block' AND {has_subject} ORDER BY rowid;

-- name: held_events
-- Reads the events that wait at consumers.
SELECT event_id AS id, event_type AS name, consumer || ' ' || topic AS place, headers, consumer FROM inbox_held
WHERE {has_subject} ORDER BY rowid;

-- name: blocking_consumer_dead_letters
-- Reads the dead letters of consumers.
SELECT id, event_type AS name, consumer || ' ' || topic AS place, headers FROM inbox_dead_letter
WHERE policy = 'block' AND {has_subject} ORDER BY id;

-- name: unended_sagas
-- Sagas that have not ended, and ended children whose parent may still compensate them.
SELECT saga.saga_id AS id, saga.saga_type AS name, saga.status AS place, saga.subject FROM saga_instance AS saga
WHERE saga.subject IN (SELECT value FROM json_each(:subjects)) AND (
    saga.status NOT IN ('completed', 'compensated') OR EXISTS (
        SELECT 1 FROM saga_instance AS parent
        WHERE parent.saga_id = saga.parent_id AND parent.status NOT IN ('completed', 'compensated')))
ORDER BY saga.saga_id;

-- name: skip_held
-- The event becomes the marker of a skipped event, so that its stream goes on in order; the unique index.
UPDATE inbox_held SET event_type = '{skipped_type}', headers = :headers, body = CAST('null' AS BLOB)
WHERE event_id = :event_id AND consumer = :consumer AND headers = :before;

-- name: dead_letter_last
SELECT max(rowid) FROM outbox_dead_letter;

-- name: dead_letter_part
-- The primary key.
SELECT event_id, event_type, headers, 0 AS sealed FROM outbox_dead_letter
WHERE rowid > :after AND rowid <= :end AND policy <> 'block' AND {has_subject};

-- name: consumer_dead_letter_last
SELECT max(rowid) FROM inbox_dead_letter;

-- name: consumer_dead_letter_part
-- The primary key.
SELECT id, event_type, headers, 0 AS sealed FROM inbox_dead_letter
WHERE rowid > :after AND rowid <= :end AND policy <> 'block' AND {has_subject};

-- name: archived_event_last
SELECT max(rowid) FROM outbox_archive;

-- name: archived_event_part
-- The primary key. A payload with the id of a subject's key is sealed.
SELECT event_id, event_type, headers, payload LIKE '%"s-________________"%' AS sealed FROM outbox_archive
WHERE rowid > :after AND rowid <= :end AND {has_subject};

-- name: saga_last
SELECT max(rowid) FROM saga_instance;

-- name: saga_part
-- The primary key.
SELECT saga_id, saga_type, subject FROM saga_instance
WHERE rowid > :after AND rowid <= :end AND status IN ('completed', 'compensated')
    AND subject IN (SELECT value FROM json_each(:needles));

-- name: removed_saga_part
-- Heads of which some line has details; saga_audit_head_subject, saga_audit_saga.
SELECT DISTINCT head.saga_id, head.subject_hash FROM saga_audit_head AS head
WHERE head.subject_hash IN (SELECT value FROM json_each(:hashes)) AND head.saga_id > :after AND EXISTS (
    SELECT 1 FROM saga_audit_log AS line
    WHERE line.saga_id = head.saga_id AND line.id <= head.place AND line.digest IS NULL AND line.salt IS NOT NULL)
ORDER BY head.saga_id LIMIT :limit;

-- name: erase_dead_letter
-- The unique index of ids.
UPDATE outbox_dead_letter SET payload = '{erased}', headers = :headers, failure = '{erased_failure}'
WHERE event_id = :key AND headers = :before;

-- name: erase_consumer_dead_letter
-- The primary key.
UPDATE inbox_dead_letter SET body = CAST('{erased}' AS BLOB), headers = :headers, failure = '{erased_failure}'
WHERE id = :key AND headers = :before;

-- name: erase_archived_event
-- The unique index of ids.
UPDATE outbox_archive SET payload = '{erased}', headers = :headers, failure = NULL
WHERE event_id = :key AND headers = :before;

-- name: erase_replies
-- The replies of participants to a command; reads the table, whose key begins with the participant.
UPDATE saga_barrier SET reply = {erased_reply} WHERE key = :key AND reply IS NOT NULL;

-- name: lock_saga
-- The primary key.
SELECT saga_id FROM saga_instance
WHERE saga_id = :saga_id AND subject = :subject AND status IN ('completed', 'compensated');

-- name: detailed_lines
-- Lines whose details are there; saga_audit_saga.
SELECT {audit_line} FROM saga_audit_log WHERE saga_id = :saga_id AND digest IS NULL AND salt IS NOT NULL ORDER BY id;

-- name: erase_details
-- The primary key.
UPDATE saga_audit_log SET detail = '', state = NULL, state_hash = NULL, salt = NULL, digest = :digest
WHERE id = :id AND digest IS NULL;

-- name: saga_steps
-- The primary key.
SELECT DISTINCT step FROM saga_step WHERE saga_id = :saga_id;

-- name: erase_journal
-- The primary key.
UPDATE saga_step SET error = NULL, data = NULL WHERE saga_id = :saga_id;

-- name: erase_mailbox
-- The unique index of sagas and events.
UPDATE saga_mailbox SET body = '{erased}' WHERE saga_id = :saga_id;

-- name: erase_saga
-- The primary key.
UPDATE saga_instance SET state = '{erased}', last_error = NULL, subject = NULL WHERE saga_id = :saga_id;
