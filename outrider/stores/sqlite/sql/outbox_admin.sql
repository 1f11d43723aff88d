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
SELECT {facts}, 'dead_letter' AS state, reason, policy, dead_lettered_at FROM outbox_dead_letter
WHERE (:ids IS NULL OR event_id IN (SELECT value FROM json_each(:ids)))
    AND (:event_type IS NULL OR event_type = :event_type)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR stream_key = :key)
    AND (:reason IS NULL OR reason = :reason)
ORDER BY id LIMIT :limit;

-- name: dead_letter_groups
-- Count the dead letters by reason and topic; reads all of them.
SELECT reason, topic, count(*) FROM outbox_dead_letter
WHERE (:ids IS NULL OR event_id IN (SELECT value FROM json_each(:ids)))
    AND (:event_type IS NULL OR event_type = :event_type)
    AND (:topic IS NULL OR topic = :topic) AND (:key IS NULL OR stream_key = :key)
    AND (:reason IS NULL OR reason = :reason)
GROUP BY reason, topic ORDER BY count(*) DESC, reason, topic LIMIT :limit;

-- name: has_due
-- Tell whether an event can be published now; outbox_fetchable, outbox_blocked_due.
SELECT EXISTS (SELECT 1 FROM outbox WHERE state IN ({fetchable}))
    OR EXISTS (SELECT 1 FROM outbox_blocked WHERE until <= :now);

-- name: find_event
-- One undelivered event; the unique index.
SELECT {facts}, state FROM outbox WHERE event_id = :event_id;

-- name: find_sent
-- One delivered event; the unique index.
SELECT {facts}, 'sent' AS state, sent_at FROM outbox_archive WHERE event_id = :event_id;

-- name: find_dead_letter
-- One dead letter; the unique index.
SELECT {facts}, 'dead_letter' AS state, reason, policy, dead_lettered_at FROM outbox_dead_letter WHERE event_id = :event_id;

-- name: topics
-- What decides about the topics of the oldest events, and of blocked streams; the primary keys.
SELECT event_type, topic, routing_key FROM (SELECT event_type, topic, routing_key FROM outbox ORDER BY id LIMIT :look)
UNION SELECT '', topic, NULL FROM (SELECT topic FROM outbox_blocked LIMIT :look);

-- name: lane_owner
-- The live relay that owns a lane; the primary keys.
SELECT relay_id FROM outbox_lane JOIN outbox_relay ON relay_id = owner WHERE lane = :lane AND {living};

-- name: blocked_streams
-- List blocked streams, those with a dead letter first, with the number of waiting events; outbox_waiting.
SELECT lane, topic, key, cause, until, (
    SELECT count(*) FROM outbox
    WHERE outbox.lane = blocked.lane AND outbox.topic = blocked.topic AND stream_key = blocked.key AND state IN ({waiting})
)
FROM outbox_blocked AS blocked
ORDER BY cause <> 'dead_letter', until, lane, topic, key LIMIT :limit;

-- name: chosen
-- Those of the ids that are dead letters, in the order they are replayed; the unique index.
SELECT event_id, lane, topic, stream_key, policy FROM outbox_dead_letter
WHERE event_id IN (SELECT value FROM json_each(:ids)) ORDER BY id, rowid;

-- name: resume
-- Replay a dead letter at its old position, the head of its blocked stream; the unique index.
INSERT INTO outbox ({copied_but_attempts}, attempts, state)
SELECT {copied_but_attempts}, 0, 'parked' FROM outbox_dead_letter WHERE event_id = :event_id AND policy = 'block';

-- name: stage_again
-- Stage a dead letter anew, as a late delivery; the unique index.
INSERT INTO outbox ({copied_but_position_headers_attempts}, headers, attempts, state)
SELECT {copied_but_position_headers_attempts}, json_set(headers, '$.replayed', 'true'), 0, 'pending'
FROM outbox_dead_letter WHERE event_id = :event_id AND policy = 'skip';

-- name: remove_dead_letter
-- Delete a dead letter; the unique index.
DELETE FROM outbox_dead_letter WHERE event_id = :event_id;

-- name: drain_held
-- A blocked stream drains when no dead letter blocks it any more; outbox_dead_letter_blocking.
UPDATE outbox_blocked SET cause = 'draining', head_id = NULL, until = :now
WHERE lane = :lane AND topic = :topic AND key = :key AND cause = 'dead_letter'
    AND NOT EXISTS (
        SELECT 1 FROM outbox_dead_letter AS dead
        WHERE dead.lane = :lane AND dead.topic = :topic AND dead.stream_key = :key AND dead.policy = 'block'
    );

-- name: editable
-- One dead letter that an operator edits; the unique index.
SELECT lane, topic, stream_key, policy, headers, payload FROM outbox_dead_letter WHERE event_id = :event_id;

-- name: edit
-- Change a dead letter. With another topic it leaves its stream, and its number with it; the unique index.
UPDATE outbox_dead_letter
SET payload = coalesce(:payload, payload), headers = :headers, topic = coalesce(:topic, topic),
    sequence = CASE WHEN :moved THEN NULL ELSE sequence END, policy = CASE WHEN :moved THEN 'skip' ELSE policy END
WHERE event_id = :event_id;

-- name: position_of
-- The position of an event that a person dead-letters; an event that its writer claims is left out; the unique index.
SELECT id, lane, event_type, topic, routing_key, stream_key FROM outbox
WHERE event_id = :event_id AND state IN ({dead_letter_guard}) AND state <> 'optimistic';

-- name: pending_before
-- Events of a key before one that a person dead-letters; outbox_fetchable.
SELECT id, event_type, topic, routing_key, state FROM outbox
WHERE lane = :lane AND state IN ({fetchable}) AND stream_key = :key AND id < :id;

-- name: dead_relays
-- Relays whose heartbeat has lapsed, and how many lanes each left behind.
SELECT relay_id, (SELECT count(*) FROM outbox_lane WHERE owner = relay_id) FROM outbox_relay
WHERE NOT {living} ORDER BY relay_id;

-- name: sweep
-- Remove lapsed heartbeats.
DELETE FROM outbox_relay WHERE NOT {living};

-- name: take_duty
-- Take a duty whose time has come; changes no row if it has not.
INSERT INTO outbox_duty (name, due_at) VALUES (:name, :next)
ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at WHERE outbox_duty.due_at <= :now;

-- name: prune_archive
-- Remove the oldest delivered events; outbox_archive_sent.
DELETE FROM outbox_archive WHERE rowid IN (
    SELECT rowid FROM outbox_archive WHERE sent_at < :before ORDER BY sent_at LIMIT :limit
);

-- name: prune_dead_letters
-- Remove the oldest dead letters; a blocking one is needed to drain its stream, so it stays until an operator acts.
-- outbox_dead_letter_skipped.
DELETE FROM outbox_dead_letter WHERE rowid IN (
    SELECT rowid FROM outbox_dead_letter WHERE policy = 'skip' AND dead_lettered_at < :before ORDER BY dead_lettered_at LIMIT :limit
)
RETURNING event_id;
