-- The operation log. Its anchors are those of the audit log.

-- fragment: operation_line
-- In the order of OperationLine's fields.
at, actor, verb, event_id, consumer, detail, traceparent, line, id, salt, hash, digest

-- name: lock_head
-- The end of the chain, for the command that writes next, and the time. Index: outbox_operation_head_pkey.
SELECT lines, hash, unchained, {schema}.outbox_clock() AS now FROM {schema}.outbox_operation_head WHERE id = 1 FOR UPDATE

-- name: add_operations
-- The lines of a command, and the head after them. Index: outbox_operation_head_pkey.
WITH moved AS (UPDATE {schema}.outbox_operation_head SET lines = $1, hash = $2 WHERE id = 1)
INSERT INTO {schema}.outbox_operation (at, actor, verb, event_id, consumer, detail, traceparent, line, salt, hash)
SELECT at, actor, verb, event_id, consumer, detail, traceparent, line, salt, hash
FROM unnest($3::timestamptz[], $4::text[], $5::text[], $6::uuid[], $7::text[], $8::text[], $9::text[], $10::bigint[],
    $11::bytea[], $12::bytea[])
    AS w (at, actor, verb, event_id, consumer, detail, traceparent, line, salt, hash)

-- name: operation_find
-- The latest lines that match. Index: outbox_operation_age.
SELECT {operation_line} FROM {schema}.outbox_operation
WHERE ($1::uuid IS NULL OR event_id = $1) AND ($2::text IS NULL OR actor = $2) AND ($3::timestamptz IS NULL OR at >= $3)
ORDER BY at DESC, line DESC NULLS LAST, id DESC LIMIT $4

-- name: operation_page
-- A page of the lines with a number. Index: outbox_operation_line.
SELECT {operation_line} FROM {schema}.outbox_operation
WHERE line IS NOT NULL AND (line, id) > ($1::bigint, $2::bigint) ORDER BY line, id LIMIT $3

-- name: operation_rest
-- All later lines. Index: outbox_operation_line.
SELECT {operation_line} FROM {schema}.outbox_operation
WHERE line IS NOT NULL AND (line, id) > ($1::bigint, $2::bigint) ORDER BY line, id

-- name: operation_head
-- The end of the chain, and the count of lines without a number. Indexes: outbox_operation_head_pkey, outbox_operation_line.
SELECT (SELECT count(*) FROM {schema}.outbox_operation WHERE line IS NULL) AS found, h.lines, h.hash, h.unchained
FROM (VALUES (1)) AS one LEFT JOIN {schema}.outbox_operation_head AS h ON h.id = 1

-- name: operation_anchor
-- The last anchor of removed lines. Index: saga_audit_anchor_operations.
SELECT {anchor} FROM {schema}.saga_audit_anchor WHERE chains = 0 ORDER BY number DESC LIMIT 1

-- name: operation_age
-- The time of the oldest line, and the time. Index: outbox_operation_age.
SELECT {schema}.outbox_clock() AS now, (SELECT min(at) FROM {schema}.outbox_operation) AS oldest

-- name: oldest_unchained
-- The oldest lines without a number. Index: outbox_operation_line.
SELECT {operation_line} FROM {schema}.outbox_operation WHERE line IS NULL ORDER BY at LIMIT $1

-- name: oldest_operations
-- The first lines after a number. Index: outbox_operation_line.
SELECT {operation_line} FROM {schema}.outbox_operation WHERE line > $1 ORDER BY line, id LIMIT $2

-- name: prune_operations
SELECT {schema}.outbox_operation_prune($1, $2, $3, $4, $5, $6) AS removed
