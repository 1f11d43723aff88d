-- Pieces that statements share. A piece may use those before it.

-- fragment: stream_key
coalesce(o.key, o.aggregate_id, o.event_id::text)

-- fragment: fence
-- Locks the lanes that are still the lease's own; $1 is the owner, $2 the lanes, $3 their epochs. A statement with it
-- writes rows that a crash may lose because they are only published again, so its commit need not wait for the disk.
l AS MATERIALIZED (
    SELECT k.lane, set_config('synchronous_commit', 'off', true)
    FROM {schema}.outbox_lane AS k JOIN unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch) USING (lane)
    WHERE k.owner = $1 AND k.epoch = w.epoch
    ORDER BY k.lane
    FOR SHARE OF k
)

-- A CASE, because the planner would take outbox_fetchable for a plain condition, and read all of it for a few ids.

-- fragment: claimed
CASE o.state WHEN 'optimistic' THEN
    o.claimed_until > (SELECT {schema}.outbox_clock())
        AND o.claimed_until <= (SELECT {schema}.outbox_clock()) + {claim_seconds_max} * interval '1 second'
    ELSE false END

-- fragment: event_columns
o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, o.topic, {stream_key} AS key,
    o.routing_key, o.lane, o.schema_version, o.saga_id, o.sequence, o.max_attempts, o.retry, o.attempts, o.state,
    o.created_at, o.available_at,
    CASE WHEN {claimed} THEN 'optimistic' WHEN o.available_at > (SELECT {schema}.outbox_clock()) THEN 'early' ELSE 'ready' END
        AS readiness,
    coalesce(o.failure ->> 'kind' = 'unknown', false) AS suspect

-- fragment: waiting_rows
SELECT FROM {schema}.outbox AS o
    WHERE o.lane = b.lane AND o.topic = b.topic AND {stream_key} = b.key AND o.state IN ({waiting})

-- fragment: archive_columns
id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, sequence, attempts, created_at, sent_at

-- fragment: gone_columns
o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, o.topic, {stream_key},
    o.routing_key, o.priority, o.schema_version, o.saga_id, o.sequence, o.attempts, o.created_at,
    (SELECT {schema}.outbox_clock())

-- fragment: new_event_columns
event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, max_attempts, retry, created_at, available_at, sequence

-- fragment: new_events
unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
    $10::smallint[], $11::text[], $12::text[], $13::bigint[], $14::smallint[], $15::text[], $16::timestamptz[],
    $17::timestamptz[]) WITH ORDINALITY AS g (event_id, event_type, aggregate_type, aggregate_id, payload, headers,
    topic, key, routing_key, priority, schema_version, saga_id, sequence, max_attempts, retry, created_at,
    available_at, ord)

-- fragment: new_event_values
g.event_id, g.event_type, g.aggregate_type, g.aggregate_id, g.payload::json, g.headers::json, g.topic, g.key,
    g.routing_key, g.priority, g.schema_version, g.saga_id, g.max_attempts, g.retry::json,
    coalesce(g.created_at, {schema}.outbox_clock()), g.available_at

-- fragment: one_new_event
-- A single new event, without the array functions, which the planner handles fast.
$1::uuid, $2::text, $3::text, $4::text, $5::text::json, $6::text::json, $7::text, $8::text, $9::text, $10::smallint,
    $11::text, $12::text, $14::smallint, $15::text::json,
    coalesce($16::timestamptz, {schema}.outbox_clock()), $17::timestamptz

-- fragment: new_event_lane
{schema}.outbox_lane_of(coalesce(g.key, g.aggregate_id, g.event_id::text), g.priority)

-- fragment: quiet
-- Evaluated only with a claim: a writer may claim an event if no undelivered event lies before it. At a stricter
-- isolation level the statement would look at an old snapshot, so the event is left to the relay.
CROSS JOIN LATERAL (
    SELECT $18::text IS NOT NULL AND current_setting('transaction_isolation') = 'read committed'
        AND NOT EXISTS (
            SELECT FROM {schema}.outbox AS o WHERE o.lane = {new_event_lane} AND o.state IN ({fetchable}))
        AND NOT EXISTS (
            SELECT FROM {schema}.outbox_blocked AS b
            WHERE b.lane = {new_event_lane} AND b.topic = g.topic
                AND b.key = coalesce(g.key, g.aggregate_id, g.event_id::text)) AS quiet
) AS q

-- fragment: staged_state
CASE WHEN q.quiet THEN 'optimistic' ELSE 'pending' END, CASE WHEN q.quiet THEN $18 END,
    CASE WHEN q.quiet THEN (SELECT {schema}.outbox_clock()) + $19::float8 * interval '1 second' END

-- fragment: replayed_event
event_id, event_type, aggregate_type, aggregate_id, payload, (headers::jsonb || '{"replayed": "true"}')::json, topic,
    key, routing_key, priority, schema_version, saga_id, max_attempts, retry, created_at, available_at, sequence

-- fragment: dead_columns
id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, sequence, max_attempts, retry, created_at, available_at, lane, attempts, reason, failure,
    policy, dead_lettered_at

-- fragment: journal_is_on
-- Read once in a statement. Settling statements call the journal's function only if it is on; `gone` has their rows.
(SELECT m.value = '1' FROM {schema}.outbox_meta AS m WHERE m.name = 'journal')

-- fragment: journal_archived
(SELECT CASE WHEN {journal_is_on} THEN {journal_add}('archived', ARRAY(SELECT event_id FROM gone)) IS NOT NULL ELSE true END)

-- fragment: journal_sent
(SELECT CASE WHEN {journal_is_on} THEN {journal_add}('sent', ARRAY(SELECT event_id FROM gone)) IS NOT NULL ELSE true END)

-- fragment: journal_dead_letter
(SELECT CASE WHEN {journal_is_on} THEN {journal_add}('dead_letter', ARRAY(SELECT event_id FROM gone)) IS NOT NULL ELSE true END)

-- fragment: journal_discarded
(SELECT CASE WHEN {journal_is_on} THEN {journal_add}('discarded', ARRAY(SELECT event_id FROM gone)) IS NOT NULL ELSE true END)

-- fragment: journal_expired
(SELECT CASE WHEN {journal_is_on} THEN {journal_add}('expired', ARRAY(SELECT event_id FROM gone)) IS NOT NULL ELSE true END)

-- fragment: living
(r.alive_from <= {schema}.outbox_clock() AND r.alive_until > {schema}.outbox_clock())

-- Living relays and owners of lanes. Time is database time.

-- name: heartbeat
-- Join ($3) or renew; says how many others live and which lanes are free. A relay whose heartbeat is from before the
-- clock was set back may renew it; until then, others may take its lanes, and the fence protects them. Index:
-- outbox_relay_pkey.
WITH beaten AS (
    INSERT INTO {schema}.outbox_relay AS r (relay_id, alive_from, alive_until)
    SELECT $1, now - $2 * interval '1 second', now + $2 * interval '1 second' FROM {schema}.outbox_clock() AS now
    WHERE $3 OR EXISTS (
        SELECT FROM {schema}.outbox_relay WHERE relay_id = $1 AND alive_until > {schema}.outbox_clock())
    ON CONFLICT (relay_id) DO UPDATE SET alive_from = excluded.alive_from, alive_until = excluded.alive_until
    WHERE r.alive_until > {schema}.outbox_clock()
    RETURNING relay_id
)
SELECT
    (SELECT count(*) FROM beaten) AS beaten,
    (SELECT count(*) FROM {schema}.outbox_relay AS r WHERE relay_id <> $1 AND {living}) AS others,
    ARRAY(SELECT lane FROM {schema}.outbox_lane AS k
          WHERE owner IS NULL OR NOT EXISTS (
              SELECT FROM {schema}.outbox_relay AS r
              WHERE r.relay_id = k.owner AND {living})
          ORDER BY lane) AS free

-- name: alive
-- Count living relays.
SELECT count(*) FROM {schema}.outbox_relay AS r WHERE {living}

-- name: claim
-- Claim free lanes; a lane that is locked at this moment is left out. Index: outbox_lane_pkey.
WITH free AS (
    SELECT k.lane FROM {schema}.outbox_lane AS k
    WHERE k.lane = ANY ($2::smallint[]) AND (k.owner IS NULL OR NOT EXISTS (
        SELECT FROM {schema}.outbox_relay AS r
        WHERE r.relay_id = k.owner AND {living}))
    ORDER BY k.lane
    FOR UPDATE OF k SKIP LOCKED
)
UPDATE {schema}.outbox_lane AS k SET owner = $1, epoch = k.epoch + 1
FROM free
WHERE k.lane = free.lane AND EXISTS (
    SELECT FROM {schema}.outbox_relay AS r WHERE relay_id = $1 AND {living})
RETURNING k.lane, k.epoch

-- name: release
-- Give lanes back, if they are still ours at these epochs.
UPDATE {schema}.outbox_lane AS k SET owner = NULL
FROM unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch)
WHERE k.lane = w.lane AND k.epoch = w.epoch AND k.owner = $1

-- name: leave
-- End a heartbeat and free its remaining lanes.
WITH gone AS (DELETE FROM {schema}.outbox_relay WHERE relay_id = $1)
UPDATE {schema}.outbox_lane SET owner = NULL WHERE owner = $1

-- name: lock_lanes
-- The fence, for writes of several statements: the lanes stay ours until the commit.
SELECT k.lane
FROM {schema}.outbox_lane AS k JOIN unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch) USING (lane)
WHERE k.owner = $1 AND k.epoch = w.epoch
ORDER BY k.lane
FOR SHARE OF k

-- name: take_lane
-- An operator changes rows of a lane: the results in flight of the lane's owner can no longer be written.
UPDATE {schema}.outbox_lane SET owner = NULL, epoch = epoch + 1 WHERE lane = $1

-- Reading: only rows of lanes that are still ours, and without a lock. A relay that is frozen while it reads would keep
-- the lock past its lease, and a lock writes WAL. A result that is out of date does no harm: the relay publishes within
-- its lease by its own clock, and every write is fenced.

-- name: fetch
-- The start of each lane. Index: outbox_fetchable.
WITH owned AS MATERIALIZED (
    SELECT k.lane, w.quota, EXISTS (SELECT FROM {schema}.outbox_blocked AS b WHERE b.lane = k.lane) AS blocked
    FROM {schema}.outbox_lane AS k
    JOIN unnest($2::smallint[], $3::bigint[], $4::integer[]) AS w (lane, epoch, quota) USING (lane)
    WHERE k.owner = $1 AND k.epoch = w.epoch
    ORDER BY k.lane
)
SELECT owned.lane, owned.blocked, e.*
FROM owned LEFT JOIN LATERAL (
    SELECT {event_columns}
    FROM {schema}.outbox AS o
    WHERE o.lane = owned.lane AND o.state IN ({fetchable})
    ORDER BY o.id
    LIMIT owned.quota
) AS e ON true

-- name: sequence_look
-- Whether events were inserted, committed or not, with the transactions in progress. The snapshot is older than the
-- position, and age() reads the next transaction id after both. No parameters, so that one message is enough.
SELECT concat_ws(' ', s.last_value + s.is_called::integer, pg_current_snapshot(),
    age(pg_snapshot_xmax(pg_current_snapshot())::xid))
FROM {schema}.outbox_id_seq AS s

-- name: blocked
-- Which of these streams are blocked. LIMIT makes the planner look up each stream. Index: outbox_blocked_pkey.
SELECT s.lane, s.topic, s.key
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS s (lane, topic, key) CROSS JOIN LATERAL (
    SELECT FROM {schema}.outbox_blocked AS b
    WHERE b.lane = s.lane AND b.topic = s.topic AND b.key = s.key LIMIT 1
) AS found

-- name: due
-- Blocked streams whose time has come, with the head, or a share of the budget once draining.
-- Indexes: outbox_blocked_due, outbox_waiting.
WITH ripe AS MATERIALIZED (
    SELECT b.lane, b.topic, b.key, b.cause, b.until
    FROM {schema}.outbox_lane AS k JOIN unnest($2::smallint[], $3::bigint[]) AS w (lane, epoch) USING (lane)
    JOIN {schema}.outbox_blocked AS b USING (lane)
    WHERE k.owner = $1 AND k.epoch = w.epoch AND b.until <= (SELECT {schema}.outbox_clock())
    ORDER BY b.until
    LIMIT $4
), crowd AS (
    SELECT greatest(1, $4 / greatest(1, count(*) FILTER (WHERE cause = 'draining'))) AS run FROM ripe
)
SELECT ripe.lane, ripe.topic, ripe.key, ripe.cause, e.*
FROM ripe CROSS JOIN crowd LEFT JOIN LATERAL (
    SELECT {event_columns}
    FROM {schema}.outbox AS o
    WHERE o.lane = ripe.lane AND o.topic = ripe.topic
        AND {stream_key} = ripe.key AND o.state IN ({waiting})
    ORDER BY o.id
    LIMIT CASE ripe.cause WHEN 'draining' THEN crowd.run ELSE 1 END
) AS e ON true
ORDER BY ripe.until, ripe.lane, ripe.topic, ripe.key, e.id

-- name: next_due
-- Seconds until the next blocked stream of these lanes is due. Index: outbox_blocked_due.
SELECT extract(epoch FROM min(until) - {schema}.outbox_clock())::float8
FROM {schema}.outbox_blocked
WHERE lane = ANY ($1::smallint[]) AND until > (SELECT {schema}.outbox_clock())

-- Writing outcomes. Every write is fenced by lane and guarded by the state it comes from.

-- name: confirm_archive
-- The common case in one statement. The lanes are an array, not a join: the planner takes them for one, and would look
-- every event up again for each of them. $5 and $6 are the events that were inserted without a topic, and their topics.
-- Indexes: outbox_lane_pkey, outbox_pkey.
WITH {fence}, gone ({archive_columns}) AS (
    DELETE FROM {schema}.outbox AS o
    WHERE o.event_id = ANY ($4::uuid[]) AND o.lane = ANY (ARRAY(SELECT lane FROM l)) AND o.state IN ({confirm_guard})
    RETURNING {gone_columns}
)
INSERT INTO {schema}.outbox_archive ({archive_columns})
SELECT g.id, g.event_id, g.event_type, g.aggregate_type, g.aggregate_id, g.payload, g.headers, coalesce(g.topic, w.topic),
    g.key, g.routing_key, g.priority, g.schema_version, g.saga_id, g.sequence, g.attempts, g.created_at, g.sent_at
FROM gone AS g LEFT JOIN unnest($5::uuid[], $6::text[]) AS w (event_id, topic) USING (event_id)
WHERE {journal_archived}

-- name: confirm_delete
-- The same, where nothing is kept.
WITH {fence}, gone AS (
    DELETE FROM {schema}.outbox AS o
    WHERE o.event_id = ANY ($4::uuid[]) AND o.lane = ANY (ARRAY(SELECT lane FROM l)) AND o.state IN ({confirm_guard})
    RETURNING o.event_id
)
SELECT FROM gone WHERE {journal_sent}

-- name: retry
-- A spent attempt. Lanes are locked by lock_lanes, here and below.
UPDATE {schema}.outbox AS o
SET state = 'failed', attempts = least(o.attempts, {attempts_max} - 1) + 1, topic = w.topic, failure = w.failure::json, claimed_by = NULL
FROM unnest($1::uuid[], $2::text[], $3::text[]) AS w (event_id, topic, failure)
WHERE o.event_id = w.event_id AND o.state IN ({retry_guard}) AND NOT {claimed}
RETURNING o.event_id

-- name: wait
-- Deferred or parked ($3). Both transitions have the same source states.
UPDATE {schema}.outbox AS o SET state = w.state, topic = w.topic, claimed_by = NULL
FROM unnest($1::uuid[], $2::text[], $3::text[]) AS w (event_id, topic, state)
WHERE o.event_id = w.event_id AND o.state IN ({park_guard}) AND NOT {claimed}
RETURNING o.event_id

-- name: dead_letter
-- Copy to the dead letters; the row itself is removed or becomes a marker in the next statement.
INSERT INTO {schema}.outbox_dead_letter ({dead_columns})
SELECT o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, w.topic,
    {stream_key}, o.routing_key, o.priority, o.schema_version, o.saga_id,
    o.sequence, o.max_attempts, o.retry, o.created_at, o.available_at, o.lane, least(o.attempts + w.spent::integer, {attempts_max}), w.reason,
    w.failure::json, w.policy, {schema}.outbox_clock()
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::smallint[])
    AS w (event_id, topic, reason, failure, policy, spent)
JOIN {schema}.outbox AS o USING (event_id)
WHERE o.state IN ({dead_letter_guard}) AND NOT {claimed}
RETURNING event_id

-- name: remove_dead_lettered
-- Dead-lettered rows leave the outbox. Index: outbox_pkey.
WITH gone AS (DELETE FROM {schema}.outbox WHERE event_id = ANY ($1::uuid[]) RETURNING event_id)
SELECT FROM gone WHERE {journal_dead_letter}

-- name: mark_skipped
-- The marker of a skipped numbered event: same stream and number, no content.
WITH gone AS (
    UPDATE {schema}.outbox AS o
    SET event_type = '{skipped_type}', payload = 'null', headers = json_build_object('skipped', o.event_id),
        key = {stream_key}, event_id = {schema}.outbox_uuid7(), topic = w.topic,
        state = 'failed', attempts = 0, failure = NULL, available_at = NULL, claimed_by = NULL
    FROM unnest($1::uuid[], $2::text[]) AS w (event_id, topic)
    WHERE o.event_id = w.event_id
    RETURNING w.event_id, o.event_id AS marker_id
)
SELECT FROM gone WHERE {journal_dead_letter} AND (SELECT CASE WHEN {journal_is_on}
    THEN {journal_add}('staged', ARRAY(SELECT marker_id FROM gone)) IS NOT NULL ELSE true END)

-- name: block
-- Block streams, or change the cause; only an operator unblocks a stream with a dead letter.
-- $6 is a delay in seconds, $7 a time; neither means until a person acts.
INSERT INTO {schema}.outbox_blocked AS b (lane, topic, key, head_id, cause, until)
SELECT lane, topic, key, head_id, cause, coalesce(at, {schema}.outbox_clock() + delay * interval '1 second')
FROM unnest($1::smallint[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::float8[], $7::timestamptz[])
    AS w (lane, topic, key, head_id, cause, delay, at)
ON CONFLICT (lane, topic, key) DO UPDATE
SET head_id = excluded.head_id, cause = excluded.cause, until = excluded.until
WHERE b.cause <> 'dead_letter' OR excluded.cause = 'dead_letter'

-- name: ensure_blocked
-- A parked event is found through its blocked stream, so there must be one, even if its head has vanished.
INSERT INTO {schema}.outbox_blocked (lane, topic, key, cause, until)
SELECT DISTINCT lane, topic, key, 'draining', {schema}.outbox_clock()
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
ON CONFLICT (lane, topic, key) DO NOTHING

-- name: unblock
-- Streams with nothing left waiting are free; this is the only statement that removes a blocked row.
DELETE FROM {schema}.outbox_blocked AS b
USING unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
WHERE b.lane = w.lane AND b.topic = w.topic AND b.key = w.key AND b.cause <> 'dead_letter' AND NOT EXISTS ({waiting_rows})

-- name: drain
-- Streams with something left go to the end of the line.
UPDATE {schema}.outbox_blocked AS b SET cause = 'draining', head_id = NULL, until = {schema}.outbox_clock()
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
WHERE b.lane = w.lane AND b.topic = w.topic AND b.key = w.key AND b.cause <> 'dead_letter' AND EXISTS ({waiting_rows})

-- name: renew_claim
-- A writer renews its claim after its commit, on rows that are still claimed. Index: outbox_pkey.
-- The clock is read once: a claim must not end between two rows of a batch.
-- The commit need not wait for the disk: a crash that loses it lets a relay have the row sooner, and publish it again.
UPDATE {schema}.outbox AS o SET claimed_until = (SELECT {schema}.outbox_clock()) + $3 * interval '1 second'
WHERE o.event_id = ANY ($2::uuid[]) AND {claimed} AND o.claimed_by = $1
    AND set_config('synchronous_commit', 'off', true) = 'off'
RETURNING {event_columns}

-- name: confirm_claim_archive
-- Rows that a writer delivered, if still claimed: after the end of a claim, a relay may have the row in flight.
-- Index: outbox_pkey.
WITH gone AS (
    DELETE FROM {schema}.outbox AS o
    WHERE o.event_id = ANY ($2::uuid[]) AND {claimed} AND o.claimed_by = $1
    RETURNING o.*, set_config('synchronous_commit', 'off', true)
)
INSERT INTO {schema}.outbox_archive ({archive_columns})
SELECT {gone_columns} FROM gone AS o WHERE {journal_archived}

-- name: confirm_claim_delete
WITH gone AS (
    DELETE FROM {schema}.outbox AS o
    WHERE o.event_id = ANY ($2::uuid[]) AND {claimed} AND o.claimed_by = $1
        AND set_config('synchronous_commit', 'off', true) = 'off'
    RETURNING o.event_id
)
SELECT FROM gone WHERE {journal_sent}

-- name: yield_claim
-- What a writer leaves to the relay.
UPDATE {schema}.outbox AS o SET state = 'pending', claimed_by = NULL, claimed_until = NULL
WHERE o.event_id = ANY ($2::uuid[]) AND o.state IN ({yield_optimistic_guard}) AND {claimed} AND o.claimed_by = $1

-- name: last_values
-- The last published values of increasing fields. Index: payload_last_value_pkey.
SELECT v.rule, v.lane, v.topic, v.key, v.value
FROM unnest($1::text[], $2::smallint[], $3::text[], $4::text[]) AS g (rule, lane, topic, key)
JOIN {schema}.payload_last_value AS v USING (topic, key, lane, rule)

-- name: raise_values
-- In the transaction that settles the events, under its fence; a value never falls. Index: payload_last_value_pkey.
INSERT INTO {schema}.payload_last_value AS v (rule, lane, topic, key, value)
SELECT * FROM unnest($1::text[], $2::smallint[], $3::text[], $4::text[], $5::bigint[])
ON CONFLICT (topic, key, lane, rule) DO UPDATE SET value = excluded.value WHERE v.value < excluded.value
