-- Sagas: instances, their journal, their mailbox, the audit log, and the barriers of participants.
--
-- Most instances have ended, and most messages have been read. Workers use partial indexes, which hold the
-- few others, by definition first: sagas that no worker here can run are not read again and again.

-- name: saga_instance
-- `wake_at` is when an instance is next of interest to anybody: due, or the end of its owner's claim. Only the owner of
-- a claim writes the row, which happens often: the free room in each page keeps the row in its page. `losses` counts the
-- workers that were lost in a row while they had the saga. `parent_id` and `parent_step` are set for a child.
-- `claimed_from` is one lease before the claim or its last renewal: a claim is dead as well if the clock of the database
-- was set back by more than that, or a dead worker would keep the saga until the clock is there again.
-- `audit_lines` and `audit_hash` are the head of its audit chain.
CREATE TABLE {schema}.saga_instance (
    saga_id            uuid PRIMARY KEY,
    saga_type          text NOT NULL CHECK (saga_type <> ''),
    definition_version integer NOT NULL,
    correlation_id     text NOT NULL CHECK (octet_length(correlation_id) <= 1000),
    state              json NOT NULL,
    status             text NOT NULL CHECK (
        status IN ('started', 'running', 'compensating', 'completed', 'compensated', 'failed')),
    current_step       text,
    version            bigint NOT NULL DEFAULT 0,
    last_error         text,
    retry_count        integer NOT NULL DEFAULT 0,
    needs_attention    boolean NOT NULL DEFAULT false,
    traceparent        text,
    started_at         timestamptz NOT NULL,
    updated_at         timestamptz NOT NULL,
    ended_at           timestamptz,
    wake_at            timestamptz,
    owner              text,
    claimed_from       timestamptz,
    epoch              bigint NOT NULL DEFAULT 0,
    fingerprint        text NOT NULL DEFAULT '',
    losses             integer NOT NULL DEFAULT 0,
    deadline_at        timestamptz,
    parent_id          uuid,
    parent_step        text,
    audit_lines        integer NOT NULL DEFAULT 1,
    audit_hash         bytea,
    CONSTRAINT saga_instance_name UNIQUE (saga_type, correlation_id)
) WITH (fillfactor = 70)

-- name: saga_instance_due
CREATE INDEX saga_instance_due ON {schema}.saga_instance (saga_type, definition_version, wake_at)
WHERE wake_at IS NOT NULL

-- name: saga_instance_claimed
-- Those that have an owner: the few whose claim may be from before the clock was set back.
CREATE INDEX saga_instance_claimed ON {schema}.saga_instance (saga_type, definition_version, claimed_from)
WHERE claimed_from IS NOT NULL

-- name: saga_instance_lost
-- Those that were lost with their workers: the few that may become suspects.
CREATE INDEX saga_instance_lost ON {schema}.saga_instance (saga_type, definition_version, wake_at) WHERE losses > 0

-- name: saga_instance_age
-- Those that may be pruned.
CREATE INDEX saga_instance_age ON {schema}.saga_instance (ended_at) WHERE ended_at IS NOT NULL AND NOT needs_attention

-- name: saga_instance_parent
-- The children of a saga.
CREATE INDEX saga_instance_parent ON {schema}.saga_instance (parent_id) WHERE parent_id IS NOT NULL

-- name: saga_step
-- The journal: one line for each step and phase.
CREATE TABLE {schema}.saga_step (
    saga_id          uuid NOT NULL,
    step             text NOT NULL,
    phase            text NOT NULL CHECK (phase IN ('action', 'compensation')),
    status           text NOT NULL CHECK (
        status IN ('planned', 'started', 'retrying', 'done', 'skipped', 'rejected', 'failed')),
    position         integer NOT NULL,
    attempts         integer NOT NULL,
    due_at           timestamptz,
    error            text,
    started_at       timestamptz,
    ended_at         timestamptz,
    uncertainty      text CHECK (uncertainty IN ('outcome_unknown', 'reply_not_applied', 'no_event', 'raised')),
    undelivered      text CHECK (undelivered IN ('waiting', 'dead_letter')),
    command_event_id uuid,
    reply_event_id   uuid,
    unavailable_since timestamptz,
    data             text,
    PRIMARY KEY (saga_id, step, phase)
) WITH (fillfactor = 80)

-- name: saga_mailbox
-- The messages to a saga. The definition is copied here, so that a worker finds its messages by definition.
CREATE TABLE {schema}.saga_mailbox (
    message_id         bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    saga_id            uuid NOT NULL,
    event_id           uuid NOT NULL,
    kind               text NOT NULL CHECK (kind IN ('reply', 'operator')),
    name               text NOT NULL,
    key                text,
    body               json NOT NULL,
    delivered_at          timestamptz NOT NULL,
    seen               boolean NOT NULL DEFAULT false,
    saga_type          text NOT NULL,
    definition_version integer NOT NULL,
    schema_version     text NOT NULL DEFAULT '1',
    CONSTRAINT saga_mailbox_event UNIQUE (saga_id, event_id)
)

-- name: saga_mailbox_unseen
-- The messages that wake a worker.
CREATE INDEX saga_mailbox_unseen ON {schema}.saga_mailbox (saga_type, definition_version, message_id) WHERE NOT seen

-- name: saga_audit_log
-- What happened, when, and by whom. It outlives the saga. `line` and `hash` are the chain, `salt` and `state_hash` belong
-- to the details, and `digest` stands for details that were removed. The first line of a saga has no hash: the second
-- line covers it.
CREATE TABLE {schema}.saga_audit_log (
    id          bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    saga_id     uuid NOT NULL,
    line        integer NOT NULL,
    at          timestamptz NOT NULL,
    old_status  text,
    new_status  text NOT NULL,
    step        text,
    what        text NOT NULL,
    actor       text NOT NULL,
    detail      text NOT NULL,
    traceparent text,
    state_hash  bytea,
    salt        bytea,
    hash        bytea,
    digest      bytea,
    PRIMARY KEY (saga_id, id)
)

-- name: saga_audit_age
CREATE INDEX saga_audit_age ON {schema}.saga_audit_log (at)

-- name: saga_audit_anchor
-- The anchors: `close` covers the heads of sagas that were removed, `prune` the removal of the lines that it `covers`.
-- Anchors stay for ever.
CREATE TABLE {schema}.saga_audit_anchor (
    number bigint PRIMARY KEY,
    at     timestamptz NOT NULL,
    kind   text NOT NULL CHECK (kind IN ('close', 'prune')),
    covers bigint UNIQUE CHECK ((covers IS NULL) = (kind = 'close')),
    chains integer NOT NULL,
    lines  bigint NOT NULL,
    until  timestamptz NOT NULL,
    digest bytea NOT NULL,
    hash   bytea NOT NULL
)

-- name: saga_audit_head
-- The heads of the chains of removed sagas, until their lines are removed. `place` is the id of the last line.
CREATE TABLE {schema}.saga_audit_head (
    saga_id uuid NOT NULL,
    anchor  bigint NOT NULL,
    lines   integer NOT NULL,
    hash    bytea NOT NULL,
    place   bigint,
    PRIMARY KEY (saga_id, anchor)
)

-- name: saga_audit_head_anchor
CREATE INDEX saga_audit_head_anchor ON {schema}.saga_audit_head (anchor)

-- name: saga_audit_refuse
-- A line, and the head of a chain, may be deleted once an anchor records its removal; nothing else may be changed. No
-- setting of a session has a say in it.
CREATE FUNCTION {schema}.saga_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
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
    END IF;
    RAISE EXCEPTION 'the audit log of sagas is append only; % is rejected', TG_OP
    USING ERRCODE = 'check_violation', HINT = 'Old lines are removed by the maintenance of saga workers.';
END $$

-- name: saga_audit_unchanged
CREATE TRIGGER saga_audit_unchanged BEFORE UPDATE OR DELETE ON {schema}.saga_audit_log FOR EACH ROW
EXECUTE FUNCTION {schema}.saga_audit_refuse()

-- name: saga_audit_whole
CREATE TRIGGER saga_audit_whole BEFORE TRUNCATE ON {schema}.saga_audit_log FOR EACH STATEMENT
EXECUTE FUNCTION {schema}.saga_audit_refuse()

-- name: saga_audit_anchor_unchanged
CREATE TRIGGER saga_audit_anchor_unchanged BEFORE UPDATE OR DELETE ON {schema}.saga_audit_anchor FOR EACH ROW
EXECUTE FUNCTION {schema}.saga_audit_refuse()

-- name: saga_audit_anchor_whole
CREATE TRIGGER saga_audit_anchor_whole BEFORE TRUNCATE ON {schema}.saga_audit_anchor FOR EACH STATEMENT
EXECUTE FUNCTION {schema}.saga_audit_refuse()

-- name: saga_audit_head_unchanged
CREATE TRIGGER saga_audit_head_unchanged BEFORE UPDATE OR DELETE ON {schema}.saga_audit_head FOR EACH ROW
EXECUTE FUNCTION {schema}.saga_audit_refuse()

-- name: saga_audit_head_whole
CREATE TRIGGER saga_audit_head_whole BEFORE TRUNCATE ON {schema}.saga_audit_head FOR EACH STATEMENT
EXECUTE FUNCTION {schema}.saga_audit_refuse()

-- name: saga_audit_log_always
-- The triggers also fire while `session_replication_role` is replica.
ALTER TABLE {schema}.saga_audit_log ENABLE ALWAYS TRIGGER saga_audit_unchanged,
    ENABLE ALWAYS TRIGGER saga_audit_whole

-- name: saga_audit_anchor_always
ALTER TABLE {schema}.saga_audit_anchor ENABLE ALWAYS TRIGGER saga_audit_anchor_unchanged,
    ENABLE ALWAYS TRIGGER saga_audit_anchor_whole

-- name: saga_audit_head_always
ALTER TABLE {schema}.saga_audit_head ENABLE ALWAYS TRIGGER saga_audit_head_unchanged,
    ENABLE ALWAYS TRIGGER saga_audit_head_whole

-- name: saga_audit_prune
-- Remove the lines that an anchor covers, and leave an anchor that says so. The role of the workers may run this function,
-- and has no right to delete. The caller computes the hash, because the key of the hash is in no database.
CREATE FUNCTION {schema}.saga_audit_prune(covered bigint, fresh bigint, moment timestamptz, sealed bytea)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE removed bigint;
BEGIN
    INSERT INTO {schema}.saga_audit_anchor (number, at, kind, covers, chains, lines, until, digest, hash)
    SELECT fresh, moment, 'prune', a.number, a.chains, a.lines, a.until, a.digest, sealed
    FROM {schema}.saga_audit_anchor AS a WHERE a.number = covered AND a.kind = 'close';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no anchor % covers removed sagas', covered USING ERRCODE = 'no_data_found';
    END IF;
    DELETE FROM {schema}.saga_audit_log AS n USING {schema}.saga_audit_head AS h
    WHERE h.anchor = covered AND n.saga_id = h.saga_id AND n.id <= h.place;
    GET DIAGNOSTICS removed = ROW_COUNT;
    DELETE FROM {schema}.saga_audit_head WHERE anchor = covered;
    RETURN removed;
END $$

-- name: saga_audit_prune_rights
REVOKE ALL ON FUNCTION {schema}.saga_audit_prune(bigint, bigint, timestamptz, bytea) FROM PUBLIC

-- name: saga_barrier
-- At a participant: the commands that arrived, and their replies. A barred action came after its compensation, or
-- never; a barred compensation found nothing to compensate.
CREATE TABLE {schema}.saga_barrier (
    participant text NOT NULL,
    key         text NOT NULL,
    phase       text NOT NULL CHECK (phase IN ('action', 'compensation')),
    barred      boolean NOT NULL,
    reply       json,
    at          timestamptz NOT NULL,
    PRIMARY KEY (key, participant, phase)
)

-- name: saga_save
-- The writes of a turn whose rows the planner finds: the instance, if claim and version are still the ones expected, and
-- the messages that were taken or seen. The plans of a function are kept and never scan a table. A plan that was made while
-- a table was empty would otherwise scan the table for each turn, once the table has filled.
CREATE FUNCTION {schema}.saga_save(
    of_saga uuid, of_owner text, of_epoch bigint, of_version bigint, new_state text, new_status text, new_step text,
    new_error text, retries integer, attention boolean, release boolean, due_seconds float8, new_losses integer,
    taken bigint[], read bigint[], now timestamptz, new_lines integer, new_hash bytea, OUT traceparent text
) RETURNS SETOF text LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    UPDATE {schema}.saga_instance AS i SET
        state = new_state::json, status = new_status, current_step = new_step, version = i.version + 1,
        last_error = new_error, retry_count = retries, needs_attention = attention, losses = new_losses,
        updated_at = now, audit_lines = new_lines, audit_hash = new_hash,
        ended_at = CASE WHEN new_status IN ('completed', 'compensated', 'failed') THEN coalesce(i.ended_at, now) END,
        owner = CASE WHEN release THEN NULL ELSE i.owner END, wake_at = now + due_seconds * interval '1 second',
        claimed_from = CASE WHEN NOT release THEN now - due_seconds * interval '1 second' END
    WHERE i.saga_id = of_saga AND i.owner = of_owner AND i.epoch = of_epoch AND i.version = of_version
    RETURNING i.traceparent INTO traceparent;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF cardinality(taken) > 0 THEN
        DELETE FROM {schema}.saga_mailbox AS m WHERE m.saga_id = of_saga AND m.message_id = ANY (taken);
    END IF;
    IF cardinality(read) > 0 THEN
        UPDATE {schema}.saga_mailbox AS m SET seen = true
        WHERE m.saga_id = of_saga AND m.message_id = ANY (read) AND m.seen IS FALSE;
    END IF;
    RETURN NEXT;
END $$

-- name: saga_read
-- Sagas with their journals and messages, as JSON. The caller has locked or claimed them by an earlier statement, so the
-- statement here sees all writes of the last owner. The functions of a worker have plans that are kept and never scan a
-- table.
CREATE FUNCTION {schema}.saga_read(of_sagas uuid[]) RETURNS TABLE (
    saga {schema}.saga_instance, journal text, messages text, now timestamptz
) LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT i, (
        SELECT json_agg(s ORDER BY s.phase, s.position, s.step)::text FROM {schema}.saga_step AS s
        WHERE s.saga_id = i.saga_id
    ), (
        SELECT json_agg(json_build_object('message_id', m.message_id, 'kind', m.kind, 'name', m.name, 'key', m.key,
            'body', m.body::text, 'event_id', m.event_id, 'delivered_at', m.delivered_at,
            'schema_version', m.schema_version) ORDER BY m.message_id)::text
        FROM {schema}.saga_mailbox AS m WHERE m.saga_id = i.saga_id
    ), moment.now
    FROM {schema}.outbox_clock() AS moment (now), {schema}.saga_instance AS i
    WHERE i.saga_id = ANY (of_sagas);
END $$

-- name: saga_load
-- One saga, locked if it will be written.
CREATE FUNCTION {schema}.saga_load(of_saga uuid, locked boolean) RETURNS TABLE (
    saga {schema}.saga_instance, journal text, messages text, now timestamptz
) LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF locked THEN
        PERFORM FROM {schema}.saga_instance AS i WHERE i.saga_id = of_saga FOR UPDATE;
    END IF;
    RETURN QUERY SELECT * FROM {schema}.saga_read(ARRAY[of_saga]);
END $$

-- name: saga_claim
-- Claim sagas of the given definitions that are due, or have unseen messages and no owner; rows locked by others are
-- left out. The kinds come in turn, so none waits for the end of another. A saga that still has an owner was lost with
-- its worker; after more than one loss in a row it is a suspect, and at most `suspects_max` of them are claimed. A claim
-- from before the clock was set back by more than a lease is lost as well. Indexes: saga_instance_due,
-- saga_instance_lost, saga_instance_claimed, saga_mailbox_unseen, saga_instance_pkey.
CREATE FUNCTION {schema}.saga_claim(
    of_owner text, types text[], versions integer[], sagas_max integer, lease float8, suspects_max integer
) RETURNS TABLE (
    saga {schema}.saga_instance, journal text, messages text, now timestamptz
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    moment timestamptz := {schema}.outbox_clock();
    claimed uuid[];
BEGIN
    WITH definition AS (
        SELECT * FROM unnest(types, versions) AS d (saga_type, definition_version)
    ), due AS MATERIALIZED (
        SELECT found.saga_id, row_number() OVER (ORDER BY found.wake_at) AS rank
        FROM definition AS d CROSS JOIN LATERAL (
            SELECT i.saga_id, i.wake_at FROM {schema}.saga_instance AS i
            WHERE i.saga_type = d.saga_type AND i.definition_version = d.definition_version AND i.wake_at <= moment
                AND i.losses = 0
            ORDER BY i.wake_at LIMIT sagas_max
            FOR UPDATE SKIP LOCKED
        ) AS found
    ), suspect AS MATERIALIZED (
        SELECT found.saga_id, row_number() OVER (ORDER BY found.wake_at) AS rank
        FROM definition AS d CROSS JOIN LATERAL (
            SELECT i.saga_id, i.wake_at FROM {schema}.saga_instance AS i
            WHERE i.saga_type = d.saga_type AND i.definition_version = d.definition_version AND i.wake_at <= moment
                AND i.losses > 0
            ORDER BY i.wake_at LIMIT suspects_max
            FOR UPDATE SKIP LOCKED
        ) AS found
        ORDER BY found.wake_at LIMIT suspects_max
    ), ahead AS MATERIALIZED (
        SELECT found.saga_id, found.losses,
            row_number() OVER (PARTITION BY found.losses > 0 ORDER BY found.claimed_from) AS rank
        FROM definition AS d CROSS JOIN LATERAL (
            SELECT i.saga_id, i.losses, i.claimed_from FROM {schema}.saga_instance AS i
            WHERE i.saga_type = d.saga_type AND i.definition_version = d.definition_version AND i.claimed_from > moment
            ORDER BY i.claimed_from LIMIT sagas_max
            FOR UPDATE SKIP LOCKED
        ) AS found
    ), mailed AS MATERIALIZED (
        SELECT found.saga_id, row_number() OVER (ORDER BY found.message_id) AS rank
        FROM definition AS d CROSS JOIN LATERAL (
            SELECT free.saga_id, m.message_id
            FROM {schema}.saga_mailbox AS m CROSS JOIN LATERAL (
                SELECT i.saga_id FROM {schema}.saga_instance AS i
                WHERE i.saga_id = m.saga_id AND i.owner IS NULL AND i.status NOT IN ('completed', 'compensated')
                FOR UPDATE SKIP LOCKED
            ) AS free
            WHERE m.saga_type = d.saga_type AND m.definition_version = d.definition_version AND NOT m.seen
            ORDER BY m.message_id LIMIT sagas_max
        ) AS found
    ), chosen AS (
        SELECT found.saga_id FROM (
            SELECT * FROM due UNION ALL SELECT * FROM suspect UNION ALL SELECT * FROM mailed
            UNION ALL SELECT a.saga_id, a.rank FROM ahead AS a
            WHERE a.losses = 0 OR a.rank <= suspects_max - (SELECT count(*) FROM suspect)
        ) AS found
        GROUP BY found.saga_id ORDER BY min(found.rank) LIMIT sagas_max
    ), taken AS (
        UPDATE {schema}.saga_instance AS i
        SET owner = of_owner, epoch = i.epoch + 1, wake_at = moment + lease * interval '1 second',
            claimed_from = moment - lease * interval '1 second',
            losses = CASE WHEN i.owner IS NULL THEN 0 ELSE i.losses + 1 END
        WHERE i.saga_id = ANY (ARRAY(SELECT c.saga_id FROM chosen AS c))
        RETURNING i.saga_id
    )
    SELECT array_agg(t.saga_id) FROM taken AS t INTO claimed;
    IF claimed IS NOT NULL THEN
        RETURN QUERY SELECT r.saga, r.journal, r.messages, moment FROM {schema}.saga_read(claimed) AS r;
    END IF;
END $$

-- name: saga_barrier_age
-- Those that may be pruned, by age. This is the last step: a schema that has it has everything.
CREATE INDEX saga_barrier_age ON {schema}.saga_barrier (at)
