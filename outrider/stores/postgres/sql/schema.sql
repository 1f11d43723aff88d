-- The record of migrations. The texts take no parameters, because every installer has its own driver.

-- name: take_turn
-- One migrator at a time, to the end of its transaction; a waiting migrator then finds the steps recorded.
SELECT pg_advisory_xact_lock(hashtextextended('outrider:{schema}', 0))

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS {schema}

-- name: create_record
-- Where applied steps are written down.
CREATE TABLE IF NOT EXISTS {schema}.outrider_migration (
    version    integer,
    step       text,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (version, step)
)

-- name: has_record
-- Tell whether anything was ever applied.
SELECT to_regclass('{schema}.outrider_migration') IS NOT NULL

-- name: applied
-- List applied steps; the primary key.
SELECT version, step, checksum FROM {schema}.outrider_migration

-- name: record
-- Write a step down, in the transaction that ran it.
INSERT INTO {schema}.outrider_migration (version, step, checksum) VALUES ({version}, '{step}', '{checksum}')

-- name: has_lanes
-- Tell whether the number of lanes can have been fixed.
SELECT to_regclass('{schema}.outbox_meta') IS NOT NULL

-- name: lanes
-- The number of lanes in each band.
SELECT value FROM {schema}.outbox_meta WHERE name = 'lanes'

-- name: partitions_ahead
-- Make the archive's partitions of today and the coming days. A day of which the net has caught rows gets none.
DO $outrider$
DECLARE
    today date := ({schema}.outbox_clock() AT TIME ZONE 'UTC')::date;
    start timestamptz;
BEGIN
    FOR ahead IN 0..{days_ahead} LOOP
        start := (today + ahead)::timestamp AT TIME ZONE 'UTC';
        IF NOT EXISTS (SELECT FROM {schema}.outbox_archive_default
            WHERE sent_at >= start AND sent_at < start + interval '24 hours')
        THEN
            EXECUTE format(
                'CREATE TABLE IF NOT EXISTS {schema}.%I PARTITION OF {schema}.outbox_archive FOR VALUES FROM (%L) TO (%L)',
                'outbox_archive_' || to_char(today + ahead, 'YYYYMMDD'), start, start + interval '24 hours');
        END IF;
    END LOOP;
END
$outrider$

-- Reverting a migration: the rows that would be lost, and the statements, each ending with a semicolon.

-- name: outbox_unfinished
-- Undelivered events, and dead letters without a decision of an operator.
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
SELECT (SELECT count(*) FROM {schema}.inbox_held) + (SELECT count(*) FROM {schema}.inbox_dead_letter)

-- name: inbox
DROP TABLE {schema}.inbox_dead_letter, {schema}.inbox_held, {schema}.inbox_stream, {schema}.consumer_inbox;
DROP FUNCTION {schema}.inbox_record_receipt(text, uuid, text, text, text, bigint, smallint),
    {schema}.inbox_finish_receipt(text, uuid, float8);
ALTER TABLE {schema}.outbox_operation DROP COLUMN consumer;

-- name: saga_unfinished
-- Sagas that are under way, or need a person.
SELECT count(*) FROM {schema}.saga_instance WHERE ended_at IS NULL OR needs_attention

-- name: saga
DROP FUNCTION {schema}.saga_claim(text, text[], integer[], integer, float8, integer), {schema}.saga_load(uuid, boolean),
    {schema}.saga_read(uuid[]);
DROP TABLE {schema}.saga_barrier, {schema}.saga_audit_log, {schema}.saga_audit_head, {schema}.saga_audit_anchor,
    {schema}.saga_mailbox, {schema}.saga_step, {schema}.saga_instance;
DROP FUNCTION {schema}.saga_audit_refuse(), {schema}.saga_audit_prune(bigint, bigint, timestamptz, bytea),
    {schema}.saga_save(uuid, text, bigint, bigint, text, text, text, text, integer, boolean, boolean, float8, integer,
    bigint[], bigint[], timestamptz, integer, bytea);

-- name: payload_unfinished
-- Schemas can be registered again, and a field starts anew.
SELECT 0

-- name: payload
DROP TABLE {schema}.payload_last_value, {schema}.payload_schema;

-- name: privacy_unfinished
-- Values that a key has encrypted cannot be read without it.
SELECT count(*) FROM {schema}.encryption_key

-- name: privacy
DROP TABLE {schema}.encryption_key;

-- name: subject_unfinished
-- Values that a key has encrypted cannot be read without it. A destroyed key says that they were erased.
SELECT count(*) FROM {schema}.subject_key

-- name: subject
DROP TABLE {schema}.subject_key;
DROP INDEX {schema}.saga_instance_subject;
ALTER TABLE {schema}.saga_instance DROP COLUMN subject;

-- name: erasure_unfinished
-- The log of erasures is evidence.
SELECT count(*) FROM {schema}.gdpr_erasure_log

-- name: erasure
-- The triggers go on to refuse every change, because nobody can open a run without the log.
DROP FUNCTION {schema}.saga_audit_erase(bigint, uuid, bigint[], bytea[]);
ALTER TABLE {schema}.saga_audit_head DROP COLUMN subject_hash;
DROP TABLE {schema}.gdpr_erasure_log;

-- name: journal_unfinished
-- The journal can be started again.
SELECT 0

-- name: journal
DROP TRIGGER IF EXISTS outbox_journal_staged ON {schema}.outbox;
DROP FUNCTION {schema}.outbox_journal_staged(), {schema}.outbox_journal_add(text, uuid[]),
    {schema}.outbox_journal_retract(uuid[]), {schema}.outbox_journal_note_prune(float8),
    {schema}.outbox_journal_prune(float8, bigint, integer);
DROP TABLE {schema}.outbox_journal;
DELETE FROM {schema}.outbox_meta WHERE name LIKE 'journal%';

-- name: operation_log_unfinished
-- The lines stay, without their numbers.
SELECT 0

-- name: operation_log
DROP TRIGGER outbox_operation_numbered ON {schema}.outbox_operation;
DROP TRIGGER outbox_operation_unchanged ON {schema}.outbox_operation;
DROP TRIGGER outbox_operation_whole ON {schema}.outbox_operation;
DROP TABLE {schema}.outbox_operation_head;
DROP FUNCTION {schema}.outbox_operation_refuse(),
    {schema}.outbox_operation_prune(bigint, timestamptz, bigint, timestamptz, bytea, bytea);
DROP INDEX {schema}.saga_audit_anchor_operations, {schema}.outbox_operation_line;
DELETE FROM {schema}.outbox_operation WHERE event_id IS NULL;
ALTER TABLE {schema}.outbox_operation DROP COLUMN line, DROP COLUMN traceparent, DROP COLUMN detail, DROP COLUMN salt,
    DROP COLUMN hash, DROP COLUMN digest, ALTER COLUMN event_id SET NOT NULL;

-- name: audit_state_unfinished
-- The log verifies without states.
SELECT 0

-- name: audit_state
CREATE OR REPLACE FUNCTION {schema}.saga_audit_erase(of_run bigint, of_saga uuid, lines bigint[], digests bytea[])
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE changed bigint;
    BEGIN
        IF NOT EXISTS (SELECT FROM {schema}.gdpr_erasure_log AS e WHERE e.id = of_run AND e.finished_at IS NULL) THEN
            RAISE EXCEPTION 'no run % of an erasure is open', of_run USING ERRCODE = 'no_data_found';
        END IF;
        UPDATE {schema}.saga_audit_log AS n SET detail = '', state_hash = NULL, salt = NULL, digest = g.digest
        FROM unnest(lines, digests) AS g (id, digest)
        WHERE n.saga_id = of_saga AND n.id = g.id AND n.digest IS NULL;
        GET DIAGNOSTICS changed = ROW_COUNT;
        RETURN changed;
    END $$;
ALTER TABLE {schema}.saga_audit_log DROP COLUMN state;

-- name: forget
DELETE FROM {schema}.outrider_migration WHERE version = {version};

-- name: forget_all
-- The schema itself stays: somebody else may have made it.
DROP TABLE {schema}.outrider_migration;
