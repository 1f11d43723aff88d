-- The state of a saga after a turn, in the audit log.

-- name: saga_audit_state
-- As the saga had it, so encrypted where it was. The lines of a turn that did not change the state have none. Without a
-- default, so that no row is written.
ALTER TABLE {schema}.saga_audit_log ADD COLUMN state text
