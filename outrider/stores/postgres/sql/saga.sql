-- Pieces that the sagas' statements share.

-- fragment: planned_anew
-- Always true, see `costly`: for a list of ids, for one id, a worker or participant, and an age. Statements whose rows are
-- found by the planner have one of them, because a worker may start on empty tables; an INSERT with ON CONFLICT finds
-- its row through the index in every plan.
($1::uuid[] IS NOT NULL OR {costly})

-- fragment: planned_anew_for_name
($1::text IS NOT NULL OR {costly})

-- fragment: planned_anew_by_age
($1::float8 IS NOT NULL OR {costly})

-- fragment: instance
-- In the order of Instance's fields. JSON as text, whatever codecs the connection has.
i.saga_id, i.saga_type, i.definition_version, i.correlation_id, i.state::text AS state, i.status, i.current_step,
i.version, i.last_error, i.retry_count, i.needs_attention, i.traceparent, i.started_at, i.updated_at, i.ended_at,
i.wake_at, i.owner, i.epoch, i.fingerprint, i.losses, i.deadline_at, i.parent_id, i.parent_step, i.audit_lines,
i.audit_hash, i.subject

-- fragment: moment
-- One moment for the whole statement.
moment AS MATERIALIZED (SELECT {schema}.outbox_clock() AS now)

-- fragment: now
(SELECT now FROM moment)

-- fragment: audit_line
-- In the order of AuditLine's fields.
saga_id, id, line, at, old_status, new_status, step, what, actor, detail, traceparent, state_hash, salt, hash, digest,
state

-- fragment: anchor
-- In the order of AuditAnchor's fields.
number, at, kind, covers, chains, lines, until, digest, hash

-- fragment: audit_columns
saga_id, line, at, old_status, new_status, step, what, actor, detail, traceparent

-- What starts, runs and answers sagas.

-- name: start
-- An instance that is due at once, with the first line of its trail; nothing if there is one of that name.
-- Indexes: saga_instance_pkey, saga_instance_name.
WITH {moment}, fresh AS (
    INSERT INTO {schema}.saga_instance (
        saga_id, saga_type, definition_version, correlation_id, state, status, traceparent, started_at, updated_at,
        wake_at, fingerprint, deadline_at, parent_id, parent_step, subject)
    SELECT $1::uuid, $2::text, $3::integer, $4::text, $5::text::json, 'started', $6::text, now, now, now, $7::text,
        now + $8::float8 * interval '1 second', $9::uuid, $10::text, $11::text
    FROM moment
    ON CONFLICT DO NOTHING
    RETURNING saga_id, started_at, traceparent
)
INSERT INTO {schema}.saga_audit_log ({audit_columns})
SELECT saga_id, 1, started_at, NULL, 'started', NULL, 'started', 'application', '', traceparent FROM fresh
RETURNING saga_id

-- name: deliver
-- Mail to sagas that may still read it and are of the type meant, sorted, so that two who post the same wait for each
-- other and never in a circle. LIMIT keeps the planner from reading all instances. Indexes: saga_instance_pkey,
-- saga_mailbox_event.
INSERT INTO {schema}.saga_mailbox (
    saga_id, event_id, kind, name, key, body, delivered_at, saga_type, definition_version, schema_version)
SELECT g.saga_id, g.event_id, g.kind, g.name, g.key, g.body::json, {schema}.outbox_clock(), i.saga_type,
    i.definition_version, g.schema_version
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::uuid[], $7::text[], $8::text[])
    AS g (saga_id, kind, name, key, body, event_id, saga_type, schema_version)
CROSS JOIN LATERAL (
    SELECT saga_type, definition_version FROM {schema}.saga_instance
    WHERE saga_id = g.saga_id AND status NOT IN ('completed', 'compensated')
        AND saga_type = coalesce(g.saga_type, saga_type)
    LIMIT 1
) AS i
WHERE {planned_anew}
ORDER BY g.saga_id, g.event_id
ON CONFLICT (saga_id, event_id) DO NOTHING
RETURNING message_id

-- name: claim
-- The function claims; indexes are named there.
SELECT {instance}, f.journal, f.messages, f.now
FROM {schema}.saga_claim($1, $2, $3, $4, $5, $6) AS f CROSS JOIN LATERAL (SELECT (f.saga).*) AS i

-- name: renew
-- Move the end of claims ahead. A row that a turn of its owner has locked cannot be taken from it, and is left alone:
-- one turn that takes long must not cost the others their claims. Index: saga_instance_pkey.
WITH {moment}, claim AS (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::bigint[]) AS c (saga_id, owner, epoch) WHERE {planned_anew}
), held AS MATERIALIZED (
    SELECT c.saga_id FROM claim AS c CROSS JOIN LATERAL (
        SELECT FROM {schema}.saga_instance
        WHERE saga_id = c.saga_id AND owner = c.owner AND epoch = c.epoch LIMIT 1
    ) AS i
), free AS MATERIALIZED (
    SELECT c.saga_id FROM claim AS c CROSS JOIN LATERAL (
        SELECT FROM {schema}.saga_instance
        WHERE saga_id = c.saga_id AND owner = c.owner AND epoch = c.epoch
        FOR UPDATE SKIP LOCKED
    ) AS i
), renewed AS (
    UPDATE {schema}.saga_instance SET wake_at = {now} + $4::float8 * interval '1 second',
        claimed_from = {now} - $4::float8 * interval '1 second'
    WHERE saga_id = ANY (ARRAY(SELECT saga_id FROM free))
)
SELECT saga_id FROM held

-- name: load
-- Index: saga_instance_pkey, saga_step_pkey, saga_mailbox_event.
SELECT {instance}, f.journal, f.messages, f.now
FROM {schema}.saga_load($1, false) AS f CROSS JOIN LATERAL (SELECT (f.saga).*) AS i

-- name: load_for_update
-- Also which transaction this is, so that `save` can tell whether a step has begun another. Indexes as for `load`.
SELECT {instance}, f.journal, f.messages, f.now, txid_current() AS transaction
FROM {schema}.saga_load($1, true) AS f CROSS JOIN LATERAL (SELECT (f.saga).*) AS i

-- name: save
-- A turn, whole. Without its claim or its version, nothing of it. $1..$4 are the fence.
-- Indexes: saga_instance_pkey, saga_step_pkey, saga_mailbox_pkey.
WITH {moment}, held AS MATERIALIZED (
    SELECT $1::uuid AS saga_id, traceparent
    FROM {schema}.saga_save($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $39, $27, $28, {now},
        $41, $42) AS traceparent
), journal AS (
    INSERT INTO {schema}.saga_step (
        saga_id, step, phase, status, position, attempts, due_at, error, started_at, ended_at, uncertainty, undelivered,
        command_event_id, reply_event_id, unavailable_since, data)
    SELECT held.saga_id, g.*
    FROM held, unnest(
        $13::text[], $14::text[], $15::text[], $16::integer[], $17::integer[], $18::timestamptz[], $19::text[],
        $20::timestamptz[], $21::timestamptz[], $22::text[], $23::text[], $24::uuid[], $25::uuid[],
        $26::timestamptz[], $40::text[]) AS g
    ON CONFLICT (saga_id, step, phase) DO UPDATE SET
        status = excluded.status, position = excluded.position, attempts = excluded.attempts, due_at = excluded.due_at,
        error = excluded.error, started_at = excluded.started_at, ended_at = excluded.ended_at,
        uncertainty = excluded.uncertainty, undelivered = excluded.undelivered,
        command_event_id = excluded.command_event_id, reply_event_id = excluded.reply_event_id,
        unavailable_since = excluded.unavailable_since, data = excluded.data
), noted AS (
    INSERT INTO {schema}.saga_audit_log ({audit_columns}, state_hash, salt, hash, state)
    SELECT held.saga_id, g.line, g.at, g.old_status, g.new_status, g.step, g.what, g.actor, g.detail, held.traceparent,
        g.state_hash, g.salt, g.hash, CASE WHEN $44::boolean AND g.state_hash IS NOT NULL THEN $5::text END
    FROM held, unnest($29::integer[], $30::timestamptz[], $31::text[], $32::text[], $33::text[], $34::text[],
        $35::text[], $36::text[], $37::bytea[], $38::bytea[], $43::bytea[])
        AS g (line, at, old_status, new_status, step, what, actor, detail, state_hash, salt, hash)
    ORDER BY g.line
)
SELECT {now} AS now, txid_current() AS transaction FROM held

-- name: undelivered
-- The tables of events that have not left the outbox. LIMIT keeps the planner from hashing the whole outbox for a few
-- ids. Indexes: outbox_pkey, outbox_dead_letter_pkey.
SELECT g.event_id, found.location FROM unnest($1::uuid[]) AS g (event_id) CROSS JOIN LATERAL (
    SELECT 'waiting' FROM {schema}.outbox AS o WHERE o.event_id = g.event_id
    UNION ALL
    SELECT 'dead_letter' FROM {schema}.outbox_dead_letter AS d WHERE d.event_id = g.event_id
    LIMIT 1
) AS found (location)
WHERE {planned_anew}

-- name: anchor_turn
-- Anchors are a chain, so those who write one take turns.
SELECT pg_advisory_xact_lock(hashtextextended('{schema}.saga_audit_anchor', 0))::text

-- name: last_anchor
-- The end of the chain of anchors, and the time. Index: saga_audit_anchor_pkey.
SELECT {schema}.outbox_clock() AS now, a.* FROM (VALUES (1)) AS one LEFT JOIN LATERAL (
    SELECT {anchor} FROM {schema}.saga_audit_anchor ORDER BY number DESC LIMIT 1
) AS a ON true

-- name: prunable_sagas
-- A bounded number of sagas that ended long ago, with the heads of their chains. A child stays until its parent has
-- ended, and a parent as long as it has children: a new saga of its name would start the same children. Indexes:
-- saga_instance_age, saga_instance_parent, saga_instance_pkey, saga_audit_log_pkey.
SELECT {instance}, (
    SELECT n.id FROM {schema}.saga_audit_log AS n WHERE n.saga_id = i.saga_id ORDER BY n.id DESC LIMIT 1
) AS place
FROM {schema}.saga_instance AS i
WHERE NOT i.needs_attention AND {planned_anew_by_age}
    AND i.ended_at < (SELECT {schema}.outbox_clock() - $1::float8 * interval '1 day')
    AND (i.parent_id IS NULL OR coalesce((
        SELECT p.status IN ('completed', 'compensated') FROM {schema}.saga_instance AS p
        WHERE p.saga_id = i.parent_id LIMIT 1
    ), true))
    AND coalesce((SELECT false FROM {schema}.saga_instance AS c WHERE c.parent_id = i.saga_id LIMIT 1), true)
ORDER BY i.ended_at LIMIT $2
FOR UPDATE OF i SKIP LOCKED

-- name: close_sagas
-- Remove sagas with their journals and messages; the anchor and the heads of their chains stay. The planner takes a list
-- of unknown length for a short one. Indexes: saga_instance_pkey, saga_step_pkey, saga_mailbox_event.
WITH old AS MATERIALIZED (
    SELECT unnest($1::uuid[]) AS saga_id
), anchor AS (
    INSERT INTO {schema}.saga_audit_anchor ({anchor})
    SELECT $5::bigint, $6::timestamptz, $7::text, $8::bigint, $9::integer, $10::bigint, $11::timestamptz, $12::bytea,
        $13::bytea
    WHERE {planned_anew}
), head AS (
    INSERT INTO {schema}.saga_audit_head (saga_id, anchor, lines, hash, place, subject_hash)
    SELECT h.saga_id, $5, h.lines, h.hash, h.place, h.subject_hash
    FROM unnest($1::uuid[], $2::integer[], $3::bytea[], $4::bigint[], $14::text[])
        AS h (saga_id, lines, hash, place, subject_hash)
), journal AS (
    DELETE FROM {schema}.saga_step WHERE saga_id = ANY (ARRAY(SELECT saga_id FROM old))
), mail AS (
    DELETE FROM {schema}.saga_mailbox WHERE saga_id = ANY (ARRAY(SELECT saga_id FROM old))
)
DELETE FROM {schema}.saga_instance WHERE saga_id = ANY (ARRAY(SELECT saga_id FROM old))

-- name: prunable_audit
-- The oldest anchor whose lines are still there, if the last change of its sagas is long ago. Later anchors cover later
-- sagas. Indexes: saga_audit_head_anchor, saga_audit_anchor_pkey.
SELECT {anchor} FROM {schema}.saga_audit_anchor
WHERE number = (SELECT min(anchor) FROM {schema}.saga_audit_head) AND {planned_anew_by_age}
    AND until < (SELECT {schema}.outbox_clock() - $1::float8 * interval '1 day')

-- name: prune_audit
SELECT {schema}.saga_audit_prune($1, $2, $3, $4) AS removed

-- name: prune_participants
-- A bounded step. Index: saga_barrier_age.
DELETE FROM {schema}.saga_barrier WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {schema}.saga_barrier
    WHERE {planned_anew_by_age} AND at < (SELECT {schema}.outbox_clock() - $1::float8 * interval '1 day')
    ORDER BY at LIMIT $2
    FOR UPDATE SKIP LOCKED))

-- name: may_prune_participants
-- A consumer without participants may have no rights there, or a schema that is older than sagas.
SELECT coalesce(has_table_privilege(b.name, 'SELECT') AND has_table_privilege(b.name, 'UPDATE')
    AND has_table_privilege(b.name, 'DELETE'), false) AS may
FROM (SELECT to_regclass('{schema}.saga_barrier') AS name) AS b

-- name: drop_unread_messages
-- Messages that were delivered while their saga ended; no turn will read them. Indexes: saga_mailbox_unseen,
-- saga_instance_pkey.
DELETE FROM {schema}.saga_mailbox AS m
WHERE NOT m.seen AND coalesce((
    SELECT i.status IN ('completed', 'compensated') FROM {schema}.saga_instance AS i WHERE i.saga_id = m.saga_id LIMIT 1
), true)

-- name: enter_action
-- A command comes for the first time, or it does not. Index: saga_barrier_pkey.
INSERT INTO {schema}.saga_barrier (participant, key, phase, barred, at)
VALUES ($1, $2, 'action', false, {schema}.outbox_clock())
ON CONFLICT (key, participant, phase) DO NOTHING
RETURNING barred

-- name: enter_compensation
-- Bar the action first, unless it arrived before; then it is compensated. Index: saga_barrier_pkey.
WITH action AS (
    INSERT INTO {schema}.saga_barrier (participant, key, phase, barred, at)
    VALUES ($1, $2, 'action', true, {schema}.outbox_clock())
    ON CONFLICT (key, participant, phase) DO NOTHING
    RETURNING key
)
INSERT INTO {schema}.saga_barrier (participant, key, phase, barred, at)
SELECT $1, $2, 'compensation', EXISTS (SELECT FROM action), {schema}.outbox_clock()
ON CONFLICT (key, participant, phase) DO NOTHING
RETURNING barred

-- name: participant_reply
-- A new statement, which sees rows committed meanwhile. Index: saga_barrier_pkey.
SELECT barred, reply::text AS reply FROM {schema}.saga_barrier WHERE participant = $1 AND key = $2 AND phase = $3
    AND {planned_anew_for_name}

-- name: save_reply
-- Index: saga_barrier_pkey.
UPDATE {schema}.saga_barrier SET reply = $4::text::json WHERE participant = $1 AND key = $2 AND phase = $3
    AND {planned_anew_for_name}

-- What people ask about sagas.

-- name: find
-- Sagas that need attention come first. Stuck sagas have no worker: overdue, or with unseen messages.
SELECT {instance} FROM {schema}.saga_instance AS i
WHERE (cardinality($1::uuid[]) = 0 OR i.saga_id = ANY ($1)) AND ($2::text IS NULL OR i.saga_type = $2)
    AND ($8::uuid IS NULL OR i.parent_id = $8)
    AND ($3::text IS NULL OR i.correlation_id = $3) AND ($4::text IS NULL OR i.status = $4)
    AND ($5::boolean IS NULL OR i.needs_attention = $5)
    AND ($6::float8 IS NULL OR i.status NOT IN ('completed', 'compensated', 'failed') AND (
        i.wake_at < (SELECT {schema}.outbox_clock() - $6 * interval '1 second')
        OR i.owner IS NULL AND i.saga_id IN (
            SELECT m.saga_id FROM {schema}.saga_mailbox AS m
            WHERE NOT m.seen AND m.delivered_at < (SELECT {schema}.outbox_clock() - $6 * interval '1 second'))))
ORDER BY i.needs_attention DESC, i.updated_at DESC, i.saga_id
LIMIT $7

-- name: counts
SELECT status, count(*) AS sagas, count(*) FILTER (WHERE needs_attention) AS needing
FROM {schema}.saga_instance GROUP BY status

-- name: audit
-- Index: saga_audit_log_pkey.
SELECT at, old_status, new_status, step, what, actor, detail, traceparent FROM {schema}.saga_audit_log
WHERE saga_id = $1 ORDER BY id LIMIT $2

-- name: audit_lines
-- A page of all lines. Index: saga_audit_log_pkey.
SELECT {audit_line} FROM {schema}.saga_audit_log
WHERE (saga_id, id) > ($1::uuid, $2::bigint) ORDER BY saga_id, id LIMIT $3

-- name: audit_chain
-- All lines of one saga. Index: saga_audit_log_pkey.
SELECT {audit_line} FROM {schema}.saga_audit_log WHERE saga_id = $1 ORDER BY id

-- name: audit_heads
-- The heads of the chains of some sagas: of removed sagas first. Indexes: saga_audit_head_pkey, saga_instance_pkey.
SELECT saga_id, lines, hash, anchor, place, NULL AS started_at, NULL AS traceparent
FROM {schema}.saga_audit_head WHERE saga_id = ANY ($1::uuid[])
UNION ALL
SELECT saga_id, audit_lines, audit_hash, NULL, NULL, started_at, traceparent
FROM {schema}.saga_instance WHERE saga_id = ANY ($1)
ORDER BY saga_id, anchor NULLS LAST

-- name: audit_missing
-- Sagas without any line in the audit log. Indexes: saga_audit_log_pkey.
SELECT k.saga_id FROM (
    SELECT saga_id FROM {schema}.saga_instance UNION SELECT saga_id FROM {schema}.saga_audit_head
) AS k
WHERE NOT EXISTS (SELECT FROM {schema}.saga_audit_log AS n WHERE n.saga_id = k.saga_id) LIMIT $1

-- name: audit_anchors
-- A page of the anchors, and whether each one that closed sagas still has its lines. Index: saga_audit_anchor_pkey.
SELECT {anchor} FROM {schema}.saga_audit_anchor WHERE number > $1 ORDER BY number LIMIT $2

-- name: anchor_heads
-- Index: saga_audit_head_anchor.
SELECT saga_id, lines, hash, anchor, place FROM {schema}.saga_audit_head WHERE anchor = $1

-- name: audit_pruned
-- Whether an anchor records the removal of lines. Index: saga_audit_anchor_covers_key.
SELECT count(*) FROM {schema}.saga_audit_anchor WHERE covers = $1

-- name: audit_find
-- The latest lines that match. Indexes: saga_audit_age, saga_audit_log_pkey.
SELECT {audit_line} FROM {schema}.saga_audit_log
WHERE ($1::uuid IS NULL OR saga_id = $1) AND ($2::text IS NULL OR actor = $2) AND ($3::timestamptz IS NULL OR at >= $3)
ORDER BY at DESC, saga_id DESC, id DESC LIMIT $4
