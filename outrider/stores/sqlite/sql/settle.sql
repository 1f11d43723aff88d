-- name: settleable
-- Those of the rows that are there, in owned lanes, and not in the hands of a writer; the primary key.
SELECT id, lane FROM outbox
WHERE id IN (SELECT value FROM json_each(:ids)) AND lane IN (SELECT value FROM json_each(:lanes))
    AND state IN ({confirm_guard}) AND NOT (state = 'optimistic' AND held_until > :now);

-- name: resolve_topic
-- Write down the topic that the relay resolved; the primary key.
UPDATE outbox SET topic = :topic WHERE id = :id AND lane = :lane;

-- name: archive
-- Keep delivered events, in the order given; the primary key.
INSERT OR REPLACE INTO outbox_archive ({copied}, sent_at)
SELECT {outbox_copied}, :now FROM json_each(:ids) AS given
CROSS JOIN outbox ON outbox.id = given.value
WHERE outbox.state IN ({confirm_guard})
ORDER BY given.key;

-- name: confirm
-- Take delivered events out of the outbox; the primary key.
DELETE FROM outbox WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({confirm_guard});

-- name: retry
-- An attempt was spent; the primary key.
UPDATE outbox SET state = 'failed', topic = :topic, attempts = attempts + 1, failure = :failure, suspect = :suspect
WHERE id = :id AND lane = :lane AND state IN ({retry_guard});

-- name: defer
-- Not to be published yet; the primary key.
UPDATE outbox SET state = 'deferred', topic = :topic WHERE id = :id AND lane = :lane AND state IN ({defer_guard});

-- name: park
-- Waits behind the head of its stream; the primary key.
UPDATE outbox SET state = 'parked', topic = :topic WHERE id = :id AND lane = :lane AND state IN ({park_guard});

-- name: bury
-- Copy an event to the dead letters; the primary key.
INSERT OR REPLACE INTO outbox_dead_letter ({copied_but_topic_attempts_failure}, topic, attempts, failure, reason, policy, buried_at)
SELECT {copied_but_topic_attempts_failure}, :topic, attempts + :spent, :failure, :reason, :policy, :now
FROM outbox WHERE id = :id AND lane = :lane AND state IN ({bury_guard});

-- name: remove_buried
-- Take a buried event out of the outbox; the primary key.
DELETE FROM outbox WHERE id = :id AND lane = :lane AND state IN ({bury_guard});

-- name: mark_skipped
-- Put a marker in the place of a numbered dead letter: same place and number, no content; the unique index.
INSERT INTO outbox (
    id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, sequence, max_attempts, retry, created_at, lane, state
)
SELECT
    id, :marker_id, :marker_type, aggregate_type, aggregate_id, 'null', json_object('skipped', event_id), topic, stream_key,
    routing_key, priority, schema_version, saga_id, sequence, max_attempts, retry, created_at, lane, :state
FROM outbox_dead_letter
WHERE event_id = :event_id AND sequence IS NOT NULL AND event_type <> :marker_type;

-- name: block
-- Block a stream, or change why it is blocked; only a person lifts a hold. The primary key.
INSERT INTO outbox_blocked (lane, topic, key, head_id, cause, until)
VALUES (:lane, :topic, :key, :head, :cause, :until)
ON CONFLICT (lane, topic, key) DO UPDATE SET head_id = excluded.head_id, cause = excluded.cause, until = excluded.until
WHERE outbox_blocked.cause <> 'held' OR excluded.cause = 'held';

-- name: ensure_blocked
-- A parked event is found through its blocked stream, so there must be one. The primary key.
INSERT OR IGNORE INTO outbox_blocked (lane, topic, key, cause, until) VALUES (:lane, :topic, :key, 'draining', :now);

-- name: drain
-- A stream of which something waits goes on draining; the primary key and outbox_waiting.
UPDATE outbox_blocked SET cause = 'draining', head_id = NULL, until = :now
WHERE lane = :lane AND topic = :topic AND key = :key AND cause <> 'held'
    AND EXISTS (
        SELECT 1 FROM outbox
        WHERE outbox.lane = :lane AND outbox.topic = :topic AND stream_key = :key AND state IN ({waiting})
    );

-- name: unblock
-- A stream of which nothing waits is let go; the primary key and outbox_waiting.
DELETE FROM outbox_blocked
WHERE lane = :lane AND topic = :topic AND key = :key AND cause <> 'held'
    AND NOT EXISTS (
        SELECT 1 FROM outbox
        WHERE outbox.lane = :lane AND outbox.topic = :topic AND stream_key = :key AND state IN ({waiting})
    );
