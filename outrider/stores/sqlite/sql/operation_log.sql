-- The operation log. Its anchors are those of the audit log.

-- fragment: operation_line
-- In the order of OperationLine's fields.
at, actor, verb, event_id, consumer, detail, traceparent, line, id, salt, hash, digest

-- name: lock_head
-- The end of the chain; the primary key. The write lock of the file is there already.
SELECT lines, hash, unchained FROM outbox_operation_head WHERE id = 1;

-- name: move_head
-- The end of the chain after a command; the primary key.
UPDATE outbox_operation_head SET lines = ?, hash = ? WHERE id = 1;

-- name: add_operations
-- The lines of a command.
INSERT INTO outbox_operation (at, actor, verb, event_id, consumer, detail, traceparent, line, salt, hash)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: operation_find
-- The latest lines that match; outbox_operation_at.
SELECT {operation_line} FROM outbox_operation
WHERE (:event_id IS NULL OR event_id = :event_id) AND (:actor IS NULL OR actor = :actor) AND (:since IS NULL OR at >= :since)
ORDER BY at DESC, line DESC, id DESC LIMIT :limit;

-- name: operation_page
-- A page of the lines with a number, or all of them if the limit is negative; outbox_operation_chain.
SELECT {operation_line} FROM outbox_operation
WHERE line IS NOT NULL AND (line, id) > (:line, :place) ORDER BY line, id LIMIT :limit;

-- name: operation_unchained
-- The count of lines without a number; outbox_operation_chain.
SELECT count(*) FROM outbox_operation WHERE line IS NULL;

-- name: operation_anchor
-- The last anchor of removed lines; saga_audit_anchor_operations.
SELECT {anchor} FROM saga_audit_anchor WHERE chains = 0 ORDER BY number DESC LIMIT 1;

-- name: operation_age
-- The time of the oldest line; outbox_operation_at.
SELECT min(at) FROM outbox_operation;

-- name: oldest_unchained
-- The oldest lines without a number; outbox_operation_chain.
SELECT {operation_line} FROM outbox_operation WHERE line IS NULL ORDER BY at LIMIT :limit;

-- name: oldest_operations
-- The first lines after a number; outbox_operation_chain.
SELECT {operation_line} FROM outbox_operation WHERE line > :line ORDER BY line, id LIMIT :limit;

-- name: prune_operations
-- The lines that an anchor covers; outbox_operation_chain. A trigger refuses to delete before the anchor is there.
DELETE FROM outbox_operation WHERE line <= :line;

-- name: prune_unchained
-- The lines without a number that an anchor covers; outbox_operation_chain.
DELETE FROM outbox_operation WHERE line IS NULL AND at <= :until;

-- name: count_unchained
-- Fewer lines without a number are left; the primary key.
UPDATE outbox_operation_head SET unchained = unchained - :removed WHERE id = 1;
