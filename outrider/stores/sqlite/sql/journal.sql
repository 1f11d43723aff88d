-- name: switch
-- Everything that is known about the journal; the primary key.
SELECT name, value FROM outbox_meta WHERE name LIKE 'journal%';

-- name: start_staged
-- From now on, rows that any program inserts are journaled.
CREATE TRIGGER IF NOT EXISTS outbox_journal_staged AFTER INSERT ON outbox
BEGIN
    INSERT INTO outbox_journal (kind, event_id, at)
    VALUES ('staged', new.event_id, (julianday('now') - 2440587.5) * 86400.0);
END;

-- name: end_staged
DROP TRIGGER IF EXISTS outbox_journal_staged;

-- name: turn
-- The switch, the time, and the last position and entry before it; the primary key.
INSERT INTO outbox_meta (name, value)
VALUES ('journal', :on), ('journal_since', :now),
    ('journal_position', (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'outbox')),
    ('journal_entry', (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'outbox_journal'))
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: is_on
-- Tell whether the journal is on, in the transaction that would write to it; the primary key.
SELECT value = 1 FROM outbox_meta WHERE name = 'journal';

-- name: add
-- Entries of events that leave a table.
INSERT INTO outbox_journal (kind, event_id, at)
SELECT :kind, given.value, :now FROM json_each(:ids) AS given ORDER BY given.key;

-- name: add_positions
-- The same for events that are about to leave the outbox, by position; the primary key.
INSERT INTO outbox_journal (kind, event_id, at) SELECT :kind, outbox.event_id, :now FROM json_each(:ids) AS given
CROSS JOIN outbox ON outbox.id = given.value
ORDER BY given.key;

-- name: entries
-- Entries by event, from an event on; outbox_journal_event.
SELECT event_id, kind, id, at FROM outbox_journal
WHERE event_id > :after AND id > :entry ORDER BY event_id, id LIMIT :limit;

-- name: places
-- Where events are, and their positions; the unique index of each table.
SELECT 'outbox', event_id, id FROM outbox WHERE event_id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT 'archive', event_id, id FROM outbox_archive WHERE event_id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT 'dead_letters', event_id, id FROM outbox_dead_letter WHERE event_id IN (SELECT value FROM json_each(:ids));

-- fragment: journaled
EXISTS (SELECT 1 FROM outbox_journal AS entry WHERE entry.event_id = held.event_id AND entry.id > :entry)

-- name: in_outbox
-- Events after an id that were staged after a position, and whether they have an entry; the unique index and
-- outbox_journal_event.
SELECT event_id, id, {journaled} FROM outbox AS held
WHERE event_id > :after AND id > :position ORDER BY event_id LIMIT :limit;

-- name: in_archive
-- The same in the archive; the unique index and outbox_journal_event.
SELECT event_id, id, {journaled} FROM outbox_archive AS held
WHERE event_id > :after AND id > :position ORDER BY event_id LIMIT :limit;

-- name: in_dead_letters
-- The same among the dead letters; the unique index and outbox_journal_event.
SELECT event_id, id, {journaled} FROM outbox_dead_letter AS held
WHERE event_id > :after AND id > :position ORDER BY event_id LIMIT :limit;

-- name: note_prune
-- Before maintenance removes old events from the archive: from now on their absence is no finding; the primary key.
INSERT INTO outbox_meta (name, value)
SELECT 'journal_archive_pruned', :before FROM outbox_meta WHERE name = 'journal' AND value = 1
ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value);

-- name: aged
-- The next entries after an id, of which the old ones may be removed; the primary key.
SELECT id, at < :before FROM outbox_journal WHERE id > :after ORDER BY id LIMIT :limit;

-- name: prune
-- Remove old entries of events that are in no table; the primary key, and the unique index of each table.
DELETE FROM outbox_journal WHERE id IN (SELECT value FROM json_each(:ids))
    AND NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.event_id = outbox_journal.event_id)
    AND NOT EXISTS (SELECT 1 FROM outbox_archive AS kept WHERE kept.event_id = outbox_journal.event_id)
    AND NOT EXISTS (SELECT 1 FROM outbox_dead_letter AS dead WHERE dead.event_id = outbox_journal.event_id);
