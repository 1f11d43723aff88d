-- name: counts
-- What waits, and what was buried; inbox_stream_cause and the unique index of dead letters.
SELECT coalesce(sum(waiting), 0), count(*),
    (SELECT count(*) FROM inbox_dead_letter WHERE :consumer IS NULL OR consumer = :consumer)
FROM inbox_stream WHERE cause IS NOT NULL AND (:consumer IS NULL OR consumer = :consumer);

-- name: receipts
-- Receipts of events; the primary key.
SELECT event_id, event_type, topic, key, sequence, received_at, processing_seconds FROM consumer_inbox
WHERE consumer = :consumer AND event_id IN (SELECT value FROM json_each(:ids)) ORDER BY received_at, event_id;

-- name: dead_letters
-- Oldest first, which is the order they would be replayed in; the primary key.
SELECT
    id, consumer, event_id, event_type, topic, key, sequence, place, headers, body, reason, failure, policy, attempts,
    buried_at
FROM inbox_dead_letter
WHERE (:ids IS NULL OR id IN (SELECT value FROM json_each(:ids))) AND (:consumer IS NULL OR consumer = :consumer)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR key = :key) AND (:reason IS NULL OR reason = :reason)
ORDER BY id LIMIT :limit;

-- name: streams
-- Streams that wait, held ones first, because they wait for a person; inbox_stream_cause.
SELECT consumer, topic, key, band, seen, cause, waiting, since FROM inbox_stream
WHERE cause IS NOT NULL AND (:consumer IS NULL OR consumer = :consumer)
ORDER BY cause <> 'held', since LIMIT :limit;

-- name: chosen
-- Those of the ids that are dead letters, in their order; the primary key.
SELECT id, event_id, policy, sequence, consumer, topic, key, band FROM inbox_dead_letter
WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY id;

-- name: bring_back
-- Back to its place among those that wait. One that was skipped is late by design, and marked so. The primary key.
INSERT OR REPLACE INTO inbox_waiting (id, {inbox_event})
SELECT id, {inbox_event_but_replayed}, replayed OR policy = 'skip', received_at
FROM inbox_dead_letter WHERE id = :id;

-- name: forget_receipt
-- It was not handled after all; the primary key.
DELETE FROM consumer_inbox WHERE consumer = :consumer AND event_id = :event_id;

-- name: remove
-- Take a dead letter away; the primary key.
DELETE FROM inbox_dead_letter WHERE id = :id;

-- name: go_on
-- A stream drains once no dead letter holds it; the primary key and inbox_dead_letter_held.
INSERT INTO inbox_stream (consumer, topic, key, band, seen, cause, waiting, since)
SELECT
    :consumer, :topic, :key, :band, NULL,
    CASE
        WHEN EXISTS (
            SELECT 1 FROM inbox_dead_letter
            WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band AND policy = 'hold'
        ) THEN 'held'
        WHEN :added + coalesce((
            SELECT waiting FROM inbox_stream
            WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
        ), 0) > 0 THEN 'draining'
    END,
    :added, :now
WHERE true
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    seen = max(inbox_stream.seen, coalesce(:passed, inbox_stream.seen)),
    cause = excluded.cause, waiting = inbox_stream.waiting + :added,
    since = CASE WHEN excluded.cause = 'held' AND inbox_stream.cause = 'held' THEN inbox_stream.since ELSE :now END;

-- name: forget
-- A stream of which nothing is to be known any more; the primary key.
DELETE FROM inbox_stream
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
    AND seen IS NULL AND cause IS NULL AND waiting = 0;

-- name: first_early
-- The first event behind the gap of a stream that waits for one; the primary key and inbox_waiting_sequence.
SELECT waiting.event_id, waiting.sequence FROM inbox_stream AS stream
JOIN inbox_waiting AS waiting USING (consumer, topic, key, band)
WHERE stream.consumer = :consumer AND stream.topic = :topic AND stream.key = :key AND stream.band = :band
    AND stream.cause = 'early' AND waiting.sequence > coalesce(stream.seen, -1)
ORDER BY waiting.sequence, waiting.id LIMIT 1;

-- name: release
-- As if everything before that event had been seen; the primary key.
UPDATE inbox_stream SET seen = :sequence - 1, cause = 'draining', since = :now
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;

-- name: record
-- Write down what a person did.
INSERT INTO outbox_operation (at, actor, verb, event_id, consumer) VALUES (:now, :actor, :verb, :event_id, :consumer);
