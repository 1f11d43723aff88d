-- Taking a migration back: what would be lost, and the statements that take it away, each ending with a semicolon.

-- name: outbox_unfinished
-- Events that no broker has, and dead letters that nobody has decided about.
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
SELECT (SELECT count(*) FROM inbox_waiting) + (SELECT count(*) FROM inbox_dead_letter);

-- name: inbox
DROP TABLE inbox_dead_letter;
DROP TABLE inbox_waiting;
DROP TABLE inbox_stream;
DROP TABLE consumer_inbox;
ALTER TABLE outbox_operation DROP COLUMN consumer;

-- name: saga_unfinished
-- Sagas that are under way, or need a person.
SELECT count(*) FROM saga_instance WHERE ended_at IS NULL OR needs_attention;

-- name: saga
DROP TABLE saga_barrier;
DROP TABLE saga_audit_log;
DROP TABLE saga_mailbox;
DROP TABLE saga_step;
DROP TABLE saga_instance;

-- name: forget
DELETE FROM outrider_migration WHERE version = {version};

-- name: forget_all
DROP TABLE outrider_migration;
