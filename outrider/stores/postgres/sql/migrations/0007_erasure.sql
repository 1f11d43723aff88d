-- Erasure: the log of erasures, and the one change that the audit log allows.

-- name: gdpr_erasure_log
-- A run for each erased subject, by the hash of the subject. Runs stay for ever. `counts` grow while the run is open.
CREATE TABLE {schema}.gdpr_erasure_log (
    id           bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    subject_hash text NOT NULL CHECK (length(subject_hash) = 64),
    actor        text NOT NULL,
    started_at   timestamptz NOT NULL,
    finished_at  timestamptz,
    counts       json NOT NULL DEFAULT '{}',
    receipt      json,
    CHECK ((finished_at IS NULL) = (receipt IS NULL))
)

-- name: gdpr_erasure_log_subject
CREATE INDEX gdpr_erasure_log_subject ON {schema}.gdpr_erasure_log (subject_hash, id)

-- name: gdpr_erasure_log_open
-- One open run for each subject.
CREATE UNIQUE INDEX gdpr_erasure_log_open ON {schema}.gdpr_erasure_log (subject_hash) WHERE finished_at IS NULL

-- name: saga_audit_head_subject
-- The hash of the subject of a removed saga, so that the details of its lines can still be erased.
ALTER TABLE {schema}.saga_audit_head ADD COLUMN subject_hash text

-- name: saga_audit_head_subject_index
-- The heads of sagas with a subject, of which no one is older than this index.
CREATE INDEX saga_audit_head_subject ON {schema}.saga_audit_head (subject_hash) WHERE subject_hash IS NOT NULL

-- name: saga_audit_refuse
-- As before, and one change more: while a run of an erasure is open, the owner of the audit log may replace the details
-- of a line by their digest. Only the function `saga_audit_erase` works as the owner. No setting of a session has a say.
CREATE OR REPLACE FUNCTION {schema}.saga_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND TG_TABLE_NAME = 'saga_audit_log' THEN
        IF EXISTS (SELECT FROM {schema}.saga_audit_head AS h JOIN {schema}.saga_audit_anchor AS a ON a.covers = h.anchor
                WHERE h.saga_id = old.saga_id AND old.id <= h.place) THEN
            RETURN old;
        END IF;
    ELSIF TG_OP = 'DELETE' AND TG_TABLE_NAME = 'saga_audit_head' THEN
        IF EXISTS (SELECT FROM {schema}.saga_audit_anchor AS a WHERE a.covers = old.anchor) THEN
            RETURN old;
        END IF;
    ELSIF TG_OP = 'UPDATE' AND TG_TABLE_NAME = 'saga_audit_log' THEN
        IF old.digest IS NULL AND length(new.digest) = 32 AND new.detail = '' AND new.state_hash IS NULL
                AND new.salt IS NULL AND to_jsonb(new) ->> 'state' IS NULL
                AND to_jsonb(new) - ARRAY['detail', 'state_hash', 'salt', 'state', 'digest']
                    = to_jsonb(old) - ARRAY['detail', 'state_hash', 'salt', 'state', 'digest']
                AND EXISTS (SELECT FROM pg_catalog.pg_class AS c
                    WHERE c.oid = TG_RELID AND pg_catalog.pg_get_userbyid(c.relowner) = current_user)
                AND EXISTS (SELECT FROM {schema}.gdpr_erasure_log AS e WHERE e.finished_at IS NULL) THEN
            RETURN new;
        END IF;
    END IF;
    RAISE EXCEPTION 'the audit log of sagas is append only; % is rejected', TG_OP
    USING ERRCODE = 'check_violation', HINT = 'Old lines are removed by the maintenance of saga workers.';
END $$

-- name: saga_audit_erase
-- Replace the details of lines of a saga by their digests, for an open run. The chain still verifies, and a wrong digest
-- is found. The role of the workers has no right to run this function.
CREATE FUNCTION {schema}.saga_audit_erase(of_run bigint, of_saga uuid, lines bigint[], digests bytea[])
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
END $$

-- name: saga_audit_erase_rights
-- This is the last step: a schema that has it has everything.
REVOKE ALL ON FUNCTION {schema}.saga_audit_erase(bigint, uuid, bigint[], bytea[]) FROM PUBLIC
