-- name: join
-- Start a heartbeat.
INSERT INTO outbox_relay (relay_id, alive_until) VALUES (:relay, :until)
ON CONFLICT (relay_id) DO UPDATE SET alive_until = excluded.alive_until;

-- name: beat
-- Renew a heartbeat that has not lapsed; the primary key.
UPDATE outbox_relay SET alive_until = :until WHERE relay_id = :relay AND alive_until > :now;

-- name: alive
-- Count living relays.
SELECT count(*) FROM outbox_relay WHERE alive_until > :now;

-- name: free_lanes
-- Lanes that nobody alive owns.
SELECT lane FROM outbox_lane
WHERE owner IS NULL OR owner NOT IN (SELECT relay_id FROM outbox_relay WHERE alive_until > :now)
ORDER BY lane;

-- name: claim
-- Take the free ones of the lanes, if the relay is alive; the epoch goes up.
UPDATE outbox_lane SET owner = :relay, epoch = epoch + 1
WHERE lane IN (SELECT value FROM json_each(:lanes))
    AND (owner IS NULL OR owner NOT IN (SELECT relay_id FROM outbox_relay WHERE alive_until > :now))
    AND :relay IN (SELECT relay_id FROM outbox_relay WHERE alive_until > :now);

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
