-- The record of migrations. The texts take no parameters, because every installer has its own driver.

-- name: create_record
-- Where applied steps are written down.
CREATE TABLE IF NOT EXISTS outrider_migration (
    version INTEGER NOT NULL,
    step TEXT NOT NULL,
    checksum TEXT NOT NULL,
    applied_at REAL NOT NULL,
    PRIMARY KEY (version, step)
) WITHOUT ROWID;

-- name: has_record
-- Tell whether anything was ever applied.
SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'outrider_migration';

-- name: applied
-- List applied steps; the primary key.
SELECT version, step, checksum FROM outrider_migration;

-- name: record
-- Write a step down, in the transaction that ran it.
INSERT INTO outrider_migration (version, step, checksum, applied_at)
VALUES ({version}, '{step}', '{checksum}', (julianday('now') - 2440587.5) * 86400.0);

-- name: has_lanes
-- Tell whether the number of lanes can have been fixed.
SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'outbox_meta';

-- name: lanes
-- The number of lanes in each band.
SELECT value FROM outbox_meta WHERE name = 'lanes';

-- Reverting a migration: the rows that would be lost, and the statements, each ending with a semicolon.

-- name: outbox_unfinished
-- Undelivered events, and dead letters without a decision of an operator.
SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM outbox_dead_letter);

-- name: outbox
DROP TABLE outbox;
DROP TABLE outbox_archive;
DROP TABLE outbox_dead_letter;
DROP TABLE outbox_operation;
DROP TABLE outbox_blocked;
DROP TABLE outbox_counter;
DROP TABLE outbox_lane;
DROP TABLE outbox_relay;
DROP TABLE outbox_duty;
DROP TABLE outbox_meta;

-- name: inbox_unfinished
-- Events that wait at consumers, and their dead letters.
SELECT (SELECT count(*) FROM inbox_held) + (SELECT count(*) FROM inbox_dead_letter);

-- name: inbox
DROP TABLE inbox_dead_letter;
DROP TABLE inbox_held;
DROP TABLE inbox_stream;
DROP TABLE consumer_inbox;
ALTER TABLE outbox_operation DROP COLUMN consumer;

-- name: saga_unfinished
-- Sagas that are under way, or need a person.
SELECT count(*) FROM saga_instance WHERE ended_at IS NULL OR needs_attention;

-- name: saga
DROP TABLE saga_barrier;
DROP TABLE saga_audit_log;
DROP TABLE saga_audit_head;
DROP TABLE saga_audit_anchor;
DROP TABLE saga_mailbox;
DROP TABLE saga_step;
DROP TABLE saga_instance;

-- name: payload_unfinished
-- Schemas can be registered again, and a field starts anew.
SELECT 0;

-- name: payload
DROP TABLE payload_last_value;
DROP TABLE payload_schema;

-- name: privacy_unfinished
-- Values that a key has encrypted cannot be read without it.
SELECT count(*) FROM encryption_key;

-- name: privacy
DROP TABLE encryption_key;

-- name: subject_unfinished
-- Values that a key has encrypted cannot be read without it. A destroyed key says that they were erased.
SELECT count(*) FROM subject_key;

-- name: subject
DROP TABLE subject_key;
DROP INDEX saga_instance_subject;
ALTER TABLE saga_instance DROP COLUMN subject;

-- name: erasure_unfinished
-- The log of erasures is evidence.
SELECT count(*) FROM gdpr_erasure_log;

-- name: erasure
DROP TRIGGER saga_audit_unchanged;
CREATE TRIGGER saga_audit_unchanged BEFORE UPDATE ON saga_audit_log
    BEGIN SELECT RAISE(ABORT, 'the audit log of sagas is append only; UPDATE is rejected'); END;
DROP INDEX saga_audit_head_subject;
ALTER TABLE saga_audit_head DROP COLUMN subject_hash;
DROP TABLE gdpr_erasure_log;

-- name: journal_unfinished
-- The journal can be started again.
SELECT 0;

-- name: journal
DROP TRIGGER IF EXISTS outbox_journal_staged;
DROP TABLE outbox_journal;
DELETE FROM outbox_meta WHERE name LIKE 'journal%';

-- name: operation_log_unfinished
-- The lines stay, without their numbers.
SELECT 0;

-- name: operation_log
DROP TRIGGER outbox_operation_numbered;
DROP TRIGGER outbox_operation_unchanged;
DROP TRIGGER outbox_operation_kept;
DROP TABLE outbox_operation_head;
DROP INDEX saga_audit_anchor_operations;
DROP INDEX outbox_operation_chain;
DELETE FROM outbox_operation WHERE event_id = '';
ALTER TABLE outbox_operation DROP COLUMN line;
ALTER TABLE outbox_operation DROP COLUMN traceparent;
ALTER TABLE outbox_operation DROP COLUMN detail;
ALTER TABLE outbox_operation DROP COLUMN salt;
ALTER TABLE outbox_operation DROP COLUMN hash;
ALTER TABLE outbox_operation DROP COLUMN digest;

-- name: audit_state_unfinished
-- The log verifies without states.
SELECT 0;

-- name: audit_state
DROP TRIGGER saga_audit_unchanged;
CREATE TRIGGER saga_audit_unchanged BEFORE UPDATE ON saga_audit_log
    WHEN NOT coalesce(
        old.digest IS NULL AND length(new.digest) = 32 AND new.detail = '' AND new.state_hash IS NULL AND new.salt IS NULL
        AND new.id = old.id AND new.saga_id = old.saga_id AND new.line = old.line AND new.at = old.at
        AND new.old_status IS old.old_status AND new.new_status = old.new_status AND new.step IS old.step
        AND new.what = old.what AND new.actor = old.actor AND new.traceparent IS old.traceparent AND new.hash IS old.hash
        AND EXISTS (SELECT 1 FROM gdpr_erasure_log WHERE finished_at IS NULL), false)
    BEGIN
        SELECT RAISE(ABORT, 'the audit log of sagas is append only; UPDATE is rejected');
    END;
ALTER TABLE saga_audit_log DROP COLUMN state;

-- name: forget
DELETE FROM outrider_migration WHERE version = {version};

-- name: forget_all
DROP TABLE outrider_migration;
