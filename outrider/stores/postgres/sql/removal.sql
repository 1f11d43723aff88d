-- Taking a migration back: what would be lost, and the statements that take it away, each ending with a semicolon.

-- name: outbox_unfinished
-- Events that no broker has, and dead letters that nobody has decided about.
SELECT (SELECT count(*) FROM {schema}.outbox) + (SELECT count(*) FROM {schema}.outbox_dead_letter)

-- name: outbox
-- The archive takes its partitions with it.
DROP TABLE {schema}.outbox, {schema}.outbox_archive, {schema}.outbox_dead_letter, {schema}.outbox_operation,
    {schema}.outbox_blocked, {schema}.outbox_counter, {schema}.outbox_lane, {schema}.outbox_relay, {schema}.outbox_duty,
    {schema}.outbox_meta;
DROP FUNCTION {schema}.outbox_refuse_move(), {schema}.outbox_lane_of(text, smallint), {schema}.outbox_uuid7(),
    {schema}.outbox_clock();

-- name: inbox_unfinished
-- Events that wait at consumers, and their dead letters.
SELECT (SELECT count(*) FROM {schema}.inbox_waiting) + (SELECT count(*) FROM {schema}.inbox_dead_letter)

-- name: inbox
DROP TABLE {schema}.inbox_dead_letter, {schema}.inbox_waiting, {schema}.inbox_stream, {schema}.consumer_inbox;
ALTER TABLE {schema}.outbox_operation DROP COLUMN consumer;

-- name: saga_unfinished
-- Sagas that are under way, or need a person.
SELECT count(*) FROM {schema}.saga_instance WHERE ended_at IS NULL OR needs_attention

-- name: saga
DROP TABLE {schema}.saga_barrier, {schema}.saga_audit_log, {schema}.saga_mailbox, {schema}.saga_step,
    {schema}.saga_instance;
DROP FUNCTION {schema}.saga_audit_refuse();

-- name: forget
DELETE FROM {schema}.outrider_migration WHERE version = {version};

-- name: forget_all
-- The schema itself stays: somebody else may have made it.
DROP TABLE {schema}.outrider_migration;
