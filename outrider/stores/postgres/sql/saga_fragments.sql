-- Pieces that the sagas' statements share.

-- name: instance
-- In the order of Instance's fields. JSON as text, whatever codecs the connection has.
i.saga_id, i.saga_type, i.definition_version, i.correlation_id, i.state::text AS state, i.status, i.current_step,
i.version, i.last_error, i.retry_count, i.needs_attention, i.traceparent, i.started_at, i.updated_at, i.ended_at,
i.wake_at, i.owner, i.epoch, i.outline

-- name: moment
-- One moment for the whole statement.
moment AS MATERIALIZED (SELECT {schema}.outbox_clock() AS now)

-- name: now
(SELECT now FROM moment)

-- name: audit_columns
saga_id, at, old_status, new_status, step, what, actor, detail, traceparent
