-- Keeping the record of migrations. These texts take no parameters: whoever installs brings a driver of their own.

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
