-- The operation log: a chain of all lines in `outbox_operation`, append only like the audit log of sagas, whose anchors it
-- shares. Lines that are there already stay, without a number.

-- name: outbox_operation_line
-- The number in the chain. A command that is about no event has an empty `event_id`, which must not be null.
ALTER TABLE outbox_operation ADD COLUMN line INTEGER;

-- name: outbox_operation_traceparent
-- The trace in which the command ran.
ALTER TABLE outbox_operation ADD COLUMN traceparent TEXT;

-- name: outbox_operation_detail
-- The object of the command, as JSON, without its content.
ALTER TABLE outbox_operation ADD COLUMN detail TEXT NOT NULL DEFAULT '';

-- name: outbox_operation_salt
-- The salt belongs to the details.
ALTER TABLE outbox_operation ADD COLUMN salt BLOB;

-- name: outbox_operation_hash
-- The hash of the line, after the line before.
ALTER TABLE outbox_operation ADD COLUMN hash BLOB;

-- name: outbox_operation_digest
-- The digest stands for details that were removed.
ALTER TABLE outbox_operation ADD COLUMN digest BLOB;

-- name: outbox_operation_chain
-- The lines in the order of the chain.
CREATE INDEX outbox_operation_chain ON outbox_operation (line, id);

-- name: outbox_operation_head
-- The end of the chain, one row: the number of lines, the hash of the last one, and the count of lines without a number.
CREATE TABLE outbox_operation_head (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    lines INTEGER NOT NULL,
    hash BLOB NOT NULL,
    unchained INTEGER NOT NULL
);

-- name: saga_audit_anchor_operations
-- The anchors of the operation log, which have no chains of sagas.
CREATE INDEX saga_audit_anchor_operations ON saga_audit_anchor (number) WHERE chains = 0;

-- name: outbox_operation_numbered
-- A new line has a number, and REPLACE would replace a line without any of the triggers below.
CREATE TRIGGER outbox_operation_numbered BEFORE INSERT ON outbox_operation
WHEN new.line IS NULL OR EXISTS (SELECT 1 FROM outbox_operation WHERE id = new.id)
BEGIN
    SELECT RAISE(ABORT, 'the operation log is append only, and a line has a number; upgrade outrider');
END;

-- name: outbox_operation_unchanged
-- The operation log is append only.
CREATE TRIGGER outbox_operation_unchanged BEFORE UPDATE ON outbox_operation
BEGIN
    SELECT RAISE(ABORT, 'the operation log is append only; UPDATE is rejected');
END;

-- name: outbox_operation_kept
-- A line may be deleted once an anchor covers it.
CREATE TRIGGER outbox_operation_kept BEFORE DELETE ON outbox_operation
WHEN NOT EXISTS (
    SELECT 1 FROM (SELECT lines, until FROM saga_audit_anchor WHERE chains = 0 ORDER BY number DESC LIMIT 1) AS covered
    WHERE old.line <= covered.lines OR (old.line IS NULL AND old.at <= covered.until)
)
BEGIN
    SELECT RAISE(ABORT, 'the operation log is append only; DELETE is rejected');
END;

-- name: outbox_operation_head_unchanged
-- The head may only go forward.
CREATE TRIGGER outbox_operation_head_unchanged BEFORE UPDATE ON outbox_operation_head
WHEN new.lines < old.lines OR new.unchained > old.unchained OR new.id <> old.id
BEGIN
    SELECT RAISE(ABORT, 'the head of the operation log is append only; UPDATE is rejected');
END;

-- name: outbox_operation_head_kept
-- The head stays.
CREATE TRIGGER outbox_operation_head_kept BEFORE DELETE ON outbox_operation_head
BEGIN
    SELECT RAISE(ABORT, 'the head of the operation log is append only; DELETE is rejected');
END;

-- name: outbox_operation_head_row
-- No line without a number can be added by now.
INSERT INTO outbox_operation_head (id, lines, hash, unchained)
SELECT 1, 0, x'', count(*) FROM outbox_operation;

-- name: outbox_operation_head_placed
-- REPLACE would replace the head without any of the triggers above. This is the last step.
CREATE TRIGGER outbox_operation_head_placed BEFORE INSERT ON outbox_operation_head
BEGIN
    SELECT RAISE(ABORT, 'the head of the operation log is append only; REPLACE is rejected');
END;
