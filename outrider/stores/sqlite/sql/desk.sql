-- name: count_states
-- Count undelivered events.
SELECT state, count(*) FROM outbox GROUP BY state;

-- name: count_settled
-- Count the archive and the dead letters.
SELECT (SELECT count(*) FROM outbox_archive), (SELECT count(*) FROM outbox_dead_letter);

-- name: events
-- List undelivered events, oldest first; the primary key.
SELECT {facts}, state FROM outbox
WHERE (:ids IS NULL OR event_id IN (SELECT value FROM json_each(:ids)))
    AND (:state IS NULL OR state = :state) AND (:event_type IS NULL OR event_type = :event_type)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR stream_key = :key)
ORDER BY id LIMIT :limit;

-- name: sent
-- List delivered events, newest first; outbox_archive_sent.
SELECT {facts}, 'sent' AS state, sent_at FROM outbox_archive
WHERE (:ids IS NULL OR event_id IN (SELECT value FROM json_each(:ids)))
    AND (:event_type IS NULL OR event_type = :event_type)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR stream_key = :key)
ORDER BY sent_at DESC, rowid DESC LIMIT :limit;

-- name: dead_letters
-- List dead letters in the order they would be replayed; outbox_dead_letter_position.
SELECT {facts}, 'dead_letter' AS state, reason, policy, buried_at FROM outbox_dead_letter
WHERE (:ids IS NULL OR event_id IN (SELECT value FROM json_each(:ids)))
    AND (:event_type IS NULL OR event_type = :event_type)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR stream_key = :key)
    AND (:reason IS NULL OR reason = :reason)
ORDER BY id LIMIT :limit;

-- name: find_event
-- One undelivered event; the unique index.
SELECT {facts}, state FROM outbox WHERE event_id = :event_id;

-- name: find_sent
-- One delivered event; the unique index.
SELECT {facts}, 'sent' AS state, sent_at FROM outbox_archive WHERE event_id = :event_id;

-- name: find_dead_letter
-- One dead letter; the unique index.
SELECT {facts}, 'dead_letter' AS state, reason, policy, buried_at FROM outbox_dead_letter WHERE event_id = :event_id;

-- name: topics
-- What decides about the topics of the oldest events, and of blocked streams; the primary keys.
SELECT event_type, topic, routing_key FROM (SELECT event_type, topic, routing_key FROM outbox ORDER BY id LIMIT :look)
UNION SELECT '', topic, NULL FROM (SELECT topic FROM outbox_blocked LIMIT :look);

-- name: blocked_streams
-- List blocked streams, held ones first, with how many events wait; outbox_waiting.
SELECT lane, topic, key, cause, until, (
    SELECT count(*) FROM outbox
    WHERE outbox.lane = blocked.lane AND outbox.topic = blocked.topic AND stream_key = blocked.key AND state IN ({waiting})
)
FROM outbox_blocked AS blocked
ORDER BY cause <> 'held', until, lane, topic, key LIMIT :limit;

-- name: chosen
-- Those of the ids that are dead letters, in the order they are replayed; the unique index.
SELECT event_id, lane, topic, stream_key, policy FROM outbox_dead_letter
WHERE event_id IN (SELECT value FROM json_each(:ids)) ORDER BY id, rowid;

-- name: resume
-- Put a dead letter back in its place, at the head of its held stream; the unique index.
INSERT INTO outbox ({copied_but_attempts}, attempts, state)
SELECT {copied_but_attempts}, 0, 'parked' FROM outbox_dead_letter WHERE event_id = :event_id AND policy = 'hold';

-- name: stage_again
-- Stage a dead letter anew, as a late delivery; the unique index.
INSERT INTO outbox ({copied_but_position_headers_attempts}, headers, attempts, state)
SELECT {copied_but_position_headers_attempts}, json_set(headers, '$.replayed', 'true'), 0, 'pending'
FROM outbox_dead_letter WHERE event_id = :event_id AND policy = 'skip';

-- name: remove_dead_letter
-- Take a dead letter away; the unique index.
DELETE FROM outbox_dead_letter WHERE event_id = :event_id;

-- name: let_go
-- A held stream drains once none of its dead letters is held; outbox_dead_letter_held.
UPDATE outbox_blocked SET cause = 'draining', head_id = NULL, until = :now
WHERE lane = :lane AND topic = :topic AND key = :key AND cause = 'held'
    AND NOT EXISTS (
        SELECT 1 FROM outbox_dead_letter AS dead
        WHERE dead.lane = :lane AND dead.topic = :topic AND dead.stream_key = :key AND dead.policy = 'hold'
    );

-- name: buriable
-- An undelivered event that a person may bury: not one in the hands of a writer; the unique index.
SELECT id, lane, event_type, topic, routing_key, stream_key FROM outbox
WHERE event_id = :event_id AND state IN ({bury_guard}) AND state <> 'optimistic';

-- name: pending_before
-- Events of a key that come before one that is buried by hand; outbox_fetchable.
SELECT id, event_type, topic, routing_key, state FROM outbox
WHERE lane = :lane AND state IN ({fetchable}) AND stream_key = :key AND id < :id;

-- name: record
-- Write down what a person did.
INSERT INTO outbox_operation (at, actor, verb, event_id) VALUES (:now, :actor, :verb, :event_id);
