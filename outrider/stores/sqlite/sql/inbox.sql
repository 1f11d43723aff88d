-- name: installed
-- Tell whether the last step of the inbox's migration was taken.
SELECT count(*) FROM sqlite_schema WHERE type = 'index' AND name = 'inbox_dead_letter_age';

-- name: receive
-- A receipt, unless there is one or the event waits; the primary key, and the unique index of those that wait.
INSERT INTO consumer_inbox (consumer, event_id, event_type, topic, key, sequence, received_at)
SELECT :consumer, :event_id, :event_type, :topic, :key, :sequence, :now
WHERE :waits OR NOT EXISTS (SELECT 1 FROM inbox_waiting WHERE consumer = :consumer AND event_id = :event_id)
ON CONFLICT (consumer, event_id) DO NOTHING;

-- name: standing
-- Where a stream stands; the primary key.
SELECT seen, cause, waiting FROM inbox_stream
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;

-- name: waiting_in_turn
-- Waiting events as they came; inbox_waiting_place.
SELECT id, event_id, replayed, event_type, sequence, topic, raw_key, body, headers, shard, place FROM inbox_waiting
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
ORDER BY id LIMIT :limit;

-- name: waiting_by_sequence
-- Waiting events by their numbers; inbox_waiting_sequence.
SELECT id, event_id, replayed, event_type, sequence, topic, raw_key, body, headers, shard, place FROM inbox_waiting
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band
ORDER BY sequence, id LIMIT :limit;

-- name: mend
-- A counted stream that drains though nothing of it waits; without this it would drain for ever. The primary key.
UPDATE inbox_stream SET cause = NULL, waiting = 0, since = :now
WHERE consumer = :consumer AND topic = :topic AND key = :key AND band = :band;

-- name: finish
-- How long the handler took; the primary key.
UPDATE consumer_inbox SET processing_seconds = :seconds WHERE consumer = :consumer AND event_id = :event_id;

-- name: withdraw
-- The receipt of an event that was not handled after all; the primary key.
DELETE FROM consumer_inbox WHERE consumer = :consumer AND event_id = :event_id;

-- name: park
-- Keep an event whole. One that waits already stays where it is; the unique index.
INSERT INTO inbox_waiting ({inbox_event})
VALUES (
    :consumer, :event_id, :event_type, :topic, :key, :band, :sequence, :raw_key, :headers, :body, :shard, :place,
    :replayed, :now
)
ON CONFLICT (consumer, event_id) DO NOTHING;

-- name: bury
-- Copy an event from those that wait to the dead letters; it keeps its place, and its id is told. The unique index.
INSERT OR REPLACE INTO inbox_dead_letter (id, {inbox_event}, reason, failure, policy, attempts, buried_at)
SELECT id, {inbox_event}, :reason, :failure, :policy, :attempts, :now FROM inbox_waiting
WHERE consumer = :consumer AND event_id = :event_id
RETURNING id;

-- name: leave
-- An event that waits no more; the unique index.
DELETE FROM inbox_waiting WHERE consumer = :consumer AND event_id = :event_id;

-- name: stand
-- Where a stream stands now; the primary key.
INSERT INTO inbox_stream (consumer, topic, key, band, seen, cause, waiting, since)
VALUES (:consumer, :topic, :key, :band, :seen, :cause, :waiting, :now)
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    seen = excluded.seen, cause = excluded.cause, waiting = excluded.waiting,
    since = CASE WHEN inbox_stream.cause IS excluded.cause THEN inbox_stream.since ELSE excluded.since END;

-- name: forget
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
-- A bounded step; a held dead letter is all that lets its stream go on. inbox_dead_letter_age.
DELETE FROM inbox_dead_letter WHERE id IN (
    SELECT id FROM inbox_dead_letter
    WHERE consumer = :consumer AND policy = 'skip' AND buried_at < :before LIMIT :limit
);

-- name: release_holds
-- Streams held for a dead letter that is no longer there go on; inbox_stream_cause and inbox_dead_letter_held.
UPDATE inbox_stream SET cause = 'draining', since = :now
WHERE consumer = :consumer AND cause = 'held' AND NOT EXISTS (
    SELECT 1 FROM inbox_dead_letter AS dead
    WHERE dead.consumer = inbox_stream.consumer AND dead.topic = inbox_stream.topic AND dead.key = inbox_stream.key
        AND dead.band = inbox_stream.band AND dead.policy = 'hold'
);

-- name: adopt_orphans
-- A waiting event is found through its stream. None should ever be without one that waits; if one is, it is found again.
INSERT INTO inbox_stream (consumer, topic, key, band, cause, waiting, since)
SELECT consumer, topic, key, band, 'draining', count(*), :now FROM inbox_waiting AS orphan
WHERE consumer = :consumer AND NOT EXISTS (
    SELECT 1 FROM inbox_stream AS known
    WHERE known.consumer = orphan.consumer AND known.topic = orphan.topic AND known.key = orphan.key
        AND known.band = orphan.band AND known.cause IS NOT NULL
)
GROUP BY consumer, topic, key, band LIMIT :limit
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    cause = excluded.cause, waiting = excluded.waiting, since = excluded.since;
