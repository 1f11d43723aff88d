-- fragment: living
(alive_from <= :now AND alive_until > :now)

-- fragment: claim_lasts
claimed_until > :now AND claimed_until <= :now + {claim_seconds_max}

-- name: join
-- Start a heartbeat.
INSERT INTO outbox_relay (relay_id, alive_from, alive_until) VALUES (:relay, :from, :until)
ON CONFLICT (relay_id) DO UPDATE SET alive_from = excluded.alive_from, alive_until = excluded.alive_until;

-- name: heartbeat
-- Renew a heartbeat that has not lapsed, also one from before the clock was set back; the primary key.
UPDATE outbox_relay SET alive_from = :from, alive_until = :until WHERE relay_id = :relay AND alive_until > :now;

-- name: alive
-- Count living relays.
SELECT count(*) FROM outbox_relay WHERE {living};

-- name: free_lanes
-- Lanes without a living owner.
SELECT lane FROM outbox_lane
WHERE owner IS NULL OR owner NOT IN (SELECT relay_id FROM outbox_relay WHERE {living})
ORDER BY lane;

-- name: claim
-- Take the free ones of the lanes, if the relay is alive; the epoch goes up.
UPDATE outbox_lane SET owner = :relay, epoch = epoch + 1
WHERE lane IN (SELECT value FROM json_each(:lanes))
    AND (owner IS NULL OR owner NOT IN (SELECT relay_id FROM outbox_relay WHERE {living}))
    AND :relay IN (SELECT relay_id FROM outbox_relay WHERE {living});

-- name: take_lane
-- Take a lane from its relay, so that nothing decided before can be written after.
UPDATE outbox_lane SET owner = NULL, epoch = epoch + 1 WHERE lane = :lane;

-- name: owned
-- A relay's lanes with their epochs, and whether any stream of each is blocked.
SELECT lane, epoch, EXISTS (SELECT 1 FROM outbox_blocked WHERE outbox_blocked.lane = outbox_lane.lane)
FROM outbox_lane WHERE owner = :owner;

-- name: release
-- Give a lane back, unless it was taken over.
UPDATE outbox_lane SET owner = NULL WHERE lane = :lane AND owner = :owner AND epoch = :epoch;

-- name: leave
-- End a heartbeat.
DELETE FROM outbox_relay WHERE relay_id = :relay;

-- name: leave_lanes
-- Free whatever the relay still owned.
UPDATE outbox_lane SET owner = NULL WHERE owner = :relay;

-- name: fetch
-- The start of one lane; outbox_fetchable.
SELECT {event} FROM outbox WHERE lane = :lane AND state IN ({fetchable}) ORDER BY id LIMIT :limit;

-- name: blocked
-- The blocked streams, by index in the list; the primary key.
SELECT given.key FROM json_each(:streams) AS given
CROSS JOIN outbox_blocked AS blocked
    ON blocked.lane = json_extract(given.value, '$[0]')
    AND blocked.topic = json_extract(given.value, '$[1]')
    AND blocked.key = json_extract(given.value, '$[2]');

-- name: due
-- Blocked streams with a time, longest due first; read lazily from outbox_blocked_due.
SELECT lane, topic, key, cause, until FROM outbox_blocked INDEXED BY outbox_blocked_due
WHERE until IS NOT NULL AND lane IN (SELECT value FROM json_each(:lanes))
ORDER BY until;

-- name: waiting
-- The first waiting events of one stream; outbox_waiting.
SELECT {event} FROM outbox
WHERE lane = :lane AND topic = :topic AND stream_key = :key AND state IN ({waiting})
ORDER BY id LIMIT :limit;

-- name: claimed_rows
-- Those of the rows that are still the writer's own, in the order given; the unique index.
SELECT {event} FROM json_each(:ids) AS given
CROSS JOIN outbox ON outbox.event_id = given.value
WHERE state = 'optimistic' AND claimed_by = :owner AND {claim_lasts}
ORDER BY given.key;

-- name: renew_claim
-- Renew the claim of a writer; the unique index.
UPDATE outbox SET claimed_until = :until
WHERE event_id IN (SELECT value FROM json_each(:ids)) AND state = 'optimistic' AND claimed_by = :owner AND {claim_lasts};

-- name: claimed_positions
-- The rows that are still claimed by the writer: after the end of a claim, a relay may have them in flight.
-- The unique index.
SELECT id FROM outbox
WHERE event_id IN (SELECT value FROM json_each(:ids)) AND state IN ({confirm_optimistic_guard})
    AND claimed_by = :owner AND {claim_lasts};

-- name: yield_claim
-- Leave rows to the relay; the unique index.
UPDATE outbox SET state = 'pending', claimed_by = NULL, claimed_until = NULL
WHERE event_id IN (SELECT value FROM json_each(:ids)) AND state IN ({yield_optimistic_guard})
    AND claimed_by = :owner AND {claim_lasts};

-- name: settleable
-- Those of the rows that are there, in owned lanes, and not in the hands of a writer; the primary key.
SELECT id, lane FROM outbox
WHERE id IN (SELECT value FROM json_each(:ids)) AND lane IN (SELECT value FROM json_each(:lanes))
    AND state IN ({confirm_guard}) AND NOT (state = 'optimistic' AND {claim_lasts});

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
UPDATE outbox SET state = 'failed', topic = :topic, attempts = min(attempts, {attempts_max} - 1) + 1, failure = :failure, suspect = :suspect
WHERE id = :id AND lane = :lane AND state IN ({retry_guard});

-- name: defer
-- Not to be published yet; the primary key.
UPDATE outbox SET state = 'deferred', topic = :topic WHERE id = :id AND lane = :lane AND state IN ({defer_guard});

-- name: park
-- Waits behind the head of its stream; the primary key.
UPDATE outbox SET state = 'parked', topic = :topic WHERE id = :id AND lane = :lane AND state IN ({park_guard});

-- name: dead_letter
-- Copy an event to the dead letters; the primary key.
INSERT OR REPLACE INTO outbox_dead_letter ({copied_but_topic_attempts_failure}, topic, attempts, failure, reason, policy, dead_lettered_at)
SELECT {copied_but_topic_attempts_failure}, :topic, min(attempts + :spent, {attempts_max}), :failure, :reason, :policy, :now
FROM outbox WHERE id = :id AND lane = :lane AND state IN ({dead_letter_guard});

-- name: remove_dead_lettered
-- Take a dead-lettered event out of the outbox; the primary key.
DELETE FROM outbox WHERE id = :id AND lane = :lane AND state IN ({dead_letter_guard});

-- name: mark_skipped
-- Insert the marker of a numbered dead letter: same position and number, no content; the unique index.
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
-- Block a stream, or change the cause; only an operator unblocks a stream with a dead letter. The primary key.
INSERT INTO outbox_blocked (lane, topic, key, head_id, cause, until)
VALUES (:lane, :topic, :key, :head, :cause, :until)
ON CONFLICT (lane, topic, key) DO UPDATE SET head_id = excluded.head_id, cause = excluded.cause, until = excluded.until
WHERE outbox_blocked.cause <> 'dead_letter' OR excluded.cause = 'dead_letter';

-- name: ensure_blocked
-- A parked event is found through its blocked stream, so there must be one. The primary key.
INSERT OR IGNORE INTO outbox_blocked (lane, topic, key, cause, until) VALUES (:lane, :topic, :key, 'draining', :now);

-- name: drain
-- A stream of which something waits goes on draining; the primary key and outbox_waiting.
UPDATE outbox_blocked SET cause = 'draining', head_id = NULL, until = :now
WHERE lane = :lane AND topic = :topic AND key = :key AND cause <> 'dead_letter'
    AND EXISTS (
        SELECT 1 FROM outbox
        WHERE outbox.lane = :lane AND outbox.topic = :topic AND stream_key = :key AND state IN ({waiting})
    );

-- name: unblock
-- A stream of which nothing waits is let go; the primary key and outbox_waiting.
DELETE FROM outbox_blocked
WHERE lane = :lane AND topic = :topic AND key = :key AND cause <> 'dead_letter'
    AND NOT EXISTS (
        SELECT 1 FROM outbox
        WHERE outbox.lane = :lane AND outbox.topic = :topic AND stream_key = :key AND state IN ({waiting})
    );

-- name: last_values
-- The last published value of an increasing field; the primary key.
SELECT value FROM payload_last_value WHERE topic = :topic AND key = :key AND lane = :lane AND rule = :rule;

-- name: raise_values
-- In the transaction that settles the events; a value never falls; the primary key.
INSERT INTO payload_last_value (rule, lane, topic, key, value) VALUES (:rule, :lane, :topic, :key, :value)
ON CONFLICT (topic, key, lane, rule) DO UPDATE SET value = max(value, excluded.value);
