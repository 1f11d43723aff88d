-- name: fetch
-- The start of one lane; outbox_fetchable.
SELECT {event} FROM outbox WHERE lane = :lane AND state IN ({fetchable}) ORDER BY id LIMIT :limit;

-- name: blocked
-- Which of the streams, by place in the list, are blocked; the primary key.
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

-- name: held
-- Those of the rows that are still the writer's own, in the order given; the unique index.
SELECT {event} FROM json_each(:ids) AS given
CROSS JOIN outbox ON outbox.event_id = given.value
WHERE state = 'optimistic' AND held_by = :owner AND held_until > :now
ORDER BY given.key;

-- name: renew_hold
-- Lengthen a writer's hold; the unique index.
UPDATE outbox SET held_until = :until
WHERE event_id IN (SELECT value FROM json_each(:ids)) AND state = 'optimistic' AND held_by = :owner AND held_until > :now;

-- name: held_by
-- Those of the rows that are still the writer's own: once a hold has lapsed, a relay may have them in flight.
-- The unique index.
SELECT id FROM outbox
WHERE event_id IN (SELECT value FROM json_each(:ids)) AND state IN ({confirm_optimistic_guard})
    AND held_by = :owner AND held_until > :now;

-- name: yield_hold
-- Leave rows to the relay; the unique index.
UPDATE outbox SET state = 'pending', held_by = NULL, held_until = NULL
WHERE event_id IN (SELECT value FROM json_each(:ids)) AND state IN ({yield_optimistic_guard})
    AND held_by = :owner AND held_until > :now;
