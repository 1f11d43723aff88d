-- name: saga_audit_state
-- The state of a saga after a turn, as the saga had it, so encrypted where it was. The lines of a turn that did not
-- change the state have none.
ALTER TABLE saga_audit_log ADD COLUMN state TEXT;
