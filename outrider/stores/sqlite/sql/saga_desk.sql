-- name: find
-- Those that need attention first. Stuck are those that nobody works on: overdue, or with mail that nobody has seen.
SELECT {saga} FROM saga_instance AS saga
WHERE (:ids IS NULL OR saga_id IN (SELECT value FROM json_each(:ids)))
    AND (:saga_type IS NULL OR saga_type = :saga_type)
    AND (:correlation_id IS NULL OR correlation_id = :correlation_id) AND (:status IS NULL OR status = :status)
    AND (:needs_attention IS NULL OR needs_attention = :needs_attention)
    AND (:before IS NULL OR status NOT IN ('completed', 'compensated', 'failed') AND (
        wake_at < :before OR owner IS NULL AND EXISTS (
            SELECT 1 FROM saga_mailbox AS mail
            WHERE mail.saga_id = saga.saga_id AND NOT mail.seen AND mail.posted_at < :before)))
ORDER BY needs_attention DESC, updated_at DESC, saga_id LIMIT :limit;

-- name: counts
-- A look at all of them.
SELECT status, count(*), sum(needs_attention) FROM saga_instance GROUP BY status;

-- name: audit
-- The trail of a saga; saga_audit_saga.
SELECT at, old_status, new_status, step, what, actor, detail, traceparent FROM saga_audit_log
WHERE saga_id = :saga_id ORDER BY id LIMIT :limit;
