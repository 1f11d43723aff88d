-- What people ask about consumers, and do for them.

-- name: counts
-- Indexes: inbox_stream_cause, inbox_dead_letter_event.
SELECT s.waiting, s.blocked_streams,
    (SELECT count(*) FROM {schema}.inbox_dead_letter WHERE $1::text IS NULL OR consumer = $1) AS dead_letters
FROM (
    SELECT coalesce(sum(waiting), 0)::bigint AS waiting, count(*) AS blocked_streams FROM {schema}.inbox_stream
    WHERE cause IS NOT NULL AND ($1::text IS NULL OR consumer = $1)
) AS s

-- name: receipts
-- Index: consumer_inbox_pkey.
SELECT event_id, event_type, topic, key, sequence, received_at, processing_seconds FROM {schema}.consumer_inbox
WHERE consumer = $1 AND event_id = ANY ($2::uuid[])
ORDER BY received_at, event_id

-- name: dead_letters
-- Oldest first, which is the order they would be replayed in.
SELECT id, consumer, event_id, event_type, topic, key, sequence, place, headers::text AS headers, body, reason,
    failure::text AS failure, policy, attempts, buried_at
FROM {schema}.inbox_dead_letter
WHERE (cardinality($1::bigint[]) = 0 OR id = ANY ($1)) AND ($2::text IS NULL OR consumer = $2)
    AND ($3::text IS NULL OR topic = $3) AND ($4::text IS NULL OR key = $4) AND ($5::text IS NULL OR reason = $5)
ORDER BY id LIMIT $6

-- name: streams
-- Held ones first, because they wait for a person. Index: inbox_stream_cause.
SELECT consumer, topic, key, band, seen, cause, waiting, since FROM {schema}.inbox_stream
WHERE cause IS NOT NULL AND ($1::text IS NULL OR consumer = $1)
ORDER BY cause <> 'held', since LIMIT $2

-- name: make_streams
-- Dead letters are brought back through their streams' rows. One that was skipped may have none. A row that is there is
-- locked by the same statement: a consumer that is done with the stream could remove it between two. In the order in
-- which consumers lock them.
INSERT INTO {schema}.inbox_stream AS s (consumer, topic, key, band, waiting, since)
SELECT g.consumer, g.topic, g.key, g.band, 0, {schema}.outbox_clock()
FROM (
    SELECT DISTINCT d.consumer, d.topic, d.key, d.band FROM {schema}.inbox_dead_letter AS d
    WHERE d.id = ANY ($1::bigint[])
) AS g
ORDER BY g.consumer COLLATE "C", g.topic COLLATE "C", g.key COLLATE "C", g.band
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET waiting = s.waiting

-- name: lock_streams
-- In the order in which consumers lock them.
SELECT FROM {schema}.inbox_stream AS s
WHERE (s.consumer, s.topic, s.key, s.band) IN (
    SELECT d.consumer, d.topic, d.key, d.band FROM {schema}.inbox_dead_letter AS d WHERE d.id = ANY ($1::bigint[]))
ORDER BY s.consumer COLLATE "C", s.topic COLLATE "C", s.key COLLATE "C", s.band
FOR UPDATE OF s

-- name: replay
-- Back to their places, without receipts. One that was skipped is late by design, and marked so.
WITH back AS (
    DELETE FROM {schema}.inbox_dead_letter WHERE id = ANY ($1::bigint[]) RETURNING *
), forgotten AS (
    DELETE FROM {schema}.consumer_inbox AS r USING back AS b WHERE r.consumer = b.consumer AND r.event_id = b.event_id
)
INSERT INTO {schema}.inbox_waiting (id, {event_columns})
SELECT id, consumer, event_id, event_type, topic, key, band, sequence, raw_key, headers, body, shard, place,
    replayed OR policy = 'skip', received_at
FROM back
ON CONFLICT (consumer, event_id) DO UPDATE SET id = excluded.id, replayed = excluded.replayed
RETURNING consumer, event_id, topic, key, band, NULL::bigint AS passed

-- name: discard
-- Given up for good. Their receipts stay. The number of one that held its stream counts as passed.
DELETE FROM {schema}.inbox_dead_letter WHERE id = ANY ($1::bigint[])
RETURNING consumer, event_id, topic, key, band, policy, sequence AS passed

-- name: go_on
-- A new statement, which sees what has left: a stream drains once no dead letter holds it. Each stream is named once.
-- Index: inbox_dead_letter_held.
UPDATE {schema}.inbox_stream AS s SET
    seen = CASE WHEN s.seen IS NOT NULL THEN greatest(s.seen, g.passed) END,
    waiting = s.waiting + g.added,
    cause = CASE WHEN g.held THEN 'held' WHEN s.waiting + g.added > 0 THEN 'draining' END,
    since = CASE WHEN g.held AND s.cause = 'held' THEN s.since ELSE {schema}.outbox_clock() END
FROM (
    SELECT w.*, EXISTS (
        SELECT FROM {schema}.inbox_dead_letter AS d
        WHERE d.consumer = w.consumer AND d.topic = w.topic AND d.key = w.key AND d.band = w.band
            AND d.policy = 'hold') AS held
    FROM unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::bigint[], $6::integer[])
        AS w (consumer, topic, key, band, passed, added)
) AS g
WHERE s.consumer = g.consumer AND s.topic = g.topic AND s.key = g.key AND s.band = g.band

-- name: forget
-- Streams of which nothing is to be known any more.
DELETE FROM {schema}.inbox_stream AS s
USING unnest($1::text[], $2::text[], $3::text[], $4::smallint[]) AS g (consumer, topic, key, band)
WHERE s.consumer = g.consumer AND s.topic = g.topic AND s.key = g.key AND s.band = g.band
    AND s.seen IS NULL AND s.cause IS NULL AND s.waiting = 0

-- name: lock_stream
-- Index: inbox_stream_pkey.
SELECT seen, cause FROM {schema}.inbox_stream
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
FOR UPDATE

-- name: first_early
-- The first event behind the gap. Index: inbox_waiting_sequence.
SELECT event_id, sequence FROM {schema}.inbox_waiting
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4 AND sequence > coalesce($5::bigint, -1)
ORDER BY sequence NULLS FIRST, id LIMIT 1

-- name: release
-- As if everything before that event had been seen.
UPDATE {schema}.inbox_stream SET seen = $5 - 1, cause = 'draining', since = {schema}.outbox_clock()
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4

-- name: record
INSERT INTO {schema}.outbox_operation (at, actor, verb, event_id, consumer)
SELECT {schema}.outbox_clock(), $1, $2, g.event_id, g.consumer
FROM unnest($3::uuid[], $4::text[]) AS g (event_id, consumer)
