-- name: dead_relays
-- Relays whose heartbeat has lapsed, and how many lanes each left behind.
SELECT relay_id, (SELECT count(*) FROM outbox_lane WHERE owner = relay_id) FROM outbox_relay
WHERE alive_until <= :now ORDER BY relay_id;

-- name: sweep
-- Remove lapsed heartbeats.
DELETE FROM outbox_relay WHERE alive_until <= :now;

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
-- Remove the oldest dead letters; a held one is what lets its stream go on, so it stays until a person acts.
-- outbox_dead_letter_buried.
DELETE FROM outbox_dead_letter WHERE rowid IN (
    SELECT rowid FROM outbox_dead_letter WHERE policy = 'skip' AND buried_at < :before ORDER BY buried_at LIMIT :limit
);

-- name: prune_operations
-- Remove the oldest operations; outbox_operation_at.
DELETE FROM outbox_operation WHERE id IN (
    SELECT id FROM outbox_operation WHERE at < :before ORDER BY at LIMIT :limit
);
