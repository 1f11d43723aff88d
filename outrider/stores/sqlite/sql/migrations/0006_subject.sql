-- name: subject_key
-- Wrapped as `encryption_key` is. Of a destroyed key the row stays, without the key, and with a hash of the subject.
CREATE TABLE subject_key (
    key_id TEXT PRIMARY KEY CHECK (key_id <> ''),
    subject TEXT NOT NULL CHECK (subject <> ''),
    wrapped TEXT CHECK (wrapped IS NULL OR json_valid(wrapped)),
    created_at REAL NOT NULL,
    destroyed_at REAL,
    CHECK ((wrapped IS NULL) = (destroyed_at IS NOT NULL))
) WITHOUT ROWID;

-- name: subject_key_live
-- A subject has one live key at most.
CREATE UNIQUE INDEX subject_key_live ON subject_key (subject) WHERE destroyed_at IS NULL;

-- name: subject_key_destroyed
CREATE INDEX subject_key_destroyed ON subject_key (subject) WHERE destroyed_at IS NOT NULL;

-- name: saga_subject
ALTER TABLE saga_instance ADD COLUMN subject TEXT;

-- name: saga_instance_subject
CREATE INDEX saga_instance_subject ON saga_instance (subject) WHERE subject IS NOT NULL;
