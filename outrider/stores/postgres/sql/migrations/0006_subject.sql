-- Subjects: the persons whose data events and sagas carry, and a key for each of them.

-- name: subject_key
-- Wrapped as `encryption_key` is. Of a destroyed key the row stays, without the key, and with a hash of the subject.
CREATE TABLE {schema}.subject_key (
    key_id       text PRIMARY KEY CHECK (key_id <> '' AND octet_length(key_id) <= 64),
    subject      text NOT NULL CHECK (subject <> '' AND octet_length(subject) <= 400),
    wrapped      json,
    created_at   timestamptz NOT NULL,
    destroyed_at timestamptz,
    CHECK ((wrapped IS NULL) = (destroyed_at IS NOT NULL))
)

-- name: subject_key_live
-- A subject has one live key at most.
CREATE UNIQUE INDEX subject_key_live ON {schema}.subject_key (subject) WHERE destroyed_at IS NULL

-- name: subject_key_destroyed
CREATE INDEX subject_key_destroyed ON {schema}.subject_key (subject) WHERE destroyed_at IS NOT NULL

-- name: saga_subject
-- Without a default, so that no row is written.
ALTER TABLE {schema}.saga_instance ADD COLUMN subject text

-- name: saga_instance_subject
CREATE INDEX saga_instance_subject ON {schema}.saga_instance (subject) WHERE subject IS NOT NULL
