-- Pieces that the inbox's statements share.

-- name: receipt_columns
consumer, event_id, event_type, topic, key, sequence, received_at

-- name: written_here
-- A receipt of this very transaction: one that a handler has committed, to begin another, is not.
xmin = pg_current_xact_id()::xid

-- name: event_columns
consumer, event_id, event_type, topic, key, band, sequence, raw_key, headers, body, shard, place, replayed, received_at

-- name: streams
-- $2..$4 are streams, sorted by the caller: everybody locks in the same order.
unnest($2::text[], $3::text[], $4::smallint[]) WITH ORDINALITY AS g (topic, key, band, ord)

-- name: standing
consumer, topic, key, band, seen, cause, waiting, since

-- name: merged
-- A stream that had no row was not locked, and one may have come meanwhile: what it has seen and what waits in it is
-- added to, never overwritten. For a locked row that makes no difference.
ON CONFLICT (consumer, topic, key, band) DO UPDATE SET
    seen = greatest(s.seen, excluded.seen), cause = excluded.cause, waiting = s.waiting + excluded.waiting,
    since = CASE WHEN s.cause IS DISTINCT FROM excluded.cause THEN excluded.since ELSE s.since END

-- name: stand
INSERT INTO {schema}.inbox_stream AS s ({standing})
SELECT $1, g.topic, g.key, g.band, g.seen, g.cause, g.added, {schema}.outbox_clock()
FROM unnest($2::text[], $3::text[], $4::smallint[], $5::bigint[], $6::text[], $7::integer[]) WITH ORDINALITY
    AS g (topic, key, band, seen, cause, added, ord)
ORDER BY g.ord
{merged}

-- name: taken
-- The first waiting events get their receipts; `first` comes from the statement.
receipt AS (
    INSERT INTO {schema}.consumer_inbox ({receipt_columns})
    SELECT consumer, event_id, event_type, topic, key, sequence, {schema}.outbox_clock() FROM first
    ORDER BY event_id
    ON CONFLICT (consumer, event_id) DO NOTHING
    RETURNING event_id
)
SELECT f.id, f.event_id, r.event_id IS NOT NULL AS fresh, f.replayed,
    f.topic, f.raw_key, f.body, f.headers::text AS headers, f.shard, f.place
FROM first AS f LEFT JOIN receipt AS r USING (event_id)
