-- The state of a saga after a turn, in the audit log.

-- name: saga_audit_erase
-- As before, with the states, which are the next step. The rights stay.
CREATE OR REPLACE FUNCTION {schema}.saga_audit_erase(of_run bigint, of_saga uuid, lines bigint[], digests bytea[])
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE changed bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.gdpr_erasure_log AS e WHERE e.id = of_run AND e.finished_at IS NULL) THEN
        RAISE EXCEPTION 'no run % of an erasure is open', of_run USING ERRCODE = 'no_data_found';
    END IF;
    UPDATE {schema}.saga_audit_log AS n SET detail = '', state = NULL, state_hash = NULL, salt = NULL, digest = g.digest
    FROM unnest(lines, digests) AS g (id, digest)
    WHERE n.saga_id = of_saga AND n.id = g.id AND n.digest IS NULL;
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$

-- name: saga_audit_state
-- As the saga had it, so encrypted where it was. The lines of a turn that did not change the state have none. Without a
-- default, so that no row is written.
ALTER TABLE {schema}.saga_audit_log ADD COLUMN state text
