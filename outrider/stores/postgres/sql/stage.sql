-- Staging, inside the caller's transaction. $1..$17 are the columns of a new event; $18 is the claiming writer and $19
-- its seconds.

-- fragment: planned_anew
-- Always true, see `costly`.
($1::uuid[] IS NOT NULL OR {costly})

-- name: stage
-- Many events in one statement; a known id that is still undelivered is left alone. Index: outbox_pkey.
INSERT INTO {schema}.outbox ({new_event_columns}, state, claimed_by, claimed_until)
SELECT {new_event_values}, g.sequence, {staged_state}
FROM {new_events} {quiet}
ORDER BY g.ord
ON CONFLICT (event_id) DO NOTHING
RETURNING event_id, state

-- name: stage_one
-- The most common call: one event without a claim. Half the cost of the general statement. Index: outbox_pkey.
INSERT INTO {schema}.outbox ({new_event_columns}) VALUES ({one_new_event}, $13::bigint)
ON CONFLICT (event_id) DO NOTHING
RETURNING event_id, state

-- name: stage_numbered_one
-- One event with a generated id, which cannot be staged already: lock, count and insert at once.
-- The position is taken after the counter's lock, because the row comes out of `counted`.
WITH counted AS (
    INSERT INTO {schema}.outbox_counter AS c (topic, key, band, sequence)
    SELECT $7::text, coalesce($8::text, $4::text),
        CASE WHEN $10::smallint >= 7 THEN 0 WHEN $10::smallint >= 3 THEN 1 ELSE 2 END, 1
    WHERE $13::bigint IS NULL
    ON CONFLICT (topic, key, band) DO UPDATE SET sequence = c.sequence + 1
    RETURNING sequence
)
INSERT INTO {schema}.outbox ({new_event_columns}) SELECT {one_new_event}, counted.sequence FROM counted
RETURNING event_id, state

-- name: retract
-- Ids chosen by the caller may be delivered or dead-lettered already; a new statement sees rows that moved meanwhile.
-- LIMIT keeps the planner from hashing the whole archive for a few ids, here and below.
-- Indexes: outbox_archive_event_id, outbox_dead_letter_pkey.
DELETE FROM {schema}.outbox AS o
WHERE o.event_id = ANY ($1::uuid[]) AND {planned_anew} AND (
    (SELECT true FROM {schema}.outbox_archive AS a WHERE a.event_id = o.event_id LIMIT 1)
    OR (SELECT true FROM {schema}.outbox_dead_letter AS d WHERE d.event_id = o.event_id LIMIT 1))
RETURNING o.event_id

-- name: has_journal
-- Whether rows that were taken back may have entries.
SELECT to_regprocedure('{schema}.outbox_journal_retract(uuid[])') IS NOT NULL

-- name: journal_retracted
-- Entries of rows that were taken back, if their staging has one; outbox_journal_event.
SELECT {schema}.outbox_journal_retract($1::uuid[])

-- name: lock_counters
-- Lock the counters of numbered streams, in order, without writing to those that exist.
INSERT INTO {schema}.outbox_counter AS c (topic, key, band, sequence)
SELECT s.topic, s.key, s.band, 0 FROM unnest($1::text[], $2::text[], $3::smallint[]) AS s (topic, key, band)
ORDER BY s.topic, s.key, s.band
ON CONFLICT (topic, key, band) DO UPDATE SET sequence = c.sequence WHERE false

-- name: stage_numbered
-- A new statement after the lock: drop known ids, number the rest, insert in that order. No gaps on duplicates.
WITH fresh AS MATERIALIZED (
    SELECT g.*, coalesce(g.key, g.aggregate_id) AS stream_key,
        (CASE WHEN g.priority >= 7 THEN 0 WHEN g.priority >= 3 THEN 1 ELSE 2 END)::smallint AS band
    FROM {new_events}
    WHERE (SELECT true FROM {schema}.outbox AS o WHERE o.event_id = g.event_id LIMIT 1) IS NULL
        AND (SELECT true FROM {schema}.outbox_archive AS a WHERE a.event_id = g.event_id LIMIT 1) IS NULL
        AND (SELECT true FROM {schema}.outbox_dead_letter AS d WHERE d.event_id = g.event_id LIMIT 1) IS NULL
        AND {planned_anew}
), numbered AS MATERIALIZED (
    SELECT f.*, c.sequence + row_number() OVER (PARTITION BY f.topic, f.stream_key, f.band ORDER BY f.ord) AS number
    FROM fresh AS f
    JOIN {schema}.outbox_counter AS c ON c.topic = f.topic AND c.key = f.stream_key AND c.band = f.band
), counted AS (
    UPDATE {schema}.outbox_counter AS c SET sequence = n.last
    FROM (SELECT topic, stream_key, band, max(number) AS last FROM numbered GROUP BY topic, stream_key, band) AS n
    WHERE c.topic = n.topic AND c.key = n.stream_key AND c.band = n.band
)
INSERT INTO {schema}.outbox ({new_event_columns}, state, claimed_by, claimed_until)
SELECT {new_event_values}, g.number, {staged_state}
FROM numbered AS g {quiet}
ORDER BY g.ord
RETURNING event_id, state
