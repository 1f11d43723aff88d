-- name: outbox_journal
-- The journal of the outbox: append only, and pruned by age. There are no transaction ids in SQLite, and no positions in
-- its log; the id of an entry is its position.
CREATE TABLE outbox_journal (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL CHECK (kind IN ('staged', 'archived', 'sent', 'dead_letter', 'discarded', 'expired', 'retracted')),
    event_id TEXT NOT NULL,
    at REAL NOT NULL
);

-- name: outbox_journal_event
-- The entries of an event in order, for the check.
CREATE INDEX outbox_journal_event ON outbox_journal (event_id, id);

-- name: journal_switch
-- The switch; without one, nothing is written to the journal.
INSERT INTO outbox_meta (name, value) VALUES ('journal', 0);
