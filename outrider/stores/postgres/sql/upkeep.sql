-- Keeping the tables bounded.

-- name: sweep
-- Remove dead relays. A heartbeat that is being renewed at this moment is looked at again and spared.
WITH dead AS (DELETE FROM {schema}.outbox_relay WHERE alive_until <= {schema}.outbox_clock() RETURNING relay_id)
SELECT relay_id, (SELECT count(*) FROM {schema}.outbox_lane WHERE owner = relay_id) AS lanes FROM dead

-- name: take_duty
-- One caller gets the turn.
INSERT INTO {schema}.outbox_duty AS d (name, due_at) VALUES ($1, {schema}.outbox_clock() + $2 * interval '1 second')
ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at WHERE d.due_at <= {schema}.outbox_clock()
RETURNING name

-- name: today
SELECT ({schema}.outbox_clock() AT TIME ZONE 'UTC')::date AS today

-- name: partitions
-- The archive's daily partitions.
SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = '{schema}.outbox_archive'::regclass ORDER BY c.relname

-- name: netted
-- Whether the default partition caught rows of a day; that day then has no partition of its own.
SELECT EXISTS (SELECT FROM {schema}.outbox_archive_default WHERE sent_at >= $1 AND sent_at < $2)

-- name: release_holds
-- Streams held for a dead letter that is no longer there, deleted by hand for instance: they go on.
UPDATE {schema}.outbox_blocked AS b SET cause = 'draining', head_id = NULL, until = {schema}.outbox_clock()
WHERE b.cause = 'held' AND NOT EXISTS (
    SELECT FROM {schema}.outbox_dead_letter AS d
    WHERE d.lane = b.lane AND d.topic = b.topic AND d.key = b.key AND d.policy = 'hold')

-- name: adopt_orphans
-- A waiting event is found through its blocked stream. None should ever be without one; if one is, it is found again.
INSERT INTO {schema}.outbox_blocked (lane, topic, key, cause, until)
SELECT DISTINCT o.lane, o.topic, {stream_key}, 'draining', {schema}.outbox_clock()
FROM {schema}.outbox AS o
WHERE o.state IN ({waiting}) AND o.topic IS NOT NULL AND NOT EXISTS (
    SELECT FROM {schema}.outbox_blocked AS b WHERE b.lane = o.lane AND b.topic = o.topic AND b.key = {stream_key})
ON CONFLICT (lane, topic, key) DO NOTHING

-- name: prune_net
-- Old rows that fell into the default partition, a bounded step.
DELETE FROM {schema}.outbox_archive_default WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {schema}.outbox_archive_default
    WHERE sent_at < (SELECT {schema}.outbox_clock() - $1 * interval '1 day') LIMIT $2))

-- name: prune_dead_letters
-- A held dead letter is all that lets its stream go on, so it stays until a person acts. Index: outbox_dead_letter_age.
DELETE FROM {schema}.outbox_dead_letter WHERE event_id = ANY (ARRAY(
    SELECT event_id FROM {schema}.outbox_dead_letter
    WHERE buried_at < (SELECT {schema}.outbox_clock() - $1 * interval '1 day') AND policy <> 'hold' LIMIT $2))

-- name: prune_operations
-- Index: outbox_operation_age.
DELETE FROM {schema}.outbox_operation WHERE id = ANY (ARRAY(
    SELECT id FROM {schema}.outbox_operation
    WHERE at < (SELECT {schema}.outbox_clock() - $1 * interval '1 day') LIMIT $2))
