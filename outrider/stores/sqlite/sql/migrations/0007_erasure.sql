-- name: gdpr_erasure_log
-- A run for each erased subject, by the hash of the subject. Runs stay for ever. `counts` grow while the run is open.
CREATE TABLE gdpr_erasure_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    subject_hash TEXT NOT NULL CHECK (length(subject_hash) = 64),
    actor TEXT NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL,
    counts TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(counts)),
    receipt TEXT CHECK (receipt IS NULL OR json_valid(receipt)),
    CHECK ((finished_at IS NULL) = (receipt IS NULL))
);

-- name: gdpr_erasure_log_subject
-- The runs of a subject.
CREATE INDEX gdpr_erasure_log_subject ON gdpr_erasure_log (subject_hash, id);

-- name: gdpr_erasure_log_open
-- One open run for each subject.
CREATE UNIQUE INDEX gdpr_erasure_log_open ON gdpr_erasure_log (subject_hash) WHERE finished_at IS NULL;

-- name: saga_audit_head_subject
-- The hash of the subject of a removed saga, so that the details of its lines can still be erased.
ALTER TABLE saga_audit_head ADD COLUMN subject_hash TEXT;

-- name: saga_audit_head_subject_index
-- The heads of sagas with a subject.
CREATE INDEX saga_audit_head_subject ON saga_audit_head (subject_hash) WHERE subject_hash IS NOT NULL;

-- name: saga_audit_unchanged_drop
-- The trigger is made anew in the next step. A migrator that ends between the two leaves the step to the next one.
DROP TRIGGER saga_audit_unchanged;

-- name: saga_audit_unchanged
-- The audit log is append only, but for one change: while a run of an erasure is open, the details of a line may be
-- replaced by their digest. A wrong digest is found by the verification. This is the last step: a database that has it has
-- everything.
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
