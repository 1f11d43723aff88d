-- name: saga_audit_state
-- The state of a saga after a turn, as the saga had it, so encrypted where it was. The lines of a turn that did not
-- change the state have none.
ALTER TABLE saga_audit_log ADD COLUMN state TEXT;

-- name: saga_audit_unchanged_drop
-- The trigger is made anew in the next step. A migrator that ends between the two leaves the step to the next one.
DROP TRIGGER saga_audit_unchanged;

-- name: saga_audit_unchanged
-- As before, and a line whose details are replaced by their digest loses its state.
CREATE TRIGGER saga_audit_unchanged BEFORE UPDATE ON saga_audit_log
WHEN NOT coalesce(
    old.digest IS NULL AND length(new.digest) = 32 AND new.detail = '' AND new.state_hash IS NULL AND new.salt IS NULL
    AND new.state IS NULL
    AND new.id = old.id AND new.saga_id = old.saga_id AND new.line = old.line AND new.at = old.at
    AND new.old_status IS old.old_status AND new.new_status = old.new_status AND new.step IS old.step
    AND new.what = old.what AND new.actor = old.actor AND new.traceparent IS old.traceparent AND new.hash IS old.hash
    AND EXISTS (SELECT 1 FROM gdpr_erasure_log WHERE finished_at IS NULL), false)
BEGIN
    SELECT RAISE(ABORT, 'the audit log of sagas is append only; UPDATE is rejected');
END;
