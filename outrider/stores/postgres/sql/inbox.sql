-- What a consumer does, inside the transaction of its handler unless said otherwise. $1 is the consumer.

-- name: admit_one
-- The most common call: one receipt, and then its stream's row if there is one, locked. One that waits already gets no
-- receipt, so that it cannot stand in the way of whoever lets it go. The statement looks at a moment before it may have
-- had to wait for the receipt, so a stream's very first row can be missed: it is as if it had come earlier.
-- Indexes: inbox_waiting_event, consumer_inbox_pkey, inbox_stream_pkey.
WITH receipt AS (
    INSERT INTO {schema}.consumer_inbox ({receipt_columns})
    SELECT $1::text, $2::uuid, $3::text, $4::text, $5::text, $6::bigint, {schema}.outbox_clock()
    WHERE NOT EXISTS (SELECT FROM {schema}.inbox_waiting AS w WHERE w.consumer = $1 AND w.event_id = $2)
    ON CONFLICT (consumer, event_id) DO NOTHING
    RETURNING consumer
)
SELECT s.seen, s.cause, s.waiting, txid_current() AS transaction
FROM receipt LEFT JOIN LATERAL (
    SELECT seen, cause, waiting FROM {schema}.inbox_stream
    WHERE consumer = receipt.consumer AND topic = $4 AND key = $5 AND band = $7::smallint
    FOR UPDATE
) AS s ON true

-- name: receive
-- Receipts of several arrivals, in the order of their ids. LIMIT keeps the planner from hashing whatever waits.
-- Indexes: inbox_waiting_event, consumer_inbox_pkey.
INSERT INTO {schema}.consumer_inbox ({receipt_columns})
SELECT $1, g.event_id, g.event_type, g.topic, g.key, g.sequence, {schema}.outbox_clock()
FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[])
    AS g (event_id, event_type, topic, key, sequence)
WHERE (SELECT true FROM {schema}.inbox_waiting AS w WHERE w.consumer = $1 AND w.event_id = g.event_id LIMIT 1) IS NULL
ORDER BY g.event_id
ON CONFLICT (consumer, event_id) DO NOTHING
RETURNING event_id, txid_current() AS transaction

-- name: make_streams
-- A gate counts, so its streams have rows from their first event on.
INSERT INTO {schema}.inbox_stream (consumer, topic, key, band, waiting, since)
SELECT $1, g.topic, g.key, g.band, 0, {schema}.outbox_clock() FROM {streams}
ORDER BY g.ord
ON CONFLICT (consumer, topic, key, band) DO NOTHING

-- name: lock_streams
-- Begins after the receipts are there: a hold that was committed meanwhile is seen. Index: inbox_stream_pkey.
SELECT g.ord, s.seen, s.cause, s.waiting
FROM (SELECT * FROM {streams} ORDER BY ord) AS g CROSS JOIN LATERAL (
    SELECT seen, cause, waiting FROM {schema}.inbox_stream
    WHERE consumer = $1 AND topic = g.topic AND key = g.key AND band = g.band
    FOR UPDATE
) AS s

-- name: withdraw_waiting
-- An event that has come to wait while its second delivery stood in line for the receipt: that one is no news.
-- Indexes: consumer_inbox_pkey, inbox_waiting_event.
DELETE FROM {schema}.consumer_inbox AS r
WHERE r.consumer = $1 AND r.event_id = ANY ($2::uuid[])
    AND (SELECT true FROM {schema}.inbox_waiting AS w WHERE w.consumer = $1 AND w.event_id = r.event_id LIMIT 1)
RETURNING r.event_id

-- name: lock_unless_taken
-- A stream, unless another has it. Its cause is no condition, or the wrong index could be used. Index: inbox_stream_pkey.
SELECT seen, cause, waiting, txid_current() AS transaction FROM {schema}.inbox_stream
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
FOR UPDATE SKIP LOCKED

-- name: resume_in_turn
-- Waiting events as they came. Index: inbox_waiting_pkey.
WITH first AS MATERIALIZED (
    SELECT * FROM {schema}.inbox_waiting WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
    ORDER BY id LIMIT $5
), {taken}
ORDER BY f.id

-- name: resume_by_sequence
-- Waiting events by their numbers. Index: inbox_waiting_sequence.
WITH first AS MATERIALIZED (
    SELECT * FROM {schema}.inbox_waiting WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4
    ORDER BY sequence NULLS FIRST, id LIMIT $5
), {taken}
ORDER BY f.sequence NULLS FIRST, f.id

-- name: mend
-- A counted stream that drains though nothing of it waits; without this it would drain for ever.
UPDATE {schema}.inbox_stream SET cause = NULL, waiting = 0, since = {schema}.outbox_clock()
WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4

-- name: finish_one
-- Index: consumer_inbox_pkey.
UPDATE {schema}.consumer_inbox SET processing_seconds = $3
WHERE consumer = $1 AND event_id = $2 AND {written_here}
RETURNING event_id

-- name: finish
-- Index: consumer_inbox_pkey.
UPDATE {schema}.consumer_inbox AS r SET processing_seconds = g.seconds
FROM unnest($2::uuid[], $3::float8[]) AS g (event_id, seconds)
WHERE r.consumer = $1 AND r.event_id = g.event_id AND {written_here}
RETURNING r.event_id

-- name: finish_and_stand_one
-- What a gate writes for every event, in one statement. Less than half the cost of the general one, which is planned anew
-- each time. Indexes: inbox_stream_pkey, consumer_inbox_pkey.
WITH stood AS (
    INSERT INTO {schema}.inbox_stream AS s ({standing})
    VALUES ($1, $2, $3, $4, $5, $6, $7, {schema}.outbox_clock())
    {merged}
)
UPDATE {schema}.consumer_inbox SET processing_seconds = $9
WHERE consumer = $1 AND event_id = $8 AND {written_here}
RETURNING event_id

-- name: finish_and_stand
-- The same for several events. Indexes: inbox_stream_pkey, consumer_inbox_pkey.
WITH stood AS ({stand})
UPDATE {schema}.consumer_inbox AS r SET processing_seconds = g.seconds
FROM unnest($8::uuid[], $9::float8[]) AS g (event_id, seconds)
WHERE r.consumer = $1 AND r.event_id = g.event_id AND {written_here}
RETURNING r.event_id

-- name: withdraw
-- Receipts of events that were not handled after all. Index: consumer_inbox_pkey.
DELETE FROM {schema}.consumer_inbox WHERE consumer = $1 AND event_id = ANY ($2::uuid[])

-- name: park
-- Keep events whole, in their order. One that waits already stays where it is. Index: inbox_waiting_event.
INSERT INTO {schema}.inbox_waiting ({event_columns})
SELECT $1, g.event_id, g.event_type, g.topic, g.key, g.band, g.sequence, g.raw_key, g.headers::json, g.body, g.shard,
    g.place, g.replayed, {schema}.outbox_clock()
FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::bigint[], $8::bytea[], $9::text[],
    $10::bytea[], $11::text[], $12::text[], $13::boolean[]) WITH ORDINALITY
    AS g (event_id, event_type, topic, key, band, sequence, raw_key, headers, body, shard, place, replayed, ord)
ORDER BY g.ord
ON CONFLICT (consumer, event_id) DO NOTHING

-- name: bury
-- Events go from those that wait to the dead letters, and keep their places. A second burial of an event replaces the
-- first. Index: inbox_waiting_event.
WITH gone AS (
    DELETE FROM {schema}.inbox_waiting AS w
    USING unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::integer[])
        AS g (event_id, reason, failure, policy, attempts)
    WHERE w.consumer = $1 AND w.event_id = g.event_id
    RETURNING w.*, g.reason, g.failure, g.policy, g.attempts
)
INSERT INTO {schema}.inbox_dead_letter (id, {event_columns}, reason, failure, policy, attempts, buried_at)
SELECT id, {event_columns}, reason, failure::json, policy, attempts, {schema}.outbox_clock() FROM gone
ON CONFLICT (consumer, event_id) DO UPDATE SET
    raw_key = excluded.raw_key, headers = excluded.headers, body = excluded.body, shard = excluded.shard,
    place = excluded.place, replayed = excluded.replayed, received_at = excluded.received_at,
    reason = excluded.reason, failure = excluded.failure, policy = excluded.policy, attempts = excluded.attempts,
    buried_at = excluded.buried_at
RETURNING event_id, id

-- name: leave
-- Events that wait no more. Index: inbox_waiting_event.
DELETE FROM {schema}.inbox_waiting WHERE consumer = $1 AND event_id = ANY ($2::uuid[])

-- name: stand
{stand}

-- name: forget
-- A stream of which nothing is to be known any more. Index: inbox_stream_pkey.
DELETE FROM {schema}.inbox_stream WHERE consumer = $1 AND topic = $2 AND key = $3 AND band = $4

-- name: draining
-- Outside of a transaction; longest first. Index: inbox_stream_cause.
SELECT topic, key, band FROM {schema}.inbox_stream
WHERE consumer = $1 AND cause = $2
ORDER BY since LIMIT $3

-- name: overdue
-- Outside of a transaction; longest first. Index: inbox_stream_cause.
SELECT topic, key, band, seen, waiting, since FROM {schema}.inbox_stream
WHERE consumer = $1 AND cause = 'early' AND since < (SELECT {schema}.outbox_clock() - $2::float8 * interval '1 second')
ORDER BY since LIMIT $3

-- name: prune_receipts
-- A bounded step. A receipt stays as long as its dead letter, or the event could be handled beside it.
-- Indexes: consumer_inbox_age, inbox_dead_letter_event, consumer_inbox_pkey.
DELETE FROM {schema}.consumer_inbox WHERE consumer = $1 AND event_id = ANY (ARRAY(
    SELECT r.event_id FROM {schema}.consumer_inbox AS r
    WHERE r.consumer = $1 AND r.received_at > '-infinity'
        AND r.received_at < (SELECT {schema}.outbox_clock() - $2::float8 * interval '1 day')
        AND (SELECT true FROM {schema}.inbox_dead_letter AS d
             WHERE d.consumer = r.consumer AND d.event_id = r.event_id LIMIT 1) IS NULL
    ORDER BY r.received_at LIMIT $3
    FOR UPDATE SKIP LOCKED))

-- name: prune_dead_letters
-- A bounded step. A held dead letter is all that lets its stream go on. Index: inbox_dead_letter_age.
DELETE FROM {schema}.inbox_dead_letter WHERE id = ANY (ARRAY(
    SELECT id FROM {schema}.inbox_dead_letter
    WHERE consumer = $1 AND policy = 'skip'
        AND buried_at < (SELECT {schema}.outbox_clock() - $2::float8 * interval '1 day')
    ORDER BY buried_at LIMIT $3
    FOR UPDATE SKIP LOCKED))

-- name: adopt_orphans
-- A waiting event is found through its stream. None should ever be without one that waits; if one is, it is found again.
INSERT INTO {schema}.inbox_stream AS s (consumer, topic, key, band, cause, waiting, since)
SELECT w.consumer, w.topic, w.key, w.band, 'draining', count(*), {schema}.outbox_clock()
FROM {schema}.inbox_waiting AS w
WHERE w.consumer = $1 AND NOT EXISTS (
    SELECT FROM {schema}.inbox_stream AS b
    WHERE b.consumer = w.consumer AND b.topic = w.topic AND b.key = w.key AND b.band = w.band AND b.cause IS NOT NULL)
GROUP BY w.consumer, w.topic, w.key, w.band
LIMIT $2
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    cause = excluded.cause, waiting = excluded.waiting, since = excluded.since
WHERE s.cause IS NULL

-- name: release_holds
-- Streams held for a dead letter that is no longer there, deleted by hand for instance: they go on.
-- Indexes: inbox_stream_cause, inbox_dead_letter_held.
UPDATE {schema}.inbox_stream AS s SET cause = 'draining', since = {schema}.outbox_clock()
WHERE s.consumer = $1 AND s.cause = 'held' AND NOT EXISTS (
    SELECT FROM {schema}.inbox_dead_letter AS d
    WHERE d.consumer = s.consumer AND d.topic = s.topic AND d.key = s.key AND d.band = s.band AND d.policy = 'hold')
