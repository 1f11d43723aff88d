-- name: consumer_inbox
-- That a consumer has handled an event.
CREATE TABLE consumer_inbox (
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    sequence INTEGER,
    received_at REAL NOT NULL,
    processing_seconds REAL,
    PRIMARY KEY (consumer, event_id)
) WITHOUT ROWID;

-- name: consumer_inbox_age
-- Receipts by age, for pruning.
CREATE INDEX consumer_inbox_age ON consumer_inbox (consumer, received_at);

-- name: inbox_stream
-- The state of a stream at a consumer: one row per stream with an ordering, else only while events are held.
CREATE TABLE inbox_stream (
    consumer TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    band INTEGER NOT NULL,
    seen INTEGER,
    cause TEXT CHECK (cause IN ('early', 'dead_letter', 'draining')),
    waiting INTEGER NOT NULL,
    since REAL NOT NULL,
    PRIMARY KEY (consumer, topic, key, band)
) WITHOUT ROWID;

-- name: inbox_stream_cause
-- The few that wait, among all that are counted.
CREATE INDEX inbox_stream_cause ON inbox_stream (consumer, cause, since) WHERE cause IS NOT NULL;

-- name: inbox_held
-- Events that wait, whole as they came: their bytes, and their headers as an object of base64. Dead letters take their
-- id from here as well, so that a replayed event has its old position.
CREATE TABLE inbox_held (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    band INTEGER NOT NULL,
    sequence INTEGER,
    raw_key BLOB,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    partition TEXT NOT NULL,
    position TEXT NOT NULL,
    replayed INTEGER NOT NULL,
    received_at REAL NOT NULL,
    UNIQUE (consumer, event_id)
);

-- name: inbox_held_place
-- The events of a stream as they came.
CREATE INDEX inbox_held_place ON inbox_held (consumer, topic, key, band, id);

-- name: inbox_held_sequence
-- The events of a stream by their numbers.
CREATE INDEX inbox_held_sequence ON inbox_held (consumer, topic, key, band, sequence, id);

-- name: inbox_dead_letter
-- What a consumer could not handle, and why.
CREATE TABLE inbox_dead_letter (
    id INTEGER PRIMARY KEY,
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    band INTEGER NOT NULL,
    sequence INTEGER,
    raw_key BLOB,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    partition TEXT NOT NULL,
    position TEXT NOT NULL,
    replayed INTEGER NOT NULL,
    received_at REAL NOT NULL,
    reason TEXT NOT NULL,
    failure TEXT NOT NULL,
    policy TEXT NOT NULL CHECK (policy IN ('block', 'skip')),
    attempts INTEGER NOT NULL,
    dead_lettered_at REAL NOT NULL,
    UNIQUE (consumer, event_id)
);

-- name: outbox_operation_consumer
-- The consumer of the dead letter; an operation on the outbox has none.
ALTER TABLE outbox_operation ADD COLUMN consumer TEXT;

-- name: inbox_dead_letter_blocking
-- The dead letters that block a stream.
CREATE INDEX inbox_dead_letter_blocking ON inbox_dead_letter (consumer, topic, key, band) WHERE policy = 'block';

-- name: inbox_dead_letter_age
-- Dead letters that may be pruned, by age. This is the last step: an inbox that has it has everything.
CREATE INDEX inbox_dead_letter_age ON inbox_dead_letter (consumer, dead_lettered_at) WHERE policy = 'skip';
