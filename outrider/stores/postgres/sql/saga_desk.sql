-- What people ask about sagas.

-- name: find
-- Those that need attention first. Stuck are those that nobody works on: overdue, or with mail that nobody has seen.
SELECT {instance} FROM {schema}.saga_instance AS i
WHERE (cardinality($1::uuid[]) = 0 OR i.saga_id = ANY ($1)) AND ($2::text IS NULL OR i.saga_type = $2)
    AND ($3::text IS NULL OR i.correlation_id = $3) AND ($4::text IS NULL OR i.status = $4)
    AND ($5::boolean IS NULL OR i.needs_attention = $5)
    AND ($6::float8 IS NULL OR i.status NOT IN ('completed', 'compensated', 'failed') AND (
        i.wake_at < (SELECT {schema}.outbox_clock() - $6 * interval '1 second')
        OR i.owner IS NULL AND i.saga_id IN (
            SELECT m.saga_id FROM {schema}.saga_mailbox AS m
            WHERE NOT m.seen AND m.posted_at < (SELECT {schema}.outbox_clock() - $6 * interval '1 second'))))
ORDER BY i.needs_attention DESC, i.updated_at DESC, i.saga_id
LIMIT $7

-- name: counts
SELECT status, count(*) AS sagas, count(*) FILTER (WHERE needs_attention) AS needing
FROM {schema}.saga_instance GROUP BY status

-- name: audit
-- Index: saga_audit_log_pkey.
SELECT at, old_status, new_status, step, what, actor, detail, traceparent FROM {schema}.saga_audit_log
WHERE saga_id = $1 ORDER BY id LIMIT $2
