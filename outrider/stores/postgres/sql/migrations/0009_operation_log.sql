-- The operation log: a chain of all lines in `outbox_operation`, append only like the audit log of sagas, whose anchors it
-- shares. Lines that are there already stay, without a number. Columns are added without a rewrite of the table.

-- name: outbox_operation_chain
-- `line` and `hash` are the chain, `salt` belongs to the details, and `digest` stands for details that were removed. A
-- command that is about no event has no `event_id`.
ALTER TABLE {schema}.outbox_operation
    ADD COLUMN line bigint, ADD COLUMN traceparent text, ADD COLUMN detail text NOT NULL DEFAULT '',
    ADD COLUMN salt bytea, ADD COLUMN hash bytea, ADD COLUMN digest bytea, ALTER COLUMN event_id DROP NOT NULL

-- name: outbox_operation_line
-- The lines in the order of the chain. It is not unique: a forged number must not stop the commands of others.
CREATE INDEX outbox_operation_line ON {schema}.outbox_operation (line, id)

-- name: outbox_operation_head
-- The end of the chain, one row: the number of lines, the hash of the last one, and the count of lines without a number.
CREATE TABLE {schema}.outbox_operation_head (
    id        smallint PRIMARY KEY CHECK (id = 1),
    lines     bigint NOT NULL,
    hash      bytea NOT NULL,
    unchained bigint NOT NULL
)

-- name: saga_audit_anchor_operations
-- The anchors of the operation log, which have no chains of sagas.
CREATE INDEX saga_audit_anchor_operations ON {schema}.saga_audit_anchor (number) WHERE chains = 0

-- name: outbox_operation_refuse
-- A line may be deleted once an anchor covers it, the head may only go forward, and nothing else may be changed. A new line
-- has a number. No setting of a session has a say in it.
CREATE FUNCTION {schema}.outbox_operation_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE covered record;
BEGIN
    IF TG_OP = 'INSERT' THEN
        RAISE EXCEPTION 'a line of the operation log has a number' USING ERRCODE = 'check_violation',
        HINT = 'This outrider is older than the tables; run: pip install --upgrade outrider';
    ELSIF TG_OP = 'UPDATE' AND TG_TABLE_NAME = 'outbox_operation_head' THEN
        IF new.lines >= old.lines AND new.unchained <= old.unchained THEN
            RETURN new;
        END IF;
    ELSIF TG_OP = 'DELETE' AND TG_TABLE_NAME = 'outbox_operation' THEN
        SELECT a.lines, a.until INTO covered FROM {schema}.saga_audit_anchor AS a
        WHERE a.chains = 0 ORDER BY a.number DESC LIMIT 1;
        IF old.line <= covered.lines OR (old.line IS NULL AND old.at <= covered.until) THEN
            RETURN old;
        END IF;
    END IF;
    RAISE EXCEPTION 'the operation log is append only; % is rejected', TG_OP
    USING ERRCODE = 'check_violation', HINT = 'Old lines are removed by the maintenance of relays.';
END $$

-- name: outbox_operation_numbered
CREATE TRIGGER outbox_operation_numbered BEFORE INSERT ON {schema}.outbox_operation FOR EACH ROW WHEN (new.line IS NULL)
EXECUTE FUNCTION {schema}.outbox_operation_refuse()

-- name: outbox_operation_unchanged
CREATE TRIGGER outbox_operation_unchanged BEFORE UPDATE OR DELETE ON {schema}.outbox_operation FOR EACH ROW
EXECUTE FUNCTION {schema}.outbox_operation_refuse()

-- name: outbox_operation_whole
CREATE TRIGGER outbox_operation_whole BEFORE TRUNCATE ON {schema}.outbox_operation FOR EACH STATEMENT
EXECUTE FUNCTION {schema}.outbox_operation_refuse()

-- name: outbox_operation_head_unchanged
CREATE TRIGGER outbox_operation_head_unchanged BEFORE UPDATE OR DELETE ON {schema}.outbox_operation_head FOR EACH ROW
EXECUTE FUNCTION {schema}.outbox_operation_refuse()

-- name: outbox_operation_head_whole
CREATE TRIGGER outbox_operation_head_whole BEFORE TRUNCATE ON {schema}.outbox_operation_head FOR EACH STATEMENT
EXECUTE FUNCTION {schema}.outbox_operation_refuse()

-- name: outbox_operation_always
-- The triggers also fire while `session_replication_role` is replica.
ALTER TABLE {schema}.outbox_operation ENABLE ALWAYS TRIGGER outbox_operation_numbered,
    ENABLE ALWAYS TRIGGER outbox_operation_unchanged, ENABLE ALWAYS TRIGGER outbox_operation_whole

-- name: outbox_operation_head_always
ALTER TABLE {schema}.outbox_operation_head ENABLE ALWAYS TRIGGER outbox_operation_head_unchanged,
    ENABLE ALWAYS TRIGGER outbox_operation_head_whole

-- name: outbox_operation_prune
-- Remove the lines up to a number, or, if an earlier anchor covers that number, those without a number up to a time, and
-- leave an anchor that says so. The role of the relays may run this function, and has no right to delete. The caller
-- computes the hash, because the key of the hash is in no database.
CREATE FUNCTION {schema}.outbox_operation_prune(
    fresh bigint, moment timestamptz, upto bigint, latest timestamptz, ended bytea, sealed bytea
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    former bigint;
    removed bigint;
BEGIN
    SELECT a.lines INTO former FROM {schema}.saga_audit_anchor AS a WHERE a.chains = 0 ORDER BY a.number DESC LIMIT 1;
    IF upto < former THEN
        RAISE EXCEPTION 'an anchor covers line % already', former USING ERRCODE = 'check_violation';
    END IF;
    INSERT INTO {schema}.saga_audit_anchor (number, at, kind, covers, chains, lines, until, digest, hash)
    VALUES (fresh, moment, 'close', NULL, 0, upto, latest, ended, sealed);
    IF upto > coalesce(former, 0) THEN
        DELETE FROM {schema}.outbox_operation AS o WHERE o.line <= upto;
        GET DIAGNOSTICS removed = ROW_COUNT;
        RETURN removed;
    END IF;
    DELETE FROM {schema}.outbox_operation AS o WHERE o.line IS NULL AND o.at <= latest;
    GET DIAGNOSTICS removed = ROW_COUNT;
    UPDATE {schema}.outbox_operation_head AS h SET unchained = h.unchained - removed;
    RETURN removed;
END $$

-- name: outbox_operation_prune_rights
REVOKE ALL ON FUNCTION {schema}.outbox_operation_prune(bigint, timestamptz, bigint, timestamptz, bytea, bytea) FROM PUBLIC

-- name: outbox_operation_head_row
-- No line without a number can be added by now. This is the last step: a schema that has it has everything.
INSERT INTO {schema}.outbox_operation_head (id, lines, hash, unchained)
SELECT 1, 0, '', count(*) FROM {schema}.outbox_operation
