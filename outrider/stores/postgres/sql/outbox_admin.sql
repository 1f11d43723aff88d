-- What people ask and do.

-- name: count_states
SELECT state, count(*) FROM {schema}.outbox GROUP BY state
UNION ALL SELECT 'dead_letter', count(*) FROM {schema}.outbox_dead_letter

-- name: count_sent
-- Reads the whole archive.
SELECT 'sent', count(*) FROM {schema}.outbox_archive

-- name: events
-- Undelivered events, oldest first.
SELECT o.*, {stream_key} AS stream_key FROM {schema}.outbox AS o
WHERE (cardinality($1::uuid[]) = 0 OR o.event_id = ANY ($1)) AND ($2::text IS NULL OR o.state = $2)
    AND ($3::text IS NULL OR o.event_type = $3) AND ($4::text IS NULL OR o.topic = $4)
    AND ($5::text IS NULL OR {stream_key} = $5)
ORDER BY o.id
LIMIT $6

-- name: sent
-- Archived events, newest first.
SELECT *, 'sent' AS state FROM {schema}.outbox_archive AS o
WHERE (cardinality($1::uuid[]) = 0 OR o.event_id = ANY ($1)) AND ($2::text IS NULL OR $2 = 'sent')
    AND ($3::text IS NULL OR o.event_type = $3) AND ($4::text IS NULL OR o.topic = $4)
    AND ($5::text IS NULL OR o.key = $5)
ORDER BY o.sent_at DESC, o.id DESC
LIMIT $6

-- name: dead_letters
-- In the order they would be replayed.
SELECT *, 'dead_letter' AS state FROM {schema}.outbox_dead_letter AS o
WHERE (cardinality($1::uuid[]) = 0 OR o.event_id = ANY ($1)) AND ($2::text IS NULL OR $2 = 'dead_letter')
    AND ($3::text IS NULL OR o.event_type = $3) AND ($4::text IS NULL OR o.topic = $4)
    AND ($5::text IS NULL OR o.key = $5) AND ($7::text IS NULL OR o.reason = $7)
ORDER BY o.id
LIMIT $6

-- name: dead_letter_groups
-- The numbers of dead letters by reason and topic. Reads all dead letters.
SELECT o.reason, o.topic, count(*) AS count FROM {schema}.outbox_dead_letter AS o
WHERE (cardinality($1::uuid[]) = 0 OR o.event_id = ANY ($1)) AND ($2::text IS NULL OR $2 = 'dead_letter')
    AND ($3::text IS NULL OR o.event_type = $3) AND ($4::text IS NULL OR o.topic = $4)
    AND ($5::text IS NULL OR o.key = $5) AND ($7::text IS NULL OR o.reason = $7)
GROUP BY o.reason, o.topic
ORDER BY count(*) DESC, o.reason, o.topic
LIMIT $6

-- name: has_due
-- Whether an event can be published now. Indexes: outbox_fetchable, outbox_blocked_due.
SELECT EXISTS (SELECT FROM {schema}.outbox AS o WHERE o.state IN ({fetchable}))
    OR EXISTS (SELECT FROM {schema}.outbox_blocked AS b WHERE b.until <= (SELECT {schema}.outbox_clock()))

-- name: topics
-- What decides about the topics at the start of each lane, and of blocked streams. Indexes: outbox_fetchable,
-- outbox_blocked_pkey. A limit that the planner does not know makes it read in order and stop, whatever it estimates.
WITH look AS MATERIALIZED (SELECT $1::integer AS most)
SELECT DISTINCT e.event_type, e.topic, e.routing_key
FROM {schema}.outbox_lane AS l CROSS JOIN look CROSS JOIN LATERAL (
    SELECT o.event_type, o.topic, o.routing_key FROM {schema}.outbox AS o
    WHERE o.lane = l.lane AND o.state IN ({fetchable}) ORDER BY o.id LIMIT look.most
) AS e
UNION SELECT '', b.topic, NULL FROM (SELECT topic FROM {schema}.outbox_blocked LIMIT $2) AS b

-- name: lane_owner
-- The live relay that owns a lane. Index: outbox_lane_pkey, outbox_relay_pkey.
SELECT r.relay_id FROM {schema}.outbox_lane AS l JOIN {schema}.outbox_relay AS r ON r.relay_id = l.owner
WHERE l.lane = $1 AND {living}

-- name: blocked_streams
-- Held ones first, because they wait for a person.
SELECT b.lane, b.topic, b.key, b.cause, b.until,
    (SELECT count(*) FROM {schema}.outbox AS o
     WHERE o.lane = b.lane AND o.topic = b.topic AND o.state IN ({waiting})
        AND {stream_key} = b.key) AS waiting
FROM {schema}.outbox_blocked AS b
ORDER BY b.cause <> 'dead_letter', b.until, b.lane, b.topic, b.key
LIMIT $1

-- name: lock_streams
-- Operators decide about a blocked stream one after another; two could each see the other's dead letter and leave the
-- stream wait for ever. Index: outbox_blocked_pkey.
SELECT FROM {schema}.outbox_blocked AS b
WHERE (b.lane, b.topic, b.key) IN (
    SELECT d.lane, d.topic, d.key FROM {schema}.outbox_dead_letter AS d WHERE d.event_id = ANY ($1::uuid[]))
ORDER BY b.lane, b.topic, b.key
FOR UPDATE OF b

-- name: resume
-- Blocking dead letters go back to their own position in the stream.
WITH back AS (DELETE FROM {schema}.outbox_dead_letter WHERE event_id = ANY ($1::uuid[]) AND policy = 'block' RETURNING *)
INSERT INTO {schema}.outbox (id, {new_event_columns}, state)
SELECT id, {new_event_columns}, 'parked' FROM back ORDER BY id
RETURNING event_id, lane, topic, coalesce(key, aggregate_id, event_id::text) AS stream_key

-- name: stage_again
-- Skipped dead letters are late by design: a new position at the end, marked as replayed.
WITH back AS (DELETE FROM {schema}.outbox_dead_letter WHERE event_id = ANY ($1::uuid[]) AND policy = 'skip' RETURNING *)
INSERT INTO {schema}.outbox ({new_event_columns}, state)
SELECT {replayed_event}, 'pending' FROM back ORDER BY id
RETURNING event_id

-- name: discard
-- Discarded. A numbered dead letter of a blocked stream leaves a skip marker.
WITH gone AS (DELETE FROM {schema}.outbox_dead_letter WHERE event_id = ANY ($1::uuid[]) RETURNING *),
marked AS (
    INSERT INTO {schema}.outbox (id, event_type, payload, headers, topic, key, priority, sequence, state)
    SELECT id, '{skipped_type}', 'null', json_build_object('skipped', event_id), topic, key, priority, sequence, 'parked'
    FROM gone WHERE policy = 'block' AND sequence IS NOT NULL AND event_type <> '{skipped_type}'
)
SELECT event_id, lane, topic, key AS stream_key FROM gone WHERE {journal_discarded}

-- name: editable
-- One dead letter that an operator edits, locked. Index: outbox_dead_letter_pkey.
SELECT event_id, lane, topic, key AS stream_key, headers, payload::text AS payload
FROM {schema}.outbox_dead_letter WHERE event_id = $1 FOR UPDATE

-- name: leave_marker
-- A numbered dead letter that leaves its blocked stream is replaced by a marker. Index: outbox_dead_letter_pkey.
INSERT INTO {schema}.outbox (id, event_type, payload, headers, topic, key, priority, sequence, state)
SELECT id, '{skipped_type}', 'null', json_build_object('skipped', event_id), topic, key, priority, sequence, 'parked'
FROM {schema}.outbox_dead_letter
WHERE event_id = $1 AND policy = 'block' AND sequence IS NOT NULL AND event_type <> '{skipped_type}'

-- name: edit
-- Change a dead letter. With another topic it leaves its stream, and its number with it. Index:
-- outbox_dead_letter_pkey.
UPDATE {schema}.outbox_dead_letter
SET payload = coalesce($2::text::json, payload), headers = $3::text::json, topic = coalesce($4::text, topic),
    sequence = CASE WHEN $5::boolean THEN NULL ELSE sequence END, policy = CASE WHEN $5 THEN 'skip' ELSE policy END
WHERE event_id = $1

-- name: drain_held
-- A blocked stream drains when no dead letter blocks it any more; its owner removes the row.
UPDATE {schema}.outbox_blocked AS b SET cause = 'draining', head_id = NULL, until = {schema}.outbox_clock()
FROM unnest($1::smallint[], $2::text[], $3::text[]) AS w (lane, topic, key)
WHERE b.lane = w.lane AND b.topic = w.topic AND b.key = w.key AND b.cause = 'dead_letter' AND NOT EXISTS (
    SELECT FROM {schema}.outbox_dead_letter AS d
    WHERE d.lane = b.lane AND d.topic = b.topic AND d.key = b.key AND d.policy = 'block')

-- name: position_of
-- The position of an event that a person dead-letters. Index: outbox_pkey.
SELECT o.id, o.lane, o.topic, o.event_type, o.routing_key, {stream_key} AS key,
    o.sequence
FROM {schema}.outbox AS o
WHERE o.event_id = $1 AND o.state IN ({dead_letter_guard}) AND o.state <> 'optimistic'

-- name: pending_before
-- Events of a key before one that a person dead-letters. Index: outbox_fetchable.
SELECT o.event_id, o.event_type, o.topic, o.routing_key, o.state FROM {schema}.outbox AS o
WHERE o.lane = $1 AND o.state IN ({fetchable}) AND {stream_key} = $2 AND o.id < $3

-- Keeping the tables bounded.

-- name: sweep
-- Remove dead relays. A heartbeat that is being renewed at this moment is looked at again and spared.
WITH dead AS (DELETE FROM {schema}.outbox_relay AS r WHERE NOT {living} RETURNING relay_id)
SELECT relay_id, (SELECT count(*) FROM {schema}.outbox_lane WHERE owner = relay_id) AS lanes FROM dead

-- name: take_duty
-- One caller gets the turn.
INSERT INTO {schema}.outbox_duty AS d (name, due_at) VALUES ($1, {schema}.outbox_clock() + $2 * interval '1 second')
ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at WHERE d.due_at <= {schema}.outbox_clock()
RETURNING name

-- name: today
SELECT ({schema}.outbox_clock() AT TIME ZONE 'UTC')::date AS today

-- name: partitions
-- The archive's daily partitions.
SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = '{schema}.outbox_archive'::regclass ORDER BY c.relname

-- name: netted
-- Whether the default partition caught rows of a day; that day then has no partition of its own.
SELECT EXISTS (SELECT FROM {schema}.outbox_archive_default WHERE sent_at >= $1 AND sent_at < $2)

-- name: unblock_without_dead_letter
-- Streams blocked by a dead letter that does not exist any more, for example after a manual delete, drain.
UPDATE {schema}.outbox_blocked AS b SET cause = 'draining', head_id = NULL, until = {schema}.outbox_clock()
WHERE b.cause = 'dead_letter' AND NOT EXISTS (
    SELECT FROM {schema}.outbox_dead_letter AS d
    WHERE d.lane = b.lane AND d.topic = b.topic AND d.key = b.key AND d.policy = 'block')

-- name: adopt_orphans
-- A waiting event is found through its blocked stream. None should ever be without one; if one is, it is found again.
INSERT INTO {schema}.outbox_blocked (lane, topic, key, cause, until)
SELECT DISTINCT o.lane, o.topic, {stream_key}, 'draining', {schema}.outbox_clock()
FROM {schema}.outbox AS o
WHERE o.state IN ({waiting}) AND o.topic IS NOT NULL AND NOT EXISTS (
    SELECT FROM {schema}.outbox_blocked AS b WHERE b.lane = o.lane AND b.topic = o.topic AND b.key = {stream_key})
ON CONFLICT (lane, topic, key) DO NOTHING

-- name: prune_net
-- Old rows that fell into the default partition, a bounded step.
DELETE FROM {schema}.outbox_archive_default WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {schema}.outbox_archive_default
    WHERE sent_at < (SELECT {schema}.outbox_clock() - $1 * interval '1 day') LIMIT $2))

-- name: prune_dead_letters
-- A blocking dead letter is needed to drain its stream, so it stays until an operator acts. Each one that goes leaves a
-- line in the operation log. Index: outbox_dead_letter_age.
WITH gone AS (
    DELETE FROM {schema}.outbox_dead_letter WHERE event_id = ANY (ARRAY(
        SELECT event_id FROM {schema}.outbox_dead_letter
        WHERE dead_lettered_at < (SELECT {schema}.outbox_clock() - $1 * interval '1 day') AND policy <> 'block' LIMIT $2))
    RETURNING event_id
)
SELECT event_id FROM gone WHERE {journal_expired}
