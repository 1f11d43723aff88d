-- Keeping the record of migrations. These texts take no parameters: whoever installs brings a driver of their own.

-- name: take_turn
-- One migrator at a time, to the end of its transaction; whoever waited finds the steps recorded and goes on.
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
