-- The switch of the journal, its pages for the check, and its maintenance.

-- name: switch
-- Everything that is known about the journal; outbox_meta_pkey.
SELECT name, value::bigint FROM {schema}.outbox_meta WHERE name LIKE 'journal%'

-- name: early_relays
-- Living relays that were started before the journal was installed; outbox_relay_pkey.
SELECT r.relay_id FROM {schema}.outbox_relay AS r
WHERE r.alive_from <= {schema}.outbox_clock() AND r.alive_until > {schema}.outbox_clock() AND r.joined_at < (
    SELECT max(m.applied_at) FROM {schema}.outrider_migration AS m WHERE m.version = 8)

-- name: lock_outbox
-- Wait for every transaction that writes to the outbox. After the commit, each of their statements sees the new switch.
LOCK TABLE {schema}.outbox IN SHARE ROW EXCLUSIVE MODE

-- name: start_staged
-- From now on, rows that any program inserts are journaled.
CREATE OR REPLACE TRIGGER outbox_journal_staged AFTER INSERT ON {schema}.outbox
REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_journal_staged()

-- name: end_staged
-- Dropped and not disabled, because a disabled trigger would still collect the new rows.
DROP TRIGGER IF EXISTS outbox_journal_staged ON {schema}.outbox

-- name: turn
-- The switch ($1), the time, and the last position and entry before it.
INSERT INTO {schema}.outbox_meta (name, value)
VALUES ('journal', $1::integer::text),
    ('journal_since', (extract(epoch FROM {schema}.outbox_clock()) * 1000)::bigint::text),
    ('journal_position', (SELECT (s.last_value - (NOT s.is_called)::integer)::text FROM {schema}.outbox_id_seq AS s)),
    ('journal_entry', (SELECT coalesce(max(j.id), 0)::text FROM {schema}.outbox_journal AS j))
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- name: entries
-- Entries by event, from an event on; outbox_journal_event.
SELECT j.event_id, j.kind, j.transaction_id::text, j.log_position, j.at FROM {schema}.outbox_journal AS j
WHERE j.event_id > $1 AND j.id > $2 ORDER BY j.event_id, j.id LIMIT $3

-- name: places
-- Where events are, and their positions; outbox_pkey, outbox_archive_event_id, outbox_dead_letter_pkey. LIMIT keeps the
-- planner from reading whole tables for a page.
SELECT p.place, g.event_id, p.id FROM unnest($1::uuid[]) AS g (event_id) CROSS JOIN LATERAL (
    (SELECT 'outbox' AS place, o.id FROM {schema}.outbox AS o WHERE o.event_id = g.event_id LIMIT 1)
    UNION ALL
    (SELECT 'archive', a.id FROM {schema}.outbox_archive AS a WHERE a.event_id = g.event_id ORDER BY a.id DESC LIMIT 1)
    UNION ALL
    (SELECT 'dead_letters', d.id FROM {schema}.outbox_dead_letter AS d WHERE d.event_id = g.event_id LIMIT 1)
) AS p

-- fragment: journaled
(SELECT true FROM {schema}.outbox_journal AS j WHERE j.event_id = o.event_id AND j.id > $3 LIMIT 1) IS NOT NULL

-- name: in_outbox
-- Events after an id that were staged after a position, and whether they have an entry; outbox_pkey,
-- outbox_journal_event.
SELECT o.event_id, o.id, {journaled} FROM {schema}.outbox AS o
WHERE o.event_id > $1 AND o.id > $2 ORDER BY o.event_id LIMIT $4

-- name: in_archive
-- The same in the archive; outbox_archive_event_id, outbox_journal_event.
SELECT o.event_id, o.id, {journaled} FROM {schema}.outbox_archive AS o
WHERE o.event_id > $1 AND o.id > $2 ORDER BY o.event_id LIMIT $4

-- name: in_dead_letters
-- The same among the dead letters; outbox_dead_letter_pkey, outbox_journal_event.
SELECT o.event_id, o.id, {journaled} FROM {schema}.outbox_dead_letter AS o
WHERE o.event_id > $1 AND o.id > $2 ORDER BY o.event_id LIMIT $4

-- name: note_prune
-- From now on, events that are older than $1 days may be missing in the archive.
SELECT {schema}.outbox_journal_note_prune($1)

-- name: prune
-- Remove old entries of events that are in no table, a bounded step; outbox_journal_pkey.
SELECT next, removed FROM {schema}.outbox_journal_prune($1, $2, $3)
