-- Pieces that the inbox's statements share.

-- fragment: planned_anew
-- Always true, see `costly`. Statements whose rows are found by the planner have it, because a consumer may start on
-- empty tables; an INSERT with ON CONFLICT finds its row through the index in every plan.
($1::text IS NOT NULL OR {costly})

-- fragment: receipt_columns
consumer, event_id, event_type, topic, key, sequence, received_at

-- fragment: written_here
-- A receipt of this very transaction: one that a handler has committed, to begin another, is not.
xmin = pg_current_xact_id()::xid

-- fragment: event_columns
consumer, event_id, event_type, topic, key, band, sequence, raw_key, headers, body, partition, position, replayed, received_at

-- fragment: given_streams
-- $2..$4 are streams, sorted by the caller: everybody locks in the same order.
unnest($2::text[], $3::text[], $4::smallint[]) WITH ORDINALITY AS g (topic, key, band, ord)

-- fragment: stream_columns
consumer, topic, key, band, seen, cause, waiting, since

-- fragment: merged
-- A stream without a row was not locked, and a row may exist by now: its last sequence and its held events are
-- added to, never overwritten. For a locked row that makes no difference.
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    seen = greatest(s.seen, excluded.seen), cause = excluded.cause, waiting = s.waiting + excluded.waiting,
    since = CASE WHEN s.cause IS DISTINCT FROM excluded.cause THEN excluded.since ELSE s.since END

-- fragment: write_streams
INSERT INTO {schema}.inbox_stream AS s ({stream_columns})
SELECT $1, g.topic, g.key, g.band, g.seen, g.cause, g.added, {schema}.outbox_clock()
FROM unnest($2::text[], $3::text[], $4::smallint[], $5::bigint[], $6::text[], $7::integer[]) WITH ORDINALITY
    AS g (topic, key, band, seen, cause, added, ord)
ORDER BY g.ord
{merged}

-- fragment: claimed
-- The first waiting events get their receipts; `first` comes from the statement.
receipt AS (
    INSERT INTO {schema}.consumer_inbox ({receipt_columns})
    SELECT consumer, event_id, event_type, topic, key, sequence, {schema}.outbox_clock() FROM first
    ORDER BY event_id
    ON CONFLICT (consumer, event_id) DO NOTHING
    RETURNING event_id
)
SELECT f.id, f.event_id, r.event_id IS NOT NULL AS fresh, f.replayed,
    f.topic, f.raw_key, f.body, f.headers::text AS headers, f.partition, f.position
FROM first AS f LEFT JOIN receipt AS r USING (event_id)

-- What a consumer does, inside the transaction of its handler unless said otherwise. $1 is the consumer.

-- name: record_receipt
-- The most common call: one receipt, and then its stream's row if there is one, locked. A held event gets no
-- receipt, so that it cannot delay the drain of its stream. Indexes: inbox_held_event, consumer_inbox_pkey,
-- inbox_stream_pkey.
SELECT seen, cause, waiting, txid_current() AS transaction
FROM {schema}.inbox_record_receipt($1, $2, $3, $4, $5, $6, $7::smallint)

-- name: record_receipts
-- Receipts of several events, in the order of their ids. LIMIT keeps the planner from hashing all held events.
-- Indexes: inbox_held_event, consumer_inbox_pkey.
INSERT INTO {schema}.consumer_inbox ({receipt_columns})
SELECT $1, g.event_id, g.event_type, g.topic, g.key, g.sequence, {schema}.outbox_clock()
FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[])
    AS g (event_id, event_type, topic, key, sequence)
WHERE (SELECT true FROM {schema}.inbox_held AS w WHERE w.consumer = $1 AND w.event_id = g.event_id LIMIT 1) IS NULL
    AND {planned_anew}
ORDER BY g.event_id
ON CONFLICT (consumer, event_id) DO NOTHING
RETURNING event_id, txid_current() AS transaction

-- name: create_streams
-- With an ordering, streams have rows from their first event on.
INSERT INTO {schema}.inbox_stream (consumer, topic, key, band, waiting, since)
SELECT $1, g.topic, g.key, g.band, 0, {schema}.outbox_clock() FROM {given_streams}
ORDER BY g.ord
ON CONFLICT (consumer, topic, key, band) DO NOTHING

-- name: lock_streams
-- Starts after the receipts are written: a block that was committed meanwhile is seen. Index: inbox_stream_pkey.
SELECT g.ord, s.seen, s.cause, s.waiting
FROM (SELECT * FROM {given_streams} WHERE {planned_anew} ORDER BY ord) AS g CROSS JOIN LATERAL (
    SELECT seen, cause, waiting FROM {schema}.inbox_stream
    WHERE consumer = $1 AND topic = g.topic AND key = g.key AND band = g.band
    FOR UPDATE
) AS s

-- name: withdraw_held
-- Events that are held already, while a second delivery waited for the receipt: the second one is a duplicate.
-- Indexes: consumer_inbox_pkey, inbox_held_event.
DELETE FROM {schema}.consumer_inbox AS r
WHERE r.consumer = $1 AND r.event_id = ANY ($2::uuid[]) AND {planned_anew}
    AND (SELECT true FROM {schema}.inbox_held AS w WHERE w.consumer = $1 AND w.event_id = r.event_id LIMIT 1)
RETURNING r.event_id

-- name: lock_unless_taken
-- A stream, unless another has it. Its cause is no condition, or the wrong index could be used. Index:
-- inbox_stream_pkey.
SELECT seen, cause, waiting, txid_current() AS transaction FROM {schema}.inbox_stream
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4 AND {planned_anew}
FOR UPDATE SKIP LOCKED

-- name: claim_in_order
-- Waiting events as they came. Index: inbox_held_pkey.
WITH first AS MATERIALIZED (
    SELECT * FROM {schema}.inbox_held WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
        AND {planned_anew}
    ORDER BY id LIMIT $5
), {claimed}
ORDER BY f.id

-- name: claim_by_sequence
-- Waiting events by their numbers. Index: inbox_held_sequence.
WITH first AS MATERIALIZED (
    SELECT * FROM {schema}.inbox_held WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
        AND {planned_anew}
    ORDER BY sequence NULLS FIRST, id LIMIT $5
), {claimed}
ORDER BY f.sequence NULLS FIRST, f.id

-- name: repair_stream
-- A counted stream that drains though nothing of it waits; without this it would drain for ever.
UPDATE {schema}.inbox_stream SET cause = NULL, waiting = 0, since = {schema}.outbox_clock()
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4 AND {planned_anew}

-- name: finish_receipt
-- Index: consumer_inbox_pkey.
SELECT event_id FROM {schema}.inbox_finish_receipt($1, $2, $3) AS event_id

-- name: finish_receipts
-- Index: consumer_inbox_pkey.
UPDATE {schema}.consumer_inbox AS r SET processing_seconds = g.seconds
FROM unnest($2::uuid[], $3::float8[]) AS g (event_id, seconds)
WHERE r.consumer = $1 AND r.event_id = g.event_id AND {written_here} AND {planned_anew}
RETURNING r.event_id

-- name: finish_and_save_stream
-- The write of an ordering for every event, in one statement. Less than half the cost of the general one, which is
-- planned anew each time. Indexes: inbox_stream_pkey, consumer_inbox_pkey.
WITH stood AS (
    INSERT INTO {schema}.inbox_stream AS s ({stream_columns})
    VALUES ($1, $2, $3, $4, $5, $6, $7, {schema}.outbox_clock())
    {merged}
)
SELECT event_id FROM {schema}.inbox_finish_receipt($1, $8, $9) AS event_id

-- name: finish_and_save_streams
-- The same for several events. Indexes: inbox_stream_pkey, consumer_inbox_pkey.
WITH stood AS ({write_streams})
UPDATE {schema}.consumer_inbox AS r SET processing_seconds = g.seconds
FROM unnest($8::uuid[], $9::float8[]) AS g (event_id, seconds)
WHERE r.consumer = $1 AND r.event_id = g.event_id AND {written_here} AND {planned_anew}
RETURNING r.event_id

-- name: withdraw_receipts
-- Receipts of events that were not handled after all. Index: consumer_inbox_pkey.
DELETE FROM {schema}.consumer_inbox WHERE consumer = $1 AND event_id = ANY ($2::uuid[]) AND {planned_anew}

-- name: hold
-- Keep events whole, in their order. One that waits already stays where it is. Index: inbox_held_event.
INSERT INTO {schema}.inbox_held ({event_columns})
SELECT $1, g.event_id, g.event_type, g.topic, g.key, g.band, g.sequence, g.raw_key, g.headers::json, g.body, g.partition,
    g.position, g.replayed, {schema}.outbox_clock()
FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::bigint[], $8::bytea[], $9::text[],
    $10::bytea[], $11::text[], $12::text[], $13::boolean[]) WITH ORDINALITY
    AS g (event_id, event_type, topic, key, band, sequence, raw_key, headers, body, partition, position, replayed, ord)
ORDER BY g.ord
ON CONFLICT (consumer, event_id) DO NOTHING

-- name: dead_letter
-- Held events become dead letters, with their positions. A second dead letter of an event replaces the
-- first. Index: inbox_held_event.
WITH gone AS (
    DELETE FROM {schema}.inbox_held AS w
    USING unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::integer[])
        AS g (event_id, reason, failure, policy, attempts)
    WHERE w.consumer = $1 AND w.event_id = g.event_id AND {planned_anew}
    RETURNING w.*, g.reason, g.failure, g.policy, g.attempts
)
INSERT INTO {schema}.inbox_dead_letter (id, {event_columns}, reason, failure, policy, attempts, dead_lettered_at)
SELECT id, {event_columns}, reason, failure::json, policy, attempts, {schema}.outbox_clock() FROM gone
ON CONFLICT (consumer, event_id) DO UPDATE SET
    raw_key = excluded.raw_key, headers = excluded.headers, body = excluded.body, partition = excluded.partition,
    position = excluded.position, replayed = excluded.replayed, received_at = excluded.received_at,
    reason = excluded.reason, failure = excluded.failure, policy = excluded.policy, attempts = excluded.attempts,
    dead_lettered_at = excluded.dead_lettered_at
RETURNING event_id, id

-- name: remove_held
-- Events that wait no more. Index: inbox_held_event.
DELETE FROM {schema}.inbox_held WHERE consumer = $1 AND event_id = ANY ($2::uuid[]) AND {planned_anew}

-- name: save_streams
{write_streams}

-- name: forget_stream
-- A stream of which nothing is to be known any more. Index: inbox_stream_pkey.
DELETE FROM {schema}.inbox_stream WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4 AND {planned_anew}

-- name: draining
-- Outside of a transaction; longest first. Index: inbox_stream_cause.
SELECT topic, key, band FROM {schema}.inbox_stream
WHERE consumer = $1 AND cause = $2 AND {planned_anew}
ORDER BY since LIMIT $3

-- name: overdue
-- Outside of a transaction; longest first. Index: inbox_stream_cause.
SELECT topic, key, band, seen, waiting, since FROM {schema}.inbox_stream
WHERE consumer = $1 AND cause = 'early' AND since < (SELECT {schema}.outbox_clock() - $2::float8 * interval '1 second')
    AND {planned_anew}
ORDER BY since LIMIT $3

-- name: prune_receipts
-- A bounded step. A receipt stays as long as its dead letter, or the event could be handled beside it.
-- Indexes: consumer_inbox_age, inbox_dead_letter_event, consumer_inbox_pkey.
DELETE FROM {schema}.consumer_inbox WHERE consumer = $1 AND event_id = ANY (ARRAY(
    SELECT r.event_id FROM {schema}.consumer_inbox AS r
    WHERE r.consumer = $1 AND {planned_anew} AND r.received_at > '-infinity'
        AND r.received_at < (SELECT {schema}.outbox_clock() - $2::float8 * interval '1 day')
        AND (SELECT true FROM {schema}.inbox_dead_letter AS d
             WHERE d.consumer = r.consumer AND d.event_id = r.event_id LIMIT 1) IS NULL
    ORDER BY r.received_at LIMIT $3
    FOR UPDATE SKIP LOCKED))

-- name: prune_dead_letters
-- A bounded step. A blocking dead letter stays, because it is needed to drain its stream. Index: inbox_dead_letter_age.
DELETE FROM {schema}.inbox_dead_letter WHERE id = ANY (ARRAY(
    SELECT id FROM {schema}.inbox_dead_letter
    WHERE consumer = $1 AND policy = 'skip' AND {planned_anew}
        AND dead_lettered_at < (SELECT {schema}.outbox_clock() - $2::float8 * interval '1 day')
    ORDER BY dead_lettered_at LIMIT $3
    FOR UPDATE SKIP LOCKED))

-- name: adopt_orphans
-- A waiting event is found through its stream. None should ever be without one that waits; if one is, it is found
-- again.
INSERT INTO {schema}.inbox_stream AS s (consumer, topic, key, band, cause, waiting, since)
SELECT w.consumer, w.topic, w.key, w.band, 'draining', count(*), {schema}.outbox_clock()
FROM {schema}.inbox_held AS w
WHERE w.consumer = $1 AND NOT EXISTS (
    SELECT FROM {schema}.inbox_stream AS b
    WHERE b.consumer = w.consumer AND b.topic = w.topic AND b.key = w.key AND b.band = w.band AND b.cause IS NOT NULL)
GROUP BY w.consumer, w.topic, w.key, w.band
LIMIT $2
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    cause = excluded.cause, waiting = excluded.waiting, since = excluded.since
WHERE s.cause IS NULL

-- name: unblock_without_dead_letter
-- Streams blocked by a dead letter that does not exist any more, for example after a manual delete, drain.
-- Indexes: inbox_stream_cause, inbox_dead_letter_blocking.
UPDATE {schema}.inbox_stream AS s SET cause = 'draining', since = {schema}.outbox_clock()
WHERE s.consumer = $1 AND s.cause = 'dead_letter' AND {planned_anew} AND NOT EXISTS (
    SELECT FROM {schema}.inbox_dead_letter AS d
    WHERE d.consumer = s.consumer AND d.topic = s.topic AND d.key = s.key AND d.band = s.band AND d.policy = 'block')

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
SELECT id, consumer, event_id, event_type, topic, key, sequence, position, headers::text AS headers, body, reason,
    failure::text AS failure, policy, attempts, dead_lettered_at
FROM {schema}.inbox_dead_letter
WHERE (cardinality($1::bigint[]) = 0 OR id = ANY ($1)) AND ($2::text IS NULL OR consumer = $2)
    AND ($3::text IS NULL OR topic = $3) AND ($4::text IS NULL OR key = $4) AND ($5::text IS NULL OR reason = $5)
ORDER BY id LIMIT $6

-- name: blocked_streams
-- Held ones first, because they wait for a person. Index: inbox_stream_cause.
SELECT consumer, topic, key, band, seen, cause, waiting, since FROM {schema}.inbox_stream
WHERE cause IS NOT NULL AND ($1::text IS NULL OR consumer = $1)
ORDER BY cause <> 'dead_letter', since LIMIT $2

-- name: create_dead_letter_streams
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

-- name: lock_dead_letter_streams
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
INSERT INTO {schema}.inbox_held (id, {event_columns})
SELECT id, consumer, event_id, event_type, topic, key, band, sequence, raw_key, headers, body, partition, position,
    replayed OR policy = 'skip', received_at
FROM back
ON CONFLICT (consumer, event_id) DO UPDATE SET id = excluded.id, replayed = excluded.replayed
RETURNING consumer, event_id, topic, key, band, NULL::bigint AS passed

-- name: discard
-- Discarded. The receipts stay. The number of a blocking dead letter counts as passed.
DELETE FROM {schema}.inbox_dead_letter WHERE id = ANY ($1::bigint[])
RETURNING consumer, event_id, topic, key, band, policy, sequence AS passed

-- name: drain_unblocked
-- A new statement, which sees the removed rows: a stream drains when no dead letter blocks it. Each stream is named
-- once. Index: inbox_dead_letter_blocking.
UPDATE {schema}.inbox_stream AS s SET
    seen = CASE WHEN s.seen IS NOT NULL THEN greatest(s.seen, g.passed) END,
    waiting = s.waiting + g.added,
    cause = CASE WHEN g.held THEN 'dead_letter' WHEN s.waiting + g.added > 0 THEN 'draining' END,
    since = CASE WHEN g.held AND s.cause = 'dead_letter' THEN s.since ELSE {schema}.outbox_clock() END
FROM (
    SELECT w.*, EXISTS (
        SELECT FROM {schema}.inbox_dead_letter AS d
        WHERE d.consumer = w.consumer AND d.topic = w.topic AND d.key = w.key AND d.band = w.band
            AND d.policy = 'block') AS held
    FROM unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::bigint[], $6::integer[])
        AS w (consumer, topic, key, band, passed, added)
) AS g
WHERE s.consumer = g.consumer AND s.topic = g.topic AND s.key = g.key AND s.band = g.band

-- name: forget_empty_streams
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
-- The first event behind the gap. Index: inbox_held_sequence.
SELECT event_id, sequence FROM {schema}.inbox_held
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4 AND sequence > coalesce($5::bigint, -1)
ORDER BY sequence NULLS FIRST, id LIMIT 1

-- name: release
-- As if everything before that event had been seen.
UPDATE {schema}.inbox_stream SET seen = $5 - 1, cause = 'draining', since = {schema}.outbox_clock()
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
