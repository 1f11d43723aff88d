-- name: lock
-- Take the write lock of the database without writing: later reads stay valid until the commit.
UPDATE outbox_meta SET value = value WHERE 0;

-- name: lanes
-- The number of lanes in each band; the primary key.
SELECT value FROM outbox_meta WHERE name = 'lanes';

-- name: known
-- The ids that exist already, by index in the list; the unique index of each table.
SELECT given.key FROM json_each(:ids) AS given
WHERE EXISTS (SELECT 1 FROM outbox WHERE event_id = given.value)
    OR EXISTS (SELECT 1 FROM outbox_archive WHERE event_id = given.value)
    OR EXISTS (SELECT 1 FROM outbox_dead_letter WHERE event_id = given.value);

-- name: counters
-- The last number of each stream, by index in the list; the primary key.
SELECT given.key, counter.sequence FROM json_each(:streams) AS given
CROSS JOIN outbox_counter AS counter
    ON counter.topic = json_extract(given.value, '$[0]')
    AND counter.key = json_extract(given.value, '$[1]')
    AND counter.band = json_extract(given.value, '$[2]');

-- name: count
-- Write the last number of a stream.
INSERT INTO outbox_counter (topic, key, band, sequence) VALUES (:topic, :key, :band, :sequence)
ON CONFLICT (topic, key, band) DO UPDATE SET sequence = excluded.sequence;

-- name: quiet
-- The streams without an undelivered event before a new event, by index in the list; outbox_fetchable,
-- outbox_laneless (a row without a lane could be in any of them) and the primary key of outbox_blocked.
SELECT given.key FROM json_each(:streams) AS given
WHERE NOT EXISTS (SELECT 1 FROM outbox WHERE lane IS NULL)
    AND NOT EXISTS (
        SELECT 1 FROM outbox WHERE lane = json_extract(given.value, '$[0]') AND state IN ({fetchable})
    )
    AND NOT EXISTS (
        SELECT 1 FROM outbox_blocked AS blocked
        WHERE blocked.lane = json_extract(given.value, '$[0]')
            AND blocked.topic = json_extract(given.value, '$[1]')
            AND blocked.key = json_extract(given.value, '$[2]')
    );

-- name: last_position
-- The highest position ever assigned; counting on from it is safe under the write lock.
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'outbox';

-- name: stage
-- Insert one event.
INSERT INTO outbox (
    id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, key, routing_key, priority,
    schema_version, saga_id, sequence, max_attempts, retry, created_at, available_at, lane, state, claimed_by, claimed_until
) VALUES (
    :id, :event_id, :event_type, :aggregate_type, :aggregate_id, :payload, :headers, :topic, :key, :routing_key, :priority,
    :schema_version, :saga_id, :sequence, :max_attempts, :retry, :created_at, :available_at, :lane, :state, :claimed_by,
    :claimed_until
);

-- name: laneless
-- Tell whether rows from elsewhere have no lane yet; outbox_laneless.
SELECT EXISTS (SELECT 1 FROM outbox WHERE lane IS NULL);

-- name: fill_lanes
-- Give rows from elsewhere their lanes, oldest first; outbox_laneless. The function is ours, on the store's connection.
UPDATE outbox SET lane = outrider_lane(stream_key, priority)
WHERE id IN (SELECT id FROM outbox WHERE lane IS NULL ORDER BY id LIMIT :limit);
