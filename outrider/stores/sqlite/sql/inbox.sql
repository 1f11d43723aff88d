-- name: installed
-- Tell whether the last step of the inbox's migration was taken.
SELECT count(*) FROM sqlite_schema WHERE type = 'index' AND name = 'inbox_dead_letter_age';

-- name: record_receipts
-- A receipt, unless there is one or the event waits; the primary key, and the unique index of those that wait.
INSERT INTO consumer_inbox (consumer, event_id, event_type, topic, key, sequence, received_at)
SELECT :consumer, :event_id, :event_type, :topic, :key, :sequence, :now
WHERE :waits OR NOT EXISTS (SELECT 1 FROM inbox_held WHERE consumer = :consumer AND event_id = :event_id)
ON CONFLICT (consumer, event_id) DO NOTHING;

-- name: lock_stream
-- The state of a stream; the primary key.
SELECT seen, cause, waiting FROM inbox_stream
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;

-- name: claim_in_order
-- Waiting events as they came; inbox_held_place.
SELECT id, event_id, replayed, event_type, sequence, topic, raw_key, body, headers, partition, position FROM inbox_held
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
ORDER BY id LIMIT :limit;

-- name: claim_by_sequence
-- Waiting events by their numbers; inbox_held_sequence.
SELECT id, event_id, replayed, event_type, sequence, topic, raw_key, body, headers, partition, position FROM inbox_held
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
ORDER BY sequence, id LIMIT :limit;

-- name: repair_stream
-- A counted stream that drains though nothing of it waits; without this it would drain for ever. The primary key.
UPDATE inbox_stream SET cause = NULL, waiting = 0, since = :now
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;

-- name: finish_receipts
-- How long the handler took; the primary key.
UPDATE consumer_inbox SET processing_seconds = :seconds WHERE consumer = :consumer AND event_id = :event_id;

-- name: withdraw_receipts
-- The receipt of an event that was not handled after all; the primary key.
DELETE FROM consumer_inbox WHERE consumer = :consumer AND event_id = :event_id;

-- name: hold
-- Keep an event whole. One that waits already stays where it is; the unique index.
INSERT INTO inbox_held ({inbox_event})
VALUES (
    :consumer, :event_id, :event_type, :topic, :key, :band, :sequence, :raw_key, :headers, :body, :partition, :position,
    :replayed, :now
)
ON CONFLICT (consumer, event_id) DO NOTHING;

-- name: dead_letter
-- Copy a held event to the dead letters, with its position; the id is returned. The unique index.
INSERT OR REPLACE INTO inbox_dead_letter (id, {inbox_event}, reason, failure, policy, attempts, dead_lettered_at)
SELECT id, {inbox_event}, :reason, :failure, :policy, :attempts, :now FROM inbox_held
WHERE consumer = :consumer AND event_id = :event_id
RETURNING id;

-- name: remove_held
-- An event that waits no more; the unique index.
DELETE FROM inbox_held WHERE consumer = :consumer AND event_id = :event_id;

-- name: save_streams
-- The current state of a stream; the primary key.
INSERT INTO inbox_stream (consumer, topic, key, band, seen, cause, waiting, since)
VALUES (:consumer, :topic, :key, :band, :seen, :cause, :waiting, :now)
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    seen = excluded.seen, cause = excluded.cause, waiting = excluded.waiting,
    since = CASE WHEN inbox_stream.cause IS excluded.cause THEN inbox_stream.since ELSE excluded.since END;

-- name: forget_stream
-- A stream of which nothing is to be known any more; the primary key.
DELETE FROM inbox_stream WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;

-- name: draining
-- Streams whose events wait for a cause, longest first; inbox_stream_cause.
SELECT topic, key, band FROM inbox_stream
WHERE consumer = :consumer AND cause = :cause ORDER BY since LIMIT :limit;

-- name: overdue
-- Streams that have waited for a predecessor, longest first; inbox_stream_cause.
SELECT topic, key, band, seen, waiting, since FROM inbox_stream
WHERE consumer = :consumer AND cause = 'early' AND since < :before ORDER BY since LIMIT :limit;

-- name: prune_receipts
-- A bounded step; a receipt stays as long as its dead letter. consumer_inbox_age and the unique index of dead letters.
DELETE FROM consumer_inbox WHERE consumer = :consumer AND event_id IN (
    SELECT event_id FROM consumer_inbox
    WHERE consumer = :consumer AND received_at < :before AND NOT EXISTS (
        SELECT 1 FROM inbox_dead_letter AS dead
        WHERE dead.consumer = consumer_inbox.consumer AND dead.event_id = consumer_inbox.event_id
    )
    LIMIT :limit
);

-- name: prune_dead_letters
-- A bounded step; a blocking dead letter stays, because it is needed to drain its stream. inbox_dead_letter_age.
DELETE FROM inbox_dead_letter WHERE id IN (
    SELECT id FROM inbox_dead_letter
    WHERE consumer = :consumer AND policy = 'skip' AND dead_lettered_at < :before LIMIT :limit
);

-- name: unblock_without_dead_letter
-- Streams blocked by a dead letter that does not exist any more drain; inbox_stream_cause and
-- inbox_dead_letter_blocking.
UPDATE inbox_stream SET cause = 'draining', since = :now
WHERE consumer = :consumer AND cause = 'dead_letter' AND NOT EXISTS (
    SELECT 1 FROM inbox_dead_letter AS dead
    WHERE dead.consumer = inbox_stream.consumer AND dead.topic = inbox_stream.topic AND dead.key = inbox_stream.key
        AND dead.band = inbox_stream.band AND dead.policy = 'block'
);

-- name: adopt_orphans
-- A waiting event is found through its stream. None should ever be without one that waits; if one is, it is found
-- again.
INSERT INTO inbox_stream (consumer, topic, key, band, cause, waiting, since)
SELECT consumer, topic, key, band, 'draining', count(*), :now FROM inbox_held AS orphan
WHERE consumer = :consumer AND NOT EXISTS (
    SELECT 1 FROM inbox_stream AS known
    WHERE known.consumer = orphan.consumer AND known.topic = orphan.topic AND known.key = orphan.key
        AND known.band = orphan.band AND known.cause IS NOT NULL
)
GROUP BY consumer, topic, key, band LIMIT :limit
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    cause = excluded.cause, waiting = excluded.waiting, since = excluded.since;

-- name: counts
-- Held events and dead letters; inbox_stream_cause and the unique index of dead letters.
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
    id, consumer, event_id, event_type, topic, key, sequence, position, headers, body, reason, failure, policy, attempts,
    dead_lettered_at
FROM inbox_dead_letter
WHERE (:ids IS NULL OR id IN (SELECT value FROM json_each(:ids))) AND (:consumer IS NULL OR consumer = :consumer)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR key = :key) AND (:reason IS NULL OR reason = :reason)
ORDER BY id LIMIT :limit;

-- name: blocked_streams
-- Blocked streams, those with a dead letter first, because they wait for an operator; inbox_stream_cause.
SELECT consumer, topic, key, band, seen, cause, waiting, since FROM inbox_stream
WHERE cause IS NOT NULL AND (:consumer IS NULL OR consumer = :consumer)
ORDER BY cause <> 'dead_letter', since LIMIT :limit;

-- name: chosen_dead_letters
-- Those of the ids that are dead letters, in their order; the primary key.
SELECT id, event_id, policy, sequence, consumer, topic, key, band FROM inbox_dead_letter
WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY id;

-- name: replay
-- Back to its position among the held events. A skipped event is late by design, and marked as replayed. The primary
-- key.
INSERT OR REPLACE INTO inbox_held (id, {inbox_event})
SELECT id, {inbox_event_but_replayed}, replayed OR policy = 'skip', received_at
FROM inbox_dead_letter WHERE id = :id;

-- name: discard
-- Delete a dead letter; the primary key.
DELETE FROM inbox_dead_letter WHERE id = :id;

-- name: drain_unblocked
-- A stream drains when no dead letter blocks it; the primary key and inbox_dead_letter_blocking.
INSERT INTO inbox_stream (consumer, topic, key, band, seen, cause, waiting, since)
SELECT
    :consumer, :topic, :key, :band, NULL,
    CASE
        WHEN EXISTS (
            SELECT 1 FROM inbox_dead_letter
            WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band AND policy = 'block'
        ) THEN 'dead_letter'
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
    since = CASE WHEN excluded.cause = 'dead_letter' AND inbox_stream.cause = 'dead_letter' THEN inbox_stream.since ELSE :now END;

-- name: forget_empty_streams
-- A stream of which nothing is to be known any more; the primary key.
DELETE FROM inbox_stream
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
    AND seen IS NULL AND cause IS NULL AND waiting = 0;

-- name: first_early
-- The first event behind the gap of a stream that waits for one; the primary key and inbox_held_sequence.
SELECT waiting.event_id, waiting.sequence FROM inbox_stream AS stream
JOIN inbox_held AS waiting USING (consumer, topic, key, band)
WHERE stream.consumer = :consumer AND stream.topic = :topic AND stream.key = :key AND stream.band = :band
    AND stream.cause = 'early' AND waiting.sequence > coalesce(stream.seen, -1)
ORDER BY waiting.sequence, waiting.id LIMIT 1;

-- name: release
-- As if everything before that event had been seen; the primary key.
UPDATE inbox_stream SET seen = :sequence - 1, cause = 'draining', since = :now
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;
